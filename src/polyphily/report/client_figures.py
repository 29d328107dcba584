"""Figures for papers that show single clients: their scores, their graphs, who learns from whom."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from polyphily.errors import UserError, unknown
from polyphily.report.clients import MEASURES
from polyphily.report.models import MAX_RESIDUAL
from polyphily.report.run_set import RunSet
from polyphily.report.runs import Run
from polyphily.report.style import (
    COLOURS,
    RAMP,
    Look,
    axes_grid,
    legend,
    marker,
    set_title,
    style,
)

BASES = ("local", "fedavg")  # what gains are measured from, unless a base is named
PEAK = 0.3  # a share of eigenvalues in one bin from which the scale is logarithmic
NAMED = 20  # clients whose numbers all stand at an axis


# Scores ------------------------------------------------------------------------------------------


def client_spread(runs: Sequence[Run], look: Look) -> Any:
    """Plot the test score of every client as a dot, and the median of the clients as a line."""
    run_set = RunSet(runs)
    groups = run_set.by_data()
    tallest = max(len(members) for members in groups.values())
    with style():
        figure, all_axes = axes_grid(len(groups), look, min(0.22 + 0.08 * tallest, 2.0))
        for axes, (data, members) in zip(all_axes, groups.items(), strict=True):
            for row, (label, run) in enumerate(members):
                scores = sorted(100 * s for s in run.per_client if s is not None)
                colour = COLOURS[run_set.slots[label] % len(COLOURS)]
                heights = [row + 0.14 * (i % 3 - 1) for i in range(len(scores))]
                axes.plot(
                    scores,
                    heights,
                    linestyle="none",
                    marker=marker(run_set.slots[label]),
                    color=colour,
                    alpha=0.65,
                    markeredgewidth=0,
                )
                if scores:
                    axes.vlines(_median(scores), row - 0.32, row + 0.32, color=colour, lw=1.6)
            axes.set_yticks(range(len(members)), [label for label, _ in members])
            axes.set_ylim(len(members) - 0.4, -0.6)
            axes.grid(visible=False, axis="y")
            axes.set_xlabel(f"test {members[0][1].metric} of a client (%)")
            set_title(axes, data, len(all_axes))
    return figure


def _median(ordered: Sequence[float]) -> float:
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def gain(runs: Sequence[Run], look: Look) -> Any:
    """Plot what each client gains beside another method against its homophily.

    A gain is the difference of two test scores of a client, both at the best validation round, in
    points. Scores and homophily are those of the first seed, because another seed may have another
    partition.
    """
    key = _measure(look)
    measured = inspections(runs)
    run_set = RunSet(runs)
    groups = {data: run_set.by_data()[data] for data in measured}
    base = _base([label for members in groups.values() for label, _ in members], look)
    with style():
        figure, all_axes = axes_grid(len(groups), look)
        for axes, (data, members) in zip(all_axes, groups.items(), strict=True):
            x = [client[key] for client in measured[data]["clients"]]
            known = dict(members)
            if base not in known:
                raise UserError(f"gain: there is no run of {base} on {data}")
            start = _first_seed(known[base])
            axes.axhline(0, color="#444444", linewidth=0.8)
            for label, run in members:
                if label == base:
                    continue
                slot = run_set.slots[label]
                rows = zip(x, _first_seed(run), start, strict=True)
                points = sorted(
                    (place, 100 * (own - before))
                    for place, own, before in rows
                    if place is not None and own is not None and before is not None
                )
                axes.plot(
                    [place for place, _ in points],
                    [points_gained for _, points_gained in points],
                    marker=marker(slot),
                    color=COLOURS[slot % len(COLOURS)],
                    linestyle="none",
                    markersize=4.5,
                    markeredgewidth=0,
                    alpha=0.85,
                    label=label,
                )
            axes.set_xlabel(f"{MEASURES[key]} of the client")
            axes.set_ylabel(f"gain over {base} (points)")
            set_title(axes, data, len(all_axes))
        legend(figure, all_axes)
    return figure


def _base(labels: Sequence[str], look: Look) -> str:
    """Return the label of the run that gains are measured from."""
    if look.base is not None:
        if look.base not in labels:
            raise unknown("--base", look.base, dict.fromkeys(labels))
        found = look.base
    else:
        found = next((name for name in BASES if name in labels), "")
        if not found:
            raise UserError("gain: none of these runs is local or fedavg: name one with --base")
    if set(labels) == {found}:
        raise UserError(f"gain needs a run of another method beside {found}")
    return found


def _first_seed(run: Run) -> list[float | None]:
    """Return the test score of every client with the first seed."""
    first = run.summary.get("per_seed", [run.summary])[0]
    found: list[float | None] = first["best_val"]["test"][f"{run.metric}_per_client"]
    return found


# Graphs ------------------------------------------------------------------------------------------


def homophily(runs: Sequence[Run], look: Look) -> Any:
    """Plot the edge homophily of each client, or another measure."""
    key = _measure(look)
    measured = inspections(runs)
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
            if len(heights) <= NAMED:
                axes.set_xticks(range(1, len(heights) + 1))
            set_title(axes, data, len(all_axes))
    return figure


def spectra(runs: Sequence[Run], look: Look) -> Any:
    """Plot the eigenvalues of every client's Laplacian, coloured by the client's homophily."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    key = _measure(look)
    measured = inspections(runs)
    with style():
        figure, all_axes = axes_grid(len(measured), look)
        for axes, (data, inspection) in zip(all_axes, measured.items(), strict=True):
            clients = inspection["clients"]
            known = [client[key] for client in clients if client[key] is not None]
            colours = ScalarMappable(
                Normalize(min(known, default=0), max(known, default=1)), "cividis"
            )
            for client in clients:
                shares = client["spectrum"]
                x = [(i + 0.5) * 2 / len(shares) for i in range(len(shares))]
                own = "#999999" if client[key] is None else colours.to_rgba(client[key])
                axes.plot(x, [100 * s for s in shares], color=own, linewidth=0.9)
            axes.set_xlim(0, 2)
            if max(share for client in clients for share in client["spectrum"]) > PEAK:
                axes.set_yscale("symlog", linthresh=1, linscale=0.6)
                axes.set_yticks([0, 1, 10, 100], ["0", "1", "10", "100"])
            axes.set_ylim(bottom=0)
            axes.set_xlabel("eigenvalue of the Laplacian")
            axes.set_ylabel("share of eigenvalues (%)")
            _colour_bar(figure, axes, colours, MEASURES[key])
            set_title(axes, data, len(all_axes))
    return figure


def spectral_kl(runs: Sequence[Run], look: Look) -> Any:
    """Plot the KL divergence between the Laplacian spectra of every pair of clients."""
    measured = inspections(runs)
    with style():
        figure, all_axes = axes_grid(len(measured), look, 0.85)
        for axes, (data, inspection) in zip(all_axes, measured.items(), strict=True):
            image = _matrix(axes, inspection["pairs"]["spectral_kl"])
            axes.set_xlabel("client j")
            axes.set_ylabel("client i")
            _colour_bar(figure, axes, image, "KL(i‖j), nats")
            set_title(axes, data, len(all_axes))
    return figure


def collaboration(runs: Sequence[Run], look: Look) -> Any:
    """Plot what the next model of each client is made of, in the last round that was recorded."""
    run_set = RunSet(runs)
    found: dict[str, list[list[float]]] = {}
    for label, run in zip(run_set.labels, run_set.runs, strict=True):
        frames = [r for r in run.collaboration if (r["residual"] or 0) < MAX_RESIDUAL]
        if frames:
            several = len(run_set.settings) > 1
            name = f"{label}, {run_set.settings[run.data]}" if several else label
            found[f"{name}, round {frames[-1]['round']}"] = frames[-1]["weights"]
    if not found:
        raise UserError(
            "none of these runs has recorded weights between clients: `polyphily run` and "
            "`polyphily compare` do so for methods that send models, unless --no-report is given"
        )
    with style():
        figure, all_axes = axes_grid(len(found), look, 0.95)
        for axes, (name, weights) in zip(all_axes, found.items(), strict=True):
            high = max(2 / len(weights), *(value for row in weights for value in row))
            image = _matrix(axes, weights, vmax=high)
            axes.set_xlabel("model of client j")
            axes.set_ylabel("next model of client i")
            axes.set_title(name)
            _colour_bar(figure, axes, image, "weight of j in i")
    return figure


# Shared ------------------------------------------------------------------------------------------


def inspections(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the measures of the clients of each data setting.

    Raises:
        UserError: if no run has any.
    """
    found = RunSet(runs).inspections()
    if not found:
        raise UserError(
            "none of these runs has measurements of its clients, and their data are not here"
        )
    return found


def _measure(look: Look) -> str:
    """Return the key of the measure that `against` names."""
    name = look.against or MEASURES["edge_homophily"]
    keys = {title: key for key, title in MEASURES.items()} | {key: key for key in MEASURES}
    if name not in keys:
        raise unknown("--against", name, MEASURES)
    return keys[name]


def _matrix(axes: Any, values: Sequence[Sequence[float | None]], vmax: float | None = None) -> Any:
    """Draw a matrix with a row and a column per client."""
    from matplotlib.colors import LinearSegmentedColormap

    ramp = LinearSegmentedColormap.from_list("polyphily", RAMP)
    shown = [[math.nan if v is None else v for v in row] for row in values]
    image = axes.imshow(shown, cmap=ramp, vmin=0, vmax=vmax)
    axes.grid(visible=False)
    if len(shown) <= NAMED:
        names = range(1, len(shown) + 1)
        axes.set_xticks(range(len(shown)), names)
        axes.set_yticks(range(len(shown)), names)
    return image


def _colour_bar(figure: Any, axes: Any, image: Any, label: str) -> None:
    bar = figure.colorbar(image, ax=axes, shrink=0.8)
    bar.set_label(label)
    bar.outline.set_linewidth(0)
