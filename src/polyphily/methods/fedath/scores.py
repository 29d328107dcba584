"""Scores of edges by the edge evaluator, in blocks of edges that fit the cache of a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from polyphily.nn.segments import Segments
from polyphily.nn.sparse import SparseMatrix, full, multiply
from polyphily.nn.stacked import StackedGraph

CACHED = 1 << 17  # numbers of a block on a CPU, few enough for its cache


def rectified_scores(
    one: Tensor,
    two: Tensor,
    last: Tensor,
    graph: StackedGraph,
    edges: Segments,
    *,
    symmetric: bool = False,
) -> Tensor:
    """Return a · relu(one_i + two_j) for every edge (i, j), `[nnz]`.

    Args:
        one: what a node adds to its own edges, `[N, width]`.
        two: what it adds to those of its neighbours, `[N, width]`.
        last: a of every client, `[K, width, 1]`.
        graph: the graph.
        edges: the edges of each client.
        symmetric: whether the gradients of (i, j) and (j, i) are known to be equal.
    """
    one, two, last = full(one), full(two), full(last)
    if not one.is_cpu:
        hidden = (graph.edges.at_rows(one) + graph.edges.at_cols(two)).relu()
        return edges.matmul(hidden, last).view(-1)
    size = max(1, CACHED // one.shape[1])
    blocks = graph.cached(("fedath/blocks of edges", size), lambda whole: cut(whole, size))
    known = (graph.edges, blocks, graph.segments, symmetric)
    scores: Tensor = _RectifiedScores.apply(one, two, last, *known)  # type: ignore[no-untyped-call]
    return scores


def mean_of_both_ways(score: Tensor, edges: SparseMatrix) -> Tensor:
    """Return (c_ij + c_ji) / 2 for every edge of a symmetric pattern."""
    mean: Tensor = _BothWays.apply(score, edges.permutation)  # type: ignore[no-untyped-call]
    return mean


@dataclass(frozen=True)
class Block:
    """Whole rows of one client's edges.

    Attributes:
        client: whose they are.
        rows: the nodes.
        entries: their edges.
        pointers: where the edges of each node begin in the block, int32.
    """

    client: int
    rows: slice
    entries: slice
    pointers: Tensor


def cut(graph: StackedGraph, size: int) -> list[Block]:
    """Cut each client's edges into blocks of about `size` edges, or one node's if it has more."""
    crow = graph.edges.crow.cpu()
    return [
        Block(client, slice(first, end), slice(int(crow[first]), int(crow[end])), own - own[0])
        for client, (start, stop) in enumerate(pairwise(graph.segments.pointers))
        for first, end in _borders(crow[start : stop + 1], start, size)
        if len(own := crow[first : end + 1]) > 1
    ]


def _borders(crow: Tensor, start: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the rows of each block of a client, whose first row is `start`."""
    steps = torch.arange(int(crow[0]), int(crow[-1]), size, dtype=crow.dtype)
    inner = torch.searchsorted(crow, steps[1:]).tolist()
    yield from pairwise(sorted({start, *(start + row for row in inner), start + len(crow) - 1}))


class _RectifiedScores(torch.autograd.Function):
    """Computes hidden features block by block, and again in the backward pass.

    With M_ij = (one_i + two_j > 0) and the gradients g of the scores, all gradients follow from the
    sums R_i = sum_j g_ij M_ij and C_j = sum_i g_ij M_ij: those of `one` are a R, those of `two` are
    a C, and that of a is sum_i one_i R_i + sum_j two_j C_j. The pattern is symmetric, so C_i is a
    sum over the edges of i, as well.
    """

    @staticmethod
    def forward(
        ctx: Any,
        one: Tensor,
        two: Tensor,
        last: Tensor,
        matrix: SparseMatrix,
        blocks: list[Block],
        segments: Segments,
        symmetric: bool,
    ) -> Tensor:
        ctx.matrix, ctx.blocks, ctx.segments = matrix, blocks, segments
        ctx.symmetric = symmetric
        ctx.save_for_backward(one, two, last)
        out = one.new_empty(matrix.nnz)
        row, near = one.detach(), two.detach().contiguous()
        for block in blocks:
            hidden = _at_edges(row, near, matrix, block).relu_()
            torch.mv(hidden, last[block.client, :, 0].detach(), out=out[block.entries])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        one, two, last = ctx.saved_tensors
        matrix: SparseMatrix = ctx.matrix
        segments: Segments = ctx.segments
        grad = grad.contiguous()
        if ctx.symmetric:  # g_ij = g_ji: both sums in one pass
            pair, turned = torch.cat([one, two], dim=1), torch.cat([two, one], dim=1)
            by_row, by_col = _sums(pair, turned, grad, matrix, ctx.blocks).chunk(2, dim=1)
        else:
            by_row = _sums(one, two, grad, matrix, ctx.blocks)
            turned = grad.index_select(0, matrix.permutation)
            by_col = _sums(two, one, turned, matrix, ctx.blocks)
        to_last = segments.sum(one * by_row + two * by_col).unsqueeze(2)
        vector = segments.expand(last.squeeze(2))
        return by_row.mul_(vector), by_col.mul_(vector), to_last, None, None, None, None


def _at_edges(one: Tensor, two: Tensor, matrix: SparseMatrix, block: Block) -> Tensor:
    """Return one_i + two_j at the edges (i, j) of a block."""
    found = one.index_select(0, matrix.row[block.entries])
    return found.add_(two.index_select(0, matrix.col[block.entries]))


def _sums(
    one: Tensor, two: Tensor, grad: Tensor, matrix: SparseMatrix, blocks: list[Block]
) -> Tensor:
    """Return sum_j g_ij M_ij for every node i."""
    out = torch.zeros_like(one, memory_format=torch.contiguous_format)
    one, two = one.contiguous(), two.contiguous()
    for block in blocks:
        mask = _at_edges(one, two, matrix, block).gt_(0)
        entries = matrix._entries[: len(mask)]
        rows = block.rows.stop - block.rows.start
        out[block.rows] = multiply(block.pointers, entries, grad[block.entries], rows, mask)
    return out


class _BothWays(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, score: Tensor, permutation: Tensor) -> Tensor:
        ctx.permutation = permutation  # of ij and ji, its own inverse
        return (score + score.index_select(0, permutation)).div_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return (grad + grad.index_select(0, ctx.permutation)).div_(2), None
