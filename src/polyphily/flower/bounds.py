"""Bounds on what a site may send: counts, statistics and changes of models, and their aggregate.

A bound is relative to what the other sites sent, because only they tell what is usual. The sizes
that are compared:

- of a model: the norm of its change, upload less download. It may be `max_update` times the largest
  of three: the upper median of the other sites' changes in this round, the same of earlier rounds,
  and the norm of the model that was sent out. The last one keeps a site that sends tiny changes
  from making honest ones look large, so that it works with two sites, too.
- of a count: its sum. No number in it is negative or above `LARGEST_COUNT`. It may be `max_weight`
  times the upper median of the others.
- of a statistic: its norm, with the same factor, because statistics can grow with the number of
  nodes as counts do.

Counts and statistics are compared only if at least two other sites answered. Between two sites
nobody could tell which one is wrong.

The bounds stop broken sites and gross attacks. They do not replace robust aggregation, which bounds
what a hostile site can do within them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from polyphily.core.messages import Declared, Message, Role, State
from polyphily.flower.joining import Policy
from polyphily.flower.wire import WireError

LARGEST_COUNT = 1e9  # of the nodes of a site


def upper_median(values: Iterable[float]) -> float:
    """Return the median, the larger one of two in the middle; 0 without values.

    >>> upper_median([1.0, 5.0]), upper_median([1.0, 2.0, 9.0])
    (5.0, 2.0)
    """
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else 0.0


def drowning(values: Mapping[str, float], factor: float) -> dict[str, str]:
    """Return which sites' values are more than `factor` times those of the others, and why."""
    found = {}
    for site, own in values.items():
        others = [value for other, value in values.items() if other != site]
        usual = upper_median(others)
        if len(others) >= 2 and own > factor * usual > 0:
            found[site] = (
                f"is {own:.3g}, more than {factor:g} times that of the other sites ({usual:.3g})"
            )
    return found


class Bounds:
    """The bounds on the uploads of a run.

    Args:
        declared: the uploads (`Method.uploads`).
        policy: of the run.
        noise: deviation of the noise that sites add to every number; 0 without `--dp`.

    Attributes:
        record: the largest usual change of a model in any round so far, by declaration.
    """

    def __init__(self, declared: Sequence[Declared], policy: Policy, noise: float = 0.0) -> None:
        self.declared, self.policy, self.noise = declared, policy, noise
        self.record: dict[str, float] = {}

    def check(
        self, number: int, uploads: Mapping[str, Message], downloads: Mapping[str, Message]
    ) -> dict[str, str]:
        """Return which sites' uploads of a round are out of bounds, and why.

        Args:
            number: the round, from 1.
            uploads: by site, as their contract wants them.
            downloads: what each of these sites was sent.
        """
        found: dict[str, str] = {}
        for entry in self._travelling(number):
            if entry.role is Role.MODEL:
                found |= self._large_changes(entry, uploads, downloads)
                continue
            if entry.role is Role.COUNT:
                sizes = {site: _total(entry, upload) for site, upload in uploads.items()}
                found |= {
                    site: f"its {_words(entry)} has a count below zero or above {LARGEST_COUNT:g}"
                    for site, upload in uploads.items()
                    if not _is_count(entry, upload)
                }
            else:
                sizes = {site: _norm(entry, upload) for site, upload in uploads.items()}
            for site, why in drowning(sizes, self.policy.max_weight).items():
                found.setdefault(site, f"its {_words(entry)} {why} (max_weight)")
        return found

    def check_mean(self, number: int, mean: Message, download: Message) -> None:
        """Check the mean of all uploads, if there is nothing else to see.

        Raises:
            WireError: if it is out of bounds.
        """
        for entry in self._travelling(number):
            if entry.role is Role.MODEL:
                own = _norm(entry, mean, download)
                limit = self._limit(entry, [], download)
                if limit is not None and own > limit:
                    raise WireError(
                        f"the change of the mean model is {own:.3g}, more than "
                        f"{self.policy.max_update:g} times what is usual (max_update)"
                    )

    def accept(
        self, number: int, uploads: Mapping[str, Message], downloads: Mapping[str, Message]
    ) -> None:
        """Take note of the changes in a round that is complete."""
        for entry in self._travelling(number):
            if entry.role is Role.MODEL:
                sizes = [_norm(entry, own, downloads[site]) for site, own in uploads.items()]
                self.record[entry.name] = max(self.record.get(entry.name, 0.0), upper_median(sizes))

    def reason_against(self, state: State, sent: Message, following: Message) -> str:
        """Return why an aggregate must not be kept; empty if it may.

        Call `accept` first, so that the changes of the round count as usual.

        Args:
            state: the server's new state.
            sent: the models that the server sent before the round, stacked over clients.
            following: what it would send now.
        """
        for name, tensor in (*state.items(), *following.items()):
            if tensor.is_floating_point() and not bool(torch.isfinite(_distinct(tensor)).all()):
                return f"{name} would hold numbers that are not finite"
        usual = max(self.record.values(), default=0.0)
        for name, before in sent.items():
            after = following.get(name)
            if after is None or after.shape != before.shape or not usual:
                continue
            start = _distinct(before).double()
            moved, length = _rows(_distinct(after).double() - start), _rows(start)
            if bool((moved > self.policy.max_update * length.clamp(min=usual)).any()):
                return f"the change of {name} would be {float(moved.max()):.3g} (max_update)"
        return ""

    def _travelling(self, number: int) -> list[Declared]:
        return [entry for entry in self.declared if number in entry.rounds]

    def _large_changes(
        self, entry: Declared, uploads: Mapping[str, Message], downloads: Mapping[str, Message]
    ) -> dict[str, str]:
        """Return which sites' models changed too much, and why."""
        sizes = {site: _norm(entry, own, downloads[site]) for site, own in uploads.items()}
        found = {}
        for site, own in sizes.items():
            others = [size for other, size in sizes.items() if other != site]
            limit = self._limit(entry, others, downloads[site])
            if limit is not None and own > limit:
                found[site] = (
                    f"its change of {_words(entry)} is {own:.3g}, more than "
                    f"{self.policy.max_update:g} times what is usual "
                    f"({limit / self.policy.max_update:.3g}; max_update)"
                )
        return found

    def _limit(self, entry: Declared, others: Sequence[float], download: Message) -> float | None:
        """Return the largest change that is accepted; None if nothing is known to compare with."""
        start = _norm(entry, {n: t for n, t in download.items() if n in entry.shapes})
        known = len(others) >= 2 or (start > 0 and (others or self.record or self.noise))
        numbers = sum(math.prod(shape) for shape in entry.shapes.values())
        usual = max(
            upper_median(others),
            self.record.get(entry.name, 0.0),
            start,
            self.noise * math.sqrt(numbers),
        )
        return self.policy.max_update * usual if known and usual > 0 else None


def _norm(entry: Declared, upload: Message, download: Message | None = None) -> float:
    """Return the norm of a declared part of an upload, or of its difference to a download."""
    total = 0.0
    for name in entry.shapes:
        if name in upload:
            value = upload[name].double()
            start = None if download is None else download.get(name)
            if start is not None and start.shape == value.shape:
                value = value - start.double()
            total += float(value.square().sum())
    return math.sqrt(total)


def _distinct(stacked: Tensor) -> Tensor:
    """Return one row of a tensor that is the same row for every client; else the whole."""
    return stacked[:1] if stacked.dim() and stacked.stride(0) == 0 else stacked


def _rows(stacked: Tensor) -> Tensor:
    """Return the norm of each row."""
    return stacked.reshape(len(stacked), -1).square().sum(dim=1).sqrt()


def _total(entry: Declared, upload: Message) -> float:
    return sum(float(upload[name].double().sum()) for name in entry.shapes if name in upload)


def _is_count(entry: Declared, upload: Message) -> bool:
    return all(
        bool((upload[name] >= 0).all()) and bool((upload[name] <= LARGEST_COUNT).all())
        for name in entry.shapes
        if name in upload
    )


def _words(entry: Declared) -> str:
    return entry.meaning or entry.name.rstrip("/")
