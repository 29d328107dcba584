"""`polyphily watch`: the report page of a run while it goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polyphily.cli import completion
from polyphily.errors import UserError

if TYPE_CHECKING:
    from polyphily.report.serving import LivePage

PORT = 8766
LOOK = 1.0  # seconds between two looks at the runs


def add_to(app: typer.Typer) -> None:
    app.command("watch")(watch)


def watch(
    folder: Annotated[
        Path,
        typer.Argument(
            help="A run folder, or a folder with runs in it. It need not exist yet.",
            metavar="RUN",
            autocompletion=completion.run_folder,
        ),
    ],
    port: Annotated[
        int | None,
        typer.Option(
            "--port",
            help=f"The port on 127.0.0.1; 0 takes one that is free. [dim]\\[{PORT}, else a free "
            "one][/dim]",
            min=0,
            max=65535,
        ),
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Serve the report page of a run on this machine while the run goes on.

    The page updates itself. Nothing leaves the machine. Ctrl-C ends the page, not the run.
    """
    from polyphily.cli import terminal
    from polyphily.report.serving import LivePage

    if folder.is_file():
        raise UserError(f"{folder} is a file: name the run folder, as in polyphily watch runs/…")
    live = LivePage(folder)
    with ExitStack() as stack:
        address = stack.enter_context(_served(live, port))
        terminal.print_line(f"watching {folder}: {address}  (Ctrl-C ends the page, not the run)")
        if open_:
            import webbrowser

            webbrowser.open(address)
        try:
            _show(live)
        except KeyboardInterrupt:
            terminal.print_line("ended", error=True)


@contextmanager
def _served(live: LivePage, port: int | None) -> Iterator[str]:
    """Serve the page at a port; if none is asked for, at the usual one or any that is free."""
    from polyphily.report.serving import serving

    with ExitStack() as stack:
        try:
            address = stack.enter_context(serving(live, PORT if port is None else port))
        except OSError as error:
            if port is not None:
                raise UserError(
                    f"--port {port}: {error.strerror}. Choose another, or 0 for one that is free"
                ) from None
            address = stack.enter_context(serving(live, 0))
        yield address


def _show(live: LivePage) -> None:
    """Show until Ctrl-C where the runs stand: in one line of a terminal, else whenever it changes.

    Without a terminal the rounds are not shown, only starts and ends.
    """
    from rich.markup import escape

    from polyphily.cli import terminal

    if terminal.err.is_terminal:
        with terminal.err.status("looking") as status:
            while True:
                status.update(escape(live.state()["words"]))
                time.sleep(LOOK)
    before = None
    while True:
        state = live.state()
        now = [(run["name"], run["state"]) for run in state["runs"]]
        if now != before:
            terminal.print_line(state["words"], error=True)
        before = now
        time.sleep(LOOK)
