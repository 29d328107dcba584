"""Differential privacy of what a site uploads: clipped and noised at the site, accounted for.

The unit is a site: whatever its graph, everybody who sees its uploads of a whole run learns hardly
more than epsilon and delta allow. `docs/privacy.md` says what that covers and what not.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyphily.core.local import Message
from polyphily.core.method import Method
from polyphily.core.settings import OFF, Settings
from polyphily.errors import UserError, missing_package, unknown
from polyphily.nn.draws import Draws
from polyphily.nn.sparse import flat

SENSITIVITY = 2.0  # two points of a ball are at most two radii apart
FEWEST = 3  # clients whose sum is worth masking


# How much may be told --------------------------------------------------------------------------


@dataclass(frozen=True)
class Budget:
    """What all uploads of a run may tell about a site: `--dp epsilon=8,delta=1e-5,clip=1.0`.

    Attributes:
        epsilon: the privacy loss that is not exceeded,
        delta: but for this probability.
        clip: largest norm of an upload, less what was received.
    """

    epsilon: float
    delta: float = 1e-5
    clip: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Budget | None:
        """A budget as a user writes it; None where it is off.

        >>> Budget.parse("epsilon=8,clip=0.5")
        Budget(epsilon=8.0, delta=1e-05, clip=0.5)
        """
        if text == OFF:
            return None
        values: dict[str, float] = {}
        known = [field.name for field in fields(cls)]
        for item in text.split(","):
            name, _, value = (part.strip() for part in item.partition("="))
            if name not in known:
                raise unknown("part of dp", name, known)
            try:
                values[name] = float(value)
            except ValueError:
                raise UserError(f"dp: '{item}' is not a number, as in epsilon=8") from None
            if not 0 < values[name] < (1 if name == "delta" else math.inf):
                words = "between 0 and 1" if name == "delta" else "positive and finite"
                raise UserError(f"dp: {name} must be {words}, not {value}")
        if "epsilon" not in values:
            raise UserError("dp: say how much privacy, as in epsilon=8,delta=1e-5,clip=1.0")
        return cls(**values)

    def covers(self, other: Budget | None) -> bool:
        """Whether what another budget allows is within this one."""
        return other is not None and other.epsilon <= self.epsilon and other.delta <= self.delta

    def multiplier(self, uploads: int) -> float:
        """Noise, in units of the sensitivity, with which so many uploads spend the budget.

        Gaussian noise composes without loss, whatever later uploads make of earlier ones: `n`
        uploads with noise z are as one with z / sqrt(n) (Dong, Roth and Su 2022, Corollary 3.3).
        """
        sigma: float = _accounting().get_sigma_gaussian(self.epsilon, self.delta)
        return sigma * math.sqrt(uploads)

    def spent(self, multiplier: float, uploads: int) -> float:
        """The epsilon of so many uploads, exactly."""
        return _epsilon(multiplier / math.sqrt(uploads), self.delta) if uploads else 0.0


@lru_cache(maxsize=4096)
def _epsilon(sigma: float, delta: float) -> float:
    return float(_accounting().get_epsilon_gaussian(sigma, delta))


def _accounting() -> ModuleType:
    try:
        import dp_accounting
    except ImportError:
        raise missing_package("dp-accounting", "privacy", "--dp") from None
    module: ModuleType = dp_accounting
    return module


# What a site does to its uploads ---------------------------------------------------------------


@dataclass(frozen=True)
class Guard:
    """The Gaussian mechanism on all that a site uploads.

    Each kind of tensor (the model, prototypes, …) is taken relative to what the server sent under
    the same name and scaled down to the norm clip / sqrt(number of kinds), so that all of them
    together are within `clip`. Every number then gets noise of the deviation 2 · clip ·
    multiplier: two sites' uploads may be as far apart as two radii. Numbers that are not finite
    count as no change.

    Attributes:
        clip: radius of the ball.
        multiplier: noise in units of the sensitivity.
        tallies: uploads that count a client's nodes, for weights: ones are sent instead.
        public: uploads that say nothing about a client's data: sent as they are.
        draws: where noise comes from; None: the round's own draws, which follow from the seed.
    """

    clip: float
    multiplier: float
    tallies: Sequence[str] = ()
    public: Sequence[str] = ()
    draws: Draws | None = None

    @property
    def deviation(self) -> float:
        """Of the noise on every number."""
        return SENSITIVITY * self.clip * self.multiplier

    def __call__(self, upload: Message, received: Message, draws: Draws) -> Message:
        """What leaves the site in place of `upload`."""
        sent = dict(upload)
        kinds: dict[str, Message] = {}
        for name, value in upload.items():
            if name in self.tallies:
                sent[name] = torch.ones_like(value)
            elif name not in self.public:
                kinds.setdefault(name.partition("/")[0], {})[name] = value
        for own in kinds.values():
            start = {n: _reference(t, received.get(n)) for n, t in own.items()}
            change = {n: t.double() - start[n] for n, t in own.items()}
            for name, value in clipped(change, self.clip / math.sqrt(len(kinds))).items():
                noise = normal(self.draws or draws, value)
                sent[name] = (start[name] + value + self.deviation * noise).to(own[name].dtype)
        return sent


def guard_of(method: Method, settings: Settings, draws: Draws | None = None) -> Guard | None:
    """What protects the uploads of a run, from its first upload to that of its last round."""
    budget = Budget.parse(settings.dp)
    if budget is None:
        return None
    return Guard(
        budget.clip, budget.multiplier(settings.rounds), method.tallies, method.public, draws
    )


def spent(settings: Settings, guard: Guard | None, uploads: int) -> dict[str, float]:
    """The epsilon that so many uploads of a client have cost, for a round's record."""
    budget = Budget.parse(settings.dp)
    if budget is None or guard is None:
        return {}
    return {"epsilon": budget.spent(guard.multiplier, uploads)}


def account(settings: Settings, guard: Guard | None, uploads: int) -> dict[str, Any]:
    """What was promised and what was spent, for a run's summary; empty where nothing was."""
    budget = Budget.parse(settings.dp)
    if budget is None or guard is None:
        return {}
    return {
        "dp": {
            "unit": "all uploads of a client",
            "target_epsilon": budget.epsilon,
            **spent(settings, guard, uploads),
            "delta": budget.delta,
            "clip": budget.clip,
            "noise_multiplier": guard.multiplier,
            "noise_deviation": guard.deviation,
        }
    }


def treatment(method: Method | type[Method], name: str) -> str:
    """What `--dp` does to an upload of that name, in words."""
    if name in method.tallies:
        return "ones are sent"
    return "sent as it is" if name in method.public else "clipped and noised"


def clipped(message: Message, radius: float) -> Message:
    """Each client's tensors, all together scaled down to a norm of at most `radius`."""
    square = torch.stack([flat(t).square().sum(dim=1) for t in message.values()]).sum(dim=0)
    scale = (radius / square.sqrt()).clamp(max=1)
    fine = square.isfinite()
    return {
        name: torch.where(_beside(fine, t), t * _beside(scale, t), 0) for name, t in message.items()
    }


def normal(draws: Draws, like: Tensor) -> Tensor:
    """Standard normal numbers of a tensor's shape, a client's from its own stream (Box-Muller)."""
    count = like[0].numel()
    half = -(-count // 2)
    pairs = draws.uniform(2 * half, range(len(like) + 1))
    length, angle = (-2 * (1 - pairs[:, :half]).log()).sqrt(), math.tau * pairs[:, half:]
    both = torch.cat([length * angle.cos(), length * angle.sin()], dim=1)
    return both[:, :count].reshape(like.shape).to(like.device)


class SystemDraws(Draws):
    """Numbers from the operating system, which nobody can draw again: for sites of their own."""

    def uniform(self, width: int, pointers: Sequence[int]) -> Tensor:
        raw = np.frombuffer(os.urandom(8 * pointers[-1] * width), dtype=np.uint64)
        return torch.from_numpy((raw >> np.uint64(11)) * 2.0**-53).view(pointers[-1], width)


def _reference(value: Tensor, received: Tensor | None) -> Tensor:
    """What the server knows already: what it sent under that name, else zeros."""
    if received is None or received.shape != value.shape:
        return torch.zeros_like(value, dtype=torch.float64)
    return received.double()


def _beside(per_client: Tensor, tensor: Tensor) -> Tensor:
    return per_client.view(-1, *[1] * (tensor.dim() - 1))


# Sums instead of uploads -----------------------------------------------------------------------


def check(method: Method | type[Method], settings: Settings, clients: int) -> None:
    """Refuses what cannot be kept private as asked.

    Raises:
        UserError: saying why.
    """
    if settings.dp != OFF and settings.patience:
        raise UserError("--patience with --dp: when a site stops would tell of its scores")
    if not settings.secure_aggregation:
        return
    if isinstance(method.averaged, str):
        raise UserError(f"{method.name} cannot take --secure-aggregation: {method.averaged}")
    asked = max(1, round(settings.participation * clients))
    if asked < FEWEST:
        raise UserError(
            f"--secure-aggregation needs at least {FEWEST} clients in a round, not {asked}: "
            "from a sum of two each would know the other's"
        )
    try:
        import flwr.common.secure_aggregation  # noqa: F401
    except ImportError:
        raise missing_package("flwr", "flower", "--secure-aggregation") from None


def weighed(message: Message, averaged: Mapping[str, str]) -> Message:
    """What is to be summed: averaged tensors times their weights, others as they are."""
    return {n: t.double() * _weight(n, t, message, averaged) for n, t in message.items()}


def unweighed(sums: Message, averaged: Mapping[str, str]) -> Message:
    """Means of what is averaged, sums of the rest; a mean of no weight is zero."""
    found = {}
    for name, total in sums.items():
        weight = _weight(name, total, sums, averaged)
        found[name] = torch.where(weight != 0, total / weight, 0)
    return found


def _weight(name: str, tensor: Tensor, message: Message, averaged: Mapping[str, str]) -> Tensor:
    """The weights of a tensor, in a shape to multiply with it; one where it is only summed."""
    chosen = [weight for prefix, weight in averaged.items() if name.startswith(prefix)]
    if not chosen:
        return torch.ones((), dtype=torch.float64, device=tensor.device)
    weight = message[chosen[0]].double()
    return weight.view(*weight.shape, *[1] * (tensor.dim() - weight.dim()))
