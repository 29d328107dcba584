"""Protocols of a stacked graph, the graphs of `K` clients as one, for layers and networks.

Nodes of client `k` are the rows `segments.pointers[k]` to `segments.pointers[k + 1]`, and no edge
joins two clients. These are protocols: any class with the members will do. The graph that clients
train on is `polyphily.core.cohort.Cohort`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from polyphily.graphs.graph import Graph
from polyphily.nn.segments import Segments
from polyphily.nn.sparse import SparseMatrix

T = TypeVar("T")


class Propagation(Protocol):
    """A linear map from node features to node features: a normalised adjacency."""

    def __matmul__(self, dense: Tensor, /) -> Tensor:
        """Return the product with a dense matrix, `[N, d] -> [N, d]`."""
        ...


class AttentionPattern(Protocol):
    """The edges that graph attention runs along, self-loops included."""

    def at_rows(self, x: Tensor) -> Tensor:
        """Return `x` at the target of every edge, `[N, …] -> [nnz, …]`."""
        ...

    def at_cols(self, x: Tensor) -> Tensor:
        """Return `x` at the source of every edge, `[N, …] -> [nnz, …]`."""
        ...

    def softmax(self, score: Tensor) -> Tensor:
        """Normalise scores over the edges of each target, `[nnz, heads] -> [nnz, heads]`."""
        ...

    def with_value(self, value: Tensor) -> Propagation:
        """Return the matrix that has these values at the edges."""
        ...


class GraphOperators(Protocol):
    """The part of a stacked graph that convolutions need: nodes per client, and operators."""

    @property
    def segments(self) -> Segments:
        """The nodes of each client."""
        ...

    @property
    def gcn(self) -> Propagation:
        """(D+I)^-1/2 (A+I) (D+I)^-1/2."""
        ...

    @property
    def random_walk(self) -> Propagation:
        """(D+I)^-1 (A+I)."""
        ...

    @property
    def mean(self) -> Propagation:
        """D^-1 A: the mean over neighbours, zero for a node without any."""
        ...


class AttendedOperators(GraphOperators, Protocol):
    """Operators with a pattern for graph attention."""

    @property
    def attention(self) -> AttentionPattern:
        """The edges for graph attention: `edges_with_loops`, weighted if edges have weights."""
        ...


class StackedGraph(AttendedOperators, Protocol):
    """A stacked graph as networks see it: operators, features, edges and train labels.

    Operators take weights and the chosen direction of edges into account. `edges`,
    `edges_with_loops` and `degrees` are those of the symmetric graph without weights.
    """

    @property
    def inward(self) -> AttendedOperators:
        """Operators that receive from in-neighbours only, without self-loops."""
        ...

    @property
    def outward(self) -> AttendedOperators:
        """Operators that receive from out-neighbours only, without self-loops."""
        ...

    @property
    def relations(self) -> Sequence[Propagation]:
        """The mean over the neighbours of each relation; one for all edges if there are no types.

        If directions are separate, the means over in-neighbours come first, then those over
        out-neighbours.
        """
        ...

    @property
    def link_weights(self) -> Tensor | None:
        """The weights at the entries of `edges`; None if edges have no weights."""
        ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype:
        """The type of features and weights."""
        ...

    @property
    def num_nodes(self) -> int: ...

    @property
    def num_features(self) -> int: ...

    @property
    def x(self) -> Tensor | SparseMatrix:
        """Features: dense `[N, F]`, or sparse and block-diagonal `[N, K·F]`."""
        ...

    @property
    def x_pointers(self) -> tuple[int, ...]:
        """The first stored feature entry of each client (the first row if `x` is dense)."""
        ...

    @property
    def labels(self) -> Tensor:
        """Labels of train nodes, -1 elsewhere."""
        ...

    @property
    def train_nodes(self) -> Tensor:
        """The train nodes, ascending."""
        ...

    @property
    def train_segments(self) -> Segments:
        """The train nodes of each client."""
        ...

    @property
    def edges(self) -> SparseMatrix:
        """The adjacency pattern A: all ones, no self-loops."""
        ...

    @property
    def edges_with_loops(self) -> SparseMatrix:
        """The pattern A + I."""
        ...

    @property
    def degrees(self) -> Tensor:
        """The number of neighbours of every node in its client's graph."""
        ...

    def cached(self, key: Hashable, make: Callable[[StackedGraph], T]) -> T:
        """Return `make(graph)`, computed on first use and kept with the graph."""
        ...

    def cached_per_graph(self, key: Hashable, make: Callable[[Graph], T]) -> list[T]:
        """Return `make` of each client's graph, computed once for as long as the client exists."""
        ...


class GraphView:
    """A `StackedGraph` that passes everything through to another one.

    Subclasses replace the members that differ. `cached` belongs to the other graph, which `make`
    is given: a cached value must not depend on what a view replaces.

    Args:
        graph: the other graph.
    """

    def __init__(self, graph: StackedGraph) -> None:
        self.graph = graph

    @property
    def segments(self) -> Segments:
        return self.graph.segments

    @property
    def gcn(self) -> Propagation:
        return self.graph.gcn

    @property
    def random_walk(self) -> Propagation:
        return self.graph.random_walk

    @property
    def mean(self) -> Propagation:
        return self.graph.mean

    @property
    def device(self) -> torch.device:
        return self.graph.device

    @property
    def dtype(self) -> torch.dtype:
        return self.graph.dtype

    @property
    def num_nodes(self) -> int:
        return self.graph.num_nodes

    @property
    def num_features(self) -> int:
        return self.graph.num_features

    @property
    def x(self) -> Tensor | SparseMatrix:
        return self.graph.x

    @property
    def x_pointers(self) -> tuple[int, ...]:
        return self.graph.x_pointers

    @property
    def labels(self) -> Tensor:
        return self.graph.labels

    @property
    def train_nodes(self) -> Tensor:
        return self.graph.train_nodes

    @property
    def train_segments(self) -> Segments:
        return self.graph.train_segments

    @property
    def edges(self) -> SparseMatrix:
        return self.graph.edges

    @property
    def edges_with_loops(self) -> SparseMatrix:
        return self.graph.edges_with_loops

    @property
    def degrees(self) -> Tensor:
        return self.graph.degrees

    @property
    def attention(self) -> AttentionPattern:
        return self.graph.attention

    @property
    def inward(self) -> AttendedOperators:
        return self.graph.inward

    @property
    def outward(self) -> AttendedOperators:
        return self.graph.outward

    @property
    def relations(self) -> Sequence[Propagation]:
        return self.graph.relations

    @property
    def link_weights(self) -> Tensor | None:
        return self.graph.link_weights

    def cached(self, key: Hashable, make: Callable[[StackedGraph], T]) -> T:
        return self.graph.cached(key, make)

    def cached_per_graph(self, key: Hashable, make: Callable[[Graph], T]) -> list[T]:
        return self.graph.cached_per_graph(key, make)
