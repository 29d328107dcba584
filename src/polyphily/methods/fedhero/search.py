"""Search for latent neighbours: the most similar nodes, or the strongest given edges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from polyphily.methods.fedhero.neighbours import NUMBERS_GPU, block_rows
from polyphily.nn.segments import Segments
from polyphily.nn.sparse import SparseMatrix

ROWS = 1024  # of a client's similarity matrix that are in memory at a time, at most


class Block(NamedTuple):
    """Some rows of a client's matrix of node pairs.

    Attributes:
        client: whose pairs they are.
        rows: the first nodes of the pairs.
        nodes: the second nodes: all nodes of the client.
    """

    client: int
    rows: slice
    nodes: slice

    @property
    def diagonal(self) -> int:
        """The column in which the first row's own node is."""
        return int(self.rows.start - self.nodes.start)


Adjust: TypeAlias = Callable[[Tensor, Block], Tensor]
"""(products of a block, the block) -> the scores to rank by."""


def row_blocks(segments: Segments, like: Tensor) -> Iterator[Block]:
    """Divide the pairs of each client's nodes into blocks that fit the device of `like`."""
    for client, (start, stop) in enumerate(pairwise(segments.pointers)):
        step = min(ROWS, block_rows(like, stop - start))
        for first in range(start, stop, step):
            yield Block(client, slice(first, min(first + step, stop)), slice(start, stop))


def width_of(segments: Segments, k: int) -> int:
    """Return the columns that an index needs: k, or all other nodes of the largest client."""
    return max(min(k, max(segments.sizes) - 1), 1)


def no_neighbours(segments: Segments, k: int) -> Tensor:
    """Return an index `[N, k]` in which no node has a neighbour."""
    nodes = torch.arange(segments.rows, device=segments.device).unsqueeze(1)
    return nodes.repeat(1, width_of(segments, k))


@torch.no_grad()
def nearest(
    left: Tensor, right: Tensor, segments: Segments, k: int, adjust: Adjust | None = None
) -> Tensor:
    """Find the k nodes v of u's client with the largest left_u · right_v, except u, `[N, k]`."""
    if left.is_cuda and adjust is None and max(segments.sizes) ** 2 <= NUMBERS_GPU:
        return _nearest_together(left, right, segments, k)
    index = no_neighbours(segments, k)
    blocks = [b for b in row_blocks(segments, left) if b.nodes.stop - b.nodes.start > 1]
    shapes = [(b.rows.stop - b.rows.start, b.nodes.stop - b.nodes.start) for b in blocks]
    buffer = left.new_empty(max((rows * nodes for rows, nodes in shapes), default=0))
    for block, (rows, nodes) in zip(blocks, shapes, strict=True):
        out = buffer[: rows * nodes].view(rows, nodes)
        scores = torch.mm(left[block.rows], right[block.nodes].T, out=out)
        if adjust is not None:
            scores = adjust(scores, block)
        scores.diagonal(block.diagonal).fill_(-torch.inf)
        count = min(k, nodes - 1)
        found = scores.topk(count, dim=1, sorted=False).indices
        index[block.rows, :count] = found.sort(dim=1).values + block.nodes.start
    return index


def _nearest_together(left: Tensor, right: Tensor, segments: Segments, k: int) -> Tensor:
    """Search clients of similar size at once, padded to the largest of them."""
    index = no_neighbours(segments, k)
    index = torch.cat([index, index[:1]])  # the last row takes the padding
    left, right = (torch.cat([x, x.new_zeros(1, x.shape[1])]) for x in (left, right))
    buckets, _ = segments.buckets
    for bucket in buckets:
        size, width = bucket.size, min(index.shape[1], bucket.size)
        together = max(1, NUMBERS_GPU // max(size, 1) ** 2)
        rows = bucket.gather.view(-1, size)
        for gather in torch.split(rows, together):
            scores = torch.bmm(left[gather], right[gather].transpose(1, 2))
            scores.diagonal(dim1=1, dim2=2).fill_(-torch.inf)
            scores.masked_fill_((gather == segments.rows).unsqueeze(1), -torch.inf)
            best, place = scores.topk(width, dim=2)
            found = gather.unsqueeze(1).expand(-1, size, -1).gather(2, place)
            # Where there is no neighbour, the node's own index follows its neighbours.
            missing = best == -torch.inf
            ordered = found.masked_fill(missing, segments.rows).sort(dim=2).values
            own = gather.unsqueeze(2).expand_as(ordered)
            index[gather, :width] = torch.where(ordered == segments.rows, own, ordered)
    return index[:-1]


@torch.no_grad()
def strongest(edges: SparseMatrix, score: Tensor, segments: Segments, k: int) -> Tensor:
    """Find the k neighbours in a given graph with the largest edge scores, `[N, k]`."""
    index = no_neighbours(segments, k)
    order = score.argsort(descending=True, stable=True)
    order = order[edges.row[order].argsort(stable=True)]
    row = edges.row[order]
    rank = torch.arange(edges.nnz, device=row.device) - edges.crow.long()[row]
    kept = rank < index.shape[1]
    index[row[kept], rank[kept]] = edges.col_long[order][kept]
    return index
