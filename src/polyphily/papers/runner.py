"""Run jobs in folders: finished runs are reused, interrupted runs are resumed."""

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
from polyphily.core.method import VIEW_OF, create
from polyphily.core.settings import from_mapping
from polyphily.graphs.loading import Federation
from polyphily.graphs.prepared import load_prepared
from polyphily.papers.plan import DEFAULT, Job, Order, key_of
from polyphily.papers.tables import SECONDS
from polyphily.runs.folder import CONFIG, SUMMARY, RunFolder, safe_name, write_text
from polyphily.runs.run import Execution
from polyphily.runs.together import RATES, Together

REQUEST = "reproduce.json"  # the job that a run folder was created for

Train = Callable[[Execution, int], dict[str, Any]]
"""Trains a run after a number of complete rounds, and returns its summary."""

TrainTogether = Callable[[Together], object]
"""Trains several runs in one pass."""


def folder_of(out: Path, table: str, job: Job) -> Path:
    """Return the run folder of a job: table, cell, and row with its form."""
    form = "" if job.form == DEFAULT else f".{job.form}"
    name = safe_name(job.entry.method) + form
    return out / safe_name(table) / safe_name(job.entry.cell) / name


def finished_runs(out: Path) -> dict[str, Path]:
    """Return the folders of all finished runs of tables, by request: tables share some of them."""
    found = {}
    for file in sorted(out.glob(f"*/*/*/{REQUEST}")):
        if (file.parent / SUMMARY).exists():
            found[key_of(json.loads(file.read_text(encoding="utf-8")))] = file.parent
    return found


def run(job: Order, folder: Path, train: Train) -> dict[str, Any]:
    """Run a job and return its summary; read it from the folder if the run is finished."""
    if _is_for(folder, job) and (found := RunFolder(folder).read_summary()) is not None:
        return found
    return train(*_prepare(job, folder))


def run_together(jobs: Mapping[Path, Order], train: TrainTogether) -> None:
    """Run the jobs of a group (`groups`), as many in one pass as fit into memory.

    Runs that diverge or run out of memory stay unfinished. Continue them with `run`.
    """
    folder, job = next(iter(jobs.items()))
    simulation = _execution(job, folder).simulation
    waiting = iter(jobs.items())
    while len(chosen := dict(islice(waiting, simulation.groups.room))) > 1:
        runs = [_prepare(job, folder, simulation.cohort)[0] for folder, job in chosen.items()]
        with suppress(torch.OutOfMemoryError):
            train(Together(runs))


def groups(jobs: Mapping[Path, Order]) -> list[dict[Path, Order]]:
    """Group unfinished jobs that can be trained in one pass: they differ in `RATES` only."""
    found: dict[str, dict[Path, Order]] = {}
    for folder, job in jobs.items():
        settings = from_mapping(job.settings)
        if settings.engine != "stacked" or settings.secure_aggregation or is_finished(job, folder):
            continue
        done = RunFolder(folder).rounds_saved() if _is_for(folder, job) else 0
        rest = {k: v for k, v in job.settings.items() if k not in RATES}
        shared = [job.method, job.hyperparameters, job.data, job.seeds, rest, done]
        found.setdefault(json.dumps(shared, sort_keys=True), {})[folder] = job
    return [group for group in found.values() if len(group) > 1]


def _prepare(job: Order, folder: Path, cohort: Cohort | None = None) -> tuple[Execution, int]:
    """Create or restore the run of a job; return it with the number of complete rounds.

    If the folder holds another run, it is renamed.
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
    federations = federations_of(job)
    return Execution(
        create(job.method, job.hyperparameters),
        federations,
        from_mapping(job.settings),
        folder,
        time.perf_counter() - began,
        cohort=cohort,
    )


def federations_of(job: Order) -> list[Federation]:
    """Load the data of a job, a federation for each seed."""
    return _federations(json.dumps(job.data), job.seeds, job.partitions)


@lru_cache(maxsize=1)  # consecutive jobs often share their data
def _federations(data: str, seeds: tuple[int, ...], partitions: Path | None) -> list[Federation]:
    return [load_prepared(partitions, **json.loads(data), seed=seed) for seed in seeds]


def _is_for(folder: Path, job: Order) -> bool:
    """Check whether the folder holds the run of this job, finished or not."""
    file = folder / REQUEST
    if not (file.exists() and (folder / CONFIG).exists()):
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


def outcome(job: Job, summary: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Return mean and deviation over seeds of the reported score, in percent or seconds."""
    protocol = job.protocol
    if protocol.metric == SECONDS:  # a round trains all seeds at once
        return summary["seconds_per_round_median"] / len(job.seeds), None
    scores = summary["views"][_view(job, summary)][protocol.moment]["test"]
    name = protocol.metric + ("_client_mean" if protocol.over == "clients" else "")
    return _percent(scores.get(name)), _percent(scores.get(f"{name}_std"))


def remark(job: Job, summary: Mapping[str, Any]) -> str | None:
    """Return what a reader must know of a score; None if there is nothing.

    That is the device of seconds; for other scores the method's own remarks on the run, and
    whether the score comes from its warm-up.
    """
    if job.protocol.metric == SECONDS:
        return f"measured on {summary['device']}"
    parts = [*summary.get("remarks", []), _warm_up(job, summary)]
    return "; ".join(filter(None, parts)) or None


def _warm_up(job: Job, summary: Mapping[str, Any]) -> str | None:
    """Return whether a score comes from rounds in which the method has not begun to act."""
    before = create(job.method, job.hyperparameters).rounds_before_it_acts()
    if before == 0:
        return None
    start = f"its terms start after round {before}"
    if summary["rounds"] <= before:
        return f"has not begun: {start}"
    runs = summary.get("per_seed", [summary])
    view = _view(job, summary)
    inside = sum(
        _scored_round(job, run["views"][view], summary["rounds"]) <= before for run in runs
    )
    seeds = f" in {inside} of {len(runs)} seeds" if len(runs) > 1 else ""
    return f"scored in the warm-up{seeds}: {start}" if inside else None


def _scored_round(job: Job, view: Mapping[str, Any], rounds: int) -> int:
    """Return the round that is scored: the first of the last five, the last of clients' own."""
    if job.protocol.moment == "best_val":
        best: int | list[int] = view["best_val"]["round"]
        return max(best) if isinstance(best, list) else best
    return max(1, rounds - 4) if job.protocol.moment == "last5" else rounds


def _view(job: Job, summary: Mapping[str, Any]) -> str:
    own = VIEW_OF[summary["evaluated"]]
    return own if job.protocol.view == "own" else job.protocol.view


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value
