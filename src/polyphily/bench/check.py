"""The check of `polyphily bench --check`: which methods have become slower than their record."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyphily.runtime.machine import versions
from polyphily.version import __version__

SLOWER = 1.2  # how much of its recorded ratio a method may cost
AGAIN = 2  # how often a method that looks slow is measured again

Row = Mapping[str, Any]
Key = tuple[str, str, str]


@dataclass(frozen=True)
class Slower:
    """A method that costs more rounds of FedAvg than its record says.

    Attributes:
        key: method, stage and backbone.
        recorded: its ratio to FedAvg on the same backbone, in the record.
        found: the least ratio measured now.
    """

    key: Key
    recorded: float
    found: float

    def __str__(self) -> str:
        name = ", ".join(filter(None, self.key[:2]))
        factor = self.found / self.recorded
        return f"{name}: {self.found:.2f} rounds of FedAvg, {factor:.2f} times {self.recorded:.2f}"


def slower_methods(
    recorded: Sequence[Row],
    found: Iterable[Row],
    again: Callable[[Sequence[str]], Iterable[Row]],
) -> list[Slower]:
    """Return the methods that are slower than recorded by more than a fifth.

    Ratios of interleaved rounds hardly depend on other load, but a single one may be off. A method
    that looks slow is therefore measured again, and its least ratio counts.

    Args:
        recorded: the committed rows of costs.
        found: those measured now.
        again: measures some methods once more.
    """
    known = {_key(row): float(row["ratio_on_same_backbone"]) for row in recorded}
    least: dict[Key, float] = {}

    def add(rows: Iterable[Row]) -> list[Slower]:
        for row in rows:
            ratio = float(row["ratio_on_same_backbone"])
            least[_key(row)] = min(ratio, least.get(_key(row), ratio))
        return [
            Slower(key, known[key], ratio)
            for key, ratio in least.items()
            if key in known and ratio > SLOWER * known[key]
        ]

    slow = add(found)
    for _ in range(AGAIN):
        if slow:
            slow = add(again(sorted({each.key[0] for each in slow})))
    return slow


def _key(row: Row) -> Key:
    return row["method"], row["stage"], row["backbone"]


def origin() -> dict[str, Any]:
    """Return what a record was made with: versions, and the commit if the package is in git."""
    return {"polyphily": __version__, **versions(), "commit": _commit()}


def _commit() -> str | None:
    """Return the commit of the source tree, with `+` if files have changed; None if unknown."""
    here = Path(__file__).parent
    try:
        commit = _git("-C", str(here), "rev-parse", "HEAD")
        changed = _git("-C", str(here), "status", "--porcelain", "--untracked-files=no", ".")
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+" if changed else "")


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()
