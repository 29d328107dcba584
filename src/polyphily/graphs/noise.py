"""Noise on the clients' graphs, for studies of robustness (FedHERO, Section 4.8).

Every kind has a probability p in [0, 1]:

edges       With probability p an edge is replaced by a random pair of nodes without an edge, so
            that the number of edges stays. FedHERO says "flip each edge"; flipping entries of the
            adjacency matrix would make it dense.
features    With probability p an entry moves to another node in its column. A stored entry of
            sparse features moves to a random node; entries of dense features are permuted. The
            distribution of values in a column stays.
labels      With probability p a train label is replaced by another class, all equally likely.
            Validation and test labels stay correct.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import scipy.sparse as sp

from polyphily.errors import UserError, unknown
from polyphily.graphs.edges import mirrored
from polyphily.graphs.graph import UNLABELLED, BoolArray, Features, Graph, IntArray
from polyphily.graphs.random import generator


@dataclass(frozen=True)
class Noise:
    """The probability of each kind of disturbance."""

    edges: float = 0.0
    features: float = 0.0
    labels: float = 0.0

    def __bool__(self) -> bool:
        return any((self.edges, self.features, self.labels))

    def __str__(self) -> str:
        """Return the text that a user writes.

        >>> str(Noise(edges=0.1, labels=0.25))
        'edges=0.1,labels=0.25'
        """
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return ",".join(f"{name}={value:g}" for name, value in given.items() if value)


def parse_noise(text: str | None) -> Noise:
    """Parse `edges=0.1,labels=0.2`; a kind that is not named has probability 0."""
    values: dict[str, float] = {}
    known = [field.name for field in fields(Noise)]
    for item in filter(None, (text or "").split(",")):
        name, sign, value = (part.strip() for part in item.partition("="))
        if not sign and name not in known:
            raise UserError(
                f"noise: '{item}' has no kind: write edges=0.1, features=0.1, labels=0.1"
            )
        if name not in known:
            raise unknown("kind of noise", name, known)
        try:
            values[name] = float(value)
        except ValueError:
            raise UserError(f"noise '{item}': write a probability, as in edges=0.1") from None
        if not sign or not 0 <= values[name] <= 1:
            raise UserError(f"noise '{item}': give a probability from 0 to 1, as in edges=0.1")
    return Noise(**values)


def disturb(graphs: Sequence[Graph], noise: Noise, classes: int, seed: int) -> list[Graph]:
    """Add noise to the graphs. A client's noise depends only on its graph, k and the seed."""
    found = []
    for k, graph in enumerate(graphs):
        for kind, change in (("edges", _edges), ("features", _features)):
            probability = getattr(noise, kind)
            if probability:
                rng = generator(seed, f"noise/{kind}/{k}")
                graph = change(graph, probability, rng)
        if noise.labels:
            rng = generator(seed, f"noise/labels/{k}")
            graph = replace(graph, labels=flipped_labels(graph, noise.labels, classes, rng))
        found.append(graph)
    return found


def _edges(graph: Graph, probability: float, rng: np.random.Generator) -> Graph:
    """Rewire edges. A new edge has the weight, the direction and the relations of the lost one."""
    edges, nodes = graph.edges, graph.num_nodes
    forward = np.flatnonzero(edges[0] < edges[1])
    backward = np.searchsorted(edges[0] * nodes + edges[1], edges[1] * nodes + edges[0])[forward]
    pairs, origin = rewired(edges[:, forward], nodes, probability, rng)
    ends, source = mirrored(pairs, nodes)
    places = np.concatenate([forward[origin], backward[origin]])[source]
    return graph.with_edges(graph.edge_list.take(ends, places))


def _features(graph: Graph, probability: float, rng: np.random.Generator) -> Graph:
    return replace(graph, features=scattered(graph.features, probability, rng))


def rewired(
    pairs: IntArray, nodes: int, probability: float, rng: np.random.Generator
) -> tuple[IntArray, IntArray]:
    """Replace random edges by as many random pairs of nodes that had none.

    Args:
        pairs: `[2, m]`, one direction of each edge.
        nodes: the number of nodes.
        probability: the probability that an edge is replaced.
        rng: the source of randomness.

    Returns:
        the new pairs, and the position of the edge that each of them keeps or replaces.
    """
    lost: BoolArray = np.less(rng.random(pairs.shape[1]), probability)
    free = nodes * (nodes - 1) // 2 - pairs.shape[1]
    fresh = new_pairs(pairs, nodes, min(int(lost.sum()), free), rng)
    # If the graph is almost complete, some of the lost edges stay.
    origin = np.concatenate([np.flatnonzero(~lost), np.flatnonzero(lost)])
    kept = pairs[:, origin[: pairs.shape[1] - fresh.shape[1]]]
    return np.concatenate([kept, fresh], axis=1), origin


def new_pairs(taken: IntArray, nodes: int, count: int, rng: np.random.Generator) -> IntArray:
    """Draw distinct pairs of distinct nodes that are not among `taken`, `[2, count]`.

    Args:
        taken: pairs, in either order.
        nodes: the number of nodes.
        count: the number of pairs; at most as many as are not taken.
        rng: the source of randomness.
    """
    low, high = np.minimum(*taken), np.maximum(*taken)
    used = np.unique(low * nodes + high)
    found = np.empty(0, dtype=np.int64)
    if 2 * (count + len(used)) > nodes * (nodes - 1) // 2:  # few are left: enumerate them
        upper = np.stack(np.triu_indices(nodes, 1))
        keys = np.setdiff1d(upper[0] * nodes + upper[1], used, assume_unique=True)
        found = rng.permutation(keys)[:count]
    while len(found) < count:
        a, b = rng.integers(0, nodes, size=(2, 2 * (count - len(found)) + 8))
        keys = np.minimum(a, b) * nodes + np.maximum(a, b)
        keys = keys[(a != b) & ~np.isin(keys, used) & ~np.isin(keys, found)]
        _, first = np.unique(keys, return_index=True)
        found = np.concatenate([found, keys[np.sort(first)]])[:count]
    return np.stack(np.divmod(found, max(nodes, 1)))


def scattered(features: Features, probability: float, rng: np.random.Generator) -> Features:
    """Move random entries of the features to other nodes in the same column."""
    if sp.issparse(features):
        entries = sp.coo_array(features)
        rows = entries.row.astype(np.int64)
        moved = rng.random(len(rows)) < probability
        rows[moved] = rng.integers(0, features.shape[0], int(moved.sum()))
        return sp.csr_array((entries.data, (rows, entries.col)), shape=features.shape)
    changed = features.copy()
    moved = rng.random(features.shape) < probability
    for column in range(features.shape[1]):
        rows = np.flatnonzero(moved[:, column])
        changed[rows, column] = features[rng.permutation(rows), column]
    return changed


def flipped_labels(
    graph: Graph, probability: float, classes: int, rng: np.random.Generator
) -> IntArray:
    """Replace random labels of train nodes by another class."""
    assert graph.masks is not None
    draw = rng.random(graph.num_nodes)
    shift = rng.integers(1, max(classes, 2), graph.num_nodes)
    chosen = graph.masks.train & (graph.labels != UNLABELLED) & (draw < probability)
    other = (graph.labels + shift) % max(classes, 1)
    return np.where(chosen, other, graph.labels)
