"""Which points a search tries: the defaults, then those that Optuna's TPE sampler proposes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from polyphily.core.search import Range, Search
from polyphily.runs.trials import Values

if TYPE_CHECKING:
    import optuna

STARTUP = 5  # trials that are drawn at random before the sampler learns from them
DIGITS = 3  # significant digits of the values that are drawn
TRIES = 20  # draws of a point that was tried before, until an untried one is taken in order


class Sampler:
    """Draws different points: the defaults first, then those that Optuna's TPE proposes.

    What it draws follows from the seed and the scores so far, so that a search that was stopped
    goes on as if it had not been.

    Args:
        space: the range of every name.
        defaults: the first point.
        seed: of the sampler.
    """

    def __init__(self, space: Mapping[str, Search], defaults: Mapping[str, Any], seed: int) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.space = dict(space)
        sizes = [int(s.size) if s.size < 10**6 else 10**6 for s in self.space.values()]
        self.size = 1
        for size in sizes:
            self.size = min(self.size * size, 10**6)
        sampler = optuna.samplers.TPESampler(n_startup_trials=STARTUP, seed=seed)
        self._study = optuna.create_study(sampler=sampler, direction="maximize")
        self._defaults = dict(defaults)
        self._study.enqueue_trial(self._defaults)
        self._distributions = {n: _distribution(s) for n, s in self.space.items()}
        self._scores: dict[str, float | None] = {}  # of the points that were tried
        self._asked: optuna.Trial | None = None
        self._key = ""

    def ask(self) -> Values:
        """Return a point that was not asked for before."""
        for _ in range(TRIES):
            self._asked = self._study.ask(self._distributions)
            drawn = {n: _rounded(self._asked.params[n], s) for n, s in self.space.items()}
            point = drawn if self._scores else self._defaults
            self._key = _key(point)
            if self._key not in self._scores:
                return point
            self.tell(self._scores[self._key])
        return self._untried()

    def tell(self, score: float | None) -> None:
        """Take the score of the point that was asked for; None if it failed."""
        import optuna

        assert self._asked is not None
        self._scores[self._key] = score
        # A pruned trial without a value ranks last, so that the sampler avoids its neighbourhood.
        state = optuna.trial.TrialState
        if score is None:
            self._study.tell(self._asked, state=state.PRUNED)
        else:
            self._study.tell(self._asked, score, state=state.COMPLETE)

    def _untried(self) -> Values:
        """Return the first point, in order, that was not asked for; the space is small."""
        for chosen in product(*[_all_values(search) for search in self.space.values()]):
            point = dict(zip(self.space, chosen, strict=True))
            if _key(point) not in self._scores:
                self._key = _key(point)
                self._study.enqueue_trial(point)
                self._asked = self._study.ask(self._distributions)
                return point
        raise AssertionError("every point was asked for")


def _key(point: Mapping[str, Any]) -> str:
    return json.dumps(point, sort_keys=True)


def _distribution(search: Search) -> optuna.distributions.BaseDistribution:
    from optuna import distributions

    if not isinstance(search, Range):
        return distributions.CategoricalDistribution(search.values)
    if search.whole:
        return distributions.IntDistribution(int(search.low), int(search.high), search.log)
    return distributions.FloatDistribution(search.low, search.high, search.log)


def _rounded(value: Any, search: Search) -> Any:
    """Return a value with few digits, which is easier to read and to type, within the range."""
    if not isinstance(value, float) or not isinstance(search, Range):
        return value
    return min(max(float(f"{value:.{DIGITS}g}"), search.low), search.high)


def _all_values(search: Search) -> Sequence[Any]:
    if not isinstance(search, Range):
        return search.values
    if search.whole:
        return range(int(search.low), int(search.high) + 1)
    steps = 100
    inside = [search.low + (search.high - search.low) * i / steps for i in range(steps + 1)]
    return [_rounded(value, search) for value in inside]
