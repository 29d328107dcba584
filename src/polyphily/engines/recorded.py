"""The back end for a GPU: a round is recorded once as CUDA graphs and replayed.

Three pieces are recorded: the clients' part, the servers' part, and storing what came of both.
They are recorded for every phase (`Method.phase`), since rounds of one phase do the same work. A
phase of a single round is not recorded unless it comes again. Rounds that cannot be recorded are
run step by step, and `obstacle` says why.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, cast

import numpy as np

from polyphily.core.messages import Message, State, Uploads
from polyphily.engines.backends import Answers, Arrived, Direct
from polyphily.engines.replay import Given, Replay, ServerDraws
from polyphily.engines.storage import detached_from, overwrite
from polyphily.runtime.client import Trained

if TYPE_CHECKING:
    from polyphily.engines.simulation import Simulation


@dataclass(frozen=True)
class _Recording:
    """The recorded pieces of a round."""

    clients: Replay[Answers]
    servers: Replay[list[State]]
    store: Replay[bool]


class Recorded(Direct):
    """Replays rounds as CUDA graphs where it can."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation)
        self._recordings: dict[Hashable, _Recording] = {}
        self._seen: set[Hashable] = set()  # phases of a single round, which were not recorded
        self._moves = 0  # `Simulation.moves` when the recordings were made
        self._current: _Recording | None = None  # that of the round in progress, if replayed
        self._ahead = False  # whether its servers' part has been replayed, too

    def train(self, active: Sequence[int], asked: Sequence[Sequence[int]]) -> Answers:
        simulation = self.simulation
        self._current = None
        self.obstacle = self._obstacle(active)
        if self.obstacle is not None:
            return super().train(active, asked)
        if self._moves != simulation.moves:  # tensors are elsewhere: the recordings are void
            self._recordings.clear()
            self._seen.clear()
            self._moves = simulation.moves
        phase = simulation.method.phase(simulation.round)
        if phase not in self._recordings:
            if phase not in self._seen and phase != simulation.method.phase(simulation.round + 1):
                self._seen.add(phase)
                self.obstacle = "no other round does the same work"
                return super().train(active, asked)
            self._recordings[phase] = self._record()
        work = self._recordings[phase]
        answers = work.clients(simulation.round)
        self._ahead = answers is not None and self._complete and work.servers.recorded
        if self._ahead:  # before the host looks at the answers, which it rarely refuses
            work.servers(simulation.round)
        server = work.servers.obstacle
        self.obstacle = work.clients.obstacle or (server and f"at the server, {server}")
        if answers is None:
            return super().train(active, asked)
        if simulation.settings.secure_aggregation:
            self.obstacle = "secure aggregation runs on the CPU, between the clients"
        self._current = work
        return answers

    @property
    def _complete(self) -> bool:
        """True if the servers aggregate what the clients upload, and all of it."""
        simulation = self.simulation
        return not simulation.settings.secure_aggregation and simulation.placement.size == 1

    def _obstacle(self, active: Sequence[int]) -> str | None:
        """Return why this round is not the same work as every round of its phase."""
        simulation = self.simulation
        low, high = simulation.clients.epochs
        if not simulation.even or len(active) < len(simulation.clients):
            return "not every client takes part in every round"
        if low != high:
            return "clients draw their number of steps"
        if simulation.cohort.sampling is not None:
            return "every step has a sample of its own"
        if simulation.settings.engine != "stacked" or len(simulation.groups.split(active)) > 1:
            return "clients train one group after the other"
        return None

    def aggregate(self, arrived: Arrived, *, complete: bool) -> list[State]:
        work = self._current
        if complete and work is not None:
            states = work.servers.result if self._ahead else work.servers(self.simulation.round)
            if states is not None:
                return states
        return super().aggregate(arrived, complete=complete)

    def store(
        self,
        active: Sequence[int],
        memory: Message,
        states: Sequence[State],
        fine: Sequence[bool],
        *,
        complete: bool,
    ) -> None:
        work = self._current
        recorded = complete and work is not None and work.servers.recorded
        if recorded and work is not None and work.store(self.simulation.round) is not None:
            return
        super().store(active, memory, states, fine, complete=complete)

    def _record(self) -> _Recording:
        """Prepare the recording of a round; the pieces are recorded when they are first called."""
        simulation = self.simulation
        members, memory, device = simulation.placement.members, simulation.memory, simulation.device
        first = simulation.round

        def at_clients(given: Given) -> Answers:
            downloads = simulation.download(members)
            trained = simulation.clients.train(downloads, memory, first, host=given)
            kept = detached_from(trained.memory, memory)
            return Answers.of(Trained(trained.uploads, kept, trained.losses))

        clients = Replay(at_clients, device)

        def at_servers(given: Given) -> list[State]:
            assert clients.result is not None
            uploads, states = clients.result.trained.uploads, []
            rows = pairwise(simulation.starts)
            for server, own, (a, b) in zip(simulation.servers, members, rows, strict=True):
                sent = Uploads(tuple(own), {n: t[a:b] for n, t in uploads.items()})
                draws = cast(np.random.Generator, ServerDraws(given, server.draws))
                state = server.aggregate(sent, first, draws)
                states.append(detached_from(state, server.state))
            return states

        servers = Replay(at_servers, device)

        def store(given: Given) -> bool:
            assert clients.result is not None
            assert servers.result is not None
            held = [memory, *(server.state for server in simulation.servers)]
            fresh = [clients.result.trained.memory, *servers.result]
            for old, new in zip(held, fresh, strict=True):  # new entries make recordings void
                simulation.moves += overwrite(old, new, in_place=True)
            return True

        return _Recording(clients, servers, Replay(store, device))
