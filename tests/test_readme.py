"""README.md is short, and its tables are the committed results; `tests/docs` runs its code."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"


def test_it_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) < 120


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
