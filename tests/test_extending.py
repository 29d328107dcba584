"""The packages in docs/extending.md, built and installed as a user would, in an environment of
their own in which polyphily comes from its wheel.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import site
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "extending.md"
NAMES = {
    "methods": "fedavgm",
    "backbones": "appnp",
    "partitions": "degree",
    "datasets": "dc-sbm",
    "metrics": "worst_recall",
}
BROKEN = {
    "pyproject.toml": """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "polyphily-broken"
version = "0.1.0"
[project.entry-points."polyphily.methods"]
broken = "polyphily_broken"
""",
    "polyphily_broken.py": "import a_package_that_nobody_has\n",
}


def blocks(language: str) -> list[str]:
    """Return the fenced blocks of the page in a language."""
    text = PAGE.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def files() -> dict[str, str]:
    """Return the files that the page prints, by the path in their first line."""
    found = {}
    for block in (*blocks("toml"), *blocks("python")):
        named = re.match(r"# (\S+/\S+)\n", block)
        if named:
            found[named[1]] = block
    return found


def python_without_file() -> list[str]:
    return [block for block in blocks("python") if not block.startswith("# ")]


@dataclass(frozen=True)
class Environment:
    """A virtual environment with polyphily and the packages of the page.

    Attributes:
        folder: of the environment.
        broken: a folder with one more package, which raises on import.
    """

    folder: Path
    broken: Path

    def run(
        self, command: Sequence[str], cwd: Path, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of this environment; nothing of the checkout is on its path."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "POLYPHILY"))}
        program, *rest = command
        return subprocess.run(
            [str(self.folder / "bin" / program), *rest],
            cwd=cwd,
            env={**kept, "OMP_NUM_THREADS": "1", **variables},
            capture_output=True,
            text=True,
            timeout=100,
        )

    def output(self, command: Sequence[str], cwd: Path) -> str:
        """Run a command that must succeed without a warning, and return what it prints."""
        done = self.run(command, cwd)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "skipped" not in done.stderr
        return done.stdout


def pip(*arguments: object) -> None:
    """Run this environment's pip without network."""
    words = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    done = subprocess.run([*words, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Build the wheels, and install them into a fresh environment.

    The packages that polyphily depends on are not installed again: a .pth file makes those of the
    running environment visible. Their own .pth files are not read there, so the checkout, which is
    installed by one of these, stays invisible.
    """
    home = tmp_path_factory.mktemp("extending")
    sources, wheels, folder = home / "sources", home / "wheels", home / "environment"
    broken = {f"polyphily-broken/{name}": text for name, text in BROKEN.items()}
    for path, text in {**files(), **broken}.items():
        (sources / path).parent.mkdir(parents=True, exist_ok=True)
        (sources / path).write_text(text, encoding="utf-8")
    offline = ("--no-deps", "--no-index")
    packages = sorted(sources.iterdir())
    pip("wheel", *offline, "--no-build-isolation", "--wheel-dir", wheels, ROOT, *packages)
    bad, good = [], []
    for wheel in sorted(wheels.iterdir()):
        (bad if "broken" in wheel.name else good).append(wheel)
    assert len(good) == 1 + len(NAMES)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    pip("--python", python, "install", *offline, *good)
    pip("install", *offline, "--target", home / "broken", *bad)
    (own,) = folder.glob("lib/python*/site-packages")
    (own / "dependencies.pth").write_text("\n".join(site.getsitepackages()), encoding="utf-8")
    return Environment(folder, home / "broken")


def test_the_page_has_five_packages() -> None:
    assert len({path.partition("/")[0] for path in files()}) == len(NAMES)
    assert len(files()) == 2 * len(NAMES)


def test_polyphily_comes_from_the_wheel(environment: Environment, tmp_path: Path) -> None:
    code = "import polyphily, polyphily.testing as t; print(polyphily.__file__, t.__file__)"
    found = environment.output(["python", "-c", code], tmp_path).split()
    assert all(Path(path).is_relative_to(environment.folder) for path in found), found


@pytest.mark.parametrize("kind", NAMES)
def test_it_is_listed(environment: Environment, tmp_path: Path, kind: str) -> None:
    rows = json.loads(environment.output(["polyphily", kind, "--json"], tmp_path))
    assert NAMES[kind] in [row["name"] for row in rows]


def test_the_command_of_the_page_runs(environment: Environment, tmp_path: Path) -> None:
    (line,) = blocks("sh")
    more = ["--rounds", "2", "--no-report", "--json", "--out", "here"]
    command = [*shlex.split(line.replace("\\\n", " ")), *more]
    summary: dict[str, Any] = json.loads(environment.output(command, tmp_path))
    words = json.dumps(summary)
    for name in NAMES.values():
        assert name in words
    config = (tmp_path / "here" / "config.toml").read_text(encoding="utf-8")
    for name in ("fedavgm", "appnp", "dc-sbm", "degree", "worst_recall"):
        assert name in config


def test_the_checks_pass(environment: Environment, tmp_path: Path) -> None:
    (methods,) = python_without_file()
    others = """
from polyphily_appnp import APPNP
from polyphily_worst import worst_recall
from polyphily_dcsbm import read
from polyphily_degree import by_degree
from polyphily import testing
testing.check_backbone(APPNP)
testing.check_partition(by_degree)
testing.check_partition("degree", mixed=0.3)
testing.check_dataset("dc-sbm")
testing.check_dataset(read)
testing.check_metric(worst_recall)
print("all passed")
"""
    assert "all passed" in environment.output(["python", "-c", methods + others], tmp_path)


def test_a_broken_plug_in_is_named_and_skipped(environment: Environment, tmp_path: Path) -> None:
    done = environment.run(
        ["polyphily", "methods", "--json"], tmp_path, PYTHONPATH=str(environment.broken)
    )
    assert done.returncode == 0, done.stderr
    assert {"fedavgm", "fedavg"} <= {row["name"] for row in json.loads(done.stdout)}
    words = " ".join(done.stderr.split())
    assert "method plug-in 'broken' of the package 'polyphily-broken' is skipped" in words
    assert "a_package_that_nobody_has" in words
