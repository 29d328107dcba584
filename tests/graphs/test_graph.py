"""Building graphs: what is brought into form, and what is refused with a remedy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from polyphily.errors import UserError
from polyphily.graphs.graph import UNLABELLED, Graph, Masks

NODES = 10


def parts(**changes: Any) -> dict[str, Any]:
    """The arguments of `Graph.build` for a path of ten nodes, with some replaced."""
    path = np.stack([np.arange(NODES - 1), np.arange(1, NODES)])
    valid = {"features": np.ones((NODES, 3)), "edges": path, "labels": np.arange(NODES) % 2}
    return valid | changes


def refusal(**changes: Any) -> str:
    with pytest.raises(UserError) as caught:
        Graph.build(**parts(name="north", **changes))
    assert str(caught.value).startswith("graph 'north': ")
    return str(caught.value)


def masks(nodes: int = NODES, dtype: Any = np.bool_) -> Masks:
    return Masks(*np.eye(3, nodes, dtype=dtype))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"labels": np.zeros(890, int)}, "features have 10 rows, but there are 890 labels"),
        ({"features": sp.csr_array((9, 3))}, "features have 9 rows, but there are 10 labels"),
        ({"features": np.ones(NODES)}, "features have shape (10,): give [nodes, features]"),
        ({"labels": np.zeros((NODES, 2), int)}, "labels have shape (10, 2): give one whole number"),
        ({"labels": np.array(["a"] * NODES)}, "labels have dtype <U1: give whole numbers from 0"),
        ({"labels": np.full(NODES, 0.5)}, "node 0 has the label 0.5: give whole numbers"),
        ({"labels": np.array([0.0, np.nan] * 5)}, "node 1 has the label nan: give whole numbers"),
        ({"labels": np.array([0, 1, -2, 0, 0] * 2)}, "node 2 has the label -2"),
        ({"edges": np.zeros((5, 2), int)}, "edges have shape (5, 2), but [2, edges] is needed"),
        ({"edges": np.zeros((5, 2), int)}, "transpose them (edges.T)"),
        ({"edges": np.zeros(4, int)}, "edges have shape (4,), but [2, edges] is needed"),
        ({"edges": np.zeros((3, 4), int)}, "edges have shape (3, 4)"),
        ({"edges": np.ones((2, 4))}, "edges have dtype float64"),
        ({"edges": np.array([[0, 1], [2, 10]])}, "edge 1 joins nodes 1 and 10, but there are 10"),
        ({"edges": np.array([[-1], [2]])}, "edge 0 joins nodes -1 and 2"),
        ({"masks": masks(9)}, "the train mask is bool of shape (9,): give one boolean per node"),
        ({"own_masks": (masks(), masks(11))}, "the train mask is bool of shape (11,)"),
        ({"masks": masks(dtype=np.int64)}, "the train mask is int64 of shape (10,)"),
        ({"node_ids": np.arange(4)}, "there are 4 node ids for 10 nodes"),
    ],
)
def test_parts_that_do_not_fit_are_refused(changes: dict[str, Any], words: str) -> None:
    assert words in refusal(**changes)


def test_columns_of_two_edges_are_read_as_they_are() -> None:
    """An array of two by two may be meant either way."""
    graph = Graph.build(**parts(edges=np.array([[0, 1], [2, 3]])))
    assert graph.edges.tolist() == [[0, 1, 2, 3], [2, 3, 0, 1]]


def test_edges_become_symmetric_without_loops_and_duplicates() -> None:
    graph = Graph.build(**parts(edges=np.array([[0, 1, 1, 2, 4], [1, 0, 0, 2, 3]])))
    assert graph.edges.tolist() == [[0, 1, 3, 4], [1, 0, 4, 3]]
    assert graph.num_edges == 2


def test_tensors_lists_and_whole_floats_are_taken() -> None:
    given = parts()
    plain = Graph.build(**given)
    tensors = Graph.build(**{name: torch.from_numpy(value) for name, value in given.items()})
    lists = Graph.build(**{name: value.tolist() for name, value in given.items()})
    floats = Graph.build(**parts(labels=given["labels"].astype(float)))
    for graph in (tensors, lists, floats):
        np.testing.assert_array_equal(graph.features, plain.features)
        np.testing.assert_array_equal(graph.edges, plain.edges)
        np.testing.assert_array_equal(graph.labels, plain.labels)
        assert graph.labels.dtype == np.int64


def test_a_graph_may_lack_edges_labels_and_nodes() -> None:
    graph = Graph.build(**parts(edges=np.zeros((2, 0)), labels=np.full(NODES, UNLABELLED)))
    assert graph.num_edges == 0
    empty = Graph.build(np.zeros((0, 3)), np.zeros((2, 0)), np.zeros(0))
    assert empty.num_nodes == 0
