"""Differential privacy of uploads: clipping and noise at the client, and the privacy accounting.

The unit of privacy is a client with its whole graph. Epsilon and delta bound what all uploads of a
run together reveal about it. `docs/privacy.md` says what this covers and what it does not.

The second half of the file is shared with secure aggregation: which runs can have it, and how
weighted means are computed from sums.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyphily.core.budget import OFF, Budget
from polyphily.core.declarations import example_sizes
from polyphily.core.messages import Declared, Message, MessageError, Role
from polyphily.core.method import Method
from polyphily.core.settings import Settings
from polyphily.errors import UserError, missing_package
from polyphily.nn.draws import Draws
from polyphily.nn.sparse import flat

SENSITIVITY = 2.0  # the largest distance of two points in a ball, in radii
MIN_CLIENTS = 3  # the fewest clients whose sum hides each of them


# Clipping and noise ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Guard:
    """The Gaussian mechanism, applied to everything that a client uploads.

    A declaration (the model, prototypes, …) is protected as a whole. Its change since the download
    is scaled down to a norm of clip / sqrt(number of such declarations), so that all changes
    together have a norm of at most `clip`. Two clients' uploads are then at most 2 · clip apart,
    and every number gets Gaussian noise with the standard deviation 2 · clip · multiplier.

    A change with numbers that are not finite is replaced by zeros. Counts are replaced by ones.
    Public tensors are sent unchanged.

    Attributes:
        clip: the largest norm of the change.
        multiplier: standard deviation of the noise, in units of the sensitivity.
        declared: the declared uploads (`Method.uploads`).
        draws: source of the noise. None: the draws of the round, which follow from the seed.
    """

    clip: float
    multiplier: float
    declared: Sequence[Declared]
    draws: Draws | None = None

    @property
    def sensitivity(self) -> float:
        """The largest distance of two clients' uploads before noise is added."""
        return SENSITIVITY * self.clip

    @property
    def deviation(self) -> float:
        """Standard deviation of the noise on every number."""
        return self.sensitivity * self.multiplier

    def __call__(self, upload: Message, received: Message, draws: Draws) -> Message:
        """Return the protected upload.

        Args:
            upload: what the method would send.
            received: what the server sent in this round.
            draws: the draws of the round, used unless the guard has its own.

        Raises:
            MessageError: if a tensor is not declared.
        """
        sent: Message = {}
        to_noise: list[Message] = []  # an entry per declaration
        for entry in self.declared:
            tensors = {name: upload[name] for name in entry.shapes if name in upload}
            if entry.role is Role.COUNT:
                sent |= {name: torch.ones_like(value) for name, value in tensors.items()}
            elif entry.role is Role.PUBLIC:
                sent |= tensors
            elif tensors:
                to_noise.append(tensors)
        covered = sent.keys() | {name for tensors in to_noise for name in tensors}
        if undeclared := sorted(upload.keys() - covered):
            raise MessageError(f"has undeclared {', '.join(undeclared[:5])}")
        for tensors in to_noise:
            start = {n: _reference(t, received.get(n)) for n, t in tensors.items()}
            change = {n: t.double() - start[n] for n, t in tensors.items()}
            for name, value in clipped(change, self.clip / math.sqrt(len(to_noise))).items():
                noise = normal(self.draws or draws, value)
                sent[name] = (start[name] + value + self.deviation * noise).to(tensors[name].dtype)
        return {name: sent[name] for name in upload}


def guard_of(
    settings: Settings, declared: Sequence[Declared], draws: Draws | None = None
) -> Guard | None:
    """Create the guard of a run's uploads; None without `--dp`."""
    budget = Budget.parse(settings.dp)
    if budget is None:
        return None
    return Guard(budget.clip, budget.multiplier(settings.rounds), declared, draws)


def spent(settings: Settings, guard: Guard | None, uploads: int) -> dict[str, float]:
    """Return the epsilon spent by a client after `uploads` uploads, for a round's record."""
    budget = Budget.parse(settings.dp)
    if budget is None or guard is None:
        return {}
    return {"epsilon": budget.spent(guard.multiplier, uploads)}


def account(settings: Settings, guard: Guard | None, uploads: int) -> dict[str, Any]:
    """Return the privacy budget and what was spent of it, for a summary; empty without `--dp`."""
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


TREATMENTS = {
    Role.MODEL: "clipped and noised",
    Role.STATISTIC: "clipped and noised",
    Role.COUNT: "ones are sent",
    Role.PUBLIC: "sent as it is",
}
"""The effect of `--dp` on an upload of each role, as text."""


def clipped(message: Message, radius: float) -> Message:
    """Scale each client's tensors down to a joint norm of at most `radius`.

    The tensors of a client whose norm is not finite become zeros.
    """
    square = torch.stack([flat(t).square().sum(dim=1) for t in message.values()]).sum(dim=0)
    scale = (radius / square.sqrt()).clamp(max=1)
    finite = square.isfinite()
    return {n: torch.where(_like(finite, t), t * _like(scale, t), 0) for n, t in message.items()}


def normal(draws: Draws, like: Tensor) -> Tensor:
    """Draw standard normal numbers in the shape of `like`, each client's from its own stream.

    The Box-Muller transform makes two normal numbers of two uniform ones.
    """
    count = like[0].numel()
    half = -(-count // 2)  # rounded up
    pairs = draws.uniform(2 * half, range(len(like) + 1))
    length, angle = (-2 * (1 - pairs[:, :half]).log()).sqrt(), math.tau * pairs[:, half:]
    both = torch.cat([length * angle.cos(), length * angle.sin()], dim=1)
    return both[:, :count].reshape(like.shape).to(like.device)


class SystemDraws(Draws):
    """Random numbers of the operating system, which cannot be reproduced; used at real sites."""

    def uniform(self, width: int, pointers: Sequence[int]) -> Tensor:
        raw = np.frombuffer(os.urandom(8 * pointers[-1] * width), dtype=np.uint64)
        # The upper 53 bits of each number, as a double in [0, 1).
        return torch.from_numpy((raw >> np.uint64(11)) * 2.0**-53).view(pointers[-1], width)


def _reference(value: Tensor, received: Tensor | None) -> Tensor:
    """Return what the server sent under the same name; zeros if it sent nothing that fits."""
    if received is None or received.shape != value.shape:
        return torch.zeros_like(value, dtype=torch.float64)
    return received.double()


def _like(per_client: Tensor, tensor: Tensor) -> Tensor:
    """Reshape one value per client so that it broadcasts against `tensor`."""
    return per_client.view(-1, *[1] * (tensor.dim() - 1))


# Sums in place of uploads ----------------------------------------------------------------------


def check_privacy(method: Method, settings: Settings, clients: int) -> None:
    """Check that a run can have the privacy that its settings ask for.

    Raises:
        UserError: if it cannot.
    """
    if settings.dp != OFF and settings.patience:
        raise UserError(
            "--patience cannot be used with --dp: the round in which a client stops reveals "
            "something about its scores"
        )
    if not settings.secure_aggregation:
        return
    reason = method.reason_against_sums(example_sizes(method, settings.backbone))
    if reason:
        raise UserError(f"{method.name} cannot take --secure-aggregation: {reason}")
    asked = max(1, round(settings.participation * clients))
    if asked < MIN_CLIENTS:
        raise UserError(
            f"--secure-aggregation needs at least {MIN_CLIENTS} clients in a round, not {asked}: "
            "of two clients, each could subtract its own upload from the sum"
        )
    try:
        import polyphily.privacy.crypto  # noqa: F401
    except ImportError:
        raise missing_package("cryptography", "flower", "--secure-aggregation") from None


def check_min_sites(settings: Settings, min_sites: int) -> None:
    """Check that no round of a run with secure aggregation can be a sum of one or two sites.

    Raises:
        UserError: if it can.
    """
    if settings.secure_aggregation and min_sites < MIN_CLIENTS:
        raise UserError(
            f"min_sites {min_sites}: with --secure-aggregation a round needs at least "
            f"{MIN_CLIENTS} sites, because a sum of fewer hides nobody. Set --min-sites to "
            f"{MIN_CLIENTS} or more"
        )


def weighed(message: Message, weights: Mapping[str, str]) -> Message:
    """Multiply tensors that the server averages by their weights, so that they can be summed.

    Args:
        message: uploads; tensors without a weight are left unchanged.
        weights: name of the weight of every averaged tensor (`Server.weights_of_means`).
    """
    return {n: t.double() * _weight(n, t, message, weights) for n, t in message.items()}


def unweighed(sums: Message, weights: Mapping[str, str]) -> Message:
    """Divide sums of weighted tensors by the sum of their weights; the inverse of `weighed`.

    A mean whose weights sum to zero is zero.
    """
    found = {}
    for name, total in sums.items():
        weight = _weight(name, total, sums, weights)
        found[name] = torch.where(weight != 0, total / weight, 0)
    return found


def _weight(name: str, tensor: Tensor, message: Message, weights: Mapping[str, str]) -> Tensor:
    """Return the weight of a tensor, in a shape that broadcasts; one if it has no weight."""
    if name not in weights:
        return torch.ones((), dtype=torch.float64, device=tensor.device)
    weight = message[weights[name]].double()
    return weight.view(*weight.shape, *[1] * (tensor.dim() - weight.dim()))
