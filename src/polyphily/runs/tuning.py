"""Several learning rates and decays in one pass."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyphily.core.cohort import Cohort
from polyphily.core.method import VIEWS, Method
from polyphily.core.settings import Settings
from polyphily.graphs.loading import Federation
from polyphily.runs.run import Execution
from polyphily.runs.together import stacked


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
