"""Degrees as features: columns computed by hand, and what they may depend on."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

from polyphily.graphs.degrees import BINS, COLUMNS, degree_columns, with_degrees
from polyphily.graphs.graph import Graph


def star(leaves: int, *, sparse: bool = False) -> Graph:
    """Return a graph of one node in the middle, its neighbours, and a node without any."""
    nodes = leaves + 2
    features = np.arange(2 * nodes, dtype=np.float32).reshape(nodes, 2)
    edges = np.stack([np.zeros(leaves, np.int64), 1 + np.arange(leaves)])
    x = sp.csr_array(features) if sparse else features
    return Graph.build(x, edges, np.zeros(nodes, np.int64))


@pytest.mark.parametrize(("leaves", "column"), [(1, 1), (2, 1), (3, 2), (6, 2), (7, 3), (600, 9)])
def test_a_power_of_two_is_marked(leaves: int, column: int) -> None:
    found = degree_columns(star(leaves))
    assert found.shape == (leaves + 2, COLUMNS)
    for node, (marked, neighbours) in {0: (column, leaves), 1: (1, 1), -1: (0, 0)}.items():
        wanted = np.zeros(COLUMNS)
        wanted[marked] = 1
        wanted[BINS] = np.log2(1 + neighbours) / BINS
        np.testing.assert_allclose(found[node], wanted, rtol=1e-6)


@pytest.mark.parametrize("sparse", [False, True])
def test_own_features_come_first(sparse: bool) -> None:
    graph = star(3, sparse=sparse)
    wider = with_degrees(graph)
    assert sp.issparse(wider.features) == sparse
    dense = wider.features.toarray() if sp.issparse(wider.features) else wider.features
    assert dense.dtype == np.float32
    plain = graph.features.toarray() if sp.issparse(graph.features) else graph.features
    np.testing.assert_array_equal(dense, np.concatenate([plain, degree_columns(graph)], axis=1))
    np.testing.assert_array_equal(wider.edges, graph.edges)


@given(st.integers(2, 12), st.data())
def test_columns_are_those_of_a_nodes_own_neighbours(nodes: int, data: st.DataObject) -> None:
    """Weights, directions and edges elsewhere change nothing; an edge changes its two ends."""
    ends = st.tuples(st.integers(0, nodes - 1), st.integers(0, nodes - 1))
    pairs = data.draw(st.lists(ends, max_size=20))
    source, target = data.draw(ends)
    x, y = np.zeros((nodes, 1)), np.zeros(nodes, np.int64)

    def columns(edges: list[tuple[int, int]], **parts: object) -> np.ndarray:
        index = np.array(edges, dtype=np.int64).reshape(-1, 2).T
        return degree_columns(Graph.build(x, index, y, **parts))

    before, after = columns(pairs), columns([*pairs, (source, target)])
    others = [node for node in range(nodes) if node not in (source, target)]
    np.testing.assert_array_equal(after[others], before[others])
    weights = np.arange(1, len(pairs) + 1, dtype=np.float32)
    if pairs:
        np.testing.assert_array_equal(columns(pairs, edge_weights=weights), before)
    np.testing.assert_array_equal(columns(pairs, directed=True), before)
    neighbours = [
        {a for a, b in pairs if b == n} | {b for a, b in pairs if a == n} for n in range(nodes)
    ]
    counts = [len(near - {n}) for n, near in enumerate(neighbours)]
    np.testing.assert_allclose(before[:, BINS] * BINS, np.log2(1 + np.array(counts)), rtol=1e-5)
