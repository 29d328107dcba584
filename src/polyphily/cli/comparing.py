"""`polyphily compare` and `demo`: methods side by side, on one federation or on several."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyphily.cli import options, ranks, training
from polyphily.cli.training import PAGE, AsJson, Config, Page, Set, Track
from polyphily.errors import PolyphilyError, UserError, unknown

if TYPE_CHECKING:
    from polyphily.papers.plan import Order
    from polyphily.report.board import Board

ALL = "all"
BOARD = "board"  # the stem of the files of a comparison over several federations
CELL_WIDTH = 17  # columns of a terminal that a score takes
SEVERAL = ("dataset", "partition", "clients")  # what may differ between federations
Out = Annotated[
    Path | None, typer.Option("--out", help="The folder of the runs. [dim]\\[runs/…][/dim]")
]
Write = Annotated[
    list[Path] | None,
    typer.Option("--write", help="Write the table to a file, .md, .csv or .tex; repeatable."),
]
DEMO_DATA = {
    "dataset": "csbm:homophily=0.5,gap=0.8,spread=even,nodes=400-800",
    "clients": 10,
    "split": "0.1,0.3,0.6",
}
DEMO_METHODS = ("local", "fedavg", "fedprox", "fedspa", "fedgsp", "fedhero", "s2fgl", "fedath")


def add_to(app: typer.Typer) -> None:
    app.command("compare")(options.with_settings(several=SEVERAL)(ranks.on_all_ranks(compare)))
    app.command("demo")(ranks.on_all_ranks(demo))


def compare(
    methods: Annotated[list[str], typer.Argument(help="The methods to compare, in order, or all.")],
    config: Config = None,
    set_: Set = None,
    out: Out = None,
    write: Write = None,
    as_json: AsJson = False,
    report: Page = True,
    track: Track = None,
    **values: Any,
) -> None:
    """Train several methods on the same federation, or on several, and print their scores.

    --dataset cora,citeseer --partition louvain,metis --clients 5,10 stands for all eight
    combinations. A comparison of several federations that was stopped goes on where it was if it is
    called again with the same --out. A hyperparameter given with --set is used for the methods that
    have it.
    """
    from polyphily.cli import sheets

    sheets.check_files(write or [])
    names = _methods(methods)
    cells = _cells(options.gather(None, values, set_ or [], config).data)
    if len(cells) == 1:
        values |= cells[0]
        if write:
            raise UserError("--write is for several federations: name several datasets or clients")
        _one(names, options.gather(None, values, set_ or [], config), out, as_json, report, track)
        return
    if ranks.team() is not None:
        raise UserError("compare: several processes share the clients of one federation only")
    request = options.gather(None, values, set_ or [], config)
    _several(names, request, cells, out, write or [], as_json, report)


def demo(
    out: Out = None,
    rounds: Annotated[int, typer.Option(help="Communication rounds.")] = 60,
    as_json: AsJson = False,
    report: Page = True,
) -> None:
    """Compare methods on ten synthetic clients with homophily from 0.1 to 0.9."""
    request = options.gather(None, {"rounds": rounds, **DEMO_DATA}, [], None)
    _one(list(DEMO_METHODS), request, out, as_json, report, None)


# What is compared --------------------------------------------------------------------------------


def _methods(given: Sequence[str]) -> list[str]:
    from polyphily.core.method import METHODS

    if [name.lower() for name in given] == [ALL]:
        return sorted(METHODS)
    names = [METHODS.find(name).name for name in given]
    if len(set(names)) < len(names):
        raise UserError("compare: a method is named twice")
    return names


def _cells(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the entries of `SEVERAL` for every combination of datasets, partitions and clients."""
    axes = {
        "dataset": _names(str(data["dataset"])),
        "partition": _names(str(data["partition"])) if "partition" in data else [None],
        "clients": _numbers(data["clients"]) if "clients" in data else [None],
    }
    return [
        {name: value for name, value in zip(axes, chosen, strict=True) if value is not None}
        for chosen in product(*axes.values())
    ]


def _names(text: str) -> list[str]:
    """Split names at commas, but not at one before `option=`, which belongs to the name.

    >>> _names("cora,csbm:gap=0.4,degree=2,actor")
    ['cora', 'csbm:gap=0.4,degree=2', 'actor']
    """
    return [name.strip() for name in re.split(r",(?![^,:]*=)", text) if name.strip()]


def _numbers(value: Any) -> list[int]:
    try:
        return [int(part) for part in str(value).split(",")]
    except ValueError:
        raise UserError(f"--clients {value}: write a number, or several as in 5,10") from None


def _title(cell: dict[str, Any]) -> str:
    return " ".join(str(cell[name]) for name in SEVERAL if name in cell)


# One federation ----------------------------------------------------------------------------------


def _one(
    names: Sequence[str],
    request: options.Request,
    out: Path | None,
    as_json: bool,
    report: bool,
    track: Sequence[str] | None,
) -> None:
    from polyphily.cli import terminal
    from polyphily.cli.reporting import Pages
    from polyphily.core.method import check_effects, create
    from polyphily.core.sampling import check_sampling
    from polyphily.core.settings import from_mapping
    from polyphily.privacy.differential import check_privacy
    from polyphily.runtime.network import complete

    own = _hyperparameters(names, request)
    federations, seconds = training.load_all(request)
    settings, first = from_mapping(request.settings), federations[0]
    for name in names:  # check all methods before the first one is trained
        method = create(name, own[name])
        check_effects(method, request.assigned & own[name].keys())
        filled = complete(settings, method, first.kind, first.metric, dense=first.dense)
        check_privacy(method, filled, len(first))
        check_sampling(method, filled)
    folder = ranks.leaders_folder(out or training.new_folder("compare", first))
    terminal.notes(first.notes)
    summaries, pages = [], Pages(report)
    for name in names:
        asked = replace(request, hyperparameters=own[name])
        execution = training.prepare(name, asked, federations, seconds, folder / name)
        summaries.append(training.train(execution, 0, track or (), report))
        if execution.folder:
            pages.add(training.with_all_clients(execution))
    if not execution.folder:  # the first rank has the folder and prints
        return
    page = pages.write(folder / PAGE)
    if as_json:
        typer.echo(json.dumps({summary["method"]: summary for summary in summaries}))
    else:
        terminal.comparison(summaries, folder)
        if page:
            terminal.print_line(f"report: {page}")


def _hyperparameters(names: Sequence[str], request: options.Request) -> dict[str, dict[str, Any]]:
    """Return those hyperparameters of the request that each method has."""
    from polyphily.core.method import settable

    known = {name: settable(name) for name in names}
    for given in request.hyperparameters:
        if not any(given in own for own in known.values()):
            raise unknown("hyperparameter", given, set().union(*known.values()))
    return {
        name: {k: v for k, v in request.hyperparameters.items() if k in own}
        for name, own in known.items()
    }


# Several federations -----------------------------------------------------------------------------


def _several(
    names: Sequence[str],
    request: options.Request,
    cells: Sequence[dict[str, Any]],
    out: Path | None,
    write: Sequence[Path],
    as_json: bool,
    report: bool,
) -> None:
    """Run every method on every federation; failures are reported, and the rest goes on."""
    from polyphily.cli import sheets, terminal
    from polyphily.papers import runner
    from polyphily.papers.plan import Order
    from polyphily.report.board import Board
    from polyphily.runs.folder import safe_name

    own = _hyperparameters(names, request)
    titles = [_title(cell) for cell in cells]
    orders: dict[tuple[str, str], Order] = {
        (title, name): Order(
            name, own[name], {**request.data, **cell}, tuple(request.seeds), request.settings
        )
        for title, cell in zip(titles, cells, strict=True)
        for name in names
    }
    _check(orders, request)
    folder = out or Path("runs") / safe_name("-".join(["compare", *dict.fromkeys(titles)]))[:80]
    summaries: dict[tuple[str, str], Any] = {}
    failures: dict[tuple[str, str], str] = {}
    for number, (key, order) in enumerate(orders.items(), 1):
        place = folder / safe_name(key[0]) / key[1]
        if not runner.is_finished(order, place):
            text = f"{number}/{len(orders)}  {key[0]}, {key[1]}"
            terminal.err.print(text, style="dim", markup=False)
        try:
            summaries[key] = runner.run(order, place, training.train)
        except PolyphilyError as error:
            failures[key] = str(error)
            terminal.notes([f"{key[0]}, {key[1]}: {error}"])
    board = Board(names, titles, summaries, failures)
    files = _write(board, folder, write)
    if as_json:
        typer.echo(json.dumps(board.to_dict()))
    else:
        longest = max(len(word) + 2 for title in titles for word in title.split())
        beside = max(1, (terminal.out.width - 12) // max(CELL_WIDTH, longest))
        for start in range(0, len(titles), beside):
            sheets.print_grid(board.score_grid(titles[start : start + beside]))
        sheets.print_grid(board.rank_grid())
        sheets.print_notes(board.notes())
        for file in files:
            terminal.print_line(f"written: {file}")
        terminal.print_line(f"runs: {folder}")
    if report and summaries:
        _page(folder, [orders[key] for key in summaries], as_json)
    if failures:
        raise typer.Exit(1)


def _check(orders: dict[tuple[str, str], Order], request: options.Request) -> None:
    """Refuse mistakes before anything runs: unknown names, impossible and idle values."""
    from polyphily.core.method import check_effects, create
    from polyphily.core.settings import from_mapping

    from_mapping(request.settings)
    for order in orders.values():
        method = create(order.method, order.hyperparameters)
        check_effects(method, request.assigned & order.hyperparameters.keys())


def _write(board: Board, folder: Path, write: Sequence[Path]) -> list[Path]:
    """Write the table, the data behind it and the diagram of ranks; return the files."""
    from polyphily.report import figures
    from polyphily.report.grids import to_csv, to_latex, to_markdown
    from polyphily.runs.folder import write_text

    grid, notes = board.grid(), board.notes()
    texts = {
        ".md": to_markdown(grid) + "\n\n" + "\n".join(f"- {note}" for note in notes) + "\n",
        ".csv": to_csv([grid]),
        ".tex": to_latex(grid, notes) + "\n",
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / f"{BOARD}.json", json.dumps(board.to_dict(), indent=2) + "\n")
    files = [folder / f"{BOARD}.md", *write]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, texts[file.suffix.lower()])
    ranked = board.ranking
    if ranked and len(ranked.methods) > 1 and ranked.blocks > 1:
        diagram = figures.critical_difference(ranked)
        for suffix in (".svg", ".png"):
            files.append(folder / f"{BOARD}-ranks{suffix}")
            figures.save(diagram, files[-1])
    return files


def _page(folder: Path, orders: Sequence[Order], as_json: bool) -> None:
    """Write the report page of all runs."""
    from polyphily.cli import terminal
    from polyphily.cli.reporting import write_page
    from polyphily.report import runs

    page = write_page(runs.read_runs([folder]), folder / PAGE)
    if not as_json:
        terminal.print_line(f"report: {page}")
