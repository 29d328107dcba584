"""The client runtime: the work of one or many clients in a round.

A simulation and a Flower site both drive it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from polyphily.core.cohort import Cohort, Key
from polyphily.core.local import HostInputs, Local
from polyphily.core.messages import Message, as_model, model_part
from polyphily.core.method import Method, sizes_of
from polyphily.core.objective import Objective
from polyphily.core.optimizers import PREFIX, OptimizerSpec, initial_state
from polyphily.core.sampling import Sampling
from polyphily.core.settings import MIXED, Settings
from polyphily.errors import MethodError
from polyphily.graphs.degrees import with_degrees
from polyphily.graphs.graph import Graph
from polyphily.graphs.random import generator
from polyphily.nn.backbones import Backbone
from polyphily.nn.draws import Draws
from polyphily.nn.sparse import flat
from polyphily.privacy.differential import Guard, guard_of
from polyphily.runtime.network import optimizer_of

Tamper: TypeAlias = Callable[[Message, Message, Cohort, Draws], Message]
"""Changes what hostile clients of a cohort upload, given what they received and draws."""


def cohort_of(
    settings: Settings,
    graphs: Sequence[Graph],
    keys: Sequence[Key],
    classes: int,
    *,
    federations: Sequence[int] | None = None,
    device: torch.device | str | None = None,
) -> Cohort:
    """Pack clients into a cohort, with inputs, precision and sampling as the settings ask."""
    if settings.degree_inputs:
        different = {id(graph): graph for graph in graphs}  # one may occur several times
        wider = {number: with_degrees(graph) for number, graph in different.items()}
        graphs = [wider[id(graph)] for graph in graphs]
    return Cohort(
        graphs,
        keys,
        classes,
        federations=federations,
        device=settings.device if device is None else device,
        dtype=getattr(torch, settings.dtype),
        mixed=settings.precision == MIXED,
        sampling=Sampling.of(settings),
        label_inputs=settings.label_inputs,
        direction=settings.direction,
        edge_weights=settings.edge_weights,
        relation_names=settings.relation_names(),
    )


@dataclass(frozen=True)
class Trained:
    """The outcome of a round at the clients, stacked over them.

    Attributes:
        uploads: what they send.
        memory: what they keep.
        losses: their mean losses.
    """

    uploads: Message
    memory: Message
    losses: Tensor


def sums_of(uploads: Message, losses: Tensor) -> Tensor:
    """Return each client's loss, then the sum of each of its uploads, `[1 + uploads, K]`.

    NaN and infinity survive in a sum, so these numbers tell who sent finite ones only. A sum can
    also overflow though all its numbers are finite: `exactly_finite_clients` decides then.
    """
    return torch.stack([losses, *(flat(tensor).sum(dim=1) for tensor in uploads.values())])


def exactly_finite_clients(uploads: Message, losses: Tensor) -> Tensor:
    """Return which clients sent finite numbers only, looking at every number, `[K]`."""
    fine = torch.isfinite(losses)
    for tensor in uploads.values():
        fine = fine & torch.isfinite(flat(tensor)).all(dim=1)
    return fine


@dataclass(frozen=True)
class Clients:
    """The clients of a process, and what they do when the server calls.

    What a client keeps from round to round, its memory, is passed in and out: a simulation holds
    it in stacked tensors, a site in a file.

    Attributes:
        method: what is trained.
        network: the backbone; parameters are passed to it.
        cohort: the clients' graphs.
        optimizer: which optimiser they use.
        epochs: the fewest and the most steps they take in a round.
        guard: clips and noises what is uploaded, under differential privacy.
        objective: the weights of train nodes in the loss.
        tamper: changes what hostile clients upload, in simulations of an attack.
    """

    method: Method
    network: Backbone
    cohort: Cohort
    optimizer: OptimizerSpec
    epochs: tuple[int, int]
    guard: Guard | None = None
    objective: Objective = field(default_factory=Objective)
    tamper: Tamper | None = None

    @classmethod
    def create(
        cls,
        method: Method,
        network: Backbone,
        cohort: Cohort,
        settings: Settings,
        *,
        population: int,
        rates: Sequence[tuple[float, float]] | None = None,
        noise: Draws | None = None,
        tamper: Tamper | None = None,
    ) -> Clients:
        """Set clients up as the settings of a run ask for it.

        Args:
            method: what is trained.
            network: with any parameters; it is moved to the cohort's device.
            cohort: the clients' graphs.
            settings: with every setting filled in.
            population: the number of clients in the federation.
            rates: (learning rate, weight decay) of each federation, in place of the settings'.
            noise: where the noise of differential privacy comes from; None: the seed.
            tamper: changes what hostile clients upload.
        """
        return cls(
            method,
            network.to(cohort.device),
            cohort,
            optimizer_of(settings, rates),
            settings.epoch_range(),
            guard_of(settings, method.uploads(sizes_of(method, network, population)), noise),
            Objective.of(settings),
            tamper,
        )

    def __len__(self) -> int:
        return len(self.cohort)

    def take(self, clients: Sequence[int]) -> Clients:
        """Return some of these clients, in the order given."""
        cohort = self.cohort.take(clients)
        if cohort is self.cohort:
            return self
        present = list(dict.fromkeys(cohort.federations))
        return replace(self, cohort=cohort, optimizer=self.optimizer.only(present))

    def initial_memory(self, params: Message) -> Message:
        """Return what clients hold before the first round.

        Args:
            params: their initial parameters, stacked `[K, …]`.
        """
        return {
            **as_model(params),
            **(initial_state(self.optimizer, params) if self.optimizer.keep else {}),
            **self.method.init_client_state(self.cohort, self.network, params),
        }

    def steps(self, round_index: int) -> list[int]:
        """Return how many steps each client takes; a client's draw depends on itself alone."""
        low, high = self.epochs
        if low == high:
            return [low] * len(self)
        return [
            int(generator(seed, f"epochs/{round_index}/{client}").integers(low, high + 1))
            for seed, client in self.cohort.keys
        ]

    def train(
        self,
        received: Message,
        memory: Message,
        round_index: int,
        steps: Sequence[int] | None = None,
        host: HostInputs | None = None,
        into: Message | None = None,
    ) -> Trained:
        """Run one round: receive, train, upload.

        Args:
            received: what the server sent.
            memory: what the clients have kept.
            round_index: the round, from 0.
            steps: how many steps each client takes; drawn from `epochs` unless given.
            host: given if the round is recorded to be replayed: brings in what the host computes.
                The clients of a federation have then taken equally many steps.
            into: where trained parameters and moments are put, by their names in `memory`; they are
                in new tensors otherwise.
        """
        method, cohort, optimizer = self.method, self.cohort, self.optimizer
        steps = self.steps(round_index) if steps is None else steps
        alike = len(set(steps)) == 1
        number = round_index if host is None else host(lambda r: np.asarray(r, dtype=np.int32))
        local = Local(
            cohort=cohort,
            network=self.network,
            params={},
            received=received,
            memory=dict(memory),
            optimizer=optimizer,
            steps=tuple(steps),
            phase=method.phase(round_index),
            round_index=round_index if host is None else host.round_index,
            draws=cohort.draws(number),
            even=alike if host is not None or not optimizer.keep else None,
            stepped=0 if alike and not optimizer.keep else None,
            host=host,
            objective=self.objective,
        )
        places = into or {}
        places_of_params = model_part(places)
        local.params = {
            name: _copied(value.detach(), places_of_params.get(name)).requires_grad_()
            for name, value in method.receive(local).items()
        }
        if optimizer.keep:  # it steps in place, and a refused round must leave no trace
            moments = {n: t for n, t in memory.items() if n.startswith(PREFIX)}
            local.memory |= {n: _copied(t, places.get(n)) for n, t in moments.items()}
        else:
            local.memory |= initial_state(optimizer, local.params)
        if not cohort.changes:
            local.constants = method.prepare_round(local)
        method.train(local)
        with torch.no_grad():
            upload = {name: value.detach() for name, value in method.upload(local).items()}
            if self.guard is not None:
                assert local.draws is not None
                upload = self.guard(upload, received, local.draws)
            if self.tamper is not None:
                assert local.draws is not None
                upload = self.tamper(upload, received, cohort, local.draws)
            changed = {name: value.detach() for name, value in method.update_memory(local).items()}
        if extra := sorted(changed.keys() - memory.keys()):
            raise MethodError(
                f"{type(method).__name__}.update_memory returned '{extra[0]}', which "
                "init_client_state did not: a memory has the same entries in every round"
            )
        trained = as_model({name: value.detach() for name, value in local.params.items()})
        kept = {n: t for n, t in local.memory.items() if optimizer.keep or not n.startswith(PREFIX)}
        losses = cohort.num_train.new_zeros(len(self)) if local.losses is None else local.losses
        return Trained(upload, {**kept, **changed, **trained}, losses)

    # Views -----------------------------------------------------------------------------------

    def received(self, download: Message, memory: Message, rounds: int) -> Local:
        """Return the clients with the models that the server sends them after some rounds."""
        view = self._view(download, memory, rounds)
        view.params = self.method.receive(view)
        return view

    def trained(self, memory: Message, rounds: int) -> Local:
        """Return the clients with their own models as training left them."""
        view = self._view({}, memory, rounds)
        view.params = model_part(memory)
        return view

    def with_params(
        self, params: Message, received: Message, memory: Message, rounds: int
    ) -> Local:
        """Return the clients with models that were kept."""
        view = self._view(received, memory, rounds)
        view.params = params
        return view

    def _view(self, received: Message, memory: Message, rounds: int) -> Local:
        return Local(
            cohort=self.cohort,
            network=self.network,
            params={},
            received=received,
            memory=memory,
            optimizer=self.optimizer,
            phase=self.method.phase(rounds),
            round_index=rounds,
            objective=self.objective,
        )

    def predict(self, view: Local) -> Tensor:
        """Return class scores of every node in a view, dropout off.

        The method sees of memory and download what a model file holds (`prediction_state`).
        """
        method = self.method
        seen = replace(
            view,
            memory=_Named(method, "memory/", view.memory),
            received=_Named(method, "received/", view.received),
        )
        with torch.no_grad():
            return method.predict(seen)


def _copied(value: Tensor, into: Tensor | None) -> Tensor:
    """Return a contiguous copy of a tensor, in the memory given if it fits."""
    if into is None or into.shape != value.shape or into.dtype != value.dtype:
        return value.clone(memory_format=torch.contiguous_format)
    return into.copy_(value)


class _Named(dict[str, Tensor]):
    """The entries of a memory or a download that a method names in `prediction_state`."""

    def __init__(self, method: Method, prefix: str, message: Message) -> None:
        names = method.prediction_state()
        super().__init__({n: t for n, t in message.items() if prefix + n in names})
        self._method, self._prefix = method, prefix

    def __missing__(self, name: str) -> Tensor:
        raise MethodError(
            f"{type(self._method).__name__}.predict reads '{self._prefix}{name}', which "
            "`prediction_state` does not name: model files would lack it"
        )
