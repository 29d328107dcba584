"""Polyphony: its mix, audition and loss against plain computations, and what stays at home."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from cases import simulate, small_federation
from effects import changes_predictions
from polyphily.core.method import create, sizes_of, travels
from polyphily.engines.simulation import Simulation
from polyphily.errors import UserError
from polyphily.graphs.graph import Graph, Masks
from polyphily.graphs.loading import Federation
from polyphily.methods.polyphony.audition import (
    held_out,
    posterior,
    responsibilities,
    sharpened,
)
from polyphily.methods.polyphony.method import AUDITION, PARTS, Polyphony
from polyphily.methods.polyphony.voices import MIX
from polyphily.nn.choir import mix
from polyphily.nn.segments import Segments
from polyphily.testing.examples import federation_of, with_clients

CHOIR = {"backbone": "choir", "hidden": 8, "layers": 2}
SMALL = {"mixing": "own", "fewest": 0, "held": 0.2}  # an audition, of small clients, too


def polyphony(**options: Any) -> Polyphony:
    method = create("polyphony", {**SMALL, **options})
    assert isinstance(method, Polyphony)
    return method


def sing(
    method: Polyphony, rounds: int, federation: Federation | None = None, **options: Any
) -> Simulation:
    return simulate(method, federation or small_federation(), rounds, **CHOIR, **options)


# The mix -----------------------------------------------------------------------------------------


def test_a_mix_is_the_weighted_mean_of_probabilities() -> None:
    logits = torch.randn(3, 5, 4, dtype=torch.float64)
    weights = torch.rand(5, 3, dtype=torch.float64).softmax(dim=1)
    found = mix(logits.log_softmax(dim=2), weights).exp()
    for node in range(5):
        expected = sum(weights[node, v] * logits[v, node].softmax(dim=0) for v in range(3))
        torch.testing.assert_close(found[node], expected)


def test_predictions_are_the_mix_of_the_voices() -> None:
    simulation = sing(polyphony(), 3)
    view = simulation.received()
    weights = view.params[MIX]
    parts = [view.forward(), simulation.trained().forward()]  # as received, as trained
    voices = torch.cat([part.voices[:4] for part in parts]).softmax(dim=2)
    owner = simulation.cohort.segments.owner
    expected = torch.einsum("vnc,nv->nc", voices, weights[owner])
    torch.testing.assert_close(simulation.predict(view).exp(), expected)
    assert weights.std(dim=0).max() > 0, "clients have the same mix"


def test_a_single_voice_without_labels_is_fedavg() -> None:
    one = polyphony(voices="gcn", labels="none", renditions="shared")
    found = sing(one, 3, dropout=0.3)
    plain = simulate(
        create("fedavg"), small_federation(), 3, hidden=8, layers=2, backbone="gcn", dropout=0.3
    )
    for name, value in plain.received().params.items():
        torch.testing.assert_close(found.received().params[f"voices.0.{name}"], value)


def test_voices_are_even_before_anything_is_heard_and_own_renditions_have_their_share() -> None:
    weights = sing(polyphony(own_share=0.4, voices="gcn,mlp"), 0).received().params[MIX]
    torch.testing.assert_close(weights[0], weights.new_tensor([0.3, 0.3, 0.2, 0.2]))
    alone = sing(polyphony(renditions="shared"), 0).received().params[MIX]
    torch.testing.assert_close(alone[0], torch.full_like(alone[0], 1 / 4))


@pytest.mark.parametrize(
    ("labels", "expected"),
    [("most", (1, 2, 3)), ("all", (0, 1, 2, 3)), ("residual", (2,)), ("none", ())],
)
def test_which_voices_see_labels(labels: str, expected: tuple[int, ...]) -> None:
    method = polyphony(voices="gpr-gnn,acm-gcn,res-gcn", solo="gcn", labels=labels)
    assert method.labelled == expected
    widths = {"gpr-gnn": "convs.0.", "acm-gcn": "convs.0.", "res-gcn": "input.", "gcn": "convs.0."}
    network = sing(method, 0).network
    plain = small_federation().clients[0].features.shape[1]
    for v, name in enumerate(method.all_voices):
        seen = {
            p.shape[1]
            for n, p in network.named_parameters()
            if n.startswith(f"voices.{v}.{widths[name]}") and p.dim() == 3
        }
        assert (plain in seen) == (v not in expected), name


# The audition ------------------------------------------------------------------------------------


def test_em_against_plain_loops() -> None:
    rng = np.random.default_rng(0)
    sizes, trust = (4, 0, 7), 3.0
    likelihood = rng.normal(size=(11, 3))
    start, prior = rng.dirichlet(np.ones(3), size=3), rng.dirichlet(np.ones(3), size=3)
    segments = Segments(sizes, torch.device("cpu"))
    found = responsibilities(
        *(torch.from_numpy(a) for a in (likelihood, start, prior)), trust, segments
    )
    row = 0
    for client, size in enumerate(sizes):
        weights = start[client]
        for _ in range(5):
            parts = np.zeros(3)
            for node in range(row, row + size):
                share = weights * np.exp(likelihood[node])
                parts += share / share.sum()
            weights = (trust * prior[client] + parts) / (trust + size)
        np.testing.assert_allclose(found[client], parts)
        row += size


@given(st.integers(0, 10_000), st.integers(1, 30), st.floats(0.1, 50))
def test_em_never_lowers_the_posterior(seed: int, nodes: int, trust: float) -> None:
    """The objective is sum_i log sum_v w_v p_iv + τ sum_v w̄_v log w_v."""
    rng = np.random.default_rng(seed)
    likelihood = torch.from_numpy(rng.normal(scale=2, size=(nodes, 3)))
    prior = torch.from_numpy(rng.dirichlet(np.ones(3), size=1)).clamp(min=1e-3)
    segments = Segments((nodes,), torch.device("cpu"))

    def value(weights: Tensor) -> float:
        data = (likelihood.exp() @ weights[0]).log().sum()
        return float(data + trust * (prior * weights.log()).sum())

    start = torch.full((1, 3), 1 / 3, dtype=torch.float64)
    after = posterior(responsibilities(likelihood, start, prior, trust, segments), prior, trust)
    again = posterior(responsibilities(likelihood, after, prior, trust, segments), prior, trust)
    assert value(start) <= value(after) + 1e-9
    assert value(after) <= value(again) + 1e-9


def test_a_client_that_heard_nothing_sings_as_the_federation() -> None:
    prior = torch.tensor([[0.2, 0.8]])
    torch.testing.assert_close(posterior(torch.zeros(1, 2), prior, 20.0), prior)
    assert posterior(torch.tensor([[9.0, 1.0]]), prior, 1e-9)[0, 0] == pytest.approx(0.9)


def test_a_sharper_mix_against_plain_numbers() -> None:
    even = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    weights = torch.tensor([[0.6, 0.3, 0.1]], dtype=torch.float64)
    expected = torch.tensor([[0.5 * 1.2**2, 0.3, 0.2 * 0.5**2]], dtype=torch.float64)
    found = sharpened(weights, even, 2.0)
    torch.testing.assert_close(found, expected / expected.sum())
    torch.testing.assert_close(sharpened(weights, even, 1.0), weights)
    torch.testing.assert_close(sharpened(even.unsqueeze(0), even, 3.0), even.unsqueeze(0))
    none = torch.tensor([1.0, 0.0])
    assert sharpened(none.unsqueeze(0), none, 2.0).isfinite().all(), "own_share=0"


def test_held_out_nodes_are_a_share_and_stay_the_same() -> None:
    simulation = sing(polyphony(), 1)
    cohort = simulation.cohort
    held, segments = held_out(cohort, 0.3, 0)
    assert segments.sizes == tuple(round(0.3 * size) for size in cohort.train_segments.sizes)
    again, _ = held_out(sing(polyphony(), 0).cohort, 0.3, 0)
    assert torch.equal(held, again)
    alone = sing(polyphony(), 0).cohort.take([1])
    start, stop = segments.pointers[1:3]
    own = held_out(alone, 0.3, 0)[0]
    assert torch.equal(own + cohort.train_segments.pointers[1], held[start:stop])


def test_clients_with_few_train_nodes_hold_none_out_and_mix_as_the_federation_does() -> None:
    cohort = sing(polyphony(), 0).cohort
    sizes = cohort.train_segments.sizes
    fewest = max(sizes)
    assert min(sizes) < fewest
    _, segments = held_out(cohort, 0.3, fewest)
    assert segments.sizes == tuple(round(0.3 * n) if n == fewest else 0 for n in sizes)
    simulation = sing(polyphony(fewest=fewest), 3)
    mixes, shared = simulation.received().params[MIX], simulation.servers[0].state[MIX]
    before = sing(polyphony(fewest=fewest), 2).servers[0].state[MIX]  # that of the last round
    federation = polyphony().sharpen(before.unsqueeze(0))[0]
    for own, size in zip(mixes, sizes, strict=True):
        assert torch.allclose(own, federation) == (size < fewest)
    assert shared.std() > 0, "the federation has heard nothing"


def test_without_a_large_client_the_mix_is_even() -> None:
    found = sing(polyphony(fewest=1000), 3)
    even = sing(polyphony(mixing="even"), 3)
    for name, value in even.received().params.items():
        torch.testing.assert_close(found.received().params[name], value)


def relabelled(federation: Federation, among: str) -> Federation:
    """Give other labels to the held-out train nodes, or to the others."""
    simulation = sing(polyphony(), 0, federation)
    held, _ = held_out(simulation.cohort, 0.2, 0)
    chosen = torch.zeros(len(simulation.cohort.train_nodes), dtype=torch.bool)
    chosen[held] = True
    nodes = simulation.cohort.train_nodes[chosen if among == "held" else ~chosen].numpy()
    changed, start = [], 0
    for graph in federation.clients:
        labels = graph.labels.copy()
        own = nodes[(nodes >= start) & (nodes < start + graph.num_nodes)] - start
        labels[own] = (labels[own] + 1) % len(federation.classes)
        changed.append(replace(graph, labels=labels))
        start += graph.num_nodes
    return with_clients(federation, changed)


@pytest.mark.parametrize("audition", [1, 5])
def test_voices_do_not_learn_from_held_out_nodes_until_the_concert(audition: int) -> None:
    method = polyphony(audition=audition, together=0.0, voices="gcn,res-gcn")
    federation = small_federation()
    first = sing(method, 2, federation).received().params
    second = sing(method, 2, relabelled(federation, "held")).received().params
    alike = all(torch.equal(first[name], second[name]) for name in first if name != MIX)
    assert not torch.equal(first[MIX], second[MIX])
    assert alike == (audition == 5)
    third = sing(method, 2, relabelled(federation, "others")).received().params
    assert not all(torch.equal(first[name], third[name]) for name in first)


def test_the_server_adds_up_what_clients_heard() -> None:
    method = polyphony(decay=0.5)
    simulation = sing(method, 1)
    parts = simulation.memory[PARTS]  # (1 - decay) of what each client has heard
    torch.testing.assert_close(simulation.servers[0].state[PARTS], parts.sum(dim=0))
    shared = simulation.servers[0].state[MIX]
    even = parts.new_tensor(
        [0.75 / 4] * 4 + [0.25 / 4] * 4
    )  # own renditions: a quarter, all together
    expected = (20 * even + parts.sum(dim=0)) / (20 + parts.sum())
    torch.testing.assert_close(shared, expected)
    before = parts.clone()
    simulation.advance()
    heard = (simulation.memory[PARTS] - 0.5 * before) / 0.5
    _, segments = held_out(simulation.cohort, 0.2, 0)
    torch.testing.assert_close(heard.sum(dim=1), segments.counts.to(heard))


def test_clients_prefer_the_voice_that_suits_them() -> None:
    """One client's classes are in its features, the other's in its edges only."""
    rng = np.random.default_rng(0)

    def graph(informative: bool) -> Graph:
        size = 200
        labels = rng.integers(0, 2, size)
        signal = np.where(labels == 1, 1.0, -1.0)[:, None] * np.ones(4)
        features = rng.normal(size=(size, 4)) + (1.5 * signal if informative else 0)
        same = labels[:, None] == labels
        chance = 0.05 if informative else np.where(same, 0.1, 0.002)
        edges = np.stack(np.nonzero(np.triu(rng.random((size, size)) < chance, 1)))
        train = rng.random(size) < 0.5
        masks = Masks(train, ~train, np.zeros(size, dtype=bool))
        return Graph.build(features.astype(np.float32), edges, labels, masks=masks)

    method = polyphony(voices="mlp,gcn", labels="none", trust=5.0, held=0.3)
    simulation = sing(method, 20, federation_of([graph(True), graph(False)]), lr=0.02)
    weights = simulation.received().params[MIX]
    perceptron = weights[:, 0] + weights[:, 2]  # as received, and as the client trained it
    assert perceptron[0] > perceptron[1] + 0.2
    even = sing(replace(method, mixing="federation"), 5, federation_of([graph(True), graph(False)]))
    shared = even.received().params[MIX]
    assert torch.equal(shared[0], shared[1])


# The loss ----------------------------------------------------------------------------------------


def test_the_loss_against_a_plain_computation() -> None:
    """In the concert, with all labels hidden: a sum of cross-entropies, and that of the mix."""
    method = polyphony(hidden_share=1.0, audition=1, together=0.7, voices="gcn,res-gcn")
    simulation = sing(method, 2)
    cohort, clients = simulation.cohort, simulation.clients
    local = clients.received(
        simulation.download(simulation.placement.members), simulation.memory, 2
    )
    local.draws = cohort.draws(2)
    weights = local.params[MIX]
    local.phase, local.constants = False, {MIX: weights}
    with torch.enable_grad():
        found = method.loss(replace_dropout(local))
    plain = replace_dropout(local)
    none = torch.zeros_like(cohort.train_labels, dtype=torch.bool)
    with torch.no_grad():
        voices = method.sing(plain, none).voices[:2, cohort.train_nodes]
    owner = cohort.train_segments.owner
    for client in range(len(cohort)):
        own = owner == client
        labels = cohort.train_labels[own]
        expected = sum(F.cross_entropy(voices[v][own], labels) for v in range(2))
        mixed = sum(
            (weights[client, v] + weights[client, v + 2]) * voices[v][own].softmax(dim=1)
            for v in range(2)
        )
        expected = expected + 0.7 * F.nll_loss(mixed.log(), labels)
        torch.testing.assert_close(found[client].detach(), expected)


def replace_dropout(local: Any) -> Any:
    """Switch dropout off."""
    for voice in local.network.voices:
        voice.shape = replace(voice.shape, dropout=0.0, input_dropout=0.0)
    return local


def test_labelled_voices_learn_from_hidden_nodes_only() -> None:
    """A voice that saw the labels it must predict would reach a loss of nearly zero at once."""
    method = polyphony(voices="res-gcn", hidden_share=0.5)
    simulation = sing(method, 40, lr=0.03, dropout=0.0, input_dropout=0.0)
    view = simulation.received()
    cohort = simulation.cohort
    none = torch.zeros_like(cohort.train_labels, dtype=torch.bool)
    with torch.no_grad():
        hidden = method.sing(view, none).voices[:, cohort.train_nodes]
        shown = method.sing(view, ~none).voices[:, cohort.train_nodes]
    assert not torch.equal(hidden, shown)
    assert all(v in simulation.network.labelled for v in range(1))


# What travels ------------------------------------------------------------------------------------


def test_norms_and_solo_voices_stay_at_home() -> None:
    method = polyphony(solo="gcn")
    simulation = sing(method, 2)
    params = simulation.received().params
    home = {n for n in params if not travels(method, simulation.network, n)}
    assert any(n.startswith("voices.4.") for n in home)
    apart = ("voices.4.", "own.", MIX)
    assert home == {n for n in params if n.startswith(apart) or simulation.network.is_norm(n)}
    sent = sizes_of(method, simulation.network, 3).parameters
    assert not home & set(sent)
    for name in params.keys() - home:
        assert torch.equal(params[name][0], params[name][1]), name
    moved = [n for n in home if "weight" in n and not torch.equal(params[n][0], params[n][1])]
    assert {n.split(".")[0] for n in moved} == {"voices", "own"}
    shared = sing(polyphony(private="none"), 2).received().params
    voices = {n: t for n, t in shared.items() if n.startswith("voices.")}
    assert all(torch.equal(t[0], t[1]) for t in voices.values())


def test_the_audition_is_heard_in_its_rounds_only() -> None:
    method = polyphony(audition=2)
    simulation = sing(method, 1)
    server = simulation.servers[0]
    assert PARTS in server.upload_contract(1).shapes
    assert PARTS not in server.upload_contract(2).shapes
    assert [method.stage(r) for r in range(3)] == ["audition", "audition", "concert"]
    simulation.advance()
    before = {n: server.state[n].clone() for n in (PARTS, MIX)}
    simulation.advance()
    assert all(torch.equal(server.state[n], t) for n, t in before.items())


def test_sums_are_enough_for_the_server() -> None:
    method = polyphony()
    simulation = sing(method, 0)
    assert method.reason_against_sums(sizes_of(method, simulation.network, 3)) is None


def test_noise_cannot_make_a_weight_negative() -> None:
    simulation = sing(polyphony(), 0, dp="epsilon=0.5")
    for _ in range(3):
        simulation.advance()
    weights = simulation.servers[0].state[MIX]
    assert (weights >= 0).all()
    assert float(weights.sum()) == pytest.approx(1)


# Options -----------------------------------------------------------------------------------------

FORMS = [
    {},
    {"mixing": "even"},
    {"together": 1.0, "voices": "gpr-gnn,res-gcn"},
    {"mixing": "federation"},
    {"labels": "none"},
    {"voices": "gcn"},
    {"audition": 0},
    {"voices": "gcn", "renditions": "shared"},
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_options_act_or_are_said_to_be_without_effect(form: dict[str, Any]) -> None:
    method = polyphony(**{"audition": 1, "held": 0.3, "voices": "gcn,res-gcn", **form})
    idle = method.without_effect()
    for name in (
        "labels",
        "hidden_share",
        "private",
        "renditions",
        "own_share",
        "together",
        "mixing",
        "audition",
        "held",
        "fewest",
        "trust",
        "decay",
        "sharpness",
    ):
        # In the first round a voice's renditions are one: its audition tells nothing.
        longer = name in {*AUDITION, "mixing"} - {"audition"} and method.audition
        tried = replace(method, audition=2) if longer else method
        if name == "fewest":  # the largest client's train nodes: one more, and nobody is heard
            sizes = [int(graph.masks.train.sum()) for graph in small_federation().clients]
            tried = replace(tried, fewest=max(sizes))
        assert changes_predictions(tried, name) == (name not in idle), name


@pytest.mark.parametrize(
    "wrong",
    [
        *(
            {"held": 0.95},
            {"hidden_share": 1.5},
            {"decay": 1.0},
            {"trust": -1.0},
            {"audition": -1},
            {"fewest": -1},
            {"sharpness": -1.0},
            {"own_share": 1.5},
        ),
        *({"voices": ""}, {"voices": "nothing"}, {"voices": "choir"}),
        {"voices": "unifilter", "labels": "all"},
    ],
    ids=str,
)
def test_mistakes_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        create("polyphony", wrong)


def test_a_mix_of_many_clients_is_that_of_each_alone() -> None:
    """A client's part of a round depends on itself alone."""
    method, federation = polyphony(), small_federation()
    both = sing(method, 1, federation)
    alone = sing(method, 1, with_clients(federation, federation.clients[:1]))
    torch.testing.assert_close(both.memory[PARTS][:1], alone.memory[PARTS])
    assert math.isfinite(float(both.memory[PARTS].sum()))
