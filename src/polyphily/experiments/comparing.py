"""Comparing methods: every method on every federation, and a board of the results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polyphily.core import settings as knobs
from polyphily.core.method import METHODS, check_effects, create, settable
from polyphily.errors import PolyphilyError, TrainingError, UserError, unknown
from polyphily.graphs.loading import Federation
from polyphily.report.board import Board
from polyphily.report.grids import to_csv, to_latex, to_markdown
from polyphily.runs import runner
from polyphily.runs.folder import safe_name, write_text
from polyphily.runs.orders import Order, TuneRequest
from polyphily.runs.trials import Searched

ALL = "all"
BOARD = "board"  # the stem of the files of a comparison
Key = tuple[str, str]
"""The names of a cell and of a method."""
Federations = Federation | Sequence[Federation]


@dataclass(frozen=True)
class Comparison:
    """The outcome of a comparison.

    Attributes:
        board: scores, ranks, tests and costs.
        searches: the search of each (cell, method), if there was one in this call.
        folder: the folder of the runs, if one was asked for.
    """

    board: Board
    searches: Mapping[Key, Searched] = field(default_factory=dict)
    folder: Path | None = None

    @property
    def methods(self) -> Sequence[str]:
        """The methods, the best mean rank first."""
        return self.board.ordered

    @property
    def summaries(self) -> Mapping[Key, Mapping[str, Any]]:
        """The summary of every run that ended, by (cell, method)."""
        return self.board.summaries

    @property
    def failures(self) -> Mapping[Key, str]:
        """Why runs did not end, by (cell, method)."""
        return self.board.failures

    def mean(self, method: str, cell: str | None = None) -> float | None:
        """Return the mean test score over seeds at the best validation round."""
        return self.board.mean(cell or self.board.cells[0], method)

    def deviation(self, method: str, cell: str | None = None) -> float | None:
        """Return the standard deviation over seeds; None for a single seed."""
        return self.board.deviation(cell or self.board.cells[0], method)

    def table(self) -> str:
        """Return scores, ranks and costs as a table in Markdown, with notes."""
        return board_as(".md", self.board)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        searches = [{"cell": cell, **found.to_dict()} for (cell, _), found in self.searches.items()]
        return {**self.board.to_dict(), **({"searches": searches} if searches else {})}


def compare(
    methods: str | Sequence[str],
    federations: Federations | Mapping[str, Federations],
    *,
    tune: int = 0,
    rates: Mapping[str, Sequence[float]] | None = None,
    out: str | Path | None = None,
    report: Callable[[str], None] | None = None,
    **options: Any,
) -> Comparison:
    """Train several methods on the same federations, and compare their test scores.

    >>> import polyphily
    >>> data = [polyphily.load("csbm:nodes=60,features=8", clients=2, seed=s) for s in (0, 1)]
    >>> found = polyphily.compare(["local", "fedavg"], data, rounds=2, hidden=8)
    >>> sorted(found.methods), found.board.ranking.blocks
    (['fedavg', 'local'], 2)

    Args:
        methods: names of methods, or "all".
        federations: one federation, several of one kind (one per seed, trained side by side), or
            several kinds by name, each with one or several.
        tune: search with as many trials for every method and federation before its run (see
            `polyphily.tune`); 0 does not search.
        rates: with `tune`, the learning rates and decays that every trial combines.
        out: the folder of the runs; none unless given. A comparison that was stopped goes on if it
            is called again.
        report: called with a line of text as each run begins.
        **options: settings, and hyperparameters, which are used for the methods that have them.

    Returns:
        Scores, ranks, tests of significance and costs. Runs that fail are listed there.

    Raises:
        UserError: for unknown names and values out of bounds.
        TrainingError: if every run failed.
    """
    names = method_names([methods] if isinstance(methods, str) else methods)
    cells = _cells(federations)
    settings = {k: v for k, v in options.items() if k in knobs.names()}
    given = {k: v for k, v in options.items() if k not in settings}
    own = hyperparameters_by_method(names, given)
    request = TuneRequest(tune, dict(rates or {})) if tune or rates else None
    orders = {
        (cell, name): order_of(name, own[name], members, settings, request)
        for cell, members in cells.items()
        for name in names
    }
    check_orders(orders.values(), given)
    folder = Path(out) if out else None
    searches: dict[Key, Searched] = {}
    board = run_board(
        orders,
        {key: place(folder, key, len(cells)) for key in orders} if folder else {},
        lambda execution, done: execution.go().summary,
        loaded=cells,
        announce=lambda number, key: (
            report(f"{number}/{len(orders)}  {', '.join(key)}") if report else None
        ),
        searches=searches,
    )
    if not board.summaries:
        raise TrainingError(f"every run failed: {next(iter(board.failures.values()))}")
    if folder:
        write_board(board, folder)
    return Comparison(board, searches, folder)


# What is compared --------------------------------------------------------------------------------


def method_names(given: Sequence[str]) -> list[str]:
    """Return the names of methods as they are registered; all of them for "all"."""
    if [name.lower() for name in given] == [ALL]:
        return sorted(METHODS)
    names = [METHODS.find(name).name for name in given]
    if not names:
        raise UserError("compare: no method is named")
    if len(set(names)) < len(names):
        raise UserError("compare: a method is named twice")
    return names


def hyperparameters_by_method(
    names: Sequence[str], given: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return those hyperparameters of all that each method has."""
    known = {name: settable(name) for name in names}
    for entry in given:
        if not any(entry in own for own in known.values()):
            raise unknown("hyperparameter", entry, set().union(*known.values()))
    return {name: {k: v for k, v in given.items() if k in own} for name, own in known.items()}


def order_of(
    method: str,
    hyperparameters: Mapping[str, Any],
    federations: Sequence[Federation],
    settings: Mapping[str, Any],
    tune: TuneRequest | None,
) -> Order:
    """Return the order of a run on federations that are loaded already."""
    first = federations[0]
    data = {**first.request, "sha256": [f.partition.sha256 for f in federations]}
    seeds = tuple(f.seed for f in federations)
    return Order(method, dict(hyperparameters), data, seeds, dict(settings), tune=tune)


def check_orders(orders: Iterable[Order], assigned: Iterable[str]) -> None:
    """Refuse mistakes before anything runs: unknown names, impossible and idle values.

    Args:
        orders: of all runs.
        assigned: the hyperparameters that the user set.
    """
    for order in orders:
        knobs.from_mapping(order.settings)
        method = create(order.method, order.hyperparameters)
        check_effects(method, set(assigned) & order.hyperparameters.keys())


def _cells(
    federations: Federations | Mapping[str, Federations],
) -> dict[str, list[Federation]]:
    if isinstance(federations, Mapping):
        return {name: as_list(members) for name, members in federations.items()}
    members = as_list(federations)
    return {members[0].dataset: members}


def as_list(federations: Federations) -> list[Federation]:
    """Return one or several federations as a list."""
    found = [federations] if isinstance(federations, Federation) else list(federations)
    if not found:
        raise UserError("no federation was given")
    return found


def place(folder: Path, key: Key, cells: int) -> Path:
    """Return the run folder of a cell and a method; with one cell, of the method alone."""
    return folder / key[1] if cells == 1 else folder / safe_name(key[0]) / key[1]


# Running -----------------------------------------------------------------------------------------


def run_board(
    orders: Mapping[Key, Order],
    places: Mapping[Key, Path],
    train: runner.Train,
    *,
    loaded: Mapping[str, Sequence[Federation]] | None = None,
    tuner: runner.Tune = runner.tune,
    announce: Callable[[int, Key], None] | None = None,
    on_failure: Callable[[Key, PolyphilyError], None] | None = None,
    searches: dict[Key, Searched] | None = None,
) -> Board:
    """Run orders one after another; failures are kept, and the rest goes on.

    Args:
        orders: of every cell and method.
        places: their run folders; without one, nothing is written.
        train: trains a run.
        loaded: the federations of each cell, if they are loaded already.
        tuner: makes the search of an order.
        announce: called with number and key of each order that is not finished.
        on_failure: called with the error of a run that failed.
        searches: takes the searches that were made.
    """
    summaries: dict[Key, Any] = {}
    failures: dict[Key, str] = {}
    for number, (key, order) in enumerate(orders.items(), 1):
        folder = places.get(key)
        if announce and not (folder and runner.is_finished(order, folder)):
            announce(number, key)

        def tune(
            job: Order, members: Sequence[Federation], where: Path | None, key: Key = key
        ) -> Searched:
            found = tuner(job, members, where)
            if searches is not None:
                searches[key] = found
            return found

        members = loaded[key[0]] if loaded else None
        try:
            summaries[key] = runner.run(order, folder, train, federations=members, tuner=tune)
        except PolyphilyError as error:
            failures[key] = str(error)
            if on_failure:
                on_failure(key, error)
    cells = list(dict.fromkeys(cell for cell, _ in orders))
    methods = list(dict.fromkeys(method for _, method in orders))
    return Board(methods, cells, summaries, failures)


# Files -------------------------------------------------------------------------------------------


def board_as(suffix: str, board: Board) -> str:
    """Return a board in the format of a file's suffix: .md, .csv or .tex."""
    grid, notes = board.grid(), board.notes()
    if suffix == ".csv":
        return to_csv([grid])
    if suffix == ".tex":
        return to_latex(grid, notes) + "\n"
    return to_markdown(grid) + "\n\n" + "\n".join(f"- {note}" for note in notes) + "\n"


def write_board(board: Board, folder: Path, more: Sequence[Path] = ()) -> list[Path]:
    """Write a board as data and as Markdown, and the diagram of ranks; return the files.

    Args:
        board: what is written.
        folder: where `board.json`, `board.md` and the diagram go.
        more: further files, .md, .csv or .tex.
    """
    files = [folder / f"{BOARD}.md", *more]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / f"{BOARD}.json", json.dumps(board.to_dict(), indent=2) + "\n")
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text(file, board_as(file.suffix.lower(), board))
    except OSError as error:
        raise UserError(f"cannot write {error.filename}: {error.strerror}") from None
    ranked = board.ranking
    if ranked and len(ranked.methods) > 1 and ranked.blocks > 1:
        with suppress(UserError):  # there is no matplotlib
            from polyphily.report import figures, style

            diagram = figures.critical_difference(ranked)
            for suffix in (".svg", ".png"):
                style.save(diagram, folder / f"{BOARD}-ranks{suffix}")
                files.append(folder / f"{BOARD}-ranks{suffix}")
    return files
