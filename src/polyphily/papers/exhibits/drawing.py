"""Drawings that exhibits share: lines, bars and heat maps, a panel for each entry."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyphily.report.grids import Grid

NARROW, SQUARE, WIDE = 3.3, 4.7, 6.3  # inches: one panel, two beside each other, three


@dataclass(frozen=True)
class Series:
    """Points of a line.

    Attributes:
        x: places.
        y: values; NaN if there is none.
        spread: deviations of the values.
    """

    x: Sequence[float]
    y: Sequence[float]
    spread: Sequence[float]

    @classmethod
    def of(cls, points: Sequence[tuple[float, float | None, float | None]]) -> Series:
        """Return the series of points (x, y, deviation)."""
        known = [(x, math.nan if y is None else y, spread or 0.0) for x, y, spread in points]
        return cls(*([point[i] for point in known] for i in range(3)))

    def __iter__(self) -> Iterator[tuple[float, float, float]]:
        return zip(self.x, self.y, self.spread, strict=True)


Panels = Mapping[str, Mapping[str, Series]]
"""The lines of each panel: title, then label."""


def series_grid(title: str, panels: Panels, panel: str, x: str, y: str) -> Grid:
    """Return the points of all lines as a table."""
    rows = [
        (name, label, at, None if math.isnan(value) else value, spread)
        for name, lines in panels.items()
        for label, series in lines.items()
        for at, value, spread in series
    ]
    return Grid(title, (panel, "line", x, y, "deviation"), rows)


def draw_lines(
    panels: Panels, x: str, y: str, *, markers: bool = True, log: bool = False, even: bool = False
) -> Any:
    """Draw a panel for each entry, with a line for each label.

    Args:
        panels: the lines.
        x: the label of the horizontal axes.
        y: the label of the vertical axes.
        markers: whether points are marked and have error bars; otherwise the deviation is a band.
        log: whether the horizontal axes are logarithmic.
        even: whether marked points are equally far apart, whatever their x.
    """
    from polyphily.report.style import legend, line_style, marker, style

    with style():
        from matplotlib.ticker import MaxNLocator

        figure, all_axes = panel_axes(len(panels))
        slots = _slots(panels)
        for axes, (title, lines) in zip(all_axes, panels.items(), strict=True):
            places = sorted({at for series in lines.values() for at in series.x})
            for label, series in lines.items():
                look = {"label": label, **line_style(slots[label])}
                if markers:
                    look |= {"marker": marker(slots[label]), "capsize": 1.5}
                    at = [places.index(value) for value in series.x] if even else series.x
                    axes.errorbar(at, series.y, series.spread, elinewidth=0.7, **look)
                    continue
                axes.plot(series.x, series.y, **look)
                low = [value - spread for _, value, spread in series]
                high = [value + spread for _, value, spread in series]
                axes.fill_between(series.x, low, high, color=look["color"], alpha=0.15, linewidth=0)
            if log:
                axes.set_xscale("log")
                axes.minorticks_off()
            elif markers:
                ticks = range(len(places)) if even else places
                axes.set_xticks(ticks, [f"{value:g}" for value in places])
            else:
                axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
            axes.set(xlabel=x, ylabel=y, title=title)
        legend(figure, all_axes)
    return figure


def draw_bars(
    panels: Mapping[str, Mapping[str, Sequence[float]]],
    ticks: Mapping[str, Sequence[str]],
    x: str,
    y: str,
    spreads: Mapping[str, Mapping[str, Sequence[float]]] | None = None,
) -> Any:
    """Draw a panel for each entry, with groups of bars at ticks and a colour for each label.

    Args:
        panels: the heights of each label's bars, one per tick.
        ticks: the names of each panel's groups.
        x: the label of the horizontal axes.
        y: the label of the vertical axes.
        spreads: the deviations of the heights, if they are drawn.
    """
    from polyphily.report.style import legend, line_style, style

    with style():
        figure, all_axes = panel_axes(len(panels))
        slots = _slots(panels)
        for axes, (title, bars) in zip(all_axes, panels.items(), strict=True):
            breadth = 0.8 / len(bars)
            for i, (label, heights) in enumerate(bars.items()):
                places = [at + (i - (len(bars) - 1) / 2) * breadth for at in range(len(heights))]
                colour = line_style(slots[label])["color"]
                errors = spreads[title][label] if spreads else None
                caps = {"elinewidth": 0.7, "capsize": 1.5}
                look = {"color": colour, "label": label, "yerr": errors, "error_kw": caps}
                axes.bar(places, heights, 0.9 * breadth, **look)
            axes.axhline(0, color="#444444", linewidth=0.6)
            axes.grid(visible=False, axis="x")
            axes.set_xticks(range(len(ticks[title])), ticks[title])
            axes.set(xlabel=x, ylabel=y, title=title)
        legend(figure, all_axes)
    return figure


@dataclass(frozen=True)
class Heat:
    """Values of a heat map.

    Attributes:
        values: a list for each row, from the top; NaN is left blank.
        rows: the names of the rows.
        columns: the names of the columns.
    """

    values: Sequence[Sequence[float]]
    rows: Sequence[Any]
    columns: Sequence[Any]


def draw_heat(
    panels: Mapping[str, Heat],
    x: str,
    y: str,
    bar: str,
    *,
    least: float = 0.0,
    signed: bool = False,
    digits: int = 1,
) -> Any:
    """Draw a heat map for each panel, all with one scale of colours.

    Args:
        panels: the heat maps by title.
        x: the label of the horizontal axes.
        y: the label of the vertical axes.
        bar: the label of the scale.
        least: the value of the palest colour, unless signed.
        signed: whether colours tell positive from negative values.
        digits: decimals of the numbers in the cells, if there is room for numbers.
    """
    import numpy as np

    from polyphily.report.style import style

    known = np.concatenate([np.ravel(heat.values) for heat in panels.values()])
    most = float(np.nanmax(np.abs(known), initial=0.0)) or 1.0
    with style():
        figure, all_axes = panel_axes(len(panels), 0.9)
        for axes, (title, heat) in zip(all_axes, panels.items(), strict=True):
            image = show_heat(axes, heat, most, least=least, signed=signed, digits=digits)
            axes.set(xlabel=x, ylabel=y, title=title)
        scale = figure.colorbar(image, ax=all_axes, shrink=0.8)
        scale.set_label(bar)
        scale.outline.set_linewidth(0)
    return figure


def show_heat(
    axes: Any,
    heat: Heat,
    most: float,
    *,
    least: float = 0.0,
    signed: bool = False,
    digits: int = 1,
) -> Any:
    """Draw a heat map; return the image, for a scale.

    Args:
        axes: where it is drawn.
        heat: the values.
        most: the value of the strongest colour.
        least: the value of the palest colour, unless signed.
        signed: whether colours tell positive from negative values.
        digits: decimals of the numbers in the cells, if there is room for numbers.
    """
    import numpy as np
    from matplotlib.colors import LinearSegmentedColormap

    from polyphily.report.style import RAMP

    values = np.asarray(heat.values, dtype=float)
    ramp = LinearSegmentedColormap.from_list("polyphily", RAMP)
    colours, low, pale = ("RdBu", -most, 0.0) if signed else (ramp, least, least)
    image = axes.imshow(values, cmap=colours, vmin=low, vmax=most, aspect="auto")
    axes.grid(visible=False)
    if len(heat.columns) <= 20:
        axes.set_xticks(range(len(heat.columns)), heat.columns)
        axes.set_yticks(range(len(heat.rows)), heat.rows)
    if values.size <= 30:
        for (i, j), value in np.ndenumerate(values):
            if not np.isnan(value):
                text = f"{value:{'+' if signed else ''}.{digits}f}"
                colour = "white" if abs(value - pale) > 0.6 * (most - pale) else "#222222"
                axes.text(j, i, text, ha="center", va="center", fontsize=6.5, color=colour)
    return image


def panel_axes(
    count: int, ratio: float = 0.72, width: float | None = None
) -> tuple[Any, list[Any]]:
    """Create a figure with `count` panels.

    Args:
        count: the number of panels.
        ratio: height of the panels relative to their width.
        width: of the figure, which decides how many panels are beside each other: `NARROW`,
            `SQUARE` or `WIDE`; chosen by their number unless given.
    """
    from polyphily.report.style import Look, axes_grid

    usual = {1: NARROW, 4: SQUARE}.get(count, WIDE)
    return axes_grid(count, Look(width=width or usual), ratio)


def _slots(panels: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Number the labels of all panels, so that a label looks the same in each."""
    labels = dict.fromkeys(label for entries in panels.values() for label in entries)
    return {label: slot for slot, label in enumerate(labels)}
