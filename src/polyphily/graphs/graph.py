"""The one in-memory form of a graph, on the host: numpy arrays, features dense or sparse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

Features: TypeAlias = "npt.NDArray[np.float32] | sp.csr_array"
IntArray: TypeAlias = npt.NDArray[np.int64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

UNLABELLED = -1
SPARSE_BELOW = 0.1  # features with a smaller share of non-zeros are kept sparse


@dataclass(frozen=True)
class Masks:
    """Which nodes train, select and test: boolean arrays over the nodes, pairwise disjoint."""

    train: BoolArray
    val: BoolArray
    test: BoolArray

    def take(self, nodes: IntArray) -> Masks:
        return Masks(self.train[nodes], self.val[nodes], self.test[nodes])


@dataclass(frozen=True)
class Graph:
    """An undirected graph with node features and labels.

    Attributes:
        features: float32 `[n, f]`, a dense array or a `scipy.sparse.csr_array`.
        edges: int64 `[2, 2m]`; both directions of every edge, no self-loop, no duplicate, sorted by
            source and then target. `Graph.build` brings any edge list into this form.
        labels: int64 `[n]`; `UNLABELLED` (-1) where a node has none.
        masks: the split in force, or None while none has been drawn.
        own_masks: the splits that came with the data, possibly several.
        name: what to call the graph in messages (a client's name, a dataset's name).
        node_ids: the ids the user gave to the nodes, where there are any (else 0..n-1 is meant).
    """

    features: Features
    edges: IntArray
    labels: IntArray
    masks: Masks | None = None
    own_masks: tuple[Masks, ...] = ()
    name: str = "graph"
    node_ids: npt.NDArray[np.generic] | None = field(default=None, compare=False)

    @classmethod
    def build(
        cls,
        features: Features,
        edges: IntArray,
        labels: IntArray,
        *,
        masks: Masks | None = None,
        own_masks: tuple[Masks, ...] = (),
        name: str = "graph",
        node_ids: npt.NDArray[np.generic] | None = None,
    ) -> Graph:
        """A graph from any edge list: symmetrised, self-loops and repeated edges removed."""
        return cls(
            features=compact(features),
            edges=canonical_edges(edges, len(labels)),
            labels=np.ascontiguousarray(labels, dtype=np.int64),
            masks=masks,
            own_masks=own_masks,
            name=name,
            node_ids=node_ids,
        )

    @property
    def num_nodes(self) -> int:
        return len(self.labels)

    @property
    def num_edges(self) -> int:
        """Undirected edges."""
        return int(self.edges.shape[1]) // 2

    @property
    def num_features(self) -> int:
        return int(self.features.shape[1])

    def adjacency(self) -> sp.csr_array:
        """The symmetric 0/1 adjacency matrix."""
        ones = np.ones(self.edges.shape[1], dtype=np.float32)
        indptr = np.zeros(self.num_nodes + 1, dtype=np.int64)
        np.cumsum(np.bincount(self.edges[0], minlength=self.num_nodes), out=indptr[1:])
        return sp.csr_array((ones, self.edges[1], indptr), shape=(self.num_nodes, self.num_nodes))

    def subgraph(self, nodes: IntArray, name: str | None = None) -> Graph:
        """The graph induced by `nodes`, in the order given: edges to other nodes are left out."""
        position = np.full(self.num_nodes, -1, dtype=np.int64)
        position[nodes] = np.arange(len(nodes))
        ends = position[self.edges]
        ends = ends[:, (ends >= 0).all(axis=0)]
        order = np.lexsort((ends[1], ends[0]))
        return Graph(
            features=self.features[nodes],
            edges=np.ascontiguousarray(ends[:, order]),
            labels=self.labels[nodes],
            masks=self.masks.take(nodes) if self.masks else None,
            own_masks=tuple(masks.take(nodes) for masks in self.own_masks),
            name=name or self.name,
            node_ids=None if self.node_ids is None else self.node_ids[nodes],
        )

    def with_masks(self, masks: Masks) -> Graph:
        return replace(self, masks=masks)


def canonical_edges(edges: IntArray, num_nodes: int) -> IntArray:
    """Both directions of every distinct edge without self-loops, sorted by source, then target.

    >>> canonical_edges(np.array([[0, 1, 2, 2], [1, 0, 2, 0]]), 3).tolist()
    [[0, 0, 1, 2], [1, 2, 0, 0]]
    """
    source, target = edges.astype(np.int64, copy=False)
    keep = source != target
    source, target = source[keep], target[keep]
    low, high = np.minimum(source, target), np.maximum(source, target)
    key = np.sort(low * num_nodes + high)  # sorting beats np.unique by far
    key = key[np.diff(key, prepend=-1) != 0]
    low, high = np.divmod(key, max(num_nodes, 1))
    both = np.sort(np.concatenate([low * num_nodes + high, high * num_nodes + low]))
    return np.stack(np.divmod(both, max(num_nodes, 1)))


def compact(features: Features) -> Features:
    """Float32 features, sparse where fewer than a tenth of the entries are non-zero."""
    if sp.issparse(features):
        return sp.csr_array(features, dtype=np.float32)
    dense = np.ascontiguousarray(features, dtype=np.float32)
    if dense.size and np.count_nonzero(dense) < SPARSE_BELOW * dense.size and dense.shape[1] > 64:
        return sp.csr_array(dense)
    return dense


def alike(graphs: Sequence[Graph]) -> tuple[Graph, ...]:
    """Graphs with features in one form: where some are sparse, all are."""
    if len({sp.issparse(graph.features) for graph in graphs}) <= 1:
        return tuple(graphs)
    return tuple(replace(graph, features=sp.csr_array(graph.features)) for graph in graphs)


@dataclass(frozen=True)
class Collection:
    """What a dataset's name or a path stands for: one graph to be partitioned, or one per client.

    Attributes:
        name: the dataset's name, or the folder's.
        graphs: a single graph, or the clients' graphs of a natural federation.
        classes: label names; label `i` in every graph is `classes[i]`.
        natural: True where `graphs` are already the clients.
        notes: what a user should know about how the data were read (merged edges, for example).
        feature_names: the names of the feature columns, where the files have any.
    """

    name: str
    graphs: tuple[Graph, ...]
    classes: tuple[str, ...]
    natural: bool = False
    notes: tuple[str, ...] = ()
    feature_names: tuple[str, ...] = ()
