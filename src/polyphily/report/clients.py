"""The parts of a page that show the clients' graphs and how they differ, from an inspection."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from polyphily.report.blocks import Choice, Figure, Section, Table, round_digits
from polyphily.report.run_set import RunSet
from polyphily.report.words import decimal

MEASURES = {
    "edge_homophily": "edge homophily",
    "adjusted_homophily": "adjusted homophily",
    "node_homophily": "node homophily",
    "label_informativeness": "label informativeness",
    "high_frequency_area": "high-frequency area",
}
PAIRS = {
    "spectral_kl": ("spectral KL", "nats, row against column"),
    "spectral_wasserstein": ("spectral Wasserstein", "on a scale of 0 to 2"),
    "neighbour_divergence": ("neighbour divergence", "share, 0 to 1"),
    "label_divergence": ("label divergence", "share, 0 to 1"),
    "feature_divergence": ("feature divergence", "standard deviations"),
    "similarity": ("similarity", "share, 0 to 1"),
}
LEAD = "Measured on all labels, not only those for training. Formulas are in docs/measures.md."


def clients_section(run_set: RunSet) -> Section | None:
    """Return the section about clients; None if no run has measured them."""
    measured = run_set.inspections()
    if not measured:
        return None
    items = [
        _score_figure(run_set, measured),
        homophily_figure(run_set, measured),
        label_mix_figure(run_set, measured),
    ]
    return Section("clients", "Clients", LEAD, tuple(items))


def _measure_choice() -> Choice:
    return Choice("measure", tuple(MEASURES.values()))


def _score_figure(run_set: RunSet, measured: Mapping[str, Any]) -> Figure:
    """Plot the test score of every client against its homophily."""
    panels = {}
    groups = run_set.by_data()
    for data, inspection in measured.items():
        for key, measure in MEASURES.items():
            x = [client[key] for client in inspection["clients"]]
            series = [
                {
                    "name": label,
                    "slot": run_set.slots[label],
                    "points": [
                        [round_digits(a), round_digits(100 * b), name]
                        for a, b, name in zip(x, run.per_client, run.clients, strict=False)
                        if a is not None and b is not None
                    ],
                }
                for label, run in groups[data]
            ]
            metric = groups[data][0][1].metric
            panels[run_set.key(data, measure)] = {
                "x": measure,
                "y": f"test {metric}, %",
                "series": series,
            }
    return Figure(
        "accuracy-homophily",
        "points",
        "Score of each client against its homophily",
        "Each dot is a client, scored at the best validation round.",
        panels,
        (*run_set.data_choice(measured), _measure_choice()),
    )


def homophily_figure(run_set: RunSet, measured: Mapping[str, Any]) -> Figure:
    panels = {}
    for data, inspection in measured.items():
        names = [client["name"] for client in inspection["clients"]]
        for key, measure in MEASURES.items():
            values = [client[key] for client in inspection["clients"]]
            panels[run_set.key(data, measure)] = {
                "x": measure,
                "names": names,
                "series": [{"name": measure, "slot": 0, "values": values}],
            }
    return Figure(
        "homophily",
        "bars",
        "Homophily of each client",
        "Edge homophily is the share of edges that join nodes of the same class. Adjusted "
        "homophily is 0 if edges do not depend on labels.",
        panels,
        (*run_set.data_choice(measured), _measure_choice()),
        half=True,
    )


def label_mix_figure(run_set: RunSet, measured: Mapping[str, Any]) -> Figure:
    panels = {}
    for data, inspection in measured.items():
        classes = inspection["class_names"]
        counts = [client["label_counts"] for client in inspection["clients"]]
        for kind in ("nodes", "share"):
            series = []
            for c, name in enumerate(classes):
                values = [
                    own[c] if kind == "nodes" else round_digits(100 * own[c] / max(sum(own), 1))
                    for own in counts
                ]
                series.append({"name": str(name), "slot": c, "values": values})
            panels[run_set.key(data, kind)] = {
                "x": "labelled nodes" if kind == "nodes" else "labelled nodes, %",
                "names": [client["name"] for client in inspection["clients"]],
                "series": series,
                "stacked": True,
            }
    return Figure(
        "labels",
        "bars",
        "Size and label mix",
        "Number of nodes of each class at each client.",
        panels,
        (*run_set.data_choice(measured), Choice("count", ("nodes", "share"))),
        half=True,
    )


def differences_figure(run_set: RunSet, measured: Mapping[str, Any]) -> Figure | None:
    """Show every measure of pairs of clients as a matrix; None if there are no measures."""
    if not measured:
        return None
    panels = {}
    for data, inspection in measured.items():
        names = [client["name"] for client in inspection["clients"]]
        for key, (measure, unit) in PAIRS.items():
            panels[run_set.key(data, measure)] = {
                "rows": names,
                "columns": names,
                "values": [[round_digits(v) for v in row] for row in inspection["pairs"][key]],
                "unit": unit,
                "plain_diagonal": key != "similarity",
            }
    return Figure(
        "differences",
        "matrix",
        "Differences between clients",
        "Larger values mean that two clients differ more; for similarity, less.",
        panels,
        (
            *run_set.data_choice(measured),
            Choice("measure", tuple(measure for measure, _ in PAIRS.values())),
        ),
        half=True,
    )


# Of an inspection without runs -------------------------------------------------------------------


def measures_table(inspection: Mapping[str, Any]) -> Table:
    """Return a table with the measures of every graph, the whole graph first."""
    columns: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "nodes": lambda g: f"{g['nodes']:,}",
        "edges": lambda g: f"{g['edges']:,}",
        "classes": lambda g: str(g["classes"]),
        "edge h": lambda g: decimal(g["edge_homophily"]),
        "node h": lambda g: decimal(g["node_homophily"]),
        "adjusted h": lambda g: decimal(g["adjusted_homophily"]),
        "label inf.": lambda g: decimal(g["label_informativeness"]),
        "high freq.": lambda g: decimal(g["high_frequency_area"]),
        "inertia": lambda g: decimal(g["structure_inertia_score"], 1),
        "degree": lambda g: decimal(2 * g["edges"] / max(g["nodes"], 1), 1),
    }
    whole = inspection["graph"]
    graphs = [*([{**whole, "name": "whole graph"}] if whole else []), *inspection["clients"]]
    rows = [(str(g["name"]), *[cell(g) for cell in columns.values()]) for g in graphs]
    return Table(
        ("", *columns),
        tuple(rows),
        "h: homophily; label inf.: label informativeness; high freq.: high-frequency area of the "
        "features, 0 to 2; inertia: structure inertia score, a sum over nodes.",
        strong=frozenset({0} if whole else ()),
    )


def spectra_figure(inspection: Mapping[str, Any]) -> Figure:
    """Plot the distribution of the eigenvalues of each client's Laplacian."""
    series = []
    for slot, client in enumerate(inspection["clients"]):
        shares = client["spectrum"]
        width = 2 / len(shares)
        x = [round_digits((i + 0.5) * width) for i in range(len(shares))]
        y = [round_digits(100 * share) for share in shares]
        series.append({"name": client["name"], "slot": slot, "x": x, "y": y})
    panel = {"x": "eigenvalue", "y": "share of eigenvalues, %", "series": series}
    return Figure(
        "spectra",
        "lines",
        "Laplacian spectra",
        "Histogram of the eigenvalues of I - D^-1/2 A D^-1/2, which lie in [0, 2]: low (smooth) "
        "frequencies on the left, high (rough) ones on the right.",
        {"": panel},
    )


def model_figures(inspection: Mapping[str, Any]) -> list[Figure]:
    """Return the figures about a run's models: embeddings, and filters if the network has them."""
    trained = inspection.get("trained")
    if not trained:
        return []
    names = [client["name"] for client in inspection["clients"]]
    figures = [
        Figure(
            "embeddings",
            "matrix",
            "Differences between embeddings of the same class",
            f"Models of {trained['method']} after round {trained['round']}, mean over classes.",
            {
                "": {
                    "rows": names,
                    "columns": names,
                    "values": [
                        [round_digits(v) for v in row] for row in trained["embedding_divergence"]
                    ],
                    "unit": "relative to the spread of all embeddings",
                    "plain_diagonal": True,
                }
            },
            half=True,
        )
    ]
    if trained["responses"]:
        series = []
        for slot, (name, response) in enumerate(zip(names, trained["responses"], strict=True)):
            pairs = zip(trained["frequencies"], response, strict=True)
            known = [
                (round_digits(f), round_digits(value)) for f, value in pairs if value is not None
            ]
            if known:
                x, y = zip(*known, strict=True)
                series.append({"name": name, "slot": slot, "x": x, "y": y})
        panel = {"x": "frequency", "y": "response", "series": series}
        caption = (
            "The factor by which each client's filter scales the smooth (0) to rough (2) parts of "
            "its features. There is no value at frequencies that the features do not contain."
        )
        figures.append(Figure("filters", "lines", "Learned filters", caption, {"": panel}))
    return figures
