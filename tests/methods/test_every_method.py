"""The case that every registered method inherits: what fails here cannot be in the library."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
import torch

from cases import (
    assert_close,
    assert_same_bits,
    federation_of,
    simulate,
    small_federation,
    weights_of,
    with_noise_outside_training,
)
from polyphily.core.local import MODEL, model_part
from polyphily.core.method import Method, Uploads, create, load_all
from polyphily.engines.simulation import train_locally
from polyphily.errors import UserError
from polyphily.graphs.graph import Graph, Masks
from polyphily.graphs.loading import Federation
from polyphily.graphs.partitions import Partition
from polyphily.methods.traffic import trace
from polyphily.nn.backbones import BACKBONES

METHODS = sorted(load_all())
WITHOUT_DRAWS = {"fedspa": {"hidden_share": 0}}  # which belong to a client by its number
KEEPS_CLIENTS_APART = {"fedgsp"}  # whose server state has client axes, permuted with the clients
every_method = pytest.mark.parametrize("name", METHODS)


@every_method
@pytest.mark.parametrize("backbone", sorted(BACKBONES))
def test_stacked_equals_sequential(name: str, backbone: str) -> None:
    federation = small_federation()
    stacked = simulate(name, federation, 5, backbone=backbone)
    sequential = simulate(name, federation, 5, backbone=backbone, engine="sequential")
    assert_close(weights_of(stacked), weights_of(sequential), 1e-5)


@every_method
def test_stacked_equals_sequential_with_dropout_and_sparse_features(name: str) -> None:
    federation = small_federation(sparse=True)
    chosen = {"dropout": 0.5, "input_dropout": 0.3, "epochs": "1-4", "keep_optimizer": True}
    stacked = simulate(name, federation, 4, **chosen)
    sequential = simulate(name, federation, 4, engine="sequential", **chosen)
    assert_close(weights_of(stacked), weights_of(sequential), 1e-7)


@every_method
def test_permuting_the_clients_permutes_the_results(name: str) -> None:
    federation = small_federation()
    order = [2, 0, 3, 1]
    clients = tuple(federation.clients[k] for k in order)
    permuted = dataclasses.replace(federation, clients=clients)
    method = create(name, WITHOUT_DRAWS.get(name))
    straight, shuffled = simulate(method, federation, 4), simulate(method, permuted, 4)
    memory = {n: t[order] for n, t in straight.memory.items()}
    assert_close(memory, shuffled.memory, 1e-8)
    sent = straight.method.download(straight.states[0], order)
    assert_close(sent, shuffled.method.download(shuffled.states[0], range(4)), 1e-8)
    if name not in KEEPS_CLIENTS_APART:
        assert_close(straight.states[0], shuffled.states[0], 1e-8)


@every_method
def test_labels_outside_the_train_mask_change_nothing(name: str) -> None:
    federation = small_federation()
    noisy = dataclasses.replace(
        federation,
        clients=tuple(with_noise_outside_training(graph, 3) for graph in federation.clients),
    )
    assert any(
        (a.labels != b.labels).any() for a, b in zip(federation.clients, noisy.clients, strict=True)
    )
    chosen = {"dropout": 0.3, "dtype": "float32"}
    honest, blind = simulate(name, federation, 4, **chosen), simulate(name, noisy, 4, **chosen)
    assert_same_bits(weights_of(honest), weights_of(blind))
    assert torch.equal(honest.predict(honest.received()), blind.predict(blind.received()))


@every_method
@pytest.mark.parametrize("share", [1.0, 0.7])
def test_seeds_side_by_side_equal_separate_runs(name: str, share: float) -> None:
    first, second = small_federation(seed=1), small_federation((11, 5, 8), seed=2)
    chosen = {"dropout": 0.4, "dtype": "float32", "keep_optimizer": True, "participation": share}
    together = simulate(name, [first, second], 4, **chosen)
    for s, federation in enumerate((first, second)):
        alone = simulate(name, federation, 4, **chosen)
        rows = slice(together.starts[s], together.starts[s + 1])
        assert_close({n: t[rows] for n, t in together.memory.items()}, alone.memory, 1e-5)
        assert_close(together.states[s], alone.states[0], 1e-5)


@every_method
def test_every_parameter_is_trained(name: str) -> None:
    simulation = simulate(name, small_federation(), 0, weight_decay=0.0)
    before = {n: t.clone() for n, t in model_part(simulation.memory).items()}
    simulation.advance()
    for parameter, value in model_part(simulation.memory).items():
        moved = (value - before[parameter]).flatten(1).abs().amax(dim=1)
        assert (moved > 0).all(), f"{parameter} did not move at clients {moved.tolist()}"


@every_method
def test_a_restored_run_goes_on_to_the_same_bits(name: str) -> None:
    federation = small_federation()
    chosen = {"dropout": 0.5, "keep_optimizer": True, "participation": 0.6}
    straight = simulate(name, federation, 2, **chosen)
    saved = {n: t.clone() for n, t in straight.tensors().items()}
    straight.advance()
    resumed = simulate(name, federation, 0, **chosen)
    resumed.restore(saved, 2, [])
    resumed.advance()
    assert_same_bits(weights_of(straight), weights_of(resumed))


def uploads_of(name: str) -> tuple[Method, dict[str, torch.Tensor], Uploads]:
    """A method, its server's state after a round, and what clients upload in the next."""
    simulation = simulate(name, small_federation(), 1)
    clients = tuple(range(len(simulation.cohort)))
    uploads, _, _ = train_locally(
        simulation.method,
        simulation.network,
        simulation.cohort,
        simulation.method.download(simulation.states[0], clients),
        simulation.memory,
        simulation.optimizer,
        [2] * len(clients),
        1,
    )
    return simulation.method, simulation.states[0], Uploads(clients, uploads)


@every_method
def test_the_server_is_a_pure_function_of_uploads_and_state(name: str) -> None:
    method, state, uploads = uploads_of(name)
    before = {n: t.clone() for n, t in state.items()}
    sent = {n: t.clone() for n, t in uploads.tensors.items()}
    first = method.aggregate(state, uploads, np.random.default_rng(0))
    second = method.aggregate(state, uploads, np.random.default_rng(0))
    assert_same_bits(first, second)
    assert_same_bits(before, state)
    assert_same_bits(sent, uploads.tensors)
    assert first.keys() >= state.keys()


@every_method
def test_uploads_have_one_row_per_client(name: str) -> None:
    _, _, uploads = uploads_of(name)
    for tensor in uploads.tensors.values():
        assert len(tensor) == len(uploads.clients)
        assert not tensor.requires_grad


@every_method
def test_private_parameters_never_travel(name: str) -> None:
    simulation = simulate(name, small_federation(), 1)
    _, _, uploads = uploads_of(name)
    private = {
        MODEL + n
        for n in model_part(simulation.memory)
        if not simulation.method.shares(simulation.network, n)
    }
    assert not private & uploads.tensors.keys()


def awkward_graph(kind: str) -> Graph:
    rng = np.random.default_rng(3)
    nodes = 12
    labels = np.zeros(nodes, int) if kind == "one class" else np.arange(nodes) % 3
    edges = np.zeros((2, 0), int) if kind == "no edges" else rng.integers(0, nodes, (2, 30))
    train = np.arange(nodes) < 6
    val = np.zeros(nodes, bool) if kind == "no validation" else (np.arange(nodes) >= 6)
    masks = Masks(train, val & (np.arange(nodes) < 9), np.arange(nodes) >= 9)
    if kind == "one node":
        nodes, labels, edges = 1, labels[:1], np.zeros((2, 0), int)
        masks = Masks(np.array([True]), np.array([False]), np.array([False]))
    features = rng.standard_normal((nodes, 6)).astype(np.float32)
    return Graph.build(features, edges, labels, masks=masks, name=kind)


@every_method
@pytest.mark.parametrize("kind", ["one class", "no edges", "no validation", "one node"])
def test_an_awkward_client_works(name: str, kind: str) -> None:
    plain = small_federation()
    clients = (*plain.clients, awkward_graph(kind))
    nodes = np.cumsum([0, *[graph.num_nodes for graph in clients]])
    parts = [np.arange(a, b) for a, b in pairwise(nodes)]
    federation = Federation(
        "test", "files", clients, ("0", "1", "2"), Partition.of("natural", parts), "given", 0
    )
    simulation = simulate(name, federation, 3)
    assert torch.isfinite(simulation.predict(simulation.received())).all()
    assert all(t.isfinite().all() for t in simulation.tensors().values())


@every_method
def test_a_federation_of_one_client_works(name: str) -> None:
    federation = federation_of([*small_federation().clients[:1]] * 1)
    alone = dataclasses.replace(federation, clients=federation.clients[:1])
    simulation = simulate(name, alone, 3)
    assert torch.isfinite(simulation.predict(simulation.received())).all()


@every_method
def test_it_is_documented(name: str) -> None:
    cls = load_all()[name]
    assert cls.__doc__
    assert cls.cite
    for field in cls.hyperparameters().values():
        assert field.metadata.get("doc"), f"{field.name} has no meaning"


@every_method
def test_what_travels_can_be_listed(name: str) -> None:
    up, down = trace(load_all()[name]())
    assert bool(up) == (name != "local")
    assert all(row["name"] and row["shape"] for row in [*up, *down])


@every_method
def test_the_papers_form_is_one_flag_away(name: str) -> None:
    cls = load_all()[name]
    departs = {
        field: value
        for field, value in cls.paper_form().items()
        if value != cls.hyperparameters()[field].default
    }
    assert departs == cls.paper_form(), "a value that is no other than the default"
    assert create(name, {"paper": "on"}) == create(name, departs)
    assert create(name, {"paper": False}) == create(name)
    if departs:
        field, value = next(iter(departs.items()))
        usual = cls.hyperparameters()[field].default
        assert getattr(create(name, {"paper": True, field: usual}), field) == usual != value
    with pytest.raises(UserError, match="paper"):
        create(name, {"paper": "maybe"})


@pytest.mark.parametrize("name", ["fedspa", "fedgsp", "fedhero", "s2fgl", "fedath"])
def test_the_papers_forms_train(name: str) -> None:
    chosen = create(name, {"paper": "on"})
    assert chosen != create(name)
    simulation = simulate(chosen, small_federation(), 3)
    assert all(tensor.isfinite().all() for tensor in simulation.memory.values())
