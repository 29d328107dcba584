"""`polyphily sweep`: runs over a grid of values, in one folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyphily.cli import completion, options, training
from polyphily.cli.jobs import Jobs, train_ahead
from polyphily.cli.training import AsJson, Config, Page, Set, Track, Tune
from polyphily.errors import TrainingError, UserError

if TYPE_CHECKING:
    from polyphily.experiments.sweeping import Point
    from polyphily.report.runs import Run
    from polyphily.runs.run import Execution
    from polyphily.runs.together import Together


def add_to(app: typer.Typer) -> None:
    app.command("sweep")(options.with_settings()(sweep))


def sweep(
    methods: Annotated[
        list[str],
        typer.Argument(
            help="The methods to run at every point.", autocompletion=completion.of("methods")
        ),
    ],
    vary: Annotated[
        list[str],
        typer.Option(
            "--vary",
            help="name=v1,v2,…: a hyperparameter, a setting, or data such as clients. Repeat for a "
            "grid. Separate values that contain commas with semicolons.",
            autocompletion=completion.varied,
        ),
    ],
    config: Config = None,
    set_: Set = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for the runs. [dim]\\[sweeps/…][/dim]")
    ] = None,
    as_json: AsJson = False,
    report: Page = True,
    track: Track = None,
    tune: Tune = None,
    jobs: Jobs = 1,
    **values: Any,
) -> None:
    """Run methods over a grid of values, such as hyperparameters, numbers of clients or noise.

    Finished runs are not repeated, so a command that was stopped can be started again.

    Points that differ only in lr and weight_decay are trained in one pass. With --tune 20, every
    method gets a search of 20 trials at every point, over what is neither varied nor set.
    """
    from polyphily.cli import terminal
    from polyphily.cli.reporting import Pages, write_page
    from polyphily.core.method import METHODS
    from polyphily.experiments.sweeping import plan_sweep, run_sweep
    from polyphily.report import runs
    from polyphily.runs import tracking
    from polyphily.runs.folder import safe_name
    from polyphily.runs.orders import TuneRequest

    tracking.check_trackers(track or ())
    wanted = TuneRequest.parse(tune) if tune else None
    names = list(dict.fromkeys(METHODS.find(name).name for name in methods))
    axes = dict(map(_axis, vary))
    if len(axes) < len(vary):
        raise UserError("--vary: a name is given twice; write all its values at once: name=v1,v2")
    request = options.gather(None, values, set_ or [], config)
    orders = plan_sweep(
        names,
        axes,
        request.data,
        request.seeds,
        request.settings,
        request.hyperparameters,
        assigned=request.assigned,
        tune=wanted,
    )
    data = Path(str(request.data["dataset"]).partition(":")[0]).name
    folder = out or Path("sweeps") / safe_name("-".join([*names, data, "by", *axes]))
    pages, numbers = Pages(report), {path: i for i, path in enumerate(orders, 1)}

    def announce(paths: Sequence[Path], more: str = "") -> None:
        which = _ranges([numbers[path] for path in paths])
        values = _values([orders[path][0] for path in paths])
        text = f"{which}/{len(orders)}  {', '.join([orders[paths[0]][1].method, *values])}{more}"
        terminal.err.print(text, style="dim", markup=False)

    def train(execution: Execution, done: int) -> dict[str, Any]:
        summary = training.train(execution, done, track or (), report)
        pages.add(execution)
        return summary

    def train_group(group: Together) -> None:
        announce([run.out.relative_to(folder) for run in group.runs if run.out], " in one pass")
        for execution in training.train_together(group, track or (), report):
            pages.add(execution)

    places = {folder / path: order for path, (_, order) in orders.items()}
    train_ahead(places, jobs, report=report, track=track or ())
    _, failed = run_sweep(
        orders,
        folder,
        train,
        train_group,
        announce=announce,
        tuner=training.tuner,
        on_failure=lambda path, error: terminal.notes([f"{folder / path}: {error}"]),
    )
    ended = [path for path in orders if path not in failed]
    found = [runs.Run.read(folder / path) for path in ended]
    at = [orders[path][0] for path in ended]
    if not found:
        raise next(iter(failed.values()))
    page = write_page(found, folder / training.PAGE) if report else None
    if as_json:
        rows = [
            {"folder": str(run.path), "method": run.method, "at": point, **_outcome(run)}
            for run, point in zip(found, at, strict=True)
        ]
        typer.echo(json.dumps(rows))
    else:
        _table(found, at, list(axes))
        terminal.print_line(f"runs: {folder}")
        if page:
            terminal.print_line(f"report: {page}")
        kind = "client-scale" if list(axes) == ["clients"] else "sensitivity"
        more = f" --against {next(iter(axes))}" if len(axes) > 1 else ""
        terminal.print_line(f"figure: polyphily plot {kind} {folder}{more} --out {kind}.pdf")
    if failed:
        paths = ", ".join(str(folder / path) for path in failed)
        raise TrainingError(f"{len(failed)} of {len(orders)} runs failed: {paths}")


# The request -------------------------------------------------------------------------------------


def _axis(text: str) -> tuple[str, list[str]]:
    """Parse a name and its values.

    >>> _axis("mu=0.1,1"), _axis("split=0.1,0.1,0.8;0.6,0.2,0.2")
    (('mu', ['0.1', '1']), ('split', ['0.1,0.1,0.8', '0.6,0.2,0.2']))
    """
    name, sign, rest = text.partition("=")
    parts = [part.strip() for part in rest.split(";" if ";" in rest else ",")]
    found = list(dict.fromkeys(filter(None, parts)))
    if not sign or not name.strip() or not found:
        raise UserError(f"--vary {text}: write name=v1,v2")
    return name.strip().replace("-", "_"), found


def _ranges(numbers: Sequence[int]) -> str:
    """Write numbers with consecutive ones as a range.

    >>> _ranges([1, 2, 3, 5])
    '1–3, 5'
    """
    ranges = []
    # In consecutive numbers, the difference between number and position is constant.
    for _, group in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        first, *rest = [number for _, number in group]
        ranges.append(f"{first}–{rest[-1]}" if rest else str(first))
    return ", ".join(ranges)


def _values(points: Sequence[Point]) -> list[str]:
    """Write each name with the values it has at some points.

    >>> _values([{"mu": "1", "lr": "0.01"}, {"mu": "1", "lr": "0.1"}])
    ['mu 1', 'lr 0.01, 0.1']
    """
    values = {name: dict.fromkeys(point[name] for point in points) for name in points[0]}
    return [f"{name} {', '.join(different)}" for name, different in values.items()]


# The results -------------------------------------------------------------------------------------


def _outcome(run: Run) -> dict[str, Any]:
    return {
        "config": {k: v for k, v in run.config.items() if k != "method"},
        "metric": run.metric,
        "val": run.validation,
        "test": run.score,
        "test_std": run.spread,
        "client_mean": run.test.get(f"{run.metric}_client_mean"),
        "seconds_per_round": run.summary["seconds_per_round_median"],
        "bytes_up_per_round": run.summary["bytes_up_per_round"],
    }


def _table(found: Sequence[Run], at: Sequence[Point], axes: Sequence[str]) -> None:
    from polyphily.cli import terminal
    from polyphily.cli.tables import Column, label, print_table
    from polyphily.report.words import WARM_UP, duration, in_warm_up, percent

    columns = [label(name.replace("_", "-")) for name in axes] + [label("method")]
    columns += [Column(name) for name in ("validation", "test", "client mean", "round")]
    best = max(run.validation or 0 for run in found)
    rows = []
    for run, point in zip(found, at, strict=True):
        spread = f" ± {percent(run.spread)}" if run.spread is not None else ""
        rows.append(
            (
                *[point.get(name, "–") for name in axes],
                run.method,
                percent(run.validation),
                percent(run.score) + spread + WARM_UP * in_warm_up(run.summary),
                percent(run.test.get(f"{run.metric}_client_mean")),
                duration(run.summary["seconds_per_round_median"]),
            )
        )
    terminal.out.print()
    terminal.out.print(f"[bold]{found[0].metric} in %[/bold], at the best validation round")
    styles = ["bold" * (run.validation == best) for run in found]
    print_table(terminal.out, columns, rows, keys=len(axes) + 1, styles=styles)
    seeds = f"{terminal.SEEDS}; " * any(run.spread is not None for run in found)
    terminal.out.print(
        f"[dim]{seeds}round: median time of a round; bold: the row that validation chooses[/dim]"
    )
    terminal.closing_notes([run.summary for run in found])
