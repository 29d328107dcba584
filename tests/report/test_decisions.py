"""The section of a page on precision, recall, calibration and thresholds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import polyphily
from cases import small_federation
from polyphily.report.blocks import Figure, Table
from polyphily.report.content import content
from polyphily.report.runs import Run, read_runs
from polyphily.report.words import decision_words, percent

SMALL = {"rounds": 2, "hidden": 8, "backbone": "gcn"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """Two runs on two classes, one of them rare."""
    folder = tmp_path_factory.mktemp("decisions")
    data = polyphily.load("csbm:nodes=400,features=6,positives=0.08,mu=200", clients=3)
    for name in ("fedavg", "local"):
        polyphily.run(name, data, **SMALL, out=folder / name)
    return read_runs([folder / "fedavg", folder / "local"])


def items(runs: list[Run]) -> dict[str, Figure | Table]:
    (section,) = [s for s in content(runs).sections if s.id == "decisions"]
    return {
        item.id if isinstance(item, Figure) else "table": item
        for item in section.items
        if isinstance(item, Figure | Table)
    }


def test_one_run_has_curves_calibration_and_a_table(runs: list[Run]) -> None:
    found = items(runs[:1])
    assert set(found) == {"precision-recall", "reliability", "table"}
    curve = found["precision-recall"]
    assert isinstance(curve, Figure)
    panel = curve.panels[""]
    assert len(panel["series"]) == 1
    assert len(panel["light"]) == 3
    assert panel["baseline"]["y"] == pytest.approx(8, abs=1)
    recall = panel["series"][0]["x"]
    assert recall == sorted(recall)
    assert recall[-1] == 100
    bins = found["reliability"]
    assert isinstance(bins, Figure)
    assert [s["name"] for s in bins.panels[""]["series"]] == ["as trained", "with temperature"]
    assert bins.panels[""]["x"] == "probability of +1, %"


def test_the_table_has_every_client(runs: list[Run]) -> None:
    table = items(runs[:1])["table"]
    assert isinstance(table, Table)
    assert [row[0] for row in table.rows] == ["all clients", "client-0", "client-1", "client-2"]
    pooled = runs[0].decision["pooled"]
    assert table.rows[0][5] == f"{pooled['threshold']:.3f}"
    assert table.rows[0][7] == percent(pooled["test"]["recall"], 1)
    assert {len(row) for row in table.rows} == {len(table.columns)}


def test_several_runs_share_a_figure(runs: list[Run]) -> None:
    found = items(runs)
    assert set(found) == {"precision-recall", "reliability"}
    curve, bins = found["precision-recall"], found["reliability"]
    assert isinstance(curve, Figure)
    assert isinstance(bins, Figure)
    assert [s["name"] for s in curve.panels[""]["series"]] == ["fedavg", "local"]
    assert curve.panels[""]["light"] == []
    assert bins.choices[0].options == ("fedavg", "local")


def test_the_baseline_is_in_facts_and_learning_curves(runs: list[Run]) -> None:
    page = content(runs[:1])
    fact = page.facts[1]
    assert (fact.label, fact.value) == ("random ranking", percent(runs[0].baseline(), 1) + " %")
    (figure,) = [
        item
        for section in page.sections
        for item in section.items
        if isinstance(item, Figure) and item.id == "convergence"
    ]
    line = figure.panels["test auprc|rounds"]["baseline"]
    assert line["name"] == "random ranking"
    assert "baseline" not in figure.panels["loss|rounds"]


def test_many_classes_have_calibration_only(tmp_path: Path) -> None:
    polyphily.run("fedavg", small_federation(), **SMALL, out=tmp_path / "run")
    (run,) = read_runs([tmp_path / "run"])
    found = items([run])
    assert set(found) == {"reliability", "table"}
    table = found["table"]
    assert isinstance(table, Table)
    assert "threshold" not in table.columns


def test_runs_without_curves_have_no_section(runs: list[Run], tmp_path: Path) -> None:
    polyphily.run("fedavg", polyphily.load("csbm:nodes=60", clients=2), **SMALL, out=tmp_path / "r")
    (tmp_path / "r" / "curves.json").unlink()
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    del summary["decision"], summary["baseline"]
    (tmp_path / "r" / "summary.json").write_text(json.dumps(summary))
    page = content(read_runs([tmp_path / "r"]))
    assert "decisions" not in {section.id for section in page.sections}


def test_a_decision_in_words(runs: list[Run]) -> None:
    words = decision_words(runs[0].summary)
    pooled = runs[0].decision["pooled"]
    assert f"temperature {pooled['temperature']:.2f}" in words
    assert f"threshold {pooled['threshold']:.3g} on '+1' by the rule f1" in words
    assert decision_words({}) == ""
    assert decision_words({"decision": {"pooled": {"source": "default"}}}) == ""
