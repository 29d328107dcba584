"""The list of tables and figures: what each of them lacks, and the sentence at its end."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from polyphily.core.method import METHODS
from polyphily.papers import contents, exhibits, plan, tables
from polyphily.papers.contents import Item, closing

Present = Callable[..., None]
GUIDE = Path(__file__).parents[2] / "docs" / "reproduce.md"


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> Present:
    """Return a function that makes all datasets look present, except those named."""

    def hide(*names: str) -> None:
        for module in (contents, exhibits, plan):
            monkeypatch.setattr(module, "is_present", lambda name: name not in names)

    return hide


def items(paper: str) -> dict[str, Item]:
    return {item.name: item for item in contents.contents(tables.paper(paper))}


@pytest.mark.parametrize("paper", tables.PAPERS)
def test_every_row_and_figure_has_its_methods(paper: str) -> None:
    source = tables.paper(paper)
    rows = {e.method for table in source.tables.values() for e in table.entries} - {tables.AVERAGE}
    assert {source.variant(row).method for row in rows} <= set(METHODS)
    assert {m for each in exhibits.exhibits(paper).values() for m in each.methods} <= set(METHODS)


@pytest.mark.parametrize("paper", tables.PAPERS)
def test_with_all_data_everything_runs(paper: str, absent: Present) -> None:
    absent()
    found = items(paper).values()
    assert {item.state for item in found if not item.illustration} == {"runs"}
    number = sum(not item.illustration for item in found)
    assert closing(found) == f"All {number} tables and figures run."


def test_a_table_says_how_many_numbers_lack_data_or_a_method(
    absent: Present, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent("arxiv-year")
    assert items("fedspa")["1"].state == "runs; needs data arxiv-year for 12 of 84 numbers"
    known = plan.registered() - {"fedpub", "fgssl"}
    monkeypatch.setattr(plan, "registered", lambda: known)
    table = items("fedspa")["1"]
    assert table.state == (
        "runs; needs data arxiv-year for 10 of 84 numbers; "
        "no method for the rows fed-pub, fgssl (14 of 84 numbers)"
    )
    assert (table.absent, table.unknown) == (("arxiv-year",), ("fed-pub", "fgssl"))
    row = contents.as_row(tables.paper("fedspa"), table)
    assert row["needs_data"] == ["arxiv-year"]
    assert row["rows_without_method"] == ["fed-pub", "fgssl"]
    assert row["runnable"] == 84 - 10 - 14


def test_means_over_cells_are_not_counted(absent: Present) -> None:
    absent("ogbn-arxiv")
    table = items("fedgsp")["II"]
    entries = [e for e in tables.paper("fedgsp").table("II").entries if e.dataset != "average"]
    assert len(entries) < len(tables.paper("fedgsp").table("II").entries)
    assert table.state.endswith(f"of {len(entries)} numbers")


def test_a_table_without_any_data_names_it_all(absent: Present) -> None:
    absent("cora", "citeseer")
    assert items("s2fgl")["2"].state == "needs data cora, citeseer"


def test_the_last_sentence_says_what_the_rest_needs() -> None:
    found = [
        Item("fedspa", "1", "", "runs"),
        Item("fedspa", "2", "", "runs; needs data b for the rest", absent=("b",)),
        Item("fedspa", "3", "", "needs data a, b", absent=("a", "b")),
        Item("fedspa", "4", "", "runs; …", absent=("b",), unknown=("fed-x",)),
    ]
    text = closing(found)
    assert text.startswith("1 of 4 tables and figures run as a whole, 2 more run in part. ")
    assert "data that is not here: b, a. `polyphily datasets`" in text
    assert text.endswith("These rows have no method in this library: fed-x.")
    assert "in part" not in closing([found[0], found[2]])
    assert "no method" not in closing(found[:3])


# The guide, docs/reproduce.md -----------------------------------------------------------------


def lines_of(paper: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield a paper's lines in the table of what still cannot be run."""
    found = items(paper).values()
    for name in dict.fromkeys(name for item in found for name in item.absent):
        parts: tuple[list[str], list[str]] = ([], [])
        for item in found:
            if name in item.absent:
                parts[item.is_figure].append(
                    item.name.removeprefix(contents.FIGURE) + share(item, name)
                )
        yield paper, name, *(", ".join(part) or "–" for part in parts)


def share(item: Item, dataset: str) -> str:
    """Return how many numbers of a table need a dataset, in brackets."""
    if item.exhibit or not item.table:
        return ""
    entries = [e for e in item.table.entries if tables.AVERAGE not in (e.dataset, e.method)]
    return f" ({sum(e.dataset == dataset for e in entries)} of {len(entries)})"


def test_the_guide_lists_what_still_cannot_be_run(absent: Present) -> None:
    if not GUIDE.exists():
        pytest.skip("docs/reproduce.md is not part of this tree")
    text = GUIDE.read_text(encoding="utf-8").partition("## What still cannot be run")[2]
    table = re.findall(
        r"^\| (\w+) \| ([\w-]+) \| (.+?) \| (.+?) \|$", text.partition("\n## ")[0], re.M
    )
    written = [row for row in table if row[0] in tables.PAPERS]
    absent(*(name for _, name, _, _ in written))
    assert written == [line for paper in tables.PAPERS for line in lines_of(paper)]
    assert {item.name for item in items("fedgsp").values() if item.state.startswith("needs")} == {
        "figure-3"
    }
    assert not any(item.absent for item in items("s2fgl").values())
