"""Figures of S2FGL (Tan et al., ICML 2025)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from polyphily.papers.exhibits import Exhibit, Made, Wanted
from polyphily.papers.exhibits.common import (
    Bench,
    Line,
    absent,
    cells_of,
    forms_of,
    growth,
    left_out,
    lines_of,
    mean_and_deviation,
)
from polyphily.papers.exhibits.drawing import (
    SQUARE,
    Heat,
    draw_heat,
    draw_lines,
    panel_axes,
    series_grid,
    show_heat,
)
from polyphily.papers.tables import paper
from polyphily.report.grids import Grid

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from polyphily.graphs.loading import Federation

TABLE = paper("s2fgl").table("1")
PARTITION, DATASETS = "louvain", ("cora", "citeseer")
SCALES = (5, 10, 20)
LAMBDA1, LAMBDA2 = (100, 50, 10, 1), (0.01, 0.05, 0.5, 1)  # Figure 4: NLIR and FGMA
CLIENTS = 10  # Figure 4, and the heat map of Figure 1
COMPARED = ("fedavg", "fedprox", "fgssl", "s2fgl")  # Figure 5
FEDAVG = Line("fedavg", "fedavg")
PARTS = {"NLIR": {"fgma": False}, "FGMA": {"nlir": False}}  # Figure 6


# Measures of the clients' graphs ------------------------------------------------------------------


def spectral_divergences(federation: Federation) -> npt.NDArray[np.float64]:
    """Return the KL divergence between the eigenvalue distributions of all pairs of clients."""
    from polyphily.heterogeneity.divergence import pairwise
    from polyphily.heterogeneity.spectral import spectral_kl, spectrum

    return pairwise([spectrum(graph) for graph in federation.clients], spectral_kl)


def semantic_and_spectral(wanted: Wanted) -> Made:
    """Measure structure inertia over client scales, and spectral divergence between clients."""
    from polyphily.heterogeneity.spectral import BINS
    from polyphily.papers.runner import federations_of
    from polyphily.report.data_figures import inertia_scores

    bench = Bench("figure-1", TABLE, wanted)
    cells = cells_of(dict.fromkeys(DATASETS, (1, *SCALES)), wanted)
    rows, heats = [], {}
    for dataset, scales in cells.items():
        for clients in scales:
            partition = "random" if clients == 1 else PARTITION  # one client has the whole graph
            federations = federations_of(bench.job(FEDAVG, dataset, partition, clients))
            scores = [inertia_scores(federation) for federation in federations]
            means, sums, kept = map(mean_and_deviation, zip(*scores, strict=True))
            rows.append((dataset, clients, *sums, means[0], kept[0]))
            if clients in (CLIENTS, scales[-1]) and dataset not in heats:
                names = range(1, clients + 1)
                heats[dataset] = Heat(spectral_divergences(federations[0]).tolist(), names, names)
    columns = ("dataset", "clients", "SIS, sum", "deviation", "SIS of a client", "signal kept (%)")
    grids = [
        Grid("structure inertia score by clients", columns, rows),
        *[
            Grid(
                f"spectral divergence KL(i‖j) on {dataset}, in nats",
                ("client i", *[f"j = {j}" for j in heat.columns]),
                [(i, *values) for i, values in zip(heat.rows, heat.values, strict=True)],
            )
            for dataset, heat in heats.items()
        ],
    ]
    notes = [
        "The paper states neither the data, nor the numbers of clients, nor how SIS is combined "
        "over clients: sum and mean are given. One client is centralised training.",
        f"The paper does not define the estimate of KL: histograms of {BINS} bins on [0, 2]. The "
        f"heat map has {CLIENTS} clients and the first seed.",
        *absent(DATASETS),
    ]
    return Made(grids, notes, lambda: _semantic_and_spectral(rows, heats))


def _semantic_and_spectral(rows: Sequence[Sequence[Any]], heats: Mapping[str, Heat]) -> Any:
    from polyphily.report.style import COLOURS, style

    with style():
        figure, all_axes = panel_axes(3 * len(heats), 0.85)
        for i, (dataset, heat) in enumerate(heats.items()):
            own = [row for row in rows if row[0] == dataset]
            clients, sums, spread, means, _ = zip(*[row[1:] for row in own], strict=True)
            total, mean, pairs = all_axes[3 * i : 3 * i + 3]
            total.errorbar(clients, sums, spread, color=COLOURS[0], marker="o", capsize=1.5)
            mean.plot(clients, means, color=COLOURS[0], marker="o")
            for axes, name in ((total, "SIS, sum over clients"), (mean, "SIS, mean of clients")):
                axes.set_ylim(0, 1.1 * max(sums))
                axes.set_xticks(clients)
                axes.set(xlabel="clients", ylabel=name, title=dataset)
            image = show_heat(pairs, heat, max(map(max, heat.values)))
            scale = figure.colorbar(image, ax=pairs)
            scale.set_label("KL(i‖j), nats")
            scale.outline.set_linewidth(0)
            pairs.set(xlabel="client j", ylabel="client i", title=dataset)
    return figure


# Runs ---------------------------------------------------------------------------------------------


def growth_by_weights(wanted: Wanted) -> Made:
    """Compare S2FGL with FedAvg over the weights of its two terms."""
    bench = Bench("figure-4", TABLE, wanted)
    cells = cells_of(dict.fromkeys(DATASETS, (CLIENTS,)), wanted)
    rows = []
    for dataset in cells:
        base, _ = bench.run(FEDAVG, dataset, PARTITION, CLIENTS).score
        for lambda1, lambda2 in product(LAMBDA1, LAMBDA2):
            weights = {"lambda1": lambda1, "lambda2": lambda2}
            for form, line in forms_of("s2fgl", wanted, **weights).items():
                score, _ = bench.run(line, dataset, PARTITION, CLIENTS).score
                rows.append((dataset, form, lambda1, lambda2, base, score, growth(score, base)))
    columns = ("dataset", "form", "λ1", "λ2", "fedavg (%)", "s2fgl (%)", "growth")
    notes = [
        f"The number of clients is not stated: {CLIENTS}, as in Table 1, are used.",
        *absent(DATASETS),
        *bench.notes(*cells),
    ]
    return Made([Grid("growth of S2FGL over FedAvg", columns, rows)], notes, lambda: _grid(rows))


def _grid(rows: Sequence[Sequence[Any]]) -> Any:
    gains = {tuple(row[:4]): math.nan if row[-1] is None else row[-1] for row in rows}
    panels = {
        f"{dataset}, {form}": Heat(
            [[gains[dataset, form, up, right] for right in LAMBDA2] for up in LAMBDA1],
            LAMBDA1,
            LAMBDA2,
        )
        for dataset, form in dict.fromkeys((row[0], row[1]) for row in rows)
    }
    label = "S2FGL minus FedAvg (points)"
    return draw_heat(panels, "λ2 (FGMA)", "λ1 (NLIR)", label, signed=True, digits=2)


def client_scales(wanted: Wanted) -> Made:
    """Compare methods over the number of clients."""
    bench = Bench("figure-5", TABLE, wanted)
    cells = cells_of(dict.fromkeys(DATASETS, SCALES), wanted)
    lines = lines_of("s2fgl", COMPARED, wanted)
    panels = {
        dataset: bench.scores(lines, dataset, PARTITION, {n: {"clients": n} for n in clients})
        for dataset, clients in cells.items()
    }
    notes = [*left_out(COMPARED, DATASETS), *bench.notes(*cells)]
    grid = series_grid("accuracy by clients", panels, "dataset", "clients", "test accuracy (%)")
    return Made([grid], notes, lambda: draw_lines(panels, "clients", "test accuracy (%)"))


def targeted_gains(wanted: Wanted) -> Made:
    """Set the gain of NLIR beside structure inertia, and that of FGMA beside spectral divergence.

    The gain of a part is the accuracy of S2FGL with that part alone minus that of FedAvg.
    """
    from polyphily.heterogeneity.inspection import mean_of_pairs
    from polyphily.report.data_figures import inertia_scores

    bench = Bench("figure-6", TABLE, wanted)
    cells = cells_of(dict.fromkeys(DATASETS, SCALES), wanted)
    rows = []
    for dataset, scales in cells.items():
        for clients in scales:
            plain = bench.run(FEDAVG, dataset, PARTITION, clients)
            federations = plain.federations()
            sis, _ = mean_and_deviation([inertia_scores(each)[0] for each in federations])
            divergences = [mean_of_pairs(spectral_divergences(each)) for each in federations]
            measured = {"NLIR": sis, "FGMA": mean_and_deviation(divergences)[0]}
            for part, switch in PARTS.items():
                for form, line in forms_of("s2fgl", wanted, **switch).items():
                    score, _ = bench.run(line, dataset, PARTITION, clients).score
                    gain = growth(score, plain.score[0])
                    rows.append((dataset, form, part, clients, measured[part], gain))
    columns = ("dataset", "form", "part", "clients", "SIS (NLIR) or KL (FGMA)", "gain")
    notes = [
        "The paper states neither the data nor the numbers of clients: those of Figure 5 are used.",
        "SIS is the mean of clients (Figure 1 has the sum, too), KL that of pairs.",
        *absent(DATASETS),
        *bench.notes(*cells),
    ]
    return Made([Grid("gains of NLIR and FGMA", columns, rows)], notes, lambda: _gains(rows))


def _gains(rows: Sequence[Sequence[Any]]) -> Any:
    from polyphily.report.style import COLOURS, style

    blue, orange, green = COLOURS[:3]
    beside = {"NLIR": ("SIS, mean of clients", blue), "FGMA": ("KL, mean (nats)", orange)}
    pairs = dict.fromkeys((row[0], row[1]) for row in rows)
    panels = [(dataset, form, part) for dataset, form in pairs for part in PARTS]
    with style():
        figure, all_axes = panel_axes(len(panels), 0.8, SQUARE)
        for axes, (dataset, form, part) in zip(all_axes, panels, strict=True):
            own = [row[3:] for row in rows if tuple(row[:3]) == (dataset, form, part)]
            clients, measured, gains = zip(*own, strict=True)
            heights = [math.nan if gain is None else gain for gain in gains]
            axes.bar(range(len(own)), heights, 0.5, color=green)
            axes.axhline(0, color="#444444", linewidth=0.6)
            axes.grid(visible=False)
            axes.set_xticks(range(len(own)), clients)
            axes.set(xlabel="clients", title=f"{dataset}, {part}\n{form}")
            axes.set_ylabel("gain (points)", color=green)
            name, colour = beside[part]
            other = axes.twinx()
            other.plot(range(len(own)), measured, color=colour, marker="o")
            other.set_ylabel(name, color=colour)
            other.grid(visible=False)
            other.set_ylim(0, 1.15 * max(measured))
            other.spines["right"].set_visible(True)
    return figure


EXHIBITS: tuple[Exhibit, ...] = (
    Exhibit(
        "figure-1",
        "structure inertia score by clients, and spectral divergence between clients",
        semantic_and_spectral,
        DATASETS,
    ),
    Exhibit("figure-2", "label signal disruption and spectral client drift", illustration=True),
    Exhibit("figure-3", "the framework", illustration=True),
    Exhibit(
        "figure-4",
        "growth of S2FGL over FedAvg by the weights λ1 and λ2",
        growth_by_weights,
        DATASETS,
        ("fedavg", "s2fgl"),
    ),
    Exhibit("figure-5", "accuracy by number of clients", client_scales, DATASETS, COMPARED),
    Exhibit(
        "figure-6",
        "gains of NLIR beside structure inertia, and of FGMA beside spectral divergence",
        targeted_gains,
        DATASETS,
        ("fedavg", "s2fgl"),
    ),
)
