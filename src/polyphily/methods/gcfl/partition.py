"""Splitting a cluster by the similarities of its members, and distances between series.

All of it works on small matrices on the host: a row per client, nothing per parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = npt.NDArray[np.float64]
Parts: TypeAlias = list[list[int]]
"""The members of each part, by their rows in the similarities."""


def minimum_cut(similarity: FloatArray, rng: np.random.Generator) -> Parts:
    """Split where the similarities across sum to the least (Stoer and Wagner)."""
    from networkx import from_numpy_array, stoer_wagner  # slow to import

    weights = np.maximum(similarity, 0)
    graph = from_numpy_array(np.ones_like(weights))  # a similarity of 0 is an edge, too
    for i, j in graph.edges:
        graph.edges[i, j]["weight"] = weights[i, j]
    _, parts = stoer_wagner(graph)
    return sorted(sorted(part) for part in parts)


def complete_linkage(similarity: FloatArray, rng: np.random.Generator) -> Parts:
    """Merge the two groups whose least similar members are the most similar, until two are left."""
    from scipy.cluster.hierarchy import cut_tree, linkage  # slow to import

    pairs = np.triu_indices(len(similarity), 1)
    tree = linkage(similarity.max() - similarity[pairs], "complete")
    return _groups(cut_tree(tree, n_clusters=2)[:, 0])


def random_members(similarity: FloatArray, rng: np.random.Generator) -> Parts:
    """Draw the members of parts that have the sizes of those of `complete_linkage`."""
    sizes = [len(part) for part in complete_linkage(similarity, rng)]
    drawn = rng.permutation(len(similarity))
    return [sorted(part.tolist()) for part in np.split(drawn, np.cumsum(sizes)[:-1])]


def singletons(similarity: FloatArray, rng: np.random.Generator) -> Parts:
    """Separate all members."""
    return [[row] for row in range(len(similarity))]


PARTITIONS: Mapping[str, Callable[[FloatArray, np.random.Generator], Parts]] = {
    "linkage": complete_linkage,
    "mincut": minimum_cut,
    "random": random_members,
    "singletons": singletons,
}


def _groups(labels: Sequence[int] | npt.NDArray[np.int64]) -> Parts:
    found: dict[int, list[int]] = {}
    for row, label in enumerate(labels):
        found.setdefault(int(label), []).append(row)
    return list(found.values())


def warping_distances(series: FloatArray) -> FloatArray:
    """Compute the dynamic time warping distances of all pairs of series `[n, d]`, `[n, n]`.

    A step costs the squared difference of the two values, and the distance is the root of the
    cheapest path's cost.
    """
    length = series.shape[1]
    cost = np.full((length + 1, length + 1, len(series), len(series)), np.inf)
    cost[0, 0] = 0
    for i in range(length):
        for j in range(length):
            before = np.minimum(np.minimum(cost[i, j], cost[i, j + 1]), cost[i + 1, j])
            cost[i + 1, j + 1] = before + np.subtract.outer(series[:, i], series[:, j]) ** 2
    distances: FloatArray = np.sqrt(cost[-1, -1])
    return distances
