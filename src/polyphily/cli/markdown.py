"""Markdown pages in a terminal: their tables fit its width. In a pipe they are Markdown still."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby

import typer
from rich.console import Console
from rich.markup import escape

from polyphily.cli.tables import Column, print_table, text


def show_page(page: str, console: Console | None = None) -> None:
    """Print a Markdown page: as it is into a file or pipe, with tables laid out in a terminal.

    Args:
        page: in Markdown.
        console: where to print; standard output unless given.
    """
    console = console or Console(highlight=False)
    if not console.is_terminal:
        typer.echo(page)
        return
    for is_table, lines in _blocks(page):
        if is_table:
            head, _, *rows = [_cells(line) for line in lines]
            right = [cell.endswith(":") for cell in _cells(lines[1])]
            columns = [text(head[0])]
            columns += [
                Column(_plain(title), right=at_right, wraps=True)
                for title, at_right in zip(head[1:], right[1:], strict=True)
            ]
            print_table(console, columns, [[_plain(cell) for cell in row] for row in rows])
        else:
            for line in lines:
                style = "bold" if line.startswith("#") else ""
                console.print(escape(_plain(line.lstrip("# "))), style=style)


def _blocks(page: str) -> Iterator[tuple[bool, list[str]]]:
    """Yield runs of lines, and whether each is a table; comments are left out."""
    shown = re.sub(r"<!--.*?-->\n*", "", page, flags=re.S).splitlines()
    for is_table, lines in groupby(shown, key=lambda line: line.startswith("|")):
        yield is_table, list(lines)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _plain(line: str) -> str:
    """Return text without the marks of Markdown for emphasis and code."""
    return re.sub(r"(\*\*|`|(?<!\w)\*(?=\w)|(?<=\w)\*(?!\w))", "", line)
