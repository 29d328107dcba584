"""docs/security.md: every test that it names exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
FILES = {
    path.name: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")
}


def test_the_named_files_are_there() -> None:
    named = set(re.findall(r"\btest_\w+\.py\b", PAGE))
    assert len(named) > 15
    assert named <= FILES.keys()


def test_the_named_tests_are_there() -> None:
    named = set(re.findall(r"\btest_\w+\b(?!\.py)", PAGE)) - {
        name.removesuffix(".py") for name in FILES
    }
    known = {test for text in FILES.values() for test in re.findall(r"def (test_\w+)", text)}
    assert len(named) > 80
    assert named <= known, sorted(named - known)
