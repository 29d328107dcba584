"""Degrees as features: how many neighbours a node has, in columns beside its own features."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import scipy.sparse as sp

from polyphily.graphs.graph import FloatArray, Graph

BINS = 10  # the last is for 511 neighbours and more
COLUMNS = BINS + 1


def degree_columns(graph: Graph) -> FloatArray:
    """Return the columns of every node, `[n, COLUMNS]`: which power of two, and the logarithm.

    Column b < `BINS` marks nodes with 2^b - 1 to 2^(b+1) - 2 neighbours, so that a node without
    any has the first one. The last column is log2(1 + neighbours) / `BINS`. A node's columns
    depend on its own neighbours alone: not on their weights, nor on other nodes' degrees.
    """
    neighbours = np.bincount(graph.edges[0], minlength=graph.num_nodes)
    logs = np.log2(1 + neighbours)
    found = np.zeros((graph.num_nodes, COLUMNS), dtype=np.float32)
    found[np.arange(graph.num_nodes), np.minimum(logs.astype(np.int64), BINS - 1)] = 1
    found[:, BINS] = logs / BINS
    return found


def with_degrees(graph: Graph) -> Graph:
    """Return the graph with the columns of degrees after its own features."""
    columns = degree_columns(graph)
    features = graph.features
    if sp.issparse(features):
        joined = sp.csr_array(sp.hstack([features, sp.csr_array(columns)], format="csr"))
        return replace(graph, features=joined)
    return replace(graph, features=np.concatenate([features, columns], axis=1))
