"""Runs of tables: their folders, the score that a table reports, and remarks on it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyphily.core.method import VIEW_OF, create
from polyphily.papers.plan import DEFAULT, Job, key_of
from polyphily.papers.tables import SECONDS
from polyphily.runs.folder import SUMMARY, safe_name
from polyphily.runs.runner import REQUEST as REQUEST
from polyphily.runs.runner import Train as Train
from polyphily.runs.runner import _federations as _federations
from polyphily.runs.runner import federations_of as federations_of
from polyphily.runs.runner import groups as groups
from polyphily.runs.runner import is_finished as is_finished
from polyphily.runs.runner import run as run
from polyphily.runs.runner import run_together as run_together


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
