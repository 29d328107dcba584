"""FedProto: clients share class prototypes instead of weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from polyphily.core.local import Local
from polyphily.core.messages import (
    AFTER_FIRST,
    Declared,
    Mean,
    Message,
    Sizes,
    State,
    Sum,
    Uploads,
    count,
    statistic,
    to_each,
)
from polyphily.core.method import Method, parameter, register
from polyphily.core.search import Range

PROTOTYPES, COUNTS = "prototypes", "counts"


@register("fedproto", cite="Tan et al., FedProto: Federated Prototype Learning, AAAI 2022")
@dataclass(frozen=True)
class FedProto(Method):
    """L = CE + lambda · mean over train nodes of MSE(h_v, prototype of v's class).

    A client's prototype of a class is the mean embedding of its train nodes in that class; the
    server averages prototypes weighted by the number of those nodes. A class without train nodes at
    any client has no term.
    """

    evaluated = "personal"
    selection = "client"

    pull: float = parameter(
        1.0, "weight of the prototype term", symbol="λ", search=Range(0.1, 10.0, log=True)
    )

    def uploads(self, sizes: Sizes) -> tuple[Declared, ...]:
        return (
            statistic(
                PROTOTYPES,
                (sizes.classes, sizes.embedding),
                Mean(COUNTS),
                meaning="mean embedding of the train nodes of each class",
            ),
            count(COUNTS, (sizes.classes,), Sum(), meaning="train nodes of each class"),
        )

    def downloads(self, sizes: Sizes) -> tuple[Declared, ...]:
        shape = (sizes.classes, sizes.embedding)
        return (
            statistic(PROTOTYPES, shape, rounds=AFTER_FIRST, meaning="mean over clients"),
            count(COUNTS, shape[:1], rounds=AFTER_FIRST, meaning="train nodes of all clients"),
        )

    def loss(self, local: Local) -> Tensor:
        output = local.forward()
        loss = local.cross_entropy(output.logits)
        if PROTOTYPES not in local.received:
            return loss
        cohort = local.cohort
        owner, labels = cohort.train_segments.owner, cohort.train_labels
        prototype = local.received[PROTOTYPES][owner, labels]
        known = (local.received[COUNTS][owner, labels] > 0).to(cohort.dtype)
        distance = (output.embedding[cohort.train_nodes] - prototype).square().mean(dim=1)
        return loss + self.pull * local.train_mean(distance * known)

    def upload(self, local: Local) -> Message:
        cohort = local.cohort
        embedding = local.frozen(local.params).embedding[cohort.train_nodes]
        onehot = cohort.train_onehot
        counts = cohort.train_segments.sum(onehot)
        spread = onehot.unsqueeze(2) * embedding.unsqueeze(1)
        total = cohort.train_segments.sum(spread)
        return {PROTOTYPES: total / counts.clamp(min=1).unsqueeze(2), COUNTS: counts}

    def aggregate(self, state: State, uploads: Uploads, rng: np.random.Generator) -> State:
        counts = uploads[COUNTS]
        total = (uploads[PROTOTYPES] * counts.unsqueeze(2)).sum(dim=0)
        all_counts = counts.sum(dim=0)
        return {PROTOTYPES: total / all_counts.clamp(min=1).unsqueeze(1), COUNTS: all_counts}

    def download(self, state: State, clients: Sequence[int]) -> Message:
        return to_each(state, clients)
