"""`polyphily sweep`: a grid of ordinary runs, gone on with where it was stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from polyphily.runs.folder import RunFolder
from polyphily.runs.together import Together
from report.stories import DATA, call

TINY = [*DATA, "--rounds", "2"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_grid_is_run_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    grid = ["--vary", "mu=0.1,1", "--vary", "lr=0.01,0.1", "--out", "s"]
    assert call("sweep", "fedprox", "fedavg", *grid, *TINY) == 0
    said = capsys.readouterr().out
    folders = sorted(str(p.parent.relative_to("s")) for p in Path("s").rglob("summary.json"))
    assert folders == [
        "fedavg/lr-0.01",
        "fedavg/lr-0.1",
        *[f"fedprox/mu-{mu}_lr-{lr}" for mu in ("0.1", "1") for lr in ("0.01", "0.1")],
    ]
    summary = json.loads(Path("s/fedprox/mu-1_lr-0.1/summary.json").read_text(encoding="utf-8"))
    assert (summary["hyperparameters"]["mu"], summary["settings"]["lr"]) == (1.0, 0.1)
    assert "polyphily plot sensitivity s --against mu" in said
    assert Path("s/report.html").exists()
    assert call("plot", "sensitivity", "s", "--against", "mu", "--out", "f.pdf") == 0
    assert max(map(len, said.splitlines())) <= 80


@pytest.mark.parametrize(("method", "backbone"), [("fedavg", "gcn"), ("fedgsp", "unifilter")])
def test_points_in_one_pass_are_the_runs_they_would_be(
    method: str, backbone: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = [*DATA, "--rounds", "3", "--seeds", "0,1", "--backbone", backbone]
    rates = ("0.003", "0.01", "0.03")
    track = ["--track", "tensorboard"]
    vary = ["--vary", f"lr={','.join(rates)}"]
    assert call("sweep", method, *vary, *data, "--out", "s", *track) == 0
    assert f"1–3/3  {method}, lr {', '.join(rates)} in one pass" in capsys.readouterr().err
    for lr in rates:
        assert call("run", method, "--lr", lr, *data, "--out", f"r-{lr}", *track) == 0
        alone, point = Path(f"r-{lr}"), Path(f"s/{method}/lr-{lr}")
        extra = {"report.html", "reproduce.json"}  # a page by itself; what the point stands for
        names = [
            {p.relative_to(f).as_posix() for p in f.rglob("*") if "tfevents" not in p.name} - extra
            for f in (alone, point)
        ]
        assert names[0] == names[1]
        for name in ("config.toml", "collaboration.jsonl", "evidence.json"):
            assert (alone / name).read_text("utf-8") == (point / name).read_text("utf-8"), name
        for file in (alone / "models").iterdir():
            assert file.read_bytes() == (point / "models" / file.name).read_bytes(), file.name
        assert list((point / "tensorboard").iterdir())
    more = ["--resume", point, "--rounds", "5"]
    assert call("run", *more) == 0
    assert call("run", "--resume", alone, "--rounds", "5") == 0
    scores = [(RunFolder(f).read_summary() or {})["best_val"] for f in (alone, point)]
    assert scores[0] == scores[1]
    assert call("report", point) == 0


def test_what_must_be_apart_is_not_in_one_pass(capsys: pytest.CaptureFixture[str]) -> None:
    vary = ["--vary", "lr=0.01,0.1", "--vary", "hidden=4,8", "--out", "s"]
    assert call("sweep", "fedavg", "local", *vary, *TINY) == 0
    said = capsys.readouterr().err
    for numbers in ("1, 5", "2, 6", "3, 7", "4, 8"):
        assert f"{numbers}/8  " in said
    assert "1, 5/8  fedavg, lr 0.01, 0.1, hidden 4 in one pass" in said
    one_by_one = ["--engine", "sequential"]
    assert call("sweep", "local", "--vary", "lr=0.01,0.1", *one_by_one, *TINY, "--out", "t") == 0
    assert "one pass" not in capsys.readouterr().err


def test_a_pass_that_was_stopped_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["sweep", "fedavg", "--vary", "lr=0.01,0.1", *DATA, "--rounds", "4", "--out"]
    assert call(*command, "whole") == 0
    append = RunFolder.append

    def stop(folder: RunFolder, record: dict[str, Any]) -> None:
        if record["round"] == 3:
            raise KeyboardInterrupt
        append(folder, record)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "append", stop)
        assert call(*command, "cut") == 130
    capsys.readouterr()
    assert call(*command, "cut") == 0
    assert "1–2/2  fedavg, lr 0.01, 0.1 in one pass" in capsys.readouterr().err
    for lr in ("0.01", "0.1"):
        whole, cut = (RunFolder(Path(f"{name}/fedavg/lr-{lr}")) for name in ("whole", "cut"))
        assert [r["loss"] for r in whole.records()] == [r["loss"] for r in cut.records()]


def test_without_memory_for_a_pass_points_run_one_by_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["sweep", "local", "--vary", "lr=0.01,0.1", *TINY, "--out"]
    assert call(*command, "small", "--memory", "1KB") == 0
    assert "in one pass" not in capsys.readouterr().err

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Together, "go", fail)
    assert call(*command, "large") == 0
    said = capsys.readouterr().err
    assert "1–2/2" in said
    assert "2/2  local, lr 0.1\n" in said
    for place in ("small", "large"):
        assert len(list(Path(place).rglob("summary.json"))) == 2


def test_a_point_that_diverges_does_not_take_the_others_down(
    capsys: pytest.CaptureFixture[str],
) -> None:
    vary = ["--vary", "lr=1e30,0.01,0.1", "--optimizer", "sgd", "--out", "s"]
    assert call("sweep", "fedavg", *vary, *TINY, "--json") == 1
    heard = capsys.readouterr()
    assert [row["config"]["lr"] for row in json.loads(heard.out)] == [0.01, 0.1]
    assert "not finite" in heard.err
    assert "1 of 3 runs failed: s/fedavg/lr-1e30" in heard.err
    assert call("sweep", "fedavg", *vary[:1], "lr=1e30", *vary[2:], *TINY) == 1
    assert "not finite" in capsys.readouterr().err


def test_what_is_finished_is_not_run_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("sweep", "fedavg", "--vary", "lr=0.01,0.1", "--out", "s", *TINY) == 0
    first, second = (Path(f"s/fedavg/lr-{lr}/summary.json") for lr in ("0.01", "0.1"))
    stamp, wanted = first.stat().st_mtime_ns, second.read_text(encoding="utf-8")
    second.unlink()
    capsys.readouterr()
    assert call("sweep", "fedavg", "--vary", "lr=0.01,0.1,0.2", "--out", "s", *TINY) == 0
    said = capsys.readouterr().err
    assert "1/3" not in said
    assert "2/3" in said
    assert "3/3" in said
    assert first.stat().st_mtime_ns == stamp
    renewed = json.loads(second.read_text(encoding="utf-8"))
    assert renewed["best_val"] == json.loads(wanted)["best_val"]


def test_other_runs_are_set_aside_and_left_out_of_figures() -> None:
    from polyphily.report.runs import read_runs

    assert call("sweep", "local", "--vary", "lr=0.01,0.1", "--out", "s", *TINY) == 0
    assert call("sweep", "local", "--vary", "lr=0.01", "--out", "s", *DATA, "--rounds", "3") == 0
    assert sorted(path.name for path in Path("s/local").iterdir()) == [
        "lr-0.01",
        "lr-0.01.before-1",
        "lr-0.1",
    ]
    rounds = {run.config["lr"]: run.summary["rounds"] for run in read_runs([Path("s")])}
    assert rounds == {0.01: 3, 0.1: 2}


def test_data_can_be_varied(capsys: pytest.CaptureFixture[str]) -> None:
    data = ["--dataset", "csbm:nodes=60,features=8", "--hidden", "8", "--rounds", "1"]
    assert call("sweep", "local", "--vary", "clients=2,3", *data, "--out", "s") == 0
    assert "plot client-scale" in capsys.readouterr().out
    assert call("plot", "client-scale", "s", "--out", "f.svg") == 0
    capsys.readouterr()
    splits = "split=0.2,0.4,0.4;0.6,0.2,0.2"
    assert call("sweep", "local", "--vary", splits, *data, "--json", "--out", "t") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["config"]["split"] for row in rows] == ["0.2,0.4,0.4", "0.6,0.2,0.2"]
    noise = "noise=edges=0.1,edges=0.5"
    assert call("sweep", "local", "--vary", noise, *data, "--out", "n") == 0
    capsys.readouterr()
    assert call("sweep", "local", "--vary", noise, *data, "--out", "n", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["config"]["noise"] for row in rows] == ["edges=0.1", "edges=0.5"]


@pytest.mark.parametrize(
    ("vary", "words"),
    [
        (["hiden=1"], "did you mean 'hidden'"),
        (["mu"], "write name=v1,v2"),
        (["mu=a,b"], "mu"),
        (["lr=0.1", "lr=0.2"], "given twice"),
        (["seeds=0,1"], "--seeds"),
        (["hidden=many"], "hidden"),
    ],
)
def test_mistakes_are_named(
    vary: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [part for text in vary for part in ("--vary", text)]
    assert call("sweep", "fedprox", *flags, *TINY, "--out", "s") == 2
    assert words in capsys.readouterr().err
    assert not Path("s").exists()


def test_the_papers_form_may_be_set_and_varied(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("sweep", "fedspa", "--vary", "paper=on,off", *TINY, "--json") == 0
    found = {row["at"]["paper"]: row["config"] for row in json.loads(capsys.readouterr().out)}
    assert found["on"]["set.hidden_share"] == 0.0
    assert found["off"]["set.hidden_share"] == 0.5


def test_an_option_that_changes_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    idle = ["--set", "nlir=off", "--set", "lambda1=1", *TINY]
    for command in (["run"], ["compare", "fedavg"]):
        assert call(*command, "s2fgl", *idle) == 2
        assert "'lambda1' has no effect here" in capsys.readouterr().err
    grid = ["--vary", "lambda1=1,5", *TINY]
    assert call("sweep", "fedprox", "s2fgl", *grid, "--set", "nlir=off") == 2
    assert "'lambda1' has no effect here" in capsys.readouterr().err
    assert call("sweep", "s2fgl", *grid, "--vary", "nlir=on,off", "--set", "warm_up=0") == 0


def test_validation_chooses_the_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("sweep", "fedavg", "--vary", "lr=0.001,0.1", *TINY, "--out", "s") == 0
    said = capsys.readouterr().out
    assert "the row that validation chooses" in said
    summaries = [json.loads(p.read_text(encoding="utf-8")) for p in Path("s").rglob("summary.json")]
    for summary in summaries:
        best = summary["best_val"]
        assert f"{100 * best['val']['accuracy']:.2f}" in said
        assert f"{100 * best['test']['accuracy']:.2f}" in said
