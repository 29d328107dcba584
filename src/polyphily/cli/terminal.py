"""Output of `run` and `compare`: a progress line while training, then tables of scores."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from polyphily.core.method import VIEW_OF
from polyphily.report.runs import show
from polyphily.report.words import WARM_UP, in_warm_up, percent, size, span
from polyphily.runs.run import Progress as RoundCallback
from polyphily.runs.searching import Report, Standing
from polyphily.runs.trials import Searched, SearchTrial

TOP = 5  # trials of a search that are printed
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


@contextmanager
def live(
    title: str, rounds: int, evaluated: str, metric: str, done: int = 0
) -> Iterator[RoundCallback | None]:
    """Show a progress line on standard error with round, validation score and time left.

    Yields:
        A function that takes the record of every round; None if standard error is no terminal.
    """
    if not err.is_terminal:
        yield None
        return
    view = VIEW_OF[evaluated]
    columns: list[ProgressColumn] = [
        SpinnerColumn(),
        TextColumn("[bold]{task.description}", table_column=None),
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        TextColumn("[cyan]{task.fields[score]}"),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
    ]
    with Progress(*columns, console=err, transient=False) as progress:
        task: TaskID = progress.add_task(f"{title:<9}", total=rounds, completed=done, score="")

        def report(record: dict[str, Any]) -> None:
            score = record.get(view, {}).get("val", {}).get(metric)
            if score is not None:
                known = f"val {metric} {percent(score, 1)}"
                progress.update(task, score=" ".join(filter(None, (record.get("stage"), known))))
            progress.update(task, completed=record["round"])

        yield report
        progress.update(task, total=progress.tasks[0].completed)


def print_line(text: str, *, error: bool = False) -> None:
    """Print a line as it is: paths in it are not wrapped, and brackets are not markup."""
    (err if error else out).print(text, soft_wrap=True, markup=False)


def notes(lines: Sequence[str]) -> None:
    """Print each different note once, on standard error."""
    for line in dict.fromkeys(lines):
        err.print(f"[yellow]note:[/yellow] {escape(line)}", soft_wrap=True)


@contextmanager
def searching(method: str, trials: int) -> Iterator[Report | None]:
    """Show a progress line of a search: the trial, its rounds, and the best score so far.

    Yields:
        A function that takes the standing of the search; None if standard error is no terminal.
    """
    if not err.is_terminal:
        yield None
        return
    columns: list[ProgressColumn] = [
        SpinnerColumn(),
        TextColumn("[bold]{task.description}", table_column=None),
        BarColumn(bar_width=20),
        TextColumn("[cyan]{task.fields[score]}"),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
    ]
    with Progress(*columns, console=err, transient=False) as progress:
        task = progress.add_task(f"{method} trials", total=None, score="")

        def report(now: Standing) -> None:
            best = "" if now.best is None else f"best val {now.metric} {percent(now.best, 1)}"
            progress.update(
                task,
                description=f"{now.method} trial {now.trial}/{now.trials}",
                total=now.trials * now.rounds,
                completed=(now.trial - 1) * now.rounds + now.round,
                score=best,
            )

        yield report
        progress.update(task, total=1, completed=1, description=f"{method} {trials} trials")


def trials(found: Searched) -> None:
    """Print the trials of a search on standard error: the best, and the defaults."""
    notes(found.notes)
    ranked = found.ranked()
    shown = ranked[:TOP]
    if found.trials[0] not in shown:
        shown.append(found.trials[0])
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("trial", f"val {found.metric}", "lr", "decay"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("values")
    if len(found.trials) == 1:  # rates alone were tried
        _add_rates(table, found.trials[0], found.view)
    for trial in shown if len(found.trials) > 1 else ():
        pair = trial.best(found.view)
        rates = (f"{pair.lr:g}", f"{pair.weight_decay:g}") if pair else ("–", "–")
        values = ", ".join(f"{name} {show(value)}" for name, value in trial.values.items())
        words = f"failed: {trial.failure}" if trial.failure else values
        table.add_row(
            str(trial.number) + (" defaults" if trial.number == 0 else ""),
            percent(trial.score(found.view)),
            *rates,
            escape(words),
            style="bold" if trial is found.best else "",
        )
    count = len(found.trials)
    words = f"{count} trials" if count > 1 else "rates tried"
    err.print(f"[bold]{found.method}[/bold]: {words}, chosen by validation (no test score is used)")
    err.print(table)


def _add_rates(table: Table, trial: SearchTrial, view: str) -> None:
    """Add a row for each pair of rates of a trial, the best first."""
    best = trial.best(view)
    for pair in sorted(trial.rates, key=lambda p: -(p.score(view) or -1.0)):
        table.add_row(
            "",
            percent(pair.score(view)),
            f"{pair.lr:g}",
            f"{pair.weight_decay:g}",
            escape(f"failed: {pair.failure}" if pair.failure else ""),
            style="bold" if pair is best else "",
        )


def one_run(summary: Mapping[str, Any], folder: Path) -> None:
    """Print the scores of a run: two views at the best, the last five and the last round."""
    metric = summary["selection"]["metric"]
    several = len(summary["seeds"]) > 1
    table = Table(title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("view")
    table.add_column("round")
    names = [metric] if metric == "accuracy" else ["accuracy", metric]
    for name in names:
        table.add_column(f"val {name}", justify="right")
        table.add_column(f"test {name}", justify="right")
    table.add_column("client mean", justify="right", no_wrap=True)
    table.add_column("client range", justify="right", no_wrap=True)
    own = VIEW_OF[summary["evaluated"]]
    for view in ("received", "trained"):
        for moment, label in (("best_val", "best val"), ("last5", "last 5"), ("final", "last")):
            scores = summary["views"][view][moment]
            cells = [
                _with_spread(scores[split], name, several)
                for name in names
                for split in ("val", "test")
            ]
            test = scores["test"]
            table.add_row(
                view if moment == "best_val" else "",
                label,
                *cells,
                percent(test.get(f"{names[-1]}_client_mean")),
                span(test.get(f"{names[-1]}_per_client", [])),
                style="bold" if view == own and moment == "best_val" else "",
            )
    out.print()
    out.print(f"[bold]{summary['method']}[/bold] on {escape(describe_data(summary))}")
    out.print(table)
    out.print(
        f"[dim]{summary['method']} is evaluated by the {own} model; "
        f"{1000 * summary['seconds_per_round_median']:.1f} ms a round, "
        f"{size(summary['bytes_up_per_round'])} up and "
        f"{size(summary['bytes_down_per_round'])} down a round[/dim]"
    )
    if tuning := summary.get("tuning"):
        failed = f", {tuning['failed']} of them failed" if tuning["failed"] else ""
        count = f"{tuning['trials']} trial{'s' if tuning['trials'] > 1 else ''}"
        out.print(f"[dim]tuned: {count}{failed}, see {tuning['file']}[/dim]")
    for stage in summary.get("stages", []):
        out.print(
            f"[dim]stage {stage['name']}: {stage['rounds']} rounds, {stage['seconds']:.1f} s, "
            f"{size(stage['bytes_up'])} up, {size(stage['bytes_down'])} down[/dim]"
        )
    closing_notes([summary])
    if sampling := summary.get("sampling"):
        drawn = " and ".join(str(number or "all") for number in sampling["neighbours"])
        out.print(
            f"[dim]sampled for every step: {sampling['train_nodes'] or 'all'} train nodes of each "
            f"client, {drawn} neighbours by layer[/dim]"
        )
    if summary.get("precision") in ("tf32", "bf16"):
        out.print(f"[dim]products in {summary['precision']}, scores in float32[/dim]")
    if dp := summary.get("dp"):
        out.print(
            f"[dim]privacy: epsilon {dp['epsilon']:.3g} at delta {dp['delta']:g} for all uploads "
            f"of a client; noise of deviation {dp['noise_deviation']:.3g} on every number[/dim]"
        )
    print_line(f"run folder: {folder}")


def comparison(summaries: Sequence[Mapping[str, Any]]) -> None:
    """Print several methods side by side, each in its own view at its best validation round."""
    metric = summaries[0]["selection"]["metric"]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, justify in (
        ("method", "left"),
        ("test", "right"),
        ("client mean", "right"),
        ("client range", "right"),
        ("view", "left"),
        ("ms/round", "right"),
        ("up/round", "right"),
    ):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    values = [summary["best_val"]["test"].get(metric) or 0 for summary in summaries]
    for summary, value in zip(summaries, values, strict=True):
        test = summary["best_val"]["test"]
        per_client = test.get(f"{metric}_per_client", [])
        clients = [v for v in per_client if v is not None]
        deviation = f" ± {percent(statistics.stdev(clients))}" if len(clients) > 1 else ""
        table.add_row(
            summary["method"] + WARM_UP * in_warm_up(summary),
            _with_spread(test, metric, len(summary["seeds"]) > 1),
            percent(test.get(f"{metric}_client_mean")) + deviation,
            span(per_client),
            VIEW_OF[summary["evaluated"]],
            f"{1000 * summary['seconds_per_round_median']:.1f}",
            size(summary["bytes_up_per_round"]),
            style="bold" if value == max(values) else "",
        )
    out.print()
    out.print(f"[bold]Test {metric} in %[/bold] on {escape(describe_data(*summaries))}")
    out.print(table)
    out.print("[dim]at the best validation round; client mean ± deviation between clients[/dim]")
    closing_notes(summaries)


def closing_notes(summaries: Sequence[Mapping[str, Any]]) -> None:
    """Print methods' remarks, and which best rounds are such in which the method did nothing."""
    for summary in summaries:
        for remark in summary.get("remarks", []):
            out.print(f"[yellow]note: {escape(summary['method'])}: {escape(remark)}[/yellow]")
    for note in dict.fromkeys(s["warm_up"]["note"] for s in summaries if in_warm_up(s)):
        out.print(f"[yellow]{WARM_UP if len(summaries) > 1 else 'note:'} {escape(note)}[/yellow]")


def describe_data(*summaries: Mapping[str, Any]) -> str:
    """Return the data, network and length of a run in one line; backbones, if there are several."""
    summary = summaries[0]
    key = "network" if len(summaries) == 1 and "network" in summary else "backbone"
    networks = dict.fromkeys(run[key] for run in summaries)
    partition, seeds = summary["partition"], summary["seeds"]
    numbers = f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {', '.join(map(str, seeds))}"
    return (
        f"{summary['dataset']}, {partition['clients']} clients ({partition['name']}), "
        f"split {summary['split']}, {', '.join(networks)}, {summary['rounds']} rounds of "
        f"{summary['epochs']} epochs, {numbers}"
    )


def _with_spread(scores: Mapping[str, Any], metric: str, several: bool) -> str:
    text = percent(scores.get(metric))
    deviation = scores.get(f"{metric}_std")
    return f"{text} ± {percent(deviation)}" if several and deviation is not None else text
