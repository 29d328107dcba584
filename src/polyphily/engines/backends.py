"""Back ends: how the work of a round is carried out on this machine.

`Simulation.advance` is the round; a back end trains clients, calls the servers' aggregation and
stores what came of both. `Direct` does the work step by step. `Recorded` (engines/recorded.py)
replays it as CUDA graphs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from polyphily.core.messages import MODEL, Message, State, Uploads
from polyphily.core.optimizers import PREFIX
from polyphily.engines.storage import overwrite
from polyphily.runtime.client import Trained, exactly_finite_clients, sums_of

if TYPE_CHECKING:
    from polyphily.engines.simulation import Simulation


Arrived: TypeAlias = Callable[[], Sequence[Uploads | None]]


@dataclass(frozen=True)
class Answers:
    """The answers of this process's clients in a round.

    Attributes:
        trained: their uploads, memories and losses.
        seen: what the host looks at: their losses and the sums of their uploads (`sums_of`).
    """

    trained: Trained
    seen: Tensor

    @classmethod
    def of(cls, trained: Trained) -> Answers:
        return cls(trained, sums_of(trained.uploads, trained.losses))

    def look(self) -> tuple[list[bool], list[float]]:
        """Return whether each client's numbers are finite, and the losses.

        This is the one time in a round that the host waits for the device.
        """
        losses, *sums = self.seen.tolist()
        fine = [all(map(math.isfinite, own)) for own in zip(losses, *sums, strict=True)]
        if not all(fine):
            fine = exactly_finite_clients(self.trained.uploads, self.trained.losses).tolist()
        return fine, losses


class Direct:
    """Does the work of a round step by step, group of clients by group.

    Args:
        simulation: whose clients, servers and tensors these are.
    """

    obstacle: str | None = None  # why rounds are not replayed, for a back end that could

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation

    def train(self, active: Sequence[int], asked: Sequence[Sequence[int]]) -> Answers:
        """Send the servers' messages, train the clients and collect their uploads.

        Args:
            active: who trains, by place in this process.
            asked: the same clients by federation, numbered in it.
        """
        simulation = self.simulation
        if not active:
            none = simulation.cohort.num_train.new_zeros(0)
            return Answers.of(Trained({}, {}, none))
        results: list[Answers] = []
        groups = simulation.groups.split(active)
        room = _room(simulation.memory, len(active)) if len(groups) > 1 else {}
        for group in groups:
            members = [active[i] for i in group]
            rows = _rows(members)
            whole = len(members) == len(simulation.clients)
            memory = simulation.memory
            trained = simulation.clients.take(members).train(
                simulation.download(_part(asked, group)),
                memory if whole else {n: t[rows] for n, t in memory.items()},
                simulation.round,
                into={n: t[group.start : group.stop] for n, t in room.items()},
            )
            results.append(Answers.of(trained))  # now, while the numbers are in the cache
        return joined(results)

    def aggregate(self, arrived: Arrived, *, complete: bool) -> list[State]:
        """Return the servers' new states; a server that nothing arrived at keeps its own.

        Args:
            arrived: returns the accepted uploads at each server.
            complete: whether these are the uploads of `train`, all of them.
        """
        simulation = self.simulation
        return [
            server.state if uploads is None else server.aggregate(uploads, simulation.round)
            for server, uploads in zip(simulation.servers, arrived(), strict=True)
        ]

    def store(
        self,
        active: Sequence[int],
        memory: Message,
        states: Sequence[State],
        fine: Sequence[bool],
        *,
        complete: bool,
    ) -> None:
        """Keep the new states, and the memories of clients whose update was accepted."""
        simulation = self.simulation
        for server, state in zip(simulation.servers, states, strict=True):
            simulation.moves += overwrite(server.state, state, in_place=simulation.in_place)
        if not (len(active) == len(simulation.clients) and all(fine)):
            rows = [row for row, accepted in enumerate(fine) if accepted]
            clients = [active[row] for row in rows]
            after, memory = memory, {}
            for name, value in simulation.memory.items():
                memory[name] = value.clone()
                memory[name][clients] = after[name][rows] if name in after else value[clients]
        simulation.moves += overwrite(simulation.memory, memory, in_place=simulation.in_place)


def _room(memory: Message, clients: int) -> Message:
    """Return tensors in which groups of clients put parameters and moments, one after the other.

    Those of all groups are then one tensor without a copy (`_join`).
    """
    return {
        name: tensor.new_empty(clients, *tensor.shape[1:])
        for name, tensor in memory.items()
        if name.startswith((MODEL, PREFIX))
    }


def _rows(members: Sequence[int]) -> slice | list[int]:
    """Return how to index the rows of some clients: by a slice, without a copy, if they follow."""
    first, end = members[0], members[-1] + 1
    return slice(first, end) if list(members) == list(range(first, end)) else list(members)


def _part(asked: Sequence[Sequence[int]], group: range) -> list[list[int]]:
    """Return the clients of each federation that are in a group of places among all asked."""
    found, start = [], 0
    for own in asked:
        first, end = max(group.start - start, 0), max(group.stop - start, 0)
        found.append(list(own[first:end]))
        start += len(own)
    return found


def joined(results: Sequence[Answers]) -> Answers:
    """Return the answers of several groups of clients as one."""
    if len(results) == 1:
        return results[0]

    def stacked(messages: Sequence[Message]) -> Message:
        return {n: _join([message[n] for message in messages]) for n in messages[0]}

    parts = [result.trained for result in results]
    trained = Trained(
        stacked([part.uploads for part in parts]),
        stacked([part.memory for part in parts]),
        torch.cat([part.losses for part in parts]),
    )
    return Answers(trained, torch.cat([result.seen for result in results], dim=1))


def _join(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors, without a copy if they already follow each other in memory."""
    first, place = parts[0], parts[0].data_ptr()
    storage = first.untyped_storage().data_ptr()
    for part in parts:
        there = part.data_ptr() == place and part.untyped_storage().data_ptr() == storage
        if not (there and part.is_contiguous()):
            return torch.cat(list(parts))
        place += part.nbytes
    rows = sum(len(part) for part in parts)
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())
