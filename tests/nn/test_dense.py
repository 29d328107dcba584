"""Products of tall matrices by oneDNN, against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from builders import CPU
from polyphily.nn import dense
from polyphily.nn.segments import Segments

ROWS = dense.TALL

needs_one_dnn = pytest.mark.skipif(
    dense._linear() is None, reason="oneDNN is no faster on this machine"
)


@needs_one_dnn
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 2), (2, 64), (65, 33), (128, 128)])
def test_products_and_gradients(inputs: int, outputs: int) -> None:
    x, weight, grad = (
        torch.randn(600, inputs),
        torch.randn(inputs, outputs),
        torch.randn(600, outputs),
    )
    assert_close(dense.product(x, weight), x @ weight)
    assert_close(dense.product(grad, weight.t()), grad @ weight.t())
    assert_close(dense.gradient(x, grad), x.t() @ grad, atol=1e-3, rtol=1e-4)


@needs_one_dnn
def test_parts_of_weights() -> None:
    x, weight = torch.randn(600, 64), torch.randn(64, 96)
    assert_close(dense.product(x, weight[:, :32]), x @ weight[:, :32])
    assert_close(dense.product(x, weight[:, ::3]), x @ weight[:, ::3])


def test_it_pays_for_tall_float32_on_a_cpu_only() -> None:
    x = torch.zeros(2, ROWS, 64)
    assert not dense.pays(x.double(), 64, 64)
    assert not dense.pays(x[:, 1:], 64, 64)
    assert not dense.pays(x, 64, 1)
    assert not dense.pays(x, 32, 32)
    assert dense.pays(x, 64, 2) == (dense._linear() is not None)


@pytest.mark.parametrize("sizes", [[ROWS, ROWS], [ROWS, 3, 2 * ROWS], [ROWS - 1, ROWS]])
def test_clients_with_many_rows(sizes: list[int]) -> None:
    segments = Segments(tuple(sizes), CPU)
    x = torch.randn(segments.rows, 64).requires_grad_()
    weight = torch.randn(len(sizes), 64, 20).requires_grad_()
    above = torch.randn(segments.rows, 20)
    found = segments.matmul(x, weight)
    wide = (x.double(), weight.double())
    wanted = torch.cat([own @ w for own, w in zip(wide[0].split(sizes), wide[1], strict=True)])
    assert_close(found.double(), wanted, atol=1e-4, rtol=1e-4)
    back = torch.autograd.grad(found, (x, weight), above)
    for one, two in zip(
        back, torch.autograd.grad(wanted, (x, weight), above.double()), strict=True
    ):
        assert_close(one, two, atol=1e-3, rtol=1e-4)
