"""Figures of data alone, for papers: how two measures behave as graphs are made or divided."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from polyphily.graphs.loading import Federation, load, whole_graph
from polyphily.heterogeneity.pagerank import structure_inertia_score
from polyphily.heterogeneity.partitioning import label_signal_lost
from polyphily.heterogeneity.spectral import high_frequency_area
from polyphily.report.figures import COLOURS, MARKERS, Look, legend, sheet, style

HOMOPHILY = tuple(round(0.1 * tenth, 1) for tenth in range(1, 10))
STRENGTHS = (10, 1_000, 10_000)  # of features
PARTITIONS = ("louvain", "metis", "random")
CLIENTS = (1, 2, 5, 10, 20, 50)
SPLIT = "0.2,0.4,0.4:global"

Tell = Callable[[str], None]


def high_frequency(look: Look, tell: Tell = lambda _: None) -> Any:
    """High-frequency area of csbm graphs of rising homophily, both Laplacians (FedSPA, Figure 1).

    Mean and deviation over graphs. It falls the more, the more features tell of classes: a line
    for each strength of the features; csbm's usual one is the weakest.
    """
    found = {}
    for mu in STRENGTHS:
        tell(f"measuring csbm graphs with features of strength {mu}")
        found[mu] = np.array([areas(homophily, mu) for homophily in HOMOPHILY])
    titles = ("symmetric normalised Laplacian", "D - A")
    with style():
        figure, sheets = sheet(len(titles), look)
        for i, (axes, title) in enumerate(zip(sheets, titles, strict=True)):
            for slot, (mu, values) in enumerate(found.items()):
                axes.errorbar(
                    HOMOPHILY,
                    values[:, :, i].mean(axis=1),
                    values[:, :, i].std(axis=1, ddof=1),
                    color=COLOURS[slot],
                    marker=MARKERS[slot],
                    capsize=1.5,
                    elinewidth=0.7,
                    label=f"features μ = {mu}",
                )
            axes.set_ylim(bottom=0)
            axes.set_xlabel("homophily")
            axes.set_ylabel("high-frequency area")
            axes.set_title(title)
        legend(figure, sheets)
    return figure


def areas(homophily: float, mu: float) -> list[tuple[float, float]]:
    """High-frequency areas by both Laplacians of some csbm graphs."""
    graphs = load(f"csbm:homophily={homophily},gap=0,mu={mu},nodes=1000", clients=5).clients
    return [
        (high_frequency_area(graph), high_frequency_area(graph, "combinatorial"))
        for graph in graphs
    ]


def inertia(look: Look, dataset: str = "cora", tell: Tell = lambda _: None) -> Any:
    """Structure inertia and label signal as a graph is divided further (S2FGL, Figure 1).

    The score falls for a client, as its graph shrinks. The sum over clients falls where a partition
    ignores communities and rises where it follows them; what is kept of the label signal falls in
    any case.
    """
    found: dict[str, list[tuple[float, float, float]]] = {}
    for partition in PARTITIONS:
        for clients in CLIENTS:
            tell(f"dividing {dataset} among {clients} clients by {partition}")
            federation = load(
                dataset,
                partition="random" if clients == 1 else partition,
                clients=clients,
                split=SPLIT,
            )
            found.setdefault(partition, []).append(divided(federation))
    titles = ("SIS of a client, mean", "SIS, sum over clients", "label signal kept (%)")
    with style():
        figure, sheets = sheet(len(titles), look, 0.9)
        for i, (axes, title) in enumerate(zip(sheets, titles, strict=True)):
            for slot, (partition, rows) in enumerate(found.items()):
                axes.plot(
                    CLIENTS,
                    [row[i] for row in rows],
                    color=COLOURS[slot],
                    marker=MARKERS[slot],
                    label=partition,
                )
            axes.set_xscale("log")
            axes.set_xticks(CLIENTS, [str(count) for count in CLIENTS])
            axes.minorticks_off()
            if i == 0:
                axes.set_yscale("log")
            else:
                axes.set_ylim(bottom=0)
            axes.set_xlabel("clients")
            axes.set_ylabel(title)
        legend(figure, sheets)
    return figure


def divided(federation: Federation) -> tuple[float, float, float]:
    """Of a federation: a client's mean score, the sum, and percent of label signal kept."""
    whole = whole_graph(federation)
    assert whole is not None
    train = [client.masks.train for client in federation.clients if client.masks]
    parts = [federation.partition.nodes_of(k) for k in range(len(federation))]
    scores: Sequence[float] = [
        structure_inertia_score(graph, own)
        for graph, own in zip(federation.clients, train, strict=True)
    ]
    kept = 1 - label_signal_lost(whole, parts, train)
    return float(np.mean(scores)), float(np.sum(scores)), 100 * kept
