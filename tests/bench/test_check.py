"""The check of costs against a record, and the suite of runs. The records are made up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from polyphily import load
from polyphily.bench import check, runs, suite
from polyphily.bench.check import AGAIN, origin, slower_methods
from polyphily.cli import app
from polyphily.cli.benching import PARTS
from polyphily.errors import UserError
from polyphily.graphs.loading import Federation

Row = dict[str, Any]


def small(dataset: str, *, seed: int = 0, **_: object) -> Federation:
    return load("csbm:nodes=40,features=5", clients=3, seed=seed)


def row(method: str, ratio: float, stage: str = "", backbone: str = "gcn") -> Row:
    return {
        "method": method,
        "stage": stage,
        "backbone": backbone,
        "ratio_on_same_backbone": ratio,
    }


def never(names: Sequence[str]) -> list[Row]:
    raise AssertionError(f"measured again: {names}")


def test_a_fifth_more_is_allowed_and_new_rows_are_not_compared() -> None:
    recorded = [row("fedprox", 1.0), row("adafgl", 2.0, "local")]
    found = [row("fedprox", 1.19), row("adafgl", 9.0, "other"), row("new", 50.0)]
    found += [row("fedprox", 9.0, backbone="sage"), row("adafgl", 1.0, "local")]
    assert slower_methods(recorded, found, never) == []


def test_a_method_that_looks_slow_is_measured_again_before_it_is_flagged() -> None:
    asked: list[list[str]] = []

    def again(names: Sequence[str]) -> list[Row]:
        asked.append(list(names))
        return [row("noisy", 1.1), row("slow", 1.5 - 0.1 * len(asked))]

    recorded = [row(name, 1.0) for name in ("noisy", "slow", "fine")]
    found = [row("noisy", 3.0), row("slow", 3.0), row("fine", 1.0)]
    (slow,) = slower_methods(recorded, found, again)
    assert slow.key[0] == "slow"
    assert slow.found == pytest.approx(1.5 - 0.1 * AGAIN), "the least counts"
    assert asked == [["noisy", "slow"], *[["slow"]] * (AGAIN - 1)]
    assert "slow: 1.30 rounds of FedAvg, 1.30 times 1.00" in str(slow)


@pytest.mark.parametrize(("ratio", "status"), [(1.0, 0), (1.5, 1)])
def test_the_command_fails_if_a_method_is_slower(
    ratio: float, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, Any]] = []

    def costs(device: str, **wanted: Any) -> list[Row]:
        given.append(wanted)
        known = {"fedavg_ms": 1.0, "median_ms": 1.0, "first_ms": 1.0, "memory_gb": None, "note": ""}
        sizes = {"megabytes_up": 0.0, "megabytes_down": 0.0, "from_round": 1, "ratio": ratio}
        return [{**row("fedprox", ratio), **known, **sizes}]

    monkeypatch.setattr(suite, "costs", costs)
    record = tmp_path / "cpu.json"
    record.write_text(json.dumps({"costs": [row("fedprox", 1.0)]}), encoding="utf-8")
    words = ["--out", str(tmp_path / "out"), "--write", str(tmp_path / "page.md"), "--quick"]
    done = CliRunner().invoke(app, ["bench", "--suite", "costs", "--check", str(record), *words])
    assert done.exit_code == status, done.output
    assert ("slower than recorded: fedprox" in done.output) == bool(status)
    assert all(wanted["rounds"] == suite.QUICK["costs"] for wanted in given)
    assert [wanted.get("methods") for wanted in given[1:]] == [["fedprox"]] * (AGAIN * status)
    kept = json.loads((tmp_path / "out" / "cpu.json").read_text(encoding="utf-8"))
    assert kept["origin"]["costs"]["quick"] is True
    assert {"commit", "polyphily", "torch", "numpy", "python"} <= kept["origin"]["costs"].keys()


@pytest.mark.parametrize(
    ("text", "part", "words"),
    [
        ("{}", "costs", "no costs of methods"),
        ("no json", "costs", "cannot read a record"),
        ("{}", "speed", "add --suite costs"),
    ],
)
def test_a_record_that_cannot_be_compared_is_refused(
    text: str, part: str, words: str, tmp_path: Path
) -> None:
    record = tmp_path / "cpu.json"
    record.write_text(text, encoding="utf-8")
    done = CliRunner().invoke(app, ["bench", "--suite", part, "--check", str(record)])
    assert isinstance(done.exception, UserError)
    assert words in str(done.exception)


def test_the_commit_is_unknown_outside_of_git(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(check.subprocess, "run", missing)
    assert origin()["commit"] is None


def test_runs_are_timed_beside_bare_rounds() -> None:
    rows = list(runs.runs("cpu", rounds=2, get=small))
    assert [row["what"] for row in rows] == list(runs.LIMITS) * len(runs.CLIENTS)
    for found in rows:
        assert found["ratio"] == pytest.approx(found["ms"] / found["fedavg_ms"])
    table = runs.runs_table(rows)
    assert "| a round of its run | 3 |" in table
    assert len({line.count("|") for line in table.splitlines()}) == 1


def test_every_part_has_quick_rounds() -> None:
    assert {*suite.QUICK, "large"} == set(PARTS)
