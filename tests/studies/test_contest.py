"""Polyphony against everything else: its cells and rows, what is run, and the verdicts."""

from __future__ import annotations

import json
import shutil
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from polyphily.core.method import create
from polyphily.graphs.datasets import DATASETS
from polyphily.studies import FEDAVG, METHOD, Cell, Row, Study, contest, studies
from polyphily.studies.trials import file_of, request, run_cell

SPLIT = "0.6,0.2,0.2:client"
SHARED = Cell("csbm:nodes=40,features=6", "natural", 2, SPLIT, table="figure-4")
ALONE = Cell("csbm:nodes=40,features=6,degree=5", "natural", 2, SPLIT)


def patch(monkeypatch: pytest.MonkeyPatch) -> tuple[Study, Study]:
    """Make a contest of two cells, of which one study has one; return the study and the contest."""
    settings = {"rounds": 2, "hidden": 8, "epochs": 1, "selection": "federation"}
    rows = (
        Row(FEDAVG, "FedAvg, gcn", "fedavg", "gcn"),
        Row(METHOD, "fedspa", "fedspa", "acm-gcn"),
    )
    common = {"seeds": (0, 1, 2), "rates": ((0.01, 0.0), (0.05, 0.0)), "settings": settings}
    study = replace(studies()["fedspa"], cells=(SHARED,), rows=rows, **common)
    own = contest.contest()
    kept = {"FedAvg, gcn", "FedAvg, acm-gcn", "FedAvg, res-acm, labels", "polyphony", "fedspa"}
    chosen = tuple(row for row in own.rows if row.label in kept)
    whole = replace(own, cells=(replace(SHARED, table="1"), ALONE), rows=chosen, **common)
    monkeypatch.setattr(contest, "studies", lambda: {"fedspa": study})
    monkeypatch.setattr(contest, "contest", lambda: whole)
    return study, whole


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run everything of the small contest, once for all tests."""
    folder = tmp_path_factory.mktemp("contest")
    with pytest.MonkeyPatch.context() as monkeypatch:
        study, whole = patch(monkeypatch)
        run_cell(study, SHARED, folder, report=lambda _: None)
        contest.run(whole.cells, folder, report=lambda _: None)
    return folder


@pytest.fixture
def small(finished: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return a copy of the small contest's results; a test may change it."""
    patch(monkeypatch)
    return Path(shutil.copytree(finished, tmp_path, dirs_exist_ok=True))


def stored(folder: Path, study: Study, cell: Cell) -> dict[str, object]:
    found: dict[str, object] = json.loads(file_of(folder, study, cell).read_text("utf-8"))["rows"]
    return found


def test_every_cell_of_all_studies_is_there_once() -> None:
    names = [cell.name for cell in contest.contest().cells]
    assert len(set(names)) == len(names)
    assert {cell.name for study in studies().values() for cell in study.cells} < set(names)
    for cell in contest.contest().cells:
        DATASETS.find(cell.dataset.partition(":")[0])


def test_rows_are_different_and_can_be_created() -> None:
    study = contest.contest()
    assert len({row.key for row in study.rows}) == len(study.rows)
    for row in study.rows:
        create(row.method, dict(row.set))
    labelled = [row for row in study.rows if row.settings]
    assert labelled
    for row in labelled:
        plain = replace(row, settings={})
        assert plain.key != row.key
        assert request(study, study.cells[0], plain) != request(study, study.cells[0], row)


def test_what_a_study_has_run_is_not_run_again(small: Path) -> None:
    study = contest.contest()
    shared = {row.label for row in study.rows if row.key in stored(small, study, SHARED)}
    assert shared == {"FedAvg, acm-gcn", "FedAvg, res-acm, labels", "polyphony"}
    alone = {row.label for row in study.rows if row.key in stored(small, study, ALONE)}
    assert alone == {row.label for row in study.rows}
    assert contest.to_run(ALONE, small, ["polyphony"]).rows[0].label == "polyphony"


def test_the_rival_is_the_row_that_validates_best(small: Path) -> None:
    """Look at all scores in the files, without the library's reading of them."""
    for cell in contest.contest().cells:
        best: tuple[float, float, str] | None = None
        own = 0.0
        for study in (contest.studies()["fedspa"], contest.contest()):
            path = file_of(small, study, cell)
            if not path.exists():
                continue
            for key, entry in json.loads(path.read_text("utf-8"))["rows"].items():
                for view, scores in entry["scores"].items():
                    trials = list(zip(scores["val"], scores["test"], strict=True))
                    val, test = max(trials, key=lambda pair: statistics.fmean(pair[0]))
                    mean = statistics.fmean(test)
                    if key.startswith("polyphony"):
                        own = mean if view == "received" else own
                    elif "label_inputs" in key or (key.startswith("fedspa") and view == "trained"):
                        continue
                    elif best is None or statistics.fmean(val) > best[0]:
                        best = (statistics.fmean(val), mean, key)
        assert best is not None
        line = next(
            x for x in contest.section(small).splitlines() if x.startswith(f"| {cell.title} |")
        )
        columns = [part.strip() for part in line.split("|")[1:-1]]
        assert columns[1].startswith(f"{100 * best[1]:.2f} ±")
        assert columns[2].startswith(f"{100 * own:.2f} ±")
        assert columns[3].startswith(f"{100 * (own - best[1]):+.2f}")


def test_the_summary_counts_cells_by_study(small: Path) -> None:
    lines = [line.split("|") for line in contest.section(small).splitlines()]
    counts = {line[1].strip(): line[2].strip() for line in lines if len(line) == 10}
    assert counts["fedspa"] == "1"
    assert counts["natural federations"] == "1"
    assert counts["all"] == "2"


def test_nothing_is_said_before_it_has_run(tmp_path: Path) -> None:
    assert contest.section(tmp_path) == ""


def test_the_comparison_runs_before_its_parts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The method's rows of all cells come first, then the others', and parts last."""
    _, whole = patch(monkeypatch)
    seen: list[tuple[str, str]] = []

    def note(pairs: list[tuple[Study, Cell]], folder: Path) -> None:
        seen.extend((row.role, cell.name) for study, cell in pairs for row in study.rows)

    monkeypatch.setattr(contest, "run_rows", note)
    contest.run(whole.cells, tmp_path)
    roles = [role for role, _ in seen]
    assert roles[:2] == [METHOD, METHOD]
    assert [name for _, name in seen[:2]] == [cell.name for cell in whole.cells]
    assert roles[-2:] == [contest.PART, contest.PART]
    seen.clear()
    contest.run(whole.cells, tmp_path, ["acm-gcn"])
    assert {role for role, _ in seen} == {FEDAVG}
