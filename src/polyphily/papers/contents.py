"""The tables and figures of a paper in printed order, each with its state and its command.

Nothing here imports torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from polyphily.errors import unknown
from polyphily.papers import plan
from polyphily.papers.exhibits import Exhibit, exhibits
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
    """

    paper: str
    name: str
    title: str
    state: str
    table: Table | None = None
    exhibit: Exhibit | None = None

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
        shown = exhibit or _as_exhibit(paper, paper.tables[name])
        found.append(Item(paper.name, name, shown.title, shown.state(), table, exhibit))
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
        "command": item.command,
    }


def _as_exhibit(paper: Paper, table: Table) -> Exhibit:
    """Return what a table of scores needs."""
    entries = [e for e in table.entries if AVERAGE not in (e.dataset, e.method)]
    return Exhibit(
        table.name,
        table.title,
        datasets=list(dict.fromkeys(entry.dataset for entry in entries)),
        methods=list(dict.fromkeys(paper.variant(entry.method).method for entry in entries)),
    )


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
