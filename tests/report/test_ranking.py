"""Mean ranks, critical differences and corrected tests against small computations by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyphily.report.ranking import Ranking, against_first, critical_difference, holm, ranking


def test_mean_ranks_by_hand() -> None:
    found = ranking({"a": [0.5, 0.9, 0.1], "b": [0.7, 0.9, 0.3], "c": [0.6, 0.2, None]})
    # two blocks are shared: ranks 3, 1, 2 and 1.5, 1.5, 3
    assert found.methods == ("b", "a", "c")
    assert found.ranks == (1.25, 2.25, 2.5)
    assert found.blocks == 2


def test_the_critical_difference_is_that_of_demsar() -> None:
    # q of the two-tailed Nemenyi test at 0.05 (Demšar 2006, Table 5): 1.960, 2.343, 2.569, 2.728
    for methods, q in ((2, 1.960), (3, 2.343), (4, 2.569), (5, 2.728)):
        wanted = q * math.sqrt(methods * (methods + 1) / (6 * 14))
        assert critical_difference(methods, 14) == pytest.approx(wanted, rel=1e-3)
    assert math.isnan(critical_difference(1, 5))
    assert math.isnan(critical_difference(3, 1))


def test_holm_by_hand() -> None:
    # smallest times three, next times two, largest times one, never below the one before
    assert holm([0.02, 0.01, 0.5]).tolist() == pytest.approx([0.04, 0.03, 0.5])
    assert holm([0.4, 0.4, 0.4]).tolist() == [1.0, 1.0, 1.0]
    assert holm([]).tolist() == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_never_lowers_and_keeps_the_order(values: list[float]) -> None:
    found = holm(values)
    assert (found >= np.array(values) - 1e-15).all()
    order = np.argsort(values, kind="stable")
    assert (np.diff(found[order]) >= 0).all()
    assert (found <= 1).all()


def test_a_clear_winner_differs_and_a_twin_does_not() -> None:
    rng = np.random.default_rng(0)
    base = rng.normal(size=12)
    table = np.stack([base + 1, base + 1, base])
    assert against_first(table).tolist() == pytest.approx([1.0, 1.0, 2 * 2 / 2**12])


def test_groups_are_the_largest_that_stay_within_the_difference() -> None:
    def groups(*ranks: float) -> list[tuple[int, int]]:
        names = tuple("abcdefgh"[: len(ranks)])
        return Ranking(names, ranks, 9, 1.0, 0.01, (1.0,) * len(ranks)).groups()

    assert groups(1, 1.5, 2.2, 3.5) == [(0, 1), (1, 2)]
    assert groups(1, 1.2, 1.9) == [(0, 2)]
    assert groups(1, 3, 5) == []


def test_friedman_needs_three_methods_that_differ() -> None:
    assert math.isnan(ranking({"a": [1, 2, 3], "b": [2, 3, 4]}).friedman)
    assert math.isnan(ranking({name: [1, 2, 3] for name in "abc"}).friedman)
    apart = {"a": list(range(10)), "b": list(range(1, 11)), "c": list(range(2, 12))}
    assert ranking(apart).friedman < 1e-3


def test_tables_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="each block"):
        ranking({"a": [1.0], "b": [1.0, 2.0]})
    with pytest.raises(ValueError, match="no block"):
        ranking({"a": [1.0, None], "b": [None, 2.0]})
