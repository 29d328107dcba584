"""Synthetic federations from the contextual stochastic block model (FedSPA, Appendix C).

Two balanced classes y = ±1 on N nodes, and a direction c ~ N(0, I/F):

    x_u = sqrt(mu / N) y_u c + g_u / sqrt(F),    g_u ~ N(0, I)                                (16)
    P(edge u, v) = (d + sigma sqrt(d)) / N within a class, (d - sigma sqrt(d)) / N across     (17)

with sigma = sqrt(d) (2h - 1), that is 2dh/N and 2d(1 - h)/N: average degree d, edge homophily h.

If the classes have N1 < N2 nodes, all nodes keep the average degree d, and h is the share of the
neighbours of a rarer node that are of its class. Edges within the rarer class have the probability
dh/N1, those across d(1 - h)/N2, and those within the other class what is left of its degree. Equal
classes give the probabilities above.

Along c the two classes lie at ±sqrt(mu/N) |c| with standard deviation 1/sqrt(F). The best
classifier on features alone therefore has accuracy Phi(sqrt(mu F / N) |c|), where |c| is close to
1. The paper gives neither mu nor F. With our defaults, 10 and 100, this is 72 % at N = 3000 (84 %
at 1000, 67 % at 5000): features are informative, and the graph can still help or harm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from polyphily.errors import UserError, unknown
from polyphily.graphs.graph import Collection, Graph, IntArray
from polyphily.graphs.options import real, whole
from polyphily.graphs.random import generator

Vector = npt.NDArray[np.float64]

CLASSES = ("-1", "+1")
SPREADS = ("uniform", "even")


def sample(
    nodes: int,
    features: int,
    mu: float,
    degree: float,
    homophily: float,
    rng: np.random.Generator,
    direction: Vector | None = None,
    name: str = "csbm",
    positives: float = 0.5,
) -> Graph:
    """Draw one graph, in time and memory linear in nodes and edges.

    Args:
        nodes: N; if it is odd, equal classes differ by one node.
        features: F.
        mu: strength of the features.
        degree: d, the expected degree.
        homophily: h, the expected share of edges within a class, in [0, 1].
        rng: the source of all randomness.
        direction: c, `[F]`; drawn unless given.
        name: the graph's name.
        positives: the share of nodes of the second class.
    """
    if positives == 0.5:
        kinds = np.arange(nodes, dtype=np.int64) % 2
        within, across = 2 * degree * homophily / nodes, 2 * degree * (1 - homophily) / nodes
        rates = (within, across, within)
    else:
        ones_count = min(max(1, round(positives * nodes)), nodes - 1)
        kinds = (np.arange(nodes) < ones_count).astype(np.int64)
        rates = _uneven_rates(nodes - ones_count, ones_count, degree, homophily)
    if max(rates) > 1:
        raise UserError(
            f"degree {degree:g} with homophily {homophily:g} is too large for {nodes} nodes: an "
            f"edge would have probability {max(rates):.3g}. Lower the degree."
        )
    labels = rng.permutation(kinds)
    zeros, ones = np.flatnonzero(labels == 0), np.flatnonzero(labels == 1)
    edges = [
        zeros[_pairs_within(len(zeros), rates[0], rng)],
        ones[_pairs_within(len(ones), rates[2], rng)],
        _pairs_across(zeros, ones, rates[1], rng),
    ]
    if direction is None:
        direction = draw_direction(features, rng)
    shift = (math.sqrt(mu / nodes) * direction).astype(np.float32)
    values = rng.standard_normal((nodes, features), dtype=np.float32)
    values /= np.float32(math.sqrt(features))
    values[zeros] -= shift
    values[ones] += shift
    return Graph.build(values, np.concatenate(edges, axis=1), labels, name=name)


def _uneven_rates(
    zeros: int, ones: int, degree: float, homophily: float
) -> tuple[float, float, float]:
    """Return the probabilities of edges between zeros, across, and between ones."""
    few, many = min(zeros, ones), max(zeros, ones)
    across = degree * (1 - homophily) / many
    rates = degree * homophily / few, across, (degree - few * across) / many
    return rates if zeros < ones else rates[::-1]


def draw_direction(features: int, rng: np.random.Generator) -> Vector:
    """Draw c ~ N(0, I/F)."""
    return rng.standard_normal(features) / math.sqrt(features)


def _distinct(total: int, probability: float, rng: np.random.Generator) -> IntArray:
    """Draw a subset of range(total) that holds every element with the given probability.

    Its size is binomial. Given the size, all subsets are equally likely.
    """
    count = rng.binomial(total, min(probability, 1.0))
    return rng.choice(total, size=count, replace=False, shuffle=False)


def _pairs_within(count: int, probability: float, rng: np.random.Generator) -> IntArray:
    return unrank_pairs(_distinct(count * (count - 1) // 2, probability, rng))


def _pairs_across(
    left: IntArray, right: IntArray, probability: float, rng: np.random.Generator
) -> IntArray:
    at_left, at_right = np.divmod(
        _distinct(len(left) * len(right), probability, rng), max(len(right), 1)
    )
    return np.stack([left[at_left], right[at_right]])


def unrank_pairs(index: IntArray) -> IntArray:
    """Return the pairs i < j with number j(j - 1)/2 + i, exact for every index below 2**59.

    >>> unrank_pairs(np.array([0, 1, 2, 3])).tolist()
    [[0, 0, 1, 0], [1, 2, 2, 3]]
    """
    high = ((1 + np.sqrt(1 + 8 * index.astype(np.float64))) / 2).astype(np.int64)
    high -= high * (high - 1) // 2 > index  # correct the rounding of the square root
    high += high * (high + 1) // 2 <= index
    return np.stack([index - high * (high - 1) // 2, high])


@dataclass(frozen=True)
class Population:
    """The clients of a synthetic federation; the graph of each is drawn when it is asked for.

    Attributes:
        clients: how many there are.
        seed: of all randomness.
        nodes: the fewest and the most nodes of a client.
        features: F.
        mu: strength of the features.
        degree: the average degree.
        homophily: the lower and the upper end of the interval of homophily.
        spread: how clients are placed in it, one of `SPREADS`.
        positives: the share of nodes of the second class.
    """

    clients: int
    seed: int
    nodes: tuple[int, int]
    features: int
    mu: float
    degree: float
    homophily: tuple[float, float]
    spread: str
    positives: float

    @cached_property
    def direction(self) -> Vector:
        """c, which all clients share."""
        return draw_direction(self.features, generator(self.seed, "csbm direction"))

    @property
    def note(self) -> str:
        """The remark for the user on how the graphs were drawn."""
        low, high = self.homophily
        text = f"synthetic: homophily {low:g} to {high:g} ({self.spread}), "
        text += f"average degree {self.degree:g}"
        return text if self.positives == 0.5 else f"{text}, {100 * self.positives:g} % positive"

    def graph(self, client: int) -> Graph:
        """Draw the graph of a client; it depends on no other client."""
        low, high = self.homophily
        rng = generator(self.seed, f"csbm client {client}")
        count = int(rng.integers(self.nodes[0], self.nodes[1] + 1))
        if self.spread == "uniform":
            drawn = float(rng.uniform(low, high))
        else:
            drawn = float(self._spaced[client])
        return sample(
            count,
            self.features,
            self.mu,
            self.degree,
            drawn,
            rng,
            self.direction,
            f"client-{client:0{len(str(self.clients - 1))}}",
            self.positives,
        )

    @cached_property
    def _spaced(self) -> Vector:
        low, high = self.homophily
        if self.clients == 1:
            return np.array([(low + high) / 2])
        return np.linspace(low, high, self.clients)


def sample_federation(**options: Any) -> Collection:
    """Draw a natural federation of graphs that differ in homophily (`population`)."""
    found = population(**options)
    graphs = tuple(found.graph(client) for client in range(found.clients))
    return Collection("csbm", graphs, CLASSES, natural=True, notes=(found.note,))


def population(
    *,
    clients: int | str | None = None,
    seed: int = 0,
    nodes: int | str = "1000-5000",
    features: int | str = 100,
    mu: float | str = 10.0,
    degree: float | str = 5.0,
    homophily: float | str = 0.5,
    gap: float | str = 0.8,
    spread: str = "uniform",
    positives: float | str = 0.5,
) -> Population:
    """Return the clients of a federation of graphs that differ in homophily.

    Numbers may be given as text. The graph of client k depends on k and the seed; only with
    `spread="even"` does it depend on the number of clients.

    Args:
        clients: how many; 10 unless given.
        seed: any whole number from 0.
        nodes: of each client, one number or a range `1000-5000` to draw from.
        features: F.
        mu: strength of the features.
        degree: the average degree.
        homophily: the middle of the interval of homophily.
        gap: the width of the interval of homophily.
        spread: `uniform` draws each client's homophily from the interval; `even` spaces the clients
            evenly from its lower end (client 0) to its upper end.
        positives: the share of nodes of the second class.
    """
    share = real("positives", positives, 0, 1)
    if not 0 < share < 1:
        raise UserError(f"option 'positives' must be between 0 and 1, got {positives}")
    if spread not in SPREADS:
        raise unknown("spread", spread, SPREADS)
    return Population(
        clients=whole("clients", 10 if clients is None else clients, low=1),
        seed=seed,
        nodes=_node_range(nodes),
        features=whole("features", features, low=1),
        mu=real("mu", mu, low=0),
        degree=real("degree", degree, low=0),
        homophily=_homophily_range(homophily, gap),
        spread=spread,
        positives=share,
    )


def _node_range(nodes: int | str) -> tuple[int, int]:
    first, dash, last = str(nodes).partition("-")
    fewest = whole("nodes", first, low=2)
    most = whole("nodes", last, low=2) if dash else fewest
    if fewest > most:
        raise UserError(f"option 'nodes' must be a range such as 1000-5000, got {nodes}")
    return fewest, most


def _homophily_range(homophily: float | str, gap: float | str) -> tuple[float, float]:
    middle, width = real("homophily", homophily, 0, 1), real("gap", gap, 0, 1)
    low, high = middle - width / 2, middle + width / 2
    if low < -1e-9 or high > 1 + 1e-9:
        raise UserError(
            f"homophily {middle:g} with gap {width:g} is an interval from {low:g} to {high:g}, "
            "which leaves 0 to 1: here the gap can be at most "
            f"{2 * min(middle, 1 - middle):g}."
        )
    return max(low, 0.0), min(high, 1.0)
