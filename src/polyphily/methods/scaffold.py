"""SCAFFOLD: control variates correct the drift of each client's gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from polyphily.core.cohort import Cohort
from polyphily.core.local import Local
from polyphily.core.messages import (
    Declared,
    Message,
    Sizes,
    State,
    Sum,
    Uploads,
    model,
    model_part,
    to_each,
)
from polyphily.core.method import parameter, register, travels
from polyphily.core.optimizers import in_cache
from polyphily.core.search import Choices
from polyphily.methods.fedavg import FedAvg
from polyphily.nn.backbones import Backbone

CONTROL, CHANGE, POPULATION = "control/", "control_change/", "clients"


@register("scaffold", cite="Karimireddy et al., Stochastic Controlled Averaging, ICML 2020")
@dataclass(frozen=True)
class Scaffold(FedAvg):
    """Local gradients become g - c_i + c; then c_i is updated, and c by the mean change.

    Option I sets c_i to the gradient at the received model, with any optimiser. A step sees all
    train nodes, so this is the gradient of the first step, and no further pass is needed. Option II
    sets c_i to c_i - c + (w - w_i) / (tau_i lr), which is meant for plain SGD.
    """

    labels_can_be_inputs: ClassVar[bool] = True

    option: str = parameter(
        "I", "how a client updates c_i", choices=("I", "II"), search=Choices("I", "II")
    )

    def uploads(self, sizes: Sizes) -> tuple[Declared, ...]:
        change = model(sizes, Sum(), prefix=CHANGE, meaning="change of the control variate c_i")
        return (*super().uploads(sizes), change)

    def downloads(self, sizes: Sizes) -> tuple[Declared, ...]:
        control = model(sizes, prefix=CONTROL, meaning="the server's control variate c")
        return (*super().downloads(sizes), control)

    def needs_whole_graph(self) -> str | None:
        if self.option == "II":
            return None
        return "option I takes the gradient over all train nodes (--set option=II does not)"

    def init_client_state(self, cohort: Cohort, network: Backbone, params: Message) -> Message:
        return {
            CONTROL + name: torch.zeros_like(value)
            for name, value in params.items()
            if travels(self, network, name)
        }

    def prepare_round(self, local: Local) -> Message:
        return local.constants  # those of the first step, in all others

    def correct_gradients(self, local: Local, grads: Message) -> Message:
        corrected = dict(grads)
        keep = self.option == "I" and local.taken == 0
        for name, grad in grads.items():
            if CONTROL + name not in local.memory:
                continue
            if keep:  # at the received model
                local.constants[name], corrected[name] = grad, torch.empty_like(grad)
            own, common = local.memory[CONTROL + name], local.received[CONTROL + name]
            for clients in in_cache(grad):
                found = torch.sub(grad[clients], own[clients], out=corrected[name][clients])
                found.add_(common[clients])
        return corrected

    def update_memory(self, local: Local) -> Message:
        if self.option == "I":
            return {CONTROL + name: grad for name, grad in local.constants.items()}
        way = local.learning_rates * local.cohort.constant(local.steps)
        received = model_part(local.received)
        return {
            CONTROL + n: local.memory[CONTROL + n]
            - local.received[CONTROL + n]
            + (sent - local.params[n].detach()) / way.view(-1, *[1] * (sent.dim() - 1))
            for n, sent in received.items()
        }

    def upload(self, local: Local) -> Message:
        updated = self.update_memory(local)
        changes = {
            CHANGE + name.removeprefix(CONTROL): value - local.memory[name]
            for name, value in updated.items()
        }
        return {**super().upload(local), **changes}

    def init_server_state(self, shared: Message, clients: int) -> State:
        zeros = {CONTROL + name: torch.zeros_like(value) for name, value in shared.items()}
        return {
            **super().init_server_state(shared, clients),
            **zeros,
            POPULATION: torch.tensor(clients),
        }

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
