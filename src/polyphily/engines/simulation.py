"""The round loop in one place: clients train, the server aggregates.

Several federations (one per seed) run side by side: their clients are stacked into one cohort, and
each federation has a server of its own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from polyphily.core.cohort import Cohort
from polyphily.core.local import Local
from polyphily.core.messages import Message, MessageError, State, Uploads, model_part, with_prefix
from polyphily.core.method import Method
from polyphily.core.optimizers import STEPS
from polyphily.core.settings import Settings
from polyphily.engines.attacks import Attack, Hostile, hostile_clients
from polyphily.engines.backends import Direct
from polyphily.engines.memory import Groups
from polyphily.engines.placement import OneProcess, Placement
from polyphily.engines.recorded import Recorded
from polyphily.errors import Diverged, MethodError
from polyphily.graphs.loading import Federation
from polyphily.nn.backbones import Backbone
from polyphily.runtime.client import Clients, Trained, cohort_of
from polyphily.runtime.machine import keep_freed_memory
from polyphily.runtime.network import build_network
from polyphily.runtime.server import RoundPlan, Server

UPLOADS = "uploads"  # in a checkpoint: how many uploads each client has made
MEMORY, STATE = "memory/", "state/"


@dataclass
class RoundReport:
    """A round before anything is scored; lists have an entry per federation."""

    round: int
    seconds: float
    loss: list[float | None]
    selected: list[list[int]]
    failed: list[list[int]]
    refused: list[list[int]]
    bytes_up: list[int]
    bytes_down: list[int]
    uploads: list[int]  # the most that a client has sent so far


class Simulation:
    """Federations of one method, advanced round by round.

    Args:
        method: what is trained.
        federations: one per seed; also several times the same, with rates of their own.
        settings: with every setting filled in.
        rates: (learning rate, weight decay) of each federation, in place of the settings'.
        cohort: that of these very federations, if it was made already.
        placement: which process each client lives in; by default all in this one.

    Attributes:
        clients: the clients of this process.
        servers: a server per federation.
        memory: what the clients of this process keep, stacked.
        round: how many rounds are complete.
        starts: where each federation's clients begin, among the clients that are scored.
        offsets: the same among all clients that can be drawn. Unless clients are on disk
            (`engines/drawn.py`), both are equal.
        stopped: clients that take no part any more (early stopping), over all federations.
        even: whether all clients of a federation have taken equally many steps.
        moves: how often states or memory have moved to other tensors; on a GPU they stay where
            they are, for recorded rounds to find them.
    """

    def __init__(
        self,
        method: Method,
        federations: Sequence[Federation],
        settings: Settings,
        rates: Sequence[tuple[float, float]] | None = None,
        *,
        cohort: Cohort | None = None,
        placement: Placement | None = None,
    ) -> None:
        self.method, self.federations = method, federations
        self.placement: Placement = placement or OneProcess(federations)
        self.settings = replace(settings, device=self.placement.device(settings.device))
        self.device = torch.device(self.settings.device)
        self.in_place = self.device.type == "cuda"
        if self.device.type == "cpu":
            keep_freed_memory()
        first, members = federations[0], self.placement.members
        here = [(s, f, k) for s, f in enumerate(federations) for k in members[s]]
        attack = Attack.parse(self.settings.attack)
        hostile = frozenset(
            (f.seed, k) for f in federations for k in hostile_clients(f, self.settings)
        )
        self.cohort = cohort or cohort_of(
            self.settings,
            [
                attack.on_graph(f.clients[k], len(f.classes))
                if attack is not None and (f.seed, k) in hostile
                else f.clients[k]
                for _, f, k in here
            ],
            [(f.seed, k) for _, f, k in here],
            len(first.classes),
            federations=[s for s, _, _ in here],
        )
        self.offsets: list[int] = [0, *np.cumsum([len(f.clients) for f in federations]).tolist()]
        self.starts = self.offsets
        width, classes = first.clients[0].num_features, len(first.classes)
        networks = [
            build_network(method, self.settings, width, classes, f.seed).to(self.device)
            for f in federations
        ]
        self.clients = Clients.create(
            method,
            networks[0],
            self.cohort,
            self.settings,
            population=len(first.clients),
            rates=rates,
            tamper=None if attack is None else Hostile(attack, hostile),
        )
        self.servers = [
            Server(method, network, self.settings, len(f.clients), f.seed)
            for network, f in zip(networks, federations, strict=True)
        ]
        self.memory = self.clients.initial_memory(self.initial_parameters(members))
        self.groups = Groups(self.clients, self.settings, self.placement.sharing(self.device))
        self.round, self.moves, self.even = 0, 0, True
        self.stopped: set[int] = set()
        self.upload_counts = np.zeros(self.offsets[-1], dtype=np.int64)  # by each client so far
        self._checked: Message | None = None  # uploads that agree with their declaration
        self.backend: Direct = Recorded(self) if self.device.type == "cuda" else Direct(self)

    @property
    def network(self) -> Backbone:
        """The network; its own parameters are not those of the clients."""
        return self.clients.network

    @property
    def states(self) -> list[State]:
        """The servers' states."""
        return [server.state for server in self.servers]

    @property
    def obstacle(self) -> str | None:
        """Why rounds are not replayed as CUDA graphs, if they are not."""
        return self.backend.obstacle

    # One round -------------------------------------------------------------------------------

    def advance(self) -> RoundReport:
        """Run the next round: send, train, upload, check, aggregate.

        Raises:
            Diverged: if no client of a federation sent finite numbers.
        """
        began = time.perf_counter()
        plans = [server.plan(self.round, self._stopped(s)) for s, server in enumerate(self.servers)]
        active = [
            start + k
            for start, plan in zip(self.offsets, plans, strict=False)
            for k in plan.answering
        ]
        here, asked = self.placement.here(active), self._asked_here(plans)
        answers = self.backend.train(here, asked)  # send, train, upload
        fine, losses = self.placement.share_looks(*answers.look(), active)
        self._check(plans, fine, answers.trained)
        complete = all(fine) and not self.settings.secure_aggregation and self.placement.size == 1
        states, bytes_up = self._aggregate(plans, active, fine, answers.trained, complete)
        own = self.placement.own_entries(fine, active)
        self.backend.store(here, answers.trained.memory, states, own, complete=complete)
        self.even &= len(active) == self.offsets[-1] and all(fine)
        report = self._report(plans, active, fine, losses, bytes_up, began)
        self.round += 1
        return report

    def _stopped(self, s: int) -> set[int]:
        first, end = self.offsets[s], self.offsets[s + 1]
        return {k - first for k in self.stopped if first <= k < end}

    def _asked_here(self, plans: Sequence[RoundPlan]) -> list[list[int]]:
        """Return the clients that train in this process, by federation, numbered in it."""
        if self.placement.size == 1:
            return [plan.answering for plan in plans]
        return [
            [k for k in plan.answering if self.placement.here([start + k])]
            for start, plan in zip(self.offsets, plans, strict=False)
        ]

    def stop(self, scored: Sequence[int]) -> None:
        """Let clients take no part any more, given by position among those that are scored."""
        self.stopped |= set(scored)

    @property
    def ended(self) -> bool:
        """True if every client has stopped."""
        return len(self.stopped) == self.offsets[-1]

    def download(self, clients: Sequence[Sequence[int]]) -> Message:
        """Return what the servers send to these clients of each federation, stacked.

        A server to which nobody has answered yet may lack an entry that others have, such as
        prototypes. It sends zeros then, which methods read as nothing.
        """
        asked = [(server, own) for server, own in zip(self.servers, clients, strict=True) if own]
        sent = [server.download(own) for server, own in asked]
        if len(sent) == 1:
            return sent[0]
        examples = {name: tensor for message in sent for name, tensor in message.items()}
        return {
            name: torch.cat(
                [
                    message[name] if name in message else like.new_zeros(len(own), *like.shape[1:])
                    for message, (_, own) in zip(sent, asked, strict=True)
                ]
            )
            for name, like in examples.items()
        }

    def _check(self, plans: Sequence[RoundPlan], fine: Sequence[bool], trained: Trained) -> None:
        """Compare uploads with their declaration; end the run where nobody's numbers are finite."""
        if len(trained.losses) and trained.uploads is not self._checked:
            self._checked = trained.uploads  # a replayed round fills the same tensors again
            try:
                self.servers[0].upload_contract(self.round).check(trained.uploads)
            except MessageError as error:
                raise MethodError(
                    f"{self.method.name} does not upload what it declares: an upload of round "
                    f"{self.round + 1} {error}"
                ) from None
        row = 0
        for s, plan in enumerate(plans):
            count = len(plan.answering)
            if count and not any(fine[row : row + count]):
                raise Diverged(
                    f"round {self.round + 1}: the update of every client was not finite "
                    f"({count} clients, seed {self.federations[s].seed}). The last good model is "
                    "that of the round before. A smaller --lr or --clip 1.0 usually mends this.",
                    federation=s,
                )
            row += count

    def _aggregate(
        self,
        plans: Sequence[RoundPlan],
        active: Sequence[int],
        fine: Sequence[bool],
        trained: Trained,
        complete: bool,
    ) -> tuple[list[State], list[int]]:
        """Return the servers' new states from the accepted uploads, and the bytes sent up."""
        size = self.servers[0].upload_contract(self.round).bytes
        bytes_up = [size * len(plan.answering) for plan in plans]
        gathered = self.placement.gather(trained.uploads, active, self.device)

        def arrived() -> list[Uploads | None]:
            found: list[Uploads | None] = []
            start = 0
            for s, plan in enumerate(plans):
                rows = [start + i for i in range(len(plan.answering)) if fine[start + i]]
                uploads = _rows_of(gathered, rows, [plan.answering[row - start] for row in rows])
                if uploads is not None and self.settings.secure_aggregation:
                    uploads, bytes_up[s] = self._summed(uploads, plan.asked)
                found.append(uploads)
                start += len(plan.answering)
            return found

        leads = self.placement.leads
        states = self.backend.aggregate(arrived, complete=complete) if leads else self.states
        return self.placement.from_leader(states, self.device), bytes_up

    def _summed(self, uploads: Uploads, asked: Sequence[int]) -> tuple[Uploads, int]:
        """Return the sums of uploads by secure aggregation among all asked, and the bytes sent."""
        from polyphily.privacy.secure_aggregation import sum_securely

        return sum_securely(uploads, asked, self.servers[0].weights_of_means())

    def _report(
        self,
        plans: Sequence[RoundPlan],
        active: Sequence[int],
        fine: Sequence[bool],
        losses: Sequence[float],
        bytes_up: list[int],
        began: float,
    ) -> RoundReport:
        ends = np.cumsum([0, *(len(plan.answering) for plan in plans)]).tolist()
        contract = self.servers[0].upload_contract(self.round)
        self.upload_counts[active] += bool(contract.shapes)
        down = self.servers[0].download_contract(self.round).bytes
        return RoundReport(
            round=self.round + 1,
            seconds=time.perf_counter() - began,
            loss=[float(np.mean(losses[a:b])) if b > a else None for a, b in pairwise(ends)],
            selected=[plan.asked for plan in plans],
            failed=[plan.failing for plan in plans],
            refused=[
                [k for row, k in enumerate(plan.answering, start) if not fine[row]]
                for start, plan in zip(ends, plans, strict=False)
            ],
            bytes_up=bytes_up,
            bytes_down=[down * len(plan.asked) for plan in plans],
            uploads=[int(self.upload_counts[a:b].max()) for a, b in pairwise(self.offsets)],
        )

    # Views -----------------------------------------------------------------------------------

    def received(self) -> Local:
        """Return the clients of this process with the models that the servers would send now."""
        return self.clients.received(self.download(self.placement.members), self.memory, self.round)

    def trained(self) -> Local:
        """Return the clients of this process with their own models, before aggregation."""
        return self.clients.trained(self.memory, self.round)

    def predict(self, view: Local) -> Tensor:
        """Return class scores of every node of every client, dropout off."""
        groups = self.groups.to_predict()
        if len(groups) == 1:
            return self.clients.predict(view)
        return torch.cat([self.clients.predict(self._of_clients(view, own)) for own in groups])

    def _of_clients(self, view: Local, clients: range) -> Local:
        """Return a view of some consecutive clients."""
        cut = slice(clients.start, clients.stop)

        def rows(message: Message) -> Message:
            return {name: tensor[cut] for name, tensor in message.items()}

        return replace(
            view,
            cohort=self.cohort.take(list(clients)),
            params=rows(view.params),
            received=rows(view.received),
            memory=rows(view.memory),
        )

    def trained_models(self, federation: int = 0) -> Message:
        """Return the models that a federation's clients trained last, at the leading process."""
        clients = range(self.starts[federation], self.starts[federation + 1])
        return self.placement.collect(model_part(self.memory), self.device, clients)

    def initial_parameters(self, members: Sequence[Sequence[int]]) -> Message:
        """Return the initial parameters of some clients of each federation, stacked."""
        initial = [{n: p.detach() for n, p in s.network.named_parameters()} for s in self.servers]
        return {
            name: torch.cat(
                [
                    own[name].expand(len(clients), *own[name].shape[1:])
                    for own, clients in zip(initial, members, strict=True)
                ]
            )
            for name in initial[0]
        }

    # What a checkpoint holds -----------------------------------------------------------------

    def tensors(self) -> Message:
        """Return what a checkpoint holds, complete at the leading process."""
        memory = self.placement.collect(self.memory, self.device)
        return self._saved(memory, self.states, slice(None))

    def part(self, federations: range) -> Message:
        """Return the same for consecutive federations, as if they had run by themselves."""
        clients = slice(self.starts[federations.start], self.starts[federations.stop])
        return self._saved(self.memory, [self.states[s] for s in federations], clients)

    def _saved(self, memory: Message, states: Sequence[State], clients: slice) -> Message:
        saved = {MEMORY + n: t[clients] for n, t in memory.items()}
        for s, state in enumerate(states):
            saved |= {f"{STATE}{s}/{n}": t for n, t in state.items()}
        return saved | (
            {UPLOADS: torch.from_numpy(self.upload_counts[clients].copy())}
            if self.clients.guard
            else {}
        )

    def commit(self) -> None:
        """Note that a checkpoint is complete."""

    def start_again(self) -> None:
        """Go back to the beginning, before any round."""

    def restore(self, tensors: Message, round_index: int, stopped: Sequence[int]) -> None:
        """Go back to a checkpoint (`tensors`)."""
        memory = self.placement.own_rows(with_prefix(tensors, MEMORY))
        states = [with_prefix(tensors, f"{STATE}{s}/") for s in range(len(self.servers))]
        if UPLOADS in tensors:
            self.upload_counts = tensors[UPLOADS].cpu().numpy().copy()
        self.set_state(memory, states, round_index)
        self.stopped = set(stopped)

    def set_state(self, memory: Message, states: Sequence[State], rounds: int) -> None:
        """Take over what clients of this process and servers held after some rounds."""
        self.round = rounds
        self.moves += 1
        self.memory = {n: memory[n].to(t.device) for n, t in self.memory.items()}
        for server, state in zip(self.servers, states, strict=True):
            server.state = {n: t.to(self.device) for n, t in state.items()}
        counts = self.memory.get(STEPS)
        blocks = [] if counts is None else [set(counts[b].tolist()) for b in self.cohort.blocks]
        self.even = all(len(block) == 1 for block in blocks)


def _rows_of(message: Message, rows: list[int], clients: list[int]) -> Uploads | None:
    """Return some rows as the uploads of these clients; None without any."""
    if not rows:
        return None
    together = rows == list(range(rows[0], rows[-1] + 1))
    cut = slice(rows[0], rows[-1] + 1) if together else rows
    return Uploads(tuple(clients), {n: t[cut] for n, t in message.items()})
