"""Formatting of numbers for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

WARM_UP = "†"  # marks a score at a round in which the method had not begun


def in_warm_up(summary: Mapping[str, Any]) -> bool:
    """Return whether the best round of a run lies in its method's warm-up."""
    return bool(summary.get("warm_up", {}).get("note"))


def percent(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{100 * value:.{digits}f}"


def span(values: Sequence[float | None], dash: str = " – ") -> str:
    """Format the smallest and the largest known value in percent.

    >>> span([0.5, None, 0.25])
    '25.0 – 50.0'
    """
    known = [value for value in values if value is not None]
    return f"{percent(min(known), 1)}{dash}{percent(max(known), 1)}" if known else "–"


def length(rounds: int, epochs: int) -> str:
    """Return how long a training was.

    >>> length(100, 3)
    '100 rounds of 3 epochs'
    >>> length(1, 1)
    '1 round of 1 epoch'
    """
    return f"{rounds} round{'s' * (rounds != 1)} of {epochs} epoch{'s' * (epochs != 1)}"


def size(count: float) -> str:
    """Format a number of bytes.

    >>> size(12), size(1_468_000)
    ('12 B', '1.5 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def duration(seconds: float) -> str:
    """Format a time in seconds.

    >>> duration(0.0123), duration(0.456), duration(2.5), duration(300)
    ('12.3 ms', '456 ms', '2.5 s', '5.0 min')
    """
    if seconds < 0.9995:
        return f"{1000 * seconds:.{1 if seconds < 0.09995 else 0}f} ms"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def short_number(value: float | None) -> str:
    """Format a whole number without decimals, others with one.

    >>> short_number(2.0), short_number(2.5), short_number(None)
    ('2', '2.5', '–')
    """
    if value is None:
        return "–"
    return f"{value:.0f}" if value == int(value) else f"{value:.1f}"


def decimal(value: float | None, digits: int = 3) -> str:
    """Format a number with a fixed number of decimals.

    >>> decimal(0.5), decimal(None)
    ('0.500', '–')
    """
    return "–" if value is None else f"{value:.{digits}f}"


def decision_words(summary: Mapping[str, Any]) -> str:
    """Return temperature and threshold of all clients together in words; "" if there is none."""
    found = summary.get("decision", {}).get("pooled")
    if not found or found["source"] == "default":
        return ""
    test = found["test"]
    words = (
        f"Chosen on the validation nodes of all clients: temperature {found['temperature']:.2f} "
        f"(calibration error on test {percent(test['ece_before'], 1)}, then "
        f"{percent(test['ece_after'], 1)} %)"
    )
    if found["threshold"] is None:
        return words + "."
    return (
        f"{words}; threshold {found['threshold']:.3g} on '{found['positive']}' by the rule "
        f"{found['rule']} (test precision {percent(test['precision'], 1)}, recall "
        f"{percent(test['recall'], 1)} %, {percent(test['flagged'], 1)} % of the nodes above it)."
    )
