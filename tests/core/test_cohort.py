"""A cohort: graphs packed end to end, train labels only, normalised adjacencies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from builders import (
    cohort_of,
    dense_adjacency,
    dense_features,
    mask_at,
    random_cohort,
    random_graph,
    random_graphs,
)
from polyphily.core.cohort import Cohort
from polyphily.graphs.graph import UNLABELLED, Graph, Masks
from polyphily.nn.sparse import SparseMatrix

MANY = settings(max_examples=40, deadline=None)
SIZES = [7, 1, 5, 5]
kinds_of_features = pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
cohorts = st.builds(
    random_cohort,
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    seed=st.integers(0, 1000),
    density=st.sampled_from([0.0, 0.3, 1.0]),
    sparse=st.booleans(),
    unlabelled=st.sampled_from([0.0, 0.3]),
)


def dense(matrix: SparseMatrix) -> Tensor:
    return matrix @ torch.eye(matrix.shape[1], dtype=torch.float64)


def adjacency(cohort: Cohort) -> Tensor:
    return torch.block_diag(*[dense_adjacency(graph) for graph in cohort.graphs])


def features(cohort: Cohort) -> Tensor:
    return torch.cat([dense_features(graph) for graph in cohort.graphs])


# Packing ---------------------------------------------------------------------------------------


@MANY
@given(cohorts)
def test_graphs_are_packed_end_to_end(cohort: Cohort) -> None:
    sizes = [graph.num_nodes for graph in cohort.graphs]
    assert len(cohort) == len(sizes)
    assert cohort.segments.sizes == tuple(sizes)
    assert cohort.num_nodes == sum(sizes)
    assert cohort.num_features == 6
    assert torch.equal(dense(cohort.edges), adjacency(cohort))
    loops = adjacency(cohort) + torch.eye(cohort.num_nodes, dtype=torch.float64)
    assert torch.equal(dense(cohort.edges_with_loops), loops)
    assert torch.equal(cohort.degrees, adjacency(cohort).sum(dim=1))


@MANY
@given(cohorts)
def test_features_are_dense_or_block_diagonal(cohort: Cohort) -> None:
    x, width = cohort.x, cohort.num_features
    if isinstance(x, Tensor):
        assert torch.equal(x, features(cohort))
        assert x.dtype == torch.float64
        return
    assert x.shape == (cohort.num_nodes, len(cohort) * width)
    blocks = torch.block_diag(*[dense_features(graph) for graph in cohort.graphs])
    assert torch.equal(dense(x), blocks)


@MANY
@given(cohorts)
def test_feature_pointers_cut_the_stored_entries_by_client(cohort: Cohort) -> None:
    lengths = np.diff(cohort.x_pointers).tolist()
    if isinstance(cohort.x, Tensor):
        assert cohort.x_pointers == cohort.segments.pointers
        return
    assert lengths == [graph.features.nnz for graph in cohort.graphs]
    assert cohort.x.value is not None
    for k, graph in enumerate(cohort.graphs):
        own = cohort.x.value[cohort.x_pointers[k] : cohort.x_pointers[k + 1]]
        assert own.tolist() == graph.features.data.tolist()


def test_sparse_features_may_be_stored_in_any_order() -> None:
    graph = random_graph(8, sparse=True)
    shuffled = graph.features.copy()
    for row in range(8):
        entries = slice(shuffled.indptr[row], shuffled.indptr[row + 1])
        shuffled.indices[entries] = shuffled.indices[entries][::-1].copy()
        shuffled.data[entries] = shuffled.data[entries][::-1].copy()
    shuffled.has_sorted_indices = False
    x, wanted = cohort_of([replace(graph, features=shuffled)]).x, cohort_of([graph]).x
    assert isinstance(x, SparseMatrix)
    assert isinstance(wanted, SparseMatrix)
    assert torch.equal(x.col, wanted.col)
    assert torch.equal(dense(x), dense_features(graph))


def test_one_sparse_client_makes_the_cohort_sparse() -> None:
    cohort = cohort_of([random_graph(5, seed=1), random_graph(4, seed=2, sparse=True)])
    assert isinstance(cohort.x, SparseMatrix)
    blocks = torch.block_diag(*[dense_features(graph) for graph in cohort.graphs])
    assert torch.equal(dense(cohort.x), blocks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@kinds_of_features
def test_the_dtype_asked_for_is_everywhere(dtype: torch.dtype, sparse: bool) -> None:
    cohort = random_cohort(SIZES, dtype=dtype, sparse=sparse)
    x = cohort.x if isinstance(cohort.x, Tensor) else cohort.x.value
    tensors = [x, cohort.gcn.value, cohort.random_walk.value, cohort.mean.value]
    tensors += [cohort.degrees, cohort.num_train, cohort.train_onehot]
    assert {tensor.dtype for tensor in tensors if tensor is not None} == {dtype}
    assert all(tensor is not None for tensor in tensors)


# Normalised adjacencies ------------------------------------------------------------------------


@MANY
@given(cohorts)
def test_normalised_adjacencies_are_their_formulas(cohort: Cohort) -> None:
    a = adjacency(cohort)
    loops = a + torch.eye(len(a), dtype=torch.float64)
    root = torch.diag(loops.sum(dim=1) ** -0.5)
    expected = {
        "gcn": root @ loops @ root,
        "random_walk": torch.diag(1 / loops.sum(dim=1)) @ loops,
        "mean": torch.diag(1 / a.sum(dim=1).clamp(min=1)) @ a,
    }
    for name, formula in expected.items():
        matrix = getattr(cohort, name)
        assert_close(dense(matrix), formula, rtol=1e-12, atol=1e-12)
        assert_close(dense(matrix.transposed), formula.T, rtol=1e-12, atol=1e-12)


# Labels ----------------------------------------------------------------------------------------


@MANY
@given(cohorts)
def test_only_train_labels_are_visible(cohort: Cohort) -> None:
    expected = [
        int(label) if train else UNLABELLED
        for graph in cohort.graphs
        for label, train in zip(graph.labels, graph.masks.train, strict=True)
    ]
    assert cohort.labels.tolist() == expected
    nodes = [i for i, label in enumerate(expected) if label != UNLABELLED]
    assert cohort.train_nodes.tolist() == nodes
    assert cohort.train_labels.tolist() == [expected[i] for i in nodes]


@MANY
@given(cohorts, st.integers(0, 100))
def test_other_labels_change_nothing_a_method_can_see(cohort: Cohort, seed: int) -> None:
    rng = np.random.default_rng(seed)
    graphs = [
        replace(
            graph,
            labels=np.where(
                graph.masks.train, graph.labels, rng.integers(UNLABELLED, 3, graph.num_nodes)
            ),
        )
        for graph in cohort.graphs
    ]
    other = cohort_of(graphs)
    for name in ("labels", "train_nodes", "train_labels", "train_onehot", "num_train"):
        assert torch.equal(getattr(other, name), getattr(cohort, name)), name


@MANY
@given(cohorts)
def test_train_segments_divide_the_train_nodes_by_client(cohort: Cohort) -> None:
    counts = [int(graph.masks.train.sum()) for graph in cohort.graphs]
    assert cohort.train_segments.sizes == tuple(counts)
    assert cohort.num_train.tolist() == counts
    owner = cohort.segments.owner[cohort.train_nodes]
    assert torch.equal(cohort.train_segments.owner, owner)
    onehot = cohort.train_onehot
    assert onehot.shape == (sum(counts), cohort.classes)
    assert onehot.argmax(dim=1).tolist() == cohort.train_labels.tolist()
    assert onehot.sum().item() == sum(counts)


def test_an_unlabelled_node_never_trains() -> None:
    graphs = random_graphs([4, 4])
    labels = graphs[0].labels.copy()
    labels[1] = UNLABELLED
    none = mask_at(4, [])
    masked = replace(graphs[0], labels=labels, masks=Masks(mask_at(4, [0, 1]), none, none))
    cohort = cohort_of([masked, graphs[1]])
    owner = cohort.segments.owner[cohort.train_nodes]
    assert torch.equal(cohort.train_segments.owner, owner)


def test_labels_need_a_split() -> None:
    graph = replace(random_graph(4, name="north"), masks=None)
    with pytest.raises(AssertionError, match="north: no split was drawn"):
        _ = cohort_of([graph]).labels


# Taking clients --------------------------------------------------------------------------------


@MANY
@given(cohorts, st.data())
def test_take_gives_the_clients_in_the_order_asked_for(cohort: Cohort, data: st.DataObject) -> None:
    members = data.draw(
        st.lists(st.integers(0, len(cohort) - 1), min_size=1, max_size=len(cohort), unique=True)
    )
    taken = cohort.take(members)
    fresh = Cohort(
        [cohort.graphs[k] for k in members],
        [cohort.keys[k] for k in members],
        cohort.classes,
        dtype=cohort.dtype,
    )
    assert taken.graphs == fresh.graphs
    assert taken.keys == tuple((0, k) for k in members)
    assert (taken.classes, taken.dtype, taken.device) == (3, torch.float64, cohort.device)
    assert torch.equal(taken.labels, fresh.labels)
    assert torch.equal(dense(taken.gcn), dense(fresh.gcn))
    assert torch.equal(dense(taken.edges), adjacency(taken))


def test_take_all_is_the_cohort_itself_and_singles_are_kept() -> None:
    cohort = random_cohort(SIZES)
    assert cohort.take([0, 1, 2, 3]) is cohort
    assert cohort.take(range(4)) is cohort
    assert cohort.take([2]) is cohort.take([2])
    assert cohort.take([2]) is not cohort.take([1])
    assert cohort.take([1, 0, 2, 3]) is not cohort
    assert cohort.take([1, 0, 2, 3]).segments.sizes == (1, 7, 5, 5)
    alone = cohort.take([3])
    assert alone.take([0]) is alone
    apart = cohort.take([0, 2])
    assert cohort.take([0, 2]) is apart  # of those that are not consecutive the latest is kept
    assert cohort.take([1, 3]) is not apart
    assert cohort.take([0, 2]) is not apart


def test_a_taken_client_draws_as_it_does_in_the_cohort() -> None:
    cohort = cohort_of(random_graphs(SIZES), keys=[(4, 0), (4, 1), (5, 0), (5, 1)])
    x = torch.ones(cohort.num_nodes, 3)
    together = cohort.draws(6).dropout(x, 0.5, cohort.segments.pointers).split(SIZES)
    for members in ([2], [3, 0], [1, 2, 0]):
        part = cohort.take(members)
        ones = torch.ones(part.num_nodes, 3)
        drawn = part.draws(6).dropout(ones, 0.5, part.segments.pointers)
        assert torch.equal(drawn, torch.cat([together[k] for k in members]))


def test_what_is_computed_once_is_kept_per_cohort_and_key() -> None:
    cohort = random_cohort([4, 5])
    calls: list[int] = []

    def count(of: Cohort) -> int:
        calls.append(len(of))
        return sum(calls)

    assert cohort.cached("a", count) == cohort.cached("a", count) == 2
    assert cohort.cached(("a", 1), count) == 4
    assert cohort.take([1]).cached("a", count) == 5
    assert calls == [2, 2, 1]


def test_what_is_computed_of_each_graph_is_kept_in_every_cohort_with_it() -> None:
    cohort = random_cohort([4, 5, 6])
    seen: list[int] = []

    def size(graph: Graph) -> int:
        seen.append(graph.num_nodes)
        return graph.num_nodes

    assert cohort.take([2, 0]).cached_per_graph("size", size) == [6, 4]
    assert cohort.cached_per_graph("size", size) == [4, 5, 6]
    assert cohort.take([1, 2]).cached_per_graph("size", size) == [5, 6]
    assert cohort.repeated(2).cached_per_graph("size", size) == [4, 5, 6, 4, 5, 6]
    assert seen == [6, 4, 5]


def test_repeated_clients_are_federations_of_their_own() -> None:
    keys = [(4, 0), (5, 0), (5, 1)]
    cohort = cohort_of(random_graphs([3, 4, 5]), keys=keys)
    twice = cohort.repeated(2)
    assert [(own.start, own.stop) for own in twice.blocks] == [(0, 1), (1, 3), (3, 4), (4, 6)]
    assert twice.keys == (*keys, *keys)
    assert twice.segments.sizes == (3, 4, 5, 3, 4, 5)
