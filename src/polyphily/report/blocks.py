"""The content of a page as plain data: sections that hold tables and figures.

A figure has a `kind` (the type of chart), `choices` (what the reader can select) and `panels` (the
numbers to draw for every combination of choices). Nothing here knows about HTML.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

POINTS = 200  # maximum number of points of a line
SEPARATOR = "|"  # joins the options of a combination of choices


@dataclass(frozen=True)
class Choice:
    """A choice that a figure offers to its reader."""

    name: str
    options: tuple[str, ...]


@dataclass(frozen=True)
class Figure:
    """A chart.

    Attributes:
        id: the name of the figure in the page.
        kind: the type of chart, a function in `assets/charts.js`.
        title: the heading.
        caption: the text below the chart.
        panels: what to draw, by the chosen options joined by `SEPARATOR`.
        choices: what the reader can select.
        half: whether the figure takes half the width of a wide screen.
    """

    id: str
    kind: str
    title: str
    caption: str
    panels: Mapping[str, Any]
    choices: tuple[Choice, ...] = ()
    half: bool = False


@dataclass(frozen=True)
class Table:
    """A table of texts.

    Attributes:
        columns: the headings.
        rows: the cells.
        caption: the text below the table.
        text_columns: how many leading columns hold text; the others hold numbers.
        strong: indices of the rows that are emphasised.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    text_columns: int = 1
    strong: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Entries:
    """A titled list of names and values."""

    title: str
    pairs: Mapping[str, str]


Item = Figure | Table | Entries


@dataclass(frozen=True)
class Section:
    id: str
    title: str
    lead: str = ""
    items: tuple[Item, ...] = ()
    points: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fact:
    """A headline number at the top of a page."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Content:
    title: str
    subtitle: str
    facts: tuple[Fact, ...]
    sections: tuple[Section, ...]
    notes: tuple[str, ...] = field(default=())


def subsample(indices: Sequence[int], most: int = POINTS) -> list[int]:
    """Return at most `most` of the indices, evenly spread, including the first and the last.

    >>> subsample([0, 1, 2, 3, 4, 5, 6], 3)
    [0, 3, 6]
    """
    if len(indices) <= most:
        return list(indices)
    step = (len(indices) - 1) / max(most - 1, 1)
    return [indices[round(i * step)] for i in range(most)]


def to_percent(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else round_digits(100 * value) for value in values]


def round_digits(value: Any) -> Any:
    """Round to five significant digits, more than a chart can show."""
    return None if value is None else float(f"{value:.5g}")
