"""Several learning rates and decays in one pass; validation says which is best."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from polyphily.core.cohort import Cohort
from polyphily.core.method import VIEWS, Method
from polyphily.core.settings import Settings
from polyphily.errors import UserError, unknown
from polyphily.graphs.loading import Federation
from polyphily.runs.run import Execution
from polyphily.runs.together import RATES, stacked


@dataclass(frozen=True)
class Trial:
    """One choice of rates, over all seeds.

    Attributes:
        lr: learning rate.
        weight_decay: coefficient of the decay.
        moments: for each view, each seed's scores at its best validation round.
    """

    lr: float
    weight_decay: float
    moments: Mapping[str, Sequence[Mapping[str, Any]]]

    def score(self, view: str, metric: str, split: str = "val") -> float:
        """Return the mean over seeds."""
        return statistics.fmean(moment[split][metric] for moment in self.moments[view])


@dataclass(frozen=True)
class Tuned:
    """The outcome of tuning.

    Attributes:
        trials: all of them.
        best: the one that validates best.
        view: the view that was compared.
        metric: the metric that was compared.
    """

    trials: Sequence[Trial]
    best: Trial
    view: str
    metric: str


def side_by_side(
    method: Method,
    federations: Sequence[Federation],
    settings: Settings,
    rates: Sequence[tuple[float, float]],
    cohort: Cohort | None = None,
) -> tuple[list[Trial], Execution]:
    """Run every (learning rate, decay) on every federation in one pass.

    Args:
        method: what is trained.
        federations: one per seed.
        settings: of every run, but for the rates.
        rates: the trials.
        cohort: that of an earlier pass over the same federations and as many trials.

    Returns:
        The trials with their scores, and the execution behind them.
    """
    execution = stacked(method, federations, settings, rates, keep_best=False, cohort=cohort)
    with execution.at_work():
        execution.advance_to_the_end()
    seeds = len(federations)
    trials = [
        Trial(
            lr,
            decay,
            {
                view: [
                    execution.tracker.moments(view, s)["best_val"]
                    for s in range(i * seeds, (i + 1) * seeds)
                ]
                for view in VIEWS
            },
        )
        for i, (lr, decay) in enumerate(rates)
    ]
    return trials, execution


def parse_rates(wishes: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """Parse values to try.

    >>> parse_rates(["lr=0.003,0.01", "weight_decay=0"])
    {'lr': (0.003, 0.01), 'weight_decay': (0.0,)}
    """
    found: dict[str, tuple[float, ...]] = {}
    for wish in wishes:
        name, _, values = wish.partition("=")
        name = name.strip().replace("-", "_")
        if name not in RATES:
            raise unknown("rate to tune", name, RATES)
        try:
            found[name] = tuple(float(value) for value in values.split(","))
        except ValueError:
            raise UserError(f"--tune {wish}: write values, as in lr=0.003,0.01,0.03") from None
    return found


def tune(
    method: Method,
    federations: Sequence[Federation],
    settings: Settings,
    wishes: Mapping[str, Sequence[float]],
) -> Tuned:
    """Try all combinations; select by validation in the method's own view."""
    usual = Execution(method, federations[:1], settings, None).settings
    choices = [wishes.get(name, (getattr(usual, name),)) for name in RATES]
    for value in product(*choices):
        replace(settings, lr=value[0], weight_decay=value[1]).check()
    rates = [(lr, decay) for lr, decay in product(*choices)]
    trials, execution = side_by_side(method, federations, settings, rates)
    metric = execution.settings.metric or "accuracy"
    best = max(trials, key=lambda trial: trial.score(execution.view, metric))
    return Tuned(trials, best, execution.view, metric)
