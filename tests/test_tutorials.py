"""The tutorials run, and what they show is true."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

TUTORIALS = Path(__file__).parents[1] / "docs" / "tutorials"


@pytest.fixture
def pyg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the tutorial in an empty folder and return its variables."""
    monkeypatch.chdir(tmp_path)
    return runpy.run_path(str(TUTORIALS / "pyg.py"))


def test_from_data_to_probabilities(pyg: dict[str, Any], tmp_path: Path) -> None:
    probabilities = pyg["probabilities"]
    assert list(probabilities.columns) == ["red", "green", "blue"]
    assert probabilities.shape == (150, 3)
    assert abs(probabilities.sum(axis=1) - 1).max() < 1e-6
    assert pyg["right"].mean() > 0.7
    found = pyg["logits"].argmax(dim=1).numpy()
    assert (found == probabilities.to_numpy().argmax(axis=1)).all()
    scores = [pyg[name].summary["best_val"]["test"]["accuracy"] for name in ("alone", "together")]
    assert scores[1] > scores[0]
    explanation = pyg["explanation"]
    assert torch.count_nonzero(explanation.edge_mask) > 0
    assert not list(tmp_path.iterdir())  # it leaves no file
