"""`Data` of torch_geometric, in and out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp

from polyphily.errors import UserError
from polyphily.graphs.conversion.parts import (
    PARTS,
    Found,
    as_matrix,
    checked_features,
    checked_labels,
    checked_splits,
    is_directed,
    unless_ones,
)
from polyphily.graphs.files.client import count, edge_notes
from polyphily.graphs.graph import UNLABELLED, Graph, IntArray, as_array

if TYPE_CHECKING:
    from torch_geometric.data import Data


def from_data(data: Any, name: str, features: Any = None, labels: Any = None) -> Found:
    """Convert a `Data`, with other features or labels if they are given."""
    name = str(getattr(data, "name", None) or name)
    x = _given(data, "x") if features is None else features
    if x is None:
        raise UserError(
            f"graph '{name}': the Data has no node features x: add some, such as a constant "
            "(torch_geometric.transforms.Constant) or degrees (OneHotDegree)"
        )
    values = checked_features(x, name)
    nodes = values.shape[0]
    edges, weights, notes = _data_edges(data, name)
    types = _given(data, "edge_type")
    y = _given(data, "y") if labels is None else labels
    found = np.full(nodes, UNLABELLED) if y is None else checked_labels(y, nodes, name)
    masks = {part: _given(data, f"{part}_mask") for part in PARTS} if y is not None else {}
    directed = _given(data, "directed")
    built = Graph.build(
        values,
        edges,
        found,
        edge_weights=weights,
        directed=is_directed(edges, weights, nodes) if directed is None else bool(directed),
        edge_types=types,
        relations=tuple(map(str, _given(data, "relations") or ())) if types is not None else (),
        own_masks=checked_splits(masks, found, name),
        name=name,
        node_ids=_given(data, "node_ids"),
    )
    notes += edge_notes(edges, nodes)
    return Found(built, _class_names(data, found, name), y is not None, tuple(notes))


def _given(data: Any, key: str) -> Any:
    """Return an attribute of a `Data`, None if it has none."""
    return data[key] if key in data else None  # noqa: SIM401 - Data.get is missing in old releases


def _class_names(data: Any, labels: IntArray, name: str) -> tuple[str, ...] | None:
    given = _given(data, "class_names")
    if given is None:
        return None
    names = tuple(map(str, given))
    if len(names) <= labels.max(initial=0):
        raise UserError(
            f"graph '{name}': class_names has {count(len(names), 'name')}, but y has the label "
            f"{labels.max()}: name every class"
        )
    return names


def _data_edges(data: Any, name: str) -> tuple[IntArray, Any, list[str]]:
    """Return edges and their weights, if there are any, and notes on what is ignored."""
    notes: list[str] = []
    weights = _given(data, "edge_weight")
    edge_index = _given(data, "edge_index")
    if edge_index is None:
        transposed = _given(data, "adj_t")
        if transposed is None:
            raise UserError(
                f"graph '{name}': the Data has neither edge_index nor adj_t: give edge_index, of "
                "shape [2, 0] if there are no edges"
            )
        entries = sp.coo_array(as_matrix(transposed))
        edges = np.stack([entries.col, entries.row]).astype(np.int64)  # row v: the sources of v
        if weights is None:
            weights = unless_ones(entries.data)
    else:
        edges = as_array(edge_index)
        attributes = _given(data, "edge_attr")
        if weights is None and attributes is not None:
            values = as_array(attributes)
            if values.ndim == 1 or values.shape[1:] == (1,):
                weights = values.reshape(-1)
            else:
                notes.append(f"edge_attr of {values.shape[1]} columns ignored (one is a weight)")
    return edges, None if weights is None else as_array(weights).reshape(-1), notes


def to_pyg(graph: Graph, class_names: Sequence[str] = (), *, sparse: bool = False) -> Data:
    """Convert a graph to a torch_geometric `Data`.

    It has x, edge_index, y, masks, edge_weight, edge_type, node_ids and name, as far as the graph
    has them, and copies of all arrays. `load` reads all of these again. Features of a federation's
    client are those after encoding. An edge of several relations occurs once for each, with equal
    parts of its weight.

    Args:
        graph: the graph. Its split in use becomes the masks; without one, the splits that came
            with the data, with a column each.
        class_names: the names of the labels.
        sparse: whether sparse features stay sparse (a `torch.sparse_csr` tensor).
    """
    import torch
    from torch_geometric.data import Data

    features: Any = graph.features
    if sp.issparse(features) and sparse:
        parts = (features.indptr, features.indices, features.data)
        indptr, indices, values = (torch.tensor(part) for part in parts)
        x = torch.sparse_csr_tensor(indptr.long(), indices.long(), values, size=features.shape)
    else:
        x = torch.tensor(features.toarray() if sp.issparse(features) else features)
    edges, weights, types = given_edges(graph)
    data = Data(x=x, edge_index=torch.tensor(edges), y=torch.tensor(graph.labels), name=graph.name)
    if weights is not None:
        data.edge_weight = torch.tensor(weights)
    if types is not None:
        data.edge_type, data.relations = torch.tensor(types), list(graph.relations)
    if graph.arcs is not None:
        data.directed = True
    splits = [graph.masks] if graph.masks is not None else list(graph.own_masks)
    for part in PARTS if splits else ():
        columns = torch.tensor(np.stack([getattr(masks, part) for masks in splits], axis=1))
        data[f"{part}_mask"] = columns[:, 0] if len(splits) == 1 else columns
    if graph.node_ids is not None:
        ids = graph.node_ids
        data.node_ids = torch.tensor(ids) if ids.dtype.kind in "iu" else ids.tolist()
    if class_names:
        data.class_names = list(class_names)
    return data


def given_edges(graph: Graph) -> tuple[IntArray, Any, IntArray | None]:
    """Return edges as the data had them: arcs only, and an entry for every relation."""
    edges, weights, types = graph.edges, graph.edge_weights, graph.edge_types
    if graph.arcs is not None:
        edges = edges[:, graph.arcs]
        weights = None if weights is None else weights[graph.arcs]
        types = None if types is None else types[graph.arcs]
    if types is None:
        return edges, weights, None
    bits = (types[:, None] >> np.arange(len(graph.relations))) & 1
    entry, relation = np.nonzero(bits)
    shared = None if weights is None else weights[entry] / bits.sum(axis=1)[entry]
    return edges[:, entry], shared, relation.astype(np.int64)
