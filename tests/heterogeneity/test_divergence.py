"""Distances between clients: in labels, neighbours, features and embeddings."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import wasserstein_distance

from builders import random_graph, random_graphs
from polyphily.graphs.graph import Graph
from polyphily.heterogeneity import divergence
from polyphily.heterogeneity.divergence import (
    chance_neighbour_divergence,
    chance_total_variation,
    collaboration_heterogeneity,
    complementarity_ratio,
    embedding_divergence,
    feature_divergence,
    line_wasserstein,
    mean_known,
    neighbour_distribution,
    neighbour_divergence,
    pairwise,
    principal_scores,
    quantiles,
    shares,
    similarity,
    symmetric,
    total_variation,
)
from polyphily.heterogeneity.homophily import class_mixing


def test_pairs_in_both_orders() -> None:
    found = pairwise([1, 2, 4], lambda a, b: float(a - 2 * b))
    assert found.tolist() == [[0, -3, -7], [0, 0, -6], [2, 0, 0]]
    assert symmetric([1, 2, 4], lambda a, b: float(a + b)).tolist() == [
        [0, 3, 5],
        [3, 0, 6],
        [5, 6, 0],
    ]


@settings(deadline=None)
@given(st.integers(0, 1000))
def test_total_variation_is_a_distance_between_shares(seed: int) -> None:
    p, q, r = np.random.default_rng(seed).dirichlet(np.ones(4), 3)
    assert 0 <= total_variation(p, q) <= 1
    assert total_variation(p, q) == total_variation(q, p)
    assert total_variation(p, r) <= total_variation(p, q) + total_variation(q, r) + 1e-12


def test_shares_of_nothing() -> None:
    assert np.isnan(shares(np.array([0, 0]))).all()
    assert shares(np.array([[1, 3], [0, 2]])).tolist() == [[0.25, 0.75], [0, 1]]


def test_chance_level_is_the_mean_of_many_draws() -> None:
    rng = np.random.default_rng(0)
    p = np.array([0.5, 0.3, 0.2])
    draws = [(rng.multinomial(80, p), rng.multinomial(200, p)) for _ in range(2000)]
    seen = np.mean([total_variation(a / 80, b / 200) for a, b in draws])
    told = np.mean([chance_total_variation(a, b) for a, b in draws])
    assert told == pytest.approx(seen, rel=0.05)
    assert math.isnan(chance_total_variation(np.zeros(3), np.ones(3)))


def test_neighbour_distribution_by_hand() -> None:
    """A path of labels 0 - 0 - 1 - 2: class 0 has three edge ends, class 1 two, class 2 one."""
    edges = np.array([[0, 1, 2], [1, 2, 3]])
    graph = Graph.build(np.zeros((4, 1)), edges, np.array([0, 0, 1, 2]))
    expected = [[2 / 3, 1 / 3, 0], [1 / 2, 0, 1 / 2], [0, 1, 0]]
    found = neighbour_distribution(graph, 4)
    assert found[:3, :3] == pytest.approx(np.array(expected))
    assert np.isnan(found[3]).all()


def test_neighbour_divergence_looks_at_shared_classes() -> None:
    first = np.array([[1.0, 0.0], [np.nan, np.nan]])
    second = np.array([[0.25, 0.75], [0.5, 0.5]])
    assert neighbour_divergence(first, second) == pytest.approx(0.75)
    lonely = np.array([[np.nan, np.nan], [0.5, 0.5]])
    assert math.isnan(neighbour_divergence(first, lonely))


def test_chance_of_neighbours_falls_with_edges() -> None:
    few, many = (np.array([[6.0, 4.0], [4.0, 10.0]]) * scale for scale in (1, 100))
    assert chance_neighbour_divergence(many, many) == pytest.approx(
        chance_neighbour_divergence(few, few) / 10
    )
    expected = np.mean([chance_total_variation(few[a], few[a]) for a in (0, 1)])
    assert chance_neighbour_divergence(few, few) == pytest.approx(expected)


def test_similarity_and_complementarity() -> None:
    like = np.array([[4.0, 0.0], [0.0, 4.0]])
    unlike = np.array([[0.0, 3.0], [3.0, 0.0]])
    half = np.array([[1.0, 1.0], [1.0, 1.0]])
    assert similarity(like, 10 * like) == 1
    assert similarity(like, unlike) == 0
    assert similarity(like, half) == similarity(unlike, half) == pytest.approx(0.5)
    table = symmetric([like, unlike, half], similarity)
    assert complementarity_ratio(table) == pytest.approx(1 / 3)  # one half is similar
    assert math.isnan(similarity(like, np.zeros((2, 2))))
    assert math.isnan(complementarity_ratio(np.ones((1, 1))))


@settings(deadline=None)
@given(st.integers(0, 1000))
def test_collaboration_heterogeneity_is_its_sum(seed: int) -> None:
    rng = np.random.default_rng(seed)
    weights, theta = rng.random((4, 4)), rng.standard_normal((4, 3))
    expected = sum(
        weights[i, j] * ((theta[i] - theta[j]) ** 2).sum() for i in range(4) for j in range(4)
    )
    assert collaboration_heterogeneity(weights, theta) == pytest.approx(expected)
    # Theorem 2 of FedGSP: a quarter of it is half of tr(Θ^T L Θ), L the Laplacian of symmetric W.
    both = (weights + weights.T) / 2
    laplacian = np.diag(both.sum(axis=1)) - both
    frequency = np.trace(theta.T @ laplacian @ theta) / 2
    assert frequency == pytest.approx(expected / 4)


def test_wasserstein_on_a_line_is_close_to_scipys() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.standard_normal((3000, 1)), rng.standard_normal((2000, 1)) * 1.5 + 0.3
    expected = wasserstein_distance(first[:, 0], second[:, 0])
    found = line_wasserstein(quantiles(first), quantiles(second))
    assert found == pytest.approx(expected, rel=0.02)


def moved(graph: Graph, shift: float) -> Graph:
    return replace(graph, features=graph.features + np.float32(shift))


def test_features_that_move_diverge() -> None:
    rng = np.random.default_rng(0)
    base = [
        replace(g, features=rng.standard_normal((300, 5)).astype(np.float32))
        for g in random_graphs([300, 300, 300], density=0.01)
    ]
    near = feature_divergence(base)
    far = feature_divergence([base[0], base[1], moved(base[2], 1.0)])
    assert near.max() < 0.25
    assert far[0, 2] > 2 * near.max()
    assert far[0, 1] < far[0, 2]
    assert np.array_equal(far, far.T)


def test_feature_divergence_by_hand_in_one_direction() -> None:
    """One feature that is 0 at one client and 1 at the other: two pooled deviations apart."""
    graphs = [
        replace(g, features=np.full((4, 1), k, dtype=np.float32))
        for k, g in enumerate(random_graphs([4, 4]))
    ]
    assert feature_divergence(graphs)[0, 1] == pytest.approx(2)


def test_units_of_features_do_not_matter() -> None:
    graphs = random_graphs([40, 50], density=0.1)
    scale = np.array([1, 10, 100, 1e3, 1e-2, 1e-3], dtype=np.float32)
    scaled = [replace(g, features=g.features * scale) for g in graphs]
    assert feature_divergence(scaled) == pytest.approx(feature_divergence(graphs), rel=1e-3)


def test_sparse_features_diverge_as_dense_ones() -> None:
    dense = random_graphs([40, 50], features=12, density=0.1)
    sparse = [replace(g, features=sp.csr_array(g.features)) for g in dense]
    assert feature_divergence(sparse) == pytest.approx(feature_divergence(dense), rel=1e-6)


def test_many_features_take_the_iterative_way(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_graph(60, features=40, sparse=True)
    monkeypatch.setattr(divergence, "PRINCIPAL", 3)
    direct = principal_scores(graph.features)
    monkeypatch.setattr(divergence, "COVARIANCE", 10)
    iterated = principal_scores(graph.features)
    overlap = np.abs(direct.T @ iterated) / 60  # unit deviation: a rotation at most
    assert np.linalg.svd(overlap)[1] == pytest.approx(np.ones(3), abs=1e-2)


def test_constant_features_do_not_diverge() -> None:
    graphs = [replace(g, features=np.ones((9, 2), dtype=np.float32)) for g in random_graphs([9, 9])]
    assert not feature_divergence(graphs).any()


def test_embeddings_of_one_class_that_move_apart() -> None:
    rng = np.random.default_rng(0)
    labels = np.repeat([0, 1, 2], [60, 60, 4])
    here, there = rng.standard_normal((2, 124, 8))
    there[labels == 1] += 5
    per_class, pairs = embedding_divergence([here, there], [labels, labels], 4)
    assert per_class[1] > 5 * per_class[0]
    assert np.isnan(per_class[2:]).all()  # too few nodes, and none
    assert pairs[0, 1] == pairs[1, 0] == pytest.approx(per_class[:2].mean())
    assert pairs[0, 0] == 0


def test_embedding_divergence_has_no_unit_and_a_seed() -> None:
    rng = np.random.default_rng(1)
    parts, labels = list(rng.standard_normal((3, 30, 4))), [rng.integers(0, 2, 30)] * 3
    once, _ = embedding_divergence(parts, labels, 2)
    scaled, _ = embedding_divergence([7 * p for p in parts], labels, 2)
    other, _ = embedding_divergence(parts, labels, 2, seed=1)
    assert scaled == pytest.approx(once)
    assert not np.array_equal(once, other)
    assert other == pytest.approx(once, rel=0.3)


def test_sliced_distance_of_a_shift() -> None:
    """Two clouds a vector d apart: the mean over directions of |<d, u>| / spread."""
    rng = np.random.default_rng(0)
    cloud = rng.standard_normal((500, 2)) * 1e-6
    shift = np.array([3.0, 4.0])
    per_class, _ = embedding_divergence([cloud, cloud + shift], [np.zeros(500, int)] * 2, 1)
    spread = 5 / 2  # every point is half a shift from the mean
    assert per_class[0] == pytest.approx(5 * (2 / math.pi) / spread, rel=0.1)


def test_mean_of_what_is_known() -> None:
    found = mean_known(np.array([[1.0, np.nan], [3.0, np.nan]]), axis=0)
    assert found[0] == 2
    assert math.isnan(found[1])


def test_neighbours_of_equal_graphs() -> None:
    graph = random_graph(30, density=0.3)
    q = neighbour_distribution(graph, 3)
    assert neighbour_divergence(q, q) == 0
    assert similarity(class_mixing(graph, 3), class_mixing(graph, 3)) == 1
