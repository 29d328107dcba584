"""Every equation of FedGSP's paper, in the paper's form, against sums written out here.

`docs/equations/fedgsp.md` says which test belongs to which equation.
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest
import torch

from builders import dense_adjacency, dense_features
from cases import simulate, small_federation
from polyphily.core.messages import model_part
from polyphily.core.method import create
from polyphily.engines.simulation import Simulation
from polyphily.graphs.graph import Graph
from polyphily.methods.fedgsp import FedGSP
from polyphily.methods.fedgsp.collaboration import Points, Term

Array = npt.NDArray[np.float64]

CLIENTS, ORDER, COUNT, FEATURES = 4, 2, 2, 6  # those of `small_federation`, K and t


def paper(**options: object) -> FedGSP:
    method = create("fedgsp", {"paper": True, "order": ORDER, "vectors": COUNT, **options})
    assert isinstance(method, FedGSP)
    return method


def run(rounds: int, method: FedGSP | None = None, **settings: object) -> Simulation:
    return simulate(method or paper(), small_federation(), rounds, **settings)


# The bases of a client, Section V-A --------------------------------------------------------------


def bases(graph: Graph) -> tuple[list[Array], list[Array]]:
    """H^0 … H^K and U^0 … U^K of one client."""
    a, x = dense_adjacency(graph).numpy(), dense_features(graph).numpy()
    degree = a.sum(axis=1)
    p = np.zeros_like(a)
    for u, v in zip(*np.nonzero(a), strict=True):
        p[u, v] = a[u, v] / np.sqrt(degree[u] * degree[v])
    homophily = [np.linalg.matrix_power(p, k) @ x for k in range(ORDER + 1)]
    columns = [equiangular(p, x[:, f], train_homophily(graph)) for f in range(x.shape[1])]
    heterophily = [np.stack([c[k] for c in columns], axis=1) for k in range(ORDER + 1)]
    return homophily, heterophily


def train_homophily(graph: Graph) -> float:
    assert graph.masks is not None
    train, same = graph.masks.train, []
    for u, v in graph.edges.T:
        if train[u] and train[v]:
            same.append(graph.labels[u] == graph.labels[v])
    return float(np.mean(same)) if same else 0.75


def equiangular(p: Array, x: Array, homophily: float) -> list[Array]:
    """UniFilter's u_0 … u_K from one column: the next vector by solving for its part along v_k.

    Every pair has the cosine c. u_k is in the span of u_0 … u_{k-1} and p^k x, and it is found from
    the Gram matrix of the others: the only unit vector with these cosines, up to a sign.
    """
    if not x.any():
        return [np.zeros_like(x)] * (ORDER + 1)
    c = np.cos((1 - homophily) * np.pi / 2)
    found, raised = [x / np.linalg.norm(x)], x
    directions = [found[0]]
    for _ in range(ORDER):
        raised = p @ directions[-1]
        for d in directions:
            raised = raised - (raised @ d) * d
        before = np.stack(found)
        inside = before.T @ np.linalg.solve(before @ before.T, np.full(len(before), c))
        if np.linalg.norm(raised) < 1e-9 or c > 1 - 1e-12:  # no new direction
            total = before.sum(axis=0)
            found.append(total / np.linalg.norm(total))
            directions.append(np.zeros_like(x))
            continue
        directions.append(raised / np.linalg.norm(raised))
        found.append(inside + np.sqrt(1 - inside @ inside) * directions[-1])
    return found


def test_equations_3_and_4_the_network() -> None:
    """Z = sum_k W^k (tau H^k + (1-tau) U^k), then layers with ReLU between them."""
    simulation = run(1, paper(tau=0.7), layers=2, hidden=5)
    local = simulation.received()
    logits = simulation.predict(local).numpy()
    params = {name: value.numpy() for name, value in local.params.items()}
    first = 0
    for k, graph in enumerate(simulation.cohort.graphs):
        z = np.zeros((graph.num_nodes, FEATURES))
        for order, (h, u) in enumerate(zip(*bases(graph), strict=True)):
            z += params["coefficients"][k, order] * (0.7 * h + 0.3 * u)
        hidden = np.maximum(z @ params["linears.0.weight"][k], 0)
        expected = hidden @ params["linears.1.weight"][k]
        found = logits[first : first + graph.num_nodes]
        np.testing.assert_allclose(found, expected, atol=1e-6)
        first += graph.num_nodes


def test_the_loss_is_the_cross_entropy_of_train_nodes() -> None:
    """Algorithm 1, line 7; nothing is added to it."""
    simulation = run(1)
    local = simulation.received()
    logits = simulation.predict(local).numpy()
    found = simulation.method.loss(local)
    first = 0
    for k, graph in enumerate(simulation.cohort.graphs):
        assert graph.masks is not None
        losses = []
        for node in np.flatnonzero(graph.masks.train):
            scores = logits[first + node]
            losses.append(np.log(np.exp(scores).sum()) - scores[graph.labels[node]])
        assert float(found[k]) == pytest.approx(float(np.mean(losses)), abs=1e-6)
        first += graph.num_nodes


# What a client sends, Eq. (5) and (6) ------------------------------------------------------------


def singular_vectors(basis: Array) -> Array:
    """The first t right singular vectors of the centred basis, `[t, F]`; zero beyond the rank."""
    _, values, v = np.linalg.svd(basis - basis.mean(axis=0), full_matrices=False)
    found = np.zeros((COUNT, basis.shape[1]))
    for row in range(COUNT):
        if values[row] > 1e-9 * values[0]:
            found[row] = v[row] * np.sign(v[row][np.abs(v[row]).argmax()])
    return found


def sent_vectors(graphs: list[Graph]) -> dict[str, Array]:
    """p and q of every client and order, `[clients, K+1, t F]`."""
    kinds: dict[str, list[list[Array]]] = {"homophily": [], "heterophily": []}
    for graph in graphs:
        for name, found in zip(kinds, bases(graph), strict=True):
            kinds[name].append([singular_vectors(basis).ravel() for basis in found])
    return {name: np.array(found) for name, found in kinds.items()}


def test_equations_5_and_6_singular_vectors_are_sent() -> None:
    simulation = run(1)
    expected = sent_vectors(list(simulation.cohort.graphs))
    for name, value in expected.items():
        sent = simulation.states[0][name].numpy()
        np.testing.assert_allclose(sent, value, atol=1e-6)
        left = [graph.num_nodes * COUNT for graph in simulation.cohort.graphs]
        assert len(set(left)) > 1  # the left ones have another length at every client


# The optimisation, Eq. (7) to (16) ---------------------------------------------------------------


def points(seed: int, clients: int = 5, dimensions: int = 7) -> Array:
    return np.random.default_rng(seed).normal(size=(clients, dimensions))


def random_rows(seed: int, clients: int = 5) -> Array:
    return np.random.default_rng(seed).dirichlet(np.ones(clients), size=clients)


def laplacian(w: Array) -> Array:
    both = (w + w.T) / 2
    return np.asarray(np.diag(both.sum(axis=1)) - both)


def attention(x: Array, w: Array) -> Array:
    """Eq. (11) and (12): r_l = 1 / (e_l sum_k 1 / e_k), e_l = p_l^T L p_l."""
    e = [float(x[:, k] @ laplacian(w) @ x[:, k]) + 1e-10 for k in range(x.shape[1])]
    total = sum(1 / value for value in e)
    return np.array([1 / (value * total) for value in e])


def distance(x: Array, r: Array, i: int, j: int) -> float:
    """||R x_i - R x_j||^2."""
    return float(sum((r[k] * x[i, k] - r[k] * x[j, k]) ** 2 for k in range(len(r))))


def differences(p: Array, q: Array, r: Array, s: Array) -> Array:
    """t_ij below Eq. (16)."""
    size = range(len(p))
    return np.array([[distance(p, r, i, j) - distance(q, s, i, j) for j in size] for i in size])


def row_on_the_simplex(t: Array, gamma: float) -> Array:
    """Eq. (14) by trying every set of clients with a positive weight: w = -t / (2 gamma) - b."""
    best, least = np.zeros(len(t)), np.inf
    for size in range(1, len(t) + 1):
        for chosen in map(list, itertools.combinations(range(len(t)), size)):
            w = np.zeros(len(t))
            w[chosen] = 1 / size - (t[chosen] - t[chosen].mean()) / (2 * gamma)
            value = float(t @ w + gamma * w @ w)
            if w.min() >= 0 and value < least:
                best, least = w, value
    return best


def sweep(p: Array, q: Array, w: Array, gamma: float) -> Array:
    """R, S and W in turn, once."""
    t = differences(p, q, attention(p, w), attention(q, w))
    return np.stack([row_on_the_simplex(row, gamma) for row in t])


def term(x: Array, weight: float = 1.0) -> Term:
    """A kind of vectors as `paper=on` compares them."""
    some = torch.from_numpy(random_rows(9, len(x)))
    clients = Points(torch.from_numpy(x))
    return Term.of(weight, clients, some, scale="none", floor=0.0, learnt=True)


def test_equation_9_the_laplacian_sums_distances() -> None:
    o, w = points(0), random_rows(0)
    found = 2 * Points(torch.from_numpy(o)).spread(torch.from_numpy(laplacian(w))).sum()
    expected = sum(w[i, j] * ((o[i] - o[j]) ** 2).sum() for i in range(5) for j in range(5))
    assert float(found) == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(3))
def test_equations_8_10_and_11_the_attention(seed: int) -> None:
    p, w = points(seed), random_rows(seed)
    r = term(p).focus(torch.from_numpy(w)).numpy()
    np.testing.assert_allclose(r, attention(p, w), rtol=1e-9)
    assert r.sum() == pytest.approx(1)

    def value(r: Array) -> float:  # of Eq. (8), which is twice that of Eq. (10)
        pairs = itertools.product(range(5), repeat=2)
        total = sum(w[i, j] * distance(p, r, i, j) for i, j in pairs)
        o = p * r
        assert total == pytest.approx(2 * np.trace(o.T @ laplacian(w) @ o))
        return total

    rng = np.random.default_rng(seed)
    for share in (0.01, 0.3, 1.0):
        other = rng.dirichlet(np.ones(len(r)))
        assert value((1 - share) * r + share * other) > value(r)


def test_equation_12_attention_of_the_heterophily_bases() -> None:
    """It is computed as r is, though the objective has the other sign."""
    method, q, w = paper(), points(4), random_rows(4)
    assert method.learnt == ["homophily", "heterophily"]
    found = term(q, -1.0).focus(torch.from_numpy(w)).numpy()
    np.testing.assert_allclose(found, attention(q, w), rtol=1e-9)


@pytest.mark.parametrize("gamma", [0.002, 0.02, 0.5])
def test_equations_13_to_16_the_strengths(gamma: float) -> None:
    p, q, w = points(1), points(2), random_rows(3)
    vectors = {
        name: torch.from_numpy(x).view(5, 1, 1, 7)
        for name, x in (("homophily", p), ("heterophily", q))
    }
    found = paper(gamma=gamma, sweeps=1).solve(vectors, torch.from_numpy(w))[0].numpy()
    np.testing.assert_allclose(found, sweep(p, q, w, gamma), atol=1e-9)
    t = differences(p, q, attention(p, w), attention(q, w))
    for i in range(5):  # Eq. (15) and (16), at their solution
        h = [1 / 5 - t[i, j] / (2 * gamma) + t[i].sum() / (10 * gamma) for j in range(5)]
        j = int(found[i].argmax())
        b = h[j] - found[i, j]
        assert b == pytest.approx(np.mean([max(b - value, 0) for value in h]), abs=1e-9)
        np.testing.assert_allclose(found[i], [max(value - b, 0) for value in h], atol=1e-9)


def test_equation_7_the_variables_are_updated_in_turn() -> None:
    p, q = points(5), points(6)
    w = (1 - np.eye(5)) / 4
    vectors = {
        name: torch.from_numpy(x).view(5, 1, 1, 7)
        for name, x in (("homophily", p), ("heterophily", q))
    }
    found = paper(sweeps=3).solve(vectors, torch.from_numpy(w))[0]
    for _ in range(3):
        w = sweep(p, q, w, 1.0)
    np.testing.assert_allclose(found, w, atol=1e-10)


def test_as_printed_the_strengths_are_even() -> None:
    """Unit vectors of realistic length: W is 1/M, to the first sweep and to the last."""
    rng = np.random.default_rng(0)
    drawn = rng.normal(size=(2, 6, 3, 1433)) * (rng.random((2, 6, 3, 1433)) < 0.3)
    drawn /= np.linalg.norm(drawn, axis=-1, keepdims=True)
    vectors = {
        name: torch.from_numpy(x).unsqueeze(1)
        for name, x in zip(("homophily", "heterophily"), drawn, strict=True)
    }
    start = torch.from_numpy((1 - np.eye(6)) / 5)
    for sweeps in (1, 100):
        found = paper(sweeps=sweeps).solve(vectors, start)[0]
        np.testing.assert_allclose(found, 1 / 6, rtol=0, atol=1e-12)


# The server, Eq. (17) to (19) and Algorithm 2 ----------------------------------------------------


def test_equations_17_to_19_every_order_and_the_mlp_have_strengths_of_their_own() -> None:
    method = paper(gamma=0.05)
    simulation = run(2, method)
    sent = sent_vectors(list(simulation.cohort.graphs))
    problems = [{n: x[:, k] for n, x in sent.items()} for k in range(ORDER + 1)]
    problems.append({n: x.reshape(CLIENTS, -1) for n, x in sent.items()})  # Eq. (18)
    strengths = []
    for problem in problems:
        w = (1 - np.eye(CLIENTS)) / (CLIENTS - 1)
        for _ in range(300):
            w = sweep(problem["homophily"], problem["heterophily"], w, method.gamma)
        strengths.append(w)
    assert max(abs(a - b).max() for a, b in itertools.pairwise(strengths)) > 1e-3
    trained = {n: t.numpy() for n, t in model_part(simulation.memory).items()}
    down = model_part(method.download(simulation.states[0], range(CLIENTS)))
    for m in range(CLIENTS):
        for k in range(ORDER + 1):
            expected = sum(
                strengths[k][m, j] * trained["coefficients"][j, k] for j in range(CLIENTS)
            )
            np.testing.assert_allclose(down["coefficients"][m, k], expected, atol=1e-6)
        for name in ("linears.0.weight", "linears.1.weight"):
            expected = sum(strengths[-1][m, j] * trained[name][j] for j in range(CLIENTS))
            np.testing.assert_allclose(down[name][m], expected, atol=1e-6)


def test_algorithm_1_a_round_starts_from_what_was_received() -> None:
    simulation = run(2)
    received = simulation.received().params
    down = model_part(simulation.method.download(simulation.states[0], range(CLIENTS)))
    for name, value in received.items():
        torch.testing.assert_close(value, down[name])
    before = {n: t.clone() for n, t in received.items()}
    simulation.advance()
    after = model_part(simulation.memory)
    assert all(not torch.equal(after[n], t) for n, t in before.items())


def test_algorithm_2_the_first_round_starts_from_one_model() -> None:
    params = run(0).received().params
    for value in params.values():
        assert all(torch.equal(row, value[0]) for row in value)


def test_algorithm_2_models_and_vectors_are_sent_in_every_round() -> None:
    simulation = run(0)
    rounds = [simulation.advance().bytes_up for _ in range(17)]
    assert all(found == rounds[0] for found in rounds)
    model = sum(t[0].numel() for t in model_part(simulation.memory).values())
    vectors = 2 * (ORDER + 1) * COUNT * FEATURES
    width = next(iter(simulation.memory.values())).element_size()
    assert rounds[0][0] == CLIENTS * width * (model + vectors)
