"""docs/edges.md: its tables are those of the code, and its example prints what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from polyphily.core.method import METHODS, create
from polyphily.nn.backbones import BACKBONES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "edges.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the docs are not here")


def table(header: str) -> list[list[str]]:
    """Return the rows below a header."""
    _, _, below = PAGE.read_text(encoding="utf-8").partition(f"\n{header}\n")
    rows = []
    for line in below.splitlines()[1:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def word(value: object) -> str:
    return "yes" if value else "no"


def test_the_table_of_backbones() -> None:
    wanted = [
        [
            name,
            word(cls.uses_weights()),
            word("in" in cls.directions() and "out" in cls.directions()),
            word("separate" in cls.directions()),
            word(cls.relational),
        ]
        for name, cls in BACKBONES.items()
        if name != "mlp" and cls.__module__.startswith("polyphily.")
    ]
    found = table("| backbone | weights | `in`, `out` | `separate` | types |")
    assert sorted(found) == sorted(wanted)


def test_the_table_of_methods() -> None:
    found = {
        name.strip(): (weights, direction)
        for names, weights, direction in table("| methods | weights | direction |")
        for name in names.split(",")
    }
    wanted = {}
    for name, cls in METHODS.items():
        if cls.__module__.startswith("polyphily."):
            method = create(name)
            symmetric = method.needs_symmetric_edges()
            wanted[name] = (word(method.weighted_edges), word(symmetric is None))
    assert found == wanted


def test_the_example_prints_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    found = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", text, flags=re.DOTALL)
    assert found is not None
    code, printed = found.groups()
    exec(compile(code, str(PAGE), "exec"), {})
    assert capsys.readouterr().out == printed
