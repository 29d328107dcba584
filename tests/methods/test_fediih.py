"""FedIIH: its server and its bound, compared with plain loops, and what each part changes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F

from builders import random_cohort
from cases import federation_of, simulate, small_federation
from effects import changes_predictions
from polyphily.core.local import Local
from polyphily.core.messages import Message, State, Uploads, model_part
from polyphily.core.method import create
from polyphily.engines.simulation import Simulation
from polyphily.methods.fedath.network import edge_segments
from polyphily.methods.fedavg import FedAvg
from polyphily.methods.fediih import FedIIH
from polyphily.methods.fediih.network import (
    VariationalGNN,
    distance_of_centres,
    divergence,
    encode,
    partners,
    reconstruction,
    sampled,
)
from polyphily.methods.fediih.server import similarity, strengths
from polyphily.nn.disengcn import DisenGCN

BASES: dict[str, dict[str, object]] = {
    "default": {},
    "paper": {"paper": True},
    "code": {"code": True},
    "even": {"weights": "even"},
    "control": {"weights": "control"},
}
EVERYONE = torch.ones(3, dtype=torch.bool)


def close(found: Tensor, wanted: Tensor, within: float) -> None:
    torch.testing.assert_close(found, wanted, rtol=within, atol=within)


def random_like(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def started(simulation: Simulation) -> Local:
    """Return the local view at the start of the next round, with its draws."""
    local = simulation.received()
    local.params = {n: p.clone().requires_grad_() for n, p in local.params.items()}
    local.draws = local.cohort.draws(simulation.round)
    return local


def column(*values: float) -> Tensor:
    """Return one number per client as `[clients, 1 factor, width 1]`."""
    return torch.tensor(values, dtype=torch.float64).view(-1, 1, 1)


# The server --------------------------------------------------------------------------------------


def test_similarities_and_weights_of_two_clients() -> None:
    alike = similarity(column(0, 1), column(0, 0))
    close((1 - alike[0, 0, 1]) * math.log(2), torch.tensor(0.125).double(), 1e-12)
    assert alike[0, 0, 1].item() == pytest.approx(0.8197, abs=5e-5)
    beta = strengths(alike, EVERYONE[:2], 10.0, "factors")
    assert beta[0, 0].tolist() == pytest.approx([0.8586, 0.1414], abs=5e-5)


def test_similarity_of_two_variances() -> None:
    alike = similarity(column(2, 2), column(0, math.log(4)))
    assert ((1 - alike[0, 0, 1]) * math.log(2)).item() == pytest.approx(0.1116, abs=5e-5)


def test_similarity_is_one_less_the_divergence_from_the_middle() -> None:
    mean, logvar = random_like(3, 2, 5), random_like(3, 2, 5, seed=1)
    found = similarity(mean, logvar)
    for q in range(2):
        for i in range(3):
            for j in range(3):
                one, two = (Normal(mean[k, q], logvar[k, q].exp().sqrt()) for k in (i, j))
                middle = Normal(
                    (one.mean + two.mean) / 2, ((one.variance + two.variance) / 2).sqrt()
                )
                js = (kl_divergence(one, middle) + kl_divergence(two, middle)).sum() / 2
                close(found[q, i, j], 1 - js / math.log(2), 1e-10)


def test_the_federations_centre_is_shrunk() -> None:
    method = FedIIH(factors=1)
    shared = {"project.bias": torch.zeros(1).double()}
    state = method.init_server_state(shared, 3)
    assert method.download(state, [0])["alpha"].item() == 0
    sent = {
        "model/project.bias": torch.zeros(3, 1).double(),
        "mean": column(1, 2, 3),
        "logvar": column(0, 0, 0),
    }
    after = method.aggregate(state, Uploads((0, 1, 2), sent), np.random.default_rng(0))
    assert method.download(after, [0])["alpha"].item() == pytest.approx(1.8462, abs=5e-5)


def sent_by(method: FedIIH, clients: int = 4) -> tuple[Simulation, State, Uploads]:
    """Return a federation, its first state, and random uploads of its clients."""
    simulation = simulate(method, small_federation())
    server = simulation.servers[0]
    shapes = server.upload_contract(0).shapes
    tensors = {n: random_like(clients, *s, seed=i) for i, (n, s) in enumerate(shapes.items())}
    return simulation, server.state, Uploads(tuple(range(clients)), tensors)


@pytest.mark.parametrize("encoder", ["both", "labels"])
@pytest.mark.parametrize("weights", ["factors", "averaged", "control", "even"])
def test_every_slice_is_mixed_by_the_weights_of_its_factor(weights: str, encoder: str) -> None:
    method = FedIIH(weights=weights, encoder=encoder, temperature=0.5)
    _, state, uploads = sent_by(method)
    after = method.aggregate(state, uploads, np.random.default_rng(0))
    sent = method.download(after, range(4))
    scores = 0.5 * similarity(uploads["mean"], uploads["logvar"])
    if weights == "averaged":
        scores = scores.mean(dim=0).expand(2, -1, -1)
    beta = scores.softmax(dim=2)
    if weights == "control":
        own = [beta[q].diagonal().mean() for q in range(2)]
        beta = torch.stack([(1 - o) / 3 + torch.eye(4).double() * (o - (1 - o) / 3) for o in own])
    if weights == "even":
        beta = torch.full((2, 4, 4), 0.25).double()
    for i in range(4):
        for q, own in enumerate((slice(0, 4), slice(4, 8))):
            for name, at in {
                "project.weight": (slice(None), own),
                "project.bias": (own,),
                "head.weight": (own,),
                **({"spread": (q,), "spread_bias": (q,)} if encoder == "both" else {}),
            }.items():
                parts = uploads[f"model/{name}"]
                wanted = sum(beta[q, i, j] * parts[j][at] for j in range(4))
                assert isinstance(wanted, Tensor)
                close(sent[f"model/{name}"][i][at], wanted, 1e-12)
        close(sent["model/head.bias"][i], uploads["model/head.bias"].mean(dim=0), 1e-12)
    close(method.collaboration(after), beta.mean(dim=0), 1e-12)


@pytest.mark.parametrize("weights", ["factors", "control"])
def test_clients_that_do_not_answer(weights: str) -> None:
    method = FedIIH(weights=weights, temperature=0.5)
    _, state, uploads = sent_by(method)
    rng = np.random.default_rng(0)
    some = Uploads((3, 1), {n: t[[3, 1]] for n, t in uploads.tensors.items()})
    after = method.aggregate(state, some, rng)
    beta = after["strength"]
    close(beta.sum(dim=2), torch.ones(4, 3).double(), 1e-12)
    assert beta[:, :, [0, 2]].abs().max() == 0  # not heard yet: they have no weight
    plain = method.download(after, [0])
    for name, value in model_part(some.tensors).items():
        close(plain[f"model/{name}"][0], value.mean(dim=0), 1e-12)
    close(plain["alpha"][0], some["mean"].sum(dim=0) / 2.25, 1e-12)
    rest = Uploads((0, 2), {n: t[[0, 2]] for n, t in uploads.tensors.items()})
    late = method.aggregate(after, rest, rng)  # 1 and 3 are represented by what they sent
    at_once = method.aggregate(state, uploads, rng)
    for name, value in at_once.items():
        close(late[name].double(), value.double(), 1e-12)


def test_even_weights_without_a_bound_are_those_of_fedavg() -> None:
    method = FedIIH(encoder="labels", weights="even")
    federation, settings = small_federation(), {"backbone": "disengcn", "dropout": 0.3}
    mine = simulate(method, federation, 3, **settings)
    fedavg = simulate(FedAvg(weighting="uniform"), federation, 3, **settings)
    assert isinstance(fedavg.network, DisenGCN)
    assert not isinstance(mine.network, VariationalGNN)
    for name, value in fedavg.received().params.items():
        close(mine.received().params[name], value, 1e-10)


@pytest.mark.parametrize("other", ["averaged", "control", "even"])
def test_weights_of_single_factors_change_what_is_trained(other: str) -> None:
    one, two = (
        simulate(FedIIH(encoder="labels", weights=w), small_federation(), 3).received().params
        for w in ("factors", other)
    )
    assert not torch.allclose(one["project.weight"], two["project.weight"], rtol=1e-6)


def test_with_one_factor_the_averaged_similarity_is_that_of_the_factor() -> None:
    one, two = (
        simulate(FedIIH(factors=1, weights=w), small_federation(), 2).tensors()
        for w in ("factors", "averaged")
    )
    assert all(torch.equal(one[name], two[name]) for name in one)


# The variational model ---------------------------------------------------------------------------


def test_divergences_are_those_of_normal_distributions() -> None:
    mean, logvar, centre, alpha = (random_like(6, 5, seed=s) for s in range(4))
    prior = Normal(centre, 0.5)
    wanted = kl_divergence(Normal(mean, logvar.exp().sqrt()), prior)
    close(divergence(mean, logvar, centre), wanted, 1e-12)
    wanted = kl_divergence(prior, Normal(alpha, 0.5)) - Normal(0, 1).log_prob(centre)
    close(distance_of_centres(centre, alpha), wanted, 1e-12)


def test_samples_have_the_mean_and_variance_of_the_encoding() -> None:
    cohort = random_cohort((3000, 5))
    mean, logvar = (
        torch.full((3005, 4), 2.0).double(),
        torch.full((3005, 4), math.log(0.09)).double(),
    )
    z = sampled(mean, logvar, cohort.segments, cohort.draws(0))[:3000]
    assert z.mean().item() == pytest.approx(2.0, abs=0.01)
    assert z.std().item() == pytest.approx(0.3, abs=0.01)
    assert z.isfinite().all()


def test_every_pair_of_a_client_is_drawn_equally_often() -> None:
    cohort = random_cohort((4, 1, 3))
    counts = torch.zeros(8, 8)
    for number in range(60):
        for other in partners(cohort.segments, 5, cohort.draws(number)):
            assert sorted(other.tolist()) == list(range(8))  # nobody is drawn twice
            counts[torch.arange(8), other] += 1
    for rows in (slice(0, 4), slice(4, 5), slice(5, 8)):
        own = counts[rows, rows]
        assert own.sum() == counts[rows].sum() == 300 * len(own)
        share = own / 300
        assert (share - 1 / len(own)).abs().max() < 0.12


@pytest.mark.parametrize("balanced", [False, True])
def test_drawn_pairs_estimate_the_cross_entropy_of_all_pairs(balanced: bool) -> None:
    n = 9
    cohort = random_cohort((n, 4))
    z = random_like(n + 4, 3)
    ahead = torch.arange(n).unsqueeze(1)  # every shift of the first client once
    first = (torch.arange(n) + ahead) % n
    others = torch.cat([first, (n + torch.arange(4)).expand(n, 4)], dim=1)
    edges = edge_segments(cohort)
    found = reconstruction(z, cohort, edges, others, balanced=balanced)[0]
    joined = torch.zeros(n, n).double()
    count = edges.sizes[0]
    joined[cohort.edges.row[:count], cohort.edges.col_long[:count]] = 1
    score = z[:n] @ z[:n].T
    if balanced:
        wanted = (F.softplus(-score)[joined == 1].mean() + F.softplus(score).mean()) / 2
    else:
        wanted = F.binary_cross_entropy_with_logits(score, joined)
    close(found, wanted, 1e-12)


@pytest.mark.parametrize("form", [{}, {"paper": True}])
def test_the_bound_is_that_of_plain_loops(form: dict[str, Any]) -> None:
    method = create("fediih", {**form, "pairs": 2})
    assert isinstance(method, FedIIH)
    local = started(simulate(method, small_federation(), 2))
    network, cohort, params = local.network, local.cohort, local.params
    assert isinstance(network, DisenGCN)
    hidden = local.forward().embedding
    found = method.negative_bound(local, hidden)
    mean = network.convolve(hidden, cohort, None)
    draws = cohort.draws(2)
    noise = Normal(0, 1).icdf(draws.uniform(8, cohort.segments.pointers) + 2.0**-33)
    ahead = draws.uniform(2, range(5))
    for k, (start, stop) in enumerate(
        zip(cohort.segments.pointers[:-1], cohort.segments.pointers[1:], strict=True)
    ):
        n, own = stop - start, mean[start:stop].view(-1, 2, 4)
        logvar = torch.einsum("nqd,qde->nqe", own, params["spread"][k]) + params["spread_bias"][k]
        a, alpha = params["centre"][k], local.received["alpha"][k]
        z = own + noise[start:stop].view(-1, 2, 4) * (logvar / 2).exp()
        score = z.flatten(1) @ z.flatten(1).T
        inside = (cohort.edges.row >= start) & (cohort.edges.row < stop)
        edge = score[cohort.edges.row[inside] - start, cohort.edges.col_long[inside] - start]
        shifts = (ahead[k] * n).long().tolist()
        drawn = torch.stack([score[i, (i + s) % n] for s in shifts for i in range(n)])
        if method.edges == "balanced":
            wanted = (F.softplus(-edge).mean() + F.softplus(drawn).mean()) / 2
        else:
            wanted = F.softplus(drawn).mean() - edge.sum() / n**2
        for q in range(2):
            posterior = Normal(own[:, q], logvar[:, q].exp().sqrt())
            wanted = wanted + kl_divergence(posterior, Normal(a[q], 0.5)).mean()
            wanted = wanted + kl_divergence(Normal(a[q], 0.5), Normal(alpha[q], 0.5)).mean()
            wanted = wanted - Normal(0, 1).log_prob(a[q]).mean()
        close(found[k], wanted, 1e-9)


@pytest.mark.parametrize(("layers", "times"), [(1, 1), (2, 1), (3, 2), (5, 2)])
def test_encodings_are_routed_again(layers: int, times: int) -> None:
    local = started(simulate(FedIIH(), small_federation(), 1, layers=layers))
    network = local.network
    assert isinstance(network, VariationalGNN)
    hidden = mean = local.forward().embedding
    for _ in range(times):
        mean = network.convolve(mean, local.cohort, None)
    found, logvar = encode(network, local.params, hidden, local.cohort)
    close(found, mean, 1e-12)
    assert not torch.allclose(found, logvar, atol=0.1)


@pytest.mark.parametrize("encoder", ["both", "bound", "labels"])
def test_what_is_sent_is_the_mean_encoding_without_dropout(encoder: str) -> None:
    simulation = simulate(FedIIH(encoder=encoder), small_federation(), 2, dropout=0.5)
    local = simulation.trained()
    assert isinstance(local.network, DisenGCN)
    upload = simulation.method.upload(local)
    hidden = local.forward().embedding
    found = encode(local.network, local.params, hidden, local.cohort)
    for name, values in zip(("mean", "logvar"), found, strict=True):
        per_client = torch.stack([v.mean(dim=0) for v in values.split(local.cohort.segments.sizes)])
        close(upload[name].flatten(1), per_client, 1e-12)
    same = torch.equal(upload["mean"], upload["logvar"])
    assert same == (encoder == "labels")


# What each part trains ---------------------------------------------------------------------------


def test_in_the_papers_form_labels_reach_the_classifier_only() -> None:
    method = create("fediih", {"paper": True, "bound": 0.0})
    local = started(simulate(method, small_federation()))
    names = list(local.params)
    grads = torch.autograd.grad(
        method.loss(local).sum(), list(local.params.values()), materialize_grads=True
    )
    moved = {name for name, grad in zip(names, grads, strict=True) if grad.abs().max() > 0}
    assert moved == {"head.weight", "head.bias"}


def test_in_the_papers_form_the_bound_trains_the_encoder() -> None:
    weights = [
        simulate(create("fediih", {"paper": True, "bound": b}), small_federation(), 1)
        .trained()
        .params["project.weight"]
        for b in (0.0, 1.0)
    ]
    assert not torch.allclose(*weights, rtol=1e-3)


def test_by_default_both_losses_train_the_encoder() -> None:
    federation = small_federation()
    local = started(simulate(FedIIH(), federation))
    weight = local.params["project.weight"]
    cross_entropy = local.cross_entropy(local.forward().logits)
    method = FedIIH()
    bound = method.negative_bound(local, local.forward().embedding)
    local.draws = local.cohort.draws(0)  # the same draws again
    close(method.loss(local), cross_entropy + 0.1 * bound, 1e-12)
    for part in (cross_entropy, bound):
        (grad,) = torch.autograd.grad(part.sum(), weight, retain_graph=True)
        assert grad.flatten(1).abs().amax(dim=1).min() > 0


@dataclass(frozen=True)
class WithoutTheFederation(FedIIH):
    """FedIIH in which clients are told α = 0."""

    def download(self, state: State, clients: Any) -> Message:
        sent = super().download(state, clients)
        return {**sent, "alpha": torch.zeros_like(sent["alpha"])}


def test_the_federations_centre_reaches_the_models() -> None:
    one, two = (
        simulate(method, small_federation(), 3).received().params["project.weight"]
        for method in (FedIIH(), WithoutTheFederation())
    )
    assert not torch.allclose(one, two, rtol=1e-6)


def test_centres_stay_with_the_clients() -> None:
    simulation = simulate(FedIIH(), small_federation(), 2)
    assert "centre" in model_part(simulation.memory)
    server = simulation.servers[0]
    assert "model/centre" not in server.download(range(4))
    assert "model/centre" not in server.upload_contract(2).shapes


def test_a_client_without_edges_has_a_finite_bound() -> None:
    cohort = random_cohort((6,), density=0.0)
    federation = federation_of(list(cohort.graphs))
    simulation = simulate(create("fediih", {"paper": True}), federation, 2)
    assert all(t.isfinite().all() for t in simulation.tensors().values())


@pytest.mark.parametrize("name", FedIIH.hyperparameters())
@pytest.mark.parametrize("base", BASES)
def test_a_hyperparameter_acts_or_is_said_not_to(base: str, name: str) -> None:
    method = create("fediih", BASES[base])
    assert changes_predictions(method, name) == (name not in method.without_effect())
