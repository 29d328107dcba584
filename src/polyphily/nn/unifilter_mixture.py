"""Mixtures of UniFilter's bases over all clients, in a ragged and in a packed layout.

The ragged layout keeps for each client only the features that occur there, and is used on a CPU.
The packed layout has all features in one matrix, and is used on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from polyphily.nn import kernels
from polyphily.nn.draws import Draws, HashedDraws
from polyphily.nn.segments import Segments

Masks: TypeAlias = Sequence[Sequence[Tensor]]  # of every order and client, zeros and ones

LEVELS = 1 << 16  # of the numbers that decide about dropout


@dataclass(frozen=True)
class Ragged:
    """Bases at some nodes of every client, as they are cached: nothing is copied.

    The matrices `[n_k, F_k]` of all clients are stored in one vector, one after the other.

    Attributes:
        segments: the nodes of each client.
        columns: the features that occur at each client, `[F_k]`.
        blocks: the bases of each client, `[K+1, n_k, F_k]`.
        features: number of all features.
    """

    segments: Segments
    columns: tuple[Tensor, ...]
    blocks: tuple[Tensor, ...]
    features: int

    @cached_property
    def pointers(self) -> tuple[int, ...]:
        """The first entry of each client, and the number of entries."""
        return (0, *np.cumsum([block[0].numel() for block in self.blocks]).tolist())

    def split(self, entries: Tensor) -> list[Tensor]:
        """Return each client's matrix."""
        parts = (entries[start:stop] for start, stop in pairwise(self.pointers))
        return [part.view(b.shape[1:]) for part, b in zip(parts, self.blocks, strict=True)]

    def basis(self, client: int, order: int, masks: Masks | None) -> Tensor:
        """Return a client's basis, zero where its mask is."""
        basis = self.blocks[client][order]
        return basis if masks is None else basis * masks[order][client].to(basis.dtype)

    def of_client(self, client: int, x: Tensor, dim: int) -> Tensor:
        """Return the entries of `x` for the features that occur at a client."""
        columns = self.columns[client]
        return x if len(columns) == self.features else x.index_select(dim, columns)

    def mixture(self, coefficients: Tensor, draws: Draws | None, p: float) -> Tensor:
        """Compute sum_k W^k ∘ B^k with a share `p` of the entries of each B^k dropped."""
        masks = None
        if draws is not None and p > 0:
            dropped = round(p * LEVELS)
            coefficients = coefficients * (LEVELS / (LEVELS - dropped))
            drawn = (draws.at_least(dropped, 1, self.pointers) for _ in self.blocks[0])
            masks = [self.split(mask.view(-1).view(torch.uint8)) for mask in drawn]
        mixed: Tensor = _RaggedMixture.apply(coefficients, masks, self)  # type: ignore[no-untyped-call]
        return mixed

    def matmul(self, z: Tensor, weight: Tensor) -> Tensor:
        """Multiply each client's matrix by its weights `[clients, F, outputs]`."""
        product: Tensor = _RaggedProduct.apply(z, weight, self)  # type: ignore[no-untyped-call]
        return product

    def dense(self, z: Tensor) -> Tensor:
        """Return the matrices with all features, `[rows, F]`."""
        parts = zip(self.split(z), self.columns, strict=True)
        return torch.cat(
            [z.new_zeros(len(x), self.features).index_copy(1, cols, x) for x, cols in parts]
        )

    def packed(self) -> Packed:
        """Return the same bases in one matrix per order."""
        whole = self.blocks[0].new_zeros(len(self.blocks[0]), self.segments.rows, self.features)
        starts = self.segments.pointers
        for start, block, columns in zip(starts, self.blocks, self.columns, strict=False):
            whole[:, start : start + block.shape[1]].index_copy_(2, columns, block)
        return Packed(self.segments, whole)


@dataclass(frozen=True)
class Packed:
    """Bases with all features and clients in one matrix per order.

    Larger than `Ragged`, but the number of kernels does not grow with the number of clients.

    Attributes:
        segments: the nodes of each client.
        bases: `[K+1, rows, F]`.
    """

    segments: Segments
    bases: Tensor

    @property
    def pointers(self) -> tuple[int, ...]:
        return self.segments.pointers

    def mixture(self, coefficients: Tensor, draws: Draws | None, p: float) -> Tensor:
        if kernels.available(self.bases) and (draws is None or isinstance(draws, HashedDraws)):
            hashes = None if draws is None else draws.hashes(p, len(self.bases))
            return kernels.mixture(self.bases, coefficients, self.segments, hashes)
        kept: Sequence[Tensor] = self.bases.unbind()
        if draws is not None:
            kept = [draws.dropout(basis, p, self.pointers) for basis in kept]
        mixed: Tensor = _PackedMixture.apply(coefficients, kept, self.segments)  # type: ignore[no-untyped-call]
        return mixed

    def matmul(self, z: Tensor, weight: Tensor) -> Tensor:
        return self.segments.matmul(z, weight)

    def dense(self, z: Tensor) -> Tensor:
        return z


class _RaggedMixture(torch.autograd.Function):
    """sum_k weight[client, k] ∘ basis_k for weights `[clients, K+1, F]`.

    No temporary is as large as the bases: what belongs to one client and order stays in a CPU's
    cache. For this reason masks (one byte per entry) are applied here, in both directions.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, masks: Masks | None, layout: Ragged) -> Tensor:
        ctx.masks, ctx.layout = masks, layout
        entries = weight.new_zeros(layout.pointers[-1])
        for client, out in enumerate(layout.split(entries)):
            own = layout.of_client(client, weight[client], 1)
            for k, coefficients in enumerate(own.unbind()):
                out.addcmul_(layout.basis(client, k, masks), coefficients)
        return entries

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        layout: Ragged = ctx.layout
        orders = len(layout.blocks[0])
        out = grad.new_zeros(len(layout.blocks), orders, layout.features)
        for client, own in enumerate(layout.split(grad)):
            sums = own.new_empty(orders, own.shape[1])
            for k in range(orders):
                torch.sum(layout.basis(client, k, ctx.masks) * own, dim=0, out=sums[k])
            out[client].index_copy_(1, layout.columns[client], sums)
        return out, None, None


class _RaggedProduct(torch.autograd.Function):
    """The product of each client's matrix and the rows of its weights whose features occur."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, weight: Tensor, layout: Ragged) -> Tensor:
        ctx.layout = layout
        ctx.save_for_backward(z, weight)
        out = z.new_empty(layout.segments.rows, weight.shape[2])
        rows = pairwise(layout.segments.pointers)
        for client, (own, (start, stop)) in enumerate(zip(layout.split(z), rows, strict=True)):
            torch.mm(own, layout.of_client(client, weight[client], 0), out=out[start:stop])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        z, weight = ctx.saved_tensors
        layout: Ragged = ctx.layout
        grad = grad.contiguous()
        grad_z, grad_weight = torch.empty_like(z), torch.zeros_like(weight)
        rows = pairwise(layout.segments.pointers)
        blocks = zip(layout.split(z), layout.split(grad_z), rows, strict=True)
        for client, (own, own_grad, (start, stop)) in enumerate(blocks):
            part = grad[start:stop]
            torch.mm(part, layout.of_client(client, weight[client], 0).T, out=own_grad)
            grad_weight[client].index_copy_(0, layout.columns[client], own.T @ part)
        return grad_z, grad_weight, None


class _PackedMixture(torch.autograd.Function):
    """sum_k weight[client, k] ∘ basis_k for packed bases."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, kept: Sequence[Tensor], segments: Segments) -> Tensor:
        ctx.kept, ctx.segments = kept, segments
        out = torch.zeros_like(kept[0])
        for basis, own in zip(kept, weight.unbind(dim=1), strict=True):
            out.addcmul_(basis, own.index_select(0, segments.owner))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        sums = [ctx.segments.sum(basis * grad) for basis in ctx.kept]
        return torch.stack(sums, dim=1), None, None
