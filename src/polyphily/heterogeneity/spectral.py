"""The Laplacian spectrum of a graph, distances between spectra, and frequencies of features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp
from scipy.linalg import eigvalsh
from scipy.special import rel_entr

from polyphily.graphs.graph import Graph
from polyphily.graphs.random import generator

FloatArray = npt.NDArray[np.float64]
Laplacian = Literal["symmetric", "combinatorial"]

EXACT = 2048  # largest number of nodes for which all eigenvalues are computed
STEPS, PROBES = 160, 16  # of the Lanczos estimate for larger graphs
DRAWS = 1 << 17  # sufficient number of random signs: larger graphs need fewer probes, but two
BINS = 51  # of [0, 2]; odd, so that the frequent eigenvalue 1 does not lie on a boundary
SMALLEST = 1e-8  # added to every bin before two histograms are compared


def normalised_adjacency(graph: Graph) -> sp.csr_array:
    """Compute D^-1/2 A D^-1/2; a node without edges has a zero row."""
    adjacency = graph.adjacency().astype(np.float64)
    scale = sp.diags_array(np.maximum(np.diff(adjacency.indptr), 1) ** -0.5)
    return sp.csr_array(scale @ adjacency @ scale)


def laplacian_matrix(graph: Graph) -> sp.csr_array:
    """Compute I - D^-1/2 A D^-1/2, with eigenvalues in [0, 2]; isolated nodes have a zero row."""
    linked = np.bincount(graph.edges[0], minlength=graph.num_nodes) > 0
    return sp.csr_array(sp.diags_array(linked.astype(np.float64)) - normalised_adjacency(graph))


@dataclass(frozen=True)
class Spectrum:
    """The distribution of a graph's Laplacian eigenvalues on [0, 2].

    Attributes:
        values: the eigenvalues, or the nodes of a quadrature.
        weights: the weights of the values; they sum to one.
        exact: whether the values are all eigenvalues, not an estimate.
    """

    values: FloatArray
    weights: FloatArray
    exact: bool

    def histogram(self, bins: int = BINS) -> FloatArray:
        """Return the share of eigenvalues in each of `bins` equal parts of [0, 2]."""
        counts, _ = np.histogram(self.values, bins=bins, range=(0, 2), weights=self.weights)
        return counts


def spectrum(graph: Graph, seed: int = 0) -> Spectrum:
    """Compute the eigenvalues of the symmetric normalised Laplacian.

    Up to `EXACT` nodes all eigenvalues are computed. Larger graphs use stochastic Lanczos
    quadrature (Ubaru, Chen and Saad 2017): the quadratures of `STEPS` Lanczos steps are averaged
    over at most `PROBES` random sign vectors. The estimate is exact in expectation for polynomials
    of degree up to 2 · STEPS - 1; moments deviate by about 1/sqrt(n · probes). Compared with all
    eigenvalues of graphs of 1,200 to 2,000 nodes, the KL divergence and W1 were below 0.01.

    Args:
        graph: a graph of any size.
        seed: the seed of the sign vectors.
    """
    if not graph.num_nodes:
        raise ValueError(f"{graph.name}: a graph without nodes has no spectrum")
    if graph.num_nodes <= EXACT:
        values = eigvalsh(laplacian_matrix(graph).toarray(), overwrite_a=True, check_finite=False)
        weights = np.full(len(values), 1 / len(values))
        return Spectrum(np.clip(values, 0, 2), weights, exact=True)
    probes = max(2, min(PROBES, -(-DRAWS // graph.num_nodes)))
    return lanczos_spectrum(graph, seed, probes=probes)


def lanczos_spectrum(
    graph: Graph, seed: int = 0, steps: int = STEPS, probes: int = PROBES
) -> Spectrum:
    """Compute the estimate of `spectrum` for a graph of any size."""
    matrix = laplacian_matrix(graph)
    nodes = graph.num_nodes
    steps = min(steps, nodes)
    rng = generator(seed, "spectral density")
    v = rng.choice([-1.0, 1.0], (nodes, probes)) / np.sqrt(nodes)
    before, beta = np.zeros_like(v), np.zeros(probes)
    tridiagonal = np.zeros((probes, steps, steps))
    for step in range(steps):
        w = matrix @ v - beta * before
        alpha = (w * v).sum(axis=0)
        w -= alpha * v
        beta = np.sqrt((w * w).sum(axis=0))
        beta[beta < 1e-10] = 0  # the Krylov space is exhausted: later steps have no weight
        tridiagonal[:, step, step] = alpha
        if step + 1 < steps:
            tridiagonal[:, step, step + 1] = tridiagonal[:, step + 1, step] = beta
        before, v = v, w * np.divide(1, beta, out=np.zeros_like(beta), where=beta > 0)
    values, vectors = np.linalg.eigh(tridiagonal)
    weights = vectors[:, 0, :] ** 2 / probes
    return Spectrum(np.clip(values.ravel(), 0, 2), weights.ravel(), exact=False)


def spectral_kl(first: Spectrum, second: Spectrum) -> float:
    """Compute KL(first || second) of eigenvalue histograms, in nats (S2FGL, ICML 2025, Figure 1).

    The paper gives no details. We use `BINS` bins, add `SMALLEST` to each and normalise. A bin that
    is empty in `second` only has a large effect; `spectral_wasserstein` is the more stable measure.
    """
    p, q = (s.histogram() + SMALLEST for s in (first, second))
    return float(rel_entr(p / p.sum(), q / q.sum()).sum())


def spectral_wasserstein(first: Spectrum, second: Spectrum) -> float:
    """Compute W1 between two distributions of eigenvalues on [0, 2]."""
    values = np.concatenate([first.values, second.values])
    order = np.argsort(values)
    gap = np.cumsum(np.concatenate([first.weights, -second.weights])[order])  # of the two CDFs
    return float(np.abs(gap[:-1]) @ np.diff(values[order]))


def high_frequency_area(graph: Graph, laplacian: Laplacian = "symmetric") -> float:
    """Compute S, the mean over features of x^T L x / x^T x: how much features vary along edges.

    S decreases with homophily (FedSPA, CVPR 2025, equations 2 and 7). Features that are zero at
    every node are left out. If all are, S = 0.

    Args:
        graph: only its features and edges are used. Sparse features stay sparse.
        laplacian: "symmetric" is I - D^-1/2 A D^-1/2, whose S lies in [0, 2]; "combinatorial" is
            D - A. A node without edges has a zero row in both.

    >>> triangle = np.array([[0, 1, 2], [1, 2, 0]])
    >>> smooth, rough = np.ones((3, 1)), np.array([[1.0], [-1.0], [0.0]])
    >>> [high_frequency_area(Graph.build(x, triangle, np.zeros(3))) for x in (smooth, rough)]
    [0.0, 1.5]
    """
    degrees = np.bincount(graph.edges[0], minlength=graph.num_nodes).astype(np.float64)
    if laplacian == "symmetric":
        adjacency, diagonal = normalised_adjacency(graph), (degrees > 0).astype(np.float64)
    else:
        adjacency, diagonal = graph.adjacency().astype(np.float64), degrees
    x = graph.features
    if sp.issparse(x):
        x = sp.csr_array(x, dtype=np.float64)
        square, product = x.multiply(x), x.multiply(adjacency @ x)
    else:
        x = np.asarray(x, dtype=np.float64)
        square, product = x * x, x * (adjacency @ x)
    energy = diagonal @ square - product.sum(axis=0)  # x^T L x of every feature
    norm = square.sum(axis=0)  # x^T x
    present = norm > 0
    if not present.any():
        return 0.0
    # Rounding may make the value of a smooth feature slightly negative.
    return float(np.maximum(energy[present] / norm[present], 0.0).mean())
