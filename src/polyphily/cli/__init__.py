"""The command line. Heavy imports happen inside the commands, so that `--help` answers at once."""

from __future__ import annotations

import os
import sys

import typer
from rich.console import Console

from polyphily import __version__
from polyphily.cli import (
    auditing,
    benching,
    deploying,
    inspecting,
    listings,
    ranks,
    reporting,
    reproducing,
    studying,
    sweeping,
    training,
)
from polyphily.errors import PolyphilyError

app = typer.Typer(
    name="polyphily",
    help="Federated graph learning for graphs that differ in kind.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
training.add_to(app)
listings.add_to(app)
reproducing.add_to(app)
deploying.add_to(app)
inspecting.add_to(app)
reporting.add_to(app)
auditing.add_to(app)
sweeping.add_to(app)
studying.add_to(app)
benching.add_to(app)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"polyphily {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and stop."
    ),
) -> None:
    """Federated graph learning for graphs that differ in kind."""
    ranks.check(context.invoked_subcommand)


def main() -> None:
    """Runs the command line: exit status 2 for a user's mistake, 1 for a failure, no traceback.

    `POLYPHILY_DEBUG=1` shows the traceback.
    """
    try:
        app()
    except KeyboardInterrupt:
        _complain("interrupted")
        sys.exit(130)
    except PolyphilyError as error:
        if os.environ.get("POLYPHILY_DEBUG"):
            raise
        _complain(str(error))
        sys.exit(error.exit_status)
    except Exception as error:
        if os.environ.get("POLYPHILY_DEBUG"):
            raise
        if type(error).__name__ == "OutOfMemoryError":  # torch's, which is not imported here
            _complain(
                f"the GPU has no memory left. {str(error).partition('. ')[0]}.\n"
                "--memory 20GB, say, trains in turn what does not fit into that much; fewer seeds "
                "or --device cpu need less, too."
            )
            sys.exit(1)
        _complain(
            f"failed: {type(error).__name__}: {error}\n"
            "This is a failure of the run, not of your request. "
            "POLYPHILY_DEBUG=1 shows where it happened."
        )
        sys.exit(1)


def _complain(message: str) -> None:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print("error:", style="bold red", end=" ")
    console.print(message, markup=False)
