"""`polyphily audit`: how much about a client's edges can be inferred from what it shares."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer


def add_to(app: typer.Typer) -> None:
    app.command("audit")(audit)


def audit(
    folders: Annotated[
        list[Path],
        typer.Argument(help="Run folders, or folders with runs in them.", metavar="RUN…"),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Try to infer the clients' edges from what they sent (first seed, last round)."""
    from polyphily.audit import links
    from polyphily.cli import terminal
    from polyphily.cli.inspecting import progress
    from polyphily.cli.training import restore
    from polyphily.report import runs

    found = runs.read_runs(folders)
    rows: list[dict[str, Any]] = []
    with progress() as report:
        for label, run in zip(runs.labels(found), found, strict=True):
            report(f"attacking {run.path}")
            for name, attacks in links.audit(restore(run.path).simulation).items():
                rows.append(
                    {
                        "run": label,
                        "folder": str(run.path),
                        "method": run.method,
                        "dataset": run.summary["dataset"],
                        "sees": name,
                        "auc": links.mean(attacks, lambda a: a.auc),
                        "auc_either_way": links.mean(attacks, lambda a: a.either_way),
                        "accuracy": links.mean(attacks, lambda a: a.accuracy),
                        "chance": links.CHANCE,
                        "chance_either_way": links.mean(attacks, lambda a: a.chance_either_way),
                        "clients": [a and asdict(a) for a in attacks],
                    }
                )
    if as_json:
        typer.echo(json.dumps(rows))
        return
    from rich.table import Table

    from polyphily.report.words import percent, span

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("run", "attacker sees"):
        table.add_column(title)
    for title in ("AUC", "accuracy", "chance", "by client", "either way", "chance"):
        table.add_column(title, justify="right", no_wrap=True)
    for i, row in enumerate(rows):
        aucs = [client and client["auc"] for client in row["clients"]]
        table.add_row(
            row["run"] if i == 0 or rows[i - 1]["folder"] != row["folder"] else "",
            row["sees"],
            percent(row["auc"], 1),
            percent(row["accuracy"], 1),
            percent(row["chance"], 1),
            span(aucs),
            percent(row["auc_either_way"], 1),
            percent(row["chance_either_way"], 1),
        )
    terminal.out.print("[bold]Link inference[/bold], in %, mean over clients")
    terminal.out.print(table)
    terminal.out.print(
        "[dim]–: nothing is shared. The attacker sees features: no model at all; model: features "
        "and the parameters that were sent; representations: the output of that model on the "
        "client's graph, which is never sent. Either way: the larger of AUC and 100 - AUC, for an "
        "attacker who knows at which clients unlike nodes are joined; chance is its value if the "
        "scores say nothing.[/dim]"
    )
