"""Clients' graphs without some hidden nodes, on which NeighGen is trained."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from polyphily.core.cohort import TrainingGraph
from polyphily.graphs.graph import IntArray
from polyphily.graphs.random import generator
from polyphily.methods.fedsage.leaves import Compared, DenseTargets, SparseTargets, Targets
from polyphily.methods.fedsage.network import gate
from polyphily.methods.fedsage.slots import Order, Slots, all_slots, by_count, counted, open_slots
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
        index: up to P hidden neighbours of each of them, `[Q, P]`.
        present: which of these there are, `[Q, P]`.
        learns: 1 for the train nodes that are visible, `[train nodes]`.
        layers: in how many layers the judge must hear the generated neighbours of a node, to
            classify visible train nodes, `[N]`: 2 at these nodes, 1 at their visible neighbours.
    """

    graph: Visible
    nodes: Tensor
    rows: Segments
    missing: Tensor
    losers: Tensor
    loser_rows: Segments
    index: Tensor
    present: Tensor
    learns: Tensor
    layers: Tensor

    @property
    def number(self) -> int:
        """P, the number of slots of a node."""
        return self.index.shape[1]

    @cached_property
    def targets(self) -> Tensor:
        """The features of the hidden neighbours, `[Q, P, F]`."""
        return dense_features(self.graph)[self.index]

    def gate(self, count: Tensor, counting: str) -> Tensor:
        """Return which slots of a node exist, `[N, P]`; hidden nodes have none."""
        return gate(count, self.number, counting) * self.graph.visible.unsqueeze(1)

    def choose(self, exists: Tensor) -> Slots:
        """Return the slots that the loss depends on: of losers, and where the judge looks."""
        if by_count(self.graph):
            return open_slots(self.graph, exists * self._wanted.unsqueeze(1), self._order)
        return replace(self._wanted_slots, exists=exists.flatten()[self._wanted_slots.place])

    def compared(self, slots: Slots) -> Compared:
        """Return what slots that exist are compared with, and where the judge looks."""
        assert slots.blocks is not None
        pointers = (0, *np.cumsum(slots.blocks).tolist())
        layers, number = self.layers[slots.node], self.loser_number[slots.node]
        judged, deep = (counted(layers >= least, pointers) for least in (1, 2))
        return Compared(slots, self._table, self._squares[number], judged, deep)

    @cached_property
    def loser_number(self) -> Tensor:
        """The number of each node among the losers; -1 for others, `[N]`."""
        number = torch.full_like(self.layers, -1)
        number[self.losers] = torch.arange(len(self.losers), device=number.device)
        return number

    @cached_property
    def loser_place(self) -> Tensor:
        """Where each loser is among the nodes of `choose` on a GPU, `[Q]`."""
        return (self._wanted.cumsum(0).long() - 1)[self.losers]

    @cached_property
    def _wanted(self) -> Tensor:
        """1 for the nodes whose generated neighbours enter the loss, `[N]`."""
        return ((self.layers > 0) | (self.loser_number >= 0)).to(self.graph.dtype)

    @cached_property
    def _wanted_slots(self) -> Slots:
        nodes = self._wanted.nonzero().view(-1)
        rows = _by_client(self.graph, nodes.cpu().numpy())
        return all_slots(nodes, rows, self.graph.num_nodes, self.number)

    @cached_property
    def _order(self) -> Order:
        """The order of slots in which those that the judge looks at come first."""
        nodes = torch.argsort(self.layers, descending=True, stable=True)
        segments = self.graph.segments
        nodes = nodes[torch.argsort(segments.owner[nodes], stable=True)]
        return Order.of(nodes, segments, self.number)

    @cached_property
    def _squares(self) -> Tensor:
        """The squared norms of targets, infinite where there is none; the last row has none."""
        x = self.graph.x
        if isinstance(x, Tensor):
            norms = x.square().sum(dim=1)
        else:
            assert x.value is not None
            norms = x.sum_by_row(x.value.square())
        own = norms[self.index].masked_fill(~self.present, torch.inf)
        return torch.cat([own, own.new_full((1, self.number), torch.inf)])

    @cached_property
    def _table(self) -> Targets:
        x = self.graph.x
        if isinstance(x, Tensor):
            return DenseTargets(x, self.index, self.loser_number)
        owner = self.graph.segments.owner
        return SparseTargets.of(x, owner, self.losers, self.index, self.present)


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
        index=tensor(index),
        present=torch.from_numpy(present).to(graph.device),
        learns=seen[graph.train_nodes],
        layers=tensor(_layers(graph, visible)),
    )


def _layers(graph: TrainingGraph, visible: np.ndarray) -> IntArray:
    """Return 2 for visible train nodes, 1 for their visible neighbours, and 0 for others."""
    learns = np.zeros(graph.num_nodes, dtype=np.bool_)
    learns[graph.train_nodes.cpu().numpy()] = True
    learns &= visible
    row, column = (t.cpu().numpy() for t in (graph.edges.row, graph.edges.col_long))
    near = np.zeros(graph.num_nodes, dtype=np.bool_)
    near[column[learns[row]]] = True
    return np.where(learns, 2, (near & visible).astype(np.int64))


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
