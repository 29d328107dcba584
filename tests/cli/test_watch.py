"""`polyphily watch` as a command: what it prints, its port, and its end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

import polyphily
from commands import Cli, caller


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    return caller(tmp_path, monkeypatch, capsys)


def test_a_port_that_is_taken_and_a_file_are_refused(cli: Cli, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        answer = cli("watch", "runs", "--port", str(port))
    assert answer.status == 2
    assert f"--port {port}: Address already in use. Choose another, or 0" in answer.err
    (tmp_path / "file").touch()
    assert "file is a file: name the run folder" in cli("watch", "file").err


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_it_serves_a_run_until_ctrl_c(tmp_path: Path) -> None:
    data = polyphily.load("csbm:nodes=60,features=8", clients=3, seed=0)
    polyphily.run("fedavg", data, rounds=2, hidden=8, out=tmp_path / "run")
    process = subprocess.Popen(
        [sys.executable, "-m", "polyphily", "watch", str(tmp_path / "run"), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell may ignore it
        env={**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "80"},
    )
    try:
        assert process.stdout
        assert process.stderr
        address = process.stdout.readline().split(": ", 1)[1].split()[0]
        assert process.stderr.readline().startswith("finished after 2 rounds, test accuracy")
        with urllib.request.urlopen(f"{address}state") as answer:
            [run] = json.load(answer)["runs"]
        assert (run["name"], run["state"], run["round"]) == ("run", "finished", 2)
        process.send_signal(signal.SIGINT)
        _, printed = process.communicate(timeout=30)
        assert (process.returncode, printed) == (0, "ended\n")
    finally:
        process.kill()
        process.communicate()
