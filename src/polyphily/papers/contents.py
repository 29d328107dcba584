"""The tables and figures of a paper in printed order, each with its state and its command.

Nothing here imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from polyphily.errors import unknown
from polyphily.graphs.datasets import is_present
from polyphily.papers import plan
from polyphily.papers.exhibits import RUNS, Exhibit, exhibits
from polyphily.papers.tables import AVERAGE, Paper, Table

FIGURE = "figure-"
_ROMAN = {"i": 1, "v": 5, "x": 10}


@dataclass(frozen=True)
class Item:
    """A table or figure of a paper.

    Attributes:
        paper: the name of the paper.
        name: as printed: "1", "VI", "figure-2b".
        title: what it shows.
        state: "runs", or what is missing.
        table: its published scores, if it has any.
        exhibit: what makes it, if it is a figure or a computed table.
        absent: the datasets that it needs and that are not here.
        unknown: the rows, or methods, that this library does not have.
    """

    paper: str
    name: str
    title: str
    state: str
    table: Table | None = None
    exhibit: Exhibit | None = None
    absent: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """The command that makes it."""
        flag, name = (
            ("figure", self.name[len(FIGURE) :]) if self.is_figure else ("table", self.name)
        )
        return f"polyphily reproduce {self.paper} --{flag} {name}"

    @property
    def illustration(self) -> bool:
        """True if it is a drawing of an idea, with nothing to run."""
        return self.exhibit is not None and self.exhibit.illustration

    @property
    def is_figure(self) -> bool:
        return self.name.startswith(FIGURE)


def contents(paper: Paper) -> list[Item]:
    """Return all tables and figures of a paper: the tables first, each kind by number."""
    drawn = exhibits(paper.name)
    found = []
    for name in {*paper.tables, *drawn}:
        table, exhibit = paper.tables.get(name), drawn.get(name)
        if exhibit is None:
            found.append(_scores(paper, paper.tables[name]))
            continue
        absent = tuple(dataset for dataset in exhibit.datasets if not is_present(dataset))
        lacking = tuple(method for method in exhibit.methods if method not in plan.registered())
        title, state = exhibit.title, exhibit.state()
        found.append(Item(paper.name, name, title, state, table, exhibit, absent, lacking))
    return sorted(found, key=lambda item: _number(item.name))


def find_item(paper: Paper, name: str, *, figure: bool = False) -> Item:
    """Return a table or figure by its printed name.

    Args:
        paper: the paper.
        name: "1", "VI", "figure-2b"; for figures also "2b" and "Fig. 2b".
        figure: whether the name is that of a figure, so that "4" is Figure 4.
    """
    known = {item.name.lower(): item for item in contents(paper)}
    bare = re.sub(r"^(figure|fig|table)[. -]*", "", name.strip().lower())
    figure = figure or name.strip().lower().startswith("fig")
    if (wanted := FIGURE * figure + bare) in known:
        return known[wanted]
    names = [item.name.removeprefix(FIGURE) for item in known.values() if item.is_figure is figure]
    raise unknown(f"{'figure' if figure else 'table'} of {paper.name}", bare, names)


def as_row(paper: Paper, item: Item) -> dict[str, object]:
    """Return an item as a JSON object."""
    entries = item.table.entries if item.table else ()
    return {
        "paper": item.paper,
        "table": item.name,
        "title": item.title,
        "cells": len({entry.cell for entry in entries}),
        "numbers": len(entries),
        "runnable": sum(plan.obstacle(paper, entry) is None for entry in entries),
        "state": item.state,
        "needs_data": list(item.absent),
        "rows_without_method": list(item.unknown),
        "command": item.command,
    }


def _scores(paper: Paper, table: Table) -> Item:
    """Return a table of scores, with what its numbers need."""
    entries = [e for e in table.entries if AVERAGE not in (e.dataset, e.method)]
    reasons = [plan.obstacle(paper, entry) for entry in entries]

    def names(reason: str, field: str) -> tuple[str, ...]:
        found = (getattr(e, field) for e, r in zip(entries, reasons, strict=True) if r == reason)
        return tuple(dict.fromkeys(found))

    def of_all(reason: str) -> str:
        return f"{reasons.count(reason)} of {len(entries)} numbers"

    absent, rows = names(plan.NO_DATA, "dataset"), names(plan.NO_METHOD, "method")
    parts = [RUNS] if None in reasons else []
    if absent:
        share = f" for {of_all(plan.NO_DATA)}" if parts else ""
        parts.append(f"needs data {', '.join(absent)}{share}")
    if rows:
        parts.append(f"no method for the rows {', '.join(rows)} ({of_all(plan.NO_METHOD)})")
    state = "; ".join(parts)
    return Item(paper.name, table.name, table.title, state, table, absent=absent, unknown=rows)


def closing(items: Iterable[Item]) -> str:
    """Return a sentence on how many tables and figures run, and one on what the rest needs."""
    possible = [item for item in items if not item.illustration]
    whole = sum(item.state == RUNS for item in possible)
    part = sum(item.state.startswith(f"{RUNS};") for item in possible)
    if whole == len(possible):
        return f"All {whole} tables and figures run."
    more = f", {part} more run in part" if part else ""
    sentences = [f"{whole} of {len(possible)} tables and figures run as a whole{more}."]
    if absent := _joined(item.absent for item in possible):
        sentences.append(
            f"The rest needs data that is not here: {absent}. `polyphily datasets` has the "
            "sources; `polyphily inspect --dataset NAME` downloads one, or says how to get it."
        )
    if rows := _joined(item.unknown for item in possible):
        sentences.append(f"These rows have no method in this library: {rows}.")
    return " ".join(sentences)


def _joined(names: Iterable[Sequence[str]]) -> str:
    return ", ".join(dict.fromkeys(name for own in names for name in own))


def _number(name: str) -> tuple[bool, int, str]:
    """Return where a name stands among the others.

    >>> sorted(["figure-10", "VI", "figure-2b", "IX", "figure-2a"], key=_number)
    ['VI', 'IX', 'figure-2a', 'figure-2b', 'figure-10']
    """
    text = name.lower().removeprefix(FIGURE)
    if found := re.match(r"\d+", text):
        return name.startswith(FIGURE), int(found[0]), text[found.end() :]
    values = [_ROMAN.get(letter, 0) for letter in text]
    following = [*values[1:], 0]
    signed = [-v if v < after else v for v, after in zip(values, following, strict=True)]
    return name.startswith(FIGURE), sum(signed), ""
