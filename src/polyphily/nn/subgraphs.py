"""A stacked graph with weights on its edges, on which any backbone runs.

Backbones read a graph through a few operators. A `Subgraph` replaces these by their weighted forms
and passes everything else through. Gradients reach the weights. Self-loops have weight 1. If the
edges of the graph have weights already, both are multiplied.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from polyphily.nn.sparse import SparseMatrix, full, multiply, products_at_entries
from polyphily.nn.stacked import GraphView, StackedGraph


class Subgraph(GraphView):
    """A stacked graph with adjacency A ⊙ Ω, where A has the weights of the graph's edges, if any.

    `edges`, `edges_with_loops` and `degrees` remain those of A.

    Args:
        graph: the graph with adjacency A.
        weight: the entries of Ω at `graph.edges`, `[nnz]`.
        symmetric: whether Ω is known to be symmetric.
    """

    def __init__(self, graph: StackedGraph, weight: Tensor, *, symmetric: bool = False) -> None:
        super().__init__(graph)
        given = graph.link_weights
        self.weight = weight if given is None else weight * given
        self.symmetric = symmetric and given is None

    @property
    def link_weights(self) -> Tensor:
        return self.weight

    @cached_property
    def _weight_with_loops(self) -> Tensor:
        """The entries of A ⊙ Ω + I at `edges_with_loops`."""
        between, source = self.cached("subgraph/entries between two nodes", _off_diagonal)
        entries: Tensor = _WithLoops.apply(self.weight, between, source)  # type: ignore[no-untyped-call]
        return entries

    @cached_property
    def _degree_with_loops(self) -> Tensor:
        return self.edges_with_loops.sum_by_row(self._weight_with_loops)

    @cached_property
    def gcn(self) -> Normalised:
        """D^-1/2 (A ⊙ Ω + I) D^-1/2, where D are the weighted degrees with the loop."""
        return Normalised(
            self.edges_with_loops,
            self._weight_with_loops,
            self._degree_with_loops.rsqrt(),
            symmetric=self.symmetric,
        )

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


class Normalised:
    """diag(s) W diag(s), for products that pass gradients to W and s; a `Propagation`.

    Args:
        pattern: the entries of W.
        weight: their values, `[nnz]`.
        scale: s, positive, `[N]`.
        symmetric: whether W is known to be symmetric.
    """

    def __init__(
        self, pattern: SparseMatrix, weight: Tensor, scale: Tensor, *, symmetric: bool
    ) -> None:
        self.pattern, self.weight, self.scale = pattern, weight, scale
        self.shape = pattern.shape
        with torch.no_grad():
            self.factor = pattern.at_rows(scale) * pattern.at_cols(scale)
            self.value = weight * self.factor
            self.value_t = (
                self.value if symmetric else self.value.index_select(0, pattern.permutation)
            )

    def __matmul__(self, dense: Tensor) -> Tensor:
        """Return the product with a dense matrix."""
        product: Tensor = _NormalisedProduct.apply(self, self.weight, self.scale, full(dense))  # type: ignore[no-untyped-call]
        return product


class _NormalisedProduct(torch.autograd.Function):
    """V x with V_ij = s_i w_ij s_j.

    Gradients of w are those of V times s_i s_j. As sum_j V_ij g_i·x_j = g_i·(V x)_i, those of s
    need no pass over the entries: s_i ∂s_i = g_i·(V x)_i + x_i·(V^T g)_i.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Normalised, weight: Tensor, scale: Tensor, x: Tensor) -> Tensor:
        pattern = matrix.pattern
        out = multiply(pattern.crow, pattern.col, matrix.value, pattern.shape[0], x)
        ctx.matrix = matrix
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        matrix: Normalised = ctx.matrix
        pattern, (x, out) = matrix.pattern, ctx.saved_tensors
        grad = grad.contiguous()
        to_weight = to_scale = to_x = None
        if any(ctx.needs_input_grad[2:]):
            to_x = multiply(pattern.crow_t, pattern.col_t, matrix.value_t, pattern.shape[1], grad)
        if ctx.needs_input_grad[1]:
            to_weight = products_at_entries(pattern, grad, x).mul_(matrix.factor)
        if ctx.needs_input_grad[2]:
            to_scale = ((grad * out).sum(dim=1) + (x * to_x).sum(dim=1)) / matrix.scale
        return None, to_weight, to_scale, to_x


class _WithLoops(torch.autograd.Function):
    """Puts the weights of edges where they lie among `edges_with_loops`, and ones at loops."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, between: Tensor, source: Tensor) -> Tensor:
        ctx.between = between
        return torch.cat([weight, weight.new_ones(1)]).index_select(0, source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.between), None, None


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


def _off_diagonal(graph: StackedGraph) -> tuple[Tensor, Tensor]:
    """Return where the entries of `edges` lie among those of `edges_with_loops`, and the reverse.

    In the reverse, loops have the number of edges.
    """
    pattern = graph.edges_with_loops
    between = torch.nonzero(pattern.row != pattern.col_long).view(-1)
    source = torch.full_like(pattern.col, len(between))
    source[between] = torch.arange(len(between), device=source.device, dtype=source.dtype)
    return between.int(), source


def _inverse_degrees(graph: StackedGraph) -> Tensor:
    """Return one over the sum of the weights of its target's edges, for every edge."""
    weights = graph.link_weights
    if weights is not None:
        return graph.edges.sum_by_row(weights).reciprocal()[graph.edges.row]
    return graph.degrees.clamp(min=1).reciprocal()[graph.edges.row]
