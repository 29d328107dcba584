"""UniFilter, part by part, each against a dense computation written out here."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from builders import (
    CPU,
    cohort_of,
    dense_adjacency,
    dense_features,
    predict,
    random_cohort,
    random_graph,
    random_parameters,
    split_by_client,
    with_features,
)
from polyphily.core.cohort import Cohort
from polyphily.graphs.graph import Graph
from polyphily.nn import unifilter
from polyphily.nn.backbones import BACKBONES, Shape, build
from polyphily.nn.unifilter import UniFilter, bases, client_bases, propagation, train_bases
from polyphily.nn.unifilter_mixture import Ragged


def dense_propagation(graph: Graph) -> Tensor:
    a = dense_adjacency(graph)
    degree = a.sum(dim=1)
    scale = torch.where(degree > 0, degree.clamp(min=1).rsqrt(), 0)
    return scale[:, None] * a * scale


def bases_of(graph: Graph, homophily: float, order: int) -> tuple[np.ndarray, np.ndarray]:
    """Both kinds, `[order + 1, n, F]` each."""
    x = dense_features(graph)
    near, far = zip(*bases(propagation(graph, CPU), x, homophily, order), strict=True)
    return torch.stack(near).numpy(), torch.stack(far).numpy()


def mixed(graph: Graph, order: int, tau: float) -> Tensor:
    """tau H^k + (1-tau) U^k with all columns, `[order + 1, n, F]`."""
    assert graph.masks is not None
    labels = np.where(graph.masks.train, graph.labels, -1)
    near, far = bases_of(graph, unifilter.train_homophily(graph.edges, labels), order)
    return torch.from_numpy(tau * near + (1 - tau) * far)


def without_features(graph: Graph, absent: list[int]) -> Graph:
    x = dense_features(graph).numpy().astype(np.float32)
    x[:, absent] = 0
    return with_features(graph, x)


@pytest.fixture
def uneven() -> Cohort:
    """Features 1 and 4 do not occur at the first client, nor 0 at the last."""
    first, second, third = random_cohort((9, 14, 9)).graphs
    return cohort_of([without_features(first, [1, 4]), second, without_features(third, [0])])


# Bases -------------------------------------------------------------------------------------------


def test_homophily_bases_are_powers_of_the_propagation() -> None:
    graph = random_graph(30, density=0.08)
    near, _ = bases_of(graph, 0.5, 4)
    p, x = dense_propagation(graph), dense_features(graph)
    for k in range(5):
        np.testing.assert_allclose(near[k], torch.linalg.matrix_power(p, k) @ x, atol=1e-12)


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


def test_rounding_is_no_direction() -> None:
    """If a column has no new direction, u_k is the normalised sum despite rounding errors."""
    path = np.stack([np.arange(9), np.arange(1, 10)])
    x = np.zeros((10, 1), dtype=np.float32)
    x[[4, 5]] = 1  # symmetric about the middle of the path: five dimensions
    _, far = bases_of(Graph.build(x, path, np.zeros(10, dtype=np.int64)), 0.3, 12)
    assert np.linalg.matrix_rank(far[:, :, 0], tol=1e-6) == 5
    for k in range(5, 13):
        total = far[:k, :, 0].sum(axis=0)
        np.testing.assert_allclose(far[k, :, 0], total / np.linalg.norm(total), atol=1e-12)


def test_homophily_counts_edges_between_train_nodes() -> None:
    edges = np.array([[0, 1, 1, 2, 2, 3, 0, 3], [1, 0, 2, 1, 3, 2, 3, 0]])
    count = unifilter.train_homophily
    assert count(edges, np.array([0, 0, 1, 0])) == 0.5
    assert count(edges, np.array([0, 0, -1, 1])) == 0.5
    assert count(edges, np.array([0, -1, 1, -1])) == 0.75
    assert count(edges[:, :0], np.array([0, 0, 1, 0])) == 0.75


# What is kept ------------------------------------------------------------------------------------


@pytest.mark.parametrize("sparse", [True, False])
def test_bases_are_kept_at_features_that_occur(sparse: bool) -> None:
    graph = random_graph(14, sparse=sparse)
    if not sparse:
        graph = without_features(graph, [0, 3])
    cohort = cohort_of([random_graph(9, sparse=sparse), graph])
    kept = client_bases(cohort, 3, 0.7)[1]
    assert kept.columns.tolist() == ([1, 2, 4, 5] if not sparse else list(range(6)))
    expected = mixed(graph, 3, 0.7)[:, :, kept.columns]
    train = cohort.labels[9:] >= 0
    torch.testing.assert_close(kept.train, expected[:, train], atol=1e-12, rtol=0)
    torch.testing.assert_close(kept.rest, expected[:, ~train], atol=1e-12, rtol=0)


def test_a_graph_is_worked_on_once(uneven: Cohort, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = client_bases(uneven, 3, 0.7)
    monkeypatch.setattr(unifilter, "graph_bases", lambda *_: pytest.fail("computed again"))
    part = uneven.take([2, 0])
    again = client_bases(part, 3, 0.7)
    assert again[0] is kept[2]
    assert again[1] is kept[0]


def test_who_else_is_in_a_cohort_changes_no_bit(uneven: Cohort) -> None:
    alone = cohort_of(uneven.graphs[2:], keys=uneven.keys[2:])
    ours, theirs = client_bases(alone, 4, 0.6)[0], client_bases(uneven, 4, 0.6)[2]
    assert torch.equal(ours.train, theirs.train)
    assert torch.equal(ours.rest, theirs.rest)


@pytest.mark.parametrize("size", [1, 30, 300])
def test_the_size_of_a_block_does_not_matter(
    size: int, uneven: Cohort, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = client_bases(uneven, 4, 0.7)
    monkeypatch.setattr(unifilter, "BLOCK_ON_CPU", size)
    again = cohort_of(uneven.graphs)
    for ours, theirs in zip(client_bases(again, 4, 0.7), kept, strict=True):
        torch.testing.assert_close(ours.train, theirs.train, atol=1e-12, rtol=0)
        torch.testing.assert_close(ours.rest, theirs.rest, atol=1e-12, rtol=0)


# Network -----------------------------------------------------------------------------------------


def by_hand(cohort: Cohort, k: int, params: dict[str, Tensor], tau: float) -> tuple[Tensor, Tensor]:
    """Embedding and logits of client k's nodes, Z and the MLP written out."""
    w = params["coefficients"][k]
    z = sum(w[order] * block for order, block in enumerate(mixed(cohort.graphs[k], 3, tau)))
    assert isinstance(z, Tensor)
    weights = [params[n][k] for n in sorted(params) if n != "coefficients"]
    for weight in weights[:-1]:
        out = z @ weight
        z = (out + z if out.shape == z.shape else out).relu()  # a residual where widths agree
    out = z @ weights[-1]
    return z, out + z if out.shape == z.shape else out


@pytest.mark.parametrize("per_feature", [True, False])
@pytest.mark.parametrize(("hidden", "layers"), [(5, 4), (6, 2), (5, 1)])
def test_network_is_equations_3_and_4(
    per_feature: bool, hidden: int, layers: int, uneven: Cohort
) -> None:
    shape = Shape(features=6, classes=3, hidden=hidden, layers=layers)
    network = UniFilter(shape, 3, 0.8, per_feature=per_feature).double()
    assert (network.coefficients == 0.25).all()
    params = random_parameters(network, 3)
    output = predict(network, params, uneven)
    for k in range(3):
        embedding, logits = by_hand(uneven, k, params, 0.8)
        torch.testing.assert_close(split_by_client(output.embedding, uneven)[k], embedding)
        torch.testing.assert_close(split_by_client(output.logits, uneven)[k], logits)


def test_train_nodes_alone_give_the_same_output_and_gradient(uneven: Cohort) -> None:
    network = UniFilter(Shape(features=6, classes=3, hidden=5), 3, 0.8).double()
    params = {n: p.requires_grad_() for n, p in random_parameters(network, 3).items()}
    every = predict(network, params, uneven).logits[uneven.train_nodes]
    alone = torch.func.functional_call(network, params, (uneven, None, True)).logits
    torch.testing.assert_close(alone, every)
    target = torch.randn_like(every)
    first = torch.autograd.grad((every * target).sum(), list(params.values()))
    second = torch.autograd.grad((alone * target).sum(), list(params.values()))
    torch.testing.assert_close(first, second)
    assert all((g.flatten(1).abs().amax(dim=1) > 0).all() for g in first)


def test_gradients_of_mixture_and_product(uneven: Cohort) -> None:
    ragged = train_bases(uneven, 2, 0.5)
    weight = torch.randn(3, 3, 6, dtype=torch.float64, requires_grad=True)
    first = torch.randn(3, 6, 2, dtype=torch.float64, requires_grad=True)

    def product(weight: Tensor, first: Tensor, p: float) -> Tensor:
        return ragged.matmul(ragged.mixture(weight, uneven.draws(0), p), first)

    assert torch.autograd.gradcheck(lambda w, f: product(w, f, 0.0), (weight, first))
    assert torch.autograd.gradcheck(lambda w, f: product(w, f, 0.4), (weight, first))


def test_all_clients_in_one_matrix_are_the_same(uneven: Cohort) -> None:
    ragged = train_bases(uneven, 3, 0.8)
    assert isinstance(ragged, Ragged)
    packed = ragged.packed()
    weight = torch.randn(3, 4, 6, dtype=torch.float64, requires_grad=True)
    first = torch.randn(3, 6, 5, dtype=torch.float64, requires_grad=True)
    results = []
    for form in (ragged, packed):
        z = form.mixture(weight, None, 0.5)
        out = form.matmul(z, first)
        loss = out.square().sum() + form.dense(z).square().sum()
        results.append([form.dense(z), out, *torch.autograd.grad(loss, [weight, first])])
    torch.testing.assert_close(*results)


def test_dropped_entries_of_the_bases(uneven: Cohort) -> None:
    """Each order has a mask of its own; what is left is scaled up."""
    ragged = train_bases(uneven, 3, 0.8)
    assert isinstance(ragged, Ragged)
    weight = torch.rand(3, 4, 6, dtype=torch.float64) + 0.5
    found = ragged.split(ragged.mixture(weight, uneven.draws(0), 0.25))
    draws = uneven.draws(0)
    masks = [ragged.split(draws.at_least(1 << 14, 1, ragged.pointers).view(-1)) for _ in range(4)]
    for k, (ours, block) in enumerate(zip(found, ragged.blocks, strict=True)):
        own = weight[k][:, ragged.columns[k]]
        theirs = sum(own[o] * block[o] * masks[o][k] / 0.75 for o in range(4))
        torch.testing.assert_close(ours, theirs)
    assert not torch.equal(masks[0][1], masks[1][1])


def test_dropout_is_on_bases_and_before_every_layer(uneven: Cohort) -> None:
    def logits(draws: bool, only_train: bool = False, **dropout: float) -> Tensor:
        shape = Shape(features=6, classes=3, hidden=5, **{"dropout": 0.0, **dropout})
        network = UniFilter(shape, 3, 0.8).double()
        given = uneven.draws(0) if draws else None
        params = random_parameters(network, 3)
        output = torch.func.functional_call(network, params, (uneven, given, only_train))
        return output.logits

    plain = logits(False, dropout=0.5, input_dropout=0.5)
    torch.testing.assert_close(logits(True), plain)
    for only_train in (True, False):
        expected = plain[uneven.train_nodes] if only_train else plain
        assert not torch.allclose(logits(True, only_train, input_dropout=0.5), expected)
        assert not torch.allclose(logits(True, only_train, dropout=0.5), expected)


def test_clients_without_features_or_without_train_nodes(uneven: Cohort) -> None:
    first, second, third = uneven.graphs
    bare = without_features(first, list(range(6)))
    assert third.masks is not None
    none = np.zeros_like(third.masks.train)
    unlabelled = third.with_masks(replace(third.masks, train=none))
    cohort = cohort_of([bare, second, unlabelled])
    network = UniFilter(Shape(features=6, classes=3, hidden=5), 3, 0.8).double()
    params = {n: p.requires_grad_() for n, p in random_parameters(network, 3).items()}
    output = torch.func.functional_call(network, params, (cohort, cohort.draws(0), True))
    assert len(output.logits) == cohort.train_segments.rows
    grads = torch.autograd.grad(output.logits.square().sum(), list(params.values()))
    for grad in grads:
        assert (grad[[0, 2]] == 0).all()
        assert (grad[1] != 0).any()
    every = predict(network, params, cohort).logits
    assert (split_by_client(every, cohort)[0] == 0).all()
    torch.testing.assert_close(
        split_by_client(every, cohort)[2], by_hand(cohort, 2, params, 0.8)[1]
    )


# As a backbone -----------------------------------------------------------------------------------


def test_it_is_a_backbone_like_the_others() -> None:
    network = build("unifilter", Shape(features=6, classes=3, hidden=5, hops=4), 0)
    assert isinstance(network, UniFilter)
    assert BACKBONES["unifilter"] is UniFilter
    assert (network.order, network.tau, network.describe()) == (4, 0.95, "unifilter")
    assert network.coefficients.shape == (1, 5, 6)
    assert not network.local_reach
    assert not network.weighted_edges


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_width_of_embeddings(layers: int, uneven: Cohort) -> None:
    network = UniFilter(Shape(features=6, classes=3, hidden=5, layers=layers), 2).double()
    output = predict(network, random_parameters(network, 3), uneven)
    assert output.embedding.shape[1] == network.embedding_width
