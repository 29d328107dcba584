"""What a comparison shows, in a few sentences: does training together help?"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

ALONE = "local"
MOST = 8  # methods; more sentences would say less than the table


def print_story(summaries: Mapping[str, Mapping[str, Any]]) -> None:
    """Print what a comparison shows, if it has several clients that train alone and together."""
    from polyphily.cli import tables, terminal

    if lines := story(summaries):
        terminal.out.print("\n[bold]In short[/bold]")
        columns = [tables.label(""), tables.text("")]
        tables.print_table(terminal.out, columns, [("-", line) for line in lines], header=False)
        terminal.out.print()


def story(summaries: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return what the runs show, in sentences computed from their summaries.

    Args:
        summaries: of the runs on one federation, by method.

    Returns:
        The sentences; none without clients that train alone, or with one method or very many.
    """
    if ALONE not in summaries or not 1 < len(summaries) <= MOST:
        return []
    metric = summaries[ALONE]["selection"]["metric"]
    found = {
        name: summary["best_val"]["test"].get(f"{metric}_per_client", [])
        for name, summary in summaries.items()
    }
    # Clients that have a score in every run: without test nodes there is none.
    known = [i for i, own in enumerate(zip(*found.values(), strict=True)) if None not in own]
    if len(known) < 2:
        return []
    scores = {name: [100 * own[i] for i in known] for name, own in found.items()}
    clients = [summaries[ALONE]["clients"][i] for i in known]
    alone = scores.pop(ALONE)
    lines = [
        f"Each client alone: test {metric} from {min(alone):.1f} to {max(alone):.1f} %, "
        f"{statistics.fmean(alone):.1f} % on average."
    ]
    for name, own in scores.items():
        better = sum(a > b for a, b in zip(own, alone, strict=True))
        gain = statistics.fmean(own) - statistics.fmean(alone)
        lines.append(
            f"Together by {name}: {statistics.fmean(own):.1f} % on average ({gain:+.1f} points); "
            f"{better} of {len(own)} clients score{'s' * (better == 1)} higher than alone."
        )
    weakest = alone.index(min(alone))
    best = max(scores, key=lambda name: scores[name][weakest])
    lines.append(
        f"Weakest alone: {clients[weakest]}, {alone[weakest]:.1f} %; together it has at most "
        f"{scores[best][weakest]:.1f} %, by {best}."
    )
    return lines
