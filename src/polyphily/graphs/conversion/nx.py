"""Graphs of networkx, in and out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from polyphily.errors import UserError
from polyphily.graphs.conversion.parts import (
    PARTS,
    Found,
    checked_features,
    checked_splits,
    coded_labels,
)
from polyphily.graphs.files.client import edge_notes, listed
from polyphily.graphs.graph import UNLABELLED, BoolArray, Graph, IntArray, as_array

if TYPE_CHECKING:
    import networkx as nx

LABELS = ("y", "label")  # node attributes in which a label is looked for


def from_networkx(
    source: Any,
    name: str,
    features: Any = None,
    labels: Any = None,
    weight: str | None = "weight",
) -> Found:
    """Convert a networkx graph.

    Args:
        source: the graph.
        name: its name, unless it has one.
        features: `[n, f]`, or the names of node attributes; "x" unless given.
        labels: `[n]`, or the name of a node attribute; "y" or "label" unless given.
        weight: the edge attribute of weights.
    """
    nodes = list(source)
    name = str(source.name or name)
    tables = [source.nodes[node] for node in nodes]
    if features is None or _is_names(features):
        wanted = ["x"] if features is None else features
        values = _attributes(tables, nodes, [wanted] if isinstance(wanted, str) else wanted, name)
    else:
        values = checked_features(features, name)
    codes, classes, labelled = _attribute_labels(tables, labels, name)
    position = {node: i for i, node in enumerate(nodes)}
    ends = [(position[u], position[v]) for u, v in source.edges()]
    edges = np.array(ends, dtype=np.int64).reshape(-1, 2).T
    weights = _networkx_weights(source, weight, name)
    masks = _split_attribute(tables, nodes, name) if labelled else {}
    ids = np.array(nodes if _are_integers(nodes) else [str(node) for node in nodes])
    made = Graph.build(
        values,
        edges,
        codes,
        edge_weights=weights,
        directed=bool(source.is_directed()),
        own_masks=checked_splits(masks, codes, name),
        name=name,
        node_ids=ids,
    )
    return Found(made, classes, labelled, tuple(edge_notes(edges, len(nodes))))


def _is_names(given: Any) -> bool:
    if isinstance(given, str):
        return True
    return isinstance(given, list | tuple) and all(isinstance(name, str) for name in given)


def _are_integers(nodes: Sequence[Any]) -> bool:
    return all(isinstance(node, int | np.integer) for node in nodes)


def _attributes(
    tables: Sequence[Mapping[str, Any]], nodes: Sequence[Any], names: Sequence[str], name: str
) -> npt.NDArray[np.float64]:
    """Return node attributes, numbers or vectors, side by side."""
    columns = []
    for attribute in names:
        missing = [
            node for node, table in zip(nodes, tables, strict=True) if attribute not in table
        ]
        if missing:
            known = sorted({str(key) for table in tables for key in table})
            raise UserError(
                f"graph '{name}': node {missing[0]!r} has no attribute '{attribute}' for features "
                f"(attributes found: {listed(known) or 'none'}). Set it at every node, or give "
                "polyphily.load the tuple (graph, names of attributes, name of the label)"
            )
        try:
            rows = [np.ravel(as_array(table[attribute])).astype(np.float64) for table in tables]
        except (TypeError, ValueError):
            raise UserError(
                f"graph '{name}': attribute '{attribute}' is not a number at every node: encode "
                "text as numbers, or leave the attribute out"
            ) from None
        widths = {len(row) for row in rows}
        if len(widths) > 1:
            raise UserError(
                f"graph '{name}': attribute '{attribute}' has {sorted(widths)} numbers: give every "
                "node as many"
            )
        columns.append(np.stack(rows) if rows else np.zeros((0, 1)))
    found: npt.NDArray[np.float64] = checked_features(np.concatenate(columns, axis=1), name)
    return found


def _attribute_labels(
    tables: Sequence[Mapping[str, Any]], labels: Any, name: str
) -> tuple[IntArray, tuple[str, ...] | None, bool]:
    """Return labels, the names of the classes if they are text, and whether there are labels."""
    if labels is None:
        labels = next((key for key in LABELS if any(key in table for table in tables)), None)
        if labels is None:
            return np.full(len(tables), UNLABELLED), None, False
    elif not isinstance(labels, str):
        return (*coded_labels(labels, len(tables), name), True)
    elif tables and not any(labels in table for table in tables):
        raise UserError(f"graph '{name}': no node has the attribute '{labels}' for its label")
    return (*coded_labels([table.get(labels) for table in tables], len(tables), name), True)


def _networkx_weights(source: Any, weight: str | None, name: str) -> Any:
    """Return the weights of edges; 1 for an edge without, None if no edge has one."""
    if weight is None:
        return None
    found = [value for _, _, value in source.edges(data=weight)]
    if all(value is None for value in found):
        return None
    try:
        return np.array([1.0 if value is None else float(value) for value in found])
    except (TypeError, ValueError):
        raise UserError(
            f"graph '{name}': the attribute '{weight}' of an edge is not a number: correct it, or "
            "build the graph with polyphily.graph(…, weight=None)"
        ) from None


def _split_attribute(
    tables: Sequence[Mapping[str, Any]], nodes: Sequence[Any], name: str
) -> dict[str, BoolArray]:
    """Return masks from the node attribute "split"; no mask if no node has it."""
    found = [table.get("split") for table in tables]
    for node, value in zip(nodes, found, strict=True):
        if value not in (None, "", *PARTS):
            raise UserError(
                f"graph '{name}': node {node!r} has split {value!r}: give train, val, test or none"
            )
    if not any(found):
        return {}
    return {part: np.array([value == part for value in found], dtype=np.bool_) for part in PARTS}


def to_networkx(graph: Graph, class_names: Sequence[str] = ()) -> nx.Graph:
    """Convert a graph to a networkx graph, directed if its edges have a direction.

    Nodes are the ids of the graph's nodes, or 0 to n - 1. They have the attributes x (an array), y
    (the label, or its name; none if unknown) and split, edges the attributes weight and relations,
    as far as the graph has them. `load` reads them again but for relations.

    Args:
        graph: the graph.
        class_names: the names of the labels.
    """
    import networkx as nx

    made = nx.Graph(name=graph.name) if graph.arcs is None else nx.DiGraph(name=graph.name)
    ids = list(range(graph.num_nodes)) if graph.node_ids is None else graph.node_ids.tolist()
    features: Any = graph.features
    for node, (row, label) in enumerate(zip(features, graph.labels.tolist(), strict=True)):
        values = row.toarray().ravel() if sp.issparse(row) else row.copy()
        known = {} if label == UNLABELLED else {"y": class_names[label] if class_names else label}
        made.add_node(ids[node], x=values, **known)
    for part in PARTS if graph.masks is not None else ():
        for node in np.flatnonzero(getattr(graph.masks, part)).tolist():
            made.nodes[ids[node]]["split"] = part
    kept = graph.edges[0] < graph.edges[1] if graph.arcs is None else graph.arcs
    for entry in np.flatnonzero(kept).tolist():
        source, target = (ids[node] for node in graph.edges[:, entry].tolist())
        made.add_edge(source, target)
        if graph.edge_weights is not None:
            made[source][target]["weight"] = float(graph.edge_weights[entry])
        if graph.edge_types is not None:
            bits = int(graph.edge_types[entry])
            names = [name for r, name in enumerate(graph.relations) if bits >> r & 1]
            made[source][target]["relations"] = names
    return made
