"""Sweeps: methods over a grid of values, each point an ordinary run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, get_args, get_type_hints

from polyphily.core import settings as knobs
from polyphily.core.method import Method, check_effects, create, settable
from polyphily.core.settings import Settings, from_mapping
from polyphily.errors import TrainingError, UserError, unknown
from polyphily.experiments.comparing import Federations, as_list, method_names, order_of
from polyphily.graphs.loading import Federation
from polyphily.report.grids import Grid, to_markdown
from polyphily.report.words import percent
from polyphily.runs import runner
from polyphily.runs.folder import safe_name
from polyphily.runs.orders import RATES, Order, TuneRequest
from polyphily.runs.together import Together

DATA: dict[str, type] = {
    "dataset": str,
    "partition": str,
    "clients": int,
    "split": str,
    "normalize": str,
    "encoding": str,
    "noise": str,
}
"""The arguments of `load` that can be varied, with their types."""
EVERYWHERE = {*DATA, *get_type_hints(Settings)}  # can be varied for any method

Point = dict[str, str]
"""One value for each name that is varied."""
Plan = dict[Path, tuple[Point, Order]]
"""The point and the order of every run, by its place below the folder of the sweep."""


@dataclass(frozen=True)
class SweepRun:
    """A run of a sweep.

    Attributes:
        method: the name of the method.
        at: the values of the names that are varied.
        summary: of the run.
        folder: the run folder, if one was asked for.
    """

    method: str
    at: Point
    summary: Mapping[str, Any]
    folder: Path | None = None

    @property
    def validation(self) -> float | None:
        """The validation score at the best validation round, mean over seeds."""
        return self._score("val")

    @property
    def test(self) -> float | None:
        """The test score at the best validation round, mean over seeds."""
        return self._score("test")

    def _score(self, split: str) -> float | None:
        metric = self.summary["selection"]["metric"]
        value: float | None = self.summary["best_val"][split].get(metric)
        return value


@dataclass(frozen=True)
class Sweep:
    """The outcome of a sweep.

    Attributes:
        axes: the names that were varied.
        runs: the runs that ended, in order.
        failures: why runs did not end, by their place.
        folder: the folder of the runs, if one was asked for.
    """

    axes: Sequence[str]
    runs: Sequence[SweepRun]
    failures: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None

    @property
    def best(self) -> SweepRun:
        """The run that validates best."""
        return max(self.runs, key=lambda run: run.validation or -1.0)

    def table(self) -> str:
        """Return the scores of all runs as a table in Markdown."""
        rows = [
            [
                *[run.at.get(name, "–") for name in self.axes],
                run.method,
                percent(run.validation),
                percent(run.test),
            ]
            for run in self.runs
        ]
        return to_markdown(Grid("", [*self.axes, "method", "validation", "test"], rows)) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        runs = [
            {"method": run.method, "at": run.at, "val": run.validation, "test": run.test}
            for run in self.runs
        ]
        return {"axes": list(self.axes), "runs": runs, "failed": dict(self.failures)}


def sweep(
    methods: str | Sequence[str],
    data: Federations | str | Mapping[str, Any],
    vary: Mapping[str, Sequence[Any]],
    *,
    seeds: Sequence[int] = (0,),
    tune: int = 0,
    rates: Mapping[str, Sequence[float]] | None = None,
    out: str | Path | None = None,
    report: Callable[[str], None] | None = None,
    **options: Any,
) -> Sweep:
    """Run methods over a grid of values.

    >>> import polyphily
    >>> data = {"dataset": "csbm:nodes=60,features=8", "clients": 2}
    >>> found = polyphily.sweep("fedprox", data, {"mu": [0.1, 1]}, rounds=2, hidden=8)
    >>> [run.at for run in found.runs]
    [{'mu': '0.1'}, {'mu': '1'}]

    Args:
        methods: one or several names of methods.
        data: a dataset's name, or arguments of `polyphily.load`, of which some may be varied; or
            federations that are loaded already.
        vary: the values of each name: hyperparameters, settings, or arguments of `load`.
        seeds: of partition, split and weights, trained side by side. Loaded federations have
            their own.
        tune: at every point, search with as many trials for what is not varied or set; 0 does not.
        rates: with `tune`, the learning rates and decays that every trial combines.
        out: the folder of the runs; none unless given. A sweep that was stopped goes on if it is
            called again.
        report: called with a line of text as each run begins.
        **options: settings, and hyperparameters, which are used for the methods that have them.

    Raises:
        UserError: for unknown names and values out of bounds.
        TrainingError: if every run failed.
    """
    names = method_names([methods] if isinstance(methods, str) else methods)
    axes = {name: [str(value) for value in values] for name, values in vary.items()}
    loaded: list[Federation] | None = None
    if isinstance(data, str | Mapping):
        request = {"dataset": data} if isinstance(data, str) else dict(data)
    else:
        loaded, request = as_list(data), {}
        if fixed := axes.keys() & DATA.keys():
            raise UserError(
                f"sweep: {', '.join(sorted(fixed))} cannot be varied on federations that are "
                "loaded already: give the arguments of load instead"
            )
    settings = {k: v for k, v in options.items() if k in knobs.names()}
    given = {k: v for k, v in options.items() if k not in settings}
    plan = plan_sweep(
        names,
        axes,
        request,
        seeds,
        settings,
        given,
        assigned=frozenset(given),
        tune=TuneRequest(tune, dict(rates or {})) if tune or rates else None,
    )
    if loaded:
        plan = {
            path: (
                point,
                order_of(order.method, order.hyperparameters, loaded, order.settings, order.tune),
            )
            for path, (point, order) in plan.items()
        }
    folder = Path(out) if out else None

    def announce(paths: Sequence[Path]) -> None:
        for path in paths if report else ():
            assert report
            report(str(path))

    summaries, failures = run_sweep(
        plan,
        folder,
        lambda execution, done: execution.go().summary,
        lambda group: group.go([lambda _: None] * len(group.runs)),
        announce=announce,
        loaded=loaded,
    )
    if not summaries:
        raise next(iter(failures.values()))
    found = [
        SweepRun(plan[path][1].method, plan[path][0], summary, folder and folder / path)
        for path, summary in summaries.items()
    ]
    return Sweep(list(axes), found, {str(p): str(e) for p, e in failures.items()}, folder)


# The grid ----------------------------------------------------------------------------------------


def plan_sweep(
    names: Sequence[str],
    axes: Mapping[str, Sequence[str]],
    data: Mapping[str, Any],
    seeds: Sequence[int],
    settings: Mapping[str, Any],
    hyperparameters: Mapping[str, Any],
    *,
    assigned: frozenset[str],
    tune: TuneRequest | None = None,
) -> Plan:
    """Return the runs of a sweep.

    Args:
        names: the methods.
        axes: the values of every name that is varied.
        data: arguments of `load`, without the seed.
        seeds: trained side by side.
        settings: of all runs.
        hyperparameters: used for the methods that have them.
        assigned: those of them that must have an effect.
        tune: the search before every run.

    Raises:
        UserError: for a name that cannot be varied or set, and values that are impossible or idle.
    """
    known = {name: settable(name) for name in names}
    _check(axes, hyperparameters, known)
    if tune and (both := [name for name in axes if name in RATES]):
        raise UserError(
            f"sweep: {', '.join(both)} cannot be varied and tuned at once, because every trial "
            "tries several learning rates and decays: leave out --vary or --tune"
        )
    plan: Plan = {}
    for chosen in product(*axes.values()):
        point = dict(zip(axes, chosen, strict=True))
        for name in names:
            own = {n: v for n, v in point.items() if n in known[name] or n in EVERYWHERE}
            hyper = {n: v for n, v in hyperparameters.items() if n in known[name]}
            order = _order(
                name,
                own,
                known[name],
                Order(name, hyper, dict(data), tuple(seeds), dict(settings), tune=tune),
            )
            path = Path(name) / _folder_name(own)
            # Different values may have the same file name, which has no special characters.
            while path in plan and plan[path][1] != order:
                path = path.with_name(f"{path.name}-2")
            plan[path] = own, order
    _check_effects(plan.values(), assigned)
    return plan


def _check(
    axes: Mapping[str, Sequence[str]],
    hyperparameters: Mapping[str, Any],
    known: Mapping[str, set[str]],
) -> None:
    """Raise a `UserError` for a name that cannot be varied, or that no method has.

    Args:
        axes: the values of every name that is varied.
        hyperparameters: those that are set.
        known: the hyperparameters of every method.
    """
    hyper = set().union(*known.values())
    for name, values in axes.items():
        if name == "seeds":
            raise UserError("--vary seeds: seeds are trained side by side: give --seeds 0,1,2")
        if name not in EVERYWHERE | hyper:
            raise unknown("name to vary", name, EVERYWHERE | hyper)
        if not values:
            raise UserError(f"sweep: '{name}' has no values to vary")
    for name in hyperparameters:
        if name not in hyper:
            raise unknown("hyperparameter", name, hyper)


def _order(method: str, point: Point, own: set[str], usual: Order) -> Order:
    """Return the order for the run of one method at one point.

    Args:
        method: its name.
        point: the values that are varied.
        own: the hyperparameters of the method.
        usual: the order without these values.
    """
    hyper, data = dict(usual.hyperparameters), dict(usual.data)
    settings = dict(usual.settings)
    for name, value in point.items():
        if name in own:
            hyper[name] = value
        elif name in DATA:
            data[name] = _typed(name, value, DATA[name])
        else:
            settings[name] = _typed(name, value, get_type_hints(Settings)[name])
    create(method, hyper)  # refuses impossible values before anything runs
    from_mapping(settings)
    return Order(method, hyper, data, usual.seeds, settings, tune=usual.tune)


def _check_effects(orders: Iterable[tuple[Point, Order]], assigned: frozenset[str]) -> None:
    """Raise a `UserError` for a name that was set or varied and changes nothing at any point."""
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
    """Convert a value that is varied to the type of the setting or the data option."""
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
    return safe_name("_".join(f"{n}={v}" for n, v in point.items())) if point else "as-it-is"


# Running -----------------------------------------------------------------------------------------


def run_sweep(
    plan: Plan,
    folder: Path | None,
    train: runner.Train,
    train_group: Callable[[Together], object],
    *,
    announce: Callable[[Sequence[Path]], None],
    loaded: Sequence[Federation] | None = None,
    tuner: runner.Tune = runner.tune,
    on_failure: Callable[[Path, TrainingError], None] | None = None,
) -> tuple[dict[Path, dict[str, Any]], dict[Path, TrainingError]]:
    """Run all points; those that differ only in lr and weight_decay in one pass.

    Finished runs are not repeated. A run that fails is kept with its error, and the rest goes on.

    Args:
        plan: the runs, by their place.
        folder: the folder of the sweep; None writes nothing.
        train: trains a run.
        train_group: trains several runs in one pass.
        announce: called with the places of runs before they are trained.
        loaded: the federations, if they are loaded already.
        tuner: makes the search of an order.
        on_failure: called with the place and the error of a run that failed.

    Returns:
        The summaries and the errors, by place.
    """
    summaries: dict[Path, dict[str, Any]] = {}
    failures: dict[Path, TrainingError] = {}
    in_one_pass: dict[Path, dict[Path, Order]] = {}
    if folder and loaded is None:
        orders = {folder / path: order for path, (_, order) in plan.items()}
        in_one_pass = {next(iter(group)): group for group in runner.groups(orders)}
    for path, (_, order) in plan.items():
        place = folder / path if folder else None
        if place in in_one_pass:
            assert place
            runner.run_together(in_one_pass[place], train_group)
        if place is None or not runner.is_finished(order, place):
            announce([path])
        try:
            summaries[path] = runner.run(order, place, train, federations=loaded, tuner=tuner)
        except TrainingError as error:  # go on with the other points
            failures[path] = error
            if on_failure:
                on_failure(path, error)
    return summaries, failures
