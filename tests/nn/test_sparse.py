"""Sparse products against dense ones: values, transposes, gradients, gathers and softmax."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from builders import CPU
from polyphily.nn.sparse import SparseMatrix

MANY = settings(max_examples=60, deadline=None)
FEW = settings(max_examples=15, deadline=None)
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-11}


@dataclass(frozen=True)
class Case:
    """A random matrix: its pattern, its values, and the numbers to multiply it by."""

    rows: int
    cols: int
    density: float
    width: int
    dtype: torch.dtype
    seed: int

    def rng(self, purpose: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, purpose])

    def coordinates(self) -> tuple[np.ndarray, np.ndarray]:
        rows, cols = np.nonzero(self.rng(0).random((self.rows, self.cols)) < self.density)
        return rows, cols

    def pattern(self) -> SparseMatrix:
        rows, cols = self.coordinates()
        return SparseMatrix.from_coordinates(
            rows, cols, None, (self.rows, self.cols), dtype=self.dtype, device=CPU
        )

    def numbers(self, *shape: int, purpose: int = 1) -> Tensor:
        return torch.from_numpy(self.rng(purpose).standard_normal(shape)).to(self.dtype)

    def values(self) -> Tensor:
        return self.numbers(len(self.coordinates()[0]), purpose=2)

    def dense(self, values: Tensor) -> Tensor:
        rows, cols = map(torch.from_numpy, self.coordinates())
        return torch.zeros(self.rows, self.cols, dtype=self.dtype).index_put((rows, cols), values)

    def equal(self, left: Tensor, right: Tensor) -> None:
        tolerance = TOLERANCE[self.dtype]
        assert_close(left, right, rtol=tolerance, atol=tolerance)


sizes = st.integers(0, 9)
cases = st.builds(
    Case,
    rows=sizes,
    cols=sizes,
    density=st.sampled_from([0.0, 0.15, 0.5, 1.0]),
    width=st.integers(1, 5),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 10_000),
)
filled = cases.filter(lambda case: len(case.coordinates()[0]) > 0)
EMPTY = Case(rows=3, cols=2, density=0.0, width=4, dtype=torch.float64, seed=0)
NO_ROWS = Case(rows=0, cols=2, density=0.0, width=4, dtype=torch.float64, seed=0)


@MANY
@given(cases)
@example(EMPTY)
@example(NO_ROWS)
def test_the_product_and_its_gradients_are_those_of_dense_matrices(case: Case) -> None:
    x = case.numbers(case.cols, case.width)
    upstream = case.numbers(case.rows, case.width, purpose=3)
    found, expected = [], []
    for sparse, leaves in ((True, found), (False, expected)):
        value, dense = case.values().requires_grad_(), x.clone().requires_grad_()
        matrix = case.pattern().with_value(value) if sparse else case.dense(value)
        product = matrix @ dense
        product.backward(upstream)
        leaves += [product.detach(), value.grad, dense.grad]
    for left, right in zip(found, expected, strict=True):
        assert left is not None
        assert right is not None
        case.equal(left, right)


@MANY
@given(cases)
def test_a_pattern_multiplies_as_a_matrix_of_ones(case: Case) -> None:
    ones = case.dense(torch.ones(len(case.coordinates()[0]), dtype=case.dtype))
    x = case.numbers(case.cols, case.width).requires_grad_()
    product = case.pattern() @ x
    case.equal(product, ones @ x)
    upstream = torch.ones_like(product)
    case.equal(torch.autograd.grad(product, x, upstream)[0], ones.T @ upstream)


@MANY
@given(cases)
def test_the_transpose_multiplies_as_the_dense_transpose(case: Case) -> None:
    value, x = case.values(), case.numbers(case.rows, case.width).requires_grad_()
    matrix = case.pattern().with_value(value)
    product = matrix.transposed @ x
    case.equal(product, case.dense(value).T @ x)
    upstream = case.numbers(case.cols, case.width, purpose=3)
    case.equal(torch.autograd.grad(product, x, upstream)[0], case.dense(value) @ upstream)


@MANY
@given(filled)
def test_a_transposed_pattern_takes_values_and_gathers_as_any_other(case: Case) -> None:
    pattern = case.pattern().transposed
    value = case.numbers(pattern.nnz, purpose=5)
    dense = torch.zeros(case.cols, case.rows, dtype=case.dtype)
    dense[pattern.row, pattern.col_long] = value
    x = case.numbers(case.rows, case.width).requires_grad_()
    upstream = case.numbers(case.cols, case.width, purpose=3)
    product, gathered = pattern.with_value(value) @ x, pattern.at_cols(x)
    case.equal(product, dense @ x)
    case.equal(torch.autograd.grad(product, x, upstream)[0], dense.T @ upstream)
    weights = case.numbers(pattern.nnz, case.width, purpose=6)
    expected = torch.autograd.grad(x[pattern.col_long], x, weights)[0]
    case.equal(torch.autograd.grad(gathered, x, weights)[0], expected)


@MANY
@given(cases)
def test_transposing_twice_gives_the_matrix_back(case: Case) -> None:
    matrix = case.pattern().with_value(case.values())
    again = matrix.transposed.transposed
    assert again.shape == matrix.shape
    for name in ("crow", "col", "crow_t", "col_t", "permutation", "value", "value_t"):
        assert torch.equal(getattr(again, name), getattr(matrix, name)), name


@MANY
@given(cases)
def test_the_transposed_values_are_a_permutation_of_the_values(case: Case) -> None:
    matrix = case.pattern().with_value(case.values())
    assert matrix.value is not None
    assert matrix.value_t is not None
    assert torch.equal(matrix.value_t, matrix.value[matrix.permutation])
    assert matrix.nnz == len(case.coordinates()[0])
    assert matrix.row.tolist() == case.coordinates()[0].tolist()
    assert matrix.col.tolist() == case.coordinates()[1].tolist()


@MANY
@given(cases)
def test_values_given_at_construction_are_kept_in_the_dtype_asked_for(case: Case) -> None:
    rows, cols = case.coordinates()
    value = case.rng(2).standard_normal(len(rows))
    matrix = SparseMatrix.from_coordinates(
        rows, cols, value, (case.rows, case.cols), dtype=case.dtype, device=CPU
    )
    assert matrix.value is not None
    assert torch.equal(matrix.value, torch.from_numpy(value).to(case.dtype))


@FEW
@given(filled)
def test_gradients_of_the_product_by_finite_differences(case: Case) -> None:
    case = Case(case.rows, case.cols, case.density, case.width, torch.float64, case.seed)
    pattern = case.pattern()
    leaves = [case.values().requires_grad_(), case.numbers(case.cols, case.width).requires_grad_()]
    assert torch.autograd.gradcheck(lambda v, x: pattern.with_value(v) @ x, leaves)


@FEW
@given(filled)
def test_gradients_of_gathers_sums_and_softmax_by_finite_differences(case: Case) -> None:
    case = Case(case.rows, case.cols, case.density, case.width, torch.float64, case.seed)
    pattern = case.pattern()
    at_rows = case.numbers(case.rows, case.width).requires_grad_()
    at_cols = case.numbers(case.cols, case.width).requires_grad_()
    entries = case.numbers(pattern.nnz, case.width).requires_grad_()
    assert torch.autograd.gradcheck(pattern.at_rows, [at_rows])
    assert torch.autograd.gradcheck(pattern.at_cols, [at_cols])
    assert torch.autograd.gradcheck(pattern.sum_by_row, [entries])
    assert torch.autograd.gradcheck(pattern.softmax, [entries])


@MANY
@given(filled, st.sampled_from([(), (1,), (3,), (2, 3)]))
def test_gathers_are_plain_indexing(case: Case, tail: tuple[int, ...]) -> None:
    matrix = case.pattern()
    rows, cols = map(torch.from_numpy, case.coordinates())
    for gather, length, index in (
        (matrix.at_rows, case.rows, rows),
        (matrix.at_cols, case.cols, cols),
    ):
        x = case.numbers(length, *tail).requires_grad_()
        gathered = gather(x)
        assert torch.equal(gathered, x[index])
        upstream = case.numbers(len(index), *tail, purpose=4)
        grad = torch.autograd.grad(gathered, x, upstream)[0]
        case.equal(grad, torch.autograd.grad(x[index], x, upstream)[0])


@MANY
@given(filled, st.sampled_from([(), (1,), (3,), (2, 3)]))
def test_sums_by_row_are_a_loop_over_the_entries(case: Case, tail: tuple[int, ...]) -> None:
    matrix = case.pattern()
    entries = case.numbers(matrix.nnz, *tail).requires_grad_()
    total = torch.zeros(case.rows, *tail, dtype=case.dtype)
    for entry, row in enumerate(case.coordinates()[0]):
        total[row] += entries.detach()[entry]
    summed = matrix.sum_by_row(entries)
    case.equal(summed, total)
    upstream = case.numbers(case.rows, *tail, purpose=4)
    grad = torch.autograd.grad(summed, entries, upstream)[0]
    assert torch.equal(grad, upstream[matrix.row])


@MANY
@given(filled, st.sampled_from([0.0, 1.0, 400.0]))
def test_softmax_is_that_of_torch_row_by_row(case: Case, scale: float) -> None:
    """The largest scale overflows `exp` where the row's peak is not taken off."""
    matrix = case.pattern()
    score = (scale * case.numbers(matrix.nnz, case.width)).requires_grad_()
    found = matrix.softmax(score)
    upstream = case.numbers(matrix.nnz, case.width, purpose=4)
    expected = torch.cat(
        [
            score[torch.from_numpy(case.coordinates()[0] == row)].softmax(dim=0)
            for row in range(case.rows)
        ]
    )
    case.equal(found, expected)
    case.equal(
        torch.autograd.grad(found, score, upstream)[0],
        torch.autograd.grad(expected, score, upstream)[0],
    )


def test_the_gradient_is_left_out_where_nothing_asks_for_it() -> None:
    case = Case(5, 4, 0.5, 3, torch.float64, 1)
    value = case.values()
    x = case.numbers(4, 3).requires_grad_()
    (case.pattern().with_value(value) @ x).sum().backward()
    assert value.grad is None
    assert x.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_operands_and_gradients_need_not_be_contiguous(dtype: torch.dtype) -> None:
    case = Case(5, 4, 0.5, 3, dtype, 1)
    matrix, dense = case.pattern().with_value(case.values()), case.dense(case.values())
    x, upstream = case.numbers(3, 4).T.requires_grad_(), case.numbers(3, 5, purpose=3).T
    assert not x.is_contiguous()
    assert not upstream.is_contiguous()
    product = matrix @ x
    case.equal(product, dense @ x)
    case.equal(torch.autograd.grad(product, x, upstream)[0], dense.T @ upstream)


def test_sums_by_row_of_an_empty_matrix_are_zero() -> None:
    assert torch.equal(EMPTY.pattern().sum_by_row(torch.ones(0, 4)), torch.zeros(3, 4))


def test_softmax_of_an_empty_matrix_is_empty() -> None:
    assert EMPTY.pattern().softmax(torch.ones(0, 4)).shape == (0, 4)


def test_gathers_from_a_matrix_without_rows_are_empty() -> None:
    assert NO_ROWS.pattern().at_rows(torch.ones(0, 4)).shape == (0, 4)


def test_gradients_reach_the_values_through_the_transpose() -> None:
    case = Case(5, 4, 0.5, 3, torch.float64, 1)
    value = case.values().requires_grad_()
    x = case.numbers(5, 3).requires_grad_()
    (case.pattern().with_value(value).transposed @ x).sum().backward()
    expected = torch.autograd.grad((case.dense(value).T @ x).sum(), value)[0]
    assert value.grad is not None
    case.equal(value.grad, expected)
