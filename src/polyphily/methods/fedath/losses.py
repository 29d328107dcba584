"""Losses of FedATH: the HSIC of two outputs, and the negative entropy of predictions."""

from __future__ import annotations

from torch import Tensor

from polyphily.nn.segments import Segments


def hsic(one: Tensor, two: Tensor, segments: Segments, scale: str) -> Tensor:
    """Compute the HSIC of each client's rows with linear kernels, Eqs. 10 and 11.

    Tr(K_1 C K_2 C) = ||(C H_1)^T (C H_2)||_F^2, where C H is H minus its column means.
    Eq. 11 prints the factor of Eq. 10, (N-1)^-2, without its minus sign.

    Args:
        one: H_1, `[N, C]`.
        two: H_2, `[N, C]`.
        segments: the nodes of each client.
        scale: what the trace is divided by: "pairs", "nodes" or "alignment".
    """
    one, two = (h - segments.expand(segments.mean(h)) for h in (one, two))
    trace = cross_square(one, two, segments)
    if scale == "alignment":
        norms = cross_square(one, one, segments) * cross_square(two, two, segments)
        return trace / norms.clamp(min=1e-12).sqrt()
    sizes = segments.counts.to(one.dtype)
    return trace / ((sizes - 1).clamp(min=1).square() if scale == "pairs" else sizes)


def cross_square(a: Tensor, b: Tensor, segments: Segments) -> Tensor:
    """Compute ||a^T b||_F^2 of each client's rows in O(n C^2) time, without an n × n matrix."""
    return segments.cross(a, b).square().sum(dim=(1, 2))


def negative_entropy(logits: Tensor, segments: Segments, form: str) -> Tensor:
    """Compute the negative entropy of each client's predictions, Eq. 9.

    Eq. 9 prints the logarithm without the probability before it ("printed", "printed-sum"). That is
    the cross-entropy to the uniform distribution and has the same minimum.
    """
    log = logits.log_softmax(dim=1)
    values = -log.sum(dim=1) if form.startswith("printed") else (log.exp() * log).sum(dim=1)
    return segments.sum(values) if form.endswith("sum") else segments.mean(values)
