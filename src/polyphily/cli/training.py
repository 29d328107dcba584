"""`polyphily run`, `compare` and `demo`."""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyphily.cli import options
from polyphily.errors import UserError, unknown

if TYPE_CHECKING:
    from polyphily.federation.run import Execution
    from polyphily.graphs.federation import Federation

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

DEMO_DATA = {
    "dataset": "csbm:homophily=0.5,gap=0.8,spread=even,nodes=400-800",
    "clients": 10,
    "split": "0.1,0.3,0.6",
}
DEMO_METHODS = ("local", "fedavg", "fedprox", "fedspa", "fedgsp", "fedhero", "s2fgl", "fedath")


def add_to(app: typer.Typer) -> None:
    app.command("run")(options.with_settings()(run))
    app.command("compare")(options.with_settings()(compare))
    app.command("demo")(demo)


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
    **values: Any,
) -> None:
    """Train a federation with one method."""
    from polyphily.cli import terminal

    if resume:
        given = [name for name in values if name != "rounds"]
        if method or config or set_ or out or given:
            raise UserError("--resume takes the run as it is: only --rounds may be given beside it")
        execution, done = _resumed(resume, values.get("rounds"))
    else:
        request = options.gather(method, values, set_ or [], config)
        if request.method is None:
            raise UserError("which method? `polyphily methods` lists them: polyphily run fedavg")
        federations, seconds = _load(request)
        execution, done = _prepare(request.method, request, federations, seconds, out), 0
    terminal.notes(execution.federations[0].notes)
    summary = train(execution, done)
    assert execution.folder
    if as_json:
        typer.echo(json.dumps(summary))
    else:
        terminal.one_run(summary, execution.folder.path)


def compare(
    methods: Annotated[list[str], typer.Argument(help="The methods to compare, in order.")],
    config: Config = None,
    set_: Set = None,
    out: Out = None,
    as_json: AsJson = False,
    **values: Any,
) -> None:
    """Train the same federation with several methods and set them side by side.

    A hyperparameter given with --set goes to the methods that have it.
    """
    from polyphily.cli import terminal
    from polyphily.methods.base import find

    names = [find(name).name for name in methods]
    if len(set(names)) < len(names):
        raise UserError("compare: a method is named twice")
    request = options.gather(None, values, set_ or [], config)
    known = {name: set(find(name).hyperparameters()) for name in names}
    for given in request.hyperparameters:
        if not any(given in own for own in known.values()):
            raise unknown("hyperparameter", given, set().union(*known.values()))
    federations, seconds = _load(request)
    folder = out or _new_folder("compare", federations[0])
    terminal.notes(federations[0].notes)
    summaries = []
    for name in names:
        own = {k: v for k, v in request.hyperparameters.items() if k in known[name]}
        asked = dataclasses.replace(request, hyperparameters=own)
        execution = _prepare(name, asked, federations, seconds, folder / name)
        summaries.append(train(execution, 0))
    if as_json:
        typer.echo(json.dumps({summary["method"]: summary for summary in summaries}))
    else:
        terminal.comparison(summaries, folder)


def demo(
    out: Out = None,
    rounds: Annotated[int, typer.Option(help="Communication rounds.")] = 60,
    as_json: AsJson = False,
) -> None:
    """Compare methods on ten synthetic clients whose homophily runs from 0.1 to 0.9."""
    compare(list(DEMO_METHODS), None, None, out, as_json, rounds=rounds, **DEMO_DATA)


def _load(request: options.Request) -> tuple[list[Federation], float]:
    from polyphily.graphs.federation import load

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
    from polyphily.federation.run import Execution
    from polyphily.federation.settings import from_mapping
    from polyphily.methods.base import create

    made = create(method, request.hyperparameters)
    folder = out or _new_folder(made.name, federations[0])
    execution = Execution(
        made, federations, from_mapping(request.settings), folder, loading_seconds
    )
    assert execution.folder
    execution.folder.create(execution.config(), federations)
    return execution


def _resumed(folder: Path, rounds: int | None) -> tuple[Execution, int]:
    """The run of a folder, set back to its last checkpoint."""
    from polyphily.federation.folder import CONFIG, RunFolder
    from polyphily.federation.run import Execution
    from polyphily.federation.settings import from_mapping
    from polyphily.graphs.federation import load
    from polyphily.methods.base import create

    if not (folder / CONFIG).exists():
        raise UserError(f"{folder} holds no run to resume: it has no {CONFIG}")
    request = options.gather(None, {}, [], folder / CONFIG)
    files = RunFolder(folder)
    began = time.perf_counter()
    federations = []
    for i, seed in enumerate(request.seeds):
        saved = files.partition_file(seed, first=i == 0)
        data = {k: v for k, v in request.data.items() if k not in ("partition", "split")}
        federation = load(**data, partition=saved, seed=seed)
        split = request.data.get("split", federation.split)  # the file holds the masks it led to
        federations.append(replace(federation, split=split))
    settings = request.settings | ({} if rounds is None else {"rounds": rounds})
    execution = Execution(
        create(str(request.method), request.hyperparameters),
        federations,
        from_mapping(settings),
        folder,
        time.perf_counter() - began,
    )
    done = execution.restore()
    if rounds is not None:
        if rounds < done:
            raise UserError(f"--rounds {rounds}: the run has {done} rounds behind it already")
        files.amend_config(rounds=rounds)
    return execution, done


def train(execution: Execution, done: int) -> dict[str, Any]:
    from polyphily.cli import terminal

    settings, method = execution.settings, execution.method
    metric = settings.metric or "accuracy"
    with terminal.live(method.name, settings.rounds, method.evaluated, metric, done) as report:
        return execution.go(report).summary


def _new_folder(what: str, federation: Federation) -> Path:
    """A folder under runs/ that does not exist yet, named for what runs and when."""
    from polyphily.federation.folder import safe_name

    data = safe_name(Path(federation.dataset.partition(":")[0]).name)
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{what}-{data}"
    folder = Path("runs") / stem
    for number in range(2, 1000):
        if not folder.exists():
            break
        folder = Path("runs") / f"{stem}-{number}"
    return folder
