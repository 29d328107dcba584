"""Run orders in folders: finished runs are reused, interrupted runs are resumed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from polyphily.core.cohort import Cohort
from polyphily.core.method import create
from polyphily.core.settings import from_mapping
from polyphily.graphs.loading import Federation, kept_on_disk
from polyphily.graphs.prepared import load_seeds
from polyphily.runs.folder import CONFIG, SUMMARY, RunFolder, write_text
from polyphily.runs.orders import RATES, Order
from polyphily.runs.run import Execution
from polyphily.runs.searching import search
from polyphily.runs.together import Together
from polyphily.runs.trials import Searched
from polyphily.runtime.machine import release_memory

REQUEST = "reproduce.json"  # the order that a run folder was created for

Train = Callable[[Execution, int], dict[str, Any]]
"""Trains a run after a number of complete rounds, and returns its summary."""

TrainTogether = Callable[[Together], object]
"""Trains several runs in one pass."""

Tune = Callable[[Order, Sequence[Federation], Path | None], Searched]
"""Makes the search of an order."""


def tune(job: Order, federations: Sequence[Federation], folder: Path | None) -> Searched:
    """Make the search of an order, without a display."""
    assert job.tune is not None
    return search(
        job.method,
        federations,
        job.settings,
        job.hyperparameters,
        trials=job.tune.trials,
        rates=job.tune.rates,
        folder=folder,
    )


def run(
    job: Order,
    folder: Path | None,
    train: Train,
    *,
    federations: Sequence[Federation] | None = None,
    tuner: Tune = tune,
) -> dict[str, Any]:
    """Run an order and return its summary; read it from the folder if the run is finished.

    Args:
        job: the order. If it has a search, that is made first, and the run has what it chose.
        folder: the run folder; None writes none.
        train: trains the run.
        federations: those of the order, if they are loaded already.
        tuner: makes the search.
    """
    if folder and _is_for(folder, job):
        found = RunFolder(folder).read_summary()
        if found is not None:
            return found
    if str(job.settings.get("device", "cpu")) != "cpu":
        release_memory()  # of the runs before this one
    began = time.perf_counter()
    federations = federations_of(job) if federations is None else federations
    seconds = time.perf_counter() - began
    if job.tune is None:
        return train(*_prepare(job, folder, federations, seconds))
    if folder and not _is_for(folder, job, started=False):
        _set_aside(folder)
        folder.mkdir(parents=True)
        write_text(folder / REQUEST, _request_text(job))
    searched = tuner(job, federations, folder)
    chosen = tuned(job, searched)
    summary = train(*_prepare(chosen, folder, federations, seconds, asked=job))
    if folder is None:  # there is no file of the trials that the summary could count
        failed = sum(bool(trial.failure) for trial in searched.trials)
        summary["tuning"] = {"trials": len(searched.trials), "failed": failed}
    return summary


def tuned(job: Order, found: Searched) -> Order:
    """Return an order without a search, with what a search has chosen."""
    return replace(
        job,
        hyperparameters={**job.hyperparameters, **found.hyperparameters},
        settings={**job.settings, **found.settings},
        tune=None,
    )


def run_together(jobs: Mapping[Path, Order], train: TrainTogether) -> None:
    """Run the jobs of a group (`groups`), as many in one pass as fit into memory.

    Runs that diverge or run out of memory stay unfinished. Continue them with `run`.
    """
    folder, job = next(iter(jobs.items()))
    began = time.perf_counter()
    federations = federations_of(job)
    seconds = time.perf_counter() - began
    simulation = _execution(job, folder, federations, seconds).simulation
    waiting = iter(jobs.items())
    while len(chosen := dict(islice(waiting, simulation.groups.room))) > 1:
        runs = [
            _prepare(job, folder, federations, seconds, cohort=simulation.cohort)[0]
            for folder, job in chosen.items()
        ]
        with suppress(torch.OutOfMemoryError):
            train(Together(runs))


def groups(jobs: Mapping[Path, Order]) -> list[dict[Path, Order]]:
    """Group unfinished jobs that can be trained in one pass: they differ in `RATES` only."""
    found: dict[str, dict[Path, Order]] = {}
    for folder, job in jobs.items():
        settings = from_mapping(job.settings)
        on_disk = settings.on_disk or kept_on_disk(job.data["dataset"], job.data.get("clients"))
        alone = settings.engine != "stacked" or settings.secure_aggregation or job.tune is not None
        alone = alone or on_disk
        if alone or is_finished(job, folder):
            continue
        done = RunFolder(folder).rounds_saved() if _is_for(folder, job) else 0
        rest = {k: v for k, v in job.settings.items() if k not in RATES}
        shared = [job.method, job.hyperparameters, job.data, job.seeds, rest, done]
        found.setdefault(json.dumps(shared, sort_keys=True), {})[folder] = job
    return [group for group in found.values() if len(group) > 1]


def _prepare(
    job: Order,
    folder: Path | None,
    federations: Sequence[Federation],
    seconds: float,
    *,
    asked: Order | None = None,
    cohort: Cohort | None = None,
) -> tuple[Execution, int]:
    """Create or restore the run of an order; return it with the number of complete rounds.

    If the folder holds another run, it is renamed.

    Args:
        job: the order.
        folder: the run folder; None writes none.
        federations: those of the order.
        seconds: how long loading them took.
        asked: the order before its search, if it had one; the folder is made for it already.
        cohort: that of an earlier execution on the same federations, to be reused.
    """
    execution = _execution(job, folder, federations, seconds, cohort)
    if folder is None:
        return execution, 0
    if _is_for(folder, asked or job):
        return execution, execution.restore()
    if asked is None:
        _set_aside(folder)
    RunFolder(folder).create(execution.config(), execution.federations)
    write_text(folder / REQUEST, _request_text(asked or job))
    return execution, 0


def _request_text(job: Order) -> str:
    return json.dumps(job.request(), indent=2) + "\n"


def _execution(
    job: Order,
    folder: Path | None,
    federations: Sequence[Federation],
    seconds: float,
    cohort: Cohort | None = None,
) -> Execution:
    return Execution(
        create(job.method, job.hyperparameters),
        federations,
        from_mapping(job.settings),
        folder,
        seconds,
        cohort=cohort,
    )


def federations_of(job: Order) -> list[Federation]:
    """Load the data of a job, a federation for each seed."""
    settings = from_mapping(job.settings)
    data = json.dumps(job.data)
    return _federations(data, job.seeds, job.partitions, settings.private, settings.on_disk)


@lru_cache(maxsize=1)  # consecutive jobs often share their data
def _federations(
    data: str, seeds: tuple[int, ...], partitions: Path | None, private: bool, on_disk: bool | None
) -> list[Federation]:
    return load_seeds(json.loads(data), seeds, partitions, private=private, on_disk=on_disk)


def _is_for(folder: Path, job: Order, *, started: bool = True) -> bool:
    """Check whether the folder holds the run of this order, finished or not.

    With `started` off, a folder whose run has not begun counts, too: its search has.
    """
    file = folder / REQUEST
    if not file.exists() or (started and not (folder / CONFIG).exists()):
        return False
    return bool(json.loads(file.read_text(encoding="utf-8")) == job.request())


def _set_aside(folder: Path) -> None:
    """Rename a folder that holds another run, so that nothing is lost."""
    if not folder.exists():
        return
    number = 1
    while (aside := folder.with_name(f"{folder.name}.before-{number}")).exists():
        number += 1
    folder.rename(aside)


def is_finished(job: Order, folder: Path) -> bool:
    return _is_for(folder, job) and (folder / SUMMARY).exists()
