"""Figures of FedATH (Fu et al., ICML 2025), and its table of datasets."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING

from polyphily.graphs.datasets import is_present, read
from polyphily.papers.exhibits import Exhibit, Made, Wanted
from polyphily.papers.exhibits.common import (
    Bench,
    absent,
    cells_of,
    chosen,
    forms_of,
    left_out,
    lines_of,
    methods_of,
)
from polyphily.papers.exhibits.drawing import Panels, Series, draw_bars, draw_lines, series_grid
from polyphily.papers.tables import Table, paper
from polyphily.report.grids import Grid

if TYPE_CHECKING:
    from polyphily.engines.simulation import Simulation

TABLES = [paper("fedath").table(name) for name in ("1", "2")]
METHODS = methods_of(paper("fedath"), TABLES[0])
PARTITION, ACCURACY, ROUND = "louvain-capped", "test accuracy (%)", "round"
EMBEDDED = {"cora": (10,)}  # Figure 1b
SHOWN = ("fedavg", "fgssl", "fedtad", "fedath")  # Figure 1b
LAMBDAS = (0.0001, 0.001, 0.01, 0.1, 1.0, 10.0)  # Figure 4
RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5)  # Figure 5
TUNED = {"cora": (15,), "wikics": (15,)}  # Figures 4 and 5
SCALES = dict.fromkeys(("cora", "wikics"), (10, 15, 20, 25, 30))  # Figure 6
TRAINED = {"cora": (10,), "pubmed": (10,)}  # Figure 7
COUNTED = ("nodes", "features", "edges", "classes", "train / val / test")
STATISTICS = {  # Table 7, as printed
    "cora": (2708, 1433, 5429, 7, "20 / 40 / 40 %"),
    "pubmed": (19717, 500, 44338, 3, "20 / 40 / 40 %"),
    "ogbn-arxiv": (169343, 128, 231559, 40, "60 / 20 / 20 %"),
    "amazon-photo": (7487, 745, 119043, 8, "20 / 40 / 40 %"),
    "wikics": (11701, 300, 216123, 10, "50 / 20 / 30 %"),
    "roman-empire": (22662, 300, 32927, 18, "50 / 20 / 30 %"),
}


def table_of(dataset: str) -> Table:
    """Return the table of scores that has the protocol of a dataset."""
    return next(t for t in TABLES if any(entry.dataset == dataset for entry in t.entries))


def benches_of(exhibit: str, datasets: Iterable[str], wanted: Wanted) -> dict[str, Bench]:
    return {dataset: Bench(exhibit, table_of(dataset), wanted) for dataset in datasets}


def notes_of(benches: dict[str, Bench], **shown: bool) -> list[str]:
    found = [note for name, bench in benches.items() for note in bench.notes(name, **shown)]
    return list(dict.fromkeys(found))


# Figure 1b ----------------------------------------------------------------------------------------


def embedding_distances(wanted: Wanted) -> Made:
    """Compare how far apart clients embed nodes of the same class."""
    cells = cells_of(EMBEDDED, wanted)
    benches = benches_of("figure-1b", cells, wanted)
    panels: dict[str, dict[str, list[float]]] = {}
    ticks: dict[str, list[str]] = {}
    for dataset, (clients,) in cells.items():
        for line in lines_of("fedath", SHOWN, wanted):
            ran = benches[dataset].run(line, dataset, PARTITION, clients)
            if ran.summary is not None:
                distances = class_distances(ran.simulation())
                panels.setdefault(dataset, {})[line.label] = distances
                ticks[dataset] = [*map(str, range(1, len(distances))), "mean"]
    rows = [
        (dataset, label, name, None if math.isnan(value) else value)
        for dataset, bars in panels.items()
        for label, values in bars.items()
        for name, value in zip(ticks[dataset], values, strict=True)
    ]
    notes = [
        "The paper states neither data, nor clients, nor the estimator, nor which embedding: Cora, "
        "10 clients, and the sliced W1 of `embedding_divergence` between last hidden layers of "
        "the clients' own models are used, relative to the spread of all embeddings.",
        *left_out(SHOWN, EMBEDDED),
        *notes_of(benches, scores=False),
    ]
    grid = Grid("distance by class", ("dataset", "line", "class", "Wasserstein distance"), rows)
    label = "Wasserstein distance (relative)"
    return Made([grid], notes, lambda: draw_bars(panels, ticks, "class", label))


def class_distances(simulation: Simulation) -> list[float]:
    """Return the distance between clients' embeddings of each class, and its mean over classes.

    The distances are means over pairs of clients and over seeds.
    """
    import numpy as np

    from polyphily.heterogeneity.divergence import embedding_divergence, mean_known

    local = simulation.trained()
    embedding = local.frozen(local.params).embedding.double().cpu().numpy()
    pointers = simulation.cohort.segments.pointers
    parts = [embedding[start:stop] for start, stop in pairwise(pointers)]
    found = []
    for federation, start in zip(simulation.federations, simulation.starts, strict=False):
        per_class, _ = embedding_divergence(
            parts[start : start + len(federation)],
            [graph.labels for graph in federation.clients],
            len(federation.classes),
            federation.seed,
        )
        found.append(per_class)
    classes = mean_known(np.stack(found), axis=0)
    return [*classes.tolist(), float(np.nanmean(classes))]


# Figures 4 to 7 -----------------------------------------------------------------------------------


def sensitivity(wanted: Wanted) -> Made:
    """Vary λ, the weight of the HSIC."""
    cells = cells_of(TUNED, wanted)
    benches = benches_of("figure-4", cells, wanted)
    panels: dict[str, dict[str, Series]] = {}
    for dataset, (clients,) in cells.items():
        points: dict[str, list[tuple[float, float | None, float | None]]] = {}
        for weight in LAMBDAS:
            for form, line in forms_of("fedath", wanted, independence=weight).items():
                score = benches[dataset].run(line, dataset, PARTITION, clients).score
                points.setdefault(f"fedath, {form}", []).append((weight, *score))
        panels[dataset] = {label: Series.of(own) for label, own in points.items()}
    notes = ["The datasets are those that the text names: Cora and WikiCS."]
    return _made("accuracy by λ", panels, "λ", notes + absent(TUNED), benches, log=True)


def label_ratios(wanted: Wanted) -> Made:
    """Vary the share of train nodes; validation and test nodes share the rest equally."""
    cells = cells_of(TUNED, wanted)
    benches = benches_of("figure-5", cells, wanted)
    lines = lines_of("fedath", METHODS, wanted)
    panels = {}
    for dataset, (clients,) in cells.items():
        points = {ratio: {"clients": clients, "split": _split(ratio)} for ratio in RATIOS}
        panels[dataset] = benches[dataset].scores(lines, dataset, PARTITION, points)
    notes = [
        "The paper states neither data nor ratios: those of Figure 4, and 10 to 50 % are used. "
        "Validation and test nodes share the rest equally.",
        *left_out(METHODS, TUNED),
    ]
    return _made("accuracy by label ratio", panels, "share of train nodes", notes, benches)


def _split(ratio: float) -> str:
    rest = (1 - ratio) / 2
    return f"{ratio:g},{rest:g},{rest:g}:stratified"


def client_numbers(wanted: Wanted) -> Made:
    """Vary the number of clients."""
    cells = cells_of(SCALES, wanted)
    benches = benches_of("figure-6", cells, wanted)
    lines = lines_of("fedath", METHODS, wanted)
    panels = {
        dataset: benches[dataset].scores(
            lines, dataset, PARTITION, {n: {"clients": n} for n in clients}
        )
        for dataset, clients in cells.items()
    }
    notes = [
        "The paper states neither data nor numbers of clients: those of Figure 4, and 10 to 30 "
        "are used.",
        *left_out(METHODS, SCALES),
    ]
    return _made("accuracy by clients", panels, "clients", notes, benches)


def convergence(wanted: Wanted) -> Made:
    """Follow the test accuracy of all methods over rounds."""
    cells = cells_of(TRAINED, wanted)
    benches = benches_of("figure-7", cells, wanted)
    lines = lines_of("fedath", METHODS, wanted)
    panels = {
        dataset: benches[dataset].curves(lines, dataset, PARTITION, clients)
        for dataset, (clients,) in cells.items()
    }
    notes = [
        "The text names PubMed alone: Cora and PubMed are used.",
        *left_out(METHODS, TRAINED),
    ]
    return _made("accuracy over rounds", panels, ROUND, notes, benches, markers=False)


def _made(
    title: str, panels: Panels, x: str, notes: list[str], benches: dict[str, Bench], **look: bool
) -> Made:
    """Return an exhibit of lines: its table, its notes and its drawing."""
    grid = series_grid(title, panels, "dataset", x, ACCURACY)
    notes = notes + notes_of(benches, rounds=x == ROUND)
    return Made([grid], notes, lambda: draw_lines(panels, x, ACCURACY, **look))


# Table 7 ------------------------------------------------------------------------------------------


def statistics(wanted: Wanted) -> Made:
    """Count nodes, features, edges and classes of the datasets, beside the printed numbers."""
    names = chosen("only", list(STATISTICS), wanted.choice.datasets)
    rows = [
        (dataset, *cells)
        for dataset in names
        for cells in zip(COUNTED, STATISTICS[dataset], count(dataset), strict=True)
    ]
    notes = [
        "Edges are counted without direction, duplicates and loops. The split is the one that "
        "runs use.",
        *absent(names),
    ]
    return Made([Grid("datasets", ("dataset", "statistic", "printed", "counted"), rows)], notes)


def count(dataset: str) -> tuple[int | str | None, ...]:
    """Count nodes, features, edges and classes, and return the split; None if not present."""
    split = table_of(dataset).protocol_of(dataset).split
    if not is_present(dataset):
        return (None, None, None, None, split)
    data = read(dataset)
    graph = data.graphs[0]
    return graph.num_nodes, graph.num_features, graph.num_edges, len(data.classes), split


EXHIBITS: tuple[Exhibit, ...] = (
    Exhibit("figure-1a", "topology heterogeneity between clients", illustration=True),
    Exhibit(
        "figure-1b",
        "Wasserstein distance between clients' embeddings of one class",
        embedding_distances,
        tuple(EMBEDDED),
        SHOWN,
    ),
    Exhibit("figure-2", "the framework", illustration=True),
    Exhibit("figure-3", "structural causal models", illustration=True),
    Exhibit("figure-4", "accuracy by λ", sensitivity, tuple(TUNED), ("fedath",)),
    Exhibit("figure-5", "accuracy by label ratio", label_ratios, tuple(TUNED), METHODS),
    Exhibit("7", "datasets: printed and counted", statistics, tuple(STATISTICS)),
    Exhibit("figure-6", "accuracy by number of clients", client_numbers, tuple(SCALES), METHODS),
    Exhibit("figure-7", "accuracy over rounds", convergence, tuple(TRAINED), METHODS),
)
