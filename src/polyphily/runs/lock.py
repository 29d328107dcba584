"""A lock on a file that tells other processes whether a run is going on.

The operating system releases it when the process ends, however it ends. There is no such lock on
Windows and on some network file systems; whether a run goes on is then unknown.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

if sys.platform != "win32":
    import fcntl


@contextmanager
def held(file: Path) -> Iterator[None]:
    """Hold the lock inside the block. Without locks, or in a read-only folder, do nothing."""
    if sys.platform == "win32":
        yield
        return
    try:
        stream = file.open("a")
    except OSError:
        yield
        return
    with stream:
        with suppress(OSError):
            fcntl.flock(stream, fcntl.LOCK_SH)
        yield


def is_held(file: Path) -> bool | None:
    """Return whether some process holds the lock; None if that cannot be known."""
    if sys.platform == "win32":
        return None
    try:
        with file.open() as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False
    except FileNotFoundError:
        return False
    except OSError:
        return None
