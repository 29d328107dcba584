"""`polyphily export`, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import polyphily
from commands import Cli, caller
from polyphily.nn.plain import load
from polyphily.runs.prediction import class_scores

DATA = "csbm:nodes=60,features=8"
QUICK = ["--dataset", DATA, "--clients", "2", "--rounds", "2", "--hidden", "8", "--no-report"]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    return caller(tmp_path, monkeypatch, capsys)


def test_a_run_is_exported_to_a_folder(cli: Cli, tmp_path: Path) -> None:
    assert cli("run", "fedavg", *QUICK, "--out", "run").status == 0
    answer = cli("export", "--model", "run", "--client", "client-1", "--out", "exported")
    assert answer.status == 0
    assert answer.out.split() == [
        f"exported/{name}" for name in ("model.safetensors", "model.json", "module.py")
    ]
    federation = polyphily.load(DATA, clients=2)
    graph, data = federation.clients[1], federation.to_pyg()[1]
    wanted = class_scores(polyphily.load_model(tmp_path / "run", "client-1"), graph)
    found = load(tmp_path / "exported")(data.x, data.edge_index).detach()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    facts = json.loads((tmp_path / "exported" / "model.json").read_text())
    assert facts["client"] == "client-1"
    assert facts["classes"] == list(federation.classes)
    assert 0 < facts["decision"]["threshold"] < 1


def test_what_cannot_be_exported_is_explained(cli: Cli) -> None:
    assert cli("run", "fedspa", *QUICK, "--out", "run").status == 0
    answer = cli("export", "--model", "run", "--client", "client-0", "--out", "exported")
    assert answer.status == 2
    assert "fedspa cannot be exported" in answer.err
    answer = cli("export", "--model", "nowhere", "--out", "exported")
    assert answer.status == 2
    answer = cli("export", "--model", "run", "--out", "model.onnx")
    assert "a folder, or a file that ends in .pt2" in answer.err
