"""The suites `costs` and `plain`: which rounds are timed, what is recorded and written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from polyphily import load
from polyphily.bench import loops
from polyphily.bench.costs import costs, costs_table
from polyphily.bench.geometric import FedSagePlusLoop, make_loop
from polyphily.bench.loops import plain, plain_table
from polyphily.bench.stages import (
    FEW,
    FIRST_ROUND,
    Span,
    first_round_again,
    more_if_quick,
    spans,
    turns,
)
from polyphily.bench.suite import machine
from polyphily.bench.timing import make_simulation, time_rounds
from polyphily.cli import app
from polyphily.core.method import METHODS, create
from polyphily.engines.simulation import Simulation
from polyphily.graphs.loading import Federation


def small(dataset: str, *, seed: int = 0, **_: object) -> Federation:
    return load("csbm:nodes=40,features=5", clients=3, seed=seed)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_timed_rounds_are_of_one_kind(name: str) -> None:
    rounds = 7
    found = spans(name, rounds)
    assert len({span.label for span in found}) == len(found)
    for span in found:
        method = create(name, span.hyperparameters)
        if span.again:
            after = [n for n in range(1, 9) if method.stage(n) == method.stage(0)]
            assert any(method.phase(n) != method.phase(0) for n in after)
            continue
        for device in ("cpu", "cuda"):
            timed, before = turns(span, device, rounds)
            assert timed == rounds
            first = max(span.start, 1) + before
            numbers = range(first, first + timed + 1)  # one round may be run before all of these
            assert {method.stage(number) for number in numbers} == {span.label}
            assert len({method.phase(number) for number in numbers}) == 1


def test_every_stage_and_a_first_round_of_its_own_are_timed() -> None:
    def labels(name: str) -> list[str]:
        return [span.label for span in spans(name, 5)]

    assert labels("fedsage+") == [FIRST_ROUND, "generator", "classifier"]
    assert labels("adafgl") == ["federated", "local"]
    assert labels("fedavg") == [""]
    assert spans("s2fgl", 5)[-1].start == create("s2fgl").rounds_before_it_acts() > 0
    assert spans("adafgl", 5)[-1].hyperparameters == {}
    assert turns(spans("fedpub", 9)[0], "cuda", 9) == (FEW, 1)


def test_quick_rounds_are_timed_more_often_while_they_do_the_same() -> None:
    simulation = make_simulation([small("")], "fedavg", {"backbone": "gcn"})
    assert more_if_quick(simulation, 7, 1, 0.01) == 21
    assert more_if_quick(simulation, 7, 1, 2.0) == 7
    stages = make_simulation([small("")], "adafgl", {"backbone": "gcn"}, {"federated": 12})
    assert more_if_quick(stages, 7, 1, 0.01) == 11
    assert more_if_quick(stages, 4, 9, 0.01) == 4


def test_a_first_round_is_run_again_from_the_same_state() -> None:
    simulation = make_simulation([small("")], "fedpub", {"backbone": "gcn"})
    again = first_round_again(simulation)
    seen: list[dict[str, Any]] = []
    for _ in range(2):
        again()
        assert simulation.round == 0
        simulation.advance()
        seen.append({name: tensor.clone() for name, tensor in simulation.tensors().items()})
    assert all(bool((seen[0][name] == seen[1][name]).all()) for name in seen[0])


def test_time_before_a_round_does_not_count() -> None:
    calls: list[str] = []
    time_rounds(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")},
        2,
        before={"b": lambda: calls.append("before")},
        warm_up=1,
    )
    assert calls == ["a", "before", "b"] * 3


def test_costs_are_recorded_beside_fedavg(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str | None, int]] = []
    advance = Simulation.advance

    def watched(self: Simulation) -> Any:
        seen.append((self.method.name, self.settings.backbone, self.round))
        return advance(self)

    monkeypatch.setattr(Simulation, "advance", watched)
    names = ["fedavg", "scaffold", "fedsage", "adafgl"]
    rows = list(costs("cpu", rounds=2, get=small, methods=names))
    assert [(row["method"], row["stage"]) for row in rows] == [
        ("fedavg", ""),
        ("scaffold", ""),
        ("fedsage", ""),
        ("adafgl", "federated"),
        ("adafgl", "local"),
    ]
    fedavg, scaffold, sage, first, local = rows
    assert scaffold["megabytes_up"] == pytest.approx(2 * fedavg["megabytes_up"], rel=0.01)
    weights = (5 * 64 + 64 * 2) * 2 + 64 + 2
    assert sage["megabytes_down"] == pytest.approx(4 * weights / 1e6)
    assert first["megabytes_up"] > 0 == local["megabytes_up"]
    assert ("fedavg", "sage", 0) in seen, "FedAvg on the backbone of fedsage is timed, too"
    assert sage["ratio"] != sage["ratio_on_same_backbone"]
    assert fedavg["ratio"] == fedavg["ratio_on_same_backbone"]
    assert max(number for name, _, number in seen if name == "adafgl") == 10 + 1 + 3 * 2 - 1
    for row in rows:
        assert row["ratio"] == pytest.approx(row["median_ms"] / row["fedavg_ms"])
        assert row["memory_gb"] is None


def row_of_costs(**changes: object) -> dict[str, Any]:
    return {
        "method": "fedavg",
        "stage": "",
        "from_round": 1,
        "backbone": "gcn",
        "median_ms": 2.0,
        "first_ms": 30.0,
        "fedavg_ms": 2.0,
        "ratio": 1.0,
        "ratio_on_same_backbone": 1.0,
        "megabytes_up": 0.5,
        "megabytes_down": 0.25,
        "memory_gb": None,
        "note": "",
        **changes,
    }


def test_the_table_of_costs_names_what_is_too_dear() -> None:
    text = costs_table([row_of_costs(), row_of_costs(method="fedtad", ratio=59.0)])
    assert "| fedavg | gcn | 2.00 | 1.0× | 1.0× | 30 | 0.500 | 0.250 |  |" in text
    assert text.endswith(
        "at most 25 rounds of FedAvg (60 for fediih, 60 for fedtad). All of these do."
    )
    dear = row_of_costs(method="other", stage="late", ratio=26.0, memory_gb=0.5)
    text = costs_table([dear, row_of_costs(from_round=21, memory_gb=1.25)])
    assert "More is taken by: other, late (26.0)." in text
    assert "| GB |" in text
    assert "| fedavg, from round 21 |" in text
    widths = {line.count("|") for line in text.split("\n\n")[0].splitlines()}
    assert len(widths) == 1


def shorter(name: str, rounds: int) -> list[Span]:
    """Return the rounds that are timed, with a small generator in FedSage+."""
    few = {"generator_steps": 1, "rows": 2, "second_width": 4} if name == "fedsage+" else {}
    return [
        replace(span, hyperparameters={**span.hyperparameters, **few})
        for span in spans(name, rounds)
    ]


def test_plain_loops_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "CASES", (("csbm", "natural", 3),))
    monkeypatch.setattr(loops, "LONG_FIRST_ROUND", ("fedsage+", loops.CASES[0]))
    monkeypatch.setattr(loops, "spans", shorter)
    rows = list(plain("cpu", rounds=2, get=small))
    assert [(row["method"], row["stage"]) for row in rows] == [
        ("fedgta", ""),
        ("fedpub", ""),
        ("fedsage+", FIRST_ROUND),
        ("fedsage+", "generator"),
        ("fedsage+", "classifier"),
    ]
    for row in rows:
        assert row["ratio"] == pytest.approx(row["plain_ms"] / row["stacked_ms"])
        assert bool(row["accuracies"]) == (row["stage"] in ("", "classifier"))
    text = plain_table(rows)
    assert "| fedsage+, first round | csbm" in text
    assert len({line.count("|") for line in text.splitlines()}) == 1


def test_a_first_round_of_a_loop_can_be_run_again() -> None:
    few = {"generator_steps": 1, "first_rounds": 1}
    simulation = make_simulation([small("")], "fedsage+", {"backbone": "sage"}, few)
    loop = make_loop(small(""), simulation.method, simulation.settings)
    assert isinstance(loop, FedSagePlusLoop)
    again = loops._first_round_of(loop)
    for _ in range(2):
        again()
        loop.advance()
    assert loop.round == 1
    assert loop.questions
    assert loop.answers == [None] * 3, "nobody answers in a first round"


def test_a_known_machine_is_not_measured_again() -> None:
    known = {**machine("cpu"), "copy_gb_per_s": -1.0}
    assert machine("cpu", known) == known
    assert machine("cpu", {**known, "torch": "older"})["copy_gb_per_s"] > 0


def test_the_command_runs_both_suites_with_stored_partitions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def get(folder: Path, **wanted: Any) -> Federation:
        asked.append({"folder": folder, **wanted})
        return small("")

    monkeypatch.setattr("polyphily.graphs.prepared.load_prepared", get)
    monkeypatch.setattr("polyphily.bench.costs.METHODS", ["fedavg"])
    monkeypatch.setattr(loops, "METHODS", ("fedgta",))
    out, page, stored = (tmp_path / name for name in ("out", "page.md", "partitions"))
    words = ["--out", str(out), "--write", str(page), "--partitions", str(stored)]
    done = CliRunner().invoke(app, ["bench", "--suite", "costs,plain", *words])
    assert done.exit_code == 0, done.output
    text = page.read_text(encoding="utf-8")
    assert "| fedavg | acm-gcn |" in text
    assert text.count("| fedgta | csbm") == 3
    assert "OpenFGL itself was not run" in text
    assert asked[0] == {
        "folder": stored,
        "dataset": "cora",
        "partition": "louvain-capped",
        "clients": 10,
        "seed": 0,
    }
