"""The response of a filter is what it does to eigenvectors."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import scipy.sparse as sp

from builders import random_graph
from polyphily.graphs.graph import Graph
from polyphily.heterogeneity import filters
from polyphily.heterogeneity.filters import basis_response, polynomial_response
from polyphily.heterogeneity.spectral import normalised_adjacency
from polyphily.report.trained import host_bases


def test_polynomial_response_filters_eigenvectors() -> None:
    graph = random_graph(15, density=0.3)
    p = normalised_adjacency(graph).toarray()
    gamma = np.random.default_rng(0).standard_normal(4)
    matrix = sum(g * np.linalg.matrix_power(p, k) for k, g in enumerate(gamma))
    values, vectors = np.linalg.eigh(np.eye(15) - p)
    response = polynomial_response(gamma[None], values)[0]
    assert vectors * response == pytest.approx(matrix @ vectors)


@pytest.mark.parametrize("tau", [1.0, 0.6, 0.0])
@pytest.mark.parametrize("homophily", [0.2, 0.9])
def test_basis_response_at_the_eigenvalues(tau: float, homophily: float) -> None:
    """A factor for each eigenvector, where eigenvalues are further apart than the window: a path,
    whose eigenvalues are 1 - cos(pi k / 7)."""
    path = Graph.build(np.zeros((8, 1)), np.stack([np.arange(7), np.arange(1, 8)]), np.zeros(8))
    p = normalised_adjacency(path)
    x = np.random.default_rng(1).standard_normal((8, 3))
    weights = np.random.default_rng(2).standard_normal((5, 3))
    make = partial(host_bases, homophily=homophily, order=4)
    z = sum(
        w * (tau * near + (1 - tau) * far)
        for w, (near, far) in zip(weights, make(p, x), strict=True)
    )
    values, vectors = np.linalg.eigh(np.eye(8) - p.toarray())
    before, after = vectors.T @ x, vectors.T @ z
    expected = (before * after).sum(axis=1) / (before**2).sum(axis=1)
    found = basis_response(make, p, x, weights, tau, values)
    assert found == pytest.approx(expected, abs=0.02 * np.abs(expected).max())


def test_response_of_a_polynomial_is_the_polynomial() -> None:
    """Homophily bases alone are one polynomial for all features, wherever these have energy."""
    graph = random_graph(200, features=5, density=0.05)
    p, x = normalised_adjacency(graph), np.asarray(graph.features, dtype=np.float64)
    weights = np.array([[0.2], [0.5], [0.3]])
    make = partial(host_bases, homophily=0.5, order=2)
    at = np.linspace(0.6, 1.4, 9)
    found = basis_response(make, p, x, weights, 1.0, at)
    assert found == pytest.approx(polynomial_response(weights.T, at)[0], abs=0.01)


def test_no_response_where_features_have_no_energy() -> None:
    """In a complete graph all frequencies are 0 or n/(n-1); others are unknown, not large."""
    edges = np.stack(np.triu_indices(30, 1))
    graph = Graph.build(np.random.default_rng(0).random((30, 4)), edges, np.zeros(30))
    p, x = normalised_adjacency(graph), np.asarray(graph.features, dtype=np.float64)
    make = partial(host_bases, homophily=0.9, order=6)
    found = basis_response(make, p, x, np.ones((7, 1)), 0.5, np.array([0, 0.5, 30 / 29, 1.7]))
    assert np.isnan(found).tolist() == [False, True, False, True]


def test_small_parts_leave_the_response_of_the_rest() -> None:
    """A part of three nodes exhausts its Krylov space, all but: that must not show elsewhere."""
    big = random_graph(120, features=1, density=0.1)
    edges = np.concatenate([big.edges, [[120, 121], [121, 122]]], axis=1)
    x = np.zeros((123, 2))
    x[:120, 0] = np.asarray(big.features)[:, 0]
    x[120:, 1] = [1, 1.0001, 1]  # all but an eigenvector
    graph = Graph.build(x, edges, np.zeros(123))
    p = normalised_adjacency(graph)
    make = partial(host_bases, homophily=0.8, order=6)
    weights = np.random.default_rng(3).standard_normal((7, 1))
    at = np.linspace(0.6, 1.4, 9)
    alone = basis_response(make, p, x[:, :1], weights, 0.5, at)
    both = basis_response(make, p, x, weights, 0.5, at)
    assert both == pytest.approx(alone, rel=0.2, abs=0.2)


def test_sparse_features_and_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    graph = random_graph(60, features=40, density=0.1)
    p, x = normalised_adjacency(graph), rng.random((60, 40)) * (rng.random((60, 40)) < 0.4)
    x[:, 2] = 0  # a feature that nobody has
    weights = rng.random((4, 40))
    make = partial(host_bases, homophily=0.5, order=3)
    at = np.linspace(0.5, 1.5, 5)
    whole = basis_response(make, p, x, weights, 0.5, at)
    monkeypatch.setattr(filters, "COLUMNS", 7)
    assert basis_response(make, p, sp.csr_array(x), weights, 0.5, at) == pytest.approx(whole)
