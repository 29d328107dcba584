"""Runs what a table asks for: what is finished stands, what was interrupted goes on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from polyphily.core.cohort import Cohort
from polyphily.core.method import create
from polyphily.core.settings import from_mapping
from polyphily.graphs.loading import Federation, load
from polyphily.papers.plan import Job, Order
from polyphily.papers.tables import SECONDS
from polyphily.runs.folder import CONFIG, SUMMARY, RunFolder, safe_name, write_text
from polyphily.runs.run import VIEW_OF, Execution
from polyphily.runs.together import RATES, Together

REQUEST = "reproduce.json"  # what a run folder was made for

Go = Callable[[Execution, int], dict[str, Any]]
"""Runs an execution that has so many rounds behind it, and gives its summary."""

GoTogether = Callable[[Together], object]
"""Runs several in one pass."""


def folder_of(out: Path, table: str, job: Job) -> Path:
    return out / safe_name(table) / safe_name(job.figure.cell) / safe_name(job.figure.method)


def run(job: Order, folder: Path, go: Go) -> dict[str, Any]:
    """The summary of a job, from its folder where it is finished."""
    if _is_for(folder, job) and (found := RunFolder(folder).read_summary()) is not None:
        return found
    return go(*_prepared(job, folder))


def run_together(jobs: Mapping[Path, Order], go: GoTogether) -> None:
    """Runs jobs of a group (`groups`), as many in one pass as fit into memory.

    What it leaves undone, a run that diverges or finds no memory, goes on with `run`.
    """
    folder, job = next(iter(jobs.items()))
    simulation = _execution(job, folder).simulation
    waiting = iter(jobs.items())
    while len(chosen := dict(islice(waiting, simulation.room))) > 1:
        runs = [_prepared(job, folder, simulation.cohort)[0] for folder, job in chosen.items()]
        with suppress(torch.OutOfMemoryError):
            go(Together(runs))


def groups(jobs: Mapping[Path, Order]) -> list[dict[Path, Order]]:
    """The unfinished jobs that may run in one pass: all is the same but their rates."""
    found: dict[str, dict[Path, Order]] = {}
    for folder, job in jobs.items():
        settings = from_mapping(job.settings)
        if settings.engine != "stacked" or settings.secure_aggregation or is_finished(job, folder):
            continue
        done = RunFolder(folder).rounds_saved() if _is_for(folder, job) else 0
        rest = {k: v for k, v in job.settings.items() if k not in RATES}
        same = [job.method, job.hyperparameters, job.data, job.seeds, rest, done]
        found.setdefault(json.dumps(same, sort_keys=True), {})[folder] = job
    return [group for group in found.values() if len(group) > 1]


def _prepared(job: Order, folder: Path, cohort: Cohort | None = None) -> tuple[Execution, int]:
    """The execution of a job and the rounds behind it, with the folder laid out for it.

    Another run that is there is set aside.
    """
    execution = _execution(job, folder, cohort)
    if _is_for(folder, job):
        return execution, execution.restore()
    _set_aside(folder)
    RunFolder(folder).create(execution.config(), execution.federations)
    write_text(folder / REQUEST, json.dumps(job.request(), indent=2) + "\n")
    return execution, 0


def _execution(job: Order, folder: Path, cohort: Cohort | None = None) -> Execution:
    began = time.perf_counter()
    federations = _federations(json.dumps(job.data), job.seeds)
    return Execution(
        create(job.method, job.hyperparameters),
        federations,
        from_mapping(job.settings),
        folder,
        time.perf_counter() - began,
        cohort=cohort,
    )


@lru_cache(maxsize=1)  # the rows of a cell follow each other
def _federations(data: str, seeds: tuple[int, ...]) -> list[Federation]:
    return [load(**json.loads(data), seed=seed) for seed in seeds]


def _is_for(folder: Path, job: Order) -> bool:
    """Whether the folder holds this very run, finished or not."""
    file = folder / REQUEST
    if not (file.exists() and (folder / CONFIG).exists()):
        return False
    return bool(json.loads(file.read_text(encoding="utf-8")) == job.request())


def _set_aside(folder: Path) -> None:
    """Renames a folder that holds another run, so that nothing is lost."""
    if not folder.exists():
        return
    number = 1
    while (aside := folder.with_name(f"{folder.name}.before-{number}")).exists():
        number += 1
    folder.rename(aside)


def is_finished(job: Order, folder: Path) -> bool:
    return _is_for(folder, job) and (folder / SUMMARY).exists()


def outcome(job: Job, summary: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Mean and standard deviation over seeds of what the table reports, in percent or seconds."""
    protocol = job.protocol
    if protocol.metric == SECONDS:  # all seeds share a round
        return summary["seconds_per_round_median"] / len(job.seeds), None
    view = VIEW_OF[summary["evaluated"]] if protocol.view == "own" else protocol.view
    scores = summary["views"][view][protocol.moment]["test"]
    name = protocol.metric + ("_client_mean" if protocol.over == "clients" else "")
    return _percent(scores.get(name)), _percent(scores.get(f"{name}_std"))


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value
