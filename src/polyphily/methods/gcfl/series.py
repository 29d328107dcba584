"""GCFL+: clients are compared by the norms of their gradients over the last rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from polyphily.core.local import Local
from polyphily.core.messages import (
    Declared,
    Individually,
    Message,
    Sizes,
    State,
    Uploads,
    statistic,
)
from polyphily.core.method import parameter, register, travels
from polyphily.core.search import Range
from polyphily.errors import UserError
from polyphily.methods.gcfl.method import CLUSTER, GCFL, update_products
from polyphily.methods.gcfl.partition import FloatArray, warping_distances
from polyphily.nn.sparse import flat

NORM, TAKEN = "gradient_norm", "taken"  # ||∇||, and how many steps a client has taken
SERIES, LENGTH = "series", "series_length"


@register("gcfl+", cite="Xie et al., Federated Graph Classification over Non-IID Graphs, 2021")
@dataclass(frozen=True)
class GCFLPlus(GCFL):
    """GCFL that compares series of gradient norms in place of the updates of a single round.

    The server keeps the norms of the last `length` rounds of each client. D_ij is the dynamic time
    warping distance of two series, and a cluster is split by the similarities max(D) - D_ij. It is
    split as soon as all its members have full series. When any cluster has been split, all series
    begin anew.
    """

    labels_can_be_inputs: ClassVar[bool] = True
    left_open: ClassVar[Sequence[str]] = (
        *GCFL.left_open,
        "The authors' code runs the method once with the norms of gradients and once with the "
        "norms of updates; series=updates is the second.",
        "In the authors' code a gradient is that of the last batch of a round; here it is that of "
        "the last step, of the shared parameters, without weight decay.",
        "In the authors' code at most one cluster is split in a round, the first that can be; here "
        "all that can be are split.",
    )

    length: int = parameter(
        5, "norms of each client that are compared", symbol="d", paper=10, search=Range(3, 15)
    )
    series: str = parameter(
        "gradients",
        "whose norms are compared: gradients, those of the last step of a round; updates, Δ_i",
        choices=("gradients", "updates"),
    )
    standardise: bool = parameter(
        False, "divide each series by its standard deviation, so that only its course counts"
    )

    def __post_init__(self) -> None:
        if self.length < 1:
            raise UserError(f"gcfl+: 'length' must be at least 1, not {self.length}")

    def rounds_before_it_acts(self) -> int:
        return max(self.warm_up, self.length - 1) if self.splits else 0

    def without_effect(self) -> Mapping[str, str]:
        found = dict(super().without_effect())
        if not self.splits:
            found |= dict.fromkeys(("length", "series", "standardise"), found["partition"])
        elif self.partition == "singletons":
            reason = "clients are not compared; set partition=linkage"
            found |= dict.fromkeys(("series", "standardise"), reason)
        return found

    # At the clients --------------------------------------------------------------------------

    def uploads(self, sizes: Sizes) -> tuple[Declared, ...]:
        sent = super().uploads(sizes)
        if self.series == "updates":
            return sent
        alone = Individually("the server compares the series of single clients to cluster them")
        return (*sent, statistic(NORM, (), alone, meaning="norm of the last step's gradient"))

    def prepare_round(self, local: Local) -> Message:
        """Return the norm of the last gradient and the steps so far, of every client."""
        if self.series == "updates":
            return {}
        zeros = torch.zeros_like(local.cohort.constant(local.steps))
        return {name: local.constants.get(name, zeros) for name in (NORM, TAKEN)}

    def correct_gradients(self, local: Local, grads: Message) -> Message:
        """Keep the norm of the gradient of each client's last step; change no gradient."""
        if self.series == "updates":
            return grads
        shared = [g for name, g in grads.items() if travels(self, local.network, name)]
        squares = sum((flat(g).square().sum(dim=1) for g in shared), local.constants[NORM] * 0)
        taken = local.constants[TAKEN] + 1
        going = taken <= local.cohort.constant(local.steps)
        norm = torch.where(going, squares.sqrt(), local.constants[NORM])
        local.constants = {NORM: norm, TAKEN: taken}
        return grads

    def upload(self, local: Local) -> Message:
        sent = super().upload(local)
        return sent if self.series == "updates" else {**sent, NORM: local.constants[NORM]}

    # At the server ---------------------------------------------------------------------------

    def init_server_state(self, shared: Message, clients: int) -> State:
        state = super().init_server_state(shared, clients)
        device = state[CLUSTER].device
        return {
            **state,
            SERIES: torch.zeros(clients, self.length, dtype=torch.float64, device=device),
            LENGTH: torch.zeros(clients, dtype=torch.int64, device=device),
        }

    def aggregate(self, state: State, uploads: Uploads, rng: np.random.Generator) -> State:
        """Add the norms of the round to the series, then go on as GCFL."""
        here = list(uploads.clients)
        series, length = state[SERIES].clone(), state[LENGTH].clone()
        norms = self.norms(state, uploads).to(series).unsqueeze(1)
        series[here] = torch.cat([series[here, 1:], norms], dim=1)
        length[here] += 1
        after = super().aggregate({**state, SERIES: series, LENGTH: length}, uploads, rng)
        if int(after[CLUSTER].max()) > int(state[CLUSTER].max()):  # a cluster was split
            after[LENGTH] = torch.zeros_like(length)
        return after

    def norms(self, state: State, uploads: Uploads) -> Tensor:
        if self.series == "gradients":
            return uploads[NORM]
        return torch.from_numpy(np.sqrt(update_products(state, uploads).diagonal()))

    def comparable(self, state: State, members: Sequence[int]) -> bool:
        return bool((state[LENGTH][members] >= self.length).all())

    def similarity(self, state: State, members: Sequence[int], products: FloatArray) -> FloatArray:
        """Return max(D) - D_ij, `[n, n]`, from the members' series."""
        series: FloatArray = state[SERIES][members].cpu().numpy()
        if self.standardise:
            series = series / np.maximum(series.std(axis=1, keepdims=True), 1e-12)
        distances = warping_distances(series)
        found: FloatArray = distances.max() - distances
        return found
