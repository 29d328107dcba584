"""Graphs on the host: numpy arrays, with dense or sparse features."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from polyphily.errors import UserError
from polyphily.graphs.edges import (
    UNTYPED,
    BoolArray,
    Edges,
    FloatArray,
    IntArray,
    canonical,
    checked_types,
    checked_weights,
)

if TYPE_CHECKING:
    import networkx as nx
    from torch_geometric.data import Data

if TYPE_CHECKING:
    from polyphily.graphs.files.client import RawColumn

__all__ = [
    "SPARSE_BELOW",
    "UNLABELLED",
    "BoolArray",
    "Collection",
    "Features",
    "FloatArray",
    "Graph",
    "IntArray",
    "Masks",
    "alike",
    "as_array",
    "compact",
    "join_relations",
    "own_relations",
    "relations_of",
]

Features: TypeAlias = "npt.NDArray[np.float32] | sp.csr_array"

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
    """A graph with node features and labels. Its neighbours are symmetric.

    Weights, directions and relations of edges are kept beside the symmetric list of edges, for
    the networks that use them (`docs/edges.md`).

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
        edge_weights: float32 `[2m]`, positive, one per column of `edges`; None if edges have no
            weights.
        arcs: bool `[2m]`, True at (u, v) if the data have the edge from u to v. None if edges
            have no direction.
        edge_types: int64 `[2m]`, a bit set: bit r is set if the edge belongs to `relations[r]`.
            None if edges have no types.
        relations: the names of the types of edges.
        table: the columns of a table that are not encoded yet (`graphs/encoding.py`); then
            `features` has no columns. None if there is no table, or once it is encoded.
    """

    features: Features
    edges: IntArray
    labels: IntArray
    masks: Masks | None = None
    own_masks: tuple[Masks, ...] = ()
    name: str = "graph"
    node_ids: npt.NDArray[np.generic] | None = field(default=None, compare=False)
    edge_weights: FloatArray | None = None
    arcs: BoolArray | None = None
    edge_types: IntArray | None = None
    relations: tuple[str, ...] = ()
    table: tuple[RawColumn, ...] | None = field(default=None, compare=False)

    @classmethod
    def build(
        cls,
        features: Any,
        edges: Any,
        labels: Any,
        *,
        edge_weights: Any = None,
        directed: bool = False,
        edge_types: Any = None,
        relations: Sequence[str] = (),
        masks: Masks | None = None,
        own_masks: tuple[Masks, ...] = (),
        name: str = "graph",
        node_ids: Any = None,
    ) -> Graph:
        """Build a graph from any edge list, after checking that all parts fit together.

        Neighbours are made symmetric. Self-loops and edges of weight 0 are removed, and repeated
        edges become one, with the sum of their weights. Arrays may be numpy arrays, lists, or
        torch tensors on any device; features may also be sparse matrices of scipy or torch.

        Args:
            features: `[n, f]`, dense or sparse.
            edges: `[2, m]`, sources in the first row and targets in the second. One direction of
                an edge is enough.
            labels: `[n]`, whole numbers from 0; -1 for a node without a label.
            edge_weights: `[m]`, a number from 0 for every edge. If edges have no direction, and
                a pair is given in both orders, its weight is the mean of both.
            directed: whether edges lead from source to target only. Networks use it with
                `direction`.
            edge_types: `[m]`, the position of every edge's relation in `relations`.
            relations: the names of the types; "0", "1", … unless given.
            masks: the split in use, if there is one.
            own_masks: the splits that come with the data.
            name: the name of the graph in messages.
            node_ids: the user's ids of the nodes, if there are any.

        Raises:
            UserError: if shapes or types do not fit, or an edge names a node that does not exist.
        """
        values = as_array(features)
        classes = _checked_labels(name, as_array(labels))
        ids = None if node_ids is None else as_array(node_ids)
        _check_rows(name, values, classes, ids)
        for split in (*own_masks, *([masks] if masks is not None else [])):
            _check_masks(name, split, len(classes))
        found = _checked_edges(name, as_array(edges), len(classes))
        weights = types = None
        names: tuple[str, ...] = ()
        if edge_weights is not None:
            weights = checked_weights(name, as_array(edge_weights), found.shape[1])
        if edge_types is not None:
            types, names = checked_types(name, as_array(edge_types), relations, found.shape[1])
        elif relations:
            raise UserError(f"graph '{name}': relations are named, but edge_types are not given")
        edge_list = canonical(found, len(classes), weights, types, directed=directed)
        return cls(
            features=compact(values),
            edges=edge_list.ends,
            labels=classes,
            masks=masks,
            own_masks=own_masks,
            name=name,
            node_ids=ids,
            edge_weights=edge_list.weights,
            arcs=edge_list.arcs,
            edge_types=edge_list.types,
            relations=names,
        )

    @property
    def edge_list(self) -> Edges:
        """The edges with all that is known about them."""
        return Edges(self.edges, self.edge_weights, self.arcs, self.edge_types)

    def with_edges(self, edges: Edges) -> Graph:
        """Return the graph with other edges, in canonical form, between the same nodes."""
        return replace(
            self,
            edges=edges.ends,
            edge_weights=edges.weights,
            arcs=edges.arcs,
            edge_types=edges.types,
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
        return self._matrix(np.ones(self.edges.shape[1], dtype=np.float32))

    def weighted_adjacency(self) -> sp.csr_array:
        """Return the weights of edges as a matrix, ones if edges have none.

        If edges have a direction, entry (u, v) is the weight of the edge from u to v, and there
        is no entry if the data do not have this edge.
        """
        weights = self.edge_weights
        values = np.ones(self.edges.shape[1], dtype=np.float32) if weights is None else weights
        if self.arcs is None:
            return self._matrix(values)
        found = self._matrix(np.where(self.arcs, values, np.float32(0)))
        found.eliminate_zeros()
        return found

    def _matrix(self, values: FloatArray) -> sp.csr_array:
        """Return a matrix with a value for every column of `edges`."""
        indptr = np.zeros(self.num_nodes + 1, dtype=np.int64)
        np.cumsum(np.bincount(self.edges[0], minlength=self.num_nodes), out=indptr[1:])
        shape = (self.num_nodes, self.num_nodes)
        return sp.csr_array((values, self.edges[1].copy(), indptr), shape=shape)

    def subgraph(self, nodes: IntArray, name: str | None = None) -> Graph:
        """Return the subgraph induced by `nodes`, which are kept in the order given."""
        position = np.full(self.num_nodes, -1, dtype=np.int64)
        position[nodes] = np.arange(len(nodes))
        ends = position[self.edges]
        kept = np.flatnonzero((ends >= 0).all(axis=0))
        kept = kept[np.lexsort((ends[1, kept], ends[0, kept]))]
        edges = self.edge_list.take(np.ascontiguousarray(ends[:, kept]), kept)
        return Graph(
            features=self.features[nodes],
            edges=edges.ends,
            labels=self.labels[nodes],
            masks=self.masks.take(nodes) if self.masks else None,
            own_masks=tuple(masks.take(nodes) for masks in self.own_masks),
            name=name or self.name,
            node_ids=None if self.node_ids is None else self.node_ids[nodes],
            edge_weights=edges.weights,
            arcs=edges.arcs,
            edge_types=edges.types,
            relations=self.relations,
            table=None if self.table is None else tuple(c.take(nodes) for c in self.table),
        )

    def with_ids(self) -> Graph:
        """Return the graph with ids of its nodes: its own, or 0 to n - 1."""
        if self.node_ids is not None:
            return self
        return replace(self, node_ids=np.arange(self.num_nodes))

    def with_masks(self, masks: Masks) -> Graph:
        """Return the graph with a split in use."""
        return replace(self, masks=masks)

    def to_pyg(self, *, sparse: bool = False) -> Data:
        """Convert the graph to a torch_geometric `Data` (`polyphily.graphs.conversion.to_pyg`)."""
        from polyphily.graphs.conversion import to_pyg

        return to_pyg(self, sparse=sparse)

    def to_networkx(self) -> nx.Graph:
        """Convert the graph to networkx (`polyphily.graphs.conversion.to_networkx`)."""
        from polyphily.graphs.conversion import to_networkx

        return to_networkx(self)


def as_array(values: Any) -> Any:
    """Return a numpy array or a `scipy.sparse.csr_array` of what a user gave.

    torch is not imported: whoever has a tensor has it loaded.
    """
    if sp.issparse(values):
        return values
    if not hasattr(values, "detach"):
        return np.asarray(values)
    tensor = values.detach().cpu()
    if str(tensor.dtype) in ("torch.bfloat16", "torch.float16"):
        tensor = tensor.float()
    if str(tensor.layout) == "torch.strided":
        return tensor.numpy()
    entries = tensor.to_sparse_coo().coalesce()
    rows, columns = entries.indices().numpy()
    return sp.csr_array((entries.values().numpy(), (rows, columns)), shape=tuple(entries.shape))


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


def compact(features: Features) -> Features:
    """Convert features to float32, and to sparse if less than a tenth of them is non-zero."""
    if sp.issparse(features):
        return sp.csr_array(features, dtype=np.float32)
    dense = np.ascontiguousarray(features, dtype=np.float32)
    if dense.size and np.count_nonzero(dense) < SPARSE_BELOW * dense.size and dense.shape[1] > 64:
        return sp.csr_array(dense)
    return dense


def own_relations(graph: Graph) -> tuple[str, ...]:
    """Return the types of a graph's edges; `UNTYPED` if edges have none."""
    if graph.edge_types is not None:
        return graph.relations
    return (UNTYPED,) if graph.num_edges else ()


def join_relations(parts: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """Return the relations that clients with these relations agree on, sorted.

    Edges without types, if there are any beside those with types, are of the last one.

    >>> join_relations([("work", "family"), (), ("untyped",)])
    ('family', 'work', 'untyped')
    """
    names = {name for part in parts for name in part}
    typed = sorted(names - {UNTYPED})
    return (*typed, UNTYPED) if typed and UNTYPED in names else tuple(typed)


def relations_of(graphs: Sequence[Graph]) -> tuple[str, ...]:
    """Return the types of edges that several graphs have together; empty if they have none."""
    return join_relations(map(own_relations, graphs))


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
