"""`polyphily run`, `compare` and `demo`."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyphily.cli import options, ranks
from polyphily.errors import UserError, unknown

if TYPE_CHECKING:
    from polyphily.graphs.loading import Federation
    from polyphily.runs.run import Execution, Progress
    from polyphily.runs.together import Together

Config = Annotated[
    Path | None,
    typer.Option("--config", help="A TOML file with the same names as the flags; flags win."),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="A hyperparameter of the method, name=value; repeat for more."),
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
        help="Try these first, all in one pass, and run what validates best: lr=0.003,0.01,0.03; "
        "repeat for weight_decay=0,0.0005.",
    ),
]
Track = Annotated[
    list[str] | None,
    typer.Option(
        "--track", help="Log every round to tensorboard, mlflow or wandb; repeat for more."
    ),
]

PAGE = "report.html"
DEMO_DATA = {
    "dataset": "csbm:homophily=0.5,gap=0.8,spread=even,nodes=400-800",
    "clients": 10,
    "split": "0.1,0.3,0.6",
}
DEMO_METHODS = ("local", "fedavg", "fedprox", "fedspa", "fedgsp", "fedhero", "s2fgl", "fedath")


def add_to(app: typer.Typer) -> None:
    app.command("run")(options.with_settings()(ranks.spread(run)))
    app.command("compare")(options.with_settings()(ranks.spread(compare)))
    app.command("demo")(ranks.spread(demo))


def run(
    method: Annotated[
        str | None, typer.Argument(help="The method's name; `polyphily methods` lists them.")
    ] = None,
    config: Config = None,
    set_: Set = None,
    out: Out = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", help="Go on with the run in this folder.")
    ] = None,
    as_json: AsJson = False,
    report: Page = True,
    track: Track = None,
    tune: Tune = None,
    **values: Any,
) -> None:
    """Train a federation with one method."""
    from polyphily.cli import terminal
    from polyphily.cli.reporting import Pages
    from polyphily.runs.tracking import check

    check(track or ())
    if resume:
        given = [name for name in values if name != "rounds"]
        if method or config or set_ or out or tune or given:
            raise UserError("--resume takes the run as it is: only --rounds may be given beside it")
        execution, done = _resumed(resume, values.get("rounds"))
    else:
        request = options.gather(method, values, set_ or [], config)
        if request.method is None:
            raise UserError("which method? `polyphily methods` lists them: polyphily run fedavg")
        federations, seconds = _load(request)
        name = request.method
        if tune:
            request = _tuned(name, request, federations, tune)
        execution, done = _prepare(name, request, federations, seconds, out), 0
    terminal.notes(execution.federations[0].notes)
    summary = train(execution, done, track or ())
    if not execution.folder:  # another rank's
        return
    pages = Pages(report)
    pages.add(_whole(execution))
    page = pages.write(execution.folder.path / PAGE)
    if as_json:
        typer.echo(json.dumps(summary))
    else:
        terminal.one_run(summary, execution.folder.path)
        _say(page)


def compare(
    methods: Annotated[list[str], typer.Argument(help="The methods to compare, in order.")],
    config: Config = None,
    set_: Set = None,
    out: Out = None,
    as_json: AsJson = False,
    report: Page = True,
    track: Track = None,
    **values: Any,
) -> None:
    """Train the same federation with several methods and set them side by side.

    A hyperparameter given with --set goes to the methods that have it.
    """
    from polyphily.cli import terminal
    from polyphily.cli.reporting import Pages
    from polyphily.core import sampling
    from polyphily.core.method import PAPER, create, find
    from polyphily.core.settings import from_mapping
    from polyphily.privacy import differential as privacy

    names = [find(name).name for name in methods]
    if len(set(names)) < len(names):
        raise UserError("compare: a method is named twice")
    request = options.gather(None, values, set_ or [], config)
    known = {name: {*find(name).hyperparameters(), PAPER} for name in names}
    for given in request.hyperparameters:
        if not any(given in own for own in known.values()):
            raise unknown("hyperparameter", given, set().union(*known.values()))
    federations, seconds = _load(request)
    settings = from_mapping(request.settings)
    for name in names:
        own = {k: v for k, v in request.hyperparameters.items() if k in known[name]}
        privacy.check(find(name), settings, len(federations[0]))
        sampling.check(create(name, own), settings)
    folder = ranks.same(out or _new_folder("compare", federations[0]))
    terminal.notes(federations[0].notes)
    summaries, pages = [], Pages(report)
    for name in names:
        own = {k: v for k, v in request.hyperparameters.items() if k in known[name]}
        asked = dataclasses.replace(request, hyperparameters=own)
        execution = _prepare(name, asked, federations, seconds, folder / name)
        summaries.append(train(execution, 0, track or ()))
        if execution.folder:
            pages.add(_whole(execution))
    if not execution.folder:  # another rank's
        return
    page = pages.write(folder / PAGE)
    if as_json:
        typer.echo(json.dumps({summary["method"]: summary for summary in summaries}))
    else:
        terminal.comparison(summaries, folder)
        _say(page)


def demo(
    out: Out = None,
    rounds: Annotated[int, typer.Option(help="Communication rounds.")] = 60,
    as_json: AsJson = False,
    report: Page = True,
) -> None:
    """Compare methods on ten synthetic clients whose homophily runs from 0.1 to 0.9."""
    compare(list(DEMO_METHODS), None, None, out, as_json, report, None, rounds=rounds, **DEMO_DATA)


def _load(request: options.Request) -> tuple[list[Federation], float]:
    from polyphily.graphs.loading import load

    began = time.perf_counter()
    federations = [load(**request.data, seed=seed) for seed in request.seeds]
    return federations, time.perf_counter() - began


def _prepare(
    method: str,
    request: options.Request,
    federations: list[Federation],
    loading_seconds: float,
    out: Path | None,
) -> Execution:
    from polyphily.core.method import create
    from polyphily.core.settings import from_mapping
    from polyphily.runs.folder import RunFolder
    from polyphily.runs.run import Execution

    made = create(method, request.hyperparameters)
    folder = ranks.same(out or _new_folder(made.name, federations[0]))
    settings = from_mapping(request.settings)
    team = ranks.team()
    execution = Execution(made, federations, settings, folder, loading_seconds, team=team)
    config = execution.config()
    ranks.once(lambda: RunFolder(folder).create(config, federations))
    ranks.writes(folder)
    return execution


def read_run(folder: Path) -> tuple[options.Request, list[Federation]]:
    """What was asked of the run in a folder, and its federations with the partitions it kept."""
    from polyphily.graphs.loading import load
    from polyphily.runs.folder import CONFIG, RunFolder

    request = options.gather(None, {}, [], folder / CONFIG)
    files = RunFolder(folder)
    federations = []
    for i, seed in enumerate(request.seeds):
        saved = files.partition_file(seed, first=i == 0)
        data = {k: v for k, v in request.data.items() if k not in ("partition", "split")}
        federation = load(**data, partition=saved, seed=seed)
        split = request.data.get("split", federation.split)  # the file holds the masks it led to
        federations.append(replace(federation, split=split))
    return request, federations


def restored(folder: Path) -> Execution:
    """The run of a folder as its checkpoint has it, to be looked at: it writes nothing."""
    from polyphily.core.method import create
    from polyphily.core.settings import from_mapping
    from polyphily.runs.folder import RunFolder
    from polyphily.runs.run import Execution

    request, federations = read_run(folder)
    found = RunFolder(folder).load_checkpoint()
    if found is None:
        raise UserError(f"{folder} has no checkpoint yet: nothing is trained to be measured")
    settings = from_mapping(request.settings | {"device": "cpu"})
    method = create(str(request.method), request.hyperparameters)
    execution = Execution(method, federations, settings, None)
    execution.adopt(*found, folder)
    return execution


def _tuned(
    method: str, request: options.Request, federations: list[Federation], wishes: list[str]
) -> options.Request:
    """The request with the learning rate and decay that validate best."""
    from polyphily.cli import terminal
    from polyphily.core.method import create
    from polyphily.core.settings import from_mapping
    from polyphily.runs import tuning

    found = tuning.tune(
        create(method, request.hyperparameters),
        federations,
        from_mapping(request.settings),
        tuning.parse(wishes),
    )
    terminal.trials(found)
    rates = {"lr": found.best.lr, "weight_decay": found.best.weight_decay}
    return replace(request, settings=request.settings | rates)


def _resumed(folder: Path, rounds: int | None) -> tuple[Execution, int]:
    """The run of a folder, set back to its last checkpoint."""
    from polyphily.core.method import create
    from polyphily.core.settings import from_mapping
    from polyphily.runs.folder import CONFIG, RunFolder
    from polyphily.runs.run import Execution

    if not (folder / CONFIG).exists():
        raise UserError(f"{folder} holds no run to resume: it has no {CONFIG}")
    began = time.perf_counter()
    request, federations = read_run(folder)
    if rounds is not None and request.settings.get("dp", "off") != "off":
        raise UserError("--rounds: the noise of --dp was set for the run's own number of rounds")
    settings = request.settings | ({} if rounds is None else {"rounds": rounds})
    execution = Execution(
        create(str(request.method), request.hyperparameters),
        federations,
        from_mapping(settings),
        folder,
        time.perf_counter() - began,
        team=ranks.team(),
    )
    ranks.writes(folder)
    done = execution.restore()
    if rounds is not None:
        if rounds < done:
            raise UserError(f"--rounds {rounds}: the run has {done} rounds behind it already")
        ranks.once(lambda: RunFolder(folder).amend_config(rounds=rounds))
    return execution, done


def _whole(execution: Execution) -> Execution:
    """A run that has ended, with all its clients in this process."""
    if execution.team is None:
        return execution
    assert execution.folder
    whole = restored(execution.folder.path)
    whole.folder = execution.folder
    return whole


def train(execution: Execution, done: int, track: Sequence[str] = ()) -> dict[str, Any]:
    """Runs to the end, showing how it goes and logging rounds where that is asked for."""
    from polyphily.cli import terminal
    from polyphily.report.evidence import Collaboration
    from polyphily.runs.tracking import log_to

    settings, method = execution.settings, execution.method
    if not execution.folder:  # another rank shows and logs it
        return execution.go(Collaboration(execution)).summary
    metric = settings.metric or "accuracy"
    live = terminal.live(method.name, settings.rounds, method.evaluated, metric, done)
    with live as report, log_to(track, execution) as log:
        if settings.engine == "flower":
            from polyphily.flower import loopback

            return log.finish(loopback.run(execution, _each(report, log.round)))
        watch = Collaboration(execution)
        return log.finish(execution.go(_each(report, log.round, watch)).summary)


def train_together(group: Together, track: Sequence[str] = ()) -> list[Execution]:
    """Runs several in one pass to the end; those that got there. The progress line shows the best.

    Trackers get a run's rounds after the pass: some of them take one run at a time.
    """
    from polyphily.cli import terminal
    from polyphily.report.evidence import Collaboration
    from polyphily.runs.tracking import log_to

    first, simulation = group.runs[0], group.joint.simulation
    method, rounds = first.method, first.settings.rounds
    metric = first.settings.metric or "accuracy"

    def score(record: dict[str, Any]) -> float:
        return record.get(first.view, {}).get("val", {}).get(metric) or 0.0

    watchers = [
        Collaboration(run, simulation, group.places(i).start) for i, run in enumerate(group.runs)
    ]
    title = f"{method.name} x{len(group.runs)}"
    with terminal.live(title, rounds, method.evaluated, metric, simulation.round) as report:

        def show(records: Sequence[dict[str, Any]]) -> None:
            if report:
                report(max(records, key=score))

        ended = group.go(watchers, show)
    for run, result in ended:
        with log_to(track, run) as log:
            for record in run.reports:
                log.round(record)
            log.finish(result.summary)
    return [run for run, _ in ended]


def _each(*watchers: Progress | None) -> Progress:
    """One callback that calls all that are there."""
    present = [watcher for watcher in watchers if watcher is not None]

    def tell(record: dict[str, Any]) -> None:
        for watcher in present:
            watcher(record)

    return tell


def _say(page: Path | None) -> None:
    from polyphily.cli import terminal

    if page:
        terminal.out.print(f"report: {page}", soft_wrap=True, markup=False)


def _new_folder(what: str, federation: Federation) -> Path:
    """A folder under runs/ that does not exist yet, named for what runs and when."""
    from polyphily.runs.folder import safe_name

    data = safe_name(Path(federation.dataset.partition(":")[0]).name)
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{what}-{data}"
    folder = Path("runs") / stem
    for number in range(2, 1000):
        if not folder.exists():
            break
        folder = Path("runs") / f"{stem}-{number}"
    return folder
