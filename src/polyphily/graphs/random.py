"""Random numbers for partitions, splits and synthetic graphs: one stream per seed and purpose.

No stream equals `numpy.random.default_rng(seed)`. Some published data were drawn with it: the mines
of Minesweeper are `default_rng(0).permutation(10000)[:2000]`. A split drawn in the same way would
equal the labels.
"""

from __future__ import annotations

import zlib

import numpy as np

from polyphily.errors import UserError

_CONSTANT = 0x706F6C797068696C79  # "polyphily" in ASCII


def _sequence(seed: int, purpose: str) -> np.random.SeedSequence:
    if seed < 0:
        raise UserError(f"a seed must be 0 or more, got {seed}")
    return np.random.SeedSequence([_CONSTANT, zlib.crc32(purpose.encode()), seed])


def generator(seed: int, purpose: str) -> np.random.Generator:
    """Return the generator of a seed and a purpose. Different pairs give independent streams.

    >>> draws = [generator(0, purpose).random() for purpose in ("split", "split", "partition")]
    >>> draws[0] == draws[1], draws[0] == draws[2]
    (True, False)
    """
    return np.random.Generator(np.random.PCG64(_sequence(seed, purpose)))


def derive(seed: int, purpose: str) -> int:
    """Return a whole number below 2**63 from seed and purpose, as a seed for other libraries."""
    return int(_sequence(seed, purpose).generate_state(1, np.uint64)[0]) >> 1
