"""`polyphily reproduce`: a paper's table, run again beside the published figures."""

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
        str | None, typer.Argument(help="fedspa, fedgsp, fedhero, s2fgl, fedath.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the tables and stop.")] = False,
    table: Annotated[
        str | None, typer.Option("--table", help="A table's number as printed; all unless given.")
    ] = None,
    only: Annotated[str | None, typer.Option("--only", help="Datasets: cora,texas.")] = None,
    methods: Annotated[str | None, typer.Option("--methods", help="Rows: fedavg,fedspa.")] = None,
    clients: Annotated[str | None, typer.Option("--clients", help="Numbers: 5,10.")] = None,
    seeds: Annotated[
        str | None, typer.Option("--seeds", "--seed", help="Seeds: 0,1,2; as many as the paper's.")
    ] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", help="In place of the paper's.")] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help=f"One seed and {plan.QUICK_ROUNDS} rounds: does it work?"),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Where runs and tables go. [dim]\\[reproduce/…][/dim]"),
    ] = None,
    device: Annotated[str, typer.Option("--device", help="cpu or cuda.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Run a paper's tables again, beside the published figures.

    What has finished is not run again, so a stopped command goes on where it was.
    """
    if list_ or paper is None:
        _list(paper, as_json)
        return
    found = tables.paper(paper)
    wanted = [found.table(table)] if table else list(found.tables.values())
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
    plan.check(found, wanted, choice)
    check_device(device)
    folder = out or Path("reproduce") / found.name
    results = [_reproduce(found, one, choice, folder) for one in wanted]
    results = [result for result in results if result["rows"]]
    if not results:
        raise UserError(
            "no cell is asked for: --table, --only, --methods and --clients do not meet"
        )
    if as_json:
        typer.echo(json.dumps(results if table is None else results[0], indent=2))
    else:
        typer.echo("\n".join(report.as_markdown(result) for result in results))
    if any(str(row["skipped"]).startswith(FAILED) for one in results for row in one["rows"]):
        raise typer.Exit(1)


def _reproduce(paper: Paper, table: Table, choice: Choice, out: Path) -> dict[str, Any]:
    """Runs a table's cells; the files are renewed after every row, so that a kill loses none."""
    lines: list[Line] = []
    data = report.as_data(paper, table, lines, choice)
    for line in _lines(paper, table, choice, out):
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


def _lines(paper: Paper, table: Table, choice: Choice, out: Path) -> Iterator[Line]:
    for figure in plan.select(paper, table, choice):
        reason = plan.obstacle(paper, figure)
        if reason:
            yield Line(figure, skipped=reason)
        else:
            yield _line(table, plan.job(paper, table, figure, choice), out)


def _line(table: Table, job: plan.Job, out: Path) -> Line:
    from polyphily.papers import runner

    folder = runner.folder_of(out, table.name, job)
    if not runner.is_finished(job, folder):
        words = f"{job.figure.cell}, {job.figure.method}"
        Console(stderr=True, highlight=False).print(f"[dim]{words}[/dim]", soft_wrap=True)
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


def check_device(device: str) -> None:
    """Refuses a device that is not there, before any cell is loaded."""
    if device != "cpu":
        from polyphily.runs import run

        run.check_device(device)


def _names(text: str | None) -> tuple[str, ...] | None:
    """Names between commas; a comma before `option=` belongs to the name."""
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
