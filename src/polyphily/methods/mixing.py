"""Servers that send every client its own mixture of the models that arrived."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from polyphily.core.messages import (
    Declared,
    Individually,
    Message,
    Sizes,
    State,
    Uploads,
    as_model,
    model,
    rows_of,
    with_prefix,
)
from polyphily.core.method import Method
from polyphily.nn.backbones import Backbone
from polyphily.nn.sparse import flat

MIXED, WEIGHTS, HEARD = "mixed/", "weights", "heard"
ALONE = Individually("the server mixes the clients' models differently for each of them")


@dataclass(frozen=True)
class Mixing(Method):
    """Client i receives sum_j a_ij w_j over the clients j that answered; `mixing` computes a.

    A client that does not answer keeps the mixture that was made for it last. One that has never
    answered receives the plain mean.
    """

    def mixing(self, uploads: Uploads, rng: np.random.Generator) -> Tensor:
        """Return a, `[answers, answers]`, whose rows sum to one."""
        raise NotImplementedError

    def shares(self, network: Backbone, parameter: str) -> bool:
        return True

    def uploads(self, sizes: Sizes) -> tuple[Declared, ...]:
        return (model(sizes, ALONE),)

    def downloads(self, sizes: Sizes) -> tuple[Declared, ...]:
        return (model(sizes, meaning="the client's own mixture of all models"),)

    def init_server_state(self, shared: Message, clients: int) -> State:
        first = next(iter(shared.values()))
        return {
            **{MIXED + n: t.expand(clients, *t.shape).clone() for n, t in shared.items()},
            WEIGHTS: first.new_full((clients, clients), 1 / clients),
            HEARD: torch.zeros(clients, dtype=torch.bool, device=first.device),
        }

    def aggregate(self, state: State, uploads: Uploads, rng: np.random.Generator) -> State:
        weights, here = self.mixing(uploads, rng), list(uploads.clients)
        if here == list(range(len(state[HEARD]))):  # no index need be copied to the device
            mixed = _products(weights, uploads.model)
            return {**state, **mixed, WEIGHTS: weights, HEARD: torch.ones_like(state[HEARD])}
        heard = state[HEARD].clone()
        heard[here] = True
        renewed = ~heard
        renewed[here] = True
        rows = weights.new_full((len(heard), len(here)), 1 / len(here))
        rows[here] = weights
        changed = _products(rows, uploads.model)
        changed[WEIGHTS] = torch.zeros_like(state[WEIGHTS])
        changed[WEIGHTS][:, here] = rows
        kept = {
            n: torch.where(renewed.view(-1, *[1] * (t.dim() - 1)), t, state[n])
            for n, t in changed.items()
        }
        return {**state, **kept, HEARD: heard}

    def download(self, state: State, clients: Sequence[int]) -> Message:
        mixed = as_model(with_prefix(state, MIXED))
        return {name: rows_of(tensor, clients) for name, tensor in mixed.items()}

    def collaboration(self, state: State) -> Tensor:
        return state[WEIGHTS]


def _products(weights: Tensor, models: Message) -> State:
    """Return the mixtures of all parameters, a row for each row of weights."""
    return {
        MIXED + n: (weights @ flat(t)).view(len(weights), *t.shape[1:]) for n, t in models.items()
    }
