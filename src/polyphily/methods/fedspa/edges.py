"""Kinds of edges: between nodes of the same class, of different classes, or unknown."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from polyphily.nn import kernels
from polyphily.nn.segments import Piece, Segments
from polyphily.nn.sparse import SparseMatrix
from polyphily.nn.stacked import StackedGraph

HET, HOM, UNKNOWN = 0, 1, 2
CACHED = 1 << 17  # numbers of a block of inputs, few enough for the cache


class KindSums:
    """Sums over the neighbours of a node by kind of edge (equation 6).

    Few edges are of a known kind if few labels are known. So sums over unknown edges are sums over
    all edges without those of known ones.

    Attributes:
        edges: the pattern of all edges, symmetric, all ones.
        hom: that of homophilic edges.
        het: that of heterophilic edges.
    """

    edges: SparseMatrix
    hom: SparseMatrix
    het: SparseMatrix

    def sum(self, hom: Tensor, het: Tensor, alpha: Tensor) -> Tensor:
        """Compute equation 6 without the node itself, for messages of the two channels.

        Equation 5 mixes parameters, theta_unk = alpha theta_hom + (1 - alpha) theta_het. For linear
        maps this equals mixing the messages at the centre node, which needs no weights per node.
        """
        both = torch.cat([hom, het], dim=1)
        near_hom, near_het = self.hom @ both, self.het @ both
        unknown = (self.edges @ both - near_hom - near_het).chunk(2, dim=1)
        known = near_hom.chunk(2, dim=1)[0] + near_het.chunk(2, dim=1)[1]
        return known + alpha * unknown[0] + (1 - alpha) * unknown[1]

    def sum_inputs(
        self,
        x: Tensor,
        everything: Tensor,
        alpha: Tensor,
        hom: Tensor,
        het: Tensor,
        segments: Segments,
    ) -> Tensor:
        """Compute the same for constant features, summing over neighbours before the weights.

        A weight is the same for all neighbours, so equation 6 may sum first. No gradient has to
        pass the edges then.

        Args:
            x: features `[N, F]`.
            everything: their sums over all neighbours.
            alpha: the harmoniser's output.
            hom: theta_hom of every client, `[K, F, width]`.
            het: theta_het of every client.
            segments: the nodes of each client.
        """
        near = self.hom @ x, self.het @ x, everything
        summed: Tensor = _SumOfInputs.apply(*near, alpha, hom, het, segments)  # type: ignore[no-untyped-call]
        return summed


class _SumOfInputs(torch.autograd.Function):
    """(s_hom + alpha s_unk) theta_hom + (s_het + (1 - alpha) s_unk) theta_het, s constant.

    The gradient of alpha is g · s_unk (theta_hom - theta_het), for gradients g of the result. The
    inputs of the product are computed piece by piece, and once more in the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        near_hom: Tensor,
        near_het: Tensor,
        near: Tensor,
        alpha: Tensor,
        hom: Tensor,
        het: Tensor,
        segments: Segments,
    ) -> Tensor:
        ctx.segments = segments
        ctx.save_for_backward(near_hom, near_het, near, alpha, hom, het)
        weight = torch.cat([hom, het], dim=1)
        out = near.new_empty(len(near), hom.shape[2])
        for rows, clients, own in _pieces(segments, near):
            inputs, _ = _inputs(near_hom[rows], near_het[rows], near[rows], alpha[rows])
            out[rows] = own.matmul(inputs, weight[clients])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        near_hom, near_het, near, alpha, hom, het = ctx.saved_tensors
        grad = grad.contiguous()
        to_alpha = torch.empty_like(alpha) if ctx.needs_input_grad[3] else None
        apart = (hom - het).mT
        to_weights = torch.zeros_like(torch.cat([hom, het], dim=1))
        for rows, clients, own in _pieces(ctx.segments, near):
            inputs, unknown = _inputs(near_hom[rows], near_het[rows], near[rows], alpha[rows])
            to_weights[clients] += own.gradient(inputs, grad[rows])
            if to_alpha is not None:
                back = own.matmul(grad[rows], apart[clients])
                torch.sum(back.mul_(unknown), dim=1, keepdim=True, out=to_alpha[rows])
        to_hom, to_het = to_weights.chunk(2, dim=1)
        return None, None, None, to_alpha, to_hom, to_het, None


def _pieces(segments: Segments, x: Tensor) -> tuple[Piece, ...]:
    return segments.pieces(max(1, CACHED // max(x.shape[1], 1)))


def _inputs(
    near_hom: Tensor, near_het: Tensor, near: Tensor, alpha: Tensor
) -> tuple[Tensor, Tensor]:
    """Return [s_hom + alpha s_unk, s_het + (1 - alpha) s_unk] and s_unk at some nodes."""
    width = near.shape[1]
    unknown = (near - near_hom).sub_(near_het)
    inputs = unknown.new_empty(len(unknown), 2 * width)
    torch.addcmul(near_hom, alpha, unknown, out=inputs[:, :width])
    torch.sub(near, inputs[:, :width], out=inputs[:, width:])  # both sum to that of all edges
    return inputs, unknown


@dataclass(frozen=True)
class EdgeKinds(KindSums):
    """The adjacency pattern with a kind for every edge, the same for its reverse.

    Attributes:
        edges: the pattern, symmetric, all ones.
        kind: of every entry, int8.
        moving: whether the kinds are used in a single step. On a GPU a pattern is then stored as
            zeros and ones at all edges, so that the host need not wait for the number of edges
            of a kind.
    """

    edges: SparseMatrix
    kind: Tensor
    moving: bool = False

    def of(self, kind: int) -> SparseMatrix:
        """Return the pattern of one kind."""
        chosen = self.kind == kind
        if self.moving and chosen.is_cuda:
            return mark(self.edges, chosen, torch.float32)
        return _select(self.edges, chosen)

    @cached_property
    def hom(self) -> SparseMatrix:  # type: ignore[override]
        return self.of(HOM)

    @cached_property
    def het(self) -> SparseMatrix:  # type: ignore[override]
        return self.of(HET)

    @cached_property
    def unknown(self) -> SparseMatrix:
        return self.of(UNKNOWN)

    def sum(self, hom: Tensor, het: Tensor, alpha: Tensor) -> Tensor:
        """Compute the same, by a kernel if there is one."""
        if all(map(kernels.available, (hom, het, alpha))):
            edges = self.edges
            return kernels.sum_by_kind(edges.crow, edges.col, self.kind, hom, het, alpha)
        return super().sum(hom, het, alpha)

    def visible(self, nodes: Tensor) -> VisibleKinds:
        """Return the kinds if only the labels of some nodes are known, given as a mask."""

        def between(edges: SparseMatrix) -> SparseMatrix:
            return _select(edges, nodes[edges.row] & nodes[edges.col_long])

        return VisibleKinds(self.edges, between(self.hom), between(self.het))


@dataclass(frozen=True)
class VisibleKinds(KindSums):
    """The kinds of edges in a step that hides labels: fewer edges have a known kind."""

    edges: SparseMatrix
    hom: SparseMatrix
    het: SparseMatrix


def edge_kinds(graph: StackedGraph, labels: Tensor, *, moving: bool = False) -> EdgeKinds:
    """Return the kinds of all edges; `labels` are -1 where unknown (equation 4)."""
    of_row, of_col = labels[graph.edges.row], labels[graph.edges.col_long]
    known = (of_row >= 0) & (of_col >= 0)
    kind = torch.where(known, of_row == of_col, UNKNOWN).to(torch.int8)
    return EdgeKinds(graph.edges, kind, moving)


def mark(edges: SparseMatrix, chosen: Tensor, dtype: torch.dtype) -> SparseMatrix:
    """Return a symmetric pattern with ones at the chosen edges and zeros elsewhere."""
    value = chosen.to(dtype)
    return replace(edges, value=value, value_t=value)


def _select(edges: SparseMatrix, chosen: Tensor) -> SparseMatrix:
    """Return the chosen edges of a symmetric pattern; an edge is chosen with its reverse."""
    before = torch.cat([chosen.new_zeros(1, dtype=torch.int64), chosen.cumsum(0)])
    crow = before[edges.crow.long()].int()
    col = edges.col[chosen]
    reverse = before[edges.permutation[chosen]]  # the new place of each chosen entry's reverse
    return SparseMatrix(edges.shape, crow, col, crow, col, reverse)
