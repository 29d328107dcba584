"""FED-PUB: masks, both penalties, the proxy graph, and the server against plain computations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from builders import dense_adjacency, random_parameters
from cases import assert_close, assert_same_bits, simulate, small_federation
from effects import changes_predictions
from polyphily.core.local import Local
from polyphily.core.messages import Message, Uploads, model_part, with_prefix
from polyphily.core.method import create
from polyphily.engines.simulation import Simulation
from polyphily.methods.fedpub import FedPub
from polyphily.methods.fedpub.method import shrunk
from polyphily.methods.fedpub.network import GNN, MASKS, MaskedNetwork, masked
from polyphily.methods.fedpub.proxy import Proxy, proxy_graph
from polyphily.testing import METHOD_CHECKS, MethodCase

RNG = np.random.default_rng(0)
WEIGHT, MASK = "gnn.convs.0.weight", "masks.convs/0/weight"
CE_ALONE: dict[str, Any] = {"sparsity": 0.0, "proximity": 0.0}


def started(simulation: Simulation, shift: float = 0.0) -> Local:
    """The local view at the start of the next round, its parameters moved a little."""
    local = simulation.received()
    local.params = {n: (p + shift).clone().requires_grad_() for n, p in local.params.items()}
    return local


def gradients(simulation: Simulation, shift: float = 0.0) -> Message:
    local = started(simulation, shift)
    names, values = zip(*local.params.items(), strict=True)
    grads = torch.autograd.grad(simulation.method.loss(local).sum(), values, materialize_grads=True)
    return dict(zip(names, grads, strict=True))


# Masks --------------------------------------------------------------------------------------------


def test_every_weight_matrix_has_a_mask_of_ones_and_no_bias_has() -> None:
    simulation = simulate("fedpub", small_federation())
    params = model_part(simulation.memory)
    masks = with_prefix(params, MASKS)
    assert set(masks) == {"convs/0/weight", "convs/1/weight"}
    for key, mask in masks.items():
        assert mask.shape == params[GNN + key.replace("/", ".")].shape
        assert mask.unique().tolist() == [1.0]


def test_logits_are_those_of_masked_weights() -> None:
    simulation = simulate("fedpub", small_federation())
    local = simulation.received()
    local.params = random_parameters(local.network, 4)
    graphs, logits = simulation.cohort.graphs, local.forward().logits
    start = 0
    for k, graph in enumerate(graphs):
        own = {n: p[k] for n, p in local.params.items()}
        loops = dense_adjacency(graph) + torch.eye(graph.num_nodes, dtype=torch.float64)
        scale = torch.diag(loops.sum(dim=1).rsqrt())
        x = torch.from_numpy(np.asarray(graph.features)).double()
        for layer in (0, 1):
            mask = own[f"masks.convs/{layer}/weight"]
            mask = torch.where(mask.abs() < 1e-3, 0, mask)
            weight, bias = own[f"gnn.convs.{layer}.weight"], own[f"gnn.convs.{layer}.bias"]
            x = scale @ loops @ scale @ (x.relu() if layer else x) @ (weight * mask) + bias
        torch.testing.assert_close(logits[start : start + graph.num_nodes], x)
        start += graph.num_nodes


def test_small_entries_are_pruned_in_evaluation_only() -> None:
    simulation = simulate(create("fedpub", {"prune": 0.4}), small_federation())
    local = simulation.received()
    local.params[MASK] = torch.full_like(local.params[MASK], 0.3)
    weights = masked(local.params, 0.4)
    assert not weights["convs.0.weight"].any()
    assert masked(local.params, 0.0)["convs.0.weight"].any()
    evaluated = local.forward().logits
    local.draws = simulation.cohort.draws(0)  # draws are given in training; nothing is dropped
    assert not torch.allclose(local.forward().logits, evaluated)


def test_masks_never_travel_and_differ_between_clients() -> None:
    simulation = simulate("fedpub", small_federation(), 2)
    received = simulation.download([range(4)])
    sent = simulation.clients.train(received, simulation.memory, simulation.round).uploads
    assert not [n for n in (*received, *sent, *simulation.states[0]) if "masks" in n]
    mask = model_part(simulation.memory)[MASK]
    assert not torch.allclose(mask[0], mask[1])
    assert_same_bits({"m": simulation.received().params[MASK]}, {"m": mask})


def test_masks_have_no_weight_decay() -> None:
    method = create("fedpub")
    run = simulate(method, small_federation()).clients.optimizer
    assert run.weight_decay != 0
    assert method.optimizer_for(MASK, run) == replace(run, weight_decay=0.0)
    assert method.optimizer_for(WEIGHT, run) == run


# The penalties ------------------------------------------------------------------------------------


def test_the_l1_penalty_has_a_gradient() -> None:
    options = {"penalty": "loss", "sparsity": 0.25, "proximity": 0.0}
    with_penalty = simulate(create("fedpub", options), small_federation())
    without = simulate(create("fedpub", CE_ALONE), small_federation())
    for shift in (0.0, -1.5):  # entries of 1 and of -0.5
        ours, plain = (gradients(s, shift) for s in (with_penalty, without))
        difference = ours[MASK] - plain[MASK]
        torch.testing.assert_close(
            difference, torch.full_like(difference, 0.25 if shift == 0 else -0.25)
        )
        torch.testing.assert_close(ours[WEIGHT], plain[WEIGHT])


def test_the_distance_to_received_weights_has_a_gradient_from_the_second_round() -> None:
    options = {"sparsity": 0.0, "proximity": 0.5}
    pulled = simulate(create("fedpub", options), small_federation())
    free = simulate(create("fedpub", CE_ALONE), small_federation())
    assert_same_bits(gradients(pulled, 0.1), gradients(free, 0.1))
    for simulation in (pulled, free):
        simulation.advance()
    ours, plain = (gradients(s, 0.1) for s in (pulled, free))
    for name, grad in ours.items():
        entries = grad[0].numel()
        expected = 0.0 if name.startswith(MASKS) else 0.5 / entries**0.5  # 0.1 / ||0.1, …, 0.1||
        pull = grad - plain[name]
        torch.testing.assert_close(pull, torch.full_like(pull, expected))


def test_no_gradient_is_nan_where_nothing_has_moved() -> None:
    found = gradients(simulate("fedpub", small_federation(), 1))
    assert all(grad.isfinite().all() for grad in found.values())


def test_the_loss_is_cross_entropy_and_both_terms() -> None:
    options = {"penalty": "loss", "sparsity": 0.02, "proximity": 0.3}
    simulation = simulate(create("fedpub", options), small_federation(), 1)
    local = started(simulation, 0.05)
    loss, logits = simulation.method.loss(local), local.forward().logits
    owner, labels = local.cohort.segments.owner, local.cohort.labels
    for k in range(4):
        mine = (owner == k) & (labels >= 0)
        expected = F.cross_entropy(logits[mine], labels[mine])
        for name, value in local.params.items():
            if name.startswith(MASKS):
                expected = expected + 0.02 * sum(abs(m) for m in value[k].view(-1).tolist())
            else:
                moved = value[k] - local.received["model/" + name][k]
                expected = expected + 0.3 * moved.square().sum().sqrt()
        assert loss[k].item() == pytest.approx(expected.item())


def test_the_soft_threshold() -> None:
    mask = torch.tensor([[0.5, -0.5, 0.1, -0.1], [0.5, -0.5, 0.1, 0.0]], dtype=torch.float64)
    way = torch.tensor([0.2, 0.05], dtype=torch.float64)
    expected = [[0.3, -0.3, 0.0, 0.0], [0.45, -0.45, 0.05, 0.0]]
    torch.testing.assert_close(shrunk(mask, way), torch.tensor(expected, dtype=torch.float64))


def test_masks_are_shrunk_by_the_steps_of_the_round() -> None:
    settings = {"lr": 0.05, "epochs": 3, "optimizer": "sgd"}
    shrinking = create("fedpub", {"sparsity": 0.4, "proximity": 0.0})
    free = simulate(create("fedpub", CE_ALONE), small_federation(), 1, **settings)
    ours = simulate(shrinking, small_federation(), 1, **settings)
    for name, value in model_part(free.memory).items():
        expected = value
        if name.startswith(MASKS):
            expected = torch.sign(value) * (value.abs() - 0.4 * 0.05 * 3).clamp(min=0)
        torch.testing.assert_close(model_part(ours.memory)[name], expected)


def test_shrunk_masks_become_sparse_where_features_are_absent() -> None:
    """Entries that no data uses reach zero, and others do not."""
    federation = small_federation()
    unseen = [
        replace(g, features=np.asarray(g.features) * (np.arange(6) > 0)) for g in federation.clients
    ]
    federation = replace(federation, clients=tuple(unseen))
    simulation = simulate(create("fedpub", {"sparsity": 0.5}), federation, 30, epochs=2)
    mask = model_part(simulation.memory)[MASK]
    assert not mask[:, 0].any()
    assert mask[:, 1:].any(dim=2).all()


# The proxy graph ----------------------------------------------------------------------------------


def test_the_proxy_graph_has_five_blocks_without_edges_between() -> None:
    graph = proxy_graph(7, 0)
    assert graph.num_nodes == 500
    source, target = graph.edges
    assert (source // 100 == target // 100).all()
    pairs = 5 * 100 * 99 / 2
    assert graph.edges.shape[1] / 2 / pairs == pytest.approx(0.1, abs=0.01)
    x = np.asarray(graph.features)
    assert abs(x.mean()) < 0.06
    assert x.std() == pytest.approx(1, abs=0.05)
    other = proxy_graph(7, 1)
    assert not np.array_equal(np.asarray(other.features), x)


@pytest.mark.parametrize("head", ["none", "linear"])
def test_the_functional_embedding_is_the_mean_output_of_the_last_convolution(head: str) -> None:
    simulation = simulate(create("fedpub", {"head": head}), small_federation(), 1)
    local = simulation.trained()
    local.params = random_parameters(local.network, 4)
    sent = simulation.method.upload(local)["embedding"]
    graph = proxy_graph(6, 0)
    loops = dense_adjacency(graph) + torch.eye(500, dtype=torch.float64)
    scale = loops.sum(dim=1).rsqrt()
    step = scale[:, None] * loops * scale
    prefix = "trunk." if head == "linear" else ""
    for k in range(4):
        own = masked({n: p[k] for n, p in local.params.items()}, 1e-3)
        x = torch.from_numpy(np.asarray(graph.features)).double()
        for layer in (0, 1):
            weight, bias = (own[f"{prefix}convs.{layer}.{n}"] for n in ("weight", "bias"))
            x = step @ (x.relu() if layer else x) @ weight + bias
        torch.testing.assert_close(sent[k], x.mean(dim=0))


@pytest.mark.parametrize("backbone", FedPub().supported_backbones())
def test_features_stored_once_give_what_copies_give(backbone: str) -> None:
    """A cohort of the proxy graph with its features once per client is the reference."""
    simulation = simulate("fedpub", small_federation(), backbone=backbone)
    local, network = simulation.received(), simulation.network
    assert isinstance(network, MaskedNetwork)
    params = random_parameters(network, 4)
    proxy = Proxy(local.cohort, 0)
    torch.testing.assert_close(
        network.convolved(params, proxy), network.convolved(params, proxy.graph)
    )
    assert len(proxy.x) == 500


# The server ---------------------------------------------------------------------------------------


def embeddings(*rows: tuple[float, ...]) -> Uploads:
    return Uploads(
        tuple(range(len(rows))),
        {
            "embedding": torch.tensor(rows, dtype=torch.float64),
            "model/w": torch.arange(len(rows), dtype=torch.float64).unsqueeze(1),
        },
    )


def test_mixing_weights_of_three_clients() -> None:
    sent = embeddings((1, 0), (0, 1), (1, 1))
    weights = FedPub(tau=3.0).mixing(sent, RNG)
    assert weights[0].tolist() == pytest.approx([0.6825, 0.0340, 0.2835], abs=6e-5)
    assert weights[2].tolist() == pytest.approx([0.2269, 0.2269, 0.5463], abs=6e-5)
    method = FedPub(tau=3.0)
    state = method.init_server_state({"w": torch.zeros(1, dtype=torch.float64)}, 3)
    mixed = method.download(method.aggregate(state, sent, RNG), range(3))["model/w"]
    torch.testing.assert_close(mixed.view(-1), weights @ torch.arange(3, dtype=torch.float64))


def test_the_control_has_equal_self_weights() -> None:
    sent = embeddings((1, 0), (0, 1), (1, 1))
    weights, control = (FedPub(mixture=m).mixing(sent, RNG) for m in ("similarity", "control"))
    own = weights.diagonal().mean().item()
    for i in range(3):
        for j in range(3):
            assert control[i, j].item() == pytest.approx(own if i == j else (1 - own) / 2)


def test_absent_clients_keep_their_mixture_and_new_ones_get_the_mean() -> None:
    method = FedPub(mixture="own")
    state = method.init_server_state({"w": torch.zeros(1)}, 3)

    def answers(clients: tuple[int, ...], *models: float) -> Uploads:
        return Uploads(clients, {"model/w": torch.tensor(models).unsqueeze(1)})

    first = method.aggregate(state, answers((1, 2), 2.0, 4.0), RNG)
    assert method.download(first, range(3))["model/w"].view(-1).tolist() == [3, 2, 4]
    second = method.aggregate(first, answers((0, 1), 6.0, 8.0), RNG)
    assert method.download(second, range(3))["model/w"].view(-1).tolist() == [6, 8, 4]


def test_mixtures_that_are_almost_even_are_remarked_on() -> None:
    simulation = simulate(create("fedpub", {"tau": 0.01}), small_federation(), 1)
    (remark,) = simulation.servers[0].remarks()
    assert "evenly" in remark
    sharp = simulate(create("fedpub", {"tau": 100.0}), small_federation(), 1)
    assert not sharp.servers[0].remarks()


# Ablations ----------------------------------------------------------------------------------------

PLAIN: dict[str, Any] = {**CE_ALONE, "masks": False}


def test_even_mixtures_without_masks_are_fedavg() -> None:
    method = create("fedpub", {**PLAIN, "mixture": "even"})
    ours = simulate(method, small_federation(), 4, dropout=0.4)
    plain = simulate(create("fedavg", {"weighting": "uniform"}), small_federation(), 4, dropout=0.4)
    assert_close(with_prefix(ours.received().params, GNN), plain.received().params, 1e-12)


def test_own_models_without_masks_are_local() -> None:
    method = create("fedpub", {**PLAIN, "mixture": "own"})
    ours = simulate(method, small_federation(), 4, dropout=0.4)
    alone = simulate("local", small_federation(), 4, dropout=0.4)
    assert_same_bits(with_prefix(model_part(ours.memory), GNN), model_part(alone.memory))


@pytest.mark.parametrize(
    "change",
    [
        {"mixture": "even"},
        {"mixture": "control"},
        {"masks": False},
        {"sparsity": 0.0},
        {"proximity": 0.0},
        {"proxy_seed": 1},
        {"tau": 1.0},
    ],
    ids=str,
)
def test_each_part_changes_the_models(change: dict[str, Any]) -> None:
    """Plain SGD: Adam would divide factors of gradients out."""
    form = {"proximity": 0.5}
    ours = simulate(create("fedpub", form), small_federation(), 3, optimizer="sgd")
    other = simulate(create("fedpub", form | change), small_federation(), 3, optimizer="sgd")
    first, second = (s.received().params[WEIGHT] for s in (ours, other))
    assert not torch.allclose(first, second, rtol=1e-7, atol=1e-9)


def test_code_form_has_no_penalties() -> None:
    method = create("fedpub", {"code": True})
    assert isinstance(method, FedPub)
    assert (method.sparsity, method.proximity, method.head) == (0, 0, "linear")


@pytest.mark.parametrize(
    "settings",
    [{"masks": False}, {"sparsity": 0.0}, {"mixture": "even"}, {"mixture": "own"}],
    ids=str,
)
def test_hyperparameters_said_to_be_idle_change_nothing(settings: dict[str, Any]) -> None:
    method = FedPub(**settings)
    idle = method.without_effect()
    assert idle
    for name in idle:
        assert not changes_predictions(method, name), name


@pytest.mark.parametrize("check", ["declares-what-it-sends", "stacked-equals-sequential"])
@pytest.mark.parametrize(
    "form",
    [
        {"code": True},
        {"masks": False},
        {"masks": False, "head": "linear"},
        {"mixture": "control"},
        {"mixture": "even"},
        {"mixture": "own"},
    ],
    ids=str,
)
def test_other_forms_pass_the_checks(form: dict[str, Any], check: str) -> None:
    METHOD_CHECKS[check](MethodCase(create("fedpub", form)))
