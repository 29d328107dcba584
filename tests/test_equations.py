"""The equation tables in docs/equations name code and tests that exist."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "equations").glob("*.md"))
METHODS = ("fedath", "fedgsp", "fedhero", "fedspa", "s2fgl")


def rows(page: Path) -> list[list[str]]:
    """The cells of the first table on a page, without its head."""
    table = page.read_text(encoding="utf-8").partition("\n|")[2].partition("\n\n")[0]
    lines = [line.strip().strip("|") for line in table.splitlines()]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)] for line in lines[2:]]


def exists(dotted: str) -> bool:
    """Check that a name below `polyphily` can be found."""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: object = import_module(".".join(["polyphily", *parts[:count]]))
        except ModuleNotFoundError:
            continue
        for name in parts[count:]:
            if not hasattr(found, name):
                return False
            found = getattr(found, name)
        return True
    return False


def defined_in(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_paper_has_a_page() -> None:
    if not PAGES:
        pytest.skip("docs/equations is not part of this tree")
    assert [page.stem for page in PAGES] == list(METHODS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_row_matches_or_is_open_and_names_code_and_a_test(page: Path) -> None:
    found = rows(page)
    assert len(found) > 10
    for where, _, here, state, tests in found:
        assert state.startswith(("match", "open in the paper")), f"{where}: {state}"
        names = re.findall(r"`([\w./]+)`", here)
        assert names, where
        for name in names:
            is_file = (ROOT / "src" / "polyphily" / name).is_file()
            assert is_file or exists(name), f"{where}: there is no {name}"
        places = re.findall(r"`([\w/.]+\.py)::(\w+)", tests)
        assert places, where
        for file, test in places:
            assert test in defined_in(ROOT / file), f"{where}: there is no {file}::{test}"
