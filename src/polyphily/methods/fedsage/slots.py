"""Places for generated neighbours: which of them are computed, and who hears them.

Every node has P slots. A count says how many of them exist: the first ones. A slot that does not
exist is heard by nobody and compared with nothing. On a CPU only slots that exist are computed
(`open_slots`). On a GPU shapes must not depend on counts, because rounds are recorded: all slots of
some nodes are computed, and those that do not exist are multiplied by zero (`every_slot`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from polyphily.nn.segments import Run, Segments
from polyphily.nn.sparse import SparseMatrix
from polyphily.nn.stacked import StackedGraph


class Counted(Segments):
    """Segments of sizes that depend on counts.

    Clients that have equally many rows by chance are not multiplied together: a client's result
    would be rounded differently if other clients are trained beside it.
    """

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        return tuple(
            Run(slice(start, stop), slice(k, k + 1))
            for k, (start, stop) in enumerate(pairwise(self.pointers))
        )


@dataclass(frozen=True)
class Slots:
    """Some of the slots of stacked clients, those of each client together.

    Attributes:
        place: the number of each among all slots, node · P + number, `[A]`.
        node: the node of each, `[A]`.
        rows: the slots of each client.
        members: the 0/1 matrix `[N, A]` whose product sums slots by node.
        nodes: the nodes that have any of them, those of each client together, `[n]`.
        node_rows: those of each client.
        exists: 1 or 0 for each slot; None if all exist.
        blocks: how many there are of each client and number, if that is their order. None if they
            are all slots of `nodes`, in their order.
    """

    place: Tensor
    node: Tensor
    rows: Segments
    members: SparseMatrix
    nodes: Tensor
    node_rows: Segments
    exists: Tensor | None = None
    blocks: tuple[int, ...] | None = None

    def heard(self, x: Tensor) -> Tensor:
        """Sum over the slots of every node that exist, `[A, d] -> [N, d]`."""
        return self.members @ (x if self.exists is None else self.exists.unsqueeze(1) * x)

    def at_node(self, x: Tensor) -> Tensor:
        """Return `x` at the node of each slot, `[N, d] -> [A, d]`."""
        return self.members.transposed @ x

    def among_nodes(self) -> Tensor:
        """Return where the node of each slot is in `nodes`, `[A]`."""
        where = self.node.new_zeros(self.members.shape[0])
        where[self.nodes] = torch.arange(len(self.nodes), device=where.device)
        return where[self.node]


class Order(NamedTuple):
    """The order of all slots: by client, then by number, then as the nodes are given.

    Attributes:
        places: the slots in this order, `[N · P]`.
        pointers: where the slots of each client and number begin, and the end.
    """

    places: Tensor
    pointers: tuple[int, ...]

    @classmethod
    def of(cls, nodes: Tensor, segments: Segments, number: int) -> Order:
        """Order the slots of nodes, which are given in an order of their own at each client."""
        own = [nodes[start:stop] * number for start, stop in pairwise(segments.pointers)]
        parts = [part + p for part in own for p in range(number)]
        return cls(torch.cat(parts), (0, *np.cumsum([len(part) for part in parts]).tolist()))


def by_count(graph: StackedGraph) -> bool:
    """Return whether shapes may depend on counts."""
    return graph.device.type == "cpu" and not torch.is_autocast_enabled("cpu")


def slots_of(graph: StackedGraph, gate: Tensor) -> Slots:
    """Return the slots to compute if all nodes matter: on a CPU those that exist, else all."""
    return open_slots(graph, gate) if by_count(graph) else every_slot(graph, gate)


def open_slots(graph: StackedGraph, gate: Tensor, order: Order | None = None) -> Slots:
    """Return the slots that exist.

    Args:
        graph: the graph.
        gate: 1 or 0 for each slot, `[N, P]`; those of a node that exist are its first.
        order: an order of the slots; by default nodes are in their own order.
    """
    number = gate.shape[1]
    if order is None:
        order = graph.cached(("fedsage+ order", number), lambda own: _own_order(own, number))
    is_open = gate.flatten()[order.places] > 0
    blocks = counted(is_open, order.pointers)
    place = order.places[is_open]
    node = place.div(number, rounding_mode="floor")
    starts = np.cumsum((0, *blocks)).tolist()
    firsts = range(0, len(blocks), number)  # a node that has a slot has the first one
    sizes = tuple(starts[b + number] - starts[b] for b in firsts)
    return Slots(
        place,
        node,
        Counted(sizes, graph.device),
        _members(node, graph.num_nodes),
        torch.cat([node[starts[b] : starts[b + 1]] for b in firsts]),
        Counted(tuple(blocks[b] for b in firsts), graph.device),
        blocks=blocks,
    )


def every_slot(graph: StackedGraph, gate: Tensor) -> Slots:
    """Return all slots of all nodes, and which of them exist."""
    number = gate.shape[1]
    whole = graph.cached(("fedsage+ slots", number), lambda own: _whole(own, number))
    return replace(whole, exists=gate.flatten())


def all_slots(nodes: Tensor, rows: Segments, total: int, number: int) -> Slots:
    """Return all slots of some nodes, which are given by client."""
    node = nodes.repeat_interleave(number)
    place = node * number + torch.arange(number, device=nodes.device).repeat(len(nodes))
    each = Segments(tuple(number * size for size in rows.sizes), rows.device)
    return Slots(place, node, each, _members(node, total), nodes, rows)


def counted(chosen: Tensor, pointers: tuple[int, ...]) -> tuple[int, ...]:
    """Return how many of each block are chosen; this reads the device."""
    total = np.concatenate([[0], chosen.cpu().numpy().cumsum()])
    return tuple(np.diff(total[list(pointers)]).tolist())


def _own_order(graph: StackedGraph, number: int) -> Order:
    return Order.of(torch.arange(graph.num_nodes, device=graph.device), graph.segments, number)


def _whole(graph: StackedGraph, number: int) -> Slots:
    nodes = torch.arange(graph.num_nodes, device=graph.device)
    return all_slots(nodes, graph.segments, graph.num_nodes, number)


def _members(node: Tensor, total: int) -> SparseMatrix:
    """Return the 0/1 matrix `[N, A]` that says whose each slot is."""
    order = torch.argsort(node, stable=True)
    pointers = node.new_zeros(total + 1)
    pointers[1:] = torch.bincount(node, minlength=total).cumsum(0)
    each = torch.arange(len(node) + 1, device=node.device)
    return SparseMatrix(
        shape=(total, len(node)),
        crow=pointers.int(),
        col=order.int(),
        crow_t=each.int(),
        col_t=node.int(),
        permutation=torch.empty_like(order).scatter_(0, order, each[:-1]),
    )
