"""Synthetic payments: how many are illicit, how they flow, and how banks differ."""

from __future__ import annotations

import inspect

import networkx as nx
import numpy as np
import pytest

from polyphily.errors import UserError
from polyphily.graphs.datasets import DATASETS
from polyphily.graphs.graph import UNLABELLED, Graph
from polyphily.graphs.loading import load
from polyphily.graphs.payments import CLASSES, LONGEST, SHORTEST, sample_federation


def illicit_graph(graph: Graph) -> nx.Graph:
    """The edges between illicit payments."""
    found = nx.Graph()
    found.add_nodes_from(np.flatnonzero(graph.labels == 1).tolist())
    both = graph.labels[graph.edges] == 1
    found.add_edges_from(graph.edges[:, both.all(axis=0)].T.tolist())
    return found


def test_the_share_of_illicit_payments() -> None:
    drawn = sample_federation(clients=3, nodes=1000, positives=0.05, unknown=0)
    assert drawn.classes == CLASSES
    for graph in drawn.graphs:
        assert graph.num_nodes == 1000
        assert (graph.labels == 1).sum() == 50
        assert (graph.labels == 0).sum() == 950


def test_some_payments_have_no_label() -> None:
    (graph,) = sample_federation(clients=1, nodes=4000, unknown=0.7).graphs
    assert (graph.labels == UNLABELLED).mean() == pytest.approx(0.7, abs=0.03)


def test_schemes_are_chains() -> None:
    for graph in sample_federation(clients=2, nodes=2000, unknown=0).graphs:
        parts = list(nx.connected_components(illicit_graph(graph)))
        assert min(map(len, parts)) >= SHORTEST - 2  # the last one may be cut short
        assert np.median([len(part) for part in parts]) >= SHORTEST
        assert max(map(len, parts)) <= 3 * LONGEST  # chains may touch


def test_money_flows_to_later_payments_of_the_same_step() -> None:
    (graph,) = sample_federation(clients=1, nodes=600, steps=3, unknown=0).graphs
    assert graph.arcs is not None
    source, target = graph.edges[:, graph.arcs]
    assert (source < target).all()
    parts = nx.Graph(graph.edges.T.tolist())
    assert nx.number_connected_components(parts) >= 3


def test_degrees_have_a_heavy_tail() -> None:
    (graph,) = sample_federation(clients=1, nodes=3000).graphs
    degrees = np.bincount(graph.edges[0], minlength=3000)
    assert degrees.max() > 8 * degrees.mean()


def test_banks_differ_in_how_schemes_hide() -> None:
    graphs = sample_federation(clients=4, nodes=6000, unknown=0, positives=0.05).graphs
    shares = []
    for graph in graphs:
        source, target = graph.edges
        own = graph.labels[source] == 1
        shares.append((graph.labels[target][own] == 1).mean())
    assert shares[0] > shares[1] > shares[-1]


def test_the_same_seed_draws_the_same() -> None:
    first, again = (sample_federation(clients=2, nodes=300, seed=3) for _ in range(2))
    other = sample_federation(clients=2, nodes=300, seed=4)
    for a, b, c in zip(first.graphs, again.graphs, other.graphs, strict=True):
        np.testing.assert_array_equal(a.features, b.features)
        np.testing.assert_array_equal(a.edges, b.edges)
        assert a.edges.shape != c.edges.shape or (a.edges != c.edges).any()


def test_it_is_a_dataset_whose_metric_is_auprc() -> None:
    own = set(inspect.signature(sample_federation).parameters) - {"clients", "seed"}
    assert set(DATASETS["payments"].options) - {"component"} == own
    federation = load("payments:nodes=800", clients=2)
    assert federation.metric == "auprc"
    assert "'illicit' has" in federation.metric_reason


@pytest.mark.parametrize("options", [{"nodes": 100, "positives": 0.01}, {"nodes": 60, "steps": 10}])
def test_too_few_payments_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(UserError, match="are too few for a scheme of 3 payments"):
        sample_federation(**options)  # type: ignore[arg-type]
