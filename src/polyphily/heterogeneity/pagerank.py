"""Personalised PageRank of a graph, P = α (I - (1-α) D^-1 A)^-1, and measures that S2FGL uses.

Row u of P is the distribution of the last node of a walk from u that stops with probability α at
every step. No function builds an n × n array for a graph of more than `LARGEST` nodes.
"""

from __future__ import annotations

from functools import reduce
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp
from scipy.linalg import lapack

from polyphily.graphs.graph import BoolArray, Graph, IntArray
from polyphily.graphs.random import generator

FloatArray: TypeAlias = npt.NDArray[np.float64]

LARGEST = 4096  # largest number of nodes for which P may be computed as a dense inverse
DENSE = 2048  # largest number of nodes for which it is by default
BLOCK = 512  # rows of P that forward push computes together
MANY = 4096  # largest number of rows of P that a structure inertia score uses


def walk_matrix(graph: Graph, *, loops: bool = False) -> sp.csr_array:
    """Compute D^-1 A, or (D+I)^-1 (A+I) with self-loops. Isolated nodes have a row of zeros.

    >>> path = Graph.build(np.zeros((3, 1)), np.array([[0, 1], [1, 2]]), np.zeros(3, int))
    >>> walk_matrix(path).toarray().tolist()
    [[0.0, 1.0, 0.0], [0.5, 0.0, 0.5], [0.0, 1.0, 0.0]]
    """
    adjacency = graph.adjacency().astype(np.float64)
    if loops:
        adjacency = sp.csr_array(adjacency + sp.eye_array(graph.num_nodes, format="csr"))
    degrees = np.diff(adjacency.indptr)
    scale = np.repeat(1 / np.maximum(degrees, 1), degrees)
    return sp.csr_array((scale, adjacency.indices, adjacency.indptr), shape=adjacency.shape)


def pagerank_matrix(
    graph: Graph, alpha: float, *, loops: bool = False, most: int | None = None
) -> FloatArray:
    """Compute P as a dense matrix, for graphs of at most `most` nodes (default `DENSE`)."""
    if graph.num_nodes > min(DENSE if most is None else most, LARGEST):
        raise ValueError(f"{graph.name}: {graph.num_nodes} nodes are too many for a dense PageRank")
    walk = walk_matrix(graph, loops=loops)
    root = np.sqrt(np.maximum(np.diff(walk.indptr), 1))
    # With S = D^1/2 W D^-1/2 symmetric, I - (1-α) S is positive definite: Cholesky, not LU.
    system = -(1 - alpha) * (root[:, None] * walk.toarray() / root)
    np.fill_diagonal(system, 1 + system.diagonal())
    lower = lapack.dpotri(lapack.dpotrf(system, lower=1)[0], lower=1)[0]
    inverse = np.tril(lower) + np.tril(lower, -1).T
    matrix: FloatArray = alpha * inverse * (root / root[:, None])
    return matrix


def received_from(
    graph: Graph, sources: BoolArray, alpha: float, *, loops: bool = False
) -> FloatArray:
    """Compute sum_v P_vu over sources v for every node u: how many walks from sources end at u."""
    return _accumulate(walk_matrix(graph, loops=loops).T.tocsr(), sources, alpha)


def sent_to(graph: Graph, targets: BoolArray, alpha: float, *, loops: bool = False) -> FloatArray:
    """Compute sum_v P_uv over targets v for every node u: how often a walk from u ends at a target.

    Several sets of targets are given as columns, `[n, sets]`.
    """
    return _accumulate(walk_matrix(graph, loops=loops), targets, alpha)


def strongest(
    graph: Graph,
    alpha: float,
    targets: BoolArray | None = None,
    *,
    tolerance: float = 1e-4,
    nodes: IntArray | None = None,
    dense: int | None = None,
) -> FloatArray:
    """Compute max_v P_uv over targets v for every node u; zero if there is no target.

    Args:
        graph: a graph of any size.
        alpha: the probability of a restart.
        targets: the nodes v; all nodes unless given.
        tolerance: with more than `dense` nodes, P_uv is a lower bound. Its error is at most
            `tolerance` times the degree of v.
        nodes: the nodes u; all nodes unless given.
        dense: the largest number of nodes for which the result is exact; `DENSE` unless given, at
            most `LARGEST`.
    """
    among = np.ones(graph.num_nodes, dtype=np.bool_) if targets is None else targets
    rows = np.arange(graph.num_nodes) if nodes is None else nodes
    if graph.num_nodes <= min(DENSE if dense is None else dense, LARGEST):
        matrix = pagerank_matrix(graph, alpha, most=dense)
        largest: FloatArray = np.where(among, matrix, 0.0).max(axis=1, initial=0.0)
        return largest[rows]
    walk = walk_matrix(graph)
    keep = sp.diags_array(among.astype(np.float64), format="csr")
    parts = [
        (_push(walk, rows[start : start + BLOCK], alpha, tolerance) @ keep).max(axis=1).toarray()
        for start in range(0, len(rows), BLOCK)
    ]
    return np.concatenate(parts).ravel()  # scipy before 1.13 returns a column


def structure_inertia_score(
    graph: Graph,
    train: BoolArray,
    alpha: float = 0.15,
    *,
    tolerance: float = 1e-4,
    most: int = MANY,
    seed: int = 0,
) -> float:
    """Compute SIS = sum_u max_v P_uv over train nodes v (S2FGL, ICML 2025, Eq. 2).

    It measures how far labels reach. It is exact for up to `LARGEST` nodes and a lower bound for
    larger graphs (see `strongest`). For more than `most` nodes it is extrapolated from a random
    sample of `most` nodes.

    Args:
        graph: a graph of any size.
        train: the nodes v.
        alpha: the probability of a restart.
        tolerance: the tolerance of the lower bound.
        most: the largest number of nodes u that are used.
        seed: the seed of the sample.
    """
    if graph.num_nodes <= most:
        return float(strongest(graph, alpha, train, tolerance=tolerance, dense=LARGEST).sum())
    chosen = generator(seed, "structure inertia").choice(graph.num_nodes, most, replace=False)
    found = strongest(graph, alpha, train, tolerance=tolerance, nodes=np.sort(chosen))
    return float(found.mean() * graph.num_nodes)


def _accumulate(step: sp.csr_array, start: BoolArray, alpha: float) -> FloatArray:
    """Compute α sum_t (1-α)^t step^t start until the rest of the series is below 1e-12."""
    term = alpha * start.astype(np.float64)
    total = term.copy()
    for _ in range(int(np.ceil(np.log(1e-12) / np.log1p(-alpha)))):
        term = (1 - alpha) * (step @ term)
        total += term
    return total


def _push(walk: sp.csr_array, rows: IntArray, alpha: float, tolerance: float) -> sp.csr_array:
    """Compute rows of P by forward push (Andersen et al. 2006), all of them at once.

    A residual of at least tolerance · degree is pushed: α of it stays, the rest moves one step. The
    remaining residual adds at most tolerance · d_v to P_uv, because D P is symmetric.
    """
    nodes = walk.shape[0]
    least = tolerance * np.maximum(np.diff(walk.indptr), 1)
    steps = []
    rest = sp.csr_array(
        (np.ones(len(rows)), (np.arange(len(rows)), rows)), shape=(len(rows), nodes)
    )
    while True:
        large = rest.data >= least[rest.indices]
        if not large.any():
            break
        pushed = rest.copy()
        pushed.data = np.where(large, rest.data, 0.0)
        pushed.eliminate_zeros()
        rest.data = np.where(large, 0.0, rest.data)
        rest.eliminate_zeros()
        steps.append(pushed)
        rest = sp.csr_array(rest + (1 - alpha) * (pushed @ walk))
    # The last steps have the fewest entries: adding from the end copies the least.
    return alpha * reduce(lambda a, b: sp.csr_array(a + b), reversed(steps), 0 * rest)
