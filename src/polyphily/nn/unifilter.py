"""UniFilter: a learned mixture of homophily and heterophily bases, then an MLP (Huang et al. 2024).

The bases are static: they depend on edges, features and train labels, not on parameters. They are
computed client by client in float64 on the cohort's device, and kept with the client's graph, so
who else is in a cohort changes no bit of them. A feature that no node of a client has is zero in
all of the client's bases: such columns are neither computed nor kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import scipy.linalg
import scipy.sparse as sp
import torch
from torch import Tensor, nn

from polyphily.graphs.graph import UNLABELLED
from polyphily.nn import cores, kernels
from polyphily.nn.backbones import Backbone, Output, Shape
from polyphily.nn.draws import HashedDraws
from polyphily.nn.layers import Linear
from polyphily.nn.segments import Segments
from polyphily.nn.sparse import SparseMatrix

if TYPE_CHECKING:
    from polyphily.core.cohort import Cohort
    from polyphily.graphs.graph import Graph, IntArray
    from polyphily.nn.draws import Draws

Pair: TypeAlias = tuple[Tensor, Tensor]
FloatArray: TypeAlias = npt.NDArray[np.float64]
Masks: TypeAlias = Sequence[Sequence[Tensor]]  # of every order and client, zeros and ones

UNKNOWN_HOMOPHILY = 0.75  # of a graph without an edge between train nodes
SMALLEST_COSINE = 1e-6  # at homophily 0 the bases are orthogonal; the recursion divides by it
EXHAUSTED = 1e-5  # Krylov residuals of unit vectors: above 1e-3, or rounding (to 1e-8 at order 10)
EPSILON = float(np.finfo(np.float64).eps)

DENSE_ON_CPU = 600  # shorter side of a matrix up to which LAPACK beats the iteration
DENSE_ELSEWHERE = 256  # and where the matrix must go to the host for that
SPARE = 1  # vectors iterated beside those wanted
DEPTH = 8  # blocks in a Krylov space before it is restarted
RESTARTS, FEW_RESTARTS = 40, 5  # of large matrices, and of those that LAPACK solves in no time
SHORTENED = 0.25  # squared length that a unit vector keeps when it is projected once more
ACCURACY = 1e-9  # of an eigenvector: its residual over the gap to the next eigenvalue
LEVELS = 1 << 16  # of the numbers that decide about dropout
PACKED_AT_MOST = 1 << 32  # numbers in the bases of nodes without labels that a GPU packs
LARGEST_GRAM = 4096  # side of the largest symmetric matrix that is formed
BLOCK_ON_CPU = 1 << 17  # numbers in columns whose bases are computed together
BATCH_ON_CPU = 1  # numbers in bases whose directions are found together: one order's
BATCH_ELSEWHERE = 1 << 24  # a GPU solves many small problems as fast as one


# Bases of one graph ------------------------------------------------------------------------------


def propagation(graph: Graph, device: torch.device) -> SparseMatrix:
    """P = D^-1/2 A D^-1/2 without self-loops; an isolated node has a zero row."""
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
    """Labels of train nodes, -1 elsewhere."""
    assert graph.masks is not None, f"{graph.name}: no split was drawn"
    return np.where(graph.masks.train, graph.labels, UNLABELLED)


def train_homophily(edges: IntArray, labels: IntArray) -> float:
    """Share of same-label edges among those whose ends are both labelled (-1 is unlabelled).

    >>> train_homophily(np.array([[0, 1, 1, 2], [1, 0, 2, 1]]), np.array([1, 1, -1]))
    1.0
    """
    source, target = labels[edges]
    seen = (source >= 0) & (target >= 0)
    return float((source == target)[seen].mean()) if seen.any() else UNKNOWN_HOMOPHILY


def bases(p: SparseMatrix, x: Tensor, homophily: float, order: int) -> Iterator[Pair]:
    """The homophily basis P^k x and the heterophily basis u_k for k = 0 … `order`, `[n, F]` each.

    Column by column, every pair of u_0, u_1, … has the cosine c of theta = (1-h) pi/2. v_0, v_1, …
    are orthonormal (Lanczos on P from x), s_k is the sum of the k vectors u_0 … u_{k-1}, so that
    |s_k/k|^2 = a = ((k-1)c + 1)/k, and u_k is s_k/k + push · v_k, normalised, whose cosine with
    each u_j is a / sqrt(a + push^2) = c for push = sqrt(a (a - c^2)) / c.

    A column whose Krylov space is exhausted at order k has no direction v_k left: its u_k is the
    normalised s_k. A zero column stays zero.

    Args:
        p: the propagation matrix.
        x: features in float64, `[n, F]`.
        homophily: of the graph, in [0, 1]; see `train_homophily`.
        order: K.
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
    """Columns of unit norm; those with a norm no larger than `negligible` become zero."""
    norm = (x * x).sum(dim=0).sqrt()
    return x * torch.where(norm > negligible, 1 / norm, 0)


# Directions --------------------------------------------------------------------------------------


def principal_directions(found: Tensor, count: int) -> Tensor:
    """The first right singular vectors of centred matrices, `[batch, n, F] -> [batch, count, F]`.

    Signs are fixed: the entry of the largest magnitude is positive. Directions beyond the rank are
    zero, so that a client with few nodes sends as many numbers as every other.
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
    """The largest eigenvalues of a a^T and their vectors, `[batch, count]`, `[batch, n, count]`.

    Small sides go to a dense solver. Above, a block Krylov iteration (Rayleigh-Ritz on a space that
    is restarted from its best vectors) ends when each vector's residual is small beside the gap
    between its eigenvalue and its neighbours', or is rounding. Where neither comes about, because
    eigenvalues are all but equal, the dense solver decides, or the last vectors stand if the matrix
    is too large for it.
    """
    side, block = a.shape[1], count + SPARE
    small = max(2 * DEPTH * block, DENSE_ON_CPU if a.device.type == "cpu" else DENSE_ELSEWHERE)
    if side <= small:
        return _dense_eigenpairs(a, count)
    gram = _gram(a) if side <= LARGEST_GRAM else None
    source = torch.Generator().manual_seed(0)  # any start will do, as long as it is the same
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
    """a a^T; numpy's product knows its symmetry, and does half the work."""
    if a.device.type != "cpu":
        return a @ a.mT
    return torch.from_numpy(np.stack([x @ x.T for x in a.numpy()]))


def _dense_eigenpairs(a: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """By LAPACK, which can leave out the eigenvectors that nobody wants; a GPU cannot."""
    gram = _gram(a).cpu().numpy()
    wanted = [gram.shape[1] - count, gram.shape[1] - 1]

    def solve(matrix: FloatArray) -> tuple[FloatArray, FloatArray]:
        return scipy.linalg.eigh(matrix, subset_by_index=wanted, overwrite_a=True)  # type: ignore[no-any-return]

    solved = map(solve, gram) if a.device.type == "cpu" else cores.each(solve, gram)
    parts = (torch.from_numpy(np.stack(part)) for part in zip(*solved, strict=True))
    values, vectors = (part.to(a.device) for part in parts)
    return values.flip(1), vectors.flip(2)


def _orthonormal(x: Tensor, beside: Tensor | None = None) -> Tensor:
    """Orthonormal columns that span what of x is orthogonal to `beside`; zero if nothing is left.

    By products and a small eigenproblem, all of them batched; twice, for the sake of rounding. What
    the first time leaves as rounding, or the second makes much shorter, was nothing.
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


# Bases of a client, kept with its graph ----------------------------------------------------------


def graph_bases(
    graph: Graph, device: torch.device, order: int
) -> tuple[Tensor, list[Iterator[Pair]]]:
    """The features that occur in a graph, `[F_k]`, and the bases of blocks of these columns.

    Columns are independent of each other; on a CPU blocks are small enough to stay in its cache.
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


@dataclass(frozen=True)
class ClientBases:
    """tau H^k + (1-tau) U^k of one client: `[K+1, nodes, F_k]` at train nodes, and at the rest."""

    columns: Tensor
    train: Tensor
    rest: Tensor


def client_bases(cohort: Cohort, order: int, tau: float) -> list[ClientBases]:
    """Every client's bases in the cohort's dtype: (K+1) n_k F_k numbers, the kinds mixed.

    In float32, with K = 10 and ten METIS clients, 0.1 GB of Cora and 5.3 GB of Coauthor-Physics.
    """

    def make(graph: Graph) -> ClientBases:
        columns, blocks = graph_bases(graph, cohort.device, order)
        trains = train_labels(graph) != UNLABELLED
        nodes = [torch.from_numpy(np.flatnonzero(chosen)) for chosen in (trains, ~trains)]
        rows, count = torch.cat(nodes).to(cohort.device), len(nodes[0])
        train, rest = (
            columns.new_empty(order + 1, len(part), len(columns), dtype=cohort.dtype)
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

    return cohort.of_each(("unifilter", order, tau), make)


def client_directions(cohort: Cohort, order: int, count: int) -> Tensor:
    """The principal directions of every client's bases, `[clients, 2, K+1, count · F]`."""
    width = cohort.num_features

    def make(graph: Graph) -> Tensor:
        columns, blocks = graph_bases(graph, cohort.device, order)
        numbers = BATCH_ON_CPU if cohort.device.type == "cpu" else BATCH_ELSEWHERE
        size = max(1, numbers // max(2 * graph.num_nodes * len(columns), 1))
        orders, tops = zip(*blocks, strict=True), []
        while batch := list(islice(orders, size)):
            pairs = [zip(*parts, strict=True) for parts in batch]
            found = torch.stack([torch.cat(parts, dim=1) for pair in pairs for parts in pair])
            tops.append(principal_directions(found, count))
        top = torch.cat(tops)
        wide = top.new_zeros(*top.shape[:2], width).index_copy_(2, columns, top)
        return wide.view(order + 1, 2, -1).transpose(0, 1).to(cohort.dtype)

    return torch.stack(cohort.of_each(("unifilter directions", order, count), make))


# Bases of a cohort -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ragged:
    """Bases at some nodes of every client, `[K+1, n_k, F_k]`, as they are kept: nothing is copied.

    A matrix `[n_k, F_k]` of every client is one vector here, laid end to end.
    """

    segments: Segments
    columns: tuple[Tensor, ...]
    blocks: tuple[Tensor, ...]
    features: int

    @cached_property
    def pointers(self) -> tuple[int, ...]:
        """Where each client's entries begin."""
        return (0, *np.cumsum([block[0].numel() for block in self.blocks]).tolist())

    def split(self, entries: Tensor) -> list[Tensor]:
        """Each client's matrix."""
        parts = (entries[start:stop] for start, stop in pairwise(self.pointers))
        return [part.view(b.shape[1:]) for part, b in zip(parts, self.blocks, strict=True)]

    def basis(self, client: int, order: int, masks: Masks | None) -> Tensor:
        """A client's basis, zero where its mask is."""
        basis = self.blocks[client][order]
        return basis if masks is None else basis * masks[order][client].to(basis.dtype)

    def of_client(self, client: int, x: Tensor, dim: int) -> Tensor:
        """Those of all features that occur at a client."""
        columns = self.columns[client]
        return x if len(columns) == self.features else x.index_select(dim, columns)

    def mixture(self, coefficients: Tensor, draws: Draws | None, p: float) -> Tensor:
        """sum_k W^k ∘ B^k with a share `p` of the entries of each B^k dropped."""
        masks = None
        if draws is not None and p > 0:
            dropped = round(p * LEVELS)
            coefficients = coefficients * (LEVELS / (LEVELS - dropped))
            drawn = (draws.at_least(dropped, 1, self.pointers) for _ in self.blocks[0])
            masks = [self.split(mask.view(-1).view(torch.uint8)) for mask in drawn]
        mixed: Tensor = _RaggedMixture.apply(coefficients, masks, self)  # type: ignore[no-untyped-call]
        return mixed

    def matmul(self, z: Tensor, weight: Tensor) -> Tensor:
        product: Tensor = _RaggedProduct.apply(z, weight, self)  # type: ignore[no-untyped-call]
        return product

    def dense(self, z: Tensor) -> Tensor:
        """`[rows, F]`, zero where a feature does not occur."""
        parts = zip(self.split(z), self.columns, strict=True)
        return torch.cat(
            [z.new_zeros(len(x), self.features).index_copy(1, cols, x) for x, cols in parts]
        )

    def packed(self) -> Packed:
        """The same in one matrix per order."""
        whole = self.blocks[0].new_zeros(len(self.blocks[0]), self.segments.rows, self.features)
        starts = self.segments.pointers
        for start, block, columns in zip(starts, self.blocks, self.columns, strict=False):
            whole[:, start : start + block.shape[1]].index_copy_(2, columns, block)
        return Packed(self.segments, whole)


@dataclass(frozen=True)
class Packed:
    """The same with all features and clients in one matrix per order, `[K+1, rows, F]`.

    Larger, but the number of kernels does not grow with the number of clients.
    """

    segments: Segments
    bases: Tensor

    @property
    def pointers(self) -> tuple[int, ...]:
        return self.segments.pointers

    def mixture(self, coefficients: Tensor, draws: Draws | None, p: float) -> Tensor:
        if kernels.available(self.bases) and (draws is None or isinstance(draws, HashedDraws)):
            hashes = None if draws is None else draws.hashes(p, len(self.bases))
            return kernels.mixture(self.bases, coefficients, self.segments, hashes)
        kept: Sequence[Tensor] = self.bases.unbind()
        if draws is not None:
            kept = [draws.dropout(basis, p, self.pointers) for basis in kept]
        mixed: Tensor = _PackedMixture.apply(coefficients, kept, self.segments)  # type: ignore[no-untyped-call]
        return mixed

    def matmul(self, z: Tensor, weight: Tensor) -> Tensor:
        return self.segments.matmul(z, weight)

    def dense(self, z: Tensor) -> Tensor:
        return z


def train_bases(cohort: Cohort, order: int, tau: float) -> Ragged | Packed:
    """The mixed bases at train nodes."""

    def make(cohort: Cohort) -> Ragged | Packed:
        clients = client_bases(cohort, order, tau)
        ragged = Ragged(
            cohort.train_segments,
            tuple(client.columns for client in clients),
            tuple(client.train for client in clients),
            cohort.num_features,
        )
        return ragged.packed() if cohort.device.type == "cuda" else ragged

    return cohort.once(("unifilter at train nodes", order, tau), make)


def rest_bases(cohort: Cohort, order: int, tau: float) -> Ragged | Packed:
    """The mixed bases at all other nodes."""

    def make(cohort: Cohort) -> Ragged | Packed:
        clients = client_bases(cohort, order, tau)
        ragged = Ragged(
            Segments(tuple(client.rest.shape[1] for client in clients), cohort.device),
            tuple(client.columns for client in clients),
            tuple(client.rest for client in clients),
            cohort.num_features,
        )
        numbers = (order + 1) * ragged.segments.rows * cohort.num_features
        fits = cohort.device.type == "cuda" and numbers <= PACKED_AT_MOST
        return ragged.packed() if fits else ragged

    return cohort.once(("unifilter at other nodes", order, tau), make)


def _place(cohort: Cohort) -> Tensor:
    """Where each node is among the train nodes followed by the others."""
    others = torch.nonzero(cohort.labels == UNLABELLED).view(-1)
    return torch.cat([cohort.train_nodes, others]).argsort()


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
        train = self._at(train_bases(cohort, self.order, self.tau), draws)
        if only_train:
            return train
        rest = self._at(rest_bases(cohort, self.order, self.tau), draws)
        place = cohort.once("unifilter/place of nodes", _place)
        logits, embedding = (torch.cat(parts)[place] for parts in zip(train, rest, strict=True))
        return Output(logits, embedding)

    def _at(self, bases: Ragged | Packed, draws: Draws | None) -> Output:
        """Output of the nodes that the bases are at."""
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


class _RaggedMixture(torch.autograd.Function):
    """sum_k weight[client, k] ∘ basis_k, weights `[clients, K+1, F]`, without temporaries as large
    as the bases: what belongs to one client and order stays in a CPU's cache. So masks (one byte
    per entry) are applied here, in both directions, rather than kept with the bases."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, masks: Masks | None, layout: Ragged) -> Tensor:
        ctx.masks, ctx.layout = masks, layout
        entries = weight.new_zeros(layout.pointers[-1])
        for client, out in enumerate(layout.split(entries)):
            own = layout.of_client(client, weight[client], 1)
            for k, coefficients in enumerate(own.unbind()):
                out.addcmul_(layout.basis(client, k, masks), coefficients)
        return entries

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        layout: Ragged = ctx.layout
        orders = len(layout.blocks[0])
        out = grad.new_zeros(len(layout.blocks), orders, layout.features)
        for client, own in enumerate(layout.split(grad)):
            sums = own.new_empty(orders, own.shape[1])
            for k in range(orders):
                torch.sum(layout.basis(client, k, ctx.masks) * own, dim=0, out=sums[k])
            out[client].index_copy_(1, layout.columns[client], sums)
        return out, None, None


class _RaggedProduct(torch.autograd.Function):
    """Each client's matrix times those rows of its weights whose features occur."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, weight: Tensor, layout: Ragged) -> Tensor:
        ctx.layout = layout
        ctx.save_for_backward(z, weight)
        out = z.new_empty(layout.segments.rows, weight.shape[2])
        rows = pairwise(layout.segments.pointers)
        for client, (own, (start, stop)) in enumerate(zip(layout.split(z), rows, strict=True)):
            torch.mm(own, layout.of_client(client, weight[client], 0), out=out[start:stop])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        z, weight = ctx.saved_tensors
        layout: Ragged = ctx.layout
        grad = grad.contiguous()
        grad_z, grad_weight = torch.empty_like(z), torch.zeros_like(weight)
        rows = pairwise(layout.segments.pointers)
        blocks = zip(layout.split(z), layout.split(grad_z), rows, strict=True)
        for client, (own, own_grad, (start, stop)) in enumerate(blocks):
            part = grad[start:stop]
            torch.mm(part, layout.of_client(client, weight[client], 0).T, out=own_grad)
            grad_weight[client].index_copy_(0, layout.columns[client], own.T @ part)
        return grad_z, grad_weight, None


class _PackedMixture(torch.autograd.Function):
    """The same for matrices of all clients."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, kept: Sequence[Tensor], segments: Segments) -> Tensor:
        ctx.kept, ctx.segments = kept, segments
        out = torch.zeros_like(kept[0])
        for basis, own in zip(kept, weight.unbind(dim=1), strict=True):
            out.addcmul_(basis, own.index_select(0, segments.owner))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        sums = [ctx.segments.sum(basis * grad) for basis in ctx.kept]
        return torch.stack(sums, dim=1), None, None
