"""The link-inference attack against small independent computations, and on graphs that leak."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from builders import random_graph
from polyphily.audit import links
from polyphily.audit.links import (
    area,
    at_chance,
    attack,
    chance_either_way,
    cosines,
    draw_pairs,
    two_means,
)

VALUES = st.lists(st.integers(-20, 20), min_size=2, max_size=12).filter(lambda v: len(set(v)) > 1)


@given(VALUES)
def test_two_means_finds_the_best_cut(values: list[int]) -> None:
    x = np.array(values, dtype=np.float64)

    def inertia(upper: np.ndarray) -> float:
        return sum(float(((g - g.mean()) ** 2).sum()) for g in (x[upper], x[~upper]) if len(g))

    cuts = [x > (a + b) / 2 for a, b in itertools.pairwise(sorted(set(values)))]
    assert inertia(x > two_means(x)) == pytest.approx(min(map(inertia, cuts)))


@settings(deadline=None)
@given(VALUES)
def test_area_equals_scikit_learn(values: list[int]) -> None:
    x = np.array(values, dtype=np.float64)
    positive = np.arange(len(x)) % 2 == 0
    assert area(x, positive) == pytest.approx(roc_auc_score(positive, x))


@pytest.mark.parametrize("levels", [3, 1000])
@pytest.mark.parametrize("count", [10, 60])
def test_chance_either_way_is_that_of_dealing_labels_anew(levels: int, count: int) -> None:
    rng = np.random.default_rng(count)
    scores = rng.integers(0, levels, 2 * count).astype(np.float64)
    positive = np.arange(2 * count) < count
    areas = np.array([area(scores, rng.permutation(positive)) for _ in range(4000)])
    dealt = np.maximum(areas, 1 - areas).mean()
    assert chance_either_way(scores, positive) - 0.5 == pytest.approx(dealt - 0.5, rel=0.05)


def test_cosines_of_dense_and_sparse_rows() -> None:
    x = np.array([[1.0, 0, 0], [1, 1, 0], [0, 0, 2], [0, 0, 0]], dtype=np.float32)
    pairs = np.array([[0, 0, 1, 0], [1, 2, 1, 3]])
    wanted = [2**-0.5, 0, 1, 0]
    assert cosines(x, pairs) == pytest.approx(wanted)
    assert cosines(sp.csr_array(x), pairs) == pytest.approx(wanted)


def test_a_trial_is_half_edges() -> None:
    graph = random_graph(40, density=0.2)
    found = draw_pairs(graph, seed=0, client=0)
    assert found is not None
    pairs, linked = found
    edges = {(a, b) for a, b in graph.edges.T.tolist()}
    assert [tuple(pair) in edges for pair in pairs.T.tolist()] == linked.tolist()
    assert linked.sum() * 2 == len(linked) == 2 * graph.num_edges
    assert draw_pairs(replace(graph, edges=graph.edges[:, :0]), seed=0, client=0) is None
    complete = random_graph(6, density=1.0)
    assert draw_pairs(complete, seed=0, client=0) is None


def test_representations_that_show_the_edges_are_seen_through() -> None:
    """Nodes of two cliques, told apart by their representation."""
    edges = [(a, b) for a, b in itertools.combinations(range(20), 2) if (a < 10) == (b < 10)]
    graph = replace(
        random_graph(20, density=0), edges=np.array(edges + [(b, a) for a, b in edges]).T
    )
    found = draw_pairs(graph, seed=0, client=0)
    assert found is not None
    sides = np.eye(2)[(np.arange(20) >= 10).astype(int)]
    pairs, linked = found
    seen = attack(cosines(sides, pairs), linked)
    assert (seen.auc, seen.accuracy) == (1.0, 1.0)
    table = np.random.default_rng(0).normal(size=(20, 50))
    noise = attack(cosines(table, pairs), linked)
    assert 0.3 < noise.auc < 0.7


def test_at_chance_is_what_uninformative_scores_give_in_95_of_100_cases(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng, linked = np.random.default_rng(0), np.arange(200) < 100
    monkeypatch.setattr(links, "MATERIAL", -1.0)
    trials = [
        at_chance([attack(rng.normal(size=200), linked) for _ in range(3)]) for _ in range(1000)
    ]
    assert 0.93 < np.mean(trials) < 0.97
    above = attack(1.0 * linked + 0.5 * rng.normal(size=200), linked)
    assert not at_chance([above, None])
    below = attack(-1.0 * linked + 0.5 * rng.normal(size=200), linked)
    assert not at_chance([above, below])  # they do not cancel
    assert at_chance([attack(np.ones(200), linked)])
    assert not at_chance([None])


def test_a_difference_without_importance_is_chance() -> None:
    rng, linked = np.random.default_rng(0), np.arange(200_000) < 100_000
    shifts = {0.015: True, 0.1: False}
    for shift, chance in shifts.items():
        found = attack(rng.normal(size=200_000) + shift * linked, linked)
        assert found.deviations > 2
        assert at_chance([found]) is chance
