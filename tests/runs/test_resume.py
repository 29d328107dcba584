"""A killed run goes on to the very bytes it would have reached."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import polyphily
from cases import usual_backbone
from polyphily.cli import main
from polyphily.cli.training import read_run, restore
from polyphily.core.method import METHODS, create
from polyphily.runs.folder import RunFolder

ROUNDS = 250
TINY = ["--dataset", "csbm:nodes=60,features=8", "--clients", "4"]
FLAGS = [*TINY, "--backbone", "gcn", "--hidden", "8", "--epochs", "1", "--rounds", str(ROUNDS)]
UNEVEN = ["--participation", "0.6", "--failures", "0.3", "--keep-optimizer", "--epochs", "1-3"]

Cli = Callable[..., int]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs a command line in this process; its exit status."""

    def call(*arguments: str | Path) -> int:
        monkeypatch.setattr(sys, "argv", ["polyphily", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        return int(caught.value.code or 0)

    return call


def lines(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def kill_when(ready: Callable[[], bool], *arguments: str | Path, delay: float = 0.0) -> None:
    """Starts a command line in a process of its own and kills it once `ready`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "polyphily", *map(str, arguments)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    while not ready() and process.poll() is None:
        time.sleep(0.001)
    time.sleep(delay)
    process.kill()
    _, message = process.communicate()
    assert process.returncode == -signal.SIGKILL, message.decode()


def models(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted((folder / "models").iterdir())}


def outcome(folder: Path) -> dict[str, Any]:
    """What of the summary does not depend on the clock."""
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    apart = ("seconds_per_round_median", "seconds_evaluation_median", "setup_seconds")
    for stage in summary.get("stages", []):
        del stage["seconds"]
    return {k: v for k, v in summary.items() if k not in (*apart, "peak_memory_mb", "versions")}


def rounds_of(folder: Path) -> list[dict[str, Any]]:
    """The recorded rounds without their timings."""
    text = (folder / "metrics.jsonl").read_text()
    found = [json.loads(line) for line in text.splitlines()]
    return [{k: v for k, v in r.items() if not k.startswith("seconds")} for r in found]


def assert_same_run(folder: Path, expected: Path) -> None:
    assert [record["round"] for record in rounds_of(folder)] == list(
        range(1, len(rounds_of(expected)) + 1)
    )
    assert rounds_of(folder) == rounds_of(expected)
    assert models(folder) == models(expected)
    assert outcome(folder) == outcome(expected)


# Killed by the system --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(["fedavg"], id="plain"),
        pytest.param(["scaffold", "--seeds", "2,0", *UNEVEN], id="seeds, partial participation"),
    ],
)
def test_killed_again_and_again_a_run_ends_as_if_it_had_not_been(
    flags: list[str], tmp_path: Path, cli: Cli
) -> None:
    arguments = [flags[0], *FLAGS, *flags[1:]]
    assert cli("run", *arguments, "--out", tmp_path / "whole") == 0
    folder = tmp_path / "killed"
    kill_when(lambda: (folder / "config.toml").exists(), "run", *arguments, "--out", folder)
    assert lines(folder) < ROUNDS // 2
    luck = random.Random(len(flags))
    for low, high in ((1, 40), (60, 120)):
        wanted = luck.randint(low, high)
        kill_when(
            lambda wanted=wanted: lines(folder) >= wanted,
            *("run", "--resume", folder),
            delay=luck.uniform(0, 0.02),
        )
        assert wanted <= lines(folder) < ROUNDS
    assert not (folder / "summary.json").exists()
    assert cli("run", "--resume", folder) == 0
    assert_same_run(folder, tmp_path / "whole")
    assert {p.name for p in folder.iterdir()} == {p.name for p in (tmp_path / "whole").iterdir()}


def test_a_run_killed_before_its_first_round_starts_over(tmp_path: Path, cli: Cli) -> None:
    arguments = ["run", "fedavg", *FLAGS, "--rounds", "5", "--out"]
    assert cli(*arguments, tmp_path / "whole") == 0
    assert cli(*arguments, tmp_path / "early") == 0
    for file in ("metrics.jsonl", "summary.json", "checkpoint/state.safetensors"):
        (tmp_path / "early" / file).unlink()
    for file in (tmp_path / "early" / "models").iterdir():
        file.unlink()
    assert cli("run", "--resume", tmp_path / "early") == 0
    assert_same_run(tmp_path / "early", tmp_path / "whole")


# Killed at every kind of moment ----------------------------------------------------------------


class Killed(BaseException):
    """Stands for a kill: nothing in the library may catch it."""


def start(method: str, folder: Path) -> None:
    federations = [
        polyphily.load("csbm:nodes=40,features=6", clients=4, seed=seed) for seed in (4, 1)
    ]
    options: dict[str, Any] = {"rounds": 12, "hidden": 8, "evaluate_every": 2}
    options["backbone"] = usual_backbone(create(method))
    options |= {"participation": 0.8, "failures": 0.3, "epochs": "1-3", "keep_optimizer": True}
    polyphily.run(method, federations, out=folder, **options)


@contextmanager
def killed_at(round_index: int, luck: random.Random, share: float = 0.4) -> Iterator[None]:
    """Within, a run dies once this round is recorded; a share of the rounds has a checkpoint."""
    append = RunFolder.append

    def append_and_die(self: RunFolder, record: dict[str, Any], within: float = 0.0) -> None:
        append(self, record, within)
        if record["round"] == round_index:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "append", append_and_die)
        patch.setattr(RunFolder, "checkpoint_due", lambda self: luck.random() < share)
        with pytest.raises(Killed):
            yield


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_goes_on_from_any_checkpoint(method: str, tmp_path: Path, cli: Cli) -> None:
    start(method, tmp_path / "whole")
    luck = random.Random(method)
    for i, at in enumerate((1, luck.randint(2, 6), luck.randint(7, 12))):
        with killed_at(at, luck):
            start(method, tmp_path / f"killed-{i}")
        assert cli("run", "--resume", tmp_path / f"killed-{i}") == 0
        assert_same_run(tmp_path / f"killed-{i}", tmp_path / "whole")


def test_stopping_early_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    flags = ["--patience", "4", "--rounds", "120", "--epochs", "2"]
    arguments = ["run", "local", *FLAGS, *flags, "--out"]
    assert cli(*arguments, tmp_path / "whole") == 0
    selected = [record["selected"] for record in rounds_of(tmp_path / "whole")]
    assert len(selected) < 120
    at = next(r for r, count in enumerate(selected, start=1) if count < 4)  # some have stopped
    assert at < len(selected)
    monkeypatch.setattr(sys, "argv", ["polyphily", *arguments, str(tmp_path / "killed")])
    with killed_at(at, random.Random(2), share=1):
        main()
    assert cli("run", "--resume", tmp_path / "killed") == 0
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.parametrize("half", ['{"round": 6, "seconds": 0.0', '{"round": 6', "{", '"'])
def test_a_line_that_a_kill_cut_short_is_forgotten(half: str, tmp_path: Path, cli: Cli) -> None:
    start("fedavg", tmp_path / "whole")
    with killed_at(5, random.Random(1)):
        start("fedavg", tmp_path / "killed")
    with (tmp_path / "killed" / "metrics.jsonl").open("a") as file:
        file.write(half)
    assert cli("run", "--resume", tmp_path / "killed") == 0
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.parametrize("way", ["natural", "random"])
def test_a_single_graph_of_ones_own_goes_on(way: str, tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "north").mkdir()
    rows = "".join(f"{i},{i % 2},{i % 3}\n" for i in range(40))
    (tmp_path / "north" / "nodes.csv").write_text("id,label,x\n" + rows)
    (tmp_path / "north" / "edges.csv").write_text("source,target\n0,1\n1,2\n")
    flags = ["--dataset", tmp_path / "north", "--partition", way]
    flags += ["--clients", "1" if way == "natural" else "3", "--hidden", "4"]
    for name, rounds in (("whole", "4"), ("short", "2")):
        arguments = ["run", "local", *flags, "--rounds", rounds, "--out", tmp_path / name]
        assert cli(*arguments) == 0
    assert cli("run", "--resume", tmp_path / "short", "--rounds", "4") == 0
    assert_same_run(tmp_path / "short", tmp_path / "whole")
    assert ("north.safetensors" in models(tmp_path / "short")) == (way == "natural")


@pytest.mark.data
def test_seeds_with_different_numbers_of_clients_go_on(
    real_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.setenv("POLYPHILY_DATA", str(real_data))
    flags = ["--dataset", "cora", "--partition", "louvain-min:min_nodes=90", "--seeds", "0,1,2"]
    flags += ["--rounds", "3", "--hidden", "4", "--backbone", "gcn"]
    assert cli("run", "fedavg", *flags, "--out", tmp_path / "whole") == 0
    summary = outcome(tmp_path / "whole")
    counts = {len(run["final"]["test"]["accuracy_per_client"]) for run in summary["per_seed"]}
    assert len(counts) > 1
    assert cli("run", "fedavg", *flags, "--rounds", "1", "--out", tmp_path / "killed") == 0
    assert cli("run", "--resume", tmp_path / "killed", "--rounds", "3") == 0
    assert models(tmp_path / "killed") == models(tmp_path / "whole")
    assert cli("run", "--config", tmp_path / "killed/config.toml", "--out", tmp_path / "again") == 0
    assert models(tmp_path / "again") == models(tmp_path / "whole")


# Finished runs ---------------------------------------------------------------------------------


def test_a_finished_run_is_left_as_it_is(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polyphily.runs.summary.peak_memory_mb", lambda: 100.0)
    folder = tmp_path / "run"
    assert cli("run", "fedper", *FLAGS, "--rounds", "4", "--seeds", "0,1", "--out", folder) == 0
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    summary = outcome(folder)
    assert cli("run", "--resume", folder) == 0
    after = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    assert before.keys() == after.keys()
    assert not {file.name for file in before if before[file] != after[file]}
    assert outcome(folder) == summary


def test_a_finished_run_is_extended(tmp_path: Path, cli: Cli) -> None:
    arguments = ["run", "fedavg", *FLAGS, *UNEVEN, "--seeds", "0,1", "--out"]
    assert cli(*arguments, tmp_path / "long", "--rounds", "9") == 0
    assert cli(*arguments, tmp_path / "short", "--rounds", "4") == 0
    before = (tmp_path / "short" / "metrics.jsonl").read_bytes()
    assert cli("run", "--resume", tmp_path / "short", "--rounds", "9") == 0
    assert (tmp_path / "short" / "metrics.jsonl").read_bytes().startswith(before)
    assert_same_run(tmp_path / "short", tmp_path / "long")
    configs = [(tmp_path / name / "config.toml").read_text() for name in ("short", "long")]
    assert configs[0] == configs[1]
    assert tomllib.loads(configs[0])["rounds"] == 9
    assert cli("run", "--config", tmp_path / "short/config.toml", "--out", tmp_path / "again") == 0
    assert models(tmp_path / "again") == models(tmp_path / "long")


# What cannot be resumed ------------------------------------------------------------------------


def test_where_there_is_nothing_to_resume_says_so(
    tmp_path: Path, cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in (tmp_path, tmp_path / "nowhere"):
        assert cli("run", "--resume", place) == 2
        assert "holds no run to resume" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_resumed_as_it_is(
    tmp_path: Path, cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli("run", "fedavg", *FLAGS, "--rounds", "3", "--out", tmp_path / "run") == 0
    before = {file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()}
    capsys.readouterr()
    for extra in (["--lr", "1"], ["--seeds", "1"], ["--set", "a=1"], ["--out", "x"]):
        assert cli("run", "--resume", tmp_path / "run", *extra) == 2
        assert "only --rounds" in capsys.readouterr().err
    assert cli("run", "local", "--resume", tmp_path / "run") == 2
    for rounds, words in (("2", "3 rounds behind it"), ("0", "out of bounds")):
        assert cli("run", "--resume", tmp_path / "run", "--rounds", rounds) == 2
        assert words in capsys.readouterr().err
    after = {file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()}
    assert before == after
    (tmp_path / "run" / "partition.npz").unlink()
    assert cli("run", "--resume", tmp_path / "run") == 2
    assert "partition.npz" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("method", "recorded", "trained"),
    [
        ("fedgsp", "acm-gcn", "unifilter"),
        ("fedhero", "gpr-gnn", "gcn"),
        ("fedspa", "gat", "acm-gcn"),
    ],
)
def test_a_folder_that_names_another_network_than_was_trained_resumes(
    method: str, recorded: str, trained: str, tmp_path: Path
) -> None:
    """Earlier versions recorded any backbone, also where the method built a network of its own."""
    federation = polyphily.load("csbm:nodes=40,features=6", clients=3)
    folder = tmp_path / "run"
    options: dict[str, Any] = {"rounds": 2, "hidden": 8, "backbone": trained}
    polyphily.run(method, federation, out=folder, **options)
    config = folder / "config.toml"
    text = config.read_text()
    assert f'backbone = "{trained}"' in text
    config.write_text(text.replace(f'backbone = "{trained}"', f'backbone = "{recorded}"'))
    request, _ = read_run(folder)
    assert request.settings["backbone"] == trained
    execution = restore(folder)
    assert execution.simulation.round == 2
    assert execution.simulation.network.describe().endswith(trained)
