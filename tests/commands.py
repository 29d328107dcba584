"""The command line, run in this process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from polyphily.cli import main


@dataclass
class Answer:
    """The exit status and the output of a command."""

    status: int
    out: str
    err: str

    def json(self) -> dict[str, Any]:
        assert self.status == 0, self.err
        found: dict[str, Any] = json.loads(self.out)
        return found


Cli = Callable[..., Answer]


def caller(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Cli:
    """Return a function that runs `polyphily` with some arguments, in a folder."""
    monkeypatch.chdir(folder)
    monkeypatch.delenv("POLYPHILY_DEBUG", raising=False)

    def call(*arguments: str | Path) -> Answer:
        monkeypatch.setattr(sys, "argv", ["polyphily", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main()
        printed = capsys.readouterr()
        return Answer(int(caught.value.code or 0), printed.out, printed.err)

    return call
