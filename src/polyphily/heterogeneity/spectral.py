"""Measures from the graph spectrum that need no eigenvectors."""

from __future__ import annotations

from typing import Literal

import numpy as np
import scipy.sparse as sp

from polyphily.graphs.graph import Graph

Laplacian = Literal["symmetric", "combinatorial"]


def high_frequency_area(graph: Graph, laplacian: Laplacian = "symmetric") -> float:
    """S = mean over features of x^T L x / x^T x: how much features change along edges.

    It falls as homophily grows (FedSPA, CVPR 2025, equations 2 and 7). Features that are zero at
    every node are left out; a graph where no other is left has S = 0.

    Args:
        graph: only its features and edges are read. Sparse features stay sparse.
        laplacian: "symmetric" is I - D^-1/2 A D^-1/2, whose S lies in [0, 2]; "combinatorial" is
            D - A. A node without edges has a zero row in both.

    >>> triangle = np.array([[0, 1, 2], [1, 2, 0]])
    >>> smooth, rough = np.ones((3, 1)), np.array([[1.0], [-1.0], [0.0]])
    >>> [high_frequency_area(Graph.build(x, triangle, np.zeros(3))) for x in (smooth, rough)]
    [0.0, 1.5]
    """
    adjacency = graph.adjacency().astype(np.float64)
    degrees = np.diff(adjacency.indptr).astype(np.float64)
    if laplacian == "symmetric":
        scale = np.maximum(degrees, 1) ** -0.5
        adjacency = sp.diags_array(scale) @ adjacency @ sp.diags_array(scale)
        diagonal = (degrees > 0).astype(np.float64)
    else:
        diagonal = degrees
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
    # Rounding may leave a smooth feature a hair below zero.
    return float(np.maximum(energy[present] / norm[present], 0.0).mean())
