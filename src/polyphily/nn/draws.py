"""Random draws that belong to a client, so that who else trains beside it changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

_DOMAIN = 0x706F6C79  # keeps these streams apart from every other use of the same seeds
_LEVELS = 1 << 16


class Draws:
    """The dropout masks of one round.

    On a CPU every client draws from a stream of its own, named by (seed, client, round): the
    stacked engine, the sequential engine and a site that trains alone draw the same numbers. On a
    GPU one stream serves the clients of a seed: a launch per client would cost more than the draw.

    Args:
        keys: (seed, client) of every client, in the cohort's order.
        round_index: the round the draws are for.
        device: where the masks are wanted.
    """

    def __init__(
        self, keys: Sequence[tuple[int, int]], round_index: int, device: torch.device
    ) -> None:
        self.device = device
        if device.type == "cpu":
            self._members = [1] * len(keys)
            self._streams = [
                np.random.SFC64(np.random.SeedSequence((_DOMAIN, seed, client, round_index)))
                for seed, client in keys
            ]
            return
        runs = [(seed, len(list(run))) for seed, run in groupby(seed for seed, _ in keys)]
        self._members = [length for _, length in runs]
        self._generators = [torch.Generator(device) for _ in runs]
        for generator, (seed, _) in zip(self._generators, runs, strict=True):
            entropy = np.random.SeedSequence((_DOMAIN, seed, round_index)).generate_state(
                1, np.uint64
            )
            generator.manual_seed(int(entropy[0] >> np.uint64(1)))

    def dropout(self, x: Tensor, p: float, pointers: Sequence[int]) -> Tensor:
        """Zeroes entries with probability `p` and scales the rest by 1/(1-p).

        Args:
            x: `[rows, …]`.
            p: to the nearest 1/65536.
            pointers: client `k` owns rows `pointers[k]` to `pointers[k + 1]`.
        """
        return x * self._mask(x, p, pointers) if p > 0 else x

    def _mask(self, x: Tensor, p: float, pointers: Sequence[int]) -> Tensor:
        width = x[0].numel() if len(x) else 0
        threshold = round(p * _LEVELS)
        scale = _LEVELS / (_LEVELS - threshold)
        bounds = [pointers[i] for i in np.cumsum([0, *self._members])]
        if self.device.type == "cpu":
            noise = np.empty(len(x) * width, dtype=np.uint16)
            for stream, start, stop in zip(self._streams, bounds, bounds[1:], strict=False):
                count = (stop - start) * width
                raw = stream.random_raw(-(-count // 4)).view(np.uint16)
                noise[start * width : stop * width] = raw[:count]
            kept = torch.from_numpy((noise >= threshold).view(np.uint8))
        else:
            levels = torch.empty(len(x), width, device=self.device)
            for generator, start, stop in zip(self._generators, bounds, bounds[1:], strict=False):
                levels[start:stop].uniform_(generator=generator)
            kept = levels >= threshold / _LEVELS
        return kept.view(x.shape).to(x.dtype).mul_(scale)
