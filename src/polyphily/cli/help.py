"""Help pages: names on the left, text on the right, with room for it in 80 columns."""

from __future__ import annotations

import re
from collections.abc import Iterable

import click
import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from typer.core import TyperCommand, TyperGroup

WIDEST = 24  # columns of names; longer ones are divided
METAVARS = {"integer": "N", "integer range": "N", "float": "X", "float range": "X"}
PANELS = {  # headings, and the commands below each; others are below `COMMANDS`
    "Train": ("run", "compare", "sweep", "demo"),
    "Your data": ("check", "inspect"),
    "Results": ("report", "watch", "plot", "predict", "export", "audit"),
    "What there is": ("methods", "datasets", "partitions", "backbones", "metrics"),
    "Real sites": ("server", "site"),
    "Research": ("reproduce", "study", "bench"),
}
ARGUMENTS, OPTIONS, COMMANDS = "Arguments", "Options", "Commands"

Rows = Iterable[tuple[str, str]]


def arrange(app: typer.Typer) -> None:
    """Give all commands of an application these help pages. Called when it has all commands."""
    app.info.cls = Group
    for command in app.registered_commands:
        command.cls = Command
    for group in app.registered_groups:
        assert group.typer_instance
        group.cls = Group
        arrange(group.typer_instance)


class Command(TyperCommand):
    """A command with such a help page."""

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Print the help page."""
        _print_help(self, ctx)


class Group(TyperGroup):
    """A group of commands with such a help page."""

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Print the help page."""
        _print_help(self, ctx)


def _print_help(command: click.Command, ctx: click.Context) -> None:
    console = Console(highlight=False)
    usage = " ".join(command.collect_usage_pieces(ctx))
    console.print(f"[bold]Usage:[/bold] {escape(f'{ctx.command_path} {usage}')}")
    for paragraph in (command.help or "").split("\n\n"):
        console.print()
        console.print(" ".join(paragraph.split()), markup=False)
    panels = commands_of(command, ctx) if isinstance(command, click.Group) else {ARGUMENTS: []}
    panels[OPTIONS] = []  # of a group, after its commands
    for parameter in command.get_params(ctx):
        if record := row_of(parameter, ctx):
            usual = ARGUMENTS if isinstance(parameter, click.Argument) else OPTIONS
            panel = getattr(parameter, "rich_help_panel", None) or usual
            panels.setdefault(panel, []).append(record)
    names = [line for rows in panels.values() for name, _ in rows for line in _divided(name)]
    width = min(WIDEST, max(map(len, names), default=0))
    for title, rows in panels.items():
        if rows:
            console.print(f"\n[bold]{escape(title)}[/bold]")
            console.print(Padding(_table(rows, width), (0, 0, 0, 2), expand=False))


def commands_of(group: click.Group, ctx: click.Context) -> dict[str, list[tuple[str, str]]]:
    """Return names and first sentences of a group's commands, by heading."""
    known = group.list_commands(ctx)
    panels = {**(PANELS if ctx.parent is None else {}), COMMANDS: ()}
    listed = {name for names in panels.values() for name in names}
    panels[COMMANDS] = tuple(name for name in known if name not in listed)
    found: dict[str, list[tuple[str, str]]] = {}
    for panel, names in panels.items():
        commands = {name: group.get_command(ctx, name) for name in names}
        found[panel] = [
            (name, _first_sentence(command.help))
            for name, command in commands.items()
            if command and not command.hidden
        ]
    return found


def _table(rows: Rows, width: int) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="cyan", width=width, overflow="fold")
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(escape("\n".join(_divided(name))), text)
    return table


def _divided(name: str) -> list[str]:
    """Divide names that are too wide for their column at commas."""
    return [name] if len(name) <= WIDEST else name.split(", ")


def row_of(parameter: click.Parameter, ctx: click.Context) -> tuple[str, str] | None:
    """Return the names of a parameter with the word for its value, and its text with markup."""
    record = parameter.get_help_record(ctx)
    if record is None:
        return None
    written = getattr(parameter, "help", None) or ""
    text, extra = " ".join(written.split()), record[1].removeprefix(written).replace("\\[", "[")
    if extra.strip():  # "[default: (cora)]" is written "[cora]" here
        plain = re.sub(r"default: \(?([^\];)]*)\)?", r"\1", extra.strip())
        text += f" [dim]{escape(plain)}[/dim]"
    if isinstance(parameter, click.Argument):
        name = parameter.metavar or (parameter.name or "").upper()
        return name.strip("[]…") + "…" * (parameter.nargs == -1), text
    names = [*sorted(parameter.opts, key=len, reverse=True), *parameter.secondary_opts]
    if getattr(parameter, "is_flag", False):
        return ", ".join(names), text
    kind = parameter.type.name
    word = parameter.metavar or METAVARS.get(kind, kind.upper())
    return f"{', '.join(names)} {word}", text


def _first_sentence(text: str | None) -> str:
    """Return the first sentence of a command's help.

    >>> _first_sentence("Train, and wait. Ctrl-C\\n detaches.")
    'Train, and wait.'
    """
    words = " ".join((text or "").split("\n\n")[0].split())
    return escape(re.split(r"(?<=\.) (?=[A-Z])", words)[0])
