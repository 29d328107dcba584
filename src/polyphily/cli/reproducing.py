"""`polyphily reproduce`: the tables of a paper, run again and compared with what it printed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from polyphily.cli import listings, options, training
from polyphily.core.settings import from_mapping
from polyphily.errors import PolyphilyError, UserError
from polyphily.papers import plan, report, tables
from polyphily.papers.plan import Choice
from polyphily.papers.report import Line
from polyphily.papers.tables import Paper, Table

FAILED = "failed"


def add_to(app: typer.Typer) -> None:
    app.command("reproduce")(reproduce)


def reproduce(
    paper: Annotated[
        str | None, typer.Argument(help="The paper: fedspa, fedgsp, fedhero, s2fgl, fedath.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the tables and exit.")] = False,
    table: Annotated[
        str | None, typer.Option("--table", help="The number of one table; all unless given.")
    ] = None,
    only: Annotated[str | None, typer.Option("--only", help="Datasets: cora,texas.")] = None,
    methods: Annotated[str | None, typer.Option("--methods", help="Rows: fedavg,fedspa.")] = None,
    clients: Annotated[str | None, typer.Option("--clients", help="Numbers: 5,10.")] = None,
    seeds: Annotated[
        str | None,
        typer.Option("--seeds", "--seed", help="Seeds: 0,1,2; unless given, as many as the paper."),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option("--rounds", help="Rounds, instead of the paper's.")
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help=f"Try with one seed and {plan.QUICK_ROUNDS} rounds."),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for runs and tables. [dim]\\[reproduce/…][/dim]"),
    ] = None,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Run a paper's tables again and print the results beside the published figures.

    Finished runs are not repeated, so a command that was stopped can be started again.
    """
    if list_ or paper is None:
        _list(paper, as_json)
        return
    source = tables.paper(paper)
    wanted = [source.table(table)] if table else list(source.tables.values())
    choice = Choice(
        datasets=_names(only),
        methods=_names(methods),
        clients=_numbers("clients", clients),
        seeds=None if seeds is None else tuple(_seeds(seeds)),
        rounds=rounds,
        quick=quick,
        device=device,
    )
    from_mapping({"device": device} | ({} if rounds is None else {"rounds": rounds}))
    plan.check_choice(source, wanted, choice)
    _check_device(device)
    folder = out or Path("reproduce") / source.name
    results = [_reproduce(source, each, choice, folder) for each in wanted]
    results = [result for result in results if result["rows"]]
    if not results:
        raise UserError(
            "no cell is asked for: no cell fits --table, --only, --methods and --clients together"
        )
    if as_json:
        typer.echo(json.dumps(results if table is None else results[0], indent=2))
    else:
        typer.echo("\n".join(report.as_markdown(result) for result in results))
    if any(str(row["skipped"]).startswith(FAILED) for one in results for row in one["rows"]):
        raise typer.Exit(1)


def _reproduce(paper: Paper, table: Table, choice: Choice, out: Path) -> dict[str, Any]:
    """Run a table's cells, and write the files after every row so that a kill loses none."""
    lines: list[Line] = []
    data = report.as_data(paper, table, lines, choice)
    for line in _run_lines(paper, table, choice, out):
        lines.append(line)
        data = report.as_data(paper, table, lines, choice)
        if line.skipped is None:
            _write(data, out)
    if lines:
        _write(data, out)
    return data


def _write(data: dict[str, Any], out: Path) -> None:
    from polyphily.runs.folder import write_text

    name = data["table"] if data["table"].startswith("figure") else f"table-{data['table']}"
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_text(out / f"{name}.json", json.dumps(data, indent=2, ensure_ascii=False) + "\n")
        write_text(out / f"{name}.md", report.as_markdown(data))
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror}") from None


def _run_lines(paper: Paper, table: Table, choice: Choice, out: Path) -> Iterator[Line]:
    for figure in plan.select(paper, table, choice):
        reason = plan.obstacle(paper, figure)
        if reason:
            yield Line(figure, skipped=reason)
        else:
            yield _run_line(table, plan.job(paper, table, figure, choice), out)


def _run_line(table: Table, job: plan.Job, out: Path) -> Line:
    from polyphily.papers import runner

    folder = runner.folder_of(out, table.name, job)
    if not runner.is_finished(job, folder):
        what = f"{job.figure.cell}, {job.figure.method}"
        Console(stderr=True, highlight=False).print(f"[dim]{what}[/dim]", soft_wrap=True)
    try:
        summary = runner.run(job, folder, training.train)
    except PolyphilyError as error:
        return Line(job.figure, skipped=f"{FAILED}: {error}", folder=str(folder))
    mean, std = runner.outcome(job, summary)
    return Line(job.figure, mean, std, job.seeds, folder=str(folder))


def _list(name: str | None, as_json: bool) -> None:
    rows = [
        {
            "paper": paper.name,
            "table": table.name,
            "title": table.title,
            "cells": len({figure.cell for figure in table.figures}),
            "figures": len(table.figures),
            "runnable": sum(plan.obstacle(paper, figure) is None for figure in table.figures),
        }
        for paper in map(tables.paper, tables.PAPERS if name is None else (name,))
        for table in paper.tables.values()
    ]
    columns = {key: key for key in ("paper", "table", "cells", "figures", "runnable")}
    listings.show(rows, as_json, columns | {"title": "what it shows"})


def _check_device(device: str) -> None:
    """Raise a `UserError` if a device does not exist. Torch is imported for a GPU only."""
    if device != "cpu":
        from polyphily.runtime import machine

        machine.check_device(device)


def _names(text: str | None) -> tuple[str, ...] | None:
    """Split names at commas, but not at one before `option=`, which belongs to the name."""
    if text is None:
        return None
    return tuple(filter(None, (name.strip() for name in re.split(r",(?![^,:\[]*=)", text))))


def _numbers(flag: str, text: str | None) -> tuple[int, ...] | None:
    try:
        return None if text is None else tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"--{flag} {text}: write numbers such as 5,10") from None


def _seeds(text: str) -> list[int]:
    return options.gather(None, {"seeds": text}, [], None).seeds
