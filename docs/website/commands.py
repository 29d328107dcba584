"""The pages of commands, made from the commands themselves."""

from __future__ import annotations

import re

import click
import typer
from rich.text import Text

from polyphily.cli import app
from polyphily.cli.help import ARGUMENTS, OPTIONS, commands_of, row_of
from website.markdown import cell, escape, table

FOLDER = "reference/commands"


def pages() -> dict[str, str]:
    """Return a page on all commands, and one for each of them."""
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group)
    context = click.Context(group, info_name="polyphily")
    texts = [
        "# Commands\n\n`polyphily COMMAND --help` prints the same in a terminal. "
        "The exit status is 0 after success, 2 after a mistake of the user, 1 after a failure.\n"
    ]
    found = {f"{FOLDER}/index.md": ""}
    for panel, commands in commands_of(group, context).items():
        rows = []
        for name, _ in commands:
            command = group.get_command(context, name)
            assert command is not None
            found[f"{FOLDER}/{name}.md"] = "\n".join(_describe(command, name, context, level=1))
            rows.append((f"[`{name}`]({name}.md)", cell(_paragraphs(command)[0])))
        if rows:
            texts.append(f"## {panel}\n\n{table(('command', 'what it does'), rows)}")
    found[f"{FOLDER}/index.md"] = "\n".join(texts)
    return found


def _describe(command: click.Command, name: str, parent: click.Context, level: int) -> list[str]:
    """Return the lines on a command, then those on the commands below it."""
    context = click.Context(command, info_name=name, parent=parent)
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    lines = [f"{'#' * level} polyphily {context.command_path.partition(' ')[2]}", ""]
    lines += [*(escape(part) + "\n" for part in _paragraphs(command)), f"```text\n{usage}\n```\n"]
    panels: dict[str, list[tuple[str, ...]]] = {}
    for parameter in command.get_params(context):
        if (shown := row_of(parameter, context)) and parameter.name != "help":
            usual = ARGUMENTS if isinstance(parameter, click.Argument) else OPTIONS
            panel = getattr(parameter, "rich_help_panel", None) or usual
            panels.setdefault(panel, []).append(_row(*shown))
    for panel, rows in panels.items():
        lines += [f"**{panel}**\n", table(("name", "meaning"), rows)]
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            child = command.get_command(context, below)
            assert child is not None
            lines += _describe(child, below, context, level + 1)
    return lines


def _row(names: str, text: str) -> tuple[str, ...]:
    """Return the cells of a parameter: its names, and its meaning with the default in brackets.

    >>> _row("--rounds N", "How many. [dim]\\\\[100; x>=1][/dim]")
    ('`--rounds N`', 'How many. \\\\[100; x\\\\>=1\\\\]')
    """
    shown = "<br>".join(f"`{name}`" for name in names.split(", "))
    return shown, cell(Text.from_markup(text).plain)


def _paragraphs(command: click.Command) -> list[str]:
    parts = re.split(r"\n\s*\n", (command.help or "").strip())
    return [" ".join(part.split()) for part in parts]
