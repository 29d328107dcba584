"""Clients over several processes: the same results as one, and an end when one is lost."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import assert_close
from engines.rank_worker import CASES, ROUNDS
from polyphily.cli import main
from polyphily.cli.ranks import check_launcher
from polyphily.engines.placement import spread
from polyphily.engines.team import LAUNCHER, TIMEOUT, layout, pack, unpack, width
from polyphily.errors import UserError
from polyphily.runs.folder import read_tensors

WORKER = Path(__file__).with_name("rank_worker.py")
TINY = ["--dataset", "csbm:nodes=40-90,features=8", "--clients", "5", "--backbone", "gcn"]
TINY += ["--hidden", "8", "--dtype", "float64", "--no-report"]
SECONDS = 90  # after which a process that should have ended is taken for hung
CPU = torch.device("cpu")


def environment(**more: str) -> dict[str, str]:
    tests = str(Path(__file__).parents[1])
    alone = {k: v for k, v in os.environ.items() if k not in LAUNCHER}
    return {**alone, "OMP_NUM_THREADS": "1", "PYTHONPATH": tests, **more}


def start(ranks: int, *arguments: str | Path, timeout: float = 60) -> list[subprocess.Popen[str]]:
    """Ranks without torchrun: the first keeps the address book."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), TIMEOUT: str(timeout)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            env=environment(**shared, RANK=str(rank), LOCAL_RANK=str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]


def torchrun(ranks: int, *arguments: str | Path) -> subprocess.Popen[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", str(ranks), "-m", "polyphily"]
    return subprocess.Popen(
        [*launcher, *map(str, arguments)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def cli(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> None:
    monkeypatch.setattr(sys, "argv", ["polyphily", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        main()
    assert not caught.value.code


def assert_same_models(folder: Path, expected: Path) -> None:
    files = sorted(file.name for file in (expected / "models").iterdir())
    assert files
    assert sorted(file.name for file in (folder / "models").iterdir()) == files
    for name in files:
        found, wanted = (read_tensors(run / "models" / name)[0] for run in (folder, expected))
        assert_close(found, wanted)


def assert_alike(found: Any, expected: Any) -> None:
    """The same structure, numbers but for rounding, whatever the clock says."""
    if isinstance(expected, dict):
        apart = {"peak_memory_mb", "setup_seconds", "versions", "ranks"}
        names = {k for k in expected if k not in apart and not k.startswith("seconds")}
        assert names == {k for k in found if k not in apart and not k.startswith("seconds")}
        for name in names:
            assert_alike(found[name], expected[name])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_alike(one, other)
    else:
        assert found == (pytest.approx(expected) if isinstance(expected, float) else expected)


# The same results --------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[2, 3])
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What so many ranks made of all cases."""
    folder: Path = tmp_path_factory.mktemp(f"ranks-{request.param}")
    found = ended(start(request.param, WORKER, "rounds", folder))
    assert {status for status, _ in found} == {0}, "\n".join(err for _, err in found)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_several_processes_agree_with_one(outcome: Path, name: str) -> None:
    simulation = CASES[name].simulation()
    reports = [simulation.advance() for _ in range(ROUNDS)]
    found, _ = read_tensors(outcome / f"{name}.safetensors")
    assert_close(found, simulation.tensors())
    facts = [(r.refused, r.failed, r.bytes_up, r.bytes_down) for r in reports]
    assert (outcome / f"{name}.txt").read_text() == repr(facts)
    assert any(map(any, reports[0].refused)) == CASES[name].broken


def test_a_run_under_torchrun_is_the_run_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores, records, the best round's models, early stopping; rank 0 alone prints."""
    tiny = [flag for flag in TINY if flag != "--no-report"]  # who learned from whom is recorded
    flags = ["run", "fedper", *tiny, "--seeds", "2,0", "--rounds", "8", "--patience", "2"]
    flags += ["--participation", "0.5", "--evaluate-every", "2", "--selection", "client"]
    cli(monkeypatch, *flags, "--out", tmp_path / "one")
    process = torchrun(3, *flags, "--out", tmp_path / "three", "--json")
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    assert err.count("note: synthetic") == 1
    one, three = tmp_path / "one", tmp_path / "three"
    summary = json.loads((one / "summary.json").read_text())
    found = json.loads(out.splitlines()[-1])  # torch 2.8 prints lines of its own before it
    assert found["ranks"] == 3
    assert_alike(found, summary)
    assert_same_models(three, one)
    lines = [(run / "metrics.jsonl").read_text().splitlines() for run in (three, one)]
    assert_alike(*[list(map(json.loads, records)) for records in lines])
    for file in ("config.toml", "partition.npz", "partition-seed-0.npz"):
        assert (three / file).read_bytes() == (one / file).read_bytes()
    frames = [(run / "collaboration.jsonl").read_text().splitlines() for run in (three, one)]
    assert len(frames[0]) == len(frames[1]) > 0


# A rank that is lost -----------------------------------------------------------------------------


def rank_of(process: int) -> str:
    entries = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    return next((e[5:].decode() for e in entries if e.startswith(b"RANK=")), "")


def children(process: int) -> list[int]:
    found = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [int(child) for child in found]


def wait_for_rounds(folder: Path, count: int, process: subprocess.Popen[str]) -> None:
    file, began = folder / "metrics.jsonl", time.monotonic()
    while not file.exists() or file.read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < began + SECONDS
        time.sleep(0.01)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds ranks by /proc")
def test_killed_ranks_end_the_run_and_any_number_of_ranks_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 of three is killed, then rank 0 of the two that went on; one process ends it."""
    folder, rounds, done = tmp_path / "killed", 150, 0
    flags = ["run", "fedper", *TINY, "--rounds", str(rounds)]
    cli(monkeypatch, *flags, "--out", tmp_path / "whole")
    resumed = ["run", "--resume", folder, "--no-report"]
    for ranks, victim, arguments in ((3, 1, [*flags, "--out", folder]), (2, 0, resumed)):
        process = torchrun(ranks, *arguments)
        wait_for_rounds(folder, done + 5, process)
        (chosen,) = [child for child in children(process.pid) if rank_of(child) == str(victim)]
        os.kill(chosen, signal.SIGKILL)
        ((status, err),) = ended([process])
        assert status == 1
        said = [line for line in err.splitlines() if line.startswith("error:")]
        assert len(said) == 1, err
        assert f"rank {victim} of {ranks} is gone" in said[0]
        assert f"-m polyphily run --resume {folder}" in said[0]
        done = (folder / "metrics.jsonl").read_bytes().count(b"\n")
        assert done < rounds
    cli(monkeypatch, *resumed)
    assert_same_models(folder, tmp_path / "whole")


def ended(processes: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    found = []
    for process in processes:
        _, err = process.communicate(timeout=SECONDS)
        found.append((process.returncode, err))
    return found


def test_a_rank_that_hangs_is_named(tmp_path: Path) -> None:
    """The other waits for it when the launcher ends it: the thread speaks, the rank cannot."""
    flags = ["-m", "polyphily", "run", "fedavg", *TINY, "--rounds", "100000"]
    processes = start(2, *flags, "--out", tmp_path / "run", timeout=600)
    wait_for_rounds(tmp_path / "run", 2, processes[0])
    processes[1].send_signal(signal.SIGSTOP)
    processes[0].terminate()
    try:
        ((status, err),) = ended(processes[:1])
    finally:
        processes[1].kill()
        processes[1].wait()
    assert status == 1
    assert "error: rank 1 of 2 is gone" in err
    assert "Traceback" not in err


def test_ranks_that_are_only_slow_are_not_called_gone(tmp_path: Path) -> None:
    (status, said), _ = ended(start(2, WORKER, "late", tmp_path, timeout=5))
    assert status == 1
    assert "all 2 are there" in said
    assert f"{TIMEOUT}=20" in said
    assert "gone" not in said


# What cannot be ----------------------------------------------------------------------------------


def test_other_commands_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_launcher("sweep")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_launcher("run")
    with pytest.raises(UserError, match="start polyphily sweep without it"):
        check_launcher("sweep")


# Parts -------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 8))
def test_every_client_has_one_rank_and_loads_are_even(costs: list[int], ranks: int) -> None:
    shares = spread(costs, ranks)
    assert sorted(k for own in shares for k in own) == list(range(len(costs)))
    assert all(own == sorted(own) for own in shares)
    loads = [sum(costs[k] for k in own) for own in shares]
    assert max(loads) <= sum(costs) / ranks + max(costs)
    assert len(costs) < ranks or all(shares)


@given(
    st.integers(0, 4),
    st.lists(
        st.tuples(
            st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool, torch.int8]),
            st.lists(st.integers(0, 3), max_size=3),
        ),
        max_size=4,
    ),
)
def test_messages_survive_as_bytes(rows: int, tensors: list[tuple[torch.dtype, list[int]]]) -> None:
    source = torch.Generator().manual_seed(rows)
    message = {
        f"t{i}": (3 * torch.randn(rows, *shape, generator=source)).to(dtype)
        for i, (dtype, shape) in enumerate(tensors)
    }
    packed = pack(message, rows, CPU)
    assert packed.shape == (rows, width(layout(message)))
    found = unpack(packed, layout(message))
    assert found.keys() == message.keys()
    for name, value in message.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value)
