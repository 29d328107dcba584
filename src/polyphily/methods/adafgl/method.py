"""AdaFGL: a federated extractor, then personal propagation for homophily and heterophily."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from polyphily.core.cohort import Cohort, TrainingGraph
from polyphily.core.local import Local
from polyphily.core.messages import (
    Declared,
    Mean,
    Message,
    Rounds,
    Sizes,
    State,
    Sum,
    Uploads,
    count,
    model,
    model_part,
    with_prefix,
)
from polyphily.core.method import parameter, register
from polyphily.core.optimizers import STEPS
from polyphily.core.search import Range
from polyphily.graphs.random import derive
from polyphily.methods.adafgl.network import (
    ADAPTED,
    EXTRACTOR,
    HEADS,
    AdaptiveNetwork,
    Heads,
    Propagation,
)
from polyphily.methods.adafgl.propagation import homophily_confidence, similar_pairs, smoothing
from polyphily.methods.fedavg import WEIGHT, FedAvg
from polyphily.methods.fedhero.neighbours import Neighbours
from polyphily.nn.backbones import Backbone, Shape
from polyphily.nn.sparse import SparseMatrix

FEDERATED, LOCAL = "federated", "local"
HOMOPHILOUS, HETEROPHILOUS, FINE_TUNING = "homophilous", "heterophilous", "fine-tuning"
PARTS = {HOMOPHILOUS: (HOMOPHILOUS,), HETEROPHILOUS: (HETEROPHILOUS,), FINE_TUNING: ()}
GLOBAL, SMOOTH, PAIRS, ALIKE = "global", "smooth/", "pairs/", "alike"
SHARE = "share"  # in a client's memory: the weight of its homophilous head


@register(
    "adafgl",
    cite="Li et al., AdaFGL: A New Paradigm for Federated Node Classification with Topology "
    "Heterogeneity, ICDE 2024",
)
@dataclass(frozen=True)
class AdaFGL(FedAvg):
    """FedAvg for some rounds; then each client trains heads on what the global model P predicts.

    A' = α A + (1-α) U, where U joins nodes with similar P. X̃ = [X, Â'X, Â'²X, …]. The homophilous
    head learns Z = MLP(X̃) with CE(Z) + MSE(softmax Z, P) and predicts ½ (softmax Z + P). The
    heterophilous heads learn MLP(X), MLP(X̃) and signed messages between nodes with a CE each and
    predict the mean of their softmaxes. The prediction is HCS · homophilous + (1-HCS) ·
    heterophilous, where HCS is the accuracy of label propagation between halves of the train nodes.
    """

    evaluated = "personal"
    selection = "client"

    weighted_edges: ClassVar[bool] = False
    left_open: ClassVar[Sequence[str]] = (
        "The stages are rounds here: `federated` rounds of FedAvg, then local rounds of as many "
        "steps as a round has. The authors take 200 steps: 67 rounds of 3.",
        "The authors keep the extractor of the best validation round of the first stage. Here it "
        "is the extractor of its last round, because the server sees no validation scores.",
        "Each client's result is its model at its own best validation round, which may lie in the "
        "first stage.",
        "U and the signed messages are over all pairs of nodes, a quadratic number. Here each node "
        "has the `neighbours` most similar and as many least similar nodes by P; with as many "
        "neighbours as nodes all pairs are there.",
        "The authors' code joins nodes by a softmax of probabilities, which nearly equal "
        "predictions of any class pass. Here U compares the probabilities themselves.",
        "The code's MSE compares logits with probabilities, and its signs of pairs below the mean "
        "grow with similarity. Here both sides are probabilities (distil=logits is the code's), "
        "and a pair is the more negative the less similar it is (signs=reversed is the code's).",
        "The code trains and uses one head, chosen by HCS >= 0.9 (adaptation=threshold). Here both "
        "are trained and mixed by HCS, as OpenFGL does.",
        "No gradient goes through the mean and the maximum that scale the signs.",
        "In the local stage the server sends the final extractor again, so that a client that "
        "missed a round has it. Nothing is uploaded.",
        "The authors' extractor is a ChebNet. Here it is any backbone.",
    )

    federated: int = parameter(10, "rounds of the first stage, FedAvg", code=100)
    adaptation: str = parameter(
        "mixed",
        "the local stage: both heads mixed by HCS; one of them chosen by the threshold; one of "
        "them always; or fine-tuning of the extractor, a control",
        choices=("mixed", "threshold", HOMOPHILOUS, HETEROPHILOUS, FINE_TUNING),
        code="threshold",
    )
    threshold: float = parameter(
        0.9, "HCS from which a client is homophilous", search=Range(0.5, 0.95)
    )
    alpha: float = parameter(
        0.5, "share of the given edges in A'", symbol="α", code=0.05, search=Range(0.05, 0.95)
    )
    beta: float = parameter(
        0.2,
        "share of U in the similarity of the signed messages",
        symbol="β",
        search=Range(0.05, 0.95),
    )
    smoothings: int = parameter(
        3, "how often features are smoothed", symbol="k", search=Range(1, 5)
    )
    neighbours: int = parameter(8, "most similar and least similar nodes of each node")
    alike: float = parameter(0.999, "cosine of predictions above which U joins two nodes")
    distil: str = parameter(
        "probabilities",
        "what the MSE compares with P",
        choices=("probabilities", "logits"),
        code="logits",
    )
    signs: str = parameter(
        "distance",
        "signs of pairs below the mean similarity: by their distance from it, or reversed",
        choices=("distance", "reversed"),
        code="reversed",
    )
    rows: str = parameter(
        "mean",
        "signed messages of a node: their weighted mean or their sum",
        choices=("mean", "sum"),
        code="sum",
    )

    # The network -----------------------------------------------------------------------------

    @property
    def parts(self) -> Sequence[str]:
        """The heads that are trained."""
        return PARTS.get(self.adaptation, (HOMOPHILOUS, HETEROPHILOUS))

    def build(self, backbone: str, shape: Shape, seed: int) -> Backbone:
        extractor = super().build(backbone, shape, seed)
        if not self.parts:
            return AdaptiveNetwork(extractor, None)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(seed, "adafgl/heads"))
            heads = Heads(
                extractor,
                self.parts,
                hops=self.smoothings,
                beta=self.beta,
                below=self.signs,
                rows=self.rows,
            )
        return AdaptiveNetwork(extractor, heads)

    def shares(self, network: Backbone, parameter: str) -> bool:
        return parameter.startswith(EXTRACTOR)

    # Stages ----------------------------------------------------------------------------------

    def phase(self, round_index: int) -> str:
        return FEDERATED if round_index < self.federated else LOCAL

    def stage(self, round_index: int) -> str:
        return self.phase(round_index)

    def rounds_before_it_acts(self) -> int:
        return self.federated

    def needs_symmetric_edges(self) -> str:
        return "the adjacency that it learns is symmetric"

    def needs_whole_graph(self) -> str:
        return "its heads compare all nodes of a client"

    def uploads(self, sizes: Sizes) -> tuple[Declared, ...]:
        first = Rounds(1, self.federated)
        weight = count(WEIGHT, (), Sum(), rounds=first, meaning="weight of the client in the mean")
        return (model(sizes, Mean(WEIGHT), rounds=first), weight)

    # At the clients --------------------------------------------------------------------------

    def receive(self, local: Local) -> Message:
        """Return the received extractor, or the client's own once it has been fine-tuned."""
        params = super().receive(local)
        if self.parts:
            return params
        own = model_part(local.memory)
        tuned = own[ADAPTED] > 0
        return {
            name: torch.where(tuned.view(-1, *[1] * (value.dim() - 1)), own[name], value)
            for name, value in params.items()
        }

    def init_client_state(self, cohort: Cohort, network: Backbone, params: Message) -> Message:
        """Return HCS of the training graph, which also weighs the heads on other graphs."""
        return {SHARE: self.homophilous_share(cohort)} if self.parts else {}

    def prepare_round(self, local: Local) -> Message:
        if local.phase == FEDERATED or not self.parts:
            return {}
        p, along = self._propagation(local)
        return {
            GLOBAL: p,
            ALIKE: along.alike,
            **_tensors(along.smooth, SMOOTH),
            **_tensors(along.pairs, PAIRS),
        }

    def _propagation(self, local: Local) -> tuple[Tensor, Propagation]:
        """Compute P, A' normalised, and the pairs of nodes with U."""
        cohort, p = local.cohort, local.frozen(local.params).logits.softmax(dim=1)
        pairs, alike = similar_pairs(p, cohort.segments, self.neighbours, self.alike)
        return p, Propagation(smoothing(cohort, pairs, alike, self.alpha), pairs, alike)

    def train(self, local: Local) -> None:
        """Train the extractor in the first stage, and the heads alone in the second."""
        everything = local.params
        adapting = local.phase == LOCAL
        trained = HEADS if adapting and self.parts else EXTRACTOR
        local.params = {n: p for n, p in everything.items() if n.startswith(trained)}
        if adapting:  # a new stage begins with a new optimiser
            local.memory[STEPS] = local.memory[STEPS] * (everything[ADAPTED][:, 0] > 0)
        local.descend(self)
        local.params = {**everything, **local.params}
        if adapting:
            local.params[ADAPTED] = torch.ones_like(everything[ADAPTED])

    def loss(self, local: Local) -> Tensor:
        if local.phase == FEDERATED or not self.parts:
            return local.cross_entropy(local.forward().logits)
        known, cohort = local.constants, local.cohort
        shape = (cohort.num_nodes, cohort.num_nodes)
        smooth = SparseMatrix(shape, **with_prefix(known, SMOOTH))
        pairs = Neighbours(**with_prefix(known, PAIRS))
        logits = self._heads(local, Propagation(smooth, pairs, known[ALIKE]))
        share = self.homophilous_share(cohort)
        loss = torch.zeros_like(share)
        for name, z in logits.items():
            part = local.cross_entropy(z)
            if name == HOMOPHILOUS:
                own = z.softmax(dim=1) if self.distil == "probabilities" else z
                error = (own - known[GLOBAL]).square().mean(dim=1)
                part = part + cohort.segments.mean(error)
            used = share > 0 if name == HOMOPHILOUS else share < 1
            loss = loss + used * part
        return loss

    def _heads(self, local: Local, along: Propagation) -> dict[str, Tensor]:
        network = local.network
        assert isinstance(network, AdaptiveNetwork)
        assert network.heads is not None
        logits: dict[str, Tensor] = functional_call(
            network.heads, with_prefix(local.params, HEADS), (local.cohort, along, local.draws)
        )
        return logits

    def homophilous_share(self, cohort: TrainingGraph) -> Tensor:
        """Return the weight of the homophilous head at each client, `[K]`."""
        if self.adaptation in (HOMOPHILOUS, HETEROPHILOUS):
            return torch.full_like(cohort.num_train, float(self.adaptation == HOMOPHILOUS))
        confidence = cohort.cached("adafgl/homophily confidence", _confidence)
        if self.adaptation == "threshold":
            return (confidence >= self.threshold).to(cohort.dtype)
        return confidence

    def upload(self, local: Local) -> Message:
        return super().upload(local) if local.phase == FEDERATED else {}

    def predict(self, local: Local) -> Tensor:
        plain = super().predict(local)
        if local.phase == FEDERATED or not self.parts:
            return plain
        p, along = self._propagation(local)
        chances = {n: z.softmax(dim=1) for n, z in self._heads(local, along).items()}
        expand = local.cohort.segments.expand
        share = expand(local.memory[SHARE]).unsqueeze(1)
        mixed = torch.zeros_like(p)
        if HOMOPHILOUS in chances:
            mixed = mixed + share * (chances.pop(HOMOPHILOUS) + p) / 2
        if chances:
            mixed = mixed + (1 - share) * torch.stack(list(chances.values())).mean(dim=0)
        adapted = expand(local.params[ADAPTED]) > 0
        return torch.where(adapted, mixed.clamp(min=1e-12).log(), plain)

    def prediction_state(self) -> Sequence[str]:
        return (f"memory/{SHARE}",) if self.parts else ()

    # At the server ---------------------------------------------------------------------------

    def aggregate(self, state: State, uploads: Uploads, rng: np.random.Generator) -> State:
        if WEIGHT not in uploads.tensors:  # the local stage
            return state
        return super().aggregate(state, uploads, rng)

    # For people ------------------------------------------------------------------------------

    def without_effect(self) -> Mapping[str, str]:
        idle = {}
        if self.adaptation != "threshold":
            idle["threshold"] = (
                "HCS is compared with it by adaptation=threshold only: set that, too"
            )
        needed = {
            "distil": (HOMOPHILOUS, "the homophilous head"),
            "beta": (HETEROPHILOUS, "the signed messages"),
            "signs": (HETEROPHILOUS, "the signed messages"),
            "rows": (HETEROPHILOUS, "the signed messages"),
        }
        for name, (part, words) in needed.items():
            if part not in self.parts:
                idle[name] = (
                    f"it belongs to {words}, which adaptation={self.adaptation} leaves out: "
                    "set adaptation=mixed"
                )
        if not self.parts:
            for name in ("alpha", "smoothings", "neighbours", "alike"):
                idle[name] = (
                    "it belongs to the heads, which adaptation=fine-tuning leaves out: set "
                    "adaptation=mixed"
                )
        return idle


def _tensors(value: Any, prefix: str) -> Message:
    """Return the tensors in the fields of a dataclass."""
    found = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return {prefix + name: t for name, t in found.items() if isinstance(t, Tensor)}


def _confidence(cohort: TrainingGraph) -> Tensor:
    """Compute HCS; the halves of the train nodes are drawn from each client's first stream."""
    assert isinstance(cohort, Cohort)
    lots = cohort.draws(0).uniform(1, cohort.train_segments.pointers).view(-1)
    return homophily_confidence(cohort, lots.to(cohort.device), cohort.classes)
