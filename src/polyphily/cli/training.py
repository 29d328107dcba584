"""`polyphily run`, and the training that other commands share."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyphily.cli import completion, options, ranks
from polyphily.cli.reporting import Open, Pages, open_page
from polyphily.errors import TrainingError, UserError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from polyphily.engines.simulation import Simulation
    from polyphily.graphs.loading import Federation
    from polyphily.runs.orders import Order, TuneRequest
    from polyphily.runs.run import Execution, Progress
    from polyphily.runs.together import Together
    from polyphily.runs.trials import Searched

Config = Annotated[
    Path | None,
    typer.Option("--config", help="A TOML file with the same names as the flags; flags win."),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="A hyperparameter of the method, name=value; repeat for more.",
        autocompletion=completion.hyperparameter,
    ),
]
Out = Annotated[Path | None, typer.Option("--out", help="The run folder. [dim]\\[runs/…][/dim]")]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print the summary as one JSON object and nothing else.")
]
Page = Annotated[
    bool, typer.Option("--report/--no-report", help="Write report.html into the run folder.")
]
Tune = Annotated[
    list[str] | None,
    typer.Option(
        "--tune",
        help="Search first, and run with what validates best: a number of trials (20), learning "
        "rates and decays that every trial tries (lr=0.003,0.01), or both; repeat for more.",
    ),
]
Track = Annotated[
    list[str] | None,
    typer.Option(
        "--track",
        help="Log every round to tensorboard, mlflow or wandb; repeat for more.",
        autocompletion=completion.of("trackers"),
    ),
]

PAGE = "report.html"
Live = Callable[[str, int, str, str, int], "AbstractContextManager[Progress | None]"]
"""Shows a run by title, rounds, evaluated view, metric and complete rounds (`terminal.live`)."""


def add_to(app: typer.Typer) -> None:
    app.command("run")(options.with_settings()(ranks.on_all_ranks(run)))


def run(
    method: Annotated[
        str | None,
        typer.Argument(
            help="The method's name; `polyphily methods` lists them.",
            show_default=options.METHOD,
            autocompletion=completion.of("methods"),
        ),
    ] = None,
    config: Config = None,
    set_: Set = None,
    out: Out = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume",
            help="Continue the run in this folder.",
            autocompletion=completion.run_folder,
        ),
    ] = None,
    as_json: AsJson = False,
    report: Page = True,
    open_: Open = False,
    track: Track = None,
    tune: Tune = None,
    **values: Any,
) -> None:
    """Train a federation with one method."""
    from polyphily.cli import terminal
    from polyphily.core.method import METHODS, check_effects, create
    from polyphily.runs.orders import TuneRequest
    from polyphily.runs.tracking import check_trackers

    check_trackers(track or ())
    wanted = TuneRequest.parse(tune) if tune else None
    if resume:
        given = [name for name in values if name != "rounds"]
        if method or config or set_ or out or tune or given:
            raise UserError("--resume continues a run as it is: only --rounds may be given with it")
        execution, done = _resume(resume, values.get("rounds"))
    else:
        request = options.gather(method, values, set_ or [], config)
        federations, seconds = load_all(request)
        name = request.method or options.METHOD
        check_effects(create(name, request.hyperparameters), request.assigned)
        if wanted:
            out = ranks.leaders_folder(out or new_folder(METHODS.find(name).name, federations[0]))
            request = tuned(name, request, federations, wanted, out)
        execution, done = prepare(name, request, federations, seconds, out), 0
    terminal.notes(execution.federations[0].notes)
    summary = train(execution, done, track or (), report)
    if not execution.folder:  # the first rank has the folder and prints
        return
    pages = Pages(report)
    pages.add(with_all_clients(execution))
    page = pages.write(execution.folder.path / PAGE)
    if page and open_:
        open_page(page)
    if as_json:
        typer.echo(json.dumps(summary))
    else:
        terminal.one_run(summary, execution.folder.path)
        if page:
            terminal.print_line(f"report: {page}")


def load_all(request: options.Request) -> tuple[list[Federation], float]:
    """Load a federation for every seed; return also the seconds that it took."""
    from polyphily.core.settings import from_mapping
    from polyphily.graphs.prepared import load_seeds

    began = time.perf_counter()
    settings = from_mapping(request.settings)
    federations = load_seeds(
        request.data, request.seeds, private=settings.private, on_disk=settings.on_disk
    )
    return federations, time.perf_counter() - began


def prepare(
    method: str,
    request: options.Request,
    federations: list[Federation],
    loading_seconds: float,
    out: Path | None,
) -> Execution:
    """Create a run and its folder."""
    from polyphily.core.method import create
    from polyphily.core.settings import from_mapping
    from polyphily.runs.folder import RunFolder
    from polyphily.runs.run import Execution

    created = create(method, request.hyperparameters)
    folder = ranks.leaders_folder(out or new_folder(created.name, federations[0]))
    settings = from_mapping(request.settings)
    team = ranks.team()
    execution = Execution(created, federations, settings, folder, loading_seconds, team=team)
    config = execution.config()
    ranks.at_leader(lambda: RunFolder(folder).create(config, execution.federations))
    ranks.set_run_folder(folder)
    return execution


def read_run(folder: Path) -> tuple[options.Request, list[Federation]]:
    """Return the request of the run in a folder, and its federations with the saved partitions."""
    from polyphily.graphs.loading import kept_on_disk, load
    from polyphily.runs.folder import CONFIG, RunFolder

    request = options.gather(None, {}, [], folder / CONFIG)
    files = RunFolder(folder)
    federations = []
    on_disk = request.settings.get("on_disk")
    if kept_on_disk(request.data["dataset"], request.data.get("clients"), on_disk):
        data = {k: v for k, v in request.data.items() if k != "partition"}
        found = [load(**data, seed=seed, on_disk=on_disk) for seed in request.seeds]
        return _with_trained_backbone(request), found
    for i, seed in enumerate(request.seeds):
        saved = files.partition_file(seed, first=i == 0)
        data = {k: v for k, v in request.data.items() if k not in ("partition", "split")}
        federation = load(**data, partition=saved, seed=seed)
        split = request.data.get("split", federation.split)  # its masks are in the partition file
        federations.append(replace(federation, split=split))
    return _with_trained_backbone(request), federations


def _with_trained_backbone(request: options.Request) -> options.Request:
    """Return the request with the backbone that was trained, for folders of earlier versions.

    They recorded any backbone that was asked for, also where the method built its own.
    """
    from polyphily.core.method import create

    supported = create(str(request.method), request.hyperparameters).supported_backbones()
    if request.settings.get("backbone", supported[0]) in supported:
        return request
    return replace(request, settings=request.settings | {"backbone": supported[0]})


def restore(folder: Path) -> Execution:
    """Return the run of a folder at its last checkpoint, to be measured: it writes nothing."""
    from polyphily.core.method import create
    from polyphily.core.settings import from_mapping
    from polyphily.runs.folder import RunFolder
    from polyphily.runs.run import Execution

    request, federations = read_run(folder)
    checkpoint = RunFolder(folder).load_checkpoint()
    if checkpoint is None:
        raise UserError(f"{folder} has no checkpoint yet: there are no models to measure")
    settings = from_mapping(request.settings | {"device": "cpu"})
    if settings.on_disk:
        raise UserError(
            f"{folder} was run with --on-disk: its clients' states can be used by the run alone"
        )
    method = create(str(request.method), request.hyperparameters)
    execution = Execution(method, federations, settings, None)
    execution.adopt(*checkpoint, folder)
    return execution


def tuned(
    method: str,
    request: options.Request,
    federations: list[Federation],
    wanted: TuneRequest,
    folder: Path,
) -> options.Request:
    """Return the request with what a search chose; its trials are kept in the run folder.

    Under torchrun the first rank searches, and the others take what it found.
    """
    from polyphily.runs.folder import RunFolder
    from polyphily.runs.orders import Order

    order = Order(
        method,
        request.hyperparameters,
        request.data,
        tuple(request.seeds),
        request.settings,
        tune=wanted,
    )
    chosen: dict[str, Any] = {}

    def work() -> None:
        RunFolder(folder).refuse_another_run()
        try:
            found = tuner(order, federations, folder)
        except TrainingError as error:
            if ranks.team() is None:
                raise
            raise UserError(str(error)) from None  # which reaches the other ranks
        chosen.update(set=found.hyperparameters, settings=found.settings)

    ranks.at_leader(work)
    team = ranks.team()
    agreed = chosen if team is None else team.same(chosen)
    return replace(
        request,
        hyperparameters=request.hyperparameters | agreed["set"],
        settings=request.settings | agreed["settings"],
    )


def tuner(order: Order, federations: Sequence[Federation], folder: Path | None) -> Searched:
    """Make the search of an order with a progress line, and print its best trials."""
    from polyphily.cli import terminal
    from polyphily.runs.searching import search

    assert order.tune
    if order.settings.get("dp", "off") != "off":
        terminal.notes(["--dp: the epsilon of the summary is that of the run, without its trials"])
    with terminal.searching(order.method, order.tune.trials) as report:
        found = search(
            order.method,
            federations,
            order.settings,
            order.hyperparameters,
            trials=order.tune.trials,
            rates=order.tune.rates,
            folder=folder,
            report=report,
        )
    terminal.trials(found)
    return found


def _resume(folder: Path, rounds: int | None) -> tuple[Execution, int]:
    """Return the run of a folder at its last checkpoint, and its number of complete rounds."""
    from polyphily.core.method import create
    from polyphily.core.settings import from_mapping
    from polyphily.runs.folder import CONFIG, RunFolder
    from polyphily.runs.run import Execution

    if not (folder / CONFIG).exists():
        raise UserError(f"{folder} holds no run to resume: it has no {CONFIG}")
    began = time.perf_counter()
    request, federations = read_run(folder)
    if rounds is not None and request.settings.get("dp", "off") != "off":
        raise UserError("--rounds: the noise of --dp was chosen for the run's number of rounds")
    settings = request.settings | ({} if rounds is None else {"rounds": rounds})
    execution = Execution(
        create(str(request.method), request.hyperparameters),
        federations,
        from_mapping(settings),
        folder,
        time.perf_counter() - began,
        team=ranks.team(),
    )
    ranks.set_run_folder(folder)
    done = execution.restore()
    if rounds is not None:
        if rounds < done:
            raise UserError(f"--rounds {rounds}: the run has {done} rounds behind it already")
        ranks.at_leader(lambda: RunFolder(folder).amend_config(rounds=rounds))
    return execution, done


def with_all_clients(execution: Execution) -> Execution:
    """Return a run that has ended, with the clients of all ranks in this process."""
    if execution.team is None:
        return execution
    assert execution.folder
    complete = restore(execution.folder.path)
    complete.folder = execution.folder
    return complete


def train(
    execution: Execution,
    done: int,
    track: Sequence[str] = (),
    evidence: bool = True,
    live: Live | None = None,
) -> dict[str, Any]:
    """Train to the end, show progress, and return the summary.

    Args:
        execution: the run.
        done: how many of its rounds are complete.
        track: the trackers that rounds are logged to.
        evidence: whether to record after every round what the report needs.
        live: shows the progress; `terminal.live` unless given.
    """
    from polyphily.cli import terminal
    from polyphily.runs.tracking import log_to

    settings, method = execution.settings, execution.method
    recorder = _collaboration(execution) if evidence and settings.engine != "flower" else None
    if not execution.folder:  # the first rank shows and logs the run
        return execution.go(recorder).summary
    metric = settings.metric or "accuracy"
    shown = (live or terminal.live)(method.name, settings.rounds, method.evaluated, metric, done)
    with shown as report, log_to(track, execution) as log:
        if settings.engine == "flower":
            from polyphily.flower import loopback

            return log.finish(loopback.run(execution, _call_all(report, log.round)))
        return log.finish(execution.go(_call_all(report, log.round, recorder)).summary)


def _collaboration(
    execution: Execution, trained_in: Simulation | None = None, federation: int = 0
) -> Progress:
    """Return a callback that records after every round, for the report, who learns from whom."""
    from polyphily.report.evidence import Collaboration

    return Collaboration(execution, trained_in, federation)


def train_together(
    group: Together, track: Sequence[str] = (), evidence: bool = True
) -> list[Execution]:
    """Train several runs in one pass to the end, and return those that did not fail.

    The progress line shows the best run. Trackers get the rounds after the pass, because some of
    them can log only one run at a time.
    """
    from polyphily.cli import terminal
    from polyphily.runs.tracking import log_to

    first, simulation = group.runs[0], group.joint.simulation
    method, rounds = first.method, first.settings.rounds
    metric = first.settings.metric or "accuracy"

    def score(record: dict[str, Any]) -> float:
        return record.get(first.view, {}).get("val", {}).get(metric) or 0.0

    recorders: list[Progress] = [
        _collaboration(run, simulation, group.places(i).start) if evidence else lambda _: None
        for i, run in enumerate(group.runs)
    ]
    title = f"{method.name} x{len(group.runs)}"
    with terminal.live(title, rounds, method.evaluated, metric, simulation.round) as report:

        def show(records: Sequence[dict[str, Any]]) -> None:
            if report:
                report(max(records, key=score))

        ended = group.go(recorders, show)
    for run, result in ended:
        with log_to(track, run) as log:
            for record in run.reports:
                log.round(record)
            log.finish(result.summary)
    return [run for run, _ in ended]


def _call_all(*callbacks: Progress | None) -> Progress:
    """Return one callback that calls all those that are not None."""

    def call(record: dict[str, Any]) -> None:
        for callback in callbacks:
            if callback is not None:
                callback(record)

    return call


def new_folder(what: str, federation: Federation) -> Path:
    """Return a folder under runs/ that does not exist, named by time, method and dataset."""
    from polyphily.runs.folder import safe_name

    data = safe_name(Path(federation.dataset.partition(":")[0]).name)
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{what}-{data}"
    folder = Path("runs") / stem
    for number in range(2, 1000):
        if not folder.exists():
            break
        folder = Path("runs") / f"{stem}-{number}"
    return folder
