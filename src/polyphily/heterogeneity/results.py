"""What our own studies found, as it ships with the package: `results.json` beside this file.

It says what docs/results.md says, and one command writes both from the files in docs/results:
`polyphily study --no-run --out docs/results --write docs/results.md
--digest src/polyphily/heterogeneity/results.json`.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

FILE = "results.json"
WHERE = "docs/results.md"


@dataclass(frozen=True)
class Finding:
    """A method against FedAvg on the same backbone, in one setting, over the same seeds.

    Attributes:
        method: which.
        setting: dataset, partition, number of clients, in words.
        dataset: its name.
        view: whose models were scored: "received" or "trained".
        metric: which score.
        difference: in points; positive where the method is ahead.
        p: of a paired t-test.
        verdict: "better", "level" or "worse".
    """

    method: str
    setting: str
    dataset: str
    view: str
    metric: str
    difference: float
    p: float
    verdict: str


@cache
def findings() -> dict[str, tuple[Finding, ...]]:
    """All that was found, by method."""
    text = resources.files(__package__).joinpath(FILE).read_text(encoding="utf-8")
    found: dict[str, tuple[Finding, ...]] = {}
    for entry in json.loads(text):
        found[entry["method"]] = (*found.get(entry["method"], ()), Finding(**entry))
    return found


def in_words(methods: Sequence[str], dataset: str) -> str:
    """What we found about methods, and on this dataset where we tried it.

    Args:
        methods: their names.
        dataset: the one at hand, with options or without.
    """
    known = findings()
    tried = [_one(known[method], dataset) for method in methods if method in known]
    untried = [method for method in methods if method not in known]
    parts = []
    if tried:
        parts.append(f"Our results against FedAvg on the same backbone: {'; '.join(tried)}.")
    if untried:
        parts.append(f"We have no results on {' and '.join(untried)} yet.")
    return " ".join(parts)


def _one(found: Sequence[Finding], dataset: str) -> str:
    better, worse = (
        sum(entry.verdict == verdict for entry in found) for verdict in ("better", "worse")
    )
    mean = statistics.fmean(entry.difference for entry in found)
    words = f"{found[0].method} better in {better or 'none'} of {len(found)} settings, worse in "
    words += f"{worse or 'none'}, by {mean:+.2f} points in the mean"
    here = [entry for entry in found if entry.dataset == dataset.partition(":")[0]]
    if here:
        settings = ", ".join(f"{entry.setting}: {entry.difference:+.2f}" for entry in here)
        words += f" ({settings})"
    return words
