"""Features of generated neighbours, and what NeighGen's loss makes of them.

`filled` computes the features. `leaves` computes on a CPU what the loss needs of them: distances to
targets, and the judge's products. Features are wide, so this takes most of the time of a step. It
works on blocks of rows that fit the cache, and passes over wide matrices as seldom as it can.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from polyphily.methods.fedsage.slots import Slots
from polyphily.nn.sparse import SparseMatrix

CHUNK = 64  # rows that are compared with dense targets at a time, to fit the cache
LINE = 16  # rows, of any width: a multiple of 64 bytes


WEIGHT, BIAS = "generator.last.weight", "generator.last.bias"  # `[K, i, P · F]` and `[K, P · F]`


def filled(hidden: Tensor, params: Mapping[str, Tensor], slots: Slots) -> Tensor:
    """Return the features tanh(h W + b) in every slot, `[A, F]`.

    A gradient goes through only if these are all slots of their nodes.

    Args:
        hidden: h of each of the slots' nodes, `[n, i]`.
        params: NeighGen's. W and b have columns for the first slot, then for the second, and so on.
        slots: the slots to fill.
    """
    weight, bias = params[WEIGHT], params[BIAS]
    if slots.blocks is None:
        rows = slots.node_rows
        wide = rows.matmul(hidden, weight) + rows.expand(bias)
        return wide.tanh().view(len(slots.node), -1)
    with torch.no_grad():
        x = _fill(hidden[slots.among_nodes()], weight, bias, slots.blocks)
        return x[aligned_rows(slots.blocks)]


def _fill(h: Tensor, weight: Tensor, bias: Tensor, blocks: tuple[int, ...]) -> Tensor:
    """Return the features in rows as `aligned_rows` has them; the rows between are zero."""
    width = weight.shape[2] * len(weight) // len(blocks)
    out = h.new_zeros(_starts(blocks)[-1], width)
    for block in _each(blocks, len(weight), width):
        if block.rows.start == block.rows.stop:
            continue
        part, columns = out[block.aligned], block.columns
        own = h[block.rows].clone()
        torch.addmm(bias[block.client, columns], own, weight[block.client, :, columns], out=part)
        # tanh x = 2 sigmoid(2x) - 1. torch's sigmoid takes a sixth of the time of its tanh.
        part.mul_(2).sigmoid_().mul_(2).sub_(1)
    return out


# A product of matrices is rounded differently if they begin elsewhere in a line of the CPU's cache,
# and where a client's rows begin depends on the clients before it. So blocks begin at lines.


def _starts(blocks: tuple[int, ...]) -> list[int]:
    """Return the row at which each block begins, and the number of rows."""
    return [0, *np.cumsum([-(-size // LINE) * LINE for size in blocks]).tolist()]


def aligned_rows(blocks: tuple[int, ...]) -> Tensor:
    """Return the row of every slot, `[A]`."""
    pairs = zip(_starts(blocks), blocks, strict=False)
    return torch.from_numpy(np.concatenate([np.arange(s, s + size) for s, size in pairs]))


class Block(NamedTuple):
    """The slots of a client that have the same number.

    Attributes:
        rows: where they are among the slots.
        aligned: where they are among rows that are aligned.
        client: the client.
        columns: their columns of the client's weights.
    """

    rows: slice
    aligned: slice
    client: int
    columns: slice


def _each(blocks: tuple[int, ...], clients: int, width: int) -> Iterator[Block]:
    number = len(blocks) // clients
    rows = np.cumsum((0, *blocks)).tolist()
    for b, (size, start) in enumerate(zip(blocks, _starts(blocks), strict=False)):
        first = b % number * width
        yield Block(
            slice(rows[b], rows[b + 1]),
            slice(start, start + size),
            b // number,
            slice(first, first + width),
        )


# Targets -----------------------------------------------------------------------------------------


class Targets(Protocol):
    """Features that generated neighbours are compared with; every slot has P of them or none."""

    def products(self, x: Tensor, slots: Slots, rows: Tensor) -> Tensor:
        """Return x_a · t_k of every slot and target, `[A, P]`; 0 where there is none.

        Args:
            x: a matrix with a row for each slot, `[…, F]`.
            slots: the slots.
            rows: the row of each, `[A]`.
        """
        ...

    def add(self, x: Tensor, factors: Tensor, slots: Slots, rows: Tensor) -> None:
        """Add sum_k factor_k t_k to the row of every slot, in place; factors are `[A, P]`."""
        ...


@dataclass(frozen=True)
class DenseTargets:
    """Targets as a dense table.

    Attributes:
        features: of the nodes, `[N, F]`.
        index: the nodes that losers are compared with, `[Q, P]`.
        number: the number of each node among the losers; -1 for others, `[N]`.
    """

    features: Tensor
    index: Tensor
    number: Tensor

    def products(self, x: Tensor, slots: Slots, rows: Tensor) -> Tensor:
        found = x.new_zeros(len(rows), self.index.shape[1])
        for some, near in self._chunks(slots):
            found[some] = (near * x[rows[some]].unsqueeze(1)).sum(dim=2)
        return found

    def add(self, x: Tensor, factors: Tensor, slots: Slots, rows: Tensor) -> None:
        for some, near in self._chunks(slots):
            x[rows[some]] += (factors[some].unsqueeze(2) * near).sum(dim=1)

    def _chunks(self, slots: Slots) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield some slots of losers and the features of their targets, `[…, P, F]`."""
        number = self.number[slots.node]
        chosen = (number >= 0).nonzero().view(-1)
        for start in range(0, len(chosen), CHUNK):
            some = chosen[start : start + CHUNK]
            yield some, self.features[self.index[number[some]]]


@dataclass(frozen=True)
class SparseTargets:
    """Targets as the list of their entries that are not zero, once for each slot.

    Attributes:
        place: the slot that is compared, `[E]`.
        target: which of its targets it is, `[E]`.
        column: the feature, `[E]`.
        value: the entry, `[E]`.
        slots: P.
        places: the number of all slots.
    """

    place: Tensor
    target: Tensor
    column: Tensor
    value: Tensor
    slots: int
    places: int

    @classmethod
    def of(
        cls, x: SparseMatrix, owner: Tensor, losers: Tensor, index: Tensor, present: Tensor
    ) -> SparseTargets:
        """List the entries of targets.

        Args:
            x: features of all nodes, block-diagonal.
            owner: the client of every node.
            losers: the nodes that are compared, `[Q]`.
            index: the nodes that they are compared with, `[Q, P]`.
            present: which of these there are, `[Q, P]`.
        """
        assert x.value is not None
        number, width = index.shape[1], x.shape[1] // (int(owner[-1]) + 1)
        loser, target = present.nonzero(as_tuple=True)
        node = index[loser, target]
        begin, end = x.crow[node].long(), x.crow[node + 1].long()
        pair = torch.repeat_interleave(torch.arange(len(node)), end - begin)
        within = torch.arange(len(pair)) - ((end - begin).cumsum(0) - (end - begin))[pair]
        entry = begin[pair] + within
        place = losers[loser][pair] * number
        return cls(
            torch.cat([place + p for p in range(number)]),
            target[pair].repeat(number),
            (x.col_long[entry] - owner[node][pair] * width).repeat(number),
            x.value[entry].repeat(number),
            number,
            number * len(owner),
        )

    def products(self, x: Tensor, slots: Slots, rows: Tensor) -> Tensor:
        entry, slot = self._found(slots)
        place = rows[slot] * x.shape[1] + self.column[entry]
        pair = slot * self.slots + self.target[entry]
        found = x.new_zeros(len(rows) * self.slots)
        found.index_add_(0, pair, x.view(-1)[place] * self.value[entry])
        return found.view(-1, self.slots)

    def add(self, x: Tensor, factors: Tensor, slots: Slots, rows: Tensor) -> None:
        entry, slot = self._found(slots)
        place = rows[slot] * x.shape[1] + self.column[entry]
        pair = slot * self.slots + self.target[entry]
        x.view(-1).index_add_(0, place, factors.reshape(-1)[pair] * self.value[entry])

    def _found(self, slots: Slots) -> tuple[Tensor, Tensor]:
        """Return the entries of slots that are there, and the slot of each."""
        number = self.place.new_full((self.places,), -1)
        number[slots.place] = torch.arange(len(slots.place))
        slot = number[self.place]
        entry = (slot >= 0).nonzero().view(-1)
        return entry, slot[entry]


# The loss ----------------------------------------------------------------------------------------


class Compared(NamedTuple):
    """What slots are compared with, and where the judge looks.

    Slots that the judge looks at come first in each block, and among them those of train nodes.

    Attributes:
        slots: the slots.
        targets: what they are compared with.
        squares: the squared norm of each target, infinite where there is none, `[A, P]`.
        judged: how many of each block the judge hears in its first layer.
        deep: how many of each block it hears in its second layer.
    """

    slots: Slots
    targets: Targets
    squares: Tensor
    judged: tuple[int, ...]
    deep: tuple[int, ...]


class Products(NamedTuple):
    """Features of generated nodes times the two weights of a GraphSAGE layer, `[A, d]` each."""

    near: Tensor
    own: Tensor


def leaves(
    hidden: Tensor, params: Mapping[str, Tensor], layer: Mapping[str, Tensor], compared: Compared
) -> tuple[Tensor, Products]:
    """Fill slots that exist with features, and return what the loss needs of these.

    Args:
        hidden: the input of the generator's last layer at each of the slots' nodes, `[n, i]`.
        params: NeighGen's parameters.
        layer: those of the judge's first layer.
        compared: the slots and their targets.

    Returns:
        The squared distance to the nearest target, 0 without targets, `[A]`, and the products of
        the judge's first layer, 0 where it does not look.
    """
    gaps, near, own = _Leaves.apply(  # type: ignore[no-untyped-call]
        hidden.index_select(0, compared.slots.among_nodes()),
        params[WEIGHT],
        params[BIAS],
        layer["weight_near"],
        layer["weight_self"],
        compared,
    )
    return gaps, Products(near, own)


class _Leaves(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        weight: Tensor,
        bias: Tensor,
        weight_near: Tensor,
        weight_self: Tensor,
        compared: Compared,
    ) -> tuple[Tensor, Tensor, Tensor]:
        slots = compared.slots
        assert slots.blocks is not None
        x, rows = _fill(h, weight, bias, slots.blocks), aligned_rows(slots.blocks)
        near, own = (h.new_zeros(len(h), weight_near.shape[2]) for _ in range(2))
        for block, first, second in _judged(compared, weight):
            part, k = x[block.aligned], block.client
            torch.mm(part[:first], weight_near[k], out=near[block.rows][:first])
            torch.mm(part[:second], weight_self[k], out=own[block.rows][:second])
        norms = torch.linalg.vector_norm(x, dim=1).square_()[rows].unsqueeze(1)
        gaps = norms + compared.squares - 2 * compared.targets.products(x, slots, rows)
        least = gaps.amin(dim=1, keepdim=True)
        some = least.isfinite()
        shares = ((gaps == least) & some).to(x.dtype)  # equally near targets share the gradient
        shares /= shares.sum(dim=1, keepdim=True).clamp_(min=1)
        ctx.compared = compared
        ctx.save_for_backward(h, weight, weight_near, weight_self, x, rows, shares)
        return torch.where(some, least, 0).squeeze(1).clamp_(min=0), near, own

    @staticmethod
    def backward(
        ctx: Any, grad_gaps: Tensor, grad_near: Tensor, grad_own: Tensor
    ) -> tuple[Tensor | None, ...]:
        h, weight, weight_near, weight_self, x, rows, shares = ctx.saved_tensors
        compared: Compared = ctx.compared
        factors = 2 * grad_gaps.unsqueeze(1) * shares
        grad = x * x.new_zeros(len(x), 1).index_copy_(0, rows, factors.sum(dim=1, keepdim=True))
        compared.targets.add(grad, -factors, compared.slots, rows)
        grad_h, grad_weight = torch.empty_like(h), torch.zeros_like(weight)
        grad_bias = torch.zeros_like(weight[:, 0])
        judges = ctx.needs_input_grad[3]
        near, own = (torch.zeros_like(w) if judges else None for w in (weight_near, weight_self))
        for block, first, second in _judged(compared, weight):
            part, inside, k = grad[block.aligned], x[block.aligned], block.client
            of_near, of_own = grad_near[block.rows][:first], grad_own[block.rows][:second]
            part[:first].addmm_(of_near, weight_near[k].t())
            part[:second].addmm_(of_own, weight_self[k].t())
            if near is not None and own is not None:
                near[k].addmm_(inside[:first].t(), of_near)
                own[k].addmm_(inside[:second].t(), of_own)
            torch.ops.aten.tanh_backward.grad_input(part, inside, grad_input=part)
            grad_h[block.rows] = part @ weight[k, :, block.columns].t()
            torch.mm(h[block.rows].clone().t(), part, out=grad_weight[k, :, block.columns])
            torch.sum(part, dim=0, out=grad_bias[k, block.columns])
        return grad_h, grad_weight, grad_bias, near, own, None


def _judged(compared: Compared, weight: Tensor) -> Iterator[tuple[Block, int, int]]:
    """Yield the blocks that are not empty, each with its part of `judged` and `deep`."""
    blocks = compared.slots.blocks
    assert blocks is not None
    each = _each(blocks, len(weight), weight.shape[2] * len(weight) // len(blocks))
    found = zip(each, blocks, compared.judged, compared.deep, strict=True)
    return ((block, first, second) for block, size, first, second in found if size)
