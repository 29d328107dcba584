"""`polyphily reproduce`: what runs, what does not and why, and what is printed."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polyphily.cli import main, reproducing, sheets
from polyphily.core.method import create
from polyphily.errors import UserError
from polyphily.papers import contents, pages, plan, report, runner, tables
from polyphily.papers.exhibits import Exhibit, Made, Wanted
from polyphily.papers.plan import Choice
from polyphily.papers.report import Line, Result
from polyphily.papers.tables import Entry, Paper
from polyphily.report.grids import Grid, to_csv, to_latex, to_markdown
from polyphily.runs.folder import CONFIG, METRICS, SUMMARY
from polyphily.runs.run import Execution

Say = Callable[..., tuple[int, str, str]]
BOTH = ("paper", "default")
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
    choice = Choice(seeds=(0, 1), rounds=rounds)
    [job] = plan.jobs(paper, table, table.entries[0], choice).values()
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
    assert "Not the paper's protocol: a quick look, 1 seed instead of 5, 2 rounds." in out
    text = (tmp_path / "here" / "figure-4.md").read_text(encoding="utf-8")
    assert f"| {dataset} | natural   |      10 | fedavg | –         |" in text
    folder = tmp_path / "here" / "figure-4" / "csbm-homophily-0.75-gap-0.1-degree-2-natural-10"
    assert (folder / "fedavg" / CONFIG).exists()
    monkeypatch.setattr("polyphily.runs.runner.Execution", None)  # a second run would fail
    status, out, _ = say(*arguments, "--json")
    data = json.loads(out)
    assert status == 0
    assert data == json.loads((tmp_path / "here" / "figure-4.json").read_text(encoding="utf-8"))
    [row] = data["rows"]
    assert row["published"] == {"mean": None, "std": None}
    assert row["difference"] is None
    assert 0 < row["ours"]["mean"] <= 100
    assert row["ours"]["seeds"] == [0]
    assert row["forms"]["paper"] == row["forms"]["default"]  # fedavg has one form


def hide(monkeypatch: pytest.MonkeyPatch, *methods: str) -> None:
    """Make the library look as if it did not have some methods."""
    rest = plan.registered() - set(methods)
    monkeypatch.setattr(plan, "registered", lambda: rest)


@pytest.mark.data
def test_a_cell_of_real_data(say: Say, real_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYPHILY_DATA", str(real_data))
    hide(monkeypatch, "fedfa")
    chosen = ["--only", "texas", "--methods", "fedavg,s2fgl,fedfa"]
    status, out, _ = say("s2fgl", "--table", "1", *chosen, "--json", *QUICK)
    data = json.loads(out)
    rows = {row["method"]: row for row in data["rows"]}
    assert status == 0
    assert rows["fedavg"]["difference"] == pytest.approx(rows["fedavg"]["ours"]["mean"] - 72.8)
    assert rows["s2fgl"]["marks"] == ["validation", "dropout", "labels", "order"]
    assert rows["fedfa"]["skipped"] == plan.NO_METHOD
    assert set(data["marks"]) == {"validation", "dropout", "labels", "order"}


def test_what_cannot_run_is_listed_with_the_reason(
    say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, "gcfl", "fedgnn", "fedsage+", "fedpub", "fedgta", "adafgl", "fedtad")
    hide(monkeypatch, "fediih", "fedstar")
    status, out, _ = say("fedgsp", "--table", "II", "--only", "cora,average", "--clients", "5")
    assert status == 0
    assert "No cell has run." in out
    assert "needs data: cora (5 numbers)" in out
    assert "method not in the library: gcfl, fedgnn, fedsage+, fed-pub" in out
    status, out, _ = say("fedgsp", "--table", "II", "--only", "average")
    assert "a mean over cells, not a run: 13 numbers" in out


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
    assert "failed: it diverged: csbm:homophily=0.75,gap=0.1,degree=2 natural 10 fedavg" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fedsap"], "unknown paper 'fedsap': did you mean 'fedspa'?"),
        (["fedspa", "--table", "9"], "unknown table of fedspa '9'"),
        (["fedspa", "--figure", "2d"], "did you mean '2"),
        (["fedspa", "--figure", "3"], "Figure 3: the framework: an illustration: nothing to run"),
        (["fedspa", "--figure", "4", "--table", "1"], "give one of them"),
        (["fedspa", "--form", "papers"], "did you mean 'paper'?"),
        (["fedhero", "--form", "code"], "there is no code=on"),
        (["fedspa", "--set", "paper=on"], "choose forms with --form paper"),
        (["fedspa", "--set", "channel=2"], "did you mean 'channel_lr'?"),
        (["fedspa", "--only", "cora 11"], "unknown dataset, partition or number"),
        (["fedspa", "--write", "table.doc"], "must end in .md, .csv or .tex"),
        (["fedspa", "--prepare"], "name their folder with --partitions"),
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
    assert rows["fedspa", "1"] == {
        "paper": "fedspa",
        "table": "1",
        "title": "FedSPA and baselines on homophilic and heterophilic graphs",
        "cells": 7,
        "numbers": 84,
        "runnable": 0,
        "state": rows["fedspa", "1"]["state"],
        "needs_data": rows["fedspa", "1"]["needs_data"],
        "rows_without_method": [],
        "command": "polyphily reproduce fedspa --table 1",
    }
    assert rows["fedspa", "1"]["state"].startswith("needs data cora, ")
    assert rows["fedspa", "figure-4"]["runnable"] == 36
    assert rows["fedspa", "figure-4"]["state"] == "runs"
    assert rows["fedspa", "figure-3"]["state"] == "an illustration: nothing to run"
    assert rows["fedspa", "figure-2b"]["command"] == "polyphily reproduce fedspa --figure 2b"
    names = [row["table"] for row in json.loads(out) if row["paper"] == "fedgsp"]
    assert names[:8] == ["I", "II", "III", "IV", "V", "VI", "VII", "figure-1"]
    assert names[-2:] == ["figure-9", "figure-10"]


@pytest.mark.parametrize("columns", [80, 120])
def test_the_list_fits_the_terminal(
    columns: int, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    _, out, _ = say("--list")
    assert max(map(len, out.splitlines())) <= columns
    assert "polyphily reproduce fedgsp --figure 10" in out
    assert " tables and figures run as a whole" in " ".join(out.split("\n\n")[-1].split())


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


def result(mean: float | None, std: float | None = None, **changes: Any) -> Result:
    """A result of ours; its request is the mean unless given."""
    request = {"mean": mean, "seeds": [0, 1]}
    return replace(Result(mean, std, (0, 1), request), **changes)


def entries_of(paper: Paper, table: str, cell: str) -> dict[str, Entry]:
    return {e.method: e for e in paper.table(table).entries if e.cell == cell}


def test_the_text_of_a_table() -> None:
    paper = tables.paper("fedspa")
    entries = entries_of(paper, "1", "coauthor-cs louvain 10")
    fewer = ("2 seeds instead of 5",)
    plain = result(92.46, 0.123, changed=fewer)
    lines = [
        Line(entries["fedavg"], {"paper": plain, "default": plain}),
        Line(
            entries["fedspa"],
            {"default": result(None, changed=fewer, remark="has not begun")},
            failed={"paper": "it diverged"},
        ),
        Line(entries["fedgta"], skipped=plan.NO_METHOD),
    ]
    text = report.as_markdown(report.as_data(paper, paper.table("1"), lines, BOTH))
    assert text.startswith("# fedspa, Table 1: FedSPA and baselines")
    assert "over seeds 0, 1, with the difference" in text
    assert "**Not the paper's protocol: 2 seeds instead of 5.**" in text
    cells = [[cell.strip() for cell in row.split("|")] for row in text.splitlines()]
    [fedavg] = [row[5:9] for row in cells if row[4:5] == ["fedavg"]]
    ours = "92.46 ± 0.12 (+0.7)"
    assert fedavg == ["91.8 ± 0.3 [1]", ours, ours, "validation, dropout"]
    [fedspa] = [row[6:9] for row in cells if row[4:5] == ["fedspa"]]
    assert fedspa == ["failed [4]", "– [3]", "validation, dropout, labels, order"]
    assert "- **validation**: the published number is accuracy on validation nodes" in text
    assert "- [1] recovered: a 4 stands for the plus-minus sign" in text
    assert "- [3] has not begun" in text
    assert "- [4] it diverged" in text
    assert "- method not in the library: fedgta (1 number)" in text


def test_changes_that_differ_by_row_are_noted_at_the_row() -> None:
    paper = tables.paper("fedspa")
    entries = entries_of(paper, "1", "cora louvain 10")
    lines = [
        Line(entries["fedavg"], {"default": result(80.0)}),
        Line(entries["fedspa"], {"default": result(81.0, changed=("7 rounds",), set={"tied": 1})}),
    ]
    data = report.as_data(paper, paper.table("1"), lines)
    assert data["changed"] == ["fedspa with tied=1"]
    assert [row["forms"]["default"]["notes"] for row in data["rows"]] == [
        [],
        ["not the paper's protocol: 7 rounds, tied=1"],
    ]


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


@pytest.mark.parametrize(
    ("only", "cells"),
    [
        ("cora", {"cora metis 5", "cora metis 10", "cora metis 20"}),
        ("Cora 10", {"cora metis 10"}),
        ("metis 20, cora 5", None),
        ("10", None),
    ],
)
def test_cells_are_chosen_by_words(only: str, cells: set[str] | None) -> None:
    paper = tables.paper("fedgsp")
    table = paper.table("II")
    choice = Choice(datasets=reproducing._names(only))
    plan.check_choice(paper, [table], choice)
    found = {entry.cell for entry in plan.select(paper, table, choice)}
    every = {entry.cell for entry in table.entries}
    wanted = {
        "metis 20, cora 5": {c for c in every if c.endswith(" 20")} | {"cora metis 5"},
        "10": {c for c in every if c.endswith(" 10")},
    }
    assert found == (cells or wanted[only])


def test_an_exhibit_is_chosen_by_names_and_numbers() -> None:
    assert Choice(datasets=("cora 10", "texas 5")).by_name() == Choice(
        datasets=("cora", "texas"), clients=(10, 5)
    )
    assert Choice(datasets=("cora 10", "texas")).by_name().clients is None


# Forms -----------------------------------------------------------------------------------------


def jobs_of(paper: str, table: str, cell: str, row: str, **given: Any) -> dict[str, plan.Job]:
    source = tables.paper(paper)
    entry = entries_of(source, table, cell)[row]
    return plan.jobs(source, source.table(table), entry, Choice(), BOTH, given)


def test_the_papers_method_runs_in_each_form() -> None:
    found = jobs_of("fedspa", "1", "cora louvain 10", "fedspa")
    methods = {form: create(job.method, job.hyperparameters) for form, job in found.items()}
    assert methods["paper"] == create("fedspa", {"paper": True})
    assert methods["default"] == create("fedspa")
    assert {job.form for job in found.values()} == set(BOTH)


def test_a_method_of_one_form_runs_once() -> None:
    found = jobs_of("fedspa", "1", "cora louvain 10", "fedavg")
    assert found["paper"] is found["default"]
    assert runner.folder_of(Path(), "1", found["paper"]).name == "fedavg"


def test_each_form_has_a_folder() -> None:
    found = jobs_of("fedspa", "1", "cora louvain 10", "fedspa")
    folders = [runner.folder_of(Path(), "1", job).name for job in found.values()]
    assert folders == ["fedspa.paper", "fedspa"]


def test_what_the_user_sets_is_for_the_papers_method_and_rows_keep_their_meaning() -> None:
    cell = "coauthor-cs louvain 10"
    whole = jobs_of("fedspa", "2", cell, "fedspa", prior="off", tied="on")
    assert whole["default"].hyperparameters == {"prior": "off", "tied": "on"}
    part = jobs_of("fedspa", "2", cell, "fedspa[sfpd=on,hbda=off]", prior="on", tied="on")
    assert create("fedspa", part["paper"].hyperparameters) == create(
        "fedspa", {"paper": True, "tied": True, "prior": False, "posterior": False}
    )
    assert jobs_of("fedspa", "1", cell, "fedavg", tied="on")["default"].hyperparameters == {}


def test_a_setting_without_effect_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cls = type(create("fedspa"))
    monkeypatch.setattr(cls, "without_effect", lambda self: {"tied": "it is idle"})
    paper = tables.paper("fedspa")
    plan.check_forms(paper, BOTH, {"prior": "off"})
    with pytest.raises(UserError, match="paper's form of fedspa: 'tied' has no effect here"):
        plan.check_forms(paper, BOTH, {"tied": "on"})


def test_orders_for_one_model_have_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """FedGSP's published weight of complementing is 0 on Cora with 5 clients."""
    whole = jobs_of("fedgsp", "VI", "cora metis 5", "fedgsp")["default"]
    part = jobs_of("fedgsp", "VI", "cora metis 5", "fedgsp[complementing=off]")["default"]
    other = jobs_of("fedgsp", "VI", "cora metis 5", "fedgsp[sharing=off]")["default"]
    assert whole.request() == part.request()
    assert whole.request() != other.request()
    spelled = replace(tiny_job(), method="fedprox", hyperparameters={"mu": "0.01"})
    typed = replace(spelled, hyperparameters={"mu": 0.01})
    changed = replace(spelled, hyperparameters={"mu": 0.02})
    assert spelled.request() == typed.request() != changed.request()
    cls = type(create("fedprox"))
    monkeypatch.setattr(cls, "without_effect", lambda self: {"mu": "it is idle"})
    assert spelled.request() == changed.request()


def test_rows_that_are_one_model_are_noted() -> None:
    paper = tables.paper("fedgsp")
    entries = entries_of(paper, "VI", "cora metis 5")
    names = ["fedgsp", "fedgsp[complementing=off]", "fedgsp[sharing=off]"]
    shared = [result(80.0), result(80.0), result(79.0)]
    lines = [
        Line(entries[name], {"paper": result(float(i)), "default": ours})
        for i, (name, ours) in enumerate(zip(names, shared, strict=True))
    ]
    rows = report.as_data(paper, paper.table("VI"), lines, BOTH)["rows"]
    notes = [[row["forms"][form]["notes"] for form in BOTH] for row in rows]
    assert notes == [[[], []], [[], ["same model as fedgsp"]], [[], []]]


def test_one_model_is_trained_once(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = count_runs(monkeypatch)
    source = tables.paper("fedspa")
    first, *_ = source.table("figure-4").entries
    table = replace(
        source.table("figure-4"), entries=(first, replace(first, method="fedavg again"))
    )
    rows = {**source.rows, "fedavg again": tables.Variant("fedavg")}
    changed = replace(source, rows=rows, tables={**source.tables, "figure-4": table})
    monkeypatch.setattr(tables, "paper", lambda _: changed)
    status, out, _ = say("fedspa", "--table", "figure-4", *QUICK, "--json")
    assert status == 0
    assert trained == ["fedavg"]
    again = json.loads(out)["rows"][1]["forms"]
    assert [again[form]["notes"] for form in BOTH] == [["same model as fedavg"]] * 2


CELL = "csbm:homophily=0.75,gap=0.1,degree=2"


def count_runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Do not train; return a list to which every run adds the name of its method."""
    trained: list[str] = []

    def train(execution: Execution, done: int) -> dict[str, Any]:
        trained.append(execution.method.name)
        scores = {"test": {"accuracy": 0.5}, "round": 2}
        summary = {
            "rounds": execution.settings.rounds,
            "device": "cpu",
            "evaluated": execution.method.evaluated,
            "views": {"received": {"last5": scores, "best_val": scores}},
        }
        assert execution.folder
        execution.folder.write_summary(summary)
        return summary

    monkeypatch.setattr(reproducing.training, "train", train)
    return trained


# Results of several commands -------------------------------------------------------------------


def test_results_of_commands_are_merged(
    say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = count_runs(monkeypatch)
    base = ("fedspa", "--table", "figure-4", "--only", CELL, "--seeds", "0", "--rounds", "2")
    say(*base, "--methods", "fedavg")
    say(*base, "--methods", "fedspa", "--form", "paper")
    say(*base, "--methods", "fedspa", "--form", "default")
    assert trained == ["fedavg", "fedspa", "fedspa"]
    shutil.rmtree(tmp_path / "reproduce" / "fedspa" / "figure-4")  # the run folders
    status, out, _ = say(*base, "--json")
    assert (status, trained) == (0, ["fedavg", "fedspa", "fedspa"])
    rows = {row["method"]: row["forms"] for row in json.loads(out)["rows"]}
    assert {name: set(forms) for name, forms in rows.items()} == {
        "fedavg": set(BOTH),
        "fedspa": set(BOTH),
    }


def test_a_run_is_shared_by_tables(tmp_path: Path) -> None:
    """FedATH's Table 8 has other scores of the runs of Table 1."""
    paper = tables.paper("fedath")
    requests = []
    for table in ("1", "8"):
        entry = entries_of(paper, table, "cora louvain-capped 10")["fedath"]
        requests.append(plan.jobs(paper, paper.table(table), entry, Choice())["default"].request())
    assert requests[0] == requests[1]
    runner.run(tiny_job(), tmp_path / "1" / "cell" / "row", Counted())
    found = runner.finished_runs(tmp_path)
    assert found == {plan.key_of(tiny_job().request()): tmp_path / "1" / "cell" / "row"}


def test_a_result_by_the_protocol_stays() -> None:
    paper = tables.paper("fedspa")
    table = paper.table("1")
    entry = table.entries[0]
    whole, quick, better = result(80.0), result(70.0, changed=("a quick look",)), result(81.0)

    def merged(old: Result, new: Result) -> Mapping[str, Result]:
        lines = report.merge(
            table, [Line(entry, {"default": old})], [Line(entry, {"default": new, "paper": new})]
        )
        return lines[0].results

    assert merged(whole, quick) == {"default": whole, "paper": quick}
    assert merged(quick, better) == {"default": better, "paper": better}
    assert merged(whole, better) == {"default": better, "paper": better}


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "table-1.json").write_text("[]", encoding="utf-8")
    with pytest.raises(UserError, match="is not a table of this command"):
        report.read_lines(tables.paper("fedspa").table("1"), tmp_path)


# Warm-up ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("moment", "rounds", "best", "words"),
    [
        ("best_val", 2, [1, 2], "has not begun: its terms start after round 3"),
        ("best_val", 9, [3, 9], "scored in the warm-up in 1 of 2 seeds: its terms start after"),
        ("best_val", 9, [[2, 3], [4, 1]], "scored in the warm-up in 1 of 2 seeds"),
        ("best_val", 9, [4, 9], None),
        ("last5", 7, [1, 1], "scored in the warm-up in 2 of 2 seeds"),
        ("last5", 8, [1, 1], None),
        ("final", 4, [1, 1], None),
    ],
)
def test_scores_before_a_method_acts_are_noted(
    moment: str, rounds: int, best: list[Any], words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(create("fedavg")), "rounds_before_it_acts", lambda self: 3)
    job = tiny_job(rounds)
    job = replace(job, protocol=replace(job.protocol, moment=moment))
    runs = [{"views": {"received": {"best_val": {"round": found}}}} for found in best]
    summary = {"rounds": rounds, "evaluated": "global", "per_seed": runs}
    remark = runner.remark(job, summary)
    assert (remark is None) == (words is None)
    assert words is None or (remark or "").startswith(words)


def test_a_methods_remarks_on_the_run_are_kept() -> None:
    assert runner.remark(tiny_job(), {"remarks": ["W had not converged"]}) == "W had not converged"


def test_seconds_name_the_device() -> None:
    job = tiny_job()
    job = replace(job, protocol=replace(job.protocol, metric=tables.SECONDS))
    assert runner.remark(job, {"device": "cuda"}) == "measured on cuda"


# Files -----------------------------------------------------------------------------------------


def test_what_is_written(say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count_runs(monkeypatch)
    files = [tmp_path / "to" / f"table{suffix}" for suffix in (".md", ".csv", ".tex")]
    flags = [part for file in files for part in ("--write", str(file))]
    say("fedspa", "--table", "figure-4", "--only", CELL, *QUICK, *flags)
    text, numbers, latex = (file.read_text(encoding="utf-8") for file in files)
    assert text == (tmp_path / "reproduce/fedspa/figure-4.md").read_text(encoding="utf-8")
    rows = list(csv.DictReader(io.StringIO(numbers)))
    assert [row["method"] for row in rows] == ["fedavg", "fedspa"]
    assert [row["paper mean"] for row in rows] == ["50.0", "50.0"]
    assert rows[0]["published mean"] == ""
    assert rows[0]["default seeds"] == "0"
    assert latex.count(r"\\") == 3
    assert latex.index(r"\toprule") < latex.index(r"\midrule") < latex.index(r"\bottomrule")


def test_latex_is_escaped() -> None:
    grid = Grid("50 % & more", ("a_b", "n"), [("[x] {y} #1 $ ~ ^ \\", 1.25), ("λ ± <", None)])
    text = to_latex(grid, ["100 %"])
    assert r"\caption{50 \% \& more}" in text
    assert r"a\_b & n \\" in text
    assert (
        r"{}[x] \{y\} \#1 \$ \textasciitilde{} \textasciicircum{} \textbackslash{} & 1.25 \\"
        in text
    )
    assert r"$\lambda$ $\pm$ $<$ &  \\" in text
    assert r"\begin{tabular}{lr}" in text
    assert r"100 \%\par" in text


def test_markdown_and_csv_of_grids() -> None:
    grid = Grid("t", ("name", "x"), [("a|b", 0.123456), ("c", None)])
    assert to_markdown(grid).splitlines() == [
        "| name | x |",
        "| --- | --: |",
        "| a\\|b | 0.1235 |",
        "| c |  |",
    ]
    other = Grid("u", ("y",), [(1,)])
    assert to_csv([grid, grid, other]) == ("name,x\na|b,0.123456\nc,\na|b,0.123456\nc,\n\ny\n1\n")


@pytest.mark.parametrize("columns", [80, 120])
def test_a_table_fits_the_terminal(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    paper = tables.paper("fedspa")
    entries = entries_of(paper, "3", "coauthor-cs louvain 10")
    ours = result(92.46, 0.123, remark="has not begun")
    lines = [Line(entry, {"paper": ours, "default": ours}) for entry in entries.values()]
    sheets.print_scores(report.as_data(paper, paper.table("3"), lines, BOTH))
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= columns
    assert out.count("coauthor-cs") == 1  # a cell is named once
    assert out.replace(" ± ", "±").count("92.46±0.12") == 2 * len(entries)
    assert out.count("posterior=off") == 1  # no word is broken
    assert "validation (all rows): the published number" in " ".join(out.split())


# Exhibits --------------------------------------------------------------------------------------


def test_an_exhibit_is_drawn_and_written(
    say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted: list[Wanted] = []

    def make(given: Wanted) -> Made:
        wanted.append(given)
        return Made([Grid("numbers", ("x", "y"), [(1, 0.5), (2, None)])], ["A note."], draw)

    def draw() -> Any:
        from matplotlib.figure import Figure

        return Figure(figsize=(1, 1))

    exhibit = Exhibit("figure-2b", "what it shows", make)
    monkeypatch.setattr(contents, "exhibits", lambda _: {"figure-2b": exhibit})
    file = tmp_path / "b.md"
    arguments = ("fedspa", "--figure", "2b", "--form", "default,paper", "--set", "tied=on")
    status, out, _ = say(*arguments, "--only", "cora 5", *QUICK, "--write", str(file))
    assert status == 0
    assert (wanted[0].forms, wanted[0].set) == (BOTH, {"tied": "on"})
    assert (wanted[0].choice.datasets, wanted[0].choice.clients) == (("cora",), (5,))
    folder = tmp_path / "reproduce" / "fedspa"
    assert (folder / "figure-2b.csv").read_text(encoding="utf-8") == "x,y\n1,0.5\n2,\n"
    assert (folder / "figure-2b.svg").read_text(encoding="utf-8").startswith("<?xml")
    assert (folder / "figure-2b.png").read_bytes().startswith(b"\x89PNG")
    assert "| 1 | 0.5 |" in file.read_text(encoding="utf-8")
    assert all(f"reproduce/fedspa/figure-2b.{kind}" in out for kind in ("svg", "png", "csv"))
    status, out, _ = say("fedspa", "--page", "pages/fedspa.md")
    page = (tmp_path / "pages" / "fedspa.md").read_text(encoding="utf-8")
    assert "![Figure 2b: what it shows](fedspa/figure-2b.svg)" in page
    assert (tmp_path / "pages" / "fedspa" / "figure-2b.svg").exists()
    assert "**Not the paper's protocol: a quick look, 2 rounds, fedspa with tied=on.**" in page
    assert "- A note." in page


def test_computed_tables_are_found_by_either_flag() -> None:
    paper = tables.paper("fedath")
    assert contents.find_item(paper, "7").exhibit is not None
    spa = tables.paper("fedspa")
    found = [contents.find_item(spa, n).name for n in ("figure-4", "Figure 4", "fig. 4")]
    assert found == ["figure-4"] * 3
    assert contents.find_item(spa, "4", figure=True).name == "figure-4"
    assert contents.find_item(tables.paper("fedgsp"), "vi").name == "VI"


# Pages -----------------------------------------------------------------------------------------


def test_a_page(say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "fedgta")
    paper = tables.paper("s2fgl")
    table = paper.table("1")
    entries = entries_of(paper, "1", "cora louvain 10")
    plain = result(80.0, 0.5)
    lines = [
        Line(entries["fedavg"], {"paper": plain, "default": plain}),
        Line(entries["s2fgl"], {"paper": result(84.4), "default": result(83.0, remark="late")}),
    ]
    folder = tmp_path / "reproduce" / "s2fgl"
    folder.mkdir(parents=True)
    data = report.as_data(paper, table, lines, BOTH)
    (folder / "table-1.json").write_text(json.dumps(data), encoding="utf-8")
    status, _, _ = say("s2fgl", "--page", "s2fgl.md")
    text = (tmp_path / "s2fgl.md").read_text(encoding="utf-8")
    rows = [line[2:-2].split(" | ")[:4] for line in text.splitlines() if line.startswith("| ")]
    assert status == 0
    assert rows[0] == ["method", "", "cora louvain 10", "citeseer louvain 10"]
    assert ["fedavg", "published", "81.9 ± 0.7", "74.3 ± 0.4"] in rows
    assert ["", "here", "80.00 ± 0.50 (-1.9)", "needs data"] in rows
    assert ["s2fgl", "published (labels, order)", "83.4 ± 0.2", "76.0 ± 0.3"] in rows
    assert ["", "paper's form", "84.40 (+1.0)", "needs data"] in rows
    assert ["", "default form", "83.00 (-0.4) [1]", "needs data"] in rows
    [absent] = [row for row in rows if row[0] == "fedgta"]
    assert absent[1] == "published; method not in the library"
    assert "- [1] late" in text
    assert "over seeds 0, 1, with" in text
    assert "- Table 2, ablation of NLIR and FGMA: needs data cora, citeseer." in text


def test_a_page_says_what_was_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plan, "is_present", lambda _: True)
    paper = tables.paper("s2fgl")
    entries = entries_of(paper, "2", "cora louvain 10")
    data = report.as_data(
        paper, paper.table("2"), [Line(entries["s2fgl"], {"default": result(83.0)})]
    )
    (tmp_path / "table-2.json").write_text(json.dumps(data), encoding="utf-8")
    text = pages.page(paper, tmp_path).text
    assert "|  | default form | 83.00 (-0.4) | not run |" in text


# Partition files -------------------------------------------------------------------------------


def test_partition_files_are_made_first_and_used_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = tmp_path / "graph"
    graph.mkdir()
    nodes = [f"{i},{i % 2},{i * 0.1},{i % 3}" for i in range(60)]
    (graph / "nodes.csv").write_text("\n".join(["id,label,a,b", *nodes]), encoding="utf-8")
    edges = [f"{i},{(i * 7 + 1) % 60}" for i in range(60)]
    (graph / "edges.csv").write_text("\n".join(["source,target", *edges]), encoding="utf-8")
    data = {"dataset": str(graph), "partition": "random", "clients": 2, "split": "0.6,0.2,0.2"}
    job = replace(tiny_job(), data=data, partitions=tmp_path / "files")
    first = runner.federations_of(job)
    assert len(list((tmp_path / "files").iterdir())) == 2  # seeds
    monkeypatch.setattr("polyphily.graphs.loading.partition", None)  # there is no partitioner
    runner._federations.cache_clear()
    again = runner.federations_of(job)
    assert [f.partition.sha256 for f in first] == [f.partition.sha256 for f in again]
