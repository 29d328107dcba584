"""`polyphily sweep`: runs over a grid of values, in one folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import groupby, product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

from polyphily.cli import options, training
from polyphily.cli.training import AsJson, Config, Page, Set, Track
from polyphily.core.settings import Settings, from_mapping
from polyphily.errors import TrainingError, UserError, unknown

if TYPE_CHECKING:
    from polyphily.core.method import Method
    from polyphily.papers.plan import Order
    from polyphily.report.runs import Run
    from polyphily.runs.run import Execution
    from polyphily.runs.together import Together

EVERYWHERE = {*options.DATA, *get_type_hints(Settings)} - {"seeds"}  # can be varied for any method

Point = dict[str, str]
"""One value for each name that is varied."""


def add_to(app: typer.Typer) -> None:
    app.command("sweep")(options.with_settings()(sweep))


def sweep(
    methods: Annotated[list[str], typer.Argument(help="The methods to run at every point.")],
    vary: Annotated[
        list[str],
        typer.Option(
            "--vary",
            help="name=v1,v2,…: a hyperparameter, a setting, or data such as clients. Repeat for a "
            "grid. Separate values that contain commas with semicolons.",
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
    **values: Any,
) -> None:
    """Run methods over a grid of values, such as hyperparameters, numbers of clients or noise.

    Finished runs are not repeated, so a command that was stopped can be started again.

    Points that differ only in lr and weight_decay are trained in one pass.
    """
    from polyphily.cli import terminal
    from polyphily.cli.reporting import Pages, write_page
    from polyphily.core.method import METHODS, settable
    from polyphily.papers import runner
    from polyphily.report import runs
    from polyphily.runs import tracking
    from polyphily.runs.folder import safe_name

    tracking.check_trackers(track or ())
    names = list(dict.fromkeys(METHODS.find(name).name for name in methods))
    axes = dict(map(_axis, vary))
    if len(axes) < len(vary):
        raise UserError("--vary: a name is given twice; write all its values at once: name=v1,v2")
    request = options.gather(None, values, set_ or [], config)
    known = {name: settable(name) for name in names}
    _check(axes, request, known)
    points = [dict(zip(axes, chosen, strict=True)) for chosen in product(*axes.values())]
    data = Path(str(request.data["dataset"]).partition(":")[0]).name
    folder = out or Path("sweeps") / safe_name("-".join([*names, data, "by", *axes]))
    orders: dict[Path, tuple[Point, Order]] = {}
    for point in points:
        for name in names:
            own = {n: v for n, v in point.items() if n in known[name] or n in EVERYWHERE}
            order = _order(name, request, own, known[name])
            path = folder / name / _folder_name(own)
            # Different values may have the same file name, which has no special characters.
            while path in orders and orders[path][1] != order:
                path = path.with_name(f"{path.name}-2")
            orders[path] = own, order
    _check_effects(orders.values(), request.assigned)
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
        announce([run.out for run in group.runs if run.out], " in one pass")
        for execution in training.train_together(group, track or (), report):
            pages.add(execution)

    groups = runner.groups({path: order for path, (_, order) in orders.items()})
    in_one_pass = {next(iter(group)): group for group in groups}
    failed: dict[Path, TrainingError] = {}
    for path, (_, order) in orders.items():
        if path in in_one_pass:
            runner.run_together(in_one_pass[path], train_group)
        if not runner.is_finished(order, path):
            announce([path])
        try:
            runner.run(order, path, train)
        except TrainingError as error:  # go on with the other points
            failed[path] = error
            terminal.notes([f"{path}: {error}"])
    found = [runs.Run.read(path) for path in orders if path not in failed]
    at = [orders[run.path][0] for run in found]
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
        paths = ", ".join(map(str, failed))
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


def _check(
    axes: dict[str, list[str]], request: options.Request, known: dict[str, set[str]]
) -> None:
    """Raise a `UserError` for a name that cannot be varied, or that no method has.

    Args:
        axes: the values of every name that is varied.
        request: everything else that was asked for.
        known: the hyperparameters of every method.
    """
    hyper = set().union(*known.values())
    for name in axes:
        if name == "seeds":
            raise UserError("--vary seeds: seeds are trained side by side: give --seeds 0,1,2")
        if name not in EVERYWHERE | hyper:
            raise unknown("name to vary", name, EVERYWHERE | hyper)
    for name in request.hyperparameters:
        if name not in hyper:
            raise unknown("hyperparameter", name, hyper)


def _order(method: str, request: options.Request, point: Point, own: set[str]) -> Order:
    """Return the order for the run of one method at one point.

    `own` are the hyperparameters of the method.
    """
    from polyphily.core.method import create
    from polyphily.papers.plan import Order

    hyper = {n: v for n, v in request.hyperparameters.items() if n in own}
    data, settings = dict(request.data), dict(request.settings)
    for name, value in point.items():
        if name in own:
            hyper[name] = value
        elif name in options.DATA:
            data[name] = _typed(name, value, options.DATA[name][0])
        else:
            settings[name] = _typed(name, value, get_type_hints(Settings)[name])
    create(method, hyper)  # refuses impossible values before anything runs
    from_mapping(settings)
    return Order(method, hyper, data, tuple(request.seeds), settings)


def _check_effects(orders: Iterable[tuple[Point, Order]], assigned: frozenset[str]) -> None:
    """Raise a `UserError` for a name that was set or varied and changes nothing at any point."""
    from polyphily.core.method import check_effects, create

    acting: set[tuple[str, str]] = set()
    idle: dict[tuple[str, str], Method] = {}
    for point, order in orders:
        method = create(order.method, order.hyperparameters)
        without = method.without_effect()
        for name in (point.keys() | assigned) & order.hyperparameters.keys():
            if name in without:
                idle[order.method, name] = method
            else:
                acting.add((order.method, name))
    for pair, method in idle.items():
        if pair not in acting:
            check_effects(method, [pair[1]])


def _typed(name: str, text: str, kind: Any) -> Any:
    """Convert a value of --vary to the type of the setting or the data option."""
    kinds = [k for k in get_args(kind) or (kind,) if k is not type(None)]
    if bool in kinds:
        truth = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}
        if text.lower() in truth:
            return truth[text.lower()]
    for wanted in (int, float, str):
        if wanted in kinds:
            try:
                return wanted(text)
            except ValueError:
                continue
    raise UserError(f"--vary {name}: '{text}' is not a possible value")


def _folder_name(point: Point) -> str:
    from polyphily.runs.folder import safe_name

    return safe_name("_".join(f"{n}={v}" for n, v in point.items())) if point else "as-it-is"


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
    from rich.table import Table

    from polyphily.cli import terminal
    from polyphily.report.words import WARM_UP, in_warm_up, percent

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in axes:
        table.add_column(name.replace("_", "-"))
    table.add_column("method")
    for name in ("validation", "test", "client mean", "ms/round"):
        table.add_column(name, justify="right", no_wrap=True)
    best = max(run.validation or 0 for run in found)
    for run, point in zip(found, at, strict=True):
        spread = f" ± {percent(run.spread)}" if run.spread is not None else ""
        table.add_row(
            *[point.get(name, "–") for name in axes],
            run.method,
            percent(run.validation),
            percent(run.score) + spread + WARM_UP * in_warm_up(run.summary),
            percent(run.test.get(f"{run.metric}_client_mean")),
            f"{1000 * run.summary['seconds_per_round_median']:.1f}",
            style="bold" if run.validation == best else "",
        )
    terminal.out.print()
    terminal.out.print(f"[bold]{found[0].metric} in %[/bold], at the best validation round")
    terminal.out.print(table)
    terminal.out.print("[dim]bold: the row that validation chooses[/dim]")
    terminal.closing_notes([run.summary for run in found])
