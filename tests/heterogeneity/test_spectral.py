"""Spectra: exact, estimated, compared; and the high-frequency area."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import wasserstein_distance

from builders import dense_adjacency, random_graph
from polyphily.graphs.csbm import draw_direction, sample
from polyphily.graphs.graph import Graph
from polyphily.heterogeneity import spectral
from polyphily.heterogeneity.spectral import (
    BINS,
    SMALLEST,
    Spectrum,
    high_frequency_area,
    lanczos_spectrum,
    laplacian_matrix,
    spectral_kl,
    spectral_wasserstein,
    spectrum,
)


def ring(nodes: int) -> Graph:
    first = np.arange(nodes)
    return Graph.build(
        np.ones((nodes, 1)), np.stack([first, (first + 1) % nodes]), np.zeros(nodes, int)
    )


def test_laplacian_is_that_of_the_definition() -> None:
    graph = random_graph(30, density=0.05)
    adjacency = dense_adjacency(graph).numpy()
    degrees = adjacency.sum(axis=1)
    assert (degrees == 0).any()
    expected = np.zeros((30, 30))
    for i in range(30):
        for j in range(30):
            if i == j and degrees[i]:
                expected[i, i] = 1
            elif adjacency[i, j]:
                expected[i, j] = -1 / np.sqrt(degrees[i] * degrees[j])
    assert laplacian_matrix(graph).toarray() == pytest.approx(expected)


def test_spectrum_of_a_ring() -> None:
    """1 - cos(2 pi k / n)."""
    found = spectrum(ring(12))
    expected = 1 - np.cos(2 * np.pi * np.arange(12) / 12)
    assert found.exact
    assert found.values == pytest.approx(np.sort(expected), abs=1e-12)
    assert found.weights.sum() == pytest.approx(1)


def test_estimate_is_close_to_all_eigenvalues() -> None:
    graph = sample(1500, 2, 10.0, 6.0, 0.8, np.random.default_rng(0))
    exact, estimate = spectrum(graph), lanczos_spectrum(graph, seed=1)
    assert exact.exact
    assert not estimate.exact
    assert estimate.weights.sum() == pytest.approx(1)
    assert spectral_wasserstein(exact, estimate) < 0.01
    assert np.abs(exact.histogram() - estimate.histogram()).max() < 0.01
    moments = [
        abs(exact.weights @ exact.values**k - estimate.weights @ estimate.values**k)
        for k in range(1, 6)
    ]
    assert max(moments) < 0.02


def test_estimate_has_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_graph(60)
    monkeypatch.setattr(spectral, "EXACT", 10)
    first, again, other = spectrum(graph, 3), spectrum(graph, 3), spectrum(graph, 4)
    assert not first.exact
    assert np.array_equal(first.weights, again.weights)
    assert not np.array_equal(first.weights, other.weights)


def test_estimate_of_a_graph_with_few_eigenvalues() -> None:
    """Stars have the eigenvalues 0, 1 and 2 alone: the Krylov space is exhausted after three."""
    spokes = np.arange(1, 2500)
    star = Graph.build(np.ones((2500, 1)), np.stack([0 * spokes, spokes]), np.zeros(2500, int))
    found = spectrum(star)
    assert not found.exact
    shares = found.histogram()
    assert shares[BINS // 2] == pytest.approx(2498 / 2500, abs=1e-3)
    assert shares[[0, -1]] == pytest.approx([1 / 2500] * 2, abs=1e-3)


def test_kl_by_hand() -> None:
    first = Spectrum(np.array([0.0, 1.0]), np.array([0.5, 0.5]), exact=True)
    second = Spectrum(np.array([0.0, 1.0]), np.array([0.25, 0.75]), exact=True)
    expected = 0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75)
    assert spectral_kl(first, second) == pytest.approx(expected, abs=1e-6)
    assert spectral_kl(first, first) == 0
    nowhere = Spectrum(np.array([2.0]), np.array([1.0]), exact=True)
    assert spectral_kl(first, nowhere) == pytest.approx(np.log(0.5 / SMALLEST), rel=1e-3)


def test_rounding_does_not_split_the_eigenvalue_one() -> None:
    """Bipartite graphs have it many times, and it comes out a hair above or below."""
    noise = np.array([-1e-14, 0, 1e-14])
    found = Spectrum(1 + noise, np.full(3, 1 / 3), exact=True).histogram()
    assert found.max() == pytest.approx(1)


def test_wasserstein_equals_scipys() -> None:
    rng = np.random.default_rng(2)
    first, second = (
        Spectrum(rng.uniform(0, 2, n), rng.dirichlet(np.ones(n)), exact=True) for n in (7, 11)
    )
    expected = wasserstein_distance(first.values, second.values, first.weights, second.weights)
    assert spectral_wasserstein(first, second) == pytest.approx(expected)
    assert spectral_wasserstein(first, first) == pytest.approx(0)


@pytest.mark.parametrize("laplacian", ["symmetric", "combinatorial"])
def test_high_frequency_area_falls_as_homophily_rises(laplacian: spectral.Laplacian) -> None:
    """FedSPA, Figure 1: on csbm, features strong enough to follow the classes."""
    direction = draw_direction(50, np.random.default_rng(0))
    areas = [
        high_frequency_area(
            sample(2000, 50, 2000.0, 10.0, h, np.random.default_rng(1), direction), laplacian
        )
        for h in (0.1, 0.3, 0.5, 0.7, 0.9)
    ]
    assert areas == sorted(areas, reverse=True)
    assert areas[0] > 1.4 * areas[-1]


def test_a_graph_without_nodes_has_no_spectrum() -> None:
    nothing = Graph.build(np.zeros((0, 2)), np.zeros((2, 0), int), np.zeros(0, int), name="empty")
    with pytest.raises(ValueError, match="empty"):
        spectrum(nothing)
