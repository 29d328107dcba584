"""Threads on the host, for many small problems that a GPU would solve one after the other."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")


def count() -> int:
    """Return the number of CPU cores."""
    return os.cpu_count() or 1


def each(work: Callable[[S], T], items: Iterable[S]) -> list[T]:
    """Return `work` of every item, in order; it should release the GIL, as LAPACK does."""
    return list(_pool().map(work, items))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count())
