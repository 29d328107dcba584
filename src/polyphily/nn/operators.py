"""Operators of edges with weights or with one direction.

A is the matrix of weights: entry (v, u) is the weight of the edge along which v receives from u,
and there is no entry if v receives nothing. Sums over rows and columns of A are those of the whole
graph, also if only some of its edges are here because neighbours were sampled.
"""

from __future__ import annotations

from copy import copy
from functools import cached_property

import torch
from torch import Tensor

from polyphily.nn.segments import Segments
from polyphily.nn.sparse import SparseMatrix


class Operators:
    """Normalised adjacencies of weighted or directed edges; an `AttendedOperators`.

    Args:
        segments: the nodes of each client.
        edges: the pattern of A.
        with_loops: the pattern of A + I, or that of A again if nodes do not receive from
            themselves.
        weights: the entries of A, `[nnz]`.
        row_sums: the sum of each row of A, `[N]`.
        col_sums: the sum of each column of A, `[N]`.
        counts: how many edges of the whole graph each entry stands for, `[nnz]`; None: one.
    """

    def __init__(
        self,
        segments: Segments,
        edges: SparseMatrix,
        with_loops: SparseMatrix,
        weights: Tensor,
        row_sums: Tensor,
        col_sums: Tensor,
        counts: Tensor | None = None,
    ) -> None:
        self._segments, self.edges, self.with_loops = segments, edges, with_loops
        self.weights = weights if counts is None else weights * counts
        self.loops = with_loops is not edges
        self.row_sums, self.col_sums = row_sums, col_sums

    @property
    def segments(self) -> Segments:
        return self._segments

    def on(self, segments: Segments) -> Operators:
        """Return the same operators for other products per client."""
        found = copy(self)
        found._segments = segments
        return found

    @cached_property
    def _weights_with_loops(self) -> Tensor:
        """The entries of A + I, or of A."""
        if not self.loops:
            return self.weights
        pattern = self.with_loops
        between = torch.nonzero(pattern.row != pattern.col_long).view(-1)
        return self.weights.new_ones(pattern.nnz).index_put((between,), self.weights)

    @cached_property
    def gcn(self) -> SparseMatrix:
        """R^-1/2 (A+I) C^-1/2, where R and C are the sums over rows and columns of A + I."""
        row, col = (
            _inverse(sums + 1 if self.loops else sums).sqrt()
            for sums in (self.row_sums, self.col_sums)
        )
        pattern = self.with_loops
        scale = row[pattern.row] * col[pattern.col_long]
        return pattern.with_value(self._weights_with_loops * scale)

    @cached_property
    def random_walk(self) -> SparseMatrix:
        """R^-1 (A+I), where R are the sums over rows of A + I."""
        scale = _inverse(self.row_sums + 1 if self.loops else self.row_sums)
        pattern = self.with_loops
        return pattern.with_value(self._weights_with_loops * scale[pattern.row])

    @cached_property
    def mean(self) -> SparseMatrix:
        """R^-1 A: the weighted mean over neighbours, zero for a node without any."""
        scale = _inverse(self.row_sums)
        return self.edges.with_value(self.weights * scale[self.edges.row])

    @cached_property
    def attention(self) -> BiasedAttention:
        """A + I as a pattern whose softmax is w e^s / sum w e^s."""
        return BiasedAttention(self.with_loops, self._weights_with_loops)


def _inverse(sums: Tensor) -> Tensor:
    """Return one over every sum, and 0 for the sum of nothing."""
    return torch.where(sums > 0, sums, torch.inf).reciprocal()


class BiasedAttention:
    """An attention pattern that adds log w to the scores: its softmax is w e^s / sum w e^s.

    The weights are data: no gradient reaches them.

    Args:
        pattern: the edges.
        weights: w of every edge, positive, `[nnz]`.
    """

    def __init__(self, pattern: SparseMatrix, weights: Tensor) -> None:
        self.pattern, self.bias = pattern, weights.log().unsqueeze(1)

    def at_rows(self, x: Tensor) -> Tensor:
        return self.pattern.at_rows(x)

    def at_cols(self, x: Tensor) -> Tensor:
        return self.pattern.at_cols(x)

    def softmax(self, score: Tensor) -> Tensor:
        return self.pattern.softmax(score + self.bias)

    def with_value(self, value: Tensor) -> SparseMatrix:
        return self.pattern.with_value(value)
