"""FGGP against small computations of its own, and its ablations."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from cases import assert_same_bits, simulate, small_federation
from effects import changes_predictions
from polyphily.core.cohort import Cohort
from polyphily.core.messages import Uploads
from polyphily.core.method import create
from polyphily.errors import UserError
from polyphily.methods.fggp.method import BUFFER, FGGP, FILLED, PROTOTYPES, WEIGHTS, recognition
from polyphily.methods.fggp.network import EdgePredictor
from polyphily.methods.fggp.prototypes import (
    alignment,
    class_means,
    cluster_means,
    finch,
    soft_membership,
    vote,
)
from polyphily.methods.fggp.view import (
    EDGE,
    LOOP,
    OTHER,
    REPEATED,
    Candidates,
    DrawnGraph,
    candidate_pairs,
)
from polyphily.nn.segments import Segments
from polyphily.testing import METHOD_CHECKS, MethodCase
from polyphily.testing.examples import cohort_of, random_graphs

PAPER = create("fggp", {"paper": True})


# Prototypes --------------------------------------------------------------------------------------


def test_alignment_of_two_orthogonal_classes_in_equal_views() -> None:
    q = torch.eye(2, 4).unsqueeze(0)
    assert alignment(q, q, torch.ones(1, 2), 0.5).item() == pytest.approx(0.2395, abs=5e-5)


def test_alignment_against_plain_loops() -> None:
    generator = torch.Generator().manual_seed(0)
    one, two = (torch.randn(3, 4, 5, generator=generator) for _ in range(2))
    present = torch.tensor([[1.0, 1, 1, 1], [1, 0, 1, 0], [0, 0, 1, 0]])
    found = alignment(one, two, present, 0.7)
    for k in range(3):
        have = [c for c in range(4) if present[k, c]]

        def s(a: Tensor, b: Tensor) -> float:
            return math.exp(F.cosine_similarity(a, b, dim=0).item() / 0.7)

        losses = []
        for c in have:
            near = s(two[k, c], one[k, c])
            far = sum(s(two[k, c], q[k, d]) for q in (one, two) for d in have if d != c)
            losses.append(-math.log(near / (near + far)))
        assert found[k].item() == pytest.approx(sum(losses) / len(losses), abs=1e-5)


def test_prototypes_are_means_weighted_by_confidence_at_the_place_of_their_class() -> None:
    logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.0, 3.0], [0.0, 0.0, 1.0]])
    labels, z = torch.tensor([-1, 0, -1]), torch.tensor([[1.0], [2.0], [5.0]])
    segments = Segments((3,), torch.device("cpu"))
    member = soft_membership(logits, labels, 3)
    sure = [math.exp(2) / (math.exp(2) + 2), 1.0, math.e / (math.e + 2)]
    expected = [[sure[0], 0, 0], [1, 0, 0], [0, 0, sure[2]]]
    torch.testing.assert_close(member, torch.tensor(expected))
    means = class_means(z, member, segments)[0, :, 0].tolist()
    assert means[0] == pytest.approx((sure[0] + 2) / (sure[0] + 1), abs=1e-5)
    assert means[1] == 0  # a class that nobody is in keeps its place
    assert means[2] == pytest.approx(5, abs=1e-4)


def test_finch_finds_two_tight_pairs() -> None:
    rows = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.01], [0.01, 1.0]])
    found = finch(rows)
    assert found[0] == found[2] != found[1] == found[3]
    assert len(cluster_means(rows, "finch")) == 2
    np.testing.assert_allclose(cluster_means(rows, "mean"), rows.mean(axis=0, keepdims=True))


def test_finch_takes_the_coarsest_partition_with_more_than_one_cluster() -> None:
    """Four tight pairs form two groups of two: the second step joins them, the third all."""
    angles = np.array([0.0, 0.01, 0.3, 0.31, 1.5, 1.51, 1.8, 1.81])
    found = finch(np.stack([np.cos(angles), np.sin(angles)], axis=1))
    assert len(set(found[:4])) == 1
    assert len(set(found[4:])) == 1
    assert len(set(found)) == 2
    assert set(finch(np.array([[1.0, 0], [0, 1.0], [1, 1.0]]))) == {0}  # three are always one
    assert finch(np.array([[1.0, 0]])).tolist() == [0]


def test_votes_against_plain_loops() -> None:
    rng = np.random.default_rng(0)
    sizes, classes, places = (4, 3), 3, 2
    z = torch.from_numpy(rng.standard_normal((7, 5)))
    kept = torch.from_numpy(rng.standard_normal((2, classes, places, 5)))
    filled = torch.tensor([[2, 1, 0], [1, 2, 2]])
    found = vote(z, kept, filled, Segments(sizes, torch.device("cpu")), 2).exp()
    for v in range(7):
        k = int(v >= 4)
        near = sorted(
            (
                (F.cosine_similarity(z[v], kept[k, c, p], dim=0).item(), c)
                for c in range(classes)
                for p in range(int(filled[k, c]))
            ),
            reverse=True,
        )[:2]
        weight = [math.exp(cosine / 0.1) for cosine, _ in near]
        expected = [0.0] * classes
        for (_, c), w in zip(near, weight, strict=True):
            expected[c] += w / sum(weight)
        np.testing.assert_allclose(found[v].numpy(), expected, atol=1e-9)


# The second view ---------------------------------------------------------------------------------


def pairs_of(neighbours: int = 2, m: int = 3) -> tuple[Cohort, Tensor, Tensor, Candidates]:
    """Return a cohort of three clients, embeddings, sampled nodes, and the candidates of these."""
    cohort = cohort_of(random_graphs((9, 2, 6)))
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(17, 4, generator=generator).double()
    start = torch.tensor([0, 9, 11])[cohort.segments.owner].unsqueeze(1)
    size = cohort.segments.counts[cohort.segments.owner].unsqueeze(1)
    others = (torch.rand(17, m, generator=generator) * size).long() + start
    pairs = candidate_pairs(cohort, z, neighbours, others)
    return cohort, z, others, Candidates.of(pairs, cohort, neighbours + m)


def joined(cohort: Cohort, z: Tensor, neighbours: int) -> Tensor:
    """Return A' as a dense matrix, by loops."""
    dense = torch.eye(cohort.num_nodes).double()
    dense[cohort.edges.row, cohort.edges.col_long] = 1
    unit = F.normalize(z, dim=1)
    for v in range(cohort.num_nodes):
        owner = cohort.segments.owner
        near = [u for u in range(cohort.num_nodes) if owner[u] == owner[v] and u != v]
        near.sort(key=lambda u: -float(unit[u] @ unit[v]))
        for u in near[:neighbours]:
            dense[u, v] = dense[v, u] = 1
    return dense


def dense_of(candidates: Candidates, value: Tensor) -> Tensor:
    """Return the values of entries that are no repetition as a dense matrix."""
    pattern = candidates.pattern
    dense = torch.zeros(pattern.shape, dtype=value.dtype)
    return dense.index_put((pattern.row, pattern.col_long), value, accumulate=True)


def test_candidates_are_the_joined_graph_and_other_pairs_each_once() -> None:
    cohort, z, others, found = pairs_of()
    expected = joined(cohort, z, 2)
    assert torch.equal(dense_of(found, found.known), expected)
    sampled = torch.zeros_like(expected)
    for v, row in enumerate(others.tolist()):
        for u in row:
            sampled[u, v] = sampled[v, u] = 1
    assert torch.equal(dense_of(found, found.other), sampled * (1 - expected))
    assert {LOOP, EDGE, OTHER, REPEATED} == set(found.kind.tolist())
    row, col = found.pattern.row, found.pattern.col_long
    assert torch.equal(row[found.pattern.permutation], col)
    assert torch.equal(found.kind[found.pattern.permutation], found.kind)
    assert torch.equal(cohort.segments.owner[row], found.segments.owner)


def test_scores_probabilities_and_edge_loss_against_dense_matrices() -> None:
    """With all pairs sampled, the loss is the authors', over all pairs of nodes."""
    cohort, z, _, _ = pairs_of()
    everything = torch.full((17, 9), -1)
    for a, b in ((0, 9), (9, 11), (11, 17)):
        everything[a:b] = a + torch.arange(9) % (b - a)
    pairs = Candidates.of(candidate_pairs(cohort, z, 2, everything), cohort, 11)
    for signed in (True, False):
        torch.manual_seed(0)
        predictor = EdgePredictor(6, 5, signed=signed).double()
        weights = {n: t.detach().repeat(3, 1, 1) for n, t in predictor.named_parameters()}
        h = functional_call(predictor, weights, (cohort, pairs))
        chance, loss = pairs.probabilities(h, pairs.scores(h)), recognition(pairs, pairs.scores(h))
        assert isinstance(cohort.x, Tensor)
        for k, (a, b) in enumerate(((0, 9), (9, 11), (11, 17))):
            n, own = b - a, joined(cohort, z, 2)[a:b, a:b]
            scale = own.sum(dim=1).rsqrt()
            spread = scale[:, None] * own * scale
            expected = spread @ (spread @ cohort.x[a:b] @ predictor.first[0]) @ predictor.second[0]
            expected = expected if signed else expected.relu()
            torch.testing.assert_close(h[a:b], expected.detach())
            scores = (expected @ expected.T).detach()
            likely = scores.relu() / scores.max() / 2 + own / 2
            once = (pairs.kind != REPEATED).double()
            torch.testing.assert_close(dense_of(pairs, chance * once)[a:b, a:b], likely)
            free = n**2 - own.sum()
            if free == 0:
                continue
            printed = F.binary_cross_entropy_with_logits(scores, own, pos_weight=free / own.sum())
            torch.testing.assert_close(loss[k], n**2 / (2 * free) * printed)


def test_drawn_graphs_are_symmetric_have_loops_and_follow_the_probabilities() -> None:
    cohort, _, _, pairs = pairs_of()
    chance = torch.rand(pairs.pattern.nnz, generator=torch.Generator().manual_seed(2)).double()
    chance = (chance + chance[pairs.pattern.permutation]) / 2
    total = torch.zeros(pairs.pattern.nnz).double()
    rounds = 4000
    for number in range(rounds):
        uniform = cohort.draws(number).uniform(1, pairs.segments.pointers).squeeze(1)
        weight = pairs.draw(chance, uniform, 1.0)
        assert torch.equal(weight, weight[pairs.pattern.permutation])
        total += weight
    between = (pairs.kind == EDGE) | (pairs.kind == OTHER)
    assert (total[pairs.kind == LOOP] == rounds).all()
    assert (total[pairs.kind == REPEATED] == 0).all()
    assert (total / rounds - chance)[between].abs().max() < 0.05


def test_gradients_of_drawn_weights_are_those_of_the_relaxation() -> None:
    _, _, _, pairs = pairs_of()
    between = (pairs.kind == EDGE) | (pairs.kind == OTHER)
    chance = torch.full((pairs.pattern.nnz,), 0.3, dtype=torch.float64, requires_grad=True)
    uniform = torch.full((pairs.pattern.nnz,), 0.8, dtype=torch.float64)
    weight = pairs.draw(chance, uniform, 2.0)
    assert set(weight[between].tolist()) == {1.0}  # 0.8 > 1 - 0.3
    weight.sum().backward()
    relaxed = chance.detach().clone().requires_grad_()
    ((relaxed.logit() + uniform.logit()) / 2).sigmoid().sum().backward()
    assert chance.grad is not None
    assert relaxed.grad is not None
    torch.testing.assert_close(chance.grad[between], relaxed.grad[between])
    assert not chance.grad[~between].any()


def test_operators_of_a_drawn_graph_against_dense_matrices() -> None:
    cohort, _, _, pairs = pairs_of()
    uniform = torch.rand(pairs.pattern.nnz, generator=torch.Generator().manual_seed(3)).double()
    weight = pairs.draw(torch.full_like(uniform, 0.6), uniform, 1.0)
    graph, dense = DrawnGraph(cohort, pairs, weight), dense_of(pairs, weight)
    x = torch.randn(17, 3).double()
    scale = dense.sum(dim=1).rsqrt()
    torch.testing.assert_close(graph.gcn @ x, scale[:, None] * dense * scale @ x)
    torch.testing.assert_close(graph.random_walk @ x, dense / dense.sum(1, keepdim=True) @ x)
    bare = dense - torch.eye(17)
    torch.testing.assert_close(graph.mean @ x, bare / bare.sum(1, keepdim=True).clamp(min=1) @ x)


# The server --------------------------------------------------------------------------------------


def test_the_server_keeps_the_newest_clusters_of_each_class_under_its_own_number() -> None:
    method = replace(PAPER, buffer=3)
    clients = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.01], [0.01, 1.0]]).double()
    prototypes = torch.zeros(4, 3, 2).double()
    prototypes[:, 0], prototypes[1, 2] = clients, torch.tensor([3.0, 4.0]).double()
    weights = torch.zeros(4, 3).double()
    weights[:, 0], weights[1, 2] = 1, 0.5
    sent = {PROTOTYPES: prototypes, WEIGHTS: weights, "model/w": torch.ones(4, 1).double()}
    uploads = Uploads((0, 1, 2, 3), {**sent, "weight": torch.ones(4).double()})
    rng = np.random.default_rng(0)
    first = method.aggregate({"model/w": torch.zeros(1).double()}, uploads, rng)
    assert first[FILLED].tolist() == [2, 0, 1]
    np.testing.assert_allclose(first[BUFFER][0, :2], [[0.005, 1.0], [1.0, 0.005]])
    np.testing.assert_allclose(first[BUFFER][2, 0], [3.0, 4.0])
    second = method.aggregate(first, uploads, rng)
    assert second[FILLED].tolist() == [3, 0, 2]
    np.testing.assert_allclose(second[BUFFER][0, 2], [0.005, 1.0])  # the rest of the first round


# In training -------------------------------------------------------------------------------------


def test_without_second_view_and_votes_it_is_fedavg() -> None:
    plain = simulate("fedavg", small_federation(), 3, dropout=0.4)
    other = simulate(create("fggp", {"second_view": False}), small_federation(), 3, dropout=0.4)
    assert_same_bits(plain.tensors(), other.tensors())


@pytest.mark.parametrize(
    "change",
    [
        *({"second_view": False}, {"edge_loss": 0.0}, {"align": 0.0}, {"neighbours": 0}),
        *({"non_edges": 0}, {"scores": "nonnegative"}, {"relaxation": 0.5}, {"temperature": 1.0}),
        {"prediction": "prototypes"},
    ],
    ids=str,
)
def test_every_part_changes_what_is_predicted(change: dict[str, Any]) -> None:
    usual, other = (
        simulate(create("fggp", form), small_federation(), 3, dropout=0.3, optimizer="sgd")
        for form in ({}, change)
    )
    assert not torch.equal(usual.predict(usual.received()), other.predict(other.received()))


@pytest.mark.parametrize("change", [{"clustering": "mean"}, {"votes": 2}, {"buffer": 1}], ids=str)
def test_every_part_of_the_votes_changes_what_is_predicted(change: dict[str, Any]) -> None:
    federation = small_federation((17, 9, 24, 9, 12, 15))
    usual, other = (
        simulate(replace(PAPER, **form), federation, 3) for form in ({"votes": 5}, change)
    )
    assert not torch.equal(usual.predict(usual.received()), other.predict(other.received()))


def test_nearest_nodes_are_searched_with_the_model_of_every_refresh() -> None:
    """With refresh=2, rounds 1 and 2 use the model sent for round 1, rounds 3 and 4 that of 3."""
    method = create("fggp", {"refresh": 2})
    simulation = simulate(method, small_federation(), 0)
    held = []
    for _ in range(4):
        sent = simulation.download(simulation.placement.members)
        simulation.advance()
        name = "encoder.convs.0.weight"
        held.append((sent["model/" + name], simulation.memory["anchor/" + name]))
    for number, source in enumerate((0, 0, 2, 2)):
        torch.testing.assert_close(held[number][1], held[source][0])
    assert not torch.equal(held[1][1], held[2][1])


@pytest.mark.parametrize(
    ("base", "form"),
    [
        ("default", {}),
        ("paper", {"second_view": False}),
        ("default", {"neighbours": 0}),
        ("default", {"align": 0.0}),
    ],
    ids=str,
)
def test_what_is_said_to_have_no_effect_has_none(base: str, form: dict[str, Any]) -> None:
    method = replace(PAPER if base == "paper" else create("fggp"), **form)
    idle = method.without_effect()
    assert idle
    for name in idle:
        assert not changes_predictions(method, name), name


@pytest.mark.parametrize("check", METHOD_CHECKS)
def test_votes_without_a_second_view_pass_all_checks(check: str) -> None:
    """This form draws nothing at clients, so that their order does not matter."""
    METHOD_CHECKS[check](MethodCase(replace(PAPER, second_view=False)))


def test_impossible_values_are_refused() -> None:
    for name, value in (("votes", 0), ("refresh", 0), ("neighbours", -1), ("temperature", 0)):
        with pytest.raises(UserError, match=name):
            create("fggp", {name: value})
    assert isinstance(PAPER, FGGP)
