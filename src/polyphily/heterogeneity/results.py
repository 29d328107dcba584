"""The findings of our own studies, which ship with the package in `results.json`.

They are those of docs/results.md. One command writes both from the files in docs/results:
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
    """A comparison of a method with FedAvg on the same backbone, in one setting, on equal seeds.

    Attributes:
        method: the name of the method.
        setting: dataset, partition and number of clients, as text.
        dataset: the name of the dataset.
        view: which models were scored: "received" or "trained".
        metric: the metric.
        difference: in percentage points; positive if the method is better.
        p: the p-value of a paired t-test.
        verdict: "better", "level", "worse", or "unclear" if validation left a tie.
        against_best: the difference to FedAvg on its best backbone, in percentage points.
        gain: the part of the method that the gain comes from.
    """

    method: str
    setting: str
    dataset: str
    view: str
    metric: str
    difference: float
    p: float
    verdict: str
    against_best: float | None = None
    gain: str = ""


@cache
def findings() -> dict[str, tuple[Finding, ...]]:
    """Return all findings by method."""
    text = resources.files(__package__).joinpath(FILE).read_text(encoding="utf-8")
    found: dict[str, tuple[Finding, ...]] = {}
    for entry in json.loads(text):
        found[entry["method"]] = (*found.get(entry["method"], ()), Finding(**entry))
    return found


def tried(methods: Sequence[str]) -> tuple[str, ...]:
    """Return those of the methods that we have results on."""
    return tuple(method for method in methods if method in findings())


def in_words(methods: Sequence[str], dataset: str) -> str:
    """Return a sentence on our findings about methods, in general and on a dataset.

    Args:
        methods: the names of the methods; those without results are left out.
        dataset: the name of the dataset, with or without options.
    """
    parts = [_one(findings()[method], dataset) for method in tried(methods)]
    return f"Our results against FedAvg on the same backbone: {'; '.join(parts)}." if parts else ""


def _one(found: Sequence[Finding], dataset: str) -> str:
    better, worse = (
        sum(entry.verdict == verdict for entry in found) for verdict in ("better", "worse")
    )
    mean = statistics.fmean(entry.difference for entry in found)
    words = f"{found[0].method} better in {better or 'none'} of {len(found)} settings, worse in "
    words += f"{worse or 'none'}, by {mean:+.2f} points on average"
    more = []
    here = [entry for entry in found if entry.dataset == dataset.partition(":")[0]]
    if here:
        more.append(", ".join(f"{entry.setting}: {entry.difference:+.2f}" for entry in here))
    best = [entry.against_best for entry in found if entry.against_best is not None]
    if best:
        more.append(f"against FedAvg on its best backbone {statistics.fmean(best):+.2f}")
    if found[0].gain:
        more.append(f"the gain {found[0].gain}")
    return f"{words} ({'; '.join(more)})" if more else words
