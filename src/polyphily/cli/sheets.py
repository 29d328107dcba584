"""Tables of `polyphily reproduce`: in a terminal of any width, and as files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from polyphily.cli import options
from polyphily.cli.tables import Column, print_table
from polyphily.errors import UserError
from polyphily.papers import report
from polyphily.papers.contents import Item
from polyphily.papers.plan import FORMS
from polyphily.papers.tables import Paper
from polyphily.report.grids import Grid, is_right, text_of, to_csv, to_latex, to_markdown

SUFFIXES = (".md", ".csv", ".tex")
LONG = 60  # rows of an exhibit that are printed
ROOMY = 120  # columns of a terminal in which a difference stands beside its number


def print_scores(data: Mapping[str, Any]) -> None:
    """Print a table of scores, then its footnotes."""
    console = Console(highlight=False)
    console.print(f"[bold]{escape(report.heading(data))}[/bold]")
    for line in report.introduction(data):
        console.print(escape(line))
    ran = [row for row in data["rows"] if row["forms"]]
    common = set.intersection(*[set(row["marks"]) for row in ran]) if ran else set()
    if ran:
        console.print()
        console.print(_scores(data, common, wide=console.width >= ROOMY))
    else:
        console.print("No cell has run.")
    _print_notes(console, report.footnotes(data), dict.fromkeys(common, "all rows"))


def _scores(data: Mapping[str, Any], common: set[str], *, wide: bool) -> Table:
    """Return the rows that ran, below the names of their cells."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("cell and row", overflow="fold")
    for name in ("published", *[FORMS[form] for form in data["forms"]]):
        heading = name if wide else name.replace(" ", "\n")
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("marks", overflow="fold")
    before = ""
    for dataset, partition, clients, method, *numbers, marks in report.as_grid(data).rows:
        cell = f"{dataset} {partition} {clients}".removesuffix(" –")
        if cell != before:
            table.add_row(f"[bold]{escape(cell)}[/bold]")
        before = cell
        own = ("," + (" " if wide else "\n")).join(m for m in marks.split(", ") if m not in common)
        name = re.sub(r"(?<=,)" if wide else r"(?<=,)|(?=\[)", "\n", method)
        values = numbers if wide else map(_folded, numbers)
        table.add_row(Padding(escape(name), (0, 0, 0, 2)), *map(escape, (*values, own)))
    return table


def _folded(number: str) -> str:
    """Put the difference behind a number, and references to notes, on lines of their own."""
    value, bracket, notes = number.replace(" ± ", "±").partition(" [")
    return value.replace(" (", "\n(") + (f"\n[{notes}" if bracket else "")


def print_grids(grids: Sequence[Grid]) -> None:
    """Print tables, with a blank line between them."""
    for i, grid in enumerate(grids):
        if i:
            typer.echo()
        _print_grid(grid)


def _print_grid(grid: Grid) -> None:
    """Print a table of an exhibit; of a long one, such as a curve, the first rows."""
    columns = [
        Column(name, right=is_right(grid, i), wraps=not is_right(grid, i))
        for i, name in enumerate(grid.columns)
    ]
    console = Console(highlight=False)
    console.print(f"[bold]{escape(grid.title)}[/bold]")
    print_table(console, columns, [[*map(text_of, row)] for row in grid.rows[:LONG]])
    if len(grid.rows) > LONG:
        console.print(f"… and {len(grid.rows) - LONG} more rows: see the CSV file")


def print_contents(paper: Paper, items: Sequence[Item]) -> None:
    """Print the tables and figures of a paper with their states and commands."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for item in items:
        command = "" if item.illustration else f"\n[dim]{escape(item.command)}[/dim]"
        text = f"{escape(item.title)}\n{escape(item.state)}{command}"
        table.add_row(report.title_of(item.name), text)
    console = Console(highlight=False)
    console.print(f"[bold]{paper.name}[/bold]: {escape(paper.cite)}")
    console.print(Padding(table, (0, 0, 1, 2)))


def print_notes(notes: Sequence[str]) -> None:
    _print_notes(Console(highlight=False), {"Notes": list(notes)}, {})


def _print_notes(
    console: Console, notes: Mapping[str, Sequence[str]], behind: Mapping[str, str]
) -> None:
    """Print lists with headings; `behind` is added to the words that lines begin with."""
    for title, lines in notes.items():
        if lines:
            console.print(f"\n[bold]{title}[/bold]")
        for line in lines:
            word, colon, rest = line.partition(":")
            added = f" ({behind[word]})" if word in behind else ""
            console.print(Padding(escape(f"{word}{added}{colon}{rest}"), (0, 0, 0, 2)))


# Files --------------------------------------------------------------------------------------------


def check_files(files: Sequence[Path]) -> None:
    """Raise a `UserError` if a table cannot be written to one of the files of --write."""
    for file in files:
        options.check_output("--write", file, SUFFIXES)


def scores_as(suffix: str, results: Sequence[Mapping[str, Any]]) -> str:
    """Return tables of scores in the format of a file's suffix."""
    if suffix == ".csv":
        return to_csv([report.as_numbers(data) for data in results])
    if suffix == ".md":
        return "\n".join(map(report.as_markdown, results))
    pages = []
    for data in results:
        notes = [*report.introduction(data), *_flat(report.footnotes(data))]
        pages.append(to_latex(report.as_grid(data), notes))
    return "\n".join(pages)


def grids_as(suffix: str, title: str, grids: Sequence[Grid], notes: Sequence[str]) -> str:
    """Return the tables of an exhibit in the format of a file's suffix."""
    if suffix == ".csv":
        return to_csv(grids)
    if suffix == ".md":
        parts = [f"# {title}", *[f"{g.title}\n\n{to_markdown(g)}" for g in grids]]
        return "\n\n".join(filter(None, [*parts, report.items("Notes", notes)])) + "\n"
    return "\n".join(to_latex(grid, notes if grid is grids[-1] else ()) for grid in grids)


def _flat(notes: Mapping[str, Sequence[str]]) -> list[str]:
    return [line for lines in notes.values() for line in lines]


def write(file: Path, text: str) -> None:
    """Write a file and the folders above it."""
    from polyphily.runs.folder import write_text

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, text)
    except OSError as error:
        raise UserError(f"cannot write to {file}: {error.strerror}") from None
