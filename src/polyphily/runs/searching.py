"""Tuning: trials of hyperparameters and settings, chosen by Optuna, judged by validation.

The first trial has the defaults. The others are drawn by Optuna's TPE sampler from the ranges that
the method declares (`parameter(…, search=…)`) and from those of all methods (`settings.SEARCHED`).
Every trial trains all its pairs of learning rate and weight decay, for all seeds, in one pass, or
in several if that does not fit into memory.

Only validation scores are kept. Nothing here reads a test score.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyphily.core.cohort import Cohort
from polyphily.core.method import METHODS, VIEWS, Method, check_effects, create
from polyphily.core.search import Search
from polyphily.core.settings import SEARCHED, Settings, from_mapping, names
from polyphily.errors import Diverged, OutOfMemory, TrainingError, UserError
from polyphily.graphs.loading import Federation
from polyphily.runs.folder import TUNING, RunFolder, clean, write_text
from polyphily.runs.orders import RATES, TuneRequest
from polyphily.runs.run import Execution, Progress, check_names
from polyphily.runs.sampler import Sampler
from polyphily.runs.together import stacked
from polyphily.runs.trials import RateScores, Searched, SearchTrial, Values
from polyphily.runtime.machine import is_out_of_memory, release_memory
from polyphily.runtime.network import complete

if TYPE_CHECKING:
    pass

GRID = ((0.003, 0.0), (0.01, 0.0), (0.03, 0.0), (0.01, 5e-4))
"""Pairs of learning rate and weight decay that every trial trains unless others are given."""
SGD_FACTOR = 10  # learning rates of the grid are so much higher for sgd
LESS = ("device", "threads", "memory", "engine", "secure_aggregation")  # do not change scores


@dataclass(frozen=True)
class Standing:
    """How far a search is, for progress displays.

    Attributes:
        method: the name of the method.
        trial: the trial that is being trained, from 1.
        trials: how many there are to be.
        round: the rounds of this trial that are complete.
        rounds: how many there are to be.
        best: the best validation score of the trials that have ended.
        metric: the metric of the score.
    """

    method: str
    trial: int
    trials: int
    round: int
    rounds: int
    best: float | None
    metric: str


Report = Callable[[Standing], None]
Trained = Callable[[int, Execution], None]
"""A callback that takes the number of a trial and an execution of it, which has trained.

It is called more than once if the trial's rates do not fit into memory together.
"""


# What is asked for -------------------------------------------------------------------------------


def search_space(
    method: str, hyperparameters: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Search]:
    """Return the ranges to search, by name.

    Left out is what the user has set, what has no effect beside it, and what the chosen form of
    the method (`paper=on`) has outside its range, such as a coefficient of 0.

    Args:
        method: the name of the method.
        hyperparameters: those that the user has set.
        settings: those that the user has set.
    """
    start = create(method, hyperparameters)
    idle = start.without_effect()
    found: dict[str, Search] = {
        name: search
        for name, search in type(start).search_ranges().items()
        if name not in hyperparameters and name not in idle and getattr(start, name) in search
    }
    fixed = {*settings, *(["layers"] if "sample" in settings else [])}  # a number for each layer
    return found | {name: search for name, search in SEARCHED.items() if name not in fixed}


def rate_grid(
    rates: Mapping[str, Sequence[float]], settings: Mapping[str, Any], filled: Settings
) -> list[tuple[float, float]]:
    """Return the pairs of learning rate and weight decay that every trial trains.

    Args:
        rates: lists to combine; a name that is missing keeps its value. If empty, `GRID` with the
            run's own pair is taken, and what the user has set stays.
        settings: those that the user has set.
        filled: with every setting filled in.
    """
    assert filled.lr is not None
    assert filled.weight_decay is not None
    own = (filled.lr, filled.weight_decay)
    if rates:
        pairs = list(product(*[rates.get(n, (v,)) for n, v in zip(RATES, own, strict=True)]))
    else:
        factor = SGD_FACTOR if filled.optimizer == "sgd" else 1
        kept = [n in settings for n in RATES]
        grid = [(float(f"{lr * factor:.6g}"), decay) for lr, decay in GRID]
        pairs = [
            tuple(o if k else v for o, k, v in zip(own, kept, pair, strict=True)) for pair in grid
        ]
        pairs.insert(0, own)
    for lr, decay in pairs:
        replace(filled, lr=lr, weight_decay=decay).check()
    return list(dict.fromkeys((float(lr), float(decay)) for lr, decay in pairs))


# The search --------------------------------------------------------------------------------------


def search(
    method: str,
    federations: Sequence[Federation],
    settings: Mapping[str, Any],
    hyperparameters: Mapping[str, Any] | None = None,
    *,
    trials: int,
    rates: Mapping[str, Sequence[float]] | None = None,
    seed: int = 0,
    folder: Path | None = None,
    report: Report | None = None,
    pairs: Sequence[tuple[float, float]] | None = None,
    trained: Trained | None = None,
) -> Searched:
    """Search for the hyperparameters, settings and rates that validate best.

    Args:
        method: the name of the method.
        federations: one per seed; the score of a trial is the mean over them.
        settings: those that the user has set; they are not searched.
        hyperparameters: those that the user has set; they are not searched. `paper=on` and
            `code=on` choose the values of the first trial.
        trials: how many trials. There are fewer if fewer different ones exist.
        rates: learning rates and decays to combine in every trial; `GRID` unless given.
        seed: of the sampler.
        folder: where `tuning.jsonl` is kept. Trials that are there already are not repeated; a
            file of another search is renamed.
        report: called as rounds and trials end.
        pairs: learning rates with their decays for every trial, in place of `rates`.
        trained: called with every trial that was trained, for what is not kept here.

    Raises:
        UserError: if the defaults cannot be trained as asked.
        TrainingError: if every trial failed.
    """
    return _Study(
        METHODS.find(method).name,
        federations,
        dict(settings),
        dict(hyperparameters or {}),
        TuneRequest(trials, dict(rates or {})),
        seed,
        pairs,
        trained,
    ).run(folder, report)


def tune(
    method: str,
    federation: Federation | Sequence[Federation],
    trials: int = 20,
    *,
    rates: Mapping[str, Sequence[float]] | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    report: Report | None = None,
    **options: Any,
) -> Searched:
    """Search for the hyperparameters, settings and rates of a method that validate best.

    >>> import polyphily
    >>> federation = polyphily.load("csbm:nodes=60,features=8", clients=2, seed=0)
    >>> found = polyphily.tune("fedprox", federation, trials=2, rounds=2, hidden=8)
    >>> len(found.trials), sorted(found.options)
    (2, ['dropout', 'epochs', 'layers', 'lr', 'mu', 'weight_decay'])

    `polyphily.run(method, federation, **found.options, …)` trains with what was found. Only
    validation scores are looked at.

    Args:
        method: the name of a method.
        federation: one federation, or several (one per seed); a trial's score is their mean.
        trials: how many trials. The first has the defaults.
        rates: learning rates and decays that every trial combines, as in {"lr": [0.01, 0.1]};
            four usual pairs unless given.
        seed: of the sampler.
        out: a folder for `tuning.jsonl`, with which a search that was stopped goes on.
        report: called as rounds and trials end, with a `Standing`.
        **options: settings, and hyperparameters of the method. They are not searched.

    Raises:
        UserError: for unknown names and values out of bounds.
        TrainingError: if every trial failed.
    """
    federations = [federation] if isinstance(federation, Federation) else list(federation)
    if not federations:
        raise UserError("no federation was given")
    settings = {k: v for k, v in options.items() if k in names()}
    given = {k: v for k, v in options.items() if k not in settings}
    check_names(method, given)
    check_effects(create(method, given), given)
    return search(
        method,
        federations,
        settings,
        given,
        trials=trials,
        rates=rates,
        seed=seed,
        folder=Path(out) if out else None,
        report=report,
    )


class _Study:
    """A search in progress.

    Args:
        method: the name of the method.
        federations: one per seed.
        settings: those that are fixed.
        hyperparameters: those that are fixed.
        request: the number of trials, and the rates.
        seed: of the sampler.
        pairs: learning rates with their decays, in place of the request's.
        trained: called with every trial that was trained.
    """

    def __init__(
        self,
        method: str,
        federations: Sequence[Federation],
        settings: Values,
        hyperparameters: Values,
        request: TuneRequest,
        seed: int,
        pairs: Sequence[tuple[float, float]] | None = None,
        trained: Trained | None = None,
    ) -> None:
        self.method, self.federations, self.seed = method, list(federations), seed
        self.settings, self.hyperparameters = settings, hyperparameters
        self.trials = request.trials
        self.start = create(method, hyperparameters)
        first = federations[0]
        self.filled = complete(
            from_mapping(settings),
            self.start,
            first.kind,
            first.metric,
            dense=first.dense,
            relations=first.relations,
        )
        self.space = search_space(method, hyperparameters, settings) if self.trials > 1 else {}
        self.pairs = list(pairs or rate_grid(request.rates, settings, self.filled))
        self._trained = trained
        self.view, self.metric = self.start.view, self.filled.metric or "accuracy"
        self.defaults = {
            name: getattr(self.start if name in self.start.hyperparameters() else self.filled, name)
            for name in self.space
        }
        # A default of a backbone may lie outside the range of all methods: then it stays.
        self.space = {n: s for n, s in self.space.items() if self.defaults[n] in s}
        self.defaults = {n: self.defaults[n] for n in self.space}
        self.done: list[SearchTrial] = []
        self.notes: list[str] = []
        self._cohort: tuple[Cohort, int] | None = None  # of the last pass, with its pairs

    def request(self) -> dict[str, Any]:
        """Return everything that determines the trials, except their number."""
        import optuna

        fixed = {k: v for k, v in dataclasses.asdict(self.filled).items() if k not in LESS}
        found: dict[str, Any] = clean(
            {
                "method": self.method,
                "set": dataclasses.asdict(self.start),
                "settings": {k: v for k, v in fixed.items() if k not in RATES},
                "data": [[f.dataset, f.seed, f.partition.sha256] for f in self.federations],
                "search": {name: search.to_dict() for name, search in self.space.items()},
                "rates": self.pairs,
                "sampler": {"name": f"optuna {optuna.__version__} tpe", "seed": self.seed},
            }
        )
        return found

    def run(self, folder: Path | None, report: Report | None) -> Searched:
        """Run the trials that are missing, and return all of them."""
        kept = self._read(folder) if folder else []
        sampler = Sampler(self.space, self.defaults, self.seed)
        most = min(self.trials, sampler.size)
        if most < self.trials:
            left = ", ".join(self.space) or "nothing"
            self.notes.append(
                f"{most} of {self.trials} trials: {left} is left to search, which has no more "
                "different values" + ("; the others were set" if self.trials > 1 else "")
            )
        while len(self.done) < most:
            number = len(self.done)
            hyper, settings = self._split(sampler.ask())
            known = kept[number] if number < len(kept) else None
            same = known and (known.hyperparameters, known.settings) == (hyper, settings)
            if known and same and not known.lacked_memory:
                trial = known
            else:
                trial = self._try(number, hyper, settings, report)
                release_memory()
                if folder:
                    _append(folder, trial, after=number if known else None)
                kept = kept[:number]
            self.done.append(trial)
            sampler.tell(trial.score(self.view))
        if all(trial.failure for trial in self.done):
            kind = OutOfMemory if any(t.lacked_memory for t in self.done) else TrainingError
            raise kind(f"{self.method}: every trial failed: {self.done[0].failure}")
        return Searched(
            self.method,
            self.view,
            self.metric,
            tuple(self.done),
            self.space,
            self.trials,
            tuple(self.notes),
        )

    def _split(self, values: Mapping[str, Any]) -> tuple[Values, Values]:
        """Return the values of the method and of the settings, without those that are idle."""
        hyper = {n: v for n, v in values.items() if n in self.start.hyperparameters()}
        settings = {n: v for n, v in values.items() if n not in hyper}
        while idle := self._create(hyper).without_effect().keys() & hyper.keys():
            hyper = {n: v for n, v in hyper.items() if n not in idle}
        return hyper, settings

    def _create(self, hyper: Mapping[str, Any]) -> Method:
        return create(self.method, {**self.hyperparameters, **hyper})

    # One trial -------------------------------------------------------------------------------

    def _try(
        self, number: int, hyper: Values, settings: Values, report: Report | None
    ) -> SearchTrial:
        """Train a trial; one that fails is returned with the reason."""
        began = time.perf_counter()

        def ended(pairs: Sequence[RateScores], failure: str = "") -> SearchTrial:
            seconds = round(time.perf_counter() - began, 3)
            return SearchTrial(number, hyper, settings, tuple(pairs), seconds, failure)

        try:
            pairs = self._train(number, hyper, settings, report, self.pairs)
        except (UserError, TrainingError) as error:
            if number == 0 and isinstance(error, UserError):
                raise  # the request itself is impossible
            return ended((), str(error))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self._cohort = None
            return ended((), str(OutOfMemory()))
        failed = all(pair.failure for pair in pairs)
        return ended(pairs, pairs[0].failure if failed else "")

    def _train(
        self,
        number: int,
        hyper: Values,
        settings: Values,
        report: Report | None,
        pairs: Sequence[tuple[float, float]],
    ) -> list[RateScores]:
        """Train pairs of rates in one pass or, if they do not fit into memory, half after half."""
        try:
            return self._pass(number, hyper, settings, report, pairs)
        except (RuntimeError, MemoryError, OutOfMemory) as error:
            if len(pairs) == 1 or not is_out_of_memory(error):
                raise
        self._cohort = None
        release_memory()
        half = len(pairs) // 2
        return [
            *self._train(number, hyper, settings, report, pairs[:half]),
            *self._train(number, hyper, settings, report, pairs[half:]),
        ]

    def _pass(
        self,
        number: int,
        hyper: Values,
        settings: Values,
        report: Report | None,
        pairs: Sequence[tuple[float, float]],
    ) -> list[RateScores]:
        chosen = from_mapping({**self.settings, **settings})
        if chosen.engine != "sequential":
            chosen = replace(chosen, engine="stacked")
        cohort, size = self._cohort or (None, 0)
        execution = stacked(
            self._create(hyper),
            self.federations,
            replace(chosen, secure_aggregation=False),
            pairs,
            keep_best=False,
            cohort=cohort if size == len(pairs) else None,
        )
        self._cohort = execution.simulation.cohort, len(pairs)
        failures = _advance(execution, len(self.federations), self._progress(number, report))
        if self._trained:
            self._trained(number, execution)
        return [
            RateScores(lr, decay, failure=failures[i])
            if i in failures
            else self._scores(execution, i, lr, decay)
            for i, (lr, decay) in enumerate(pairs)
        ]

    def _scores(self, execution: Execution, pair: int, lr: float, decay: float) -> RateScores:
        seeds = len(self.federations)
        val: dict[str, list[float]] = {}
        rounds: dict[str, list[int | list[int]]] = {}
        for view in VIEWS:
            moments = [
                execution.tracker.moments(view, s)["best_val"]
                for s in range(pair * seeds, (pair + 1) * seeds)
            ]
            scores = [moment["val"].get(self.metric) for moment in moments]
            if any(score is None for score in scores):
                raise UserError(
                    f"tune: {self.federations[0].dataset} has no validation score to choose by "
                    f"({self.metric}): give a --split with validation nodes, or another --metric"
                )
            val[view], rounds[view] = scores, [moment["round"] for moment in moments]
        return RateScores(lr, decay, val, rounds)

    def _progress(self, number: int, report: Report | None) -> Progress | None:
        if report is None:
            return None
        known = [score for t in self.done if (score := t.score(self.view)) is not None]
        start = Standing(
            self.method,
            number + 1,
            self.trials,
            0,
            self.filled.rounds,
            max(known, default=None),
            self.metric,
        )
        report(start)
        return lambda record: report(replace(start, round=record["round"]))

    # The file --------------------------------------------------------------------------------

    def _read(self, folder: Path) -> list[SearchTrial]:
        """Return the trials of the folder's file; begin a new file if it is of another search."""
        file, files = folder / TUNING, RunFolder(folder)
        lines = files.records(TUNING)
        header = {"request": self.request()}
        trials: list[SearchTrial] = []
        if lines and lines[0] != json.loads(json.dumps(header)):
            aside = _aside(file)
            file.rename(aside)
            self.notes.append(f"{file} was of another search; it is now {aside.name}")
        elif lines:
            trials = [SearchTrial.from_dict(line) for line in lines[1:]]
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write to {folder}: {error.strerror}") from None
        kept = [header, *[trial.to_dict() for trial in trials]]  # without a line cut short
        write_text(file, "".join(json.dumps(line, allow_nan=False) + "\n" for line in kept))
        return trials


def read_trials(folder: Path) -> list[SearchTrial]:
    """Return the trials in a run folder; none if it was not tuned."""
    lines = RunFolder(folder).records(TUNING)
    return [SearchTrial.from_dict(line) for line in lines[1:]]


def _append(folder: Path, trial: SearchTrial, after: int | None = None) -> None:
    """Add a trial to the file, in place of those after a number of trials, if one is given."""
    if after is not None:
        lines = RunFolder(folder).records(TUNING)[: after + 1]
        write_text(folder / TUNING, "".join(json.dumps(line) + "\n" for line in lines))
    with (folder / TUNING).open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(clean(trial.to_dict()), allow_nan=False) + "\n")


def _aside(file: Path) -> Path:
    number = 1
    while (aside := file.with_name(f"{file.name}.before-{number}")).exists():
        number += 1
    return aside


def _advance(execution: Execution, seeds: int, progress: Progress | None) -> dict[int, str]:
    """Run all rounds; return the pairs of rates that diverged, with the reasons.

    The others go on without them.
    """
    failures: dict[int, str] = {}
    simulation = execution.simulation
    with execution.at_work():
        while True:
            try:
                execution.advance_to_the_end(progress)
                return failures
            except Diverged as error:
                pair = error.federation // seeds
                failures[pair] = str(error)
                first, end = pair * seeds, (pair + 1) * seeds
                simulation.stop(range(simulation.starts[first], simulation.starts[end]))
