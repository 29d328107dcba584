"""`polyphily demo`: a first look, with a live table while it trains."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyphily.cli import options, ranks
from polyphily.cli.comparing import Out, Task
from polyphily.cli.reporting import Open
from polyphily.cli.training import AsJson, Page

if TYPE_CHECKING:
    from rich.table import Table

    from polyphily.runs.run import Progress

DATA = {
    "dataset": "csbm:homophily=0.5,gap=0.8,spread=even,nodes=150-300",
    "clients": 6,
    "split": "0.1,0.3,0.6",
}
METHODS = ("local", "fedavg", "polyphony")
ROUNDS = 20
FULL_DATA = {**DATA, "dataset": DATA["dataset"].replace("150-300", "400-800"), "clients": 10}  # type: ignore[attr-defined]
FULL_METHODS = ("local", "fedavg", "fedprox", "fedspa", "fedgsp", "fedhero", "s2fgl", "fedath")
FULL_ROUNDS = 60
BAR = 16  # characters


def add_to(app: typer.Typer) -> None:
    app.command("demo")(ranks.on_all_ranks(demo))


def demo(
    out: Out = None,
    full: Annotated[
        bool,
        typer.Option(
            "--full",
            help="Ten larger clients, eight methods and 60 rounds; a minute or two.",
        ),
    ] = False,
    rounds: Annotated[
        int | None,
        typer.Option(help=f"Communication rounds. [dim]\\[{ROUNDS}, full: {FULL_ROUNDS}][/dim]"),
    ] = None,
    as_json: AsJson = False,
    report: Page = True,
    open_: Open = False,
) -> None:
    """Train methods on synthetic clients that differ in kind, as a first look.

    Six clients have homophily from 0.1 to 0.9, and labels for 10 % of their nodes. Each trains
    alone, then with the others.
    """
    from polyphily.cli import terminal

    names = FULL_METHODS if full else METHODS
    data = FULL_DATA if full else DATA
    number = rounds if rounds is not None else FULL_ROUNDS if full else ROUNDS
    request = options.gather(None, {"rounds": number, **data}, [], None)
    if not as_json:
        terminal.err.print(
            f"{data['clients']} synthetic clients, homophily 0.1 to 0.9, labels for 10 % of their "
            f"nodes; {len(names)} methods, {number} rounds each."
        )
    table = LiveTable(names)
    Task(list(names), out, [], as_json, report, live=table.live, open_=open_).one(request)


# While it trains ---------------------------------------------------------------------------------


@dataclass
class Row:
    """The progress of a method in the live table.

    Attributes:
        done: its complete rounds.
        rounds: their number in the end.
        scores: validation scores of the clients after the last round.
        mean: their mean, weighted by nodes.
        seconds: since its start.
    """

    done: int = 0
    rounds: int = 0
    scores: Sequence[float | None] = ()
    mean: float | None = None
    seconds: float = 0.0


@dataclass
class LiveTable:
    """A table of all methods, redrawn after every round; without a terminal, a line per method."""

    names: Sequence[str]
    rows: dict[str, Row] = field(default_factory=dict)

    @contextmanager
    def live(
        self, title: str, rounds: int, evaluated: str, metric: str, done: int = 0
    ) -> Iterator[Progress | None]:
        """Show the progress of one method inside the block, as `terminal.live` does."""
        from rich.live import Live

        from polyphily.cli import terminal
        from polyphily.core.method import VIEW_OF
        from polyphily.report.words import percent, span

        row = self.rows[title] = Row(done, rounds)
        view, began = VIEW_OF[evaluated], time.perf_counter()

        def note(record: dict[str, Any]) -> None:
            scores = record.get(view, {}).get("val", {})
            row.done, row.seconds = record["round"], time.perf_counter() - began
            row.scores = scores.get(f"{metric}_per_client", row.scores)
            row.mean = scores.get(metric, row.mean)

        if not terminal.err.is_terminal or terminal.err.is_dumb_terminal:
            yield note
            terminal.print_line(
                f"{title}: {row.done} rounds in {row.seconds:.1f} s, validation {metric} "
                f"{percent(row.mean, 1)} %, clients {span(row.scores, '–')}",
                error=True,
            )
            return
        with Live(self._table(metric), console=terminal.err, transient=True) as live:

            def show(record: dict[str, Any]) -> None:
                note(record)
                live.update(self._table(metric))

            yield show

    def _table(self, metric: str) -> Table:
        from rich.table import Table

        from polyphily.report.words import percent, span

        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for title in ("method", "", "round", f"val {metric}", "clients", "time"):
            table.add_column(title, justify="left" if title in ("method", "") else "right")
        for name in self.names:
            row = self.rows.get(name)
            if row is None:
                table.add_row(name, "waits", style="dim")
                continue
            full = round(BAR * row.done / max(row.rounds, 1))
            table.add_row(
                name,
                f"[cyan]{'━' * full}[/cyan][dim]{'━' * (BAR - full)}[/dim]",
                f"{row.done}/{row.rounds}",
                percent(row.mean, 1),
                span(row.scores, "–"),
                f"{row.seconds:.1f} s",
            )
        return table
