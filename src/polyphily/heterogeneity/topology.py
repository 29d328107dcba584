"""The shape of a graph: degrees, density, clustering, components."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
from scipy.sparse.csgraph import connected_components

from polyphily.graphs.graph import Graph, IntArray

ENTRIES = 4_000_000  # matrix entries in memory at a time while triangles are counted


@dataclass(frozen=True)
class Topology:
    """The topology of a graph.

    Attributes:
        degree_mean: the mean degree, 2m/n.
        degree_median: the median degree.
        degree_max: the largest degree.
        isolated: the number of nodes without an edge.
        density: the share of possible edges that exist, 2m / (n (n-1)).
        clustering: the mean over nodes of the share of their pairs of neighbours that are joined. A
            node with fewer than two neighbours counts as 0 (Watts and Strogatz 1998).
        transitivity: the share of all such pairs that are joined.
        components: the number of connected components; an isolated node is one.
        largest_component: the share of nodes in the largest component.
    """

    degree_mean: float
    degree_median: float
    degree_max: int
    isolated: int
    density: float
    clustering: float
    transitivity: float
    components: int
    largest_component: float


def topology(graph: Graph) -> Topology:
    """Compute the topology of a graph."""
    nodes = graph.num_nodes
    degrees = np.bincount(graph.edges[0], minlength=nodes)
    pairs = degrees * (degrees - 1) / 2
    closed = triangles(graph)
    components, member = connected_components(graph.adjacency(), directed=False)
    return Topology(
        degree_mean=2 * graph.num_edges / max(nodes, 1),
        degree_median=float(np.median(degrees)) if nodes else 0.0,
        degree_max=int(degrees.max(initial=0)),
        isolated=int((degrees == 0).sum()),
        density=2 * graph.num_edges / max(nodes * (nodes - 1), 1),
        clustering=float((closed / np.maximum(pairs, 1)).sum() / max(nodes, 1)),
        transitivity=float(closed.sum() / max(pairs.sum(), 1)),
        components=int(components),
        largest_component=float(np.bincount(member).max(initial=0) / max(nodes, 1)),
    )


def triangles(graph: Graph) -> IntArray:
    """Count the triangles of each node.

    Edges are directed to the end of higher degree, so that no node has more than sqrt(2m)
    successors. A triangle is an edge (u, v) with a common successor w. Memory is bounded, even if
    the graph has hubs.

    >>> square = np.array([[0, 1, 2, 3, 0], [1, 2, 3, 0, 2]])  # with one diagonal
    >>> triangles(Graph.build(np.zeros((4, 1)), square, np.zeros(4))).tolist()
    [2, 1, 2, 1]
    """
    nodes = graph.num_nodes
    source, target = graph.edges
    degrees = np.bincount(source, minlength=nodes)
    up = (degrees[source] < degrees[target]) | (
        (degrees[source] == degrees[target]) & (source < target)
    )
    first, second = source[up], target[up]
    successors = sp.csr_array(
        (np.ones(len(first), dtype=np.int64), (first, second)), shape=(nodes, nodes)
    )
    counts = np.diff(successors.indptr)
    work = np.cumsum(counts[first] + counts[second])
    found = np.zeros(nodes, dtype=np.int64)
    start = 0
    while start < len(first):
        done = work[start - 1] if start else 0
        stop = max(int(np.searchsorted(work, done + ENTRIES)), start + 1)
        u, v = first[start:stop], second[start:stop]
        common = sp.csr_array(successors[u].multiply(successors[v]))
        each = np.diff(common.indptr)
        np.add.at(found, u, each)
        np.add.at(found, v, each)
        found += np.bincount(common.indices, minlength=nodes)
        start = stop
    return found
