"""Noise: how much changes, what stays, and that a seed decides it."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import random_graph, random_graphs
from polyphily.errors import UserError
from polyphily.graphs.edges import canonical_edges
from polyphily.graphs.graph import UNLABELLED, Graph
from polyphily.graphs.loading import load
from polyphily.graphs.noise import (
    Noise,
    disturb,
    flipped_labels,
    new_pairs,
    parse_noise,
    rewired,
    scattered,
)

PROBABILITY = st.sampled_from([0.0, 0.1, 0.5, 1.0])


def pairs(edges: np.ndarray) -> set[tuple[int, int]]:
    return {(int(a), int(b)) for a, b in edges.T if a < b}


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 30), st.floats(0.02, 1), PROBABILITY, st.integers(0, 99))
def test_rewiring_keeps_the_number_of_edges(
    nodes: int, density: float, probability: float, seed: int
) -> None:
    graph = random_graph(nodes, seed=seed, density=density)
    (noisy,) = disturb([graph], Noise(edges=probability), 2, seed)
    assert noisy.edges.shape == graph.edges.shape
    assert np.array_equal(noisy.edges, canonical_edges(noisy.edges, nodes))
    if probability == 0:
        assert np.array_equal(noisy.edges, graph.edges)


@settings(max_examples=40, deadline=None)
@given(st.integers(3, 30), st.floats(0.02, 1), PROBABILITY, st.integers(0, 99))
def test_new_edges_have_the_weights_directions_and_relations_of_lost_ones(
    nodes: int, density: float, probability: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    plain = random_graph(nodes, seed=seed, density=density)
    single = plain.edges[:, plain.edges[0] < plain.edges[1]]
    count = single.shape[1]
    weights = 1.0 + np.arange(count)  # tells edges apart
    flipped = rng.random(count) < 0.5
    graph = Graph.build(
        plain.features,
        np.where(flipped, single[::-1], single),
        plain.labels,
        edge_weights=weights,
        directed=True,
        edge_types=np.arange(count) % 3,
        relations=("a", "b", "c"),
    )
    (noisy,) = disturb([graph], Noise(edges=probability), 2, seed)
    assert noisy.edge_weights is not None
    assert noisy.arcs is not None
    assert noisy.edge_types is not None
    assert sorted(noisy.edge_weights[noisy.arcs].tolist()) == weights.tolist()
    # Both entries of an edge agree, one of them is its arc, and edges that stay have their own.
    index = {(u, v): i for i, (u, v) in enumerate(noisy.edges.T.tolist())}
    for (u, v), i in index.items():
        j = index[v, u]
        assert noisy.edge_weights[i] == noisy.edge_weights[j]
        assert noisy.arcs[i] != noisy.arcs[j]
        edge = int(noisy.edge_weights[i]) - 1
        assert noisy.edge_types[i] == 1 << (edge % 3)
    kept = pairs(graph.edges) & pairs(noisy.edges)
    if probability == 0:
        assert len(kept) == count
    moved = [e for e in range(count) if tuple(single[:, e].tolist()) not in kept]
    for e in set(range(count)) - set(moved):
        u, v = (single[::-1] if flipped[e] else single)[:, e].tolist()
        assert noisy.edge_weights[index[u, v]] == weights[e]
        assert noisy.arcs[index[u, v]]


def test_rewiring_replaces_the_share_asked_for_by_pairs_that_were_free() -> None:
    graph = random_graph(300, density=0.1)
    before = pairs(graph.edges)
    single = graph.edges[:, graph.edges[0] < graph.edges[1]]
    after = pairs(rewired(single, 300, 0.1, np.random.default_rng(0))[0])
    lost = len(before - after) / len(before)
    deviation = (0.1 * 0.9 / len(before)) ** 0.5
    assert abs(lost - 0.1) < 5 * deviation
    everything = pairs(rewired(single, 300, 1.0, np.random.default_rng(0))[0])
    assert not before & everything


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 12), st.floats(0, 1), st.integers(0, 99))
def test_new_pairs_are_new_and_different(nodes: int, density: float, seed: int) -> None:
    graph = random_graph(nodes, seed=seed, density=density)
    free = nodes * (nodes - 1) // 2 - graph.num_edges
    for count in {0, free // 2, free}:
        found = new_pairs(graph.edges, nodes, count, np.random.default_rng(seed))
        assert found.shape == (2, count)
        assert len(pairs(found)) == count
        assert not pairs(found) & pairs(graph.edges)


def test_new_pairs_are_drawn_evenly() -> None:
    """Every free pair of a small graph, about equally often, whichever way they are found."""
    for nodes, taken in ((5, [[0, 1, 2, 3], [1, 2, 3, 4]]), (30, [[0], [1]])):
        rng = np.random.default_rng(1)
        counts: dict[tuple[int, int], int] = {}
        draws = 4000
        for _ in range(draws):
            (pair,) = pairs(new_pairs(np.array(taken), nodes, 1, rng))
            counts[pair] = counts.get(pair, 0) + 1
        free = nodes * (nodes - 1) // 2 - len(taken[0])
        assert len(counts) == free
        expected = draws / free
        chi_square = sum((n - expected) ** 2 / expected for n in counts.values())
        assert chi_square < free + 6 * (2 * free) ** 0.5


@pytest.mark.parametrize("sparse", [False, True])
def test_scattered_features_keep_the_columns(sparse: bool) -> None:
    graph = random_graph(400, features=5, sparse=sparse)
    found = scattered(graph.features, 0.3, np.random.default_rng(0))
    before = graph.features.toarray() if sparse else graph.features
    after = found.toarray() if sparse else found
    assert sp.issparse(found) == sparse
    assert np.allclose(before.sum(axis=0), after.sum(axis=0), atol=1e-4)
    if not sparse:
        assert np.array_equal(np.sort(before, axis=0), np.sort(after, axis=0))
    stored = before != 0
    changed = ((before != after) & stored).sum() / stored.sum()
    assert 0.2 < changed < 0.45
    assert np.array_equal(
        scattered(graph.features, 0.0, np.random.default_rng(0)).toarray() if sparse
        else scattered(graph.features, 0.0, np.random.default_rng(0)),
        before,
    )  # fmt: skip


def test_label_noise_spares_all_but_train_nodes() -> None:
    graph = random_graph(2000, density=0.0, classes=4, unlabelled=0.1)
    assert graph.masks is not None
    found = flipped_labels(graph, 0.25, 4, np.random.default_rng(0))
    train = graph.masks.train
    assert np.array_equal(found[~train], graph.labels[~train])
    share = (found[train] != graph.labels[train]).mean()
    assert abs(share - 0.25) < 5 * (0.25 * 0.75 / train.sum()) ** 0.5
    assert (found[train] != UNLABELLED).all()
    assert set(found[train]) == {0, 1, 2, 3}
    certain = flipped_labels(graph, 1.0, 4, np.random.default_rng(0))
    assert (certain[train] != graph.labels[train]).all()


def test_noise_is_each_clients_own_and_of_the_seed() -> None:
    graphs = random_graphs([30, 40, 50])
    noise = Noise(edges=0.2, features=0.2, labels=0.2)
    both = disturb(graphs, noise, 3, seed=1)
    assert [g.name for g in both] == [g.name for g in graphs]
    first = disturb(graphs[:1], noise, 3, seed=1)[0]
    assert np.array_equal(both[0].edges, first.edges)
    assert np.array_equal(both[0].features, first.features)
    assert np.array_equal(both[0].labels, first.labels)
    other = disturb(graphs, noise, 3, seed=2)
    assert not np.array_equal(both[2].edges, other[2].edges)


def test_load_takes_noise_and_asks_for_it_again() -> None:
    data = "csbm:nodes=50,features=6"
    calm, noisy = load(data, clients=2), load(data, clients=2, noise="edges=0.5, labels=0.1")
    assert noisy.request["noise"] == "edges=0.5,labels=0.1"
    assert "noise" not in calm.request
    assert not np.array_equal(calm.clients[0].edges, noisy.clients[0].edges)
    assert np.array_equal(calm.clients[0].features, noisy.clients[0].features)
    again = load(**noisy.request)  # type: ignore[arg-type]
    assert np.array_equal(again.clients[1].edges, noisy.clients[1].edges)


def test_parse_reads_what_str_writes() -> None:
    assert parse_noise(None) == Noise()
    assert not parse_noise("edges=0")
    noise = Noise(edges=0.1, features=0.25, labels=1)
    assert parse_noise(str(noise)) == noise


@pytest.mark.parametrize("text", ["edge=0.1", "edges", "edges=x", "edges=1.5", "labels=-0.1"])
def test_noise_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="noise"):
        parse_noise(text)
