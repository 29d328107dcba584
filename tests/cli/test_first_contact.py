"""Lacks of a newcomer's machine: an old Python, packages, room on the disk, UTF-8."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import polyphily
from commands import Cli, caller
from polyphily.cli import options
from polyphily.errors import UserError
from polyphily.graphs.files.schema import read_schema

SOURCES = Path(polyphily.__file__).parent
ROOT = Path(__file__).resolve().parents[2]
QUICK = ["--dataset", "csbm:nodes=60,features=8", "--clients", "3", "--rounds", "1"]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    return caller(tmp_path, monkeypatch, capsys)


def python(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(SOURCES.parent), **environment},
    )


@pytest.mark.parametrize(("start", "raised"), [("-m", "SystemExit"), ("x.py", "ImportError")])
def test_an_old_python_is_told(start: str, raised: str) -> None:
    done = python(f"""
import sys
sys.argv = [{start!r}]
sys.version_info, sys.version = (3, 10, 13), "3.10.13 (main)"
try:
    import polyphily
except (SystemExit, ImportError) as error:
    print(type(error).__name__, error)
""")
    assert done.stdout.startswith(raised), done.stderr
    assert "polyphily needs Python 3.11 or later, this is Python 3.10.13" in done.stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("target", ["install", "demo", "dist", "test-oldest"])
def test_make_refuses_an_old_python_and_leaves_nothing(tmp_path: Path, target: str) -> None:
    old = tmp_path / "python3"
    script = 'exec "$PYTHON_OF_TEST" -c "import sys; sys.version_info = (3, 10, 13, 0, 0); $2"'
    old.write_text(f"#!/bin/sh\n{script}\n")
    old.chmod(0o755)
    here = tmp_path / "clone"
    here.mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "constraints-oldest.txt"):
        shutil.copyfile(ROOT / name, here / name)
    before = sorted(here.iterdir())
    done = subprocess.run(
        ["make", target, f"PYTHON={old}"],
        cwd=here,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHON_OF_TEST": sys.executable},
    )
    assert done.returncode != 0
    assert "Polyphily needs Python 3.11 or later, this is 3.10." in done.stderr
    assert "venv" not in done.stdout
    assert sorted(here.iterdir()) == before


def test_a_missing_package_is_named() -> None:
    done = python("""
import runpy, sys
sys.modules["typer"] = None
runpy.run_module("polyphily", run_name="__main__")
""")
    assert done.returncode == 1
    assert "the package 'typer', which polyphily needs, is not installed" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_terminal_without_utf8_gets_question_marks() -> None:
    done = python(
        "import sys; sys.argv[1:] = ['metrics', '--help']\n"
        "from polyphily.cli import main\n"
        "print_ = lambda: print('a – b')\n"
        "import polyphily.cli as cli\n"
        "cli.app = print_\n"
        "main()",
        PYTHONIOENCODING="ascii",
        PYTHONUTF8="0",
    )
    assert (done.returncode, done.stdout) == (0, "a ? b\n")


def test_without_home_commands_work(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("POLYPHILY_DATA", raising=False)
    assert cli("datasets").status == 0


def test_no_color_is_respected(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[3" not in cli("--help").out


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_a_disk_that_takes_nothing_is_told(
    number: int, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), "here/state.safetensors")

    monkeypatch.setattr("polyphily.runs.folder.save_tensors", fail)
    answer = cli("run", "fedavg", *QUICK, "--no-report", "--out", "run")
    assert answer.status == 1
    assert f"error: {os.strerror(number)}: here/state.safetensors. " in answer.err
    assert "failure of the program" not in answer.err


def test_a_machine_without_memory_is_told(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def training(*_: object, **__: object) -> None:
        torch.empty(1 << 48)

    monkeypatch.setattr("polyphily.runs.run.Execution.advance", training)
    answer = cli("run", "fedavg", *QUICK, "--no-report")
    assert answer.status == 1
    assert "error: this machine has no memory left for another 1125899.9 GB" in answer.err
    assert "--memory 20GB" in answer.err
    assert "failure of the program" not in answer.err


def test_without_a_network_the_message_says_what_to_do(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setenv("POLYPHILY_DATA", str(tmp_path / "data"))
    monkeypatch.setattr("polyphily.graphs.datasets.fetch._from_pyg", fail)
    answer = cli("run", "fedavg", "--dataset", "cora", "--clients", "3")
    assert answer.status == 2
    for words in ("Name or service not known", str(tmp_path / "data"), "--dataset csbm"):
        assert words in answer.err


# Files from Windows ----------------------------------------------------------------------------


def test_a_schema_from_windows_is_read(tmp_path: Path) -> None:
    file = tmp_path / "schema.toml"
    file.write_bytes(b'\xef\xbb\xbfdelimiter = ";"\r\ndecimal = ","\r\n')
    schema = read_schema(file)
    assert (schema.delimiter, schema.decimal) == (";", ",")


def test_tables_from_windows_are_read(cli: Cli, tmp_path: Path) -> None:
    for client in "ab":
        folder = tmp_path / "sites" / client
        folder.mkdir(parents=True)
        rows = [
            "id;label;path;x",
            "n1;yes;C:\\new\\t.csv;1,5",
            'n2;no;"D:\\a;b";2,5',
            "n3;no;E:\\;0",
        ]
        (folder / "nodes.csv").write_bytes(("\ufeff" + "\r\n".join(rows) + "\r\n").encode())
        (folder / "edges.csv").write_bytes("\ufeffsource;target\r\nn1;n2\r\nn2;n3\r\n".encode())
    (tmp_path / "sites" / "schema.toml").write_bytes(b'\xef\xbb\xbfdecimal = ","\r\n')
    answer = cli("check", "sites")
    assert answer.status == 0, answer.err
    assert "C:\\new\\t.csv" in answer.out
    assert "0 to 2.5" in answer.out


def test_a_configuration_from_windows_is_read_and_backslashes_are_told(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_bytes(b"\xef\xbb\xbfdataset = 'C:\\new\\data'\r\nrounds = 2\r\n")
    assert options.gather("fedavg", {}, [], file).data["dataset"] == "C:\\new\\data"
    for text in (b'dataset = "C:\\data"', b'dataset = "C:\\Users"', b'dataset = "C:\\new"'):
        file.write_bytes(text)
        with pytest.raises(UserError, match="in single quotes"):
            options.gather("fedavg", {}, [], file)
