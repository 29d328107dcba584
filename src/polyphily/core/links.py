"""The links of a cohort: which neighbours a node receives from, and with what weight.

A graph stores its edges symmetrically, with weights, arcs and relations beside them
(`polyphily.graphs.edges`). A way to read them, `Reading`, says which of its entries (v, u) are
links along which v receives from u, and their weights:

    both    all entries; for a pair with two weights, one for each direction, their mean
    in      the entries whose reverse (u, v) is an arc: a node receives from those that point to it
    out     the entries that are arcs: a node receives from those that it points to

The links of one relation are those of its edges.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from polyphily.errors import UserError
from polyphily.graphs.directions import BOTH, INWARD, OUTWARD
from polyphily.graphs.edges import UNTYPED
from polyphily.graphs.graph import Graph, IntArray

Values: TypeAlias = npt.NDArray[np.float32]


class Reading(NamedTuple):
    """A way to read the edges of a cohort.

    Attributes:
        direction: "both", "in" or "out".
        weighted: whether weights are used; otherwise every link has weight 1.
        relation: the relation whose edges are read; None: all edges.
    """

    direction: str = BOTH
    weighted: bool = True
    relation: str | None = None

    def is_plain(self, graphs: Sequence[Graph]) -> bool:
        """Return whether all edges of all graphs are links of weight 1."""
        if self.relation is not None or (self.weighted and any_weights(graphs)):
            return False
        return self.direction == BOTH or all(graph.arcs is None for graph in graphs)


class Links(NamedTuple):
    """Links among the nodes of a cohort, sorted by row and then column.

    Attributes:
        rows: the receiver of every link.
        cols: its sender.
        weights: its weight.
    """

    rows: IntArray
    cols: IntArray
    weights: Values


def any_weights(graphs: Sequence[Graph]) -> bool:
    """Return whether edges of some graph have weights."""
    return any(graph.edge_weights is not None for graph in graphs)


def link_weights(graph: Graph, reading: Reading) -> Values:
    """Return the weight of the link at every column (v, u) of `graph.edges`; 0: there is none."""
    count = graph.edges.shape[1]
    weights = graph.edge_weights if reading.weighted else None
    values = np.ones(count, dtype=np.float32) if weights is None else weights
    types = None if reading.relation is None else _belongs(graph, reading.relation)
    if graph.arcs is not None:
        reverse = reversal(graph.edges)
        if reading.direction == BOTH:
            values = (values + values[reverse]) / np.float32(2)
            types = None if types is None else types | types[reverse]
        else:
            assert reading.direction in (INWARD, OUTWARD)
            values = np.where(graph.arcs, values, np.float32(0))
            if reading.direction == INWARD:
                values = values[reverse]
                types = None if types is None else types[reverse]
    return values if types is None else np.where(types, values, np.float32(0))


def all_link_weights(graphs: Sequence[Graph], reading: Reading) -> Values:
    """Return `link_weights` of several graphs, one after another."""
    return np.concatenate([link_weights(graph, reading) for graph in graphs])


def links_of(graphs: Sequence[Graph], starts: Sequence[int], reading: Reading) -> Links:
    """Return the links of several graphs whose nodes begin at `starts`."""
    ends = zip(graphs, starts, strict=False)
    edges = np.concatenate([graph.edges + start for graph, start in ends], axis=1)
    weights = all_link_weights(graphs, reading)
    kept = weights > 0
    rows, cols = edges[:, kept]
    return Links(rows, cols, weights[kept])


def sums(index: IntArray, weights: Values, size: int) -> npt.NDArray[np.float64]:
    """Return the sum of the weights at every index."""
    found: npt.NDArray[Any] = np.bincount(index, weights, minlength=size)
    return found


def reversal(edges: IntArray) -> IntArray:
    """Return for every column (u, v) of canonical edges where (v, u) is."""
    return np.lexsort((edges[0], edges[1]))


def _belongs(graph: Graph, relation: str) -> npt.NDArray[np.bool_]:
    """Return which entries belong to a relation."""
    if graph.edge_types is None:
        return np.full(graph.edges.shape[1], relation == UNTYPED)
    if relation not in graph.relations:
        return np.zeros(graph.edges.shape[1], dtype=np.bool_)
    bit = np.int64(1 << graph.relations.index(relation))
    found: npt.NDArray[np.bool_] = (graph.edge_types & bit) != 0
    return found


def check_relations(graphs: Sequence[Graph], relations: Sequence[str]) -> None:
    """Raise a `UserError` for a graph without types if a network needs the types of edges."""
    if not relations or UNTYPED in relations:
        return
    for graph in graphs:
        if graph.edge_types is None and graph.num_edges:
            raise UserError(
                f"graph '{graph.name}': its edges have no types, but the network was built for the "
                f"relations {', '.join(relations)}: give every edge one of them"
            )
