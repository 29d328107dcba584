"""Canonical edges: weights, directions and types against a computation with dictionaries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyphily.errors import UserError
from polyphily.graphs.edges import MOST_RELATIONS, UNTYPED
from polyphily.graphs.graph import Graph, join_relations, relations_of

NODES = 6
EDGE = st.tuples(
    st.integers(0, NODES - 1),
    st.integers(0, NODES - 1),
    st.integers(0, 8),  # a weight in quarters
    st.integers(0, 2),
)


def build(edges: Any, **given_: Any) -> Graph:
    pairs = np.array([edge[:2] for edge in edges], dtype=np.int64).reshape(-1, 2).T
    return Graph.build(np.ones((NODES, 1)), pairs, np.zeros(NODES, int), **given_)


def expected(
    edges: list[tuple[int, int, int, int]], *, directed: bool
) -> dict[tuple[int, int], tuple[float, bool, int]]:
    """Return weight, arc and relations of every entry, by the rules in words."""
    arcs: dict[tuple[int, int], list[Any]] = {}
    for u, v, quarters, kind in edges:
        if u != v and quarters:
            entry = arcs.setdefault((u, v), [0.0, 0])
            entry[0] += quarters / 4
            entry[1] |= 1 << kind
    found = {}
    for u, v in {*arcs, *(pair[::-1] for pair in arcs)}:
        own, other = arcs.get((u, v)), arcs.get((v, u))
        first = own or other
        assert first is not None
        if directed:
            found[u, v] = (first[0], own is not None, first[1])
        else:
            second = other or first
            found[u, v] = ((first[0] + second[0]) / 2, True, first[1] | second[1])
    return found


@settings(max_examples=200, deadline=None)
@given(st.lists(EDGE, max_size=20), st.booleans())
def test_every_entry_has_weight_arc_and_relations(edges: list[Any], directed: bool) -> None:
    graph = build(
        edges,
        edge_weights=[e[2] / 4 for e in edges],
        edge_types=np.array([e[3] for e in edges], dtype=np.int64),
        relations=("a", "b", "c"),
        directed=directed,
    )
    assert graph.edge_weights is not None
    assert graph.edge_types is not None
    arcs = np.ones(graph.edges.shape[1], bool) if graph.arcs is None else graph.arcs
    assert (graph.arcs is not None) == directed
    rows = zip(
        graph.edges.T.tolist(),
        graph.edge_weights.tolist(),
        arcs.tolist(),
        graph.edge_types.tolist(),
        strict=True,
    )
    assert {tuple(pair): (w, a, t) for pair, w, a, t in rows} == expected(edges, directed=directed)
    keys = graph.edges[0] * NODES + graph.edges[1]
    assert (np.diff(keys) > 0).all()
    # Without attributes the same edges are found, but for those of weight 0.
    plain = build([e for e in edges if e[2]])
    assert np.array_equal(plain.edges, graph.edges)
    assert plain.edge_weights is None
    assert plain.arcs is None
    assert plain.edge_types is None


@settings(max_examples=60, deadline=None)
@given(st.lists(EDGE, max_size=20), st.booleans(), st.permutations(range(NODES)), st.integers(0, 6))
def test_a_subgraph_has_the_attributes_of_its_edges(
    edges: list[Any], directed: bool, order: list[int], count: int
) -> None:
    nodes = np.array(order[:count], dtype=np.int64)
    kinds = {"directed": directed, "relations": ("a", "b", "c")}
    whole = build(
        edges,
        edge_weights=[e[2] / 4 for e in edges],
        edge_types=np.array([e[3] for e in edges], dtype=np.int64),
        **kinds,
    )
    part = whole.subgraph(nodes)
    inside = [e for e in edges if e[0] in nodes and e[1] in nodes]
    place = {node: i for i, node in enumerate(nodes.tolist())}
    again = Graph.build(
        np.ones((count, 1)),
        np.array([[place[e[0]], place[e[1]]] for e in inside], int).reshape(-1, 2).T,
        np.zeros(count, int),
        edge_weights=[e[2] / 4 for e in inside],
        edge_types=np.array([e[3] for e in inside], dtype=np.int64),
        **kinds,
    )
    for name in ("edges", "edge_weights", "arcs", "edge_types"):
        np.testing.assert_array_equal(getattr(part, name), getattr(again, name))
    assert part.relations == whole.relations


def test_the_weighted_adjacency_has_an_entry_for_every_arc() -> None:
    edges = [(0, 1), (1, 0), (1, 2), (3, 4)]
    weights = [1.0, 3.0, 5.0, 7.0]
    directed = build(edges, edge_weights=weights, directed=True)
    wanted = sp.coo_array((weights, np.array(edges).T), shape=(NODES, NODES)).toarray()
    np.testing.assert_array_equal(directed.weighted_adjacency().toarray(), wanted)
    symmetric = build(edges, edge_weights=weights).weighted_adjacency().toarray()
    np.testing.assert_array_equal(symmetric, symmetric.T)
    assert symmetric[0, 1] == 2
    assert symmetric[2, 1] == 5
    np.testing.assert_array_equal(directed.adjacency().toarray(), symmetric > 0)
    np.testing.assert_array_equal(build(edges).weighted_adjacency().toarray(), symmetric > 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"edge_weights": [1.0]}, "edge weights have shape (1,), but there are 2 edges"),
        ({"edge_weights": [1.0, -2.0]}, "edge 1 has the weight -2.0: give finite numbers from 0"),
        ({"edge_weights": [np.nan, 1.0]}, "edge 0 has the weight nan"),
        ({"edge_weights": [1e60, 1.0]}, "edge 0 has the weight 1e+60"),
        ({"edge_weights": ["a", "b"]}, "edge weights have dtype <U1: give numbers"),
        ({"edge_types": [0]}, "edge types have shape (1,), but there are 2 edges"),
        ({"edge_types": [0.0, 1.0]}, "edge types have dtype float64"),
        ({"edge_types": [0, 2], "relations": ("a", "b")}, "edge 1 has the type 2, but there are 2"),
        ({"edge_types": [0, -1]}, "edge 1 has the type -1"),
        ({"edge_types": [0, 1], "relations": ("a", "a")}, "the same name twice: a, a"),
        ({"edge_types": [0, 1], "relations": ("a", "b,c")}, "'b,c' has a name with a comma"),
        ({"relations": ("a",)}, "relations are named, but edge_types are not given"),
        ({"edge_types": [0, MOST_RELATIONS]}, f"{MOST_RELATIONS + 1} relations, but at most"),
    ],
)
def test_attributes_that_do_not_fit_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=r"graph 'north': ") as caught:
        build([(0, 1), (1, 2)], name="north", **changes)
    assert words in str(caught.value)


def test_relations_without_names_are_numbered() -> None:
    assert build([(0, 1), (1, 2)], edge_types=[0, 2]).relations == ("0", "1", "2")


@pytest.mark.parametrize("layout", ["dense", "coo", "csr", "bfloat16"])
def test_tensors_of_every_layout_are_taken(layout: str) -> None:
    x = torch.arange(18.0).view(NODES, 3)
    given_x: Any = {
        "dense": x.requires_grad_(),
        "coo": x.detach().to_sparse_coo(),
        "csr": x.detach().to_sparse_csr(),
        "bfloat16": x.detach().bfloat16(),
    }[layout]
    graph = Graph.build(
        given_x,
        torch.tensor([[0, 1], [1, 2]]),
        torch.zeros(NODES, dtype=torch.long),
        edge_weights=torch.tensor([0.5, 2.0], requires_grad=True),
        edge_types=torch.tensor([1, 0], dtype=torch.int32),
        node_ids=torch.arange(NODES),
    )
    features: Any = graph.features
    assert sp.issparse(features) == (layout in ("coo", "csr"))
    dense = features.toarray() if sp.issparse(features) else features
    np.testing.assert_array_equal(dense, x.detach().numpy())
    assert graph.edge_weights is not None
    assert graph.edge_weights.tolist() == [0.5, 0.5, 2.0, 2.0]
    assert graph.node_ids is not None
    assert graph.node_ids.tolist() == list(range(NODES))


def test_relations_are_agreed_on_by_name() -> None:
    one = build([(0, 1), (1, 2)], edge_types=[0, 1], relations=("work", "family"))
    other = build([(0, 1)], edge_types=[0], relations=("trade",))
    untyped, empty = build([(0, 1)]), build([])
    assert relations_of([one, other, empty]) == ("family", "trade", "work")
    assert relations_of([untyped, one]) == ("family", "work", UNTYPED)
    assert relations_of([untyped, empty]) == ()
    assert join_relations([(UNTYPED,), (), ("b", "a")]) == ("a", "b", UNTYPED)
