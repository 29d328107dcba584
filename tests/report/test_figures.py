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
@pytest.mark.parametrize(
    "name", [n for n in figures.FIGURES if n not in ("client-scale", "sensitivity")]
)
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


def test_gain_is_the_difference_to_the_base_client_by_client(runs: list[Run]) -> None:
    local, prox = runs
    (axes,) = figures.gain(runs, Look()).axes
    (line,) = [own for own in axes.lines if own.get_label() == "fedprox"]
    first = [run.summary["per_seed"][0]["best_val"]["test"] for run in runs]
    before, after = (scores["accuracy_per_client"] for scores in first)
    places = [c["edge_homophily"] for c in local.evidence["inspection"]["clients"]]
    gains = [100 * (b - a) for a, b in zip(before, after, strict=True)]
    wanted = sorted(zip(places, gains, strict=True))
    assert list(line.get_xdata()) == pytest.approx([x for x, _ in wanted])
    assert list(line.get_ydata()) == pytest.approx([y for _, y in wanted])
    (axes,) = figures.gain(runs, Look(base="fedprox", against="adjusted homophily")).axes
    assert [own.get_label() for own in axes.lines[1:]] == ["local"]
    assert axes.get_ylabel() == "gain over fedprox (points)"
    with pytest.raises(UserError, match="unknown --base 'fedspa'"):
        figures.gain(runs, Look(base="fedspa"))
    with pytest.raises(UserError, match="another method"):
        figures.gain([local], Look())
    with pytest.raises(UserError, match="name one with --base"):
        figures.gain([prox], Look())


def test_client_spread_has_a_dot_per_client_and_their_median(runs: list[Run]) -> None:
    (axes,) = figures.client_spread(runs, Look()).axes
    for line, bar, run in zip(axes.lines, axes.collections, runs, strict=True):
        scores = sorted(100 * score for score in run.per_client if score is not None)
        assert list(line.get_xdata()) == pytest.approx(scores)
        assert bar.get_segments()[0][0][0] == pytest.approx(scores[1])  # of three


def test_cost_counts_up_to_the_best_round(runs: list[Run]) -> None:
    local, prox = runs
    (axes,) = figures.cost(runs, Look()).axes
    x = {c.get_label(): c.lines[0].get_xdata()[0] for c in axes.containers}
    best = [seed["best_val"]["round"] for seed in prox.summary["per_seed"]]
    wanted = sum(prox.megabytes[number - 1] for number in best) / len(best)
    assert x == {"local": 0, "fedprox": pytest.approx(wanted)}
    (axes,) = figures.cost([local], Look(against="rounds")).axes
    last = [max(seed["best_val"]["round"]) for seed in local.summary["per_seed"]]
    assert axes.containers[0].lines[0].get_xdata()[0] == sum(last) / len(last)


def test_spectra_are_shares_of_eigenvalues(runs: list[Run]) -> None:
    axes = figures.spectra(runs, Look()).axes[0]
    assert len(axes.lines) == 3
    assert all(sum(line.get_ydata()) == pytest.approx(100, rel=1e-3) for line in axes.lines)


def test_collaboration_shows_the_last_weights(runs: list[Run]) -> None:
    axes = figures.collaboration(runs, Look()).axes[0]
    frame = runs[1].collaboration[-1]
    assert axes.get_title() == f"fedprox, round {frame['round']}"
    assert axes.images[0].get_array().tolist() == frame["weights"]
    with pytest.raises(UserError, match="recorded weights"):
        figures.collaboration(runs[:1], Look())


def test_critical_difference_needs_several_methods_and_seeds(runs: list[Run]) -> None:
    (axes,) = figures.mean_ranks(runs, Look()).axes
    words = " ".join(text.get_text() for text in axes.texts)
    assert "local" in words
    assert "fedprox" in words
    with pytest.raises(UserError, match="several methods"):
        figures.mean_ranks(runs[:1], Look())


def test_the_same_figure_is_the_same_file(runs: list[Run], tmp_path: Path) -> None:
    files = [tmp_path / f"{i}.{kind}" for kind in ("svg", "pdf") for i in range(2)]
    for file in files:
        style.save(figures.convergence(runs, Look()), file)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert files[2].read_bytes() == files[3].read_bytes()


def test_mistakes_are_named(runs: list[Run], tmp_path: Path, capsys: Any) -> None:
    folder = runs[0].path
    assert call("plot", "convergense", folder) == 2
    assert "did you mean 'convergence'" in capsys.readouterr().err
    assert call("plot", "convergence", folder, "--out", tmp_path / "figure.doc") == 2
    assert ".pdf" in capsys.readouterr().err
    assert call("plot", "convergence", folder, "--against", "moons") == 2
    assert call("plot", "convergence", tmp_path / "nowhere") == 2
    capsys.readouterr()
    assert call("plot", "convergence", folder, "--base", "local") == 2
    assert "--base is for gain" in capsys.readouterr().err
    assert call("plot", "convergence", folder, "--out", tmp_path / "deep" / "figure.pdf") == 0
    assert (tmp_path / "deep" / "figure.pdf").exists()
