"""The server's checkpoints: three are kept, and a run goes on from the last good one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flower.federations import Wires, coordinate, federation, plan_for, sites_of
from polyphily.errors import UserError
from polyphily.flower.checkpoint import ServerCheckpoint
from polyphily.flower.joining import EVENTS
from polyphily.flower.wire import ROUND, Parcel
from polyphily.runs.folder import RunFolder

ROUNDS = 5


class Cut(Exception):
    """The server is killed."""


def cut_at(number: int) -> Callable[[str, Parcel, Parcel], Parcel]:
    def twist(name: str, asked: Parcel, reply: Parcel) -> Parcel:
        if asked.facts["kind"] == ROUND and asked.facts["round"] == number:
            raise Cut
        return reply

    return twist


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def empty(file: Path) -> None:
    os.truncate(file, 0)


def flip(file: Path) -> None:
    """Change one bit of a weight: still a valid file."""
    content = bytearray(file.read_bytes())
    content[-40] ^= 1
    file.write_bytes(content)


def forge(file: Path) -> None:
    """Change the round in the header."""
    content = file.read_bytes()
    file.write_bytes(content.replace(b'\\"round\\": 4', b'\\"round\\": 3'))


def files_of(folder: Path) -> list[Path]:
    names = ("state", "state-1", "state-2")
    return [folder / "checkpoint" / f"{name}.safetensors" for name in names]


def test_the_last_three_are_kept(tmp_path: Path) -> None:
    data = federation()
    wires = Wires(sites_of(data, tmp_path), cut_at(5))
    with pytest.raises(Cut):
        coordinate(plan_for(data, "fedavg", rounds=ROUNDS), wires, tmp_path / "run").go()
    assert sorted((tmp_path / "run" / "checkpoint").iterdir()) == sorted(files_of(tmp_path / "run"))
    assert [ServerCheckpoint._read(file).round for file in files_of(tmp_path / "run")] == [4, 3, 2]


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
@pytest.mark.parametrize("damage", [truncate, empty, flip, forge])
@pytest.mark.parametrize("count", [1, 2])
def test_resume_goes_back_to_the_last_good_one_and_says_so(
    method: str, damage: Callable[[Path], None], count: int, tmp_path: Path
) -> None:
    data = federation()
    plan = plan_for(data, method, rounds=ROUNDS)
    cut = Wires(sites_of(data, tmp_path / "cut"), cut_at(5))
    with pytest.raises(Cut):
        coordinate(plan, cut, tmp_path / "cut" / "run", 3).go()
    for file in files_of(tmp_path / "cut" / "run")[:count]:
        if damage is not forge or file.name == "state.safetensors":
            damage(file)
        else:
            flip(file)
    resumed = coordinate(plan, Wires(sites_of(data, tmp_path / "cut")), tmp_path / "cut" / "run", 3)
    summary = resumed.go()
    lines = (tmp_path / "cut" / "run" / EVENTS).read_text().splitlines()
    notes = [e["text"] for e in map(json.loads, lines) if e["event"] == "note"]
    assert sum("a checkpoint cannot be used: state" in note for note in notes) == count
    assert notes[-1] == f"going back to the checkpoint of round {4 - count}"
    assert not any("no memory" in note for note in notes)  # the sites kept theirs
    whole = coordinate(plan, Wires(sites_of(data, tmp_path / "b")), tmp_path / "b" / "run", 3)
    assert whole.go()["final"] == summary["final"]
    assert len(RunFolder(tmp_path / "cut" / "run").records()) == ROUNDS
    for name, value in whole.server.state.items():
        assert torch.equal(value, resumed.server.state[name])


def test_without_a_good_checkpoint_the_run_does_not_begin_anew(tmp_path: Path) -> None:
    data = federation()
    plan = plan_for(data, "fedavg", rounds=ROUNDS)
    with pytest.raises(Cut):
        coordinate(plan, Wires(sites_of(data, tmp_path), cut_at(5)), tmp_path / "run").go()
    for file in files_of(tmp_path / "run"):
        truncate(file)
    with pytest.raises(UserError, match=r"no checkpoint .* can be used .*start a new run"):
        coordinate(plan, Wires(sites_of(data, tmp_path)), tmp_path / "run").go()


def test_a_checkpoint_is_on_the_disk_before_it_replaces_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    real = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        steps.append("sync " + Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real[0](descriptor)

    def replace(source: Path, target: Path) -> None:
        steps.append(f"replace {Path(target).name}")
        real[1](source, target)

    folder = RunFolder(tmp_path)
    checkpoint = ServerCheckpoint(1, {"w": torch.ones(3)}, {}, {"a": 1}, [], None)
    checkpoint.save(folder)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    checkpoint.save(folder)
    assert steps == [
        "replace state-1.safetensors",
        "sync state.partial",
        "replace state.safetensors",
        "sync checkpoint",
    ]
