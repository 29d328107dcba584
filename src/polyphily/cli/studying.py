"""`polyphily study`: run the library's own studies and write their tables."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from polyphily import studies
from polyphily.cli import options
from polyphily.errors import UserError


def add_to(app: typer.Typer) -> None:
    app.command("study")(study)


def study(
    names: Annotated[
        list[str] | None, typer.Argument(help="Studies; all unless given. See --list.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List studies and cells and exit.")] = False,
    only: Annotated[
        str | None, typer.Option("--only", help="Cells whose title contains this: cora, 'metis 5'.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder of results.")] = Path("studies"),
    write: Annotated[
        Path | None, typer.Option("--write", help="Write the tables to this file.")
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
) -> None:
    """Run the studies behind docs/results.md: where a method helps, and by how much.

    All trials and seeds of a row run in one pass. Finished rows are not repeated.
    """
    changes = options.gather(None, {}, set_ or [], None).hyperparameters
    wanted = [studies.find_study(name).with_set(changes) for name in names or studies.studies()]
    number, _, parts = share.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts)):
        raise UserError(f"--share {share}: write 1/3, 2/3 or 3/3")
    cells = [(s, cell) for s in wanted for cell in s.cells if (only or "") in cell.title]
    if not cells:
        raise UserError(f"--only {only}: no cell has this in its title; --list shows all cells")
    if list_:
        for s, cell in cells:
            typer.echo(f"{s.name:12s} {cell.title}")
        return
    if run:
        _run(cells[int(number) - 1 :: int(parts)], out, device, partitions, minutes)
    from polyphily.studies import results

    if digest is not None:
        lines = ",\n".join(json.dumps(entry) for entry in results.digest(out, wanted))
        digest.parent.mkdir(parents=True, exist_ok=True)
        digest.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
        if write is None:
            return
    text = results.page(out, wanted)
    if write is None:
        typer.echo(text)
    else:
        write.parent.mkdir(parents=True, exist_ok=True)
        write.write_text(text, encoding="utf-8")


def _run(
    cells: list[tuple[studies.Study, studies.Cell]],
    out: Path,
    device: str,
    partitions: Path | None,
    minutes: float,
) -> None:
    from polyphily.runtime.machine import check_device
    from polyphily.studies import trials

    check_device(device)
    console = Console(stderr=True, highlight=False)
    until = time.monotonic() + 60 * minutes
    for s, cell in cells:
        trials.run_cell(
            s,
            cell,
            out,
            device=device,
            partitions=partitions,
            report=lambda line: console.print(f"[dim]{line}[/dim]", soft_wrap=True),
            until=until,
        )
