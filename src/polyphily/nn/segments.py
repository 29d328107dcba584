"""Rows grouped by client, one block after the other, and operations on each block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from polyphily.nn import dense, kernels
from polyphily.nn.sparse import SparseMatrix, flat, full, is_shared

NARROW, TALL = 16, 1024  # columns and rows of a product with (gradᵀ x)ᵀ on a CPU
PADDING = 1.25  # largest ratio of sizes of clients that share a padded product


class Run(NamedTuple):
    """Consecutive clients of equal size: their rows viewed as `[clients, size, width]`."""

    rows: slice
    clients: slice

    def view(self, x: Tensor) -> Tensor:
        """Return the rows of these clients as `[clients, size, width]`."""
        return x[self.rows].view(self.clients.stop - self.clients.start, -1, x.shape[1])


class Piece(NamedTuple):
    """Rows of consecutive clients, or a part of one client's; `segments` divides them."""

    rows: slice
    clients: slice
    segments: Segments


class Bucket(NamedTuple):
    """Clients of similar size, padded to the largest; `gather` is the number of rows at padding."""

    clients: Tensor
    gather: Tensor
    size: int


@dataclass(frozen=True)
class Segments:
    """A division of rows among clients: `k` owns rows `pointers[k]` to `pointers[k + 1]`.

    Attributes:
        sizes: the number of rows of each client.
        device: where tensors made from it live.
    """

    sizes: tuple[int, ...]
    device: torch.device

    def __len__(self) -> int:
        return len(self.sizes)

    @cached_property
    def pointers(self) -> tuple[int, ...]:
        """The first row of each client, and the number of rows."""
        return (0, *np.cumsum(self.sizes).tolist())

    @property
    def rows(self) -> int:
        return self.pointers[-1]

    @cached_property
    def counts(self) -> Tensor:
        """The sizes on the device, int64."""
        return torch.tensor(self.sizes, device=self.device)

    @cached_property
    def owner(self) -> Tensor:
        """The client of every row, int64."""
        return torch.from_numpy(np.repeat(np.arange(len(self)), self.sizes)).to(self.device)

    @cached_property
    def membership(self) -> SparseMatrix:
        """The 0/1 matrix `[clients, rows]`, whose product sums rows by client."""
        rows = np.repeat(np.arange(len(self)), self.sizes)
        return SparseMatrix.from_coordinates(
            rows,
            np.arange(self.rows),
            None,
            (len(self), self.rows),
            dtype=torch.float32,
            device=self.device,
        )

    @cached_property
    def starts(self) -> Tensor:
        """The pointers on the device, int32."""
        return torch.tensor(self.pointers, device=self.device, dtype=torch.int32)

    def pointers_into(self, x: Tensor | SparseMatrix) -> tuple[int, ...]:
        """Return where each client's entries of a matrix begin: rows if dense, else stored ones."""
        if isinstance(x, Tensor):
            return self.pointers
        return tuple(x.crow[list(self.pointers)].tolist())

    def tiles(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Cut the rows of each client into blocks of up to `size`.

        Returns:
            The client of each block, its first row, and the end of the client's rows.
        """
        if size not in self._tiles:
            counts = -(-np.asarray(self.sizes) // size)
            client = np.repeat(np.arange(len(self)), counts)
            number = np.arange(len(client)) - np.repeat(np.cumsum(counts) - counts, counts)
            start = np.asarray(self.pointers)[client] + size * number
            stop = np.asarray(self.pointers)[client + 1]
            found = torch.from_numpy(np.stack([client, start, stop]).astype(np.int32))
            self._tiles[size] = found.to(self.device)
        tiles = self._tiles[size]
        return tiles[0], tiles[1], tiles[2]

    @cached_property
    def _tiles(self) -> dict[int, Tensor]:
        return {}

    def tiled(self, size: int) -> Segments:
        """Return the segments of these blocks: how many each client has."""
        if size not in self._tiled:
            counts = tuple(-(-rows // size) for rows in self.sizes)
            self._tiled[size] = Segments(counts, self.device)
        return self._tiled[size]

    @cached_property
    def _tiled(self) -> dict[int, Segments]:
        return {}

    def pieces(self, size: int) -> tuple[Piece, ...]:
        """Cut the rows into pieces of at most `size`, to work on them while they are in the cache.

        A client with more rows is cut into equal parts, others stay whole.
        """
        if size not in self._pieces:
            self._pieces[size] = tuple(self._cut(size))
        return self._pieces[size]

    def _cut(self, size: int) -> Iterator[Piece]:
        first = 0
        for client, rows in enumerate(self.sizes):
            start, stop = self.pointers[first], self.pointers[client]
            if client > first and stop + rows - start > size:
                yield self._piece(slice(start, stop), slice(first, client))
                first, start = client, stop
            if rows > size:
                ends = [stop + rows * n // -(-rows // size) for n in range(-(-rows // size) + 1)]
                for part in pairwise(ends):
                    yield self._piece(slice(*part), slice(client, client + 1))
                first = client + 1
        if first < len(self):
            yield self._piece(slice(self.pointers[first], self.rows), slice(first, len(self)))

    def _piece(self, rows: slice, clients: slice) -> Piece:
        part = clients.stop - clients.start == 1
        sizes = (rows.stop - rows.start,) if part else self.sizes[clients]
        return Piece(rows, clients, Segments(sizes, self.device))

    @cached_property
    def _pieces(self) -> dict[int, tuple[Piece, ...]]:
        return {}

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of the rows of each client, `[rows, …] -> [clients, …]`."""
        wide = flat(full(x))
        summed: Tensor = (
            _Sum.apply(wide, self)  # type: ignore[no-untyped-call]
            if kernels.available(wide)
            else self.membership @ wide
        )
        return summed.view(len(self), *x.shape[1:])

    def mean(self, x: Tensor) -> Tensor:
        """Return the mean of the rows of each client; zero for a client without rows."""
        total = self.sum(x)
        sizes = self.counts.to(total.dtype).clamp(min=1)
        return total / sizes.view(-1, *[1] * (x.dim() - 1))

    def expand(self, per_client: Tensor) -> Tensor:
        """Return each client's value at each of its rows, `[clients, …] -> [rows, …]`."""
        if is_shared(per_client):
            return full(per_client[:1]).expand(self.rows, *per_client.shape[1:])
        wide = flat(full(per_client))
        expanded: Tensor = (
            _Expansion.apply(wide, self)  # type: ignore[no-untyped-call]
            if kernels.available(wide)
            else self.membership.transposed @ wide
        )
        return expanded.view(self.rows, *per_client.shape[1:])

    def matmul(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return each client's rows times that client's matrix: `[rows, i]`, `[clients, i, o]`.

        Under autocast the product is computed in its dtype, as in torch's own products.
        """
        device = x.device.type
        if torch.is_autocast_enabled(device):
            short = torch.get_autocast_dtype(device)
            x, weight = x.to(short), weight.to(short)
        if not torch.is_grad_enabled():  # a function of autograd costs time even so
            return _product(x.contiguous(), weight, self)
        product: Tensor = _GroupedProduct.apply(x, weight, self)  # type: ignore[no-untyped-call]
        return product

    def gradient(self, x: Tensor, grad: Tensor) -> Tensor:
        """Return x^T grad over the rows of each client, `[clients, i, o]`, without gradient."""
        x, grad = x.contiguous(), grad.contiguous()
        if kernels.available(x):
            return kernels.grouped_gradient(x, grad, self)
        if len(self.runs) > 1 and x.is_cuda:
            return _padded_gradient(x, grad, self)
        return _gradient(x, grad, self)

    def cross(self, a: Tensor, b: Tensor) -> Tensor:
        """Return a^T b over the rows of each client, `[clients, i, o]`."""
        product: Tensor = _Cross.apply(full(a), full(b), self)  # type: ignore[no-untyped-call]
        return product

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """Runs of consecutive clients of equal size."""
        return tuple(self._runs())

    @cached_property
    def lengths(self) -> tuple[list[int], list[int]]:
        """The rows and the clients of each run."""
        return (
            [run.rows.stop - run.rows.start for run in self.runs],
            [run.clients.stop - run.clients.start for run in self.runs],
        )

    def _runs(self) -> Iterator[Run]:
        for _, group in groupby(range(len(self)), key=self.sizes.__getitem__):
            members = list(group)
            first, last = members[0], members[-1] + 1
            yield Run(slice(self.pointers[first], self.pointers[last]), slice(first, last))

    @cached_property
    def buckets(self) -> tuple[tuple[Bucket, ...], Tensor]:
        """Padded groups of clients, and where each row is in their concatenated outputs."""
        order = sorted(range(len(self)), key=lambda k: (self.sizes[k], k))
        groups: list[list[int]] = []
        for client in order:
            if groups and self.sizes[client] <= PADDING * max(self.sizes[groups[-1][0]], 1):
                groups[-1].append(client)
            else:
                groups.append([client])
        home = np.empty(self.rows, dtype=np.int64)
        buckets, offset = [], 0
        for group in groups:
            size = self.sizes[group[-1]]
            gather = np.full((len(group), size), self.rows, dtype=np.int64)
            for position, client in enumerate(group):
                start, length = self.pointers[client], self.sizes[client]
                gather[position, :length] = np.arange(start, start + length)
                home[start : start + length] = offset + position * size + np.arange(length)
            offset += gather.size
            buckets.append(
                Bucket(
                    torch.tensor(group, device=self.device),
                    torch.from_numpy(gather.ravel()).to(self.device),
                    size,
                )
            )
        return tuple(buckets), torch.from_numpy(home).to(self.device)


def _with_empty_row(x: Tensor) -> Tensor:
    return torch.cat([x, x.new_zeros(1, x.shape[1])])


def _padded_product(x: Tensor, weight: Tensor, segments: Segments) -> Tensor:
    buckets, home = segments.buckets
    padded = _with_empty_row(x)
    parts = [
        torch.bmm(
            padded[bucket.gather].view(len(bucket.clients), bucket.size, x.shape[1]),
            weight[bucket.clients],
        ).view(-1, weight.shape[2])
        for bucket in buckets
    ]
    return torch.cat(parts)[home]


def _padded_gradient(x: Tensor, grad: Tensor, segments: Segments) -> Tensor:
    buckets, _ = segments.buckets
    x, grad = _with_empty_row(x), _with_empty_row(grad)
    out = x.new_empty(len(segments), x.shape[1], grad.shape[1])
    for bucket in buckets:
        shape = (len(bucket.clients), bucket.size)
        inputs = x[bucket.gather].view(*shape, x.shape[1])
        outputs = grad[bucket.gather].view(*shape, grad.shape[1])
        out[bucket.clients] = torch.bmm(inputs.transpose(1, 2), outputs)
    return out


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, segments: Segments) -> Tensor:
        ctx.segments = segments
        return kernels.segment_sum(x, segments)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.segments.owner), None


class _Expansion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, segments: Segments) -> Tensor:
        ctx.segments = segments
        return x.index_select(0, segments.owner)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return kernels.segment_sum(grad, ctx.segments), None


def _product(x: Tensor, weight: Tensor, segments: Segments) -> Tensor:
    if kernels.available(x):
        return kernels.grouped_product(x, weight, segments)
    if len(segments.runs) > 1 and x.is_cuda:
        return _padded_product(x, weight, segments)
    if len(segments) == 1 and dense.pays(x.unsqueeze(0), *weight.shape[1:]):
        return dense.product(x, weight[0])
    out = x.new_empty(segments.rows, weight.shape[2])
    rows, clients = segments.lengths
    parts = zip(
        x.split_with_sizes(rows),
        weight.split_with_sizes(clients),
        out.split_with_sizes(rows),
        strict=True,
    )
    for own, matrices, found in parts:
        inputs = own.view(len(matrices), -1, x.shape[1])
        outputs = found.view(len(matrices), -1, out.shape[1])
        if dense.pays(inputs, x.shape[1], out.shape[1]):
            for mine, matrix, place in zip(inputs, matrices, outputs, strict=True):
                place.copy_(dense.product(mine, matrix))
        elif len(matrices) == 1:
            torch.mm(own, matrices[0], out=found)
        elif out.shape[1] == 1 and inputs.shape[1] >= TALL:  # a vector for each: faster alone
            for mine, matrix, place in zip(inputs, matrices, outputs, strict=True):
                torch.mm(mine, matrix, out=place)
        else:
            torch.bmm(inputs, matrices, out=outputs)
    return out


def _gradient(x: Tensor, grad: Tensor, segments: Segments) -> Tensor:
    """Return the gradient of each client's matrix, `[clients, i, o]`, client by client.

    For a narrow matrix of a client with many rows, (gradᵀ x)ᵀ is several times as fast as xᵀ grad.
    Which form is computed depends on the client alone, as its last digits do.
    """
    out = x.new_empty(len(segments), x.shape[1], grad.shape[1])
    for run in segments.runs:
        inputs, outputs = run.view(x), run.view(grad)
        each = zip(inputs, outputs, out[run.clients], strict=True)
        if inputs.shape[1] >= TALL and grad.shape[1] <= NARROW:
            for own, above, found in each:
                found.copy_(torch.mm(above.T, own).T)
        elif dense.pays(inputs, x.shape[1], grad.shape[1]):
            for own, above, found in each:
                found.copy_(dense.gradient(own, above))
        else:
            torch.bmm(inputs.mT, outputs, out=out[run.clients])
    return out


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, segments: Segments) -> Tensor:
        ctx.segments = segments
        ctx.save_for_backward(x, weight)
        return _product(x.contiguous(), weight, segments)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        segments: Segments = ctx.segments
        x, grad = x.contiguous(), grad.contiguous()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = _product(grad, weight.transpose(1, 2), segments)
        if ctx.needs_input_grad[1]:
            grad_weight = segments.gradient(x, grad)
        return grad_x, grad_weight, None


class _Cross(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, segments: Segments) -> Tensor:
        ctx.segments = segments
        ctx.save_for_backward(a, b)
        return segments.gradient(a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        to_a = to_b = None
        if ctx.needs_input_grad[0]:
            to_a = _product(b.contiguous(), grad.mT, ctx.segments)
        if ctx.needs_input_grad[1]:
            to_b = _product(a.contiguous(), grad, ctx.segments)
        return to_a, to_b, None
