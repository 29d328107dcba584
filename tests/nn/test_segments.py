"""Products, sums and means by client against a loop over the clients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from builders import CPU
from polyphily.nn.segments import PADDING, Segments, _padded_gradient, _padded_product

MANY = settings(max_examples=60, deadline=None)
FEW = settings(max_examples=12, deadline=None)

unequal = st.lists(st.integers(0, 9), min_size=1, max_size=8)
equal = st.integers(0, 6).flatmap(lambda n: st.integers(1, 6).map(lambda k: [n] * k))
blocks = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3)), min_size=1, max_size=4).map(
    lambda runs: [size for size, times in runs for _ in range(times)]
)
any_sizes = st.one_of(unequal, equal, blocks)
some_rows = any_sizes.filter(any)
positive = st.lists(st.integers(1, 9), min_size=1, max_size=8)
dtypes = st.sampled_from([torch.float32, torch.float64])
seeds = st.integers(0, 1000)


def segments_of(sizes: list[int]) -> Segments:
    return Segments(tuple(sizes), CPU)


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).to(dtype)


def loop_product(sizes: list[int], x: Tensor, weight: Tensor) -> Tensor:
    parts = torch.split(x, sizes)
    return torch.cat([part @ weight[k] for k, part in enumerate(parts)])


def close(left: Tensor, right: Tensor) -> None:
    tolerance = 1e-4 if left.dtype == torch.float32 else 1e-12
    assert_close(left, right, rtol=tolerance, atol=tolerance)


@MANY
@given(any_sizes)
def test_pointers_and_owners_lay_the_clients_end_to_end(sizes: list[int]) -> None:
    segments = segments_of(sizes)
    assert len(segments) == len(sizes)
    assert segments.rows == sum(sizes)
    assert [b - a for a, b in zip(segments.pointers, segments.pointers[1:], strict=False)] == sizes
    assert segments.owner.tolist() == [k for k, size in enumerate(sizes) for _ in range(size)]


@MANY
@given(any_sizes, dtypes, seeds)
@example([0, 0], torch.float64, 0)
@example([3, 0, 0, 3, 3], torch.float64, 0)
def test_the_product_and_its_gradients_are_a_loop_over_clients(
    sizes: list[int], dtype: torch.dtype, seed: int
) -> None:
    found, expected = [], []
    for grouped, results in ((True, found), (False, expected)):
        x = numbers(seed, sum(sizes), 4, dtype=dtype).requires_grad_()
        weight = numbers(seed + 1, len(sizes), 4, 3, dtype=dtype).requires_grad_()
        if grouped:
            product = segments_of(sizes).matmul(x, weight)
        else:
            product = loop_product(sizes, x, weight)
        product.backward(numbers(seed + 2, sum(sizes), 3, dtype=dtype))
        results += [product.detach(), x.grad, weight.grad]
    for left, right in zip(found, expected, strict=True):
        assert left is not None
        assert right is not None
        close(left, right)


@FEW
@given(some_rows, seeds)
def test_gradients_of_the_product_by_finite_differences(sizes: list[int], seed: int) -> None:
    x = numbers(seed, sum(sizes), 2).requires_grad_()
    weight = numbers(seed + 1, len(sizes), 2, 3).requires_grad_()
    assert torch.autograd.gradcheck(segments_of(sizes).matmul, [x, weight])


@pytest.mark.parametrize("width", [1, 3, 40])
@pytest.mark.parametrize("tall", [1, 4, 6])
def test_products_of_tall_clients_are_a_loop_over_clients_too(
    width: int, tall: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polyphily.nn.segments.TALL", tall)
    sizes = [5, 5, 2, 7, 0]
    x, weight = numbers(1, sum(sizes), 4), numbers(2, len(sizes), 4, width)
    upstream = numbers(3, sum(sizes), width)
    found, expected = [], []
    for product, leaves in ((segments_of(sizes).matmul, found), (None, expected)):
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        out = loop_product(sizes, a, b) if product is None else product(a, b)
        leaves += [out, *torch.autograd.grad(out, (a, b), upstream)]
    for left, right in zip(found, expected, strict=True):
        close(left, right)


def test_the_product_takes_views() -> None:
    sizes = [2, 3, 3]
    x, weight = numbers(0, 4, 8).T, numbers(1, 3, 5, 4).transpose(1, 2)
    assert not x.is_contiguous()
    close(segments_of(sizes).matmul(x, weight), loop_product(sizes, x, weight))


@MANY
@given(some_rows, st.sampled_from([(), (1,), (3,), (2, 3)]), dtypes, seeds)
def test_sums_and_means_are_a_loop_over_clients(
    sizes: list[int], tail: tuple[int, ...], dtype: torch.dtype, seed: int
) -> None:
    segments, x = segments_of(sizes), numbers(seed, sum(sizes), *tail, dtype=dtype)
    parts = torch.split(x, sizes)
    close(segments.sum(x), torch.stack([part.sum(dim=0) for part in parts]))
    means = [part.mean(dim=0) if len(part) else part.sum(dim=0) for part in parts]
    close(segments.mean(x), torch.stack(means))


@MANY
@given(any_sizes, st.sampled_from([(), (1,), (3,), (2, 3)]), dtypes, seeds)
def test_expand_repeats_each_clients_value(
    sizes: list[int], tail: tuple[int, ...], dtype: torch.dtype, seed: int
) -> None:
    values = numbers(seed, len(sizes), *tail, dtype=dtype)
    expanded = segments_of(sizes).expand(values)
    assert torch.equal(expanded, values.repeat_interleave(torch.tensor(sizes), dim=0))


@FEW
@given(some_rows, seeds)
def test_gradients_of_sum_mean_and_expand_by_finite_differences(
    sizes: list[int], seed: int
) -> None:
    segments = segments_of(sizes)
    rows = numbers(seed, sum(sizes), 2, 2).requires_grad_()
    clients = numbers(seed, len(sizes), 2, 2).requires_grad_()
    assert torch.autograd.gradcheck(segments.sum, [rows])
    assert torch.autograd.gradcheck(segments.mean, [rows])
    assert torch.autograd.gradcheck(segments.expand, [clients])


@MANY
@given(any_sizes, seeds)
def test_no_client_sees_another_clients_rows_or_weights(sizes: list[int], seed: int) -> None:
    segments = segments_of(sizes)
    x, weight = numbers(seed, sum(sizes), 4), numbers(seed + 1, len(sizes), 4, 3)
    before = torch.split(segments.matmul(x, weight), sizes)
    for k, start in enumerate(segments.pointers[:-1]):
        others, own = x + 1.0, weight + 1.0
        others[start : start + sizes[k]] = x[start : start + sizes[k]]
        own[k] = weight[k]
        assert torch.equal(torch.split(segments.matmul(others, own), sizes)[k], before[k])


# The padded products, which serve GPUs -------------------------------------------------------


@MANY
@given(positive, dtypes, seeds)
def test_padded_products_equal_the_plain_ones(
    sizes: list[int], dtype: torch.dtype, seed: int
) -> None:
    segments = segments_of(sizes)
    x = numbers(seed, sum(sizes), 4, dtype=dtype)
    weight = numbers(seed + 1, len(sizes), 4, 3, dtype=dtype).requires_grad_()
    grad = numbers(seed + 2, sum(sizes), 3, dtype=dtype)
    plain = segments.matmul(x, weight)
    close(_padded_product(x, weight, segments), plain)
    close(_padded_gradient(x, grad, segments), torch.autograd.grad(plain, weight, grad)[0])


@pytest.mark.parametrize("sizes", [[0, 0], [0, 3, 0]])
def test_padded_products_allow_clients_without_rows(sizes: list[int]) -> None:
    segments = segments_of(sizes)
    x, weight = numbers(0, sum(sizes), 4), numbers(1, len(sizes), 4, 3)
    close(_padded_product(x, weight, segments), loop_product(sizes, x, weight))
    grad = numbers(2, sum(sizes), 3)
    parts = zip(torch.split(x, sizes), torch.split(grad, sizes), strict=True)
    expected = torch.stack([left.T @ right for left, right in parts])
    close(_padded_gradient(x, grad, segments), expected)


@MANY
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=60))
def test_padding_adds_at_most_a_quarter(sizes: list[int]) -> None:
    buckets, _ = segments_of(sizes).buckets
    assert sum(len(bucket.gather) for bucket in buckets) <= PADDING * sum(sizes)


@MANY
@given(st.lists(st.integers(0, 40), min_size=1, max_size=30))
def test_a_client_without_rows_costs_at_most_one_row_of_padding(sizes: list[int]) -> None:
    buckets, _ = segments_of(sizes).buckets
    padded = sum(len(bucket.gather) for bucket in buckets)
    assert padded <= PADDING * sum(sizes) + sizes.count(0)


@MANY
@given(st.lists(st.integers(0, 200), min_size=1, max_size=40))
def test_every_client_and_row_is_in_exactly_one_bucket(sizes: list[int]) -> None:
    segments = segments_of(sizes)
    buckets, home = segments.buckets
    clients = [k for bucket in buckets for k in bucket.clients.tolist()]
    assert sorted(clients) == list(range(len(sizes)))
    slots = torch.cat([bucket.gather for bucket in buckets])
    assert torch.equal(slots[home], torch.arange(segments.rows))
    assert int((slots < segments.rows).sum()) == segments.rows
    for bucket in buckets:
        assert len(bucket.gather) == len(bucket.clients) * bucket.size
        assert bucket.size == max(sizes[k] for k in bucket.clients.tolist())


@pytest.mark.parametrize("tail", [(), (3,)])
def test_sums_and_means_are_zero_where_no_client_has_a_row(tail: tuple[int, ...]) -> None:
    segments, x = segments_of([0, 0]), torch.zeros(0, *tail)
    assert torch.equal(segments.sum(x), torch.zeros(2, *tail))
    assert torch.equal(segments.mean(x), torch.zeros(2, *tail))


@MANY
@given(sizes=any_sizes, size=st.integers(1, 12))
def test_pieces_cover_all_rows_in_order(sizes: list[int], size: int) -> None:
    segments = segments_of(sizes)
    pieces = segments.pieces(size)
    owners = [piece.segments.owner + piece.clients.start for piece in pieces]
    assert torch.cat([*owners, torch.zeros(0).long()]).tolist() == segments.owner.tolist()
    stop = 0
    for rows, clients, own in pieces:
        assert (rows.start, rows.stop) == (stop, stop + own.rows)
        assert len(own) == clients.stop - clients.start
        assert own.rows <= size
        stop = rows.stop


def test_only_large_clients_are_cut_and_into_equal_parts() -> None:
    pieces = segments_of([3, 4, 21, 2]).pieces(10)
    assert [own.sizes for _, _, own in pieces] == [(3, 4), (7,), (7,), (7,), (2,)]


@MANY
@given(sizes=any_sizes, width=st.integers(1, 3), seed=seeds)
def test_cross_products_and_their_gradients(sizes: list[int], width: int, seed: int) -> None:
    a, b = (numbers(seed + n, sum(sizes), n).requires_grad_() for n in (width, 2))
    found = segments_of(sizes).cross(a, b)
    parts = zip(a.split(sizes), b.split(sizes), strict=True)
    wanted = torch.stack([one.T @ two for one, two in parts])
    assert_close(found, wanted)
    above = numbers(seed, *wanted.shape)
    for one, two in zip(
        torch.autograd.grad(found, (a, b), above),
        torch.autograd.grad(wanted, (a, b), above),
        strict=True,
    ):
        assert_close(one, two)
