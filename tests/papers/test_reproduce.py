"""`polyphily reproduce`: what runs, what does not and why, and what is printed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polyphily.cli import main, reproducing
from polyphily.papers import plan, report, runner, tables
from polyphily.papers.plan import Choice
from polyphily.papers.report import Line
from polyphily.runs.folder import CONFIG, METRICS, SUMMARY
from polyphily.runs.run import Execution

Say = Callable[..., tuple[int, str, str]]
QUICK = ("--quick", "--rounds", "2")
FIGURE_4 = ("fedspa", "--table", "figure-4", "--methods", "fedavg", *QUICK)


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Say:
    """Runs `polyphily reproduce …` in this process, in a folder of its own and without data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POLYPHILY_DATA", str(tmp_path / "nothing"))
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["polyphily", "reproduce", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main()
        said = capsys.readouterr()
        return int(caught.value.code or 0), said.out, said.err

    return call


def tiny_job(rounds: int = 3, **changes: Any) -> plan.Job:
    """A job of the synthetic study, on small graphs."""
    paper = tables.paper("fedspa")
    table = paper.table("figure-4")
    job = plan.job(paper, table, table.figures[0], Choice(seeds=(0, 1), rounds=rounds))
    data = {**job.data, "dataset": "csbm:nodes=60,features=8", "clients": 3}
    settings = {**job.settings, "hidden": 8, **changes}
    return replace(job, method="fedavg", hyperparameters={}, data=data, settings=settings)


class Counted:
    """Runs executions, and counts them and the rounds they had behind them."""

    def __init__(self) -> None:
        self.done: list[int] = []

    def __call__(self, execution: Execution, done: int) -> dict[str, Any]:
        self.done.append(done)
        return execution.go().summary


# Runs ------------------------------------------------------------------------------------------


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    go = Counted()
    first = runner.run(tiny_job(), tmp_path / "run", go)
    again = runner.run(tiny_job(), tmp_path / "run", go)
    assert go.done == [0]
    assert runner.outcome(tiny_job(), again) == runner.outcome(tiny_job(), first)


def test_an_interrupted_run_goes_on_to_the_same_figure(tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    def killed(execution: Execution, done: int) -> dict[str, Any]:
        def after_two(record: dict[str, Any]) -> None:
            if record["round"] == 2:
                execution.checkpoint()
                raise Killed

        return execution.go(after_two).summary

    go = Counted()
    whole = runner.run(tiny_job(5), tmp_path / "whole", go)
    with pytest.raises(Killed):
        runner.run(tiny_job(5), tmp_path / "cut", killed)
    assert not runner.is_finished(tiny_job(5), tmp_path / "cut")
    resumed = runner.run(tiny_job(5), tmp_path / "cut", go)
    assert go.done == [0, 2]
    assert resumed["views"] == whole["views"]


def test_another_request_sets_the_old_run_aside(tmp_path: Path) -> None:
    folder, go = tmp_path / "run", Counted()
    runner.run(tiny_job(2), folder, go)
    runner.run(tiny_job(3), folder, go)
    assert len(go.done) == 2
    assert sum(1 for _ in (folder / METRICS).open()) == 3
    assert (tmp_path / "run.before-1" / SUMMARY).exists()


def test_the_device_is_no_part_of_the_request() -> None:
    assert tiny_job(device="cuda").request() == tiny_job().request()


def test_all_seeds_run_in_one_pass_and_the_protocol_picks_the_score(tmp_path: Path) -> None:
    job = tiny_job()
    summary = runner.run(job, tmp_path / "run", Counted())
    mean, std = runner.outcome(job, summary)
    test = summary["views"]["received"]["last5"]["test"]
    assert summary["seeds"] == [0, 1]
    assert (mean, std) == (100 * test["accuracy"], 100 * test["accuracy_std"])


# The command -----------------------------------------------------------------------------------


def test_a_cell_by_the_command(say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = "csbm:homophily=0.75,gap=0.1,degree=2"
    arguments = (*FIGURE_4, "--only", dataset, "--out", "here")
    status, out, _ = say(*arguments)
    assert status == 0
    assert "**Not the paper's protocol: a quick look, 1 seed instead of 5, 2 rounds.**" in out
    assert f"| {dataset} | natural   |      10 | fedavg |         – |" in out
    assert (tmp_path / "here" / "figure-4.md").read_text(encoding="utf-8") + "\n" == out
    folder = tmp_path / "here" / "figure-4" / "csbm-homophily-0.75-gap-0.1-degree-2-natural-10"
    assert (folder / "fedavg" / CONFIG).exists()
    monkeypatch.setattr(runner, "Execution", None)  # a second run would fail
    status, out, _ = say(*arguments, "--json")
    data = json.loads(out)
    assert status == 0
    assert data == json.loads((tmp_path / "here" / "figure-4.json").read_text(encoding="utf-8"))
    [row] = data["rows"]
    assert row["published"] == {"mean": None, "std": None}
    assert row["difference"] is None
    assert 0 < row["ours"]["mean"] <= 100
    assert row["ours"]["seeds"] == [0]


@pytest.mark.data
def test_a_cell_of_real_data(say: Say, real_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYPHILY_DATA", str(real_data))
    status, out, _ = say("s2fgl", "--table", "1", "--only", "texas", "--json", *QUICK)
    data = json.loads(out)
    rows = {row["method"]: row for row in data["rows"]}
    assert status == 0
    assert rows["fedavg"]["difference"] == pytest.approx(rows["fedavg"]["ours"]["mean"] - 72.8)
    assert rows["s2fgl"]["marks"] == ["validation", "dropout", "labels", "order"]
    assert rows["fedfa"]["skipped"] == plan.NO_METHOD
    assert set(data["marks"]) == {"validation", "dropout", "labels", "order"}


def test_what_cannot_run_is_listed_with_the_reason(say: Say) -> None:
    status, out, _ = say("fedgsp", "--table", "II", "--only", "cora,average", "--clients", "5")
    assert status == 0
    assert "No cell has run." in out
    assert "- data not present: cora (5 figures)" in out
    assert "- method not in the library yet: gcfl, fedgnn, fedsage+, fed-pub" in out
    status, out, _ = say("fedgsp", "--table", "II", "--only", "average")
    assert "- a mean over cells, not a run: 13 figures" in out


def test_a_run_that_fails_is_named_and_the_rest_goes_on(
    say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    from polyphily.errors import TrainingError

    def fail(*_: Any) -> dict[str, Any]:
        raise TrainingError("it diverged")

    monkeypatch.setattr(runner, "run", fail)
    status, out, _ = say(*FIGURE_4)
    assert status == 1
    assert out.count("natural 10 fedavg") == 18
    assert "- failed: it diverged: csbm:homophily=0.75,gap=0.1,degree=2 natural 10 fedavg" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fedsap"], "unknown paper 'fedsap': did you mean 'fedspa'?"),
        (["fedspa", "--table", "figure4"], "did you mean 'figure-4'?"),
        (["fedspa", "--only", "cornel"], "did you mean 'cornell'?"),
        (["fedspa", "--methods", "fedavgg"], "did you mean 'fedavg'?"),
        (["fedspa", "--clients", "7"], "--clients 7: the tables have 5, 10, 30"),
        (["fedspa", "--clients", "many"], "write numbers such as 5,10"),
        (["fedspa", "--seeds", "a"], "not a list of whole numbers"),
        (["fedspa", "--rounds", "0"], "rounds: 0 is out of bounds"),
        (["fedspa", "--device", "tpu"], "unknown device 'tpu'"),
        (["fedspa", "--only", "cora", "--clients", "30"], "no cell is asked for"),
    ],
)
def test_mistakes(say: Say, arguments: list[str], words: str) -> None:
    status, out, err = say(*arguments)
    assert (status, out) == (2, "")
    assert words in " ".join(err.split())


def test_the_list(say: Say) -> None:
    status, out, _ = say("--list", "--json")
    rows = {(row["paper"], row["table"]): row for row in json.loads(out)}
    assert status == 0
    assert len(rows) == 26
    assert rows["fedspa", "1"] | {"title": ""} == {
        "paper": "fedspa",
        "table": "1",
        "title": "",
        "cells": 7,
        "figures": 84,
        "runnable": 0,
    }
    assert rows["fedspa", "figure-4"]["runnable"] == 36
    assert "what it shows" in say("--list")[1]


def test_the_list_does_not_import_torch() -> None:
    code = (
        "import sys; sys.argv = ['polyphily', 'reproduce', '--list']\n"
        "from polyphily.cli import app\n"
        "app(standalone_mode=False)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, env={**os.environ}
    )


# The table -------------------------------------------------------------------------------------


def test_the_text_of_a_table() -> None:
    paper = tables.paper("fedspa")
    table = paper.table("1")
    figures = {f.method: f for f in table.figures if f.dataset == "coauthor-cs"}
    lines = [
        Line(figures["fedavg"], 92.46, 0.123, (0, 1)),
        Line(figures["fedspa"], None, None, (0, 1)),
        Line(figures["fedgta"], skipped=plan.NO_METHOD),
    ]
    text = report.as_markdown(report.as_data(paper, table, lines, Choice(seeds=(0, 1))))
    assert text.startswith("# fedspa, Table 1: FedSPA and baselines")
    assert "over seeds 0, 1. Published: 5 runs." in text
    assert "**Not the paper's protocol: 2 seeds instead of 5.**" in text
    assert "| fedavg | 91.8 ± 0.3 | 92.46 ± 0.12 |       +0.7 | validation, dropout, [1]" in text
    assert "|            – |          – | validation, dropout, labels, order" in text
    assert "- **validation**: the published figure is accuracy on validation nodes" in text
    assert "- [1] recovered: a 4 stands for the plus-minus sign" in text
    assert "- method not in the library yet: fedgta (1 figure)" in text


def test_the_papers_own_number_of_seeds_is_no_change() -> None:
    protocol = tables.paper("fedspa").table("1").protocol
    assert report.changes(protocol, Choice()) == []
    assert Choice().seeds_of(protocol) == (0, 1, 2, 3, 4)
    unstated = tables.paper("fedath").table("1").protocol
    assert report.changes(unstated, Choice()) == []
    assert Choice().seeds_of(unstated) == (0, 1, 2)
    assert report.changes(unstated, Choice(rounds=7)) == ["7 rounds"]


def test_ablations_are_asked_for_by_their_method() -> None:
    paper = tables.paper("fedspa")
    chosen = plan.select(paper, paper.table("2"), Choice(methods=("fedspa",)))
    assert len(chosen) == 9
    [one] = plan.select(
        paper, paper.table("2"), Choice(("minesweeper",), ("fedspa[sfpd=on,hbda=off]",))
    )
    assert one.mean == 81.62


def test_names_may_hold_commas_before_options() -> None:
    names = ("csbm:gap=0.1,degree=2", "cora", "fedspa[sfpd=on,hbda=off]", "fedavg")
    assert reproducing._names(", ".join(names)) == names


def test_the_rows_of_a_cell_follow_each_other() -> None:
    paper = tables.paper("fedspa")
    cells = [f.cell for f in plan.select(paper, paper.table("1"), Choice())]
    assert len([c for i, c in enumerate(cells) if i == 0 or cells[i - 1] != c]) == 7
