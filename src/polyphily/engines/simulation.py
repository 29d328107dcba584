"""The round loop: clients train, the server aggregates, both views of every model are scored.

Several federations (one per seed) run side by side: their clients are stacked into one cohort, and
each federation has a server state of its own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from polyphily.core.cohort import Cohort
from polyphily.core.local import Local, Message, as_model, model_part
from polyphily.core.method import Method, State, Uploads
from polyphily.core.optimizers import PREFIX as OPTIMIZER
from polyphily.core.optimizers import STEPS, OptimizerSpec, initial_state
from polyphily.core.sampling import Sampling
from polyphily.core.settings import MIXED, Settings
from polyphily.engines.replay import Given, Replay, ServerDraws, Unknown
from polyphily.errors import Diverged
from polyphily.graphs.loading import Federation
from polyphily.graphs.random import derive, generator
from polyphily.nn.backbones import Backbone, Shape
from polyphily.nn.sparse import flat
from polyphily.privacy.differential import Guard, guard_of

UPLOADS = "uploads"
Plan: TypeAlias = tuple[list[int], list[int], list[int]]  # selected, failed, answering
IN_CACHE = 1 << 25  # bytes; four rates on clients of 60 nodes took 0.6 of the time, on Cora 1.1
ACTIVATIONS = 16  # numbers kept per node and hidden unit in a layer's forward and backward pass


def train_locally(
    method: Method,
    network: Backbone,
    cohort: Cohort,
    received: Message,
    memory: Message,
    optimizer: OptimizerSpec,
    steps: Sequence[int],
    round_index: int,
    given: Given | None = None,
    guard: Guard | None = None,
) -> tuple[Message, Message, Tensor]:
    """One round at the clients of a cohort, one or many: what a deployed site runs, too.

    Args:
        method: what is trained.
        network: the backbone.
        cohort: the clients.
        received: what the server sent.
        memory: what the clients have kept.
        optimizer: which optimiser they use.
        steps: how many steps each client takes.
        round_index: the round, from 0.
        given: where the round is recorded to be replayed: brings in what the host computes. The
            clients of a federation have then taken equally many steps.
        guard: clips and noises what is uploaded, under differential privacy.

    Returns:
        What the clients upload, their memories after the round, and each client's mean loss.
    """
    alike = len(set(steps)) == 1
    number = round_index if given is None else given(lambda r: np.asarray(r, dtype=np.int64))
    draws = cohort.draws(number)
    local = Local(
        cohort=cohort,
        network=network,
        params={},
        received=received,
        memory=dict(memory),
        optimizer=optimizer,
        steps=tuple(steps),
        phase=method.phase(round_index),
        round_index=round_index if given is None else cast(int, Unknown("the round's number")),
        draws=draws,
        even=alike if given is not None or not optimizer.keep else None,
        give=given,
    )
    local.params = {
        name: value.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
        for name, value in method.receive(local).items()
    }
    if optimizer.keep:  # the optimiser steps in place: a refused round must not be felt
        kept_state = {n: t.clone() for n, t in memory.items() if n.startswith(OPTIMIZER)}
        local.memory |= kept_state
    else:
        local.memory |= initial_state(optimizer, local.params)
    if cohort.sampling is None:
        local.constants = method.begin(local)
    method.train(local)
    with torch.no_grad():
        upload = {name: value.detach() for name, value in method.upload(local).items()}
        if guard is not None:
            upload = guard(upload, received, draws)
        changed = {name: value.detach() for name, value in method.update_memory(local).items()}
    trained = as_model({name: value.detach() for name, value in local.params.items()})
    kept = {n: t for n, t in local.memory.items() if optimizer.keep or not n.startswith(OPTIMIZER)}
    losses = cohort.num_train.new_zeros(len(cohort)) if local.losses is None else local.losses
    return upload, {**kept, **changed, **trained}, losses


def payload(message: Message) -> int:
    """Bytes of one client's share of a message."""
    return sum(t.numel() // len(t) * t.element_size() for t in message.values())


@dataclass(frozen=True)
class Trained:
    """What a round at the clients leaves: stacked over those that took part.

    Attributes:
        uploads: what they send.
        memory: what they keep.
        losses: their mean losses.
        fine: whether a client's sums are finite; a sum may also be too large.
        bytes_down: what was sent to each.
        aggregated: the servers' new states from all uploads, where that is recorded.
        commit: stores these states and the memories, where that is recorded; whether it did.
    """

    uploads: Message
    memory: Message
    losses: Tensor
    fine: Tensor
    bytes_down: int
    aggregated: Callable[[], list[State] | None] | None = None
    commit: Callable[[], bool] | None = None

    @classmethod
    def of(cls, uploads: Message, memory: Message, losses: Tensor, downloads: Message) -> Trained:
        fine = torch.isfinite(losses)
        for tensor in uploads.values():  # NaN and infinity stay in a sum, and a sum is cheap
            fine = fine & torch.isfinite(flat(tensor).sum(dim=1))
        return cls(uploads, memory, losses, fine, payload(downloads))

    def look(self) -> tuple[list[bool], list[float]]:
        """Which clients sent finite numbers only (the loss stands in where nothing is sent), and
        the losses: the one time in a round that the host waits for the device."""
        fine, losses = torch.stack([self.fine.double(), self.losses.double()]).tolist()
        if not all(fine):  # look at every number
            exact = torch.isfinite(self.losses)
            for tensor in self.uploads.values():
                exact &= torch.isfinite(flat(tensor)).all(dim=1)
            fine = exact.tolist()
        return [bool(number) for number in fine], losses


@dataclass(frozen=True)
class _Recording:
    """The recorded parts of a round."""

    clients: Replay[Trained]
    servers: Replay[list[State]]
    commit: Replay[bool]


@dataclass
class RoundReport:
    """What happened in a round, before anything is scored."""

    round: int
    seconds: float
    loss: list[float | None]
    selected: list[list[int]]
    failed: list[list[int]]
    refused: list[list[int]]
    bytes_up: list[int]
    bytes_down: list[int]
    uploads: list[int]  # the most that a client of each federation has sent so far


@dataclass
class Simulation:
    """Federations of one method, advanced round by round.

    Attributes:
        method: what is trained.
        federations: one per seed; also several times the same, with rates of their own.
        settings: with every knob filled in.
        rates: (learning rate, weight decay) of each federation, in place of the settings'.
        states: the servers' states.
        memory: what the clients keep, stacked over all federations' clients.
        round: how many rounds are complete.
        stopped: clients that take no part any more (early stopping), over all federations.
        obstacle: why rounds are not replayed as CUDA graphs, if they are not.
        known: the cohort of these very federations, where it is at hand already.
        moves: how often states or memories have moved to other tensors; they stay where they are
            on a GPU, for what is recorded to find them.
    """

    method: Method
    federations: Sequence[Federation]
    settings: Settings
    rates: Sequence[tuple[float, float]] | None = None
    states: list[State] = field(default_factory=list)
    memory: Message = field(default_factory=dict)
    round: int = 0
    stopped: set[int] = field(default_factory=set)
    obstacle: str | None = None
    moves: int = 0
    known: Cohort | None = None

    def __post_init__(self) -> None:
        settings, first = self.settings, self.federations[0]
        self.device = torch.device(settings.device)
        self.dtype = getattr(torch, settings.dtype)
        self.members = self._members()
        here = [(s, f, k) for s, f in enumerate(self.federations) for k in self.members[s]]
        self.cohort = self.known or Cohort(
            [f.clients[k] for _, f, k in here],
            [(f.seed, k) for _, f, k in here],
            len(first.classes),
            federations=[s for s, _, _ in here],
            device=self.device,
            dtype=self.dtype,
            mixed=settings.precision == MIXED,
            sampling=Sampling.of(settings),
        )
        self.memory_budget = settings.memory_limit() or free_memory(self.device) // 2
        self.starts = [0, *np.cumsum([len(f.clients) for f in self.federations]).tolist()]
        self.optimizer = self._optimizer()
        shape = network_shape(settings, self.cohort.num_features, len(first.classes))
        assert settings.backbone is not None
        networks = [
            self.method.build(settings.backbone, shape, derive(f.seed, "initial parameters"))
            for f in self.federations
        ]
        self.network = networks[0].to(self.device, self.dtype)
        self.guard = guard_of(self.method, settings)
        self.uploads = torch.zeros(self.starts[-1], dtype=torch.int64)  # by each client so far
        self._even = True  # all clients of a federation have taken equally many steps
        self._recorded: dict[Hashable, _Recording] = {}
        self._open([n.to(self.device, self.dtype) for n in networks])

    def _members(self) -> list[list[int]]:
        """The clients of each federation that live in this process: all of them."""
        return [list(range(len(f.clients))) for f in self.federations]

    def _optimizer(self) -> OptimizerSpec:
        settings = self.settings
        assert settings.lr is not None
        assert settings.optimizer is not None
        assert settings.weight_decay is not None
        rates = self.rates or []
        return OptimizerSpec(
            kind=settings.optimizer,
            lr=tuple(lr for lr, _ in rates) or settings.lr,
            weight_decay=tuple(decay for _, decay in rates) or settings.weight_decay,
            momentum=settings.momentum,
            clip=settings.clip,
            keep=bool(settings.keep_optimizer),
        )

    def _open(self, networks: Sequence[Backbone]) -> None:
        initial = [{n: p.detach() for n, p in net.named_parameters()} for net in networks]
        params = {
            name: torch.cat(
                [
                    own[name].expand(len(ks), *own[name].shape[1:])
                    for own, ks in zip(initial, self.members, strict=True)
                ]
            )
            for name in initial[0]
        }
        shared = [n for n in params if self.method.shares(self.network, n)]
        self.states = [
            self.method.open({n: own[n][0].clone() for n in shared}, len(f.clients))
            for own, f in zip(initial, self.federations, strict=True)
        ]
        self.memory = {
            **as_model(params),
            **(initial_state(self.optimizer, params) if self.optimizer.keep else {}),
            **self.method.remember(self.cohort, self.network, params),
        }

    # One round -------------------------------------------------------------------------------

    def advance(self) -> RoundReport:
        """Runs the next round."""
        began = time.perf_counter()
        plan = [self._plan(s) for s in range(len(self.federations))]
        active = [self.starts[s] + k for s, (_, _, ks) in enumerate(plan) for k in ks]
        counts = [len(ks) for _, _, ks in plan]
        ends = np.cumsum([0, *counts]).tolist()
        trained = self._trained(active, [ks for _, _, ks in plan])
        finite, loss = trained.look()
        good = [[row for row in range(a, b) if finite[row]] for a, b in pairwise(ends)]
        for s, count in enumerate(counts):
            if count and not good[s]:
                raise Diverged(
                    f"round {self.round + 1}: the update of every client was not finite "
                    f"({count} clients, seed {self.federations[s].seed}). The last good model is "
                    "that of the round before. A smaller --lr or --clip 1.0 usually mends this.",
                    federation=s,
                )
        self.uploads[active] += bool(trained.uploads)
        states, bytes_up = self._aggregate(plan, good, trained)
        if not (trained.commit and all(finite) and trained.commit()):
            for state, renewed in zip(self.states, states, strict=True):
                self._store(state, renewed)
            self._keep(active, trained.memory, finite)
        self._even &= len(active) == self.starts[-1] and all(finite)
        self.round += 1
        return RoundReport(
            round=self.round,
            seconds=time.perf_counter() - began,
            loss=[float(np.mean(loss[a:b])) if b > a else None for a, b in pairwise(ends)],
            selected=[chosen for chosen, _, _ in plan],
            failed=[lost for _, lost, _ in plan],
            refused=[
                [k for row, k in enumerate(ks, start) if not finite[row]]
                for start, (_, _, ks) in zip(ends, plan, strict=False)
            ],
            bytes_up=bytes_up,
            bytes_down=[trained.bytes_down * len(chosen) for chosen, _, _ in plan],
            uploads=[int(self.uploads[a:b].max()) for a, b in pairwise(self.starts)],
        )

    def _trained(self, active: Sequence[int], clients: Sequence[Sequence[int]]) -> Trained:
        """The round at the clients."""
        return self._replayed(active) or self._train(active, clients)

    def _aggregate(
        self, plan: Sequence[Plan], good: Sequence[Sequence[int]], trained: Trained
    ) -> tuple[list[State], list[int]]:
        """The servers' new states from the rows of uploads that are good, and the bytes sent."""
        ends = np.cumsum([0, *[len(ks) for _, _, ks in plan]]).tolist()
        bytes_up = [payload(trained.uploads) * len(ks) for _, _, ks in plan]
        if trained.aggregated and sum(map(len, good)) == ends[-1]:
            recorded = trained.aggregated()
            if recorded is not None:
                return recorded, bytes_up
        states = list(self.states)
        for s, rows in enumerate(good):
            if rows:
                answered = [plan[s][2][row - ends[s]] for row in rows]
                uploads = self._uploads(answered, rows, trained)
                if self.settings.secure_aggregation:
                    uploads, bytes_up[s] = self._folded(uploads, plan[s][0])
                rng = self._server_rng(s, self.round)
                states[s] = self.method.aggregate(self.states[s], uploads, rng)
        return states, bytes_up

    def _uploads(self, clients: Sequence[int], rows: Sequence[int], trained: Trained) -> Uploads:
        """What arrives from some clients of a federation, which are those in `rows`."""
        together = list(rows) == list(range(rows[0], rows[-1] + 1))
        cut = slice(rows[0], rows[-1] + 1) if together else list(rows)
        return Uploads(tuple(clients), {n: t[cut] for n, t in trained.uploads.items()})

    def _folded(self, uploads: Uploads, asked: Sequence[int]) -> tuple[Uploads, int]:
        """The sums of the uploads, by secure aggregation among all that were asked, and bytes."""
        from polyphily.privacy.secure_aggregation import folded

        assert not isinstance(self.method.averaged, str)
        return folded(uploads, asked, self.method.averaged)

    def _server_rng(self, s: int, round_index: int) -> np.random.Generator:
        return generator(self.federations[s].seed, f"server/{round_index}")

    # Replaying a round -----------------------------------------------------------------------

    def _replayed(self, active: Sequence[int]) -> Trained | None:
        """The round as a CUDA graph, where it is the same work as every round of its phase."""
        low, high = self.settings.epoch_range()
        if self.device.type != "cuda":
            return None
        if not self._even or len(active) < len(self.cohort):
            self.obstacle = "not every client takes part in every round"
        elif low != high:
            self.obstacle = "clients draw their number of steps"
        elif self.cohort.sampling is not None:
            self.obstacle = "every step has a sample of its own"
        elif self.settings.engine != "stacked" or len(self._groups(active)) > 1:
            self.obstacle = "clients train one group after the other"
        else:
            phase = self.method.phase(self.round)
            if phase not in self._recorded:
                self._recorded[phase] = self._recording()
            work = self._recorded[phase]
            trained = work.clients(self.round)
            server = work.servers.obstacle
            self.obstacle = work.clients.obstacle or (server and f"at the server, {server}")
            if trained is None:
                return None
            if self.settings.secure_aggregation:
                self.obstacle = "secure aggregation runs on the CPU, between the clients"
                return trained
            return replace(
                trained,
                aggregated=lambda: work.servers(self.round),
                commit=lambda: work.servers.recorded and work.commit(self.round) is not None,
            )
        return None

    def _recording(self) -> _Recording:
        """The work of a round at the clients, at the servers, and storing what came of it."""
        everyone = self.members
        active, steps = range(len(self.cohort)), self.settings.epoch_range()[0]
        first = self.round

        def at_clients(given: Given) -> Trained:
            downloads = self._download(everyone)
            uploads, memory, losses = train_locally(
                self.method,
                self.network,
                self.cohort,
                downloads,
                self.memory,
                self.optimizer,
                [steps] * len(active),
                first,
                given,
                self.guard,
            )
            return Trained.of(uploads, self._apart(memory, self.memory), losses, downloads)

        clients = Replay(at_clients, self.device)

        def at_servers(given: Given) -> list[State]:
            assert clients.result is not None
            uploads, states = clients.result.uploads, []
            for s, (state, (a, b)) in enumerate(
                zip(self.states, pairwise(self.starts), strict=True)
            ):
                sent = Uploads(tuple(everyone[s]), {n: t[a:b] for n, t in uploads.items()})
                rng = cast(np.random.Generator, ServerDraws(given, partial(self._server_rng, s)))
                states.append(self._apart(self.method.aggregate(state, sent, rng), state))
            return states

        servers = Replay(at_servers, self.device)

        def commit(given: Given) -> bool:
            assert clients.result is not None
            assert servers.result is not None
            for old, new in zip(
                [self.memory, *self.states],
                [clients.result.memory, *servers.result],
                strict=True,
            ):
                self._store(old, new)
            return True

        return _Recording(clients, servers, Replay(commit, self.device))

    def _apart(self, new: Message, old: Message) -> Message:
        """Copies of what shares memory with an entry of another name, which is to change."""
        places = {t.untyped_storage().data_ptr() for t in old.values()}
        return {
            n: t if t is old.get(n) or t.untyped_storage().data_ptr() not in places else t.clone()
            for n, t in new.items()
        }

    def _forget(self) -> None:
        """Drops what was recorded, because tensors have moved."""
        self._recorded.clear()
        self.moves += 1

    def _store(self, old: Message, new: Message) -> None:
        """Replaces a state or memory; on a GPU in place, where what was recorded will look."""
        if new is old:
            return
        if self.device.type == "cuda":
            same = old.keys() == new.keys() and all(
                t.shape == old[n].shape and t.dtype == old[n].dtype for n, t in new.items()
            )
            if same:
                for name, tensor in self._apart(new, old).items():
                    if tensor is not old[name]:
                        old[name].copy_(tensor)
                return
            new = {n: t.clone() for n, t in new.items()}
            self._forget()
        changed = dict(new)
        old.clear()
        old.update(changed)

    def _plan(self, s: int) -> Plan:
        """Who is selected, who fails to answer, and who answers, in federation `s`."""
        federation, settings = self.federations[s], self.settings
        if settings.participation == 1 and settings.failures == 0 and not self.stopped:
            everybody = list(range(len(federation.clients)))
            return everybody, [], everybody
        rng = generator(federation.seed, f"participation/{self.round}")
        chosen = np.arange(len(federation.clients))
        if settings.participation < 1:
            count = max(1, round(settings.participation * len(chosen)))
            chosen = np.sort(rng.choice(chosen, count, replace=False))
        lost = rng.choice(chosen, round(settings.failures * len(chosen)), replace=False)
        going = [k for k in chosen.tolist() if self.starts[s] + k not in self.stopped]
        failed = sorted(set(lost.tolist()) & set(going))
        return going, failed, [k for k in going if k not in failed]

    def _steps(self, active: Sequence[int]) -> list[int]:
        """How many local steps each client takes; its own draw, whoever else takes part."""
        low, high = self.settings.epoch_range()
        if low == high:
            return [low] * len(active)
        return [
            int(generator(seed, f"epochs/{self.round}/{client}").integers(low, high + 1))
            for seed, client in (self.cohort.keys[k] for k in active)
        ]

    def _download(self, clients: Sequence[Sequence[int]]) -> Message:
        """What the servers send to these clients of each federation, stacked."""
        sent = [
            self.method.download(state, ks)
            for state, ks in zip(self.states, clients, strict=True)
            if ks
        ]
        if len(sent) == 1:
            return sent[0]
        return (
            {name: torch.cat([message[name] for message in sent]) for name in sent[0]}
            if sent
            else {}
        )

    def _train(self, active: Sequence[int], clients: Sequence[Sequence[int]]) -> Trained:
        downloads = self._download(clients)
        if not active:
            none = self.cohort.num_train.new_zeros(0)
            return Trained({}, {}, none, none.bool(), self._bytes_down())
        steps = self._steps(active)
        results = []
        for group in self._groups(active):
            members = [active[i] for i in group]
            whole = len(members) == len(self.cohort)
            cohort = self.cohort.take(members)
            results.append(
                train_locally(
                    self.method,
                    self.network,
                    cohort,
                    {n: t[group.start : group.stop] for n, t in downloads.items()},
                    self.memory if whole else {n: t[members] for n, t in self.memory.items()},
                    self.optimizer.only(list(dict.fromkeys(cohort.federations))),
                    [steps[i] for i in group],
                    self.round,
                    guard=self.guard,
                )
            )
        uploads, memories, losses = zip(*results, strict=True)
        if len(results) == 1:
            return Trained.of(uploads[0], memories[0], losses[0], downloads)
        return Trained.of(_stack(uploads), _stack(memories), torch.cat(losses), downloads)

    def _bytes_down(self) -> int:
        """What a server sends to one client now."""
        return payload(self.method.download(self.states[0], [0]))

    def _groups(self, active: Sequence[int]) -> list[range]:
        """Which clients train together: all, or as many as memory allows; one by one if asked.

        Who trains beside a client changes its numbers by rounding at the most, and the time.
        """
        if self.settings.engine == "sequential":
            return [range(i, i + 1) for i in range(len(active))]
        groups, start, used = [], 0, 0
        for i, client in enumerate(active):
            need = self._bytes_to_train[client]
            if i > start and used + need > self.memory_budget:
                groups.append(range(start, i))
                start, used = i, 0
            used += need
        return [*groups, range(start, len(active))]

    @property
    def room(self) -> int:
        """How many simulations like this one gain by training in one group; one at the least.

        A GPU gains until its memory is full, a CPU while the whole group's work stays in its cache.
        """
        limit = IN_CACHE if self.device.type == "cpu" else self.memory_budget
        return max(1, min(limit, self.memory_budget) // sum(self._bytes_to_train))

    @cached_property
    def _bytes_to_train(self) -> list[int]:
        """A rough count for every client: features and edges, activations with gradients, weights
        with moments."""
        settings, sampling = self.settings, self.cohort.sampling
        weights = 6 * sum(p.numel() for p in self.network.parameters())
        found = []
        for graph in self.cohort.graphs:
            nodes = graph.num_nodes if sampling is None else sampling.most_nodes(graph)
            edges = graph.edges.shape[1] * nodes / max(graph.num_nodes, 1)
            numbers = ACTIVATIONS * settings.layers * (settings.hidden or 1) * nodes
            numbers += int(edges) * (settings.layers * ACTIVATIONS // 2)
            numbers += 2 * graph.features.size + weights
            found.append(int(numbers * self.dtype.itemsize))
        return found

    def _keep(self, active: Sequence[int], memory: Message, finite: Sequence[bool]) -> None:
        """Stores the memories of the clients whose update was accepted; the rest keep theirs."""
        if not (len(active) == len(self.cohort) and all(finite)):
            rows = [row for row, fine in enumerate(finite) if fine]
            clients = [active[row] for row in rows]
            before, after = dict(self.memory), memory
            memory = {}
            for name, value in before.items():
                memory[name] = value.clone()
                memory[name][clients] = after[name][rows] if name in after else value[clients]
        self._store(self.memory, memory)

    # Views -----------------------------------------------------------------------------------

    def received(self) -> Local:
        """Every client with the model that the server would send it now."""
        view = self._view(self._download(self.members))
        view.params = self.method.receive(view)
        return view

    def trained(self) -> Local:
        """Every client with its own model as training left it, before aggregation."""
        view = self._view({})
        view.params = model_part(self.memory)
        return view

    def _view(self, received: Message) -> Local:
        return Local(
            cohort=self.cohort,
            network=self.network,
            params={},
            received=received,
            memory=self.memory,
            optimizer=self.optimizer,
            phase=self.method.phase(self.round),
            round_index=self.round,
        )

    def predict(self, view: Local) -> Tensor:
        """Class scores of every node of every client, dropout off."""
        groups = self._groups(range(len(view.cohort)))
        if self.settings.engine == "sequential" or len(groups) == 1:
            groups = [range(len(view.cohort))]
        with torch.no_grad():
            if len(groups) == 1:
                return self.method.predict(view)
            return torch.cat([self.method.predict(_of_clients(view, own)) for own in groups])

    # Where clients live in several processes (`distributed.py`) -------------------------------

    @property
    def leads(self) -> bool:
        """Whether this is the process that holds the servers and writes what a run leaves."""
        return True

    def share(self, rows: Tensor) -> Tensor:
        """What every client has, from a row for each of this process."""
        return rows

    def collect(self, rows: Message, clients: Sequence[int] | None = None) -> Message:
        """Rows of all clients, or of those given, from rows of this process; where it leads."""
        return rows if clients is None else {n: t[list(clients)] for n, t in rows.items()}

    def agree(self, decision: bool) -> bool:
        """What the leading process decides."""
        return decision

    # What a checkpoint holds -----------------------------------------------------------------

    def tensors(self) -> Message:
        return self._saved(self.states, slice(None))

    def part(self, federations: range) -> Message:
        """The same of consecutive federations, as if they had run by themselves."""
        clients = slice(self.starts[federations.start], self.starts[federations.stop])
        return self._saved([self.states[s] for s in federations], clients)

    def _saved(self, states: Sequence[State], clients: slice) -> Message:
        saved = {f"memory/{n}": t[clients] for n, t in self.memory.items()}
        for s, state in enumerate(states):
            saved |= {f"state/{s}/{n}": t for n, t in state.items()}
        return saved | ({UPLOADS: self.uploads[clients].clone()} if self.guard else {})

    def restore(self, tensors: Message, round_index: int, stopped: Sequence[int]) -> None:
        self.round, self.stopped = round_index, set(stopped)
        self._forget()
        self._even = False  # nobody knows
        self.uploads = tensors.get(UPLOADS, self.uploads).cpu()
        self.memory = {n: tensors[f"memory/{n}"].to(t.device) for n, t in self.memory.items()}
        for s in range(len(self.states)):
            prefix = f"state/{s}/"
            self.states[s] = {
                n.removeprefix(prefix): t.to(self.device)
                for n, t in tensors.items()
                if n.startswith(prefix)
            }
        counts = self.memory.get(STEPS)
        if counts is None:
            self._even = True
        else:
            parts = [set(counts[own].tolist()) for own in self.cohort.blocks]
            self._even = all(len(part) == 1 for part in parts)


def _of_clients(view: Local, clients: range) -> Local:
    """A view of some of the clients, in a run of consecutive ones."""
    cut = slice(clients.start, clients.stop)

    def rows(message: Message) -> Message:
        return {name: tensor[cut] for name, tensor in message.items()}

    return replace(
        view,
        cohort=view.cohort.take(list(clients)),
        params=rows(view.params),
        received=rows(view.received),
        memory=rows(view.memory),
    )


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a device; without bound where the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        (free,) = [line.split()[1] for line in lines if line.startswith("MemAvailable")]
        return 1024 * int(free)
    except (OSError, ValueError):
        return sys.maxsize


def network_shape(settings: Settings, features: int, classes: int) -> Shape:
    assert settings.hidden is not None
    assert settings.dropout is not None
    assert settings.input_dropout is not None
    return Shape(
        features=features,
        classes=classes,
        hidden=settings.hidden,
        layers=settings.layers,
        dropout=settings.dropout,
        input_dropout=settings.input_dropout,
        heads=settings.heads,
        hops=settings.hops,
    )


def _stack(messages: Sequence[Message]) -> Message:
    return {name: torch.cat([message[name] for message in messages]) for name in messages[0]}
