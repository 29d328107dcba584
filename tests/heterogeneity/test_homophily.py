"""Homophily and label informativeness: against torch_geometric, by hand, and as published."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.utils import homophily as reference

from builders import edge_index, random_graph
from polyphily.graphs import datasets
from polyphily.graphs.graph import UNLABELLED, Graph
from polyphily.heterogeneity.homophily import (
    adjusted_homophily,
    class_counts,
    class_insensitive_homophily,
    class_mixing,
    edge_homophily,
    label_informativeness,
    node_homophily,
)

MEASURES = (
    edge_homophily,
    node_homophily,
    class_insensitive_homophily,
    adjusted_homophily,
    label_informativeness,
)
# Adjusted homophily and label informativeness by Platonov et al. 2023. Chameleon and Squirrel are
# the graphs with duplicate nodes, read as undirected: their adjusted homophily is that published
# for the graphs without duplicates, while Chameleon's label informativeness (0.01 there) is ours.
PUBLISHED = {
    "cora": (0.77, 0.59),
    "citeseer": (0.67, 0.45),
    "pubmed": (0.69, 0.41),
    "actor": (0.00, 0.00),
    "minesweeper": (0.01, 0.00),
    "tolokers": (0.09, 0.01),
    "chameleon": (0.03, 0.05),
    "squirrel": (0.01, 0.00),
}


def same_as_reference(graph: Graph) -> None:
    edges, labels = edge_index(graph), torch.from_numpy(graph.labels)
    for measure, method in (
        (edge_homophily, "edge"),
        (node_homophily, "node"),
        (class_insensitive_homophily, "edge_insensitive"),
    ):
        expected = float(reference(edges, labels, method=method))
        assert measure(graph) == pytest.approx(expected, abs=1e-6), method


@pytest.mark.parametrize("density", [0.02, 0.3])  # with and without isolated nodes
def test_torch_geometric_finds_the_same(density: float) -> None:
    graph = random_graph(60, classes=4, density=density)
    assert len(np.unique(graph.labels)) == 4
    same_as_reference(graph)


@pytest.mark.data
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_values(name: str, real_data: Path) -> None:
    graph = datasets.read(name, root=real_data, seed=0).graphs[0]
    adjusted, informativeness = PUBLISHED[name]
    assert round(adjusted_homophily(graph), 2) + 0.0 == adjusted
    assert round(label_informativeness(graph), 2) == informativeness
    same_as_reference(graph)


def test_adjusted_homophily_and_informativeness_by_hand() -> None:
    """A path a-a-b: p(a) = 3/4, p(b) = 1/4, p(a,a) = 1/2, p(a,b) = p(b,a) = 1/4."""
    graph = Graph.build(np.zeros((3, 1)), np.array([[0, 1], [1, 2]]), np.array([0, 0, 1]))
    chance = (3 / 4) ** 2 + (1 / 4) ** 2
    assert adjusted_homophily(graph) == pytest.approx((1 / 2 - chance) / (1 - chance))
    joint = 1 / 2 * math.log(1 / 2) + 2 * (1 / 4 * math.log(1 / 4))
    margin = 3 / 4 * math.log(3 / 4) + 1 / 4 * math.log(1 / 4)
    assert label_informativeness(graph) == pytest.approx(2 - joint / margin)


@settings(deadline=None)
@given(st.integers(0, 1000))
def test_the_names_of_classes_do_not_matter(seed: int) -> None:
    graph = random_graph(20, seed=seed, density=0.2)
    other = replace(graph, labels=np.random.default_rng(seed).permutation(5)[graph.labels])
    for measure in MEASURES:
        assert measure(graph) == pytest.approx(measure(other), nan_ok=True), measure.__name__


def test_extremes() -> None:
    """Edges within classes only, and between two classes only."""
    labels = np.arange(10) % 2
    within = np.array(
        [(i, j) for i, j in product(range(10), repeat=2) if i < j and not (j - i) % 2]
    )
    across = np.array([(i, j) for i, j in product(range(10), repeat=2) if i < j and (j - i) % 2])
    like = Graph.build(np.zeros((10, 1)), within.T, labels)
    unlike = Graph.build(np.zeros((10, 1)), across.T, labels)
    assert [measure(like) for measure in MEASURES] == pytest.approx([1] * 5)
    assert [measure(unlike) for measure in MEASURES] == pytest.approx([0, 0, 0, -1, 1])


def test_labels_that_do_not_matter_tell_nothing() -> None:
    graph = random_graph(400, classes=2, density=0.5)
    assert adjusted_homophily(graph) == pytest.approx(0, abs=0.01)
    assert label_informativeness(graph) == pytest.approx(0, abs=0.001)


def test_unlabelled_nodes_are_left_out() -> None:
    graph = random_graph(40, unlabelled=0.4, density=0.2)
    known = np.flatnonzero(graph.labels != UNLABELLED)
    rest = graph.subgraph(known)
    assert 0 < len(known) < 40
    for measure in MEASURES:
        assert measure(graph) == measure(rest), measure.__name__
    assert class_counts(graph).sum() == len(known)


@pytest.mark.parametrize("measure", MEASURES)
def test_what_is_not_defined_is_nan(measure: object) -> None:
    edgeless = Graph.build(np.zeros((3, 1)), np.zeros((2, 0), int), np.array([0, 1, 1]))
    nobody = Graph.build(np.zeros((2, 1)), np.array([[0], [1]]), np.array([-1, -1]))
    assert callable(measure)
    assert math.isnan(measure(edgeless))
    assert math.isnan(measure(nobody))


def test_one_class_has_no_adjusted_homophily() -> None:
    graph = Graph.build(np.zeros((3, 1)), np.array([[0, 1], [1, 2]]), np.zeros(3, int))
    assert edge_homophily(graph) == node_homophily(graph) == 1
    for measure in (adjusted_homophily, label_informativeness, class_insensitive_homophily):
        assert math.isnan(measure(graph)), measure.__name__


def test_mixing_counts_edges_in_both_directions() -> None:
    graph = random_graph(25, density=0.3)
    expected = np.zeros((4, 4))
    for source, target in graph.edges.T:
        expected[graph.labels[source], graph.labels[target]] += 1
    assert np.array_equal(class_mixing(graph, 4), expected)
