"""Adjacency matrices of scipy with features and labels."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp

from polyphily.errors import UserError
from polyphily.graphs.conversion.parts import (
    Found,
    as_matrix,
    checked_features,
    coded_labels,
    is_directed,
    unless_ones,
)
from polyphily.graphs.files.client import edge_notes
from polyphily.graphs.graph import UNLABELLED, Graph


def from_adjacency(adjacency: Any, features: Any, labels: Any, name: str) -> Found:
    """Convert an adjacency matrix, whose entry (u, v) is the weight of the edge from u to v."""
    matrix = as_matrix(adjacency)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise UserError(
            f"graph '{name}': an adjacency has as many rows as columns, but this is "
            f"{tuple(matrix.shape)}; Graph.build(features, edges, labels) takes a list of edges"
        )
    if features is None:
        raise UserError(
            f"graph '{name}': give features beside the adjacency, [nodes, features]; without any, "
            "such as a constant (numpy.ones((n, 1))) or the degrees of nodes"
        )
    entries = sp.coo_array(matrix)
    entries.sum_duplicates()
    entries.eliminate_zeros()
    edges = np.stack([entries.row, entries.col]).astype(np.int64)
    weights = unless_ones(entries.data)
    nodes = matrix.shape[0]
    codes, classes = np.full(nodes, UNLABELLED), None
    if labels is not None:
        codes, classes = coded_labels(labels, nodes, name)
    made = Graph.build(
        checked_features(features, name),
        edges,
        codes,
        edge_weights=weights,
        directed=is_directed(edges, weights, nodes),
        name=name,
    )
    return Found(made, classes, labels is not None, tuple(edge_notes(edges, nodes)))
