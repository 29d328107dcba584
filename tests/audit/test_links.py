"""The link-inference attack against small independent computations, and on graphs that leak."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from builders import random_graph
from polyphily.audit.links import (
    KNOWLEDGE,
    area,
    attack,
    audit,
    chance_either_way,
    cosines,
    draw_pairs,
    sent_parameters,
    two_means,
)
from polyphily.core.method import create
from polyphily.core.recipes import fill
from polyphily.core.settings import Settings
from polyphily.engines.simulation import Simulation
from polyphily.graphs.loading import load

VALUES = st.lists(st.integers(-20, 20), min_size=2, max_size=12).filter(lambda v: len(set(v)) > 1)


@given(VALUES)
def test_two_means_finds_the_best_cut(values: list[int]) -> None:
    x = np.array(values, dtype=np.float64)

    def inertia(upper: np.ndarray) -> float:
        return sum(float(((g - g.mean()) ** 2).sum()) for g in (x[upper], x[~upper]) if len(g))

    cuts = [x > (a + b) / 2 for a, b in itertools.pairwise(sorted(set(values)))]
    assert inertia(x > two_means(x)) == pytest.approx(min(map(inertia, cuts)))


@settings(deadline=None)
@given(VALUES)
def test_area_equals_scikit_learn(values: list[int]) -> None:
    x = np.array(values, dtype=np.float64)
    positive = np.arange(len(x)) % 2 == 0
    assert area(x, positive) == pytest.approx(roc_auc_score(positive, x))


@pytest.mark.parametrize("levels", [3, 1000])
@pytest.mark.parametrize("count", [10, 60])
def test_chance_either_way_is_that_of_dealing_labels_anew(levels: int, count: int) -> None:
    rng = np.random.default_rng(count)
    scores = rng.integers(0, levels, 2 * count).astype(np.float64)
    positive = np.arange(2 * count) < count
    areas = np.array([area(scores, rng.permutation(positive)) for _ in range(4000)])
    dealt = np.maximum(areas, 1 - areas).mean()
    assert chance_either_way(scores, positive) - 0.5 == pytest.approx(dealt - 0.5, rel=0.05)


def test_cosines_of_dense_and_sparse_rows() -> None:
    x = np.array([[1.0, 0, 0], [1, 1, 0], [0, 0, 2], [0, 0, 0]], dtype=np.float32)
    pairs = np.array([[0, 0, 1, 0], [1, 2, 1, 3]])
    wanted = [2**-0.5, 0, 1, 0]
    assert cosines(x, pairs) == pytest.approx(wanted)
    assert cosines(sp.csr_array(x), pairs) == pytest.approx(wanted)


def test_a_trial_is_half_edges() -> None:
    graph = random_graph(40, density=0.2)
    found = draw_pairs(graph, seed=0, client=0)
    assert found is not None
    pairs, linked = found
    edges = {(a, b) for a, b in graph.edges.T.tolist()}
    assert [tuple(pair) in edges for pair in pairs.T.tolist()] == linked.tolist()
    assert linked.sum() * 2 == len(linked) == 2 * graph.num_edges
    assert draw_pairs(replace(graph, edges=graph.edges[:, :0]), seed=0, client=0) is None
    complete = random_graph(6, density=1.0)
    assert draw_pairs(complete, seed=0, client=0) is None


def test_representations_that_show_the_edges_are_seen_through() -> None:
    """Nodes of two cliques, told apart by their representation."""
    edges = [(a, b) for a, b in itertools.combinations(range(20), 2) if (a < 10) == (b < 10)]
    graph = replace(
        random_graph(20, density=0), edges=np.array(edges + [(b, a) for a, b in edges]).T
    )
    found = draw_pairs(graph, seed=0, client=0)
    assert found is not None
    sides = np.eye(2)[(np.arange(20) >= 10).astype(int)]
    seen = attack(sides, *found)
    assert (seen.auc, seen.accuracy) == (1.0, 1.0)
    noise = attack(np.random.default_rng(0).normal(size=(20, 50)), *found)
    assert 0.3 < noise.auc < 0.7


def simulation(method: str, rounds: int = 2) -> Simulation:
    data = "csbm:nodes=150,features=8,homophily=0.9,gap=0,degree=6"
    federation = load(data, clients=2)
    given = fill(Settings(rounds=rounds, hidden=8, backbone="gcn"), federation.kind, "accuracy")
    made = Simulation(create(method), [federation], given)
    for _ in range(rounds):
        made.advance()
    return made


def test_audit_by_what_the_attacker_sees() -> None:
    found = audit(simulation("fedavg", 20))
    assert tuple(found) == KNOWLEDGE
    means = {name: np.mean([a.auc for a in own if a]) for name, own in found.items()}
    # Representations of a homophilic graph that edges have smoothed show these edges.
    assert means["representations"] > means["model"] + 0.05
    assert means["representations"] > 0.7
    assert means == {
        name: np.mean([a.auc for a in own if a])
        for name, own in audit(simulation("fedavg", 20)).items()
    }


def test_nothing_shared_is_nothing_to_attack_with() -> None:
    found = audit(simulation("local"))
    assert all(found["features"])
    assert not any(found["model"])
    assert not any(found["representations"])


def test_what_a_client_keeps_is_not_used() -> None:
    made = simulation("fedper")
    params = sent_parameters(made)
    assert params is not None
    for name, value in params.items():
        shared = made.method.shares(made.network, name)
        kept = made.memory[f"model/{name}"]
        assert torch.equal(value, kept if shared else torch.zeros_like(kept))
    assert any(not made.method.shares(made.network, name) for name in params)
