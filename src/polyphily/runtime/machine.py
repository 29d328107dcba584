"""The machine that a run is on: devices, threads, precision, memory, versions."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import torch

from polyphily.errors import OutOfMemory, UserError, unknown

DEVICES = ("cpu", "cuda")
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # the numbers of these options in glibc's malloc.h
_PIECE, HELD = 1 << 27, 1 << 29  # bytes: tensors that are reused, and free memory that is held
_CACHES = tuple(1 << power for power in range(20, 27))  # bytes: sizes that a cache may have
_IN_CACHE = 1.5  # how much faster per byte a pass over numbers in the cache is at least

_sharing = 1  # processes that share the memory of a device


def check_device(device: str) -> None:
    """Raise a `UserError` for a device that does not exist here."""
    kind, _, number = device.partition(":")
    if kind not in DEVICES or not (number or "0").isdecimal():
        raise unknown("device", device, DEVICES)
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        found = torch.cuda.device_count() or "no"
        raise UserError(f"--device {device}: {found} CUDA device is there; use --device cpu")


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Set torch's number of threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Set the precision of float32 matrix products for a while."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def share_memory(processes: int) -> None:
    """Say that this process is one of several that begin with the same free memory."""
    global _sharing
    _sharing = processes


def free_memory(device: torch.device) -> int:
    """Return the free bytes of a device; `sys.maxsize` if the system does not tell.

    If several processes share them (`share_memory`), it is the share of one.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // _sharing
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        (free,) = [line.split()[1] for line in lines if line.startswith("MemAvailable")]
        return 1024 * int(free) // _sharing
    except (OSError, ValueError):
        return sys.maxsize


@cache
def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory for the next tensors; return whether it does.

    A round allocates and frees tensors of several megabytes again and again. By default glibc hands
    them back to the system, which then clears every page anew: up to half of a round's time. With
    this, pieces of up to 128 MB stay with the process, and up to 512 MB in all. Environment
    variables that configure malloc have priority.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library has no such function
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _PIECE) and mallopt(_TRIM_THRESHOLD, HELD))


@cache
def cache_size() -> int:
    """Measure how many bytes a core can work on in its caches; takes a tenth of a second, once.

    It is the largest size whose bytes are read and written clearly faster than those of the
    largest size tried. If all sizes are alike, it is the largest.
    """
    numbers = torch.ones(_CACHES[-1] // 4)
    with threads(1):
        return chosen_size({size: _seconds_per_byte(numbers[: size // 4]) for size in _CACHES})


def chosen_size(seconds: Mapping[int, float]) -> int:
    """Return the largest size that is fast, from the seconds per byte of each size.

    >>> chosen_size({1: 1.0, 2: 1.1, 4: 2.0, 8: 4.0}), chosen_size({1: 1.0, 2: 1.1, 4: 1.2})
    (4, 4)
    """
    largest = max(seconds)
    fast = [size for size, each in seconds.items() if _IN_CACHE * each <= seconds[largest]]
    return max(fast, default=largest)


def _seconds_per_byte(numbers: torch.Tensor) -> float:
    """Return the least time per byte of passes over the numbers."""
    passes = max(1, (1 << 24) // numbers.nbytes)
    found = []
    for _ in range(4):  # the first one brings the numbers into the cache
        began = time.perf_counter()
        for _ in range(passes):
            numbers.mul_(1)
        found.append(time.perf_counter() - began)
    return min(found) / (passes * numbers.nbytes)


# Words of CUDA, of its libraries, and of torch about a CPU's memory, in errors of other kinds.
_NO_MEMORY = ("out of memory", "ALLOC_FAILED", "can't allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that there is no memory left, on a device or the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError | OutOfMemory):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


def release_memory() -> None:
    """Give back what finished runs held on the devices.

    A run and its recorded rounds refer to each other, so that its tensors and CUDA graphs stay
    until the garbage collector finds them, which can be many runs later.
    """
    gc.collect()
    if torch.cuda.is_available():
        # Workspaces of matrix products last as long as the process. Each lies within a larger piece
        # of memory, often that of a recorded round, which could not be given back.
        getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()
        torch.cuda.empty_cache()  # leave the memory to other processes


def peak_memory_mb() -> float:
    """Return the largest resident size of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1024 if sys.platform != "darwin" else peak / 1024**2


def versions() -> dict[str, str]:
    """Return the versions and resources that results may depend on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "threads": str(torch.get_num_threads()),
        "cpus": str(os.cpu_count()),
    }
