"""Run the rows of a cell: all trials and seeds of a row in one pass, results in a file per cell."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import polyphily
from polyphily.core.cohort import Cohort
from polyphily.core.method import VIEWS, create
from polyphily.core.settings import from_mapping
from polyphily.errors import PolyphilyError, UserError
from polyphily.graphs.datasets import is_present
from polyphily.graphs.loading import Federation
from polyphily.graphs.prepared import load_prepared
from polyphily.runs.folder import write_text
from polyphily.runs.tuning import side_by_side
from polyphily.runtime.machine import release_memory
from polyphily.studies import Cell, Row, Study

DIGITS = 6
Report = Callable[[str], None]


def file_of(folder: Path, study: Study, cell: Cell) -> Path:
    return folder / study.name / f"{cell.name}.json"


def run_cell(
    study: Study,
    cell: Cell,
    folder: Path,
    *,
    device: str = "cpu",
    partitions: Path | None = None,
    report: Report = print,
    until: float = float("inf"),
) -> None:
    """Run the rows of a cell that are not in its file yet.

    Args:
        study: the study.
        cell: one of its cells.
        folder: the folder of the results.
        device: the device to train on.
        partitions: a folder of partition files (`graphs.prepared`), for machines without the
            partitioners; missing files are written.
        report: called with a message for every row.
        until: no row is started after this value of `time.monotonic()`.
    """
    if not is_present(cell.dataset):
        report(f"{cell.title}: data not present, skipped")
        return
    path = file_of(folder, study, cell)
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": {}}
    missing = [row for row in study.rows if request(study, cell, row) != _saved(found, row)]
    if not missing or time.monotonic() > until:
        return
    federations = [federation_of(cell, seed, partitions) for seed in study.seeds]
    cohort: Cohort | None = None
    for row in missing:
        if time.monotonic() > until:
            return
        began = time.perf_counter()
        try:
            scores, used = try_row(study, cell, row, federations, device, cohort)
            cohort = cohort if row.settings else used
        except PolyphilyError as error:
            report(f"{cell.title}: {row.label}: {error}")
            continue
        except torch.OutOfMemoryError:
            report(
                f"{cell.title}: {row.label}: {device} has no memory left; call the command again "
                "to run this row"
            )
            cohort = None
            continue
        finally:
            release_memory()
        seconds = time.perf_counter() - began
        found |= {"cell": asdict(cell), "polyphily": polyphily.__version__}
        found["rows"][row.key] = {
            "request": request(study, cell, row),
            "seconds": round(seconds, 1),
            "scores": scores,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, to_json(found))
        report(f"{cell.title}: {row.label}: {seconds:.1f} s")


def to_json(found: dict[str, Any]) -> str:
    """Return JSON with one line per row, which is small and makes readable diffs."""
    rows = [f"{json.dumps(key)}: {json.dumps(row)}" for key, row in found["rows"].items()]
    rest = json.dumps({name: value for name, value in found.items() if name != "rows"})
    return rest[:-1] + ', "rows": {\n' + ",\n".join(rows) + "\n}}\n"


def request(study: Study, cell: Cell, row: Row) -> dict[str, Any]:
    """Return everything that determines the results of a row, saved beside them."""
    return json.loads(  # type: ignore[no-any-return]
        json.dumps(
            {
                "method": row.method,
                "backbone": row.backbone,
                "set": asdict(create(row.method, dict(row.set))),
                "settings": {
                    **study.settings,
                    **cell.settings,
                    **row.settings,
                    "metric": cell.metric,
                },
                "split": cell.split,
                **({} if cell.normalize == "none" else {"normalize": cell.normalize}),
                "seeds": study.seeds,
                "rates": study.rates,
            }
        )
    )


def _saved(found: dict[str, Any], row: Row) -> dict[str, Any] | None:
    """Return the request that a row was run with; None if it has not run."""
    saved: dict[str, Any] | None = found["rows"].get(row.key, {}).get("request")
    return saved


def federation_of(cell: Cell, seed: int, partitions: Path | None = None) -> Federation:
    return load_prepared(
        partitions,
        dataset=cell.dataset,
        partition=cell.partition,
        clients=cell.clients,
        split=cell.split,
        seed=seed,
        normalize=cell.normalize,
    )


def try_row(
    study: Study,
    cell: Cell,
    row: Row,
    federations: Sequence[Federation],
    device: str = "cpu",
    cohort: Cohort | None = None,
) -> tuple[dict[str, Any], Cohort]:
    """Train all trials and seeds of a row.

    Returns:
        The scores, and the cohort, which the next row can reuse. For each view the scores have
        `val`, `test` and `test_client_mean`, and the best round as `round`: a list of trials, each
        a list of seeds.
    """
    chosen = {**study.settings, **cell.settings, **row.settings}
    settings = {**chosen, "device": device, "metric": cell.metric}
    if row.backbone is not None:
        settings["backbone"] = row.backbone
    trials, execution = side_by_side(
        create(row.method, dict(row.set)),
        federations,
        from_mapping(settings),
        study.rates,
        cohort if not row.settings else None,  # they may change what a cohort holds
    )
    scores: dict[str, Any] = {}
    for view in VIEWS:

        def table(split: str, name: str, view: str = view) -> list[list[float]]:
            moments = [trial.moments[view] for trial in trials]
            if any(moment[split].get(name) is None for seeds in moments for moment in seeds):
                raise UserError(f"{cell.title}: there are no {split} nodes to score")
            return [[round(moment[split][name], DIGITS) for moment in seeds] for seeds in moments]

        scores[view] = {
            "val": table("val", cell.metric),
            "test": table("test", cell.metric),
            "test_client_mean": table("test", f"{cell.metric}_client_mean"),
            "round": [[moment["round"] for moment in trial.moments[view]] for trial in trials],
        }
    return scores, execution.simulation.cohort
