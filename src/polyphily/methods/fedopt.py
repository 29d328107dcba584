"""FedOpt: the server takes adaptive steps with the mean update as its gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from polyphily.core.messages import Declared, Message, Sizes, State, Uploads, as_model, model_part
from polyphily.core.method import parameter, register
from polyphily.core.search import Range
from polyphily.methods.fedavg import WEIGHT, FedAvg

MEAN, SQUARE = "mean/", "square/"


@register("fedopt", cite="Reddi et al., Adaptive Federated Optimization, ICLR 2021")
@dataclass(frozen=True)
class FedOpt(FedAvg):
    """D = sum_i p_i (w_i - w); m and v follow D and D^2; w <- w + eta m / (sqrt(v) + tau)."""

    labels_can_be_inputs: ClassVar[bool] = True

    rule: str = parameter(
        "adam", "how v follows D^2", choices=("adam", "yogi", "adagrad"), symbol="v"
    )
    server_lr: float = parameter(
        0.01, "the server's learning rate", symbol="η", search=Range(1e-3, 0.1, log=True)
    )
    beta1: float = parameter(0.9, "decay of the first moment", symbol="β1")
    beta2: float = parameter(0.99, "decay of the second moment", symbol="β2")
    adaptivity: float = parameter(
        1e-3, "added to sqrt(v)", symbol="τ", search=Range(1e-5, 0.1, log=True)
    )

    def uploads(self, sizes: Sizes) -> tuple[Declared, ...]:
        return super().uploads(sizes)  # this server needs only the mean update

    def init_server_state(self, shared: Message, clients: int) -> State:
        state = super().init_server_state(shared, clients)
        for name, value in shared.items():
            state[MEAN + name] = torch.zeros_like(value)
            state[SQUARE + name] = torch.full_like(value, self.adaptivity**2)
        return state

    def aggregate(self, state: State, uploads: Uploads, rng: np.random.Generator) -> State:
        after = dict(state)
        mean = uploads.mean(uploads.model, uploads[WEIGHT])
        for name, weight in model_part(state).items():
            update = mean[name] - weight
            first = self.beta1 * state[MEAN + name] + (1 - self.beta1) * update
            second = self._second(state[SQUARE + name], update.square())
            step = self.server_lr * first / (second.sqrt() + self.adaptivity)
            after |= {MEAN + name: first, SQUARE + name: second}
            after |= as_model({name: weight + step})
        return after

    def _second(self, v: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
        """Update the second moment v with D^2."""
        if self.rule == "adagrad":
            return v + square
        if self.rule == "yogi":
            return v - (1 - self.beta2) * square * (v - square).sign()
        return self.beta2 * v + (1 - self.beta2) * square
