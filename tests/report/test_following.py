"""Runs that are followed while they go on: states, new lines, summaries so far."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import polyphily
from polyphily.report.following import (
    FINISHED,
    RUNNING,
    SEARCHING,
    STARTING,
    STOPPED,
    Follower,
    Lines,
    headline,
)
from polyphily.report.so_far import run_so_far
from polyphily.runs.folder import METRICS, SUMMARY, RunFolder


def train(out: Path, seeds: tuple[int, ...] = (0,), **options: Any) -> Path:
    data = [polyphily.load("csbm:nodes=60,features=8", clients=3, seed=seed) for seed in seeds]
    polyphily.run("fedavg", data, rounds=4, hidden=8, out=out, **options)
    return out


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """Return a copy of a finished run."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def cut(run: Path, rounds: int) -> Path:
    """Make a run one that has as many rounds behind it and no summary."""
    (run / SUMMARY).unlink()
    RunFolder(run).truncate(rounds)
    return run


def state(folder: Path) -> tuple[str, int, int]:
    [found] = Follower(folder).standings()
    return found.state, found.round, found.rounds


def test_only_whole_new_lines_are_read(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    lines = Lines(file)
    assert lines.look() == []
    file.write_text('{"round": 1}\n{"rou')
    assert lines.look() == [{"round": 1}]
    with file.open("a") as stream:
        stream.write('nd": 2}\n')
    assert lines.look() == [{"round": 1}, {"round": 2}]
    read: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json, "loads", lambda text: read.append(len(text)))
        lines.look()
    assert read == []  # nothing was parsed twice
    os.replace(_written(tmp_path / "new", '{"round": 9}\n{"round": 10}\n{"round": 11}\n'), file)
    assert [line["round"] for line in lines.look()] == [9, 10, 11]
    file.unlink()
    assert lines.look() == []


def _written(file: Path, text: str) -> Path:
    file.write_text(text)
    return file


def test_a_run_has_begun_goes_on_is_stopped_and_is_resumed(run: Path, tmp_path: Path) -> None:
    assert state(run) == (FINISHED, 4, 4)
    cut(run, 2)
    assert state(run) == (STOPPED, 2, 4)
    [standing] = Follower(run).standings()
    assert f"polyphily run --resume {run}" in standing.words
    with RunFolder(run).at_work():
        assert state(run) == (RUNNING, 2, 4)
        cut_off = (run / METRICS).rename(tmp_path / "elsewhere")
        assert state(run) == (STARTING, 0, 4)
        cut_off.rename(run / METRICS)
    assert state(run) == (STOPPED, 2, 4)


def test_a_finished_run_that_is_continued_is_not_finished(run: Path) -> None:
    records = RunFolder(run).records()
    RunFolder(run).amend_config(rounds=8)
    RunFolder(run).append({**records[-1], "round": 5})
    assert state(run)[0] == FINISHED
    with RunFolder(run).at_work():
        assert state(run) == (RUNNING, 5, 8)


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such locks")
def test_a_killed_process_leaves_no_lock(run: Path) -> None:
    cut(run, 1)
    script = f"""
from pathlib import Path
from polyphily.runs.lock import held
with held(Path({str(run)!r}) / "lock"):
    print("held", flush=True)
    input()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout
    assert process.stdout.readline() == b"held\n"
    assert state(run)[0] == RUNNING
    process.kill()
    process.communicate()
    assert state(run)[0] == STOPPED


def test_where_locks_are_unknown_a_silent_run_is_stopped(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(run, 2)
    monkeypatch.setattr(RunFolder, "is_at_work", lambda self: None)
    assert state(run)[0] == RUNNING
    for file in run.iterdir():
        os.utime(file, (0, 0))
    assert state(run)[0] == STOPPED


def test_all_runs_in_a_folder_are_followed_also_new_ones(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polyphily.report.following.SEARCH", 0.0)
    folder = tmp_path / "several"
    follower = Follower(folder)
    assert follower.standings() == []
    assert headline([], folder) == f"waiting for a run in {folder}"
    shutil.copytree(run, folder / "a")
    assert [s.name for s in follower.standings()] == ["a"]
    cut(Path(shutil.copytree(run, folder / "b")), 3)
    (folder / "c").mkdir()
    (folder / "c" / "tuning.jsonl").write_text('{"request": {"trials": 7}}\n{"trial": 0}\n')
    shutil.copytree(run, folder / "a.before-1")  # set aside by another run
    found = {s.name: s for s in follower.standings()}
    assert {name: s.state for name, s in found.items()} == {
        "a": FINISHED,
        "b": STOPPED,
        "c": SEARCHING,
    }
    assert found["c"].words == "searching, 1 of 7 trials"
    assert headline(follower.standings(), folder).startswith("1 of 3 runs finished; ")
    assert [r.finished for r in follower.runs()].count(True) == 1


def test_a_change_changes_the_signature(run: Path) -> None:
    follower = Follower(run)
    before = follower.signature()
    assert follower.signature() == before
    RunFolder(run).append({"round": 5})
    assert follower.signature() != before


@pytest.mark.parametrize("seeds", [(0,), (0, 1)])
def test_the_summary_so_far_is_that_of_the_end(seeds: tuple[int, ...], tmp_path: Path) -> None:
    """After the last round, scores, data and costs equal those of `summary.json`."""
    path = train(tmp_path / "run", seeds)
    summary = RunFolder(path).read_summary()
    found = run_so_far(path, RunFolder(path).records())
    assert summary
    assert found
    assert not found.finished
    for moment in ("final", "last5", "best_val"):
        for split in ("val", "test"):
            own, expected = found.summary[moment][split], summary[moment][split]
            assert own.keys() == expected.keys()
            assert all(own[name] == pytest.approx(expected[name]) for name in expected)
    assert found.summary["best_val"]["round"] == summary["best_val"]["round"]
    same = ["method", "hyperparameters", "dataset", "partition", "split", "classes", "clients"]
    same += ["seeds", "rounds", "epochs", "backbone", "evaluated", "bytes_up_per_round"]
    same += ["bytes_down_per_round", "seconds_per_round_median"]
    assert {n: found.summary[n] for n in same} == {n: summary[n] for n in same}
    assert found.data == type(found).read(path).data  # so that both are compared on one page


def test_before_the_first_scored_round_there_is_no_run(run: Path) -> None:
    assert run_so_far(cut(run, 0), []) is None
