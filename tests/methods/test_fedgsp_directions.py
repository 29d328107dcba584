"""The singular vectors that FedGSP's clients send, against numpy's decompositions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from builders import CPU, cohort_of, dense_features, random_cohort, with_features
from polyphily.core.cohort import Cohort
from polyphily.graphs.graph import Graph
from polyphily.methods.fedgsp import directions
from polyphily.methods.fedgsp.directions import (
    client_directions,
    largest_eigenpairs,
    principal_directions,
)
from polyphily.nn.unifilter import bases, propagation, train_homophily, train_labels


def without_features(graph: Graph, absent: list[int]) -> Graph:
    x = dense_features(graph).numpy().astype(np.float32)
    x[:, absent] = 0
    return with_features(graph, x)


@pytest.fixture
def uneven() -> Cohort:
    """Features 1 and 4 do not occur at the first client, nor 0 at the last."""
    first, second, third = random_cohort((9, 14, 9)).graphs
    return cohort_of([without_features(first, [1, 4]), second, without_features(third, [0])])


# Matrices ----------------------------------------------------------------------------------------

SOLVERS = {
    "dense": {},
    "iteration": {"DENSE_ON_CPU": 0},
    "iteration without a Gram matrix": {"DENSE_ON_CPU": 0, "LARGEST_GRAM": 0},
}


@pytest.fixture(params=SOLVERS)
def solver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in SOLVERS[request.param].items():
        monkeypatch.setattr(directions, name, value)
    return str(request.param)


def with_spectrum(shape: tuple[int, int], singular: np.ndarray, seed: int = 0) -> Tensor:
    """A matrix with these singular values, whose columns have mean zero."""
    rng = np.random.default_rng(seed)
    left = rng.standard_normal((shape[0], len(singular)))
    left = np.linalg.qr(left - left.mean(axis=0))[0]
    right = np.linalg.qr(rng.standard_normal((shape[1], len(singular))))[0]
    return torch.from_numpy((left * singular) @ right.T)


@pytest.mark.parametrize("shape", [(300, 90), (90, 300), (20, 7), (7, 20)])
def test_directions_are_right_singular_vectors(shape: tuple[int, int], solver: str) -> None:
    matrices = torch.from_numpy(np.random.default_rng(0).normal(size=(2, *shape)) + 3)
    found = principal_directions(matrices, 3)
    for matrix, ours in zip(matrices.numpy(), found.numpy(), strict=True):
        theirs = np.linalg.svd(matrix - matrix.mean(axis=0), full_matrices=False)[2][:3]
        theirs *= np.sign(np.take_along_axis(theirs, np.abs(theirs).argmax(axis=1)[:, None], 1))
        np.testing.assert_allclose(ours, theirs, atol=1e-8)
    torch.testing.assert_close(principal_directions(-matrices, 3), found, atol=1e-8, rtol=0)


@pytest.mark.parametrize("shape", [(300, 120), (120, 300)])
def test_directions_of_close_singular_values(shape: tuple[int, int], solver: str) -> None:
    """A gap of a thousandth still leaves eight digits."""
    matrix = with_spectrum(shape, 0.999 ** np.arange(80)).unsqueeze(0)
    found = principal_directions(matrix, 3)[0].numpy()
    theirs = np.linalg.svd(matrix[0].numpy(), full_matrices=False)[2][:3]
    np.testing.assert_allclose(np.abs((found * theirs).sum(axis=1)), 1, atol=1e-14)
    np.testing.assert_allclose(np.abs(found), np.abs(theirs), atol=1e-8)


def test_equal_singular_values_give_some_basis_of_their_space(solver: str) -> None:
    """The rank is small: a Krylov space is soon exhausted, and rounding must not fill it up."""
    matrices = torch.stack(
        [with_spectrum((300, 120), np.array([3.0, 2, 2, 2, 1, 0.5]), seed) for seed in range(20)]
    )
    found = principal_directions(matrices, 3)
    torch.testing.assert_close(
        found @ found.mT, torch.eye(3).double().expand(20, -1, -1), atol=1e-8, rtol=0
    )
    scaled = found @ matrices.mT @ matrices / torch.tensor([[9.0], [4], [4]])
    torch.testing.assert_close(scaled, found, atol=1e-8, rtol=0)
    assert torch.equal(principal_directions(matrices, 3), found)


def test_an_iteration_that_does_not_end_goes_to_the_dense_solver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    matrix = with_spectrum((300, 120), 0.999 ** np.arange(80)).unsqueeze(0)
    theirs = largest_eigenpairs(matrix, 3)
    monkeypatch.setattr(directions, "DENSE_ON_CPU", 0)
    monkeypatch.setattr(directions, "RESTARTS", 1)
    for ours, dense in zip(largest_eigenpairs(matrix, 3), theirs, strict=True):
        assert torch.equal(ours, dense)
    monkeypatch.setattr(directions, "LARGEST_GRAM", 0)  # too large for a dense solver
    values, _ = largest_eigenpairs(matrix, 3)
    assert not torch.allclose(values, theirs[0], rtol=1e-8)
    torch.testing.assert_close(values, theirs[0], rtol=0.05, atol=0)


@pytest.mark.parametrize("shape", [(4, 3), (200, 90), (90, 200)])
def test_directions_beyond_the_rank_are_zero(shape: tuple[int, int], solver: str) -> None:
    rng = np.random.default_rng(0)
    direction = rng.standard_normal(shape[1])
    matrix = torch.from_numpy(np.outer(rng.standard_normal(shape[0]), direction)).unsqueeze(0)
    found = principal_directions(matrix, 5)[0]
    np.testing.assert_allclose(found[0].abs(), np.abs(direction) / np.linalg.norm(direction))
    assert (found[1:] == 0).all()


def test_directions_where_there_is_nothing_to_find(solver: str) -> None:
    for shape in [(1, 1, 3), (1, 200, 90), (1, 5, 0)]:
        assert torch.equal(
            principal_directions(torch.ones(shape, dtype=torch.float64), 2),
            torch.zeros(1, 2, shape[2], dtype=torch.float64),
        )


@given(st.integers(4, 12), st.integers(3, 12), st.integers(0, 999))
def test_directions_do_not_depend_on_the_origin_or_the_order_of_nodes(
    nodes: int, features: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    matrix = torch.from_numpy(rng.standard_normal((1, nodes, features)))
    spread = torch.linalg.svdvals(matrix[0] - matrix[0].mean(dim=0))
    assume(float((spread[:2] - spread[1:3]).min()) > 1e-3)
    moved = matrix[:, rng.permutation(nodes)] + torch.from_numpy(rng.standard_normal(features))
    found = principal_directions(matrix, 2)
    torch.testing.assert_close(principal_directions(moved, 2), found, atol=1e-8, rtol=0)


# Clients -----------------------------------------------------------------------------------------

BOTH = pytest.mark.parametrize("joint", [False, True])


def test_directions_are_in_the_order_of_kinds_and_bases(uneven: Cohort) -> None:
    found = client_directions(uneven, 2, 2, joint=False).view(3, 2, 3, 2, 6)
    graph = uneven.graphs[0]
    homophily = train_homophily(graph.edges, train_labels(graph))
    pairs = bases(propagation(graph, CPU), dense_features(graph), homophily, 2)
    kinds = [torch.stack(kind).numpy() for kind in zip(*pairs, strict=True)]
    for ours, basis in zip(found[0].flatten(0, 1), np.concatenate(kinds), strict=True):
        theirs = np.linalg.svd(basis - basis.mean(axis=0))[2][:2]
        np.testing.assert_allclose(ours.abs(), np.abs(theirs), atol=1e-9)
        assert (ours[:, [1, 4]] == 0).all()


def test_joint_directions_are_those_of_the_bases_side_by_side(uneven: Cohort) -> None:
    found = client_directions(uneven, 3, 2, joint=True).view(3, 2, 6, 2, 6)
    apart = client_directions(uneven, 3, 2, joint=False).view(3, 2, 4, 2, 6)
    torch.testing.assert_close(found[:, :, :3], apart[:, :, 1:], atol=1e-10, rtol=0)
    for k, graph in enumerate(uneven.graphs):
        homophily = train_homophily(graph.edges, train_labels(graph))
        pairs = list(bases(propagation(graph, CPU), dense_features(graph), homophily, 3))
        for kind in (0, 1):
            side_by_side = torch.cat([pair[kind] for pair in pairs[1:]], dim=1).numpy()
            theirs = np.linalg.svd(side_by_side - side_by_side.mean(axis=0))[2][:2]
            ours = found[k, kind, 3:].transpose(0, 1).reshape(2, 18)
            np.testing.assert_allclose(ours.abs(), np.abs(theirs), atol=1e-9)


@BOTH
def test_a_graph_is_decomposed_once(
    joint: bool, uneven: Cohort, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = client_directions(uneven, 3, 2, joint=joint)
    monkeypatch.setattr(directions, "graph_bases", lambda *_: pytest.fail("computed again"))
    assert torch.equal(client_directions(uneven.take([2, 0]), 3, 2, joint=joint), found[[2, 0]])


@BOTH
def test_directions_do_not_depend_on_the_other_clients(joint: bool, uneven: Cohort) -> None:
    alone = cohort_of(uneven.graphs[2:], keys=uneven.keys[2:])
    assert torch.equal(
        client_directions(alone, 4, 3, joint=joint)[0],
        client_directions(uneven, 4, 3, joint=joint)[2],
    )


@BOTH
@pytest.mark.parametrize("size", [1, 30, 300])
def test_the_size_of_a_batch_does_not_matter(
    size: int, joint: bool, uneven: Cohort, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = client_directions(uneven, 4, 2, joint=joint)
    monkeypatch.setattr(directions, "BATCH_ON_CPU", size)
    again = client_directions(cohort_of(uneven.graphs), 4, 2, joint=joint)
    torch.testing.assert_close(again, found, atol=1e-10, rtol=0)


@BOTH
def test_a_client_without_features_sends_zeros(joint: bool, uneven: Cohort) -> None:
    bare = without_features(uneven.graphs[0], list(range(6)))
    found = client_directions(cohort_of([bare, uneven.graphs[1]]), 3, 2, joint=joint)
    assert (found[0] == 0).all()
    assert (found[1] != 0).any()
