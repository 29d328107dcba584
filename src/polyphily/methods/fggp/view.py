"""The second view of a graph: candidate pairs of nodes, and a graph drawn among them.

A' joins the given edges, the nearest nodes by embedding, and self-loops. The paper scores all pairs
of nodes. Here A' is scored and a sample of other pairs, so that no matrix over pairs is needed. The
number of entries depends on nothing but the client's sizes: a pair that occurs twice keeps its
place and is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from polyphily.core.messages import Message
from polyphily.methods.fedath.network import edge_segments
from polyphily.methods.fedhero.latent import straight_through
from polyphily.methods.fedhero.search import nearest
from polyphily.nn.segments import Segments
from polyphily.nn.sparse import SparseMatrix, full
from polyphily.nn.stacked import GraphView, StackedGraph
from polyphily.nn.subgraphs import WeightedAttention

LOOP, EDGE, OTHER, REPEATED = 0, 1, 2, 3  # kinds of entries; edges are those of A'
STARTS, COLS, REVERSE, KINDS = "pairs/starts", "pairs/cols", "pairs/reverse", "pairs/kinds"


@dataclass(frozen=True)
class Candidates:
    """Pairs of nodes, in both directions, sorted by row and then column.

    Attributes:
        pattern: the pairs; some occur several times.
        kind: of every entry, `[nnz]`: `LOOP`, `EDGE`, `OTHER`, or `REPEATED` if it is not the first
            entry of its pair.
        segments: the entries of each client.
        nodes: the nodes of each client.
        dtype: of weights.
    """

    pattern: SparseMatrix
    kind: Tensor
    segments: Segments
    nodes: Segments
    dtype: torch.dtype

    @classmethod
    def of(cls, pairs: Mapping[str, Tensor], graph: StackedGraph, per_node: int) -> Candidates:
        """Return the pairs of `candidate_pairs`, of which each node added `per_node`."""

        def entries(whole: StackedGraph) -> Segments:
            edges = edge_segments(whole).sizes
            own = zip(whole.segments.sizes, edges, strict=True)
            counts = tuple((1 + 2 * per_node) * n + e for n, e in own)
            return Segments(counts, whole.device)

        starts, cols, reverse = pairs[STARTS], pairs[COLS], pairs[REVERSE]
        pattern = SparseMatrix(
            shape=(graph.num_nodes, graph.num_nodes),
            crow=starts,
            col=cols,
            crow_t=starts,  # every pair is there in both directions
            col_t=cols,
            permutation=reverse,
        )
        segments = graph.cached(("fggp/entries of each client", per_node), entries)
        return cls(pattern, pairs[KINDS], segments, graph.segments, graph.dtype)

    @cached_property
    def known(self) -> Tensor:
        """One at the entries of A', zero elsewhere."""
        return (self.kind <= EDGE).to(self.dtype)

    @cached_property
    def other(self) -> Tensor:
        """One at the pairs outside A', zero elsewhere."""
        return (self.kind == OTHER).to(self.dtype)

    def normalised(self, weight: Tensor) -> SparseMatrix:
        """Return D^-1/2 W D^-1/2 for weights W at the entries, loops included."""
        degree = self.pattern.sum_by_row(weight)
        scale = torch.where(degree > 0, degree, 1).rsqrt()
        return self.pattern.with_value(
            weight * self.pattern.at_rows(scale) * self.pattern.at_cols(scale)
        )

    def scores(self, h: Tensor) -> Tensor:
        """Compute h_u · h_v at every entry, `[nnz]`."""
        return self.pattern.products(h, h)

    def mean(self, values: Tensor, chosen: Tensor) -> Tensor:
        """Return each client's mean of values at the chosen entries, `[K]`; zero without any."""
        return self.segments.sum(values * chosen) / self.segments.sum(chosen).clamp(min=1)

    def probabilities(self, h: Tensor, scores: Tensor) -> Tensor:
        """Compute P = L / (2 max L) + A' / 2 at every entry, with L = h_u · h_v.

        The largest of all scores of a client is that of a node with itself. Negative ones are 0.
        """
        own = full(h).square().sum(dim=1).detach()
        largest = own.new_zeros(len(self.nodes)).scatter_reduce(0, self.nodes.owner, own, "amax")
        largest = torch.where(largest > 0, largest, 1)
        return scores.relu() / (2 * self.segments.expand(largest)) + self.known / 2

    def draw(self, probability: Tensor, uniform: Tensor, temperature: float) -> Tensor:
        """Draw a weight of 0 or 1 for every entry, with the gradient of a relaxed Bernoulli.

        Both directions of a pair share a draw. Loops have weight 1, repeated entries 0.

        Args:
            probability: of a one, `[nnz]`.
            uniform: numbers in [0, 1), `[nnz]`.
            temperature: of the relaxation.
        """
        pattern, tiny = self.pattern, 1e-6
        noise = torch.where(pattern.row <= pattern.col_long, uniform, uniform[pattern.permutation])
        noise = noise.to(probability.dtype).clamp(tiny, 1 - tiny)
        chance = probability.clamp(tiny, 1 - tiny)
        soft = ((chance.logit() + noise.logit()) / temperature).sigmoid()
        drawn = straight_through((soft > 0.5).to(soft.dtype), soft)
        between = ((self.kind == EDGE) | (self.kind == OTHER)).to(soft.dtype)
        return drawn * between + (self.kind == LOOP).to(soft.dtype)


def candidate_pairs(
    graph: StackedGraph, embedding: Tensor | None, neighbours: int, others: Tensor
) -> Message:
    """Collect the pairs of A' = A ∪ nearest ∪ I and other pairs, as tensors for `Candidates.of`.

    Args:
        graph: with the edges A.
        embedding: of every node, for the search of the nearest by cosine; None: there are none.
        neighbours: how many nearest nodes.
        others: nodes `[N, m]` of the same client, paired with the node of their row.
    """
    nodes = torch.arange(graph.num_nodes, device=graph.device)
    near = nodes.unsqueeze(1).repeat(1, neighbours)  # a node itself where there is no neighbour
    if embedding is not None:
        unit = F.normalize(full(embedding), dim=1)
        found = nearest(unit, unit, graph.segments, neighbours)
        near[:, : found.shape[1]] = found
    parts = [(nodes, nodes, LOOP), (graph.edges.row, graph.edges.col_long, EDGE)]
    for pairs, kind in ((near, EDGE), (others, OTHER)):
        here = nodes.repeat_interleave(pairs.shape[1], output_size=pairs.numel())
        there = pairs.flatten()
        parts += [(here, there, kind), (there, here, kind)]
    rows = torch.cat([row for row, _, _ in parts])
    cols = torch.cat([col for _, col, _ in parts])
    kinds = torch.cat([torch.full_like(row, kind) for row, _, kind in parts])
    # Stable, so that the first entry of a pair has the lowest kind.
    keys, order = torch.sort(rows * graph.num_nodes + cols, stable=True)
    rows, cols = rows[order], cols[order]
    first = torch.ones_like(keys, dtype=torch.bool)
    first[1:] = keys[1:] != keys[:-1]
    bounds = torch.arange(graph.num_nodes + 1, device=graph.device)
    return {
        STARTS: torch.searchsorted(rows, bounds).int(),
        COLS: cols.int(),
        REVERSE: torch.argsort(cols * graph.num_nodes + rows, stable=True),
        KINDS: torch.where(first, kinds[order], REPEATED),
    }


class DrawnGraph(GraphView):
    """A stacked graph whose edges are weighted candidates, self-loops of weight 1 included.

    Args:
        graph: with features and segments.
        candidates: the pairs.
        weight: of every entry.
    """

    def __init__(self, graph: StackedGraph, candidates: Candidates, weight: Tensor) -> None:
        super().__init__(graph)
        self.candidates, self.weight = candidates, weight

    @cached_property
    def gcn(self) -> SparseMatrix:
        return self.candidates.normalised(self.weight)

    @cached_property
    def random_walk(self) -> SparseMatrix:
        return self._by_row(self.weight)

    @cached_property
    def mean(self) -> SparseMatrix:
        return self._by_row(self.weight * (self.candidates.kind != LOOP))

    @cached_property
    def attention(self) -> WeightedAttention:
        return WeightedAttention(self.candidates.pattern, self.weight)

    def _by_row(self, weight: Tensor) -> SparseMatrix:
        pattern = self.candidates.pattern
        degree = pattern.sum_by_row(weight)
        return pattern.with_value(weight / pattern.at_rows(torch.where(degree > 0, degree, 1)))
