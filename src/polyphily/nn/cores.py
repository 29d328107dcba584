"""The host's cores, for small problems that a GPU solves one after the other, and slowly."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")


def count() -> int:
    return os.cpu_count() or 1


def each(work: Callable[[S], T], items: Iterable[S]) -> list[T]:
    """`work` on every item, in the items' order; it should leave the interpreter free (LAPACK)."""
    return list(_pool().map(work, items))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count())
