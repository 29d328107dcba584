"""FedTAD against small computations of its own, and its ablations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cases import assert_same_bits, simulate, small_federation
from effects import changes_predictions
from polyphily.core.messages import Uploads, model_part
from polyphily.core.method import create
from polyphily.engines.simulation import Simulation
from polyphily.errors import UserError
from polyphily.graphs.graph import Graph
from polyphily.methods.fedtad.distillation import GENERATOR, Distillation, class_weights, predict
from polyphily.methods.fedtad.method import RELIABILITY, FedTAD
from polyphily.methods.fedtad.pseudo import (
    PseudoGraph,
    generate,
    join_nearest,
    likeness_penalty,
    new_generator,
    pseudo_labels,
)
from polyphily.methods.fedtad.reliability import reliability_in
from polyphily.testing.examples import random_graph


def graph_of(features: Any, edges: list[tuple[int, int]]) -> Graph:
    x = np.asarray(features, dtype=np.float32)
    ends = np.array(edges, dtype=np.int64).reshape(-1, 2).T
    return Graph.build(x, ends, np.zeros(len(x), dtype=np.int64))


# Reliability -------------------------------------------------------------------------------------


def test_reliability_of_one_edge_between_orthogonal_nodes() -> None:
    """No walk is back after one step, so that g is orthogonal if the features are."""
    alone = reliability_in(graph_of([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], [(0, 1)]), walk=1)
    torch.testing.assert_close(alone, torch.tensor([0.5, 0.5, 1.0]).double())


@pytest.mark.parametrize("sparse", [False, True])
def test_reliability_is_the_mean_cosine_to_neighbours_and_itself(sparse: bool) -> None:
    graph, walk = random_graph(14, seed=3, sparse=sparse), 5
    x = graph.features.toarray() if sparse else graph.features  # type: ignore[union-attr]
    adjacency = graph.adjacency().toarray().astype(float)
    degrees = adjacency.sum(axis=0)
    transition = adjacency / np.maximum(degrees, 1)
    powers = [np.linalg.matrix_power(transition, k).diagonal() for k in range(1, walk + 1)]
    g = np.concatenate([x, np.stack(powers, axis=1)], axis=1)
    expected = []
    for v in range(graph.num_nodes):
        total = 1.0
        for u in np.flatnonzero(adjacency[v]):
            total += g[v] @ g[u] / np.linalg.norm(g[v]) / np.linalg.norm(g[u])
        expected.append(total / (degrees[v] + 1))
    found = reliability_in(graph, walk).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_client_sends_the_sum_over_its_train_nodes_of_each_class() -> None:
    simulation = simulate(create("fedtad"), small_federation(), 0)
    sent = simulation.clients.train(
        simulation.download(simulation.placement.members), simulation.memory, 0
    ).uploads[RELIABILITY]
    for k, graph in enumerate(simulation.cohort.graphs):
        own, expected = reliability_in(graph, 5), torch.zeros(3).double()
        assert graph.masks is not None
        for v in np.flatnonzero(graph.masks.train):
            expected[graph.labels[v]] += own[v]
        torch.testing.assert_close(sent[k], expected)


def test_class_weights_sum_to_one_over_clients_or_are_zero() -> None:
    found = class_weights(torch.tensor([[1.0, 0.0, 2.0], [3.0, 0.0, 0.0]]))
    assert found.tolist() == [[0.25, 0.0, 1.0], [0.75, 0.0, 0.0]]


# Pseudo-graphs -----------------------------------------------------------------------------------


def test_pseudo_labels_are_even_and_the_rest_is_of_the_last_class() -> None:
    assert pseudo_labels(10, 3).bincount().tolist() == [3, 3, 4]
    assert pseudo_labels(2, 3).tolist() == [0, 1]


def test_the_penalty_of_like_nodes() -> None:
    z, x = torch.tensor([[0.0, 0.0], [1.0, 1.0]]), torch.tensor([[0.0, 0.0], [2.0, 0.0]])
    assert likeness_penalty(z, x).item() == pytest.approx(0.6065, abs=5e-5)


def test_a_pseudo_graph_joins_the_nearest_in_both_directions() -> None:
    angles = torch.tensor([0.0, 0.1, 0.3, 2.0])
    x = torch.stack([angles.cos(), angles.sin()], dim=1)
    graph = PseudoGraph(x, join_nearest(x, 1), 2)
    pairs = set(zip(graph.edges.row.tolist(), graph.edges.col.tolist(), strict=True))
    one = {(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)}
    assert pairs == one | {(u + 4, v + 4) for u, v in one}
    torch.testing.assert_close(graph.x, torch.cat([x, x]))
    assert PseudoGraph(x, join_nearest(x, 0), 1).edges.nnz == 0


# The server --------------------------------------------------------------------------------------


def server_round(method: FedTAD, **settings: Any) -> tuple[Simulation, Uploads]:
    """Return a simulation before its first round, and what its clients would upload."""
    simulation = simulate(method, small_federation(), 0, **settings)
    trained = simulation.clients.train(
        simulation.download(simulation.placement.members), simulation.memory, 0
    )
    return simulation, Uploads((0, 1, 2, 3), trained.uploads, simulation.network)


def first_adam_step(value: Tensor, gradient: Tensor, lr: float) -> Tensor:
    return value - lr * gradient / (gradient.abs() + 1e-8)


def gcn_logits(params: dict[str, Tensor], x: Tensor, neighbours: int) -> Tensor:
    """Run a two-layer GCN on the pseudo-graph of x with dense matrices."""
    unit = x.detach() / x.detach().norm(dim=1, keepdim=True)
    adjacency = torch.zeros(len(x), len(x), dtype=x.dtype)
    for v in range(len(x)):
        others = [u for u in range(len(x)) if u != v]
        others.sort(key=lambda u: -float(unit[v] @ unit[u]))
        for u in others[:neighbours]:
            adjacency[v, u] = adjacency[u, v] = 1
    adjacency = adjacency + torch.eye(len(x), dtype=x.dtype)
    scale = adjacency.sum(dim=1).rsqrt()
    spread = scale[:, None] * adjacency * scale
    h = (spread @ x @ params["convs.0.weight"] + params["convs.0.bias"]).relu()
    return spread @ h @ params["convs.1.weight"] + params["convs.1.bias"]


def test_a_round_at_the_server_against_plain_loops() -> None:
    method = create(
        "fedtad",
        {"server_epochs": 1, "distil_steps": 1, "nodes": 12, "neighbours": 3, "decay": 0}
        | {"semantic": 0.7, "diversity": 0.3, "generator_lr": 0.01, "distil_lr": 0.02},
    )
    assert isinstance(method, FedTAD)
    simulation, uploads = server_round(method, backbone="gcn")
    with torch.no_grad():
        after = method.aggregate(simulation.states[0], uploads, np.random.default_rng(4))
    rng, like = np.random.default_rng(4), uploads["weight"]
    maker = new_generator(32, 3, 6, rng, like)
    z = torch.from_numpy(rng.standard_normal((12, 32)))
    labels, weights = pseudo_labels(12, 3), class_weights(uploads[RELIABILITY])
    share = uploads["weight"] / uploads["weight"].sum()
    mean = {n: torch.einsum("k,k...->...", share, t) for n, t in uploads.model.items()}
    teachers = [{n: t[k] for n, t in uploads.model.items()} for k in range(4)]

    def gap(f: Tensor, g: Tensor, c: int) -> Tensor:
        return (f - g)[labels == c].abs().mean()

    own = {n: t.clone().requires_grad_() for n, t in maker.items()}
    x = generate(own, z, labels)
    f, loss = gcn_logits(mean, x, 3), torch.zeros((), dtype=torch.float64)
    for i, teacher in enumerate(teachers):
        g = gcn_logits(teacher, x, 3)
        for c in range(3):
            error = F.cross_entropy(g[labels == c], labels[labels == c])
            loss = loss + weights[i, c] * (0.7 * error - gap(f, g.detach(), c))
        apart = torch.zeros((), dtype=torch.float64)
        for u in range(12):
            for v in range(12):
                apart = apart + (z[u] - z[v]).square().mean() * (x[u] - x[v]).abs().mean()
        loss = loss + 0.3 * (-apart / 144).exp()
    for name, grad in zip(own, torch.autograd.grad(loss, list(own.values())), strict=True):
        maker[name] = first_adam_step(maker[name], grad, 0.01)
        torch.testing.assert_close(after[GENERATOR + name], maker[name])
    x = generate(maker, z, labels)
    student = {n: t.clone().requires_grad_() for n, t in mean.items()}
    f, loss = gcn_logits(student, x, 3), torch.zeros((), dtype=torch.float64)
    for i, teacher in enumerate(teachers):
        for c in range(3):
            loss = loss + weights[i, c] * gap(f, gcn_logits(teacher, x, 3), c)
    for name, grad in zip(student, torch.autograd.grad(loss, list(student.values())), strict=True):
        expected = first_adam_step(mean[name], grad, 0.02)
        torch.testing.assert_close(model_part(after)[name], expected)


def test_distillation_brings_the_student_to_a_single_reliable_teacher() -> None:
    simulation, uploads = server_round(create("fedtad"), backbone="gcn")  # type: ignore[arg-type]
    work = Distillation(40, 30, 8, 3, 1, 1e-3, 1.0, 1.0, 5, 1e-2, 0.0)
    weights = torch.zeros(4, 3).double()
    weights[2] = 1
    mean = {n: t.mean(dim=0) for n, t in uploads.model.items()}
    with torch.no_grad():
        found, _ = work(
            simulation.network, mean, uploads.model, weights, {}, np.random.default_rng(0)
        )
        x = torch.randn(30, 6, generator=torch.Generator().manual_seed(0)).double()
        taught, before, teacher = (
            predict(
                simulation.network,
                {n: t.unsqueeze(0) for n, t in model.items()},
                x,
                join_nearest(x, work.neighbours),
            )
            for model in (found, mean, {n: t[2] for n, t in uploads.model.items()})
        )
    assert (taught - teacher).abs().mean() < 0.5 * (before - teacher).abs().mean()


def test_the_generator_and_both_optimisers_go_on_from_round_to_round() -> None:
    method = create("fedtad", {"nodes": 9, "server_epochs": 2})
    simulation = simulate(method, small_federation(), 1)
    first = dict(simulation.states[0])
    simulation.advance()
    second = simulation.states[0]
    assert first.keys() == second.keys()
    assert first["generator/optimizer/steps"].tolist() == [2]
    assert second["generator/optimizer/steps"].tolist() == [4]
    assert second["student/optimizer/steps"].tolist() == [20]
    assert not torch.equal(first["generator/weight0"], second["generator/weight0"])


# Ablations ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("off", ["server_epochs", "distil_steps"])
def test_without_distillation_it_is_fedavg(off: str) -> None:
    plain = simulate("fedavg", small_federation(), 3, dropout=0.4)
    other = simulate(create("fedtad", {off: 0}), small_federation(), 3, dropout=0.4)
    assert_same_bits(plain.tensors(), other.tensors())


@pytest.mark.parametrize(
    "change",
    [
        *({"server_epochs": 0}, {"weights": "uniform"}, {"neighbours": 0}, {"generator_steps": 0}),
        *({"semantic": 0.0}, {"diversity": 0.0}, {"walk": 1}),
    ],
    ids=str,
)
def test_every_part_changes_the_global_model(change: dict[str, Any]) -> None:
    federation = small_federation()
    usual, other = (
        simulate(create("fedtad", {"distil_lr": 0.01, **form}), federation, 2)
        for form in ({}, change)
    )
    assert not torch.equal(usual.predict(usual.received()), other.predict(other.received()))


@pytest.mark.parametrize(
    "form",
    [{"server_epochs": 0}, {"distil_steps": 0}, {"weights": "uniform"}, {"generator_steps": 0}],
    ids=str,
)
def test_what_is_said_to_have_no_effect_has_none(form: dict[str, Any]) -> None:
    method = replace(create("fedtad"), nodes=9, **form)
    idle = method.without_effect()
    assert idle
    for name in idle:
        assert not changes_predictions(method, name), name


def test_a_single_client_teaches_nothing_new() -> None:
    """The mean of one model is that model, so that there is no disagreement."""
    simulation, uploads = server_round(create("fedtad"))  # type: ignore[arg-type]
    work = Distillation(5, 30, 8, 3, 1, 1e-3, 1.0, 1.0, 5, 1e-2, 0.0)
    only = {n: t[:1] for n, t in uploads.model.items()}
    mean = {n: t[0] for n, t in only.items()}
    ones, rng = torch.ones(1, 3).double(), np.random.default_rng(0)
    found, _ = work(simulation.network, mean, only, ones, {}, rng)
    for name, value in mean.items():
        torch.testing.assert_close(found[name], value)


def test_impossible_values_are_refused() -> None:
    for name, value in (("nodes", 1), ("walk", 0), ("server_epochs", -1)):
        with pytest.raises(UserError, match=name):
            create("fedtad", {name: value})
