"""Markdown pages in a terminal and in a pipe."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from polyphily.cli.markdown import show_page

PAGE = """# Scores

<!-- Written by a command. -->

**Means** over *seeds*, by `validation`.

| method | cora louvain 10 | minesweeper louvain 10 (AUC) | wisconsin | actor |
| --- | --: | --: | --: | --: |
| fedavg, trained at home | 87.4 ± 2.0 | 89.4 ± 0.6 | 82.9 ± 1.9 | 35.0 ± 0.6 |
| local | 85.2 ± 1.0 | – | 75.9 ± 4.8 | 33.0 ± 0.6 |

After it.
"""


def shown(width: int) -> list[str]:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    show_page(PAGE, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [50, 80, 120])
def test_tables_fit_the_terminal_and_lose_nothing(width: int) -> None:
    lines = shown(width)
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    for cell in ("87.4 ± 2.0", "82.9 ± 1.9", "33.0 ± 0.6", "minesweeper", "After it."):
        assert cell in text
    assert not any(mark in text for mark in ("|", "**", "`", "<!--", "# "))


def test_a_pipe_gets_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    show_page(PAGE, Console(file=io.StringIO(), width=80))
    assert capsys.readouterr().out == PAGE + "\n"
