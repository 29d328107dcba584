"""Run the rows of a cell: all trials and seeds of a row in one pass, results in a file per cell."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import polyphily
from polyphily.core.cohort import Cohort
from polyphily.core.method import VIEWS, create
from polyphily.core.settings import from_mapping
from polyphily.errors import UserError
from polyphily.graphs.datasets import is_present
from polyphily.graphs.loading import Federation
from polyphily.graphs.prepared import load_prepared
from polyphily.runs.folder import write_text
from polyphily.runs.jobs import Ended, Job, Watch, run_jobs
from polyphily.runs.tuning import side_by_side
from polyphily.studies import Cell, Row, Study

DIGITS = 6
Report = Callable[[str], None]


def file_of(folder: Path, study: Study, cell: Cell) -> Path:
    return folder / study.name / f"{cell.name}.json"


def run_rows(
    pairs: Iterable[tuple[Study, Cell]],
    folder: Path,
    *,
    device: str = "cpu",
    partitions: Path | None = None,
    report: Report = print,
    until: float = float("inf"),
    processes: int = 1,
    watch: Watch | None = None,
) -> None:
    """Run the rows of studies in some of their cells that are not in the cells' files yet.

    Args:
        pairs: studies, each with one of its cells.
        folder: the folder of the results.
        device: the device to train on.
        partitions: a folder of partition files (`graphs.prepared`), for machines without the
            partitioners; missing files are written.
        report: called with a message for every row.
        until: no row is started after this value of `time.monotonic()`.
        processes: how many rows run at once.
        watch: shows which rows are running.
    """
    jobs: list[Job[dict[str, Any]]] = []
    for study, cell in pairs:
        if not is_present(cell.dataset):
            report(f"{cell.title}: data not present, skipped")
            continue
        found = _read(file_of(folder, study, cell))
        for row in study.rows:
            if request(study, cell, row) != _saved(found, row):
                work = partial(_scores, study, cell, row, device, partitions)
                jobs.append(Job(f"{cell.title}: {row.label}", work, (study, cell, row)))
    for ended in run_jobs(jobs, processes, device=device, until=until, watch=watch):
        if ended.result is None:
            report(f"{ended.job.name}: {failure_text(ended)}")
            continue
        study, cell, row = ended.job.about
        path = file_of(folder, study, cell)
        found = _read(path)  # another process may have written meanwhile
        found |= {"cell": asdict(cell), "polyphily": polyphily.__version__}
        found["rows"][row.key] = {
            "request": request(study, cell, row),
            "seconds": round(ended.seconds, 1),
            "scores": ended.result,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, to_json(found))
        report(f"{ended.job.name}: {ended.seconds:.1f} s")


def run_cell(study: Study, cell: Cell, folder: Path, **options: Any) -> None:
    """Run the rows of one cell that are not in its file yet; options as in `run_rows`."""
    run_rows([(study, cell)], folder, **options)


def failure_text(ended: Ended[Any]) -> str:
    """Return why a row has not run, and what to do if it lacked memory."""
    return ended.failure + ("; call the command again to run this row" if ended.no_memory else "")


@dataclass
class _Data:
    """The data of a cell: federations, and the cohort of all trials, which rows can share."""

    federations: list[Federation]
    cohort: Cohort | None = None


_last: dict[str, _Data] = {}
"""The data of the last cell in this process."""


def data_of(cell: Cell, seeds: Sequence[int], partitions: Path | None, *trials: object) -> _Data:
    """Load the data of a cell; that of the last cell is kept.

    Args:
        cell: the cell.
        seeds: of the federations.
        partitions: the folder of partition files.
        *trials: what else a shared cohort depends on.
    """
    wanted = json.dumps([asdict(cell), list(seeds), str(partitions), *trials])
    if wanted not in _last:
        _last.clear()
        _last[wanted] = _Data([federation_of(cell, seed, partitions) for seed in seeds])
    return _last[wanted]


def _scores(
    study: Study, cell: Cell, row: Row, device: str, partitions: Path | None
) -> dict[str, Any]:
    """Train a row of a cell, and return its scores."""
    data = data_of(cell, study.seeds, partitions, study.rates, dict(study.settings), device)
    kept, data.cohort = data.cohort, None  # not kept if the row runs out of memory
    scores, used = try_row(study, cell, row, data.federations, device, kept)
    data.cohort = kept if row.settings else used  # they may change what a cohort holds
    return scores


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {"rows": {}}
    return found


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
