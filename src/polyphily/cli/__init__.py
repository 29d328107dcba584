"""The command line. Commands import torch and the like when they run, so that `--help` is fast."""

from __future__ import annotations

import errno
import io
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console

from polyphily import __version__
from polyphily.cli import (
    auditing,
    benching,
    checking,
    comparing,
    demonstrating,
    deploying,
    exporting,
    help,
    inspecting,
    joining,
    listings,
    predicting,
    ranks,
    reporting,
    reproducing,
    studying,
    sweeping,
    training,
    watching,
)
from polyphily.errors import PolyphilyError
from polyphily.registry import PluginWarning

app = typer.Typer(
    name="polyphily",
    help="Federated graph learning for graphs that differ in kind.",
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
training.add_to(app)
comparing.add_to(app)
demonstrating.add_to(app)
listings.add_to(app)
reproducing.add_to(app)
deploying.add_to(app)
joining.add_to(app)
checking.add_to(app)
inspecting.add_to(app)
reporting.add_to(app)
watching.add_to(app)
predicting.add_to(app)
exporting.add_to(app)
auditing.add_to(app)
sweeping.add_to(app)
studying.add_to(app)
benching.add_to(app)
help.arrange(app)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"polyphily {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: bool = typer.Option(
        False,
        "--version",
        callback=_print_version,
        is_eager=True,
        help="Print the version and exit.",
    ),
) -> None:
    """Federated graph learning for graphs that differ in kind."""
    if context.invoked_subcommand is None:
        _welcome()
    else:
        ranks.check_launcher(context.invoked_subcommand)


def _welcome() -> None:
    """Print what this is, and what to try first."""
    out = Console(highlight=False)
    out.print(
        f"[bold]polyphily {__version__}[/bold] trains graph neural networks across owners of graphs"
        " who may not share them, and whose graphs differ in kind."
    )
    out.print("\n[bold]Try[/bold]")
    commands = {
        "polyphily demo": "six synthetic clients, 20 seconds, no download",
        "polyphily run --dataset cora --clients 5": "a real graph, divided among five clients",
        "polyphily check ./sites": "your own files: what they hold, or all their faults",
    }
    for command, text in commands.items():
        out.print(f"  [cyan]{command}[/cyan]\n      {text}")
    out.print("\n[bold]Help[/bold]\n  polyphily --help, polyphily run --help, polyphily methods")


def main() -> None:
    """Run the command line; exit with status 2 after a user's mistake and 1 after a failure.

    Errors are printed without a traceback, unless `POLYPHILY_DEBUG=1` is set.
    """
    _replace_unprintable()
    try:
        with _plain_plugin_warnings():
            app()
    except KeyboardInterrupt:
        _print_error("interrupted")
        sys.exit(130)
    except PolyphilyError as error:
        if os.environ.get("POLYPHILY_DEBUG"):
            raise
        _print_error(str(error))
        sys.exit(error.exit_status)
    except Exception as error:
        if os.environ.get("POLYPHILY_DEBUG"):
            raise
        if said := _memory_trouble(error) or _disk_trouble(error):
            _print_error(said)
            sys.exit(1)
        _print_error(
            f"failed: {type(error).__name__}: {error}\n"
            "This is a failure of the program, not a mistake in your command. "
            "Set POLYPHILY_DEBUG=1 to see where it happened."
        )
        sys.exit(1)


def _replace_unprintable() -> None:
    """Print "?" for characters that the terminal's encoding lacks, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() != "utf-8":
            stream.reconfigure(errors="replace")


def _memory_trouble(error: Exception) -> str:
    """Return what lacks memory and what to do; empty for other errors.

    Errors are known by their names and words, because torch is not imported here.
    """
    advice = "Set a limit such as --memory 20GB: clients that do not fit into it train in turn. "
    if type(error).__name__ == "OutOfMemoryError":
        first = str(error).partition(". ")[0]
        advice += "Fewer seeds or --device cpu also need less."
        return f"the GPU has no memory left. {first}.\n{advice}"
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        asked = re.search(r"tried to allocate (\d+) bytes", str(error))
        size = f" for another {int(asked[1]) / 1e9:.1f} GB" if asked else ""
        return f"this machine has no memory left{size}.\n{advice}Fewer seeds also need less."
    return ""


def _disk_trouble(error: Exception) -> str:
    """Return what is wrong with the disk and what to do; empty for other errors.

    safetensors has errors of its own, which give the system's words.
    """
    full = os.strerror(errno.ENOSPC)
    if full in str(error):
        where = getattr(error, "filename", None)
        return (
            f"{full}{f': {where}' if where else ''}. Make room there, or choose another folder "
            "(--out). A run that was cut short goes on with polyphily run --resume"
        )
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{error.strerror}: {error.filename}. Choose another folder, or ask for the right"
    return ""


@contextmanager
def _plain_plugin_warnings() -> Iterator[None]:
    """Print a warning about a plug-in as one line, without Python's file name and source line."""
    with warnings.catch_warnings():  # restores `showwarning` at the end
        show_other = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
            if issubclass(category, PluginWarning):
                _print_message("warning:", "bold yellow", str(message))
            else:
                show_other(message, category, *rest, **more)

        warnings.showwarning = show
        yield


def _print_error(message: str) -> None:
    _print_message("error:", "bold red", message)


def _print_message(label: str, style: str, message: str) -> None:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(label, style=style, end=" ")
    console.print(message, markup=False)
