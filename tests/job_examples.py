"""Work for jobs in other processes, which cannot import a test module."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from polyphily.errors import UserError
from polyphily.runtime import machine


def square(number: int) -> int:
    return number**2


def mistake() -> int:
    raise UserError("there is no such thing")


def bug() -> int:
    return 1 // 0


def die() -> int:
    os._exit(7)


def sole_user(folder: Path, number: int) -> int:
    """Fail for lack of memory whenever another job of the folder is running."""
    mine = folder / f"job-{number}"
    mine.touch()
    try:
        time.sleep(0.3)
        if len(list(folder.glob("job-*"))) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return number
    finally:
        mine.unlink()


def sharing() -> int:
    """Return the number of processes that share the memory."""
    return machine._sharing
