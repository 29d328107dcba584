"""FedHERO: a shared structure learner gives every client a latent graph beside its own."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from polyphily.core.cohort import Cohort
from polyphily.core.local import Local, Message
from polyphily.core.method import State, Uploads, parameter, register
from polyphily.errors import UserError, unknown
from polyphily.methods.fedavg import FedAvg
from polyphily.methods.fedhero.latent import FeatureDistances, LatentGraph, Neighbours, width_of
from polyphily.methods.fedhero.structure import LEARNERS
from polyphily.nn.backbones import BACKBONES, Backbone, Output, Shape
from polyphily.nn.draws import Draws
from polyphily.nn.layers import ACMConv, GATConv, GCNConv, Linear, SAGEConv
from polyphily.nn.sparse import SparseMatrix

NEAR, NOISE, DISTANCE = "neighbours/", "noise", "distance"


class WithLatent(Output):
    """A backbone's output, and the latent graph it was computed on."""

    latent: LatentGraph


class DualChannel(Backbone):
    """Convolutions on the given graph and on a latent one, mixed layer by layer.

    The paper's network projects the features, has `shape.layers` convolutions, and classifies the
    features beside all layers' outputs. The plain one is the backbone itself, twice.

    The backbone's name chooses the convolution: gcn, sage and acm-gcn serve both channels. Graph
    attention and no graph at all (gat, mlp) are for the local channel, beside GCN on the latent
    graph, whose weights are learned already; gpr-gnn has no layer of its own and stands for gcn.
    """

    def __init__(self, kind: str, shape: Shape, method: FedHERO) -> None:
        super().__init__(shape)
        self.method = method
        self.learner = LEARNERS[method.learner](shape.features, method.width, method.comparisons)
        hidden, layers = shape.hidden, shape.layers
        widths = shape.widths() if method.plain else [(hidden, hidden)] * layers
        both = {"sage": SAGEConv, "acm-gcn": ACMConv}.get(kind, GCNConv)
        if not method.plain:
            self.projection = Linear(shape.features, hidden)
        self.global_convs = nn.ModuleList(both(*width) for width in widths)
        self.local_convs = nn.ModuleList()
        if method.dual_channel:
            heads = [shape.heads] * (layers - 1) + [1 if method.plain else shape.heads]
            self.local_convs.extend(
                _local_conv(kind, *width, h, both) for width, h in zip(widths, heads, strict=True)
            )
        if not method.plain:
            self.classifier = nn.ModuleDict(
                {
                    "ego": Linear(shape.features, shape.classes, bias=False),
                    "layers": Linear((layers + 1) * hidden, shape.classes),
                }
            )

    def forward(
        self, cohort: Cohort, draws: Draws | None = None, known: Message | None = None
    ) -> WithLatent:
        """`known` is what `FedHERO.begin` computed for the round; without it all is found anew."""
        method, known = self.method, known or {}
        found = {n.removeprefix(NEAR): t for n, t in known.items() if n.startswith(NEAR)}
        near, score = self.learner(cohort, method.k, Neighbours(**found) if found else None)
        latent = LatentGraph(near, method.weigh(score, near, known.get(NOISE)), cohort.segments)
        forward = self._plain if method.plain else self._jumping
        output = WithLatent(*forward(cohort, latent, draws))
        output.latent = latent
        return output

    def _mixed(self, z: Tensor | SparseMatrix, layer: int, cohort: Cohort, near: Cohort) -> Tensor:
        """alpha f_loc(z, A) + (1 - alpha) f_g(z, Ã), Eq. (5)."""
        # Without the dual channel one GNN is given both graphs.
        local_convs = self.local_convs if self.method.dual_channel else self.global_convs
        given: Tensor = local_convs[layer](z, cohort)
        other: Tensor = self.global_convs[layer](z, near)
        return torch.lerp(other, given, self.method.alpha)

    def _jumping(
        self, cohort: Cohort, latent: LatentGraph, draws: Draws | None
    ) -> tuple[Tensor, Tensor]:
        near = cast("Cohort", latent)
        x = self.drop_input(cohort, draws)
        z = self.drop(self.projection(x, cohort).relu(), cohort, draws)  # Z^0 = f_0(X)
        outputs = [z]
        for layer in range(len(self.global_convs)):
            z = self.drop(self._mixed(z, layer, cohort, near).relu(), cohort, draws)
            outputs.append(z)
        embedding = torch.cat(outputs, dim=1)
        # f_c(concat(X, Z^0, …, Z^L)), Eq. (6): a product for X, which may be sparse, and one more.
        logits = self.classifier["ego"](x, cohort) + self.classifier["layers"](embedding, cohort)
        return logits, embedding

    def _plain(
        self, cohort: Cohort, latent: LatentGraph, draws: Draws | None
    ) -> tuple[Tensor, Tensor]:
        near = cast("Cohort", latent)
        z: Tensor | SparseMatrix = self.drop_input(cohort, draws)
        embedding, last = None, len(self.global_convs) - 1
        for layer in range(last):
            embedding = self._mixed(z, layer, cohort, near).relu()
            z = self.drop(embedding, cohort, draws)
        logits = self._mixed(z, last, cohort, near)
        return logits, logits if embedding is None else embedding

    def is_classifier(self, parameter: str) -> bool:
        last = f"_convs.{len(self.global_convs) - 1}."
        return last in parameter if self.method.plain else parameter.startswith("classifier.")


def _local_conv(
    kind: str, inputs: int, outputs: int, heads: int, usual: type[nn.Module]
) -> nn.Module:
    if kind == "mlp":
        return Linear(inputs, outputs)
    if kind != "gat":
        return usual(inputs, outputs)
    if outputs % heads:
        raise ValueError(f"gat: hidden ({outputs}) must be a multiple of heads ({heads})")
    return GATConv(inputs, outputs // heads, heads, average=False)


@register(
    "fedhero",
    cite="FedHERO: A Federated Learning Approach for Node Classification Task on Heterophilic "
    "Graphs",
)
@dataclass(frozen=True)
class FedHERO(FedAvg):
    """Z^l = relu(alpha f_loc(Z^(l-1), A) + (1-alpha) f_g(Z^(l-1), Ã)), Ã from a shared learner.

    Ã joins each node to the k others that a learned similarity puts first. As printed, Eq. (4)
    makes Ã binary, which leaves the learner without a gradient: here an edge's weight is its
    similarity, negative ones cut off, or one with the similarity's gradient (`weights`). A node is
    never among its own k; convolutions add it with weight one and normalise by row.

    The method brings its own network; the backbone's name chooses its convolutions. By default
    that is the backbone itself, twice, all of it travels, and Ã joins the five nearest by cosine;
    in the paper f_g and Ã's learner travel, and Ã has twenty by weighted cosines.
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
        "nothing (sums that outgrow the mean cross-entropy)",
        choices=("edges", "pairs", "nothing"),
        paper="nothing",
    )
    unit_features: bool = parameter(
        True, "whether the smoothness compares features of length one", paper=False
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
        "probability (the paper's second form at k = all nodes); scored at the mean",
        choices=("topk", "bernoulli"),
    )
    weights: str = parameter(
        "similarity",
        "weight of a latent edge: its similarity, or one (Eq. 4) with the similarity's gradient",
        choices=("similarity", "one"),
    )
    refresh: str = parameter(
        "round",
        "when neighbours are searched anew; their similarities follow the learner at every step",
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
        "what travels: learner and latent convolutions (global), nothing, everything, or the task "
        "model (projection, local convolutions, classifier)",
        choices=("global", "none", "all", "task"),
        paper="global",
    )
    share_projection: bool = parameter(
        False, "whether the projection f_0 travels with the global channel", symbol="f_0"
    )

    def __post_init__(self) -> None:
        for name in ("k", "comparisons", "width"):
            if getattr(self, name) < 1:
                raise UserError(f"fedhero: '{name}' must be at least 1")
        if not 0 <= self.alpha <= 1:
            raise UserError(f"fedhero: 'alpha' must be between 0 and 1, not {self.alpha}")

    # At the clients --------------------------------------------------------------------------

    def whole_graph(self) -> str:
        return "latent neighbours are searched among all nodes"

    def build(self, backbone: str, shape: Shape, seed: int) -> Backbone:
        if backbone not in BACKBONES:
            raise unknown("backbone", backbone, BACKBONES)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return DualChannel(backbone, shape, self)

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

    def weigh(self, score: Tensor, near: Neighbours, noise: Tensor | None) -> Tensor:
        """Ã at the neighbours, from their similarities; zero where there is no neighbour."""
        if self.latent == "bernoulli":
            chance = score.clamp(0, 1)
            if noise is None:  # no draws in evaluation: the mean of the samples
                return chance
            return (noise < chance).to(score.dtype) + (chance - chance.detach())
        if self.weights == "one":
            return near.filled.to(score.dtype) + (score - score.detach())
        return score.relu()

    def begin(self, local: Local) -> Message:
        cohort, constants = local.cohort, {}
        if self.latent == "bernoulli" and local.draws is not None:
            noise = local.draws.uniform(self.k, cohort.segments.pointers)
            constants[NOISE] = noise[:, : width_of(cohort.segments, self.k)].to(cohort.dtype)
        if self.refresh == "round":
            near = self._search(local)
            constants |= {NEAR + field.name: getattr(near, field.name) for field in fields(near)}
            constants[DISTANCE] = self._distances(cohort, near)
        return constants

    def loss(self, local: Local) -> Tensor:
        arguments = (local.cohort, local.draws, local.constants)
        output: WithLatent = functional_call(local.network, local.params, arguments)
        return local.cross_entropy(output.logits) + self.regulariser(local, output.latent)

    def regulariser(self, local: Local, latent: LatentGraph) -> Tensor:
        """Eq. (7): lambda sum_uv Ã_uv ||x_u - x_v||^2 + mu ||Ã||_F^2, scaled, `[K]`."""
        cohort = local.cohort
        distance = local.constants.get(DISTANCE)
        if distance is None:
            distance = self._distances(cohort, latent.neighbours)
        terms = latent.weight * (self.smoothness * distance + self.degree * latent.weight)
        total = cohort.segments.sum(terms.sum(dim=1))
        if self.scale == "edges":
            edges = latent.neighbours.filled.sum(dim=1).to(cohort.dtype)
            return total / cohort.segments.sum(edges).clamp(min=1)
        if self.scale == "pairs":
            return total / cohort.segments.counts.to(total.dtype).square()
        return total

    def upload(self, local: Local) -> Message:
        return {} if self.share == "none" else super().upload(local)

    def _search(self, local: Local) -> Neighbours:
        network = local.network
        assert isinstance(network, DualChannel)
        prefix = "learner."
        own = {n.removeprefix(prefix): p for n, p in local.params.items() if n.startswith(prefix)}
        with torch.no_grad():
            near, _ = functional_call(
                network.learner, own, (local.cohort, self.k), {"scored": False}
            )
        found: Neighbours = near
        return found

    def _distances(self, cohort: Cohort, near: Neighbours) -> Tensor:
        distances = cohort.once(
            ("feature distances", self.unit_features),
            lambda c: FeatureDistances(c.x, c.segments, unit=self.unit_features),
        )
        return distances(near.index)

    # At the server ---------------------------------------------------------------------------

    def aggregate(self, state: State, uploads: Uploads, rng: np.random.Generator) -> State:
        return state if self.share == "none" else super().aggregate(state, uploads, rng)
