"""Figures and computed tables of FedGSP and FedHERO, made of small data."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from papers.library import few_methods  # noqa: F401 -- a fixture
from polyphily.graphs.graph import Graph
from polyphily.graphs.loading import load
from polyphily.heterogeneity.filters import FREQUENCIES, basis_response
from polyphily.heterogeneity.spectral import normalised_adjacency
from polyphily.nn.unifilter import train_homophily
from polyphily.papers import Published, tables
from polyphily.papers.exhibits import Exhibit, Made, Wanted, exhibits, fedgsp, fedhero
from polyphily.papers.exhibits.fedgsp import Cell
from polyphily.papers.plan import Choice
from polyphily.report.trained import host_bases
from polyphily.runs.run import Execution

DATA = "csbm:nodes=60,features=8,gap=0.6"
CLIENTS, NATURAL = 3, "natural"
CELL = Cell(DATA, NATURAL, CLIENTS)
SPLIT = "0.2,0.4,0.4"  # of each client: there is no whole graph to split
TINY = {"rounds": 2, "epochs": 1, "hidden": 8, "layers": 2, "lr": 0.01, "dropout": 0.0}


def train(execution: Execution, done: int) -> dict[str, Any]:
    return execution.go().summary


def canned(score: Callable[[Any], float]) -> Callable[[Execution, int], dict[str, Any]]:
    """Return a training that only says what a method would score."""

    def pretend(execution: Execution, done: int) -> dict[str, Any]:
        value = score(execution.method) / 100
        names = [name + end for name in ("accuracy", "auc") for end in ("", "_client_mean")]
        moment = {"round": 1, "test": dict.fromkeys(names, value)}
        views = {view: {"best_val": moment} for view in ("received", "trained")}
        return {"evaluated": execution.method.evaluated, "views": views, "seeds": [0]}

    return pretend


def want(out: Path, how: Any = train, *forms: str, **choice: Any) -> Wanted:
    given = {"seeds": (0,), "rounds": 2, **choice}
    return Wanted(Choice(**given), forms or ("paper", "default"), {}, out, how)


def rows(made: Made, grid: int = 0) -> list[dict[str, Any]]:
    """Return a grid's rows by the names of its columns; of equal names the last counts."""
    found = made.grids[grid]
    return [dict(zip(found.columns, row, strict=True)) for row in found.rows]


def make(paper: str, name: str, wanted: Wanted) -> Made:
    exhibit: Exhibit = exhibits(paper)[name]
    assert exhibit.make is not None
    made = exhibit.make(wanted)
    for grid in made.grids:
        assert all(len(row) == len(grid.columns) for row in grid.rows)
    return made


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the exhibits be of synthetic clients and a narrow network."""
    case = Published(DATA, NATURAL, CLIENTS, dict(TINY), {"order": 3, "tau": 0.9, "vectors": 2})
    monkeypatch.setattr(fedgsp, "published", lambda *cell: case)
    paper = tables.paper("fedgsp")
    split = {
        name: replace(table, common={**table.common, "split": SPLIT})
        for name, table in paper.tables.items()
    }
    monkeypatch.setattr(tables, "paper", lambda name: replace(paper, tables=split))
    for name in ("VARIED", "COMPARED", "STUDIED"):
        monkeypatch.setattr(fedgsp, name, (CELL,))
    monkeypatch.setattr(fedgsp, "COST_CELL", CELL)
    monkeypatch.setattr(fedgsp, "HOMOPHILIC", ())
    monkeypatch.setattr(fedgsp, "HETEROPHILIC", (DATA,))  # their features are taken as they are
    monkeypatch.setattr(fedhero, "METIS", NATURAL)
    monkeypatch.setattr(fedhero, "LOUVAIN", NATURAL)
    monkeypatch.setattr(fedhero, "DATASETS", (DATA,))
    monkeypatch.setattr(fedhero, "NATURAL", (DATA,))
    for name in ("COST_CELL", "SEVEN"):
        monkeypatch.setattr(fedhero, name, {DATA: (CLIENTS,)})


def clients_of_cell() -> tuple[Graph, ...]:
    return load(DATA, clients=CLIENTS, split=SPLIT).clients


def joint(graph: Graph) -> np.ndarray:
    """Count edges by the labels of their ends, one by one."""
    found = np.zeros((2, 2))
    for u, v in graph.edges.T:
        found[graph.labels[u], graph.labels[v]] += 1
    return found


# Which there are ----------------------------------------------------------------------------------


def test_every_figure_and_computed_table_has_an_exhibit() -> None:
    own = exhibits("fedgsp")
    assert set(own) == {"I", *[f"figure-{n}" for n in range(1, 11)]}
    assert {n for n, e in own.items() if e.illustration} == {"figure-4", "figure-5"}
    own = exhibits("fedhero")
    assert set(own) == {"2", "6", "7", *[f"figure-{n}" for n in range(1, 10)]}
    assert {n for n, e in own.items() if e.illustration} == {"figure-1", "figure-2"}


@pytest.mark.parametrize("paper", ["fedgsp", "fedhero"])
def test_what_is_no_illustration_can_be_made(paper: str) -> None:
    for exhibit in exhibits(paper).values():
        assert (exhibit.make is None) == exhibit.illustration


# FedGSP -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("tiny")
def test_homophily_levels_are_adjusted_homophily(tmp_path: Path) -> None:
    made = make("fedgsp", "figure-1", want(tmp_path))
    for row, graph in zip(rows(made), clients_of_cell(), strict=True):
        counts = joint(graph)
        ends = counts.sum(axis=1) / counts.sum()
        chance = (ends**2).sum()
        expected = (np.trace(counts) / counts.sum() - chance) / (1 - chance)
        assert row["homophily"] == pytest.approx(expected)
    assert made.draw is not None
    assert len(made.draw().axes[0].patches) == CLIENTS


@pytest.mark.usefixtures("tiny")
def test_similarities_compare_labels_at_the_ends_of_edges(tmp_path: Path) -> None:
    made = make("fedgsp", "figure-3", want(tmp_path))
    shares = [joint(graph) / joint(graph).sum() for graph in clients_of_cell()]
    pairs = list(combinations(shares, 2))
    expected = [1 - np.abs(first - second).sum() / 2 for first, second in pairs]
    assert [row["similarity"] for row in rows(made, 1)] == pytest.approx(expected)
    (ratios,) = rows(made)
    assert ratios["complementary"] == np.mean([value < 0.5 for value in expected])
    assert made.draw is not None
    made.draw()


def response(graph: Graph, weights: np.ndarray, tau: float, order: int) -> np.ndarray:
    assert graph.masks is not None
    h = train_homophily(graph.edges, np.where(graph.masks.train, graph.labels, -1))
    propagation = normalised_adjacency(graph)
    return basis_response(
        lambda p, x: host_bases(p, x, h, order), propagation, graph.features, weights, tau
    )


@pytest.mark.usefixtures("tiny")
def test_responses_are_those_of_the_written_models_at_both_ends_of_homophily(
    tmp_path: Path,
) -> None:
    made = make("fedgsp", "figure-6", want(tmp_path, train, "default"))
    graphs = clients_of_cell()
    levels = fedgsp.homophily_of(load(DATA, clients=CLIENTS))
    wanted = {int(np.argmax(levels)), int(np.argmin(levels))}
    shown = {int(row["client"].split("client ")[1].split(",")[0]) - 1 for row in rows(made)}
    assert shown == wanted
    for client in wanted:
        for method in ("local", "fedavg"):  # the server's model is everyone's
            number = client if method == "local" else 0
            (file,) = tmp_path.glob(f"figure-6/*/{method}-on-*/models/client-{number}.safetensors")
            weights = load_file(file)["coefficients"].reshape(4, -1).astype(np.float64)
            expected = response(graphs[client], weights, 0.95, 3)
            found = {
                row["frequency"]: row["response"]
                for row in rows(made)
                if f"client {client + 1}," in row["client"] and row["line"].startswith(method)
            }
            for frequency, value in zip(FREQUENCIES.tolist(), expected, strict=True):
                assert found.get(frequency, math.nan) == pytest.approx(value, nan_ok=True, rel=1e-5)
    assert {row["line"] for row in rows(made)} == {
        "local on unifilter",
        "fedavg on unifilter",
        "fedgsp, default form",
    }
    assert made.draw is not None
    assert len(made.draw().axes) == 2


@pytest.mark.usefixtures("tiny")
def test_figure_2_shows_local_models_only(tmp_path: Path) -> None:
    made = make("fedgsp", "figure-2", want(tmp_path))
    assert {row["line"] for row in rows(made)} == {"local on unifilter"}


@pytest.mark.usefixtures("tiny")
def test_costs_count_parameters_and_bytes(tmp_path: Path) -> None:
    made = make("fedgsp", "I", want(tmp_path, train, "default", methods=("fedavg", "gcfl")))
    fedavg, gcfl = rows(made)
    features, hidden, classes = 8, 128, 2  # the width is the protocol's
    parameters = features * hidden + hidden + hidden * classes + classes
    assert fedavg["parameters"] == parameters
    assert fedavg["kB down"] == 4 * parameters / 1000
    assert fedavg["kB up"] == 4 * (parameters + 1) / 1000  # and the client's weight in the mean
    assert fedavg["seconds"] > 0
    assert gcfl["server time"] == "M + M²(log M + d²)"
    assert gcfl["parameters"] is None
    assert any("gcfl" in note for note in made.notes)


@pytest.mark.usefixtures("tiny")
def test_curves_are_the_scores_of_the_records(tmp_path: Path) -> None:
    wanted = want(tmp_path, train, methods=("fedavg", "fedgsp"))
    made = fedgsp.curves(wanted, "figure-7", NATURAL, CLIENTS)
    (folder,) = tmp_path.glob("figure-7/*/fedavg")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    expected = [100 * record["trained"]["test"]["accuracy_client_mean"] for record in records]
    assert [row["score"] for row in rows(made) if row["line"] == "fedavg"] == expected
    assert {row["line"] for row in rows(made)} == {
        "fedavg",
        "fedgsp, paper's form",
        "fedgsp, default form",
    }
    assert made.draw is not None
    assert len(made.draw().axes[0].lines) == 3


@pytest.mark.usefixtures("tiny")
def test_orders_and_vectors_are_varied_one_at_a_time_in_both_forms(tmp_path: Path) -> None:
    how = canned(lambda m: m.order + 0.1 * m.vectors + (50 if m.compare == "vectors" else 0))
    made = make("fedgsp", "figure-9", want(tmp_path, how))
    for row in rows(made):
        paper = 50 if row["line"] == "paper's form" else 0
        varied = row["value"] + 0.2 if row["varied"].endswith("K") else 3 + 0.1 * row["value"]
        assert row["score"] == pytest.approx(varied + paper)
    assert len(rows(made)) == 2 * (len(fedgsp.ORDERS) + len(fedgsp.VECTORS))
    assert made.draw is not None
    assert [axes.get_xlabel() for axes in made.draw().axes] == ["K", "t"]


@pytest.mark.usefixtures("tiny")
def test_gamma_and_tau_make_a_grid(tmp_path: Path) -> None:
    how = canned(lambda m: m.gamma + m.tau)
    made = make("fedgsp", "figure-10", want(tmp_path, how))
    found = {(row["form"], row["gamma"], row["tau"]): row["score"] for row in rows(made)}
    assert len(found) == 2 * len(fedgsp.GAMMAS) * len(fedgsp.TAUS)
    assert found["default form", 5.0, 0.7] == pytest.approx(5.7)
    assert made.draw is not None
    image = made.draw().axes[0].images[0].get_array()
    assert image[fedgsp.GAMMAS.index(5.0), 0] == pytest.approx(5.7)


# FedHERO ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("tiny")
def test_overhead_is_what_fedhero_sends_beyond_fedavg(tmp_path: Path) -> None:
    wanted = want(tmp_path, train, "default", methods=("fedavg", "fedhero", "fedstar"))
    fedavg, fedstar, own = rows(make("fedhero", "2", wanted))
    (file,) = tmp_path.glob("table-2/*/fedhero-default-form/models/client-0.safetensors")
    sent = sum(value.size for value in load_file(file).values())  # the default shares everything
    assert own["kB up"] == 4 * (sent + 1) / 1000
    assert own["kB up beyond FedAvg"] == pytest.approx(own["kB up"] - fedavg["kB up"])
    assert own["communication"] == "N_H d + d²"
    assert (fedstar["communication"], fedstar["kB up"]) == ("1", None)


def test_statistics_are_counted() -> None:
    graphs = load(DATA, clients=CLIENTS).clients
    edges = {(k, min(u, v), max(u, v)) for k, g in enumerate(graphs) for u, v in g.edges.T}
    assert fedhero.count(graphs) == (sum(len(g.labels) for g in graphs), len(edges), 8, 2)


@pytest.fixture
def chameleon(real_data: Path, monkeypatch: pytest.MonkeyPatch) -> Choice:
    monkeypatch.setenv("POLYPHILY_DATA", str(real_data))
    return Choice(datasets=("chameleon",), seeds=(0,))


def test_homophily_by_partition_is_near_the_printed_one(chameleon: Choice, tmp_path: Path) -> None:
    wanted = Wanted(chameleon, ("paper",), {}, tmp_path, train)
    found = rows(make("fedhero", "7", wanted))
    assert [row["partition"] for row in found] == ["METIS", "Louvain", "whole graph"]
    for row in found:
        assert row["node homophily"] == pytest.approx(float(row["printed"][:4]), abs=0.02)


def test_statistics_of_chameleon(chameleon: Choice, tmp_path: Path) -> None:
    (row,) = rows(make("fedhero", "6", Wanted(chameleon, ("paper",), {}, tmp_path, train)))
    assert (row["nodes, printed"], row["nodes, counted"]) == (2_277, 2_277)
    assert (row["features, printed"], row["features, counted"]) == (2_235, 2_325)


def test_neighbours_by_class_are_shares_of_edges(chameleon: Choice, tmp_path: Path) -> None:
    wanted = Wanted(chameleon, ("paper",), {}, tmp_path, train)
    made = make("fedhero", "figure-7", wanted)
    graph = load("chameleon", partition="metis", clients=5).clients[1]
    counts = np.zeros((5, 5))
    for u, v in graph.edges.T:
        counts[graph.labels[u], graph.labels[v]] += 1
    found = [row for row in rows(made) if row["client"] == "client 2"]
    assert len(found) == 25
    for row in found:
        a, b = row["class"] - 1, row["neighbour"] - 1
        assert row["share"] == pytest.approx(counts[a, b] / counts[a].sum())
    two = make("fedhero", "figure-6", wanted)
    assert len({row["client"] for row in rows(two)}) == 2
    assert two.draw is not None
    assert len(two.draw().axes) == 2


def test_the_two_clients_shown_are_those_that_differ_most() -> None:
    even, left, right = np.full((2, 2), 0.5), np.eye(2), np.eye(2)[::-1]
    assert fedhero.most_different([even, left, right]) == (1, 2)


@pytest.mark.usefixtures("tiny")
def test_natural_clients_are_scored_by_each_method(tmp_path: Path) -> None:
    made = make("fedhero", "figure-3", want(tmp_path, canned(lambda m: len(m.name))))
    found = {row["method"]: row["score"] for row in rows(made)}
    assert found["local"] == pytest.approx(5)
    assert found["fedhero, paper's form"] == found["fedhero, default form"] == pytest.approx(7)
    assert made.draw is not None
    assert len(made.draw().axes[0].patches) == len(found)


def test_fraud_and_credit_are_scored_by_area() -> None:
    assert {name: entry["metric"] for name, entry in fedhero.BY_AREA.items()} == {
        "ieee-fraud": "auc",
        "credit": "auc",
    }


@pytest.mark.usefixtures("tiny")
def test_scores_over_rounds_have_a_line_for_each_form(tmp_path: Path) -> None:
    made = make("fedhero", "figure-4", want(tmp_path, train, methods=("fedhero",)))
    assert {row["line"] for row in rows(made)} == {"fedhero, paper's form", "fedhero, default form"}
    assert {row["round"] for row in rows(made)} == {1, 2}


@pytest.mark.usefixtures("tiny")
def test_attack_and_noise(tmp_path: Path) -> None:
    wanted = want(tmp_path, train, "default", methods=("local", "fedavg"))
    made = make("fedhero", "figure-5", wanted)
    attacks = {(row["method"], row["attacker sees"]): row["AUC (%)"] for row in rows(made)}
    assert attacks["local", "representations"] is None
    assert attacks["local", "features"] == attacks["fedavg", "features"]
    assert 0 <= attacks["fedavg", "representations"] <= 100
    configs = [path.read_text() for path in tmp_path.glob("figure-5/*noise*/*/config.toml")]
    assert len(configs) == 2
    assert all('noise = "edges=0.1"' in text for text in configs)
    for row in rows(made, 1):
        folder = next(tmp_path.glob(f"figure-5/*noise*/{row['method']}"))
        summary = json.loads((folder / "summary.json").read_text())
        expected = summary["best_val"]["test"]["accuracy_client_mean"]
        assert row["with noise"] == pytest.approx(100 * expected)
    assert made.draw is not None
    attack, noise = made.draw().axes
    bars = [bar.get_height() for bar in attack.patches]
    assert len(bars) == 2  # of FedAvg: the paper's attack, and the strongest
    assert bars[1] == max(r["accuracy (%)"] or 0 for r in rows(made) if r["method"] == "fedavg")
    assert len(noise.patches) == 4


@pytest.mark.usefixtures("tiny")
def test_sensitivity_leaves_out_what_has_no_effect(tmp_path: Path) -> None:
    made = make("fedhero", "figure-9", want(tmp_path, canned(lambda m: 10 * m.alpha)))
    panels = {row["varied"].removesuffix(f", {DATA}") for row in rows(made)}
    assert "N_H, paper's form" in panels
    assert "N_H, default form" not in panels
    assert any(note.startswith("N_H is left out of the default form") for note in made.notes)
    alpha = [row for row in rows(made) if row["varied"].startswith("α")]
    assert alpha
    assert all(row["accuracy"] == pytest.approx(10 * row["value"]) for row in alpha)
    assert made.draw is not None
    for axes in made.draw().axes:
        assert [line.get_marker() for line in axes.lines].count("*") == 1


@pytest.mark.usefixtures("tiny")
def test_latent_neighbours_are_varied_as_printed(tmp_path: Path) -> None:
    made = make("fedhero", "figure-8", want(tmp_path, canned(lambda m: m.k), "paper"))
    assert [(row["value"], row["accuracy"]) for row in rows(made)] == [
        (k, pytest.approx(k)) for k in (5, 10, 20, 50)
    ]
