"""Polyphony against everything else, in all cells of the studies and on natural federations.

In every cell Polyphony is compared with the one row that validates best among all others: Local
and FedAvg on every backbone, in both views, and the methods of the studies that have the cell. Rows
that a study has run are not run again.
"""

from __future__ import annotations

import json
import statistics
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from polyphily.studies import (
    ABLATION,
    BASELINE,
    FEDAVG,
    LOCAL,
    METHOD,
    PAPER_FORM,
    Cell,
    Row,
    Study,
    studies,
)
from polyphily.studies.results import (
    UNCLEAR,
    Comparison,
    Outcome,
    grid,
    headline,
    outcomes,
    text_of,
)
from polyphily.studies.trials import file_of, request, run_rows

NAME = "polyphony"
PART, OTHER = "part", "other"  # roles of rows, beside those of studies
RIVALS = (LOCAL, FEDAVG, BASELINE, OTHER, METHOD, PAPER_FORM)
# The comparison is there before its parts are, wherever the time ends.
ORDER = ((METHOD,), (LOCAL, FEDAVG, BASELINE, OTHER), (PART,), (ABLATION,))


@cache
def contest() -> Study:
    """Return what `contest.toml` says, as a study."""
    text = resources.files(__package__).joinpath("contest.toml").read_text(encoding="utf-8")
    data = tomllib.loads(text)
    common = next(iter(studies().values()))
    cells = {cell.name: cell for study in studies().values() for cell in study.cells}
    own = [Cell(**{"clients": None, **cell}) for cell in data["cells"]]
    return Study(
        name=NAME,
        method=NAME,
        title="Voices that every client mixes, against everything else",
        cells=(*cells.values(), *own),
        rows=tuple(_rows(data)),
        seeds=common.seeds,
        rates=common.rates,
        settings=common.settings,
        paper=NAME,
        findings=tuple(data["findings"]),
    )


def _rows(data: Mapping[str, Any]) -> list[Row]:
    rows = [Row(LOCAL, f"Local, {b}", "local", b) for b in data["backbones"]]
    rows += [Row(FEDAVG, f"FedAvg, {b}", "fedavg", b) for b in data["backbones"]]
    rows.append(Row(BASELINE, "FedAvg, choir", "fedavg", "choir"))
    rows += [
        replace(row, role=OTHER)
        for row in {
            r.key: r for s in studies().values() for r in s.rows if r.role == METHOD
        }.values()
    ]
    rows += [
        Row(PART, part["name"], "fedavg", part["backbone"], settings=part["settings"])
        for part in data["parts"]
    ]
    rows.append(Row(METHOD, NAME, NAME, None))
    rows += [
        Row(ABLATION, part["name"], NAME, None, part.get("set", {}), part.get("settings", {}))
        for part in data["ablations"]
    ]
    return rows


def has(study: Study, cell: Cell) -> bool:
    """Return whether a study has a cell; papers may have it in tables of their own."""
    return any(replace(other, table=cell.table) == cell for other in study.cells)


# Running -----------------------------------------------------------------------------------------


def to_run(cell: Cell, folder: Path, texts: Sequence[str] = ()) -> Study:
    """Return the contest with the rows that a cell needs: without those that a study has run.

    The other methods run on natural federations only, which no study has.

    Args:
        cell: one of the contest's cells.
        folder: the folder of the results.
        texts: rows whose labels contain one of these; empty: all.
    """
    study = contest()
    known = _elsewhere(study, cell, folder)
    shared = any(has(other, cell) for other in studies().values())
    return replace(
        study,
        rows=tuple(
            row
            for row in study.rows
            if row.key not in known
            and not (shared and row.role == OTHER)
            and (not texts or any(text in row.label for text in texts))
        ),
    )


def run(cells: Iterable[Cell], folder: Path, texts: Sequence[str] = (), **options: Any) -> None:
    """Run the rows of cells that have not run, in `ORDER`.

    Args:
        cells: some of the contest's cells.
        folder: the folder of the results.
        texts: as in `to_run`.
        **options: as in `trials.run_rows`.
    """
    wanted = [(to_run(cell, folder, texts), cell) for cell in cells]
    pairs = [
        (replace(study, rows=tuple(row for row in study.rows if row.role in roles)), cell)
        for roles in ORDER
        for study, cell in wanted
    ]
    run_rows(pairs, folder, **options)


def _elsewhere(study: Study, cell: Cell, folder: Path) -> set[str]:
    """Return the keys of the contest's rows that a study has run in the same cell."""
    found = set()
    for other in studies().values():
        path = file_of(folder, other, cell)
        if not has(other, cell) or not path.exists():
            continue
        kept = json.loads(path.read_text(encoding="utf-8"))["rows"]
        for row in study.rows:
            if row.key in kept and kept[row.key]["request"] == request(study, cell, row):
                found.add(row.key)
    return found


# Reading -----------------------------------------------------------------------------------------


def rivals(cell: Cell, folder: Path) -> list[tuple[str, Outcome]]:
    """Return all other rows of a cell, with the views that they are judged in.

    Local and FedAvg stand for themselves in both views, methods in their own.
    """
    found: dict[tuple[str, str], Outcome] = {}
    for study in (*studies().values(), contest()):
        if not has(study, cell):
            continue
        for view in ("received", "trained"):
            for row in study.rows:
                if row.role not in RIVALS or row.method == NAME:
                    continue
                own = row.method in ("local", "fedavg") or view == _view(row.method)
                outcome = outcomes(study, cell, folder, view).get(row.key) if own else None
                if outcome is not None:
                    found.setdefault((row.key, view), outcome)
    return [(view, outcome) for (_, view), outcome in found.items()]


def _view(method: str) -> str:
    from polyphily.core.method import METHODS

    return METHODS.find(method)().view


def section(folder: Path) -> str:
    """Return the section of the page; empty if nothing has run."""
    study = contest()
    view = headline(study)
    extra = [row for row in study.rows if row.role in (BASELINE, PART, ABLATION)]
    head = ["cell", "best other row", "polyphony", "difference", *(row.label for row in extra)]
    table, found = [head], []
    for cell in study.cells:
        own = outcomes(study, cell, folder, view)
        voice = own.get(next(row.key for row in study.rows if row.role == METHOD))
        others = rivals(cell, folder)
        if voice is None or not others:
            continue
        where, best = max(others, key=lambda pair: pair[1].val)
        found.append((cell, Comparison.of(voice, best)))
        shown = f"{best} ({best.row.label}{', trained' if where == 'trained' else ''})"
        table.append(
            [
                *(cell.title, shown, str(voice), str(found[-1][1])),
                *(text_of(own.get(row.key)) for row in extra),
            ]
        )
    if not found:
        return ""
    parts = [f"## {study.name}: {study.title}", _INTRODUCTION, _summary(found), grid(table)]
    if study.findings:
        parts.append("What was found and tried:\n\n" + "\n".join(f"- {x}" for x in study.findings))
    return "\n\n".join(parts)


_INTRODUCTION = """In every cell Polyphony, as received, is compared with the row that validates
best among all others: Local and FedAvg on every backbone, in both views, and the methods of the
studies that have the cell, by default and as printed. That row is the best of up to twenty."""


def _summary(found: Sequence[tuple[Cell, Comparison]]) -> str:
    words = ("better", "level", "worse", UNCLEAR)
    rows = [["cells of", "cells", "higher mean", *words, "mean difference"]]
    groups = [(s.name, [c for cell, c in found if has(s, cell)]) for s in studies().values()]
    natural = [c for cell, c in found if not any(has(s, cell) for s in studies().values())]
    for name, some in [*groups, ("natural federations", natural), ("all", [c for _, c in found])]:
        if not some:
            continue
        verdicts = [one.verdict for one in some]
        rows.append(
            [
                *(name, str(len(some)), str(sum(one.higher for one in some))),
                *(str(verdicts.count(word)) for word in words),
                f"{statistics.fmean(one.difference for one in some):+.2f}",
            ]
        )
    return grid(rows)
