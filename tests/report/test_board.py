"""Boards: scores, marks, ranks and costs of several methods on several federations."""

from __future__ import annotations

from typing import Any

import pytest

from polyphily.report.board import Board
from polyphily.report.grids import to_csv, to_latex


def summary(*scores: float, seconds: float = 1.0, megabytes: float = 2.0, **more: Any) -> Any:
    """The summary of a run with a test score for each seed."""
    runs = [{"best_val": {"test": {"accuracy": score}}} for score in scores]
    return {
        "selection": {"metric": "accuracy"},
        "seeds": list(range(len(scores))),
        "per_seed": runs,
        "seconds_per_round_median": seconds,
        "bytes_up_per_round": 1e6 * megabytes / 2,
        "bytes_down_per_round": 1e6 * megabytes / 2,
        **more,
    }


@pytest.fixture
def board() -> Board:
    return Board(
        ["a", "b", "c"],
        ["cora 5", "cora 10"],
        {
            ("cora 5", "a"): summary(0.80, 0.82),
            ("cora 5", "b"): summary(0.90, 0.92, seconds=3),
            ("cora 5", "c"): summary(0.85, 0.85),
            ("cora 10", "a"): summary(0.70, 0.72),
            ("cora 10", "b"): summary(0.71, 0.71),
            ("cora 10", "c"): summary(0.50, 0.60),
        },
    )


def test_means_marks_ranks_and_costs(board: Board) -> None:
    grid = board.grid()
    rows = {row[0]: row for row in grid.rows}
    assert grid.columns[:3] == ["method", "cora 5", "cora 10"]
    assert rows["b"][1] == "91.00 ± 1.41¹"
    assert rows["c"][1] == "85.00 ± 0.00²"
    assert rows["a"][1] == "81.00 ± 1.41"
    # equal means share a mark: a and b are both best on cora 10
    assert (rows["a"][2], rows["b"][2]) == ("71.00 ± 1.41¹", "71.00 ± 0.00¹")
    # ranks over seeds: a 3 3 2 1, b 1 1 1 2, c 2 2 3 3
    assert [row[0] for row in grid.rows] == ["b", "a", "c"]
    assert [row[3] for row in grid.rows] == ["1.25", "2.25", "2.50"]
    assert rows["b"][5:] == ["1.000", "2.00"]  # seconds of one seed: (1.5 + 0.5) / 2


def test_what_failed_is_named_and_not_ranked(board: Board) -> None:
    kept = {key: value for key, value in board.summaries.items() if key != ("cora 10", "c")}
    lame = Board(board.methods, board.cells, kept, {("cora 10", "c"): "no memory"})
    rows = {row[0]: row for row in lame.grid().rows}
    assert rows["c"][2] == "failed"
    assert lame.ranking is not None
    assert lame.ranking.blocks == 2
    assert "c on cora 10 failed: no memory" in lame.notes()
    assert lame.to_dict()["failed"] == [{"cell": "cora 10", "method": "c", "why": "no memory"}]


def test_without_a_common_block_there_are_no_ranks(board: Board) -> None:
    kept = {("cora 5", "a"): summary(0.8), ("cora 10", "b"): summary(0.7)}
    apart = Board(["a", "b"], board.cells, kept)
    assert apart.ranking is None
    assert [row[-4] for row in apart.grid().rows] == ["–", "–"]
    assert any(note.startswith("No ranks") for note in apart.notes())


def test_a_score_from_a_warm_up_is_marked(board: Board) -> None:
    late = {"warm_up": {"rounds": 20, "best_round_within": True, "note": "it has not begun"}}
    only = Board(["a"], ["cora 5"], {("cora 5", "a"): summary(0.8, **late)})
    assert only.grid().rows[0][1].endswith("†")
    assert "† it has not begun." in only.notes()


def test_the_table_can_be_written(board: Board) -> None:
    assert to_csv([board.grid()]).splitlines()[1].startswith("b,91.00 ± 1.41¹")
    assert r"91.00 $\pm$ 1.41$^1$" in to_latex(board.grid())
