"""Clients' graphs without some hidden nodes, on which NeighGen is trained."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from polyphily.core.cohort import TrainingGraph
from polyphily.graphs.graph import IntArray
from polyphily.graphs.random import generator
from polyphily.methods.fedsage.network import Generated, Mended, gate, slot_rows
from polyphily.nn.segments import Segments
from polyphily.nn.sparse import SparseMatrix
from polyphily.nn.stacked import GraphView, StackedGraph


class Visible(GraphView):
    """A graph without the edges of hidden nodes.

    Args:
        graph: the whole graph.
        visible: 1 for the nodes that are seen, 0 for those that are hidden, `[N]`.
    """

    def __init__(self, graph: StackedGraph, visible: Tensor) -> None:
        super().__init__(graph)
        self.visible = visible

    @cached_property
    def kept(self) -> SparseMatrix:
        """The edges of the graph, 0 where an end is hidden."""
        edges = self.graph.edges
        return edges.with_value(self.visible[edges.row] * self.visible[edges.col_long])

    @cached_property
    def degrees(self) -> Tensor:
        assert self.kept.value is not None
        return self.kept.sum_by_row(self.kept.value)

    @cached_property
    def mean(self) -> SparseMatrix:
        assert self.kept.value is not None
        return self.kept.with_value(self.kept.value / self.degrees.clamp(min=1)[self.kept.row])


@dataclass(frozen=True)
class Impaired:
    """Impaired graphs of stacked clients, and what NeighGen should find.

    Attributes:
        graph: what is left to see.
        nodes: the visible nodes.
        rows: the visible nodes of each client, at least one.
        missing: n_v, the number of hidden neighbours of every visible node, `[visible]`.
        losers: the nodes that miss a neighbour, `[Q]`.
        loser_rows: those of each client.
        targets: features of up to P hidden neighbours of each of them, `[Q, P, F]`.
        present: which of these there are, `[Q, P]`.
        learns: 1 for the train nodes that are visible, `[train nodes]`.
    """

    graph: Visible
    nodes: Tensor
    rows: Segments
    missing: Tensor
    losers: Tensor
    loser_rows: Segments
    targets: Tensor
    present: Tensor
    learns: Tensor

    def mended(self, generated: Generated, counting: str) -> Mended:
        """Give the visible nodes their generated neighbours; hidden ones get none."""
        slots = generated.features.shape[1]
        exists = gate(generated.count, slots, counting) * self.graph.visible.unsqueeze(1)
        return Mended(
            generated.features,
            exists,
            self.graph.kept,
            self.graph.degrees,
            slot_rows(self.graph, slots),
        )


def impaired(graph: TrainingGraph, share: float, slots: int) -> Impaired:
    """Hide a share of each client's nodes; the draw depends on the client's seed and number."""
    visible = np.concatenate(
        [
            _visible(size, share, generator(seed, f"fedsage+/hidden/{client}"))
            for (seed, client), size in zip(graph.keys, graph.segments.sizes, strict=True)
        ]
    )
    row, column = (t.cpu().numpy() for t in (graph.edges.row, graph.edges.col_long))
    lost = visible[row] & ~visible[column]
    row, column = row[lost], column[lost]
    counts = np.bincount(row, minlength=graph.num_nodes)
    losers = np.flatnonzero(counts)
    rank = np.arange(len(row)) - (np.cumsum(counts) - counts)[row]
    first = rank < slots
    place = np.searchsorted(losers, row[first]), rank[first]
    index, present = np.zeros((len(losers), slots), np.int64), np.zeros((len(losers), slots), bool)
    index[place], present[place] = column[first], True

    def tensor(array: IntArray) -> Tensor:
        return torch.from_numpy(array).to(graph.device)

    nodes = np.flatnonzero(visible)
    seen = tensor(visible.astype(np.int64)).to(graph.dtype)
    return Impaired(
        graph=Visible(graph, seen),
        nodes=tensor(nodes),
        rows=_by_client(graph, nodes),
        missing=tensor(counts[nodes]).to(graph.dtype),
        losers=tensor(losers),
        loser_rows=_by_client(graph, losers),
        targets=dense_features(graph)[tensor(index)],
        present=torch.from_numpy(present).to(graph.device),
        learns=seen[graph.train_nodes],
    )


def _visible(size: int, share: float, rng: np.random.Generator) -> np.ndarray:
    """Draw which nodes stay visible: at least one, and not all if there are two."""
    hidden = min(max(round(share * size), 1), size - 1)
    seen = np.ones(size, dtype=np.bool_)
    seen[rng.choice(size, hidden, replace=False)] = False
    return seen


def _by_client(graph: StackedGraph, nodes: IntArray) -> Segments:
    ends = np.searchsorted(nodes, graph.segments.pointers)
    return Segments(tuple(np.diff(ends).tolist()), graph.device)


def dense_features(graph: StackedGraph) -> Tensor:
    """Return the features as a dense matrix `[N, F]`, to compare generated ones with."""
    return graph.cached("fedsage+ dense features", _dense)


def _dense(graph: StackedGraph) -> Tensor:
    x = graph.x
    if isinstance(x, Tensor):
        return x
    assert x.value is not None
    column = x.col_long - graph.segments.owner[x.row] * graph.num_features
    empty = x.value.new_zeros(graph.num_nodes, graph.num_features)
    return empty.index_put((x.row, column), x.value)
