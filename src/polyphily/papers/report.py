"""A reproduced table as data and as Markdown: published and our figures, differences, notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyphily.papers.plan import NO_DATA, NO_METHOD, NOT_A_RUN, Choice
from polyphily.papers.tables import MEANS, MOMENTS, SECONDS, VIEWS, Figure, Paper, Protocol, Table

COLUMNS = ("dataset", "partition", "clients", "method", "published", "ours", "difference", "marks")
RIGHT = frozenset({"clients", "published", "ours", "difference"})


@dataclass(frozen=True)
class Line:
    """A published figure and our result.

    Attributes:
        figure: the published figure.
        mean: mean of our result over seeds.
        std: its standard deviation over seeds.
        seeds: the seeds that were run.
        skipped: the reason why there is no result of ours; None if there is one.
        folder: the run folder.
    """

    figure: Figure
    mean: float | None = None
    std: float | None = None
    seeds: tuple[int, ...] = ()
    skipped: str | None = None
    folder: str | None = None


def as_data(paper: Paper, table: Table, lines: Sequence[Line], choice: Choice) -> dict[str, Any]:
    """Return the table as one JSON object with all selected lines."""
    shown = [line.figure for line in lines if line.skipped is None]
    protocols = [table.protocol, *[table.protocol_of(figure.dataset) for figure in shown]]
    rows = [_row(paper, table, line) for line in lines]
    used = {mark for row in rows if row["skipped"] is None for mark in row["marks"]}
    return {
        "paper": paper.name,
        "cite": paper.cite,
        "table": table.name,
        "title": table.title,
        "digits": table.digits,
        "reported": reported(table.protocol),
        "seeds_published": table.protocol.seeds or None,
        "seeds": list(choice.seeds_of(table.protocol)),
        "changed": changes(table.protocol, choice),
        "rows": rows,
        "marks": {mark: text for mark, text in paper.marks.items() if mark in used},
        "notes": list(dict.fromkeys(note for protocol in protocols for note in protocol.notes)),
    }


def reported(protocol: Protocol) -> str:
    """Describe which score our figures are."""
    if protocol.metric == SECONDS:
        return "median seconds of a round"
    metric = {"f1_weighted": "weighted F1"}.get(protocol.metric, protocol.metric)
    parts = (VIEWS[protocol.view], MOMENTS[protocol.moment], MEANS[protocol.over])
    return f"test {metric} in %: {', '.join(parts)}"


def changes(protocol: Protocol, choice: Choice) -> list[str]:
    """List the differences between the user's selection and the paper's protocol."""
    found = ["a quick look"] if choice.quick else []
    count, usual = len(choice.seeds_of(protocol)), len(Choice().seeds_of(protocol))
    if count != usual:
        found.append(f"{count} {'seed' if count == 1 else 'seeds'} instead of {usual}")
    if choice.all_rounds is not None:
        found.append(f"{choice.all_rounds} rounds")
    return found


def _row(paper: Paper, table: Table, line: Line) -> dict[str, Any]:
    figure = line.figure
    both = line.mean is not None and figure.mean is not None
    return {
        "dataset": figure.dataset,
        "partition": figure.partition,
        "clients": figure.clients,
        "method": figure.method,
        "metric": table.protocol_of(figure.dataset).metric,
        "published": {"mean": figure.mean, "std": figure.std},
        "ours": {"mean": line.mean, "std": line.std, "seeds": list(line.seeds)},
        "difference": (line.mean or 0) - (figure.mean or 0) if both else None,
        "marks": paper.marks_of(table, figure),
        "note": figure.note,
        "skipped": line.skipped,
        "folder": line.folder,
    }


def as_markdown(data: Mapping[str, Any]) -> str:
    """Return the table as Markdown: results, then footnotes, then what did not run and why."""
    ran = [row for row in data["rows"] if row["skipped"] is None]
    notes = list(dict.fromkeys(row["note"] for row in ran if row["note"]))
    parts = [
        _heading(data),
        _grid([_cells(row, data["digits"], notes) for row in ran]) if ran else "No cell has run.",
        _items("Marks", [f"**{mark}**: {text}" for mark, text in data["marks"].items()]),
        _items("On the printed figures", [f"[{i}] {note}" for i, note in enumerate(notes, 1)]),
        _items("Notes", data["notes"]),
        _items("Not run", _skipped(data["rows"])),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _heading(data: Mapping[str, Any]) -> str:
    name = data["table"] if data["table"].startswith("figure") else f"Table {data['table']}"
    over = data["seeds_published"] or "an unstated number of"
    lines = [
        f"# {data['paper']}, {name}: {data['title']}",
        f"{data['cite']}.",
        f"Ours: {data['reported']}; mean ± standard deviation over seeds "
        f"{', '.join(map(str, data['seeds']))}. Published: {over} runs.",
    ]
    if data["changed"]:
        lines.append(f"**Not the paper's protocol: {', '.join(data['changed'])}.**")
    return "\n\n".join(lines)


def _cells(row: Mapping[str, Any], digits: int, notes: Sequence[str]) -> dict[str, str]:
    difference = row["difference"]
    marks = [*row["marks"], *([f"[{notes.index(row['note']) + 1}]"] if row["note"] else [])]
    return {
        "dataset": row["dataset"] + (" (AUC)" if row["metric"] == "auc" else ""),
        "partition": row["partition"],
        "clients": str(row["clients"] or "–"),
        "method": row["method"],
        "published": _with_spread(row["published"], digits),
        "ours": _with_spread(row["ours"], max(digits, 2)),
        "difference": "–" if difference is None else f"{difference:+.{digits}f}",
        "marks": ", ".join(marks),
    }


def _with_spread(value: Mapping[str, float | None], digits: int) -> str:
    if value["mean"] is None:
        return "–"
    spread = "" if value["std"] is None else f" ± {value['std']:.{digits}f}"
    return f"{value['mean']:.{digits}f}{spread}"


def _grid(rows: Sequence[Mapping[str, str]]) -> str:
    """Return a Markdown table whose columns are also aligned as plain text."""
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in COLUMNS}

    def line(cells: Mapping[str, str]) -> str:
        padded = [
            cells[name].rjust(widths[name]) if name in RIGHT else cells[name].ljust(widths[name])
            for name in COLUMNS
        ]
        return f"| {' | '.join(padded)} |"

    rule = {name: "-" * (widths[name] - 1) + (":" if name in RIGHT else "-") for name in COLUMNS}
    return "\n".join([line({name: name for name in COLUMNS}), line(rule), *map(line, rows)])


def _items(title: str, lines: Sequence[str]) -> str:
    return "\n".join([f"{title}:", "", *[f"- {line}" for line in lines]]) if lines else ""


def _skipped(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line per reason, with the datasets or methods concerned and how many figures."""
    reasons: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["skipped"] is not None:
            reasons.setdefault(row["skipped"], []).append(row)
    return [f"{reason}: {_concerned(reason, group)}" for reason, group in reasons.items()]


def _concerned(reason: str, rows: Sequence[Mapping[str, Any]]) -> str:
    columns = _COLUMNS_OF.get(reason, ("dataset", "partition", "clients", "method"))
    named = [" ".join(str(row[name] or "") for name in columns) for row in rows]
    names = ", ".join(filter(None, dict.fromkeys(named)))
    count = f"{len(rows)} {'figure' if len(rows) == 1 else 'figures'}"
    return f"{names} ({count})" if names else count


_COLUMNS_OF: dict[str, tuple[str, ...]] = {
    NO_METHOD: ("method",),
    NO_DATA: ("dataset",),
    NOT_A_RUN: (),
}
