"""Run folders that tests of reports read: made by the command line, small."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from polyphily.cli import main

DATA = ["--dataset", "csbm:nodes=60,features=8,gap=0.6", "--clients", "3", "--hidden", "8"]


def call(*arguments: str | Path) -> int:
    """Runs a command line in this process; its exit status."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["polyphily", *map(str, arguments)])
        patch.delenv("POLYPHILY_DEBUG", raising=False)
        with pytest.raises(SystemExit) as caught:
            main()
    return int(caught.value.code or 0)


def compared(folder: Path, *methods: str, seeds: str = "0,1", rounds: int = 4) -> Path:
    """A comparison of methods."""
    given = [*DATA, "--seeds", seeds, "--rounds", rounds, "--out", folder]
    assert call("compare", *methods, *map(str, given)) == 0
    return folder
