"""The page of a paper: its tables and figures beside what ran here, from the files of results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polyphily.papers import report
from polyphily.papers.contents import Item, contents
from polyphily.papers.plan import DEFAULT, FORMS, NO_METHOD, NOT_A_RUN, obstacle
from polyphily.papers.report import (
    Line,
    footnotes,
    introduction,
    items,
    numbers_file,
    stem_of,
    title_of,
)
from polyphily.papers.tables import Entry, Paper, Table
from polyphily.report.grids import Grid, to_markdown

NOT_RUN = "not run"
WIDTH = 6  # cells beside each other, at most; a dataset is not broken
LENGTH = 30  # rows of a figure's numbers that are printed; longer ones are curves


@dataclass(frozen=True)
class Page:
    """A page and the drawings it shows.

    Attributes:
        text: Markdown.
        drawings: files to copy, by their path relative to the page.
    """

    text: str
    drawings: Mapping[str, Path] = field(default_factory=dict)


def page(paper: Paper, folder: Path) -> Page:
    """Return the page of a paper.

    Args:
        paper: the paper.
        folder: has the files of its tables and figures, as `polyphily reproduce` writes them.
    """
    from polyphily.core.method import METHODS  # which imports torch

    sections: list[str] = []
    drawings: dict[str, Path] = {}
    rest: list[str] = []
    for item in contents(paper):
        lines = report.read_lines(item.table, folder) if item.table else []
        made = _read(folder, item)
        if item.table and lines:
            sections.append(_scores(paper, item.table, lines))
        if made:
            drawing = folder / f"{stem_of(item.name)}.svg"
            link = f"{paper.name}/{drawing.name}"
            if drawing.exists():
                drawings[link] = drawing
            sections.append(_exhibit(item, made, link if drawing.exists() else None))
        if not lines and not made:
            command = "" if item.illustration else f". `{item.command}`"
            rest.append(f"{title_of(item.name)}, {item.title}: {item.state}{command}")
    parts = [
        f"# {METHODS.find(paper.name).__name__}: published and reproduced",
        f"{paper.cite}.",
        "Published numbers beside those of this library, written by "
        f"`polyphily reproduce {paper.name} --page FILE`. The *paper's form* has the "
        "hyperparameters of the paper (`--set paper=on`), the *default form* those of this "
        "library; *here* stands for both if they are one model.",
        *sections,
        items("## Not run yet", rest).replace("yet:", "yet"),
    ]
    return Page("\n\n".join(filter(None, parts)) + "\n", drawings)


# Tables of scores ---------------------------------------------------------------------------------


def _scores(paper: Paper, table: Table, lines: Sequence[Line]) -> str:
    """Return the section of a table, all its entries, whether they ran or not."""
    ran = {line.entry: line for line in lines}
    known = {form for line in lines for form in line.results}
    forms = [form for form in FORMS if form in known]
    every = [ran.get(entry, Line(entry, skipped=_reason(paper, entry))) for entry in table.entries]
    data = report.as_data(paper, table, every, forms)
    common = set.intersection(*[set(r["marks"]) for r in data["rows"] if not _is_mean(r)])
    below = footnotes(data, bold="**")
    below["Marks"] = [
        f"**{mark}**{' (all published numbers)' if mark in common else ''}: {text}"
        for mark, text in data["marks"].items()
    ]
    del below["Not run"]  # the table says it
    return "\n\n".join(
        [
            f"## {title_of(table.name)}: {table.title}",
            *introduction(data, bold="**"),
            *[to_markdown(grid) for grid in _grids(data, common)],
            *filter(None, [items(title, texts) for title, texts in below.items()]),
        ]
    )


def _reason(paper: Paper, entry: Entry) -> str:
    return obstacle(paper, entry) or NOT_RUN


def _is_mean(row: Mapping[str, Any]) -> bool:
    return bool(row["skipped"] == NOT_A_RUN)


def _grids(data: Mapping[str, Any], common: set[str]) -> list[Grid]:
    """Return the table in the paper's layout: methods as rows, some cells at a time as columns."""
    cells = list(dict.fromkeys(_cell(row) for row in data["rows"]))
    blocks: list[list[str]] = []
    datasets = {_cell(row): row["dataset"] for row in data["rows"]}
    for dataset in dict.fromkeys(datasets[cell] for cell in cells):
        own = [cell for cell in cells if datasets[cell] == dataset]
        if blocks and len(blocks[-1]) + len(own) <= WIDTH:
            blocks[-1] += own
        else:
            blocks.append(own)
    return [_block(data, block, common) for block in blocks]


def _cell(row: Mapping[str, Any]) -> str:
    metric = " (AUC)" if row["metric"] == "auc" else ""
    return (
        " ".join(filter(None, [row["dataset"], row["partition"], str(row["clients"] or "")]))
        + metric
    )


def _block(data: Mapping[str, Any], cells: Sequence[str], common: set[str]) -> Grid:
    notes, lines = report.remarks_of(data), []
    for method in dict.fromkeys(row["method"] for row in data["rows"]):
        own = {_cell(row): row for row in data["rows"] if row["method"] == method}
        rows = [own.get(cell) for cell in cells]
        present = [row for row in rows if row]
        if not present:
            continue
        marks = [mark for mark in present[0]["marks"] if mark not in common]
        behind = f" ({', '.join(marks)})" if marks else ""
        absent = any(row["skipped"] == NO_METHOD for row in present)
        label = f"published{behind}{'; ' + NO_METHOD if absent else ''}"
        if any(row["published"]["mean"] is not None for row in present):
            printed = [report.published(row, data["digits"], notes) if row else "" for row in rows]
            lines.append((method, label, *printed))
        if absent or all(_is_mean(row) for row in present):
            continue
        for name, form in _forms(present, data["forms"]):
            found = [_here(row, form, data["digits"], notes) for row in rows]
            head = "" if lines and lines[-1][0] in (method, "") else method
            lines.append((head, name, *found))
    return Grid(data["title"], ("method", "", *cells), lines)


def _forms(rows: Sequence[Mapping[str, Any]], forms: Sequence[str]) -> list[tuple[str, str]]:
    """Return the forms to show with their headings: one, if all of them are one model."""
    ran = [form for form in forms if any(form in row["forms"] for row in rows)]
    found = [[result["request"] for result in row["forms"].values()] for row in rows]
    if not ran or (len(ran) > 1 and all(report.shared(r) for r in found if r)):
        return [("here", ran[0] if ran else DEFAULT)]
    return [(FORMS[form], form) for form in ran]


def _here(row: Mapping[str, Any] | None, form: str, digits: int, notes: Sequence[str]) -> str:
    """Return our number for a cell, or why there is none."""
    if row is None or _is_mean(row):
        return ""
    if form in row["forms"] or form in row["failed"]:
        return report.ours(row, form, digits, notes)
    return row["skipped"] or NOT_RUN


# Figures and computed tables ----------------------------------------------------------------------


def _read(folder: Path, item: Item) -> dict[str, Any] | None:
    """Return what the file of an exhibit holds; None if it was not made."""
    file = folder / numbers_file(item.name)
    if item.exhibit is None or not file.exists():
        return None
    made: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return made


def _exhibit(item: Item, made: Mapping[str, Any], link: str | None) -> str:
    grids = [Grid(grid["title"], grid["columns"], grid["rows"]) for grid in made["grids"]]
    shown = [grid for grid in grids if len(grid.rows) <= LENGTH]
    changed = ", ".join(made["changed"])
    return "\n\n".join(
        filter(
            None,
            [
                f"## {title_of(item.name)}: {item.title}",
                f"**Not the paper's protocol: {changed}.**" if changed else "",
                f"![{title_of(item.name)}: {item.title}]({link})" if link else "",
                *[f"{grid.title}\n\n{to_markdown(grid)}" for grid in shown],
                items("Notes", made["notes"]),
            ],
        )
    )
