"""Advice from measures: how clients differ most, and which methods were designed for that.

The rules are data. `RULES` has one entry per kind of heterogeneity, with its measure and the level
from which we call it strong. We set the levels ourselves. We looked at federations whose clients
are known to be similar (random parts of Cora, METIS parts of Minesweeper) and at others whose
clients are known to differ (csbm with a homophily gap, Louvain parts of Cora). Similar clients are
below every level but that of lost signal, which is no difference between clients. Scores of methods
were not used. A method is named if its paper addresses that kind of heterogeneity. The advice adds
what our own studies found (`results`), and recommends no method that they do not have.

A client with few labels or edges shows differences by chance, so it is not counted. If fewer than
two clients, or fewer than half of them, are counted, no advice is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from polyphily.heterogeneity.inspection import Inspection, mean_of_pairs
from polyphily.heterogeneity.results import in_words, tried

ENOUGH_LABELS, ENOUGH_EDGES = 50, 100  # that a client needs to be counted
SLIGHT = 0.5  # a measure below this share of its level is slight


@dataclass(frozen=True)
class Rule:
    """One kind of heterogeneity.

    Attributes:
        finding: what a strong measure means, in words.
        measure: the name of the measure in tables.
        value: computes the measure from the clients that are counted; NaN if it is undefined.
        level: the value from which the measure is strong.
        methods: the methods that were designed for it.
        reason: how these methods address it.
        compares: whether the measure compares clients, for which each must be large enough.
    """

    finding: str
    measure: str
    value: Callable[[Inspection, Sequence[int]], float]
    level: float
    methods: tuple[str, ...]
    reason: str
    compares: bool = True


@dataclass(frozen=True)
class Advice:
    """A piece of advice with the measure that it is based on.

    Attributes:
        text: the advice.
        measure: the name of the measure.
        value: the value of the measure.
        level: the value from which the measure is strong.
        methods: the methods that the text names.
    """

    text: str
    measure: str = ""
    value: float = math.nan
    level: float = math.nan
    methods: tuple[str, ...] = ()


def _spread_of_homophily(inspection: Inspection, clients: Sequence[int]) -> float:
    """Return the smaller of the ranges of edge and adjusted homophily.

    Each has a weakness of its own. A client with almost one class only has a low adjusted homophily
    although hardly an edge joins two classes. Edge homophily depends on the mix of labels.
    """
    chosen = [inspection.clients[k] for k in clients]
    values = np.array([(p.edge_homophily, p.adjusted_homophily) for p in chosen])
    known = values[~np.isnan(values).any(axis=1)]
    return float(np.ptp(known, axis=0).min()) if len(known) > 1 else math.nan


def _pairs(name: str) -> Callable[[Inspection, Sequence[int]], float]:
    """Return a function that averages a matrix over pairs, less the value expected by chance."""

    def value(inspection: Inspection, clients: Sequence[int]) -> float:
        chosen = np.ix_(clients, clients)
        chance = inspection.pairs.get(f"{name}_chance")
        found = mean_of_pairs(inspection.pairs[name][chosen])
        return found if chance is None else max(found - mean_of_pairs(chance[chosen]), 0.0)

    return value


def _neighbours(inspection: Inspection, clients: Sequence[int]) -> float:
    """Return the neighbour divergence less the label divergence.

    If clients differ in their mix of labels, classes have different neighbours even if edges are
    formed in the same way.
    """
    found = [
        _pairs(name)(inspection, clients) for name in ("neighbour_divergence", "label_divergence")
    ]
    return math.nan if math.isnan(found[0]) else max(found[0] - found[1], 0.0)


def _lost_signal(inspection: Inspection, _: Sequence[int]) -> float:
    return math.nan if inspection.lost is None else inspection.lost.label_signal_share


RULES = (
    Rule(
        "clients differ in homophily",
        "smaller of the ranges of edge and adjusted homophily",
        _spread_of_homophily,
        0.3,
        ("fedspa", "fedgsp", "fedhero"),
        "they keep homophilic and heterophilic propagation apart, or personal",
    ),
    Rule(
        "one class has different neighbours at different clients",
        "neighbour divergence beyond chance and label divergence",
        _neighbours,
        0.2,
        ("fedath", "fedhero"),
        "they look for edges that mean the same at every client, or share a learned structure",
    ),
    Rule(
        "clients differ in their mix of labels",
        "label divergence beyond chance",
        _pairs("label_divergence"),
        0.25,
        ("fedper", "fedproto"),
        "they keep classifiers personal, or share one prototype per class",
    ),
    Rule(
        "clients' graphs differ in their spectra",
        "spectral Wasserstein distance",
        _pairs("spectral_wasserstein"),
        0.1,
        ("s2fgl", "fedgsp"),
        "they align or weigh clients by frequencies",
    ),
    Rule(
        "clients differ in their features",
        "feature divergence",
        _pairs("feature_divergence"),
        0.5,
        ("fedper", "moon"),
        "they keep a part of the model personal, or pull embeddings together",
    ),
    Rule(
        "dividing the graph cut nodes off from labels",
        "share of label signal lost",
        _lost_signal,
        0.25,
        ("s2fgl",),
        "it brings labels back through class prototypes",
        compares=False,
    ),
)


def counting_clients(inspection: Inspection) -> list[int]:
    """Return the clients with enough labels and edges to tell a difference from chance."""
    return [
        k
        for k, client in enumerate(inspection.clients)
        if client.labelled >= ENOUGH_LABELS and client.edges >= ENOUGH_EDGES
    ]


def advise(inspection: Inspection) -> tuple[Advice, ...]:
    """Return advice on a federation, for the strongest kind of heterogeneity first."""
    clients = counting_clients(inspection)
    everyone = len(inspection.clients)
    if everyone < 2:
        return (Advice("One client: there is nothing to compare it with."),)
    enough = len(clients) >= 2 and 2 * len(clients) >= everyone
    values = [
        (rule, rule.value(inspection, clients)) for rule in RULES if enough or not rule.compares
    ]
    known = sorted(
        ((rule, value) for rule, value in values if not math.isnan(value)),
        key=lambda pair: -_ratio(*pair),
    )
    strong = [
        _strong(*pair, inspection.dataset, first=i == 0)
        for i, pair in enumerate(known)
        if _ratio(*pair) >= 1
    ]
    if not enough:
        thin = (
            f"No advice on how clients differ: {len(clients)} of {everyone} have "
            f"{ENOUGH_LABELS} labels and {ENOUGH_EDGES} edges, too few to tell differences from "
            "chance."
        )
        return (*strong, Advice(thin))
    return (*(strong or [_nothing_strong(*known[0])]), *_about_edges(inspection))


def _nothing_strong(rule: Rule, value: float) -> Advice:
    """Return advice for clients that are similar, or differ too little."""
    words = f"The largest measure is the {rule.measure}, {value:.2f} (strong from {rule.level:g})"
    if _ratio(rule, value) >= SLIGHT:
        text = f"Clients differ moderately. {words}: too little to recommend a method for it."
        return Advice(text, rule.measure, value, rule.level)
    text = f"Clients are similar. {words}: fedavg should work well here."
    return Advice(text, rule.measure, value, rule.level, ("fedavg",))


def _ratio(rule: Rule, value: float) -> float:
    return value / rule.level


def _strong(rule: Rule, value: float, dataset: str, *, first: bool) -> Advice:
    opening = f"{'Above all' if first else 'Also'}, {rule.finding}"
    opening += f": {rule.measure} {value:.2f} (strong from {rule.level:g})."
    known = tried(rule.methods)
    if not known:
        text = (
            f"{opening} {_listed(rule.methods)} made for this: {rule.reason}. Our studies did not "
            "test that, so we recommend none: compare with local and fedavg first."
        )
        return Advice(text, rule.measure, value, rule.level)
    text = f"{opening} {_listed(known)} made for this: {rule.reason}. {in_words(known, dataset)}"
    return Advice(text, rule.measure, value, rule.level, known)


def _listed(methods: Sequence[str]) -> str:
    """Return names as the subject of a sentence, with its verb."""
    names = " and ".join(filter(None, (", ".join(methods[:-1]), methods[-1])))
    return f"{names} {'is' if len(methods) == 1 else 'are'}"


def _about_edges(inspection: Inspection) -> tuple[Advice, ...]:
    """Return advice if edges hardly inform about labels at any client."""
    sizes = [client.edges for client in inspection.clients]
    told = [client.label_informativeness for client in inspection.clients]
    known = [(e, t) for e, t in zip(sizes, told, strict=True) if not math.isnan(t)]
    edges = sum(e for e, _ in known)
    if edges < ENOUGH_EDGES * len(inspection.clients):
        return ()
    mean = sum(e * t for e, t in known) / edges
    if mean >= 0.05:
        return ()
    text = (
        f"Edges alone say little about labels: label informativeness is {mean:.2f} (at most 1). "
        "To see what the edges contribute, add --backbone mlp to a comparison."
    )
    return (Advice(text, "label informativeness", mean, 0.05),)
