"""A library with fewer methods, so that tests do not change whenever a baseline is added."""

from __future__ import annotations

import pytest

from polyphily.papers import exhibits, plan
from polyphily.papers.exhibits import common

FEW = frozenset(
    {
        *("local", "fedavg", "fedprox", "fedper", "fednova", "fedopt", "moon", "fedproto"),
        *("scaffold", "fedspa", "fedgsp", "fedhero", "s2fgl", "fedath"),
    }
)


@pytest.fixture(autouse=True)
def few_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the library look as if it had the methods of `FEW` alone."""
    for module in (plan, exhibits, common):
        monkeypatch.setattr(module, "registered", lambda: FEW)
