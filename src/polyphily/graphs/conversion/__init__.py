"""Graphs of other libraries, in and out: torch_geometric, networkx and scipy.

Objects are recognised by the names of their classes, so that no library is imported which the user
has not imported already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy.sparse as sp

from polyphily.errors import UserError
from polyphily.graphs.conversion.adjacency import from_adjacency
from polyphily.graphs.conversion.nx import from_networkx, to_networkx
from polyphily.graphs.conversion.parts import Found, is_directed
from polyphily.graphs.conversion.pyg import from_data, given_edges, to_pyg
from polyphily.graphs.files.client import is_whole, listed
from polyphily.graphs.graph import UNLABELLED, Graph, as_array

__all__ = [
    "Converted",
    "as_graph",
    "convert",
    "given_edges",
    "graph",
    "is_directed",
    "to_networkx",
    "to_pyg",
]

SOURCES = (
    "a polyphily.Graph, a torch_geometric Data, a networkx graph, or a tuple "
    "(scipy adjacency, features, labels)"
)


@dataclass(frozen=True)
class Converted:
    """Graphs in memory, as `load` takes them.

    Attributes:
        graphs: the graphs, whose labels are positions in `classes`.
        classes: the names of the labels; None if no graph names them.
        notes: what was ignored or removed.
    """

    graphs: tuple[Graph, ...]
    classes: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()


def convert(given: Any) -> Converted:
    """Convert whatever `load` takes that is no name and no file.

    Args:
        given: a graph (a `Graph`, a `Data`, a networkx graph, a tuple of adjacency, features and
            labels), a torch_geometric dataset or batch, or a list of graphs of any kind.

    Raises:
        UserError: for anything else, and for graphs without features or labels.
    """
    items = _items(given)
    if not items:
        raise UserError("no graph was given")
    digits = len(str(len(items) - 1))
    names = ["graph"] if len(items) == 1 else [f"client-{k:0{digits}d}" for k in range(len(items))]
    found = [_one(item, name) for item, name in zip(items, names, strict=True)]
    classes = _union([one.classes for one in found if one.classes is not None])
    graphs = tuple(_relabelled(one, classes) if classes else one.graph for one in found)
    for graph, one in zip(graphs, found, strict=True):
        if not one.labelled:
            raise UserError(
                f"graph '{graph.name}' has no labels: give every node one, as y, and -1 to nodes "
                "whose class is unknown"
            )
    notes = tuple(
        f"{one.graph.name}: {', '.join(one.notes)}" if len(found) > 1 else ", ".join(one.notes)
        for one in found
        if one.notes
    )
    return Converted(graphs, classes or None, notes)


def as_graph(given: Any, classes: Sequence[str] = (), name: str = "graph") -> Graph:
    """Convert one graph, which may be without labels, for predictions.

    Args:
        given: a `Graph`, a torch_geometric `Data`, a networkx graph, or a tuple of a scipy
            adjacency, features and, if there are any, labels.
        classes: the names that labels are positions in, for graphs whose labels have names. A
            node whose label is not among them has no label.
        name: the name of the graph in messages, unless it has one.

    Raises:
        UserError: if it is no such graph, or a part of it cannot be used.
    """
    found = _one(given, name)
    return _relabelled(found, tuple(classes)) if classes else found.graph


def graph(
    source: Any,
    features: Any = None,
    labels: Any = None,
    *,
    weight: str | None = "weight",
    name: str = "graph",
    node_ids: Any = None,
) -> Graph:
    """Build a graph from an adjacency matrix, a networkx graph or a torch_geometric `Data`.

    Args:
        source: a scipy sparse matrix or a square array, whose entry (u, v) is the weight of the
            edge from u to v; or a networkx graph; or a `Data`.
        features: `[n, f]`, dense or sparse. For a networkx graph also the name of a node attribute
            or a list of names; "x" unless given. For a `Data` its `x` unless given.
        labels: `[n]`, whole numbers from 0, and -1 for a node without a label. For a networkx graph
            also the name of a node attribute; "y" or "label" unless given.
        weight: the edge attribute of a networkx graph that holds weights, if there is one.
        name: the name of the graph in messages.
        node_ids: ids of the nodes. Those of a networkx graph are its nodes.

    >>> import scipy.sparse
    >>> ring = scipy.sparse.csr_array([[0, 1, 1], [1, 0, 1], [1, 1, 0]])
    >>> graph(ring, [[0.0], [1.0], [2.0]], [0, 1, -1]).num_edges
    3

    Raises:
        UserError: if a part is missing or does not fit.
    """
    kind = _kind(source)
    if kind == "networkx":
        found = from_networkx(source, name, features, labels, weight)
    elif kind == "data":
        found = from_data(source, name, features, labels)
    else:
        found = from_adjacency(source, features, labels, name)
    if found.classes is not None and not all(map(is_whole, found.classes)):
        raise UserError(
            f"graph '{name}': labels are text ({listed(found.classes, 3)}), but a Graph has whole "
            "numbers: give polyphily.load the tuple (source, features, labels), which keeps names"
        )
    made = found.graph if node_ids is None else replace(found.graph, node_ids=as_array(node_ids))
    if made.node_ids is not None and len(made.node_ids) != made.num_nodes:
        raise UserError(
            f"graph '{name}': there are {len(made.node_ids)} node ids for {made.num_nodes} nodes"
        )
    return made


def _kind(given: Any) -> str:
    """Return which library's object this is, by the names of its classes."""
    if isinstance(given, Graph):
        return "graph"
    if sp.issparse(given):
        return "scipy"
    names = {(cls.__module__.partition(".")[0], cls.__name__) for cls in type(given).__mro__}
    for name, kind in (
        (("torch_geometric", "HeteroData"), "hetero"),
        (("torch_geometric", "TemporalData"), "temporal"),
        (("torch_geometric", "Batch"), "batch"),
        (("torch_geometric", "Data"), "data"),
        (("torch_geometric", "Dataset"), "dataset"),
        (("networkx", "Graph"), "networkx"),
    ):
        if name in names:
            return kind
    if isinstance(given, tuple) and given and _kind(given[0]) in ("scipy", "networkx"):
        return "tuple"
    return "unknown"


def _items(given: Any) -> list[Any]:
    """Return the graphs that were given, one or many."""
    kind = _kind(given)
    if kind == "batch":
        return list(given.to_data_list())
    if kind == "dataset":
        return [given[i] for i in range(len(given))]
    if kind == "unknown" and isinstance(given, list | tuple):
        return list(given)
    return [given]


def _one(given: Any, name: str) -> Found:
    kind = _kind(given)
    if kind == "graph":
        return Found(given)
    if kind == "data":
        return from_data(given, name)
    if kind == "networkx":
        return from_networkx(given, name)
    if kind == "tuple":
        return _from_tuple(given, name)
    if kind == "hetero":
        raise UserError(
            f"graph '{name}' is a HeteroData, with several types of nodes: convert it with "
            "data.to_homogeneous() (all types of nodes need features of one width; types of edges "
            "stay, as edge_type), or choose one type of nodes and make a Data of it"
        )
    if kind == "temporal":
        raise UserError(
            f"graph '{name}' is a TemporalData: make a Data of the edges of a period, with x and y"
        )
    if kind == "scipy":
        raise UserError(
            f"graph '{name}' is an adjacency matrix without features and labels: give the tuple "
            "(adjacency, features, labels)"
        )
    raise UserError(f"a {type(given).__name__} is not a graph: give {SOURCES}")


def _from_tuple(given: tuple[Any, ...], name: str) -> Found:
    if len(given) not in (2, 3):
        raise UserError(
            f"graph '{name}' is a tuple of {len(given)}: give (adjacency, features, labels)"
        )
    source, features, labels = (*given, None)[:3]
    if _kind(source) == "networkx":
        return from_networkx(source, name, features, labels)
    return from_adjacency(source, features, labels, name)


def _union(named: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return all class names in the order in which they are met."""
    return tuple(dict.fromkeys(name for names in named for name in names))


def _relabelled(found: Found, classes: tuple[str, ...]) -> Graph:
    """Return the graph with labels as positions in `classes`, which numbers are already."""
    graph, names = found.graph, found.classes
    if graph.labels.max(initial=0) >= len(classes) and names is None:
        raise UserError(
            f"graph '{graph.name}' has the label {graph.labels.max()}, but the names of the "
            f"classes are {listed(classes)}: number the labels from 0 in this order"
        )
    if names is None or names == classes:
        return graph
    position = {name: i for i, name in enumerate(classes)}
    table = np.array([*(position.get(name, UNLABELLED) for name in names), UNLABELLED])
    return replace(graph, labels=table[graph.labels].astype(np.int64))
