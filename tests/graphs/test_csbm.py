"""The block model: its statistics are those asked for, and it scales."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyphily.errors import UserError
from polyphily.graphs.csbm import (
    _uneven_rates,
    draw_direction,
    sample,
    sample_federation,
    unrank_pairs,
)
from polyphily.graphs.edges import canonical_edges
from polyphily.graphs.graph import Graph
from polyphily.graphs.random import generator


def homophily(graph: Graph) -> float:
    source, target = graph.edges
    return float((graph.labels[source] == graph.labels[target]).mean())


def phi(value: float) -> float:
    return (1 + math.erf(value / math.sqrt(2))) / 2


@settings(max_examples=30, deadline=None)
@given(st.integers(200, 2000), st.floats(1, 20), st.floats(0, 1), st.integers(0, 99))
def test_degree_and_homophily_are_those_asked_for(
    nodes: int, degree: float, share: float, seed: int
) -> None:
    graph = sample(nodes, 1, 1.0, degree, share, generator(seed, "test"))
    half, other = (nodes + 1) // 2, nodes // 2
    pairs = (half * (half - 1) + other * (other - 1)) // 2, half * other
    chances = 2 * degree * share / nodes, 2 * degree * (1 - share) / nodes
    alike = round(homophily(graph) * graph.num_edges)
    for found, total, chance in zip((alike, graph.num_edges - alike), pairs, chances, strict=True):
        error = math.sqrt(total * chance * (1 - chance))
        assert abs(found - total * chance) <= 5.5 * error + 5  # counts near 0 are skewed
    assert np.abs(np.bincount(graph.labels) - nodes / 2).max() <= 0.5


def test_large_graph_matches_to_the_percent() -> None:
    graph = sample(100_000, 1, 1.0, 10.0, 0.3, generator(0, "test"))
    assert 2 * graph.num_edges / graph.num_nodes == pytest.approx(10, abs=0.07)
    assert homophily(graph) == pytest.approx(0.3, abs=0.0033)  # five standard errors


def test_edges_are_canonical_and_degrees_poisson() -> None:
    graph = sample(20_000, 1, 1.0, 6.0, 0.8, generator(1, "test"))
    assert np.array_equal(graph.edges, canonical_edges(graph.edges, graph.num_nodes))
    degrees = np.bincount(graph.edges[0], minlength=graph.num_nodes)
    assert degrees.var() == pytest.approx(6, rel=0.06)
    assert not np.array_equal(graph.labels, np.sort(graph.labels))


def test_every_pair_is_equally_likely() -> None:
    rng = generator(2, "test")
    counts = np.zeros((6, 6))
    for _ in range(3000):
        graph = sample(6, 1, 1.0, 2.0, 0.5, rng)  # probability 1/3 for every pair
        np.add.at(counts, tuple(graph.edges), 1)
    off = ~np.eye(6, dtype=bool)
    assert np.abs(counts[off] / 3000 - 1 / 3).max() < 5 * math.sqrt(2 / 9 / 3000)


@pytest.mark.parametrize(("share", "edges"), [(1.0, 2 * 10), (0.0, 25)])
def test_probability_one_gives_every_edge(share: float, edges: int) -> None:
    assert sample(10, 1, 1.0, 5.0, share, generator(0, "test")).num_edges == edges


@pytest.mark.parametrize("nodes", [2, 3, 5])
def test_tiny_graphs(nodes: int) -> None:
    graph = sample(nodes, 3, 1.0, 0.5, 0.5, generator(0, "test"))
    assert graph.features.shape == (nodes, 3)


def test_pairs_are_numbered_without_gaps() -> None:
    low, high = unrank_pairs(np.arange(100 * 99 // 2))
    assert (low < high).all()
    assert len(set(zip(low.tolist(), high.tolist(), strict=True))) == 100 * 99 // 2
    assert high.max() == 99


@given(st.integers(2, 10**9))
def test_unranking_is_exact_at_row_ends(high: int) -> None:
    first = high * (high - 1) // 2
    found = unrank_pairs(np.array([first - 1, first, first + high - 1, first + high]))
    assert found.tolist() == [[high - 2, 0, high - 1, 0], [high - 1, high, high, high + 1]]


def test_features_have_the_distribution_stated() -> None:
    nodes, features, mu = 20_000, 25, 4000.0
    direction = draw_direction(features, generator(3, "c"))
    graph = sample(nodes, features, mu, 0.0, 0.5, generator(3, "test"), direction)
    sign = 2 * graph.labels[:, None] - 1
    values = np.asarray(graph.features) * sign
    error = 1 / math.sqrt(features * nodes)
    assert np.abs(values.mean(axis=0) - math.sqrt(mu / nodes) * direction).max() < 5 * error
    assert np.allclose(values.var(axis=0), 1 / features, rtol=0.06)


def test_the_best_linear_classifier_is_as_good_as_stated() -> None:
    """Accuracy Phi(sqrt(mu F / N) |c|) for the defaults, which lie between 70 and 75 per cent."""
    nodes, features, mu = 3000, 100, 10.0
    rates = []
    for seed in range(10):
        rng = generator(seed, "test")
        direction = draw_direction(features, rng)
        graph = sample(nodes, features, mu, 0.0, 0.5, rng, direction)
        right = (np.asarray(graph.features) @ direction > 0) == (graph.labels == 1)
        expected = phi(math.sqrt(mu * features / nodes) * float(np.linalg.norm(direction)))
        assert abs(right.mean() - expected) < 5 * math.sqrt(0.25 / nodes)
        rates.append(right.mean())
    assert 0.70 < np.mean(rates) < 0.75


def test_time_is_linear_in_edges() -> None:
    start = time.perf_counter()
    graph = sample(200_000, 4, 10.0, 10.0, 0.2, generator(0, "test"))
    assert graph.num_edges > 990_000
    assert time.perf_counter() - start < 10  # an N x N matrix would not fit in memory


def test_too_high_a_degree_is_an_error() -> None:
    with pytest.raises(UserError, match=r"degree 30 with homophily 0\.9 is too large for 50 nodes"):
        sample(50, 1, 1.0, 30.0, 0.9, generator(0, "test"))


# Federations --------------------------------------------------------------------------------------


def test_a_federation_from_texts() -> None:
    made = sample_federation(
        clients="4", nodes="900-1100", features="8", degree="8", homophily="0.4", gap="0.4",
        spread="even",
    )  # fmt: skip
    assert made.natural
    assert (made.name, made.classes) == ("csbm", ("-1", "+1"))
    assert [graph.name for graph in made.graphs] == [f"client-{k}" for k in range(4)]
    assert all(900 <= graph.num_nodes <= 1100 for graph in made.graphs)
    assert [homophily(graph) for graph in made.graphs] == pytest.approx(
        [0.2, 1 / 3, 7 / 15, 0.6], abs=0.045
    )


def test_uniform_homophily_fills_the_interval() -> None:
    made = sample_federation(clients=60, nodes=400, features=2, degree=10, homophily=0.6, gap=0.4)
    found = np.array([homophily(graph) for graph in made.graphs])
    assert found.min() > 0.4 - 0.06
    assert found.max() < 0.8 + 0.06
    assert found.mean() == pytest.approx(0.6, abs=0.06)
    assert found.std() == pytest.approx(0.4 / math.sqrt(12), abs=0.04)
    assert made.graphs[7].name == "client-07"


def test_clients_share_the_direction() -> None:
    made = sample_federation(clients=3, nodes=4000, features=20, mu=8000, degree=0)
    means = [
        (np.asarray(graph.features) * (2 * graph.labels[:, None] - 1)).mean(axis=0)
        for graph in made.graphs
    ]
    assert np.corrcoef(means)[np.triu_indices(3, 1)].min() > 0.99


def test_a_seed_fixes_the_federation_and_more_clients_leave_the_first_alone() -> None:
    options: dict[str, Any] = {"nodes": "50-90", "features": 3}
    first, again = (sample_federation(clients=3, **options) for _ in range(2))
    more = sample_federation(clients=5, **options)
    other = sample_federation(clients=3, seed=1, **options)
    for left, right in [
        *zip(first.graphs, again.graphs, strict=True),
        *zip(first.graphs, more.graphs, strict=False),
    ]:
        assert np.array_equal(left.edges, right.edges)
        assert np.array_equal(left.features, right.features)
    assert not np.array_equal(first.graphs[0].labels, other.graphs[0].labels)
    assert len(sample_federation(**options).graphs) == 10


def test_one_even_client_has_the_mean() -> None:
    made = sample_federation(clients=1, nodes=2000, features=1, spread="even")
    assert homophily(made.graphs[0]) == pytest.approx(0.5, abs=0.04)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clients": 0}, "option 'clients' must be at least 1"),
        ({"clients": "many"}, "option 'clients' must be a number, got 'many'"),
        ({"clients": 2.5}, "option 'clients' must be a whole number"),
        ({"nodes": "5000-1000"}, "option 'nodes' must be a range such as 1000-5000"),
        ({"nodes": "1000-"}, "option 'nodes' must be a number"),
        ({"nodes": 1}, "option 'nodes' must be at least 2"),
        ({"features": "0"}, "option 'features' must be at least 1"),
        ({"mu": -1}, "option 'mu' must be at least 0"),
        ({"degree": "five"}, "option 'degree' must be a number"),
        ({"degree": 2000, "nodes": 100}, "degree 2000 .* too large for 100 nodes"),
        ({"homophily": 1.5}, "option 'homophily' must be at most 1"),
        ({"homophily": 0.75}, "interval from 0.35 to 1.15.* at most 0.5"),
        ({"gap": -0.1}, "option 'gap' must be at least 0"),
        ({"spread": "evenly"}, "unknown spread 'evenly': did you mean 'even'"),
    ],
)
def test_options_that_cannot_be_met(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        sample_federation(**options)


@pytest.mark.parametrize("positives", [0.02, 0.2, 0.9])
def test_classes_may_be_uneven(positives: float) -> None:
    graph = sample(20_000, 4, 10.0, 8.0, 0.3, np.random.default_rng(0), positives=positives)
    assert graph.labels.mean() == pytest.approx(positives)
    degrees = np.bincount(graph.edges[0], minlength=20_000)
    rare = graph.labels == (positives < 0.5)
    assert degrees[rare].mean() == pytest.approx(8, rel=0.08)
    assert degrees[~rare].mean() == pytest.approx(8, rel=0.05)
    source, target = graph.edges[:, rare[graph.edges[0]]]
    assert (graph.labels[source] == graph.labels[target]).mean() == pytest.approx(0.3, abs=0.05)


def test_uneven_classes_are_as_equal_ones_in_the_limit() -> None:
    assert _uneven_rates(500, 500, 6.0, 0.7) == pytest.approx((0.0084, 0.0036, 0.0084))


@pytest.mark.parametrize("positives", ["0", "1", "1.5", "few"])
def test_a_share_of_positives_is_between_0_and_1(positives: str) -> None:
    with pytest.raises(UserError, match="option 'positives' must be"):
        sample_federation(nodes=50, positives=positives)
