"""The structure inertia score as clients become more (its formula: tests/methods/test_s2fgl.py)."""

from __future__ import annotations

import numpy as np
import pytest

from builders import mask_at, random_graph
from polyphily.graphs.csbm import sample
from polyphily.graphs.graph import Graph
from polyphily.graphs.partitions import partition
from polyphily.heterogeneity import pagerank
from polyphily.heterogeneity.pagerank import pagerank_matrix, strongest, structure_inertia_score


def test_score_falls_as_a_random_partition_goes_finer() -> None:
    """S2FGL, Figure 1: with every client the labelled nodes around a node become fewer."""
    graph = sample(1500, 2, 10.0, 6.0, 0.8, np.random.default_rng(0))
    train = np.random.default_rng(1).random(1500) < 0.2
    scores = []
    for clients in (5, 10, 20, 50):
        parts = partition(graph, "random", clients, 0)
        scores.append(sum(structure_inertia_score(graph.subgraph(p), train[p]) for p in parts))
    assert scores == sorted(scores, reverse=True)
    assert scores[-1] < 0.6 * scores[0]


def test_score_may_rise_when_communities_are_cut_apart() -> None:
    """The score itself does not promise to fall: walks that cannot leave come back more often."""
    edges = np.array([[0, 1, 2, 3, 4, 5, 2], [1, 2, 0, 4, 5, 3, 3]])
    graph = Graph.build(np.zeros((6, 1)), edges, np.zeros(6, int))
    train = mask_at(6, [2, 3])
    parts = [np.arange(3), np.arange(3, 6)]
    apart = sum(structure_inertia_score(graph.subgraph(p), train[p]) for p in parts)
    assert apart > structure_inertia_score(graph, train)


def test_only_some_nodes() -> None:
    graph = random_graph(50, density=0.1)
    nodes = np.array([3, 40, 7])
    everything = strongest(graph, 0.15)
    assert strongest(graph, 0.15, nodes=nodes) == pytest.approx(everything[nodes])
    pushed = strongest(graph, 0.15, nodes=nodes, dense=0, tolerance=1e-7)
    assert pushed == pytest.approx(everything[nodes], abs=1e-5)


def test_score_of_many_nodes_is_scaled_up_from_some() -> None:
    graph = sample(800, 2, 10.0, 6.0, 0.8, np.random.default_rng(0))
    train = np.random.default_rng(1).random(800) < 0.3
    exact = structure_inertia_score(graph, train)
    first, again, other = (
        structure_inertia_score(graph, train, most=400, seed=seed) for seed in (0, 0, 1)
    )
    assert first == again != other
    assert first == pytest.approx(exact, rel=0.1)


def test_no_dense_matrix_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_graph(40)
    monkeypatch.setattr(pagerank, "LARGEST", 30)
    with pytest.raises(ValueError, match="too many"):
        pagerank_matrix(graph, 0.15, most=50)
    assert graph.masks is not None
    assert structure_inertia_score(graph, graph.masks.train) > 0  # finds another way


def test_several_sets_of_targets_at_once() -> None:
    graph = random_graph(20)
    sets = np.random.default_rng(0).random((20, 3)) < 0.4
    together = pagerank.sent_to(graph, sets, 0.15)
    for column in range(3):
        assert together[:, column] == pytest.approx(pagerank.sent_to(graph, sets[:, column], 0.15))
