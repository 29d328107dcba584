"""UniFilter: a learned mixture of homophily and heterophily bases, then an MLP (Huang et al. 2024).

The bases are static: they depend on edges, features and train labels, not on parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import scipy.linalg
import scipy.sparse as sp
import torch
from scipy.sparse.linalg import eigsh
from torch import Tensor, nn

from polyphily.nn.backbones import Backbone, Output, Shape
from polyphily.nn.layers import Linear
from polyphily.nn.segments import Segments

if TYPE_CHECKING:
    from polyphily.federation.cohort import Cohort
    from polyphily.graphs.graph import Graph, IntArray
    from polyphily.nn.draws import Draws

Array = npt.NDArray[np.float64]

UNKNOWN_HOMOPHILY = 0.75  # of a graph without an edge between train nodes
SMALLEST_COSINE = 1e-6  # at homophily 0 the bases are orthogonal; the recursion divides by it
EXHAUSTED = 1e-8  # a Krylov residual (of unit vectors) below this is rounding
DENSE_EIGEN = 1500  # side of a Gram matrix above which an iteration beats the dense solver


# Bases of one graph ------------------------------------------------------------------------------


def propagation(graph: Graph) -> sp.csr_array:
    """P = D^-1/2 A D^-1/2 without self-loops; an isolated node has a zero row."""
    degrees = np.bincount(graph.edges[0], minlength=graph.num_nodes)
    scale = sp.diags_array(1 / np.sqrt(np.maximum(degrees, 1)))
    return sp.csr_array(scale @ graph.adjacency().astype(np.float64) @ scale)


def train_homophily(edges: IntArray, labels: IntArray) -> float:
    """Share of same-label edges among those whose ends are both labelled (-1 is unlabelled).

    >>> train_homophily(np.array([[0, 1, 1, 2], [1, 0, 2, 1]]), np.array([1, 1, -1]))
    1.0
    """
    source, target = labels[edges]
    seen = (source >= 0) & (target >= 0)
    return float((source == target)[seen].mean()) if seen.any() else UNKNOWN_HOMOPHILY


def bases(p: sp.csr_array, x: Array, homophily: float, order: int) -> Iterator[tuple[Array, Array]]:
    """The homophily basis P^k x and the heterophily basis u_k for k = 0 … `order`, `[n, F]` each.

    Column by column, every pair of u_0, u_1, … has the cosine c of theta = (1-h) pi/2. v_0, v_1, …
    are orthonormal (Lanczos on P from x), s_k is the sum of the k vectors u_0 … u_{k-1}, so that
    |s_k/k|^2 = a = ((k-1)c + 1)/k, and u_k is s_k/k + push · v_k, normalised, whose cosine with
    each u_j is a / sqrt(a + push^2) = c for push = sqrt(a (a - c^2)) / c.

    A column whose Krylov space is exhausted at order k has no direction v_k left: its u_k is the
    normalised s_k. A zero column stays zero.

    Args:
        p: the propagation matrix.
        x: features, `[n, F]`.
        homophily: of the graph, in [0, 1]; see `train_homophily`.
        order: K.
    """
    c = max(math.cos((1 - homophily) * math.pi / 2), SMALLEST_COSINE)
    near = x
    u = v = _normalised(x)
    before = np.zeros_like(v)
    total = u
    yield near, u
    for k in range(1, order + 1):
        near = p @ near
        step = p @ v
        step -= (step * v).sum(axis=0) * v
        step -= (step * before).sum(axis=0) * before
        before, v = v, _normalised(step, EXHAUSTED)
        a = ((k - 1) * c + 1) / k
        u = _normalised(total / k + math.sqrt(max(a * (a - c * c), 0)) / c * v)
        total = total + u
        yield near, u


def _normalised(x: Array, negligible: float = 0.0) -> Array:
    """Columns of unit norm; those with a norm no larger than `negligible` become zero."""
    norm = np.sqrt((x * x).sum(axis=0))
    kept = norm > negligible
    scaled: Array = x * (kept / np.where(kept, norm, 1))
    return scaled


def principal_directions(basis: Array, count: int) -> Array:
    """The first right singular vectors of the centred matrix, `[count, F]`.

    Signs are fixed: the entry of the largest magnitude is positive. Directions beyond the rank are
    zero, so that a client with few nodes sends as many numbers as every other.
    """
    found = np.zeros((count, basis.shape[1]))
    centred = basis - basis.mean(axis=0)
    wide = centred.shape[0] < centred.shape[1]
    gram = centred @ centred.T if wide else centred.T @ centred
    values, vectors = _largest_eigenpairs(gram, min(count, len(gram)))
    kept = values > len(gram) * np.finfo(np.float64).eps * max(values[0], 0) * 10
    directions = (vectors.T @ centred if wide else vectors.T)[kept]
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    peak = np.abs(directions).argmax(axis=1)
    directions *= np.sign(directions[np.arange(len(directions)), peak])[:, None]
    found[: len(directions)] = directions
    return found


def _largest_eigenpairs(gram: Array, count: int) -> tuple[Array, Array]:
    side = len(gram)
    if side <= DENSE_EIGEN:
        values, vectors = scipy.linalg.eigh(gram, subset_by_index=[side - count, side - 1])
    else:
        values, vectors = eigsh(gram, count, which="LA", v0=np.ones(side))
    order = np.argsort(-values)
    return values[order], vectors[:, order]


# Bases of a cohort -------------------------------------------------------------------------------


def client_bases(
    cohort: Cohort, order: int
) -> Iterator[tuple[slice, Iterator[tuple[Array, Array]]]]:
    """For every client its rows and its bases, order by order.

    One client at a time and in float64: about eight matrices `[n_k, F]` live at once, so who else
    is in the cohort changes no bit of a client's bases.
    """
    labels = cohort.labels.cpu().numpy()
    for graph, (start, stop) in zip(cohort.graphs, pairwise(cohort.segments.pointers), strict=True):
        x: Any = graph.features
        dense = np.asarray(x.toarray() if sp.issparse(x) else x, dtype=np.float64)
        h = train_homophily(graph.edges, labels[start:stop])
        yield slice(start, stop), bases(propagation(graph), dense, h, order)


def mixed_bases(cohort: Cohort, order: int, tau: float) -> Tensor:
    """tau H^k + (1-tau) U^k of every node, `[K+1, N, F]`, computed once per cohort.

    The two kinds are kept as their mixture only: (K+1) N F numbers, 4 bytes each in float32 (113 MB
    for 20,000 nodes, 128 features and K = 10; 170 MB for Cora; 13 GB for Coauthor-Physics).
    """

    def make(cohort: Cohort) -> Tensor:
        shape = (order + 1, cohort.num_nodes, cohort.num_features)
        mixed = torch.empty(shape, dtype=cohort.dtype, device=cohort.device)
        for rows, found in client_bases(cohort, order):
            for k, (near, far) in enumerate(found):
                mixed[k, rows] = torch.from_numpy(tau * near + (1 - tau) * far).to(cohort.dtype)
        return mixed

    return cohort.once(("unifilter", order, tau), make)


def mixed_train_bases(cohort: Cohort, order: int, tau: float) -> Tensor:
    """The rows of `mixed_bases` at train nodes, `[K+1, train nodes, F]`."""
    return cohort.once(
        ("unifilter at train nodes", order, tau),
        lambda cohort: mixed_bases(cohort, order, tau)[:, cohort.train_nodes].contiguous(),
    )


# Network -----------------------------------------------------------------------------------------


class UniFilter(Backbone):
    """Z = sum_k W^k ∘ (tau H^k + (1-tau) U^k), then a bias-free MLP with residual layers.

    Coefficients start at 1/(K+1), the MLP uniformly in ±1/sqrt(outputs). Dropout is on the bases
    (`input_dropout`) and before every layer of the MLP (`dropout`).

    Args:
        shape: `layers` and `hidden` are those of the MLP.
        order: K.
        tau: share of the homophily bases.
        per_feature: one coefficient per order and feature, or one per order.
    """

    citation = "Huang et al., ICML 2024"

    def __init__(self, shape: Shape, order: int, tau: float, *, per_feature: bool = True) -> None:
        super().__init__(shape)
        self.order, self.tau = order, tau
        width = shape.features if per_feature else 1
        self.coefficients = nn.Parameter(torch.full((1, order + 1, width), 1 / (order + 1)))
        self.linears = nn.ModuleList(Linear(i, o, bias=False) for i, o in shape.widths())
        for linear, (_, outputs) in zip(self.linears, shape.widths(), strict=True):
            assert isinstance(linear, Linear)
            nn.init.uniform_(linear.weight, -1 / math.sqrt(outputs), 1 / math.sqrt(outputs))

    def forward(
        self, cohort: Cohort, draws: Draws | None = None, only_train: bool = False
    ) -> Output:
        """Output of every node, or of the train nodes alone: no node's output needs another's."""
        find = mixed_train_bases if only_train else mixed_bases
        segments = cohort.train_segments if only_train else cohort.segments
        kept: Sequence[Tensor] = find(cohort, self.order, self.tau).unbind()
        if draws is not None:
            p = self.shape.input_dropout
            kept = [draws.dropout(basis, p, segments.pointers) for basis in kept]
        coefficients = self.coefficients.expand(-1, -1, self.shape.features)
        z: Tensor = _Mixture.apply(coefficients, kept, segments)  # type: ignore[no-untyped-call]
        embedding = z
        for depth, linear in enumerate(self.linears):
            assert isinstance(linear, Linear)
            if draws is not None:
                z = draws.dropout(z, self.shape.dropout, segments.pointers)
            out = segments.matmul(z, linear.weight)
            z = out + z if out.shape == z.shape else out
            if depth < len(self.linears) - 1:
                z = embedding = z.relu()
        return Output(z, embedding)

    def is_classifier(self, parameter: str) -> bool:
        return parameter.startswith(f"linears.{len(self.linears) - 1}.")


class _Mixture(torch.autograd.Function):
    """sum_k weight[client, k] ∘ basis_k, weights `[clients, K+1, F]`, without temporaries as large
    as the bases: on a CPU a client's block stays in the cache while the orders pass."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, kept: Sequence[Tensor], segments: Segments) -> Tensor:
        ctx.kept, ctx.segments = kept, segments
        out = torch.zeros_like(kept[0])
        if out.is_cuda:
            for k, basis in enumerate(kept):
                out.addcmul_(basis, weight[segments.owner, k])
            return out
        for client, (start, stop) in enumerate(pairwise(segments.pointers)):
            block = out[start:stop]
            for basis, own in zip(kept, weight[client].unbind(), strict=True):
                block.addcmul_(basis[start:stop], own)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        kept, segments = ctx.kept, ctx.segments
        if grad.is_cuda:
            return torch.stack([segments.sum(basis * grad) for basis in kept], dim=1), None, None
        out = grad.new_empty(len(segments), len(kept), grad.shape[1])
        for client, (start, stop) in enumerate(pairwise(segments.pointers)):
            block = grad[start:stop]
            for k, basis in enumerate(kept):
                torch.sum(basis[start:stop] * block, dim=0, out=out[client, k])
        return out, None, None
