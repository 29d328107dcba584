"""FedHERO: a shared structure learner gives every client a latent graph beside its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from polyphily.core.local import Local
from polyphily.core.messages import Declared, Message, Sizes, State, Uploads, with_prefix
from polyphily.core.method import parameter, register
from polyphily.core.search import Range
from polyphily.errors import UserError
from polyphily.methods.fedavg import FedAvg
from polyphily.methods.fedhero.distances import FeatureDistances
from polyphily.methods.fedhero.latent import (
    LatentGraph,
    Weigh,
    binary_weights,
    similarity_weights,
)
from polyphily.methods.fedhero.neighbours import Neighbours
from polyphily.methods.fedhero.network import (
    CONVOLUTIONS,
    DualChannel,
    JumpingDualChannel,
    PlainDualChannel,
    WithLatent,
)
from polyphily.methods.fedhero.sampled import SampledGraph, pair_words
from polyphily.methods.fedhero.structure import LEARNERS
from polyphily.nn.backbones import Backbone, Shape
from polyphily.nn.stacked import StackedGraph

NEAR, WORDS, DISTANCE = "neighbours/", "words", "distance"  # constants of a round
LEARNER = "learner."


@register(
    "fedhero",
    cite="FedHERO: A Federated Learning Approach for Node Classification Task on Heterophilic "
    "Graphs",
)
@dataclass(frozen=True)
class FedHERO(FedAvg):
    """Z^l = relu(alpha f_loc(Z^(l-1), A) + (1-alpha) f_g(Z^(l-1), Ã)), Ã from a shared learner.

    Ã connects each node to the k others that are most similar by a learned similarity. As printed,
    Eq. (4) makes Ã binary, which leaves the learner without a gradient. `weights=one` passes the
    similarity's gradient through; by default an edge's weight is its similarity, or 0 if that is
    negative. A node is never its own neighbour: convolutions add it with weight one and normalise
    by row.

    The backbone's name chooses the convolutions: gcn, sage and acm-gcn serve both channels, gat and
    mlp are local channels beside a GCN on the latent graph. By default the network is the
    backbone itself, twice, all parameters are shared, and Ã connects the five nearest by cosine.
    In the paper f_g and the learner are shared, and Ã connects twenty by weighted cosines.
    """

    evaluated = "personal"
    left_open: ClassVar[Sequence[str]] = (
        "Eq. (4) makes Ã binary, and a binary Ã has no gradient, although Section 3.1 calls the "
        "top-k differentiable. In the paper's form an edge has weight one and the gradient of its "
        "similarity (straight-through).",
        "Eq. (4) ranks a node among its own candidates, while the text says that it connects to up "
        "to k neighbours. Here a node is never its own neighbour; convolutions add it with weight "
        "one.",
        "Ã is directed and no normalisation is given. Here convolutions on it are normalised by "
        "row.",
        "The convolution, the activation, the widths and the depth of f_0 are not given. The "
        "backbone's name chooses the convolution, σ is ReLU, and f_0 is one layer with ReLU (the "
        "'feature projection layer' of Section 4.1).",
        "Eq. (2) gives the learner X and A, Section 3.3 says 'from node embeddings'. Here it takes "
        "X and A.",
        "The width of the learner's embeddings, its activation and how its vectors w start are not "
        "given. Here there is no activation, and w is drawn uniformly between 0.5 and 1.5.",
        "f_0 is not assigned to a channel. It stays with the client unless share_projection is on.",
        "Eq. (7) is a sum over edges beside a cross-entropy of which neither sum nor mean is said. "
        "Here the cross-entropy is a mean over train nodes, and in the paper's form the sum stays "
        "a sum.",
        "How f_g takes a latent graph that changes within a round is not said, as a round has one "
        "step. In the paper's form Ã is computed anew at every step.",
        "Section 3.1 draws every one of N x N latent edges with ã_ij as probability, but a cosine "
        "may be negative. Here ã_ij is clipped to [0, 1], and no pair (i, i) is drawn.",
        "Table 9 draws edges 'during inference'; whether training draws them is not said. Here "
        "both do, with the gradient of ã_ij. The draws of evaluation follow from seed and client "
        "and are the same in all rounds.",
        "The learners att, gat, GLCN and GAug of Table 4 are only named. Here att is a sigmoid of "
        "scaled dot products over all pairs, gat and GLCN score the given edges, and GAug mixes "
        "predicted and given edges half and half. All are trained with Eq. (8) alone.",
    )

    k: int = parameter(
        5, "latent neighbours of a node, at most", symbol="k", paper=20, search=Range(3, 20)
    )
    comparisons: int = parameter(
        4, "heads that the learners weighted-cosine and gat average", symbol="N_H"
    )
    width: int = parameter(32, "width of the learner's embeddings (not in the paper)", symbol="d'")
    alpha: float = parameter(
        0.8, "weight of the local channel", symbol="α", paper=0.2, search=Range(0.1, 0.9)
    )
    smoothness: float = parameter(
        0.01,
        "weight of the smoothness of features over latent edges",
        symbol="λ",
        paper=0.1,
        search=Range(1e-3, 1.0, log=True),
    )
    degree: float = parameter(
        0.01,
        "weight of the squared norm of the latent graph",
        symbol="μ",
        paper=0.1,
        search=Range(1e-3, 1.0, log=True),
    )
    scale: str = parameter(
        "edges",
        "what the two terms are divided by: the client's latent edges, its pairs of nodes, or "
        "nothing (sums, which grow with the graph unlike the mean cross-entropy)",
        choices=("edges", "pairs", "nothing"),
        paper="nothing",
    )
    unit_features: bool = parameter(
        True, "whether the smoothness compares features of unit length", paper=False
    )
    learner: str = parameter(
        "cosine",
        "how the latent graph is learned",
        choices=tuple(LEARNERS),
        paper="weighted-cosine",
    )
    latent: str = parameter(
        "topk",
        "whether the k nearest are the latent edges (Eq. 4), or every pair of nodes is one with "
        "its similarity as probability, in training and in evaluation",
        choices=("topk", "bernoulli"),
    )
    weights: str = parameter(
        "similarity",
        "weight of a latent edge: its similarity, or one (Eq. 4) with the similarity's gradient",
        choices=("similarity", "one"),
        paper="one",
    )
    refresh: str = parameter(
        "round",
        "when neighbours are searched, or Bernoulli edges drawn; similarities are computed at "
        "every step",
        choices=("round", "step"),
        paper="step",
    )
    plain: bool = parameter(
        True,
        "whether the convolutions take the features and give the logits, as the backbone's do: no "
        "projection, no concatenation",
        paper=False,
    )
    dual_channel: bool = parameter(
        True, "whether the client's graph has convolutions of its own, or those of the latent one"
    )
    share: str = parameter(
        "all",
        "what is shared: learner and latent convolutions (global), nothing, everything, or the "
        "task model (projection, local convolutions, classifier)",
        choices=("global", "none", "all", "task"),
        paper="global",
    )
    share_projection: bool = parameter(
        False, "whether the projection f_0 is shared with the global channel", symbol="f_0"
    )

    def __post_init__(self) -> None:
        for name in ("k", "comparisons", "width"):
            if getattr(self, name) < 1:
                raise UserError(f"fedhero: '{name}' must be at least 1")
        if not 0 <= self.alpha <= 1:
            raise UserError(f"fedhero: 'alpha' must be between 0 and 1, not {self.alpha}")

    # The network -----------------------------------------------------------------------------

    def supported_backbones(self) -> Sequence[str]:
        return tuple(CONVOLUTIONS)

    def build(self, backbone: str, shape: Shape, seed: int) -> Backbone:
        if backbone not in CONVOLUTIONS:
            raise ValueError(f"fedhero has no convolutions of '{backbone}'")
        network = PlainDualChannel if self.plain else JumpingDualChannel
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return network(
                backbone,
                shape,
                LEARNERS[self.learner](shape.features, self.width, self.comparisons),
                k=self.k,
                alpha=self.alpha,
                weigh=self.weigh,
                dual=self.dual_channel,
            )

    @property
    def weigh(self) -> Weigh | None:
        """The function from similarities to the weights of Ã; None if edges are drawn."""
        if self.latent == "bernoulli":
            return None
        return binary_weights if self.weights == "one" else similarity_weights

    def shares(self, network: Backbone, parameter: str) -> bool:
        part = parameter.split(".")[0]
        if self.share == "global":
            return part in ("learner", "global_convs") or (
                part == "projection" and self.share_projection
            )
        if self.share == "task":
            shared_gnn = part == "global_convs" and not self.dual_channel
            return part in ("projection", "local_convs", "classifier") or shared_gnn
        return self.share == "all"

    # What travels ----------------------------------------------------------------------------

    def uploads(self, sizes: Sizes) -> tuple[Declared, ...]:
        return () if self.share == "none" else super().uploads(sizes)

    def downloads(self, sizes: Sizes) -> tuple[Declared, ...]:
        return () if self.share == "none" else super().downloads(sizes)

    # At the clients --------------------------------------------------------------------------

    def needs_symmetric_edges(self) -> str:
        return "latent edges lead both ways, and both graphs have one network"

    def needs_whole_graph(self) -> str:
        return "latent neighbours are searched among all nodes"

    def prepare_round(self, local: Local) -> Message:
        """Search the neighbours of the round, or draw what decides on its Bernoulli edges."""
        if self.refresh == "step":
            return {}
        if self.latent == "bernoulli":
            assert local.draws is not None
            return {WORDS: pair_words(local.draws, len(local.cohort))}
        near = self.search(local)
        found = {NEAR + field.name: getattr(near, field.name) for field in fields(near)}
        return {**found, DISTANCE: self.distances(local.cohort)(near.index)}

    def search(self, local: Local) -> Neighbours:
        """Search the k nearest nodes of every node by the learner's similarity, Eq. (3)."""
        network = local.network
        assert isinstance(network, DualChannel)
        own = with_prefix(local.params, LEARNER)
        with torch.no_grad():
            found: tuple[Neighbours, None] = functional_call(
                network.learner, own, (local.cohort, self.k), {"scored": False}
            )
        return found[0]

    def loss(self, local: Local) -> Tensor:
        """Compute the cross-entropy plus the regulariser of the latent graph."""
        constants = local.constants
        known = with_prefix(constants, NEAR)
        near = Neighbours(**known) if known else None
        arguments = (local.cohort, local.draws, near, constants.get(WORDS))
        output: WithLatent = functional_call(local.network, local.params, arguments)
        return local.cross_entropy(output.logits) + self.regulariser(local, output.latent)

    def regulariser(self, local: Local, latent: LatentGraph | SampledGraph) -> Tensor:
        """Compute lambda sum_uv Ã_uv ||x_u - x_v||^2 + mu ||Ã||_F^2, Eq. (7), scaled, `[K]`."""
        cohort = local.cohort
        terms = latent.sum_over_edges(
            lambda weight, distance: weight * (self.smoothness * distance + self.degree * weight),
            self.distances(cohort),
            local.constants.get(DISTANCE),
        )
        total = cohort.segments.sum(terms)
        if self.scale == "edges":
            return total / cohort.segments.sum(latent.edges.to(cohort.dtype)).clamp(min=1)
        if self.scale == "pairs":
            return total / cohort.segments.counts.to(total.dtype).square()
        return total

    def distances(self, graph: StackedGraph) -> FeatureDistances:
        """Return what computes ||x_u - x_v||^2 of pairs of nodes."""
        return graph.cached(
            ("feature distances", self.unit_features),
            lambda whole: FeatureDistances(whole.x, whole.segments, unit=self.unit_features),
        )

    def upload(self, local: Local) -> Message:
        return {} if self.share == "none" else super().upload(local)

    # At the server ---------------------------------------------------------------------------

    def aggregate(self, state: State, uploads: Uploads, rng: np.random.Generator) -> State:
        return state if self.share == "none" else super().aggregate(state, uploads, rng)

    # For people ------------------------------------------------------------------------------

    def without_effect(self) -> Mapping[str, str]:
        """Name what changes no prediction beside the other values."""
        idle: dict[str, str] = {}

        def inert(reason: str, *names: str) -> None:
            idle.update(dict.fromkeys(names, reason))

        if self.learner not in ("weighted-cosine", "gat"):
            inert(
                f"the learner '{self.learner}' has no heads (set learner=weighted-cosine or gat)",
                "comparisons",
            )
        if self.share == "none":
            inert("nothing is averaged with share=none (set another share)", "weighting")
        if self.plain:
            inert("the plain network has no projection (set plain=off)", "share_projection")
        elif self.share != "global":
            inert(f"share={self.share} decides it (set share=global)", "share_projection")
        if self.latent == "bernoulli":
            inert("every pair of nodes may be a latent edge (set latent=topk)", "k", "weights")
        if self.smoothness == 0:
            inert("smoothness is 0 (set smoothness above 0)", "unit_features")
            if self.degree == 0:
                inert("both terms are 0 (set smoothness or degree above 0)", "scale")
        if self.alpha == 1:
            inert(
                "at alpha=1 the latent graph has no weight (set alpha below 1)",
                *("k", "smoothness", "degree", "scale", "unit_features"),
                *("latent", "weights", "refresh"),
            )
        if self.alpha == 0 and self.plain and self.share != "task":
            inert("at alpha=0 the given graph has no weight (set alpha above 0)", "dual_channel")
        return idle
