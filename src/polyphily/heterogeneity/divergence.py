"""How two clients differ: in labels, in their classes' neighbours, in features, in embeddings.

Distances between distributions over classes are total variation, 1/2 sum |p - q|: the share of one
that would have to change to give the other, in [0, 1]. What is not defined is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp
from scipy.linalg import eigh
from scipy.sparse.linalg import LinearOperator, svds

from polyphily.graphs.graph import Graph, IntArray
from polyphily.graphs.random import generator
from polyphily.heterogeneity.homophily import class_mixing

FloatArray = npt.NDArray[np.float64]
T = TypeVar("T")

PRINCIPAL = 16  # directions in which features are compared
DIRECTIONS = 100  # random directions in which embeddings are compared
QUANTILES = 256  # points at which two distributions on a line are compared
FEWEST = 5  # nodes of a class that a client must have for its embeddings to be compared
COVARIANCE = 2048  # features up to which their covariance is computed


def pairwise(items: Sequence[T], distance: Callable[[T, T], float]) -> FloatArray:
    """All distances between two items, `[K, K]`, in both orders; zero on the diagonal."""
    found = np.zeros((len(items), len(items)))
    for i, first in enumerate(items):
        for j, second in enumerate(items):
            if i != j:
                found[i, j] = distance(first, second)
    return found


def symmetric(items: Sequence[T], distance: Callable[[T, T], float]) -> FloatArray:
    """As `pairwise`, for a distance that does not depend on the order."""
    found = np.zeros((len(items), len(items)))
    for i, first in enumerate(items):
        for j in range(i + 1, len(items)):
            found[i, j] = found[j, i] = distance(first, items[j])
    return found


# Labels and neighbours ---------------------------------------------------------------------------


def shares(counts: IntArray | FloatArray) -> FloatArray:
    """Counts as shares of their sum along the last axis; NaN where that is zero."""
    total = counts.sum(axis=-1, keepdims=True)
    found: FloatArray = np.divide(counts, total, out=np.full(counts.shape, np.nan), where=total > 0)
    return found


def total_variation(first: FloatArray, second: FloatArray) -> float:
    """1/2 sum |p - q|.

    >>> total_variation(np.array([0.5, 0.5]), np.array([1.0, 0.0]))
    0.5
    """
    return float(np.abs(first - second).sum() / 2)


def chance_total_variation(first: IntArray | FloatArray, second: IntArray | FloatArray) -> float:
    """The total variation to be expected between two samples of one distribution.

    For counts of these sizes, by the normal approximation: sum_c sqrt(p_c (1-p_c) s / (2 pi)) with
    p the pooled shares and s = 1/n_1 + 1/n_2. What exceeds it is a difference.
    """
    sizes = np.array([first.sum(), second.sum()], dtype=np.float64)
    if (sizes == 0).any():
        return float("nan")
    p = (first + second) / sizes.sum()
    return float(np.sqrt(p * (1 - p) * (1 / sizes).sum() / (2 * np.pi)).sum())


def neighbour_distribution(graph: Graph, classes: int) -> FloatArray:
    """Q_ab, the share of class a's edges that lead to class b, `[C, C]` (FedHERO).

    The row of a class without edges is NaN.
    """
    return shares(class_mixing(graph, classes))


def neighbour_divergence(first: FloatArray, second: FloatArray) -> float:
    """The mean over the classes that both clients have of the total variation of rows of Q."""
    gaps = np.abs(first - second).sum(axis=1) / 2
    known = ~np.isnan(gaps)
    return float(gaps[known].mean()) if known.any() else float("nan")


def chance_neighbour_divergence(first: FloatArray, second: FloatArray) -> float:
    """The neighbour divergence to be expected by chance, from the two clients' `class_mixing`.

    As if edges were drawn one by one; those of one hub are not, so chance may give more.
    """
    both = (first.sum(axis=1) > 0) & (second.sum(axis=1) > 0)
    rows = [chance_total_variation(first[a], second[a]) for a in np.flatnonzero(both)]
    return float(np.mean(rows)) if rows else float("nan")


def similarity(first: FloatArray, second: FloatArray) -> float:
    """S(i, j) in [0, 1] of two clients' `class_mixing`.

    FedGSP asks for a normalised similarity of data distributions and names none. This is one minus
    the total variation between the clients' distributions of (label, neighbour's label) over edges,
    which holds the mix of labels and how they are joined.
    """
    if not (first.any() and second.any()):
        return float("nan")
    return 1 - total_variation(first / first.sum(), second / second.sum())


def complementarity_ratio(similarities: FloatArray) -> float:
    """r_c, the share of client pairs with S(i, j) < 1/2; r_s = 1 - r_c (FedGSP, Definitions 1-4).

    NaN where no pair has a similarity.
    """
    pairs = similarities[np.triu_indices(len(similarities), 1)]
    known = pairs[~np.isnan(pairs)]
    return float((known < 0.5).mean()) if len(known) else float("nan")


def collaboration_heterogeneity(weights: FloatArray, parameters: FloatArray) -> float:
    """H(G) = sum_ij w_ij ||θ_i - θ_j||^2 over all ordered pairs of clients (FedGSP, Theorems 2, 3).

    Args:
        weights: w, the strengths of collaboration, `[K, K]`.
        parameters: one row per client.

    >>> collaboration_heterogeneity(np.array([[0.5, 0.5], [1.0, 0.0]]), np.array([[0.0], [2.0]]))
    6.0
    """
    squares = (parameters**2).sum(axis=1)
    distances = squares[:, None] + squares - 2 * parameters @ parameters.T
    return float((weights * np.maximum(distances, 0)).sum())


# Features and embeddings -------------------------------------------------------------------------


def quantiles(values: FloatArray) -> FloatArray:
    """Each column's quantiles at the middles of `QUANTILES` equal parts, `[QUANTILES, columns]`."""
    at = (np.arange(QUANTILES) + 0.5) / QUANTILES
    found: FloatArray = np.quantile(values, at, axis=0)
    return found


def line_wasserstein(first: FloatArray, second: FloatArray) -> float:
    """W1 between distributions on a line from their `quantiles`, the mean over columns."""
    return float(np.abs(first - second).mean())


def feature_divergence(graphs: Sequence[Graph]) -> FloatArray:
    """W1 between clients' features in the leading directions of all of them, `[K, K]`.

    Columns are brought to deviation one over all clients; the `PRINCIPAL` leading directions of the
    result are found, and the mean of W1 between two clients' projections is taken, each direction
    in units of its own standard deviation. An estimate in two ways: other directions are not looked
    at, and a distribution is its `QUANTILES` quantiles. No randomness.
    """
    sizes = [graph.num_nodes for graph in graphs]
    stack = sp.vstack if sp.issparse(graphs[0].features) else np.concatenate
    scores = principal_scores(stack([graph.features for graph in graphs]))
    if not scores.shape[1]:
        return np.zeros((len(graphs), len(graphs)))
    parts = np.split(scores, np.cumsum(sizes)[:-1])
    return symmetric([quantiles(part) for part in parts], line_wasserstein)


def principal_scores(x: npt.NDArray[np.float32] | sp.csr_array) -> FloatArray:
    """The rows' projections on the leading principal directions, each of deviation one.

    Columns are scaled to deviation one first; those that are constant are left out.
    """
    rows = x.shape[0]
    sparse = sp.issparse(x)
    values: Any = sp.csr_array(x) if sparse else np.asarray(x)
    values = values.astype(np.float64)
    mean = np.asarray(values.sum(axis=0)).ravel() / max(rows, 1)
    square = values.multiply(values) if sparse else values * values
    variance = np.asarray(square.sum(axis=0)).ravel() / max(rows, 1) - mean**2
    kept = variance > 1e-10 * np.maximum(mean**2, np.finfo(np.float64).tiny)
    if rows < 2 or not kept.any():
        return np.zeros((rows, 0))
    values, mean, deviation = values[:, kept], mean[kept], np.sqrt(variance[kept])
    values = sp.csr_array(values @ sp.diags_array(1 / deviation)) if sparse else values / deviation
    directions = _principal_directions(values, mean / deviation)
    scores = np.asarray(values @ directions) - (mean / deviation) @ directions
    spread = scores.std(axis=0)
    large = spread > 1e-6 * spread.max(initial=0)
    found: FloatArray = scores[:, large] / spread[large]
    return found


def _principal_directions(x: FloatArray | sp.csr_array, mean: FloatArray) -> FloatArray:
    """The leading right singular vectors of x - 1 mean^T, `[F, at most PRINCIPAL]`."""
    rows, width = x.shape
    if width <= COVARIANCE:
        product: Any = x.T @ x
        gram = product.toarray() if sp.issparse(product) else product
        count = min(PRINCIPAL, width)
        _, vectors = eigh(
            gram - rows * np.outer(mean, mean), subset_by_index=[width - count, width - 1]
        )
        found: FloatArray = vectors
        return found
    centred = LinearOperator(
        x.shape,
        matvec=lambda v: x @ v.ravel() - mean @ v.ravel(),
        rmatvec=lambda u: x.T @ u.ravel() - mean * u.sum(),
        dtype=np.float64,
    )
    count = min(PRINCIPAL, rows - 1)
    _, _, right = svds(centred, k=count, v0=np.ones(min(x.shape)), tol=1e-4)
    leading: FloatArray = right.T
    return leading


def embedding_divergence(
    embeddings: Sequence[FloatArray], labels: Sequence[IntArray], classes: int, seed: int = 0
) -> tuple[FloatArray, FloatArray]:
    """How far apart clients place nodes of one class (FedATH, ICML 2025, Figure 1b).

    Sliced W1: the mean over `DIRECTIONS` random directions of W1 between projections, over the
    root mean square distance of all embeddings from their mean, so that runs can be compared. A
    client takes part in a class with at least `FEWEST` nodes of it. The paper names no estimator.

    Args:
        embeddings: of each client's nodes, `[n_k, H]`.
        labels: of each client's nodes, -1 where unknown.
        classes: C.
        seed: of the directions.

    Returns:
        The mean over pairs of clients for every class, `[C]`, and over classes for every pair,
        `[K, K]`; NaN where there is none.
    """
    everything = np.concatenate(embeddings)
    scale = np.sqrt(((everything - everything.mean(axis=0)) ** 2).sum(axis=1).mean())
    rng = generator(seed, "slices")
    directions = rng.standard_normal((everything.shape[1], DIRECTIONS))
    directions /= np.linalg.norm(directions, axis=0) * (scale or 1.0)
    clients = len(embeddings)
    found = np.full((classes, clients, clients), np.nan)
    for label in range(classes):
        places = {
            k: quantiles(x[y == label] @ directions)
            for k, (x, y) in enumerate(zip(embeddings, labels, strict=True))
            if (y == label).sum() >= FEWEST
        }
        for i, first in places.items():
            for j, second in places.items():
                if i != j:
                    found[label, i, j] = line_wasserstein(first, second)
    pairs = mean_known(found, axis=0)
    np.fill_diagonal(pairs, 0.0)
    return mean_known(found.reshape(classes, -1), axis=1), pairs


def mean_known(values: FloatArray, axis: int) -> FloatArray:
    """The mean of what is not NaN; NaN where nothing is left."""
    known = ~np.isnan(values)
    total, count = np.where(known, values, 0).sum(axis=axis), known.sum(axis=axis)
    found: FloatArray = np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)
    return found
