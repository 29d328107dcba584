"""`polyphily site policy` and `site log`: which runs a site takes part in, and what left it."""

from __future__ import annotations

import json
import math
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyphily.errors import UserError

if TYPE_CHECKING:
    from polyphily.flower.account import Account
    from polyphily.flower.site_policy import PolicyFile, SitePolicy

WIDTH = 80
SHOWN = 20  # messages of a log
DELTA = 1e-5  # at which the account is shown; budgets have their own
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
SiteFolder = Annotated[Path, typer.Argument(help="The site's folder.", metavar="DIR")]


def add_to(site: typer.Typer) -> None:
    site.command("policy")(policy)
    site.command("log")(log)


def policy(
    folder: SiteFolder,
    new_data: Annotated[
        str | None,
        typer.Option(
            help="Declare that the site's data are others from now on: a new account of uploads "
            "begins. The note says why.",
            metavar="NOTE",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check the site's policy and show it, with the budget that is spent; write one if missing."""
    from polyphily.cli.terminal import print_line
    from polyphily.flower.account import now
    from polyphily.flower.site_policy import PolicyFile

    own = PolicyFile(_existing(folder))
    if not own.file.exists():
        own.write_default()
        if not as_json:
            print_line(f"written: {own.file}. Edit it: a running site reads it again.")
    rules, account = own.read(), own.account()
    if new_data is not None:
        if not new_data.strip():
            raise UserError("--new-data: say why the data are others, as in --new-data '2027'")
        account.begin_anew(now(), new_data.strip())
    found = _facts(own, rules, account)
    if as_json:
        typer.echo(json.dumps(found))
        return
    for name, value in found["rules"].items():
        print_line(f"{name:<20} {value}")
    made = found["uploads"]
    print_line(
        f"uploads: {made['all']:,} ({made['day']:,} in 24 hours, {made['year']:,} in 365 days), "
        f"{made['without_noise']:,} without noise"
    )
    if found["spent"] is not None:
        print_line(f"spent by uploads with noise: epsilon {found['spent']:.4g} at delta {DELTA:g}")
    for total in found["budgets"]:
        spent = "infinite" if total["spent"] is None else f"{total['spent']:.4g}"
        print_line(f"budget: {total['budget']}; spent: {spent}")


def _facts(own: PolicyFile, rules: SitePolicy, account: Account) -> dict[str, Any]:
    """Return the rules in force, the number of uploads and what is spent of each budget."""
    from polyphily.core.budget import Budget
    from polyphily.flower.account import DAY, YEAR, now

    moment, uploads = now(), account.uploads()
    noised = [upload.multiplier for upload in uploads if upload.multiplier is not None]
    return {
        "rules": rules.in_words(),
        "uploads": {
            "all": len(uploads),
            "day": len(account.uploads(since=moment - DAY)),
            "year": len(account.uploads(since=moment - YEAR)),
            "without_noise": sum(upload.multiplier is None for upload in uploads),
        },
        "spent": Budget(1.0, DELTA).spent_by(noised) if noised else None,
        "budgets": [
            {
                "rule": total.rule,
                "budget": str(total),
                "spent": spent if math.isfinite(spent := total.spent(account, moment)) else None,
            }
            for total in rules.totals
        ],
        "journal": str(account.journal.file),
    }


def log(
    folder: SiteFolder,
    run: Annotated[str | None, typer.Option(help="Only messages of this run.")] = None,
    last: Annotated[int, typer.Option(help="The number of messages; 0 shows all.")] = SHOWN,
    verify: Annotated[
        bool, typer.Option("--verify", help="Only check that nothing was changed or removed.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what left the site: names, shapes, norms and hashes of all that was sent."""
    from polyphily.cli.terminal import print_line
    from polyphily.flower.audit_log import AuditLog
    from polyphily.flower.site_policy import PolicyFile

    own = _existing(folder)
    audit = AuditLog(own)
    entries = audit.read()
    if verify:
        journal = PolicyFile(own).account().journal
        audit.check_uploads(journal)
        for file, lines in ((audit.journal.file, entries), (journal.file, journal.read())):
            print_line(f"{file.name}: {len(lines):,} lines, none changed or removed")
        return
    chosen = [entry for entry in entries if run is None or entry["run"] == run]
    chosen = chosen[-last:] if last else chosen
    if as_json:
        typer.echo(json.dumps(chosen))
        return
    for entry in chosen:
        for line in _lines(entry):
            print_line(line)
    if len(chosen) < len(entries):
        print_line(f"{len(chosen):,} of {len(entries):,} messages (--last 0 shows all)")


def _lines(entry: dict[str, Any]) -> list[str]:
    """Return an entry of the log as lines of at most 80 characters."""
    round_ = f" {entry['round']}" if entry["round"] is not None else ""
    head = f"{entry['time'][:19]} {entry['kind']}{round_}"
    head += f" of {entry['run']}" if entry["run"] else ""
    rows = [f"{entry['what']}, {entry['bytes']:,} bytes", f"sha256 {entry['sha256']}"]
    if "sent" in entry:
        rows += [f"sent: {entry['sent']}", f"reason, which stayed here: {entry['reason']}"]
    else:
        rows.append(f"facts: {', '.join(entry['names'])}")
        rows += [_tensor(tensor) for tensor in entry["tensors"]]
    return [*_wrapped(head, ""), *(line for row in rows for line in _wrapped(row, "  "))]


def _tensor(tensor: dict[str, Any]) -> str:
    shape = "×".join(map(str, tensor["shape"]))
    norm = "not finite" if tensor["norm"] is None else f"{tensor['norm']:.4g}"
    return f"{tensor['name']}: {shape} {tensor['dtype']}, norm {norm}"


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ")


def _existing(folder: Path) -> Path:
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder: give the folder of a site")
    return folder.resolve()
