"""FedATH's network: two GNNs, and an edge evaluator that weights the edges for each of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from polyphily.methods.fedath.scores import mean_of_both_ways, rectified_scores
from polyphily.nn.backbones import Backbone, Output, Shape
from polyphily.nn.draws import Draws
from polyphily.nn.layers import GCNConv, glorot, matmul, zeros
from polyphily.nn.segments import Segments
from polyphily.nn.sparse import SparseMatrix
from polyphily.nn.stacked import StackedGraph
from polyphily.nn.subgraphs import Subgraph

CAUSAL, BIASED, EVALUATOR = "causal.", "biased.", "evaluator."


class DualGNN(Backbone):
    """A causal GNN, a biased GNN and an edge evaluator; the output is that of the causal GNN."""

    def __init__(self, causal: Backbone, biased: Backbone, evaluator: EdgeEvaluator) -> None:
        super().__init__(causal.shape)
        self.causal, self.biased, self.evaluator = causal, biased, evaluator

    def describe(self) -> str:
        return f"causal and biased {self.causal.describe()}"

    @property
    def embedding_width(self) -> int:
        return self.causal.embedding_width

    def forward(self, graph: StackedGraph, draws: Draws | None = None) -> Output:
        score = self.evaluator(graph, draws)
        output: Output = self.causal(self.weighted(graph, score), draws)
        return output

    def weighted(self, graph: StackedGraph, score: Tensor) -> Subgraph:
        """Return a graph whose edges have the weights that follow from scores, Eq. 6."""
        return Subgraph(graph, score.sigmoid(), symmetric=self.evaluator.symmetric)

    def is_classifier(self, parameter: str) -> bool:
        own = parameter.removeprefix(CAUSAL)
        return parameter.startswith(CAUSAL) and self.causal.is_classifier(own)


# The edge evaluator Φ ----------------------------------------------------------------------------


class EdgeEvaluator(nn.Module):
    """The scores c_ij of all edges, Eq. 5; the edge weight is ω_ij = sigmoid(c_ij), Eq. 6.

    Args:
        shape: the size of the GNNs.
        bias: initial bias of the scores.
        symmetric: whether c_ij and c_ji are replaced by their mean.
        unit: whether node features are scaled to unit length.
    """

    last: nn.Parameter

    def __init__(self, shape: Shape, bias: float, *, symmetric: bool, unit: bool) -> None:
        super().__init__()
        self.shape, self.symmetric, self.unit = shape, symmetric, unit
        self.bias = nn.Parameter(torch.full((1, 1), float(bias)))

    def first(self, weight: Tensor, graph: StackedGraph) -> Tensor:
        """Multiply the features by a matrix."""
        product = matmul(graph.x, weight, graph)
        if self.unit:
            product = product * graph.cached("fedath/inverse norms", inverse_norms)
        return product

    def scores(self, graph: StackedGraph, edges: Segments, draws: Draws | None) -> Tensor:
        """Return the scores of all edges, without bias and as if not symmetric, `[nnz]`."""
        raise NotImplementedError

    def forward(self, graph: StackedGraph, draws: Draws | None = None) -> Tensor:
        edges = graph.cached("fedath/edges by client", edge_segments)
        score = self.scores(graph, edges, draws)
        if self.symmetric:
            score = mean_of_both_ways(score, graph.edges)
        return score + edges.expand(self.bias).view(-1)

    def link_scores(self, graph: StackedGraph, candidates: StackedGraph) -> Tensor:
        """Return c_ij of the pairs in `candidates.edges`, `[nnz]` (for `polyphily audit`)."""
        scores: Tensor = self(candidates)
        return scores


class MLPEvaluator(EdgeEvaluator):
    """The paper's Φ: an MLP on [x_i || x_j], here with one hidden layer (the paper does not say).

    [x_i || x_j] W = x_i W_1 + x_j W_2, so that the wide product is per node and not per edge.
    """

    def __init__(
        self, shape: Shape, width: int, bias: float, *, symmetric: bool, unit: bool
    ) -> None:
        super().__init__(shape, bias, symmetric=symmetric, unit=unit)
        self.weight = glorot((shape.features, 2 * width), 2 * shape.features, width)
        self.hidden_bias = zeros(width)
        self.last = glorot((width, 1), width, 1)

    def scores(self, graph: StackedGraph, edges: Segments, draws: Draws | None) -> Tensor:
        one, two = self.first(self.weight, graph).chunk(2, dim=1)
        one = one + graph.segments.expand(self.hidden_bias)
        return rectified_scores(one, two, self.last, graph, edges, symmetric=self.symmetric)


class GCNEvaluator(EdgeEvaluator):
    """The Φ of the authors' code: a linear map and two graph convolutions, then an MLP on edges.

    The MLP has the widths 2C - C - C/2 - 1, with batch norm, and its input is the output of both
    ends of an edge. Batch norm uses the statistics of the client's edges in evaluation, too,
    because these are the batch. Biases before batch norm would cancel and are left out.
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

    def scores(self, graph: StackedGraph, edges: Segments, draws: Draws | None) -> Tensor:
        h = self.first(self.embed, graph) + graph.segments.expand(self.embed_bias)
        h = self.conv1(self._drop(h, graph, draws), graph).relu()
        h = graph.gcn @ graph.segments.matmul(self._drop(h, graph, draws), self.conv2)
        one, two = graph.segments.matmul(h, self.mlp1).chunk(2, dim=1)
        z = self.norm1(graph.edges.at_rows(one) + graph.edges.at_cols(two), edges).relu()
        normed: Tensor = self.norm2(edges.matmul(z, self.mlp2), edges).relu()
        return edges.matmul(normed, self.last).view(-1)

    def _drop(self, x: Tensor, graph: StackedGraph, draws: Draws | None) -> Tensor:
        if draws is None:
            return x
        return draws.dropout(x, self.shape.dropout, graph.segments.pointers)


class EdgeNorm(nn.Module):
    """Batch norm over the edges of each client."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(1, width)), zeros(width)

    def forward(self, x: Tensor, edges: Segments) -> Tensor:
        centred = x - edges.expand(edges.mean(x))
        deviation = (edges.mean(centred.square()) + 1e-5).sqrt()
        return centred * edges.expand(self.scale / deviation) + edges.expand(self.shift)


EVALUATORS: dict[str, type[MLPEvaluator] | type[GCNEvaluator]] = {
    "mlp": MLPEvaluator,
    "gcn": GCNEvaluator,
}


def edge_segments(graph: StackedGraph) -> Segments:
    """Return the edges of each client."""
    ends = graph.edges.crow[list(graph.segments.pointers)]
    return Segments(tuple((ends[1:] - ends[:-1]).tolist()), graph.device)


def inverse_norms(graph: StackedGraph) -> Tensor:
    """Compute 1 / ||x_i|| as a column; 0 for a node without features."""
    x = graph.x
    if isinstance(x, SparseMatrix):
        assert x.value is not None
        norm = x.sum_by_row(x.value.square()).sqrt()
    else:
        norm = x.norm(dim=1)
    return torch.where(norm > 0, 1 / norm, 0).unsqueeze(1)
