"""Simulations of many clients: a round works on the clients that are drawn, and no others.

The states of clients are in a file (`engines/states.py`), and their graphs may be as well
(`graphs/mapped.py`). A round reads those of the clients that it draws, packs them into a cohort,
trains this cohort as any other, and writes the new states back. Memory holds the clients drawn and
the clients that are scored, which are a fixed sample.
"""

from __future__ import annotations

import tempfile
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from polyphily.core.messages import Message, State
from polyphily.core.method import Method, sizes_of
from polyphily.core.settings import Settings
from polyphily.engines.backends import Answers, Direct, joined
from polyphily.engines.memory import Groups
from polyphily.engines.placement import OneProcess
from polyphily.engines.simulation import Simulation
from polyphily.engines.states import ClientStates
from polyphily.engines.storage import overwrite
from polyphily.errors import UserError
from polyphily.graphs.loading import Federation
from polyphily.graphs.mapped import MappedGraphs
from polyphily.graphs.random import generator
from polyphily.nn.backbones import Backbone
from polyphily.runtime.client import Clients, cohort_of
from polyphily.runtime.network import build_network


def scored_clients(federation: Federation, settings: Settings) -> list[int]:
    """Return the clients that are scored, a fixed sample of all."""
    count = min(settings.scored_clients, len(federation))
    if count == len(federation):
        return list(range(count))
    rng = generator(federation.seed, "scored clients")
    chosen: list[int] = np.sort(rng.choice(len(federation), count, replace=False)).tolist()
    return chosen


def kept_for_all(method: Method, network: Backbone) -> list[str]:
    """Return the entries of a server's state that have a row for every client."""
    initial = {n: p.detach()[0] for n, p in network.named_parameters()}
    shared = {name: initial[name] for name in sizes_of(method, network, 2).parameters}
    small, large = (method.init_server_state(shared, clients) for clients in (2, 3))
    return [n for n, t in small.items() if t.shape != large[n].shape]


def reason_against_drawing(method: Method, network: Backbone) -> str | None:
    """Return why a round cannot do without all clients; None if those drawn are enough."""
    found = kept_for_all(method, network)
    if not found:
        return None
    names = ", ".join(dict.fromkeys(name.rpartition("/")[2] for name in found[:3]))
    more = ", …" if len(found) > 3 else ""
    return f"the server of {method.name} keeps something for every client ({names}{more})"


def check_drawn(method: Method, settings: Settings, federation: Federation) -> None:
    """Refuse what needs all clients at once.

    Raises:
        UserError: with the reason.
    """
    first = federation.clients[0]
    network = build_network(
        method, settings, first.num_features, len(federation.classes), federation.seed
    )
    if reason := reason_against_drawing(method, network):
        raise UserError(
            f"--on-disk: {reason}, so that its memory and time grow with all clients: choose "
            "another method, or --no-on-disk and fewer clients"
        )
    for flag, given, reason in (
        ("engine flower", settings.engine == "flower", "every site keeps its own state"),
        ("attack", settings.attack != "off", "hostile clients are chosen among all graphs"),
        (
            "patience with --selection client",
            settings.patience > 0 and "client" in (settings.selection, method.selection),
            "clients that are not scored cannot stop",
        ),
    ):
        if given:
            raise UserError(f"--on-disk does not go with --{flag}: {reason}")


class Sample(OneProcess):
    """The clients of all federations, of which a sample is scored.

    Args:
        members: the clients of each federation that are scored.
    """

    def __init__(self, members: list[list[int]]) -> None:
        self.members = members


class DrawnSimulation(Simulation):
    """A simulation whose clients' states are on disk.

    Seen from outside it is the simulation of the clients that are scored: `federations`, `cohort`,
    `memory` and `starts` are theirs.

    Args:
        method: what is trained.
        population: the federations with all clients, one per seed.
        settings: with every setting filled in.
        rates: (learning rate, weight decay) of each federation, in place of the settings'.
        members: the clients of each federation that are scored.
        folder: where the states are kept; None: a temporary one.
    """

    def __init__(
        self,
        method: Method,
        population: Sequence[Federation],
        settings: Settings,
        rates: Sequence[tuple[float, float]] | None = None,
        *,
        members: list[list[int]],
        folder: Path | None = None,
    ) -> None:
        super().__init__(method, population, settings, rates, placement=Sample(members))
        self.population, self.members = population, members
        self.federations = [f.some(own) for f, own in zip(population, members, strict=True)]
        self.starts = [0, *np.cumsum([len(own) for own in members]).tolist()]
        self._scored = [
            start + k for start, own in zip(self.offsets, members, strict=False) for k in own
        ]
        self._temporary = None if folder else tempfile.TemporaryDirectory(prefix="polyphily-")
        place = folder or Path(self._temporary.name if self._temporary else "")
        self.client_states = ClientStates(
            place, self.offsets[-1], self.memory, undoable=folder is not None
        )
        self._memory: Message | None = None
        self.backend = OnDisk(self)

    @property
    def memory(self) -> Message:
        """The states of the clients that are scored, stacked."""
        if self._memory is None:
            self._memory = self.read(self._scored, self.clients)
        return self._memory

    @memory.setter
    def memory(self, states: Message) -> None:
        self._memory = states

    def drawn(self, clients: Sequence[int]) -> Clients:
        """Return some clients, by number among all, with their graphs in memory."""
        places = [bisect_right(self.offsets, number) - 1 for number in clients]
        own = [(s, n - self.offsets[s]) for s, n in zip(places, clients, strict=True)]
        cohort = cohort_of(
            self.settings,
            [self.population[s].clients[k] for s, k in own],
            [(self.population[s].seed, k) for s, k in own],
            self.cohort.classes,
            federations=places,
        )
        for federation in self.population:
            if isinstance(federation.clients, MappedGraphs):
                federation.clients.release()
        present = list(dict.fromkeys(places))
        return replace(self.clients, cohort=cohort, optimizer=self.clients.optimizer.only(present))

    def read(self, numbers: Sequence[int], clients: Clients) -> Message:
        """Return the states of some clients, stacked.

        Args:
            numbers: of the clients among all.
            clients: the same clients.
        """

        def initial(rows: Sequence[int]) -> Message:
            new = clients.take(rows)
            members: list[list[int]] = [[] for _ in self.servers]
            for row, s in enumerate(new.cohort.federations):
                members[s].append(row)
            return new.initial_memory(self.initial_parameters(members))

        return self.client_states.read(numbers, initial, self.device)

    def write(self, numbers: Sequence[int], states: Message) -> None:
        """Keep the states of some clients."""
        self.client_states.write(numbers, states)
        self._memory = None

    def stop(self, scored: Sequence[int]) -> None:
        """Let whole federations stop whose scored clients have."""
        for s, server in enumerate(self.servers):
            if self.starts[s] in scored:
                self.stopped |= set(range(self.offsets[s], self.offsets[s] + server.clients))

    # What a checkpoint holds -----------------------------------------------------------------

    def tensors(self) -> Message:
        """Return what a checkpoint holds; the states of clients are in their file already."""
        return self._saved({}, self.states, slice(None))

    def commit(self) -> None:
        self.client_states.commit(self.round)

    def start_again(self) -> None:
        self.client_states.roll_back(0)
        self._memory = None

    def set_state(self, memory: Message, states: Sequence[State], rounds: int) -> None:
        """Take over what servers held after some rounds, and go back to the clients' states."""
        self.round, self.even = rounds, False
        for server, state in zip(self.servers, states, strict=True):
            server.state = {n: t.to(self.device) for n, t in state.items()}
        self.client_states.roll_back(rounds)
        self._memory = None


class OnDisk(Direct):
    """Does the work of a round step by step, for clients whose states are on disk."""

    simulation: DrawnSimulation

    def train(self, active: Sequence[int], asked: Sequence[Sequence[int]]) -> Answers:
        simulation = self.simulation
        if not active:
            return super().train(active, asked)
        downloads = simulation.download(asked)
        clients = simulation.drawn(active)
        states = simulation.read(active, clients)
        results = []
        for group in Groups(clients, simulation.settings).split(range(len(active))):
            rows = slice(group.start, group.stop)
            trained = clients.take(group).train(
                {n: t[rows] for n, t in downloads.items()},
                {n: t[rows] for n, t in states.items()},
                simulation.round,
            )
            results.append(Answers.of(trained))
        return joined(results)

    def store(
        self,
        active: Sequence[int],
        memory: Message,
        states: Sequence[State],
        fine: Sequence[bool],
        *,
        complete: bool,
    ) -> None:
        simulation = self.simulation
        for server, state in zip(simulation.servers, states, strict=True):
            overwrite(server.state, state, in_place=False)
        rows = [row for row, accepted in enumerate(fine) if accepted]
        accepted = {n: t[torch.tensor(rows, device=t.device)] for n, t in memory.items()}
        simulation.write([active[row] for row in rows], accepted)
