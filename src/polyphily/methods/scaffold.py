"""SCAFFOLD: control variates cancel the drift of each client's gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from polyphily.core.cohort import Cohort
from polyphily.core.local import Local, Message, model_part
from polyphily.core.method import State, Uploads, parameter, register, to_each
from polyphily.methods.fedavg import FedAvg
from polyphily.nn.backbones import Backbone

CONTROL, CHANGE, POPULATION = "control/", "control_change/", "clients"


@register("scaffold", cite="Karimireddy et al., Stochastic Controlled Averaging, ICML 2020")
@dataclass(frozen=True)
class Scaffold(FedAvg):
    """Local gradients become g - c_i + c; then c_i is renewed, and c moves by the mean change.

    Option I renews c_i by the gradient at the received model, whatever the optimiser; option II by
    c_i - c + (w - w_i) / (tau_i lr), which is meant for plain SGD.
    """

    option: str = parameter("I", "how a client renews c_i", choices=("I", "II"))

    def whole_graph(self) -> str | None:
        if self.option == "II":
            return None
        return "option I takes the gradient over all train nodes (--set option=II does not)"

    def remember(self, cohort: Cohort, network: Backbone, params: Message) -> Message:
        return {CONTROL + name: torch.zeros_like(value) for name, value in params.items()}

    def begin(self, local: Local) -> Message:
        if self.option == "II":
            return {}
        names, values = zip(*local.params.items(), strict=True)
        loss = super().loss(local).sum()
        grads = torch.autograd.grad(loss, values, materialize_grads=True)
        return dict(zip(names, grads, strict=True))

    def correct(self, local: Local, grads: Message) -> Message:
        return {
            n: g - local.memory[CONTROL + n] + local.received[CONTROL + n] for n, g in grads.items()
        }

    def update_memory(self, local: Local) -> Message:
        if self.option == "I":
            return {CONTROL + name: grad for name, grad in local.constants.items()}
        way = local.learning_rates * local.cohort.constant(local.steps)
        received = model_part(local.received)
        return {
            CONTROL + n: local.memory[CONTROL + n]
            - local.received[CONTROL + n]
            + (received[n] - p.detach()) / way.view(-1, *[1] * (p.dim() - 1))
            for n, p in local.params.items()
        }

    def upload(self, local: Local) -> Message:
        renewed = self.update_memory(local)
        changes = {
            CHANGE + name.removeprefix(CONTROL): value - local.memory[name]
            for name, value in renewed.items()
        }
        return {**super().upload(local), **changes}

    def open(self, shared: Message, clients: int) -> State:
        zeros = {CONTROL + name: torch.zeros_like(value) for name, value in shared.items()}
        return {**super().open(shared, clients), **zeros, POPULATION: torch.tensor(clients)}

    def aggregate(self, state: State, uploads: Uploads, rng: np.random.Generator) -> State:
        after = super().aggregate(state, uploads, rng)
        for name, change in uploads.tensors.items():
            if name.startswith(CHANGE):
                control = CONTROL + name.removeprefix(CHANGE)
                after[control] = state[control] + change.sum(dim=0) / state[POPULATION]
        return after

    def download(self, state: State, clients: Sequence[int]) -> Message:
        control = {n: t for n, t in state.items() if n.startswith(CONTROL)}
        return {**super().download(state, clients), **to_each(control, clients)}
