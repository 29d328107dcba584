"""Everything measured of a federation: in agreement with the parts, and plain in a file."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from builders import random_graph, random_graphs
from cases import federation_of
from polyphily.graphs.graph import Graph
from polyphily.graphs.loading import load, whole_graph
from polyphily.heterogeneity import homophily, pagerank, spectral
from polyphily.heterogeneity.advice import RULES, advise, counting_clients
from polyphily.heterogeneity.inspection import inspect, mean_of_pairs, profile
from polyphily.heterogeneity.results import in_words
from polyphily.runs.folder import clean

CSBM = "csbm:nodes=300,features=20,degree=8"


def test_a_profile_is_made_of_the_measures() -> None:
    graph = random_graph(40, density=0.1)
    assert graph.masks is not None
    found, _ = profile(graph, classes=3)
    assert found.edges == graph.num_edges
    assert found.adjusted_homophily == homophily.adjusted_homophily(graph)
    assert found.label_informativeness == homophily.label_informativeness(graph)
    assert found.high_frequency_area == spectral.high_frequency_area(graph)
    score = pagerank.structure_inertia_score(graph, graph.masks.train)
    assert found.structure_inertia_score == score
    assert found.structure_inertia_per_node == score / 40
    assert found.label_counts.sum() == found.labelled == 40
    assert found.spectrum.sum() == pytest.approx(1)


def test_permuting_clients_permutes_pairs() -> None:
    federation = load(CSBM, clients=4)
    order = [2, 0, 3, 1]
    shuffled = replace(federation, clients=tuple(federation.clients[k] for k in order))
    first, second = inspect(federation), inspect(shuffled)
    for name, matrix in first.pairs.items():
        assert second.pairs[name] == pytest.approx(matrix[np.ix_(order, order)]), name
    assert second.similarity_ratio == first.similarity_ratio


def test_matrices_have_their_form() -> None:
    pairs = inspect(load(CSBM, clients=3)).pairs
    for name, matrix in pairs.items():
        assert matrix.shape == (3, 3)
        assert (matrix >= 0).all(), name
        diagonal = 1 if name == "similarity" else 0
        assert (matrix.diagonal() == diagonal).all(), name
        assert (matrix == matrix.T).all() == (name != "spectral_kl"), name


def test_whole_graph_and_what_was_lost() -> None:
    graph = random_graph(120, density=0.05, name="mine")
    federation = load(graph, partition="random", clients=3)
    assert whole_graph(federation) is None  # came from memory: nothing to read again
    found = inspect(federation, graph)
    assert found.graph is not None
    assert found.graph.edges == graph.num_edges
    assert found.lost is not None
    assert found.lost.edges == graph.num_edges - sum(c.edges for c in found.clients)


def test_a_client_without_edges_or_of_one_class_is_measured() -> None:
    lonely = Graph.build(
        np.ones((6, 6)), np.zeros((2, 0), int), np.array([0, 0, 0, 1, 1, 1]), name="lonely"
    )
    single = random_graph(20, classes=1, name="single")
    federation = federation_of([*random_graphs([20]), lonely, single])
    found = inspect(federation)
    assert math.isnan(found.clients[1].edge_homophily)
    assert math.isnan(found.clients[2].adjusted_homophily)
    assert np.isnan(found.pairs["neighbour_divergence"][0, 1])
    text = json.dumps(clean(found.to_dict()), allow_nan=False)
    back = json.loads(text)
    assert back["clients"][1]["edge_homophily"] is None
    assert back["pairs"]["similarity"][0][1] is None


def test_unlabelled_nodes_are_said() -> None:
    federation = federation_of(random_graphs([40, 40], unlabelled=0.5))
    found = inspect(federation)
    assert found.clients[0].labelled < 40
    assert any("unlabelled" in note for note in found.notes)


def test_mean_of_pairs() -> None:
    matrix = np.array([[0, 1, np.nan], [3, 0, np.nan], [np.nan, np.nan, 0]])
    assert mean_of_pairs(matrix) == 2
    assert math.isnan(mean_of_pairs(np.zeros((1, 1))))


# Advice ------------------------------------------------------------------------------------------


def test_homophily_dominates_where_it_was_made_to() -> None:
    found = inspect(load(f"{CSBM},gap=0.8,spread=even", clients=5))
    first = advise(found)[0]
    assert "homophily" in first.measure
    assert first.value > first.level
    assert "fedspa" in first.methods
    assert f"{first.value:.2f}" in first.text
    assert in_words(first.methods, "csbm") in first.text


def test_clients_that_are_alike_get_fedavg() -> None:
    found = inspect(load(f"{CSBM},gap=0,homophily=0.8", clients=5))
    first, *others = advise(found)
    assert first.methods == ("fedavg",)
    assert ",," not in first.text
    assert not others


def test_labels_dominate_where_they_were_made_to() -> None:
    """Edges are random: that classes have other neighbours follows from the mix of labels."""
    rng = np.random.default_rng(0)
    graphs = []
    for k, graph in enumerate(random_graphs([200, 200, 200], density=0.05)):
        labels = np.where(rng.random(200) < 0.85, k, rng.integers(0, 3, 200))
        graphs.append(replace(graph, labels=labels))
    found = inspect(federation_of(graphs))
    assert mean_of_pairs(found.pairs["neighbour_divergence"]) > 0.5
    assert [a.measure for a in advise(found)][:1] == ["label divergence beyond chance"]
    assert not any(a.measure.startswith("neighbour") for a in advise(found))


def test_thin_evidence_gives_no_advice() -> None:
    found = inspect(federation_of(random_graphs([20, 30, 25, 200], density=0.1)))
    assert counting_clients(found) == [3]
    (only,) = advise(found)
    assert not only.methods
    assert "1 of 4" in only.text


def test_what_a_partition_cut_off_needs_no_large_clients() -> None:
    graph = replace(random_graph(300, density=0.02), name="mine")
    found = inspect(load(graph, partition="random", clients=20), graph)
    assert counting_clients(found) == []
    first, second = advise(found)
    assert first.methods == ("s2fgl",)
    assert first.measure == "share of label signal lost"
    assert not second.methods


def test_one_client_has_nobody_to_differ_from() -> None:
    found = inspect(federation_of(random_graphs([200])))
    assert len(found.clients) == 1
    (only,) = advise(found)
    assert not only.methods


def test_edges_that_say_nothing_are_mentioned() -> None:
    found = inspect(load(f"{CSBM},gap=0,homophily=0.5", clients=3))
    assert any("label informativeness" in entry.measure for entry in advise(found))


def test_small_clients_do_not_count() -> None:
    """Two small clients that differ wildly leave the advice to the four large ones."""
    alike = [
        replace(g, name=f"large-{k}")
        for k, g in enumerate(load(f"{CSBM},gap=0,homophily=0.8", clients=4).clients)
    ]
    odd = random_graphs([12, 12], features=20, classes=2, density=0.9)
    found = inspect(federation_of([*alike, *odd]))
    assert counting_clients(found) == [0, 1, 2, 3]
    assert advise(found)[0].methods == ("fedavg",)


def test_rules_name_methods_that_exist() -> None:
    from polyphily.core.method import METHODS

    known = METHODS
    for rule in RULES:
        assert set(rule.methods) <= set(known), rule.finding
