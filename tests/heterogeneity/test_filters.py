"""The response of a filter is what it does to eigenvectors."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import scipy.sparse as sp

from builders import random_graph
from polyphily.heterogeneity import filters
from polyphily.heterogeneity.filters import basis_response, polynomial_response
from polyphily.heterogeneity.spectral import normalised_adjacency
from polyphily.heterogeneity.trained import host_bases


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
def test_basis_response_filters_the_feature(tau: float, homophily: float) -> None:
    """sum_k w_k (tau P^k x + (1-tau) u_k) = U g(Lambda) U^T x, for a single feature."""
    graph = random_graph(30, features=1, density=0.2)
    p = normalised_adjacency(graph)
    x = np.random.default_rng(1).standard_normal((30, 1))
    weights = np.random.default_rng(2).standard_normal((5, 1))
    make = partial(host_bases, homophily=homophily, order=4)
    values, vectors = np.linalg.eigh(np.eye(30) - p.toarray())
    response = basis_response(make, p, x, weights, tau, values)
    expected = sum(
        w * (tau * near + (1 - tau) * far)
        for w, (near, far) in zip(weights, make(p, x), strict=True)
    )
    found = vectors @ (response[:, None] * (vectors.T @ x))
    assert found == pytest.approx(expected, abs=1e-5 * np.abs(expected).max())


def test_mean_over_features_weighs_their_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_graph(20, features=3, density=0.3)
    p, x = normalised_adjacency(graph), np.array(graph.features, dtype=np.float64)
    x[:, 2] = 0  # a feature that nobody has
    weights = np.random.default_rng(0).standard_normal((4, 3))
    make = partial(host_bases, homophily=0.5, order=3)
    single = [basis_response(make, p, x[:, [f]], weights[:, [f]], 0.5) for f in (0, 1)]
    energy = (x[:, :2] ** 2).sum(axis=0)
    expected = energy @ np.stack(single) / energy.sum()
    assert basis_response(make, p, x, weights, 0.5) == pytest.approx(expected)
    monkeypatch.setattr(filters, "COLUMNS", 2)
    sparse = sp.csr_array(x)
    assert basis_response(make, p, sparse, weights, 0.5) == pytest.approx(expected)
