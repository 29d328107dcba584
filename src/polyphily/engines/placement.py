"""The processes that clients live in, and the transfer of rows between processes."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from polyphily.core.messages import Message, State
from polyphily.engines.team import Team
from polyphily.errors import UserError
from polyphily.graphs.loading import Federation


class Placement(Protocol):
    """The assignment of clients to processes.

    Clients are numbered through all federations of a simulation, from 0. Every process holds the
    graphs, models and memories of its own; the servers are those of the leading process.

    Attributes:
        members: the clients of each federation that live here, by their number in it.
        leads: whether this process holds the servers and writes what a run leaves.
        size: how many processes there are.
    """

    members: list[list[int]]
    leads: bool
    size: int

    def device(self, asked: str) -> str:
        """Return the device of this process where a run asks for `asked`."""

    def sharing(self, device: torch.device) -> int:
        """Return how many processes use the memory of a device."""

    def here(self, clients: Sequence[int]) -> list[int]:
        """Return the places in this process of those of `clients` that live here."""

    def share(self, rows: Tensor, clients: Sequence[int] | None = None) -> Tensor:
        """Return the rows of all clients, or of those given, from the rows of those here."""

    def gather(self, rows: Message, clients: Sequence[int], device: torch.device) -> Message:
        """Do the same with a message, for the leading process alone; the others get nothing."""

    def collect(
        self, rows: Message, device: torch.device, clients: Sequence[int] | None = None
    ) -> Message:
        """Return rows of all clients, or of those given, at the leading process.

        Args:
            rows: of all clients that live here.
            device: where they are wanted.
            clients: those that are wanted; all unless given.
        """

    def from_leader(self, states: list[State], device: torch.device) -> list[State]:
        """Return the server states that the leading process has."""

    def agree(self, decision: bool) -> bool:
        """Return what the leading process decides."""

    def share_looks(
        self, fine: list[bool], losses: list[float], clients: Sequence[int]
    ) -> tuple[list[bool], list[float]]:
        """Return the entries of all `clients` at every process, from those of the clients here."""

    def own_rows(self, rows: Message) -> Message:
        """Return the rows of the clients that live here, from rows of all."""

    def own_entries(self, entries: Sequence[bool], clients: Sequence[int]) -> list[bool]:
        """Return the entries of those of `clients` that live here, from one for each of them."""


class OneProcess:
    """All clients live in this process."""

    leads, size = True, 1

    def __init__(self, federations: Sequence[Federation]) -> None:
        self.members = [list(range(len(f.clients))) for f in federations]

    def device(self, asked: str) -> str:
        return asked

    def sharing(self, device: torch.device) -> int:
        return 1

    def here(self, clients: Sequence[int]) -> list[int]:
        return list(clients)

    def share(self, rows: Tensor, clients: Sequence[int] | None = None) -> Tensor:
        return rows

    def gather(self, rows: Message, clients: Sequence[int], device: torch.device) -> Message:
        return rows

    def collect(
        self, rows: Message, device: torch.device, clients: Sequence[int] | None = None
    ) -> Message:
        return rows if clients is None else {n: t[list(clients)] for n, t in rows.items()}

    def from_leader(self, states: list[State], device: torch.device) -> list[State]:
        return states

    def agree(self, decision: bool) -> bool:
        return decision

    def share_looks(
        self, fine: list[bool], losses: list[float], clients: Sequence[int]
    ) -> tuple[list[bool], list[float]]:
        return fine, losses

    def own_rows(self, rows: Message) -> Message:
        return rows

    def own_entries(self, entries: Sequence[bool], clients: Sequence[int]) -> list[bool]:
        return list(entries)


class ManyProcesses:
    """Clients live with the ranks of a team (torchrun), spread by the size of their graphs."""

    def __init__(self, federations: Sequence[Federation], team: Team) -> None:
        self.team, self.size, self.leads = team, team.size, team.leads
        graphs = [graph for f in federations for graph in f.clients]
        if len(graphs) < team.size:
            raise UserError(
                f"{team.size} ranks for {len(graphs)} clients: "
                f"start at most {len(graphs)} with torchrun --nproc-per-node"
            )
        costs = [graph.num_nodes + graph.edges.shape[1] for graph in graphs]
        shares = spread(costs, team.size)
        self.owners = [0] * len(graphs)
        for rank, own in enumerate(shares):
            for client in own:
                self.owners[client] = rank
        self.own = shares[team.rank]
        self._place = {client: place for place, client in enumerate(self.own)}
        self.members, start = [], 0
        for f in federations:
            self.members.append([k for k in range(len(f.clients)) if start + k in self._place])
            start += len(f.clients)

    def device(self, asked: str) -> str:
        return self.team.connect(asked)

    def sharing(self, device: torch.device) -> int:
        return self.team.on_one_device(device)

    def here(self, clients: Sequence[int]) -> list[int]:
        return [self._place[k] for k in clients if k in self._place]

    def share(self, rows: Tensor, clients: Sequence[int] | None = None) -> Tensor:
        wanted = range(len(self.owners)) if clients is None else clients
        return self.team.share({"": rows}, [self.owners[k] for k in wanted]).get("", rows)

    def gather(self, rows: Message, clients: Sequence[int], device: torch.device) -> Message:
        return self.team.collect(rows, [self.owners[k] for k in clients], device)

    def collect(
        self, rows: Message, device: torch.device, clients: Sequence[int] | None = None
    ) -> Message:
        wanted = range(len(self.owners)) if clients is None else clients
        mine = self.here(wanted)
        return self.gather({n: t[mine] for n, t in rows.items()}, wanted, device)

    def from_leader(self, states: list[State], device: torch.device) -> list[State]:
        message = {f"{s}/{n}": t for s, state in enumerate(states) for n, t in state.items()}
        found: list[State] = [{} for _ in states]
        for name, value in self.team.send(message, device).items():
            s, _, own = name.partition("/")
            found[int(s)][own] = value
        return found

    def agree(self, decision: bool) -> bool:
        return bool(self.team.same(decision))

    def share_looks(
        self, fine: list[bool], losses: list[float], clients: Sequence[int]
    ) -> tuple[list[bool], list[float]]:
        rows = torch.tensor([fine, losses], dtype=torch.float64).T
        shared = self.share(rows, clients).T
        return [bool(number) for number in shared[0].tolist()], shared[1].tolist()

    def own_rows(self, rows: Message) -> Message:
        return {n: t[self.own] for n, t in rows.items()}

    def own_entries(self, entries: Sequence[bool], clients: Sequence[int]) -> list[bool]:
        return [e for e, k in zip(entries, clients, strict=True) if k in self._place]


def spread(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Return who goes where, so that no rank has much more to do than another.

    The costliest first, each to the rank that has least so far.

    >>> spread([5, 1, 1, 4, 3], 2)
    [[0, 1, 2], [3, 4]]
    """
    heap = [(0, rank) for rank in range(ranks)]
    found: list[list[int]] = [[] for _ in range(ranks)]
    for client in sorted(range(len(costs)), key=lambda k: -costs[k]):
        load, rank = heapq.heappop(heap)
        found[rank].append(client)
        heapq.heappush(heap, (load + costs[client], rank))
    return [sorted(own) for own in found]
