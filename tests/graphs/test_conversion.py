"""Tests for graphs of torch_geometric, networkx and scipy, in and out."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import numpy.typing as npt
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch_geometric.data import Batch, Data, HeteroData, InMemoryDataset, TemporalData
from torch_geometric.datasets import Planetoid, WebKB
from torch_geometric.transforms import ToSparseTensor

import polyphily
from polyphily.errors import UserError
from polyphily.graphs.conversion import as_graph, convert, is_directed, to_networkx, to_pyg
from polyphily.graphs.graph import UNLABELLED, Graph, Masks
from polyphily.graphs.loading import load

RING = [[0, 1, 2, 3, 1, 2, 3, 0], [1, 2, 3, 0, 0, 1, 2, 3]]


def ring(**more: Any) -> Data:
    """Return a ring of four nodes as a `Data`."""
    parts = {
        "x": torch.arange(8.0).view(4, 2),
        "edge_index": torch.tensor(RING),
        "y": torch.tensor([0, 1, 0, 1]),
    }
    return Data(**{key: value for key, value in {**parts, **more}.items() if value is not None})


def refusal(given: Any, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        load(given, **options)
    return str(caught.value)


def dense(graph: Graph) -> npt.NDArray[np.float32]:
    features: Any = graph.features
    return features.toarray() if sp.issparse(features) else features


def assert_same_graph(one: Graph, other: Graph) -> None:
    """Compare all that a federation's client has; splits of its own are not compared."""
    np.testing.assert_array_equal(dense(one), dense(other))
    np.testing.assert_array_equal(one.edges, other.edges)
    np.testing.assert_array_equal(one.labels, other.labels)
    for name in ("edge_weights", "arcs", "edge_types", "node_ids"):
        first, second = getattr(one, name), getattr(other, name)
        assert (first is None) == (second is None), name
        if first is not None:
            np.testing.assert_array_equal(first, second, err_msg=name)
    assert one.relations == other.relations
    assert one.name == other.name
    assert (one.masks is None) == (other.masks is None)
    for part in ("train", "val", "test") if one.masks and other.masks else ():
        np.testing.assert_array_equal(getattr(one.masks, part), getattr(other.masks, part))


# torch_geometric, in -----------------------------------------------------------------------------


def test_a_data_is_one_client_and_is_divided_on_demand() -> None:
    federation = load(ring(), split="0.5,0.25,0.25")
    (client,) = federation.clients
    np.testing.assert_array_equal(
        client.adjacency().toarray(), nx.to_numpy_array(nx.cycle_graph(4))
    )
    assert client.labels.tolist() == [0, 1, 0, 1]
    assert client.arcs is None
    assert client.edge_weights is None
    assert len(load(ring(), partition="random", clients=2, split="0.5,0.25,0.25")) == 2


def test_graph_build_takes_tensors_as_load_takes_data() -> None:
    data = ring()
    built = Graph.build(data.x, data.edge_index, data.y, name="graph")
    assert_same_graph(built, as_graph(data))


def test_a_list_a_batch_and_a_dataset_are_clients() -> None:
    class Rings(InMemoryDataset):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.data, self.slices = self.collate([ring(x=torch.rand(4, 2)) for _ in range(count)])

    several = [ring(x=torch.rand(4, 2)) for _ in range(3)]
    for source in (several, Batch.from_data_list(several), Rings(3)):
        names = [client.name for client in load(source, split="0.5,0.25,0.25").clients]
        assert names == ["client-0", "client-1", "client-2"]
    assert len(load(Rings(1), split="0.5,0.25,0.25")) == 1


def test_graphs_of_all_kinds_mix_in_a_list() -> None:
    data = ring(x=torch.rand(4, 2))
    graph = as_graph(ring())
    network = graph.to_networkx()
    matrix = (sp.csr_array(np.ones((4, 4))), np.ones((4, 2)), [0, 1, 1, 0])
    federation = load([data, graph, network, matrix], split="0.5,0.25,0.25")
    assert [client.num_edges for client in federation.clients] == [4, 4, 4, 6]


@pytest.mark.parametrize(
    "x",
    [
        torch.eye(4).to_sparse_coo(),
        torch.eye(4).to_sparse_csr(),
        torch.eye(4).to(torch.bfloat16),
        torch.eye(4, dtype=torch.float64),
        torch.eye(4, dtype=torch.int64),
    ],
)
def test_features_may_be_sparse_or_of_another_type(x: torch.Tensor) -> None:
    graph = as_graph(ring(x=x))
    np.testing.assert_array_equal(dense(graph), np.eye(4))
    assert graph.features.dtype == np.float32


class SparseTensor:
    """The part of torch_sparse's class that is used, for a machine without torch_sparse."""

    def __init__(self, matrix: npt.NDArray[np.float32]) -> None:
        self.matrix = matrix

    def to_scipy(self, layout: str) -> sp.csr_array:
        assert layout == "csr"
        return sp.csr_array(self.matrix)


@pytest.mark.parametrize("layout", ["torch", "torch_sparse"])
def test_adj_t_is_a_transposed_adjacency(layout: str) -> None:
    data = ring(edge_index=torch.tensor([[0, 1], [1, 2]]), edge_weight=torch.tensor([2.0, 3.0]))
    expected = as_graph(data)
    assert expected.arcs is not None
    if layout == "torch":
        changed = ToSparseTensor(attr="edge_weight", layout=torch.sparse_csr)(data)
    else:
        changed = ring(edge_index=None)
        matrix = np.zeros((4, 4), dtype=np.float32)
        matrix[1, 0], matrix[2, 1] = 2, 3
        changed.adj_t = SparseTensor(matrix)
    assert "edge_index" not in changed
    assert_same_graph(as_graph(changed), expected)


@pytest.mark.parametrize("key", ["edge_weight", "edge_attr", "column"])
def test_weights_are_edge_weight_or_a_single_edge_attribute(key: str) -> None:
    weights = torch.tensor([1.0, 2, 3, 4, 1, 2, 3, 4])
    more = {"edge_attr": weights.view(-1, 1)} if key == "column" else {key: weights}
    graph = as_graph(ring(**more))
    assert graph.arcs is None
    assert graph.weighted_adjacency().toarray()[[0, 1, 2, 3], [1, 2, 3, 0]].tolist() == [1, 2, 3, 4]


def test_edge_attributes_of_several_columns_are_ignored_with_a_note() -> None:
    federation = load(ring(edge_attr=torch.rand(8, 3)), split="0.5,0.25,0.25")
    assert federation.clients[0].edge_weights is None
    assert any("edge_attr of 3 columns ignored" in note for note in federation.notes)


def test_types_of_edges_are_relations() -> None:
    types = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1])
    assert as_graph(ring(edge_type=types)).relations == ("0", "1")
    graph = as_graph(ring(edge_type=types, relations=["pays", "knows"]))
    assert graph.relations == ("pays", "knows")
    assert graph.edge_types is not None
    assert set(graph.edge_types.tolist()) == {1, 2}


def test_an_edge_without_its_reverse_makes_a_graph_directed() -> None:
    graph = as_graph(ring(edge_index=torch.tensor([[0, 1, 2], [1, 0, 3]])))
    assert graph.arcs is not None
    assert graph.edges[:, graph.arcs].T.tolist() == [[0, 1], [1, 0], [2, 3]]
    weights = torch.tensor([1.0, 2, 3, 4, 1, 2, 3, 5])  # only the weights are not symmetric
    assert as_graph(ring(edge_weight=weights)).arcs is not None


@given(
    edges=arrays.arrays(
        np.int64, st.tuples(st.just(2), st.integers(0, 12)), elements=st.integers(0, 4)
    ),
    weights=st.lists(st.integers(1, 3), min_size=12, max_size=12),
)
@settings(max_examples=50, deadline=None)
def test_directed_by_counting(edges: npt.NDArray[np.int64], weights: list[int]) -> None:
    pairs = list(zip(*edges.tolist(), strict=True))
    assert is_directed(edges, None, 5) == any((v, u) not in pairs for u, v in pairs)
    total: dict[tuple[int, int], int] = {}
    for pair, weight in zip(pairs, weights, strict=False):
        total[pair] = total.get(pair, 0) + weight
    expected = any(total[u, v] != total.get((v, u)) for u, v in total)
    assert is_directed(edges, np.array(weights[: len(pairs)]), 5) == expected


@pytest.mark.parametrize(
    "y",
    [
        torch.tensor([0, 1, -1, 1]),
        torch.tensor([[0], [1], [-1], [1]]),
        torch.tensor([0.0, 1.0, float("nan"), 1.0]),
        torch.tensor([0, 1, -100, 1]),
    ],
)
def test_labels_of_all_forms(y: torch.Tensor) -> None:
    assert as_graph(ring(y=y)).labels.tolist() == [0, 1, UNLABELLED, 1]


def test_names_of_classes_are_kept() -> None:
    federation = load(ring(class_names=["honest", "fraud", "unseen"]), split="0.5,0.25,0.25")
    assert federation.classes == ("honest", "fraud", "unseen")
    assert "has 1 name" in refusal(ring(class_names=["honest"]))


def test_masks_with_columns_are_several_splits() -> None:
    column = torch.tensor([True, False, False, False])
    train = torch.stack([column, column.roll(1)], dim=1)
    data = ring(train_mask=train, val_mask=train.roll(2, 0), test_mask=torch.tensor([0, 0, 0, 1]))
    data.test_mask[3], data.val_mask[3] = 0, False
    graph = as_graph(data)
    assert [masks.train.tolist() for masks in graph.own_masks] == train.T.tolist()
    for seed in range(3):
        (client,) = load(data, seed=seed).clients
        assert client.masks is not None
        assert client.masks.train.tolist() == train[:, seed % 2].tolist()


def test_a_mask_without_columns_serves_all_splits() -> None:
    train = torch.tensor([[True, False], [False, True], [False, False], [False, False]])
    data = ring(train_mask=train, test_mask=torch.tensor([False, False, True, True]))
    first, second = as_graph(data).own_masks
    assert first.test.tolist() == second.test.tolist() == [False, False, True, True]
    assert not first.val.any()


def test_a_split_that_only_some_clients_have_is_refused_and_not_dropped() -> None:
    mask = torch.tensor([True, False, False, False])
    split = ring(train_mask=mask, val_mask=mask.roll(1), test_mask=mask.roll(2), name="Lyon")
    for given_graphs in ([split, ring()], [ring(), split]):
        assert "client 'Lyon' has a split of its own, and client" in refusal(given_graphs)
        assert len(load(given_graphs, split="0.5,0.25,0.25")) == 2


MISTAKES = [
    (ring(x=None, num_nodes=4), "has no node features x: add some, such as a constant"),
    (ring(x=torch.arange(4.0)), "features have shape (4,): give [nodes, features]"),
    (
        ring(x=torch.tensor([[0.0], [1], [float("inf")], [2]])),
        "feature 0 of node 2 is not a finite",
    ),
    (ring(y=None), "has no labels: give every node one"),
    (ring(y=torch.tensor([1])), "Labels of whole graphs are not supported"),
    (ring(y=torch.eye(4)), "give y.argmax(dim=1)"),
    (ring(y=torch.tensor([0.0, 0.5, 1.0, 0.0])), "node 1 has y = 0.5"),
    (ring(edge_index=None), "neither edge_index nor adj_t"),
    (ring(edge_index=torch.tensor([[0], [9]])), "edge 0 joins nodes 0 and 9"),
    (ring(edge_index=torch.tensor(RING).T), "transpose them"),
    (ring(edge_weight=-torch.ones(8)), "edge 0 has the weight -1"),
    (ring(edge_weight=torch.ones(3)), "edge weights have shape (3,)"),
    (ring(train_mask=torch.tensor([0, 1])), "train_mask is int64 of shape (2,)"),
    (ring(train_mask=torch.ones(4).bool(), val_mask=torch.ones(4).bool()), "in more than one of"),
    (HeteroData(), "data.to_homogeneous()"),
    (TemporalData(), "is a TemporalData"),
    (sp.eye(3), "give the tuple (adjacency, features, labels)"),
    ([], "no graph was given"),
    ([ring(), {}], "a dict is not a graph"),
    (3, "a int is not a graph"),
]


@pytest.mark.parametrize(("given", "message"), MISTAKES, ids=[text for _, text in MISTAKES])
def test_what_cannot_be_used_is_explained(given: Any, message: str) -> None:
    assert message in refusal(given)


def test_datasets_of_torch_geometric(real_data: Path, tmp_path: Path) -> None:
    for name in ("Planetoid/Cora", "WebKB/texas"):
        shutil.copytree(real_data / name, tmp_path / name)
    cora = Planetoid(str(tmp_path / "Planetoid"), "Cora")
    (client,) = load(cora).clients
    (own,) = load("cora", clients=1, partition="random", root=real_data).clients
    assert own.node_ids is not None
    order = np.argsort(own.node_ids)
    np.testing.assert_array_equal(dense(client), dense(own)[order])
    np.testing.assert_array_equal(client.edges, own.subgraph(order).edges)
    assert client.masks is not None
    assert int(client.masks.train.sum()) == 140
    texas = WebKB(str(tmp_path / "WebKB"), "Texas")
    for seed in (0, 3):
        (client,) = load(texas, seed=seed).clients
        assert client.masks is not None
        np.testing.assert_array_equal(client.masks.train, texas[0].train_mask[:, seed])
    assert client.arcs is not None
    assert len(load(cora, clients=5, partition="random")) == 5


def test_errors_name_the_graph_of_a_list() -> None:
    assert "graph 'client-1'" in refusal([ring(), ring(x=None, num_nodes=4)])
    assert "graph 'Lyon'" in refusal([ring(), ring(y=None, name="Lyon")])


def test_a_heterogeneous_graph_made_homogeneous_is_loaded() -> None:
    data = HeteroData()
    for kind in ("person", "firm"):
        data[kind].x, data[kind].y = torch.rand(5, 2), torch.tensor([0, 1, 0, 1, 0])
    data["person", "owns", "firm"].edge_index = torch.tensor([[0, 1], [2, 3]])
    data["person", "knows", "person"].edge_index = torch.tensor([[0, 1], [1, 0]])
    (client,) = load(data.to_homogeneous()).clients
    assert (client.num_nodes, client.num_edges, len(client.relations)) == (10, 3, 2)


def test_other_libraries_are_not_imported() -> None:
    code = (
        "import sys, numpy, polyphily\n"
        "graph = polyphily.Graph.build(numpy.ones((3, 1)), [[0], [1]], [0, 1, 0])\n"
        "polyphily.load(graph)\n"
        "print([name for name in ('torch_geometric', 'networkx', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# networkx ----------------------------------------------------------------------------------------


def karate() -> nx.Graph:
    graph = nx.karate_club_graph()
    for node in graph:
        graph.nodes[node]["x"] = [graph.degree(node), 1.0]
    return graph


def test_text_labels_of_networkx_are_classes() -> None:
    graph = karate()
    nx.set_node_attributes(graph, nx.get_node_attributes(graph, "club"), "label")
    del graph.nodes[3]["label"]
    federation = load(graph)
    (client,) = federation.clients
    assert federation.classes == ("Mr. Hi", "Officer")
    assert client.labels[3] == UNLABELLED
    assert client.labels[33] == 1
    np.testing.assert_array_equal(
        client.weighted_adjacency().toarray(), nx.to_numpy_array(graph, dtype=np.float32)
    )


def test_attributes_of_networkx_by_name() -> None:
    graph = karate()
    for node in graph:
        graph.nodes[node]["age"] = node
    federation = load((graph, ["age", "x"], "club"))
    assert federation.classes == ("Mr. Hi", "Officer")
    assert federation.clients[0].features[5].tolist() == [5, graph.degree(5), 1]
    by_number = polyphily.graph(graph, "age", [0] * 34, weight=None)
    assert by_number.features[:, 0].tolist() == list(range(34))
    assert by_number.edge_weights is None
    with pytest.raises(UserError, match="labels are text"):
        polyphily.graph(graph, "age", "club")


def test_directed_networkx_graphs_and_names_of_nodes() -> None:
    graph = nx.DiGraph(name="transfers")
    graph.add_edge("ann", "bob", weight=2.0)
    graph.add_edge("bob", "cyd")
    for number, node in enumerate(graph):
        graph.nodes[node].update(x=float(number), y=number % 2, split="train" if number else "test")
    (client,) = load(graph).clients
    assert client.name == "transfers"
    assert client.node_ids is not None
    assert client.node_ids.tolist() == ["ann", "bob", "cyd"]
    assert client.arcs is not None
    assert client.edges[:, client.arcs].T.tolist() == [[0, 1], [1, 2]]
    assert client.weighted_adjacency().toarray().tolist() == [[0, 2, 0], [0, 0, 1], [0, 0, 0]]
    assert client.masks is not None
    assert client.masks.train.tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g: g.nodes[4].pop("x"), "node 4 has no attribute 'x'"),
        (lambda g: g.nodes[4].update(x="red"), "attribute 'x' is not a number at every node"),
        (lambda g: g.nodes[4].update(x=[1.0]), "has [1, 2] numbers"),
        (lambda g: g.nodes[4].update(split="tain"), "node 4 has split 'tain'"),
        (lambda g: g.edges[0, 1].update(weight="big"), "of an edge is not a number"),
    ],
)
def test_what_is_wrong_in_a_networkx_graph_is_named(change: Any, message: str) -> None:
    graph = karate()
    nx.set_node_attributes(graph, 0, "y")
    change(graph)
    assert message in refusal(graph)


def test_labels_with_names_and_labels_with_numbers_in_one_list() -> None:
    graph = karate()
    text = (graph, "x", "club")
    number = (graph, "x", [0, 1] * 17)
    found = convert([text, number])
    assert found.classes == ("Mr. Hi", "Officer")
    assert found.graphs[1].labels.tolist() == [0, 1] * 17
    assert "has the label 2" in refusal([text, (graph, "x", [2] * 34)])


def test_a_graph_to_predict_takes_the_positions_of_known_classes() -> None:
    graph = karate()
    nx.set_node_attributes(graph, nx.get_node_attributes(graph, "club"), "label")
    found = as_graph(graph, classes=("Officer", "other"))
    assert set(found.labels.tolist()) == {0, UNLABELLED}
    assert as_graph(ring(y=None)).labels.tolist() == [UNLABELLED] * 4


# scipy -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [sp.csr_array, sp.coo_matrix, np.asarray])
def test_an_adjacency_with_features_and_labels(kind: Any) -> None:
    matrix = kind(np.array([[0, 2, 0], [2, 0, 1], [0, 1, 0]], dtype=np.float32))
    graph = polyphily.graph(matrix, np.eye(3), [0, 1, 0], node_ids=["a", "b", "c"])
    np.testing.assert_array_equal(
        graph.weighted_adjacency().toarray(), [[0, 2, 0], [2, 0, 1], [0, 1, 0]]
    )
    assert graph.arcs is None
    one_way = polyphily.graph(sp.csr_array(([1], ([0], [1])), shape=(2, 2)), np.eye(2), [0, 1])
    assert one_way.arcs is not None
    assert one_way.edge_weights is None


def test_an_adjacency_that_is_not_square_is_refused() -> None:
    with pytest.raises(UserError, match="as many rows as columns"):
        polyphily.graph(np.ones((2, 3)), np.eye(2), [0, 1])
    with pytest.raises(UserError, match="give features beside the adjacency"):
        polyphily.graph(sp.eye(3))
    with pytest.raises(UserError, match="2 node ids for 3 nodes"):
        polyphily.graph(sp.eye(3), np.eye(3), [0, 1, 0], node_ids=["a", "b"])


# Out, and in again -------------------------------------------------------------------------------


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Draw a graph with a split, and with or without weights, direction, relations and ids."""
    nodes = draw(st.integers(3, 8))
    count = draw(st.integers(0, 14))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    width = draw(st.sampled_from([1, 3, 100]))
    features = rng.normal(size=(nodes, width)) * (rng.random((nodes, width)) < 0.08)
    labels = rng.integers(-1, 3, nodes)
    labels[0] = 2
    part = np.where(labels >= 0, rng.integers(0, 4, nodes), 3)
    part[0] = 0
    types = draw(st.booleans())
    return Graph.build(
        features if draw(st.booleans()) else sp.csr_array(features),
        rng.integers(0, nodes, (2, count)),
        labels,
        edge_weights=rng.integers(1, 5, count) / 4 if draw(st.booleans()) else None,
        directed=draw(st.booleans()),
        edge_types=rng.integers(0, 2, count) if types else None,
        relations=("pays", "knows") if types else (),
        masks=Masks(*(part == k for k in range(3))),
        name="drawn",
        node_ids=draw(
            st.sampled_from([None, np.arange(nodes) * 7, np.array([f"n{i}" for i in range(nodes)])])
        ),
    )


@given(graph=graphs(), sparse=st.booleans())
@settings(max_examples=80, deadline=None)
def test_data_made_of_a_federation_gives_the_same_federation(graph: Graph, sparse: bool) -> None:
    federation = load(graph)
    again = load(federation.to_pyg(sparse=sparse))
    assert_same_graph(again.clients[0], federation.clients[0])
    assert again.classes == federation.classes


@given(graph=graphs())
@settings(max_examples=60, deadline=None)
def test_networkx_and_back(graph: Graph) -> None:
    federation = load(graph)
    names = ("zero", "one", "two")
    again = load(to_networkx(federation.clients[0], names))
    (client,) = again.clients
    np.testing.assert_array_equal(dense(client), dense(graph))
    np.testing.assert_array_equal(client.edges, graph.edges)
    if graph.edge_weights is not None and graph.num_edges:
        np.testing.assert_array_equal(client.edge_weights, graph.edge_weights)
    assert (client.arcs is None) == (graph.arcs is None)
    known = [names[label] if label >= 0 else None for label in graph.labels]
    found = [again.classes[label] if label >= 0 else None for label in client.labels]
    assert found == known


def test_a_divided_federation_keeps_names_ids_and_classes() -> None:
    federation = load("csbm:nodes=60,features=8", clients=3)
    again = load(federation.to_pyg())
    for one, other in zip(federation.clients, again.clients, strict=True):
        assert_same_graph(one, other)
    assert again.classes == federation.classes


def test_data_are_copies_and_splits_without_one_in_use_are_columns() -> None:
    mask = np.array([True, False, False, False])
    own = tuple(Masks(np.roll(mask, k), np.roll(mask, k + 1), np.roll(mask, k + 2)) for k in (0, 1))
    graph = Graph.build(np.eye(4), RING, [0, 1, 0, 1], own_masks=own)
    data = to_pyg(graph)
    assert data.train_mask.T.tolist() == [masks.train.tolist() for masks in own]
    data.x.zero_()
    assert dense(graph).sum() == 4
    assert len(as_graph(data).own_masks) == 2
