"""The README does what it says: its Python runs, its command lines parse."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from polyphily.cli import app
from polyphily.core.method import METHODS

README = Path(__file__).resolve().parents[1] / "README.md"


def blocks(*languages: str) -> list[str]:
    """Return the fenced blocks in one of these languages."""
    text = README.read_text(encoding="utf-8") if README.exists() else ""
    found = re.findall(r"^```(\w+)[^\n]*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return [code for language, code in found if language in languages]


def command_lines() -> list[str]:
    """Return every `polyphily …` in the shell blocks, without prompt, comment and variables."""
    found = []
    for block in blocks("sh", "bash", "console", "shell"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.strip().removeprefix("$ "), comments=True)
            while words and re.fullmatch(r"\w+=.*", words[0]):
                words = words[1:]
            words = words[2:] if words[:2] == ["python", "-m"] else words
            if words[:1] == ["polyphily"]:
                found.append(shlex.join(words))
    return found


def parse(words: list[str]) -> dict[str, Any]:
    """Return the parameters of a command line, without running it."""
    rest = [word for word in words if word not in ("-h", "--help", "--version")]
    command: Any = typer.main.get_command(app)
    context = None
    while rest:
        context = command.make_context(command.name, list(rest), parent=context)
        at = next((i for i, word in enumerate(rest) if not word.startswith("-")), None)
        if at is None or not hasattr(command, "resolve_command"):
            return dict(context.params)
        _, command, rest = command.resolve_command(context, rest[at:])
    if hasattr(command, "resolve_command") or "--help" in words:
        return {}
    return dict(command.make_context(command.name, [], parent=context).params)


def test_the_python_example_runs_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    found = blocks("python")
    if not found:
        pytest.skip("README.md has no Python example yet")
    if "csbm" not in found[0]:
        monkeypatch.setenv("POLYPHILY_DATA", str(request.getfixturevalue("real_data")))
    monkeypatch.chdir(tmp_path)
    exec(compile(found[0], "README.md", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("line", command_lines() or [None])
def test_a_command_line_parses(line: str | None) -> None:
    if line is None:
        pytest.skip("README.md has no command lines yet")
    words = shlex.split(line)[1:]
    asked = parse(words)
    named = asked.get("methods") or [asked.get("method") or asked.get("name")]
    for name in filter(None, named if words[0] in ("run", "compare", "methods") else []):
        assert name.lower() in METHODS


@pytest.mark.parametrize(
    "line", ["run fedavg --round 3", "runs", "demo x", "methods shows", "compare --round"]
)
def test_a_wrong_command_line_would_not(line: str) -> None:
    with pytest.raises(Exception, match=r"No such|unexpected|option|Missing"):
        parse(shlex.split(line))


def test_right_command_lines_do() -> None:
    assert parse(["run", "fedavg", "--rounds", "3"])["rounds"] == 3
    assert list(parse(["compare", "fedavg", "local", "--json"])["methods"]) == ["fedavg", "local"]
    assert parse(["methods", "show", "moon"])["name"] == "moon"
    for words in (["methods"], ["methods", "--json"], ["datasets"], ["demo", "--rounds", "2"], []):
        parse(words)
