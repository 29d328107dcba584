"""`polyphily sweep`: a grid of ordinary runs, gone on with where it was stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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
    from polyphily.report.runs import find

    assert call("sweep", "local", "--vary", "lr=0.01,0.1", "--out", "s", *TINY) == 0
    assert call("sweep", "local", "--vary", "lr=0.01", "--out", "s", *DATA, "--rounds", "3") == 0
    assert sorted(path.name for path in Path("s/local").iterdir()) == [
        "lr-0.01",
        "lr-0.01.before-1",
        "lr-0.1",
    ]
    rounds = {run.config["lr"]: run.summary["rounds"] for run in find([Path("s")])}
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
