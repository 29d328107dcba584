"""The end of a comparison in words, and its page in the browser."""

from __future__ import annotations

import json
import webbrowser
from pathlib import Path
from typing import Any

import pytest

from commands import Cli, caller
from polyphily.cli.story import MOST, story

DATA = ["--dataset", "csbm:nodes=60", "--clients", "2", "--rounds", "1", "--hidden", "8"]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    monkeypatch.setenv("COLUMNS", "80")
    return caller(tmp_path, monkeypatch, capsys)


def summary(*scores: float | None) -> dict[str, Any]:
    return {
        "selection": {"metric": "accuracy"},
        "clients": ["a", "b", "c"],
        "best_val": {"test": {"accuracy_per_client": list(scores)}},
    }


def test_the_words_are_those_of_the_scores() -> None:
    lines = story({"local": summary(0.9, 0.5, 0.7), "fedavg": summary(0.8, 0.75, 0.7)})
    assert lines == [
        "Each client alone: test accuracy from 50.0 to 90.0 %, 70.0 % on average.",
        "Together by fedavg: 75.0 % on average (+5.0 points); 1 of 3 clients scores higher than "
        "alone.",
        "Weakest alone: b, 50.0 %; together it has at most 75.0 %, by fedavg.",
    ]


def test_the_words_also_tell_a_loss() -> None:
    lines = story({"local": summary(0.9, 0.9, 0.9), "fedavg": summary(0.8, 0.8, 0.8)})
    assert "80.0 % on average (-10.0 points); 0 of 3 clients" in lines[1]


def test_clients_without_a_score_are_left_out() -> None:
    lines = story({"local": summary(0.9, None, 0.7), "fedavg": summary(0.8, 0.1, 0.8)})
    assert lines == [
        "Each client alone: test accuracy from 70.0 to 90.0 %, 80.0 % on average.",
        "Together by fedavg: 80.0 % on average (+0.0 points); 1 of 2 clients scores higher than "
        "alone.",
        "Weakest alone: c, 70.0 %; together it has at most 80.0 %, by fedavg.",
    ]


def test_there_are_no_words_where_nothing_is_compared_with_training_alone() -> None:
    three = summary(0.9, 0.8, 0.7)
    assert story({"local": three}) == []
    assert story({"fedavg": three, "fedprox": three}) == []
    assert story({"local": summary(0.9, None, None), "fedavg": three}) == []
    assert story({"local": three} | {str(number): three for number in range(MOST)}) == []


def test_a_comparison_ends_with_words_and_opens_its_page(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    answer = cli("compare", "local", "fedavg", *DATA, "--out", "runs/a", "--open")
    assert answer.status == 0
    assert opened == [(tmp_path / "runs" / "a" / "report.html").as_uri()]
    found = {
        name: json.loads((tmp_path / "runs" / "a" / name / "summary.json").read_text())
        for name in ("local", "fedavg")
    }
    printed = " ".join(answer.out.split())
    assert all(line in printed for line in story(found))
    assert cli("run", "fedavg", *DATA, "--out", "runs/b", "--open").status == 0
    assert opened[1:] == [(tmp_path / "runs" / "b" / "report.html").as_uri()]
