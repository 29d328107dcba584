"""FedFA's augmentation, statistics and server, each against a computation written out here."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from builders import random_cohort
from cases import assert_close, assert_same_bits, simulate, small_federation
from effects import changes_predictions
from polyphily.core.messages import Uploads, model_part
from polyphily.core.method import check_effects, create
from polyphily.errors import UserError
from polyphily.methods.fedfa import EPS, AugmentedGraph, FedFA, emphasis

NO_RNG = np.random.default_rng(0)
SIZES = (24, 9, 33)
LARGE = (40, 24, 33, 16)


def method(**options: object) -> FedFA:
    made = create("fedfa", options)
    assert isinstance(made, FedFA)
    return made


# The augmentation --------------------------------------------------------------------------------


def plain(x: Tensor, groups: list[Tensor], noise: Tensor, scale: Tensor) -> Tensor:
    """The features of one client after augmentation, group by group as the paper writes it."""
    means = [x[b].mean(dim=0) for b in groups]
    deviations = [(x[b].var(dim=0, correction=0) + EPS).sqrt() for b in groups]
    wide_mean = torch.stack(means).var(dim=0, correction=0) + EPS
    wide_deviation = torch.stack(deviations).var(dim=0, correction=0) + EPS
    out = torch.zeros_like(x)
    for i, b in enumerate(groups):
        beta = means[i] + noise[i, 0] * wide_mean.sqrt() * scale[0]
        alpha = deviations[i] + noise[i, 1] * wide_deviation.sqrt() * scale[1]
        out[b] = alpha * (x[b] - means[i]) / deviations[i] + beta
    return out


def test_augmentation_and_its_gradient_are_those_of_the_paper() -> None:
    cohort, width = random_cohort(SIZES), 5
    groups = method(groups=3).divide(cohort)
    assert groups.clients.sizes == (3, 1, 3)
    source = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, sum(SIZES), width, generator=source).double()
    noise = torch.randn(7, 1, 2, width, generator=source).double()
    scale = torch.rand(3, 1, 2, width, generator=source).double() + 1
    starts = cohort.segments.pointers
    order = torch.cat([a + torch.randperm(b - a, generator=source) for a, b in pairwise(starts)])

    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    moved = AugmentedGraph(cohort, groups, order, noise, scale).augment(ours)
    blocks = torch.split(order, groups.nodes.sizes)
    expected = torch.zeros(sum(SIZES), width).double()
    for k, (a, b) in enumerate(pairwise(groups.clients.pointers)):
        here = slice(starts[k], starts[k + 1])
        own = [block - starts[k] for block in blocks[a:b]]
        expected[here] = plain(theirs[here], own, noise[a:b, 0], scale[k, 0])
    torch.testing.assert_close(moved, expected)
    for grads in zip(
        torch.autograd.grad((moved * weight).sum(), ours),
        torch.autograd.grad((expected * weight).sum(), theirs),
        strict=True,
    ):
        torch.testing.assert_close(*grads)


def test_without_noise_features_stay_as_they_are() -> None:
    cohort = random_cohort(SIZES)
    groups = method().divide(cohort)
    x = torch.randn(sum(SIZES), 4).double()
    noise = torch.zeros(len(groups.nodes), 1, 2, 4).double()
    scale = torch.full((3, 1, 2, 4), 9.0).double()
    order = torch.arange(sum(SIZES)).flip(0).sort().indices
    assert torch.equal(AugmentedGraph(cohort, groups, order, noise, scale).augment(x), x)


def test_groups_have_eight_nodes_and_there_are_at_most_as_many_as_asked_for() -> None:
    cohort = random_cohort((1, 15, 16, 31, 64, 200))
    groups = method(groups=5).divide(cohort)
    assert groups.clients.sizes == (1, 1, 2, 3, 5, 5)
    ends = groups.clients.pointers
    for nodes, (a, b) in zip(cohort.segments.sizes, pairwise(ends), strict=True):
        own = groups.nodes.sizes[a:b]
        assert sum(own) == nodes
        assert max(own) - min(own) <= 1
        assert b - a == 1 or min(own) >= 8


def test_layers_are_augmented_with_their_probability_and_only_in_several_groups() -> None:
    cohort = random_cohort((40, 9))
    groups = method().divide(cohort)
    active = torch.zeros(2, 3)
    for round_index in range(300):
        noise = method(probability=0.25).noise(cohort.draws(round_index), groups, 3, 4)
        assert noise.shape == (6, 3, 2, 4)
        first = noise[:5]
        assert torch.equal(first.ne(0).flatten(2).all(2), first.ne(0).flatten(2).any(2))
        active += torch.stack([first.ne(0).flatten(2).any(2).all(0), noise[5].ne(0).any(2).any(1)])
    assert active[1].sum() == 0
    assert (active[0] / 300 - 0.25).abs().max() < 0.1


def test_noise_is_standard_normal() -> None:
    cohort = random_cohort((160,))
    noise = method(probability=1.0).noise(cohort.draws(0), method().divide(cohort), 2, 200)
    assert abs(noise.mean().item()) < 0.03
    assert noise.std().item() == pytest.approx(1, abs=0.03)
    assert (noise.abs() < 1.96).double().mean().item() == pytest.approx(0.95, abs=0.01)


def test_probability_zero_is_fedavg() -> None:
    federation = small_federation()
    settings = {"dropout": 0.4, "input_dropout": 0.2}
    ours = simulate(method(probability=0), federation, 3, **settings)
    plain = simulate("fedavg", federation, 3, **settings)
    assert_same_bits(model_part(ours.states[0]), model_part(plain.states[0]))
    assert_same_bits(model_part(ours.memory), model_part(plain.memory))
    assert set(ours.states[0]) == set(plain.states[0])


def test_predictions_are_not_augmented() -> None:
    simulation = simulate(method(probability=1.0), small_federation(LARGE), 2)
    plain = simulate("fedavg", small_federation(LARGE))
    local = plain.received()
    local.params = simulation.received().params
    torch.testing.assert_close(
        simulation.predict(simulation.received()), plain.predict(local), rtol=0, atol=0
    )


# γ and the server --------------------------------------------------------------------------------


def test_gamma_is_that_of_the_paper() -> None:
    variances = torch.tensor([[0.0, 0.5, 2.0, 100.0]]).double()
    weight = [1 / (1 + 1 / (s + EPS)) for s in variances[0].tolist()]
    expected = [4 * g / sum(weight) for g in weight]
    found = emphasis(variances)
    assert found[0].tolist() == pytest.approx(expected)
    assert found.sum().item() == pytest.approx(4)
    assert emphasis(torch.zeros(1, 6)).tolist() == [[1.0] * 6]


def sent(statistics: Tensor) -> Uploads:
    clients = len(statistics)
    tensors = {"model/w": torch.zeros(clients, 1), "weight": torch.arange(1.0, clients + 1)}
    tensors |= {"statistics": statistics, "squares": statistics.square()}
    return Uploads(tuple(range(clients)), {**tensors, "clients": torch.ones(clients)})


def test_variances_are_over_clients_in_every_channel() -> None:
    statistics = torch.randn(5, 2, 2, 7, generator=torch.Generator().manual_seed(1)).double()
    uploads = sent(statistics)
    found = method().aggregate({}, uploads, NO_RNG)["variances"]
    np.testing.assert_allclose(found.numpy(), statistics.numpy().var(axis=0), atol=1e-12)
    assert (found.flatten(1).std(dim=1) > 0.1).all()  # not one number for all channels


def test_sums_over_clients_are_enough_for_the_server() -> None:
    uploads = sent(torch.randn(4, 1, 2, 3).double())
    summed = {n: t.sum(dim=0, keepdim=True) for n, t in uploads.tensors.items()}
    found, other = (
        method().aggregate({}, up, NO_RNG)["variances"] for up in (uploads, Uploads((), summed))
    )
    torch.testing.assert_close(found, other)


def test_a_channel_that_is_shifted_between_clients_gets_more_noise() -> None:
    statistics = torch.ones(3, 1, 2, 6).double()
    statistics += 0.01 * torch.randn(statistics.shape, generator=torch.Generator().manual_seed(2))
    statistics[0, 0, 0, 4] += 1
    gamma = emphasis(method().aggregate({}, sent(statistics), NO_RNG)["variances"])
    assert gamma[0, 0, 4] > 1
    assert (gamma[0, 0, [0, 1, 2, 3, 5]] < 1).all()


def test_federated_statistics_act_from_the_second_round_on() -> None:
    federation = small_federation(LARGE)

    def trained(spread: str, rounds: int) -> dict[str, Tensor]:
        simulation = simulate(method(spread=spread, probability=1.0), federation, rounds)
        return model_part(simulation.states[0])

    assert_same_bits(trained("federation", 1), trained("even", 1))
    forms = [trained(spread, 2)["convs.0.weight"] for spread in ("federation", "even", "client")]
    plain = model_part(simulate("fedavg", federation, 2).states[0])["convs.0.weight"]
    for i, one in enumerate([*forms, plain]):
        for other in [*forms, plain][:i]:
            assert (one - other).abs().max() > 1e-3


def test_received_variances_are_the_scale_of_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = simulate(method(), small_federation(LARGE), 1)
    scales: list[Tensor] = []
    usual = AugmentedGraph.__init__

    def kept(self: AugmentedGraph, *arguments: object) -> None:
        scales.append(arguments[-1])
        usual(self, *arguments)

    monkeypatch.setattr(AugmentedGraph, "__init__", kept)
    gamma = emphasis(simulation.states[0]["variances"])
    assert gamma.std() > 0.1
    simulation.advance()
    torch.testing.assert_close(scales[0], (1 + gamma).sqrt().expand(4, -1, -1, -1))


# Running statistics ------------------------------------------------------------------------------


def test_running_statistics_are_weighted_means_over_steps() -> None:
    made, steps = method(decay=0.7), torch.randn(5, 2, 1, 2, 3).double()
    simulation = simulate(made, small_federation((9, 12), seed=1), hidden=3)
    local = simulation.received()
    limits = [5, 2]
    local.constants = {"end": torch.tensor(limits).double()}
    for now in steps:
        made.follow(local, now)
    assert local.memory["updates"].tolist() == limits
    found = made.upload(local)
    for k, last in enumerate(limits):
        weights = [0.7 ** (last - 1 - i) for i in range(last)]
        total = sum(w * steps[i, k] for i, w in enumerate(weights)) / sum(weights)
        torch.testing.assert_close(found["statistics"][k], total)
        torch.testing.assert_close(found["squares"][k], total.square())


def test_a_client_counts_its_own_steps_only() -> None:
    simulation = simulate(method(), small_federation(), 0, epochs="1-4")
    total = np.zeros(4)
    for round_index in range(3):
        total += simulation.clients.steps(round_index)
        simulation.advance()
    assert simulation.memory["updates"].tolist() == total.tolist()
    assert len(set(total)) > 1


def test_uploaded_statistics_are_those_of_hidden_features() -> None:
    """With groups of equal size, the mean of their means is the mean over all nodes."""
    sizes = (24, 16, 32)
    simulation = simulate(method(decay=0.0), small_federation(sizes), 1, epochs=1, layers=2)
    start = simulate("fedavg", small_federation(sizes)).received()
    features = start.forward().embedding
    found = simulation.memory["statistics"]
    for k, own in enumerate(torch.split(features, sizes)):
        torch.testing.assert_close(found[k, 0, 0], own.mean(dim=0))
        assert (found[k, 0, 1] <= (own.var(dim=0, correction=0) + EPS).sqrt() + 1e-9).all()


def test_every_hidden_layer_has_statistics() -> None:
    simulation = simulate(method(probability=1.0), small_federation(LARGE), 2, layers=3)
    variances = simulation.states[0]["variances"]
    assert variances.shape == (2, 2, 8)
    assert (variances.flatten(2).amax(dim=2) > 0).all()
    single = simulate(method(), small_federation(), 2, layers=1)
    plain = simulate("fedavg", small_federation(), 2, layers=1)
    assert_same_bits(model_part(single.states[0]), model_part(plain.states[0]))


def test_stacked_equals_sequential_with_several_groups() -> None:
    federation = small_federation(LARGE)
    settings = {"dropout": 0.3, "epochs": "1-3", "layers": 3}
    stacked, sequential = (
        simulate(method(), federation, 4, engine=engine, **settings)
        for engine in ("stacked", "sequential")
    )
    assert_close(stacked.tensors(), sequential.tensors(), 1e-7)


# For users ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form",
    [
        method(groups=2),
        method(groups=2, spread="even"),
        method(groups=2, spread="client"),
        method(groups=2, probability=0.0),
    ],
)
def test_hyperparameters_have_an_effect_or_are_refused(form: FedFA) -> None:
    idle = form.without_effect()
    for name in ("decay", "groups", "spread"):
        assert changes_predictions(form, name) == (name not in idle), name
        if name in idle:
            with pytest.raises(UserError, match=r"no effect here.*; set "):
                check_effects(form, [name])


def test_other_networks_are_refused() -> None:
    assert "unifilter" not in method().supported_backbones()
    assert {"gcn", "gat", "gpr-gnn", "acm-gcn"} <= set(method().supported_backbones())


def test_secure_aggregation_is_possible() -> None:
    simulation = simulate(method(), small_federation(LARGE), 2, secure_aggregation=True)
    plain = simulate(method(), small_federation(LARGE), 2)
    assert_close(simulation.states[0], plain.states[0], 1e-4)


def test_only_federated_statistics_travel() -> None:
    for form in (method(spread="even"), method(probability=0.0)):
        simulation = simulate(form, small_federation(), 1)
        assert "variances" not in simulation.states[0]
        sent = simulation.backend.train(range(4), [range(4)]).trained.uploads
        assert "statistics" not in sent


def test_one_client_alone_has_even_emphasis() -> None:
    statistics = torch.randn(1, 1, 2, 5).double()
    gamma = emphasis(method().aggregate({}, sent(statistics), NO_RNG)["variances"])
    torch.testing.assert_close(gamma, torch.ones_like(gamma))
