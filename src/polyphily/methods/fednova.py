"""FedNova: averages normalised updates, so that clients with more steps do not count more."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from polyphily.core.local import Local
from polyphily.core.messages import (
    Declared,
    Individually,
    Message,
    Sizes,
    State,
    Uploads,
    as_model,
    model_part,
    public,
)
from polyphily.core.method import register
from polyphily.methods.fedavg import WEIGHT, FedAvg

EFFORT = "effort"


@register("fednova", cite="Wang et al., Tackling the Objective Inconsistency Problem, NeurIPS 2020")
@dataclass(frozen=True)
class FedNova(FedAvg):
    """d_i = (w - w_i) / |a_i|_1; w <- w - (sum_i p_i |a_i|_1) sum_i p_i d_i.

    |a_i|_1 is a client's effort: its number of steps tau_i, or with SGD momentum rho
    (tau_i - rho (1 - rho^tau_i) / (1 - rho)) / (1 - rho). If every client takes the same number of
    steps, this is FedAvg; it differs if they do not (`--epochs 1-5`).
    """

    labels_can_be_inputs: ClassVar[bool] = True

    def uploads(self, sizes: Sizes) -> tuple[Declared, ...]:
        alone = Individually("the server divides every update by that client's own effort")
        sent = [replace(declared, server=alone) for declared in super().uploads(sizes)]
        return (*sent, public(EFFORT, (), alone, meaning="|a_i|_1"))

    def upload(self, local: Local) -> Message:
        rho = local.optimizer.momentum if local.optimizer.kind == "sgd" else 0.0
        effort = tuple((t - rho * (1 - rho**t) / (1 - rho)) / (1 - rho) for t in local.steps)
        return {**super().upload(local), EFFORT: local.cohort.constant(effort)}

    def aggregate(self, state: State, uploads: Uploads, rng: np.random.Generator) -> State:
        weights, effort = uploads[WEIGHT], uploads[EFFORT]
        share = weights / weights.sum()
        before = model_part(state)
        directions = {
            name: (before[name] - value) / effort.view(-1, *[1] * (value.dim() - 1))
            for name, value in uploads.model.items()
        }
        total_effort = (share * effort).sum()
        mean = uploads.mean(directions, weights)
        return {**state, **as_model({n: before[n] - total_effort * d for n, d in mean.items()})}
