"""Triton kernels for the products that torch has no single kernel for: one launch for all clients.

`available(x)` says whether they serve a tensor: float32 on a CUDA device, with Triton installed (it
comes with torch's CUDA builds). Everything here has a form in plain torch, too, where it is used.
Sums run in a fixed order, so results do not change from run to run.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

try:
    from polyphily.nn import triton_kernels
except ImportError:  # torch without CUDA, or a platform without Triton
    TRITON = False
else:
    TRITON = True

if TYPE_CHECKING:
    from polyphily.nn.segments import Segments

TILE = 32  # rows of a client that a program multiplies at a time
ON_CPU = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's own interpreter, for tests


def available(x: Tensor) -> bool:
    return TRITON and x.dtype == torch.float32 and (x.is_cuda or ON_CPU)


def _power(number: int, least: int, most: int) -> int:
    """The power of two that covers a number, within bounds."""
    return min(max(1 << (max(number, 1) - 1).bit_length(), least), most)


def sparse_product(
    crow: Tensor, col: Tensor, value: Tensor | None, rows: int, dense: Tensor
) -> Tensor:
    """CSR times dense, `[rows, width]`."""
    dense = dense.contiguous()
    width = dense.shape[1]
    out = dense.new_empty(rows, width)
    if out.numel() == 0:
        return out
    columns = _power(width, 16, 64)
    each = len(col) / rows
    height, entries = (8, 4) if each < 6 else (4, 8) if each < 64 else (1, 32)
    grid = (-(-rows // height), -(-width // columns))
    triton_kernels.sparse_kernel[grid](
        crow, col, col if value is None else value, dense, out, rows, width,
        HAS_VALUE=value is not None, ROWS=height, ENTRIES=entries, COLUMNS=columns,
    )  # fmt: skip
    return out


def entry_products(row: Tensor, col: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """left · right^T at the given rows and columns, `[entries]`."""
    left, right = left.contiguous(), right.contiguous()
    out = left.new_empty(len(row))
    if len(row):
        columns = _power(left.shape[1], 16, 64)
        entries = 2048 // columns
        triton_kernels.entry_kernel[(-(-len(row) // entries),)](
            row, col, left, right, out, len(row), left.shape[1], ENTRIES=entries, COLUMNS=columns
        )
    return out


def grouped_product(x: Tensor, weight: Tensor, segments: Segments) -> Tensor:
    """Each client's rows times that client's matrix (`Segments.matmul`)."""
    inner, outer = weight.shape[1], weight.shape[2]
    out = x.new_empty(segments.rows, outer)
    if out.numel() == 0:
        return out
    client, start, stop = segments.tiles(TILE)
    columns = _power(outer, 16, 64)
    triton_kernels.grouped_kernel[(len(client), -(-outer // columns))](
        x, weight, out, client, start, stop, inner, outer, *weight.stride(),
        PRECISION=precision(), ROWS=TILE, INNER=_power(inner, 16, 32), OUTER=columns,
    )  # fmt: skip
    return out


def grouped_gradient(x: Tensor, grad: Tensor, segments: Segments) -> Tensor:
    """x^T grad of each client's rows, `[clients, inner, outer]`."""
    inner, outer = x.shape[1], grad.shape[1]
    out = x.new_empty(len(segments), inner, outer)
    if out.numel() == 0:
        return out
    height, columns = _power(inner, 16, 32), _power(outer, 16, 32)
    triton_kernels.gradient_kernel[(len(segments), -(-inner // height), -(-outer // columns))](
        x, grad, out, segments.starts, inner, outer,
        PRECISION=precision(), ROWS=TILE, INNER=height, OUTER=columns,
    )  # fmt: skip
    return out


def segment_sum(x: Tensor, segments: Segments) -> Tensor:
    """Sums of the rows of each client, `[rows, width] -> [clients, width]`."""
    x = x.contiguous()
    width = x.shape[1]
    out = x.new_empty(len(segments), width)
    if out.numel() == 0:
        return out
    columns = _power(width, 1, 32)
    triton_kernels.sum_kernel[(len(segments), -(-width // columns))](
        x, out, segments.starts, width, ROWS=max(2048 // columns, 16), COLUMNS=columns
    )
    return out


def dropout(
    x: Tensor,
    threshold: int,
    scale: float,
    places: tuple[Tensor, Tensor],
    words: Tensor,
    moment: tuple[Tensor, int],
) -> Tensor:
    """`x`, zero where an entry's hash is below the threshold, else scaled; differentiable."""
    dropped: Tensor = _Dropout.apply(x, threshold, scale, places, words, moment)  # type: ignore[no-untyped-call]
    return dropped


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *how: Any) -> Tensor:
        ctx.how = how
        return _drop(x, *how)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _drop(grad, *ctx.how), None, None, None, None, None


def _drop(
    x: Tensor,
    threshold: int,
    scale: float,
    places: tuple[Tensor, Tensor],
    words: Tensor,
    moment: tuple[Tensor, int],
) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    count = x.numel()
    if count:
        block = 1024
        triton_kernels.dropout_kernel[(-(-count // block),)](
            x, out, *places, words, *moment, count, count // len(x), threshold, scale, BLOCK=block
        )
    return out


def precision() -> str:
    """How float32 products are computed: exactly, or in TF32 where torch is told so."""
    allowed = torch.get_float32_matmul_precision() != "highest"
    return "tf32" if allowed else "ieee"
