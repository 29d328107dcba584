"""Figures for papers: files that are what they say, and lines that are where they should be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polyphily.errors import UserError
from polyphily.report import figures, style
from polyphily.report.runs import Run, read_runs
from polyphily.report.style import Look
from report.stories import call, compared

BEGINNINGS = {"pdf": b"%PDF", "png": b"\x89PNG", "svg": b"<?xml"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    return read_runs([compared(tmp_path_factory.mktemp("figures") / "runs", "local", "fedprox")])


def varied(run: Run, score: float, **config: Any) -> Run:
    scores = run.summary["best_val"]
    test = scores["test"] | {"accuracy": score, "accuracy_std": 0.01}
    summary = run.summary | {"best_val": scores | {"test": test}}
    return replace(run, config=run.config | config, summary=summary)


@pytest.mark.parametrize("kind", BEGINNINGS)
@pytest.mark.parametrize("name", ["convergence", "homophily", "spectral-kl", "ablation"])
def test_a_figure_is_written(runs: list[Run], name: str, kind: str, tmp_path: Path) -> None:
    file = tmp_path / f"figure.{kind}"
    style.save(figures.find_figure(name)(runs, Look()), file)
    assert file.read_bytes().startswith(BEGINNINGS[kind])


def test_convergence_draws_a_line_and_a_band_per_run(runs: list[Run]) -> None:
    (axes,) = figures.convergence(runs, Look(against="seconds", score="val")).axes
    assert [line.get_label() for line in axes.lines] == ["local", "fedprox"]
    assert len(axes.collections) == 2
    run = runs[1]
    last = run.records[-1][run.view]["val"]["accuracy"]
    assert axes.lines[1].get_ydata()[-1] == pytest.approx(100 * last, rel=1e-4)
    assert axes.lines[1].get_xdata()[-1] == pytest.approx(run.seconds[-1], rel=1e-4)


def test_thirty_methods_look_different(runs: list[Run]) -> None:
    run = runs[0]
    many = [
        replace(run, summary=run.summary | {"method": f"m{i}"}, config=run.config | {"method": i})
        for i in range(30)
    ]
    (axes,) = figures.convergence(many, Look(6.8)).axes
    looks = [(line.get_color(), str(line._dash_pattern)) for line in axes.lines]
    assert len(set(looks)) == 30
    assert {line.get_label() for line in axes.lines} == {f"m{i}" for i in range(30)}
    few = figures.convergence(many[:8], Look()).axes[0].lines
    assert {line.get_marker() for line in few} == {"None"}


@pytest.mark.parametrize("rounds", [2, 3, 7, 11])
def test_rounds_are_whole_numbers_and_no_tick_repeats(runs: list[Run], rounds: int) -> None:
    run = runs[1]
    records = [{**run.records[-1], "round": i + 1} for i in range(rounds)]
    figure = figures.convergence([replace(run, records=records)], Look())
    figure.canvas.draw()
    (axes,) = figure.axes
    at = [tick.get_text() for tick in axes.get_xticklabels()]
    assert all(text.isdigit() for text in at)
    heights = [tick.get_text() for tick in axes.get_yticklabels()]
    assert len(set(at)) == len(at)
    assert len(set(heights)) == len(heights)


def test_homophily_draws_what_was_measured(runs: list[Run]) -> None:
    (axes,) = figures.homophily(runs, Look()).axes
    clients = runs[0].evidence["inspection"]["clients"]
    heights = [bar.get_height() for bar in axes.patches]
    assert heights == pytest.approx([client["edge_homophily"] for client in clients])


def test_sensitivity_finds_what_is_varied(runs: list[Run]) -> None:
    local, prox = runs
    several = [varied(prox, score, **{"set.mu": mu}) for mu, score in ((1.0, 0.5), (0.1, 0.75))]
    (axes,) = figures.sensitivity([local, *several], Look()).axes
    (line,) = [own for own in axes.lines if own.get_marker() == "s"]
    assert list(line.get_xdata()) == [0.1, 1.0]
    assert list(line.get_ydata()) == pytest.approx([75, 50])
    assert axes.get_xlabel() == "mu"
    with pytest.raises(UserError, match="do not differ"):
        figures.sensitivity(runs, Look())
    two = [varied(prox, 0.5, lr=0.1), varied(prox, 0.5, **{"set.mu": 5.0})]
    with pytest.raises(UserError, match="--against"):
        figures.sensitivity(two, Look())
    figures.sensitivity(two, Look(against="lr"))
    with pytest.raises(UserError, match="unknown"):
        figures.sensitivity(two, Look(against="rounds"))


def test_noise_of_one_kind_is_an_axis_of_its_own(runs: list[Run], tmp_path: Path) -> None:
    local = runs[0]
    calm = replace(varied(local, 0.9), path=tmp_path / "calm")
    noisy = replace(varied(local, 0.5, noise="edges=0.25"), path=tmp_path / "noisy")
    (axes,) = figures.sensitivity([noisy, calm], Look()).axes
    assert list(axes.lines[0].get_xdata()) == [0, 0.25]
    assert list(axes.lines[0].get_ydata()) == pytest.approx([90, 50])
    assert axes.get_xlabel() == "noise, edges"
    mixed = replace(varied(local, 0.7, noise="labels=0.1"), path=tmp_path / "mixed")
    (axes,) = figures.sensitivity([noisy, calm, mixed], Look()).axes
    ticks = [tick.get_text() for tick in axes.get_xticklabels()]
    assert ticks == ["edges=0.25", "labels=0.1", "none"]


def test_client_scale_is_over_numbers_of_clients(runs: list[Run]) -> None:
    prox = runs[1]
    names = [f"client-{k}" for k in range(5)]
    more = replace(varied(prox, 0.5, clients=5), summary=prox.summary | {"clients": names})
    (axes,) = figures.client_scale([prox, more], Look()).axes
    assert [float(x) for x in axes.lines[0].get_xdata()] == [3, 5]
    with pytest.raises(UserError, match="sweep"):
        figures.client_scale(runs, Look())


def test_ablation_marks_every_run(runs: list[Run]) -> None:
    (axes,) = figures.ablation(runs, Look()).axes
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["local", "fedprox"]
    assert [t.get_text() for t in axes.texts] == [f"{100 * (run.score or 0):.1f}" for run in runs]


def test_mistakes_are_named(runs: list[Run], tmp_path: Path, capsys: Any) -> None:
    folder = runs[0].path
    assert call("plot", "convergense", folder) == 2
    assert "did you mean 'convergence'" in capsys.readouterr().err
    assert call("plot", "convergence", folder, "--out", tmp_path / "figure.doc") == 2
    assert ".pdf" in capsys.readouterr().err
    assert call("plot", "convergence", folder, "--against", "moons") == 2
    assert call("plot", "convergence", tmp_path / "nowhere") == 2
    assert call("plot", "convergence", folder, "--out", tmp_path / "deep" / "figure.pdf") == 0
    assert (tmp_path / "deep" / "figure.pdf").exists()
