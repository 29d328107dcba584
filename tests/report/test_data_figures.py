"""Figures of data: lines that show what the measures are known to do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from polyphily.graphs.loading import load, whole_graph
from polyphily.heterogeneity.inspection import inspect
from polyphily.report import data_figures, figures
from polyphily.report.style import Look
from report.stories import call


def test_high_frequency_area_falls_as_homophily_rises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_figures, "HOMOPHILY", (0.1, 0.5, 0.9))
    monkeypatch.setattr(data_figures, "STRENGTHS", (10, 10_000))
    figure = data_figures.high_frequency(Look(5))
    assert len(figure.axes) == 2  # both Laplacians
    for axes in figure.axes:
        weak, strong = (np.asarray(lines[0].get_ydata()) for lines in axes.containers)
        assert (np.diff(strong) < 0).all()
        assert np.ptp(strong) > 10 * np.ptp(weak)


def test_what_is_drawn_of_a_division_is_what_inspect_measures(tmp_path: Path) -> None:
    grid = _grid(tmp_path)
    federation = load(grid, partition="random", clients=3, split="0.2,0.4,0.4:global")
    measured = inspect(federation, whole_graph(federation))
    assert measured.lost
    scores = [client.structure_inertia_score for client in measured.clients]
    wanted = (np.mean(scores), np.sum(scores), 100 * (1 - measured.lost.label_signal_share))
    assert data_figures.inertia_scores(federation) == pytest.approx(wanted)


def test_inertia_draws_a_line_per_partition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_figures, "CLIENTS", (1, 2, 6))
    monkeypatch.setattr(data_figures, "PARTITIONS", ("louvain", "random"))
    file = tmp_path / "inertia.svg"
    assert call("plot", "inertia", "--dataset", _grid(tmp_path), "--out", file) == 0
    assert file.read_text(encoding="utf-8").startswith("<?xml")
    figure = data_figures.inertia(Look(6.8), str(_grid(tmp_path)))
    each, total, kept = figure.axes
    for axes in figure.axes:
        assert [line.get_label() for line in axes.lines] == ["louvain", "random"]
    for line in (*each.lines, *kept.lines):
        assert (np.diff(line.get_ydata()) < 0).all()
    assert kept.lines[0].get_ydata()[0] == pytest.approx(100)
    assert total.lines[0].get_ydata()[0] == pytest.approx(total.lines[1].get_ydata()[0])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["inertia", "somewhere"], "figure of data"),
        (["inertia", "--against", "rounds"], "figure of data"),
        (["high-frequency", "--dataset", "cora"], "csbm graphs alone"),
        (["convergence"], "polyphily plot convergence RUN"),
        (["convergence", "r", "--dataset", "cora"], "figure of runs"),
        (["inertial"], "did you mean 'inertia'"),
    ],
)
def test_mistakes_are_named(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("plot", *arguments) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_figures_have_one_name_each() -> None:
    assert not {*figures.FIGURES} & {*figures.OF_DATA}


def _grid(folder: Path) -> Path:
    """Six blocks of twenty nodes, densely joined within, as a site's files."""
    site = folder / "site"
    site.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    rows = ["id,label,x", *[f"{n},{'ab'[n % 2]},{rng.random():.3f}" for n in range(120)]]
    (site / "nodes.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    pairs = [(a, b) for a in range(120) for b in range(a) if _joined(a, b, rng)]
    edges = ["source,target", *[f"{a},{b}" for a, b in pairs]]
    (site / "edges.csv").write_text("\n".join(edges) + "\n", encoding="utf-8")
    return site


def _joined(a: int, b: int, rng: np.random.Generator) -> bool:
    return rng.random() < (0.3 if a // 20 == b // 20 else 0.01)
