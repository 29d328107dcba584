"""Nodes with equal neighbours at several clients: keys at the clients, matches at the third party.

The key of a node is a keyed hash of the ids of its neighbours. A client has a fixed number of
slots, one for each distinct key. Two clients with more keys than slots both take the lowest hashes,
so that keys which both of them have are likely to be among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from polyphily.graphs.graph import Graph, IntArray
from polyphily.nn.sparse import SparseMatrix, multiply
from polyphily.nn.stacked import StackedGraph

PIECES, BITS = 3, 20  # a key of 60 bits is three whole numbers, which float32 holds exactly


@dataclass(frozen=True)
class Slots:
    """The slots of each client.

    Attributes:
        keys: `[K, slots, PIECES]`; zero in an empty slot.
        copies: how many nodes of the client have the key, `[K, slots]`.
        members: the 0/1 matrix `[K · slots, nodes]` of the nodes in each slot.
    """

    keys: Tensor
    copies: Tensor
    members: SparseMatrix

    @classmethod
    def of(cls, graph: StackedGraph, number: int, secret: str) -> Slots:
        """Return the slots of a stacked graph; all are empty at clients without node ids."""
        name = ("fedgnn/slots", number, secret)
        return graph.cached(name, lambda whole: cls._build(whole, number, secret))

    @classmethod
    def _build(cls, graph: StackedGraph, number: int, secret: str) -> Slots:
        found = graph.cached_per_graph(
            ("fedgnn/hashes", number, secret), lambda own: _slots_of_client(own, number, secret)
        )
        hashes = np.stack([np.pad(own, (0, number - len(own))) for own, _ in found])
        pieces = hashes[..., None] >> BITS * np.arange(PIECES)[::-1] & (1 << BITS) - 1
        slot = np.concatenate(
            [np.where(s < 0, s, s + k * number) for k, (_, s) in enumerate(found)]
        )
        nodes = np.argsort(slot, kind="stable")
        nodes = nodes[slot[nodes] >= 0]
        shape = (hashes.size, graph.num_nodes)
        copies = np.bincount(slot[nodes], minlength=hashes.size).reshape(hashes.shape)
        return cls(
            torch.from_numpy(pieces).to(graph.device, graph.dtype),
            torch.from_numpy(copies).to(graph.device, graph.dtype),
            SparseMatrix.from_coordinates(
                slot[nodes], nodes, None, shape, dtype=graph.dtype, device=graph.device
            ),
        )

    def means(self, embedding: Tensor) -> Tensor:
        """Return the mean embedding of the nodes in each slot, `[K, slots, width]`."""
        total = (self.members @ embedding).view(*self.copies.shape, -1)
        return total / self.copies.clamp(min=1).unsqueeze(2)


def _slots_of_client(graph: Graph, number: int, secret: str) -> tuple[IntArray, IntArray]:
    """Return the hashes in a client's slots, and the slot of every node; -1 if it has none."""
    hashes = neighbourhoods(graph, secret)
    found = np.unique(hashes[hashes >= 0])[:number]
    place = np.searchsorted(found, hashes)
    known = np.append(found, -1)[place] == hashes
    return found, np.where(known & (hashes >= 0), place, -1)


def neighbourhoods(graph: Graph, secret: str) -> IntArray:
    """Hash the sorted ids of each node's neighbours; -1 for a node without any, or without ids."""
    hashes = np.full(graph.num_nodes, -1, dtype=np.int64)
    if graph.node_ids is None:
        return hashes
    ids = [str(own) for own in graph.node_ids.tolist()]
    key = blake2b(secret.encode()).digest()
    ends = np.searchsorted(graph.edges[0], np.arange(graph.num_nodes + 1)).tolist()
    near = graph.edges[1].tolist()
    for node in range(graph.num_nodes):
        if own := sorted(ids[u] for u in near[ends[node] : ends[node + 1]]):
            digest = blake2b("\n".join(own).encode(), digest_size=8, key=key).digest()
            hashes[node] = int.from_bytes(digest, "big") >> 64 - PIECES * BITS
    return hashes


def match(keys: Tensor, means: Tensor, copies: Tensor) -> tuple[Tensor, Tensor]:
    """Find the nodes at other clients that have the key of a slot.

    Args:
        keys: `[clients, slots, PIECES]`; one that has been noised matches nothing.
        means: mean embedding of the nodes in each slot, `[clients, slots, width]`.
        copies: the number of these nodes, `[clients, slots]`.

    Returns:
        Their mean embedding, zero if there are none, and their number, shaped as `means` and
        `copies` are.
    """
    whole = ((keys == keys.round()) & (keys >= 0) & (keys < 1 << BITS)).all(dim=2)
    shift = BITS * torch.arange(PIECES - 1, -1, -1, device=keys.device)
    key = (keys.long() << shift).sum(dim=2).view(-1)
    number = (copies * whole).view(-1, 1)
    own = torch.cat([means.flatten(0, 1) * number, number], dim=1)
    # Sum over slots with one key, in a fixed order and with fixed shapes.
    ranked, order = key.sort(stable=True)
    group = torch.zeros_like(ranked)
    group[1:] = (ranked[1:] != ranked[:-1]).cumsum(0)
    ends = torch.searchsorted(group, torch.arange(len(key) + 1, device=key.device))
    total = multiply(ends.int(), order.int(), None, len(key), own)
    others = total[torch.empty_like(group).scatter_(0, order, group)] - own
    found = others[:, -1:] * (number > 0)
    mean = torch.where(found > 0, others[:, :-1] / found.clamp(min=1), 0)
    return mean.view(means.shape), found.view(copies.shape)
