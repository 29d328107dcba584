"""The round loop: clients train, the server aggregates, both views of every model are scored.

Several federations (one per seed) run side by side: their clients are stacked into one cohort, and
each federation has a server state of its own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from polyphily.errors import TrainingError
from polyphily.federation.cohort import Cohort
from polyphily.federation.local import Local, Message, as_model, model_part
from polyphily.federation.optimizers import PREFIX as OPTIMIZER
from polyphily.federation.optimizers import OptimizerSpec, initial_state
from polyphily.federation.settings import Settings
from polyphily.graphs.federation import Federation
from polyphily.graphs.random import derive, generator
from polyphily.methods.base import Method, State, Uploads
from polyphily.nn.backbones import Backbone, Shape
from polyphily.nn.sparse import flat

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
) -> tuple[Message, Message, Tensor]:
    """One round at the clients of a cohort, one or many: what a deployed site runs, too.

    Returns:
        What the clients upload, their memories after the round, and each client's mean loss.
    """
    local = Local(
        cohort=cohort,
        network=network,
        params={},
        received=received,
        memory=dict(memory),
        optimizer=optimizer,
        steps=tuple(steps),
        round_index=round_index,
        draws=cohort.draws(round_index),
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
    local.constants = method.begin(local)
    method.train(local)
    with torch.no_grad():
        upload = {name: value.detach() for name, value in method.upload(local).items()}
        changed = {name: value.detach() for name, value in method.update_memory(local).items()}
    trained = as_model({name: value.detach() for name, value in local.params.items()})
    kept = {n: t for n, t in local.memory.items() if optimizer.keep or not n.startswith(OPTIMIZER)}
    losses = torch.zeros(len(cohort)) if local.losses is None else local.losses
    return upload, {**kept, **changed, **trained}, losses


def payload(message: Message) -> int:
    """Bytes of one client's share of a message."""
    return sum(t[0].numel() * t.element_size() for t in message.values())


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


@dataclass
class Simulation:
    """Federations of one method, advanced round by round.

    Attributes:
        method: what is trained.
        federations: one per seed.
        settings: with every knob filled in.
        states: the servers' states.
        memory: what the clients keep, stacked over all federations' clients.
        round: how many rounds are complete.
        stopped: clients that take no part any more (early stopping), over all federations.
    """

    method: Method
    federations: Sequence[Federation]
    settings: Settings
    states: list[State] = field(default_factory=list)
    memory: Message = field(default_factory=dict)
    round: int = 0
    stopped: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        settings, first = self.settings, self.federations[0]
        self.device = torch.device(settings.device)
        self.dtype = getattr(torch, settings.dtype)
        keys = [(f.seed, k) for f in self.federations for k in range(len(f.clients))]
        graphs = [graph for f in self.federations for graph in f.clients]
        self.cohort = Cohort(graphs, keys, len(first.classes), device=self.device, dtype=self.dtype)
        self.memory_budget = free_memory(self.device) // 2
        self.starts = [0, *np.cumsum([len(f.clients) for f in self.federations]).tolist()]
        assert settings.lr is not None
        assert settings.optimizer is not None
        assert settings.weight_decay is not None
        self.optimizer = OptimizerSpec(
            kind=settings.optimizer,
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            momentum=settings.momentum,
            clip=settings.clip,
            keep=bool(settings.keep_optimizer),
        )
        shape = network_shape(settings, self.cohort.num_features, len(first.classes))
        assert settings.backbone is not None
        networks = [
            self.method.build(settings.backbone, shape, derive(f.seed, "initial parameters"))
            for f in self.federations
        ]
        self.network = networks[0].to(self.device, self.dtype)
        self._open([n.to(self.device, self.dtype) for n in networks])

    def _open(self, networks: Sequence[Backbone]) -> None:
        initial = [{n: p.detach() for n, p in net.named_parameters()} for net in networks]
        params = {
            name: torch.cat(
                [
                    own[name].expand(len(f.clients), *own[name].shape[1:])
                    for own, f in zip(initial, self.federations, strict=True)
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
        downloads = self._download([ks for _, _, ks in plan])
        uploads, memory, losses = self._train(active, downloads)
        finite = _finite(uploads, losses)
        counts = [len(ks) for _, _, ks in plan]
        ends = np.cumsum([0, *counts]).tolist()
        good = [[row for row in range(a, b) if finite[row]] for a, b in pairwise(ends)]
        for s, count in enumerate(counts):
            if count and not good[s]:
                raise TrainingError(
                    f"round {self.round + 1}: the update of every client was not finite "
                    f"({count} clients, seed {self.federations[s].seed}). The last good model is "
                    "that of the round before. A smaller --lr or --clip 1.0 usually mends this."
                )
        up, down = payload(uploads), [self._bytes_down(s) for s in range(len(plan))]
        for s, rows in enumerate(good):
            if rows:
                clients = tuple(plan[s][2][row - ends[s]] for row in rows)
                tensors = {n: t if len(rows) == len(t) else t[rows] for n, t in uploads.items()}
                rng = generator(self.federations[s].seed, f"server/{self.round}")
                self.states[s] = self.method.aggregate(
                    self.states[s], Uploads(clients, tensors), rng
                )
        self._keep(active, memory, finite)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.round += 1
        loss = losses.tolist()
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
            bytes_up=[up * n for n in counts],
            bytes_down=[
                size * len(chosen) for size, (chosen, _, _) in zip(down, plan, strict=True)
            ],
        )

    def _bytes_down(self, s: int) -> int:
        """What the server of federation `s` sends to one client now."""
        return payload(self.method.download(self.states[s], [0]))

    def _plan(self, s: int) -> tuple[list[int], list[int], list[int]]:
        """Who is selected, who fails to answer, and who answers, in federation `s`."""
        federation, settings = self.federations[s], self.settings
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

    def _train(self, active: Sequence[int], downloads: Message) -> tuple[Message, Message, Tensor]:
        if not active:
            return {}, {}, torch.zeros(0)
        steps = self._steps(active)
        results = []
        for group in self._groups(active):
            members = [active[i] for i in group]
            whole = len(members) == len(self.cohort)
            results.append(
                train_locally(
                    self.method,
                    self.network,
                    self.cohort.take(members),
                    {n: t[group.start : group.stop] for n, t in downloads.items()},
                    self.memory if whole else {n: t[members] for n, t in self.memory.items()},
                    self.optimizer,
                    [steps[i] for i in group],
                    self.round,
                )
            )
        if len(results) == 1:
            return results[0]
        uploads, memories, losses = zip(*results, strict=True)
        return _stack(uploads), _stack(memories), torch.cat(losses)

    def _groups(self, active: Sequence[int]) -> list[range]:
        """Which clients train together: all, or as many as memory allows; one by one if asked.

        Who trains beside a client changes its numbers by rounding at the most, and the time.
        """
        if self.settings.engine == "sequential":
            return [range(i, i + 1) for i in range(len(active))]
        groups, start, used = [], 0, 0
        for i, client in enumerate(active):
            need = self._bytes_to_train(client)
            if i > start and used + need > self.memory_budget:
                groups.append(range(start, i))
                start, used = i, 0
            used += need
        return [*groups, range(start, len(active))]

    def _bytes_to_train(self, client: int) -> int:
        """A rough count for one client: activations with gradients, weights with moments."""
        graph, settings = self.cohort.graphs[client], self.settings
        numbers = ACTIVATIONS * settings.layers * (settings.hidden or 1) * graph.num_nodes
        numbers += graph.edges.shape[1] * settings.layers * ACTIVATIONS // 2
        numbers += 6 * sum(p.numel() for p in self.network.parameters())
        return int(numbers * self.dtype.itemsize)

    def _keep(self, active: Sequence[int], memory: Message, finite: Sequence[bool]) -> None:
        """Stores the memories of the clients whose update was accepted; the rest keep theirs."""
        if len(active) == len(self.cohort) and all(finite):
            self.memory = memory
            return
        rows = [row for row, fine in enumerate(finite) if fine]
        clients = [active[row] for row in rows]
        for name, value in memory.items():
            updated = self.memory[name].clone()
            updated[clients] = value[rows]
            self.memory[name] = updated

    # Views -----------------------------------------------------------------------------------

    def received(self) -> Local:
        """Every client with the model that the server would send it now."""
        everyone = [list(range(len(f.clients))) for f in self.federations]
        view = self._view(self._download(everyone))
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
            round_index=self.round,
        )

    def predict(self, view: Local) -> Tensor:
        """Class scores of every node of every client, dropout off."""
        with torch.no_grad():
            return self.method.predict(view)

    # What a checkpoint holds -----------------------------------------------------------------

    def tensors(self) -> Message:
        saved = {f"memory/{n}": t for n, t in self.memory.items()}
        for s, state in enumerate(self.states):
            saved |= {f"state/{s}/{n}": t for n, t in state.items()}
        return saved

    def restore(self, tensors: Message, round_index: int, stopped: Sequence[int]) -> None:
        self.round, self.stopped = round_index, set(stopped)
        self.memory = {n: tensors[f"memory/{n}"].to(t.device) for n, t in self.memory.items()}
        for s in range(len(self.states)):
            prefix = f"state/{s}/"
            self.states[s] = {
                n.removeprefix(prefix): t.to(self.device)
                for n, t in tensors.items()
                if n.startswith(prefix)
            }


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


def _finite(uploads: Message, losses: Tensor) -> list[bool]:
    """Which clients sent finite numbers only (the loss stands in where nothing is sent)."""
    fine = torch.isfinite(losses)
    for tensor in uploads.values():  # NaN and infinity stay in a sum, and a sum is cheap
        fine &= torch.isfinite(flat(tensor).sum(dim=1))
    if not fine.all():  # a sum may also be too large: look at every number
        fine = torch.isfinite(losses)
        for tensor in uploads.values():
            fine &= torch.isfinite(flat(tensor)).all(dim=1)
    found: list[bool] = fine.tolist()
    return found
