"""Back ends: how the work of a round is carried out on this machine.

`Simulation.advance` is the round; a back end trains clients, calls the servers' aggregation and
stores what came of both. `Direct` does the work step by step. `Recorded` (engines/recorded.py)
replays it as CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from polyphily.core.messages import Message, State, Uploads
from polyphily.engines.storage import overwrite
from polyphily.runtime.client import Trained, exactly_finite_clients, finite_clients

if TYPE_CHECKING:
    from polyphily.engines.simulation import Simulation


Arrived: TypeAlias = Callable[[], Sequence[Uploads | None]]


@dataclass(frozen=True)
class Answers:
    """The answers of this process's clients in a round.

    Attributes:
        trained: their uploads, memories and losses.
        fine: which of them seem to have sent finite numbers only (`finite_clients`).
    """

    trained: Trained
    fine: Tensor

    @classmethod
    def of(cls, trained: Trained) -> Answers:
        return cls(trained, finite_clients(trained.uploads, trained.losses))

    def look(self) -> tuple[list[bool], list[float]]:
        """Return whether each client's numbers are finite, and the losses.

        This is the one time in a round that the host waits for the device.
        """
        both = torch.stack([self.fine.double(), self.trained.losses.double()])
        fine, losses = both.tolist()
        if not all(fine):
            fine = exactly_finite_clients(self.trained.uploads, self.trained.losses).tolist()
        return [bool(number) for number in fine], losses


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
        downloads = simulation.download(asked)
        if not active:
            none = simulation.cohort.num_train.new_zeros(0)
            return Answers(Trained({}, {}, none), none.bool())
        results = []
        for group in simulation.groups.split(active):
            members = [active[i] for i in group]
            whole = len(members) == len(simulation.clients)
            memory = simulation.memory
            results.append(
                simulation.clients.take(members).train(
                    {n: t[group.start : group.stop] for n, t in downloads.items()},
                    memory if whole else {n: t[members] for n, t in memory.items()},
                    simulation.round,
                )
            )
        return Answers.of(joined(results))

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


def joined(results: Sequence[Trained]) -> Trained:
    """Return what several groups of clients have trained, as one."""
    if len(results) == 1:
        return results[0]

    def stacked(messages: Sequence[Message]) -> Message:
        return {n: torch.cat([message[n] for message in messages]) for n in messages[0]}

    return Trained(
        stacked([result.uploads for result in results]),
        stacked([result.memory for result in results]),
        torch.cat([result.losses for result in results]),
    )
