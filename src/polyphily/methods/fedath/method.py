"""FedATH: an edge evaluator splits each graph; only the GNN on its causal part is shared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call

from polyphily.core.cohort import Cohort
from polyphily.core.local import Local, Message
from polyphily.core.method import parameter, register
from polyphily.core.optimizers import OptimizerSpec
from polyphily.graphs.random import derive
from polyphily.methods.fedavg import FedAvg
from polyphily.nn import backbones
from polyphily.nn.backbones import Backbone, Output, Shape
from polyphily.nn.draws import Draws
from polyphily.nn.layers import GCNConv, glorot, matmul, zeros
from polyphily.nn.segments import Segments
from polyphily.nn.sparse import SparseMatrix
from polyphily.nn.subgraphs import Subgraph

CAUSAL, BIASED, EVALUATOR = "causal.", "biased.", "evaluator."
SHARED = {
    "causal": (CAUSAL,),
    "causal+evaluator": (CAUSAL, EVALUATOR),
    "causal+biased": (CAUSAL, BIASED),
    "all": (CAUSAL, BIASED, EVALUATOR),
}
BLOCK = 256  # columns of an outer product per node that are in memory at a time


# The edge evaluator Φ --------------------------------------------------------------------------


def edge_segments(cohort: Cohort) -> Segments:
    """Edges by client."""
    ends = cohort.edges.crow[list(cohort.segments.pointers)]
    return Segments(tuple((ends[1:] - ends[:-1]).tolist()), cohort.device)


def inverse_norms(cohort: Cohort) -> Tensor:
    """1 / ||x_i|| as a column; a node without features has no direction and gets 0."""
    x = cohort.x
    if isinstance(x, SparseMatrix):
        assert x.value is not None
        norm = x.sum_by_row(x.value.square()).sqrt()
    else:
        norm = x.norm(dim=1)
    return torch.where(norm > 0, 1 / norm, 0).unsqueeze(1)


class EdgeEvaluator(nn.Module):
    """Scores c_ij of every edge, Eq. 5; the edge weight is ω_ij = sigmoid(c_ij), Eq. 6.

    Args:
        shape: the GNNs' sizes.
        bias: what the scores start around.
        symmetric: whether c_ij and c_ji are replaced by their mean.
        unit: whether node features are scaled to unit length.
    """

    last: nn.Parameter

    def __init__(self, shape: Shape, bias: float, *, symmetric: bool, unit: bool) -> None:
        super().__init__()
        self.shape, self.symmetric, self.unit = shape, symmetric, unit
        self.bias = nn.Parameter(torch.full((1, 1), float(bias)))

    def first(self, weight: Tensor, cohort: Cohort) -> Tensor:
        """Features times a matrix."""
        product = matmul(cohort.x, weight, cohort)
        if self.unit:
            product = product * cohort.once("fedath/inverse norms", inverse_norms)
        return product

    def hidden(self, cohort: Cohort, edges: Segments, draws: Draws | None) -> Tensor:
        """What the last layer sees of every edge."""
        raise NotImplementedError

    def forward(self, cohort: Cohort, draws: Draws | None = None) -> Tensor:
        edges = cohort.once("fedath/edges by client", edge_segments)
        score = edges.matmul(self.hidden(cohort, edges, draws), self.last) + edges.expand(self.bias)
        score = score.view(-1)
        if self.symmetric:  # the pattern is symmetric: entry permutation[ij] is ji
            score = (score + score[cohort.edges.permutation]) / 2
        return score


class MLPEvaluator(EdgeEvaluator):
    """The paper's Φ: an MLP on [x_i || x_j]. Its depth is not stated; here one hidden layer.

    [x_i || x_j] W = x_i W_1 + x_j W_2, so the wide product is per node and not per edge.
    """

    def __init__(
        self, shape: Shape, width: int, bias: float, *, symmetric: bool, unit: bool
    ) -> None:
        super().__init__(shape, bias, symmetric=symmetric, unit=unit)
        self.weight = glorot((shape.features, 2 * width), 2 * shape.features, width)
        self.hidden_bias = zeros(width)
        self.last = glorot((width, 1), width, 1)

    def hidden(self, cohort: Cohort, edges: Segments, draws: Draws | None) -> Tensor:
        one, two = self.first(self.weight, cohort).chunk(2, dim=1)
        one = one + cohort.segments.expand(self.hidden_bias)
        return (cohort.edges.at_rows(one) + cohort.edges.at_cols(two)).relu()


class GCNEvaluator(EdgeEvaluator):
    """The authors' code: a linear map, two graph convolutions on the whole graph, then an MLP
    2C - C - C/2 - 1 with batch norm on the endpoints' outputs.

    Batch norm takes the statistics of the client's edges in evaluation too: they are the batch.
    Biases before it would cancel, so there are none.
    """

    def __init__(
        self, shape: Shape, width: int, bias: float, *, symmetric: bool, unit: bool
    ) -> None:
        super().__init__(shape, bias, symmetric=symmetric, unit=unit)
        classes, half = shape.classes, max(shape.classes // 2, 1)
        self.embed = glorot((shape.features, width), shape.features, width)
        self.embed_bias = zeros(width)
        self.conv1 = GCNConv(width, width)
        self.conv2 = glorot((width, classes), width, classes)
        self.mlp1 = glorot((classes, 2 * classes), 2 * classes, classes)
        self.mlp2 = glorot((classes, half), classes, half)
        self.norm1, self.norm2 = EdgeNorm(classes), EdgeNorm(half)
        self.last = glorot((half, 1), half, 1)

    def hidden(self, cohort: Cohort, edges: Segments, draws: Draws | None) -> Tensor:
        h = self.first(self.embed, cohort) + cohort.segments.expand(self.embed_bias)
        h = self.conv1(self._drop(h, cohort, draws), cohort).relu()
        h = cohort.gcn @ cohort.segments.matmul(self._drop(h, cohort, draws), self.conv2)
        one, two = cohort.segments.matmul(h, self.mlp1).chunk(2, dim=1)
        z = self.norm1(cohort.edges.at_rows(one) + cohort.edges.at_cols(two), edges).relu()
        normed: Tensor = self.norm2(edges.matmul(z, self.mlp2), edges).relu()
        return normed

    def _drop(self, x: Tensor, cohort: Cohort, draws: Draws | None) -> Tensor:
        return (
            x if draws is None else draws.dropout(x, self.shape.dropout, cohort.segments.pointers)
        )


class EdgeNorm(nn.Module):
    """Batch norm over the edges of each client."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(1, width)), zeros(width)

    def forward(self, x: Tensor, edges: Segments) -> Tensor:
        centred = x - edges.expand(edges.mean(x))
        deviation = (edges.mean(centred.square()) + 1e-5).sqrt()
        return centred * edges.expand(self.scale / deviation) + edges.expand(self.shift)


# The dual GNN ----------------------------------------------------------------------------------


class DualGNN(Backbone):
    """Causal GNN, biased GNN and edge evaluator; its output is the causal GNN's."""

    def __init__(self, causal: Backbone, biased: Backbone, evaluator: EdgeEvaluator) -> None:
        super().__init__(causal.shape)
        self.causal, self.biased, self.evaluator = causal, biased, evaluator

    def forward(self, cohort: Cohort, draws: Draws | None = None) -> Output:
        score = self.evaluator(cohort, draws)
        output: Output = self.causal(Subgraph.of(cohort, score.sigmoid()), draws)
        return output

    def is_classifier(self, parameter: str) -> bool:
        own = parameter.removeprefix(CAUSAL)
        return parameter.startswith(CAUSAL) and self.causal.is_classifier(own)


def inside(params: Mapping[str, Tensor], part: str) -> Message:
    """The parameters of one part of the network, by the names they have in it."""
    return {n.removeprefix(part): p for n, p in params.items() if n.startswith(part)}


# The losses ------------------------------------------------------------------------------------


def cross_square(a: Tensor, b: Tensor, segments: Segments) -> Tensor:
    """||a^T b||_F^2 of each client's rows, in O(n C^2) time and without an n × n matrix."""
    parts = torch.split(a, max(1, BLOCK // b.shape[1]), dim=1)
    products = [segments.sum(part.unsqueeze(2) * b.unsqueeze(1)) for part in parts]
    return torch.cat(products, dim=1).square().sum(dim=(1, 2))


def hsic(one: Tensor, two: Tensor, segments: Segments, scale: str) -> Tensor:
    """HSIC of each client's rows with linear kernels, Eqs. 10 and 11.

    Tr(K_1 C K_2 C) = ||(C H_1)^T (C H_2)||_F^2, C H being H less its column means.
    Eq. 11 prints the factor of Eq. 10, (N-1)^-2, without its minus sign.
    """
    one, two = (h - segments.expand(segments.mean(h)) for h in (one, two))
    trace = cross_square(one, two, segments)
    if scale == "alignment":
        norms = cross_square(one, one, segments) * cross_square(two, two, segments)
        return trace / norms.clamp(min=1e-12).sqrt()
    sizes = segments.counts.to(one.dtype)
    return trace / ((sizes - 1).clamp(min=1).square() if scale == "pairs" else sizes)


def negative_entropy(logits: Tensor, segments: Segments, form: str) -> Tensor:
    """How far each client's predictions are from uniform, Eq. 9.

    Eq. 9 prints the log without the probability before it ("printed"); that is the cross-entropy
    to the uniform distribution and has the same minimum.
    """
    log = logits.log_softmax(dim=1)
    if form == "printed":
        return segments.mean(-log.sum(dim=1))
    values = (log.exp() * log).sum(dim=1)
    return segments.sum(values) if form == "sum" else segments.mean(values)


# The method ------------------------------------------------------------------------------------


@register(
    "fedath",
    cite="Fu et al., Less is More: Federated Graph Learning with Alleviating Topology "
    "Heterogeneity from A Causal Perspective, ICML 2025",
)
@dataclass(frozen=True)
class FedATH(FedAvg):
    """L = CE(H_c) + negative entropy(H_b) + lambda · HSIC(H_c, H_b), causal GNN averaged.

    H_c comes from the causal GNN on edges weighted ω, H_b from the biased GNN on edges weighted
    1 - ω, with ω from the edge evaluator. Evaluator and biased GNN stay with the client. The
    paper's GNNs are GCNs; any backbone serves (`mlp` has no edges: the evaluator idles).

    What is evaluated is the global causal GNN with the client's own evaluator: the paper calls that
    GNN the result. (The authors' code scores the trained view.)
    """

    independence: float = parameter(
        0.1, "weight of the HSIC; the paper tunes it in {0.001, 0.1, 7, 10}", symbol="λ"
    )
    hsic: str = parameter(
        "alignment",
        "what the trace is divided by: (N-1)^2 as in the paper (pairs), N as in the authors' code "
        "(nodes), or the two norms, a value in [0, 1] that small logits cannot lower (alignment)",
        choices=("pairs", "nodes", "alignment"),
        paper="pairs",
    )
    entropy: str = parameter(
        "mean",
        "negative entropy as a mean over nodes, as a sum (authors' code), or as Eq. 9 is printed",
        choices=("mean", "sum", "printed"),
    )
    use_entropy: bool = parameter(True, "whether the entropy loss is there (Tables 3 and 4)")
    use_independence: bool = parameter(True, "whether the HSIC loss is there (Tables 3 and 4)")
    share: str = parameter(
        "causal", "what is averaged; the paper: causal (Tables 5 and 6)", choices=tuple(SHARED)
    )
    evaluator: str = parameter(
        "mlp",
        "edge scores by an MLP on the endpoints' features (paper), or on a GCN's outputs (code)",
        symbol="Φ",
        choices=("mlp", "gcn"),
    )
    evaluator_width: int = parameter(
        16, "hidden width of the evaluator; not stated in the paper, 512 in the authors' code"
    )
    symmetric: bool = parameter(True, "whether both directions get their mean score", paper=False)
    unit_features: bool = parameter(
        True, "whether the evaluator sees features of unit length", paper=False
    )
    initial_score: float = parameter(
        4.0, "what edge scores start around: 4 keeps all edges at first (ω = 0.98)", paper=0.0
    )
    evaluator_lr: float = parameter(
        0.001, "learning rate of the evaluator; 0: that of the GNNs", paper=0.0
    )
    joint: bool = parameter(
        False,
        "whether the biased GNN's losses move the evaluator too: Eq. 12 over all parameters; "
        "the authors' code stops them at 1 - ω",
    )

    def whole_graph(self) -> str:
        return "its losses compare the two GNNs at all nodes"

    def build(self, backbone: str, shape: Shape, seed: int) -> Backbone:
        causal = backbones.build(backbone, shape, seed)
        biased = backbones.build(backbone, shape, derive(seed, "biased GNN"))
        kind = {"mlp": MLPEvaluator, "gcn": GCNEvaluator}[self.evaluator]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(seed, "edge evaluator"))
            evaluator = kind(
                shape,
                self.evaluator_width,
                self.initial_score,
                symmetric=self.symmetric,
                unit=self.unit_features,
            )
        return DualGNN(causal, biased, evaluator)

    def shares(self, network: Backbone, parameter: str) -> bool:
        return parameter.startswith(SHARED[self.share])

    def represent(self, local: Local) -> tuple[Tensor, Tensor | None]:
        """H_c, and H_b where a loss asks for it, Eq. 7."""
        network, cohort, draws = local.network, local.cohort, local.draws
        assert isinstance(network, DualGNN)
        score: Tensor = functional_call(
            network.evaluator, inside(local.params, EVALUATOR), (cohort, draws)
        )
        causal: Output = functional_call(
            network.causal,
            inside(local.params, CAUSAL),
            (Subgraph.of(cohort, score.sigmoid()), draws),
        )
        if not (self.use_entropy or self.use_independence):
            return causal.logits, None
        rest = (-score if self.joint else -score.detach()).sigmoid()
        biased: Output = functional_call(
            network.biased, inside(local.params, BIASED), (Subgraph.of(cohort, rest), draws)
        )
        return causal.logits, biased.logits

    def loss(self, local: Local) -> Tensor:
        """Eq. 12. H_c depends on the causal GNN and on Φ, H_b on the biased GNN, so its gradient is
        that of CE + λ HSIC with H_b fixed for the first two and of entropy + λ HSIC with H_c fixed
        for the last: both updates of Algorithm 1, which computes H_c and H_b once per epoch.
        """
        causal, biased = self.represent(local)
        segments = local.cohort.segments
        loss = local.cross_entropy(causal)  # Eq. 8
        if self.use_entropy and biased is not None:
            loss = loss + negative_entropy(biased, segments, self.entropy)
        if self.use_independence and biased is not None:
            loss = loss + self.independence * hsic(causal, biased, segments, self.hsic)
        return loss

    def optimizer_of(self, parameter: str, run: OptimizerSpec) -> OptimizerSpec:
        if self.evaluator_lr and parameter.startswith(EVALUATOR):
            return replace(run, lr=self.evaluator_lr)
        return run
