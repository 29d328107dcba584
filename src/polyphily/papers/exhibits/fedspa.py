"""Figures of FedSPA (Tan et al., CVPR 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyphily.errors import TrainingError
from polyphily.papers.exhibits import Exhibit, Made, Wanted
from polyphily.papers.exhibits.common import (
    Bench,
    Line,
    cells_of,
    forms_of,
    growth,
    left_out,
    lines_of,
    methods_of,
)
from polyphily.papers.exhibits.drawing import Panels, draw_bars, draw_lines, panel_axes, series_grid
from polyphily.papers.tables import paper
from polyphily.report.grids import Grid

TABLE, SYNTHETIC = paper("fedspa").table("1"), paper("fedspa").table("figure-4")
METHODS = methods_of(paper("fedspa"), TABLE)
PARTITION, CLIENTS = "louvain", 10
GAPS = (0.0, 0.2, 0.4, 0.6, 0.8)  # Figure 2a
MIXED = "csbm:homophily=0.5,gap=0.8"  # Figures 2b and 2c
TRAINED = {"minesweeper": (10,), "arxiv-year": (30,)}  # Figure 5
SCALES = {"minesweeper": (5, 10, 15, 20), "arxiv-year": (20, 30, 40, 50)}  # Figure 6
COMPARED = ("fedavg", "fggp", "fedspa")  # Figure 6
FEDAVG, LOCAL = Line("fedavg", "fedavg"), Line("local", "local")


# Figure 2: what heterogeneous homophily does to FedAvg --------------------------------------------


def curves_by_gap(wanted: Wanted) -> Made:
    """Train FedAvg on csbm federations of the same mean homophily and different gaps."""
    bench = Bench("figure-2a", SYNTHETIC, wanted)
    names = {f"csbm:homophily=0.5,gap={gap:g}": f"gap {gap:g}" for gap in GAPS}
    lines = {
        names[dataset]: bench.run(FEDAVG, dataset, "natural", clients).curve()
        for dataset, (clients,) in cells_of(dict.fromkeys(names, (CLIENTS,)), wanted).items()
    }
    panels: Panels = {"csbm, mean homophily 0.5": lines}
    notes = [
        "The paper states neither the mean, nor the gaps, nor the method: 0.5, "
        f"{', '.join(f'{gap:g}' for gap in GAPS)} and FedAvg are used, with ten clients.",
        *bench.notes("csbm", rounds=True),
    ]
    grid = series_grid("FedAvg over rounds", panels, "data", "round", "test accuracy (%)")
    return Made(
        [grid], notes, lambda: draw_lines(panels, "round", "test accuracy (%)", markers=False)
    )


COLUMNS = ("seed", "client", "nodes", "homophily", "bias", "local (%)", "fedavg (%)", "growth")


def growth_by_client(wanted: Wanted) -> tuple[Grid, list[str]]:
    """Compare FedAvg with training alone at every client.

    The bias is |h_i - h_g|: the distance of the client's edge homophily from that of all clients'
    edges together. The growth is the accuracy of FedAvg minus that of Local, in points.
    """
    from polyphily.heterogeneity.homophily import edge_homophily

    bench = Bench("figure-2", SYNTHETIC, wanted)
    ((dataset, (clients,)),) = cells_of({MIXED: (CLIENTS,)}, wanted).items()
    together = bench.run(FEDAVG, dataset, "natural", clients)
    alone = bench.run(LOCAL, dataset, "natural", clients)
    if together.summary is None or alone.summary is None:
        raise TrainingError(bench.remarks[-1])
    rows = []
    scores = zip(together.federations(), alone.clients("trained"), together.clients(), strict=True)
    for federation, apart, joint in scores:
        levels = [edge_homophily(graph) for graph in federation.clients]
        edges = [graph.num_edges for graph in federation.clients]
        globe = sum(h * count for h, count in zip(levels, edges, strict=True)) / sum(edges)
        for graph, h, own, shared in zip(federation.clients, levels, apart, joint, strict=True):
            about = (federation.seed, graph.name, graph.num_nodes, h, abs(h - globe))
            rows.append((*about, own, shared, growth(shared, own)))
    notes = [
        f"The paper names neither the data nor the measure: {MIXED} with ten clients, and the "
        "accuracy of FedAvg at a client minus that of training alone are used.",
        "Local is scored after local training, FedAvg as the server sends it.",
        *bench.notes(MIXED),
    ]
    return Grid("growth by FedAvg over training alone", COLUMNS, rows), notes


def growth_against(column: str, label: str, wanted: Wanted) -> Made:
    """Set the growth of every client against a property of the client."""
    from scipy.stats import spearmanr

    grid, notes = growth_by_client(wanted)
    at = COLUMNS.index(column)
    points = [(row[at], row[-1]) for row in grid.rows if row[-1] is not None]
    pair = list(zip(*points, strict=True))
    text = "Spearman correlation undefined: equal values"
    if all(len(set(values)) > 1 for values in pair):
        text = f"Spearman correlation {float(spearmanr(*pair).statistic):+.2f}"
    notes = [f"{text} of growth and {column} over {len(points)} clients.", *notes]
    return Made([grid], notes, lambda: _scatter(points, label, text))


def _scatter(points: Sequence[tuple[float, float]], label: str, title: str) -> Any:
    from polyphily.report.style import COLOURS, style

    with style():
        figure, (axes,) = panel_axes(1)
        axes.axhline(0, color="#444444", linewidth=0.6)
        axes.scatter(*zip(*points, strict=True), s=14, color=COLOURS[0], alpha=0.75, linewidth=0)
        axes.set(xlabel=label, ylabel="FedAvg minus Local (points)", title=title)
    return figure


def growth_by_nodes(wanted: Wanted) -> Made:
    return growth_against("nodes", "nodes of the client", wanted)


def growth_by_bias(wanted: Wanted) -> Made:
    return growth_against("bias", "homophily bias $|h_i - h_g|$", wanted)


# Figures 4 to 6: FedSPA beside others -------------------------------------------------------------


def growth_by_gap(wanted: Wanted) -> Made:
    """Compare FedSPA with FedAvg on csbm, over homophily gaps and average degrees."""
    bench = Bench("figure-4", SYNTHETIC, wanted)
    printed = {entry.dataset: (CLIENTS,) for entry in SYNTHETIC.entries}
    rows = []
    for dataset, (clients,) in cells_of(printed, wanted).items():
        homophily, gap, degree = _options(dataset)
        base, _ = bench.run(FEDAVG, dataset, "natural", clients).score
        for form, line in forms_of("fedspa", wanted).items():
            score, _ = bench.run(line, dataset, "natural", clients).score
            rows.append((form, homophily, gap, degree, base, score, growth(score, base)))
    columns = ("form", "homophily", "gap", "degree", "fedavg (%)", "fedspa (%)", "growth")
    notes = [*SYNTHETIC.protocol.notes, *bench.notes("csbm")]
    return Made([Grid("growth of FedSPA over FedAvg", columns, rows)], notes, lambda: _growth(rows))


def _options(dataset: str) -> tuple[float, float, float]:
    """Return homophily, gap and degree of a csbm dataset, from its name."""
    given = dict(option.split("=") for option in dataset.partition(":")[2].split(","))
    return float(given["homophily"]), float(given["gap"]), float(given["degree"])


def _growth(rows: Sequence[Sequence[Any]]) -> Any:
    panels: dict[str, dict[str, list[float]]] = {}
    ticks: dict[str, list[str]] = {}
    for form, homophily, gap, degree, _, _, gain in rows:
        title = f"homophily {homophily:g}, {form}"
        bars = panels.setdefault(title, {}).setdefault(f"d = {degree:g}", [])
        bars.append(float("nan") if gain is None else gain)
        if f"{gap:g}" not in ticks.setdefault(title, []):
            ticks[title].append(f"{gap:g}")
    figure = draw_bars(panels, ticks, "gap of homophily", "growth (points)")
    limits = [limit for axes in figure.axes for limit in axes.get_ylim()]
    for axes in figure.axes:  # one scale, to compare panels
        axes.set_ylim(min(limits), max(limits))
    return figure


def training_curves(wanted: Wanted) -> Made:
    """Follow the test accuracy of all methods over rounds."""
    bench = Bench("figure-5", TABLE, wanted)
    lines = lines_of("fedspa", METHODS, wanted)
    cells = cells_of(TRAINED, wanted)
    panels = {
        dataset: bench.curves(lines, dataset, PARTITION, clients)
        for dataset, (clients,) in cells.items()
    }
    notes = [*left_out(METHODS, TRAINED), *bench.notes(*cells, rounds=True)]
    grid = series_grid("accuracy over rounds", panels, "dataset", "round", "test accuracy (%)")
    return Made(
        [grid], notes, lambda: draw_lines(panels, "round", "test accuracy (%)", markers=False)
    )


def client_scales(wanted: Wanted) -> Made:
    """Compare methods over the number of clients."""
    bench = Bench("figure-6", TABLE, wanted)
    cells = cells_of(SCALES, wanted)
    lines = lines_of("fedspa", COMPARED, wanted)
    panels = {
        dataset: bench.scores(lines, dataset, PARTITION, {n: {"clients": n} for n in clients})
        for dataset, clients in cells.items()
    }
    notes = [
        "The text does not state the numbers of clients: 5 to 20 and 20 to 50 are used.",
        *left_out(COMPARED, SCALES),
        *bench.notes(*cells),
    ]
    grid = series_grid("accuracy by clients", panels, "dataset", "clients", "test accuracy (%)")
    return Made([grid], notes, lambda: draw_lines(panels, "clients", "test accuracy (%)"))


EXHIBITS: tuple[Exhibit, ...] = (
    Exhibit("figure-1", "homophily conflict and homophily bias", illustration=True),
    Exhibit(
        "figure-2a",
        "FedAvg's curves under growing gaps of homophily",
        curves_by_gap,
        ("csbm",),
        ("fedavg",),
    ),
    Exhibit(
        "figure-2b",
        "growth by FedAvg against the node count of clients",
        growth_by_nodes,
        ("csbm",),
        ("fedavg", "local"),
    ),
    Exhibit(
        "figure-2c",
        "growth by FedAvg against the homophily bias of clients",
        growth_by_bias,
        ("csbm",),
        ("fedavg", "local"),
    ),
    Exhibit("figure-3", "the framework", illustration=True),
    Exhibit(
        "figure-4",
        "growth of FedSPA over FedAvg by homophily gap and degree",
        growth_by_gap,
        ("csbm",),
        ("fedavg", "fedspa"),
    ),
    Exhibit("figure-5", "training curves", training_curves, tuple(TRAINED), METHODS),
    Exhibit("figure-6", "accuracy by number of clients", client_scales, tuple(SCALES), COMPARED),
)
