"""Distances between clients: in labels, in the neighbours of classes, in features, in embeddings.

The distance between distributions over classes is the total variation, 1/2 sum |p - q|. It is the
share of one distribution that has to change to give the other, in [0, 1]. Undefined values are NaN.
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

PRINCIPAL = 16  # number of directions in which features are compared
DIRECTIONS = 100  # number of random directions in which embeddings are compared
QUANTILES = 256  # number of points at which two distributions on a line are compared
FEWEST = 5  # nodes of a class that a client needs for its embeddings to be compared
COVARIANCE = 2048  # largest number of features whose covariance is computed


def pairwise(items: Sequence[T], distance: Callable[[T, T], float]) -> FloatArray:
    """Compute all distances between two items in both orders, `[K, K]`; the diagonal is zero."""
    found = np.zeros((len(items), len(items)))
    for i, first in enumerate(items):
        for j, second in enumerate(items):
            if i != j:
                found[i, j] = distance(first, second)
    return found


def symmetric(items: Sequence[T], distance: Callable[[T, T], float]) -> FloatArray:
    """Compute `pairwise` for a distance that does not depend on the order."""
    found = np.zeros((len(items), len(items)))
    for i, first in enumerate(items):
        for j in range(i + 1, len(items)):
            found[i, j] = found[j, i] = distance(first, items[j])
    return found


# Labels and neighbours ---------------------------------------------------------------------------


def shares(counts: IntArray | FloatArray) -> FloatArray:
    """Divide counts by their sum along the last axis; NaN where the sum is zero."""
    total = counts.sum(axis=-1, keepdims=True)
    found: FloatArray = np.divide(counts, total, out=np.full(counts.shape, np.nan), where=total > 0)
    return found


def total_variation(first: FloatArray, second: FloatArray) -> float:
    """Compute 1/2 sum |p - q|.

    >>> total_variation(np.array([0.5, 0.5]), np.array([1.0, 0.0]))
    0.5
    """
    return float(np.abs(first - second).sum() / 2)


def chance_total_variation(first: IntArray | FloatArray, second: IntArray | FloatArray) -> float:
    """Compute the expected total variation between two samples of one distribution.

    It is the normal approximation for counts of these sizes, sum_c sqrt(p_c (1-p_c) s / (2 pi)),
    with p the pooled shares and s = 1/n_1 + 1/n_2. A larger value indicates a difference.
    """
    sizes = np.array([first.sum(), second.sum()], dtype=np.float64)
    if (sizes == 0).any():
        return float("nan")
    p = (first + second) / sizes.sum()
    return float(np.sqrt(p * (1 - p) * (1 / sizes).sum() / (2 * np.pi)).sum())


def neighbour_distribution(graph: Graph, classes: int) -> FloatArray:
    """Compute Q_ab, the share of class a's edges that lead to class b, `[C, C]` (FedHERO).

    The row of a class without edges is NaN.
    """
    return shares(class_mixing(graph, classes))


def neighbour_divergence(first: FloatArray, second: FloatArray) -> float:
    """Compute the mean total variation between rows of Q, over classes that both clients have."""
    gaps = np.abs(first - second).sum(axis=1) / 2
    known = ~np.isnan(gaps)
    return float(gaps[known].mean()) if known.any() else float("nan")


def chance_neighbour_divergence(first: FloatArray, second: FloatArray) -> float:
    """Compute the neighbour divergence expected by chance from two clients' `class_mixing`.

    It assumes that edges are drawn independently. The edges of a hub are not, so the value may be
    too small.
    """
    both = (first.sum(axis=1) > 0) & (second.sum(axis=1) > 0)
    rows = [chance_total_variation(first[a], second[a]) for a in np.flatnonzero(both)]
    return float(np.mean(rows)) if rows else float("nan")


def similarity(first: FloatArray, second: FloatArray) -> float:
    """Compute the similarity S(i, j) in [0, 1] from two clients' `class_mixing`.

    FedGSP uses a normalised similarity of data distributions without defining it. We take one minus
    the total variation between the distributions of (label, neighbour's label) over edges. They
    reflect both the mix of labels and which labels are joined.
    """
    if not (first.any() and second.any()):
        return float("nan")
    return 1 - total_variation(first / first.sum(), second / second.sum())


def complementarity_ratio(similarities: FloatArray) -> float:
    """Compute r_c, the share of client pairs with S(i, j) < 1/2 (FedGSP, Definitions 1-4).

    The similarity ratio is r_s = 1 - r_c. NaN if no pair has a similarity.
    """
    pairs = similarities[np.triu_indices(len(similarities), 1)]
    known = pairs[~np.isnan(pairs)]
    return float((known < 0.5).mean()) if len(known) else float("nan")


def collaboration_heterogeneity(weights: FloatArray, parameters: FloatArray) -> float:
    """Compute H(G) = sum_ij w_ij ||θ_i - θ_j||^2 over all ordered pairs (FedGSP, Theorems 2, 3).

    Args:
        weights: w, the weights of collaboration, `[K, K]`.
        parameters: θ, one row per client.

    >>> collaboration_heterogeneity(np.array([[0.5, 0.5], [1.0, 0.0]]), np.array([[0.0], [2.0]]))
    6.0
    """
    squares = (parameters**2).sum(axis=1)
    distances = squares[:, None] + squares - 2 * parameters @ parameters.T
    return float((weights * np.maximum(distances, 0)).sum())


# Features and embeddings -------------------------------------------------------------------------


def quantiles(values: FloatArray) -> FloatArray:
    """Compute the quantiles of each column at `QUANTILES` midpoints, `[QUANTILES, columns]`."""
    at = (np.arange(QUANTILES) + 0.5) / QUANTILES
    found: FloatArray = np.quantile(values, at, axis=0)
    return found


def line_wasserstein(first: FloatArray, second: FloatArray) -> float:
    """Compute W1 between distributions on a line from their `quantiles`, averaged over columns."""
    return float(np.abs(first - second).mean())


def feature_divergence(graphs: Sequence[Graph]) -> FloatArray:
    """Compute W1 between clients' features along common principal directions, `[K, K]`.

    Columns are scaled to standard deviation 1 over all clients. W1 between the projections of two
    clients is averaged over the `PRINCIPAL` leading directions, each in units of its standard
    deviation. The result is an estimate for two reasons: other directions are ignored, and a
    distribution is represented by `QUANTILES` quantiles. It is deterministic.
    """
    sizes = [graph.num_nodes for graph in graphs]
    stack = sp.vstack if sp.issparse(graphs[0].features) else np.concatenate
    scores = principal_scores(stack([graph.features for graph in graphs]))
    if not scores.shape[1]:
        return np.zeros((len(graphs), len(graphs)))
    parts = np.split(scores, np.cumsum(sizes)[:-1])
    return symmetric([quantiles(part) for part in parts], line_wasserstein)


def principal_scores(x: npt.NDArray[np.float32] | sp.csr_array) -> FloatArray:
    """Project rows on the leading principal directions, each scaled to standard deviation 1.

    Columns are scaled to standard deviation 1 first. Constant columns are left out.
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
    """Compute the leading right singular vectors of x - 1 mean^T, `[F, at most PRINCIPAL]`."""
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
    """Compute how far apart clients embed nodes of one class (FedATH, ICML 2025, Figure 1b).

    The measure is sliced W1: W1 between projections, averaged over `DIRECTIONS` random directions.
    It is divided by the root mean square distance of all embeddings from their mean, so that runs
    can be compared. A client is considered for a class if it has at least `FEWEST` nodes of it. The
    paper does not define the estimator.

    Args:
        embeddings: the embeddings of each client's nodes, `[n_k, H]`.
        labels: the labels of each client's nodes; -1 if unknown.
        classes: C.
        seed: the seed of the directions.

    Returns:
        The mean over pairs of clients for every class, `[C]`, and the mean over classes for every
        pair, `[K, K]`; NaN if there is none.
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
    """Compute the mean of all values that are not NaN; NaN if there are none."""
    known = ~np.isnan(values)
    total, count = np.where(known, values, 0).sum(axis=axis), known.sum(axis=axis)
    found: FloatArray = np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)
    return found
