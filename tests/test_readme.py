"""The README does what it says: its Python runs, its commands parse, its tables are the results."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from polyphily.cli import app
from polyphily.core.method import METHODS

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
WRITTEN_LATER = {"docs/index.md"}  # comes with the documentation site


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


def test_it_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) < 120


def test_links_lead_to_files() -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", README.read_text(encoding="utf-8"))
    assert "docs/demo.svg" in links
    relative = [link for link in links if "://" not in link and link not in WRITTEN_LATER]
    assert [link for link in relative if not (ROOT / link).exists()] == []


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """Return the script that writes the tables."""
    path = ROOT / "benchmarks" / "readme_table.py"
    spec = importlib.util.spec_from_file_location("readme_table", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tables(script: ModuleType) -> tuple[str, str]:
    return script.tables(ROOT)  # type: ignore[no-any-return]


def test_its_tables_are_those_of_the_committed_results(
    script: ModuleType, tables: tuple[str, str]
) -> None:
    said = README.read_text(encoding="utf-8")
    assert script.with_tables(said, tables) == said, (
        "README.md differs from docs/performance and docs/results: "
        "python benchmarks/readme_table.py --write"
    )


def test_its_tables_agree_with_the_pages_of_results(tables: tuple[str, str]) -> None:
    speed, accuracy = (rows_of(table) for table in tables)
    performance = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert len(speed) >= 3
    for row in speed:
        assert row[4] in performance
        assert row[7] in performance
    results = rows_of((ROOT / "docs" / "results.md").read_text(encoding="utf-8"))
    for name, cells, better, level, worse, unclear, mean, best, _ in accuracy:
        found = next(row for row in results if row[0] == name and row[2] == "default")
        assert found[3].startswith(f"{cells} of ")
        assert found[5:9] == [better, level, worse, unclear]
        assert abs(float(found[9]) - float(mean)) < 0.06
        assert abs(float(found[10]) - float(best.split()[0])) < 0.06


def test_what_it_concludes_follows_from_its_table(tables: tuple[str, str]) -> None:
    rows = rows_of(tables[1])
    said = " ".join(README.read_text(encoding="utf-8").split())
    assert "gains are a point at most on average" in said
    assert max(float(row[6]) for row in rows) <= 1.0
    assert "more than half of the cells are level" in said
    assert sum(int(row[3]) for row in rows) > sum(int(row[1]) for row in rows) / 2
    assert "two of the methods are below FedAvg on its best backbone" in said
    assert sum(float(row[7].split()[0]) < 0 for row in rows) == 2
    assert "printed forms, which do worse on average in most studies" in said
    assert sum(float(row[8].split()[0]) < 0 for row in rows) > len(rows) / 2


def rows_of(table: str) -> list[list[str]]:
    """Return the cells of a Markdown table, without its head."""
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
