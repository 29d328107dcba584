"""`polyphily compare`: methods side by side, on one federation or on several."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyphily.cli import completion, options, ranks, training
from polyphily.cli.jobs import Jobs, train_ahead
from polyphily.cli.reporting import Open, Pages, open_page
from polyphily.cli.story import print_story
from polyphily.cli.training import PAGE, AsJson, Config, Page, Set, Track, Tune
from polyphily.errors import PolyphilyError, UserError

if TYPE_CHECKING:
    from polyphily.graphs.loading import Federation
    from polyphily.report.board import Board
    from polyphily.runs.orders import Order, TuneRequest
    from polyphily.runs.run import Execution

SEVERAL = ("dataset", "partition", "clients")  # what may differ between federations
Out = Annotated[
    Path | None, typer.Option("--out", help="The folder of the runs. [dim]\\[runs/…][/dim]")
]
Write = Annotated[
    list[Path] | None,
    typer.Option("--write", help="Write the table to a file, .md, .csv or .tex; repeatable."),
]


def add_to(app: typer.Typer) -> None:
    app.command("compare")(options.with_settings(several=SEVERAL)(ranks.on_all_ranks(compare)))


def compare(
    methods: Annotated[
        list[str] | None,
        typer.Argument(
            help="The methods to compare, in order, or all.",
            show_default=" ".join(options.METHODS),
            autocompletion=completion.of("methods"),
        ),
    ] = None,
    config: Config = None,
    set_: Set = None,
    out: Out = None,
    write: Write = None,
    as_json: AsJson = False,
    report: Page = True,
    open_: Open = False,
    track: Track = None,
    tune: Tune = None,
    jobs: Jobs = 1,
    **values: Any,
) -> None:
    """Train several methods on the same federation, or on several, and print their scores.

    --dataset cora,citeseer --partition louvain,metis --clients 5,10 stands for all eight
    combinations. A comparison that was stopped goes on where it was if it is called again with the
    same --out. A hyperparameter given with --set is used for the methods that have it. With --tune
    20 every method gets a search of 20 trials in every federation.
    """
    from polyphily.cli import sheets
    from polyphily.experiments.comparing import method_names
    from polyphily.runs.orders import TuneRequest
    from polyphily.runs.tracking import check_trackers

    sheets.check_files(write or [])
    check_trackers(track or ())
    wanted = TuneRequest.parse(tune) if tune else None
    names = method_names(methods or options.METHODS)
    cells = _cells(options.gather(None, values, set_ or [], config).data)
    task = Task(names, out, write or [], as_json, report, track or (), wanted, jobs, open_=open_)
    if len(cells) == 1:
        values |= cells[0]
        task.one(options.gather(None, values, set_ or [], config))
        return
    if ranks.team() is not None:
        raise UserError("compare: several processes share the clients of one federation only")
    if track:
        raise UserError("--track is for one federation: name one dataset, partition and number")
    task.several(options.gather(None, values, set_ or [], config), cells)


# What is compared --------------------------------------------------------------------------------


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


# Running -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A comparison as the user asked for it.

    Attributes:
        names: the methods.
        out: the folder of the runs, if one is given.
        write: files for the table.
        as_json: whether JSON is printed.
        report: whether the report page is written.
        track: the trackers that rounds are logged to.
        tune: the search before every run.
        jobs: how many runs train at once.
        live: shows the progress of a run, as `terminal.live` does; that one unless given.
        open_: whether the page is opened in the browser.
    """

    names: Sequence[str]
    out: Path | None
    write: Sequence[Path]
    as_json: bool
    report: bool
    track: Sequence[str] = ()
    tune: TuneRequest | None = None
    jobs: int = 1
    live: training.Live | None = None
    open_: bool = False

    def one(self, request: options.Request) -> None:
        """Run every method on one federation."""
        from polyphily.cli import terminal
        from polyphily.experiments import comparing
        from polyphily.report.board import Board

        own = comparing.hyperparameters_by_method(self.names, request.hyperparameters)
        federations, seconds = training.load_all(request)
        first = federations[0]
        _check_methods(own, request, first)
        folder = ranks.leaders_folder(self.out or training.new_folder("compare", first))
        terminal.notes(first.notes)
        pages, title = Pages(self.report), _title(request.data)

        def train(execution: Execution, done: int) -> dict[str, Any]:
            summary = training.train(execution, done, self.track, self.report, self.live)
            if execution.folder:
                pages.add(training.with_all_clients(execution))
            return summary

        if ranks.team() is not None:
            summaries = {}
            for name in self.names:
                asked = replace(request, hyperparameters=own[name])
                if self.tune:
                    asked = training.tuned(name, asked, federations, self.tune, folder / name)
                run = training.prepare(name, asked, federations, seconds, folder / name)
                summaries[title, name] = train(run, 0)
            if not run.folder:  # the first rank has the folder and prints
                return
            board = Board(self.names, [title], summaries)
        else:
            orders = {
                (title, name): self._order(name, own[name], request.data, request)
                for name in self.names
            }
            places = {key: folder / key[1] for key in orders}
            self._train_ahead(orders, places)
            board = comparing.run_board(
                orders,
                places,
                train,
                loaded={title: federations},
                tuner=training.tuner,
                on_failure=_raise,
            )
        places = {key: folder / key[1] for key in board.summaries}
        self._finish(board, folder, places, lambda: self._print_one(board))

    def several(self, request: options.Request, cells: Sequence[dict[str, Any]]) -> None:
        """Run every method on every federation; failures are reported, and the rest goes on."""
        from polyphily.cli import terminal
        from polyphily.experiments import comparing
        from polyphily.runs.folder import safe_name

        own = comparing.hyperparameters_by_method(self.names, request.hyperparameters)
        titles = [_title(cell) for cell in cells]
        orders = {
            (title, name): self._order(name, own[name], {**request.data, **cell}, request)
            for title, cell in zip(titles, cells, strict=True)
            for name in self.names
        }
        comparing.check_orders(orders.values(), request.assigned)
        usual = safe_name("-".join(["compare", *dict.fromkeys(titles)]))[:80]
        folder = self.out or Path("runs") / usual

        def announce(number: int, key: tuple[str, str]) -> None:
            text = f"{number}/{len(orders)}  {key[0]}, {key[1]}"
            terminal.err.print(text, style="dim", markup=False)

        places = {key: comparing.place(folder, key, len(cells)) for key in orders}
        self._train_ahead(orders, places)
        board = comparing.run_board(
            orders,
            places,
            lambda execution, done: training.train(execution, done),
            tuner=training.tuner,
            announce=announce,
            on_failure=lambda key, error: terminal.notes([f"{key[0]}, {key[1]}: {error}"]),
        )
        self._finish(board, folder, places, lambda: _print_several(board))
        if board.failures:
            raise typer.Exit(1)

    def _train_ahead(
        self, orders: Mapping[tuple[str, str], Order], places: Mapping[tuple[str, str], Path]
    ) -> None:
        own = {places[key]: order for key, order in orders.items()}
        train_ahead(own, self.jobs, report=self.report, track=self.track)

    def _order(
        self,
        name: str,
        hyperparameters: dict[str, Any],
        data: dict[str, Any],
        request: options.Request,
    ) -> Order:
        from polyphily.runs.orders import Order

        seeds = tuple(request.seeds)
        return Order(name, hyperparameters, data, seeds, request.settings, tune=self.tune)

    def _finish(
        self,
        board: Board,
        folder: Path,
        places: Mapping[tuple[str, str], Path],
        show: Callable[[], None],
    ) -> None:
        """Write the files of a board and the page, and print."""
        from polyphily.cli import terminal
        from polyphily.experiments.comparing import write_board

        files = write_board(board, folder, self.write)
        pages = Pages(self.report)
        pages.folders = [places[key] for key in board.summaries] if self.report else []
        page = pages.write(folder / PAGE)
        if page and self.open_:
            open_page(page)
        if self.as_json:
            typer.echo(json.dumps(self._json(board)))
            return
        show()
        for file in files:
            terminal.print_line(f"written: {file}")
        terminal.print_line(f"{'run folder' if len(board.cells) == 1 else 'runs'}: {folder}")
        if page:
            terminal.print_line(f"report: {page}")

    def _json(self, board: Board) -> dict[str, Any]:
        """Return the summaries of one federation by method; of several, the board."""
        if len(board.cells) > 1:
            return board.to_dict()
        return {method: dict(summary) for (_, method), summary in board.summaries.items()}

    def _print_one(self, board: Board) -> None:
        from polyphily.cli import sheets, terminal
        from polyphily.report.board import COSTS

        title = board.cells[0]
        terminal.comparison([board.summaries[title, name] for name in self.names])
        if len(self.names) > 1:
            tested = board.ranking is not None and board.ranking.blocks > 1
            if tested:
                terminal.out.print()
                sheets.print_grids([board.rank_grid()])
            sheets.print_notes([*board.rank_notes(), *([COSTS] if tested else [])])
        print_story({name: board.summaries[title, name] for name in self.names})


def _raise(key: tuple[str, str], error: PolyphilyError) -> None:
    """End the comparison: with one federation, a failure is not left behind."""
    raise error


def _check_methods(
    own: dict[str, dict[str, Any]], request: options.Request, first: Federation
) -> None:
    """Check all methods on a federation before the first one is trained."""
    from polyphily.core.method import check_effects, create
    from polyphily.core.sampling import check_sampling
    from polyphily.core.settings import from_mapping
    from polyphily.privacy.differential import check_privacy
    from polyphily.runtime.network import complete

    settings = from_mapping(request.settings)
    for name, hyperparameters in own.items():
        method = create(name, hyperparameters)
        check_effects(method, request.assigned & hyperparameters.keys())
        filled = complete(
            settings,
            method,
            first.kind,
            first.metric,
            dense=first.dense,
            relations=first.relations,
        )
        check_privacy(method, filled, len(first))
        check_sampling(method, filled)


def _print_several(board: Board) -> None:
    from polyphily.cli import sheets

    sheets.print_grids([board.score_grid(board.cells), board.rank_grid()])
    sheets.print_notes(board.notes())
