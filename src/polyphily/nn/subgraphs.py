"""A cohort seen through weights on its edges: any backbone runs on it, gradients reach the weights.

Every backbone reads the graph through a few operators of the cohort; a `Subgraph` replaces these by
their weighted forms and passes everything else through. Self-loops have weight 1.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from polyphily.nn.sparse import SparseMatrix

if TYPE_CHECKING:
    from polyphily.core.cohort import Cohort


class Subgraph:
    """The cohort's graph with adjacency A ⊙ Ω.

    Args:
        cohort: the clients' graphs.
        weight: the entries of Ω at `cohort.edges`, `[nnz]`.
    """

    def __init__(self, cohort: Cohort, weight: Tensor) -> None:
        self.cohort, self.weight = cohort, weight

    @classmethod
    def of(cls, cohort: Cohort, weight: Tensor) -> Cohort:
        """The subgraph as backbones take it."""
        return cast("Cohort", cls(cohort, weight))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cohort, name)

    @cached_property
    def _weight_with_loops(self) -> Tensor:
        """The entries of A ⊙ Ω + I at `cohort.edges_with_loops`."""
        pattern = self.cohort.edges_with_loops
        between = self.cohort.once("subgraph/entries between two nodes", _off_diagonal)
        return self.weight.new_ones(pattern.nnz).index_put((between,), self.weight)

    @cached_property
    def _degree_with_loops(self) -> Tensor:
        return self.cohort.edges_with_loops.sum_by_row(self._weight_with_loops)

    @cached_property
    def gcn(self) -> SparseMatrix:
        """D^-1/2 (A ⊙ Ω + I) D^-1/2, D the weighted degrees with the loop."""
        pattern, scale = self.cohort.edges_with_loops, self._degree_with_loops.rsqrt()
        value = self._weight_with_loops * pattern.at_rows(scale) * pattern.at_cols(scale)
        return pattern.with_value(value)

    @cached_property
    def random_walk(self) -> SparseMatrix:
        """D^-1 (A ⊙ Ω + I)."""
        pattern, scale = self.cohort.edges_with_loops, self._degree_with_loops.reciprocal()
        return pattern.with_value(self._weight_with_loops * pattern.at_rows(scale))

    @cached_property
    def mean(self) -> SparseMatrix:
        """Weighted messages over the number of neighbours: a mean by weights would not feel weights
        that are all small."""
        plain = self.cohort.mean
        assert plain.value is not None
        return plain.with_value(plain.value * self.weight)

    @cached_property
    def edges_with_loops(self) -> SparseMatrix:
        """The pattern, its softmax weighted (graph attention)."""
        attention = WeightedAttention(self.cohort.edges_with_loops, self._weight_with_loops)
        return cast(SparseMatrix, attention)


class WeightedAttention:
    """A pattern whose softmax over a row is ω e^s / sum ω e^s."""

    def __init__(self, pattern: SparseMatrix, weight: Tensor) -> None:
        self.pattern, self.weight = pattern, weight.unsqueeze(1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pattern, name)

    def softmax(self, score: Tensor) -> Tensor:
        attention = self.pattern.softmax(score) * self.weight
        total = self.pattern.sum_by_row(attention).clamp(min=1e-12)
        return attention / self.pattern.at_rows(total)


def _off_diagonal(cohort: Cohort) -> Tensor:
    """Where the entries of `edges` lie among those of `edges_with_loops`."""
    pattern = cohort.edges_with_loops
    return torch.nonzero(pattern.row != pattern.col_long).view(-1)
