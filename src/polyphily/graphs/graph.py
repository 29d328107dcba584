"""Graphs on the host: numpy arrays, with dense or sparse features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from polyphily.errors import UserError

Features: TypeAlias = "npt.NDArray[np.float32] | sp.csr_array"
IntArray: TypeAlias = npt.NDArray[np.int64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

UNLABELLED = -1
SPARSE_BELOW = 0.1  # features with a smaller share of non-zero entries are stored sparsely


@dataclass(frozen=True)
class Masks:
    """The split of a graph: pairwise disjoint boolean arrays `[n]` over its nodes.

    Attributes:
        train: nodes whose labels are trained on.
        val: nodes that select the best model.
        test: nodes that are scored.
    """

    train: BoolArray
    val: BoolArray
    test: BoolArray

    def take(self, nodes: IntArray) -> Masks:
        """Return the masks of some nodes, in the order given."""
        return Masks(self.train[nodes], self.val[nodes], self.test[nodes])


@dataclass(frozen=True)
class Graph:
    """An undirected graph with node features and labels.

    Attributes:
        features: float32 `[n, f]`, a dense array or a `scipy.sparse.csr_array`.
        edges: int64 `[2, 2m]`; both directions of every edge, without self-loops and duplicates,
            sorted by source and then target. `Graph.build` brings any edge list into this form.
        labels: int64 `[n]`; `UNLABELLED` (-1) for a node without a label.
        masks: the split in use; None until one is drawn.
        own_masks: the splits that come with the data, possibly several.
        name: the name of the graph in messages, such as that of the client or the dataset.
        node_ids: ids of the nodes, the user's or, in a part of a divided graph, those of the whole
            graph: a node that two clients have is known by its id. None if nodes have none.
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
        """Build a graph from any edge list, after checking that all parts fit together.

        Edges are made symmetric. Self-loops and repeated edges are removed.

        Args:
            features: `[n, f]`, dense or sparse.
            edges: `[2, m]`, sources in the first row and targets in the second. One direction of
                an edge is enough.
            labels: `[n]`, whole numbers from 0; -1 for a node without a label.
            masks: the split in use, if there is one.
            own_masks: the splits that come with the data.
            name: the name of the graph in messages.
            node_ids: the user's ids of the nodes, if there are any.

        Raises:
            UserError: if shapes or types do not fit, or an edge names a node that does not exist.
        """
        values = features if sp.issparse(features) else np.asarray(features)
        classes = _checked_labels(name, np.asarray(labels))
        _check_rows(name, values, classes, node_ids)
        for split in (*own_masks, *([masks] if masks is not None else [])):
            _check_masks(name, split, len(classes))
        found = _checked_edges(name, np.asarray(edges), len(classes))
        return cls(
            features=compact(values),
            edges=canonical_edges(found, len(classes)),
            labels=classes,
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
        """The number of undirected edges."""
        return int(self.edges.shape[1]) // 2

    @property
    def num_features(self) -> int:
        return int(self.features.shape[1])

    def adjacency(self) -> sp.csr_array:
        """Return the symmetric 0/1 adjacency matrix."""
        ones = np.ones(self.edges.shape[1], dtype=np.float32)
        indptr = np.zeros(self.num_nodes + 1, dtype=np.int64)
        np.cumsum(np.bincount(self.edges[0], minlength=self.num_nodes), out=indptr[1:])
        return sp.csr_array((ones, self.edges[1], indptr), shape=(self.num_nodes, self.num_nodes))

    def subgraph(self, nodes: IntArray, name: str | None = None) -> Graph:
        """Return the subgraph induced by `nodes`, which are kept in the order given."""
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

    def with_ids(self) -> Graph:
        """Return the graph with ids of its nodes: its own, or 0 to n - 1."""
        if self.node_ids is not None:
            return self
        return replace(self, node_ids=np.arange(self.num_nodes))

    def with_masks(self, masks: Masks) -> Graph:
        """Return the graph with a split in use."""
        return replace(self, masks=masks)


def _checked_labels(name: str, labels: npt.NDArray[Any]) -> IntArray:
    """Return labels as int64 `[n]`, once they are known to be whole numbers from -1."""
    if labels.ndim != 1:
        raise UserError(
            f"graph '{name}': labels have shape {labels.shape}: give one whole number per node, "
            "as a one-dimensional array"
        )
    if not len(labels):
        return np.zeros(0, dtype=np.int64)
    if labels.dtype.kind not in "iufb":
        raise UserError(
            f"graph '{name}': labels have dtype {labels.dtype}: give whole numbers from 0, and -1 "
            "for a node without a label"
        )
    wrong = ~(labels >= UNLABELLED)  # so that NaN is wrong
    if labels.dtype.kind == "f":
        wrong |= ~np.isfinite(labels) | (labels != np.floor(labels))
    if wrong.any():
        node = int(wrong.argmax())
        raise UserError(
            f"graph '{name}': node {node} has the label {labels[node]}: give whole numbers from 0, "
            "and -1 for a node without a label"
        )
    return np.ascontiguousarray(labels, dtype=np.int64)


def _check_rows(
    name: str, features: Any, labels: IntArray, node_ids: npt.NDArray[np.generic] | None
) -> None:
    if features.ndim != 2:
        raise UserError(
            f"graph '{name}': features have shape {features.shape}: give [nodes, features]"
        )
    rows, nodes = features.shape[0], len(labels)
    if rows != nodes:
        raise UserError(
            f"graph '{name}': features have {rows} rows, but there are {nodes} labels: give one "
            "row and one label per node"
        )
    if node_ids is not None and len(node_ids) != nodes:
        raise UserError(
            f"graph '{name}': there are {len(node_ids)} node ids for {nodes} nodes: give one per "
            "node"
        )


def _check_masks(name: str, masks: Masks, nodes: int) -> None:
    for part in ("train", "val", "test"):
        mask = np.asarray(getattr(masks, part))
        if mask.dtype != np.bool_ or mask.shape != (nodes,):
            raise UserError(
                f"graph '{name}': the {part} mask is {mask.dtype} of shape {mask.shape}: give one "
                f"boolean per node, of shape ({nodes},)"
            )


def _checked_edges(name: str, edges: npt.NDArray[Any], nodes: int) -> IntArray:
    """Return edges as int64 `[2, m]`, once they are known to join existing nodes."""
    if edges.ndim != 2 or edges.shape[0] != 2:
        hint = ": transpose them (edges.T)" if edges.ndim == 2 and edges.shape[1] == 2 else ""
        raise UserError(
            f"graph '{name}': edges have shape {edges.shape}, but [2, edges] is needed, with "
            f"sources in the first row and targets in the second{hint}"
        )
    if not edges.size:
        return np.zeros((2, 0), dtype=np.int64)
    if edges.dtype.kind not in "iu":
        raise UserError(
            f"graph '{name}': edges have dtype {edges.dtype}: give the positions of nodes as whole "
            "numbers"
        )
    if edges.min() < 0 or edges.max() >= nodes:
        edge = int(((edges < 0) | (edges >= nodes)).any(axis=0).argmax())
        source, target = edges[:, edge].tolist()
        raise UserError(
            f"graph '{name}': edge {edge} joins nodes {source} and {target}, but there are {nodes} "
            f"nodes (0 to {nodes - 1}): remove the edge, or give the node features and a label"
        )
    return edges.astype(np.int64, copy=False)


def canonical_edges(edges: IntArray, num_nodes: int) -> IntArray:
    """Return both directions of every distinct edge, sorted by source and then target.

    Self-loops are removed.

    >>> canonical_edges(np.array([[0, 1, 2, 2], [1, 0, 2, 0]]), 3).tolist()
    [[0, 0, 1, 2], [1, 2, 0, 0]]
    """
    source, target = edges.astype(np.int64, copy=False)
    keep = source != target
    source, target = source[keep], target[keep]
    low, high = np.minimum(source, target), np.maximum(source, target)
    key = np.sort(low * num_nodes + high)  # much faster than np.unique
    key = key[np.diff(key, prepend=-1) != 0]
    low, high = np.divmod(key, max(num_nodes, 1))
    both = np.sort(np.concatenate([low * num_nodes + high, high * num_nodes + low]))
    return np.stack(np.divmod(both, max(num_nodes, 1)))


def compact(features: Features) -> Features:
    """Convert features to float32, and to sparse if less than a tenth of them is non-zero."""
    if sp.issparse(features):
        return sp.csr_array(features, dtype=np.float32)
    dense = np.ascontiguousarray(features, dtype=np.float32)
    if dense.size and np.count_nonzero(dense) < SPARSE_BELOW * dense.size and dense.shape[1] > 64:
        return sp.csr_array(dense)
    return dense


def alike(graphs: Sequence[Graph]) -> tuple[Graph, ...]:
    """Return the graphs with features of one form: if some are sparse, all are made sparse."""
    if len({sp.issparse(graph.features) for graph in graphs}) <= 1:
        return tuple(graphs)
    return tuple(replace(graph, features=sp.csr_array(graph.features)) for graph in graphs)


@dataclass(frozen=True)
class Collection:
    """The graphs of a dataset: one graph to be partitioned, or one graph per client.

    Attributes:
        name: the name of the dataset or of the folder.
        graphs: a single graph, or the clients' graphs of a natural federation.
        classes: names of the labels; label `i` in every graph is `classes[i]`.
        natural: whether `graphs` are the clients' graphs already.
        notes: remarks for the user on how the data were read, such as merged edges.
        feature_names: the names of the feature columns, if the files have any.
    """

    name: str
    graphs: tuple[Graph, ...]
    classes: tuple[str, ...]
    natural: bool = False
    notes: tuple[str, ...] = ()
    feature_names: tuple[str, ...] = ()
