"""FedGSP, part by part, each against a computation written out here."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from builders import CPU, cohort_of
from cases import assert_close, simulate, small_federation
from polyphily import Settings
from polyphily.core.messages import Uploads, model_part
from polyphily.core.method import check_effects, create
from polyphily.core.optimizers import clipped
from polyphily.errors import UserError
from polyphily.graphs.loading import load
from polyphily.methods.fedgsp import FedGSP, collaboration
from polyphily.methods.fedgsp.collaboration import (
    Angles,
    Points,
    Subspaces,
    Term,
    nearest_on_simplex,
    only_others,
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


def others_first(clients: int) -> Tensor:
    """The W that the alternation starts from."""
    return only_others(clients, torch.empty(0, dtype=torch.float64))


def w_of(method: FedGSP, vectors: dict[str, Tensor], clients: int) -> Tensor:
    """The weights of one problem, from the usual start."""
    return method.mixture(method.solve(vectors, others_first(clients))[0])


def test_attention_by_hand() -> None:
    x = torch.tensor([[1.0, 0, 2], [0, 0, 0]], dtype=torch.float64)
    strength = torch.tensor([[0.5, 0.5], [0.3, 0.7]], dtype=torch.float64)
    e = np.array([0.4, 0.0, 1.6])  # the symmetrised w_12 times the squared difference

    def focus(x: Tensor, floor: float, start: Tensor = strength) -> Tensor:
        term = Term.of(1.0, Points(x), start, scale="none", floor=floor, learnt=True)
        return term.focus(strength)

    np.testing.assert_allclose(
        focus(x[:, [0, 2]], 0), (1 / e[[0, 2]]) / (1 / e[[0, 2]]).sum(), rtol=1e-8
    )
    assert focus(x, 0)[1] > 0.999999  # all agree there: it takes everything
    raised = 1 / (e + 0.5 * e.mean())
    np.testing.assert_allclose(focus(x, 0.5), raised / raised.sum(), rtol=1e-8)
    doubled = 1 / (e + e.mean())  # the floor is that of the start, which has twice the weight
    np.testing.assert_allclose(focus(x, 0.5, 2 * strength), doubled / doubled.sum(), rtol=1e-8)
    even = Term.of(1.0, Points(x), strength, scale="none", floor=0.5, learnt=False)
    np.testing.assert_allclose(even.focus(strength), 1 / 3)


def projectors(vectors: np.ndarray) -> np.ndarray:
    """V^T V of every client and order, `[M, orders, t, F] -> [M, orders, F, F]`."""
    return np.einsum("iotf,iotg->iofg", vectors, vectors)


def random_vectors(clients: int, orders: int, t: int, features: int, seed: int) -> np.ndarray:
    draws = np.random.default_rng(seed).normal(size=(clients, orders, features, t))
    return np.linalg.qr(draws)[0].swapaxes(2, 3)


def two_kinds(clients: int, orders: int, t: int, features: int, seed: int = 0) -> dict[str, Tensor]:
    names = ("homophily", "heterophily")
    return {
        name: torch.from_numpy(random_vectors(clients, orders, t, features, 2 * seed + k))
        for k, name in enumerate(names)
    }


def test_subspaces_are_compared_by_their_projectors() -> None:
    vectors, rng = random_vectors(4, 3, 2, 7, seed=0), np.random.default_rng(1)
    p, w, focus = projectors(vectors), rng.random((4, 4)), rng.random((3, 7))
    laplacian = np.diag(w.sum(axis=1)) - w
    ours = Subspaces.of(torch.from_numpy(vectors))
    expected = np.einsum("ij,iofg,jofg->of", laplacian, p, p)
    found = ours.spread(torch.from_numpy(laplacian)).view(3, 7)
    np.testing.assert_allclose(found, expected, atol=1e-12)
    scaled = focus[None, :, :, None] * p
    expected = ((scaled[:, None] - scaled) ** 2).sum(axis=(2, 3, 4))
    found = ours.distances(torch.from_numpy(focus.ravel()))
    np.testing.assert_allclose(found, expected, atol=1e-12)


def mean_angle(first: np.ndarray, second: np.ndarray) -> float:
    """The mean angle between rows, the pair with the smallest angle taken away first."""
    angles = []
    rows, columns = list(range(len(first))), list(range(len(second)))
    while rows:
        cosine = {
            (i, j): first[i] @ second[j] / np.linalg.norm(first[i]) / np.linalg.norm(second[j])
            for i in rows
            for j in columns
        }
        i, j = max(cosine, key=lambda pair: cosine[pair])
        angles.append(np.arccos(np.clip(cosine[i, j], -1, 1)))
        rows.remove(i)
        columns.remove(j)
    return float(np.mean(angles))


@pytest.mark.parametrize("t", [1, 2, 4])
def test_angles_are_matched_greedily(t: int) -> None:
    vectors, focus = random_vectors(4, 3, t, 7, seed=t), np.random.default_rng(1).random((3, 7))
    wide = torch.from_numpy(np.tile(focus.ravel(), t))
    ours = Angles.of(torch.from_numpy(vectors))
    found = ours.distances(wide)
    rows = (vectors * focus[:, None]).swapaxes(1, 2).reshape(4, t, 21)
    for i in range(4):
        for j in range(4):
            expected = 0 if i == j else 1 - np.cos(mean_angle(rows[i], rows[j]))
            assert float(found[i, j]) == pytest.approx(expected, abs=1e-12)
    torch.testing.assert_close(ours.distances(10_000 * wide), found)


def test_a_client_without_vectors_is_at_a_right_angle_to_all_others() -> None:
    vectors = torch.from_numpy(random_vectors(3, 1, 2, 5, seed=0)).clone()
    vectors[1] = 0
    found = Angles.of(vectors).distances(torch.ones(10, dtype=torch.float64))
    np.testing.assert_allclose(found[1], [1, 0, 1], atol=1e-12)


def test_a_subspace_does_not_depend_on_sign_order_or_rotation() -> None:
    rng = np.random.default_rng(2)
    vectors = random_vectors(5, 1, 3, 9, seed=1)
    turned = np.linalg.qr(rng.normal(size=(5, 1, 3, 3)))[0] @ vectors
    for compare, same in (("subspace", True), ("vectors", False), ("angles", False)):
        method = FedGSP(compare=compare, gamma=0.3)
        solved = [
            w_of(
                method,
                {
                    "homophily": torch.from_numpy(x),
                    "heterophily": torch.from_numpy(x[::-1].copy()),
                },
                5,
            )
            for x in (vectors, turned)
        ]
        assert np.allclose(*solved, atol=1e-9) is same
        assert float(solved[0].max() - solved[0].min()) > 0.05


# The default objective ---------------------------------------------------------------------------


class Objective:
    """J of the default form, from all squared differences: `[M, M, dimensions]` of each kind."""

    def __init__(self, method: FedGSP, p: np.ndarray, q: np.ndarray) -> None:
        self.method, size = method, len(p)
        self.near, self.far = (self.differences(x) for x in (p, q))
        self.start = (1 - np.eye(size)) / (size - 1)
        e = np.einsum("ij,ijl->l", self.start, self.near)
        self.floor = method.floor * e.mean() + 2e-10
        self.apart = ~np.eye(size, dtype=bool)
        self.kinds = [
            (method.sharing, *self.constants(self.near @ self.best_r(self.start) ** 2)),
            (-method.complementing, *self.constants(self.far.mean(axis=2) / self.far.shape[2])),
        ]
        self.complement = self.far.mean(axis=2) / self.far.shape[2]

    def differences(self, x: np.ndarray) -> np.ndarray:
        if self.method.compare == "vectors":
            return ((x[:, None] - x) ** 2).reshape(len(x), len(x), -1)
        p = projectors(x)
        return ((p[:, None] - p) ** 2).sum(axis=4).reshape(len(x), len(x), -1)

    def constants(self, distances: np.ndarray) -> tuple[float, float]:
        """c and n."""
        low, high = distances[self.apart].min(), distances.max()
        differ = high - low > 1e-10 * high  # else there is no range: c = 0
        return {
            "others": (1 / (high - low) / len(distances) if differ else 0.0, low),
            "terms": (1 / high, 0.0),
            "none": (1.0, 0.0),
        }[self.method.scale]

    def best_r(self, w: np.ndarray) -> np.ndarray:
        inverse = 1 / (np.einsum("ij,ijl->l", w, self.near) + self.floor)
        return np.asarray(inverse / inverse.sum())

    def t(self, r: np.ndarray) -> np.ndarray:
        (a, c, n), (b, d, m) = self.kinds
        found = a * c * (self.near @ r**2 - n) + b * d * (self.complement - m)
        return np.where(self.apart, found, 0)

    def best_w(self, r: np.ndarray) -> np.ndarray:
        return np.stack([projected_on_simplex(-row / (2 * self.method.gamma)) for row in self.t(r)])

    def __call__(self, w: np.ndarray, r: np.ndarray) -> float:
        a, c, _ = self.kinds[0]
        ridge = a * c * self.floor * (r**2).sum()
        return float((w * self.t(r)).sum() + self.method.gamma * (w**2).sum() + ridge)


FORMS = st.builds(
    FedGSP,
    compare=st.sampled_from(["subspace", "vectors"]),
    scale=st.sampled_from(["others", "terms", "none"]),
    gamma=st.sampled_from([0.1, 0.3, 1.0, 4.0]),
    floor=st.sampled_from([0.3, 1.0]),
    sharing=st.sampled_from([0.5, 1.0, 2.2]),
    complementing=st.sampled_from([0.25, 1.0]),
)
SIZES = st.tuples(st.integers(2, 6), st.integers(1, 2), st.integers(1, 3), st.integers(4, 8))


@settings(deadline=None, max_examples=40)
@given(method=FORMS, size=SIZES, seed=st.integers(0, 999))
def test_the_objective_never_rises(
    method: FedGSP, size: tuple[int, int, int, int], seed: int
) -> None:
    p, q = (random_vectors(*size, 2 * seed + k) for k in (0, 1))
    vectors = {"homophily": torch.from_numpy(p), "heterophily": torch.from_numpy(q)}
    j = Objective(method, p, q)
    w, value = j.start, j(j.start, j.best_r(j.start))
    for sweeps in range(1, 6):
        expected = j.best_w(j.best_r(w))
        w = dataclasses.replace(method, sweeps=1).solve(vectors, torch.from_numpy(w))[0].numpy()
        np.testing.assert_allclose(w, expected, atol=1e-8)
        after = j(w, j.best_r(w))
        assert after <= value + 1e-12 * (1 + abs(value)), sweeps
        value = after


@settings(deadline=None, max_examples=40)
@given(method=FORMS, size=SIZES, seed=st.integers(0, 999))
def test_at_the_end_nothing_lowers_the_objective(
    method: FedGSP, size: tuple[int, int, int, int], seed: int
) -> None:
    p, q = (random_vectors(*size, 2 * seed + k) for k in (0, 1))
    vectors = {"homophily": torch.from_numpy(p), "heterophily": torch.from_numpy(q)}
    j, rng = Objective(method, p, q), np.random.default_rng(seed)
    solved, settled = dataclasses.replace(method, sweeps=5000).solve(vectors, others_first(size[0]))
    assert bool(settled)
    w, r = solved.numpy(), j.best_r(solved.numpy())
    value = j(w, r)
    for share in (1e-3, 0.1, 0.9):
        for _ in range(20):
            other_w = rng.dirichlet(np.full(len(w), 0.3), size=len(w))
            other_r = rng.dirichlet(np.full(len(r), 0.3))
            least = value - 1e-9 * (1 + abs(value))
            assert j((1 - share) * w + share * other_w, r) >= least
            assert j(w, (1 - share) * r + share * other_r) >= least


@pytest.mark.parametrize("compare", ["subspace", "vectors", "angles"])
def test_problems_side_by_side_do_not_see_each_other(compare: str) -> None:
    method = FedGSP(compare=compare, gamma=0.3, attention="both", sweeps=30)
    several = [two_kinds(5, 2, 3, 6, seed) for seed in (0, 1, 2)]
    stacked = {n: torch.stack([v[n] for v in several]) for n in several[0]}
    start = others_first(5).expand(3, -1, -1)
    found, settled = method.solve(stacked, start)
    assert settled.shape == (3,)
    alone = dataclasses.replace(method, sweeps=5)
    found = alone.solve(stacked, start)[0]
    for k, vectors in enumerate(several):
        torch.testing.assert_close(found[k], alone.solve(vectors, others_first(5))[0])


# Cycles ------------------------------------------------------------------------------------------


def test_a_cycle_ends_and_what_has_not_settled_is_known() -> None:
    """As printed, with a small gamma, W can jump between two matrices for ever."""
    method = create("fedgsp", {"paper": True, "gamma": 0.003})
    assert isinstance(method, FedGSP)
    vectors, start = two_kinds(4, 1, 1, 3, seed=2), others_first(4)
    once = dataclasses.replace(method, sweeps=1)  # does not know the last step: nothing is damped
    plain = [start]
    for _ in range(200):
        plain.append(once.solve(vectors, plain[-1])[0])
    assert float((plain[-1] - plain[-2]).abs().max()) > 0.1
    torch.testing.assert_close(plain[-1], plain[-3])
    assert not bool(dataclasses.replace(method, sweeps=3).solve(vectors, start)[1])
    found, settled = method.solve(vectors, start)
    assert bool(settled)
    torch.testing.assert_close(once.solve(vectors, found)[0], found, atol=1e-8, rtol=0)


# What W is like ----------------------------------------------------------------------------------


def test_as_printed_the_strengths_are_even() -> None:
    vectors = two_kinds(6, 1, 3, 1433)
    printed = create("fedgsp", {"paper": True})
    assert isinstance(printed, FedGSP)
    np.testing.assert_allclose(w_of(printed, vectors, 6), 1 / 6, rtol=0, atol=1e-7)
    usual = w_of(FedGSP(), vectors, 6)
    assert float(usual.max() - usual.min()) > 0.02


def in_one_dimension(*places: float) -> dict[str, Tensor]:
    x = torch.tensor(places, dtype=torch.float64).view(-1, 1, 1, 1)
    return {"homophily": x, "heterophily": x}


def test_sharing_prefers_the_similar_and_complementing_the_different() -> None:
    vectors = in_one_dimension(0, 0.1, 1)
    for scale in ("others", "terms"):
        shared = w_of(FedGSP(complementing=0.0, scale=scale), vectors, 3)
        assert shared[0, 0] >= shared[0, 1] > shared[0, 2]
        assert shared[2, 2] > shared[2, 1] > shared[2, 0]
        complemented = w_of(FedGSP(sharing=0.0, scale=scale), vectors, 3)
        assert complemented[0, 0] <= complemented[0, 1] < complemented[0, 2]
    neither = w_of(FedGSP(sharing=0.0, complementing=0.0), {}, 3)
    np.testing.assert_allclose(neither, 1 / 3)
    even = w_of(FedGSP(complementing=0.0, gamma=100.0), vectors, 3)
    np.testing.assert_allclose(even, 1 / 3, atol=0.01)


def test_rounding_is_no_difference() -> None:
    rng = np.random.default_rng(3)
    basis = np.linalg.qr(rng.normal(size=(12, 12)))[0].reshape(4, 3, 12)
    turns = np.linalg.qr(rng.normal(size=(4, 3, 3)))[0]
    equal = np.broadcast_to(basis[0], (4, 3, 12))
    for spans in (turns @ equal, turns @ basis, turns[:2] @ basis[:2]):  # one, far apart, a pair
        kinds = {n: torch.from_numpy(spans)[:, None] for n in ("homophily", "heterophily")}
        for off in ({}, {"sharing": 0.0}, {"complementing": 0.0}):
            found = w_of(FedGSP(floor=1e9, **off), kinds, len(spans))
            np.testing.assert_allclose(found, 1 / len(spans), atol=1e-7)


def test_how_uneven_strengths_are_does_not_depend_on_the_number_of_clients() -> None:
    for clients in (1, 2, 5, 40):
        vectors = in_one_dimension(*np.linspace(0, 1, clients))
        strength = w_of(FedGSP(complementing=0.0, gamma=1.0), vectors, clients)
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
    spectral = w_of(FedGSP(complementing=0.0), vectors, 3)
    control = w_of(FedGSP(complementing=0.0, strengths="control"), vectors, 3)
    torch.testing.assert_close(control, uniform_self_weight(spectral))


def test_a_client_keeps_a_share_of_its_own_model() -> None:
    vectors = two_kinds(4, 2, 2, 6)
    for strengths in ("spectral", "control"):
        plain, kept, alone = (
            w_of(FedGSP(strengths=strengths, self_weight=share), vectors, 4)
            for share in (0.0, 0.3, 1.0)
        )
        torch.testing.assert_close(kept, 0.3 * torch.eye(4) + 0.7 * plain)
        torch.testing.assert_close(alone, torch.eye(4).double())


# The authors' settings ---------------------------------------------------------------------------


def code_form(**chosen: object) -> FedGSP:
    method = create("fedgsp", {"code": True, **chosen})
    assert isinstance(method, FedGSP)
    return method


def test_a_sweep_of_the_authors_code_by_hand() -> None:
    """R and S from the first W, cosines of mean angles, then the W step to its end."""
    method, vectors = code_form(gamma=1.6), two_kinds(5, 2, 3, 6)
    assert (method.sharing, method.complementing) == (1.2, 0.25)
    w = (1 - np.eye(5)) / 4
    laplacian = np.diag(w.sum(axis=1)) - w
    cosines = {}
    for name, found in vectors.items():
        x = found.numpy().swapaxes(1, 2).reshape(5, -1)  # t vectors over both orders
        inverse = 1 / (np.einsum("il,ij,jl->l", x, laplacian, x) + 1e-10)
        rows = (10_000 * inverse / inverse.sum() * x).reshape(5, 3, 12)
        angles = [[mean_angle(a, b) if a is not b else 0 for b in rows] for a in rows]
        cosines[name] = np.cos(angles)
        np.fill_diagonal(cosines[name], 1)
    t = 0.25 * cosines["heterophily"] - 1.2 * cosines["homophily"]
    expected = np.stack([projected_on_simplex(-row / 3.2) for row in t])
    np.testing.assert_allclose(w_of(method, vectors, 5), expected, atol=1e-10)


def test_the_authors_code_sweeps_once_in_a_round() -> None:
    method = code_form(order=2, vectors=2, exchange=4)
    federation = small_federation()
    simulation = simulate(method, federation)
    seen = []
    for _ in range(6):
        simulation.advance()
        seen.append(simulation.states[0]["strength"].clone())
    vectors = {n: simulation.memory[n].view(4, 4, 2, 6).double() for n in method.kinds}
    own = {n: v[:, :2].transpose(0, 1).unsqueeze(2) for n, v in vectors.items()}
    joint = {n: v[:, 2:] for n, v in vectors.items()}
    orders, mlp = others_first(4).expand(2, -1, -1), others_first(4)
    for k, strength in enumerate(seen):
        if k < 4:
            orders, mlp = method.solve(own, orders)[0], method.solve(joint, mlp)[0]
        torch.testing.assert_close(strength[:, 1:3].transpose(0, 1), orders)
        torch.testing.assert_close(strength[:, 0], mlp)  # order 0 follows the bases side by side
        torch.testing.assert_close(strength[:, 3], mlp)
    assert not torch.equal(seen[0], seen[1])
    assert 0 <= method.unsettled(simulation.states[0]) <= 3


@pytest.mark.parametrize("clients", [5, 10])
def test_with_the_authors_values_clients_keep_to_themselves(clients: int, real_data: Path) -> None:
    federation = load(
        "cora",
        partition="metis",
        clients=clients,
        split="0.2,0.4,0.4:global",
        normalize="row",
        root=real_data,
    )
    chosen = {**published("fedgsp", "cora", "metis", clients).hyperparameters, "order": 2}
    own = {}
    for form in ("code", "paper"):
        method = create("fedgsp", {**chosen, form: True})
        assert isinstance(method, FedGSP)
        cohort = cohort_of(federation.clients)
        network = method.build("unifilter", Shape(cohort.num_features, 7, hidden=2), 0)
        shared = {n: p[0].detach() for n, p in network.named_parameters()}
        state = method.init_server_state(shared, clients)
        sent = method.init_client_state(cohort, network, {})
        model = {f"model/{n}": p.expand(clients, *p.shape) for n, p in shared.items()}
        for _ in range(3):
            state = method.aggregate(state, Uploads(tuple(range(clients)), model | sent), NO_RNG)
        own[form] = state["strength"].diagonal(dim1=0, dim2=2)
    assert float(own["code"].min()) > 0.3 + 1 / clients
    np.testing.assert_allclose(own["paper"], 1 / clients, atol=1e-6)


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
        w_of(method, {"homophily": x, "heterophily": torch.zeros_like(x)}, 3) for x in problems
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


def test_the_alternation_goes_on_until_it_has_converged() -> None:
    """A sweep a round comes to what a hundred sweeps in the first round come to."""
    slow, state = tiny_server(sweeps=1, gamma=0.3)
    fast, _ = tiny_server(gamma=0.3)
    expected = fast.aggregate(state, sent((0, 1, 2)), NO_RNG)
    assert fast.unsettled(expected) == 0
    rounds = 0
    state = slow.aggregate(state, sent((0, 1, 2)), NO_RNG)
    assert slow.unsettled(state) > 0
    while slow.unsettled(state):
        state, rounds = slow.aggregate(state, sent((0, 1, 2)), NO_RNG), rounds + 1
        assert rounds < 100
    torch.testing.assert_close(state["strength"], expected["strength"], atol=1e-7, rtol=0)


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


OTHER_VALUES: dict[str, object] = {
    "order": 3,
    "tau": 0.2,
    "vectors": 1,
    "gamma": 0.6,
    "sharing": 0.7,
    "complementing": 0.4,
    "self_weight": 0.4,
    "compare": "vectors",
    "attention": "both",
    "scale": "terms",
    "floor": 0.4,
    "overall": "bases",
    "leash": 0.6,
    "strengths": "control",
    "sweeps": 2,
    "exchange": 0,
    "coefficients": "order",
    "coefficient_lr": 0.02,
    "coefficient_weight_decay": 0.1,
}
BESIDE: dict[str, dict[str, object]] = {
    "default": {},
    "paper": {"paper": True, "attention": "homophily"},
    "code": {"code": True, "overall": "orders"},
    "no sharing": {"sharing": 0.0},
    "no sharing, both learnt": {"sharing": 0.0, "attention": "both"},
    "no complementing": {"complementing": 0.0},
    "neither": {"sharing": 0.0, "complementing": 0.0},
    "control": {"strengths": "control"},
    "alone": {"self_weight": 1.0},
    "no exchange": {"exchange": 0},
    "order 0": {"order": 0},
}


@pytest.mark.parametrize("beside", BESIDE)
def test_each_option_changes_the_result_or_is_refused(beside: str) -> None:
    federation, given = small_federation(), {"order": 2, **BESIDE[beside]}
    assert set(OTHER_VALUES) == set(FedGSP.hyperparameters())
    method = create("fedgsp", given)
    plain = simulate(method, federation, 2)
    expected = plain.predict(plain.received())
    for name, value in OTHER_VALUES.items():
        if getattr(method, name) == value:
            continue
        other = simulate(create("fedgsp", {**given, name: value}), federation, 2)
        found = other.predict(other.received())
        assert torch.isfinite(found).all(), name
        idle = name in method.without_effect()
        assert torch.equal(found, expected) is idle, name
        if idle:
            with pytest.raises(UserError, match=f"'{name}' has no effect here: .*; set "):
                check_effects(method, [name])


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
        for form in ({}, {"paper": True}, {"code": True}):
            method = create("fedgsp", {**form, **case.hyperparameters})
            check_effects(method, set(case.hyperparameters) - {"sharing", "complementing"})
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
