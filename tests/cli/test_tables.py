"""Tables: nothing is wider than the terminal, and no word is cut."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from polyphily.cli import terminal
from polyphily.cli.tables import GAP, Column, label, layout, print_table, text
from polyphily.core.method import METHODS


def printed(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    print_table(console, columns, rows)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_columns_that_do_not_fit_are_in_a_further_table_with_the_first_column() -> None:
    columns = [label("name"), *[Column(f"score {i}") for i in range(4)]]
    rows = [["a", *["10.00 ± 1.00"] * 4], ["b", *["9.00 ± 0.50"] * 4]]
    lines = printed(columns, rows, 40)
    assert [line[:4].strip() for line in lines] == ["name", "a", "b", "", "name", "a", "b"]
    assert [line.count("±") for line in lines] == [0, 2, 2, 0, 0, 2, 2]
    assert len(printed(columns, rows, 80)) == 3


def test_text_wraps_between_words_before_columns_are_moved() -> None:
    words = "a sentence that is much longer than what is left"
    lines = printed([label("name"), text("meaning"), Column("n")], [["x", words, "1"]], 36)
    assert lines[0].split() == ["name", "meaning", "n"]
    assert " ".join(line[6:33].strip() for line in lines[1:]) == words


def test_brackets_are_no_markup() -> None:
    assert printed([label("[bold]")], [["[red]x[/red]"]], 40) == ["[bold]", "[red]x[/red]"]


WORD = st.text("abc±10.", min_size=1, max_size=9)
CELL = st.lists(WORD, max_size=4).map(" ".join)


@given(data=st.data(), width=st.integers(40, 120))
def test_no_table_is_too_wide_and_no_word_is_cut(data: st.DataObject, width: int) -> None:
    kinds = st.builds(Column, CELL, st.booleans(), st.just(True))
    columns = data.draw(st.lists(kinds, min_size=1, max_size=7))
    rows = data.draw(
        st.lists(
            st.lists(CELL, min_size=len(columns), max_size=len(columns)), min_size=1, max_size=4
        )
    )
    found = layout(columns, rows, width)
    assert [i for place, _ in found for i in place if i] == [*range(1, len(columns))]
    for place, widths in found:
        assert sum(widths) + GAP * (len(widths) - 1) <= width
        for i, size in zip(place, widths, strict=True):
            cells = [columns[i].title, *(row[i] for row in rows)]
            assert size >= max((len(word) for cell in cells for word in cell.split()), default=0)


# The tables of scores -----------------------------------------------------------------------------


def summary_of(method: str, metric: str, seeds: int) -> dict[str, object]:
    split: dict[str, object] = {}
    for name in ("accuracy", metric):
        split |= {name: 0.97531, f"{name}_std": 0.0123, f"{name}_client_mean": 0.9688}
        split |= {f"{name}_per_client": [0.8765, 1.0, 0.95]}
    scores = {"val": split, "test": split}
    views = {view: dict.fromkeys(terminal.MOMENTS, scores) for view in ("received", "trained")}
    return {
        "method": method,
        "selection": {"metric": metric},
        "evaluated": METHODS[method].evaluated,
        "seeds": [*range(seeds)],
        "views": views,
        "best_val": scores,
        "dataset": "csbm:homophily=0.5,gap=0.8,spread=even,nodes=400-800",
        "partition": {"clients": 10, "name": "natural"},
        "split": "0.1,0.3,0.6",
        "backbone": "acm-gcn",
        "classes": ["0", "1"],
        "baseline": {"val": split, "test": split},
        "rounds": 100,
        "epochs": 3,
        "seconds_per_round_median": 40.8875,
        "bytes_up_per_round": 316_816,
        "bytes_down_per_round": 316_816,
    }


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    out = io.StringIO()
    monkeypatch.setattr(terminal, "out", Console(file=out, width=80, highlight=False))
    return out


@pytest.mark.parametrize("seeds", [1, 5])
def test_all_methods_are_compared_within_80_columns(seeds: int, screen: io.StringIO) -> None:
    terminal.comparison([summary_of(name, "auc", seeds) for name in METHODS])
    lines = screen.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in screen.getvalue()
    rows = {line.split()[0]: line for line in lines if line.endswith("kB")}
    assert any(line.startswith("random ") for line in lines)  # the baseline
    assert rows.keys() == METHODS.keys()
    for name, row in rows.items():  # one line each, with everything
        view = "trained" if METHODS[name].evaluated == "personal" else "received"
        spread = " ± 1.23" if seeds > 1 else ""
        end = f"97.53{spread} 96.9 ± 6.2 87.6–100.0 {view} 40.9 s 316.8 kB"
        assert " ".join(row.split()) == f"{name} {end}"
    legend = " ".join(" ".join(lines).split())
    assert ("standard deviation over seeds" in legend) == (seeds > 1)
    assert "client mean ± standard deviation over clients" in legend
    assert "received: the model that the server sends" in legend


def test_two_metrics_of_a_run_fit_80_columns(screen: io.StringIO, tmp_path: object) -> None:
    terminal.one_run(summary_of("fedavg", "auc", 3), "runs/x")  # type: ignore[arg-type]
    lines = screen.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    said = " ".join(screen.getvalue().split())
    assert said.count("received best val 97.53 ± 1.23 97.53 ± 1.23 96.88 87.6 – 100.0") == 2
    assert said.index("auc in %") < said.index("accuracy in %")
    assert "takes 40.9 s and sends 316.8 kB up" in said
    assert "±: standard deviation over seeds" in said
