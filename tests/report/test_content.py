"""What a page says: ranks, curves and names, against independent computations."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import rankdata

from polyphily.report.blocks import SEPARATOR, Content, Entries, Figure, Table, subsample
from polyphily.report.content import content
from polyphily.report.page import render
from polyphily.report.runs import Run, differing, labels, read_runs, settings
from polyphily.report.scores import mean_ranks, rank
from report.stories import DATA, call, compared


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compared(tmp_path_factory.mktemp("content") / "runs", "local", "fedavg", "fedprox")


@pytest.fixture(scope="module")
def runs(folder: Path) -> list[Run]:
    return read_runs([folder])


def figure(page: Content, name: str) -> Figure:
    found = [i for s in page.sections for i in s.items if isinstance(i, Figure) and i.id == name]
    return found[0]


def combinations(figure: Figure) -> set[str]:
    keys = {""}
    for choice in figure.choices:
        keys = {f"{key}{SEPARATOR}{option}" for key in keys for option in choice.options}
    return {key.removeprefix(SEPARATOR) for key in keys}


# Ranks and lines ---------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_ranks_equal_scipys(values: list[int]) -> None:
    assert rank(values) == rankdata([-value for value in values]).tolist()


def test_mean_ranks_leave_out_what_some_lack() -> None:
    assert mean_ranks([[0.9, 0.5], [0.1, None]]) == [1, 2]
    assert mean_ranks([[0.9], [0.1, 0.3]]) == [None, None]
    assert mean_ranks([[None], [0.3]]) == [None, None]


@given(st.integers(1, 300), st.integers(2, 50))
def test_subsample_keeps_the_ends_and_the_order(count: int, most: int) -> None:
    found = subsample(range(count), most)
    assert len(found) == min(count, most)
    assert (found[0], found[-1]) == (0, count - 1)
    assert found == sorted(set(found))


def test_curves_are_means_and_deviations_over_seeds(runs: list[Run]) -> None:
    panel = figure(content(runs), "convergence").panels
    series = {s["name"]: s for s in panel[f"test accuracy{SEPARATOR}rounds"]["series"]}
    for run in runs:
        line = series[run.method]
        assert line["x"] == [record["round"] for record in run.records]
        for k, record in enumerate(run.records):
            seeds = [100 * own[run.view]["test"]["accuracy"] for own in record["per_seed"]]
            assert line["y"][k] == pytest.approx(statistics.fmean(seeds), rel=1e-4)
            spread = statistics.stdev(seeds)
            assert line["hi"][k] - line["lo"][k] == pytest.approx(2 * spread, abs=2e-3)
    sent = panel[f"loss{SEPARATOR}megabytes"]["series"]
    assert [s["name"] for s in sent] == ["fedavg", "fedprox"]  # local sends nothing
    total = sum(r["bytes_up"] + r["bytes_down"] for r in runs[1].records) / 1e6
    assert sent[0]["x"][-1] == pytest.approx(total, rel=1e-4)
    seconds = panel[f"loss{SEPARATOR}seconds"]["series"]
    assert seconds[0]["x"][-1] == pytest.approx(
        sum(r["seconds"] for r in runs[0].records), rel=1e-4
    )


def test_the_spent_epsilon_is_shown_where_there_is_one(runs: list[Run], tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    given = [*DATA, "--dp", "epsilon=12,delta=1e-4", "--rounds", 3, "--out", tmp_path / "dp"]
    assert call("run", "fedavg", *map(str, given)) == 0
    (noised,) = read_runs([tmp_path / "dp"])
    page = content([noised])
    (spent,) = [fact for fact in page.facts if fact.label == "epsilon spent"]
    assert spent.value == "12"
    assert "of 12, at delta 0.0001" in spent.note
    (line,) = figure(page, "convergence").panels[f"epsilon{SEPARATOR}rounds"]["series"]
    spends = [record["epsilon"] for record in noised.records]
    assert line["x"] == [1, 2, 3]
    assert line["y"] == pytest.approx(spends, rel=1e-4)
    assert spends[0] < spends[1] < spends[2] == pytest.approx(12)
    assert "epsilon spent" in render(page)
    both = figure(content([runs[1], noised]), "convergence")
    drawn = both.panels[f"epsilon{SEPARATOR}rounds"]["series"]
    assert len(drawn) == 1
    plain = content(runs)
    assert "epsilon" not in json.dumps(figure(plain, "convergence").panels)
    assert not [fact for fact in content([runs[1]]).facts if "epsilon" in fact.label]


def test_every_combination_of_choices_has_a_panel(runs: list[Run]) -> None:
    for section in content(runs).sections:
        for item in section.items:
            if isinstance(item, Figure):
                assert combinations(item) == set(item.panels), item.id


# The tables --------------------------------------------------------------------------------------


def test_comparison_ranks_methods(runs: list[Run]) -> None:
    table = content(runs).sections[0].items[0]
    assert isinstance(table, Table)
    column = table.columns.index("rank")
    scores = [run.score or 0 for run in runs]
    wanted = rankdata([-score for score in scores])
    assert [float(row[column]) for row in table.rows] == wanted.tolist()
    assert table.strong == {i for i, place in enumerate(wanted) if place == 1}
    by_client = table.columns.index("rank by client")
    matrix = np.array([run.per_client for run in runs], dtype=float)
    means = np.mean([rankdata(-column) for column in matrix.T], axis=0)
    assert [float(row[by_client]) for row in table.rows] == pytest.approx(means, abs=0.05)


def test_one_run_has_its_moments_and_how_it_was_made(runs: list[Run]) -> None:
    run = runs[1]
    page = content([run])
    table = page.sections[0].items[0]
    assert isinstance(table, Table)
    assert len(table.rows) == 7
    assert table.rows[-1][:2] == ("no model", "")
    (strong,) = table.strong
    assert table.rows[strong][:2] == (run.view, "best validation")
    made = page.sections[-1].items[0]
    assert isinstance(made, Entries)
    assert {"seeds", "torch", "polyphily", "rounds", "hyperparameters"} <= set(made.pairs)
    assert made.pairs["commit"] == run.evidence["commit"]
    assert made.pairs["seeds"] == "0, 1"


def test_advice_and_clients_come_from_the_inspection(runs: list[Run]) -> None:
    page = content(runs)
    sections = {section.id: section for section in page.sections}
    assert sections["pairs"].points == tuple(a["text"] for a in runs[0].evidence["advice"])
    panel = figure(page, "labels").panels["nodes"]
    counts = [c["label_counts"] for c in runs[0].evidence["inspection"]["clients"]]
    assert [s["values"] for s in panel["series"]] == np.array(counts).T.tolist()
    matrix = figure(page, "differences").panels["spectral KL"]["values"]
    assert matrix == runs[0].evidence["inspection"]["pairs"]["spectral_kl"]


def test_without_evidence_the_page_has_scores_and_says_what_lacks(runs: list[Run]) -> None:
    bare = [replace(run, evidence={}) for run in runs]
    page = content(bare)
    found = {s.id for s in page.sections}
    assert found == {"result", "convergence", "pairs", "decisions", "provenance"}
    assert any("not measured" in note for note in page.notes)
    assert "<figure" in render(page)


# Names -------------------------------------------------------------------------------------------


def varied(run: Run, **config: Any) -> Run:
    return replace(run, config=run.config | config)


def test_runs_are_named_by_what_differs(runs: list[Run]) -> None:
    prox = runs[2]
    several = [varied(prox, **{"set.mu": mu}) for mu in (0.1, 1.0)]
    assert labels([runs[1], *several]) == ["fedavg", "fedprox mu 0.1", "fedprox mu 1"]
    assert differing(several) == ["set.mu"]
    assert labels(runs) == ["local", "fedavg", "fedprox"]
    twice = labels([prox, replace(prox, path=Path("elsewhere"))])
    assert twice == ["fedprox fedprox", "fedprox elsewhere"]


def test_data_are_named_by_what_differs(runs: list[Run]) -> None:
    run = runs[1]
    names = settings([run, varied(run, clients=5), varied(run, noise="edges=0.1")])
    assert list(names.values()) == ["3 clients, none", "5 clients, none", "3 clients, edges=0.1"]
    assert list(settings([run]).values()) == [run.summary["dataset"]]


def test_several_data_make_a_grid_with_mean_ranks(runs: list[Run]) -> None:
    other = [varied(run, clients=5) for run in runs]
    page = content([*runs, *other])
    table = page.sections[0].items[0]
    assert isinstance(table, Table)
    assert table.columns == ("", "3 clients", "5 clients", "mean rank")
    assert [row[0] for row in table.rows] == ["local", "fedavg", "fedprox"]
    chosen = figure(page, "convergence").choices[0]
    assert (chosen.name, chosen.options) == ("data", ("3 clients", "5 clients"))
    for section in page.sections:
        for item in section.items:
            if isinstance(item, Figure):
                assert combinations(item) == set(item.panels), item.id


# Size --------------------------------------------------------------------------------------------


def test_a_large_comparison_stays_below_five_megabytes(runs: list[Run], tmp_path: Path) -> None:
    """Eight runs of fifty clients, five hundred rounds and forty classes."""
    clients, classes, rounds = 50, 40, 500
    rng = np.random.default_rng(0)
    names = [f"client-{k:02d}" for k in range(clients)]
    run = runs[1]
    one = run.evidence["inspection"]["clients"][0]
    inspection = run.evidence["inspection"] | {
        "clients": [
            one | {"name": name, "label_counts": rng.integers(0, 999, classes).tolist()}
            for name in names
        ],
        "class_names": [f"a class with a name {c}" for c in range(classes)],
        "pairs": {
            key: rng.random((clients, clients)).tolist()
            for key in run.evidence["inspection"]["pairs"]
        },
    }
    evidence = run.evidence | {
        "inspection": inspection,
        "confusion_at_best": rng.integers(0, 9999, (classes, classes)).tolist(),
    }
    record = run.records[-1]
    large = []
    for k in range(8):
        folder = tmp_path / f"run-{k}"
        folder.mkdir()
        lines = [
            {
                "round": r + 1,
                "kind": "learned",
                "residual": 0.0,
                "weights": rng.random((clients, clients)).tolist(),
            }
            for r in range(0, rounds, 12)
        ]
        text = "\n".join(json.dumps(line) for line in lines)
        (folder / "collaboration.jsonl").write_text(text, encoding="utf-8")
        large.append(
            replace(
                run,
                path=folder,
                summary=run.summary
                | {
                    "method": f"method-{k}",
                    "rounds": rounds,
                    "clients": names,
                    "classes": names[:classes],
                },
                records=[{**record, "round": r + 1} for r in range(rounds)],
                evidence=evidence,
            )
        )
    assert len(render(content(large)).encode()) < 5_000_000


# Finding runs ------------------------------------------------------------------------------------


def test_runs_are_found_in_the_order_they_were_begun(folder: Path, runs: list[Run]) -> None:
    assert [run.method for run in runs] == ["local", "fedavg", "fedprox"]
    named = read_runs([folder / "fedprox", folder])
    assert [run.method for run in named] == ["fedprox", "local", "fedavg"]


def test_an_unfinished_run_is_refused_alone_and_left_out_among_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = compared(tmp_path / "runs", "local", "fedavg", seeds="0", rounds=2)
    (folder / "local" / "summary.json").unlink()
    assert call("report", folder / "local") == 2
    assert "--resume" in capsys.readouterr().err
    assert [run.method for run in read_runs([folder])] == ["fedavg"]


def test_noise_is_part_of_what_a_run_was(tmp_path: Path) -> None:
    assert (
        call("run", "local", *DATA, "--noise", "edges=0.5", "--rounds", 1, "--out", tmp_path / "n")
        == 0
    )
    (run,) = read_runs([tmp_path / "n"])
    assert run.config["noise"] == "edges=0.5"
    assert call("run", "--resume", tmp_path / "n", "--rounds", "2") == 0
