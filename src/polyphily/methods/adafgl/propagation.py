"""Propagation in AdaFGL: alike nodes, the smoothing matrix, signs, and homophily."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from polyphily.methods.fedhero.neighbours import Neighbours, neighbour_products
from polyphily.methods.fedhero.search import nearest
from polyphily.nn.segments import Segments
from polyphily.nn.sparse import SparseMatrix
from polyphily.nn.stacked import StackedGraph

STEPS, RESTART = 10, 0.5  # of label propagation


# Pairs of nodes ----------------------------------------------------------------------------------


@torch.no_grad()
def similar_pairs(p: Tensor, segments: Segments, k: int, least: float) -> tuple[Neighbours, Tensor]:
    """Find each node's k most and k least similar nodes by the cosine of their predictions.

    A client with at most k + 1 nodes has all its pairs, each once.

    Returns:
        The pairs, and 1 for those with a cosine above `least`, else 0, `[N, 2k]` at most: U.
    """
    q = F.normalize(p)
    near, far = nearest(q, q, segments, k), nearest(-q, q, segments, k)
    repeated = (far.unsqueeze(2) == near.unsqueeze(1)).any(dim=2)
    own = torch.arange(len(q), device=q.device).unsqueeze(1)
    pairs = Neighbours.of(torch.cat([near, torch.where(repeated, own, far)], dim=1))
    cosine = neighbour_products(q, q, pairs.index).squeeze(2)
    return pairs, (pairs.filled & (cosine > least)).to(p.dtype)


@torch.no_grad()
def smoothing(graph: StackedGraph, pairs: Neighbours, alike: Tensor, alpha: float) -> SparseMatrix:
    """Return D^-1/2 (α A + (1-α) (U + U^T) / 2 + I) D^-1/2, D the row sums of the matrix inside.

    The count of stored entries depends on the sizes only. Entries of U that are 0 are stored.
    """
    nodes = torch.arange(graph.num_nodes, device=graph.device)
    here = nodes.repeat_interleave(alike.shape[1], output_size=alike.numel())
    there, half = pairs.index.flatten(), (1 - alpha) / 2 * alike.flatten()
    rows = torch.cat([graph.edges.row, here, there, nodes])
    cols = torch.cat([graph.edges.col_long, there, here, nodes])
    given = half.new_full((graph.edges.nnz,), alpha)
    value = torch.cat([given, half, half, torch.ones_like(nodes, dtype=half.dtype)])
    order = rows.argsort(stable=True)
    rows, cols, value = rows[order], cols[order], value[order]
    back = cols.argsort(stable=True)
    bounds = torch.arange(graph.num_nodes + 1, device=graph.device)
    matrix = SparseMatrix(
        shape=(graph.num_nodes, graph.num_nodes),
        crow=torch.searchsorted(rows, bounds, out_int32=True),
        col=cols.int(),
        crow_t=torch.searchsorted(cols[back], bounds, out_int32=True),
        col_t=rows[back].int(),
        permutation=back,
    )
    scale = matrix.sum_by_row(value).rsqrt()
    return matrix.with_value(value * scale[rows] * scale[cols])


# Signed messages ---------------------------------------------------------------------------------


def prelu(x: Tensor, slope: Tensor) -> Tensor:
    """Return x where it is positive, else slope · x."""
    return torch.where(x > 0, x, slope * x)


def signs_of(
    e: Tensor, pairs: Neighbours, alike: Tensor, segments: Segments, beta: float, below: str
) -> Tensor:
    """Compute the sign and strength S of every pair, `[N, 2k]`.

    R = β U + (1-β) cos(softmax E) with a zero diagonal. Above the mean μ of a client's R, over all
    its pairs of nodes, S = (R-μ) / (max R - μ). Below it, S = (R-μ) / μ ("distance") or S = -R / μ
    ("reversed"). No gradient goes through μ and the maximum.
    """
    q = F.normalize(e.softmax(dim=1))
    r = pairs.filled * (beta * alike + (1 - beta) * pairs.products(q, q))
    with torch.no_grad():
        cosines = segments.sum(q).square().sum(dim=1) - segments.sum(q.square()).sum(dim=1)
        total = beta * segments.sum(alike.sum(dim=1)) + (1 - beta) * cosines
        mean = total / segments.counts.square()
        most = torch.zeros_like(mean).scatter_reduce(0, segments.owner, r.amax(dim=1), "amax")
        span = segments.expand((most - mean).clamp(min=1e-12)).unsqueeze(1)
        mean = segments.expand(mean.clamp(min=1e-12)).unsqueeze(1)
    negative = (r - mean) / mean if below == "distance" else -r / mean
    return pairs.filled * torch.where(r > mean, (r - mean) / span, negative)


def signed_messages(
    e: Tensor, pairs: Neighbours, signs: Tensor, slope: Tensor, rows: str
) -> Tensor:
    """Compute ½ [softmax(PReLU(S) E) - softmax(PReLU(-S) E) + E], where S has a unit diagonal.

    Args:
        e: E, `[N, C]`.
        pairs: where S may differ from 0 outside the diagonal.
        signs: S at these pairs.
        slope: of PReLU at every node, `[N, 1]`.
        rows: "mean" divides each row of S by the sum of its absolute values, "sum" does not.
    """
    if rows == "mean":
        size = 1 + signs.abs().sum(dim=1, keepdim=True)
        signs, own = signs / size, 1 / size
    else:
        own = torch.ones_like(slope)
    near = pairs.weighted_sum(prelu(signs, slope), e) + own * e
    far = pairs.weighted_sum(prelu(-signs, slope), e) - slope * own * e
    return (near.softmax(dim=1) - far.softmax(dim=1) + e) / 2


# Homophily ---------------------------------------------------------------------------------------


def propagated(start: Tensor, seeds: Tensor, graph: StackedGraph) -> Tensor:
    """Propagate labels: F = ½ Â F + ½ F⁰, then F += F⁰ at the seeds, ten times from F⁰."""
    labels, kept = start, start * seeds.unsqueeze(1)
    for _ in range(STEPS):
        labels = (1 - RESTART) * (graph.gcn @ labels) + RESTART * start + kept
    return labels


@torch.no_grad()
def homophily_confidence(graph: StackedGraph, lots: Tensor, classes: int) -> Tensor:
    """Compute the accuracy of label propagation on one half of the train nodes from the other.

    Args:
        graph: with labels of train nodes only.
        lots: a random number in [0, 1) for every train node: the lower half of each client's are
            the seeds, rounded up.
        classes: how many there are.

    Returns:
        HCS of each client, `[K]`; ½ for one that has fewer than two train nodes.
    """
    train, nodes = graph.train_segments, graph.train_nodes
    order = (train.owner + lots).argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    place = place - train.starts.long()[train.owner]
    seed = place < (train.counts[train.owner] + 1) // 2
    onehot = F.one_hot(graph.labels[nodes], classes).to(graph.dtype)
    start = torch.full((graph.num_nodes, classes), 1 / classes).to(onehot)
    start[nodes] = torch.where(seed.unsqueeze(1), onehot, start[nodes])
    seeds = torch.zeros_like(start[:, 0])
    seeds[nodes] = seed.to(seeds.dtype)
    found = propagated(start, seeds, graph)[nodes].argmax(dim=1)
    right = train.sum((~seed & (found == graph.labels[nodes])).to(graph.dtype))
    scored = train.sum((~seed).to(graph.dtype))
    return torch.where(scored > 0, right / scored.clamp(min=1), 0.5)
