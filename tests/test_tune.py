"""`--tune N` of `run`, `compare` and `sweep`."""

from __future__ import annotations

import json
import tomllib
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from commands import Cli, caller
from polyphily.report.content import content
from polyphily.report.runs import Run, read_runs
from polyphily.runs import searching
from polyphily.runs.searching import read_trials
from report.stories import DATA

TINY = [*DATA, "--rounds", "2", "--no-report"]  # with --hidden
FEW = ["--tune", "lr=0.01,0.1"]  # in place of four pairs


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    return caller(tmp_path, monkeypatch, capsys)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Return a list of the trials that are trained, by method and number."""
    found: list[tuple[str, int]] = []
    train = searching._Study._train

    def noted(study: Any, number: int, *rest: Any) -> Any:
        found.append((study.method, number))
        return train(study, number, *rest)

    monkeypatch.setattr(searching._Study, "_train", noted)
    return found


def test_a_run_is_tuned(cli: Cli) -> None:
    answer = cli("run", "fedprox", *TINY, *FEW, "--tune", "3", "--out", "r")
    assert answer.status == 0
    trials = read_trials(Path("r"))
    assert [trial.number for trial in trials] == [0, 1, 2]
    best = max(trials, key=lambda trial: trial.score("received") or 0)
    pair = best.best("received")
    assert pair
    config = tomllib.loads(Path("r/config.toml").read_text(encoding="utf-8"))
    assert config["set"]["mu"] == best.hyperparameters["mu"]
    assert {name: config[name] for name in best.settings} == best.settings
    assert (config["lr"], config["weight_decay"]) == (pair.lr, pair.weight_decay)
    assert config["hidden"] == 8  # it was set
    summary = json.loads(Path("r/summary.json").read_text(encoding="utf-8"))
    assert summary["tuning"] == {"trials": 3, "failed": 0, "file": "tuning.jsonl"}
    assert summary["best_val"]["val"]["accuracy"] == pytest.approx(best.score("received"))
    assert "tuned: 3 trials" in answer.out
    assert "3 trials, chosen by validation" in answer.err
    assert "0 defaults" in answer.err
    assert max(map(len, answer.err.splitlines())) <= 80
    more = cli("run", "--resume", "r", "--rounds", "3", "--json", "--no-report")
    assert more.json()["tuning"]["trials"] == 3
    assert more.json()["settings"]["lr"] == pair.lr


def test_rates_alone_are_one_trial(cli: Cli) -> None:
    answer = cli("run", "fedavg", *TINY, "--tune", "lr=1e-9,0.05", "--out", "r")
    assert answer.status == 0
    (trial,) = read_trials(Path("r"))
    assert [pair.lr for pair in trial.rates] == [1e-9, 0.05]
    assert trial.values == {}


def test_a_search_that_was_stopped_goes_on(cli: Cli, trained: list[tuple[str, int]]) -> None:
    given = ["run", "fedprox", *TINY, *FEW, "--tune", "3", "--out"]
    assert cli(*given, "whole").status == 0
    lines = Path("whole/tuning.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    Path("cut").mkdir()
    Path("cut/tuning.jsonl").write_text("".join(lines[:3]), encoding="utf-8")
    trained.clear()
    assert cli(*given, "cut").status == 0
    assert trained == [("fedprox", 2)]
    configs = [Path(f, "config.toml").read_text(encoding="utf-8") for f in ("whole", "cut")]
    assert configs[0] == configs[1]
    trained.clear()
    given[given.index("3")] = "4"
    again = cli(*given, "cut")
    assert again.status == 2
    assert "holds a run already" in again.err
    assert trained == []  # refused before anything is trained


def test_mistakes(cli: Cli) -> None:
    for wrong in ("0", "-1", "x", "2.5", "lr=", "mu=1"):
        answer = cli("run", "fedavg", *TINY, "--tune", wrong, "--out", "r")
        assert answer.status == 2, wrong
        assert "tune" in answer.err, wrong
    assert cli("compare", "fedavg", *TINY, "--tune", "0", "--out", "r").status == 2
    assert cli("sweep", "fedavg", "--vary", "epochs=1", *TINY, "--tune", "x").status == 2
    assert not Path("r").exists()
    assert cli("run", "fedavg", *TINY, "--out", "r").status == 0
    answer = cli("run", "--resume", "r", "--tune", "3")
    assert answer.status == 2
    assert "--resume" in answer.err
    both = cli("sweep", "fedavg", "--vary", "lr=0.1,0.2", *TINY, "--tune", "3", "--out", "s")
    assert both.status == 2
    assert "varied and tuned at once" in both.err


def test_a_comparison_gives_every_method_as_many_trials(
    cli: Cli, trained: list[tuple[str, int]]
) -> None:
    given = ["compare", "local", "fedprox", *TINY, *FEW, "--tune", "2", "--out", "c"]
    answer = cli(*given)
    assert answer.status == 0
    assert trained == [(name, trial) for name in ("local", "fedprox") for trial in (0, 1)]
    assert "Tuned: 2 trials for each method" in answer.out
    trained.clear()
    assert cli(*given).status == 0
    assert trained == []


def test_a_comparison_that_was_stopped_in_a_search_goes_on(
    cli: Cli, trained: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["compare", "fedprox", "local", *TINY, *FEW, "--tune", "2", "--out", "c"]
    train = searching._Study._train

    def killed(study: Any, number: int, *rest: Any) -> Any:
        if (study.method, number) == ("local", 1):
            raise KeyboardInterrupt
        return train(study, number, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(searching._Study, "_train", killed)
        assert cli(*given).status != 0
    trained.clear()
    assert cli(*given).status == 0
    assert trained == [("local", 1)]


def test_every_federation_has_its_own_search(cli: Cli) -> None:
    cells = ["--dataset", "csbm:nodes=40", "--clients", "2,3", "--hidden", "8"]
    given = [*cells, "--rounds", "2", "--no-report", "--tune", "2", "--out", "c"]
    answer = cli("compare", "fedavg", *given)
    assert answer.status == 0
    assert len(list(Path("c").glob("*/fedavg/tuning.jsonl"))) == 2


def test_a_point_of_a_sweep_is_tuned_with_what_is_varied_fixed(cli: Cli) -> None:
    given = ["--vary", "mu=0.1,1", *TINY, *FEW, "--tune", "2", "--out", "s"]
    assert cli("sweep", "fedprox", *given).status == 0
    for mu in ("0.1", "1"):
        folder = Path(f"s/fedprox/mu-{mu}")
        trials = read_trials(folder)
        assert len(trials) == 2
        assert all("mu" not in trial.values for trial in trials)
        config = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
        assert config["set"]["mu"] == float(mu)


def test_the_report_shows_the_trials(cli: Cli) -> None:
    assert cli("run", "fedprox", *TINY, *FEW, "--tune", "7", "--out", "r").status == 0
    page = content(read_runs([Path("r")]))
    (section,) = [s for s in page.sections if s.id == "tuning"]
    figure, table = section.items
    (series,) = figure.panels[""]["series"]  # type: ignore[union-attr]
    run = Run.read(Path("r"))
    assert [point[0] for point in series["points"]] == list(range(7))
    scores = [100 * (trial.score("received") or 0) for trial in run.trials]
    assert [point[1] for point in series["points"]] == pytest.approx(scores, rel=1e-4)
    assert len(table.rows) in (5, 6)  # type: ignore[union-attr]
    assert "7 trials" in section.lead
    assert cli("run", "fedavg", *TINY, "--out", "plain").status == 0
    plain = content(read_runs([Path("plain")]))
    assert "tuning" not in {s.id for s in plain.sections}


def test_the_defaults_are_shown_even_if_they_are_worst(cli: Cli) -> None:
    assert cli("run", "fedprox", *TINY, *FEW, "--tune", "7", "--out", "r").status == 0
    header, first, *others = Path("r/tuning.jsonl").read_text(encoding="utf-8").splitlines()
    worst = json.loads(first)
    for pair in worst["rates"]:
        pair["val"] = {view: [0.0] for view in pair["val"]}
    text = "\n".join([header, json.dumps(worst), *others]) + "\n"
    Path("r/tuning.jsonl").write_text(text, encoding="utf-8")
    page = content(read_runs([Path("r")]))
    (section,) = [s for s in page.sections if s.id == "tuning"]
    rows = section.items[1].rows  # type: ignore[union-attr]
    assert len(rows) == 6
    assert rows[-1][1:4] == ("0, defaults", rows[-1][2], "0.00")
    scores = [float(row[3]) for row in rows]
    assert scores == sorted(scores, reverse=True)


def test_the_progress_line_names_trial_and_best_score(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    from polyphily.cli import terminal

    written = StringIO()
    console = Console(file=written, force_terminal=True, width=100, highlight=False)
    monkeypatch.setattr(terminal, "err", console)
    assert cli("run", "fedprox", *TINY, *FEW, "--tune", "2", "--out", "r").status == 0
    for words in (
        "fedprox trial 1/2",
        "fedprox trial 2/2",
        "best val accuracy",
        "fedprox 2 trials",
    ):
        assert words in written.getvalue(), words


def test_methods_show_prints_ranges(cli: Cli) -> None:
    assert "--tune: 0.001 – 1, log" in cli("methods", "show", "fedprox").out
    shown = cli("methods", "show", "fedprox", "--json").json()
    ranges = {p["name"]: p["search"] for p in shown["hyperparameters"]}
    assert ranges["mu"] == {"low": 0.001, "high": 1.0, "log": True}
    assert ranges["weighting"] is None
