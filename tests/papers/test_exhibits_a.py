"""Figures of FedSPA, S2FGL and FedATH, and FedATH's table of datasets, made of small data."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from papers.library import few_methods  # noqa: F401 -- a fixture
from polyphily.core.method import Method
from polyphily.errors import TrainingError, UserError
from polyphily.graphs.graph import Graph
from polyphily.graphs.loading import load
from polyphily.papers.exhibits import (
    Exhibit,
    Made,
    Wanted,
    common,
    drawing,
    exhibits,
    fedath,
    fedspa,
    s2fgl,
)
from polyphily.papers.exhibits.common import Bench, Line
from polyphily.papers.plan import Choice
from polyphily.report.style import save
from polyphily.report.trained import examine
from polyphily.runs.run import Execution

FIGURES = {
    "fedspa": ("1", "2a", "2b", "2c", "3", "4", "5", "6"),
    "s2fgl": ("1", "2", "3", "4", "5", "6"),
    "fedath": ("1a", "1b", "2", "3", "4", "5", "6", "7"),
}
DRAWINGS = {"fedspa": {"1", "3"}, "s2fgl": {"2", "3"}, "fedath": {"1a", "2", "3"}}
SMALL = "csbm:nodes=50-90,features=8,homophily=0.5,gap=0.6"
Train = Callable[[Execution, int], dict[str, Any]]


def train(execution: Execution, done: int) -> dict[str, Any]:
    return execution.go().summary


class Canned:
    """A training that says what a method would score, and remembers the runs."""

    def __init__(self, score: Callable[[Method], float] = lambda method: 50.0) -> None:
        self.score = score
        self.runs: list[Execution] = []

    def __call__(self, execution: Execution, done: int) -> dict[str, Any]:
        self.runs.append(execution)
        value = self.score(execution.method) / 100
        moment = {"round": 1, "test": {"accuracy": value, "accuracy_std": 0.01}}
        moments = dict.fromkeys(("best_val", "last5", "final"), moment)
        return {
            "evaluated": execution.method.evaluated,
            "rounds": execution.settings.rounds,
            "views": {"received": moments, "trained": moments},
        }

    @property
    def methods(self) -> list[str]:
        return [run.method.name for run in self.runs]


def want(
    out: Path,
    how: Train = train,
    forms: tuple[str, ...] = ("paper", "default"),
    given: Mapping[str, Any] | None = None,
    **choice: Any,
) -> Wanted:
    return Wanted(Choice(**{"seeds": (0,), "rounds": 2, **choice}), forms, given or {}, out, how)


def make(paper: str, name: str, wanted: Wanted) -> Made:
    exhibit: Exhibit = exhibits(paper)[name]
    assert exhibit.make is not None
    made = exhibit.make(wanted)
    assert all(len(row) == len(grid.columns) for grid in made.grids for row in grid.rows)
    return made


def rows(made: Made, grid: int = 0) -> list[dict[str, Any]]:
    found = made.grids[grid]
    return [dict(zip(found.columns, row, strict=True)) for row in found.rows]


def drawn(made: Made, folder: Path) -> list[Any]:
    """Draw an exhibit, write it, and return the axes with a title, one per panel."""
    assert made.draw is not None
    figure = made.draw()
    save(figure, folder / "figure.svg")
    assert (folder / "figure.svg").stat().st_size > 1000
    return [axes for axes in figure.axes if axes.get_title()]


@pytest.fixture
def data(real_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all figures be of Cornell, in two or three clients."""
    monkeypatch.setenv("POLYPHILY_DATA", str(real_data))
    for name in ("TRAINED", "SCALES"):
        monkeypatch.setattr(fedspa, name, {"cornell": (2, 3) if name == "SCALES" else (3,)})
    monkeypatch.setattr(s2fgl, "DATASETS", ("cornell",))
    monkeypatch.setattr(s2fgl, "SCALES", (2, 3))
    monkeypatch.setattr(s2fgl, "CLIENTS", 3)
    for name in ("EMBEDDED", "TUNED", "TRAINED"):
        monkeypatch.setattr(fedath, name, {"cornell": (3,)})
    monkeypatch.setattr(fedath, "SCALES", {"cornell": (2, 3)})
    monkeypatch.setattr(fedath, "table_of", lambda dataset: fedath.TABLES[0])
    monkeypatch.setattr(fedath, "PARTITION", "louvain")


@pytest.fixture
def synthetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let FedSPA's figures be of small synthetic clients."""
    monkeypatch.setattr(fedspa, "MIXED", SMALL)
    monkeypatch.setattr(fedspa, "CLIENTS", 4)


# What there is ------------------------------------------------------------------------------------


@pytest.mark.parametrize("paper", FIGURES)
def test_every_figure_of_the_paper_is_an_exhibit(paper: str) -> None:
    found = exhibits(paper)
    names = [name for name in found if name.startswith("figure-")]
    assert names == [f"figure-{name}" for name in FIGURES[paper]]
    for name in names:
        idea = name.removeprefix("figure-") in DRAWINGS[paper]
        assert found[name].illustration == idea
        assert (found[name].make is None) == idea


def test_the_exhibits_are_listed_without_torch() -> None:
    code = (
        "import sys; from polyphily.papers.exhibits import exhibits\n"
        f"for paper in {tuple(FIGURES)!r}: [e.state() for e in exhibits(paper).values()]\n"
        "assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYPHILY_DATA", str(tmp_path))
    assert exhibits("fedspa")["figure-4"].state() == "runs"
    assert exhibits("s2fgl")["figure-5"].state().startswith("needs data cora, citeseer")
    with pytest.raises(UserError, match="not present: cora, citeseer"):
        make("s2fgl", "figure-5", want(tmp_path))
    with pytest.raises(UserError, match="--clients: the figure has 10"):
        make("fedspa", "figure-4", want(tmp_path, clients=(7,)))
    with pytest.raises(UserError, match="--only: the figure has"):
        make("fedspa", "figure-4", want(tmp_path, datasets=("cora",)))


# Runs ---------------------------------------------------------------------------------------------


def test_a_form_and_what_the_user_set_reach_the_paper_method(tmp_path: Path) -> None:
    wanted = want(tmp_path, given={"hide": 0.25}, forms=("paper", "default"))
    lines = common.forms_of("fedspa", wanted, sfpd=False)
    assert dict(lines["paper's form"].set) == {"paper": True, "hide": 0.25, "sfpd": False}
    assert dict(lines["default form"].set) == {"hide": 0.25, "sfpd": False}
    found = common.lines_of("fedspa", ("fedavg", "fggp", "fedspa"), wanted)
    assert [line.label for line in found] == [
        "fedavg",
        "fedspa, paper's form",
        "fedspa, default form",
    ]
    assert common.lacking(("fedavg", "fggp")) == ["Not in the library, and left out: fggp."]


def test_a_run_follows_the_protocol_and_is_made_once(tmp_path: Path) -> None:
    bench = Bench("figure-9", fedspa.SYNTHETIC, want(tmp_path, seeds=(3,), rounds=1))
    first = bench.run(Line("fedavg", "fedavg"), SMALL, "natural", 3)
    assert first.job.settings["lr"] == 0.1
    assert first.job.settings["rounds"] == 1
    assert first.job.seeds == (3,)
    assert first.job.data["split"] == "0.6,0.2,0.2:client"
    assert first.folder.parent.parent == tmp_path / "figure-9"
    idle = Canned()
    other = Bench("figure-10", fedspa.SYNTHETIC, want(tmp_path, idle, seeds=(3,), rounds=1))
    again = other.run(Line("another name", "fedavg"), SMALL, "natural", 3)
    assert not idle.runs  # a finished run with the same request, of another figure
    assert again.score == first.score


def test_a_failed_run_is_left_out_and_said(tmp_path: Path) -> None:
    def fail(execution: Execution, done: int) -> dict[str, Any]:
        raise TrainingError("the loss is not finite")

    bench = Bench("figure-9", fedspa.SYNTHETIC, want(tmp_path, fail))
    line = Line("fedavg", "fedavg")
    assert bench.run(line, SMALL, "natural", 3).score == (None, None)
    assert bench.notes(SMALL)[-1].endswith("fedavg: failed: the loss is not finite.")
    panels = {"csbm": bench.scores([line], SMALL, "natural", {3: {"clients": 3}})}
    assert drawing.series_grid("", panels, "data", "clients", "%").rows[0][3] is None
    drawing.draw_lines(panels, "clients", "%")


# FedSPA -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("synthetic")
def test_fedspa_2_bias_and_growth_of_every_client(tmp_path: Path) -> None:
    made = make("fedspa", "figure-2c", want(tmp_path, seeds=(0, 1)))
    found = rows(made)
    scores = {}
    for method in ("fedavg", "local"):
        (file,) = (tmp_path / "figure-2").glob(f"*/{method}/summary.json")
        scores[method] = json.loads(file.read_text())["per_seed"]
    at = 0
    for seed in (0, 1):
        clients = load(SMALL, partition="natural", clients=4, seed=seed).clients
        same = [(g.labels[g.edges[0]] == g.labels[g.edges[1]]) for g in clients]
        globe = np.concatenate(same).mean()
        for k, graph in enumerate(clients):
            row, at = found[at], at + 1
            assert (row["seed"], row["nodes"]) == (seed, graph.num_nodes)
            assert row["bias"] == pytest.approx(abs(same[k].mean() - globe))
            views = {method: runs[seed]["views"] for method, runs in scores.items()}
            joint = views["fedavg"]["received"]["last5"]["test"]["accuracy_per_client"][k]
            alone = views["local"]["trained"]["last5"]["test"]["accuracy_per_client"][k]
            assert row["growth"] == pytest.approx(100 * (joint - alone))
    assert at == len(found)
    assert "Spearman correlation" in drawn(made, tmp_path)[0].get_title()
    idle = Canned()
    by_nodes = make("fedspa", "figure-2b", want(tmp_path, idle, seeds=(0, 1)))
    assert by_nodes.grids == made.grids  # of the same runs
    assert not idle.runs


@pytest.mark.usefixtures("synthetic")
def test_fedspa_2a_has_a_curve_for_each_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fedspa, "GAPS", (0.0, 0.4))
    monkeypatch.setattr(fedspa, "CLIENTS", 2)
    made = make("fedspa", "figure-2a", want(tmp_path, rounds=1, seeds=(0, 1)))
    for row in rows(made):
        (file,) = tmp_path.glob(f"figure-2a/*gap-{row['line'][4:]}-*/fedavg/metrics.jsonl")
        record = json.loads(file.read_text().splitlines()[row["round"] - 1])
        values = [100 * run["received"]["test"]["accuracy"] for run in record["per_seed"]]
        assert row["test accuracy (%)"] == pytest.approx(fmean(values))
        assert row["deviation"] == pytest.approx(np.std(values, ddof=1))
    assert [row["line"] for row in rows(made)] == ["gap 0", "gap 0.4"]
    assert len(drawn(made, tmp_path)) == 1


def test_fedspa_4_is_fedspa_minus_fedavg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def small(dataset: str, **arguments: Any) -> Any:
        return load(f"{dataset},nodes=60,features=8", **arguments)

    monkeypatch.setattr("polyphily.graphs.prepared.load", small)
    score = {"fedavg": 40.0, "fedspa": 47.5}
    canned = Canned(lambda method: score[method.name])
    made = make("fedspa", "figure-4", want(tmp_path, canned, datasets=("csbm",)))
    cells = {(row["homophily"], row["gap"], row["degree"]) for row in rows(made)}
    assert cells == {(h, g, d) for h in (0.75, 0.25) for g in (0.1, 0.3, 0.5) for d in (2, 5, 10)}
    assert {row["growth"] for row in rows(made)} == {7.5}
    assert {row["form"] for row in rows(made)} == {"paper's form", "default form"}
    assert canned.methods.count("fedavg") == 18
    assert canned.methods.count("fedspa") == 36
    assert len(drawn(made, tmp_path)) == 4


@pytest.mark.usefixtures("data")
def test_fedspa_5_and_6_show_methods_of_the_library(tmp_path: Path) -> None:
    made = make("fedspa", "figure-5", want(tmp_path, rounds=1, methods=("fedavg", "fedspa")))
    assert {row["line"] for row in rows(made)} == {
        "fedavg",
        "fedspa, paper's form",
        "fedspa, default form",
    }
    assert any("fggp" in note for note in made.notes)
    assert "after every round" in " ".join(made.notes)
    (axes,) = drawn(made, tmp_path)
    assert len(axes.lines) == 3
    canned = Canned()
    scales = make("fedspa", "figure-6", want(tmp_path, canned, forms=("default",)))
    assert [(row["line"], row["clients"]) for row in rows(scales)] == [
        ("fedavg", 2),
        ("fedavg", 3),
        ("fedspa, default form", 2),
        ("fedspa, default form", 3),
    ]
    assert {len(run.federations[0]) for run in canned.runs} == {2, 3}


# S2FGL --------------------------------------------------------------------------------------------


def inertia(graph: Graph) -> float:
    """Compute the structure inertia score by a dense inverse."""
    assert graph.masks is not None
    adjacency = graph.adjacency().toarray().astype(float)
    walk = adjacency / np.maximum(adjacency.sum(axis=1, keepdims=True), 1)
    reach = 0.15 * np.linalg.inv(np.eye(len(walk)) - 0.85 * walk)
    return float(reach[:, graph.masks.train].max(axis=1).sum())


def divergence(first: Graph, second: Graph) -> float:
    """Compute KL between the histograms of eigenvalues."""
    shares = []
    for graph in (first, second):
        adjacency = graph.adjacency().toarray().astype(float)
        degrees = adjacency.sum(axis=1)
        scale = np.divide(1, np.sqrt(degrees), out=np.zeros(len(degrees)), where=degrees > 0)
        matrix = np.diag((degrees > 0).astype(float)) - scale[:, None] * adjacency * scale
        counts, _ = np.histogram(np.linalg.eigvalsh(matrix).clip(0, 2), bins=51, range=(0, 2))
        own = counts / counts.sum() + 1e-8
        shares.append(own / own.sum())
    return float((shares[0] * np.log(shares[0] / shares[1])).sum())


def cornell(clients: int, seed: int = 0) -> tuple[Graph, ...]:
    partition = "random" if clients == 1 else "louvain"
    split = "0.6,0.2,0.2:client"
    return load("cornell", partition=partition, clients=clients, split=split, seed=seed).clients


@pytest.mark.usefixtures("data")
def test_s2fgl_1_measures_inertia_and_spectra(tmp_path: Path) -> None:
    made = make("s2fgl", "figure-1", want(tmp_path, seeds=(0, 1)))
    for row in rows(made):
        scores = [[inertia(g) for g in cornell(row["clients"], seed)] for seed in (0, 1)]
        assert row["SIS, sum"] == pytest.approx(fmean(map(sum, scores)), rel=1e-6)
        assert row["SIS of a client"] == pytest.approx(fmean(map(fmean, scores)), rel=1e-6)
    assert [row["clients"] for row in rows(made)] == [1, 2, 3]
    clients = cornell(3)
    for i, row in enumerate(rows(made, 1)):
        for j in range(3):
            expected = divergence(clients[i], clients[j])
            assert row[f"j = {j + 1}"] == pytest.approx(expected, abs=1e-6)
    assert len(drawn(made, tmp_path)) == 3


@pytest.mark.usefixtures("data")
def test_s2fgl_4_is_a_grid_of_both_weights(tmp_path: Path) -> None:
    def score(method: Any) -> float:
        return 30.0 if method.name == "fedavg" else 30.0 + method.lambda1 - method.lambda2

    canned = Canned(score)
    made = make("s2fgl", "figure-4", want(tmp_path, canned, forms=("paper",)))
    assert len(canned.runs) == 1 + 16
    for row in rows(made):
        assert row["growth"] == pytest.approx(row["λ1"] - row["λ2"])
    (axes,) = drawn(made, tmp_path)
    shown = axes.images[0].get_array()
    assert shown.shape == (4, 4)
    assert shown[0, 3] == pytest.approx(100 - 1)
    assert shown[3, 0] == pytest.approx(1 - 0.01)


@pytest.mark.usefixtures("data")
def test_s2fgl_5_compares_methods_over_clients(tmp_path: Path) -> None:
    canned = Canned()
    made = make("s2fgl", "figure-5", want(tmp_path, canned, forms=("default",), clients=(3,)))
    assert canned.methods == ["fedavg", "fedprox", "s2fgl"]
    assert "Not in the library, and left out: fgssl." in made.notes
    assert any("has not begun" in note for note in made.notes)  # two rounds are its warm-up
    assert len(drawn(made, tmp_path)) == 1


@pytest.mark.usefixtures("data")
def test_s2fgl_6_sets_gains_beside_measures(tmp_path: Path) -> None:
    def score(method: Any) -> float:
        if method.name == "fedavg":
            return 30.0
        assert method.nlir != method.fgma  # one part alone
        return 33.0 if method.nlir else 31.0

    made = make("s2fgl", "figure-6", want(tmp_path, Canned(score), forms=("default",)))
    assert len(rows(made)) == 4
    for row in rows(made):
        clients = cornell(row["clients"])
        pairs = [divergence(a, b) for a in clients for b in clients if a is not b]
        expected = {"NLIR": fmean(map(inertia, clients)), "FGMA": fmean(pairs)}[row["part"]]
        assert row["SIS (NLIR) or KL (FGMA)"] == pytest.approx(expected, rel=1e-4)
        assert row["gain"] == pytest.approx({"NLIR": 3.0, "FGMA": 1.0}[row["part"]])
    assert len(drawn(made, tmp_path)) == 2


# FedATH -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("data")
def test_fedath_1b_is_the_distance_between_clients_by_class(tmp_path: Path) -> None:
    one, two, both = (
        make("fedath", "figure-1b", want(tmp_path / str(seeds), seeds=seeds, forms=("default",)))
        for seeds in ((0,), (1,), (0, 1))
    )
    bench = Bench("figure-1b", fedath.TABLES[0], want(tmp_path / "(0,)"))
    for label in ("fedavg", "fedath, default form"):
        ran = bench.run(Line(label, label.partition(",")[0]), "cornell", "louvain", 3)
        expected = examine(ran.simulation(), "trained").embedding_divergence_per_class
        own = [row["Wasserstein distance"] for row in rows(one) if row["line"] == label]
        known = [None if np.isnan(value) else pytest.approx(value) for value in expected]
        assert own[:-1] == known
        assert own[-1] == pytest.approx(np.nanmean(expected))
    for first, second, mean in zip(rows(one), rows(two), rows(both), strict=True):
        found = [row["Wasserstein distance"] for row in (first, second)]
        values = [value for value in found if value is not None]
        if mean["class"] != "mean" and values:
            assert mean["Wasserstein distance"] == pytest.approx(fmean(values), rel=1e-4)
    assert "Not in the library, and left out: fgssl, fedtad." in one.notes
    assert len(drawn(both, tmp_path)) == 1


@pytest.mark.usefixtures("data")
def test_fedath_4_varies_lambda(tmp_path: Path) -> None:
    canned = Canned(lambda method: 50 + np.log10(getattr(method, "independence", 1)))
    made = make("fedath", "figure-4", want(tmp_path, canned))
    assert [row["λ"] for row in rows(made)] == [1e-4, 1e-3, 1e-2, 0.1, 1, 10] * 2
    for row in rows(made):
        assert row["test accuracy (%)"] == pytest.approx(50 + np.log10(row["λ"]))
    (axes,) = drawn(made, tmp_path)
    assert axes.get_xscale() == "log"


@pytest.mark.usefixtures("data")
def test_fedath_5_varies_the_share_of_train_nodes(tmp_path: Path) -> None:
    canned = Canned()
    wanted = want(tmp_path, canned, forms=("default",), methods=("fedavg", "fedath"))
    made = make("fedath", "figure-5", wanted)
    for run, ratio in zip(canned.runs[::2], (0.1, 0.2, 0.3, 0.4, 0.5), strict=True):
        (federation,) = run.federations
        assert federation.split == f"{ratio:g},{(1 - ratio) / 2:g},{(1 - ratio) / 2:g}:stratified"
        masks = [graph.masks for graph in federation.clients if graph.masks is not None]
        nodes = sum(len(mask.train) for mask in masks)
        assert sum(mask.train.sum() for mask in masks) / nodes == pytest.approx(ratio, abs=0.06)
    assert len(rows(made)) == 10
    assert "Not in the library, and left out: fedsage+, fgssl, fedpub, fedtad." in made.notes


@pytest.mark.usefixtures("data")
def test_fedath_6_and_7_have_all_methods_of_the_library(tmp_path: Path) -> None:
    known = ["fedavg", "fedprox", "moon", "fedopt", "fedproto", "fedath"]
    canned = Canned()
    made = make("fedath", "figure-6", want(tmp_path, canned, forms=("paper",)))
    assert canned.methods == known * 2
    assert {row["clients"] for row in rows(made)} == {2, 3}
    curves = make("fedath", "figure-7", want(tmp_path, rounds=1, methods=("fedavg", "fedath")))
    assert {row["round"] for row in rows(curves)} == {1}
    assert len(drawn(curves, tmp_path)) == 1


def test_fedath_table_7_counts_the_data(real_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYPHILY_DATA", str(real_data))
    made = make("fedath", "7", want(Path(), datasets=("cora",)))
    assert [row["statistic"] for row in rows(made)][:4] == ["nodes", "features", "edges", "classes"]
    assert [row["printed"] for row in rows(made)][:4] == [2708, 1433, 5429, 7]
    assert [row["counted"] for row in rows(made)][:4] == [2708, 1433, 5278, 7]
    assert rows(made)[4]["counted"] == "0.2,0.4,0.4:stratified"
    assert made.draw is None
    monkeypatch.setenv("POLYPHILY_DATA", "/nowhere")
    without = make("fedath", "7", want(Path(), datasets=("cora",)))
    assert [row["counted"] for row in rows(without)][:4] == [None] * 4
    assert "Data not present, and left out: cora." in without.notes
