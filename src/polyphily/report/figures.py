"""Figures for papers, drawn with matplotlib in the size and type of a column."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyphily.errors import UserError, missing_package, unknown
from polyphily.graphs.noise import parse_noise
from polyphily.report.clients import MEASURES
from polyphily.report.ranking import Ranking
from polyphily.report.run_set import RunSet
from polyphily.report.runs import HYPERPARAMETERS, Run, differing, option_name, show
from polyphily.report.scores import AGAINST, curve

# The colours of Okabe and Ito, which readers with colour blindness can tell apart, with wine in the
# place of yellow, which is too pale for lines.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#882255")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
MARKERS = "osD^vP*X<>"
MARKS = 8  # markers on a line of many rounds
SUFFIXES = (".pdf", ".svg", ".png")
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
    "savefig.dpi": 300,
}


@dataclass(frozen=True)
class Look:
    """Options of a figure.

    Attributes:
        width: in inches.
        against: what the horizontal axis shows; None for the default of the figure.
        score: which score to show; None for the default of the figure.
    """

    width: float = 3.3
    against: str | None = None
    score: str | None = None


Draw = Callable[[Sequence[Run], Look], Any]


def find_figure(name: str) -> Draw:
    if name not in FIGURES:
        raise unknown("figure", name, (*FIGURES, *OF_DATA))
    return FIGURES[name]


def save(figure: Any, file: Path) -> None:
    """Write a figure in the format that the file's suffix names."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with style():
            figure.savefig(file, bbox_inches="tight", pad_inches=0.02)
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}") from None


def style() -> Any:
    """Return a context in which matplotlib uses the style of these figures."""
    return _matplotlib().rc_context(STYLE)


def _matplotlib() -> Any:
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
    figure = _matplotlib().figure.Figure(figsize=size, layout="constrained")
    axes = [figure.add_subplot(rows, columns, i + 1) for i in range(count)]
    return figure, axes


# Ranks -------------------------------------------------------------------------------------------


def critical_difference(ranked: Ranking, look: Look | None = None) -> Any:
    """Draw mean ranks on a line; bars join methods that do not differ significantly."""
    width = (look or Look(6.8)).width
    count, groups = len(ranked.methods), ranked.groups()
    half = math.ceil(count / 2)
    levels = half + len(groups) * 0.5 + 1.5
    with style():
        figure = _matplotlib().figure.Figure(figsize=(width, 0.2 * levels + 0.5))
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set_axis_off()
        low, high = math.floor(min(ranked.ranks)), math.ceil(max(ranked.ranks))
        high += high == low
        left, right = 0.26, 0.74

        def place(rank: float) -> float:
            return left + (rank - low) / (high - low) * (right - left)

        axes.set(xlim=(0, 1), ylim=(-levels, 2.2))
        axes.plot([left, right], [0, 0], color="black", linewidth=0.8)
        for tick in range(low, high + 1, math.ceil((high - low) / 12)):
            axes.plot([place(tick)] * 2, [0, 0.2], color="black", linewidth=0.8)
            axes.text(place(tick), 0.3, str(tick), ha="center", va="bottom")
        if not math.isnan(ranked.difference) and ranked.difference < high - low:
            end = place(low + ranked.difference)
            axes.plot([place(low), end], [1.8, 1.8], color="black")
            axes.text(end + 0.01, 1.8, "critical difference", va="center")
        for i, (first, last) in enumerate(groups):
            ends = [place(ranked.ranks[first]) - 0.006, place(ranked.ranks[last]) + 0.006]
            axes.plot(ends, [-0.35 - 0.5 * i] * 2, color="black", linewidth=2.5)
        below = 0.5 * len(groups) + 0.8
        for i, (name, rank) in enumerate(zip(ranked.methods, ranked.ranks, strict=True)):
            first_half = i < half
            height = -below - (i if first_half else count - 1 - i)
            end = left - 0.02 if first_half else right + 0.02
            axes.plot([place(rank), place(rank), end], [0, height, height], color="#888888", lw=0.7)
            words = f"{name}  {rank:.2f}" if first_half else f"{rank:.2f}  {name}"
            axes.text(end, height, f" {words} ", ha="right" if first_half else "left", va="center")
    return figure


# Figures -----------------------------------------------------------------------------------------


def convergence(runs: Sequence[Run], look: Look) -> Any:
    """Plot scores over rounds, seconds or megabytes, with a band of one deviation over seeds."""
    against, score = look.against or "rounds", look.score or "test"
    if against not in AGAINST:
        raise unknown("--against", against, AGAINST)
    if score not in ("test", "val", "loss"):
        raise unknown("--score", score, ("test", "val", "loss"))

    def value(run: Run, record: Any) -> float | None:
        if score == "loss":
            loss: float | None = record.get("loss")
            return loss
        found: float | None = record.get(run.view, {}).get(score, {}).get(run.metric)
        return found

    run_set = RunSet(runs)
    with style():
        figure, all_axes = axes_grid(len(run_set.settings), look)
        for axes, (data, members) in zip(all_axes, run_set.by_data().items(), strict=True):
            for label, run in members:
                line = curve(run, value, against, score)
                slot = run_set.slots[label]
                look_of_line = line_style(slot)
                if len(run_set.slots) > len(COLOURS):  # colours repeat: markers help to tell
                    every = max(len(line["x"]) // MARKS, 1)
                    look_of_line |= {"marker": marker(slot), "markevery": (slot % every, every)}
                axes.plot(line["x"], line["y"], label=label, **look_of_line)
                if "lo" in line:
                    axes.fill_between(
                        line["x"],
                        line["lo"],
                        line["hi"],
                        color=look_of_line["color"],
                        alpha=0.15,
                        linewidth=0,
                    )
            if against == "rounds":
                axes.xaxis.set_major_locator(
                    _matplotlib().ticker.MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True)
                )
            units = {"rounds": "round", "seconds": "seconds", "megabytes": "MB sent and received"}
            axes.set_xlabel(units[against])
            metric = members[0][1].metric
            axes.set_ylabel("loss" if score == "loss" else f"{score} {metric} (%)")
            _set_title(axes, data, len(all_axes))
        legend(figure, all_axes)
    return figure


def homophily(runs: Sequence[Run], look: Look) -> Any:
    """Plot the edge homophily of each client, or another measure."""
    name = look.against or MEASURES["edge_homophily"]
    keys = {title: key for key, title in MEASURES.items()} | {key: key for key in MEASURES}
    if name not in keys:
        raise unknown("--against", name, MEASURES)
    key = keys[name]
    measured = _measured(runs)
    with style():
        figure, all_axes = axes_grid(len(measured), look, 0.6)
        for axes, (data, inspection) in zip(all_axes, measured.items(), strict=True):
            values = [client[key] for client in inspection["clients"]]
            heights = [math.nan if value is None else value for value in values]
            axes.bar(range(1, len(heights) + 1), heights, color=COLOURS[0], width=0.72)
            axes.grid(visible=False, axis="x")
            axes.axhline(0, color="#444444", linewidth=0.6)
            axes.set_xlabel("client")
            axes.set_ylabel(MEASURES[key])
            if len(heights) <= 20:
                axes.set_xticks(range(1, len(heights) + 1))
            _set_title(axes, data, len(all_axes))
    return figure


def spectral_kl(runs: Sequence[Run], look: Look) -> Any:
    """Plot the KL divergence between the Laplacian spectra of every pair of clients."""
    from matplotlib.colors import LinearSegmentedColormap

    measured = _measured(runs)
    ramp = LinearSegmentedColormap.from_list("polyphily", RAMP)
    with style():
        figure, all_axes = axes_grid(len(measured), look, 0.85)
        for axes, (data, inspection) in zip(all_axes, measured.items(), strict=True):
            values = inspection["pairs"]["spectral_kl"]
            shown = [[math.nan if v is None else v for v in row] for row in values]
            image = axes.imshow(shown, cmap=ramp, vmin=0)
            axes.grid(visible=False)
            names = range(1, len(shown) + 1)
            if len(shown) <= 20:
                axes.set_xticks(range(len(shown)), names)
                axes.set_yticks(range(len(shown)), names)
            axes.set_xlabel("client j")
            axes.set_ylabel("client i")
            bar = figure.colorbar(image, ax=axes, shrink=0.8)
            bar.set_label("KL(i‖j), nats")
            bar.outline.set_linewidth(0)
            _set_title(axes, data, len(all_axes))
    return figure


def client_scale(runs: Sequence[Run], look: Look) -> Any:
    """Plot the test score over the number of clients, with a line per method."""
    if len({len(run.clients) for run in runs}) < 2:
        raise UserError(
            "client-scale needs runs with different numbers of clients; create some with: "
            "polyphily sweep METHOD --vary clients=5,10,20"
        )
    return _plot_scores(runs, look, "clients", lambda run: len(run.clients), "clients")


def sensitivity(runs: Sequence[Run], look: Look) -> Any:
    """Plot the test score over what was varied: a hyperparameter, a setting, or noise."""
    varied = _varied(runs)
    names = {option_name(name): name for name in varied}
    if look.against is None and len(names) != 1:
        reason = (
            f"these differ in {show(list(names))}: choose one with --against"
            if names
            else "these do not differ: create some with polyphily sweep METHOD --vary name=v1,v2"
        )
        raise UserError(f"sensitivity needs runs that differ in one setting; {reason}")
    against = (look.against or next(iter(names))).replace("-", "_")
    if against not in names:
        raise unknown("varied setting (--against)", against, names)
    key = names[against]
    noise = {run.path: parse_noise(run.config.get("noise")) for run in runs}
    kinds = {kind for own in noise.values() for kind, share in vars(own).items() if share}
    if key == "noise" and len(kinds) == 1:
        (kind,) = kinds
        return _plot_scores(
            runs, look, key, lambda run: getattr(noise[run.path], kind), f"noise, {kind}"
        )
    absent = None if key.startswith(HYPERPARAMETERS) else "none"
    return _plot_scores(runs, look, key, lambda run: run.config.get(key, absent), against)


def ablation(runs: Sequence[Run], look: Look) -> Any:
    """Plot the test score of every run as a dot, since the axis need not begin at zero."""
    run_set = RunSet(runs)
    groups = run_set.by_data()
    tallest = max(len(members) for members in groups.values())
    with style():
        figure, all_axes = axes_grid(len(groups), look, min(0.2 + 0.07 * tallest, 2.0))
        for axes, (data, members) in zip(all_axes, groups.items(), strict=True):
            labels = [label for label, _ in members]
            values = [_percent(run.score) for _, run in members]
            spread = [_percent(run.spread) if run.spread is not None else 0.0 for _, run in members]
            places = range(len(labels))
            for y, x, deviation, label in zip(places, values, spread, labels, strict=True):
                colour = COLOURS[run_set.slots[label] % len(COLOURS)]
                axes.errorbar(
                    x, y, xerr=deviation or None, fmt="o", color=colour, markersize=5, capsize=2
                )
                axes.annotate(
                    f"{x:.1f}", (x, y), (0, 5), textcoords="offset points", ha="center", fontsize=7
                )
            axes.set_yticks(places, labels)
            low = min(v - s for v, s in zip(values, spread, strict=True))
            high = max(v + s for v, s in zip(values, spread, strict=True))
            room = max((high - low) * 0.25, 1)
            axes.set_xlim(max(low - room, 0), high + room)
            axes.set_ylim(len(labels) - 0.4, -0.8)
            axes.set_xlabel(f"test {members[0][1].metric} (%)")
            _set_title(axes, data, len(all_axes))
    return figure


FIGURES: dict[str, Draw] = {
    "convergence": convergence,
    "homophily": homophily,
    "spectral-kl": spectral_kl,
    "client-scale": client_scale,
    "sensitivity": sensitivity,
    "ablation": ablation,
}
MEASURED = ("homophily", "spectral-kl")  # need an inspection of the clients
OF_DATA = ("high-frequency", "inertia")  # need no runs, see `data_figures`


# Shared by figures --------------------------------------------------------------------------------


def _plot_scores(
    runs: Sequence[Run], look: Look, key: str, value: Callable[[Run], Any], title: str
) -> Any:
    """Plot test scores over the values of one setting.

    Runs that differ in other settings are shown as separate lines.

    Args:
        runs: the runs.
        look: options of the figure.
        key: the entry of the configuration that is varied.
        value: its value in a run; None if the run does not have it.
        title: the label of the horizontal axis.
    """
    others = [n for n in _varied(runs) if n != key and not (key == "clients" and n == "partition")]
    lines: dict[str, list[Run]] = {}
    for run in runs:
        rest = [f"{option_name(n)} {show(run.config[n])}" for n in others if n in run.config]
        lines.setdefault(" ".join([run.method, ", ".join(rest)]).strip(), []).append(run)
    known = {value(run) for run in runs if value(run) is not None}
    numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in known)
    order = sorted(known, key=(lambda v: v) if numeric else str)
    with style():
        figure, (axes,) = axes_grid(1, look)
        for slot, (label, members) in enumerate(lines.items()):
            look_of_line = {"label": label, **line_style(slot)}
            with_value = [run for run in members if value(run) is not None]
            if not with_value:  # the method does not have the varied setting: a constant line
                for run in members[:1]:
                    axes.axhline(_percent(run.score), linewidth=0.9, **look_of_line)
                continue
            with_value.sort(key=lambda run: order.index(value(run)))
            x = [value(run) if numeric else order.index(value(run)) for run in with_value]
            axes.errorbar(
                x,
                [_percent(run.score) for run in with_value],
                yerr=[0.0 if run.spread is None else _percent(run.spread) for run in with_value],
                marker=marker(slot),
                capsize=1.5,
                elinewidth=0.7,
                **look_of_line,
            )
        if numeric and order[0] > 0 and order[-1] / order[0] >= 50:
            axes.set_xscale("log")
        elif numeric and len(order) <= 8:
            axes.set_xticks(order, [show(v) for v in order])
        elif not numeric:
            axes.set_xticks(range(len(order)), [show(v) for v in order])
        axes.set_xlabel(title.replace("_", " "))
        axes.set_ylabel(f"test {runs[0].metric} (%)")
        legend(figure, [axes])
    return figure


def _varied(runs: Sequence[Run]) -> list[str]:
    """Return the settings in which runs of the same method differ."""
    methods = dict.fromkeys(run.method for run in runs)
    groups = [[run for run in runs if run.method == method] for method in methods]
    return list(dict.fromkeys(name for group in groups for name in differing(group)))


def _measured(runs: Sequence[Run]) -> dict[str, Any]:
    found = RunSet(runs).inspections()
    if not found:
        raise UserError(
            "none of these runs has measurements of its clients, and their data are not here"
        )
    return found


def _set_title(axes: Any, data: str, all_axes: int) -> None:
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


def _percent(value: float | None) -> float:
    return math.nan if value is None else 100 * value
