"""The part of a page that ranks methods: mean ranks, significance and costs."""

from __future__ import annotations

from polyphily.report.blocks import Figure, Item, Table
from polyphily.report.board import COSTS, Board
from polyphily.report.run_set import RunSet


def board_of(run_set: RunSet) -> Board | None:
    """Return the board of the runs; None if there is nothing to compare."""
    labels = list(dict.fromkeys(run_set.labels))
    if len(labels) < 2:
        return None
    cells = run_set.by_data()
    summaries = {
        (cell, label): run.summary for cell, members in cells.items() for label, run in members
    }
    return Board(labels, list(cells), summaries)


def rank_items(run_set: RunSet) -> tuple[tuple[Item, ...], tuple[str, ...]]:
    """Return the table of ranks with the diagram, and notes on them.

    With a single seed of a single federation there are notes alone.
    """
    board = board_of(run_set)
    if board is None:
        return (), ()
    found = board.ranking
    if found is None or found.blocks < 2:
        return (), tuple(board.rank_notes()[:1])
    grid = board.rank_grid()
    table = Table(
        tuple(grid.columns),
        tuple(tuple(map(str, row)) for row in grid.rows),
        " ".join([*board.rank_notes(), COSTS]),
        strong=frozenset({0}),
    )
    panel = {
        "methods": list(found.methods),
        "ranks": list(found.ranks),
        "groups": [list(group) for group in found.groups()],
        "difference": found.difference,
        "slots": [run_set.slots[name] for name in found.methods],
    }
    figure = Figure(
        "ranks",
        "ranks",
        "Mean ranks",
        f"Methods by mean rank over {found.blocks} blocks (seeds of cells); 1 is best. Bars join "
        "methods that do not differ significantly: their mean ranks are closer than the critical "
        "difference.",
        {"": panel},
    )
    return (table, figure), ()
