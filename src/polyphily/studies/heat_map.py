"""The leaderboard as a picture: what every row gains over FedAvg in every cell."""

from __future__ import annotations

import math
import statistics
from typing import Any

from polyphily.errors import UserError
from polyphily.report.style import Look, matplotlib, style
from polyphily.studies.standings import BASES, Standings

LIMIT = 6.0  # points at which the colour is darkest; larger differences have it too
NAMED = 2.0  # points
DARK = 0.6  # share of the limit from which numbers are white


def draw(shown: Standings, look: Look | None = None) -> Any:
    """Draw the difference of every row to FedAvg in the same view, cell by cell, in points.

    Rows are in the order of the mean over their cells. A cell that has not run has a point. Numbers
    stand where the difference is at least `NAMED`.
    """
    differences = {
        label: found
        for label in shown.labels
        if label not in BASES
        if (found := shown.differences(label))
    }
    if not differences:
        raise UserError("the leaderboard has no row beside FedAvg yet: nothing to draw")
    means = {label: statistics.fmean(found.values()) for label, found in differences.items()}
    order = sorted(means, key=lambda label: -means[label])
    values = [
        [differences[label].get(title, math.nan) for title in shown.titles] for label in order
    ]
    table = [[means[label], *row] for label, row in zip(order, values, strict=True)]
    width = (look or Look(6.8)).width
    with style():
        size = (width, 0.145 * len(order) + 1.5)
        figure = matplotlib().figure.Figure(figsize=size, layout="constrained")
        axes = figure.add_subplot()
        image = axes.imshow(table, cmap="PuOr_r", vmin=-LIMIT, vmax=LIMIT, aspect="auto")
        for i, row in enumerate(table):
            for j, value in enumerate(row):
                if math.isnan(value):
                    axes.text(j, i, "·", ha="center", va="center", color="#888888")
                elif abs(value) >= NAMED or j == 0:
                    colour = "white" if abs(value) > DARK * LIMIT else "black"
                    axes.text(
                        j, i, f"{value:+.1f}", ha="center", va="center", fontsize=5.5, color=colour
                    )
        axes.axvline(0.5, color="white", linewidth=3)
        axes.grid(visible=False)
        axes.set_yticks(range(len(order)), order)
        axes.set_xticks(
            range(len(shown.titles) + 1), ["mean", *shown.titles], rotation=40, ha="left"
        )
        axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
        axes.spines[:].set_visible(False)
        bar = figure.colorbar(image, ax=axes, shrink=0.5, extend="both")
        bar.set_label("points above FedAvg")
        bar.outline.set_linewidth(0)
    return figure
