"""From measures to words: what differs most between clients, and which methods are made for it.

The rules are data: one entry of `RULES` per kind of heterogeneity, with the measure it rests on and
the level from which we call it strong. The levels are ours. They were set by looking at federations
that are known to be alike (random parts of Cora, METIS parts of Minesweeper: below every level but
that of lost signal, which is not about differences) and known to differ (csbm with a homophily
gap, Louvain parts of Cora), not by how well methods score. Each method is named for what its paper
sets out to mend, and what our own studies say of it stands beside (`results`).

A client with few labels or edges shows differences by chance, so it does not count; where fewer
than half of the clients count, or fewer than two, nothing is said.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from polyphily.heterogeneity.inspection import Inspection, mean_of_pairs
from polyphily.heterogeneity.results import in_words

ENOUGH_LABELS, ENOUGH_EDGES = 50, 100  # of a client that counts
SLIGHT = 0.5  # of its level: below that a kind of heterogeneity is slight


@dataclass(frozen=True)
class Rule:
    """One kind of heterogeneity.

    Attributes:
        finding: what is the case where the measure is strong, in words.
        measure: the name of the measure, as a reader finds it in the tables.
        value: the measure of the clients that count; NaN where there is none.
        level: from which it is strong.
        methods: made for it.
        reason: what these methods do about it.
        compares: whether clients are compared, for which each of them must be large enough.
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
    """A sentence with the measure that it rests on.

    Attributes:
        text: the sentence.
        measure: the measure.
        value: what it is here.
        level: from which we call it strong.
        methods: that are named.
    """

    text: str
    measure: str = ""
    value: float = math.nan
    level: float = math.nan
    methods: tuple[str, ...] = ()


def _spread_of_homophily(inspection: Inspection, clients: Sequence[int]) -> float:
    """The smaller of two ranges: a client of all but one class has a low adjusted homophily with
    hardly an edge between classes, and edge homophily follows the mix of labels."""
    chosen = [inspection.clients[k] for k in clients]
    values = np.array([(p.edge_homophily, p.adjusted_homophily) for p in chosen])
    known = values[~np.isnan(values).any(axis=1)]
    return float(np.ptp(known, axis=0).min()) if len(known) > 1 else math.nan


def _pairs(name: str) -> Callable[[Inspection, Sequence[int]], float]:
    """The mean over pairs of a matrix, less what chance would show where that is known."""

    def value(inspection: Inspection, clients: Sequence[int]) -> float:
        chosen = np.ix_(clients, clients)
        chance = inspection.pairs.get(f"{name}_chance")
        found = mean_of_pairs(inspection.pairs[name][chosen])
        return found if chance is None else max(found - mean_of_pairs(chance[chosen]), 0.0)

    return value


def _neighbours(inspection: Inspection, clients: Sequence[int]) -> float:
    """Neighbour divergence less label divergence: where labels are mixed differently, classes have
    other neighbours even if edges come about in the same way."""
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
        "they look for edges that mean the same at every client, or learn a structure to share",
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
        "they keep a part personal, or hold embeddings together",
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
    """The clients that have enough labels and edges to tell a difference from chance."""
    return [
        k
        for k, client in enumerate(inspection.clients)
        if client.labelled >= ENOUGH_LABELS and client.edges >= ENOUGH_EDGES
    ]


def advise(inspection: Inspection) -> tuple[Advice, ...]:
    """What to say about a federation, the strongest kind of heterogeneity first."""
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
            f"{ENOUGH_LABELS} labels and {ENOUGH_EDGES} edges, too few to tell it from chance."
        )
        return (*strong, Advice(thin))
    return (*(strong or [_nothing_strong(*known[0])]), *_about_edges(inspection))


def _nothing_strong(rule: Rule, value: float) -> Advice:
    """Says that clients are alike, or differ too little for advice."""
    words = f"The largest measure is the {rule.measure}, {value:.2f} (strong from {rule.level:g})"
    if _ratio(rule, value) >= SLIGHT:
        text = f"Clients differ moderately. {words}: too little to recommend a method for it."
        return Advice(text, rule.measure, value, rule.level)
    text = f"Clients are alike. {words}: fedavg has nothing to stumble over here."
    return Advice(text, rule.measure, value, rule.level, ("fedavg",))


def _ratio(rule: Rule, value: float) -> float:
    return value / rule.level


def _strong(rule: Rule, value: float, dataset: str, *, first: bool) -> Advice:
    opening = f"{'Above all' if first else 'Also'}, {rule.finding}"
    names = " and ".join(filter(None, (", ".join(rule.methods[:-1]), rule.methods[-1])))
    made = "is" if len(rule.methods) == 1 else "are"
    text = (
        f"{opening}: {rule.measure} {value:.2f} (strong from {rule.level:g}). "
        f"{names} {made} made for this: {rule.reason}. {in_words(rule.methods, dataset)}"
    )
    return Advice(text, rule.measure, value, rule.level, rule.methods)


def _about_edges(inspection: Inspection) -> tuple[Advice, ...]:
    """A word on edges that hardly tell labels, whoever holds them."""
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
        f"Edges say little about labels by themselves: label informativeness {mean:.2f} (1 would "
        "be everything). See what they are worth: add --backbone mlp to a comparison."
    )
    return (Advice(text, "label informativeness", mean, 0.05),)
