"""A reproduced table as data and as text: published numbers and ours in each form, notes.

A table's file (`table-1.json`) has everything that pages and later commands need: results of
several commands are merged in it, and run folders are not read again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from polyphily.errors import UserError
from polyphily.papers.plan import DEFAULT, FORMS, NO_DATA, NO_METHOD, NOT_A_RUN, Choice, key_of
from polyphily.papers.tables import MEANS, MOMENTS, SECONDS, VIEWS, Entry, Paper, Protocol, Table
from polyphily.report.grids import Grid, to_markdown

NUMBERS = ("mean", "std", "difference", "seeds")  # of a result, in a file of plain numbers


@dataclass(frozen=True)
class Result:
    """Our result for an entry, in one form.

    Attributes:
        mean: mean over seeds; None if the score is undefined.
        std: standard deviation over seeds.
        seeds: the seeds that were run.
        request: what determined the run (`plan.Order.request`).
        changed: differences to the paper's protocol.
        set: hyperparameters that the user set.
        remark: what a reader must know of the score, such as a warm-up that it lies in.
        device: the device it was trained on.
        folder: the run folder.
    """

    mean: float | None
    std: float | None = None
    seeds: tuple[int, ...] = ()
    request: Mapping[str, Any] = field(default_factory=dict)
    changed: tuple[str, ...] = ()
    set: Mapping[str, Any] = field(default_factory=dict)
    remark: str | None = None
    device: str = "cpu"
    folder: str | None = None

    @property
    def key(self) -> str:
        """The request as text: results of one model have one key."""
        return key_of(self.request)

    @property
    def by_protocol(self) -> bool:
        """True if the user changed nothing."""
        return not self.changed and not self.set


@dataclass(frozen=True)
class Line:
    """A published number and our results.

    Attributes:
        entry: the published number.
        results: ours, by form.
        skipped: the reason why there is no result of ours; None if there is one.
        failed: the forms that failed, each with the reason.
    """

    entry: Entry
    results: Mapping[str, Result] = field(default_factory=dict)
    skipped: str | None = None
    failed: Mapping[str, str] = field(default_factory=dict)


# Tables as data -----------------------------------------------------------------------------------


def as_data(
    paper: Paper, table: Table, lines: Sequence[Line], forms: Sequence[str] = (DEFAULT,)
) -> dict[str, Any]:
    """Return the table as one JSON object with all given lines.

    Args:
        paper: the paper.
        table: one of its tables.
        lines: the entries and our results.
        forms: the forms to show.
    """
    results = [line.results[form] for line in lines for form in forms if form in line.results]
    protocols = [table.protocol, *[table.protocol_of(x.entry.dataset) for x in lines if x.results]]
    changed, given = shared(r.changed for r in results), shared(r.set for r in results if r.set)
    differ = changed is None or (given is None and any(r.set for r in results))
    same = _same_models(lines)
    rows = [_row(paper, table, line, forms, same, changes_noted=differ) for line in lines]
    used = {mark for row in rows if row["forms"] for mark in row["marks"]}
    return {
        "paper": paper.name,
        "cite": paper.cite,
        "table": table.name,
        "title": table.title,
        "digits": table.digits,
        "reported": reported(table.protocol),
        "seeds_published": table.protocol.seeds or None,
        "seeds": list(shared(r.seeds for r in results) or ()),
        "forms": list(forms),
        "changed": [*(changed or ()), *([f"{paper.name} with {assignments(given)}"] * bool(given))],
        "rows": rows,
        "marks": {mark: text for mark, text in paper.marks.items() if mark in used},
        "notes": list(dict.fromkeys(note for protocol in protocols for note in protocol.notes)),
    }


def reported(protocol: Protocol) -> str:
    """Describe which score our numbers are."""
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


def shared(values: Iterable[Any]) -> Any:
    """Return the value that all have in common; None if they differ, or if there is none.

    >>> shared([(1, 2), (1, 2)])
    (1, 2)
    """
    found = list(values)
    return found[0] if found and all(value == found[0] for value in found) else None


def assignments(given: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{name}={value}" for name, value in (given or {}).items())


def _row(
    paper: Paper,
    table: Table,
    line: Line,
    forms: Sequence[str],
    same: Mapping[tuple[str, str], str],
    *,
    changes_noted: bool,
) -> dict[str, Any]:
    entry = line.entry
    shown = {}
    for form in forms:
        if form in line.results:
            result = line.results[form]
            model = same[form, result.key]
            notes = [
                result.remark,
                f"same model as {model}" if model != entry.method else None,
                _changes_note(result) if changes_noted else None,
            ]
            gap = _difference(result.mean, entry.mean)
            shown[form] = asdict(result) | {"difference": gap, "notes": list(filter(None, notes))}
    first = shown.get(DEFAULT) or next(iter(shown.values()), {})
    return {
        "dataset": entry.dataset,
        "partition": entry.partition,
        "clients": entry.clients,
        "method": entry.method,
        "metric": table.protocol_of(entry.dataset).metric,
        "published": {"mean": entry.mean, "std": entry.std},
        "ours": {"mean": None, "std": None, "seeds": []}
        | {name: first[name] for name in ("mean", "std", "seeds") if first},
        "difference": first.get("difference"),
        "forms": shown,
        "failed": dict(line.failed),
        "marks": paper.marks_of(table, entry),
        "note": entry.note,
        "skipped": None if shown else line.skipped,
        "folder": first.get("folder"),
    }


def _difference(ours: float | None, published: float | None) -> float | None:
    return None if ours is None or published is None else ours - published


def _changes_note(result: Result) -> str | None:
    parts = [*result.changed, *filter(None, [assignments(result.set)])]
    return f"not the paper's protocol: {', '.join(parts)}" if parts else None


def _same_models(lines: Sequence[Line]) -> dict[tuple[str, str], str]:
    """Return the first row of each model, by form and request. Others differ in name alone."""
    first: dict[tuple[str, str], str] = {}
    for line in lines:
        for form, result in line.results.items():
            first.setdefault((form, result.key), line.entry.method)
    return first


# Files of tables ----------------------------------------------------------------------------------


def stem_of(name: str) -> str:
    """Return the name of the files of a table or figure, without suffix.

    >>> stem_of("VI"), stem_of("figure-4")
    ('table-VI', 'figure-4')
    """
    return name if name.startswith("figure") else f"table-{name}"


def numbers_file(name: str) -> str:
    """Return the name of the file with the numbers of a figure or computed table."""
    return f"{stem_of(name)}-numbers.json"


def title_of(name: str) -> str:
    """Return the printed name of a table or figure.

    >>> title_of("VI"), title_of("figure-4")
    ('Table VI', 'Figure 4')
    """
    return f"Figure {name[7:]}" if name.startswith("figure-") else f"Table {name}"


def read_lines(table: Table, folder: Path) -> list[Line]:
    """Return the lines with results in the file of a table, in printed order."""
    file = folder / f"{stem_of(table.name)}.json"
    if not file.exists():
        return []
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
        found = {tuple(row[name] for name in PLACE): _results(row) for row in rows}
    except (OSError, ValueError, KeyError, TypeError):
        text = f"{file} is not a table of this command: remove it or choose another --out"
        raise UserError(text) from None
    places = {place_of(entry): entry for entry in table.entries}
    return [Line(entry, found[at]) for at, entry in places.items() if found.get(at)]


PLACE = ("dataset", "partition", "clients", "method")


def place_of(entry: Entry) -> tuple[Any, ...]:
    return tuple(getattr(entry, name) for name in PLACE)


def _results(row: Mapping[str, Any]) -> dict[str, Result]:
    return {form: _result(**values) for form, values in row.get("forms", {}).items()}


def _result(
    seeds: Sequence[int], changed: Sequence[str], difference: object, notes: object, **values: Any
) -> Result:
    """Return a result from a file; its difference and notes follow from the other values."""
    return Result(seeds=tuple(seeds), changed=tuple(changed), **values)


def merge(table: Table, old: Sequence[Line], new: Sequence[Line]) -> list[Line]:
    """Return all lines in printed order; new results replace old ones of the same row and form.

    A result by the paper's protocol is not replaced by one with the user's changes.
    """
    lines = {place_of(line.entry): line for line in old}
    for line in new:
        before = lines.get(place_of(line.entry), line)
        results = dict(before.results)
        for form, result in line.results.items():
            if form not in results or result.by_protocol or not results[form].by_protocol:
                results[form] = result
        lines[place_of(line.entry)] = replace(line, results=results)
    return [lines[place] for entry in table.entries if (place := place_of(entry)) in lines]


# Tables as text -----------------------------------------------------------------------------------


def as_markdown(data: Mapping[str, Any]) -> str:
    """Return the table as Markdown: results, then footnotes, then what did not run and why."""
    grid = as_grid(data)
    parts = [
        f"# {heading(data)}",
        f"{data['cite']}.",
        *introduction(data, bold="**"),
        to_markdown(grid, aligned=True) if grid.rows else "No cell has run.",
        *[items(title, lines) for title, lines in footnotes(data, bold="**").items()],
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def heading(data: Mapping[str, Any]) -> str:
    return f"{data['paper']}, {title_of(data['table'])}: {data['title']}"


def introduction(data: Mapping[str, Any], bold: str = "") -> list[str]:
    """Return what the numbers are, and what the user changed."""
    over = data["seeds_published"] or "an unstated number of"
    seeds = ", ".join(map(str, data["seeds"])) or "as noted"
    lines = [
        f"Ours: {data['reported']}; mean ± standard deviation over seeds {seeds}, with the "
        f"difference to the published number. Published: {over} runs."
    ]
    if data["changed"]:
        lines.append(f"{bold}Not the paper's protocol: {', '.join(data['changed'])}.{bold}")
    return lines


def footnotes(data: Mapping[str, Any], bold: str = "") -> dict[str, list[str]]:
    """Return what stands below the table, by heading."""
    notes = remarks_of(data)
    return {
        "Marks": [f"{bold}{mark}{bold}: {text}" for mark, text in data["marks"].items()],
        "On single numbers": [f"[{i}] {note}" for i, note in enumerate(notes, 1)],
        "Notes": list(data["notes"]),
        "Not run": _skipped(data["rows"]),
    }


def remarks_of(data: Mapping[str, Any]) -> list[str]:
    """Return the notes on all rows that ran, each once: numbers refer to them."""
    ran = [row for row in data["rows"] if row["forms"]]
    return list(dict.fromkeys(text for row in ran for text in _texts(row)))


def _texts(row: Mapping[str, Any]) -> list[str]:
    """Return the note on the printed number, then those on ours."""
    ours = [note for result in row["forms"].values() for note in result["notes"]]
    return [*([row["note"]] if row["note"] else []), *ours, *row["failed"].values()]


def published(row: Mapping[str, Any], digits: int, notes: Sequence[str]) -> str:
    """Return the printed number, with references to notes."""
    return with_spread(row["published"], digits) + _refer([row["note"]], notes)


def ours(row: Mapping[str, Any], form: str, digits: int, notes: Sequence[str]) -> str:
    """Return our number, its difference to the printed one, and references to notes."""
    if form in row["failed"]:
        return "failed" + _refer([row["failed"][form]], notes)
    if form not in row["forms"]:
        return "–"
    result = row["forms"][form]
    gap = result["difference"]
    behind = "" if gap is None else f" ({gap:+.{digits}f})"
    return with_spread(result, max(digits, 2)) + behind + _refer(result["notes"], notes)


def _refer(texts: Sequence[str], notes: Sequence[str]) -> str:
    return "".join(f" [{notes.index(text) + 1}]" for text in texts if text in notes)


def as_grid(data: Mapping[str, Any]) -> Grid:
    """Return the rows that ran as text."""
    notes, digits = remarks_of(data), data["digits"]
    rows = [
        (
            row["dataset"] + (" (AUC)" if row["metric"] == "auc" else ""),
            row["partition"],
            str(row["clients"] or "–"),
            row["method"],
            published(row, digits, notes),
            *[ours(row, form, digits, notes) for form in data["forms"]],
            ", ".join(row["marks"]),
        )
        for row in data["rows"]
        if row["forms"]
    ]
    forms = [FORMS[form] for form in data["forms"]]
    return Grid(heading(data), (*PLACE, "published", *forms, "marks"), rows)


def as_numbers(data: Mapping[str, Any]) -> Grid:
    """Return all rows as plain numbers, for programs: None where there is none."""
    columns = [f"{form} {name}" for form in data["forms"] for name in NUMBERS]
    rows = []
    for row in data["rows"]:
        results = [row["forms"].get(form, {}) for form in data["forms"]]
        values = [(result.get(name), name) for result in results for name in NUMBERS]
        rows.append(
            (
                data["table"],
                *[row[name] for name in PLACE],
                row["metric"],
                row["published"]["mean"],
                row["published"]["std"],
                *[v if name != "seeds" else " ".join(map(str, v or ())) for v, name in values],
                "; ".join([*row["marks"], *_texts(row), *filter(None, [row["skipped"]])]),
            )
        )
    head = ("table", *PLACE, "metric", "published mean", "published std", *columns, "marks")
    return Grid(heading(data), head, rows)


def with_spread(value: Mapping[str, Any], digits: int) -> str:
    if value["mean"] is None:
        return "–"
    spread = "" if value["std"] is None else f" ± {value['std']:.{digits}f}"
    return f"{value['mean']:.{digits}f}{spread}"


def items(title: str, lines: Sequence[str]) -> str:
    return "\n".join([f"{title}:", "", *[f"- {line}" for line in lines]]) if lines else ""


def _skipped(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line per reason, with the datasets or methods concerned and how many numbers."""
    reasons: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["skipped"] is not None:
            reasons.setdefault(row["skipped"], []).append(row)
    return [f"{reason}: {_concerned(reason, group)}" for reason, group in reasons.items()]


def _concerned(reason: str, rows: Sequence[Mapping[str, Any]]) -> str:
    columns = _COLUMNS_OF.get(reason, PLACE)
    named = [" ".join(str(row[name] or "") for name in columns) for row in rows]
    names = ", ".join(filter(None, dict.fromkeys(named)))
    count = f"{len(rows)} {'number' if len(rows) == 1 else 'numbers'}"
    return f"{names} ({count})" if names else count


_COLUMNS_OF: dict[str, tuple[str, ...]] = {
    NO_METHOD: ("method",),
    NO_DATA: ("dataset",),
    NOT_A_RUN: (),
}
