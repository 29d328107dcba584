"""Structure learners: a latent graph from node features and the given graph.

Each finds up to k neighbours of every node and scores them. Gradients of the scores reach the
learner.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyphily.methods.fedhero.neighbours import Neighbours
from polyphily.methods.fedhero.search import nearest, strongest
from polyphily.nn.layers import GCNConv, Linear, glorot
from polyphily.nn.sparse import SparseMatrix
from polyphily.nn.stacked import StackedGraph

TINY = 1e-24


def inverse_root(squares: Tensor) -> Tensor:
    """Compute 1/sqrt, and 0 at 0: the cosine with a zero vector is 0 and has no gradient."""
    return torch.where(squares > TINY, squares.clamp(min=TINY).rsqrt(), 0)


def unit(x: Tensor) -> Tensor:
    """Divide vectors, in the last axis, by their norm."""
    return x * inverse_root(x.square().sum(dim=-1, keepdim=True))


class StructureLearner(nn.Module, ABC):
    """A one-layer GNN that embeds nodes on the given graph, and a comparison of pairs of them.

    Args:
        inputs: width of the features.
        outputs: width of the embeddings.
        heads: how many comparisons are averaged, if the learner averages.
    """

    encoder: nn.Module

    def __init__(self, inputs: int, outputs: int, heads: int) -> None:
        super().__init__()
        self.encoder = GCNConv(inputs, outputs)

    def forward(
        self, graph: StackedGraph, k: int, known: Neighbours | None = None, *, scored: bool = True
    ) -> tuple[Neighbours, Tensor | None]:
        """Return up to `k` neighbours of every node (or those `known`), and scores `[N, k]`."""
        z = self.encoder(graph.x, graph)
        near = Neighbours.of(self.search(z.detach(), graph, k)) if known is None else known
        return near, self.score(z, near, graph) * near.filled if scored else None

    @abstractmethod
    def search(self, z: Tensor, graph: StackedGraph, k: int) -> Tensor:
        """Find the neighbours with the largest scores, `[N, k]`."""

    @abstractmethod
    def score(self, z: Tensor, near: Neighbours, graph: StackedGraph) -> Tensor:
        """Compute the scores of given neighbours, `[N, k]`."""


class WeightedCosine(StructureLearner):
    """a_uv = (1/N_H) sum_h cos(w_h^1 ∘ z_u, w_h^2 ∘ z_v), Eq. (3).

    The head vectors start near one, so that the first latent graph joins similar nodes.
    """

    def __init__(self, inputs: int, outputs: int, heads: int) -> None:
        super().__init__(inputs, outputs, heads)
        self.left = nn.Parameter(torch.empty(1, heads, outputs).uniform_(0.5, 1.5))
        self.right = nn.Parameter(torch.empty(1, heads, outputs).uniform_(0.5, 1.5))

    def search(self, z: Tensor, graph: StackedGraph, k: int) -> Tensor:
        owner, mine = graph.segments.owner, z.unsqueeze(1)
        left, right = (unit(mine * w[owner]).flatten(1) for w in (self.left, self.right))
        return nearest(left, right, graph.segments, k)

    def score(self, z: Tensor, near: Neighbours, graph: StackedGraph) -> Tensor:
        # <w1 ∘ z_u, w2 ∘ z_v> = sum_d (w1 w2)_d z_ud z_vd: neighbours are gathered once.
        squares = torch.cat([self.left, self.right], dim=1).square().transpose(1, 2)
        left, right = inverse_root(graph.segments.matmul(z.square(), squares)).chunk(2, dim=1)
        products = near.products(z, z, (self.left * self.right, graph.segments))
        return (products * left.unsqueeze(1) * near.gather(right)).mean(dim=2)


class Cosine(StructureLearner):
    """a_uv = cos(z_u, z_v); no parameters beside the embedding."""

    def search(self, z: Tensor, graph: StackedGraph, k: int) -> Tensor:
        x = unit(z)
        return nearest(x, x, graph.segments, k)

    def score(self, z: Tensor, near: Neighbours, graph: StackedGraph) -> Tensor:
        x = unit(z)
        return near.products(x, x)


class Attention(StructureLearner):
    """a_uv = sigmoid(<W_q z_u, W_k z_v> / sqrt(d)): scaled dot products over all pairs."""

    def __init__(self, inputs: int, outputs: int, heads: int) -> None:
        super().__init__(inputs, outputs, heads)
        self.query = glorot((outputs, outputs), outputs, outputs)
        self.key = glorot((outputs, outputs), outputs, outputs)

    def search(self, z: Tensor, graph: StackedGraph, k: int) -> Tensor:
        query, key = (graph.segments.matmul(z, w) for w in (self.query, self.key))
        return nearest(query, key, graph.segments, k)

    def score(self, z: Tensor, near: Neighbours, graph: StackedGraph) -> Tensor:
        query, key = (graph.segments.matmul(z, w) for w in (self.query, self.key))
        return (near.products(query, key) / math.sqrt(z.shape[1])).sigmoid()


class GAug(StructureLearner):
    """a_uv = p sigmoid(<z_u, z_v>) + (1-p) A_uv, after GAug (Zhao et al. 2021).

    This is GAug's edge predictor and its mixture with the given graph. Its edge-prediction loss is
    left out, because FedHERO trains every learner with its own loss.
    """

    predicted = 0.5

    def search(self, z: Tensor, graph: StackedGraph, k: int) -> Tensor:
        edges = graph.edges

        def mix(scores: Tensor, first: int, last: int, column: int) -> Tensor:
            scores = self.predicted * scores.sigmoid()
            mine = slice(int(edges.crow[first]), int(edges.crow[last]))
            rows, columns = edges.row[mine] - first, edges.col_long[mine] - column
            scores[rows, columns] += 1 - self.predicted
            return scores

        return nearest(z, z, graph.segments, k, mix)

    def score(self, z: Tensor, near: Neighbours, graph: StackedGraph) -> Tensor:
        predicted = near.products(z, z).sigmoid()
        given = is_edge(graph.edges, near.index).to(z.dtype)
        return self.predicted * predicted + (1 - self.predicted) * given


class GATScores(StructureLearner):
    """Graph attention on the given edges: mean over heads of softmax_v LeakyReLU(s_u + t_v).

    The softmax is over the neighbours that are kept: all of them if a node has at most k.
    """

    def __init__(self, inputs: int, outputs: int, heads: int) -> None:
        super().__init__(inputs, outputs, heads)
        self.target = glorot((outputs, heads), outputs, heads)
        self.source = glorot((outputs, heads), outputs, heads)

    def search(self, z: Tensor, graph: StackedGraph, k: int) -> Tensor:
        edges = graph.edges
        target, source = (graph.segments.matmul(z, w) for w in (self.target, self.source))
        score = F.leaky_relu(target[edges.row] + source[edges.col_long], 0.2)
        return strongest(edges, edges.softmax(score).mean(dim=1), graph.segments, k)

    def score(self, z: Tensor, near: Neighbours, graph: StackedGraph) -> Tensor:
        target, source = (graph.segments.matmul(z, w) for w in (self.target, self.source))
        score = F.leaky_relu(target.unsqueeze(1) + near.gather(source), 0.2)
        return softmax_over(score, near.filled).mean(dim=2)


class GLCN(StructureLearner):
    """softmax_v ReLU(a · |z_u - z_v|) on the given edges, z = P x, after GLCN (Jiang et al. 2019).

    The softmax is over the neighbours that are kept: all of them if a node has at most k.
    """

    def __init__(self, inputs: int, outputs: int, heads: int) -> None:
        super().__init__(inputs, outputs, heads)
        self.encoder = Linear(inputs, outputs, bias=False)
        self.compare = glorot((outputs, 1), outputs, 1)

    def search(self, z: Tensor, graph: StackedGraph, k: int) -> Tensor:
        edges = graph.edges
        compare = graph.segments.expand(self.compare.detach()).squeeze(2)
        score = (compare[edges.row] * (z[edges.row] - z[edges.col_long]).abs()).sum(dim=1).relu()
        return strongest(edges, score, graph.segments, k)

    def score(self, z: Tensor, near: Neighbours, graph: StackedGraph) -> Tensor:
        difference = (z.unsqueeze(1) - near.gather(z)).abs()
        score = (difference @ graph.segments.expand(self.compare)).relu()
        return softmax_over(score, near.filled).squeeze(2)


def softmax_over(score: Tensor, filled: Tensor) -> Tensor:
    """Compute the softmax over existing neighbours, `[N, k, h]`; zero for other entries."""
    empty = ~filled.unsqueeze(2)
    isolated = empty.all(dim=1, keepdim=True)
    masked = score.masked_fill(empty & ~isolated, -torch.inf)
    return masked.softmax(dim=1).masked_fill(empty, 0)


def is_edge(edges: SparseMatrix, index: Tensor) -> Tensor:
    """Return whether each pair (u, index[u, j]) is an edge, `[N, k]`."""
    if edges.nnz == 0:
        return torch.zeros_like(index, dtype=torch.bool)
    nodes = edges.shape[0]
    known = edges.row * nodes + edges.col_long
    asked = torch.arange(nodes, device=index.device).unsqueeze(1) * nodes + index
    place = torch.searchsorted(known, asked).clamp(max=len(known) - 1)
    return known[place] == asked


LEARNERS: dict[str, type[StructureLearner]] = {
    "weighted-cosine": WeightedCosine,
    "cosine": Cosine,
    "attention": Attention,
    "gat": GATScores,
    "glcn": GLCN,
    "gaug": GAug,
}
