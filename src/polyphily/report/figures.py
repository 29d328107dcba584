"""Figures for papers: scores of runs, and the list of all figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from polyphily.errors import UserError, unknown
from polyphily.graphs.noise import parse_noise
from polyphily.report.client_figures import (
    client_spread,
    collaboration,
    gain,
    homophily,
    spectra,
    spectral_kl,
)
from polyphily.report.ranking import Ranking
from polyphily.report.ranks import board_of
from polyphily.report.run_set import RunSet
from polyphily.report.runs import HYPERPARAMETERS, Run, differing, option_name, show
from polyphily.report.scores import AGAINST, curve
from polyphily.report.style import (
    COLOURS,
    MARKS,
    Look,
    axes_grid,
    in_percent,
    legend,
    line_style,
    marker,
    matplotlib,
    set_title,
    style,
)

COSTS = {"rounds": "rounds", "seconds": "seconds", "megabytes": "MB sent and received"}
Draw = Callable[[Sequence[Run], Look], Any]


def find_figure(name: str) -> Draw:
    if name not in FIGURES:
        raise unknown("figure", name, (*FIGURES, *OF_DATA))
    return FIGURES[name]


# Ranks -------------------------------------------------------------------------------------------


def critical_difference(ranked: Ranking, look: Look | None = None) -> Any:
    """Draw mean ranks on a line; bars join methods that do not differ significantly."""
    width = (look or Look(6.8)).width
    count, groups = len(ranked.methods), ranked.groups()
    half = math.ceil(count / 2)
    levels = half + len(groups) * 0.5 + 1.5
    with style():
        figure = matplotlib().figure.Figure(figsize=(width, 0.2 * levels + 0.5))
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
                    matplotlib().ticker.MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True)
                )
            axes.set_xlabel({**COSTS, "rounds": "round"}[against])
            metric = members[0][1].metric
            axes.set_ylabel("loss" if score == "loss" else f"{score} {metric} (%)")
            set_title(axes, data, len(all_axes))
        legend(figure, all_axes)
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
            values = [in_percent(run.score) for _, run in members]
            spread = [
                in_percent(run.spread) if run.spread is not None else 0.0 for _, run in members
            ]
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
            set_title(axes, data, len(all_axes))
    return figure


def cost(runs: Sequence[Run], look: Look) -> Any:
    """Plot the test score over what it cost to reach it: megabytes, seconds or rounds.

    A run costs what it had used up to its best validation round, the mean over seeds. The last
    client counts if each has a best round of its own.
    """
    against = look.against or "megabytes"
    if against not in AGAINST:
        raise unknown("--against", against, AGAINST)
    run_set = RunSet(runs)
    with style():
        figure, all_axes = axes_grid(len(run_set.settings), look)
        for axes, (data, members) in zip(all_axes, run_set.by_data().items(), strict=True):
            spent = {label: _spent(run, against) for label, run in members}
            for label, run in members:
                slot = run_set.slots[label]
                axes.errorbar(
                    spent[label],
                    in_percent(run.score),
                    yerr=None if run.spread is None else in_percent(run.spread),
                    marker=marker(slot),
                    markersize=5,
                    capsize=1.5,
                    elinewidth=0.7,
                    label=label,
                    color=COLOURS[slot % len(COLOURS)],
                    linestyle="none",
                )
            some = [value for value in spent.values() if value > 0]
            if some and max(some) / min(some) >= 20:
                axes.set_xscale("symlog", linthresh=min(some), linscale=0.5)
                axes.minorticks_off()
            axes.set_xlim(left=0 - 0.04 * max(some, default=1.0))
            axes.set_xlabel(f"{COSTS[against]} to the best round")
            axes.set_ylabel(f"test {members[0][1].metric} (%)")
            set_title(axes, data, len(all_axes))
        legend(figure, all_axes)
    return figure


def _spent(run: Run, against: str) -> float:
    """Return what a run had used up to its best validation round, mean over seeds."""
    totals = {
        "rounds": [float(record["round"]) for record in run.records],
        "seconds": run.seconds,
        "megabytes": run.megabytes,
    }[against]
    found = []
    for seed in run.summary.get("per_seed", [run.summary]):
        best = seed["best_val"]["round"]
        found.append(totals[max(best if isinstance(best, list) else [best]) - 1])
    return statistics.fmean(found)


def mean_ranks(runs: Sequence[Run], look: Look) -> Any:
    """Draw the mean ranks of methods over seeds and data, with the critical difference."""
    board = board_of(RunSet(runs))
    if board is None or board.ranking is None or board.ranking.blocks < 2:
        raise UserError(
            "critical-difference needs several methods with the same seeds or data, two at least; "
            "create some with: polyphily compare METHOD METHOD --seeds 0-4"
        )
    return critical_difference(board.ranking, look)


FIGURES: dict[str, Draw] = {
    "convergence": convergence,
    "cost": cost,
    "critical-difference": mean_ranks,
    "client-spread": client_spread,
    "gain": gain,
    "homophily": homophily,
    "spectra": spectra,
    "spectral-kl": spectral_kl,
    "collaboration": collaboration,
    "client-scale": client_scale,
    "sensitivity": sensitivity,
    "ablation": ablation,
}
MEASURED = ("gain", "homophily", "spectra", "spectral-kl")  # need an inspection of the clients
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
                    axes.axhline(in_percent(run.score), linewidth=0.9, **look_of_line)
                continue
            with_value.sort(key=lambda run: order.index(value(run)))
            x = [value(run) if numeric else order.index(value(run)) for run in with_value]
            axes.errorbar(
                x,
                [in_percent(run.score) for run in with_value],
                yerr=[0.0 if run.spread is None else in_percent(run.spread) for run in with_value],
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
