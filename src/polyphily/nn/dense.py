"""Products of tall dense matrices on a CPU."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

TALL, WIDE = 512, 64  # rows of a client, and the larger width, from which oneDNN is faster


@cache
def _linear() -> Any:
    """Return oneDNN's product of dense matrices, or None if it does not pay.

    torch computes float32 products on x86 by MKL, which uses AVX-512 on Intel's processors only.
    oneDNN, a part of torch, uses it on all of them and is twice as fast where MKL does not.
    """
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return None
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def pays(x: Tensor, inputs: int, outputs: int) -> bool:
    """Return whether oneDNN is faster for products of a client's rows.

    Args:
        x: rows of several clients, `[clients, rows, inputs]`.
        inputs: the width of the rows.
        outputs: the width of what they are multiplied with or to.
    """
    large = min(inputs, outputs) > 1 and max(inputs, outputs) >= WIDE and x.shape[1] >= TALL
    return large and x.is_cpu and x.dtype == torch.float32 and _linear() is not None


def product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x · weight by oneDNN, without gradient."""
    found: Tensor = _linear()(_plain(x), _plain(weight.t()), None, "none", [], "")
    return found


def _plain(x: Tensor) -> Tensor:
    """Return a matrix whose rows or columns follow each other; others take oneDNN very long."""
    return x if x.is_contiguous() or x.t().is_contiguous() else x.contiguous()


def gradient(x: Tensor, grad: Tensor) -> Tensor:
    """Return xᵀ · grad by oneDNN, without gradient; its rows are the narrower side."""
    if x.shape[1] <= grad.shape[1]:
        return product(x.t(), grad)
    return product(grad.t(), x).t()
