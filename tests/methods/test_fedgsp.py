"""FedGSP, part by part, each against a computation written out here."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from builders import CPU
from cases import assert_close, simulate, small_federation
from polyphily import Settings
from polyphily.core.messages import Uploads, model_part
from polyphily.core.method import create
from polyphily.core.optimizers import clipped
from polyphily.errors import UserError
from polyphily.methods.fedgsp import FedGSP, collaboration
from polyphily.methods.fedgsp.collaboration import (
    Points,
    Subspaces,
    attention,
    nearest_on_simplex,
    uniform_self_weight,
)
from polyphily.nn.backbones import Shape
from polyphily.nn.unifilter import UniFilter, graph_bases
from polyphily.papers import published, table

NO_RNG = np.random.default_rng(0)


# Collaboration strengths -------------------------------------------------------------------------


def projected_on_simplex(v: np.ndarray) -> np.ndarray:
    """The point of the simplex nearest to v, by sorting (Held et al.)."""
    ordered = np.sort(v)[::-1]
    excess = (np.cumsum(ordered) - 1) / np.arange(1, len(v) + 1)
    last = np.flatnonzero(ordered > excess)[-1]
    return np.maximum(v - excess[last], 0)


@pytest.mark.parametrize("gamma", [0.02, 0.3, 5.0])
@pytest.mark.parametrize("size", [1, 2, 10, 40])
def test_newton_finds_the_exact_row_on_the_simplex(gamma: float, size: int) -> None:
    t = np.random.default_rng(size).normal(size=(50, size))
    found = nearest_on_simplex(torch.from_numpy(t), gamma).numpy()
    expected = np.stack([projected_on_simplex(-row / (2 * gamma)) for row in t])
    np.testing.assert_allclose(found, expected, atol=1e-12)
    np.testing.assert_allclose(found.sum(axis=1), 1)


def test_attention_by_hand() -> None:
    x = torch.tensor([[1.0, 0, 2], [0, 0, 0]], dtype=torch.float64)
    vectors = Points(x)
    strength = torch.tensor([[0.5, 0.5], [0.3, 0.7]], dtype=torch.float64)
    e = np.array([0.4, 0.0, 1.6])  # the symmetrised w_12 times the squared difference
    plain = attention(Points(x[:, [0, 2]]), strength, 0)
    np.testing.assert_allclose(plain, (1 / e[[0, 2]]) / (1 / e[[0, 2]]).sum(), rtol=1e-8)
    assert attention(vectors, strength, 0)[1] > 0.999999  # all agree there: it takes everything
    raised = 1 / (e + 0.5 * e.mean())
    np.testing.assert_allclose(attention(vectors, strength, 0.5), raised / raised.sum(), rtol=1e-8)


def projectors(vectors: np.ndarray) -> np.ndarray:
    """V^T V of every client and order, `[M, orders, t, F] -> [M, orders, F, F]`."""
    return np.einsum("iotf,iotg->iofg", vectors, vectors)


def random_vectors(clients: int, orders: int, t: int, features: int, seed: int) -> np.ndarray:
    draws = np.random.default_rng(seed).normal(size=(clients, orders, features, t))
    return np.linalg.qr(draws)[0].swapaxes(2, 3)


def test_subspaces_are_compared_by_their_projectors() -> None:
    vectors, rng = random_vectors(4, 3, 2, 7, seed=0), np.random.default_rng(1)
    p, w, focus = projectors(vectors), rng.random((4, 4)), rng.random((3, 7))
    laplacian = np.diag(w.sum(axis=1)) - w
    ours = Subspaces.of(torch.from_numpy(vectors))
    expected = np.einsum("ij,iofg,jofg->of", laplacian, p, p)
    found = ours.spread(torch.from_numpy(laplacian)).view(3, 7)
    np.testing.assert_allclose(found, expected, atol=1e-12)
    scaled = focus[None, :, :, None] * p * focus[None, :, None, :]
    expected = ((scaled[:, None] - scaled) ** 2).sum(axis=(2, 3, 4))
    found = ours.distances(torch.from_numpy(focus.ravel()))
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_a_subspace_does_not_depend_on_sign_order_or_rotation() -> None:
    rng = np.random.default_rng(2)
    vectors = random_vectors(5, 1, 3, 9, seed=1)
    turned = np.linalg.qr(rng.normal(size=(5, 1, 3, 3)))[0] @ vectors
    for compare, same in (("subspace", True), ("vectors", False)):
        method = FedGSP(compare=compare, gamma=0.3)
        solved = [
            method.solve(
                {n: torch.from_numpy(x) for n in ("homophily", "heterophily")}
                | {"heterophily": torch.from_numpy(x[::-1].copy())},
                5,
            )
            for x in (vectors, turned)
        ]
        assert np.allclose(*solved, atol=1e-9) is same
        assert float(solved[0].max() - solved[0].min()) > 0.05


def alternation(p: np.ndarray, q: np.ndarray, method: FedGSP) -> np.ndarray:
    """R, S and W in turn, client by client and dimension by dimension."""
    size = len(p)
    w = np.full((size, size), 1 / (size - 1))
    np.fill_diagonal(w, 0)
    for _ in range(method.sweeps):
        both = (w + w.T) / 2
        distance = []
        for x in (p, q):
            if method.compare == "vectors":
                pairs = (x[:, None] - x).reshape(size, size, -1) ** 2
                seen = pairs
            else:
                projected = projectors(x)
                pairs = (projected[:, None] - projected) ** 2  # [M, M, orders, F, F]
                seen = pairs.sum(axis=4).reshape(size, size, -1)
            e = 0.5 * (both[:, :, None] * seen).sum(axis=(0, 1))
            focus = 1 / (e + method.floor * e.mean() + 1e-10)
            focus /= focus.sum()
            if method.compare == "vectors":
                distance.append((focus**2 * pairs).sum(axis=2))
            else:
                r = focus.reshape(x.shape[1], -1) ** 2
                distance.append(np.einsum("of,og,ijofg->ij", r, r, pairs))
        apart = ~np.eye(size, dtype=bool)
        if method.scale == "others":
            low, high = ([f(d[apart]) for d in distance] for f in (np.min, np.max))
            distance = [
                np.where(apart, (d - a) / (b - a) / size, 0)
                for d, a, b in zip(distance, low, high, strict=True)
            ]
        if method.scale == "terms":
            distance = [d / d.max() for d in distance]
        t = method.sharing * distance[0] - method.complementing * distance[1]
        if method.scale == "range":
            t /= t.max() - t.min()
        h = 1 / size - t / (2 * method.gamma) + t.sum(axis=1)[:, None] / (2 * size * method.gamma)
        w = np.stack([projected_on_simplex(row) for row in h])
    return w


@pytest.mark.parametrize("compare", ["vectors", "subspace"])
@pytest.mark.parametrize("scale", ["others", "terms", "range", "none"])
@pytest.mark.parametrize("floor", [0.0, 0.3])
def test_alternation_is_that_of_the_paper(compare: str, scale: str, floor: float) -> None:
    method = FedGSP(
        compare=compare, scale=scale, floor=floor, sweeps=4, gamma=0.3, complementing=0.6
    )
    p, q = (random_vectors(5, 2, 3, 6, seed) for seed in (0, 1))
    vectors = {"homophily": torch.from_numpy(p), "heterophily": torch.from_numpy(q)}
    found = method.solve(vectors, 5)
    np.testing.assert_allclose(found, alternation(p, q, method), atol=1e-10)
    stacked = {n: torch.stack([v, v.flip(0)]) for n, v in vectors.items()}
    torch.testing.assert_close(method.solve(stacked, 5)[0], found)


def test_as_printed_the_strengths_are_all_but_even() -> None:
    rng = np.random.default_rng(0)
    vectors = {n: torch.from_numpy(rng.normal(size=(6, 900))) for n in ("homophily", "heterophily")}
    vectors = {n: F.normalize(v).view(6, 1, 3, 300) for n, v in vectors.items()}
    printed = create("fedgsp", {"paper": True, "gamma": 1.0}).solve(vectors, 6)
    np.testing.assert_allclose(printed, 1 / 6, atol=1e-3)
    usual = FedGSP().solve(vectors, 6)
    assert float(usual.max() - usual.min()) > 0.02


def in_one_dimension(*places: float) -> dict[str, Tensor]:
    x = torch.tensor(places, dtype=torch.float64).view(-1, 1, 1, 1)
    return {"homophily": x, "heterophily": x}


def test_sharing_prefers_the_similar_and_complementing_the_different() -> None:
    vectors = in_one_dimension(0, 0.1, 1)
    for scale in ("others", "terms"):
        shared = FedGSP(complementing=0.0, scale=scale).solve(vectors, 3)
        assert shared[0, 0] >= shared[0, 1] > shared[0, 2]
        assert shared[2, 2] > shared[2, 1] > shared[2, 0]
        complemented = FedGSP(sharing=0.0, scale=scale).solve(vectors, 3)
        assert complemented[0, 0] <= complemented[0, 1] < complemented[0, 2]
    neither = FedGSP(sharing=0.0, complementing=0.0).solve({}, 3)
    np.testing.assert_allclose(neither, 1 / 3)
    even = FedGSP(complementing=0.0, gamma=100.0).solve(vectors, 3)
    np.testing.assert_allclose(even, 1 / 3, atol=0.01)


def test_rounding_is_no_difference() -> None:
    rng = np.random.default_rng(3)
    basis = np.linalg.qr(rng.normal(size=(12, 12)))[0].reshape(4, 3, 12)
    turns = np.linalg.qr(rng.normal(size=(4, 3, 3)))[0]
    equal = np.broadcast_to(basis[0], (4, 3, 12))
    for spans in (turns @ equal, turns @ basis, turns[:2] @ basis[:2]):  # one, far apart, a pair
        kinds = {n: torch.from_numpy(spans)[:, None] for n in ("homophily", "heterophily")}
        for off in ({}, {"sharing": 0.0}, {"complementing": 0.0}):
            found = FedGSP(floor=1e9, **off).solve(kinds, len(spans))
            np.testing.assert_allclose(found, 1 / len(spans), atol=1e-7)


def test_how_uneven_strengths_are_does_not_depend_on_the_number_of_clients() -> None:
    for clients in (1, 2, 5, 40):
        vectors = in_one_dimension(*np.linspace(0, 1, clients))
        strength = FedGSP(complementing=0.0, gamma=1.0).solve(vectors, clients)
        np.testing.assert_allclose(strength.sum(dim=1), 1)
        if clients > 2:
            most = clients * float(strength.max())
            assert 1.2 < most < 1.6


def test_the_control_has_one_self_weight_for_all() -> None:
    strength = torch.tensor([[0.8, 0.2, 0.0], [0.3, 0.5, 0.2], [0.4, 0.4, 0.2]])
    torch.testing.assert_close(
        uniform_self_weight(strength),
        torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.25, 0.25, 0.5]]),
    )
    assert uniform_self_weight(torch.ones(1, 1)).item() == 1
    vectors = in_one_dimension(0, 0.1, 1)
    spectral = FedGSP(complementing=0.0).solve(vectors, 3)
    control = FedGSP(complementing=0.0, strengths="control").solve(vectors, 3)
    torch.testing.assert_close(control, uniform_self_weight(spectral))


# Server ------------------------------------------------------------------------------------------


def tiny_server(clients: int = 3, **chosen: object) -> tuple[FedGSP, dict[str, Tensor]]:
    """Order 1, two features: coefficients [2, 2] and an MLP of one number per feature."""
    method = FedGSP(order=1, vectors=1, **chosen)  # type: ignore[arg-type]
    shared = {"coefficients": torch.full((2, 2), 0.5), "linears.0.weight": torch.zeros(2, 1)}
    return method, method.init_server_state({n: t.double() for n, t in shared.items()}, clients)


def sent(clients: tuple[int, ...], *, spectra: bool = True) -> Uploads:
    """Client i sends coefficients 1000 (i+1), an MLP of i+1, and vectors that tell orders apart."""
    rows = torch.tensor(clients, dtype=torch.float64) + 1
    tensors = {
        "model/coefficients": 1000 * rows.view(-1, 1, 1).expand(-1, 2, 2),
        "model/linears.0.weight": rows.view(-1, 1, 1).expand(-1, 2, 1),
    }
    if spectra:
        position = {0: (0.0, 0.0), 1: (0.1, 1.0), 2: (1.0, 0.2)}
        p = torch.tensor([position[k] for k in clients], dtype=torch.float64)
        p = torch.stack([p, torch.zeros_like(p)], dim=2)  # [clients, K+1, t F]
        tensors |= {"homophily": p, "heterophily": torch.zeros_like(p)}
    return Uploads(clients, tensors)


def test_every_order_and_the_mlp_have_a_matrix_of_their_own() -> None:
    method, state = tiny_server()
    after = method.aggregate(state, sent((0, 1, 2)), NO_RNG)
    p = sent((0, 1, 2))["homophily"]
    problems = [p[:, :1].unsqueeze(2), p[:, 1:].unsqueeze(2), p.unsqueeze(2)]
    strength = [
        method.solve({"homophily": x, "heterophily": torch.zeros_like(x)}, 3) for x in problems
    ]
    assert not torch.allclose(strength[0], strength[1])
    down = method.download(after, [2, 0])
    models = torch.tensor([1.0, 2, 3], dtype=torch.float64)
    for row, client in enumerate((2, 0)):
        for k in range(2):
            expected = 1000 * strength[k][client] @ models
            np.testing.assert_allclose(down["model/coefficients"][row, k], expected)
        expected = strength[2][client] @ models
        np.testing.assert_allclose(down["model/linears.0.weight"][row], expected)


def test_before_the_first_round_all_clients_receive_the_initial_model() -> None:
    method, state = tiny_server()
    down = method.download(state, [0, 2])
    assert set(down) == {"model/coefficients", "model/linears.0.weight"}
    np.testing.assert_allclose(down["model/coefficients"], 0.5)


def test_a_silent_client_is_present_by_what_it_sent_last() -> None:
    method, state = tiny_server(sharing=0.0, complementing=0.0)
    first = method.aggregate(state, sent((0, 1, 2), spectra=False), NO_RNG)
    np.testing.assert_allclose(method.download(first, [1])["model/linears.0.weight"], 2)
    again = sent((0, 1), spectra=False)
    larger = Uploads((0, 1), {n: 10 * t for n, t in again.tensors.items()})
    after = method.aggregate(first, larger, NO_RNG)
    np.testing.assert_allclose(method.download(after, [2])["model/linears.0.weight"], 11)


def test_a_client_without_vectors_receives_the_mean_of_what_was_sent() -> None:
    method, state = tiny_server()
    after = method.aggregate(state, sent((0, 2)), NO_RNG)
    assert (after["strength"][:, :, 1] == 0).all()  # no weight for a client that never answered
    down = method.download(after, [1])["model/linears.0.weight"]
    np.testing.assert_allclose(down, 2)
    late = method.aggregate(after, sent((1,), spectra=False), NO_RNG)
    np.testing.assert_allclose(method.download(late, [1])["model/linears.0.weight"], 2)
    torch.testing.assert_close(late["strength"][[0, 2]], after["strength"][[0, 2]])
    known = method.aggregate(late, sent((1,)), NO_RNG)
    at_once = method.aggregate(state, sent((0, 1, 2)), NO_RNG)
    torch.testing.assert_close(known["strength"], at_once["strength"])


def test_strengths_are_solved_for_news_only(monkeypatch: pytest.MonkeyPatch) -> None:
    method, state = tiny_server()
    after = method.aggregate(state, sent((0, 1, 2)), NO_RNG)
    monkeypatch.setattr(collaboration, "nearest_on_simplex", lambda *_: pytest.fail("solved again"))
    again = method.aggregate(after, sent((0, 1, 2)), NO_RNG)
    without = method.aggregate(again, sent((0, 2), spectra=False), NO_RNG)
    assert torch.equal(without["strength"], after["strength"])


# A round -----------------------------------------------------------------------------------------


def test_vectors_travel_in_the_first_rounds_only() -> None:
    simulation = simulate(create("fedgsp", {"exchange": 2, "vectors": 2}), small_federation())
    model = simulation.advance().bytes_up
    size = 8 * 4 * (2 * 11 * 2 * 6)
    more, less = simulation.advance().bytes_up, simulation.advance().bytes_up
    assert model == more
    assert more[0] - less[0] == size
    assert simulation.states[0]["homophily"].shape == (4, 11, 12)
    torch.testing.assert_close(simulation.states[0]["homophily"], simulation.memory["homophily"])


@pytest.mark.parametrize("off", ["sharing", "complementing"])
def test_what_is_off_is_not_sent(off: str) -> None:
    simulation = simulate(create("fedgsp", {off: 0}), small_federation(), 1)
    dropped = {"sharing": "homophily", "complementing": "heterophily"}[off]
    assert dropped not in simulation.memory
    assert dropped not in simulation.states[0]


def test_vectors_are_singular_vectors_of_the_bases() -> None:
    federation = small_federation()
    simulation = simulate(create("fedgsp", {"order": 2}), federation)
    for k, graph in enumerate(federation.clients):
        _, (orders,) = graph_bases(graph, CPU, 2)
        for order, pair in enumerate(orders):
            for name, basis in zip(("homophily", "heterophily"), pair, strict=True):
                ours = simulation.memory[name][k].view(3, 3, 6)[order]
                theirs = torch.linalg.svd(basis - basis.mean(dim=0), full_matrices=False)[2][:3]
                torch.testing.assert_close(ours.abs(), theirs.abs(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_training_is_adam_with_two_groups(clip: float) -> None:
    """One client for three steps, against torch's optimiser."""
    several = small_federation()
    federation = dataclasses.replace(several, clients=several.clients[:1])
    chosen = {"coefficient_lr": 0.02, "coefficient_weight_decay": 0.3, "leash": 0.7}
    ours = simulate(
        create("fedgsp", chosen), federation, 0, epochs=3, weight_decay=0.1, lr=0.05, clip=clip
    )
    local = ours.received()
    params = {n: p.clone().requires_grad_() for n, p in local.params.items()}
    mlp = [p for n, p in params.items() if n != "coefficients"]
    optimizer = torch.optim.Adam(
        [
            {"params": mlp, "lr": 0.05, "weight_decay": 0.1},
            {"params": [params["coefficients"]], "lr": 0.02, "weight_decay": 0.3},
        ]
    )
    nodes = local.cohort.train_nodes
    for _ in range(3):
        logits = local.forward(params).logits[nodes]
        loss = F.cross_entropy(logits, local.cohort.train_labels)
        away = params["coefficients"] - local.params["coefficients"]
        loss = loss + 0.35 * away.square().sum()
        grads = dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))
        for name, grad in (clipped(grads, clip) if clip else grads).items():
            params[name].grad = grad
        optimizer.step()
    ours.advance()
    assert_close(model_part(ours.memory), {n: p.detach() for n, p in params.items()}, 1e-9)


def test_permuting_the_clients_permutes_what_they_receive() -> None:
    federation, order = small_federation(), [2, 0, 3, 1]
    clients = tuple(federation.clients[k] for k in order)
    straight = simulate("fedgsp", federation, 3)
    shuffled = simulate("fedgsp", dataclasses.replace(federation, clients=clients), 3)
    assert_close(
        straight.method.download(straight.states[0], order),
        shuffled.method.download(shuffled.states[0], range(4)),
        1e-8,
    )


def test_clients_have_models_of_their_own() -> None:
    simulation = simulate("fedgsp", small_federation(), 2)
    weight = simulation.received().params["linears.0.weight"]
    assert not torch.allclose(weight[0], weight[1])
    even = simulate(create("fedgsp", {"sharing": 0, "complementing": 0}), small_federation(), 2)
    weight = even.received().params["linears.0.weight"]
    torch.testing.assert_close(weight[0], weight[1])


@pytest.mark.parametrize(
    "chosen",
    [
        {"compare": "vectors"},
        {"scale": "none"},
        {"scale": "range"},
        {"scale": "terms"},
        {"floor": 0.0},
        {"leash": 0.0},
        {"strengths": "control"},
        {"coefficients": "order"},
        {"order": 0},
        {"tau": 0.2},
        {"tau": 1.0},
        {"gamma": 0.2},
        {"vectors": 1},
        {"complementing": 0.0},
    ],
)
def test_each_option_changes_the_result(chosen: dict[str, object]) -> None:
    federation = small_federation()
    plain, other = (
        simulate("fedgsp", federation, 2),
        simulate(create("fedgsp", chosen), federation, 2),
    )
    first, second = plain.predict(plain.received()), other.predict(other.received())
    assert torch.isfinite(second).all()
    assert float((first - second).abs().max()) > 1e-9


def test_stays_stacked_when_some_clients_sit_out() -> None:
    federation = small_federation()
    chosen = {"participation": 0.5, "failures": 0.3}
    stacked = simulate("fedgsp", federation, 4, **chosen)
    sequential = simulate("fedgsp", federation, 4, engine="sequential", **chosen)
    assert_close(stacked.states[0], sequential.states[0], 1e-9)


def test_only_a_unifilter_is_trained() -> None:
    method = FedGSP(order=3, tau=0.5)
    assert method.supported_backbones() == ("unifilter",)
    network = method.build("unifilter", Shape(6, 3), 0)
    assert isinstance(network, UniFilter)
    assert (network.order, network.tau, network.describe()) == (3, 0.5, "unifilter")
    with pytest.raises(ValueError, match="gcn"):
        method.build("gcn", Shape(6, 3), 0)


# Published settings ------------------------------------------------------------------------------


def test_published_settings_can_be_run_as_they_are() -> None:
    cases = table("fedgsp")
    assert len(cases) == len({(c.dataset, c.partition, c.clients) for c in cases}) == 66
    for case in cases:
        Settings(**case.settings).check()
        create("fedgsp", case.hyperparameters)
        assert case.clients in {"metis": (5, 10, 20), "metis-overlap": (10, 30, 50)}[case.partition]
    found = published("fedgsp", "roman-empire", "metis", 20)
    assert found.settings["dropout"] == 0.6
    assert found.settings["input_dropout"] == 0
    assert found.hyperparameters["vectors"] == 9
    assert found.hyperparameters["sharing"] == 1.2
    computers = published("fedgsp", "amazon-computers", "metis-overlap", 50)
    assert (computers.settings["rounds"], computers.settings["epochs"]) == (200, 3)
    assert (computers.hyperparameters["tau"], computers.hyperparameters["order"]) == (0.9942, 5)


def test_published_settings_name_what_there_is() -> None:
    with pytest.raises(UserError, match="metis 5, metis 10"):
        published("fedgsp", "cora", "louvain", 10)
    with pytest.raises(UserError, match="fedavg"):
        table("fedavg")
