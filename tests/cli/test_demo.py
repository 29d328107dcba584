"""The first demonstration: its live table, its lines without a terminal, its end."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from commands import Cli, caller
from polyphily.cli import terminal
from polyphily.cli.demonstrating import METHODS, LiveTable
from polyphily.cli.story import story


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    monkeypatch.setenv("COLUMNS", "80")
    return caller(tmp_path, monkeypatch, capsys)


def record(number: int, *scores: float) -> dict[str, Any]:
    val = {"accuracy": sum(scores) / len(scores), "accuracy_per_client": list(scores)}
    return {"round": number, "received": {"val": val}}


def test_the_demonstration_ends_with_words_and_the_page(cli: Cli, tmp_path: Path) -> None:
    answer = cli("demo", "--rounds", "2", "--out", "demo")
    assert answer.status == 0
    found = {n: json.loads((tmp_path / "demo" / n / "summary.json").read_text()) for n in METHODS}
    printed = " ".join(answer.out.split())
    for line in story(found):
        assert line in printed
    assert "report: demo/report.html" in answer.out
    assert (tmp_path / "demo" / "report.html").exists()
    lines = [line.partition(":")[0] for line in answer.err.splitlines()]
    assert [line for line in lines if line in METHODS] == list(METHODS)
    assert max(map(len, answer.out.splitlines())) <= 80


@pytest.mark.parametrize("width", [80, 30])
def test_the_table_shows_all_methods_while_one_trains(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=20)
    monkeypatch.setattr(terminal, "err", console)
    table = LiveTable(["local", "fedavg"])
    with table.live("local", 4, "global", "accuracy") as show:
        assert show
        show(record(1, 0.5, 0.75))
        with console.capture() as captured:
            console.print(table._table("accuracy"))
    text = captured.get()
    assert max(len(Text.from_ansi(line).plain) for line in text.splitlines()) <= width
    if width == 80:
        assert "1/4" in text
        assert "62.5" in text
        assert "50.0–75.0" in text
        assert "waits" in text


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.StringIO()
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(terminal, "err", Console(file=text, force_terminal=True, highlight=False))
    with LiveTable(["local"]).live("local", 4, "global", "accuracy") as show:
        assert show
        show(record(1, 0.5, 0.75))
    assert "validation accuracy 62.5 %, clients 50.0–75.0" in text.getvalue()
    assert "\x1b" not in text.getvalue()
