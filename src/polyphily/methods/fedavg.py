"""FedAvg: the weighted mean of the clients' models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from polyphily.core.local import Local
from polyphily.core.messages import (
    Declared,
    Mean,
    Message,
    Sizes,
    State,
    Sum,
    Uploads,
    as_model,
    count,
    model,
    model_part,
    to_each,
)
from polyphily.core.method import Method, parameter, register
from polyphily.nn.backbones import Backbone

WEIGHT = "weight"


@register("fedavg", cite="McMahan et al., Communication-Efficient Learning, AISTATS 2017")
@dataclass(frozen=True)
class FedAvg(Method):
    """w = sum_i (n_i / n) w_i after local training; every client receives w."""

    labels_can_be_inputs: ClassVar[bool] = True

    weighting: str = parameter(
        "nodes",
        "what a client's weight n_i counts: its nodes, its train nodes, or one each",
        symbol="n_i",
        choices=("nodes", "train", "uniform"),
    )

    def shares(self, network: Backbone, parameter: str) -> bool:
        return True

    def uploads(self, sizes: Sizes) -> tuple[Declared, ...]:
        weight = count(WEIGHT, (), Sum(), meaning="weight of the client in the mean")
        return (model(sizes, Mean(WEIGHT)), weight)

    def downloads(self, sizes: Sizes) -> tuple[Declared, ...]:
        return (model(sizes),)

    def upload(self, local: Local) -> Message:
        cohort = local.cohort
        counts = {
            "nodes": cohort.segments.sizes,
            "train": cohort.train_segments.sizes,
            "uniform": (1,) * len(cohort),
        }[self.weighting]
        return {**super().upload(local), WEIGHT: cohort.constant(counts)}

    def init_server_state(self, shared: Message, clients: int) -> State:
        return as_model(shared)

    def aggregate(self, state: State, uploads: Uploads, rng: np.random.Generator) -> State:
        return {**state, **as_model(uploads.mean(uploads.model, uploads[WEIGHT]))}

    def download(self, state: State, clients: Sequence[int]) -> Message:
        return to_each(as_model(model_part(state)), clients)
