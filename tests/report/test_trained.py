"""What is measured of models: embeddings, filters, weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cases import simulate, small_federation
from polyphily.heterogeneity.divergence import embedding_divergence
from polyphily.heterogeneity.filters import FREQUENCIES, polynomial_response
from polyphily.heterogeneity.spectral import normalised_adjacency
from polyphily.report.trained import examine

SIZES = (40, 30, 50)


def test_a_global_model_received_by_all_has_no_heterogeneity_before_training() -> None:
    simulation = simulate("fedavg", small_federation(SIZES))
    found = examine(simulation, "received")
    assert found.heterogeneity == pytest.approx(0, abs=1e-9)
    assert found.collaboration == "equal"
    assert found.network == "gcn"
    assert found.responses is None
    assert found.frequencies is None
    simulation.advance()
    after = examine(simulation, "trained")
    assert after.heterogeneity > 0
    assert 0 < after.heterogeneity_relative <= 2
    assert (after.round, after.method) == (1, "fedavg")


def test_weights_are_compared_pair_by_pair() -> None:
    simulation = simulate("fedavg", small_federation(SIZES), rounds=1)
    theta = torch.cat(
        [t.flatten(1) for n, t in simulation.memory.items() if n.startswith("model/")], dim=1
    )
    expected = sum(float((a - b).square().sum()) / 3 for a in theta for b in theta)
    assert examine(simulation, "trained").heterogeneity == pytest.approx(expected)


def test_embeddings_are_those_of_the_view() -> None:
    federation = small_federation(SIZES)
    simulation = simulate("local", federation, rounds=2)
    local = simulation.trained()
    output = local.forward().embedding.detach().numpy()
    parts = np.split(output, np.cumsum(SIZES)[:-1])
    expected, _ = embedding_divergence(parts, [g.labels for g in federation.clients], 3)
    found = examine(simulation, "trained").embedding_divergence_per_class
    assert found == pytest.approx(expected)
    assert not np.isnan(found).any()


def test_filter_of_gpr_gnn() -> None:
    simulation = simulate("local", small_federation(SIZES), rounds=2, backbone="gpr-gnn", hops=4)
    found = examine(simulation, "trained")
    gamma = simulation.trained().params["gamma"].detach().numpy()
    assert found.responses == pytest.approx(polynomial_response(gamma))
    assert np.array_equal(found.frequencies, FREQUENCIES)


def test_filter_of_unifilter_before_training() -> None:
    """Coefficients are all 1/(K+1), and with tau = 1 the homophily bases alone are mixed."""
    from polyphily.core.method import create

    method = create("fedgsp", {"tau": 1.0, "order": 3})
    federation = small_federation(SIZES)
    found = examine(simulate(method, federation), "trained")
    assert found.responses is not None
    expected = polynomial_response(np.full((1, 4), 1 / 4))[0]
    for graph, response in zip(federation.clients, found.responses, strict=True):
        # Small graphs have few frequencies: in between, the response is that of the nearest.
        own = np.linalg.eigvalsh(np.eye(graph.num_nodes) - normalised_adjacency(graph).toarray())
        near = np.abs(FREQUENCIES[:, None] - own).min(axis=1) < 0.02
        near &= ~np.isnan(response)
        assert near.any()
        assert response[near] == pytest.approx(expected[near], abs=0.05)
    assert found.network == "unifilter"
    assert found.collaboration == "learned"


def test_several_seeds_give_the_first() -> None:
    first, second = (small_federation(SIZES, seed=seed) for seed in (0, 1))
    together = examine(simulate("fedavg", [first, second], rounds=2), "received")
    alone = examine(simulate("fedavg", first, rounds=2), "received")
    assert together.seed == 0
    assert together.embedding_divergence == pytest.approx(alone.embedding_divergence, rel=1e-6)
    assert together.heterogeneity == pytest.approx(alone.heterogeneity, rel=1e-6)
