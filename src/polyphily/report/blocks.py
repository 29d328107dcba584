"""What a page is made of, as plain data: sections of tables and figures.

A figure has a `kind` (how it is drawn), `choices` (what its reader can choose) and `panels`: the
numbers to draw for every combination of choices. Nothing here knows about HTML.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

POINTS = 200  # of a line at most
BETWEEN = "|"  # options of a combination of choices are joined by it


@dataclass(frozen=True)
class Choice:
    """Something that a figure's reader can choose."""

    name: str
    options: tuple[str, ...]


@dataclass(frozen=True)
class Figure:
    """A chart: `panels` has one entry per combination of options, joined by `BETWEEN`; `half` may
    stand beside another on a wide screen."""

    id: str
    kind: str
    title: str
    caption: str
    panels: Mapping[str, Any]
    choices: tuple[Choice, ...] = ()
    half: bool = False


@dataclass(frozen=True)
class Table:
    """Text in rows; the first `words` columns are words, the others numbers. `strong` stand out."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    words: int = 1
    strong: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Entries:
    """Names and what they stand for."""

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
    """A number that stands by itself at the head of a page."""

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


def thinned(indices: Sequence[int], most: int = POINTS) -> list[int]:
    """At most so many of them, evenly spread, with the first and the last.

    >>> thinned([0, 1, 2, 3, 4, 5, 6], 3)
    [0, 3, 6]
    """
    if len(indices) <= most:
        return list(indices)
    step = (len(indices) - 1) / max(most - 1, 1)
    return [indices[round(i * step)] for i in range(most)]


def percents(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else digits(100 * value) for value in values]


def digits(value: Any) -> Any:
    """Five significant digits: more than a chart can show."""
    return None if value is None else float(f"{value:.5g}")
