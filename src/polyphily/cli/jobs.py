"""`--jobs`: several runs at once, each in a process of its own, with one display for all."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TaskID, TextColumn

from polyphily.errors import UserError

if TYPE_CHECKING:
    from polyphily.runs.jobs import Standing
    from polyphily.runs.orders import Order
    from polyphily.runs.run import Execution
    from polyphily.runs.together import Together

Jobs = Annotated[
    int,
    typer.Option(
        "--jobs",
        min=1,
        help="How many runs train at once, each in a process of its own, on all cores or GPUs.",
    ),
]
SHOWN = 3  # names of running jobs in the display


@dataclass(frozen=True)
class Display:
    """Shows which jobs are running; `line` prints a line above."""

    console: Console
    progress: Progress | None = None
    task: TaskID | None = None

    def line(self, text: str) -> None:
        console = self.progress.console if self.progress else self.console
        console.print(text, style="dim", markup=False, soft_wrap=True)

    def watch(self, now: Standing) -> None:
        if self.progress is None or self.task is None:
            return
        more = f" and {len(now.running) - SHOWN} more" * (len(now.running) > SHOWN)
        self.progress.update(
            self.task,
            description=f"{now.ended}/{now.total}",
            completed=now.ended,
            total=now.total,
            names="; ".join(now.running[:SHOWN]) + more,
        )


@contextmanager
def display() -> Iterator[Display]:
    """Show a progress line on standard error, if that is a terminal."""
    from polyphily.cli.terminal import err

    if not err.is_terminal:
        yield Display(err)
        return
    columns: list[ProgressColumn] = [
        SpinnerColumn(),
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("[cyan]{task.fields[names]}"),
    ]
    with Progress(*columns, console=err, transient=True) as progress:
        yield Display(err, progress, progress.add_task("", total=None, names=""))


def train_ahead(
    orders: Mapping[Path, Order],
    jobs: int,
    *,
    report: bool = True,
    track: Sequence[str] = (),
) -> None:
    """Train unfinished runs in several processes; their folders then have the summaries.

    Runs that differ only in learning rate and decay stay together in one pass. What fails is left
    to the caller, who finds it unfinished.

    Args:
        orders: of all runs, by folder.
        jobs: how many processes.
        report: whether to store what the report needs.
        track: trackers, which cannot be used here.
    """
    if jobs == 1:
        return
    if track:
        raise UserError("--jobs: trackers follow one run at a time; leave out --track or --jobs")
    from polyphily.runs import runner
    from polyphily.runs.jobs import Job, run_jobs

    groups = runner.groups(orders)
    together = {folder for group in groups for folder in group}
    groups += [
        {folder: order}
        for folder, order in orders.items()
        if folder not in together and not runner.is_finished(order, folder)
    ]
    devices = {str(order.settings.get("device", "cpu")) for order in orders.values()}
    work = [
        Job(", ".join(map(_name, group)), partial(_train_quietly, group, report))
        for group in groups
    ]
    with display() as shown:
        for ended in run_jobs(work, jobs, device=max(devices), watch=shown.watch):
            text = ended.failure or f"{ended.seconds:.1f} s"
            shown.line(f"{ended.job.name}: {text}")


def _name(folder: Path) -> str:
    return "/".join(folder.parts[-2:])


def _train_quietly(orders: Mapping[Path, Order], report: bool) -> None:
    """Train runs in a process beside others: without a display."""
    from polyphily.cli import terminal, training
    from polyphily.cli.reporting import Pages
    from polyphily.runs import runner

    terminal.err = Console(file=io.StringIO())
    pages = Pages(report)

    def train(execution: Execution, done: int) -> dict[str, object]:
        summary = training.train(execution, done, evidence=report)
        pages.add(execution)
        return summary

    def train_group(group: Together) -> None:
        for execution in training.train_together(group, evidence=report):
            pages.add(execution)

    if len(orders) > 1:
        runner.run_together(orders, train_group)
    for folder, order in orders.items():
        runner.run(order, folder, train, tuner=training.tuner)
