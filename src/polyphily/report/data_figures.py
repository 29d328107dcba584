"""Figures for papers that need no runs: two measures on generated and on divided graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from polyphily.graphs.loading import Federation, load, whole_graph
from polyphily.heterogeneity.pagerank import structure_inertia_score
from polyphily.heterogeneity.partitioning import label_signal_lost
from polyphily.heterogeneity.spectral import high_frequency_area
from polyphily.report.style import COLOURS, MARKERS, Look, axes_grid, legend, style

HOMOPHILY = tuple(round(0.1 * tenth, 1) for tenth in range(1, 10))
STRENGTHS = (10, 1_000, 10_000)  # the values of mu, the strength of csbm's features
PARTITIONS = ("louvain", "metis", "random")
CLIENTS = (1, 2, 5, 10, 20, 50)
SPLIT = "0.2,0.4,0.4:global"

Progress = Callable[[str], None]


def high_frequency(look: Look, progress: Progress = lambda _: None) -> Any:
    """Plot the high-frequency area of csbm graphs over their homophily (FedSPA, Figure 1).

    Mean and standard deviation over graphs, for both Laplacians. The area falls as homophily rises,
    and falls faster the more the features say about classes: there is a line for each strength of
    the features. The weakest is the default of csbm.
    """
    found = {}
    for mu in STRENGTHS:
        progress(f"measuring csbm graphs with features of strength {mu}")
        found[mu] = np.array([areas(homophily, mu) for homophily in HOMOPHILY])
    titles = ("symmetric normalised Laplacian", "D - A")
    with style():
        figure, all_axes = axes_grid(len(titles), look)
        for i, (axes, title) in enumerate(zip(all_axes, titles, strict=True)):
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
        legend(figure, all_axes)
    return figure


def areas(homophily: float, mu: float) -> list[tuple[float, float]]:
    """Return the high-frequency areas of some csbm graphs, by both Laplacians."""
    graphs = load(f"csbm:homophily={homophily},gap=0,mu={mu},nodes=1000", clients=5).clients
    return [
        (high_frequency_area(graph), high_frequency_area(graph, "combinatorial"))
        for graph in graphs
    ]


def inertia(look: Look, dataset: str = "cora", progress: Progress = lambda _: None) -> Any:
    """Plot structure inertia and label signal over the number of clients (S2FGL, Figure 1).

    The score (SIS) of a client falls as its graph shrinks. The sum over clients falls if the
    partition ignores communities, and rises if it follows them. The share of the label signal that
    is kept falls in either case.
    """
    found: dict[str, list[tuple[float, float, float]]] = {}
    for partition in PARTITIONS:
        for clients in CLIENTS:
            progress(f"dividing {dataset} among {clients} clients by {partition}")
            federation = load(
                dataset,
                partition="random" if clients == 1 else partition,
                clients=clients,
                split=SPLIT,
            )
            found.setdefault(partition, []).append(inertia_scores(federation))
    titles = ("SIS of a client, mean", "SIS, sum over clients", "label signal kept (%)")
    with style():
        figure, all_axes = axes_grid(len(titles), look, 0.9)
        for i, (axes, title) in enumerate(zip(all_axes, titles, strict=True)):
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
        legend(figure, all_axes)
    return figure


def inertia_scores(federation: Federation) -> tuple[float, float, float]:
    """Return mean and sum of the clients' scores, and the percentage of label signal kept."""
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
