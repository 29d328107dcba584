"""FedSage and FedSage+: mended graphs, NeighGen's losses, and the exchange between clients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from cases import assert_same_bits, simulate, small_federation
from effects import changes_predictions
from polyphily.core.local import Local
from polyphily.core.messages import Message, Uploads, model_part, with_prefix
from polyphily.core.method import create
from polyphily.engines.simulation import Simulation
from polyphily.errors import UserError
from polyphily.graphs.graph import Graph
from polyphily.methods.fedsage import FedSagePlus
from polyphily.methods.fedsage.exchange import (
    answers,
    drawn_neighbours,
    exchanged,
    handed_on,
    initial,
    pairing,
    weight_shapes,
)
from polyphily.methods.fedsage.impaired import impaired
from polyphily.methods.fedsage.network import (
    FeatureGenerator,
    Mended,
    MendedSAGE,
    MendingNetwork,
    Widths,
    count_errors,
    feature_errors,
    gate,
)
from polyphily.nn.backbones import GraphSAGE, Shape
from polyphily.testing import METHOD_CHECKS, MethodCase
from polyphily.testing.examples import cohort_of, predict, random_cohort, random_parameters

SMALL = {"embedding": 8, "first_width": 8, "second_width": 8, "rows": 5}
QUICK = {**SMALL, "generator_steps": 2, "generator_rounds": 2, "partners": 2}


def plus(**values: Any) -> FedSagePlus:
    method = create("fedsage+", {**QUICK, **values})
    assert isinstance(method, FedSagePlus)
    return method


def run(method: FedSagePlus | str, rounds: int, **settings: Any) -> Simulation:
    return simulate(method, small_federation(), rounds, backbone="sage", **settings)


def classifier(simulation: Simulation) -> Message:
    """Return the shared model, by the names that it has in FedSage."""
    found = model_part(simulation.states[0])
    return {name.removeprefix("classifier."): value for name, value in found.items()}


def same(one: Message, two: Message) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)


# FedSage -----------------------------------------------------------------------------------------


def test_fedsage_is_fedavg_of_graphsage_with_equal_weights() -> None:
    fedsage = run("fedsage", 2)
    for weighting, equal in (("uniform", True), ("nodes", False)):
        fedavg = simulate(
            create("fedavg", {"weighting": weighting}), small_federation(), 2, backbone="sage"
        )
        assert same(classifier(fedavg), classifier(fedsage)) == equal
    assert create("fedsage").supported_backbones() == ("sage",)


# Losses ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "expected"), [(1.9, 0.1), (0.99, 0.0)])
def test_losses_of_one_node(count: float, expected: float) -> None:
    counts = torch.tensor([count], dtype=torch.float64)
    generated = torch.zeros(1, 5, 2, dtype=torch.float64)
    generated[0, :, 0] = 1
    targets = torch.tensor([[[0.0, 0.0], [1.0, 1.0]]], dtype=torch.float64)
    exists = gate(counts, 5, "floor")
    assert feature_errors(generated, exists, targets, None, "mean").item() == pytest.approx(
        expected
    )
    assert feature_errors(generated, exists, targets, None, "sum").item() == pytest.approx(
        10 * expected
    )
    if count == 1.9:
        assert count_errors(counts, torch.tensor([2.0])).item() == pytest.approx(0.005)


def test_feature_errors_are_distances_to_the_nearest_target_that_exists() -> None:
    rng = np.random.default_rng(0)
    x, t = rng.standard_normal((4, 3, 5)), rng.standard_normal((4, 2, 5))
    exists, present = rng.random((4, 3)) < 0.6, np.array([[1, 1], [1, 0], [0, 1], [1, 1]], bool)
    expected = [
        sum(
            min(((x[v, p] - t[v, k]) ** 2).sum() for k in range(2) if present[v, k])
            for p in range(3)
            if exists[v, p]
        )
        for v in range(4)
    ]
    tensors = [torch.from_numpy(a) for a in (x, exists.astype(float), t, present)]
    found = feature_errors(tensors[0], tensors[1], tensors[2], tensors[3], "sum")
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_a_gate_opens_as_many_slots_as_are_counted() -> None:
    counts = torch.tensor([0.0, 0.4, 0.6, 1.6, 9.0])
    assert gate(counts, 3, "nearest").sum(1).tolist() == [0, 0, 1, 2, 3]
    assert gate(counts, 3, "floor").sum(1).tolist() == [0, 0, 0, 1, 3]
    assert gate(counts, 3, "nearest")[3].tolist() == [1, 1, 0]


# Mended graphs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("sparse", [False, True])
def test_a_mended_graph_is_the_graph_with_generated_nodes_as_leaves(
    layers: int, sparse: bool
) -> None:
    cohort = random_cohort((7, 5), sparse=sparse)
    shape = Shape(features=6, classes=3, hidden=4, layers=layers)
    params = random_parameters(GraphSAGE(shape), 2)
    rng = np.random.default_rng(1)
    features, exists = rng.standard_normal((12, 2, 6)), rng.random((12, 2)) < 0.5
    exists[:, 1] &= exists[:, 0]
    mended = Mended.whole(cohort, torch.from_numpy(features), torch.from_numpy(exists * 1.0))
    found = functional_call(MendedSAGE(shape), params, (cohort, None, mended)).logits

    expected = []
    for k, graph in enumerate(cohort.graphs):
        start, size = cohort.segments.pointers[k], graph.num_nodes
        own = exists[start : start + size]
        nodes, _ = np.nonzero(own)
        leaves = np.stack([nodes, size + np.arange(len(nodes))])
        x = graph.features.toarray() if sparse else np.asarray(graph.features)
        larger = Graph.build(
            np.concatenate([x, features[start : start + size][own]]),
            np.concatenate([graph.edges, leaves], axis=1),
            np.zeros(size + len(nodes), np.int64),
            name="mended",
        )
        assert graph.masks is not None
        outside = np.zeros(len(nodes), bool)
        masks = replace(
            graph.masks,
            **{
                part: np.concatenate([getattr(graph.masks, part), outside])
                for part in ("train", "val", "test")
            },
        )
        alone = cohort_of([replace(larger, masks=masks)])
        one = {n: t[k : k + 1] for n, t in params.items()}
        expected.append(predict(GraphSAGE(shape), one, alone).logits[:size])
    # Graphs store features in single precision.
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-5, atol=1e-5)


def test_a_real_node_hears_its_generated_neighbours_and_nobody_elses_client_does() -> None:
    cohort = random_cohort((6, 5))
    network = MendedSAGE(Shape(features=6, classes=3, hidden=4))
    params = random_parameters(network, 2)
    features = torch.zeros(11, 2, 6, dtype=torch.float64)
    exists = torch.ones(11, 2, dtype=torch.float64)

    def logits(x: Tensor) -> Tensor:
        mended = Mended.whole(cohort, x, exists)
        found: Tensor = functional_call(network, params, (cohort, None, mended)).logits
        return found

    changed = features.clone()
    changed[0, 0] = 1
    moved = (logits(changed) - logits(features)).abs().sum(dim=1)
    assert moved[0] > 0
    assert moved[6:].max() == 0
    exists[0] = 0  # a closed gate lets nothing through
    assert torch.equal(logits(changed), logits(features))


# Impaired graphs ---------------------------------------------------------------------------------


def test_an_impaired_graph_hides_nodes_and_knows_what_is_missing() -> None:
    cohort = random_cohort((9, 14), density=0.5)
    given = impaired(cohort, 0.4, slots=2)
    visible = given.graph.visible.bool()
    assert [int((~own).sum()) for own in visible.split([9, 14])] == [4, 6]
    dense = torch.zeros(23, 23, dtype=torch.float64)
    dense[cohort.edges.row, cohort.edges.col_long] = 1
    kept = dense * visible.double().outer(visible.double())
    unit = torch.eye(23, dtype=torch.float64)
    torch.testing.assert_close(
        given.graph.mean @ unit, kept / kept.sum(1, keepdim=True).clamp(min=1)
    )
    missing = (dense * ~visible).sum(1)[visible]
    assert torch.equal(given.missing, missing)
    x = cohort.x
    assert isinstance(x, Tensor)
    for row, node in enumerate(given.losers.tolist()):
        near = [u for u in range(23) if dense[node, u] and not visible[u]]
        assert near
        count = int(given.present[row].sum())
        assert count == min(len(near), 2)
        for target in given.targets[row, :count]:
            assert any(torch.equal(target, x[u]) for u in near)
    assert torch.equal(given.learns.bool(), visible[cohort.train_nodes])


def test_what_is_hidden_belongs_to_the_client() -> None:
    cohort = random_cohort((9, 14))
    alone = cohort.take([1])
    seen, own = (impaired(c, 0.3, 2).graph.visible for c in (cohort, alone))
    assert torch.equal(seen[9:], own)


# The exchange ------------------------------------------------------------------------------------


def test_partners_rotate_through_all_other_clients() -> None:
    met: dict[int, set[int]] = {client: set() for client in range(5)}
    for turn in range(2):
        owner, there = pairing(torch.tensor(turn), 5, 2)
        assert there.all()
        for client in range(5):
            met[client] |= set(owner[client].tolist())
        assert all(sorted(owner[:, r].tolist()) == list(range(5)) for r in range(2))
    assert all(others == set(range(5)) - {client} for client, others in met.items())
    assert pairing(torch.tensor(0), 3, 4)[1].tolist() == [True, True, False, False]
    assert not pairing(torch.tensor(0), 1, 1)[1].any()


@pytest.mark.parametrize("present", [(0, 1, 2, 3), (3, 1)])
def test_the_server_sums_answers_by_owner(present: tuple[int, ...]) -> None:
    state = {**initial(torch.zeros(1), 4), "turn": torch.tensor(1)}
    values = torch.randn(len(present), 2, 3, generator=torch.Generator().manual_seed(0))
    after = exchanged(state, Uploads(present, {"answers/w": values}))
    owner, _ = pairing(torch.tensor(1), 4, 2)
    expected = torch.zeros(4, 3)
    for row, client in enumerate(present):
        for r in range(2):
            expected[owner[client, r]] += values[row, r]
    torch.testing.assert_close(after["gradient/w"], expected * 3 / 2)
    assert after["turn"] == 2


def test_generators_are_handed_to_partners_once_and_then_forgotten() -> None:
    state = initial(torch.zeros(1), 3)
    weights = torch.arange(2.0).unsqueeze(1)
    sent = {"generator/w": weights, "generator/counts": torch.zeros(2, 4)}
    state |= exchanged(state, Uploads((2, 0), sent))
    found = handed_on(state, [0, 1, 2], 2)
    owner, _ = pairing(state["turn"], 3, 2)
    by_owner = {2: 0.0, 0: 1.0, 1: None}
    for client in range(3):
        for r in range(2):
            wanted = by_owner[int(owner[client, r])]
            assert found["asked"][client, r] == (wanted is not None)
            assert wanted is None or found["others/w"][client, r] == wanted
    state |= exchanged(state, Uploads((0, 1, 2), {}))
    assert handed_on(state, [0, 1, 2], 2) == {}


def asked(simulation: Simulation, partners: int, rows: int) -> Local:
    """Return the clients as they are asked about random generators."""
    source = torch.Generator().manual_seed(1)
    shapes = weight_shapes(Widths(2, 3, 4, 5), 6)

    def random(*shape: int) -> Tensor:
        return torch.randn(4, partners, *shape, generator=source, dtype=torch.float64)

    local = simulation.received()
    local.received = {f"others/{name}": random(*shape) for name, shape in shapes.items()}
    local.received["others/embeddings"] = random(rows, 3)
    local.received["others/counts"] = 1 + random(rows).abs()
    local.received["asked"] = torch.ones(4, partners, dtype=torch.float64)
    local.draws = simulation.cohort.draws(7)
    return local


@pytest.mark.parametrize("distance", ["sum", "mean"])
def test_an_answer_is_the_gradient_of_the_distance_to_own_features(distance: str) -> None:
    partners, rows, slots = 2, 3, 2
    local = asked(run("fedsage", 0), partners, rows)
    local.received["asked"][1, 0] = 0
    network = FeatureGenerator(Widths(2, 3, 4, 5), 6)
    found = answers(local, network, slots=slots, counting="floor", distance=distance)

    draws, sent = local.cohort.draws(7), with_prefix(local.received, "others/")  # the same again
    noise = torch.special.ndtri(draws.uniform(partners * rows * 3, range(5)) + 2.0**-33)
    local.draws = draws
    targets = local.cohort.x[drawn_neighbours(local, partners * rows, slots)]
    for k in range(4):
        for r in range(partners):
            w = {n: t[k, r].clone().requires_grad_() for n, t in sent.items()}
            z = w["embeddings"] + noise.view(4, partners, rows, 3)[k, r]
            h = (z @ w["first.weight"] + w["first.bias"]).relu()
            h = (h @ w["second.weight"] + w["second.bias"]).relu()
            x = (h @ w["last.weight"] + w["last.bias"]).tanh().view(rows, slots, 6)
            loss = torch.zeros((), dtype=torch.float64)
            for v in range(rows):
                near = targets.view(4, partners, rows, slots, 6)[k, r, v]
                for p in range(min(int(sent["counts"][k, r, v]), slots)):
                    loss = loss + min((x[v, p] - t).square().sum() for t in near)
            loss = loss / rows / (slots * 6 if distance == "mean" else 1)
            names = list(found)
            grads = torch.autograd.grad(loss, [w[n.removeprefix("answers/")] for n in names])
            for name, grad in zip(names, grads, strict=True):
                silent = (k, r) == (1, 0)
                torch.testing.assert_close(found[name][k, r], 0 * grad if silent else grad)


def test_features_are_compared_with_neighbours_of_one_node_of_the_own_client() -> None:
    local = asked(run("fedsage", 0), 1, 1)
    cohort = local.cohort
    edges = set(zip(cohort.edges.row.tolist(), cohort.edges.col.tolist(), strict=True))
    drawn = drawn_neighbours(local, 40, 3)
    for k in range(4):
        start, stop = cohort.segments.pointers[k : k + 2]
        own = range(start, stop)
        for near in drawn[k].tolist():
            alone = len(set(near)) == 1 and cohort.degrees[near[0]] == 0
            assert alone or any(all((u, v) in edges for v in near) for u in own)
        assert len(drawn[k].unique()) > (stop - start) / 2


# Stages ------------------------------------------------------------------------------------------


def test_what_is_trained_when() -> None:
    method = plus(generator_rounds=2)
    names = [method.stage(r) for r in range(5)]
    assert names == ["generator"] * 3 + ["classifier"] * 2
    simulation = run(method, 0, keep_optimizer=True)
    for trained in (
        "neighgen. judge.",
        "neighgen.generator.",
        "neighgen.generator.",
        "classifier.",
    ):
        before = {n: t.clone() for n, t in model_part(simulation.memory).items()}
        simulation.advance()
        after = model_part(simulation.memory)
        moved = {n for n in before if not torch.equal(before[n], after[n])}
        assert moved == {n for n in before if n.startswith(tuple(trained.split()))}


def test_generators_and_answers_travel_in_their_rounds_only() -> None:
    simulation = run(plus(generator_rounds=3), 0)
    server, kinds = simulation.servers[0], []
    for r in range(6):
        up = {name.split("/")[0] for name in server.upload_contract(r).shapes}
        down = {name.split("/")[0] for name in server.download_contract(r).shapes}
        kinds.append((up, down))
        received = simulation.download([range(4)])
        server.download_contract(r).check(received)
        simulation.advance()
    assert kinds == [
        ({"generator"}, set()),
        ({"generator", "answers"}, {"others", "asked"}),
        ({"answers"}, {"others", "asked", "gradient"}),
        ({"ready"}, {"gradient"}),
        ({"model", "weight"}, {"model"}),
        ({"model", "weight"}, {"model"}),
    ]


def test_answers_change_the_generator_and_the_classifier() -> None:
    crossed, alone = run(plus(), 4), run(plus(cross=0), 4)
    name = "neighgen.generator.last.weight"
    assert not torch.equal(*(model_part(s.memory)[name] for s in (crossed, alone)))
    assert not same(classifier(crossed), classifier(alone))


def test_noise_of_mending_is_drawn_once() -> None:
    simulation = run(plus(), 4)
    before = simulation.predict(simulation.trained())
    assert torch.equal(before, simulation.predict(simulation.trained()))
    network, memory = simulation.network, simulation.memory
    assert isinstance(network, MendingNetwork)
    own = with_prefix(model_part(memory), "neighgen.")
    first = functional_call(network.neighgen, own, (simulation.cohort,)).features
    simulation.advance()
    own = with_prefix(model_part(simulation.memory), "neighgen.")
    assert torch.equal(first, functional_call(network.neighgen, own, (simulation.cohort,)).features)


def test_answers_lower_the_distance_to_features_of_others() -> None:
    """With the cross term alone, generated features approach those of other clients."""

    def distance(cross: float) -> float:
        method = plus(
            cross=cross,
            generator_rounds=25,
            generator_steps=1,
            feature_weight=0,
            class_weight=0,
            count_weight=0,
            partners=3,
            rows=32,
        )
        simulation = run(method, 26, optimizer="sgd", lr=0.05, weight_decay=0.0)
        network, cohort = simulation.network, simulation.cohort
        own = with_prefix(model_part(simulation.memory), "neighgen.")
        features = functional_call(network.neighgen, own, (cohort,)).features.flatten(0, 1)
        assert isinstance(cohort.x, Tensor)
        return float(torch.cdist(features, cohort.x).square().mean())

    assert distance(1.0) < 0.9 * distance(0.0)


# Ablations and forms -----------------------------------------------------------------------------


def test_without_mending_it_is_fedsage() -> None:
    off, fedsage = run(plus(mend="off"), 3, dropout=0.3), run("fedsage", 3, dropout=0.3)
    assert_same_bits(classifier(off), classifier(fedsage))


def test_mending_changes_the_classifier_and_what_is_generated_matters() -> None:
    generated, shuffled = (run(plus(mend=mend), 5) for mend in ("generated", "shuffled"))
    plain = run("fedsage", 2)
    assert same(classifier(run(plus(), 3)), classifier(run("fedsage", 0)))  # not trained yet
    assert not same(classifier(generated), classifier(plain))
    assert not same(classifier(generated), classifier(shuffled))


FORMS = {
    "exchange": plus(generator_rounds=3),
    "classifier": plus(generator_rounds=0),
    "paper's rules": plus(generator_rounds=1, counting="floor", distance="mean", slots=5),
    "shuffled": plus(generator_rounds=0, mend="shuffled"),
    "off": plus(mend="off"),
}


@pytest.mark.parametrize("check", METHOD_CHECKS)
@pytest.mark.parametrize("form", FORMS)
def test_forms_that_reach_every_stage_early(form: str, check: str) -> None:
    method = FORMS[form]
    # Nodes are hidden by client number. The classifier is trained later, and a generator only
    # where a neighbour is counted.
    later = ("classifier.", *(["neighgen.generator."] if method.counting == "floor" else []))
    own = {"permutes": False, "untrained": later} if method.mends else {}
    METHOD_CHECKS[check](MethodCase(method, "sage", **own))


@pytest.mark.parametrize(
    "method", [plus(mend="off"), plus(generator_rounds=1), plus(cross=0), plus(feature_weight=0)]
)
def test_what_is_said_to_have_no_effect_has_none(method: FedSagePlus) -> None:
    idle = method.without_effect()
    assert all("set " in reason for reason in idle.values())
    if not method.mends:
        assert not any(changes_predictions(method, name) for name in idle)
    simulation = run(method, 4)
    for name in set(idle) & {"cross", "partners", "rows"}:
        other = replace(method, **{name: getattr(method, name) + 1})
        if method.cross > 0 or name != "cross":
            assert same(classifier(run(other, 4)), classifier(simulation))


def test_impossible_values_are_refused() -> None:
    for name, value in (("slots", 0), ("hidden_share", 1.0), ("generator_rounds", -1), ("rows", 0)):
        with pytest.raises(UserError, match=name):
            create("fedsage+", {name: value})
