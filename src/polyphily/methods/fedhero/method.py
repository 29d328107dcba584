"""FedHERO: a shared structure learner gives every client a latent graph beside its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from polyphily.core.local import Local
from polyphily.core.messages import Declared, Message, Sizes, State, Uploads, with_prefix
from polyphily.core.method import parameter, register
from polyphily.errors import UserError
from polyphily.methods.fedavg import FedAvg
from polyphily.methods.fedhero.distances import FeatureDistances
from polyphily.methods.fedhero.latent import (
    LatentGraph,
    Weigh,
    bernoulli_weights,
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
from polyphily.methods.fedhero.search import width_of
from polyphily.methods.fedhero.structure import LEARNERS
from polyphily.nn.backbones import Backbone, Shape
from polyphily.nn.stacked import StackedGraph

NEAR, NOISE, DISTANCE = "neighbours/", "noise", "distance"  # constants of a round
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
    Eq. (4) makes Ã binary, which leaves the learner without a gradient. Here an edge's weight is
    its similarity, or 0 if that is negative, or 1 with the similarity's gradient (`weights`). A
    node is never its own neighbour: convolutions add it with weight one and normalise by row.

    The backbone's name chooses the convolutions: gcn, sage and acm-gcn serve both channels, gat and
    mlp are local channels beside a GCN on the latent graph. By default the network is the
    backbone itself, twice, all parameters are shared, and Ã connects the five nearest by cosine.
    In the paper f_g and the learner are shared, and Ã connects twenty by weighted cosines.
    """

    evaluated = "personal"

    k: int = parameter(5, "latent neighbours of a node, at most", symbol="k", paper=20)
    comparisons: int = parameter(
        4, "heads that the learners weighted-cosine and gat average", symbol="N_H"
    )
    width: int = parameter(32, "width of the learner's embeddings (not in the paper)", symbol="d'")
    alpha: float = parameter(0.8, "weight of the local channel", symbol="α", paper=0.2)
    smoothness: float = parameter(
        0.01, "weight of the smoothness of features over latent edges", symbol="λ", paper=0.1
    )
    degree: float = parameter(
        0.01, "weight of the squared norm of the latent graph", symbol="μ", paper=0.1
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
        "whether the k nearest are the latent edges, or each of them with its similarity as "
        "probability (the paper's second form at k = all nodes); evaluated at the mean",
        choices=("topk", "bernoulli"),
    )
    weights: str = parameter(
        "similarity",
        "weight of a latent edge: its similarity, or one (Eq. 4) with the similarity's gradient",
        choices=("similarity", "one"),
    )
    refresh: str = parameter(
        "round",
        "when neighbours are searched; their similarities are computed at every step",
        choices=("round", "step"),
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
    def weigh(self) -> Weigh:
        """The function from similarities to the weights of Ã."""
        if self.latent == "bernoulli":
            return bernoulli_weights
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

    def needs_whole_graph(self) -> str:
        return "latent neighbours are searched among all nodes"

    def prepare_round(self, local: Local) -> Message:
        """Draw the round's noise and search the neighbours of the round, if they are needed."""
        cohort, constants = local.cohort, {}
        if self.latent == "bernoulli" and local.draws is not None:
            noise = local.draws.uniform(self.k, cohort.segments.pointers)
            constants[NOISE] = noise[:, : width_of(cohort.segments, self.k)].to(cohort.dtype)
        if self.refresh == "round":
            near = self.search(local)
            constants |= {NEAR + field.name: getattr(near, field.name) for field in fields(near)}
            constants[DISTANCE] = self.distances(cohort, near)
        return constants

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
        arguments = (local.cohort, local.draws, near, constants.get(NOISE))
        output: WithLatent = functional_call(local.network, local.params, arguments)
        return local.cross_entropy(output.logits) + self.regulariser(local, output.latent)

    def regulariser(self, local: Local, latent: LatentGraph) -> Tensor:
        """Compute lambda sum_uv Ã_uv ||x_u - x_v||^2 + mu ||Ã||_F^2, Eq. (7), scaled, `[K]`."""
        cohort = local.cohort
        distance = local.constants.get(DISTANCE)
        if distance is None:
            distance = self.distances(cohort, latent.neighbours)
        terms = latent.weight * (self.smoothness * distance + self.degree * latent.weight)
        total = cohort.segments.sum(terms.sum(dim=1))
        if self.scale == "edges":
            edges = latent.neighbours.filled.sum(dim=1).to(cohort.dtype)
            return total / cohort.segments.sum(edges).clamp(min=1)
        if self.scale == "pairs":
            return total / cohort.segments.counts.to(total.dtype).square()
        return total

    def distances(self, graph: StackedGraph, near: Neighbours) -> Tensor:
        """Compute ||x_u - x_v||^2 of nodes and their neighbours, `[N, k]`."""
        between = graph.cached(
            ("feature distances", self.unit_features),
            lambda whole: FeatureDistances(whole.x, whole.segments, unit=self.unit_features),
        )
        return between(near.index)

    def upload(self, local: Local) -> Message:
        return {} if self.share == "none" else super().upload(local)

    # At the server ---------------------------------------------------------------------------

    def aggregate(self, state: State, uploads: Uploads, rng: np.random.Generator) -> State:
        return state if self.share == "none" else super().aggregate(state, uploads, rng)
