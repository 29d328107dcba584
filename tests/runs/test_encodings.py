"""Runs on tables: several seeds side by side, and statistics that stay at home under privacy."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow")

import polyphily
from commands import caller
from polyphily.graphs import files
from polyphily.graphs.prepared import load_seeds
from polyphily.runs.models import SavedModel

QUICK = {"rounds": 2, "hidden": 4, "epochs": 1, "backbone": "gcn"}


@pytest.fixture(scope="module")
def banks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three clients with values so rare that train nodes of some seeds lack some of them."""
    place = tmp_path_factory.mktemp("data") / "banks"
    for k, name in enumerate(("north", "south", "west")):
        rng = np.random.default_rng(k)
        rows = [
            f"{i},{'no' if i % 2 else 'yes'},{rng.normal(40, 9):.2f},v{int(rng.exponential(3))}"
            for i in range(30)
        ]
        folder = place / name
        folder.mkdir(parents=True)
        (folder / "nodes.csv").write_text("id,label,age,channel\n" + "\n".join(rows) + "\n")
        edges = "\n".join(f"{a},{b}" for a, b in rng.integers(0, 30, (60, 2)))
        (folder / "edges.csv").write_text(f"source,target\n{edges}\n")
    return place


def test_seeds_with_other_categories_run_side_by_side(banks: Path, tmp_path: Path) -> None:
    federations = load_seeds({"dataset": str(banks), "split": "0.2,0.4,0.4"}, [0, 1, 2])
    widths = [federation.encodings[0].width for federation in federations]
    assert len(set(widths)) > 1
    polyphily.run("fedavg", federations, out=tmp_path / "run", **QUICK)
    raw = files.read(banks).graphs[0]
    for federation, width in zip(federations, widths, strict=True):
        file = next((tmp_path / "run" / "models").glob(f"seed-{federation.seed}-*best*"))
        encoding = SavedModel.load(file).encoding
        assert encoding is not None
        assert encoding.width == max(widths)
        assert encoding.padding == max(widths) - width
        features = encoding.encode(raw).features
        np.testing.assert_array_equal(features[:, :width], federation.clients[0].features)


@pytest.mark.parametrize("given", [{"dp": "epsilon=8"}, {"secure_aggregation": True}])
def test_exchanged_statistics_are_refused_under_privacy(
    given: dict[str, object], banks: Path
) -> None:
    with pytest.raises(polyphily.UserError, match="encoding 'home'"):
        polyphily.run("fedavg", polyphily.load(banks), **QUICK, **given)


def test_the_command_line_keeps_statistics_at_home_under_privacy(
    banks: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("dp_accounting")
    call = caller(tmp_path, monkeypatch, capsys)
    flags = ["--rounds", "2", "--hidden", "4", "--epochs", "1", "--no-report"]
    for name, more in (("open", []), ("private", ["--dp", "epsilon=8"])):
        found = call("run", "fedavg", "--dataset", banks, *flags, *more, "--out", tmp_path / name)
        assert found.status == 0, found.err
    configs = {
        name: tomllib.loads((tmp_path / name / "config.toml").read_text())
        for name in ("open", "private")
    }
    assert configs["private"]["encoding"] == "home"
    assert "encoding" not in configs["open"]
