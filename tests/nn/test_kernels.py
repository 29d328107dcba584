"""The Triton kernels against plain torch, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from builders import CPU
from polyphily.nn import kernels
from polyphily.nn.draws import Streams
from polyphily.nn.segments import Segments
from polyphily.nn.sparse import SparseMatrix

pytestmark = pytest.mark.skipif(not kernels.TRITON, reason="Triton is not installed")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
usable = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="neither a GPU nor the interpreter"
)
SIZES = (40, 1, 0, 7, 65)


def test_all_of_this_in_the_interpreter() -> None:
    """Runs this file again with Triton's interpreter on, which must be so before Triton loads."""
    if INTERPRETED or torch.cuda.is_available():
        pytest.skip("runs here already")
    arguments = [sys.executable, "-m", "pytest", __file__, "-q", "-p", "no:cacheprovider"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.count(".") > 40, "hardly any test ran"


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@usable
@pytest.mark.parametrize("width", [1, 3, 16, 70])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("rows", "share"), [(50, 0.02), (50, 0.3), (9, 0.9), (3, 0.0)])
def test_the_sparse_product(rows: int, share: float, weighted: bool, width: int) -> None:
    dense_matrix = (torch.rand(rows, 120, generator=torch.Generator().manual_seed(1)) < share) * 1.0
    if weighted:
        dense_matrix *= numbers(rows, 120, seed=2).cpu()
    row, col = dense_matrix.nonzero(as_tuple=True)
    value = dense_matrix[row, col].numpy() if weighted else None
    matrix = SparseMatrix.from_coordinates(
        row.numpy(), col.numpy(), value, (rows, 120), dtype=torch.float32, device=DEVICE
    )
    x = numbers(120, width, seed=3)
    found = kernels.sparse_product(matrix.crow, matrix.col, matrix.value, rows, x)
    torch.testing.assert_close(found, dense_matrix.to(DEVICE) @ x, rtol=1e-4, atol=1e-4)


@usable
@pytest.mark.parametrize("width", [1, 5, 64, 130])
def test_products_at_entries(width: int) -> None:
    left, right = numbers(20, width), numbers(30, width, seed=1)
    row = torch.randint(0, 20, (77,), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    col = torch.randint(0, 30, (77,), generator=torch.Generator().manual_seed(3)).to(DEVICE).int()
    expected = (left[row] * right[col.long()]).sum(dim=1)
    found = kernels.entry_products(row, col, left, right)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@usable
@pytest.mark.parametrize(("inner", "outer"), [(5, 3), (64, 1), (33, 70), (1, 16)])
def test_grouped_products_and_their_gradients(inner: int, outer: int) -> None:
    segments = Segments(SIZES, DEVICE)
    x, weight = numbers(sum(SIZES), inner), numbers(len(SIZES), inner, outer, seed=1)
    x.requires_grad_()
    weight.requires_grad_()
    parts = zip(x.split(list(SIZES)), weight, strict=True)
    expected = torch.cat([part @ own for part, own in parts])
    found = segments.matmul(x, weight)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    upstream = numbers(*expected.shape, seed=2)
    ours = torch.autograd.grad((found * upstream).sum(), [x, weight])
    theirs = torch.autograd.grad((expected * upstream).sum(), [x, weight])
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-4)


@usable
@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (40,)])
def test_sums_and_expansions_by_client(shape: tuple[int, ...]) -> None:
    segments = Segments(SIZES, DEVICE)
    x = numbers(sum(SIZES), *shape).requires_grad_()
    expected = torch.stack([part.sum(dim=0) for part in x.split(list(SIZES))])
    found = segments.sum(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    weights = numbers(*found.shape, seed=1)
    (grad,) = torch.autograd.grad((found * weights).sum(), x)
    torch.testing.assert_close(grad, weights[segments.owner])
    per_client = numbers(len(SIZES), *shape, seed=2).requires_grad_()
    spread = segments.expand(per_client)
    torch.testing.assert_close(spread, per_client[segments.owner])
    (grad,) = torch.autograd.grad((spread * x.detach()).sum(), per_client)
    torch.testing.assert_close(grad, expected.detach(), rtol=1e-4, atol=1e-4)


@usable
@pytest.mark.parametrize("width", [1, 6])
def test_dropout_draws_what_plain_torch_draws(width: int) -> None:
    keys, pointers = [(0, 0), (0, 1), (7, 3)], [0, 30, 31, 80]
    x = numbers(80, width).requires_grad_()
    streams = Streams(keys, DEVICE, hashed=True)
    fused, plain = streams.of_round(4), streams.of_round(4)
    for _ in range(3):
        found = fused.dropout(x, 0.3, pointers)
        kept = plain.at_least(round(0.3 * 65536), width, pointers)
        scale = 65536 / (65536 - round(0.3 * 65536))
        torch.testing.assert_close(found, torch.where(kept, x * scale, 0))
        (grad,) = torch.autograd.grad(found.sum(), x)
        torch.testing.assert_close(grad, kept * scale * torch.ones_like(x))


def test_plain_torch_serves_where_kernels_do_not() -> None:
    assert not kernels.available(torch.zeros(2, dtype=torch.float64))
    assert kernels.available(torch.zeros(2)) == INTERPRETED
    assert importlib.import_module("polyphily.nn.kernels") is kernels
    assert Segments((2,), CPU).sum(torch.ones(2, 1)).item() == 2
