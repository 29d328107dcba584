"""A site's memory of a round is on the disk before its answer leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")

from polyphily.flower import masks
from polyphily.flower.masks import Sums
from polyphily.flower.site_files import SiteState
from polyphily.flower.wire import WireError
from polyphily.runs import folder


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files and folders that were waited for, in order."""
    names: list[str] = []

    def note(path: Path) -> None:
        assert path.exists()
        names.append(path.name)

    monkeypatch.setattr(folder, "sync", note)
    monkeypatch.setattr(masks, "sync", note)
    return names


def test_the_memory_of_a_round(tmp_path: Path, synced: list[str]) -> None:
    SiteState(tmp_path, "a-run").save(3, {"x": torch.zeros(1)})
    assert synced == ["round-000003.partial", "a-run"]


def test_the_sites_of_a_sum(tmp_path: Path, synced: list[str]) -> None:
    Sums(tmp_path, "a-run").note(3, ["south", "north"])
    assert synced == ["sums.json.partial", "a-run"]
    Sums(tmp_path, "a-run").note(3, ["north", "south"])
    Sums(tmp_path, "a-run").note(4, ["north", "east"])
    with pytest.raises(WireError, match="round 3 was summed over north, south before"):
        Sums(tmp_path, "a-run").note(3, ["north", "east"])
    Sums(tmp_path, "another").note(3, ["north", "east"])
