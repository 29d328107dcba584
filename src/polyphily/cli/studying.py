"""`polyphily study`: run the library's own studies and write their tables."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from polyphily import studies
from polyphily.cli import completion, options
from polyphily.cli.jobs import Jobs, display
from polyphily.cli.markdown import show_page
from polyphily.errors import UserError

LEADERBOARD = "leaderboard"
CONTEST = "polyphony"
C = TypeVar("C")


def _complete_study(incomplete: str) -> list[tuple[str, str]]:
    return completion.words((*studies.studies(), LEADERBOARD, CONTEST))(incomplete)


def add_to(app: typer.Typer) -> None:
    app.command("study")(study)


def study(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Studies, all unless given (see --list), or leaderboard.",
            autocompletion=_complete_study,
        ),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List studies and cells and exit.")] = False,
    only: Annotated[
        str | None, typer.Option("--only", help="Cells whose title contains this: cora, 'metis 5'.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder of results.")] = Path("studies"),
    write: Annotated[
        list[Path] | None,
        typer.Option(
            "--write",
            help="Write the tables to this file; repeatable. The leaderboard also as .html, which "
            "can be sorted, .csv and .tex, and as a picture: .svg, .pdf or .png.",
        ),
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "--methods",
            help="Rows of the leaderboard: fedavg,mine; all methods unless given.",
            autocompletion=completion.of("methods", several=True),
        ),
    ] = None,
    rows: Annotated[
        list[str] | None,
        typer.Option(
            "--rows",
            help="Rows of the study polyphony whose label contains this: res-acm; repeatable.",
        ),
    ] = None,
    digest: Annotated[
        Path | None,
        typer.Option("--digest", help="Write what `polyphily inspect` quotes to this file."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="A hyperparameter of the method and its ablations: paper=on."),
    ] = None,
    run: Annotated[bool, typer.Option("--run/--no-run", help="Run what is missing.")] = True,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    partitions: Annotated[
        Path | None,
        typer.Option("--partitions", help="Folder of partition files; missing ones are written."),
    ] = None,
    share: Annotated[
        str, typer.Option("--share", help="Part of the cells: 1/3 is every third.")
    ] = "1/1",
    minutes: Annotated[
        float, typer.Option("--minutes", help="Start no row after this time.")
    ] = float("inf"),
    jobs: Jobs = 1,
) -> None:
    """Run the studies behind docs/results.md: where a method helps, and by how much.

    All trials and seeds of a row run in one pass. Finished rows are not repeated.

    `polyphily study leaderboard` is behind docs/leaderboard.md: every method, with equally many
    trials. `polyphily study polyphony` compares Polyphony with the best of all rows in the cells of
    all studies.
    """
    here = _Runs(out, device, partitions, _share(share), time.monotonic() + 60 * minutes, jobs)
    if LEADERBOARD in (names or []):
        if len(names or []) > 1 or set_ or digest or rows:
            raise UserError("study leaderboard: run it by itself, without --set, --digest, --rows")
        _leaderboard(only, methods, here, write or [], list_, run)
        return
    if CONTEST in (names or []):
        if len(names or []) > 1 or set_ or digest or methods:
            raise UserError("study polyphony: run it by itself, without --set, --digest, --methods")
        _contest(only, rows or [], here, write or [], list_, run)
        return
    if rows:
        raise UserError("--rows chooses rows of one study: polyphily study polyphony")
    if methods:
        raise UserError("--methods chooses rows of the leaderboard: polyphily study leaderboard")
    if len(write or []) > 1:
        raise UserError("--write: the studies have one file of tables")
    for file in write or []:
        options.check_output("--write", file, (".md",))
    changes = options.gather(None, {}, set_ or [], None).hyperparameters
    wanted = [studies.find_study(name).with_set(changes) for name in names or studies.studies()]
    cells = [(s, cell) for s in wanted for cell in s.cells if (only or "") in cell.title]
    if not cells:
        raise UserError(f"--only {only}: no cell has this in its title; --list shows all cells")
    if list_:
        for s, cell in cells:
            typer.echo(f"{s.name:12s} {cell.title}")
        return
    if run:
        _run(cells, here)
    from polyphily.studies import results

    if digest is not None:
        lines = ",\n".join(json.dumps(entry) for entry in results.digest(out, wanted))
        _save(digest, f"[\n{lines}\n]\n")
        if not write:
            return
    text = results.page(out, wanted)
    if write:
        _save(write[0], text)
    else:
        show_page(text)


@dataclass(frozen=True)
class _Runs:
    """The place and time of runs.

    Attributes:
        out: the folder of results.
        device: the device to train on.
        partitions: the folder of partition files.
        share: which of how many parts of the cells, from 1.
        until: no row is started after this value of `time.monotonic()`.
        jobs: how many rows run at once.
    """

    out: Path
    device: str
    partitions: Path | None
    share: tuple[int, int]
    until: float
    jobs: int = 1

    def part(self, cells: Sequence[C]) -> Sequence[C]:
        """Return the part of the cells that is run here."""
        number, parts = self.share
        return cells[number - 1 :: parts]

    @contextmanager
    def options(self) -> Iterator[dict[str, Any]]:
        """Provide the options of `run_rows`, with a display; the device is checked."""
        from polyphily.runtime.machine import check_device

        check_device(self.device)
        with display() as shown:
            yield {
                "device": self.device,
                "partitions": self.partitions,
                "report": shown.line,
                "until": self.until,
                "processes": self.jobs,
                "watch": shown.watch,
            }


def _share(text: str) -> tuple[int, int]:
    number, _, parts = text.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts)):
        raise UserError(f"--share {text}: write 1/3, 2/3 or 3/3")
    return int(number), int(parts)


def _run(cells: Sequence[tuple[studies.Study, studies.Cell]], here: _Runs) -> None:
    from polyphily.studies import trials

    with here.options() as how:
        trials.run_rows(here.part(cells), here.out, **how)


def _contest(
    only: str | None,
    rows: Sequence[str],
    here: _Runs,
    write: Sequence[Path],
    list_: bool,
    run: bool,
) -> None:
    """Run Polyphony's comparison with everything else, and write or print it."""
    for file in write:
        options.check_output("--write", file, (".md",))
    from polyphily.studies import contest

    cells = [cell for cell in contest.contest().cells if (only or "") in cell.title]
    labels = [row.label for row in contest.contest().rows]
    for text in rows:
        if not any(text in label for label in labels):
            raise UserError(f"--rows {text}: no row has this in its label: {'; '.join(labels)}")
    if not cells:
        raise UserError(f"--only {only}: no cell has this in its title; --list shows all cells")
    if list_:
        for cell in cells:
            typer.echo(f"{CONTEST} {cell.title}")
        return
    if run:
        with here.options() as how:
            contest.run(here.part(cells), here.out, rows, **how)
    text = contest.section(here.out) or "Polyphony has not run in any cell yet."
    for file in write:
        _save(file, text + "\n")
    if not write:
        show_page(text)


def _leaderboard(
    only: str | None,
    methods: Sequence[str] | None,
    here: _Runs,
    write: Sequence[Path],
    list_: bool,
    run: bool,
) -> None:
    """Run the leaderboard, and write or print it."""
    from polyphily.report import style
    from polyphily.studies import heat_map
    from polyphily.studies import leaderboard as boards
    from polyphily.studies.standings import SUFFIXES, Standings

    for file in write:
        options.check_output("--write", file, (*SUFFIXES, *style.SUFFIXES))
    board = boards.leaderboard()
    cells = [cell for cell in board.cells if (only or "") in cell.title]
    if not cells:
        raise UserError(f"--only {only}: no cell has this in its title; --list shows all cells")
    chosen = board.entrants(boards.check_names(methods) if methods else None)
    if list_:
        for cell in cells:
            typer.echo(f"{LEADERBOARD} {cell.title}")
        return
    if run:
        with here.options() as how:
            boards.run_rows(board, here.part(cells), chosen, here.out, **how)
    shown = Standings(board, board.entrants(), here.out)
    for file in write:
        if file.suffix.lower() in style.SUFFIXES:
            style.save(heat_map.draw(shown), file)
        else:
            _save(file, shown.text(file.suffix.lower()))
    if not write:
        show_page(shown.markdown())


def _save(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
