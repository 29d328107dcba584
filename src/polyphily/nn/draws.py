"""Random numbers of each client, which do not depend on the other clients in a process."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from polyphily.nn import kernels

_DOMAIN = 0x706F6C79  # keeps these streams apart from every other use of the same seeds
_LEVELS = 1 << 16
_KEPT = 64  # layouts of rows that are cached: every sampled batch has a new one


class Streams:
    """The random streams of some clients, for every round.

    On a CPU a client's stream is a generator seeded by (seed, client, round). On a GPU every number
    is a hash of (seed, client, round, call, place). That takes one pass for all clients, no state
    and no work on the host. On devices of one kind, the stacked engine, the sequential engine and a
    site that trains alone draw the same numbers.

    Args:
        keys: (seed, client) of every client, in the order of their rows.
        device: where the numbers are used.
        hashed: whether numbers are hashes; by default if the device is not a CPU.
    """

    def __init__(
        self, keys: Sequence[tuple[int, int]], device: torch.device, hashed: bool | None = None
    ) -> None:
        self.keys, self.device = tuple(keys), device
        self.hashed = device.type != "cpu" if hashed is None else hashed
        self._places: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        if self.hashed:
            words = [
                np.random.SeedSequence((_DOMAIN, *key)).generate_state(2, np.uint32)
                for key in self.keys
            ]
            self.words = torch.from_numpy(np.array(words).view(np.int32)).to(device)

    def of_round(self, round_index: int | Tensor) -> Draws:
        """Return the draws of a round; its number may be a tensor on the device."""
        if self.hashed:
            return HashedDraws(self, round_index)
        return SequentialDraws(self.keys, int(round_index))

    def places(self, pointers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the owner of every row, and the row's number among those of its owner."""
        key = tuple(pointers)
        if key not in self._places:
            sizes = np.diff(key)
            owner = np.repeat(np.arange(len(sizes)), sizes)
            place = np.arange(key[-1]) - np.repeat(key[:-1], sizes)
            if len(self._places) == _KEPT:  # drop the oldest
                del self._places[next(iter(self._places))]
            self._places[key] = (
                torch.from_numpy(owner).to(self.device),
                torch.from_numpy(place.astype(np.int32)).to(self.device),
            )
        return self._places[key]


def _level(p: float) -> tuple[int, float]:
    """Return the threshold below which an entry is dropped, and the scale of the others."""
    threshold = round(p * _LEVELS)
    return threshold, _LEVELS / (_LEVELS - threshold)


class Draws:
    """The random numbers of one round; each call advances every client's stream."""

    def dropout(self, x: Tensor, p: float, pointers: Sequence[int]) -> Tensor:
        """Zero entries with probability `p` and scale the others by 1/(1-p).

        Args:
            x: `[rows, …]`.
            p: a probability, rounded to a multiple of 1/65536.
            pointers: client `k` owns rows `pointers[k]` to `pointers[k + 1]`.
        """
        return x if p <= 0 else self._drop(x, *_level(p), pointers)

    def activate(self, x: Tensor, p: float, pointers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return ReLU(x), and the same after dropout."""
        rectified = x.relu()
        return rectified, self.dropout(rectified, p, pointers)

    def _drop(self, x: Tensor, threshold: int, scale: float, pointers: Sequence[int]) -> Tensor:
        width = x[0].numel() if len(x) else 0
        kept = self.at_least(threshold, width, pointers)
        return x * kept.view(x.shape).to(x.dtype).mul_(scale)

    def at_least(self, threshold: int, width: int, pointers: Sequence[int]) -> Tensor:
        """Return whether integers drawn from 0 to 65535 reach a threshold, `[rows, width]`."""
        raise NotImplementedError

    def uniform(self, width: int, pointers: Sequence[int]) -> Tensor:
        """Draw multiples of 2^-32 in [0, 1), `[rows, width]` in float64."""
        raise NotImplementedError


class SequentialDraws(Draws):
    """Draws from one generator per client."""

    def __init__(self, keys: Sequence[tuple[int, int]], round_index: int) -> None:
        self._streams = [
            np.random.SFC64(np.random.SeedSequence((_DOMAIN, seed, client, round_index)))
            for seed, client in keys
        ]

    def at_least(self, threshold: int, width: int, pointers: Sequence[int]) -> Tensor:
        return torch.from_numpy(self._words(np.uint16, width, pointers) >= threshold)

    def uniform(self, width: int, pointers: Sequence[int]) -> Tensor:
        return torch.from_numpy(self._words(np.uint32, width, pointers) / 2.0**32)

    def _words(
        self, kind: type[np.unsignedinteger[Any]], width: int, pointers: Sequence[int]
    ) -> npt.NDArray[Any]:
        """Draw unsigned integers of a type, `[rows, width]`."""
        noise = np.empty(pointers[-1] * width, dtype=kind)
        each = 8 // noise.itemsize
        for stream, (start, stop) in zip(self._streams, pairwise(pointers), strict=True):
            count = (stop - start) * width
            raw = stream.random_raw(-(-count // each)).view(kind)
            noise[start * width : stop * width] = raw[:count]
        return noise.reshape(-1, width) if width else noise.reshape(pointers[-1], 0)


class HashedDraws(Draws):
    """Draws in which every number is a hash."""

    def __init__(self, streams: Streams, round_index: int | Tensor) -> None:
        self._streams, self._calls = streams, 0
        if isinstance(round_index, int):
            round_index = torch.full((), round_index, device=streams.device)
        self._round = round_index.int()

    def _drop(self, x: Tensor, threshold: int, scale: float, pointers: Sequence[int]) -> Tensor:
        if not kernels.available(x):
            return super()._drop(x, threshold, scale, pointers)
        self._calls += 1
        hashes = kernels.Hashes(self._streams.words, self._round, self._calls, threshold, scale)
        return kernels.dropout(x, self._streams.places(pointers), hashes)

    def activate(self, x: Tensor, p: float, pointers: Sequence[int]) -> tuple[Tensor, Tensor]:
        if not kernels.available(x) or (hashes := self.hashes(p, 1)) is None:
            return super().activate(x, p, pointers)
        return kernels.activation(x, self._streams.places(pointers), hashes)

    def hashes(self, p: float, calls: int) -> kernels.Hashes | None:
        """Return what decides in the next calls of `dropout`, and skip them; None if p is zero."""
        if p <= 0:
            return None
        call = self._calls + 1
        self._calls += calls
        return kernels.Hashes(self._streams.words, self._round, call, *_level(p))

    def at_least(self, threshold: int, width: int, pointers: Sequence[int]) -> Tensor:
        return shifted(self._words(width, pointers), 16) >= threshold

    def uniform(self, width: int, pointers: Sequence[int]) -> Tensor:
        return self._words(width, pointers).double() / 2.0**32 + 0.5

    def _words(self, width: int, pointers: Sequence[int]) -> Tensor:
        """Return signed 32-bit hashes, `[rows, width]`."""
        owner, place = self._streams.places(pointers)
        self._calls += 1
        time = scrambled(self._round * _ODD + self._calls)
        first, second = scrambled(self._streams.words ^ time).unbind(dim=1)
        column = torch.arange(width, device=owner.device, dtype=torch.int32)
        number = place.unsqueeze(1) * width + column
        number = scrambled(number + first[owner].unsqueeze(1))
        return scrambled(number ^ second[owner].unsqueeze(1))


_ODD = -1640531527  # 2^32 over the golden ratio, as a signed number


def scrambled(x: Tensor) -> Tensor:
    """Hash 32-bit words by a bijection: each input bit changes about half of the output bits.

    This is the finaliser of MurmurHash3 with the constants of Wellons' lowbias32.
    """
    x = (x ^ shifted(x, 16)) * 0x7FEB352D
    x = (x ^ shifted(x, 15)) * -2073254261  # 0x846CA68B
    return x ^ shifted(x, 16)


def shifted(x: Tensor, bits: int) -> Tensor:
    """Shift signed 32-bit words to the right, filling with zeros."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)
