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

from polyphily.cli.tables import Column, label, print_table, text
from polyphily.core.method import VIEW_OF
from polyphily.report.runs import show
from polyphily.report.words import (
    WARM_UP,
    decision_words,
    duration,
    in_warm_up,
    length,
    percent,
    size,
    span,
)
from polyphily.runs.assessment import baseline_name
from polyphily.runs.run import Progress as RoundCallback
from polyphily.runs.searching import Report, Standing
from polyphily.runs.trials import Searched, SearchTrial

TOP = 5  # trials of a search that are printed
MOMENTS = {"best_val": "best val", "last5": "last 5", "final": "last"}
VIEWS = (
    "received: the model that the server sends; trained: each client's model after local training"
)
TRIVIAL = {  # by assessment.baseline_name
    "majority class": "each client's most frequent class for all its nodes",
    "random ranking": "nodes ranked by chance",
}
SEEDS = "±: standard deviation over seeds"
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
    """Print a line as it is: not wrapped, and brackets and ":AB:" have no special meaning."""
    (err if error else out).print(text, soft_wrap=True, markup=False, emoji=False)


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
    columns = [Column(title) for title in ("trial", f"val {found.metric}", "lr", "decay")]
    if len(found.trials) == 1:  # rates alone were tried
        rows = _rate_rows(found.trials[0], found.view)
    else:
        rows = [(_trial_row(trial, found.view), trial is found.best) for trial in shown]
    count = len(found.trials)
    words = f"{count} trials" if count > 1 else "rates tried"
    err.print(f"[bold]{found.method}[/bold]: {words}, chosen by validation (no test score is used)")
    print_table(
        err,
        [*columns, text("values")],
        [cells for cells, _ in rows],
        styles=["bold" * best for _, best in rows],
    )


def _trial_row(trial: SearchTrial, view: str) -> tuple[str, ...]:
    pair = trial.best(view)
    rates = (f"{pair.lr:g}", f"{pair.weight_decay:g}") if pair else ("–", "–")
    values = ", ".join(f"{name} {show(value)}" for name, value in trial.values.items())
    return (
        str(trial.number) + (" defaults" if trial.number == 0 else ""),
        percent(trial.score(view)),
        *rates,
        f"failed: {trial.failure}" if trial.failure else values,
    )


def _rate_rows(trial: SearchTrial, view: str) -> list[tuple[tuple[str, ...], bool]]:
    """Return a row for each pair of rates of a trial, the best first, and whether it is best."""
    best = trial.best(view)
    return [
        (
            (
                "",
                percent(pair.score(view)),
                f"{pair.lr:g}",
                f"{pair.weight_decay:g}",
                f"failed: {pair.failure}" if pair.failure else "",
            ),
            pair is best,
        )
        for pair in sorted(trial.rates, key=lambda p: -(p.score(view) or -1.0))
    ]


def one_run(summary: Mapping[str, Any], folder: Path) -> None:
    """Print the scores of a run: two views at the best, the last five and the last round."""
    metric = summary["selection"]["metric"]
    own = VIEW_OF[summary["evaluated"]]
    out.print()
    out.print(f"[bold]{summary['method']}[/bold] on {escape(describe_data(summary))}")
    metrics = list(dict.fromkeys((metric, "accuracy", *_lopsided(summary))))
    for name in metrics:
        out.print(f"\n[bold]{escape(name)}[/bold] in %")
        _print_scores(summary, name, own)
    out.print(
        f"[dim]{summary['method']} is evaluated by the {own} model (bold). {VIEWS}. "
        f"{_baselines(summary, *metrics)}"
        f"{SEEDS + '. ' if len(summary['seeds']) > 1 else ''}"
        f"A round takes {duration(summary['seconds_per_round_median'])} and sends "
        f"{size(summary['bytes_up_per_round'])} up and "
        f"{size(summary['bytes_down_per_round'])} down.[/dim]"
    )
    if words := decision_words(summary):
        out.print(f"[dim]{escape(words)}[/dim]")
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


def _print_scores(summary: Mapping[str, Any], metric: str, own: str) -> None:
    """Print one metric of a run: both views at the best, the last five and the last round."""
    columns = [label("view"), label("round")]
    columns += [Column(title) for title in ("val", "test", "client mean", "client range")]
    rows, styles = [], []
    for view in ("received", "trained"):
        for moment, name in MOMENTS.items():
            scores = summary["views"][view][moment]
            test = scores["test"]
            rows.append(
                (
                    view if moment == "best_val" else "",
                    name,
                    _with_spread(scores["val"], metric, summary),
                    _with_spread(test, metric, summary),
                    percent(test.get(f"{metric}_client_mean")),
                    span(test.get(f"{metric}_per_client", [])),
                )
            )
            styles.append("bold" if view == own and moment == "best_val" else "")
    if trivial := summary.get("baseline"):
        rows.append((_baseline(metric), "", *_trivial(trivial, metric, summary)))
        styles.append("dim")
    print_table(out, columns, rows, keys=2, styles=styles)


def _trivial(
    trivial: Mapping[str, Any], metric: str, summary: Mapping[str, Any]
) -> tuple[str, str, str, str]:
    """Return the cells of the trivial predictor's scores: val, test, client mean, client range."""
    test = trivial["test"]
    return (
        _with_spread(trivial["val"], metric, summary),
        _with_spread(test, metric, summary),
        percent(test.get(f"{metric}_client_mean")),
        span(test.get(f"{metric}_per_client", [])),
    )


def _baseline(metric: str) -> str:
    """Return the name of the trivial predictor in one word, so that its column stays narrow."""
    return baseline_name(metric).split()[0]


def _baselines(summary: Mapping[str, Any], *metrics: str) -> str:
    """Return the legend of the rows of trivial predictors beside these metrics."""
    if not summary.get("baseline"):
        return ""
    words = [f"{_baseline(metric)}: {TRIVIAL[baseline_name(metric)]}. " for metric in metrics]
    return "".join(dict.fromkeys(words))


def _lopsided(summary: Mapping[str, Any]) -> list[str]:
    """Return balanced accuracy if the largest of many classes has more than half of the nodes."""
    share = summary.get("baseline", {}).get("test", {}).get("accuracy")
    many = len(summary["classes"]) > 2
    return ["balanced_accuracy"] if many and share is not None and share > 0.5 else []


def comparison(summaries: Sequence[Mapping[str, Any]]) -> None:
    """Print several methods side by side, each in its own view at its best validation round."""
    metric = summaries[0]["selection"]["metric"]
    columns = [label("method"), *map(Column, ("test", "client mean", "client range"))]
    columns += [label("view"), *map(Column, ("round", "upload"))]
    values = [summary["best_val"]["test"].get(metric) or 0 for summary in summaries]
    rows = []
    for summary in summaries:
        test = summary["best_val"]["test"]
        per_client = test.get(f"{metric}_per_client", [])
        clients = [v for v in per_client if v is not None]
        deviation = f" ± {percent(statistics.stdev(clients), 1)}" if len(clients) > 1 else ""
        rows.append(
            (
                summary["method"] + WARM_UP * in_warm_up(summary),
                _with_spread(test, metric, summary),
                percent(test.get(f"{metric}_client_mean"), 1) + deviation,
                span(per_client, "–"),
                VIEW_OF[summary["evaluated"]],
                duration(summary["seconds_per_round_median"]),
                size(summary["bytes_up_per_round"]),
            )
        )
    styles = ["bold" * (v == max(values)) for v in values]
    if trivial := summaries[0].get("baseline"):
        test = trivial["test"]
        cells = (
            _with_spread(test, metric, summaries[0]),
            percent(test.get(f"{metric}_client_mean"), 1),
            span(test.get(f"{metric}_per_client", []), "–"),
        )
        rows.append((_baseline(metric), *cells, "", "", ""))
        styles.append("dim")
    out.print()
    out.print(f"[bold]Test {escape(metric)} in %[/bold] on {escape(describe_data(*summaries))}")
    print_table(out, columns, rows, styles=styles)
    seeds = "test ± standard deviation over seeds, " * (len(summaries[0]["seeds"]) > 1)
    out.print(
        f"[dim]At the best validation round: {seeds}client mean ± standard deviation over clients. "
        f"{VIEWS}. {_baselines(summaries[0], metric)}"
        "round: median time of a round; upload: sent by all clients in a round.[/dim]"
    )
    closing_notes(summaries)


def closing_notes(summaries: Sequence[Mapping[str, Any]]) -> None:
    """Print methods' remarks, and which best rounds are such in which the method did nothing."""
    said: dict[str, list[str]] = {}
    for summary in summaries:
        for remark in summary.get("remarks", []):
            said.setdefault(remark, []).append(summary["method"])
    for remark, methods in said.items():
        whose = "" if len(methods) == len(summaries) else f"{', '.join(methods)}: "
        out.print(f"[yellow]note: {escape(whose + remark)}[/yellow]")
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
        f"{_from_here(summary['dataset'])}, {partition['clients']} client"
        f"{'s' * (partition['clients'] != 1)} ({partition['name']}), "
        f"split {summary['split']}, {', '.join(networks)}, "
        f"{length(summary['rounds'], summary['epochs'])}, {numbers}"
    )


def _from_here(dataset: str) -> str:
    """Return a dataset's name; a file or folder below the working folder is named from there."""
    path, here = Path(dataset), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else dataset


def _with_spread(scores: Mapping[str, Any], metric: str, summary: Mapping[str, Any]) -> str:
    deviation = scores.get(f"{metric}_std") if len(summary["seeds"]) > 1 else None
    found = percent(scores.get(metric))
    return found if deviation is None else f"{found} ± {percent(deviation)}"
