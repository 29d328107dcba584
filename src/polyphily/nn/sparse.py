"""Sparse matrices for repeated products: int32 indices, with the transpose precomputed."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from polyphily.nn import kernels

if TYPE_CHECKING:
    from polyphily.nn.segments import Segments

LARGE = 1_000_000  # entries above which cuSPARSE beats embedding_bag on a GPU


def flat(x: Tensor) -> Tensor:
    """Return `[rows, …]` as a matrix, also if there are no rows."""
    return x.reshape(len(x), math.prod(x.shape[1:]))


def full(x: Tensor) -> Tensor:
    """Return `x` in float32 if it is in half precision: long sums need more digits."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def is_shared(weight: Tensor) -> bool:
    """Return whether all clients have the same weights, in memory once (`expand`), for no gradient.

    A product then needs no copy per client. On a GPU the kernels for stacked weights are used.
    """
    once = len(weight) > 1 and weight.stride(0) == 0
    return once and not (weight.is_cuda or weight.requires_grad)


@dataclass(frozen=True)
class SparseMatrix:
    """A matrix in CSR form together with the CSR form of its transpose.

    `value_t[i] == value[permutation[i]]`: new values, such as learned edge weights or features
    after dropout, are moved to the transpose by one gather. A matrix of ones stores no values.
    """

    shape: tuple[int, int]
    crow: Tensor
    col: Tensor
    crow_t: Tensor
    col_t: Tensor
    permutation: Tensor
    value: Tensor | None = None
    value_t: Tensor | None = None

    @classmethod
    def from_coordinates(
        cls,
        rows: npt.NDArray[np.int64],
        cols: npt.NDArray[np.int64],
        value: npt.NDArray[Any] | None,
        shape: tuple[int, int],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> SparseMatrix:
        """Build a matrix from coordinates sorted by row and then column, without repeats."""
        order = np.lexsort((rows, cols))

        def index(array: npt.NDArray[Any]) -> Tensor:
            return torch.from_numpy(array.astype(np.int32)).to(device)

        matrix = cls(
            shape=shape,
            crow=index(_pointers(rows, shape[0])),
            col=index(cols),
            crow_t=index(_pointers(cols, shape[1])),
            col_t=index(rows[order]),
            permutation=torch.from_numpy(order).to(device),
        )
        if value is None:
            return matrix
        return matrix.with_value(torch.from_numpy(np.ascontiguousarray(value)).to(device, dtype))

    def with_value(self, value: Tensor) -> SparseMatrix:
        """Return a matrix with the same pattern and other values, `[nnz]`."""
        return replace(self, value=value, value_t=value.detach().index_select(0, self.permutation))

    @property
    def nnz(self) -> int:
        """The number of stored entries."""
        return len(self.col)

    def folded(self, width: int) -> SparseMatrix:
        """Return a block-diagonal matrix with its blocks below each other, for products only.

        Args:
            width: the columns of each block.
        """
        if width not in self._folded:
            empty = self.col.new_empty(0)
            self._folded[width] = SparseMatrix(
                (self.shape[0], width), self.crow, self.col % width, empty, empty, empty, self.value
            )
        return self._folded[width]

    @cached_property
    def _folded(self) -> dict[int, SparseMatrix]:
        return {}

    @cached_property
    def row(self) -> Tensor:
        """The row of every entry, int64."""
        counts = (self.crow[1:] - self.crow[:-1]).long()
        index = torch.arange(self.shape[0], device=self.col.device)
        return torch.repeat_interleave(index, counts, output_size=self.nnz)

    @cached_property
    def col_long(self) -> Tensor:
        """The column of every entry, int64."""
        return self.col.long()

    @cached_property
    def transposed(self) -> SparseMatrix:
        inverse = torch.empty_like(self.permutation)
        inverse[self.permutation] = torch.arange(self.nnz, device=inverse.device)
        return SparseMatrix(
            shape=(self.shape[1], self.shape[0]),
            crow=self.crow_t,
            col=self.col_t,
            crow_t=self.crow,
            col_t=self.col,
            permutation=inverse,
            value=None if self.value is None else self.value[self.permutation],
            value_t=None if self.value is None else self.value.detach(),
        )

    def __matmul__(self, dense: Tensor) -> Tensor:
        """Return the product with a dense matrix, differentiable in `dense` and `value`."""
        return self._product(full(dense))

    def plus(self, dense: Tensor, bias: Tensor, segments: Segments) -> Tensor:
        """Return the product plus the bias of the client of each row, `[clients, width]`."""
        wide = full(dense)
        if kernels.available(wide) and bias.dtype == wide.dtype and self.nnz:
            return self._product(wide, bias, segments)
        return self._product(wide) + segments.expand(bias)

    def _product(
        self, dense: Tensor, bias: Tensor | None = None, segments: Segments | None = None
    ) -> Tensor:
        if not torch.is_grad_enabled():  # a function of autograd costs time even so
            return _multiplied(self, self.value, dense, bias, segments)
        product: Tensor = _Product.apply(self, self.value, dense, bias, segments)  # type: ignore[no-untyped-call]
        return product

    def at_rows(self, x: Tensor) -> Tensor:
        """Return `x` at the row of every entry, `[rows, …] -> [nnz, …]`."""
        return _gather(x, self.row, self._entries, self.crow)

    def at_cols(self, x: Tensor) -> Tensor:
        """Return `x` at the column of every entry, `[columns, …] -> [nnz, …]`."""
        return _gather(x, self.col_long, self.permutation.int(), self.crow_t)

    def sum_by_row(self, entries: Tensor) -> Tensor:
        """Sum values at the entries by row, `[nnz, …] -> [rows, …]`."""
        total: Tensor = _RowSum.apply(self, flat(full(entries)))  # type: ignore[no-untyped-call]
        return total.view(self.shape[0], *entries.shape[1:])

    def products(self, left: Tensor, right: Tensor) -> Tensor:
        """Return left · right^T at the entries, `[rows, d]`, `[columns, d] -> [nnz]`."""
        found: Tensor = _EntryProducts.apply(self, full(left), full(right))  # type: ignore[no-untyped-call]
        return found

    def softmax(self, score: Tensor) -> Tensor:
        """Return the softmax over each row of values at its entries, `[nnz, heads]`."""
        index = self.row.view(-1, 1).expand_as(score)
        lowest = score.new_full((self.shape[0], score.shape[1]), -torch.inf)
        peak = lowest.scatter_reduce(0, index, score.detach(), "amax")
        weight = (score - peak[self.row]).exp()
        return weight / self.at_rows(self.sum_by_row(weight))

    @cached_property
    def _entries(self) -> Tensor:
        return torch.arange(self.nnz, device=self.col.device, dtype=torch.int32)


def _pointers(index: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.int64]:
    """Return where each value of an index begins once it is sorted."""
    pointers = np.zeros(size + 1, dtype=np.int64)
    np.cumsum(np.bincount(index, minlength=size), out=pointers[1:])
    return pointers


def _as_csr(crow: Tensor, col: Tensor, value: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return a sparse tensor of torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "Sparse CSR tensor support is in beta state"
        return torch.sparse_csr_tensor(crow, col, value, shape, check_invariants=False)


def _multiply_by_cusparse(
    crow: Tensor, col: Tensor, value: Tensor | None, rows: int, dense: Tensor
) -> Tensor:
    if value is None:
        value = dense.new_ones(len(col))
    matrix = _as_csr(crow, col, value, (rows, dense.shape[0]))
    with torch.autocast(dense.device.type, enabled=False):
        return matrix @ dense


def multiply(crow: Tensor, col: Tensor, value: Tensor | None, rows: int, dense: Tensor) -> Tensor:
    """Return CSR times dense. torch's fastest kernel for it is mostly that of `embedding_bag`."""
    if len(col) == 0:
        return dense.new_zeros(rows, dense.shape[1])
    if kernels.available(dense):
        return kernels.sparse_product(crow, col, value, rows, dense)
    if dense.is_cuda and len(col) > LARGE:
        return _multiply_by_cusparse(crow, col, value, rows, dense)
    # detached: with a gradient in view, it would also compute what its own backward pass needs
    table, weights = dense.detach().contiguous(), None if value is None else value.detach()
    bags: tuple[Tensor, ...] = torch.embedding_bag(table, col, crow, False, 0, False, weights, True)
    return bags[0]


def products_at_entries(matrix: SparseMatrix, left: Tensor, right: Tensor) -> Tensor:
    """Return left · right^T at the entries of a pattern, without gradient."""
    if kernels.available(left):
        return kernels.entry_products(matrix.row, matrix.col, left, right)
    places = matrix.shape[0] * matrix.shape[1]
    if left.is_cuda or not 0 < matrix.nnz <= places:  # torch has no room for more repeated entries
        return (left.index_select(0, matrix.row) * right.index_select(0, matrix.col)).sum(dim=1)
    pattern = _as_csr(matrix.crow, matrix.col, left.new_zeros(matrix.nnz), matrix.shape)
    found: Tensor = torch.sparse.sampled_addmm(pattern, left, right.t(), beta=0.0).values()
    return found


def _multiplied(
    matrix: SparseMatrix,
    value: Tensor | None,
    dense: Tensor,
    bias: Tensor | None,
    segments: Segments | None,
) -> Tensor:
    """Return a matrix times dense, plus a bias for each client if there are segments."""
    crow, col, rows = matrix.crow, matrix.col, matrix.shape[0]
    if segments is None:
        return multiply(crow, col, value, rows, dense)
    return kernels.sparse_product(crow, col, value, rows, dense, bias, segments.owner)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        matrix: SparseMatrix,
        value: Tensor | None,
        dense: Tensor,
        bias: Tensor | None,
        segments: Segments | None,
    ) -> Tensor:
        ctx.matrix, ctx.segments = matrix, segments
        ctx.save_for_backward(dense if ctx.needs_input_grad[1] else None)
        return _multiplied(matrix, value, dense, bias, segments)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        matrix: SparseMatrix = ctx.matrix
        grad_value = grad_dense = grad_bias = None
        if ctx.needs_input_grad[1]:
            (dense,) = ctx.saved_tensors
            grad_value = products_at_entries(matrix, grad, dense)
        if ctx.needs_input_grad[2]:
            grad_dense = multiply(
                matrix.crow_t, matrix.col_t, matrix.value_t, matrix.shape[1], grad
            )
        if ctx.needs_input_grad[3]:
            grad_bias = kernels.segment_sum(grad, ctx.segments)
        return None, grad_value, grad_dense, grad_bias, None


class _EntryProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, matrix: SparseMatrix, left: Tensor, right: Tensor) -> Tensor:
        ctx.matrix = matrix
        ctx.save_for_backward(left, right)
        return products_at_entries(matrix, left, right)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
        matrix: SparseMatrix = ctx.matrix
        left, right = ctx.saved_tensors
        grad = grad.contiguous()
        grad_left = grad_right = None
        if ctx.needs_input_grad[1]:
            grad_left = multiply(matrix.crow, matrix.col, grad, matrix.shape[0], right)
        if ctx.needs_input_grad[2]:
            turned = grad.index_select(0, matrix.permutation)
            grad_right = multiply(matrix.crow_t, matrix.col_t, turned, matrix.shape[1], left)
        return None, grad_left, grad_right


class _RowSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, matrix: SparseMatrix, entries: Tensor) -> Tensor:
        ctx.matrix = matrix
        return multiply(matrix.crow, matrix._entries, None, matrix.shape[0], entries)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad.index_select(0, ctx.matrix.row)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, entries: Tensor, pointers: Tensor) -> Tensor:
        ctx.entries, ctx.pointers = entries, pointers
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        rows = len(ctx.pointers) - 1
        return multiply(ctx.pointers, ctx.entries, None, rows, grad), None, None, None


def _gather(x: Tensor, index: Tensor, entries: Tensor, pointers: Tensor) -> Tensor:
    """Return `x[index]`; its gradient is summed in a fixed order, so it is deterministic."""
    gathered: Tensor = _Gather.apply(flat(full(x)), index, entries, pointers)  # type: ignore[no-untyped-call]
    return gathered.view(len(index), *x.shape[1:])
