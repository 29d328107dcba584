"""Synthetic payments of several banks, a few of them illicit, in the manner of the Elliptic graph.

A node is a payment, an edge the flow of money from one payment to a later one. Payments belong to
time steps, and edges stay within a step. Most payments are ordinary. They spend the money of one or
two earlier ones, more often of those that many spend from, so that degrees have a heavy tail.
A few form schemes: chains of three to eight payments that pass money on. A scheme hides among
ordinary payments, from which it takes money, and each bank sees schemes that hide more or less
(`camouflage`). Some payments have no label, as if nobody had looked at them.

Features are drawn around the centre of the payment's kind. There are six kinds of ordinary payments
and three of schemes. The centres are the same at all banks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from polyphily.errors import UserError
from polyphily.graphs.graph import UNLABELLED, Collection, Graph
from polyphily.graphs.options import real, whole
from polyphily.graphs.random import generator

CLASSES = ("licit", "illicit")
ORDINARY, SCHEMES = 6, 3  # kinds of payments
SHORTEST, LONGEST = 3, 8  # payments of a scheme
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def sample_federation(
    *,
    clients: int | str | None = None,
    seed: int = 0,
    nodes: int | str = 5000,
    features: int | str = 20,
    positives: float | str = 0.02,
    unknown: float | str = 0.5,
    strength: float | str = 0.5,
    steps: int | str = 10,
) -> Collection:
    """Draw the payments of some banks, one client each.

    The graph of client k depends on k, the number of clients and the seed.

    Args:
        clients: how many banks; 5 unless given.
        seed: any whole number from 0.
        nodes: payments of each bank.
        features: the number of features.
        positives: the share of illicit payments.
        unknown: the share of payments without a label.
        strength: the distance of schemes from ordinary payments in each feature, in standard
            deviations.
        steps: the number of time steps.
    """
    clients = whole("clients", 5 if clients is None else clients, low=1)
    nodes, steps = whole("nodes", nodes, low=50), whole("steps", steps, low=1)
    features = whole("features", features, low=1)
    positives, unknown = real("positives", positives, 0, 0.5), real("unknown", unknown, 0, 0.95)
    strength = real("strength", strength, low=0)
    if round(positives * nodes) < SHORTEST or nodes // steps < 2 * LONGEST:
        raise UserError(
            f"{nodes} payments in {steps} steps with a share of {positives:g} illicit ones are too "
            f"few for a scheme of {SHORTEST} payments: choose more nodes, or fewer steps"
        )
    rng = generator(seed, "payments centres")
    ordinary = rng.standard_normal((ORDINARY, features))
    centres = np.concatenate(
        [ordinary, ordinary[:SCHEMES] + strength * rng.standard_normal((SCHEMES, features))]
    )
    camouflage = np.linspace(0.2, 0.8, clients) if clients > 1 else np.array([0.5])
    graphs = tuple(
        _sample_bank(
            f"bank-{k:0{len(str(clients - 1))}}",
            generator(seed, f"payments bank {k}"),
            (nodes, steps, round(positives * nodes)),
            centres,
            float(camouflage[k]),
            unknown,
        )
        for k in range(clients)
    )
    note = (
        f"synthetic: {100 * positives:g} % of the payments are illicit, in chains that hide among "
        f"others with probability {camouflage[0]:g} to {camouflage[-1]:g}"
    )
    return Collection("payments", graphs, CLASSES, natural=True, notes=(note,))


def _sample_bank(
    name: str,
    rng: np.random.Generator,
    sizes: tuple[int, int, int],
    centres: Floats,
    camouflage: float,
    unknown: float,
) -> Graph:
    """Draw the payments of one bank; `sizes` are payments, time steps and illicit payments."""
    nodes, steps, illicit = sizes
    kind = rng.integers(0, ORDINARY, nodes)
    step = np.sort(rng.integers(0, steps, nodes))
    edges: list[tuple[int, int]] = []
    for chain in _chains(step, illicit, rng):
        kind[chain] = ORDINARY + int(rng.integers(SCHEMES))
        edges += zip(chain[:-1].tolist(), chain[1:].tolist(), strict=True)
    scheme = kind >= ORDINARY
    for own in np.split(np.arange(nodes), _starts(step)):
        edges += _flows(own, scheme, camouflage, rng)
    labels = np.where(rng.random(nodes) < unknown, UNLABELLED, scheme.astype(np.int64))
    values = centres[kind] + rng.standard_normal((nodes, centres.shape[1]))
    return Graph.build(
        values.astype(np.float32),
        np.array(edges, dtype=np.int64).T,
        labels,
        directed=True,
        name=name,
    )


def _chains(step: Ints, illicit: int, rng: np.random.Generator) -> list[Ints]:
    """Draw disjoint chains of payments within a step, `illicit` payments in all."""
    free = [rng.permutation(own) for own in np.split(np.arange(len(step)), _starts(step))]
    found: list[Ints] = []
    while illicit > 0:
        length = min(int(rng.integers(SHORTEST, LONGEST + 1)), illicit)
        able = [s for s, own in enumerate(free) if len(own) >= length]
        s = able[int(rng.integers(len(able)))]
        found.append(np.sort(free[s][:length]))
        free[s] = free[s][length:]
        illicit -= length
    return found


def _starts(step: Ints) -> Ints:
    return np.flatnonzero(np.diff(step)) + 1


def _flows(
    own: Ints, scheme: npt.NDArray[np.bool_], camouflage: float, rng: np.random.Generator
) -> list[tuple[int, int]]:
    """Draw from which earlier payments of a step each payment takes money."""
    ends: list[int] = [int(own[0])]  # payments by their degree, once more than it
    found: list[tuple[int, int]] = []
    for node in own[1:].tolist():
        ends.append(node)
        if scheme[node] and rng.random() > camouflage:
            continue
        for _ in range(1 + int(rng.random() < 0.5)):
            source = ends[int(rng.integers(len(ends) - 1))]
            if source != node:
                found.append((source, node))
                ends += [source, node]
    return found
