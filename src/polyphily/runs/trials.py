"""Trials of a search: what was tried, and its validation scores. No test score is kept."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polyphily.core.search import Search
from polyphily.errors import OutOfMemory

Values = dict[str, Any]


@dataclass(frozen=True)
class RateScores:
    """Validation scores of one pair of rates in a trial.

    Attributes:
        lr: learning rate.
        weight_decay: coefficient of the decay.
        val: for each view, each seed's validation score at its best round.
        round: for each view, each seed's best round (of each of its clients, if they choose).
        failure: why the pair has no scores; empty if it has.
    """

    lr: float
    weight_decay: float
    val: Mapping[str, Sequence[float]] = field(default_factory=dict)
    round: Mapping[str, Sequence[int | list[int]]] = field(default_factory=dict)
    failure: str = ""

    def score(self, view: str) -> float | None:
        """Return the mean over seeds; None if training failed."""
        return None if self.failure else statistics.fmean(self.val[view])


@dataclass(frozen=True)
class SearchTrial:
    """One choice of hyperparameters and settings, with all pairs of rates.

    Attributes:
        number: its place in the search; 0 has the defaults.
        hyperparameters: the values that were tried, of the method.
        settings: the values that were tried, of the settings.
        rates: the scores of every pair of learning rate and weight decay.
        seconds: how long the trial took.
        failure: why no pair has scores; empty if one has.
    """

    number: int
    hyperparameters: Values
    settings: Values
    rates: tuple[RateScores, ...] = ()
    seconds: float = 0.0
    failure: str = ""

    @property
    def lacked_memory(self) -> bool:
        """True if the trial failed for lack of memory, which says nothing about its values."""
        return self.failure == str(OutOfMemory())

    @property
    def values(self) -> Values:
        """What was tried, except rates."""
        return {**self.hyperparameters, **self.settings}

    def best(self, view: str) -> RateScores | None:
        """Return the pair of rates with the best validation score; None if all failed."""
        known = [pair for pair in self.rates if pair.score(view) is not None]
        return max(known, key=lambda pair: pair.score(view) or 0.0) if known else None

    def score(self, view: str) -> float | None:
        """Return the validation score of the best pair of rates; None if all failed."""
        best = self.best(view)
        return None if best is None else best.score(view)

    def to_dict(self) -> dict[str, Any]:
        """Return the trial as a line of `tuning.jsonl` has it."""
        found: dict[str, Any] = {
            "trial": self.number,
            "set": self.hyperparameters,
            "settings": self.settings,
            "seconds": self.seconds,
            "rates": [
                {
                    "lr": pair.lr,
                    "weight_decay": pair.weight_decay,
                    **({"failed": pair.failure} if pair.failure else {}),
                    **({} if pair.failure else {"val": dict(pair.val), "round": dict(pair.round)}),
                }
                for pair in self.rates
            ],
        }
        return found | ({"failed": self.failure} if self.failure else {})

    @classmethod
    def from_dict(cls, line: Mapping[str, Any]) -> SearchTrial:
        """Return the trial of a line of `tuning.jsonl`."""
        pairs = tuple(
            RateScores(
                pair["lr"],
                pair["weight_decay"],
                pair.get("val", {}),
                pair.get("round", {}),
                pair.get("failed", ""),
            )
            for pair in line["rates"]
        )
        return cls(
            line["trial"],
            line["set"],
            line["settings"],
            pairs,
            line["seconds"],
            line.get("failed", ""),
        )


@dataclass(frozen=True)
class Searched:
    """The outcome of a search.

    Attributes:
        method: the name of the method.
        view: the view that validation scores are compared in: the method's own.
        metric: the metric of the scores.
        trials: all of them, in order; the first has the defaults.
        space: the range of every name that was searched.
        wanted: how many trials were asked for.
        notes: what a reader should know, such as why there are fewer trials.
    """

    method: str
    view: str
    metric: str
    trials: Sequence[SearchTrial]
    space: Mapping[str, Search]
    wanted: int
    notes: Sequence[str] = ()

    @property
    def best(self) -> SearchTrial:
        """The trial that validates best; of several, the first."""
        return self.ranked()[0]

    @property
    def score(self) -> float:
        """The validation score of the best trial, mean over seeds."""
        return self.best.score(self.view) or 0.0

    @property
    def hyperparameters(self) -> Values:
        """The values of the best trial, of the method."""
        return dict(self.best.hyperparameters)

    @property
    def settings(self) -> Values:
        """The settings of the best trial, with learning rate and weight decay."""
        pair = self.best.best(self.view)
        assert pair is not None
        return {**self.best.settings, "lr": pair.lr, "weight_decay": pair.weight_decay}

    @property
    def options(self) -> Values:
        """Everything that the best trial chose, as keyword arguments of `polyphily.run`."""
        return {**self.hyperparameters, **self.settings}

    def ranked(self) -> list[SearchTrial]:
        """Return the trials, the best first and those that failed last."""
        return ranked(self.trials, self.view)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "method": self.method,
            "view": self.view,
            "metric": self.metric,
            "wanted": self.wanted,
            "space": {name: str(search) for name, search in self.space.items()},
            "trials": [trial.to_dict() for trial in self.trials],
            "best": {"trial": self.best.number, "val": self.score, **self.options},
            "notes": list(self.notes),
        }


def ranked(trials: Sequence[SearchTrial], view: str) -> list[SearchTrial]:
    """Return trials, the best first and those that failed last."""
    return sorted(trials, key=lambda trial: 1.0 if (s := trial.score(view)) is None else -s)
