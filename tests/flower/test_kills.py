"""A few random kills of a federation's processes; `kills.py` does as many as one likes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")

from flower.kills import KINDS, Federation, run_kills, same_weights


@pytest.mark.deploy
@pytest.mark.long
@pytest.mark.xdist_group("deploy")
def test_kills_leave_no_trace_in_the_weights(tmp_path: Path) -> None:
    text, well = run_kills(tmp_path, kills=len(KINDS), seed=3, rounds=6, command="as a test")
    print(text)
    assert well, text


def test_other_weights_are_noticed(tmp_path: Path) -> None:
    """The comparison is to the bit."""
    ours = {"a": torch.tensor([1.0, 2.0])}
    assert same_weights(ours, {"a": torch.tensor([1.0, 2.0])})
    assert not same_weights(ours, {"a": torch.tensor([1.0, 2.0 + 2**-22])})
    assert not same_weights(ours, {})


def test_a_traceback_in_any_log_is_noticed(tmp_path: Path) -> None:
    own = Federation.__new__(Federation)
    own.place = tmp_path
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "some.log").write_text("all is well\nTraceback (most recent call last)")
    (tmp_path / "client-0.log").write_text("round 1\n")
    assert own.tracebacks() == ["some.log"]
