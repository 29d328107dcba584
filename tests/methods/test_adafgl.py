"""AdaFGL: its stages, and each part against a computation written out here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from builders import cohort_of, dense_adjacency, random_graphs
from cases import assert_same_bits, simulate, small_federation
from effects import changes_predictions
from polyphily.core.method import create
from polyphily.engines.simulation import Simulation
from polyphily.graphs.graph import Graph, Masks
from polyphily.methods.adafgl.method import LOCAL, AdaFGL
from polyphily.methods.adafgl.network import ADAPTED, EXTRACTOR, HEADS
from polyphily.methods.adafgl.propagation import (
    homophily_confidence,
    propagated,
    signed_messages,
    signs_of,
    similar_pairs,
    smoothing,
)
from polyphily.methods.fedhero.neighbours import Neighbours
from polyphily.testing import METHOD_CHECKS, MethodCase

SIZES = (7, 4, 1)
ALL = 10  # neighbours: more than any of these clients has nodes
SHORT = {"federated": 1, "neighbours": 3}
UNTRAINED = (HEADS, ADAPTED)


def method(**values: Any) -> AdaFGL:
    found = create("adafgl", {**SHORT, **values})
    assert isinstance(found, AdaFGL)
    return found


def model_of(simulation: Simulation, prefix: str) -> dict[str, Tensor]:
    return {
        n.removeprefix(f"model/{prefix}"): t
        for n, t in simulation.memory.items()
        if n.startswith(f"model/{prefix}")
    }


# The shared checks, in the local stage ------------------------------------------------------------


@pytest.mark.parametrize("check", METHOD_CHECKS)
@pytest.mark.parametrize("form", ["default", "code"])
def test_the_local_stage_passes_the_shared_checks(form: str, check: str) -> None:
    chosen = create("adafgl", {"federated": 1, **({"code": True} if form == "code" else {})})
    METHOD_CHECKS[check](MethodCase(chosen, permutes=False, untrained=UNTRAINED))


# Stages ------------------------------------------------------------------------------------------


def test_the_first_stage_is_fedavg_to_the_bit() -> None:
    chosen = {"dropout": 0.4}
    plain = simulate("fedavg", small_federation(), 3, **chosen)
    ours = simulate(method(federated=3), small_federation(), 3, **chosen)
    assert_same_bits(model_of(plain, ""), model_of(ours, EXTRACTOR))
    torch.testing.assert_close(ours.predict(ours.trained()), plain.predict(plain.trained()))


def test_the_local_stage_uploads_nothing_and_leaves_the_extractor() -> None:
    simulation = simulate(method(), small_federation(), 1, weight_decay=0.1)
    extractor = {n: t.clone() for n, t in simulation.states[0].items()}
    heads = {n: t.clone() for n, t in model_of(simulation, HEADS).items()}
    sent = simulation.backend.train(range(4), [range(4)]).trained.uploads
    assert sent == {}
    simulation.advance()
    simulation.advance()
    assert_same_bits(extractor, simulation.states[0])
    for name, value in model_of(simulation, EXTRACTOR).items():
        for own in value:
            torch.testing.assert_close(own, extractor[f"model/{EXTRACTOR}{name}"])
    assert all(not torch.equal(heads[n], t) for n, t in model_of(simulation, HEADS).items())


def test_stages_have_names_and_rounds() -> None:
    chosen = method(federated=2)
    assert [chosen.stage(r) for r in range(4)] == ["federated", "federated", "local", "local"]
    assert chosen.rounds_before_it_acts() == 2


def test_adaptation_differs_from_fine_tuning() -> None:
    federation = small_federation()
    tuned = simulate(method(adaptation="fine-tuning"), federation, 3)
    adapted = simulate(method(), federation, 3)
    assert not torch.allclose(tuned.predict(tuned.trained()), adapted.predict(adapted.trained()))


def test_fine_tuning_is_local_training_from_the_federated_model() -> None:
    chosen: dict[str, Any] = {"optimizer": "sgd", "lr": 0.1, "weight_decay": 0.0}
    tuned = simulate(method(adaptation="fine-tuning"), small_federation(), 3, epochs=2, **chosen)
    start = simulate("fedavg", small_federation(), 1, epochs=2, **chosen)
    local = simulate("local", small_federation(), 0, epochs=4, **chosen)
    for name, value in start.states[0].items():
        local.memory[name] = value.expand(4, *value.shape).clone()
    local.advance()
    ours, theirs = model_of(tuned, EXTRACTOR), model_of(local, "")
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value)


# Homophily ---------------------------------------------------------------------------------------


def pair_of_nodes() -> Graph:
    masks = Masks(np.array([True, True]), np.zeros(2, np.bool_), np.zeros(2, np.bool_))
    edges = np.array([[0], [1]])
    return Graph.build(np.ones((2, 6), np.float32), edges, np.array([0, 0]), masks=masks)


def test_label_propagation_of_one_edge() -> None:
    cohort = cohort_of([pair_of_nodes()], classes=2)
    start = torch.tensor([[1.0, 0.0], [0.5, 0.5]], dtype=torch.float64)
    found = propagated(start, torch.tensor([1.0, 0.0], dtype=torch.float64), cohort)
    assert found[1].tolist() == pytest.approx([1.124, 0.375], abs=1e-3)


def test_confidence_is_the_accuracy_on_the_other_half() -> None:
    cohort = cohort_of(random_graphs((30, 12, 1), density=0.2))
    rng = np.random.default_rng(0)
    lots = torch.from_numpy(rng.random(len(cohort.train_nodes)))
    found = homophily_confidence(cohort, lots, 3)
    for k, graph in enumerate(cohort.graphs):
        assert graph.masks is not None
        train = np.flatnonzero(graph.masks.train)
        own = lots[cohort.train_segments.owner == k].numpy()
        ranked = train[np.argsort(own)]
        seeds, scored = np.split(ranked, [(len(train) + 1) // 2])
        if len(scored) == 0:
            assert found[k] == 0.5
            continue
        looped = dense_adjacency(graph).numpy() + np.eye(graph.num_nodes)
        scale = looped.sum(axis=1) ** -0.5
        start = np.full((graph.num_nodes, 3), 1 / 3)
        start[seeds] = np.eye(3)[graph.labels[seeds]]
        labels = start.copy()
        for _ in range(10):
            labels = 0.5 * (scale[:, None] * looped * scale) @ labels + 0.5 * start
            labels[seeds] += start[seeds]
        right = labels[scored].argmax(axis=1) == graph.labels[scored]
        assert found[k].item() == pytest.approx(right.mean())


def test_the_share_of_the_homophilous_head() -> None:
    cohort = simulate(method(), small_federation()).cohort
    mixed = method().homophilous_share(cohort)
    assert ((mixed >= 0) & (mixed <= 1)).all()
    level = float(mixed.median())
    chosen = method(adaptation="threshold", threshold=level).homophilous_share(cohort)
    assert chosen.tolist() == (mixed >= level).double().tolist()
    assert method(adaptation="homophilous").homophilous_share(cohort).tolist() == [1.0] * 4
    assert method(adaptation="heterophilous").homophilous_share(cohort).tolist() == [0.0] * 4


# Propagation, against dense matrices --------------------------------------------------------------


def dense_pairs(p: Tensor, least: float) -> Tensor:
    """U of one client."""
    q = F.normalize(p)
    return ((q @ q.T > least) & ~torch.eye(len(p), dtype=torch.bool)).double()


def test_smoothing_is_that_of_all_pairs() -> None:
    cohort = cohort_of(random_graphs(SIZES))
    p = torch.rand(12, 3, dtype=torch.float64).softmax(dim=1)
    pairs, alike = similar_pairs(p, cohort.segments, ALL, 0.98)
    assert alike.sum() > 0
    x = torch.rand(12, 5, dtype=torch.float64)
    found = smoothing(cohort, pairs, alike, 0.3) @ x
    for graph, own, here, out in zip(
        cohort.graphs, p.split(SIZES), x.split(SIZES), found.split(SIZES), strict=True
    ):
        joined = 0.3 * dense_adjacency(graph) + 0.7 * dense_pairs(own, 0.98)
        joined += torch.eye(graph.num_nodes)
        scale = joined.sum(dim=1).rsqrt()
        torch.testing.assert_close(out, scale.unsqueeze(1) * joined * scale @ here)


def test_pairs_are_the_most_and_the_least_similar() -> None:
    cohort = cohort_of(random_graphs((15, 6)))
    p = torch.rand(21, 3, dtype=torch.float64).softmax(dim=1)
    pairs, _ = similar_pairs(p, cohort.segments, 3, 0.9)
    q = F.normalize(p)
    for start, stop in ((0, 15), (15, 21)):
        cosine = q[start:stop] @ q[start:stop].T
        for v in range(stop - start):
            others = [u for u in cosine[v].argsort().tolist() if u != v]
            wanted = {start + u for u in others[:3] + others[-3:]}
            index, filled = pairs.index[start + v], pairs.filled[start + v]
            assert set(index[filled].tolist()) == wanted
            assert len(index[filled]) == len(wanted)  # none twice


def test_signs_of_the_card() -> None:
    """μ = 0.325; above it (R-μ)/(max-μ), below it -R/μ in the authors' code."""
    values = {(0, 1): 0.9, (0, 2): 0.5, (0, 3): 0.1, (1, 2): 0.6, (1, 3): 0.3, (2, 3): 0.2}
    index = torch.tensor([[u for u in range(4) if u != v] for v in range(4)])
    similarity = torch.tensor(
        [[values[min(v, u), max(v, u)] for u in row] for v, row in enumerate(index.tolist())],
        dtype=torch.float64,
    )
    segments = cohort_of(random_graphs((4,))).segments
    e = torch.zeros(4, 3, dtype=torch.float64)  # with β = 1 only U counts
    pairs = Neighbours.of(index)
    found = signs_of(e, pairs, similarity, segments, 1.0, "reversed")
    wanted = {(0, 1): 1, (0, 2): 0.3043, (0, 3): -0.3077, (1, 2): 0.4783, (1, 3): -0.9231}
    wanted[2, 3] = -0.6154
    ours = signs_of(e, pairs, similarity, segments, 1.0, "distance")
    for v, row in enumerate(index.tolist()):
        for place, u in enumerate(row):
            key = min(v, u), max(v, u)
            assert found[v, place].item() == pytest.approx(wanted[key], abs=1e-4)
            away = wanted[key] if values[key] > 0.325 else values[key] / 0.325 - 1
            assert ours[v, place].item() == pytest.approx(away, abs=1e-4)


@pytest.mark.parametrize("rows", ["mean", "sum"])
def test_signed_messages_are_those_of_all_pairs(rows: str) -> None:
    segments = cohort_of(random_graphs(SIZES)).segments
    p = torch.rand(12, 3, dtype=torch.float64).softmax(dim=1)
    e = torch.randn(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    pairs, alike = similar_pairs(p, segments, ALL, 0.98)
    signs = signs_of(e, pairs, alike, segments, 0.2, "distance")
    slope = torch.full((12, 1), 0.25, dtype=torch.float64)
    found = signed_messages(e, pairs, signs, slope, rows)
    for own, here, out in zip(p.split(SIZES), e.split(SIZES), found.split(SIZES), strict=True):
        q = F.normalize(here.softmax(dim=1))
        r = 0.2 * dense_pairs(own, 0.98) + 0.8 * (q @ q.T)
        r.fill_diagonal_(0)
        mean, most = r.mean(), r.max()
        s = torch.where(r > mean, (r - mean) / (most - mean), (r - mean) / mean)
        s.fill_diagonal_(1)
        if rows == "mean":
            s = s / s.abs().sum(dim=1, keepdim=True)
        near, far = (F.leaky_relu(t, 0.25) @ here for t in (s, -s))
        wanted = (near.softmax(dim=1) - far.softmax(dim=1) + here) / 2
        torch.testing.assert_close(out, wanted)


# Losses and predictions ---------------------------------------------------------------------------


@pytest.mark.parametrize("distil", ["probabilities", "logits"])
def test_loss_and_prediction_are_made_of_the_heads(distil: str) -> None:
    simulation = simulate(method(distil=distil), small_federation(), 3)
    local, chosen = simulation.trained(), simulation.method
    assert isinstance(chosen, AdaFGL)
    assert local.phase == LOCAL
    local.constants = chosen.prepare_round(local)
    p, along = chosen._propagation(local)
    logits = chosen._heads(local, along)
    loss, scores = chosen.loss(local), chosen.predict(local).exp()
    share = chosen.homophilous_share(local.cohort)
    assert ((share > 0) & (share < 1)).any()
    owner, labels = local.cohort.segments.owner, local.cohort.labels
    for k in range(4):
        mine = owner == k
        train = mine & (labels >= 0)
        z = logits["homophilous"]
        compared = z.softmax(dim=1) if distil == "probabilities" else z
        homophilous = F.cross_entropy(z[train], labels[train]) + F.mse_loss(compared[mine], p[mine])
        three = [logits[name] for name in ("own", "global", "message")]
        others = sum(F.cross_entropy(x[train], labels[train]) for x in three)
        wanted = (share[k] > 0) * homophilous + (share[k] < 1) * others
        assert loss[k].item() == pytest.approx(float(wanted))
        one = (z[mine].softmax(dim=1) + p[mine]) / 2
        two = sum(x[mine].softmax(dim=1) for x in three) / 3
        torch.testing.assert_close(scores[mine], share[k] * one + (1 - share[k]) * two)


def test_smoothed_input_is_that_of_the_written_out_features() -> None:
    simulation = simulate(method(), small_federation(), 1)
    local, chosen = simulation.trained(), simulation.method
    assert isinstance(chosen, AdaFGL)
    _, along = chosen._propagation(local)
    x, mlp = local.cohort.x, local.network.get_submodule("heads.smoothed.homophilous")
    assert isinstance(x, Tensor)
    parts = [x]
    for _ in range(3):
        parts.append(along.smooth @ parts[-1])
    heads = "heads.smoothed.homophilous."
    first = local.params[f"{heads}first"].chunk(4, dim=2)
    slope = local.params[f"{heads}slope"][0, 0]
    hidden = local.cohort.segments.expand(local.params[f"{heads}bias"]) + sum(
        local.cohort.segments.matmul(a, w) for a, w in zip(parts, first, strict=True)
    )
    last = local.params[f"{heads}linears.0.weight"]
    wanted = local.cohort.segments.matmul(torch.where(hidden > 0, hidden, slope * hidden), last)
    assert mlp is not None
    torch.testing.assert_close(chosen._heads(local, along)["homophilous"], wanted)


# Hyperparameters ---------------------------------------------------------------------------------


@pytest.mark.parametrize("adaptation", ["mixed", "homophilous", "heterophilous", "fine-tuning"])
def test_what_has_no_effect_changes_nothing(adaptation: str) -> None:
    chosen = method(adaptation=adaptation, beta=0.3)
    idle = chosen.without_effect()
    for name in idle:
        assert not changes_predictions(chosen, name), name
    active = {"alpha", "beta", "smoothings", "neighbours", "distil", "signs", "rows"} - set(idle)
    for name in sorted(active):
        assert changes_predictions(replace(chosen, alike=0.5), name), name
