"""Tables for a terminal of any width: no word is cut.

Text wraps between words. If the columns still need more room, some of them go into a further table
below, which begins with the same first columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

GAP = 2  # spaces between columns
NARROW = 16  # columns of text are not made narrower


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        title: its heading, which may wrap.
        right: whether it is aligned at the right, as numbers are.
        wraps: whether its cells may wrap between words.
    """

    title: str
    right: bool = True
    wraps: bool = False


def text(title: str) -> Column:
    """Return a column of text that may wrap."""
    return Column(title, right=False, wraps=True)


def label(title: str) -> Column:
    """Return a column of names, which do not wrap."""
    return Column(title, right=False)


def print_table(
    console: Console,
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    *,
    keys: int = 1,
    styles: Sequence[str] = (),
    header: bool = True,
    indent: int = 0,
) -> None:
    """Print a table, or several below each other if one is too wide.

    Args:
        console: where to print.
        columns: the columns.
        rows: the cells, as plain text.
        keys: the number of first columns that are repeated in every table.
        styles: a style for each row.
        header: whether the titles are printed.
        indent: spaces before every line.
    """
    for number, (place, widths) in enumerate(layout(columns, rows, console.width - indent, keys)):
        if number:
            console.print()
        table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), show_header=header)
        for i, width in zip(place, widths, strict=True):
            table.add_column(
                escape(columns[i].title),
                justify="right" if columns[i].right else "left",
                width=width,
                overflow="fold",
            )
        for row, style in zip(rows, styles or [""] * len(rows), strict=True):
            table.add_row(*[escape(row[i]) for i in place], style=style)
        console.print(Padding(table, (0, 0, 0, indent), expand=False) if indent else table)


def layout(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int, keys: int = 1
) -> list[tuple[list[int], list[int]]]:
    """Divide columns among tables that fit into a width.

    Returns:
        The positions and the widths of the columns of every table.
    """
    texts = [[column.title, *(row[i] for row in rows)] for i, column in enumerate(columns)]
    full = [max(cell_len(line) for cell in cells for line in _lines(cell)) for cells in texts]
    least = [
        max(
            _longest_word(cells[0]),
            *(
                max(_longest_word(cell), min(cell_len(cell), NARROW))
                if column.wraps
                else max(map(cell_len, _lines(cell)))
                for cell in cells[1:]
            ),
            1,
        )
        for column, cells in zip(columns, texts, strict=True)
    ]
    first = list(range(min(keys, len(columns))))
    tables = [first[:]]
    for i in range(len(first), len(columns)):
        wider = sum(least[j] + GAP for j in [*tables[-1], i]) - GAP
        if wider > width and len(tables[-1]) > len(first):
            tables.append(first[:])
        tables[-1].append(i)
    return [(place, _shrunk(place, full, least, width)) for place in tables]


def _shrunk(
    place: Sequence[int], full: Sequence[int], least: Sequence[int], width: int
) -> list[int]:
    """Return widths of columns: the widest are made smaller until all fit."""
    widths = {i: full[i] for i in place}
    while sum(widths.values()) + GAP * (len(widths) - 1) > width:
        wide = [i for i in place if widths[i] > least[i]]
        if not wide:
            break
        widths[max(wide, key=lambda i: widths[i])] -= 1
    if len(widths) == 1:  # nothing to put elsewhere: the text is folded
        widths = {i: min(size, width) for i, size in widths.items()}
    return list(widths.values())


def _lines(cell: str) -> list[str]:
    return cell.splitlines() or [""]


def _longest_word(cell: str) -> int:
    return max(map(cell_len, cell.split()), default=0)
