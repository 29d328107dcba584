"""`polyphily.plot`: figures of runs in Python, as a notebook shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

import polyphily
from polyphily.report.plotting import measure_clients
from polyphily.report.runs import read_runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plotting") / "runs"
    data = polyphily.load("csbm:nodes=60,features=8,gap=0.6", clients=3)
    polyphily.compare(["local", "fedavg"], data, rounds=2, hidden=8, out=folder)
    return folder


def test_a_picture_is_shown_and_saved(runs: Path, tmp_path: Path) -> None:
    picture = polyphily.plot("convergence", runs)
    assert picture._repr_svg_().lstrip().startswith("<?xml")
    assert repr(picture).startswith("Picture(convergence, 4.5 x ")
    assert picture.save(tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(polyphily.UserError, match=r"\.pdf, \.svg, \.png"):
        picture.save(tmp_path / "a.doc")


def test_clients_are_measured_where_the_folder_lacks_it(runs: Path) -> None:
    """Runs made in Python have no evidence; the graphs are read again."""
    found = read_runs([runs])
    assert all("inspection" not in run.evidence for run in found)
    measured = [run.evidence["inspection"] for run in measure_clients(found)]
    assert measured[0] is measured[1]  # the same data
    graph = polyphily.load("csbm:nodes=60,features=8,gap=0.6", clients=3).clients[0]
    from polyphily.heterogeneity.homophily import edge_homophily

    (first, *_) = measured[0]["clients"]
    assert first["edge_homophily"] == pytest.approx(edge_homophily(graph), rel=1e-4)
    assert polyphily.plot("gain", [runs / "local", runs / "fedavg"]).name == "gain"


def test_mistakes_are_named(runs: Path) -> None:
    with pytest.raises(polyphily.UserError, match="did you mean 'gain'"):
        polyphily.plot("gian", runs)
    with pytest.raises(polyphily.UserError, match="figure of data"):
        polyphily.plot("inertia", runs)
