"""What clients are like, and how they differ: from an inspection."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from polyphily.report.blocks import Choice, Figure, Section, Table, digits
from polyphily.report.cast import Cast, only
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


def clients(cast: Cast) -> Section | None:
    measured = cast.inspections()
    if not measured:
        return None
    items = [
        _against_homophily(cast, measured),
        homophily(cast, measured),
        label_mix(cast, measured),
    ]
    lead = "Labels count whatever the split; docs/measures.md has every formula."
    return Section("clients", "Clients", lead, tuple(items))


def _measure_choice() -> Choice:
    return Choice("measure", tuple(MEASURES.values()))


def _against_homophily(cast: Cast, measured: Mapping[str, Any]) -> Figure:
    panels = {}
    groups = cast.by_data()
    for data, inspection in measured.items():
        for key, words in MEASURES.items():
            x = [client[key] for client in inspection["clients"]]
            series = [
                {
                    "name": label,
                    "slot": cast.slots[label],
                    "points": [
                        [digits(a), digits(100 * b), name]
                        for a, b, name in zip(x, run.per_client, run.clients, strict=False)
                        if a is not None and b is not None
                    ],
                }
                for label, run in groups[data]
            ]
            metric = groups[data][0][1].metric
            panels[cast.key(data, words)] = {
                "x": words,
                "y": f"test {metric}, %",
                "series": series,
            }
    return Figure(
        "accuracy-homophily",
        "points",
        "Score of each client against its homophily",
        "A dot is a client, at the best validation round.",
        panels,
        (*only(cast.data_choice(), measured), _measure_choice()),
    )


def homophily(cast: Cast, measured: Mapping[str, Any]) -> Figure:
    panels = {}
    for data, inspection in measured.items():
        names = [client["name"] for client in inspection["clients"]]
        for key, words in MEASURES.items():
            values = [client[key] for client in inspection["clients"]]
            panels[cast.key(data, words)] = {
                "x": words,
                "names": names,
                "series": [{"name": words, "slot": 0, "values": values}],
            }
    return Figure(
        "homophily",
        "bars",
        "Homophily of each client",
        "Edge homophily is the share of edges that join equal labels; adjusted homophily is 0 "
        "where labels play no part.",
        panels,
        (*only(cast.data_choice(), measured), _measure_choice()),
        half=True,
    )


def label_mix(cast: Cast, measured: Mapping[str, Any]) -> Figure:
    panels = {}
    for data, inspection in measured.items():
        classes = inspection["class_names"]
        counts = [client["label_counts"] for client in inspection["clients"]]
        for kind in ("nodes", "share"):
            series = []
            for c, name in enumerate(classes):
                values = [
                    own[c] if kind == "nodes" else digits(100 * own[c] / max(sum(own), 1))
                    for own in counts
                ]
                series.append({"name": str(name), "slot": c, "values": values})
            panels[cast.key(data, kind)] = {
                "x": "labelled nodes" if kind == "nodes" else "labelled nodes, %",
                "names": [client["name"] for client in inspection["clients"]],
                "series": series,
                "stacked": True,
            }
    return Figure(
        "labels",
        "bars",
        "Size and label mix",
        "Nodes of each class at each client.",
        panels,
        (*only(cast.data_choice(), measured), Choice("count", ("nodes", "share"))),
        half=True,
    )


def differences(cast: Cast, measured: Mapping[str, Any]) -> Figure | None:
    """Client against client, by every measure of pairs."""
    if not measured:
        return None
    panels = {}
    for data, inspection in measured.items():
        names = [client["name"] for client in inspection["clients"]]
        for key, (words, unit) in PAIRS.items():
            panels[cast.key(data, words)] = {
                "rows": names,
                "columns": names,
                "values": [[digits(v) for v in row] for row in inspection["pairs"][key]],
                "unit": unit,
                "plain_diagonal": key != "similarity",
            }
    return Figure(
        "differences",
        "matrix",
        "Client against client",
        "The larger, the more two clients differ (similarity: the less).",
        panels,
        (
            *only(cast.data_choice(), measured),
            Choice("measure", tuple(words for words, _ in PAIRS.values())),
        ),
        half=True,
    )


# Of an inspection alone --------------------------------------------------------------------------


def measures(inspection: Mapping[str, Any]) -> Table:
    """Every graph with its measures, the whole graph first."""
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


def spectra(inspection: Mapping[str, Any]) -> Figure:
    """How the eigenvalues of each client's Laplacian are spread."""
    series = []
    for slot, client in enumerate(inspection["clients"]):
        shares = client["spectrum"]
        width = 2 / len(shares)
        x = [digits((i + 0.5) * width) for i in range(len(shares))]
        y = [digits(100 * share) for share in shares]
        series.append({"name": client["name"], "slot": slot, "x": x, "y": y})
    panel = {"x": "eigenvalue", "y": "share of eigenvalues, %", "series": series}
    return Figure(
        "spectra",
        "lines",
        "Laplacian spectra",
        "Eigenvalues of I - D^-1/2 A D^-1/2 in equal parts of [0, 2]: smooth to the left, rough to "
        "the right.",
        {"": panel},
    )


def of_models(inspection: Mapping[str, Any]) -> list[Figure]:
    """What was measured of a run's models: embeddings, and filters where the network has them."""
    trained = inspection.get("trained")
    if not trained:
        return []
    names = [client["name"] for client in inspection["clients"]]
    figures = [
        Figure(
            "embeddings",
            "matrix",
            "Embeddings of the same class, client against client",
            f"Models of {trained['method']} after round {trained['round']}; mean over classes.",
            {
                "": {
                    "rows": names,
                    "columns": names,
                    "values": [[digits(v) for v in row] for row in trained["embedding_divergence"]],
                    "unit": "of the spread of all embeddings",
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
            known = [(digits(f), digits(value)) for f, value in pairs if value is not None]
            if known:
                x, y = zip(*known, strict=True)
                series.append({"name": name, "slot": slot, "x": x, "y": y})
        panel = {"x": "frequency", "y": "response", "series": series}
        words = (
            "By what factor each client's filter passes smooth (0) and rough (2) parts of its "
            "features on; no value where these have none."
        )
        figures.append(Figure("filters", "lines", "Filters that were learned", words, {"": panel}))
    return figures
