"""Neighbours of nodes in latent graphs: products and weighted sums over them.

No step holds a quadratic number of node pairs, and nothing that is kept for the backward pass is
as large as edges times width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from polyphily.nn.segments import Segments
from polyphily.nn.sparse import SparseMatrix, full

NUMBERS, NUMBERS_GPU = 1 << 19, 1 << 24  # numbers in a block: what fits into a cache, or on a GPU

Metrics: TypeAlias = tuple[Tensor, Segments]
"""Diagonal metrics `[K, h, d]` of K clients, and the nodes of each client."""


@dataclass(frozen=True)
class Neighbours:
    """At most `k` neighbours of every node.

    Attributes:
        index: `[N, k]`. A node that has fewer neighbours fills the rest with its own index, because
            no node is its own neighbour.
        order: `[N·k]`, the entries of `index` sorted by value.
        nodes: `[N·k]`, the row of each of those sorted entries.
        starts: `[N + 1]`, where each value begins among them.
    """

    index: Tensor
    order: Tensor
    nodes: Tensor
    starts: Tensor

    @classmethod
    def of(cls, index: Tensor) -> Neighbours:
        """Sort an index `[N, k]`."""
        count, width = index.shape
        values, order = torch.sort(index.flatten().int(), stable=True)
        bounds = torch.arange(count + 1, device=index.device, dtype=torch.int32)
        starts = torch.searchsorted(values, bounds, out_int32=True)
        return cls(index, order, (order.int() // width), starts)

    @cached_property
    def filled(self) -> Tensor:
        """True for entries that are neighbours, `[N, k]`."""
        own = torch.arange(len(self.index), device=self.index.device)
        return self.index != own.unsqueeze(1)

    @cached_property
    def pattern(self) -> SparseMatrix:
        """The entries as a sparse matrix `[N, N]` with `k` of them in every row."""
        count, width = self.index.shape
        device = self.index.device
        return SparseMatrix(
            shape=(count, count),
            crow=torch.arange(0, count * width + 1, width, device=device, dtype=torch.int32),
            col=self.index.flatten().int(),
            crow_t=self.starts,
            col_t=self.nodes,
            permutation=self.order,
        )

    def gather(self, x: Tensor) -> Tensor:
        """Return `x` at every neighbour, `[N, …] -> [N, k, …]`."""
        return self.pattern.at_cols(x).view(*self.index.shape, *x.shape[1:])

    def products(self, left: Tensor, right: Tensor, metrics: Metrics | None = None) -> Tensor:
        """Compute left_u · right_v of each node u and its neighbours v, two `[N, d] -> [N, k]`.

        With h metrics of each client: sum_d m_hd left_ud right_vd, `[N, k, h]`.
        """
        weight, segments = (None, None) if metrics is None else metrics
        found: Tensor = _Products.apply(full(left), full(right), weight, segments, self)  # type: ignore[no-untyped-call]
        return found if metrics is not None else found.squeeze(2)

    def weighted_sum(self, weight: Tensor, x: Tensor) -> Tensor:
        """Compute sum_v weight_uv x_v over the neighbours v of u: `[N, k]`, `[N, d] -> [N, d]`."""
        total: Tensor = _WeightedSum.apply(full(weight), full(x), self)  # type: ignore[no-untyped-call]
        return total

    def _sum(self, weight: Tensor, x: Tensor) -> Tensor:
        return replace(self.pattern, value=weight.flatten()) @ x

    def _sum_back(self, weight: Tensor, x: Tensor) -> Tensor:
        """Compute sum_u weight_uv x_u over the nodes u that have v as a neighbour."""
        value = weight.flatten()[self.order]
        return replace(self.pattern, crow=self.starts, col=self.nodes, value=value) @ x


def block_rows(like: Tensor, numbers: int) -> int:
    """Return how many rows of so many numbers fit into a block, on the device of `like`."""
    return max((NUMBERS_GPU if like.is_cuda else NUMBERS) // max(numbers, 1), 1)


def neighbour_products(
    left: Tensor, right: Tensor, index: Tensor, metrics: Metrics | None = None
) -> Tensor:
    """Compute the products of `Neighbours.products` without gradient, `[N, k, h]`.

    Works in blocks with one buffer, because large temporaries cost more than the products.
    """
    count, width = index.shape
    size = right.shape[1]
    out = left.new_empty(count, width, 1 if metrics is None else metrics[0].shape[1])
    step = block_rows(left, width * size)
    buffer = left.new_empty(min(step, count) * width, size)
    for start in range(0, count, step):
        rows = slice(start, min(start + step, count))
        chosen = index[rows].flatten()
        near = torch.index_select(right, 0, chosen, out=buffer[: len(chosen)])
        here = left[rows].unsqueeze(1)
        if metrics is not None:
            here = here * metrics[0][metrics[1].owner[rows]]
        torch.bmm(near.view(-1, width, size), here.transpose(1, 2), out=out[rows])
    return out


class _Products(torch.autograd.Function):
    """The products of nodes and their neighbours."""

    @staticmethod
    def forward(
        ctx: Any,
        left: Tensor,
        right: Tensor,
        weight: Tensor | None,
        segments: Segments | None,
        near: Neighbours,
    ) -> Tensor:
        ctx.near, ctx.segments = near, segments
        ctx.save_for_backward(left, right, weight)
        metrics = None if weight is None or segments is None else (weight, segments)
        return neighbour_products(left, right, near.index, metrics)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        left, right, weight = ctx.saved_tensors
        near: Neighbours = ctx.near
        segments: Segments = ctx.segments
        if weight is None:
            return near._sum(grad, right), near._sum_back(grad, left), None, None, None
        grad_left, grad_right = torch.zeros_like(left), torch.zeros_like(right)
        grad_weight = torch.zeros_like(weight)
        for h, coefficient in enumerate(grad.permute(2, 0, 1).contiguous()):
            metric = weight[:, h].index_select(0, segments.owner)
            forth = near._sum(coefficient, right)
            grad_left.addcmul_(metric, forth)
            grad_right.addcmul_(metric, near._sum_back(coefficient, left))
            grad_weight[:, h] = segments.sum(forth.mul_(left))
        return grad_left, grad_right, grad_weight, None, None


class _WeightedSum(torch.autograd.Function):
    """Weighted sums over neighbours."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor, near: Neighbours) -> Tensor:
        ctx.near = near
        ctx.save_for_backward(weight, x)
        return near._sum(weight, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        weight, x = ctx.saved_tensors
        near: Neighbours = ctx.near
        grad_weight = grad_x = None
        if ctx.needs_input_grad[0]:
            grad_weight = neighbour_products(grad, x, near.index).squeeze(2)
        if ctx.needs_input_grad[1]:
            grad_x = near._sum_back(weight, grad)
        return grad_weight, grad_x, None
