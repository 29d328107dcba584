"""FGGP: prototypes that hold across domains, from two views of each graph, classify nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from polyphily.core.cohort import Cohort
from polyphily.core.local import Local
from polyphily.core.messages import (
    AFTER_FIRST,
    Declared,
    Individually,
    Message,
    Sizes,
    State,
    Uploads,
    count,
    statistic,
    to_each,
    with_prefix,
)
from polyphily.core.method import parameter, register
from polyphily.core.search import Range
from polyphily.errors import UserError
from polyphily.graphs.random import derive
from polyphily.methods.fedavg import FedAvg
from polyphily.methods.fggp.network import ENCODER, PREDICTOR, WithPredictor
from polyphily.methods.fggp.prototypes import (
    alignment,
    class_means,
    cluster_means,
    soft_membership,
    vote,
)
from polyphily.methods.fggp.view import Candidates, DrawnGraph, candidate_pairs
from polyphily.nn import backbones
from polyphily.nn.backbones import BACKBONES, Backbone, Output, Shape
from polyphily.nn.stacked import StackedGraph

PROTOTYPES, WEIGHTS = "prototypes", "class weights"
BUFFER, FILLED = "buffer", "filled"
ANCHOR = "anchor/"  # of the memory: the model whose embeddings gave the nearest nodes

OF_PREDICTION = ("clustering", "votes", "buffer")


@register(
    "fggp",
    cite="Wan et al., Federated Graph Learning under Domain Shift with Generalizable Prototypes, "
    "AAAI 2024",
)
@dataclass(frozen=True)
class FGGP(FedAvg):
    """L = CE(view 1) + CE(view 2) + L_edge + L_pa; models are averaged.

    View 1 is the client's graph. View 2 is drawn by an edge predictor from A', the graph joined
    with the nearest nodes by the received model's embeddings. L_edge trains the predictor to
    recognise A'. L_pa aligns the class prototypes of both views. The server averages models. In the
    paper's form it also clusters the clients' prototypes of each class by FINCH, and a node has the
    class that the nearest prototypes vote for (prediction=prototypes).
    """

    weighted_edges: ClassVar[bool] = False
    left_open: ClassVar[Sequence[str]] = (
        "Values and details follow the authors' code, except for its defects.",
        "The authors score all pairs of nodes, which takes memory quadratic in nodes. Here A' is "
        "scored, and a sample of other pairs for each node, drawn anew in every round "
        "(non_edges). The mean over them estimates that over all others without bias; view 2 can "
        "join sampled pairs only.",
        "In the authors' code a score is a product of non-negative vectors, so that no pair can be "
        "recognised as a non-edge. Here scores have a sign by default (scores=nonnegative).",
        "The authors' GCN has batch norm without parameters, and takes prototypes from a pass "
        "without it. Here: a backbone of the library and its embedding, in the same pass.",
        "No gradient goes through the weights of pseudo-labels, as it does in the authors' code, "
        "nor through the largest score.",
        "The authors' code joins the nearest nodes in one direction. Here: in both.",
        "Before the first prototypes arrive the classifier predicts. It also predicts for a model "
        "as trained, since clustered prototypes belong to the averaged model.",
    )

    prediction: str = parameter(
        "classifier",
        "what predicts: the network's classifier, or votes of the nearest prototypes",
        choices=("classifier", "prototypes"),
        paper="prototypes",
    )
    clustering: str = parameter(
        "finch",
        "what stands for a class at the server: clusters of the clients' prototypes, or their mean",
        choices=("finch", "mean"),
    )
    votes: int = parameter(30, "nearest prototypes that vote", symbol="k")
    buffer: int = parameter(10, "prototypes of each class that the server keeps, the newest")
    second_view: bool = parameter(True, "whether view 2 and its losses are used")
    edge_loss: float = parameter(1.0, "weight of L_edge", search=Range(0.1, 10.0, log=True))
    align: float = parameter(1.0, "weight of L_pa", search=Range(0.1, 10.0, log=True))
    temperature: float = parameter(
        0.5, "temperature of the cosines in L_pa", symbol="τ", search=Range(0.1, 1.0)
    )
    neighbours: int = parameter(3, "nearest nodes in A'; 0: the edges alone", search=Range(1, 10))
    refresh: int = parameter(20, "rounds after which nearest nodes are searched with a new model")
    non_edges: int = parameter(5, "pairs outside A' that are sampled for each node")
    scores: str = parameter(
        "signed",
        "scores of pairs: products of any vectors, or of non-negative ones",
        choices=("signed", "nonnegative"),
        paper="nonnegative",
    )
    relaxation: float = parameter(1.0, "temperature of the drawn edges")

    def __post_init__(self) -> None:
        least_values = {"votes": 1, "buffer": 1, "refresh": 1, "neighbours": 0, "non_edges": 0}
        for name, least in least_values.items():
            if getattr(self, name) < least:
                raise UserError(f"fggp: '{name}' must be {least} or more")
        if min(self.temperature, self.relaxation) <= 0:
            raise UserError("fggp: 'temperature' and 'relaxation' must be above 0")

    @property
    def votes_decide(self) -> bool:
        """True if prototypes travel and predict."""
        return self.prediction == "prototypes"

    @property
    def searches(self) -> bool:
        """True if nearest nodes are part of view 2."""
        return self.second_view and self.neighbours > 0

    def without_effect(self) -> Mapping[str, str]:
        idle: dict[str, str] = {}
        if not self.votes_decide:
            reason = "prototypes do not travel; set prediction=prototypes"
            idle |= dict.fromkeys(OF_PREDICTION, reason)
        if not self.second_view:
            names = ("edge_loss", "align", "neighbours", "non_edges", "scores", "relaxation")
            idle |= dict.fromkeys(names, "there is no second view; set second_view=on")
        if not self.searches:
            idle["refresh"] = (
                "no nearest nodes are searched; set second_view=on, neighbours above 0"
            )
        if not self.second_view or not self.align:
            idle["temperature"] = "prototypes are not aligned; set second_view=on, align above 0"
        return idle

    # The network -----------------------------------------------------------------------------

    def supported_backbones(self) -> Sequence[str]:
        return tuple(name for name, backbone in BACKBONES.items() if backbone.weighted_edges)

    def build(self, backbone: str, shape: Shape, seed: int) -> Backbone:
        encoder = backbones.build(backbone, shape, seed)
        if not self.second_view:
            return encoder
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(seed, "edge predictor"))
            return WithPredictor(encoder, signed=self.scores == "signed")

    # What travels ----------------------------------------------------------------------------

    def uploads(self, sizes: Sizes) -> tuple[Declared, ...]:
        if not self.votes_decide:
            return super().uploads(sizes)
        why = Individually("it clusters the clients' prototypes")
        shape = (sizes.classes, sizes.embedding)
        return (
            *super().uploads(sizes),
            statistic(PROTOTYPES, shape, why, meaning="mean embedding of each class"),
            count(
                WEIGHTS,
                shape[:1],
                why,
                meaning="nodes of each class, predicted ones by their probability",
            ),
        )

    def downloads(self, sizes: Sizes) -> tuple[Declared, ...]:
        if not self.votes_decide:
            return super().downloads(sizes)
        shape = (sizes.classes, self.buffer, sizes.embedding)
        return (
            *super().downloads(sizes),
            statistic(BUFFER, shape, rounds=AFTER_FIRST, meaning="clustered prototypes"),
            count(FILLED, shape[:1], rounds=AFTER_FIRST, meaning="prototypes of each class"),
        )

    # At the clients --------------------------------------------------------------------------

    def needs_symmetric_edges(self) -> str:
        return "the edges that it draws lead both ways"

    def needs_whole_graph(self) -> str:
        return "its second view and its prototypes are those of whole graphs"

    def init_client_state(self, cohort: Cohort, network: Backbone, params: Message) -> Message:
        return {ANCHOR + name: value.clone() for name, value in params.items() if self.searches}

    def prepare_round(self, local: Local) -> Message:
        if not self.second_view:
            return {}
        cohort = local.cohort
        assert local.draws is not None
        segments, owner = cohort.segments, cohort.segments.owner
        start = cohort.cached("fggp/first nodes", _first_nodes)
        place = local.draws.uniform(self.non_edges, segments.pointers)
        others = (place * segments.counts[owner].unsqueeze(1)).long() + start[owner].unsqueeze(1)
        anchor = self.anchor(local) if self.searches else {}
        embedding = local.frozen(anchor).embedding if anchor else None
        return {
            **candidate_pairs(cohort, embedding, self.neighbours, others),
            **{ANCHOR + name: value for name, value in anchor.items()},
        }

    def anchor(self, local: Local) -> Message:
        """Return the model to search nearest nodes with: renewed every `refresh` rounds."""
        kept = with_prefix(local.memory, ANCHOR)
        renew = local.given(lambda number: np.array(number % self.refresh == 0))
        sent = self.receive(local)
        return {name: torch.where(renew, sent[name], value) for name, value in kept.items()}

    def update_memory(self, local: Local) -> Message:
        return {n: t for n, t in local.constants.items() if n.startswith(ANCHOR)}

    def loss(self, local: Local) -> Tensor:
        first = local.forward()
        loss = local.cross_entropy(first.logits)
        if not self.second_view:
            return loss
        cohort, network = local.cohort, local.network
        assert isinstance(network, WithPredictor)
        assert local.draws is not None
        pairs = Candidates.of(local.constants, cohort, self.neighbours + self.non_edges)
        h: Tensor = functional_call(
            network.predictor, with_prefix(local.params, PREDICTOR), (cohort, pairs)
        )
        scores = pairs.scores(h)
        uniform = local.draws.uniform(1, pairs.segments.pointers).squeeze(1)
        weight = pairs.draw(pairs.probabilities(h, scores), uniform, self.relaxation)
        second: Output = functional_call(
            network.encoder,
            with_prefix(local.params, ENCODER),
            (DrawnGraph(cohort, pairs, weight), local.draws),
        )
        loss = loss + local.cross_entropy(second.logits)
        if self.edge_loss:
            loss = loss + self.edge_loss * recognition(pairs, scores)
        if self.align:
            member = soft_membership(first.logits, cohort.labels, cohort.classes)
            present = (cohort.segments.sum(member) > 0).to(member.dtype)
            one, two = (
                class_means(view.embedding, member, cohort.segments) for view in (first, second)
            )
            loss = loss + self.align * alignment(one, two, present, self.temperature)
        return loss

    def upload(self, local: Local) -> Message:
        sent = super().upload(local)
        if not self.votes_decide:
            return sent
        cohort, output = local.cohort, local.frozen(local.params)
        member = soft_membership(output.logits, cohort.labels, cohort.classes)
        return {
            **sent,
            PROTOTYPES: class_means(output.embedding, member, cohort.segments),
            WEIGHTS: cohort.segments.sum(member),
        }

    def predict(self, local: Local) -> Tensor:
        output = local.forward()
        if BUFFER not in local.received:
            return output.logits
        kept, filled = local.received[BUFFER], local.received[FILLED]
        return vote(output.embedding, kept, filled, local.cohort.segments, self.votes)

    def prediction_state(self) -> Sequence[str]:
        return tuple(f"received/{name}" for name in (BUFFER, FILLED) if self.votes_decide)

    # At the server ---------------------------------------------------------------------------

    def aggregate(self, state: State, uploads: Uploads, rng: np.random.Generator) -> State:
        after = super().aggregate(state, uploads, rng)
        if not self.votes_decide:
            return after
        prototypes = uploads[PROTOTYPES]
        _, classes, width = prototypes.shape
        sent, have = prototypes.cpu().numpy(), (uploads[WEIGHTS] > 0).cpu().numpy()
        old = state.get(BUFFER, prototypes.new_zeros(classes, self.buffer, width)).cpu().numpy()
        filled = state.get(FILLED, prototypes.new_zeros(classes)).long().tolist()
        kept = np.zeros_like(old)
        # On the host: clusters differ in number, and there are few prototypes.
        for c in range(classes):
            fresh = cluster_means(sent[have[:, c], c], self.clustering)
            rows = np.concatenate([fresh, old[c, : filled[c]]])[: self.buffer]
            kept[c, : len(rows)] = rows
            filled[c] = len(rows)
        return {
            **after,
            BUFFER: torch.from_numpy(kept).to(prototypes),
            FILLED: prototypes.new_tensor(filled),
        }

    def download(self, state: State, clients: Sequence[int]) -> Message:
        kept = {n: t for n, t in state.items() if n in (BUFFER, FILLED)}
        return {**super().download(state, clients), **to_each(kept, clients)}


def _first_nodes(graph: StackedGraph) -> Tensor:
    """Return the first node of each client, `[K]`."""
    return torch.tensor(graph.segments.pointers[:-1], device=graph.device)


def recognition(pairs: Candidates, scores: Tensor) -> Tensor:
    """Compute L_edge of each client, `[K]`.

    Over all pairs of n nodes, n² / (2 (n² - |A'|)) times the mean binary cross-entropy with weight
    (n² - |A'|) / |A'| of edges is half the mean over A' plus half the mean over all other pairs.
    The latter is estimated by those sampled.
    """
    missed = pairs.mean(F.softplus(-scores), pairs.known)
    mistaken = pairs.mean(F.softplus(scores), pairs.other)
    return (missed + mistaken) / 2
