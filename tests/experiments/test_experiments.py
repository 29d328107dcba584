"""`polyphily.compare` and `polyphily.sweep` do what the commands do."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

import polyphily
from polyphily.cli import options
from polyphily.errors import TrainingError, UserError
from polyphily.experiments.sweeping import DATA
from polyphily.graphs.loading import Federation
from polyphily.runs import runner

NAME = "csbm:nodes=40,features=8"
TINY = {"rounds": 2, "hidden": 8}


@pytest.fixture(scope="module")
def seeds() -> list[Federation]:
    return [polyphily.load(NAME, clients=2, seed=seed) for seed in (0, 1, 2)]


# compare -----------------------------------------------------------------------------------------


def test_scores_are_those_of_separate_runs(seeds: list[Federation]) -> None:
    found = polyphily.compare(["local", "fedprox"], seeds, mu=0.5, **TINY)
    for name, given in (("local", {}), ("fedprox", {"mu": 0.5})):
        alone = polyphily.run(name, seeds, **TINY, **given).summary
        scores = [run["best_val"]["test"]["accuracy"] for run in alone["per_seed"]]
        assert found.mean(name) == pytest.approx(statistics.fmean(scores))
        assert found.deviation(name) == pytest.approx(statistics.stdev(scores))
    assert found.board.ranking is not None
    assert found.board.ranking.blocks == 3
    assert sorted(found.methods) == ["fedprox", "local"]
    assert "| fedprox" in found.table()
    assert len(found.to_dict()["rows"]) == 2
    assert "no p-value can be below 0.25" in found.table()


def test_several_federations_by_name(seeds: list[Federation], tmp_path: Path) -> None:
    other = polyphily.load(NAME, clients=3, seed=0)
    lines: list[str] = []
    found = polyphily.compare(
        "fedavg", {"two": seeds[:1], "three": other}, out=tmp_path, report=lines.append, **TINY
    )
    assert list(found.board.cells) == ["two", "three"]
    assert lines == ["1/2  two, fedavg", "2/2  three, fedavg"]
    assert found.summaries["three", "fedavg"]["partition"]["clients"] == 3
    assert {p.parent.parent.name for p in tmp_path.rglob("summary.json")} == {"two", "three"}
    lines.clear()
    polyphily.compare(
        "fedavg", {"two": seeds[:1], "three": other}, out=tmp_path, report=lines.append, **TINY
    )
    assert lines == []  # finished


def test_one_seed_is_said_to_be_too_few(seeds: list[Federation]) -> None:
    found = polyphily.compare(["local", "fedavg"], seeds[0], **TINY)
    assert "One seed of one cell" in found.table()
    assert found.deviation("local") is None


def test_a_tuned_comparison(seeds: list[Federation]) -> None:
    found = polyphily.compare(
        ["local", "fedprox"], seeds[0], tune=3, rates={"lr": [0.01, 0.1]}, **TINY
    )
    assert {len(search.trials) for search in found.searches.values()} == {3}
    cell = found.board.cells[0]
    search = found.searches[cell, "fedprox"]
    assert found.summaries[cell, "fedprox"]["hyperparameters"]["mu"] == search.options["mu"]
    assert found.summaries[cell, "fedprox"]["settings"]["lr"] == search.options["lr"]
    assert len(found.to_dict()["searches"]) == 2
    assert "Tuned: 3 trials for each method" in found.table()


def test_failures_are_kept(seeds: list[Federation], monkeypatch: pytest.MonkeyPatch) -> None:
    run = runner.run

    def lame(order: Any, *rest: Any, **more: Any) -> Any:
        if order.method == "local":
            raise TrainingError("it diverged")
        return run(order, *rest, **more)

    monkeypatch.setattr(runner, "run", lame)
    found = polyphily.compare(["local", "fedavg"], seeds[0], **TINY)
    assert list(found.failures.values()) == ["it diverged"]
    with pytest.raises(TrainingError, match="every run failed"):
        polyphily.compare(["local"], seeds[0], **TINY)


def test_mistakes_in_comparisons(seeds: list[Federation]) -> None:
    for methods, given, message in (
        (["fedavgg"], {}, "did you mean"),
        (["fedavg", "FedAvg"], {}, "twice"),
        ([], {}, "no method"),
        (["fedavg"], {"nu": 1}, "nu"),
        (["fedavg"], {"lr": 0}, "out of bounds"),
        (["fedavg"], {"tune": -1}, "number of trials"),
        (["gcfl"], {"epsilon1": 0.1}, "no effect"),
    ):
        with pytest.raises(UserError, match=message):
            polyphily.compare(methods, seeds[0], **{**TINY, **given})
    with pytest.raises(UserError, match="no federation"):
        polyphily.compare("fedavg", [], **TINY)


# sweep -------------------------------------------------------------------------------------------


def test_a_sweep_over_data_and_hyperparameters(tmp_path: Path) -> None:
    vary = {"clients": [2, 3], "mu": [0.1, 1]}
    found = polyphily.sweep("fedprox", NAME, vary, out=tmp_path, **TINY)
    assert [run.at for run in found.runs] == [
        {"clients": str(k), "mu": mu} for k in (2, 3) for mu in ("0.1", "1")
    ]
    for run in found.runs:
        assert run.summary["partition"]["clients"] == int(run.at["clients"])
        federation = polyphily.load(NAME, clients=int(run.at["clients"]), seed=0)
        alone = polyphily.run("fedprox", federation, mu=float(run.at["mu"]), **TINY).summary
        assert run.test == alone["best_val"]["test"]["accuracy"]
        assert run.validation == alone["best_val"]["val"]["accuracy"]
        assert run.folder
        assert (run.folder / "summary.json").exists()
    assert found.best.validation == max(run.validation or 0 for run in found.runs)
    assert found.table().count("fedprox") == 4
    assert len(found.to_dict()["runs"]) == 4


def test_points_that_differ_in_rates_train_in_one_pass(tmp_path: Path) -> None:
    vary = {"lr": [0.01, 0.1]}
    data = {"dataset": NAME, "clients": 2}
    together = polyphily.sweep("fedavg", data, vary, out=tmp_path, **TINY)
    apart = polyphily.sweep("fedavg", data, vary, **TINY)
    assert [r.test for r in together.runs] == [r.test for r in apart.runs]


def test_a_sweep_over_loaded_federations(seeds: list[Federation]) -> None:
    found = polyphily.sweep(["fedavg", "fedprox"], seeds, {"mu": [0.1, 1]}, tune=2, **TINY)
    assert [(run.method, run.at) for run in found.runs] == [
        ("fedavg", {}),
        ("fedprox", {"mu": "0.1"}),
        ("fedprox", {"mu": "1"}),
    ]
    assert found.runs[-1].summary["hyperparameters"]["mu"] == 1.0
    with pytest.raises(UserError, match="loaded already"):
        polyphily.sweep("fedavg", seeds, {"clients": [2]}, **TINY)


def test_mistakes_in_sweeps(seeds: list[Federation]) -> None:
    for vary, given, message in (
        ({"nu": [1]}, {}, "name to vary"),
        ({"seeds": [1]}, {}, "side by side"),
        ({"epochs": []}, {}, "no values"),
        ({"hidden": ["x"]}, {}, "not a possible value"),
        ({"lr": [0.1]}, {"tune": 2}, "at once"),
        ({"epochs": [1]}, {"nu": 1}, "nu"),
    ):
        with pytest.raises(UserError, match=message):
            polyphily.sweep("fedavg", seeds[0], vary, **{**TINY, **given})


def test_arguments_of_load_are_those_of_the_command_line() -> None:
    assert {n: kind for n, (kind, _) in options.DATA.items() if n != "seeds"} == DATA


# tune --------------------------------------------------------------------------------------------


def test_tune_searches_what_is_not_given(seeds: list[Federation], tmp_path: Path) -> None:
    found = polyphily.tune("fedprox", seeds[0], 2, mu=0.1, out=tmp_path, **TINY)
    assert set(found.space) == {"epochs", "layers", "dropout"}
    assert (tmp_path / "tuning.jsonl").exists()
    assert found.to_dict()["best"]["val"] == found.score
    summary = polyphily.run("fedprox", seeds[0], mu=0.1, **TINY, **found.options).summary
    assert summary["best_val"]["val"]["accuracy"] == pytest.approx(found.score)
    for given, message in (
        ({"nu": 1}, "unknown setting"),
        ({"trials": 0}, "number of trials"),
        ({"rates": {"lr": [-1.0]}}, "out of bounds"),
    ):
        with pytest.raises(UserError, match=message):
            polyphily.tune("fedprox", seeds[0], **{**TINY, **given})
    with pytest.raises(UserError, match="no federation"):
        polyphily.tune("fedprox", [])
