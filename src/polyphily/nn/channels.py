"""The mixture of ACM's channels for large clients on a CPU, in blocks that fit the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from polyphily.nn.segments import Segments

CACHED = 1 << 17  # numbers of a message in a block, few enough for the cache
LARGE = 1024  # mean number of nodes of a client from which blocks pay

_pass_positive = torch.ops.aten.threshold_backward.grad_input  # of a ReLU, in one pass


def pays(x: Tensor, segments: Segments) -> bool:
    """Return whether to mix in blocks: on a CPU, for clients with many nodes."""
    return x.is_cpu and x.dtype.itemsize >= 4 and segments.rows >= LARGE * max(len(segments), 1)


def mixed_in_blocks(
    own: Tensor,
    pair: Tensor,
    near: Tensor,
    scales: Tensor | None,
    attend: Tensor,
    mix: Tensor,
    segments: Segments,
) -> Tensor:
    """Compute `layers.mixed_channels`; channels are computed again in the backward pass."""
    mixed: Tensor = _Mixed.apply(own, pair, near, scales, attend, mix, segments)  # type: ignore[no-untyped-call]
    return mixed


def _blocks(segments: Segments, width: int) -> Iterator[tuple[int, slice]]:
    """Yield blocks of nodes, each of one client, as (client, nodes)."""
    size = max(1, CACHED // max(width, 1))
    for client, (start, stop) in enumerate(pairwise(segments.pointers)):
        for first in range(start, stop, size):
            yield client, slice(first, min(first + size, stop))


def _channels(
    own: Tensor, pair: Tensor, near: Tensor, scales: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return L, H and M of some nodes."""
    (low, high), (near_low, near_high) = pair.chunk(2, dim=1), near.chunk(2, dim=1)
    if scales is None:
        return near_low.relu(), (high - near_high).relu_(), own.relu()
    by, times = scales.chunk(2, dim=1)
    return (
        (low + near_low).mul_(by).relu_(),
        (high * times).addcmul_(near_high, by, value=-1).relu_(),
        own.relu(),
    )


def _weights(channels: Sequence[Tensor], attend: Tensor, mix: Tensor) -> tuple[Tensor, Tensor]:
    """Return sigmoid(scores) and the softmax of what they are mixed to, `[3, nodes]` each."""
    bounded = channels[0].new_empty(3, len(channels[0]))
    for found, channel, vector in zip(bounded, channels, attend.unbind(1), strict=True):
        torch.mv(channel, vector, out=found)
    return bounded.sigmoid_(), torch.mm(mix.T, bounded).div_(3).softmax(dim=0)


class _Mixed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        own: Tensor,
        pair: Tensor,
        near: Tensor,
        scales: Tensor | None,
        attend: Tensor,
        mix: Tensor,
        segments: Segments,
    ) -> Tensor:
        ctx.segments = segments
        out, both = own.new_empty(own.shape), own.new_empty(2, 3, len(own))
        for client, rows in _blocks(segments, own.shape[1]):
            scale = None if scales is None else scales[rows]
            channels = _channels(own[rows], pair[rows], near[rows], scale)
            bounded, share = _weights(channels, attend[client], mix[client])
            both[0, :, rows], both[1, :, rows] = bounded, share
            first, second, third = share.mul_(3).unsqueeze(2)
            found = torch.mul(channels[0], first, out=out[rows])
            found.addcmul_(channels[1], second).addcmul_(channels[2], third)
        ctx.save_for_backward(own, pair, near, scales, attend, mix, both)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        own, pair, near, scales, attend, mix, both = ctx.saved_tensors
        width, needed = own.shape[1], ctx.needs_input_grad
        to_own, to_pair, to_near = (x.new_empty(x.shape) for x in (own, pair, near))
        to_attend, to_mix = torch.zeros_like(attend), torch.zeros_like(mix)
        for client, rows in _blocks(ctx.segments, width):
            scale = None if scales is None else scales[rows]
            channels = _channels(own[rows], pair[rows], near[rows], scale)
            bounded, share = both[0, :, rows], both[1, :, rows]
            above = grad[rows]
            to_share = torch.stack([(above * channel).sum(dim=1) for channel in channels])
            to_share.mul_(share).mul_(3)  # of the softmax, whose weights are three times it
            to_mixed = to_share.addcmul_(share, to_share.sum(dim=0), value=-1).div_(3)
            to_scores = torch.mm(mix[client], to_mixed).mul_(bounded).mul_(1 - bounded)
            weights = 3 * share
            if needed[5]:
                to_mix[client] += torch.mm(bounded, to_mixed.T)
            if needed[4]:
                for n, channel in enumerate(channels):
                    to_attend[client, :, n] += torch.mv(channel.T, to_scores[n])
            vectors = attend[client].T.contiguous()
            below, beside = to_pair[rows], to_near[rows]
            places = (beside[:, :width], beside[:, width:], to_own[rows])
            if scale is not None:  # of L; H has two
                weights[0].mul_(scale[:, 0])
                to_scores[0].mul_(scale[:, 0])
            for n, (channel, place) in enumerate(zip(channels, places, strict=True)):
                if n < 2 or needed[0]:  # the gradient of each channel before its ReLU
                    torch.mul(above, weights[n].unsqueeze(1), out=place)
                    place.addcmul_(to_scores[n].unsqueeze(1), vectors[n])
                    _pass_positive(place, channel, 0, grad_input=place)
            low, high, _ = places
            if scale is None:
                below[:, :width], below[:, width:] = 0, high
                high.neg_()
                continue
            if needed[1]:
                below[:, :width] = low
                torch.mul(high, scale[:, 1:], out=below[:, width:])
            high.mul_(-scale[:, :1])
        return to_own, to_pair, to_near, None, to_attend, to_mix, None
