"""FedHERO: costs, statistics and neighbours of the data, natural clients, attacks, sensitivity."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from polyphily.papers.exhibits import Exhibit, Made, Wanted
from polyphily.papers.exhibits.common import (
    Bench,
    Line,
    Ran,
    cells_of,
    chosen,
    datasets_of,
    forms_of,
    left_out,
    lines_of,
    mean_and_deviation,
)
from polyphily.papers.exhibits.drawing import Series, draw_bars, draw_lines, series_grid
from polyphily.papers.tables import paper
from polyphily.report.grids import Grid

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from polyphily.engines.simulation import Simulation
    from polyphily.graphs.graph import Graph

OWN = "fedhero"
TABLE = paper(OWN).table("3")
SHOWN = ("local", "fedavg", "fedpub", "fedstar", "gcfl", "fedlit", "fedsage", OWN)
DATASETS = ("squirrel", "chameleon", "actor", "flickr")
TWO = ("squirrel", "chameleon")
METIS, LOUVAIN = "metis", "louvain-min"
SEVEN = {"squirrel": (7,), "chameleon": (7,)}  # clients; Tables 5 and 9 have as many
SEVEN_NOTE = "The partition is not stated: METIS with 7 clients, as in Tables 5 and 9."
FEDAVG = Line("fedavg", "fedavg")


# Table 2: costs -----------------------------------------------------------------------------------

# Computation and communication beyond FedAvg's, per client and round, as printed.
COSTS = {
    "gcfl": ("(M (L d²)² + M log M) / E", "1"),
    "fedlit": ("2 |E| n_link d I + |V| d² + 2 n_link² d I / E", "(n_link - 1) L d²"),
    "fedpub": ("L d² + M d / E", "1"),
    "fedstar": ("2 L d (d |V| + |E|)", "1"),
    "fedsage": ("|V| (θ^d + L d²)", "|V| d + L d²"),
    OWN: ("L d (d |V| + |E|) + N_H d |V|", "N_H d + d²"),
}
COST_CELL = {"chameleon": (7,)}


def costs(wanted: Wanted) -> Made:
    """Print the overhead of methods beside what they send and take beyond FedAvg."""
    bench = Bench("table-2", TABLE, wanted)
    ((dataset, (clients, *_)),) = cells_of(COST_CELL, wanted).items()
    base = bench.run(FEDAVG, dataset, METIS, clients)
    rows: list[tuple[Any, ...]] = [("fedavg", None, None, *round_costs(base))]
    lines = lines_of(OWN, ("fedavg", *COSTS), wanted)
    for method in chosen("methods", ("fedavg", *COSTS), wanted.choice.methods):
        own = [line for line in lines if line.method == method != "fedavg"]
        rows += [
            (line.label, *COSTS[method], *round_costs(bench.run(line, dataset, METIS, clients)))
            for line in own
        ]
        if not own and method != "fedavg":
            rows.append((method, *COSTS[method], None, None, None))
    compared = [(*row, *_beyond(row[3:], rows[0][3:])) for row in rows]
    columns = ("method", "computation", "communication", "kB up", "kB down", "seconds")
    extra = ("kB up beyond FedAvg", "kB down beyond FedAvg", "seconds beyond FedAvg")
    title = f"Overhead over FedAvg as printed, O(…), and measured on {dataset}, {clients} clients"
    return Made(
        [Grid(title, (*columns, *extra), compared)],
        [
            "kB are those of one client in a round. Seconds are those of a whole round of one "
            "seed: all clients and the server.",
            "M: clients; E: local epochs; L: layers; d: the larger of the widths of features and "
            "embeddings; |V|, |E|: nodes and edges of a client; N_H: heads.",
            "A negative number says that a method sends less than FedAvg: FedHERO in the paper's "
            "form keeps its local channel and its projection.",
            "The paper prints no measurement beside these; the data are our choice.",
            *left_out(tuple(COSTS)),
            *bench.remarks,
        ],
    )


def round_costs(ran: Ran) -> tuple[float | None, float | None, float | None]:
    """Return kB up and kB down of a client, and the seconds of a round of one seed."""
    if ran.summary is None:
        return None, None, None
    kilobytes = 1000 * len(ran.summary["clients"])
    return (
        ran.summary["bytes_up_per_round"] / kilobytes,
        ran.summary["bytes_down_per_round"] / kilobytes,
        ran.summary["seconds_per_round_median"] / len(ran.job.seeds),
    )


def _beyond(row: Sequence[float | None], base: Sequence[float | None]) -> list[float | None]:
    pairs = zip(row, base, strict=True)
    return [None if a is None or b is None else a - b for a, b in pairs]


# Tables 6 and 7, Figures 6 and 7: the data --------------------------------------------------------

SYN_CORA, FRAUD, CREDIT = "syn-cora:all", "ieee-fraud", "credit"
STATISTICS = {  # nodes, edges, features and classes, as printed
    "squirrel": (5_201, 198_493, 2_089, 5),
    "chameleon": (2_277, 31_421, 2_235, 5),
    "actor": (7_600, 15_009, 932, 5),
    "flickr": (89_250, 899_756, 500, 7),
    SYN_CORA: (14_900, 29_674, 1_433, 5),
    FRAUD: (144_233, 28_053_717, 371, 2),
    CREDIT: (30_000, 1_436_858, 13, 2),
}


def statistics(wanted: Wanted) -> Made:
    """Print the statistics of the datasets beside those counted."""
    rows: list[tuple[Any, ...]] = []
    present = datasets_of(tuple(STATISTICS), wanted)
    for dataset in chosen("only", tuple(STATISTICS), wanted.choice.datasets):
        counted = count(graphs_of(dataset)) if dataset in present else (None,) * 4
        rows.append((dataset, *STATISTICS[dataset], *counted))
    names = ("nodes", "edges", "features", "classes")
    columns = ("dataset", *[f"{n}, printed" for n in names], *[f"{n}, counted" for n in names])
    return Made(
        [Grid("Statistics of the datasets", columns, rows)],
        [
            "Edges are counted once, without self-loops and repetitions.",
            "The columns of the printed table are in disorder in the text at hand; numbers were "
            "assigned by the datasets' known sizes.",
            "syn-cora: the printed numbers are those of ten graphs. Counted are the eleven levels "
            "of homophily from 0 to 1, one graph each.",
            "credit: edges between clients are cut, and not counted.",
            *left_out(datasets=STATISTICS),
        ],
    )


def graphs_of(dataset: str) -> Sequence[Graph]:
    """Return the graph of a dataset before it is divided, or its natural clients."""
    from polyphily.graphs.loading import load

    return (
        load(dataset, partition="random", clients=1).clients
        if dataset in DATASETS
        else (load(dataset).clients)
    )


def count(graphs: Sequence[Graph]) -> tuple[int, int, int, int]:
    """Count nodes, edges, features and classes."""
    import numpy as np

    labels = np.concatenate([graph.labels for graph in graphs])
    return (
        sum(graph.num_nodes for graph in graphs),
        sum(graph.num_edges for graph in graphs),
        graphs[0].num_features,
        len(np.unique(labels[labels >= 0])),
    )


HOMOPHILY = {  # METIS, Louvain (mean and deviation over clients) and the whole graph, as printed
    "squirrel": ("0.22 ± 0.02", "0.21 ± 0.02", "0.22"),
    "chameleon": ("0.26 ± 0.05", "0.27 ± 0.06", "0.25"),
    "actor": ("0.17 ± 0.02", "0.19 ± 0.04", "0.22"),
    "flickr": ("0.33 ± 0.04", "0.32 ± 0.04", "0.32"),
}
DIVIDED = {"squirrel": (7,), "chameleon": (7,), "actor": (7,), "flickr": (30,)}


def homophily_by_partition(wanted: Wanted) -> Made:
    """Print the homophily of clients by partition beside the measured one."""
    from polyphily.graphs.loading import load

    rows = []
    for dataset, (clients, *_) in cells_of(DIVIDED, wanted).items():
        protocol = TABLE.protocol_of(dataset)
        (seed, *_) = wanted.choice.seeds_of(protocol)
        federations = {
            "METIS": load(dataset, partition=METIS, clients=clients, seed=seed).clients,
            "Louvain": load(dataset, partition=LOUVAIN, seed=seed).clients,
            "whole graph": graphs_of(dataset),
        }
        for (name, graphs), printed in zip(federations.items(), HOMOPHILY[dataset], strict=True):
            rows.append((dataset, name, len(graphs), printed, *homophily_of(graphs)))
    columns = ("dataset", "partition", "clients", "printed", "node homophily", "deviation")
    return Made(
        [Grid("Homophily by partition", (*columns, "edge homophily", "deviation"), rows)],
        [
            "The paper follows Mao et al. (2023), who use node homophily: the mean over nodes of "
            "the share of neighbours with an equal label. It fits the printed values of whole "
            "graphs; edge homophily does not for Chameleon. Deviations are those over clients.",
            "The number of clients of METIS is not stated: 7, and 30 for Flickr, as in Table 3.",
            *left_out(datasets=DIVIDED),
        ],
    )


def homophily_of(graphs: Sequence[Graph]) -> tuple[float, float, float, float]:
    """Return mean and deviation over graphs of node homophily, and of edge homophily."""
    from polyphily.heterogeneity.homophily import edge_homophily, node_homophily

    return (
        *mean_and_deviation([node_homophily(graph) for graph in graphs]),
        *mean_and_deviation([edge_homophily(graph) for graph in graphs]),
    )


NEIGHBOUR_NOTE = (
    "A bar a-b is the share of the edges of class a that lead to class b. The number of clients is "
    "not stated: METIS with 5, which Table 3 has for both datasets."
)
FIVE = {"squirrel": (5,), "chameleon": (5,)}


def neighbours(wanted: Wanted, *, everyone: bool) -> Made:
    """Measure the neighbour distributions of classes at the clients.

    Args:
        wanted: what the user asked for.
        everyone: whether all clients are shown, or the two that differ most.
    """
    from polyphily.graphs.loading import load

    shown: dict[str, dict[str, npt.NDArray[np.float64]]] = {}
    for dataset, (clients, *_) in cells_of(FIVE, wanted).items():
        (seed, *_) = wanted.choice.seeds_of(TABLE.protocol_of(dataset))
        federation = load(dataset, partition=METIS, clients=clients, seed=seed)
        found = distributions(federation.clients, len(federation.classes))
        kept = range(len(found)) if everyone else most_different(found)
        shown[dataset] = {f"client {k + 1}": found[k] for k in kept}
    rows = [
        (dataset, client, a + 1, b + 1, float(share))
        for dataset, clients in shown.items()
        for client, table in clients.items()
        for a, row in enumerate(table)
        for b, share in enumerate(row)
    ]
    pair = "The two clients are those whose distributions differ most; the paper does not say how "
    return Made(
        [Grid("Neighbours by class", ("dataset", "client", "class", "neighbour", "share"), rows)],
        [
            NEIGHBOUR_NOTE,
            *([] if everyone else [f"{pair}its two were chosen."]),
            *left_out(datasets=FIVE),
        ],
        lambda: _draw_neighbours(shown),
    )


def distributions(graphs: Sequence[Graph], classes: int) -> list[npt.NDArray[np.float64]]:
    """Return Q_ab of each client, the share of class a's edges that lead to class b."""
    from polyphily.heterogeneity.divergence import neighbour_distribution

    return [neighbour_distribution(graph, classes) for graph in graphs]


def most_different(found: Sequence[npt.NDArray[np.float64]]) -> tuple[int, int]:
    """Return the two clients with the largest divergence of neighbours."""
    import numpy as np

    from polyphily.heterogeneity.divergence import neighbour_divergence, symmetric

    gaps = symmetric(found, neighbour_divergence)
    first, second = np.unravel_index(np.nanargmax(gaps), gaps.shape)
    return int(min(first, second)), int(max(first, second))


def _draw_neighbours(shown: Mapping[str, Mapping[str, npt.NDArray[np.float64]]]) -> Any:
    from matplotlib.figure import Figure

    from polyphily.report.style import COLOURS, style

    with style():
        rows = max(map(len, shown.values()))
        figure = Figure(figsize=(3.3 * len(shown), 0.3 + 0.95 * rows), layout="constrained")
        grid = figure.subplots(rows, len(shown), squeeze=False, sharey=True)
        for column, (dataset, clients) in enumerate(shown.items()):
            for row, (client, table) in enumerate(clients.items()):
                axes = grid[row, column]
                classes = len(table)
                for a, shares in enumerate(table):
                    places = [a * (classes + 1) + b for b in range(classes)]
                    axes.bar(places, shares, 0.85, color=COLOURS[a])
                    last = row == len(clients) - 1
                    names = [f"{a + 1}-{b + 1}" if last else "" for b in range(classes)]
                    for at, name in zip(places, names, strict=True):
                        axes.text(at, -0.04, name, rotation=90, fontsize=5, ha="center", va="top")
                axes.set_xticks([])
                axes.set_ylim(0, 1)
                axes.grid(visible=False, axis="x")
                axes.set_title(f"{dataset}, {client}", pad=2)
            grid[-1, column].set_xlabel("class - class of neighbour", labelpad=14)
        for row in range(rows):
            grid[row, 0].set_ylabel("share of edges")
    return figure


# Figures 3, 4 and 5: methods ----------------------------------------------------------------------

NATURAL = (SYN_CORA, FRAUD, CREDIT)
BY_AREA = {name: {"metric": "auc"} for name in (FRAUD, CREDIT)}

Score = tuple[float | None, float | None]
"""Mean and deviation."""


def natural_clients(wanted: Wanted) -> Made:
    """Score methods on data that come as clients."""
    bench = Bench("figure-3", replace(TABLE, datasets={**TABLE.datasets, **BY_AREA}), wanted)
    names = datasets_of(NATURAL, wanted)
    lines = lines_of(OWN, SHOWN, wanted)
    scores: dict[str, dict[str, dict[str, Score]]] = {}
    for dataset in names:
        metric = bench.table.protocol_of(dataset).metric
        scores[dataset] = {
            line.label: {metric: bench.run(line, dataset, "natural", None).score} for line in lines
        }
    rows = [
        (dataset, label, metric, *score)
        for dataset, methods in scores.items()
        for label, groups in methods.items()
        for metric, score in groups.items()
    ]
    columns = ("dataset", "method", "metric", "score", "deviation")
    return Made(
        [Grid("Scores on natural clients", columns, rows)],
        [
            "syn-cora: one client for each of eleven levels of homophily; the paper does not say "
            "which graphs its clients hold.",
            *left_out(SHOWN, NATURAL),
            *bench.notes(*names),
        ],
        lambda: _draw_scores(scores, "test score (%)"),
    )


def _draw_scores(panels: Mapping[str, Mapping[str, Mapping[str, Score]]], y: str) -> Any:
    """Draw a panel for each entry, with a colour for each method and groups of bars."""

    def part(i: int) -> dict[str, dict[str, list[float]]]:
        return {
            panel: {
                label: [math.nan if (v := score[i]) is None else v for score in groups.values()]
                for label, groups in methods.items()
            }
            for panel, methods in panels.items()
        }

    ticks = {panel: list(next(iter(methods.values()))) for panel, methods in panels.items()}
    return draw_bars(part(0), ticks, "", y, part(1))


def curves(wanted: Wanted) -> Made:
    """Return test scores over rounds."""
    bench = Bench("figure-4", TABLE, wanted)
    cells = cells_of(SEVEN, wanted)
    lines = lines_of(OWN, SHOWN, wanted)
    panels = {
        f"{dataset}, {number} clients": bench.curves(lines, dataset, METIS, number)
        for dataset, clients in cells.items()
        for number in clients
    }
    return Made(
        [series_grid("Test accuracy over rounds", panels, "dataset", "round", "accuracy")],
        [SEVEN_NOTE, *left_out(SHOWN, SEVEN), *bench.notes(*cells)],
        lambda: draw_lines(panels, "round", "test accuracy (%)", markers=False),
    )


FLIPPED = "edges=0.1"
ATTACKED, STRONGEST = "representations", "strongest"  # the paper's attack, and the best of all


def attack_and_noise(wanted: Wanted) -> Made:
    """Attack the links of trained models, and train on graphs with flipped edges."""
    bench = Bench("figure-5", TABLE, wanted)
    cells = cells_of(SEVEN, wanted)
    found: list[tuple[Any, ...]] = []
    attacks: dict[str, dict[str, dict[str, Score]]] = {}
    noisy: dict[str, dict[str, dict[str, Score]]] = {}
    for dataset, (clients, *_) in cells.items():
        for line in lines_of(OWN, SHOWN, wanted):
            clean = bench.run(line, dataset, METIS, clients)
            noise = bench.run(line, dataset, METIS, clients, noise=FLIPPED)
            scores = {"as it is": clean.score, "noisy": noise.score}
            noisy.setdefault(f"{dataset}, noise", {})[line.label] = scores
            if clean.summary is None:
                continue
            tried = attacks_on(clean.simulation())
            found += [(dataset, line.label, *attack) for attack in tried]
            accuracies = {sees: accuracy for sees, accuracy, _ in tried if accuracy is not None}
            if ATTACKED in accuracies:  # something is shared
                bars = {ATTACKED: accuracies[ATTACKED], STRONGEST: max(accuracies.values())}
                own = attacks.setdefault(f"{dataset}, attack", {})
                own[line.label] = {name: (value, None) for name, value in bars.items()}
    rows = [
        (panel.partition(",")[0], label, *scores["as it is"], *scores["noisy"])
        for panel, methods in noisy.items()
        for label, scores in methods.items()
    ]

    def draw() -> Any:
        figure = _draw_scores({**attacks, **noisy}, "test accuracy (%)")
        for axes in figure.axes[: len(attacks)]:
            axes.set_ylabel("attack accuracy (%)")
            axes.axhline(50, color="#444444", linewidth=0.8, linestyle="--")
        return figure

    return Made(
        [
            Grid(
                "Link inference, mean over clients",
                ("dataset", "method", "attacker sees", "accuracy (%)", "AUC (%)"),
                found,
            ),
            Grid(
                f"Scores as it is and with noise ({FLIPPED})",
                ("dataset", "method", "score", "deviation", "with noise", "deviation"),
                rows,
            ),
        ],
        [
            "The paper gives no procedure of its attack; docs/privacy.md has ours. Attackers that "
            "see representations compare those of the whole model on the client's own graph, as in "
            "the paper. The strongest of all attackers in the table is drawn beside them. What is "
            "computed on the client's own graph never leaves a site. Chance is 50 %, dashed.",
            "Noise replaces each edge, with probability 0.1, by a random pair of nodes. Validation "
            "and test are on the disturbed graph, too.",
            SEVEN_NOTE,
            *left_out(SHOWN, SEVEN),
            *bench.notes(*cells),
        ],
        draw,
    )


def attacks_on(simulation: Simulation) -> list[tuple[str, float | None, float | None]]:
    """Return what each attacker sees, with the accuracy and AUC of its guesses, in percent."""
    from polyphily.audit.attackers import audit
    from polyphily.audit.links import mean

    def percent(value: float | None) -> float | None:
        return None if value is None else 100 * value

    return [
        (
            finding.sees,
            percent(mean(finding.attacks, lambda attack: attack.accuracy)),
            percent(mean(finding.attacks, lambda attack: attack.auc)),
        )
        for finding in audit(simulation).findings
    ]


# Figures 8 and 9: sensitivity ---------------------------------------------------------------------

VARIED: dict[str, tuple[str, tuple[float, ...]]] = {  # symbol and values
    "k": ("k", (5, 10, 20, 50)),
    "smoothness": ("λ", (0.0, 0.01, 0.1, 1.0, 10.0)),
    "degree": ("μ", (0.0, 0.01, 0.1, 1.0, 10.0)),
    "alpha": ("α", (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)),
    "comparisons": ("N_H", (1, 2, 4, 8, 16)),
}
MAIN = {"k": 20, "smoothness": 0.1, "degree": 0.1, "alpha": 0.2, "comparisons": 4}


def sensitivity(wanted: Wanted, exhibit: str, names: Sequence[str]) -> Made:
    """Score FedHERO over the values of hyperparameters, one at a time."""
    from polyphily.core.method import create

    bench = Bench(exhibit, TABLE, wanted)
    present = datasets_of(DATASETS, wanted)
    panels: dict[str, dict[str, Series]] = {}
    idle = []
    for name in names:
        symbol, values = VARIED[name]
        points: dict[str, dict[str, list[tuple[float, float | None, float | None]]]] = {}
        for dataset in present:
            for value in values:
                for form, line in forms_of(OWN, wanted, **{name: value}).items():
                    if name in (reasons := create(OWN, line.set).without_effect()):
                        idle.append(f"{symbol} is left out of the {form}: {reasons[name]}.")
                        continue
                    score = bench.run(line, dataset, LOUVAIN, None).score
                    title = ", ".join([symbol, form, *(present if len(present) == 1 else [])])
                    own = points.setdefault(title, {}).setdefault(dataset, [])
                    own.append((value, *score))
        panels |= {
            title: {dataset: Series.of(own) for dataset, own in lines.items()}
            for title, lines in points.items()
        }

    def draw() -> Any:
        figure = draw_lines(panels, "", "test accuracy (%)", even=True)
        for axes, (title, lines) in zip(figure.axes, panels.items(), strict=True):
            symbol = title.partition(", ")[0]
            (main,) = [MAIN[name] for name in names if VARIED[name][0] == symbol]
            axes.set_xlabel(symbol)
            for series in lines.values():
                for at, (value, score, _) in enumerate(series):
                    if value == main:
                        axes.plot(at, score, "*", color="black", markersize=7, zorder=3)
        return figure

    return Made(
        [series_grid("Sensitivity", panels, "varied", "value", "accuracy")],
        [
            "Stars are the values of the main text.",
            *(["The values are not stated in the text, but for k."] if names != ("k",) else []),
            *(["The partition is not stated: Louvain, as in Figure 9."] if "k" in names else []),
            *dict.fromkeys(idle),
            *left_out(datasets=DATASETS),
            *bench.notes(*present),
        ],
        draw,
    )


# All ----------------------------------------------------------------------------------------------

REST = ("smoothness", "degree", "alpha", "comparisons")

EXHIBITS: tuple[Exhibit, ...] = (
    Exhibit("figure-1", "transactions of two banks", illustration=True),
    Exhibit("figure-2", "framework", illustration=True),
    Exhibit("2", "overhead over FedAvg", costs, tuple(COST_CELL), ("fedavg", *COSTS)),
    Exhibit("figure-3", "scores on natural clients", natural_clients, NATURAL, SHOWN),
    Exhibit("figure-4", "scores over rounds", curves, TWO, SHOWN),
    Exhibit("figure-5", "link inference and noise", attack_and_noise, TWO, SHOWN),
    Exhibit("6", "statistics of the datasets", statistics, tuple(STATISTICS)),
    Exhibit("7", "homophily by partition", homophily_by_partition, tuple(DIVIDED)),
    Exhibit(
        "figure-6",
        "neighbours by class at two clients",
        lambda wanted: neighbours(wanted, everyone=False),
        TWO,
    ),
    Exhibit(
        "figure-7",
        "neighbours by class at all clients",
        lambda wanted: neighbours(wanted, everyone=True),
        TWO,
    ),
    Exhibit(
        "figure-8",
        "sensitivity to k",
        lambda wanted: sensitivity(wanted, "figure-8", ("k",)),
        DATASETS,
        (OWN,),
    ),
    Exhibit(
        "figure-9",
        "sensitivity to λ, μ, α and N_H",
        lambda wanted: sensitivity(wanted, "figure-9", REST),
        DATASETS,
        (OWN,),
    ),
)
