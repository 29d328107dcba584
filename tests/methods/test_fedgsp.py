"""FedGSP and its network, part by part, each against a computation written out here."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from builders import (
    cohort_of,
    dense_adjacency,
    dense_features,
    predict,
    random_cohort,
    random_graph,
    random_parameters,
    split_by_client,
)
from cases import assert_close, simulate, small_federation
from polyphily import Settings
from polyphily.errors import UserError
from polyphily.federation.local import model_part
from polyphily.federation.optimizers import clipped
from polyphily.graphs.graph import Graph
from polyphily.methods import fedgsp
from polyphily.methods.base import Uploads, create
from polyphily.methods.fedgsp import FedGSP, attention, nearest_on_simplex, same_for_everybody
from polyphily.nn import unifilter
from polyphily.nn.backbones import Shape
from polyphily.nn.unifilter import UniFilter, bases, principal_directions, propagation
from polyphily.papers import published, table

NO_RNG = np.random.default_rng(0)


def dense_propagation(graph: Graph) -> np.ndarray:
    a = dense_adjacency(graph).numpy()
    degree = a.sum(axis=1)
    scale = np.where(degree > 0, 1 / np.sqrt(np.maximum(degree, 1)), 0)
    return scale[:, None] * a * scale


def bases_of(graph: Graph, homophily: float, order: int) -> tuple[np.ndarray, np.ndarray]:
    """Both kinds, `[order + 1, n, F]` each."""
    x = dense_features(graph).numpy()
    near, far = zip(*bases(propagation(graph), x, homophily, order), strict=True)
    return np.stack(near), np.stack(far)


# Bases -------------------------------------------------------------------------------------------


def test_homophily_bases_are_powers_of_the_propagation() -> None:
    graph = random_graph(30, density=0.08)
    near, _ = bases_of(graph, 0.5, 4)
    p, x = dense_propagation(graph), dense_features(graph).numpy()
    for k in range(5):
        np.testing.assert_allclose(near[k], np.linalg.matrix_power(p, k) @ x, atol=1e-12)


@pytest.mark.parametrize("homophily", [0.05, 0.3, 0.5, 0.81, 0.97])
def test_every_pair_of_heterophily_bases_has_the_same_angle(homophily: float) -> None:
    graph = random_graph(60, density=0.15, features=5)
    _, far = bases_of(graph, homophily, 8)
    cosines = np.einsum("knf,lnf->fkl", far, far)
    expected = np.full((9, 9), math.cos((1 - homophily) * math.pi / 2))
    np.fill_diagonal(expected, 1)
    np.testing.assert_allclose(cosines, np.broadcast_to(expected, cosines.shape), atol=1e-8)


def test_heterophily_bases_are_spanned_by_the_propagated_column() -> None:
    graph = random_graph(40, density=0.15, features=3)
    near, far = bases_of(graph, 0.4, 3)
    for f in range(3):
        for k in range(4):
            krylov = near[: k + 1, :, f].T
            found = np.linalg.lstsq(krylov, far[k, :, f], rcond=None)[0]
            np.testing.assert_allclose(krylov @ found, far[k, :, f], atol=1e-9)


def test_heterophily_bases_at_the_ends_of_the_scale() -> None:
    graph = random_graph(40, density=0.15, features=3)
    _, orthogonal = bases_of(graph, 0.0, 4)
    cosines = np.einsum("knf,lnf->fkl", orthogonal, orthogonal)
    np.testing.assert_allclose(cosines, np.broadcast_to(np.eye(5), cosines.shape), atol=1e-5)
    _, same = bases_of(graph, 1.0, 4)
    for k in range(5):
        np.testing.assert_allclose(same[k], same[0], atol=1e-12)


def test_an_exhausted_column_and_a_zero_column() -> None:
    """Two nodes, one edge: two directions at most. The third node is isolated."""
    x = np.array([[1.0, 0, 1], [0, 0, 1], [0, 0, 0]])
    graph = Graph.build(x.astype(np.float32), np.array([[0], [1]]), np.array([0, 1, 0]))
    _, far = bases_of(graph, 0.5, 5)
    assert np.isfinite(far).all()
    assert (far[:, :, 1] == 0).all()
    np.testing.assert_allclose(np.linalg.norm(far[:, :, [0, 2]], axis=1), 1)
    np.testing.assert_allclose(far[:, :2, 2], 1 / math.sqrt(2))  # an eigenvector of P
    assert far[0, :, 0] @ far[1, :, 0] == pytest.approx(math.cos(math.pi / 4))


def test_homophily_counts_edges_between_train_nodes() -> None:
    edges = np.array([[0, 1, 1, 2, 2, 3, 0, 3], [1, 0, 2, 1, 3, 2, 3, 0]])
    count = unifilter.train_homophily
    assert count(edges, np.array([0, 0, 1, 0])) == 0.5
    assert count(edges, np.array([0, 0, -1, 1])) == 0.5
    assert count(edges, np.array([0, -1, 1, -1])) == 0.75
    assert count(edges[:, :0], np.array([0, 0, 1, 0])) == 0.75


@pytest.mark.parametrize("shape", [(30, 8), (8, 30)])
@pytest.mark.parametrize("dense", [True, False])
def test_principal_directions_are_right_singular_vectors(
    shape: tuple[int, int], dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unifilter, "DENSE_EIGEN", 100 if dense else 0)
    basis = np.random.default_rng(0).normal(size=shape) + 3
    found = principal_directions(basis, 3)
    _, _, expected = np.linalg.svd(basis - basis.mean(axis=0), full_matrices=False)
    for ours, theirs in zip(found, expected[:3], strict=True):
        assert abs(ours @ theirs) == pytest.approx(1)
        assert ours[np.abs(ours).argmax()] > 0
    np.testing.assert_allclose(principal_directions(-basis, 3), found, atol=1e-9)


def test_directions_beyond_the_rank_are_zero() -> None:
    basis = np.outer([1.0, 2.0, 3.0, 4.0], [1.0, -2.0, 2.0])
    found = principal_directions(basis, 5)
    np.testing.assert_allclose(np.abs(found[0]), [1 / 3, 2 / 3, 2 / 3])
    assert (found[1:] == 0).all()
    assert (principal_directions(np.ones((1, 3)), 2) == 0).all()


def test_the_mixture_is_kept_per_client_and_computed_once() -> None:
    cohort = random_cohort((9, 14), sparse=True)
    mixed = unifilter.mixed_bases(cohort, 3, 0.7)
    assert unifilter.mixed_bases(cohort, 3, 0.7) is mixed
    labels = cohort.labels.split([9, 14])
    for k, graph in enumerate(cohort.graphs):
        h = unifilter.train_homophily(graph.edges, labels[k].numpy())
        near, far = bases_of(graph, h, 3)
        ours = torch.stack([split_by_client(m, cohort)[k] for m in mixed])
        np.testing.assert_allclose(ours, 0.7 * near + 0.3 * far, atol=1e-12)


# Network -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_feature", [True, False])
def test_network_is_equations_3_and_4(per_feature: bool) -> None:
    cohort = random_cohort((9, 14, 9))
    shape = Shape(features=6, classes=3, hidden=5, layers=4)
    network = UniFilter(shape, 3, 0.8, per_feature=per_feature).double()
    assert (network.coefficients == 0.25).all()
    params = random_parameters(network, 3)
    output = predict(network, params, cohort)
    mixed = unifilter.mixed_bases(cohort, 3, 0.8)
    for k in range(3):
        blocks = [split_by_client(m, cohort)[k] for m in mixed]
        w = params["coefficients"][k]
        z = sum(w[order] * block for order, block in enumerate(blocks))
        z = (z @ params["linears.0.weight"][k]).relu()
        z = (z @ params["linears.1.weight"][k] + z).relu()  # a residual where widths agree
        z = (z @ params["linears.2.weight"][k] + z).relu()
        torch.testing.assert_close(split_by_client(output.embedding, cohort)[k], z)
        logits = z @ params["linears.3.weight"][k]
        torch.testing.assert_close(split_by_client(output.logits, cohort)[k], logits)


def test_gradient_of_the_mixture() -> None:
    cohort = random_cohort((5, 7))
    kept = unifilter.mixed_bases(cohort, 2, 0.5).unbind()
    weight = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    mix = unifilter._Mixture.apply
    assert torch.autograd.gradcheck(lambda w: mix(w, kept, cohort.segments), (weight,))


def test_train_nodes_alone_give_the_same_output_and_gradient() -> None:
    cohort = random_cohort((9, 14))
    network = UniFilter(Shape(features=6, classes=3, hidden=5), 3, 0.8).double()
    params = {n: p.requires_grad_() for n, p in random_parameters(network, 2).items()}
    every = predict(network, params, cohort).logits[cohort.train_nodes]
    alone = torch.func.functional_call(network, params, (cohort, None, True)).logits
    torch.testing.assert_close(alone, every)
    target = torch.randn_like(every)
    first = torch.autograd.grad((every * target).sum(), list(params.values()))
    second = torch.autograd.grad((alone * target).sum(), list(params.values()))
    torch.testing.assert_close(first, second)
    assert all((g.flatten(1).abs().amax(dim=1) > 0).all() for g in first)


def test_dropout_is_on_bases_and_before_every_layer() -> None:
    cohort = random_cohort((9, 14))

    def logits(draws: bool, **dropout: float) -> Tensor:
        shape = Shape(features=6, classes=3, hidden=5, **{"dropout": 0.0, **dropout})
        network = UniFilter(shape, 3, 0.8).double()
        params = random_parameters(network, 2)
        return predict(network, params, cohort, cohort.draws(0) if draws else None).logits

    plain = logits(False, dropout=0.5, input_dropout=0.5)
    torch.testing.assert_close(logits(True), plain)
    assert not torch.allclose(logits(True, input_dropout=0.5), plain)
    assert not torch.allclose(logits(True, dropout=0.5), plain)


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
    vectors = torch.tensor([[1.0, 0, 2], [0, 0, 0]], dtype=torch.float64)
    strength = torch.tensor([[0.5, 0.5], [0.3, 0.7]], dtype=torch.float64)
    e = np.array([0.4, 0.0, 1.6])  # the symmetrised w_12 times the squared difference
    plain = attention(vectors[:, [0, 2]], strength, 0)
    np.testing.assert_allclose(plain, (1 / e[[0, 2]]) / (1 / e[[0, 2]]).sum(), rtol=1e-8)
    assert attention(vectors, strength, 0)[1] > 0.999999  # all agree there: it takes everything
    raised = 1 / (e + 0.5 * e.mean())
    np.testing.assert_allclose(attention(vectors, strength, 0.5), raised / raised.sum(), rtol=1e-8)


def alternation(p: np.ndarray, q: np.ndarray, method: FedGSP) -> np.ndarray:
    """R, S and W in turn, client by client and dimension by dimension."""
    size = len(p)
    w = np.full((size, size), 1 / (size - 1))
    np.fill_diagonal(w, 0)
    for _ in range(method.sweeps):
        both = (w + w.T) / 2
        distance = []
        for x in (p, q):
            pairs = (x[:, None] - x) ** 2
            e = 0.5 * (both[:, :, None] * pairs).sum(axis=(0, 1))
            focus = 1 / (e + method.floor * e.mean() + 1e-10)
            focus /= focus.sum()
            distance.append((focus**2 * pairs).sum(axis=2))
        if method.scale == "terms":
            distance = [d / d.max() for d in distance]
        t = method.sharing * distance[0] - method.complementing * distance[1]
        if method.scale == "range":
            t /= t.max() - t.min()
        h = 1 / size - t / (2 * method.gamma) + t.sum(axis=1)[:, None] / (2 * size * method.gamma)
        w = np.stack([projected_on_simplex(row) for row in h])
    return w


@pytest.mark.parametrize("scale", ["terms", "range", "none"])
@pytest.mark.parametrize("floor", [0.0, 0.3])
def test_alternation_is_that_of_the_paper(scale: str, floor: float) -> None:
    chosen = {"scale": scale, "floor": floor, "sweeps": 4, "gamma": 0.3, "complementing": 0.6}
    method = FedGSP(**chosen)
    rng = np.random.default_rng(0)
    p, q = rng.normal(size=(5, 12)), rng.normal(size=(5, 12))
    vectors = {"homophily": torch.from_numpy(p), "heterophily": torch.from_numpy(q)}
    np.testing.assert_allclose(method.solve(vectors, 5), alternation(p, q, method), atol=1e-10)


def test_as_printed_the_strengths_are_all_but_even() -> None:
    rng = np.random.default_rng(0)
    vectors = {n: torch.from_numpy(rng.normal(size=(6, 900))) for n in ("homophily", "heterophily")}
    vectors = {n: F.normalize(v) for n, v in vectors.items()}
    printed = FedGSP(scale="none", floor=0.0).solve(vectors, 6)
    np.testing.assert_allclose(printed, 1 / 6, atol=1e-3)
    assert float(FedGSP().solve(vectors, 6).max()) > 0.2


def test_sharing_prefers_the_similar_and_complementing_the_different() -> None:
    x = torch.tensor([[0.0], [0.1], [1.0]], dtype=torch.float64)
    vectors = {"homophily": x, "heterophily": x}
    shared = FedGSP(complementing=0.0).solve(vectors, 3)
    assert shared[0, 0] > shared[0, 1] > shared[0, 2]
    complemented = FedGSP(sharing=0.0).solve(vectors, 3)
    assert complemented[0, 0] < complemented[0, 1] < complemented[0, 2]
    neither = FedGSP(sharing=0.0, complementing=0.0).solve({}, 3)
    np.testing.assert_allclose(neither, 1 / 3)
    even = FedGSP(complementing=0.0, gamma=100.0).solve(vectors, 3)
    np.testing.assert_allclose(even, 1 / 3, atol=0.01)


def test_the_control_has_one_self_weight_for_everybody() -> None:
    strength = torch.tensor([[0.8, 0.2, 0.0], [0.3, 0.5, 0.2], [0.4, 0.4, 0.2]])
    torch.testing.assert_close(
        same_for_everybody(strength),
        torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.25, 0.25, 0.5]]),
    )
    assert same_for_everybody(torch.ones(1, 1)).item() == 1
    x = torch.tensor([[0.0], [0.1], [1.0]], dtype=torch.float64)
    vectors = {"homophily": x, "heterophily": x}
    spectral = FedGSP(complementing=0.0).solve(vectors, 3)
    control = FedGSP(complementing=0.0, strengths="control").solve(vectors, 3)
    torch.testing.assert_close(control, same_for_everybody(spectral))


# Server ------------------------------------------------------------------------------------------


def tiny_server(clients: int = 3, **chosen: object) -> tuple[FedGSP, dict[str, Tensor]]:
    """Order 1, two features: coefficients [2, 2] and an MLP of one number per feature."""
    method = FedGSP(order=1, vectors=1, **chosen)  # type: ignore[arg-type]
    shared = {"coefficients": torch.full((2, 2), 0.5), "linears.0.weight": torch.zeros(2, 1)}
    return method, method.open({n: t.double() for n, t in shared.items()}, clients)


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
    problems = [p[:, 0], p[:, 1], p.flatten(1)]
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


def test_before_the_first_round_everybody_receives_the_initial_model() -> None:
    method, state = tiny_server()
    down = method.download(state, [0, 2])
    assert set(down) == {"model/coefficients", "model/linears.0.weight"}
    np.testing.assert_allclose(down["model/coefficients"], 0.5)


def test_a_silent_client_is_present_by_what_it_sent_last() -> None:
    method, state = tiny_server(sharing=0.0, complementing=0.0)
    everybody = method.aggregate(state, sent((0, 1, 2), spectra=False), NO_RNG)
    np.testing.assert_allclose(method.download(everybody, [1])["model/linears.0.weight"], 2)
    again = sent((0, 1), spectra=False)
    louder = Uploads((0, 1), {n: 10 * t for n, t in again.tensors.items()})
    after = method.aggregate(everybody, louder, NO_RNG)
    np.testing.assert_allclose(method.download(after, [2])["model/linears.0.weight"], 11)


def test_a_client_without_vectors_receives_the_mean_of_what_was_sent() -> None:
    method, state = tiny_server()
    after = method.aggregate(state, sent((0, 2)), NO_RNG)
    assert (after["strength"][:, :, 1] == 0).all()  # nobody takes from a client never heard
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
    monkeypatch.setattr(fedgsp, "nearest_on_simplex", lambda *_: pytest.fail("solved again"))
    again = method.aggregate(after, sent((0, 1, 2)), NO_RNG)
    without = method.aggregate(again, sent((0, 2), spectra=False), NO_RNG)
    assert without["strength"] is after["strength"]


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
        assert graph.masks is not None
        labels = np.where(graph.masks.train, graph.labels, -1)
        kinds = bases_of(graph, unifilter.train_homophily(graph.edges, labels), 2)
        for name, found in zip(("homophily", "heterophily"), kinds, strict=True):
            ours = simulation.memory[name][k].view(3, 3, 6).numpy()
            for order in range(3):
                centred = found[order] - found[order].mean(axis=0)
                theirs = np.linalg.svd(centred, full_matrices=False)[2][:3]
                np.testing.assert_allclose(np.abs(ours[order]), np.abs(theirs), atol=1e-6)


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_training_is_adam_with_two_groups(clip: float) -> None:
    """One client for three steps, against torch's optimiser."""
    several = small_federation()
    federation = dataclasses.replace(several, clients=several.clients[:1])
    chosen = {"coefficient_lr": 0.02, "coefficient_weight_decay": 0.3}
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
        {"scale": "none", "floor": 0.0},
        {"scale": "range"},
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


def test_cohort_of_one_has_the_bits_of_the_stacked_bases() -> None:
    cohort = random_cohort((9, 14))
    alone = cohort_of(cohort.graphs[1:], keys=cohort.keys[1:])
    together = unifilter.mixed_bases(cohort, 4, 0.6)[:, 9:]
    assert torch.equal(unifilter.mixed_bases(alone, 4, 0.6), together)


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
