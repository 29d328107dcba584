"""`--jobs`: runs in several processes are the runs they would be in one."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import caller
from polyphily.runs.folder import RunFolder

DATA = ["--dataset", "csbm:nodes=40,features=6", "--clients", "2", "--rounds", "2"]


def weights(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (folder / "models").glob("*.safetensors")}


def test_a_sweep_in_two_processes_is_the_sweep_in_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call = caller(tmp_path, monkeypatch, capsys)
    grid = ["sweep", "fedprox", "--vary", "mu=0.1,1", "--vary", "lr=0.01,0.1", *DATA]
    assert call(*grid, "--out", "one").status == 0
    two = call(*grid, "--out", "two", "--jobs", "2")
    assert two.status == 0
    for line in two.err.splitlines():
        assert "2–" not in line  # nothing was left to this process
    folders = [p.parent.relative_to("one") for p in Path("one").rglob("summary.json")]
    assert len(folders) == 4
    for folder in folders:
        ours, theirs = (RunFolder(Path(out) / folder) for out in ("two", "one"))
        mine, yours = ours.read_summary(), theirs.read_summary()
        assert mine is not None
        assert yours is not None
        assert mine["views"] == yours["views"]
        assert weights(ours.path) == weights(theirs.path)


def test_what_cannot_run_beside_others_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call = caller(tmp_path, monkeypatch, capsys)
    tracked = call("compare", "local", "fedavg", *DATA, "--jobs", "2", "--track", "tensorboard")
    assert tracked.status == 2
    assert "--jobs" in tracked.err
    figure = call("reproduce", "fedspa", "--figure", "2b", "--jobs", "2")
    assert figure.status == 2
    assert "tables of scores" in figure.err
