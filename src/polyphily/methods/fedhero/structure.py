"""Structure learners: a latent graph from node features and the given graph.

Each finds up to k neighbours of every node and scores them, or scores all pairs in blocks.
Gradients of the scores reach the learner.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyphily.methods.fedhero.neighbours import Neighbours
from polyphily.methods.fedhero.sampled import PairScores
from polyphily.methods.fedhero.search import Block, nearest, strongest
from polyphily.nn.layers import GCNConv, Linear, glorot
from polyphily.nn.sparse import SparseMatrix, full
from polyphily.nn.stacked import StackedGraph

TINY = 1e-24
COLUMNS = 64  # pairs of a node that `link_scores` holds at a time


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
        if known is None:
            with torch.no_grad():
                known = Neighbours.of(self.search(z, graph, k))
        return known, self.score(z, known, graph) * known.filled if scored else None

    def link_scores(self, graph: StackedGraph, candidates: StackedGraph) -> Tensor:
        """Compute the scores of the pairs in `candidates.edges`, `[nnz]` (`polyphily audit`)."""
        z: Tensor = self.encoder(graph.x, graph)
        edges = candidates.edges
        nodes, found = torch.arange(len(z), device=z.device), z.new_zeros(edges.nnz)
        place = torch.arange(edges.nnz, device=z.device) - edges.crow[edges.row]
        for chosen in (torch.nonzero(place // COLUMNS == b).view(-1) for b in range(edges.nnz)):
            if not len(chosen):
                break
            row, column = edges.row[chosen], place[chosen] % COLUMNS
            index = nodes.unsqueeze(1).repeat(1, COLUMNS)
            index[row, column] = edges.col_long[chosen]
            found[chosen] = self.score(z, Neighbours.of(index), graph)[row, column]
        return found

    @abstractmethod
    def search(self, z: Tensor, graph: StackedGraph, k: int) -> Tensor:
        """Find the neighbours with the largest scores, `[N, k]`."""

    @abstractmethod
    def score(self, z: Tensor, near: Neighbours, graph: StackedGraph) -> Tensor:
        """Compute the scores of given neighbours, `[N, k]`."""

    @abstractmethod
    def pairs(self, graph: StackedGraph) -> PairScores:
        """Return the function that scores all pairs of a block.

        It holds tensors and no module: the backward pass calls it after the network has returned.
        """


# Learners over all pairs -------------------------------------------------------------------------


class PairLearner(StructureLearner):
    """A learner that scores all pairs of nodes, by products of two vectors of each node."""

    @abstractmethod
    def vectors(self, z: Tensor, graph: StackedGraph) -> tuple[Tensor, Tensor]:
        """Compute the vectors of nodes as the first and as the second of a pair, `[N, d]` each."""

    def from_products(self, products: Tensor, block: Block, graph: StackedGraph) -> Tensor:
        """Compute the scores of a block from its products; uses no parameter."""
        return products

    def search(self, z: Tensor, graph: StackedGraph, k: int) -> Tensor:
        return nearest(*self.vectors(z, graph), graph.segments, k)

    def pairs(self, graph: StackedGraph) -> PairScores:
        left, right = map(full, self.vectors(self.encoder(graph.x, graph), graph))
        return lambda block: self.from_products(
            left[block.rows] @ right[block.nodes].T, block, graph
        )


class WeightedCosine(PairLearner):
    """a_uv = (1/N_H) sum_h cos(w_h^1 ∘ z_u, w_h^2 ∘ z_v), Eq. (3).

    The head vectors start near one, so that the first latent graph joins similar nodes.
    """

    def __init__(self, inputs: int, outputs: int, heads: int) -> None:
        super().__init__(inputs, outputs, heads)
        self.heads = heads
        self.left = nn.Parameter(torch.empty(1, heads, outputs).uniform_(0.5, 1.5))
        self.right = nn.Parameter(torch.empty(1, heads, outputs).uniform_(0.5, 1.5))

    def vectors(self, z: Tensor, graph: StackedGraph) -> tuple[Tensor, Tensor]:
        owner, mine = graph.segments.owner, z.unsqueeze(1)
        left, right = (unit(mine * w[owner]).flatten(1) for w in (self.left, self.right))
        return left, right

    def from_products(self, products: Tensor, block: Block, graph: StackedGraph) -> Tensor:
        return products / self.heads

    def score(self, z: Tensor, near: Neighbours, graph: StackedGraph) -> Tensor:
        # <w1 ∘ z_u, w2 ∘ z_v> = sum_d (w1 w2)_d z_ud z_vd: neighbours are gathered once.
        squares = torch.cat([self.left, self.right], dim=1).square().transpose(1, 2)
        left, right = inverse_root(graph.segments.matmul(z.square(), squares)).chunk(2, dim=1)
        products = near.products(z, z, (self.left * self.right, graph.segments))
        return (products * left.unsqueeze(1) * near.gather(right)).mean(dim=2)


class Cosine(PairLearner):
    """a_uv = cos(z_u, z_v); no parameters beside the embedding."""

    def vectors(self, z: Tensor, graph: StackedGraph) -> tuple[Tensor, Tensor]:
        x = unit(z)
        return x, x

    def score(self, z: Tensor, near: Neighbours, graph: StackedGraph) -> Tensor:
        return near.products(*self.vectors(z, graph))


class Attention(PairLearner):
    """a_uv = sigmoid(<W_q z_u, W_k z_v> / sqrt(d)): scaled dot products over all pairs."""

    def __init__(self, inputs: int, outputs: int, heads: int) -> None:
        super().__init__(inputs, outputs, heads)
        self.scale = 1 / math.sqrt(outputs)
        self.query = glorot((outputs, outputs), outputs, outputs)
        self.key = glorot((outputs, outputs), outputs, outputs)

    def vectors(self, z: Tensor, graph: StackedGraph) -> tuple[Tensor, Tensor]:
        query, key = (graph.segments.matmul(z, w) for w in (self.query, self.key))
        return query, key

    def from_products(self, products: Tensor, block: Block, graph: StackedGraph) -> Tensor:
        return (products * self.scale).sigmoid()

    def score(self, z: Tensor, near: Neighbours, graph: StackedGraph) -> Tensor:
        return (near.products(*self.vectors(z, graph)) * self.scale).sigmoid()


class GAug(PairLearner):
    """a_uv = p sigmoid(<z_u, z_v>) + (1-p) A_uv, after GAug (Zhao et al. 2021).

    This is GAug's edge predictor and its mixture with the given graph. Its edge-prediction loss is
    left out, because FedHERO trains every learner with its own loss.
    """

    predicted = 0.5

    def vectors(self, z: Tensor, graph: StackedGraph) -> tuple[Tensor, Tensor]:
        return z, z

    def from_products(self, products: Tensor, block: Block, graph: StackedGraph) -> Tensor:
        scores = self.predicted * products.sigmoid()
        _, rows, columns = entries_of(block, graph)
        scores[rows, columns] += 1 - self.predicted
        return scores

    def search(self, z: Tensor, graph: StackedGraph, k: int) -> Tensor:
        return nearest(
            *self.vectors(z, graph),
            graph.segments,
            k,
            lambda products, block: self.from_products(products, block, graph),
        )

    def score(self, z: Tensor, near: Neighbours, graph: StackedGraph) -> Tensor:
        _, given = entries_at(near.index, graph.edges)
        predicted = near.products(*self.vectors(z, graph)).sigmoid()
        return self.predicted * predicted + (1 - self.predicted) * given.to(z.dtype)


# Learners on the given edges ---------------------------------------------------------------------


class EdgeLearner(StructureLearner):
    """A learner that scores the given edges; other pairs have score 0 and are no latent edges."""

    @abstractmethod
    def on_edges(self, z: Tensor, graph: StackedGraph) -> Tensor:
        """Compute the scores of all given edges, `[edges]`."""

    def search(self, z: Tensor, graph: StackedGraph, k: int) -> Tensor:
        return strongest(graph.edges, self.on_edges(z, graph), graph.segments, k)

    def score(self, z: Tensor, near: Neighbours, graph: StackedGraph) -> Tensor:
        place, given = entries_at(near.index, graph.edges)
        padded = torch.cat([self.on_edges(z, graph), z.new_zeros(1)])
        return padded[torch.where(given, place, graph.edges.nnz)]

    def pairs(self, graph: StackedGraph) -> PairScores:
        score = self.on_edges(self.encoder(graph.x, graph), graph)

        def scores(block: Block) -> Tensor:
            mine, rows, columns = entries_of(block, graph)
            shape = block.rows.stop - block.rows.start, block.nodes.stop - block.nodes.start
            return score.new_zeros(shape).index_put((rows, columns), score[mine])

        return scores


class GATScores(EdgeLearner):
    """Graph attention on the given edges: mean over heads of softmax_v LeakyReLU(s_u + t_v)."""

    def __init__(self, inputs: int, outputs: int, heads: int) -> None:
        super().__init__(inputs, outputs, heads)
        self.target = glorot((outputs, heads), outputs, heads)
        self.source = glorot((outputs, heads), outputs, heads)

    def on_edges(self, z: Tensor, graph: StackedGraph) -> Tensor:
        edges = graph.edges
        target, source = (graph.segments.matmul(z, w) for w in (self.target, self.source))
        score = F.leaky_relu(edges.at_rows(target) + edges.at_cols(source), 0.2)
        return edges.softmax(score).mean(dim=1)


class GLCN(EdgeLearner):
    """softmax_v ReLU(a · |z_u - z_v|) on the given edges, z = P x, after GLCN (Jiang et al. 2019).

    Its own regulariser is left out, because FedHERO trains every learner with Eq. (8).
    """

    def __init__(self, inputs: int, outputs: int, heads: int) -> None:
        super().__init__(inputs, outputs, heads)
        self.encoder = Linear(inputs, outputs, bias=False)
        self.compare = glorot((outputs, 1), outputs, 1)

    def on_edges(self, z: Tensor, graph: StackedGraph) -> Tensor:
        edges = graph.edges
        compare = edges.at_rows(graph.segments.expand(self.compare).squeeze(2))
        difference = (edges.at_rows(z) - edges.at_cols(z)).abs()
        score = (compare * difference).sum(dim=1, keepdim=True).relu()
        return edges.softmax(score).squeeze(1)


# Given edges among pairs -------------------------------------------------------------------------


def entries_at(index: Tensor, edges: SparseMatrix) -> tuple[Tensor, Tensor]:
    """Find the pairs (u, index[u, j]) among edges: their entries, and whether they are edges.

    Both are `[N, k]`. An entry is meaningless if the pair is no edge.
    """
    if edges.nnz == 0:
        return torch.zeros_like(index), torch.zeros_like(index, dtype=torch.bool)
    nodes = edges.shape[0]
    known = edges.row * nodes + edges.col_long
    asked = torch.arange(nodes, device=index.device).unsqueeze(1) * nodes + index
    place = torch.searchsorted(known, asked).clamp(max=len(known) - 1)
    return place, known[place] == asked


def entries_of(block: Block, graph: StackedGraph) -> tuple[slice, Tensor, Tensor]:
    """Return the given edges of a block: their entries, and their rows and columns in it."""
    edges = graph.edges
    starts = graph.cached("fedhero: edge starts", lambda whole: whole.edges.crow.tolist())
    mine = slice(starts[block.rows.start], starts[block.rows.stop])
    return mine, edges.row[mine] - block.rows.start, edges.col_long[mine] - block.nodes.start


LEARNERS: dict[str, type[StructureLearner]] = {
    "weighted-cosine": WeightedCosine,
    "cosine": Cosine,
    "attention": Attention,
    "gat": GATScores,
    "glcn": GLCN,
    "gaug": GAug,
}
