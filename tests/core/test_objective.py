"""Class weights and the focal loss: by hand, at every method, and in all engines."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from polyphily.core.method import METHODS, create
from polyphily.core.objective import LARGEST, balanced_weights, focal_factor
from polyphily.core.settings import from_mapping
from polyphily.engines.simulation import Simulation
from polyphily.graphs.loading import Federation, load
from polyphily.runtime.network import complete

UNEVEN = "csbm:nodes=120,features=6,positives=0.2,gap=0.4"


@given(
    arrays(np.int64, st.tuples(st.integers(1, 5), st.integers(2, 5)), elements=st.integers(0, 99))
)
def test_classes_have_equal_weight_and_nodes_one_on_average(counts: np.ndarray) -> None:
    weights = balanced_weights(counts)
    assert (weights[counts == 0] == 0).all()
    for own, found in zip(counts, weights, strict=True):
        if not own.any():
            continue
        assert (own * found).sum() == pytest.approx(own.sum())
        total = (own * found)[own > 0]
        assert total == pytest.approx(total[0])


def test_weights_by_hand() -> None:
    found = balanced_weights(np.array([[90, 10, 0], [5, 5, 5]]))
    np.testing.assert_allclose(found, [[100 / 180, 5.0, 0.0], [1.0, 1.0, 1.0]])


def test_weights_are_bounded() -> None:
    counts = np.array([[99_999, 1]])
    found = balanced_weights(counts)
    assert found[0, 1] / found[0, 0] == pytest.approx(LARGEST / (100_000 / (2 * 99_999)))
    assert (found * counts).sum() == pytest.approx(100_000)


@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0])
def test_the_focal_factor_is_that_of_the_paper(gamma: float) -> None:
    chance = torch.tensor([0.01, 0.3, 0.9, 0.999], dtype=torch.float64)
    torch.testing.assert_close(focal_factor(-chance.log(), gamma), (1 - chance) ** gamma)


@pytest.mark.parametrize("gamma", [0.5, 2.0])
def test_the_focal_loss_has_a_gradient_for_a_node_that_is_sure(gamma: float) -> None:
    logits = torch.tensor([[100.0, -100.0]], requires_grad=True)
    error = torch.nn.functional.cross_entropy(logits, torch.tensor([0]), reduction="none")
    (focal_factor(error, gamma) * error).sum().backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


def federation(seed: int = 0) -> Federation:
    return load(UNEVEN, clients=3, seed=seed)


def first_losses(name: str, **settings: object) -> torch.Tensor:
    """The clients' losses in the first round in which the method classifies."""
    data = federation()
    method = create(name, {})
    chosen = from_mapping({"rounds": 2, "epochs": 1, "hidden": 8, **settings})
    filled = complete(chosen, method, data.kind, data.metric, dense=data.dense)
    simulation = Simulation(method, [data], filled)
    return torch.tensor(simulation.advance().loss)


@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_weighs_classes(name: str) -> None:
    plain = first_losses(name)
    assert torch.isfinite(plain).all()
    assert torch.equal(first_losses(name), plain)
    for settings in ({"class_weights": "balanced"}, {"loss": "focal=2"}):
        assert not torch.equal(first_losses(name, **settings), plain), (name, settings)


@pytest.mark.parametrize("name", ["fedavg", "polyphony", "fedspa"])
def test_stacked_is_sequential_with_weights(name: str) -> None:
    both = [
        first_losses(name, class_weights="balanced", loss="focal=1", engine=engine)
        for engine in ("stacked", "sequential")
    ]
    torch.testing.assert_close(both[0], both[1], rtol=1e-5, atol=1e-6)


def test_the_loss_is_the_weighted_mean_over_train_nodes() -> None:
    data = federation()
    method = create("fedavg", {})
    chosen = from_mapping({"class_weights": "balanced", "loss": "focal=2", "dtype": "float64"})
    filled = complete(chosen, method, data.kind, data.metric, dense=data.dense)
    simulation = Simulation(method, [data], filled)
    local = simulation.received()
    logits = simulation.predict(local)
    found = local.cross_entropy(logits)
    start = 0
    for k, graph in enumerate(data.clients):
        nodes = np.flatnonzero(graph.masks.train)  # type: ignore[union-attr]
        labels = graph.labels[nodes]
        chance = torch.softmax(logits[start + nodes], dim=1)[np.arange(len(nodes)), labels]
        weight = len(nodes) / (2 * np.bincount(labels)[labels])
        wanted = (-torch.from_numpy(weight) * (1 - chance) ** 2 * chance.log()).mean()
        assert float(found[k]) == pytest.approx(float(wanted), rel=1e-9)
        start += graph.num_nodes


@pytest.mark.parametrize("settings", [{"sample": "3,3", "batch": 20}, {"label_inputs": 0.5}])
def test_weights_are_those_of_all_train_labels_in_parts_of_them(
    settings: dict[str, object],
) -> None:
    data = federation()
    method = create("fedavg", {})
    chosen = from_mapping({"class_weights": "balanced", "hidden": 8, **settings})
    filled = complete(chosen, method, data.kind, data.metric, dense=data.dense)
    simulation = Simulation(method, [data], filled)
    cohort = simulation.cohort
    part = cohort.sample(cohort.draws(0))
    assert len(part.train_nodes) < len(cohort.train_nodes)
    assert torch.equal(part.class_weights, cohort.class_weights)
    assert simulation.advance().loss[0] is not None
