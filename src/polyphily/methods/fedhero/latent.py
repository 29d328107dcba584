"""Latent graphs with a bounded number of neighbours per node, whose edge weights are learned.

Nothing here is quadratic in the nodes but blocks of a bounded number of rows, and nothing that is
kept for the backward pass is as large as edges times width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from polyphily.nn.segments import Segments
from polyphily.nn.sparse import SparseMatrix, full

ROWS = 1024  # of a client's similarity matrix that exist at a time, at most
NUMBERS, NUMBERS_GPU = 1 << 19, 1 << 24  # that are worked on at a time: what fits a cache, a GPU
TABLE, TABLE_GPU = 1 << 22, 1 << 29  # products of features that are kept, not computed again

Metrics = tuple[Tensor, Segments]
"""Diagonal metrics `[K, h, d]` of K clients, and which nodes are whose."""

Adjust = Callable[[Tensor, int, int, int], Tensor]
"""(scores, first row, row after the last, first column) -> the scores to rank by."""


@dataclass(frozen=True)
class Neighbours:
    """At most `k` neighbours of every node, as tensors that last while the neighbours do.

    Attributes:
        index: `[N, k]`; the node itself stands where it has fewer (nobody is its own neighbour).
        order: `[N·k]`, the entries of `index` sorted by value.
        nodes: `[N·k]`, whose neighbours those sorted entries are.
        starts: `[N + 1]`, where each value begins among them.
    """

    index: Tensor
    order: Tensor
    nodes: Tensor
    starts: Tensor

    @classmethod
    def of(cls, index: Tensor) -> Neighbours:
        count, width = index.shape
        values, order = torch.sort(index.flatten().int(), stable=True)
        bounds = torch.arange(count + 1, device=index.device, dtype=torch.int32)
        starts = torch.searchsorted(values, bounds, out_int32=True)
        return cls(index, order, (order.int() // width), starts)

    @cached_property
    def filled(self) -> Tensor:
        """Which entries are neighbours, `[N, k]`."""
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
        """`x` at every neighbour, `[N, …] -> [N, k, …]`."""
        return self.pattern.at_cols(x).view(*self.index.shape, *x.shape[1:])

    def products(self, left: Tensor, right: Tensor, metrics: Metrics | None = None) -> Tensor:
        """left_u · right_v of each node u and its neighbours v: two `[N, d] -> [N, k]`.

        With metrics m_h, h of each client: sum_d m_hd left_ud right_vd, `[N, k, h]`.
        """
        weight, segments = (None, None) if metrics is None else metrics
        found: Tensor = _Products.apply(full(left), full(right), weight, segments, self)  # type: ignore[no-untyped-call]
        return found if metrics is not None else found.squeeze(2)

    def weighted_sum(self, weight: Tensor, x: Tensor) -> Tensor:
        """sum_v weight_uv x_v over the neighbours v of u: `[N, k]`, `[N, d] -> [N, d]`."""
        total: Tensor = _WeightedSum.apply(full(weight), full(x), self)  # type: ignore[no-untyped-call]
        return total

    def _sum(self, weight: Tensor, x: Tensor) -> Tensor:
        return replace(self.pattern, value=weight.flatten()) @ x

    def _sum_back(self, weight: Tensor, x: Tensor) -> Tensor:
        """The transpose's product: sum_u weight_uv x_u over the nodes u whose neighbour v is."""
        value = weight.flatten()[self.order]
        return replace(self.pattern, crow=self.starts, col=self.nodes, value=value) @ x


def at_a_time(like: Tensor, numbers: int) -> int:
    """How many rows of so many numbers are worked on at a time, on the device of `like`."""
    return max((NUMBERS_GPU if like.is_cuda else NUMBERS) // max(numbers, 1), 1)


def _products(left: Tensor, right: Tensor, index: Tensor, metrics: Metrics | None = None) -> Tensor:
    """`[N, k, h]`, in blocks with one buffer: large temporaries cost more than the products."""
    count, width = index.shape
    size = right.shape[1]
    out = left.new_empty(count, width, 1 if metrics is None else metrics[0].shape[1])
    step = at_a_time(left, width * size)
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
        return _products(left, right, near.index, metrics)

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
            grad_weight = _products(grad, x, near.index).squeeze(2)
        if ctx.needs_input_grad[1]:
            grad_x = near._sum_back(weight, grad)
        return grad_weight, grad_x, None


@dataclass(frozen=True)
class _Propagation:
    """x -> own · x + sum over neighbours of near · x, as layers use a cohort's matrices."""

    neighbours: Neighbours
    own: Tensor | None
    near: Tensor

    def __matmul__(self, x: Tensor) -> Tensor:
        near = self.neighbours.weighted_sum(self.near, x)
        return near if self.own is None else torch.addcmul(near, self.own, full(x))


@dataclass(frozen=True)
class LatentGraph:
    """Neighbours with non-negative weights `[N, k]`; layers take it in a cohort's place.

    The graph is directed, so that every convolution is normalised by row. Convolutions that see a
    node's own features see them as those of a neighbour of weight one.
    """

    neighbours: Neighbours
    weight: Tensor
    segments: Segments

    @cached_property
    def gcn(self) -> _Propagation:
        """(D+I)^-1 (A+I)."""
        own = (1 + self.weight.sum(dim=1, keepdim=True)).reciprocal()
        return _Propagation(self.neighbours, own, self.weight * own)

    @property
    def random_walk(self) -> _Propagation:
        return self.gcn

    @cached_property
    def mean(self) -> _Propagation:
        """D^-1 A; zero for a node without neighbours."""
        degree = self.weight.sum(dim=1, keepdim=True)
        scale = torch.where(degree > 0, degree, 1).reciprocal()
        return _Propagation(self.neighbours, None, self.weight * scale)


def width_of(segments: Segments, k: int) -> int:
    """Columns that hold the neighbours of every client: k, or all others of the largest client."""
    return max(min(k, max(segments.sizes) - 1), 1)


def nobody(segments: Segments, k: int) -> Tensor:
    """An index `[N, k]` in which no node has a neighbour yet."""
    nodes = torch.arange(segments.rows, device=segments.device).unsqueeze(1)
    return nodes.repeat(1, width_of(segments, k))


@torch.no_grad()
def nearest(
    left: Tensor, right: Tensor, segments: Segments, k: int, adjust: Adjust | None = None
) -> Tensor:
    """The k nodes v of u's client with the largest left_u · right_v, without u itself, `[N, k]`."""
    if left.is_cuda and adjust is None and max(segments.sizes) ** 2 <= NUMBERS_GPU:
        return _nearest_together(left, right, segments, k)
    index = nobody(segments, k)
    for start, stop in pairwise(segments.pointers):
        count = min(k, stop - start - 1)
        if count < 1:
            continue
        step = min(ROWS, at_a_time(left, stop - start))
        buffer = left.new_empty(min(step, stop - start), stop - start)
        others = right[start:stop].T
        for first in range(start, stop, step):
            last = min(first + step, stop)
            scores = torch.mm(left[first:last], others, out=buffer[: last - first])
            if adjust is not None:
                scores = adjust(scores, first, last, start)
            scores.diagonal(first - start).fill_(-torch.inf)
            found = scores.topk(count, dim=1, sorted=False).indices
            index[first:last, :count] = found.sort(dim=1).values + start
    return index


def _nearest_together(left: Tensor, right: Tensor, segments: Segments, k: int) -> Tensor:
    """`nearest` for clients of similar size at once, padded to the largest of them."""
    index = torch.cat([nobody(segments, k), nobody(segments, k)[:1]])  # the last row is padding's
    left, right = (torch.cat([x, x.new_zeros(1, x.shape[1])]) for x in (left, right))
    buckets, _ = segments.buckets
    for bucket in buckets:
        size, width = bucket.size, min(index.shape[1], bucket.size)
        together = max(1, NUMBERS_GPU // max(size, 1) ** 2)
        rows = bucket.gather.view(-1, size)
        for gather in torch.split(rows, together):
            scores = torch.bmm(left[gather], right[gather].transpose(1, 2))
            scores.diagonal(dim1=1, dim2=2).fill_(-torch.inf)
            scores.masked_fill_((gather == segments.rows).unsqueeze(1), -torch.inf)
            best, place = scores.topk(width, dim=2)
            found = gather.unsqueeze(1).expand(-1, size, -1).gather(2, place)
            # The node itself stands where there is no other, behind its neighbours.
            missing = best == -torch.inf
            ordered = found.masked_fill(missing, segments.rows).sort(dim=2).values
            own = gather.unsqueeze(2).expand_as(ordered)
            index[gather, :width] = torch.where(ordered == segments.rows, own, ordered)
    return index[:-1]


@torch.no_grad()
def strongest(edges: SparseMatrix, score: Tensor, segments: Segments, k: int) -> Tensor:
    """The k neighbours in a given graph with the largest scores at their edges, `[N, k]`."""
    index = nobody(segments, k)
    order = score.argsort(descending=True, stable=True)
    order = order[edges.row[order].argsort(stable=True)]
    row = edges.row[order]
    rank = torch.arange(edges.nnz, device=row.device) - edges.crow.long()[row]
    kept = rank < index.shape[1]
    index[row[kept], rank[kept]] = edges.col_long[order][kept]
    return index


class FeatureDistances:
    """||x_u - x_v||^2 of nodes and their neighbours; of x / ||x|| where `unit`.

    Args:
        x: features, as a cohort has them: dense `[N, F]`, or sparse and block-diagonal `[N, K·F]`.
        segments: of the clients.
        unit: whether features are divided by their length.
    """

    def __init__(self, x: Tensor | SparseMatrix, segments: Segments, *, unit: bool) -> None:
        if isinstance(x, Tensor):
            squares = x.square().sum(dim=1)
        else:
            assert x.value is not None
            squares = x.sum_by_row(x.value.square().unsqueeze(1)).squeeze(1)
        self.segments = segments
        if unit:
            scale = torch.where(squares > 0, squares, 1).rsqrt()
            squares = (squares > 0).to(squares.dtype)
            x = x * scale.unsqueeze(1) if isinstance(x, Tensor) else _scaled(x, scale)
        self.x, self.squares = x, squares

    @torch.no_grad()
    def __call__(self, index: Tensor) -> Tensor:
        """The distances to given neighbours, `[N, k] -> [N, k]`."""
        near = self.squares[index].add_(self.squares.unsqueeze(1))
        return near.sub_(self._products(index), alpha=2).clamp_(min=0)

    def _products(self, index: Tensor) -> Tensor:
        if isinstance(self.x, Tensor):
            return _products(self.x, self.x, index).squeeze(2)
        if self._table is not None:
            table, place = self._table
            return table[place.unsqueeze(1) + index]
        return _sparse_products(self.x, index, self.segments)

    @cached_property
    def _table(self) -> tuple[Tensor, Tensor] | None:
        """All products within each client, and where to add v to find (u, v); None if too many."""
        sizes, x = self.segments.sizes, self.x
        limit = TABLE_GPU if self.squares.is_cuda else TABLE
        pairs = [size**2 for size in sizes]
        if isinstance(x, Tensor) or sum(pairs) > limit or max(pairs) > NUMBERS_GPU:
            return None
        assert x.value is not None
        if x.value.is_cuda:
            return self._table_on_device(x)
        parts = x.value.cpu().numpy(), x.col.cpu().numpy(), x.crow.cpu().numpy()
        features = sp.csr_array(parts, shape=x.shape)
        products = sp.coo_array(features @ features.T)
        size = np.asarray(sizes)[self.segments.owner.cpu().numpy()]
        start = np.asarray(self.segments.pointers[:-1])[self.segments.owner.cpu().numpy()]
        place = np.cumsum(size) - size - start
        table = np.zeros(int(size.sum()), dtype=products.dtype)
        table[place[products.row] + products.col] = products.data
        return torch.from_numpy(table).to(x.value), torch.from_numpy(place).to(x.value.device)

    def _table_on_device(self, x: SparseMatrix) -> tuple[Tensor, Tensor]:
        assert x.value is not None
        segments = self.segments
        features = x.shape[1] // len(segments)
        place = segments.counts[segments.owner].cumsum(0)
        place = place - segments.counts[segments.owner] - segments.starts.long()[segments.owner]
        table = []
        for client, (start, stop) in enumerate(pairwise(segments.pointers)):
            mine = slice(*x.crow[[start, stop]].tolist())
            dense = x.value.new_zeros(stop - start, features)
            dense[x.row[mine] - start, x.col_long[mine] - client * features] = x.value[mine]
            table.append((dense @ dense.T).flatten())
        return torch.cat(table), place


def _scaled(x: SparseMatrix, scale: Tensor) -> SparseMatrix:
    assert x.value is not None
    return x.with_value(x.value * scale[x.row])


def _sparse_products(x: SparseMatrix, index: Tensor, segments: Segments) -> Tensor:
    """x_u · x_v, `[N, k]`: u's features are laid out densely, those of v looked up in them."""
    assert x.value is not None
    features, near_each = x.shape[1] // len(segments), index.shape[1]
    starts, counts = x.crow[:-1], x.crow[1:] - x.crow[:-1]
    column = x.col - features * segments.owner[x.row].int()
    out = x.value.new_empty(index.shape)
    step = at_a_time(x.value, features + 4 * near_each * (1 + x.nnz // max(len(index), 1)))
    for first in range(0, len(index), step):
        near = index[first : first + step].flatten()
        rows = len(near) // near_each
        mine = slice(int(x.crow[first]), int(x.crow[first + rows]))
        dense = out.new_zeros(rows, features)
        dense[x.row[mine] - first, column[mine].long()] = x.value[mine]
        length = counts[near]
        ends = length.cumsum(0, dtype=torch.int32)
        entry = torch.repeat_interleave(starts[near] - ends + length, length)
        entry += torch.arange(len(entry), device=near.device, dtype=torch.int32)
        place = torch.arange(0, rows * features, features, device=near.device, dtype=torch.int32)
        place = torch.repeat_interleave(place.repeat_interleave(near_each), length)
        bags = SparseMatrix(
            shape=(len(near), rows * features),
            crow=torch.cat([ends.new_zeros(1), ends]),
            col=place.add_(column.index_select(0, entry)),
            crow_t=ends,
            col_t=ends,
            permutation=ends,
            value=x.value.index_select(0, entry),
        )
        out[first : first + rows] = (bags @ dense.view(-1, 1)).view(rows, near_each)
    return out
