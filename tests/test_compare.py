"""`polyphily compare` over several federations: a board, gone on with where it was stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polyphily.cli.comparing import _cells
from polyphily.cli.terminal import describe_data
from polyphily.core.method import METHODS
from polyphily.errors import TrainingError
from polyphily.experiments.comparing import method_names
from polyphily.report.blocks import Figure, Table
from polyphily.report.content import content
from polyphily.report.runs import read_runs
from report.stories import call

CELLS = ["--dataset", "csbm:nodes=40,gap=0.1,csbm:nodes=40,gap=0.8", "--clients", "2,3"]
TINY = [*CELLS, "--rounds", "2", "--hidden", "8", "--no-report"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_all_combinations_are_run_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--write", "t.tex", "--write", "t.csv"]
    assert call("compare", "local", "fedavg", *TINY, "--seeds", "0-2", "--out", "c", *files) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    board = json.loads(Path("c/board.json").read_text(encoding="utf-8"))
    assert len(board["rows"]) == 2 * 4
    assert {row["cell"] for row in board["rows"]} == {
        f"csbm:nodes=40,gap={gap} {clients}" for gap in (0.1, 0.8) for clients in (2, 3)
    }
    assert board["ranking"]["blocks"] == 4 * 3
    summaries = [json.loads(p.read_text(encoding="utf-8")) for p in Path("c").rglob("summary.json")]
    found = sorted(row["mean"] for row in board["rows"])
    assert found == pytest.approx(sorted(s["best_val"]["test"]["accuracy"] for s in summaries))
    for row in board["rows"]:
        assert f"{100 * row['mean']:.2f}" in said
    for file in ("t.tex", "t.csv", "c/board.md", "c/board-ranks.svg", "c/board-ranks.png"):
        assert Path(file).stat().st_size > 0


def test_finished_runs_are_not_repeated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("compare", "fedavg", *TINY, "--out", "c") == 0
    before = {p: p.stat().st_mtime_ns for p in Path("c").rglob("summary.json")}
    capsys.readouterr()
    assert call("compare", "fedavg", "local", *TINY, "--out", "c", "--json") == 0
    assert {p: p.stat().st_mtime_ns for p in before} == before
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 8


def test_a_failure_is_reported_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from polyphily.cli import training

    train = training.train

    def lame(execution: object, done: int) -> object:
        if execution.method.name == "local" and len(execution.federations[0]) == 3:  # type: ignore[attr-defined]
            raise TrainingError("it diverged")
        return train(execution, done)  # type: ignore[arg-type]

    monkeypatch.setattr(training, "train", lame)
    assert call("compare", "local", "fedavg", *TINY, "--out", "c", "--json") == 1
    board = json.loads(capsys.readouterr().out)
    assert [row["method"] for row in board["failed"]] == ["local", "local"]
    assert len(board["rows"]) == 6


def test_mistakes_are_refused_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, message in (
        (["--set", "nu=1"], "nu"),
        (["--clients", "2,x"], "write a number"),
        (["--write", "t.doc"], ".tex"),
        (["--lr", "0"], "out of bounds"),
    ):
        assert call("compare", "fedavg", *TINY, *flags, "--out", "c") == 2
        assert message in capsys.readouterr().err
    assert not Path("c").exists()


def test_one_federation_has_a_board_too(capsys: pytest.CaptureFixture[str]) -> None:
    data = ["--dataset", "csbm:nodes=40", "--clients", "2", "--rounds", "2", "--hidden", "8"]
    files = ["--write", "t.tex", "--write", "t.csv", "--write", "t.md"]
    assert call("compare", "local", "fedavg", *data, "--seeds", "0-2", "--out", "c", *files) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    for words in ("mean rank", "p against first", "s/round", "MB/round", "no p-value can be below"):
        assert words in said
    board = json.loads(Path("c/board.json").read_text(encoding="utf-8"))
    assert board["ranking"]["blocks"] == 3
    for file in ("t.tex", "t.csv", "t.md", "c/board.md", "c/board-ranks.svg"):
        assert Path(file).stat().st_size > 0
    sections = {s.id: s for s in content(read_runs([Path("c")])).sections}
    figure = next(i for i in sections["result"].items if isinstance(i, Figure) and i.id == "ranks")
    assert figure.panels[""]["methods"] == board["ranking"]["methods"]
    assert figure.panels[""]["ranks"] == board["ranking"]["mean_ranks"]
    table = next(
        i for i in sections["result"].items if isinstance(i, Table) and "mean rank" in i.columns
    )
    assert [row[0] for row in table.rows] == board["ranking"]["methods"]
    assert "Wilcoxon" in table.caption


def test_one_seed_has_no_test(capsys: pytest.CaptureFixture[str]) -> None:
    data = ["--dataset", "csbm:nodes=40", "--clients", "2", "--rounds", "2", "--hidden", "8"]
    assert call("compare", "local", "fedavg", *data, "--out", "c") == 0
    said = capsys.readouterr().out
    assert "One seed of one cell" in said
    assert "p against first" not in said
    (result, *_) = content(read_runs([Path("c")])).sections
    assert any("One seed" in point for point in result.points)
    assert not any(isinstance(i, Figure) and i.id == "ranks" for i in result.items)


def test_a_comparison_of_one_federation_goes_on_where_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from polyphily.cli import training

    data = ["--dataset", "csbm:nodes=40", "--clients", "2", "--rounds", "2", "--hidden", "8"]
    assert call("compare", "fedavg", *data, "--out", "c", "--no-report") == 0
    trained = []
    train = training.train
    monkeypatch.setattr(
        training, "train", lambda e, *rest: trained.append(e.method.name) or train(e, *rest)
    )
    assert call("compare", "fedavg", "local", *data, "--out", "c", "--no-report") == 0
    assert trained == ["local"]


def test_own_files_are_named_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    summary = {
        "dataset": str(tmp_path / "banks" / "sites"),
        "partition": {"name": "natural", "clients": 3},
        "seeds": [0],
        "backbone": "gcn",
        "split": "0.6,0.2,0.2",
        "rounds": 2,
        "epochs": 1,
    }
    assert describe_data(summary).startswith("banks/sites, 3 clients (natural)")
    elsewhere = str(tmp_path.parent / "sites")
    assert describe_data({**summary, "dataset": elsewhere}).startswith(f"{elsewhere}, ")
    assert describe_data({**summary, "dataset": "csbm:nodes=9"}).startswith("csbm:nodes=9, ")


def test_all_stands_for_every_method() -> None:
    assert method_names(["ALL"]) == sorted(METHODS)


def test_names_are_split_at_commas_that_begin_no_option() -> None:
    given = {"dataset": "cora,csbm:gap=0.4,degree=2", "partition": "louvain,dirichlet:alpha=1"}
    found = _cells({**given, "clients": "5,10"})
    assert len(found) == 8
    assert {cell["dataset"] for cell in found} == {"cora", "csbm:gap=0.4,degree=2"}
    assert found[0] == {"dataset": "cora", "partition": "louvain", "clients": 5}
    assert _cells({"dataset": "cora"}) == [{"dataset": "cora"}]
