"""`polyphily check`: what the files of clients hold, and all their faults."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polyphily.errors import FileFaults, UserError

if TYPE_CHECKING:
    from rich.console import Console

    from polyphily.graphs.files.survey import ClientSurvey, ColumnSurvey

MOST_COLUMNS = 40  # of a client that are printed
MOST_CLASSES = 10
WIDTH = 80
VALUES = 32  # letters for the values of a column
NAME = 24  # letters for its name


def add_to(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("check")(check)


def check(
    folder: Annotated[Path, typer.Argument(help="A folder or file of your graphs.")],
    schema: Annotated[
        Path | None,
        typer.Option(
            help="The schema.toml that maps columns; unless given, the one beside the tables or in "
            "the folder above."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")] = False,
) -> None:
    """Read the files of clients and list what was found, or all faults with line and column.

    The exit status is 2 if there are faults.
    """
    from polyphily.graphs.files.schema import FILE
    from polyphily.graphs.files.survey import survey

    try:
        found = survey(folder.expanduser(), schema.expanduser() if schema else None)
    except UserError as error:
        if not as_json:
            raise
        faults = error.faults if isinstance(error, FileFaults) else (str(error),)
        count = error.count if isinstance(error, FileFaults) else 1
        typer.echo(json.dumps({"faults": faults, "count": count}, indent=2))
        raise typer.Exit(error.exit_status) from None
    if as_json:
        typer.echo(json.dumps({"faults": [], "count": 0, **asdict(found)}, indent=2))
        return
    from polyphily.cli import terminal

    console = terminal.out
    for client in found.clients:
        _print_client(client, console)
    for kind, lines in (("note", found.notes), ("warning", found.warnings)):
        for line in lines:
            terminal.print_line(f"{kind}: {line}")
    home = folder if folder.is_dir() else folder.parent
    copy = f"cp {shlex.quote(str(schema))} {shlex.quote(str(home / FILE))} && " if schema else ""
    divide = " --partition louvain --clients 5" * (len(found.clients) == 1)
    terminal.print_line(
        f"No faults. Next: {copy}polyphily compare --dataset {shlex.quote(str(folder))}{divide}"
    )


def _print_client(client: ClientSurvey, console: Console) -> None:
    from rich.markup import escape
    from rich.padding import Padding
    from rich.table import Table

    console.print(f"[bold]{escape(client.name)}[/bold]  [dim]{escape(client.path)}[/dim]")
    facts = [
        f"{_count(client.nodes, 'node')}, {client.labelled:,} labelled{_split(client)}",
        f"classes: {_classes(client)}",
        f"{_count(client.edges, 'edge')}{_edges(client)}",
    ]
    if client.features is not None:
        facts.append(f"{client.features:,} features in an array")
    for fact in facts:
        console.print(Padding(escape(fact), (0, 0, 0, 2), expand=False), width=WIDTH)
    if client.columns:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("column", max_width=NAME, overflow="fold")
        table.add_column("kind")
        table.add_column("missing", justify="right")
        table.add_column("values", max_width=VALUES, overflow="fold")
        for column in client.columns[:MOST_COLUMNS]:
            missing = f"{column.missing:.1%}" if column.missing else "–"
            table.add_row(escape(column.name), column.kind, missing, escape(describe(column)))
        console.print(Padding(table, (0, 0, 0, 2), expand=False))
        if len(client.columns) > MOST_COLUMNS:
            console.print(f"  and {len(client.columns) - MOST_COLUMNS} more columns")
    for title, lines in (("not used", client.ignored), ("note", client.notes)):
        if lines:
            text = f"{title}: {', '.join(lines)}"
            console.print(Padding(escape(text), (0, 0, 0, 2), expand=False), width=WIDTH)
    console.print()


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _split(client: ClientSurvey) -> str:
    if not client.split:
        return "; the split is drawn"
    parts = ", ".join(f"{number:,} {name}" for name, number in client.split.items())
    return f"; split: {parts}" + (f" (first of {client.splits})" if client.splits > 1 else "")


def _classes(client: ClientSurvey) -> str:
    total = max(client.labelled, 1)
    shares = [f"{name} {number / total:.1%}" for name, number in client.classes.items()]
    more = f" and {len(shares) - MOST_CLASSES} more" if len(shares) > MOST_CLASSES else ""
    return (", ".join(shares[:MOST_CLASSES]) or "none") + more


def _edges(client: ClientSurvey) -> str:
    parts = ["directed" if client.directed else "without direction"]
    if client.weights:
        low, high = client.weights
        parts.append(f"weights {low:g} to {high:g}")
    if client.relations:
        parts.append("types " + ", ".join(f"{n} ({c:,})" for n, c in client.relations.items()))
    return ", " + ", ".join(parts)


def describe(column: ColumnSurvey) -> str:
    """Return the values of a column in a few words.

    >>> from polyphily.graphs.files.survey import ColumnSurvey
    >>> describe(ColumnSurvey("age", "number", 0.0, 18.0, 95.0))
    '18 to 95'
    """
    if column.categories is not None:
        text = f"{column.categories:,}: {', '.join(column.common)}"
        cut = column.categories > len(column.common) or len(text) > VALUES
        return text[: VALUES - 1].rstrip(", ") + "…" if cut else text
    if column.true is not None:
        return f"{column.true:.1%} true"
    if column.low is None:
        return "none"
    if isinstance(column.low, str):
        return f"{column.low[:10]} to {str(column.high)[:10]}"
    return f"{column.low:.6g} to {column.high:.6g}"
