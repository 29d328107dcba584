"""Studies: what they compare, how trials are run and chosen, and the page they are written to."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from polyphily import load
from polyphily.cli import app
from polyphily.core.method import create
from polyphily.errors import UserError
from polyphily.graphs.datasets import DATASETS
from polyphily.graphs.partitions import PARTITIONS
from polyphily.papers import tables
from polyphily.runs.run import run
from polyphily.studies import (
    ABLATION,
    BASELINE,
    FEDAVG,
    LOCAL,
    METHOD,
    PAPER_FORM,
    Cell,
    Row,
    Study,
    find_study,
    studies,
    trials,
)
from polyphily.studies.results import (
    UNCLEAR,
    Comparison,
    Outcome,
    _best_trial,
    best,
    compare,
    digest,
    outcomes,
    page,
)
from polyphily.studies.trials import federation_of, file_of, request, run_cell, try_row

every_study = pytest.mark.parametrize("study", studies().values(), ids=studies())
CELL = Cell("csbm:nodes=40", "natural", 3, "0.6,0.2,0.2:client", table="figure-4")


def small(**changes: object) -> Study:
    """A study on small synthetic graphs."""
    study = Study(
        name="small",
        method="fedprox",
        title="small",
        cells=(CELL,),
        rows=(
            Row(LOCAL, "Local, gcn", "local", "gcn"),
            Row(FEDAVG, "FedAvg, gcn", "fedavg", "gcn"),
            Row(BASELINE, "FedAvg, mlp", "fedavg", "mlp"),
            Row(METHOD, "fedprox", "fedprox", "mlp", {"mu": 0.5}),
        ),
        seeds=(0, 1),
        rates=((0.01, 0.0), (0.1, 0.0), (0.01, 0.05)),
        settings={"rounds": 4, "epochs": 2, "hidden": 8},
        paper="fedspa",
    )
    return replace(study, **changes)


@every_study
def test_what_a_study_names_exists(study: Study) -> None:
    assert len({cell.name for cell in study.cells}) == len(study.cells)
    assert len({row.key for row in study.rows}) == len(study.rows)
    for cell in study.cells:
        DATASETS.find(cell.dataset.partition(":")[0])
        assert cell.partition in {*PARTITIONS, "natural"}
        tables.paper(study.paper).table(cell.table)
    for row in study.rows:
        create(row.method, dict(row.set))
    assert [row.role for row in study.rows].count(METHOD) == 1
    assert [row.role for row in study.rows].count(BASELINE) == 1


@every_study
def test_the_cells_stand_in_the_published_tables(study: Study) -> None:
    missing = []
    for cell in study.cells:
        entries = tables.paper(study.paper).table(cell.table).entries
        places = {(f.dataset, f.partition, f.clients) for f in entries}
        if (cell.dataset, cell.partition, cell.clients) not in places:
            missing.append(cell.dataset)
    ours = (":twins=one", "syn-cora:")  # our own question; and in a figure of the paper
    assert all(any(part in name for part in ours) for name in missing)


def test_every_row_of_a_study_has_the_same_trials() -> None:
    assert len({study.rates for study in studies().values()}) == 1
    assert len({study.seeds for study in studies().values()}) == 1


def test_trials_in_one_pass_are_separate_runs_to_the_bit() -> None:
    study, row = small(), Row(METHOD, "fedspa", "fedspa", "acm-gcn")
    federations = [federation_of(CELL, seed) for seed in study.seeds]
    scores, _ = try_row(study, CELL, row, federations)
    for trial, (lr, decay) in enumerate(study.rates):
        for s, seed in enumerate(study.seeds):
            alone = run(
                "fedspa",
                load(CELL.dataset, clients=3, split=CELL.split, seed=seed),
                backbone="acm-gcn",
                lr=lr,
                weight_decay=decay,
                **study.settings,
            )
            for view, found in scores.items():
                moment = alone.summary["views"][view]["best_val"]
                assert found["val"][trial][s] == round(moment["val"]["accuracy"], 6)
                assert found["test"][trial][s] == round(moment["test"]["accuracy"], 6)
                assert found["round"][trial][s] == moment["round"]


def test_what_is_finished_is_not_run_again_and_what_changed_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    run_cell(small(), CELL, tmp_path, report=said.append)
    assert len(said) == 4
    run_cell(small(), CELL, tmp_path, report=said.append)
    assert len(said) == 4
    rows = small().rows
    run_cell(
        small(rows=(*rows[:3], replace(rows[3], set={"mu": 1.0}))),
        CELL,
        tmp_path,
        report=said.append,
    )
    assert len(said) == 5
    run_cell(small(settings={**small().settings, "epochs": 1}), CELL, tmp_path, report=said.append)
    assert len(said) == 9
    found = json.loads(file_of(tmp_path, small(), CELL).read_text(encoding="utf-8"))
    assert found["cell"]["dataset"] == CELL.dataset


def test_a_cells_own_settings_reach_its_runs_and_are_part_of_what_is_asked(
    tmp_path: Path,
) -> None:
    own = replace(CELL, normalize="standard", settings={"dropout": 0.8, "input_dropout": 0.0})
    plain, changed = federation_of(CELL, 0), federation_of(own, 0)
    assert plain.partition.sha256 == changed.partition.sha256
    train = [
        np.concatenate([graph.features[graph.masks.train] for graph in found.clients])  # type: ignore[union-attr]
        for found in (plain, changed)
    ]
    assert abs(train[1].mean()) < 1e-6 < abs(train[0].mean())
    study, row = small(), small().rows[2]
    assert request(study, own, row) == {
        **request(study, CELL, row),
        "normalize": "standard",
        "settings": {**request(study, CELL, row)["settings"], **own.settings},
    }
    alone = run(
        "fedavg",
        load(CELL.dataset, clients=3, split=CELL.split, seed=0, normalize="standard"),
        backbone="mlp",
        lr=0.01,
        weight_decay=0.0,
        **{**study.settings, **own.settings},
    )
    scores, _ = try_row(small(seeds=(0,)), own, row, [changed])
    moment = alone.summary["views"]["received"]["best_val"]
    assert scores["received"]["val"][0][0] == round(moment["val"]["accuracy"], 6)
    said = page(tmp_path, [small(cells=(own,))])
    assert "features normalised by standard, dropout 0.8, input_dropout 0.0" in said
    assert "features normalised" not in page(tmp_path, [small()])


def test_the_page_says_what_was_tried(tmp_path: Path) -> None:
    assert "\n- weights by size: level" in page(
        tmp_path, [small(findings=("weights by size: level",))]
    )
    assert "tried" not in page(tmp_path, [small()])


def test_a_row_without_memory_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scarce(study: Study, cell: Cell, row: Row, *rest: object) -> object:
        if row.label == "FedAvg, gcn":
            raise torch.OutOfMemoryError
        return try_row(study, cell, row, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(trials, "try_row", scarce)
    said: list[str] = []
    run_cell(small(), CELL, tmp_path, report=said.append)
    assert sum("not enough memory; call the command again" in line for line in said) == 1
    assert len(outcomes(small(), CELL, tmp_path, "received")) == 3
    monkeypatch.undo()
    run_cell(small(), CELL, tmp_path)
    assert len(outcomes(small(), CELL, tmp_path, "received")) == 4


def test_nothing_begins_after_the_time_is_up(tmp_path: Path) -> None:
    run_cell(small(), CELL, tmp_path, until=0.0)
    assert not list(tmp_path.iterdir())


def test_partition_files_are_written_and_used(tmp_path: Path) -> None:
    graph, kept = tmp_path / "graph", tmp_path / "kept"
    graph.mkdir()
    lines = [f"{i},{i % 2},{i * 0.1},{i % 3}" for i in range(60)]
    (graph / "nodes.csv").write_text("\n".join(["id,label,a,b", *lines]), encoding="utf-8")
    lines = [f"{i},{(i * 7 + 1) % 60}" for i in range(60)]
    (graph / "edges.csv").write_text("\n".join(["source,target", *lines]), encoding="utf-8")
    cell = Cell(str(graph), "random", 2, "0.6,0.2,0.2:client")
    first = federation_of(cell, 0, kept)
    (file,) = kept.iterdir()
    before = file.read_bytes()
    again = federation_of(cell, 0, kept)
    assert file.read_bytes() == before
    assert first.partition.sha256 == again.partition.sha256
    assert first.partition.sha256 == federation_of(cell, 0).partition.sha256


def test_validation_chooses_the_trial_and_the_backbone(tmp_path: Path) -> None:
    study = small(rates=((0.1, 0.0), (0.2, 0.0)), seeds=(0, 1))
    scores = {
        "local[]/gcn": ([[0.5, 0.5], [0.6, 0.7]], [[0.9, 0.9], [0.1, 0.2]]),
        "fedavg[]/gcn": ([[0.9, 0.9], [0.1, 0.1]], [[0.3, 0.5], [0.8, 0.8]]),
        "fedavg[]/mlp": ([[0.2, 0.2], [0.3, 0.3]], [[0.9, 0.9], [0.5, 0.6]]),
        "fedprox[mu=0.5]/mlp": ([[0.2, 0.2], [0.3, 0.3]], [[0.9, 0.9], [0.7, 0.7]]),
    }
    from polyphily.studies.trials import request

    rows = {}
    for row in study.rows:
        val, test = scores[row.key]
        views = {v: {"val": val, "test": test} for v in ("received", "trained")}
        rows[row.key] = {"request": request(study, CELL, row), "scores": views}
    path = file_of(tmp_path, study, CELL)
    path.parent.mkdir()
    path.write_text(json.dumps({"rows": rows}), encoding="utf-8")
    found = outcomes(study, CELL, tmp_path, "received")
    assert found["local[]/gcn"].test == pytest.approx((10, 20))
    assert found["local[]/gcn"].rate == (0.2, 0.0)
    chosen = best(found, study, [FEDAVG, BASELINE])
    assert chosen is not None
    assert chosen.row.backbone == "gcn"
    assert chosen.mean == pytest.approx(40)
    comparison = compare(found, study)
    assert comparison is not None
    assert comparison.difference == pytest.approx(15)
    text = page(tmp_path, [study])
    assert "| csbm:nodes=40 natural 3 | – | – | 15.00 ± 7.07 (gcn) | 40.00 ± 14.14 (gcn) |" in text
    assert (
        "55.00 ± 7.07 | – | 70.00 ± 0.00 | – | +15.00 (p 0.20) level | +30.00 (p 0.20) level |"
        in text
    )
    (entry,) = digest(tmp_path, [study])
    assert entry["difference"] == pytest.approx(15)
    assert entry["p"] == pytest.approx(comparison.p, rel=0.01)
    assert (entry["method"], entry["setting"], entry["dataset"], entry["verdict"]) == (
        "fedprox",
        CELL.title,
        "csbm",
        comparison.verdict,
    )


def test_the_paired_test_is_students() -> None:
    row = small().rows[0]
    one = Outcome(row, 0, (70.0, 71.0, 73.0), (0.1, 0.0))
    two = Outcome(row, 0, (69.0, 69.5, 71.0), (0.1, 0.0))
    found = Comparison.of(one, two)
    # differences 1, 1.5, 2: mean 1.5, deviation 0.5, t = 1.5 / (0.5 / sqrt 3) with 2 degrees
    assert found.difference == pytest.approx(1.5)
    t = 1.5 / (0.5 / 3**0.5)
    assert found.p == pytest.approx(1 - t / (t * t + 2) ** 0.5)
    assert found.verdict == "better"
    assert Comparison.of(one, one).verdict == "level"


def test_a_tie_on_validation_is_shown_and_a_verdict_that_hangs_on_it_is_unclear() -> None:
    study = small(rates=((0.1, 0.0), (0.2, 0.0)), seeds=(0, 1, 2))
    scores = {
        "val": [[0.80, 0.80, 0.80], [0.8001, 0.8001, 0.8001]],
        "test": [[0.70, 0.71, 0.72], [0.75, 0.76, 0.77]],
        "round": [[3, 9, 9], [4, 9, 9]],
    }
    found = _best_trial(study, study.rows[0], scores)
    assert found.rate == (0.2, 0.0)
    assert [other.mean for other in found.tied] == [pytest.approx(71)]
    assert str(found) == "76.00 ± 1.00 ≈ 71.00"
    below = Outcome(study.rows[0], 0, (69.0, 70.1, 71.2), (0.1, 0.0))
    assert Comparison.of(found, below).verdict == "better"
    between = Outcome(study.rows[0], 0, (73.0, 74.1, 75.2), (0.1, 0.0))
    assert Comparison.of(found, between).verdict == UNCLEAR
    apart = {**scores, "val": [[0.80, 0.80, 0.80], [0.81, 0.81, 0.81]]}
    assert _best_trial(study, study.rows[0], apart).tied == ()


def test_a_best_round_in_a_warm_up_is_marked() -> None:
    row = Row(METHOD, "s2fgl", "s2fgl", "gcn")
    outcome = Outcome(row, 80, (70.0, 70.0, 70.0), (0.1, 0.0), (12, 20, 21))
    assert outcome.in_warm_up == 2
    assert str(outcome).endswith("† 2/3")
    later = replace(outcome, row=replace(row, set={"warm_up": 5}))
    assert later.in_warm_up == 0


@every_study
def test_every_cell_has_the_papers_form(study: Study) -> None:
    (row,) = [row for row in study.rows if row.role == PAPER_FORM]
    assert create(row.method, dict(row.set)) == create(study.method, {"paper": True})


def test_hyperparameters_may_be_changed_for_the_method_and_its_ablations() -> None:
    study = find_study("fedspa")
    changed = study.with_set({"paper": "on"})
    assert {row.role for row in study.rows} == {row.role for row in changed.rows}
    for before, after in zip(study.rows, changed.rows, strict=True):
        own = before.role in (METHOD, ABLATION)
        assert after.set == ({**before.set, "paper": "on"} if own else before.set)
    assert study.with_set({}) is study


def test_the_command_lists_runs_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyphily.studies.studies", lambda: {"small": small()})
    runner = CliRunner()
    assert CELL.title in runner.invoke(app, ["study", "--list"]).stdout
    arguments = ["study", "--out", str(tmp_path / "kept"), "--write", str(tmp_path / "page.md")]
    done = runner.invoke(app, arguments)
    assert done.exit_code == 0, done.output
    text = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert text.startswith("# Which methods help")
    assert "Not run yet" not in text
    with pytest.raises(UserError, match="no cell"):
        runner.invoke(app, ["study", "--only", "nothing"], catch_exceptions=False)
    with pytest.raises(UserError, match="write 1/3"):
        runner.invoke(app, ["study", "--share", "3/2"], catch_exceptions=False)


def test_an_unknown_study_is_refused() -> None:
    with pytest.raises(UserError, match="fedspa"):
        find_study("fedspaa")
