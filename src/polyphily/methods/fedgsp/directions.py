"""Singular vectors that FedGSP's clients send: principal directions of their bases.

The bases are those of `polyphily.nn.unifilter`. Everything is computed in float64, graph by graph,
and cached with the client's graph.
"""

from __future__ import annotations

from itertools import islice
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import scipy.linalg
import torch
from torch import Tensor

from polyphily.graphs.graph import Graph
from polyphily.nn import cores
from polyphily.nn.stacked import StackedGraph
from polyphily.nn.unifilter import graph_bases

FloatArray: TypeAlias = npt.NDArray[np.float64]

EPSILON = float(np.finfo(np.float64).eps)
DENSE_ON_CPU = 600  # shorter side of a matrix up to which LAPACK is faster than the iteration
DENSE_ELSEWHERE = 256  # the same if the matrix must be copied to the host first
SPARE = 1  # vectors iterated in addition to those wanted
DEPTH = 8  # blocks in a Krylov space before it is restarted
RESTARTS, FEW_RESTARTS = 40, 5  # for large matrices, and for those that LAPACK solves quickly
SHORTENED = 0.25  # squared length above which a reprojected unit vector is kept
ACCURACY = 1e-9  # of an eigenvector: its residual over the gap to the next eigenvalue
LARGEST_GRAM = 4096  # side of the largest Gram matrix that is formed
BATCH_ON_CPU = 1  # numbers in bases that are decomposed together: here one order at a time
BATCH_ELSEWHERE = 1 << 24  # a GPU solves many small problems as fast as one


def client_directions(graphs: StackedGraph, order: int, count: int, *, joint: bool) -> Tensor:
    """Compute the principal directions of every client's bases, `[clients, 2, rows, count · F]`.

    A row has the directions of the basis of one order. There are K + 1 rows. With `joint` there are
    2 K: those of the orders 1 to K, then those of [H^1 … H^K], a matrix of K F columns, whose
    directions are cut into a row for each order. This takes the memory of all bases of a client.
    """
    width = graphs.num_features
    numbers = BATCH_ON_CPU if graphs.device.type == "cpu" else BATCH_ELSEWHERE

    def compute(graph: Graph) -> Tensor:
        columns, blocks = graph_bases(graph, graphs.device, order)
        size = max(1, numbers // max(2 * graph.num_nodes * len(columns), 1))
        orders, tops, kept = zip(*blocks, strict=True), [], []
        if joint:
            next(orders)
        while batch := list(islice(orders, size)):
            pairs = [zip(*parts, strict=True) for parts in batch]
            found = torch.stack([torch.cat(parts, dim=1) for pair in pairs for parts in pair])
            tops.append(principal_directions(found, count))
            if joint:
                kept.append(found)
        if joint:
            bases = torch.cat(kept).view(order, 2, graph.num_nodes, len(columns))
            whole = principal_directions(bases.permute(1, 2, 0, 3).flatten(2), count)
            tops.append(whole.view(2, count, order, len(columns)).permute(2, 0, 1, 3).flatten(0, 1))
        top = torch.cat(tops)
        wide = top.new_zeros(*top.shape[:2], width).index_copy_(2, columns, top)
        return wide.view(len(top) // 2, 2, -1).transpose(0, 1).to(graphs.dtype)

    key = ("unifilter directions", order, count, joint)
    return torch.stack(graphs.cached_per_graph(key, compute))


def principal_directions(found: Tensor, count: int) -> Tensor:
    """Compute the first right singular vectors of centred matrices.

    Signs are fixed: the entry of the largest magnitude is positive. Directions beyond the rank are
    zero, so that a client with few nodes sends as many numbers as every other.

    Args:
        found: the matrices, `[batch, n, F]`.
        count: how many vectors of each.

    Returns:
        `[batch, count, F]`.
    """
    batch, nodes, features = found.shape
    padded = found.new_zeros(batch, count, features)
    short = min(nodes, features)
    if short == 0:
        return padded
    centred = found - found.mean(dim=1, keepdim=True)
    wide = centred if nodes < features else centred.mT
    values, vectors = largest_eigenpairs(wide, min(count, short))
    directions = vectors.mT @ wide if nodes < features else vectors.mT
    real = values > 10 * short * EPSILON * values[:, :1].clamp(min=0)
    norm = torch.linalg.vector_norm(directions, dim=2)
    directions = directions * torch.where(real, 1 / norm, 0).unsqueeze(2)
    peak = directions.gather(2, directions.abs().argmax(dim=2, keepdim=True))
    padded[:, : directions.shape[1]] = directions * peak.sign()
    return padded


def largest_eigenpairs(a: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Compute the largest eigenvalues of a a^T and their vectors.

    Small matrices go to a dense solver. For larger ones a block Krylov iteration (Rayleigh-Ritz on
    a space that is restarted from its best vectors) stops when the residual of each vector is
    small compared with the gap between its eigenvalue and the neighbouring ones, or is rounding
    error. If eigenvalues are almost equal, neither happens. The dense solver then takes over,
    unless the matrix is too large for it: in that case the last vectors are returned.

    Args:
        a: the matrices, `[batch, n, m]`.
        count: how many pairs of each.

    Returns:
        Eigenvalues `[batch, count]` and eigenvectors `[batch, n, count]`.
    """
    side, block = a.shape[1], count + SPARE
    small = max(2 * DEPTH * block, DENSE_ON_CPU if a.device.type == "cpu" else DENSE_ELSEWHERE)
    if side <= small:
        return _dense_eigenpairs(a, count)
    gram = _gram(a) if side <= LARGEST_GRAM else None
    source = torch.Generator().manual_seed(0)  # the start must be the same every time
    start = torch.randn(side, block, generator=source, dtype=a.dtype).to(a.device)
    v = _orthonormal(start.expand(len(a), -1, -1))
    values = a.new_zeros(len(a), block)
    for _ in range(FEW_RESTARTS if side <= DENSE_ON_CPU else RESTARTS):
        q = v
        image = products = a @ (a.mT @ v) if gram is None else gram @ v
        for _ in range(DEPTH - 1):
            v = _orthonormal(image, q)
            image = a @ (a.mT @ v) if gram is None else gram @ v
            q, products = torch.cat([q, v], dim=2), torch.cat([products, image], dim=2)
        values, mix = torch.linalg.eigh(q.mT @ products)
        values, mix = values.flip(1), mix.flip(2)[:, :, :block]
        v = q @ mix
        residual = torch.linalg.vector_norm(products @ mix - v * values[:, None, :block], dim=1)
        gap = values[:, :block] - values[:, 1 : block + 1]
        gap[:, 1:] = torch.minimum(gap[:, 1:], gap[:, :-1])
        enough = torch.maximum(ACCURACY * gap, side * EPSILON * values[:, :1])
        if bool((residual <= enough)[:, :count].all()):
            break
    else:
        if gram is not None:
            return _dense_eigenpairs(a, count)
    return values[:, :count], v[:, :, :count]


def _gram(a: Tensor) -> Tensor:
    """Compute a a^T; on a CPU by numpy, which computes only half of a symmetric product."""
    if a.device.type != "cpu":
        return a @ a.mT
    return torch.from_numpy(np.stack([x @ x.T for x in a.numpy()]))


def _dense_eigenpairs(a: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Solve on the host: LAPACK can compute the largest eigenpairs alone, GPU solvers cannot."""
    gram = _gram(a).cpu().numpy()
    wanted = [gram.shape[1] - count, gram.shape[1] - 1]

    def solve(matrix: FloatArray) -> tuple[FloatArray, FloatArray]:
        return scipy.linalg.eigh(matrix, subset_by_index=wanted, overwrite_a=True)  # type: ignore[no-any-return]

    solved = map(solve, gram) if a.device.type == "cpu" else cores.each(solve, gram)
    parts = (torch.from_numpy(np.stack(part)) for part in zip(*solved, strict=True))
    values, vectors = (part.to(a.device) for part in parts)
    return values.flip(1), vectors.flip(2)


def _orthonormal(x: Tensor, beside: Tensor | None = None) -> Tensor:
    """Return orthonormal columns that span the part of x orthogonal to `beside`.

    Computed twice, because the first result is not orthogonal to working precision. A column is
    zero if nothing but rounding error is left the first time, or if the second time shortens it.
    """
    largest = (x * x).sum(dim=1).amax(dim=1, keepdim=True)
    least = largest * (x.shape[1] * EPSILON) ** 2
    for _ in range(2):
        if beside is not None:
            x = x - beside @ (beside.mT @ x)
        values, vectors = torch.linalg.eigh(x.mT @ x)
        real = values > torch.maximum(least, EPSILON * values[:, -1:])
        x = x @ (vectors * torch.where(real, values.clamp(min=0).rsqrt(), 0).unsqueeze(1))
        least = torch.full_like(least, SHORTENED)
    return x
