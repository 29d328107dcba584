"""Runs what a table asks for: what is finished stands, what was interrupted goes on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from polyphily.federation.folder import CONFIG, SUMMARY, RunFolder, safe_name, write_text
from polyphily.federation.run import VIEW_OF, Execution
from polyphily.federation.settings import from_mapping
from polyphily.graphs.federation import Federation, load
from polyphily.methods.base import create
from polyphily.papers.plan import Job, Order
from polyphily.papers.tables import SECONDS

REQUEST = "reproduce.json"  # what a run folder was made for

Go = Callable[[Execution, int], dict[str, Any]]
"""Runs an execution that has so many rounds behind it, and gives its summary."""


def folder_of(out: Path, table: str, job: Job) -> Path:
    return out / safe_name(table) / safe_name(job.figure.cell) / safe_name(job.figure.method)


def run(job: Order, folder: Path, go: Go) -> dict[str, Any]:
    """The summary of a job, from its folder where it is finished."""
    files = RunFolder(folder)
    same = _is_for(folder, job)
    if same and (found := files.read_summary()) is not None:
        return found
    if not same:
        _set_aside(folder)
    began = time.perf_counter()
    federations = _federations(json.dumps(job.data), job.seeds)
    execution = Execution(
        create(job.method, job.hyperparameters),
        federations,
        from_mapping(job.settings),
        folder,
        time.perf_counter() - began,
    )
    if same:
        return go(execution, execution.restore())
    files.create(execution.config(), federations)
    write_text(folder / REQUEST, json.dumps(job.request(), indent=2) + "\n")
    return go(execution, 0)


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
