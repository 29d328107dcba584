"""Distances between the features of nodes: of latent neighbours, or of all pairs in blocks."""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from polyphily.methods.fedhero.neighbours import NUMBERS_GPU, block_rows, neighbour_products
from polyphily.methods.fedhero.search import Block
from polyphily.nn.segments import Segments
from polyphily.nn.sparse import SparseMatrix, multiply

TABLE, TABLE_GPU = 1 << 22, 1 << 29  # products of features that are kept rather than recomputed


class FeatureDistances:
    """||x_u - x_v||^2 of pairs of nodes of one client.

    Args:
        x: features: dense `[N, F]`, or sparse and block-diagonal `[N, K·F]`.
        segments: the nodes of each client.
        unit: whether features are divided by their norm.
    """

    def __init__(self, x: Tensor | SparseMatrix, segments: Segments, *, unit: bool) -> None:
        if isinstance(x, Tensor):
            squares = x.square().sum(dim=1)
        else:
            assert x.value is not None
            squares = x.sum_by_row(x.value.square().unsqueeze(1)).squeeze(1)
        self.segments = segments
        if unit:
            scale = torch.where(squares > 0, squares, 1).rsqrt()
            squares = (squares > 0).to(squares.dtype)
            x = x * scale.unsqueeze(1) if isinstance(x, Tensor) else _scaled(x, scale)
        self.x, self.squares = x, squares

    @torch.no_grad()
    def __call__(self, index: Tensor) -> Tensor:
        """Compute the distances to given neighbours, `[N, k] -> [N, k]`."""
        near = self.squares[index].add_(self.squares.unsqueeze(1))
        return near.sub_(self._products(index), alpha=2).clamp_(min=0)

    @torch.no_grad()
    def of_block(self, block: Block) -> Tensor:
        """Compute the distances of some nodes to all nodes of their client, `[rows, nodes]`."""
        near = self.squares[block.rows].unsqueeze(1) + self.squares[block.nodes]
        return near.sub_(self._block_products(block), alpha=2).clamp_(min=0)

    def _block_products(self, block: Block) -> Tensor:
        if isinstance(self.x, Tensor):
            return self.x[block.rows] @ self.x[block.nodes].T
        if self._table is not None:
            table, _ = self._table
            nodes = self.segments.sizes[block.client]
            start = sum(size**2 for size in self.segments.sizes[: block.client])
            whole = table[start : start + nodes**2].view(nodes, nodes)
            return whole[block.diagonal : block.diagonal + block.rows.stop - block.rows.start]
        crow, col, value = self._entries(self.x, block.client, block.nodes)
        nodes = block.nodes.stop - block.nodes.start
        dense = self._dense(self.x, block.client, block.rows)
        return multiply(crow, col, value, nodes, dense.T.contiguous()).T

    @cached_property
    def _starts(self) -> list[int]:
        """Where the stored features of every node begin."""
        assert isinstance(self.x, SparseMatrix)
        starts: list[int] = self.x.crow.tolist()
        return starts

    def _entries(self, x: SparseMatrix, client: int, nodes: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Return the features of some nodes of a client in CSR form."""
        assert x.value is not None
        first, last = self._starts[nodes.start], self._starts[nodes.stop]
        crow = x.crow[nodes.start : nodes.stop + 1] - first
        col = x.col[first:last] - client * (x.shape[1] // len(self.segments))
        return crow, col, x.value[first:last]

    def _dense(self, x: SparseMatrix, client: int, nodes: slice) -> Tensor:
        """Return the features of some nodes of a client as a matrix."""
        _, col, value = self._entries(x, client, nodes)
        row = x.row[self._starts[nodes.start] : self._starts[nodes.stop]] - nodes.start
        out = value.new_zeros(nodes.stop - nodes.start, x.shape[1] // len(self.segments))
        out[row, col.long()] = value
        return out

    def _products(self, index: Tensor) -> Tensor:
        if isinstance(self.x, Tensor):
            return neighbour_products(self.x, self.x, index).squeeze(2)
        if self._table is not None:
            table, place = self._table
            return table[place.unsqueeze(1) + index]
        return _sparse_products(self.x, index, self.segments)

    @cached_property
    def _table(self) -> tuple[Tensor, Tensor] | None:
        """All products within each client, and the offset of u: (u, v) is at offset + v.

        None if there are too many.
        """
        sizes, x = self.segments.sizes, self.x
        limit = TABLE_GPU if self.squares.is_cuda else TABLE
        pairs = [size**2 for size in sizes]
        if isinstance(x, Tensor) or sum(pairs) > limit or max(pairs) > NUMBERS_GPU:
            return None
        assert x.value is not None
        if x.value.is_cuda:
            return self._table_on_device(x)
        parts = x.value.cpu().numpy(), x.col.cpu().numpy(), x.crow.cpu().numpy()
        features = sp.csr_array(parts, shape=x.shape)
        products = sp.coo_array(features @ features.T)
        size = np.asarray(sizes)[self.segments.owner.cpu().numpy()]
        start = np.asarray(self.segments.pointers[:-1])[self.segments.owner.cpu().numpy()]
        place = np.cumsum(size) - size - start
        table = np.zeros(int(size.sum()), dtype=products.dtype)
        table[place[products.row] + products.col] = products.data
        return torch.from_numpy(table).to(x.value), torch.from_numpy(place).to(x.value.device)

    def _table_on_device(self, x: SparseMatrix) -> tuple[Tensor, Tensor]:
        segments = self.segments
        place = segments.counts[segments.owner].cumsum(0)
        place = place - segments.counts[segments.owner] - segments.starts.long()[segments.owner]
        table = []
        for client, (start, stop) in enumerate(pairwise(segments.pointers)):
            dense = self._dense(x, client, slice(start, stop))
            table.append((dense @ dense.T).flatten())
        return torch.cat(table), place


def _scaled(x: SparseMatrix, scale: Tensor) -> SparseMatrix:
    assert x.value is not None
    return x.with_value(x.value * scale[x.row])


def _sparse_products(x: SparseMatrix, index: Tensor, segments: Segments) -> Tensor:
    """Compute x_u · x_v, `[N, k]`: u's features are made dense, and v's entries index them."""
    assert x.value is not None
    features, near_each = x.shape[1] // len(segments), index.shape[1]
    starts, counts = x.crow[:-1], x.crow[1:] - x.crow[:-1]
    column = x.col - features * segments.owner[x.row].int()
    out = x.value.new_empty(index.shape)
    step = block_rows(x.value, features + 4 * near_each * (1 + x.nnz // max(len(index), 1)))
    for first in range(0, len(index), step):
        near = index[first : first + step].flatten()
        rows = len(near) // near_each
        mine = slice(int(x.crow[first]), int(x.crow[first + rows]))
        dense = out.new_zeros(rows, features)
        dense[x.row[mine] - first, column[mine].long()] = x.value[mine]
        length = counts[near]
        ends = length.cumsum(0, dtype=torch.int32)
        entry = torch.repeat_interleave(starts[near] - ends + length, length)
        entry += torch.arange(len(entry), device=near.device, dtype=torch.int32)
        place = torch.arange(0, rows * features, features, device=near.device, dtype=torch.int32)
        place = torch.repeat_interleave(place.repeat_interleave(near_each), length)
        bags = SparseMatrix(
            shape=(len(near), rows * features),
            crow=torch.cat([ends.new_zeros(1), ends]),
            col=place.add_(column.index_select(0, entry)),
            crow_t=ends,
            col_t=ends,
            permutation=ends,
            value=x.value.index_select(0, entry),
        )
        out[first : first + rows] = (bags @ dense.view(-1, 1)).view(rows, near_each)
    return out
