"""The part of a page that shows the sites of a deployed run: scores of each, and its troubles."""

from __future__ import annotations

from typing import Any

from polyphily.report.blocks import Choice, Figure, Item, Section, Table, round_digits, subsample
from polyphily.report.run_set import RunSet
from polyphily.report.runs import Run, show
from polyphily.report.words import percent

MOST = 24  # sites whose curves a figure shows
SHOWN = 20  # troubles that are listed


def sites_section(run_set: RunSet) -> Section | None:
    """Return the section about the sites; None for simulations and for several runs."""
    if not run_set.single or "troubles" not in run_set.runs[0].summary:
        return None
    run = run_set.runs[0]
    items: list[Item] = [_table(run)]
    if len(run.clients) <= MOST:
        items.append(_curves(run))
    return Section("sites", "Sites", _unscored(run), tuple(items), _troubles(run))


def _table(run: Run) -> Table:
    """Return the scores of every site, and how often it was missing."""
    troubles = run.summary["troubles"]
    moments = [(run.summary[m], split) for m in ("best_val", "final") for split in ("val", "test")]
    rows = []
    for k, site in enumerate(run.clients):
        scores = [moment[split].get(f"{run.metric}_per_client", []) for moment, split in moments]
        own = [trouble["what"] for trouble in troubles if trouble["site"] == site]
        counts = (str(own.count(what)) for what in ("late", "refused"))
        rows.append((site, *[percent(s[k] if k < len(s) else None) for s in scores], *counts))
    names = ("best round, val", "best round, test", "last round, val", "last round, test")
    return Table(
        ("site", *names, "late", "refused"),
        tuple(rows),
        f"{run.metric} in percent in the view {run.view}, and how many of its answers were late or "
        "refused.",
    )


def _curves(run: Run) -> Figure:
    """Plot the scores of every site over the rounds."""
    panels: dict[str, Any] = {}
    for split in ("test", "val"):
        series = []
        for k, site in enumerate(run.clients):
            values = [
                (record["round"], own[k])
                for record in run.records
                if len(own := record[run.view][split].get(f"{run.metric}_per_client", [])) > k
                and own[k] is not None
            ]
            kept = [values[i] for i in subsample(range(len(values)))]
            x, y = [float(r) for r, _ in kept], [round_digits(100 * v) for _, v in kept]
            if x:
                series.append({"name": site, "slot": k, "x": x, "y": y})
        title = f"{split} {run.metric}"
        panels[title] = {"x": "rounds", "y": f"{title}, %", "series": series}
    return Figure(
        "site-curves",
        "lines",
        "Scores of each site",
        "Rounds in which a site sent no scores are skipped in its curve.",
        panels,
        (Choice("score", tuple(panels)),),
    )


def _unscored(run: Run) -> str:
    """Return which rounds were not scored by all sites, in words."""
    marked = {
        record["round"]: [run.clients[k] for k in record[f"unscored_{run.view}"]]
        for record in run.records
        if f"unscored_{run.view}" in record
    }
    if not marked:
        return ""
    missing = list(dict.fromkeys(site for sites in marked.values() for site in sites))
    text = f"{len(marked)} of {len(run.records)} rounds lack the scores of some sites"
    text += f" ({show(missing)}); such a round is not the best one by their absence."
    absent = run.summary["best_val"].get("unscored", [])
    if absent:
        text += f" The best round has no scores of {show([run.clients[k] for k in absent])}."
    return text


def _troubles(run: Run) -> tuple[str, ...]:
    """Return what went wrong at the sites, the first entries of a long list."""
    found = run.summary["troubles"]
    lines = [
        f"round {t['round']}: {t['site']} {t['what']}: {t['reason']}"
        if t["round"]
        else f"before the first round: {t['site']} {t['what']}: {t['reason']}"
        for t in found[:SHOWN]
    ]
    return (*lines, *([f"and {len(found) - SHOWN} more"] if len(found) > SHOWN else []))
