"""What a partition loses, against counts over dense matrices."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import dense_adjacency, mask_at, random_graph
from polyphily.graphs.graph import Graph
from polyphily.heterogeneity import partitioning
from polyphily.heterogeneity.pagerank import pagerank_matrix
from polyphily.heterogeneity.partitioning import label_signal_lost, partition_loss


def test_two_triangles_cut_apart() -> None:
    """Labels a a b | b b a, one bridge between two nodes of class b."""
    edges = np.array([[0, 1, 2, 3, 4, 5, 2], [1, 2, 0, 4, 5, 3, 3]])
    graph = Graph.build(np.zeros((6, 1)), edges, np.array([0, 0, 1, 1, 1, 0]))
    parts = [np.array([0, 1, 2]), np.array([3, 4, 5])]
    train = [mask_at(3, [2]), mask_at(3, [1])]  # nodes 2 and 4
    found = partition_loss(graph, parts, train)
    assert found.edges == 1
    assert found.edges_share == pytest.approx(1 / 7)
    assert found.same_class_share == pytest.approx(1 / 3)  # 0-1, 3-4 and the bridge
    assert found.other_class_share == 0
    assert found.isolated == 0
    assert found.train_neighbours_share == pytest.approx(1 / 5)  # 3-2 of 0-2, 1-2, 3-2, 3-4, 5-4
    matrix = pagerank_matrix(graph, 0.15)
    own = matrix[:3, 2].sum() + matrix[3:, 4].sum()
    assert found.label_signal_share == pytest.approx(1 - own / matrix[:, [2, 4]].sum())


def test_overlapping_clients_keep_what_one_of_them_has() -> None:
    graph = Graph.build(np.zeros((3, 1)), np.array([[0, 1], [1, 2]]), np.zeros(3, int))
    everyone = [np.array([0, 1]), np.array([1, 2])]
    train = [np.ones(2, dtype=bool)] * 2
    assert partition_loss(graph, everyone, train).edges == 0
    apart = partition_loss(graph, [np.array([0, 1]), np.array([2])], [train[0], train[0][:1]])
    assert (apart.edges, apart.isolated) == (1, 1)


def test_one_client_loses_nothing() -> None:
    graph = random_graph(30, density=0.1)
    assert graph.masks is not None
    found = partition_loss(graph, [np.arange(30)], [graph.masks.train])
    assert found.edges == found.isolated == 0
    assert found.label_signal_share == pytest.approx(0, abs=1e-9)


@settings(deadline=None)
@given(st.integers(0, 100))
def test_dividing_further_loses_more(seed: int) -> None:
    graph = random_graph(24, seed=seed, density=0.2)
    assert graph.masks is not None
    train = graph.masks.train
    owner = np.random.default_rng(seed).integers(0, 8, 24)
    lost = []
    for fold in (8, 4, 2, 1):  # owners k and k + fold are one client
        parts = [np.flatnonzero(owner % fold == k) for k in range(fold)]
        found = partition_loss(graph, parts, [train[part] for part in parts])
        lost.append((found.edges, found.label_signal_share))
    for finer, coarser in pairwise(lost):
        assert finer[0] >= coarser[0]
        assert finer[1] >= coarser[1] - 1e-12


def test_edges_that_are_kept_are_the_clients_edges() -> None:
    graph = random_graph(40, density=0.2)
    parts = np.array_split(np.random.default_rng(0).permutation(40), 3)
    found = partition_loss(graph, parts, [np.ones(len(p), dtype=bool) for p in parts])
    kept = sum(int(dense_adjacency(graph)[p][:, p].sum()) // 2 for p in parts)
    assert found.edges == graph.num_edges - kept


def test_clients_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_graph(30, density=0.2)
    parts = np.array_split(np.arange(30), 5)
    train = [np.arange(len(p)) % 2 == 0 for p in parts]
    expected = label_signal_lost(graph, parts, train)
    monkeypatch.setattr(partitioning, "AT_ONCE", 2)
    assert label_signal_lost(graph, parts, train) == pytest.approx(expected)
    assert 0 < expected < 1


def test_nothing_to_lose() -> None:
    graph = Graph.build(np.zeros((2, 1)), np.zeros((2, 0), int), np.zeros(2, int))
    found = partition_loss(graph, [np.arange(2)], [np.zeros(2, dtype=bool)])
    assert found.edges == 0
    assert math.isnan(found.edges_share)
    assert math.isnan(found.label_signal_share)
