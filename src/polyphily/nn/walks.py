"""Random walks on a client's graph, computed once, without a dense matrix over pairs of nodes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp
import torch
from torch import Tensor

from polyphily.graphs.graph import Graph
from polyphily.nn.sparse import SparseMatrix

HELD, CACHED = 1 << 22, 1 << 20  # numbers in a block of walks, on a GPU and on a CPU
THIN = 0.01  # share of nodes that walks have reached up to which sparse blocks are faster


def return_probabilities(graph: Graph, steps: int, device: torch.device) -> Tensor:
    """Compute the diagonals of T, T², …, T^steps with T = A D^-1, `[nodes, steps]` in float64.

    Entry k - 1 of a node is the probability that a random walk is back after k steps. It is zero
    for a node without neighbours.

    T has the powers' diagonals of the symmetric Q = D^-1/2 A D^-1/2, and (Q^k)_ii is the product of
    Q^a e_i and Q^b e_i with a + b = k. So half as many propagations of blocks of unit vectors e_i
    are enough.
    """
    if device.type == "cpu":
        return torch.from_numpy(_on_host(graph, steps))
    nodes = graph.num_nodes
    found = torch.zeros(nodes, steps, dtype=torch.float64, device=device)
    rows, cols = graph.edges
    pattern = SparseMatrix.from_coordinates(
        rows, cols, None, (nodes, nodes), dtype=torch.float64, device=device
    )
    scale = (pattern.crow[1:] - pattern.crow[:-1]).double().clamp(min=1).rsqrt()
    walk = pattern.with_value(scale[pattern.row] * scale[pattern.col_long])
    width = max(HELD // max(nodes, 1), 1)
    for start in range(0, nodes, width):
        own = torch.arange(start, min(start + width, nodes), device=device)
        here = torch.zeros(nodes, len(own), dtype=torch.float64, device=device)
        here[own, own - start] = 1
        for step in range(0, steps, 2):
            after = walk @ here
            found[own, step] = (here * after).sum(dim=0)
            if step + 1 < steps:
                found[own, step + 1] = after.square().sum(dim=0)
            here = after
    return found


def _on_host(graph: Graph, steps: int) -> npt.NDArray[np.float64]:
    """Compute the same by scipy: a block of walks is sparse while few nodes are reached."""
    nodes = graph.num_nodes
    found = np.zeros((nodes, steps))
    rows, cols = graph.edges
    scale = 1 / np.sqrt(np.maximum(np.bincount(rows, minlength=nodes), 1))
    walk = sp.csr_array((scale[rows] * scale[cols], (rows, cols)), shape=(nodes, nodes))
    width = max(CACHED // max(nodes, 1), 1)
    for start in range(0, nodes, width):
        own = np.arange(start, min(start + width, nodes))
        unit = (np.ones(len(own)), (own, own - start))
        here = sp.csr_array(unit, shape=(nodes, len(own)))
        for step in range(0, steps, 2):
            if sp.issparse(here) and here.nnz > THIN * nodes * len(own):
                here = here.toarray()
            after = walk @ here
            found[own, step] = (here * after).sum(axis=0)
            if step + 1 < steps:
                found[own, step + 1] = (after * after).sum(axis=0)
            here = after
    return found
