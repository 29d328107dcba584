"""Timings: the yardstick trains what the engine trains, turns are fair, the command tells."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from polyphily import load
from polyphily.bench import many, suite
from polyphily.bench.geometric import FedAvgLoop, Training
from polyphily.bench.roofline import Machine, Work, count_work, measure
from polyphily.bench.timing import (
    PLAIN,
    WARM_UP,
    compare,
    make_simulation,
    peak_resident,
    time_rounds,
)
from polyphily.cli import app
from polyphily.core.messages import model_part
from polyphily.graphs.loading import Federation

NAMES = {
    "first.bias": "convs.0.bias",
    "first.lin.weight": "convs.0.weight",
    "second.bias": "convs.1.bias",
    "second.lin.weight": "convs.1.weight",
}
PLAINLY = {"backbone": "gcn", "hidden": 8, "epochs": 2, "input_dropout": 0.0, "dropout": 0.0}


def federation() -> Federation:
    return load("csbm:nodes=60,features=7", clients=3)


def test_the_plain_loop_trains_what_the_engine_trains() -> None:
    data = federation()
    simulation = make_simulation([data], "fedavg", {**PLAINLY, "keep_optimizer": True, "lr": 0.01})
    loop = FedAvgLoop(data, Training(hidden=8, epochs=2, dropout=(0.0, 0.0)))
    start = model_part(simulation.states[0])
    loop.state = {
        name: (start[ours].T if name.endswith("weight") else start[ours]).clone().contiguous()
        for name, ours in NAMES.items()
    }
    for _ in range(3):
        simulation.advance()
        loop.advance()
    after = model_part(simulation.states[0])
    for name, ours in NAMES.items():
        found = loop.state[name].T if name.endswith("weight") else loop.state[name]
        torch.testing.assert_close(found, after[ours], rtol=1e-3, atol=1e-5)


def test_engines_take_turns_and_the_first_rounds_do_not_count() -> None:
    calls: list[str] = []
    engines = {name: lambda name=name: calls.append(name) for name in ("a", "b")}
    seconds = time_rounds(engines, 4, every={"b": 2})
    assert len(seconds["a"]) == 4
    assert 0 < len(seconds["b"]) < 4
    assert calls[: 2 * WARM_UP] == ["a", "b"] * WARM_UP


def test_all_engines_are_compared_and_agree() -> None:
    found = compare(federation(), options=PLAINLY, rounds=3)
    assert list(found) == ["stacked", "sequential", PLAIN]
    assert found["stacked"].accuracy == found["sequential"].accuracy
    assert all(len(t.seconds) == 3 and t.median <= t.p95 for t in found.values())
    other = compare(federation(), method="fedprox", options=PLAINLY, rounds=1)
    assert list(other) == ["stacked", "sequential"]


def test_the_least_time_is_that_of_what_takes_longer() -> None:
    machine = Machine(bandwidth=100.0, rate=10.0)
    assert machine.seconds(Work(bytes=200, operations=5)) == 2
    assert machine.seconds(Work(bytes=200, operations=50)) == 5
    found = measure(torch.device("cpu"), 0.01)
    assert found.bandwidth > 1e8
    assert found.rate > 1e8


def test_work_grows_with_steps_width_and_clients() -> None:
    def work(clients: int = 3, **options: object) -> Work:
        data = load("csbm:nodes=60,features=7", clients=clients)
        return count_work(make_simulation([data], "fedavg", {**PLAINLY, **options}))

    base = work()
    broadcast = 3 * 4 * 3 * (7 * 8 + 8 + 8 * 2 + 2)
    assert work(epochs=4).bytes - broadcast == pytest.approx(2 * (base.bytes - broadcast))
    assert work(epochs=4).operations == pytest.approx(2 * base.operations)
    assert work(hidden=16).operations > 1.8 * base.operations
    assert work(clients=6).bytes > 1.5 * base.bytes


def test_seeds_and_scale_give_records(monkeypatch: pytest.MonkeyPatch) -> None:
    def small(dataset: str, *, seed: int = 0, **_: object) -> Federation:
        return load("csbm:nodes=40,features=5", clients=3, seed=seed)

    found = suite.seeds("cpu", rounds=2, get=small)
    assert found["apart"] == 0
    assert found["ratio"] > 0
    shorter = suite.precision("cpu", rounds=2, get=small)
    assert list(shorter) == ["float32", "bf16"]
    assert shorter["bf16"]["rounds"] == 5
    record = suite.large("cpu", nodes=400, clients=4, rounds=1)
    assert record["nodes"] == 400
    assert record["memory_gb"] > 0


def test_the_command_shows_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyphily.bench.suite.SPEED", (("csbm:nodes=40", "natural", 3),))
    runner = CliRunner()
    common = ["bench", "--dataset", "csbm:nodes=40", "--partition", "natural", "--rounds", "2"]
    shown = runner.invoke(app, [*common, "--clients", "3"])
    assert shown.exit_code == 0, shown.output
    assert "torch_geometric" in shown.stdout
    assert "at the least" in shown.stdout
    (record,) = json.loads(runner.invoke(app, [*common, "--clients", "3", "--json"]).stdout)
    assert set(record["engines"]) == {"stacked", "sequential", PLAIN}
    page = tmp_path / "page.md"
    kept = ["--out", str(tmp_path / "kept"), "--write", str(page)]
    done = runner.invoke(app, ["bench", "--suite", "speed", *kept])
    assert done.exit_code == 0, done.output
    assert "| csbm:nodes=40, natural | 3 |" in page.read_text(encoding="utf-8")
    assert (tmp_path / "kept" / "cpu.json").exists()


def test_a_round_is_timed_for_every_number_of_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(many, "_peak", lambda *task: 1000 * task[0])
    monkeypatch.setattr(many, "IN_MEMORY", 6)
    found = list(many.many_clients("cpu", 1, (6, 9), drawn=3))
    assert [(row["clients"], row["where"]) for row in found] == [
        (6, many.DISK),
        (6, many.MEMORY),
        (9, many.DISK),
    ]
    assert all(row["median_ms"] > 0 for row in found)
    table = many.clients_table(found)
    assert "3 clients drawn" in table
    assert [line.count("|") for line in table.splitlines()] == [6] * 4
    many.plot(found, tmp_path / "clients.svg")
    assert (tmp_path / "clients.svg").read_text(encoding="utf-8").startswith("<?xml")


def test_the_peak_of_a_process_is_its_own() -> None:
    assert peak_resident() > 10_000_000
