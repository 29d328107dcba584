"""docs/baselines.md has a row for every baseline; its tests, pages and forms exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from polyphily.core.method import METHODS
from polyphily.papers.tables import PAPERS
from test_equations import ROOT, defined_in, rows

PAGE = ROOT / "docs" / "baselines.md"
BASELINES = sorted(set(METHODS) - {*PAPERS, "polyphony"})

if not PAGE.exists():
    pytest.skip("docs/baselines.md is not part of this tree", allow_module_level=True)

CELLS = {re.sub(r"\[(.+)\]\(.+\)", r"\1", first): rest for first, *rest in rows(PAGE)}


def test_every_baseline_has_a_row() -> None:
    assert sorted(CELLS) == BASELINES
    assert len(rows(PAGE)) == len(BASELINES)


@pytest.mark.parametrize("name", BASELINES)
def test_a_row_says_everything_and_names_tests_that_exist(name: str) -> None:
    *words, tests = CELLS[name]
    assert len(words) == 3
    for cell in words:
        assert cell.endswith(".")
        assert len(cell) < 200
    places = re.findall(r"`([\w/.]+\.py)::(\w+)`", tests)
    assert places
    assert tests.count("`") == 2 * len(places)
    for file, test in places:
        assert test in defined_in(ROOT / file), f"there is no {file}::{test}"


@pytest.mark.parametrize("name", BASELINES)
def test_a_row_names_the_forms_that_a_method_has(name: str) -> None:
    here = CELLS[name][2]
    assert ("`paper=on`" in here) == bool(METHODS[name].paper_form())
    assert ("`code=on`" in here) == bool(METHODS[name].code_form())


def test_links_lead_to_the_pages_and_no_page_is_left_out() -> None:
    text = PAGE.read_text(encoding="utf-8")
    linked = {PAGE.parent / link for link in re.findall(r"\]\((.+?\.md)\)", text)}
    assert linked == set((PAGE.parent / "baselines").glob("*.md"))


@pytest.mark.parametrize(
    "page", sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").rglob("*.md")), ids=lambda p: p.name
)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"\w+:|#", link):
            assert (page.parent / link.partition("#")[0]).exists(), f"{page.name}: {link}"
