"""A stacked graph with weights on its edges, on which any backbone runs.

Backbones read a graph through a few operators. A `Subgraph` replaces these by their weighted forms
and passes everything else through. Gradients reach the weights. Self-loops have weight 1. If the
edges of the graph have weights already, both are multiplied.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from polyphily.nn.sparse import SparseMatrix
from polyphily.nn.stacked import GraphView, StackedGraph


class Subgraph(GraphView):
    """A stacked graph with adjacency A ⊙ Ω, where A has the weights of the graph's edges, if any.

    `edges`, `edges_with_loops` and `degrees` remain those of A.

    Args:
        graph: the graph with adjacency A.
        weight: the entries of Ω at `graph.edges`, `[nnz]`.
    """

    def __init__(self, graph: StackedGraph, weight: Tensor) -> None:
        super().__init__(graph)
        given = graph.link_weights
        self.weight = weight if given is None else weight * given

    @property
    def link_weights(self) -> Tensor:
        return self.weight

    @cached_property
    def _weight_with_loops(self) -> Tensor:
        """The entries of A ⊙ Ω + I at `edges_with_loops`."""
        between = self.cached("subgraph/entries between two nodes", _off_diagonal)
        ones = self.weight.new_ones(self.edges_with_loops.nnz)
        return ones.index_put((between,), self.weight)

    @cached_property
    def _degree_with_loops(self) -> Tensor:
        return self.edges_with_loops.sum_by_row(self._weight_with_loops)

    @cached_property
    def gcn(self) -> SparseMatrix:
        """D^-1/2 (A ⊙ Ω + I) D^-1/2, where D are the weighted degrees with the loop."""
        pattern, scale = self.edges_with_loops, self._degree_with_loops.rsqrt()
        value = self._weight_with_loops * pattern.at_rows(scale) * pattern.at_cols(scale)
        return pattern.with_value(value)

    @cached_property
    def random_walk(self) -> SparseMatrix:
        """D^-1 (A ⊙ Ω + I)."""
        pattern, scale = self.edges_with_loops, self._degree_with_loops.reciprocal()
        return pattern.with_value(self._weight_with_loops * pattern.at_rows(scale))

    @cached_property
    def mean(self) -> SparseMatrix:
        """The sum of weighted messages over the number of neighbours, or the sum of A's weights.

        Divided by the sum of Ω instead, it would not change if all of Ω shrink.
        """
        inverse = self.cached("subgraph/inverse degrees at edges", _inverse_degrees)
        return self.edges.with_value(inverse * self.weight)

    @cached_property
    def attention(self) -> WeightedAttention:
        return WeightedAttention(self.edges_with_loops, self._weight_with_loops)


class WeightedAttention:
    """An attention pattern whose softmax over a row is ω e^s / sum ω e^s.

    Args:
        pattern: the edges.
        weight: ω of every edge, `[nnz]`.
    """

    def __init__(self, pattern: SparseMatrix, weight: Tensor) -> None:
        self.pattern, self.weight = pattern, weight.unsqueeze(1)

    def at_rows(self, x: Tensor) -> Tensor:
        return self.pattern.at_rows(x)

    def at_cols(self, x: Tensor) -> Tensor:
        return self.pattern.at_cols(x)

    def softmax(self, score: Tensor) -> Tensor:
        attention = self.pattern.softmax(score) * self.weight
        total = self.pattern.sum_by_row(attention).clamp(min=1e-12)
        return attention / self.pattern.at_rows(total)

    def with_value(self, value: Tensor) -> SparseMatrix:
        return self.pattern.with_value(value)


def _off_diagonal(graph: StackedGraph) -> Tensor:
    """Return where the entries of `edges` lie among those of `edges_with_loops`."""
    pattern = graph.edges_with_loops
    return torch.nonzero(pattern.row != pattern.col_long).view(-1)


def _inverse_degrees(graph: StackedGraph) -> Tensor:
    """Return one over the sum of the weights of its target's edges, for every edge."""
    weights = graph.link_weights
    if weights is not None:
        return graph.edges.sum_by_row(weights).reciprocal()[graph.edges.row]
    return graph.degrees.clamp(min=1).reciprocal()[graph.edges.row]
