"""Degrees, clustering and components, against dense counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import dense_adjacency, random_graph
from polyphily.graphs.graph import Graph
from polyphily.heterogeneity import topology as module
from polyphily.heterogeneity.topology import topology, triangles


@settings(deadline=None)
@given(st.integers(0, 200), st.floats(0, 1))
def test_triangles_are_those_of_the_cubed_adjacency(seed: int, density: float) -> None:
    graph = random_graph(14, seed=seed, density=density)
    adjacency = dense_adjacency(graph).numpy()
    assert (
        triangles(graph).tolist() == (np.linalg.matrix_power(adjacency, 3).diagonal() / 2).tolist()
    )


def test_triangles_in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_graph(40, density=0.4)
    expected = triangles(graph)
    monkeypatch.setattr(module, "ENTRIES", 7)
    assert np.array_equal(triangles(graph), expected)
    assert expected.any()


def test_two_triangles_and_a_hermit() -> None:
    """A bow tie (two triangles that share node 0) beside a lone node."""
    edges = np.array([[0, 1, 2, 0, 3, 4], [1, 2, 0, 3, 4, 0]])
    found = topology(Graph.build(np.zeros((6, 1)), edges, np.zeros(6, int)))
    assert found.degree_mean == 2
    assert found.degree_median == 2
    assert found.degree_max == 4
    assert found.isolated == 1
    assert found.density == pytest.approx(6 / 15)
    assert found.clustering == pytest.approx((1 / 3 + 4 * 1) / 6)
    assert found.transitivity == pytest.approx(3 * 2 / (6 + 4 * 1))
    assert found.components == 2
    assert found.largest_component == pytest.approx(5 / 6)


def test_a_graph_without_edges() -> None:
    found = topology(Graph.build(np.zeros((3, 1)), np.zeros((2, 0), int), np.zeros(3, int)))
    assert (found.components, found.isolated, found.clustering) == (3, 3, 0.0)
