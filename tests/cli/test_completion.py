"""Completion of values, asked for as a shell asks for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from commands import Cli, caller
from polyphily.cli import completion
from polyphily.core.method import METHODS
from polyphily.core.metrics import METRICS
from polyphily.graphs.datasets import DATASETS
from polyphily.graphs.encoding import MODES, NORMALIZATIONS
from polyphily.graphs.partitions import PARTITIONS
from polyphily.nn.backbones import BACKBONES


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def complete(
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> object:
    """Return a function that completes a line; its last word is the one that is typed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("_POLYPHILY_COMPLETE", "complete_bash")
    cli: Cli = caller(tmp_path, monkeypatch, capsys)

    def ask(*words: str) -> list[str]:
        monkeypatch.setenv("COMP_WORDS", " ".join(["polyphily", *words]))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        answer = cli()
        assert answer.status == 0
        return answer.out.split()

    return ask


@pytest.mark.parametrize(
    ("words", "registry"),
    [
        (("run", "{}"), METHODS),
        (("compare", "local", "{}"), METHODS),
        (("sweep", "{}"), METHODS),
        (("methods", "show", "{}"), METHODS),
        (("server", "run", "folder", "{}"), METHODS),
        (("run", "--dataset", "{}"), DATASETS),
        (("inspect", "--dataset", "{}"), DATASETS),
        (("run", "--partition", "{}"), PARTITIONS),
        (("run", "--backbone", "{}"), BACKBONES),
    ],
)
def test_names_of_registries(words: tuple[str, ...], registry: object, complete: object) -> None:
    assert callable(complete)
    assert isinstance(registry, type(METHODS))
    first = next(iter(registry))[0]
    wanted = {name for name in registry if name.startswith(first)}
    assert set(complete(*[word.format(first) for word in words])) == wanted
    assert complete(*[word.format("zzz") for word in words]) == []


def test_metrics_that_select(complete: object) -> None:
    assert callable(complete)
    assert set(complete("run", "--metric", "a")) == {n for n in METRICS.selecting() if n[0] == "a"}


def test_words_and_names_with_commas(complete: object) -> None:
    assert callable(complete)
    assert complete("run", "--optimizer", "ada") == ["adam", "adamw"]
    assert complete("run", "--engine", "s") == ["stacked", "sequential"]
    assert complete("run", "--device", "c") == ["cpu", "cuda"]
    assert set(complete("run", "--normalize", "")) == {*NORMALIZATIONS}
    assert set(complete("run", "--encoding", "")) == {*MODES}
    assert complete("run", "--track", "t") == ["tensorboard"]
    assert complete("compare", "--dataset", "cora,cite") == ["cora,citeseer"]
    assert complete("plot", "con") == ["convergence"]
    assert complete("reproduce", "fedsp") == ["fedspa"]
    assert "leaderboard" in complete("study", "l")


def test_hyperparameters_are_those_of_the_method(complete: object) -> None:
    assert callable(complete)
    own = {f"{name}=" for name in METHODS["fedprox"].hyperparameters()}
    assert set(complete("run", "FedProx", "--set", "")) == own
    assert "tau=" in complete("run", "--set", "t")  # of any method
    assert complete("run", "fedgsp", "--set", "compare=s") == ["compare=subspace"]
    assert {"mu=", "momentum=", "memory="} <= set(complete("sweep", "fedprox", "--vary", "m"))
    assert complete("sweep", "fedprox", "--vary", "cli") == ["clients=", "clip="]


def test_run_folders(complete: object, tmp_path: Path) -> None:
    assert callable(complete)
    for path in ("runs/one", "runs/two", "sweeps/three/four", "other"):
        (tmp_path / path).mkdir(parents=True)
    (tmp_path / "runs/one/config.toml").touch()
    (tmp_path / "notes.txt").touch()
    assert complete("report", "") == ["runs/one", "runs/two/", "sweeps/three/"]
    assert complete("run", "--resume", "runs/o") == ["runs/one"]
    assert complete("audit", "o") == ["other/"]
    assert complete("report", "no") == []
    assert complete("run", "--dataset", "./n") == ["./notes.txt"]


def test_names_are_collected_once_and_again_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = {"methods": {"one": ""}}
    monkeypatch.setattr(completion, "_collect", lambda: made)
    assert completion.listing() == made
    monkeypatch.setattr(completion, "_collect", lambda: {"methods": {"two": ""}})
    assert completion.listing() == made
    monkeypatch.setattr(completion, "_fingerprint", lambda: "other")
    assert completion.listing() == {"methods": {"two": ""}}
    (file,) = tmp_path.rglob("*.json")  # the old file is removed
    file.write_text("{damaged", encoding="utf-8")
    assert completion.listing() == {"methods": {"two": ""}}
    assert json.loads(file.read_text(encoding="utf-8")) == {"methods": {"two": ""}}


def test_a_cache_that_cannot_be_written_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(completion, "_collect", lambda: {"methods": {"one": ""}})
    assert completion.of("methods")("o") == [("one", "")]


def test_a_shell_does_not_wait_for_torch(
    cache: Path, complete: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stored names, the process answers without importing what is heavy."""
    assert callable(complete)
    monkeypatch.setattr(completion, "_fingerprint", lambda: "now")  # whatever is edited meanwhile
    complete("run", "fed")  # the names are stored now
    script = """
import sys
from polyphily.cli import completion, main
sys.argv = ["polyphily"]
completion._fingerprint = lambda: "now"
try:
    main()
except SystemExit:
    heavy = {"torch", "torch_geometric", "scipy", "pandas", "numpy", "networkx", "matplotlib"}
    print(sorted(heavy & sys.modules.keys()), file=sys.stderr)
"""
    words = {"COMP_WORDS": "polyphily run fedav", "COMP_CWORD": "2"}
    environment = os.environ | {"_POLYPHILY_COMPLETE": "complete_bash", **words}
    found = subprocess.run(
        [sys.executable, "-c", script],
        env=environment | {"XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.split() == ["fedavg"]
    assert found.stderr.strip() == "[]"
