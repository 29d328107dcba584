"""FedTAD against small computations of its own, and its ablations."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cases import assert_same_bits, simulate, small_federation
from effects import changes_predictions
from polyphily.core.messages import Uploads, as_model, model_part
from polyphily.core.method import create
from polyphily.engines.replay import Given, ServerDraws
from polyphily.engines.simulation import Simulation
from polyphily.errors import UserError
from polyphily.graphs.graph import Graph
from polyphily.methods.fedtad.distillation import GENERATOR, Distillation, class_weights, predict
from polyphily.methods.fedtad.method import RELIABILITY, FedTAD
from polyphily.methods.fedtad.pseudo import (
    Nearest,
    PseudoGraph,
    copies,
    generate,
    likeness_penalty,
    new_generator,
    pseudo_labels,
)
from polyphily.methods.fedtad.reliability import reliability_in
from polyphily.nn.backbones import Backbone, Shape, build
from polyphily.nn.segments import Segments
from polyphily.nn.stacked import GraphView
from polyphily.testing.examples import random_graph


def graph_of(features: Any, edges: list[tuple[int, int]]) -> Graph:
    x = np.asarray(features, dtype=np.float32)
    ends = np.array(edges, dtype=np.int64).reshape(-1, 2).T
    return Graph.build(x, ends, np.zeros(len(x), dtype=np.int64))


def random_numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).double()


def gradient(output: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """Return the gradient of a weighted sum of an output."""
    weights = random_numbers(*output.shape)
    return torch.autograd.grad((output * weights).sum(), inputs, materialize_grads=True)


def pseudo_graph(x: Tensor, neighbours: int, models: int) -> PseudoGraph:
    segments = Segments((len(x),) * models, x.device)
    return PseudoGraph(x, Nearest(x, neighbours), segments)


def three_models(name: str) -> tuple[Backbone, dict[str, Tensor]]:
    """Return a small network for 6 features, and three models of it that differ."""
    shape = Shape(features=6, hidden=8, classes=3, layers=2, heads=2)
    network = build(name, shape, seed=0).double()
    models = {
        name: (value.detach() + 0.3 * random_numbers(3, *value.shape[1:])).requires_grad_()
        for name, value in network.named_parameters()
    }
    return network, models


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
    graph = pseudo_graph(x, 1, 2)
    pairs = set(zip(graph.edges.row.tolist(), graph.edges.col.tolist(), strict=True))
    one = {(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)}
    assert pairs == one | {(u + 4, v + 4) for u, v in one}
    torch.testing.assert_close(graph.x, torch.cat([x, x]))
    assert pseudo_graph(x, 0, 1).edges.nnz == 0


@pytest.mark.parametrize("neighbours", [0, 3, 50])
@pytest.mark.parametrize("name", ["gcn", "random_walk", "mean"])
def test_dense_operators_are_those_of_a_cohort(name: str, neighbours: int) -> None:
    x, h = random_numbers(10, 4), random_numbers(30, 5).requires_grad_()
    graph = pseudo_graph(x, neighbours, 3)
    assert graph.graph.num_nodes == graph.num_nodes == 30
    found, expected = getattr(graph, name) @ h, getattr(graph.graph, name) @ h
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient(found, [h]), gradient(expected, [h]))


class Sparse(GraphView):
    """The features of a pseudo-graph, and the operators of its cohort."""

    def __init__(self, graph: PseudoGraph) -> None:
        super().__init__(graph.graph)
        self._x = graph.x

    @property
    def x(self) -> Tensor:
        return self._x


@pytest.mark.parametrize("neighbours", [0, 3])
@pytest.mark.parametrize("name", create("fedtad").supported_backbones())
def test_backbones_see_the_same_on_dense_and_on_sparse_graphs(
    name: str, neighbours: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attention here is that of a GPU."""
    monkeypatch.setattr(PseudoGraph, "attention", property(lambda graph: graph.nearest.attention))
    network, models = three_models(name)
    x = random_numbers(10, 6).requires_grad_()
    graph = PseudoGraph(x, Nearest(x, neighbours), copies(network, 10, 3, x.device))
    found, expected = (functional_call(network, models, (g,)) for g in (graph, Sparse(graph)))
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(found.embedding, expected.embedding)
    inputs = [x, *models.values()]
    torch.testing.assert_close(
        gradient(found.logits, inputs), gradient(expected.logits, inputs), atol=1e-10, rtol=1e-7
    )


def test_segments_are_made_once_for_a_network() -> None:
    network, _ = three_models("gcn")
    first = copies(network, 10, 3, torch.device("cpu"))
    assert copies(network, 10, 3, torch.device("cpu")) is first
    assert copies(network, 10, 4, torch.device("cpu")).sizes == (10,) * 4
    gone = weakref.ref(first)
    del network, first
    gc.collect()
    assert gone() is None


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
                Nearest(x, work.neighbours),
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


# In a recorded round ----------------------------------------------------------------------------


def test_a_recorded_round_draws_the_same_numbers() -> None:
    """Tensors stand for the server's generator, renewed for every round."""
    method = create("fedtad", {"nodes": 9, "server_epochs": 2})
    simulation, uploads = server_round(method)  # type: ignore[arg-type]
    first = simulation.states[0]
    with torch.no_grad():
        later = method.aggregate(first, uploads, np.random.default_rng(0))
        for state in (first, later):
            given = Given(torch.device("cpu"), 3)
            for round_index in (3, 4, 3):
                given.renew(round_index)
                given.rewind()
                draws: Any = ServerDraws(given, np.random.default_rng)
                found = method.aggregate(state, uploads, draws)
                given.renew(5)  # of which the result must not change
                expected = method.aggregate(state, uploads, np.random.default_rng(round_index))
                assert_same_bits(found, expected)


class OnDevice(TorchDispatchMode):
    """Refuses operations on tensors of the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                raise AssertionError(f"{func} is given a tensor of the host")
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("name", create("fedtad").supported_backbones())
def test_the_host_neither_reads_nor_writes_what_is_on_the_device(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors of the meta device have no values, so that reading one is an error."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)  # not known to meta
    meta, method = torch.device("meta"), create("fedtad", {"nodes": 9, "server_epochs": 2})
    network, models = three_models(name)
    network = network.to(meta)
    uploads = Uploads(
        (0, 1, 2),
        as_model({n: t.detach().to(meta) for n, t in models.items()})
        | {"weight": torch.ones(3, device=meta, dtype=torch.float64)}
        | {RELIABILITY: torch.ones(3, 3, device=meta, dtype=torch.float64)},
        network,
    )
    state = as_model({n: t.detach()[0] for n, t in network.named_parameters()})
    with torch.no_grad():
        for _ in range(2):  # the first makes the generator
            given = Given(meta, 0)
            draws: Any = ServerDraws(given, np.random.default_rng)
            after = method.aggregate(state, uploads, draws)
            given.rewind()
            with OnDevice():
                again = method.aggregate(state, uploads, draws)
            assert again.keys() == after.keys()
            state = after


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
