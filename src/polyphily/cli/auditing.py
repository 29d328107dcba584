"""`polyphily audit`: how much about a client's edges can be inferred from what it shares."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyphily.cli import completion

if TYPE_CHECKING:
    from polyphily.audit.attackers import Finding


def add_to(app: typer.Typer) -> None:
    app.command("audit")(audit)


def audit(
    folders: Annotated[
        list[Path],
        typer.Argument(
            help="Run folders, or folders with runs in them.",
            metavar="RUN…",
            autocompletion=completion.run_folder,
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Try to infer the clients' edges from what they sent (first seed, last round)."""
    from polyphily.audit import attackers
    from polyphily.cli.inspecting import progress
    from polyphily.cli.training import restore
    from polyphily.report import runs

    found = runs.read_runs(folders)
    audited: list[dict[str, Any]] = []
    with progress() as report:
        for label, run in zip(runs.labels(found), found, strict=True):
            report(f"attacking {run.path}")
            result = attackers.audit(restore(run.path).simulation)
            facts = {
                "run": label,
                "folder": str(run.path),
                "method": run.method,
                "dataset": run.summary["dataset"],
            }
            rows = [{**facts, **_row(finding)} for finding in result.findings]
            audited.append({"run": label, "rows": rows, "unread": result.unread})
    if as_json:
        rows = [{**row, "unread": entry["unread"]} for entry in audited for row in entry["rows"]]
        typer.echo(json.dumps(rows))
        return
    _show(audited)


def _row(finding: Finding) -> dict[str, Any]:
    """Return one attacker's results as JSON has them."""
    from polyphily.audit import links

    attacks = finding.attacks
    return {
        "sees": finding.sees,
        "tried": finding.tried,
        "auc": links.mean(attacks, lambda a: a.auc),
        "auc_either_way": links.mean(attacks, lambda a: a.either_way),
        "accuracy": links.mean(attacks, lambda a: a.accuracy),
        "chance": links.CHANCE,
        "chance_either_way": links.mean(attacks, lambda a: a.chance_either_way),
        "at_chance": finding.at_chance,
        "clients": [a and asdict(a) for a in attacks],
    }


def _show(audited: list[dict[str, Any]]) -> None:
    """Print a table for each run, and what was tried where an attack is at chance."""
    from rich.markup import escape

    from polyphily.cli import terminal
    from polyphily.cli.tables import Column, print_table, text
    from polyphily.report.words import percent, span

    terminal.out.print("[bold]Link inference[/bold], in %, mean over clients; chance is 50")
    titles = ("AUC", "by client", "accuracy", "either way", "chance")
    for entry in audited:
        rows = [
            (
                row["sees"],
                percent(row["auc"], 1),
                span([client and client["auc"] for client in row["clients"]]),
                percent(row["accuracy"], 1),
                percent(row["auc_either_way"], 1),
                percent(row["chance_either_way"], 1),
            )
            for row in entry["rows"]
        ]
        terminal.out.print(f"\n[bold]{escape(entry['run'])}[/bold]")
        print_table(terminal.out, [text("attacker sees"), *map(Column, titles)], rows)
        if tried := [row["tried"] for row in entry["rows"] if row["at_chance"]]:
            terminal.out.print(f"at chance: tried {escape('; '.join(tried))}")
        if entry["unread"]:
            names = escape(", ".join(entry["unread"]))
            terminal.out.print(f"not attacked, as no scores of pairs follow: {names}")
    terminal.out.print(
        "\n[dim]–: nothing is shared. The attacker knows the nodes' features and train labels. "
        "The rows features and labels use no message. Representations, and all that is on the "
        "client's own graph, are never sent: they say what could be learned at most. Either way: "
        "the larger of AUC and 100 - AUC, for an attacker who knows at which clients unlike nodes "
        "are joined; chance is its value if the scores say nothing.[/dim]"
    )
