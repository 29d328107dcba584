"""The server runtime: the work of a server in a round.

A simulation and a Flower server both drive it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from polyphily.core.messages import Contract, Declared, Message, Role, State, Uploads
from polyphily.core.messages import weights_of_means as weights_in
from polyphily.core.method import Method, sizes_of
from polyphily.core.settings import Settings
from polyphily.graphs.random import generator
from polyphily.nn.backbones import Backbone
from polyphily.runtime.robust import Defence


@dataclass(frozen=True)
class RoundPlan:
    """The clients that take part in a round, by number.

    Attributes:
        asked: who is asked to train.
        failing: who of them will not answer (simulated failures).
        answering: who of them will.
    """

    asked: list[int]
    failing: list[int]
    answering: list[int]


class Server:
    """The server of one federation.

    Args:
        method: what is trained.
        network: with the federation's initial parameters.
        settings: with every setting filled in.
        clients: how many there are.
        seed: the federation's.
    """

    def __init__(
        self, method: Method, network: Backbone, settings: Settings, clients: int, seed: int
    ) -> None:
        self.method, self.settings, self.clients, self.seed = method, settings, clients, seed
        self.network = network
        sizes = sizes_of(method, network, clients)
        self.declared_uploads: tuple[Declared, ...] = method.uploads(sizes)
        self.declared_downloads: tuple[Declared, ...] = method.downloads(sizes)
        initial = {name: value.detach()[0] for name, value in network.named_parameters()}
        shared = {name: initial[name].clone() for name in sizes.parameters}
        self.state: State = method.init_server_state(shared, clients)
        everything = len(shared) == len(initial)
        mixes = method.collaboration(self.state) is not None
        recalls = any(name.startswith("memory/") for name in method.prediction_state())
        self.one_model = method.evaluated == "global" and everything and not (mixes or recalls)
        """True if the federation has a single model: clients keep no parameter to themselves and
        nothing that predictions need, and the server does not mix models for each of them."""
        self.defence = Defence.parse(settings.robust)
        self._dtype: torch.dtype = getattr(torch, settings.dtype)
        self._contracts: dict[tuple[bool, ...], Contract] = {}

    # A round ---------------------------------------------------------------------------------

    def plan(self, round_index: int, stopped: Collection[int] = ()) -> RoundPlan:
        """Draw who is asked in a round and who will fail, without those that have stopped."""
        settings = self.settings
        if settings.participation == 1 and settings.failures == 0 and not stopped:
            everybody = list(range(self.clients))
            return RoundPlan(everybody, [], everybody)
        rng = generator(self.seed, f"participation/{round_index}")
        chosen = np.arange(self.clients)
        if settings.participation < 1:
            count = max(1, round(settings.participation * len(chosen)))
            chosen = np.sort(rng.choice(chosen, count, replace=False))
        lost = rng.choice(chosen, round(settings.failures * len(chosen)), replace=False)
        asked = [k for k in chosen.tolist() if k not in stopped]
        failing = set(lost.tolist()) & set(asked)
        return RoundPlan(asked, sorted(failing), [k for k in asked if k not in failing])

    def download(self, clients: Sequence[int]) -> Message:
        """Return what some clients are sent now, stacked in their order."""
        return self.method.download(self.state, clients)

    def upload_contract(self, round_index: int) -> Contract:
        """Return what an upload of a round must look like."""
        return self._contract(self.declared_uploads, round_index)

    def download_contract(self, round_index: int) -> Contract:
        """Return what a download of a round looks like."""
        return self._contract(self.declared_downloads, round_index)

    def _contract(self, declared: tuple[Declared, ...], round_index: int) -> Contract:
        """Return the contract of a round, made once for all rounds in which the same travels."""
        travelling = tuple(round_index + 1 in entry.rounds for entry in declared)
        key = (declared is self.declared_uploads, *travelling)
        if key not in self._contracts:
            self._contracts[key] = Contract.of(declared, round_index + 1, self._dtype)
        return self._contracts[key]

    def draws(self, round_index: int) -> np.random.Generator:
        """Return the server's random numbers of a round."""
        return generator(self.seed, f"server/{round_index}")

    def aggregate(
        self, uploads: Uploads, round_index: int, draws: np.random.Generator | None = None
    ) -> State:
        """Return the state after a round; the server's own is left as it is.

        Args:
            uploads: of the clients whose answers were accepted.
            round_index: the round, from 0.
            draws: random numbers in place of the server's own (in a recording).
        """
        with torch.no_grad():
            chosen = self.draws(round_index) if draws is None else draws
            if self.defence is not None:
                uploads = self.defence(uploads, self.declared_uploads, round_index + 1)
            return self.method.aggregate(self.state, replace(uploads, network=self.network), chosen)

    # What follows from the declarations ------------------------------------------------------

    def weights_of_means(self) -> dict[str, str]:
        """Return the weight of every upload that the server averages, by name."""
        return weights_in(self.declared_uploads)

    def counts(self) -> list[str]:
        """Return the names of uploads that count nodes."""
        return [
            n for entry in self.declared_uploads if entry.role is Role.COUNT for n in entry.shapes
        ]

    def remarks(self) -> Sequence[str]:
        """Return what the method has to say of its state."""
        return self.method.remarks(self.state)

    def collaboration(self) -> Tensor | None:
        """Return by which weights the server mixes models now, if it has any."""
        return self.method.collaboration(self.state)
