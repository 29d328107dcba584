"""The style of figures for papers: size and type of a column, colours, legends, files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyphily.errors import UserError, missing_package

# The colours of Okabe and Ito, which readers with colour blindness can tell apart, with wine in the
# place of yellow, which is too pale for lines.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#882255")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
MARKERS = "osD^vP*X<>"
MARKS = 8  # markers on a line of many rounds
SUFFIXES = (".pdf", ".svg", ".png")
UNDATED: dict[str, Any] = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
RAMP = ("#f6f4ee", "#a9cbd0", "#3f86a3", "#123a5c")
STYLE: dict[str, Any] = {
    "font.size": 8,
    "font.family": "sans-serif",
    "axes.labelsize": 8,
    "axes.titlesize": 8,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.5,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "pdf.fonttype": 42,  # TrueType, which publishers accept
    "svg.fonttype": "none",
    "svg.hashsalt": "polyphily",  # the same figure is the same file
    "savefig.dpi": 300,
}


@dataclass(frozen=True)
class Look:
    """Options of a figure.

    Attributes:
        width: in inches.
        against: what the horizontal axis shows; None for the default of the figure.
        score: which score to show; None for the default of the figure.
        base: the method that gains are measured from; None for the default of the figure.
    """

    width: float = 3.3
    against: str | None = None
    score: str | None = None
    base: str | None = None


def save(figure: Any, file: Path) -> None:
    """Write a figure in the format that the file's suffix names."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with style():
            undated = UNDATED.get(file.suffix.lower(), {})
            figure.savefig(file, bbox_inches="tight", pad_inches=0.02, metadata=undated)
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}") from None


def style() -> Any:
    """Return a context in which matplotlib uses the style of these figures."""
    return matplotlib().rc_context(STYLE)


def matplotlib() -> Any:
    """Import matplotlib, without a display."""
    try:
        import matplotlib
        import matplotlib.figure
        import matplotlib.ticker
    except ImportError:
        raise missing_package("matplotlib", "plot", "a figure") from None
    return matplotlib


def line_style(slot: int) -> dict[str, Any]:
    """Return the colour of a line, and the dashes that tell lines of one colour apart."""
    dashes = DASHES[slot // len(COLOURS) % len(DASHES)]
    return {"color": COLOURS[slot % len(COLOURS)], "linestyle": dashes}


def marker(slot: int) -> str:
    """Return the marker of a line."""
    return MARKERS[slot % len(MARKERS)]


def axes_grid(count: int, look: Look, ratio: float = 0.72) -> tuple[Any, list[Any]]:
    """Create a figure with `count` axes, side by side as long as each is wide enough.

    Args:
        count: the number of axes.
        look: gives the width of the figure.
        ratio: height of the axes relative to their width.
    """
    columns = max(1, min(count, int(look.width // 1.6)))
    rows = math.ceil(count / columns)
    size = (look.width, rows * look.width / columns * ratio)
    figure = matplotlib().figure.Figure(figsize=size, layout="constrained")
    axes = [figure.add_subplot(rows, columns, i + 1) for i in range(count)]
    return figure, axes


def set_title(axes: Any, data: str, all_axes: int) -> None:
    """Name the data above the axes if there are several."""
    if all_axes > 1:
        axes.set_title(data)


def legend(figure: Any, all_axes: Sequence[Any]) -> None:
    """Add one legend for all axes above them, unless there is only one line.

    The figure grows by the height of the legend.
    """
    entries = {
        name: handle
        for axes in all_axes
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if len(entries) > 1:
        width = figure.get_figwidth() * 72
        columns = max(1, int(width // (max(map(len, entries)) * 4.2 + 40)))
        added = figure.legend(
            entries.values(),
            entries.keys(),
            loc="outside upper center",
            ncols=min(columns, len(entries)),
            handlelength=2.8,
            columnspacing=1.2,
        )
        height = added.get_window_extent().height / figure.dpi
        figure.set_figheight(figure.get_figheight() + height)


def in_percent(value: float | None) -> float:
    """Return a share in percent; NaN if there is none."""
    return math.nan if value is None else 100 * value
