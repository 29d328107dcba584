"""UniFilter: a learned mixture of homophily and heterophily bases, then an MLP (Huang et al. 2024).

The bases are static: they depend on edges, features and train labels, not on parameters. They are
computed in float64, client by client, and cached with the client's graph, so that they do not
depend on the other clients. A feature that is zero at all nodes of a client is zero in all of its
bases: such columns are neither computed nor kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor, nn

from polyphily.graphs.graph import UNLABELLED, Graph, IntArray
from polyphily.nn.backbones import Backbone, Output, Shape, register_backbone
from polyphily.nn.draws import Draws
from polyphily.nn.layers import Linear
from polyphily.nn.segments import Segments
from polyphily.nn.sparse import SparseMatrix
from polyphily.nn.stacked import StackedGraph
from polyphily.nn.unifilter_mixture import Packed, Ragged

Pair: TypeAlias = tuple[Tensor, Tensor]

UNKNOWN_HOMOPHILY = 0.75  # of a graph without an edge between train nodes
SMALLEST_COSINE = 1e-6  # at homophily 0 the bases are orthogonal; the recursion divides by it
EXHAUSTED = 1e-5  # Krylov residuals of unit vectors are above 1e-3, or rounding (1e-8 at order 10)
BLOCK_ON_CPU = 1 << 17  # numbers in columns whose bases are computed together
PACKED_AT_MOST = 1 << 32  # numbers in the bases of nodes without labels that a GPU packs


# The network -------------------------------------------------------------------------------------


@register_backbone("unifilter", cite="Huang et al., ICML 2024")
class UniFilter(Backbone):
    """Universal spectral filter: a learned mixture of homophily and heterophily bases, then an MLP.

    Z = sum_k W^k ∘ (tau H^k + (1-tau) U^k), then a bias-free MLP with residual layers.

    Coefficients start at 1/(K+1), the MLP uniformly in ±1/sqrt(outputs). Dropout is applied to the
    bases (`input_dropout`) and before every layer of the MLP (`dropout`).

    Args:
        shape: `layers` and `hidden` are those of the MLP.
        order: K; `shape.hops` unless given.
        tau: share of the homophily bases.
        per_feature: whether there is one coefficient per order and feature, or one per order.
    """

    local_reach = False
    keeps_features = True
    weighted_edges = False

    def __init__(
        self,
        shape: Shape,
        order: int | None = None,
        tau: float = 0.95,
        *,
        per_feature: bool = True,
    ) -> None:
        super().__init__(shape)
        self.order, self.tau = shape.hops if order is None else order, tau
        orders, width = self.order + 1, shape.features if per_feature else 1
        self.coefficients = nn.Parameter(torch.full((1, orders, width), 1 / orders))
        self.linears = nn.ModuleList(Linear(i, o, bias=False) for i, o in shape.widths())
        for linear, (_, outputs) in zip(self.linears, shape.widths(), strict=True):
            assert isinstance(linear, Linear)
            nn.init.uniform_(linear.weight, -1 / math.sqrt(outputs), 1 / math.sqrt(outputs))

    @property
    def embedding_width(self) -> int:
        return self.shape.hidden if self.shape.layers > 1 else self.shape.features

    def forward(
        self, graph: StackedGraph, draws: Draws | None = None, only_train: bool = False
    ) -> Output:
        """Compute the output of all nodes, or of the train nodes alone.

        The bases are static, so that no node's output needs another's.
        """
        train = self._at(train_bases(graph, self.order, self.tau), draws)
        if only_train:
            return train
        rest = self._at(rest_bases(graph, self.order, self.tau), draws)
        place = graph.cached("unifilter/place of nodes", _place)
        logits, embedding = (torch.cat(parts)[place] for parts in zip(train, rest, strict=True))
        return Output(logits, embedding)

    def _at(self, bases: Ragged | Packed, draws: Draws | None) -> Output:
        """Compute the output of the nodes of these bases."""
        coefficients = self.coefficients.expand(-1, -1, self.shape.features)
        z = bases.mixture(coefficients, draws, self.shape.input_dropout)
        embedding = z if len(self.linears) > 1 else bases.dense(z)
        rows: Ragged | Packed | Segments = bases
        for depth, linear in enumerate(self.linears):
            assert isinstance(linear, Linear)
            if draws is not None:
                z = draws.dropout(z, self.shape.dropout, rows.pointers)
            out = rows.matmul(z, linear.weight)
            if linear.weight.shape[1] == linear.weight.shape[2]:
                out = out + (bases.dense(z) if depth == 0 else z)
            z, rows = out, bases.segments
            if depth < len(self.linears) - 1:
                z = embedding = z.relu()
        return Output(z, embedding)

    def is_classifier(self, parameter: str) -> bool:
        return parameter.startswith(f"linears.{len(self.linears) - 1}.")


# Bases of one graph ------------------------------------------------------------------------------


def propagation(graph: Graph, device: torch.device) -> SparseMatrix:
    """Return P = D^-1/2 A D^-1/2 without self-loops; an isolated node has a zero row."""
    source, target = graph.edges
    scale = 1 / np.sqrt(np.maximum(np.bincount(source, minlength=graph.num_nodes), 1))
    return SparseMatrix.from_coordinates(
        source,
        target,
        scale[source] * scale[target],
        (graph.num_nodes, graph.num_nodes),
        dtype=torch.float64,
        device=device,
    )


def train_labels(graph: Graph) -> IntArray:
    """Return the labels of train nodes, -1 elsewhere."""
    assert graph.masks is not None, f"{graph.name}: no split was drawn"
    return np.where(graph.masks.train, graph.labels, UNLABELLED)


def train_homophily(edges: IntArray, labels: IntArray) -> float:
    """Return the share of same-label edges among edges between labelled nodes (-1: unlabelled).

    >>> train_homophily(np.array([[0, 1, 1, 2], [1, 0, 2, 1]]), np.array([1, 1, -1]))
    1.0
    """
    source, target = labels[edges]
    seen = (source >= 0) & (target >= 0)
    return float((source == target)[seen].mean()) if seen.any() else UNKNOWN_HOMOPHILY


def bases(p: SparseMatrix, x: Tensor, homophily: float, order: int) -> Iterator[Pair]:
    """Yield the homophily basis P^k x and the heterophily basis u_k for k = 0 … `order`.

    Column by column, every pair of u_0, u_1, … has the cosine c of theta = (1-h) pi/2. v_0, v_1, …
    are orthonormal (Lanczos on P from x), s_k is the sum of the k vectors u_0 … u_{k-1}, so that
    |s_k/k|^2 = a = ((k-1)c + 1)/k, and u_k is s_k/k + push · v_k, normalised, whose cosine with
    each u_j is a / sqrt(a + push^2) = c for push = sqrt(a (a - c^2)) / c.

    A column whose Krylov space is exhausted at order k has no further direction v_k: its u_k is the
    normalised s_k. A zero column stays zero.

    Args:
        p: the propagation matrix.
        x: features in float64, `[n, F]`.
        homophily: of the graph, in [0, 1]; see `train_homophily`.
        order: K.

    Yields:
        Pairs of matrices `[n, F]`.
    """
    c = max(math.cos((1 - homophily) * math.pi / 2), SMALLEST_COSINE)
    near = x
    u = v = _normalised(x)
    before = torch.zeros_like(v)
    total = u.clone()
    yield near, u
    for k in range(1, order + 1):
        near = p @ near
        step = p @ v
        for earlier in (v, before):
            step.addcmul_((step * earlier).sum(dim=0), earlier, value=-1)
        before, v = v, _normalised(step, EXHAUSTED)
        a = ((k - 1) * c + 1) / k
        u = _normalised(total / k + math.sqrt(max(a * (a - c * c), 0)) / c * v)
        total += u
        yield near, u


def _normalised(x: Tensor, negligible: float = 0.0) -> Tensor:
    """Scale columns to unit norm; those with a norm no larger than `negligible` become zero."""
    norm = (x * x).sum(dim=0).sqrt()
    return x * torch.where(norm > negligible, 1 / norm, 0)


def graph_bases(
    graph: Graph, device: torch.device, order: int
) -> tuple[Tensor, list[Iterator[Pair]]]:
    """Return the features that occur in a graph, `[F_k]`, and bases of blocks of these columns.

    Columns are independent of each other. On a CPU, blocks are small enough to stay in its cache.
    """
    features: Any = graph.features
    if sp.issparse(features):
        features = sp.csc_array(features)
        columns = np.flatnonzero(np.diff(features.indptr))
        features = features[:, columns].toarray()
    else:
        columns = np.flatnonzero((features != 0).any(axis=0))
        features = features[:, columns]
    x = torch.from_numpy(np.ascontiguousarray(features)).to(device)
    width = max(1, BLOCK_ON_CPU // max(len(x), 1)) if device.type == "cpu" else max(len(columns), 1)
    p = propagation(graph, device)
    homophily = train_homophily(graph.edges, train_labels(graph))
    blocks = [
        bases(p, part.double().contiguous(), homophily, order) for part in torch.split(x, width, 1)
    ]
    return torch.from_numpy(columns).to(device), blocks


# Bases of all clients ----------------------------------------------------------------------------


@dataclass(frozen=True)
class ClientBases:
    """tau H^k + (1-tau) U^k of one client: `[K+1, nodes, F_k]` at train nodes, and at the rest."""

    columns: Tensor
    train: Tensor
    rest: Tensor


def client_bases(graphs: StackedGraph, order: int, tau: float) -> list[ClientBases]:
    """Return every client's bases in the graphs' dtype: (K+1) n_k F_k numbers, both kinds mixed.

    In float32, with K = 10 and ten METIS clients, 0.1 GB of Cora and 5.3 GB of Coauthor-Physics.
    """

    def compute(graph: Graph) -> ClientBases:
        columns, blocks = graph_bases(graph, graphs.device, order)
        trains = train_labels(graph) != UNLABELLED
        nodes = [torch.from_numpy(np.flatnonzero(chosen)) for chosen in (trains, ~trains)]
        rows, count = torch.cat(nodes).to(graphs.device), len(nodes[0])
        train, rest = (
            columns.new_empty(order + 1, len(part), len(columns), dtype=graphs.dtype)
            for part in nodes
        )
        start = 0
        for block in blocks:
            for k, (near, far) in enumerate(block):
                mixed = (tau * near + (1 - tau) * far)[rows]
                stop = start + mixed.shape[1]
                train[k, :, start:stop], rest[k, :, start:stop] = mixed[:count], mixed[count:]
            start = stop
        return ClientBases(columns, train, rest)

    return graphs.cached_per_graph(("unifilter", order, tau), compute)


def train_bases(graphs: StackedGraph, order: int, tau: float) -> Ragged | Packed:
    """Return the mixed bases at train nodes."""

    def collect(graphs: StackedGraph) -> Ragged | Packed:
        clients = client_bases(graphs, order, tau)
        ragged = Ragged(
            graphs.train_segments,
            tuple(client.columns for client in clients),
            tuple(client.train for client in clients),
            graphs.num_features,
        )
        return ragged.packed() if graphs.device.type == "cuda" else ragged

    return graphs.cached(("unifilter at train nodes", order, tau), collect)


def rest_bases(graphs: StackedGraph, order: int, tau: float) -> Ragged | Packed:
    """Return the mixed bases at all other nodes."""

    def collect(graphs: StackedGraph) -> Ragged | Packed:
        clients = client_bases(graphs, order, tau)
        ragged = Ragged(
            Segments(tuple(client.rest.shape[1] for client in clients), graphs.device),
            tuple(client.columns for client in clients),
            tuple(client.rest for client in clients),
            graphs.num_features,
        )
        numbers = (order + 1) * ragged.segments.rows * graphs.num_features
        fits = graphs.device.type == "cuda" and numbers <= PACKED_AT_MOST
        return ragged.packed() if fits else ragged

    return graphs.cached(("unifilter at other nodes", order, tau), collect)


def _place(graph: StackedGraph) -> Tensor:
    """Return where each node is among the train nodes followed by the others."""
    others = torch.nonzero(graph.labels == UNLABELLED).view(-1)
    return torch.cat([graph.train_nodes, others]).argsort()
