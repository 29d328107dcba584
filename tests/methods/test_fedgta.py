"""FedGTA: known numbers, the client's statistics and the server against plain loops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from builders import cohort_of, dense_adjacency, mask_at
from cases import assert_close, assert_same_bits, simulate, small_federation
from effects import changes_predictions
from polyphily.core.local import Local
from polyphily.core.messages import Uploads, model_part
from polyphily.core.method import create
from polyphily.core.optimizers import OptimizerSpec
from polyphily.engines.simulation import Simulation
from polyphily.graphs.graph import Graph, Masks
from polyphily.methods.fedgta import FedGTA, certainty
from polyphily.nn.backbones import Backbone, Output, Shape
from polyphily.testing import METHOD_CHECKS, MethodCase

RNG = np.random.default_rng(0)


# A client's statistics ----------------------------------------------------------------------------


class Fixed(Backbone):
    """Predicts given probabilities."""

    def __init__(self, probabilities: torch.Tensor) -> None:
        super().__init__(Shape(features=1, classes=probabilities.shape[1]))
        self.probabilities = probabilities
        self.weight = torch.nn.Parameter(torch.zeros(1, 1))

    def forward(self, graph: object, draws: object = None) -> Output:
        return Output(self.probabilities.log(), self.probabilities)

    def is_classifier(self, parameter: str) -> bool:
        return False


def path() -> Local:
    """The path 0-1-2 with two classes, in which node 0 trains with class 0."""
    edges, labels = np.array([[0, 1], [1, 2]]), np.array([0, 1, 1])
    nobody = mask_at(3, [])
    masks = Masks(mask_at(3, [0]), nobody, nobody)
    graph = Graph.build(np.ones((3, 1), np.float32), edges, labels, masks=masks)
    probabilities = torch.tensor([[0.5, 0.5], [0.6, 0.4], [0.3, 0.7]], dtype=torch.float64)
    network = Fixed(probabilities)
    params = {"weight": torch.zeros(1, 1, 1, dtype=torch.float64)}
    return Local(cohort_of([graph], classes=2), network, params, {}, {}, OptimizerSpec())


def test_statistics_of_a_path() -> None:
    sent = FedGTA(orders=2).upload(path())
    moments = sent["signature"].view(2, 2, 2)  # kind, order, class
    expected = {(0, 0): (0.7063, 0.2937), (0, 1): (0.5471, 0.1345), (1, 1): (0.0483, 0.0483)}
    for place, values in expected.items():
        assert moments[place].tolist() == pytest.approx(values, abs=6e-5)
    assert moments[1, 0].tolist() == pytest.approx([0, 0], abs=1e-12)
    assert sent["confidence"].item() == pytest.approx(0.8638, abs=6e-5)
    assert sent["nodes"].tolist() == [3]


def test_origin_sends_raw_moments_only() -> None:
    whole = FedGTA(orders=4).upload(path())["signature"]
    raw = FedGTA(orders=4, signature="origin").upload(path())["signature"]
    assert raw.shape == (1, 8)
    assert_same_bits({"s": whole[:, :8]}, {"s": raw})


def test_certainty_is_least_for_even_labels_and_zero_at_one_over_e() -> None:
    labels = torch.tensor([[1.0, 0.0], [0.5, 0.5]], dtype=torch.float64)
    sure, unsure = certainty(labels).tolist()
    assert sure == pytest.approx(2 / math.e, abs=1e-7)
    assert unsure == pytest.approx(2 / math.e - math.log(2), abs=1e-7)


def by_hand(method: FedGTA, graph: Graph, logits: torch.Tensor) -> tuple[list[float], float]:
    """Return the signature and H of one client, from dense matrices and node by node."""
    assert graph.masks is not None
    nodes, classes = logits.shape
    adjacency = dense_adjacency(graph)
    loops = adjacency + torch.eye(nodes, dtype=torch.float64)
    scale = torch.diag(loops.sum(dim=1).rsqrt())
    step = scale @ loops @ scale
    train = [v for v in range(nodes) if graph.masks.train[v]]
    onehot = {v: F.one_hot(torch.tensor(graph.labels[v]), classes).double() for v in train}
    start = torch.stack([onehot.get(v, logits[v].softmax(dim=0)) for v in range(nodes)])
    found = start
    for _ in range(method.propagation):
        found = 0.5 * step @ found + 0.5 * start
        for v in train:
            found[v] += onehot[v]
    sharp, soft = [], []
    for v in range(nodes):
        sharp.append(onehot.get(v, found[v].softmax(dim=0)))
        soft.append(onehot.get(v, (found[v] / method.temperature).softmax(dim=0)))
    signature = []
    for central in (False, True) if method.signature == "hybrid" else (False,):
        for p in range(1, method.orders + 1):
            for c in range(classes):
                values = [row[c].item() for row in sharp]
                middle = sum(values) / nodes if central else 0.0
                signature.append(sum((value - middle) ** p for value in values) / nodes)
    confidence = 0.0
    for v in range(nodes):
        entropy = sum(b * math.log(b + 1e-8) for b in soft[v].tolist())
        confidence += adjacency[v].sum().item() * (classes / math.e + entropy)
    return signature, confidence


@pytest.mark.parametrize("signature", ["origin", "hybrid"])
@pytest.mark.parametrize("sparse", [False, True])
def test_statistics_of_stacked_clients_are_those_of_a_loop(signature: str, sparse: bool) -> None:
    method = FedGTA(signature=signature, orders=3, propagation=2)
    simulation = simulate(method, small_federation(sparse=sparse), 2, dropout=0.5)
    local = simulation.trained()
    sent = method.upload(local)
    logits = local.frozen(local.params).logits.split(local.cohort.segments.sizes)
    for k, graph in enumerate(simulation.cohort.graphs):
        expected, confidence = by_hand(method, graph, logits[k])
        assert sent["signature"][k].tolist() == pytest.approx(expected, abs=1e-10)
        assert sent["confidence"][k].item() == pytest.approx(confidence, rel=1e-8)


# The server ---------------------------------------------------------------------------------------


def uploads(clients: tuple[int, ...], **tensors: Any) -> Uploads:
    values = {n: torch.tensor(t, dtype=torch.float64) for n, t in tensors.items()}
    return Uploads(clients, {n.replace("_", "/"): t for n, t in values.items()})


def test_partners_are_weighted_by_confidence() -> None:
    method = FedGTA(threshold=0.5)
    state = method.init_server_state({"w": torch.zeros(1, dtype=torch.float64)}, 3)
    sent = uploads(
        (0, 1, 2),
        model_w=[[1.0], [2.0], [4.0]],
        signature=[[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]],  # cosines 0.71, 0.71 and 0
        confidence=[1.0, 2.0, 5.0],
        nodes=[10.0, 10.0, 10.0],
    )
    after = method.aggregate(state, sent, RNG)
    expected = [[1 / 3, 2 / 3, 0], [1 / 8, 2 / 8, 5 / 8], [0, 2 / 7, 5 / 7]]
    torch.testing.assert_close(after["weights"], torch.tensor(expected, dtype=torch.float64))
    mixed = [5 / 3, 25 / 8, 24 / 7]
    assert method.download(after, [0, 1, 2])["model/w"].view(-1).tolist() == pytest.approx(mixed)
    assert method.download(after, [2, 0])["model/w"].view(-1).tolist() == pytest.approx(
        [mixed[2], mixed[0]]
    )


def test_without_confidence_nodes_decide_and_nobody_is_without_a_model() -> None:
    method = FedGTA(threshold=1.0)
    sent = uploads((0, 1), signature=[[1.0], [1.0]], confidence=[0.0, 3.0], nodes=[5.0, 15.0])
    assert method.mixing(sent, RNG).tolist() == [[1, 0], [0, 1]]
    method = FedGTA(threshold=0.5)
    assert method.mixing(sent, RNG).tolist() == [[0, 1], [0, 1]]
    sent.tensors["confidence"] = torch.tensor([0.0, -1.0])  # as noise may leave it
    assert method.mixing(sent, RNG).tolist() == [[0.25, 0.75], [0.25, 0.75]]


def test_absent_clients_keep_their_mixture_and_new_ones_get_the_mean() -> None:
    method = FedGTA(threshold=1.0)
    state = method.init_server_state({"w": torch.zeros(1, dtype=torch.float64)}, 4)

    def answers(clients: tuple[int, ...], *models: float) -> Uploads:
        ones = [1.0] * len(clients)
        return uploads(
            clients,
            model_w=[[w] for w in models],
            signature=[[1.0]] * len(clients),
            confidence=ones,
            nodes=ones,
        )

    first = method.aggregate(state, answers((1, 3), 2.0, 4.0), RNG)
    assert method.download(first, range(4))["model/w"].view(-1).tolist() == [3, 2, 3, 4]
    assert first["heard"].tolist() == [False, True, False, True]
    assert first["weights"][0].tolist() == [0, 0.5, 0, 0.5]
    second = method.aggregate(first, answers((0, 1), 7.0, 9.0), RNG)
    assert method.download(second, range(4))["model/w"].view(-1).tolist() == [7, 9, 8, 4]
    assert second["weights"][3].tolist() == [0, 0, 0, 1]


def test_shuffled_signatures_change_partners() -> None:
    sent = uploads(
        (0, 1, 2, 3),
        signature=[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]],
        confidence=[1.0] * 4,
        nodes=[1.0] * 4,
    )
    plain = FedGTA().mixing(sent, RNG)
    drawn = [FedGTA(shuffled=True).mixing(sent, np.random.default_rng(s)) for s in range(20)]
    assert any(not torch.equal(plain, weights) for weights in drawn)
    assert all(weights.diagonal().tolist() == [0.5] * 4 for weights in drawn)


# Ablations ----------------------------------------------------------------------------------------


def received(simulation: Simulation) -> dict[str, torch.Tensor]:
    return simulation.received().params


def test_everybody_a_partner_weighted_by_nodes_is_fedavg() -> None:
    method = create("fedgta", {"threshold": -1, "confidence": "nodes"})
    ours = simulate(method, small_federation(), 4, dropout=0.4)
    plain = simulate("fedavg", small_federation(), 4, dropout=0.4)
    assert_close(received(ours), received(plain), 1e-12)


def test_nobody_a_partner_is_local() -> None:
    ours = simulate(create("fedgta", {"threshold": 1}), small_federation(), 4, dropout=0.4)
    alone = simulate("local", small_federation(), 4, dropout=0.4)
    assert_same_bits(model_part(ours.memory), model_part(alone.memory))


@pytest.mark.parametrize("change", [{"confidence": "nodes"}, {"threshold": 0.9}])
def test_each_part_changes_the_models(change: dict[str, object]) -> None:
    ours = simulate("fedgta", small_federation(), 3)
    other = simulate(create("fedgta", change), small_federation(), 3)
    name = "convs.0.weight"
    assert not torch.allclose(received(ours)[name], received(other)[name], rtol=1e-6)


def test_clients_of_a_federation_have_models_of_their_own() -> None:
    simulation = simulate(create("fedgta", {"threshold": 0.97}), small_federation(), 2)
    assert not simulation.servers[0].one_model
    models = received(simulation)["convs.0.weight"]
    assert not torch.allclose(models[0], models[1])


@pytest.mark.parametrize(
    "settings",
    [
        {"threshold": 1.0},
        {"threshold": -2.0},
        {"threshold": -2.0, "confidence": "nodes"},
        {"confidence": "nodes"},
        {"propagation": 0},
        {"restart": 1.0},
    ],
)
def test_hyperparameters_said_to_be_idle_change_nothing(settings: dict[str, Any]) -> None:
    method = FedGTA(**settings)
    idle = method.without_effect()
    assert idle
    for name in idle:
        assert not changes_predictions(method, name), name


@pytest.mark.parametrize("check", ["declares-what-it-sends", "stacked-equals-sequential"])
@pytest.mark.parametrize(
    "form",
    [
        {"signature": "origin", "orders": 13, "threshold": 0.65},
        {"threshold": 0.97},
        {"confidence": "nodes"},
        {"shuffled": True},
        {"propagation": 0},
    ],
    ids=str,
)
def test_other_forms_pass_the_checks(form: dict[str, Any], check: str) -> None:
    METHOD_CHECKS[check](MethodCase(create("fedgta", form)))
