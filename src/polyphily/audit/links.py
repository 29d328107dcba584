"""Link inference: how well a site's edges can be told from what it shares (FedHERO, Section 4.7).

FedHERO refers to Gong and Liu (2018) and gives no procedure. Ours: as many edges as pairs without
an edge, drawn at random; a pair's score is the cosine of its two nodes' representations; reported
are the area under the ROC curve, and the accuracy of the threshold that two-means finds without
knowing any edge. One half is chance for both.

What the attacker sees:

features          the nodes' features and no model: what the method cannot be blamed for
model             the features, and the parameters that the client sent: representations of nodes
                  without their edges
representations   representations that the sent parameters make on the client's own graph. They
                  never leave a site here; FedHERO's attack has them

Parameters that a client keeps to itself are zero in all of them, so that they say nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp
import torch
from scipy.stats import rankdata
from torch.func import functional_call

from polyphily.core.cohort import Cohort
from polyphily.core.local import Message, model_part
from polyphily.engines.simulation import Simulation
from polyphily.graphs.graph import BoolArray, Features, Graph, IntArray
from polyphily.graphs.noise import new_pairs
from polyphily.graphs.random import generator
from polyphily.nn.backbones import Output

FloatArray = npt.NDArray[np.float64]
MOST = 50_000  # edges of a client that are tried
KNOWLEDGE = ("features", "model", "representations")
CHANCE = 0.5


@dataclass(frozen=True)
class Attack:
    """How well edges of one client are told from pairs without one.

    Attributes:
        auc: area under the ROC curve.
        accuracy: of the threshold found by two-means.
        pairs: how many were tried, half of them edges.
        chance_either_way: what the larger of AUC and 1 - AUC is on average where scores say
            nothing; above one half, the more the fewer pairs there are.
    """

    auc: float
    accuracy: float
    pairs: int
    chance_either_way: float

    @property
    def either_way(self) -> float:
        """The AUC of an attacker who knows whether like or unlike nodes are joined."""
        return max(self.auc, 1 - self.auc)


def audit(simulation: Simulation) -> dict[str, list[Attack | None]]:
    """The attack on every client of the first federation, by what the attacker sees.

    None where a client has no edge, or no pair without one, and where nothing is shared.
    """
    federation = simulation.federations[0]
    trials = [trial(graph, federation.seed, k) for k, graph in enumerate(federation.clients)]
    seen: dict[str, list[Features] | None] = {
        "features": [graph.features for graph in federation.clients],
        **representations(simulation),
    }
    return {
        name: [
            None if found is None or own is None else attack(found[k], *own)
            for k, own in enumerate(trials)
        ]
        for name, found in seen.items()
    }


def representations(simulation: Simulation) -> dict[str, list[Features] | None]:
    """Representations of each client's nodes by what it sent, without edges and with them."""
    federation = simulation.federations[0]
    count = len(federation)
    params = sent_parameters(simulation)
    if params is None:
        return {"model": None, "representations": None}
    lonely = [replace(g, edges=np.empty((2, 0), dtype=np.int64)) for g in federation.clients]
    found: dict[str, list[Features] | None] = {}
    for name, graphs in (("model", lonely), ("representations", list(federation.clients))):
        cohort = Cohort(
            graphs,
            simulation.cohort.keys[:count],
            simulation.cohort.classes,
            device=simulation.cohort.device,
            dtype=simulation.cohort.dtype,
        )
        with torch.no_grad():
            output: Output = functional_call(simulation.network, params, (cohort,))
        sizes = list(cohort.segments.sizes)
        found[name] = [part.cpu().numpy() for part in torch.split(output.embedding, sizes)]
    return found


def sent_parameters(simulation: Simulation) -> Message | None:
    """The first federation's parameters as they were sent, zero where they stay with the client."""
    count = len(simulation.federations[0])
    trained = {n: t[:count] for n, t in model_part(simulation.memory).items()}
    shared = [n for n in trained if simulation.method.shares(simulation.network, n)]
    if not shared:
        return None
    return {n: t if n in shared else torch.zeros_like(t) for n, t in trained.items()}


# The attack --------------------------------------------------------------------------------------


def trial(graph: Graph, seed: int, client: int) -> tuple[IntArray, BoolArray] | None:
    """Pairs of nodes, and which of them are edges: half are."""
    rng = generator(seed, f"link inference/{client}")
    edges = graph.edges[:, graph.edges[0] < graph.edges[1]]
    free = graph.num_nodes * (graph.num_nodes - 1) // 2 - edges.shape[1]
    count = min(edges.shape[1], free, MOST)
    if count == 0:
        return None
    chosen = edges[:, rng.permutation(edges.shape[1])[:count]]
    others = new_pairs(edges, graph.num_nodes, count, rng)
    return np.concatenate([chosen, others], axis=1), np.arange(2 * count) < count


def attack(representation: Features, pairs: IntArray, linked: BoolArray) -> Attack:
    """Scores pairs by cosine and compares with the truth."""
    scores = cosines(representation, pairs)
    guess = scores > two_means(scores)
    accuracy = float((guess == linked).mean())
    return Attack(area(scores, linked), accuracy, len(linked), chance_either_way(scores, linked))


def cosines(representation: Features, pairs: IntArray) -> FloatArray:
    """Of each pair of rows; zero where a row is."""
    if sp.issparse(representation):
        entries = sp.csr_array(representation, dtype=np.float64)
        left, right = entries[pairs[0]], entries[pairs[1]]
        product = np.asarray(left.multiply(right).sum(axis=1)).ravel()
        squares = np.asarray(entries.multiply(entries).sum(axis=1)).ravel()
    else:
        x = np.asarray(representation, dtype=np.float64)
        product = np.einsum("ij,ij->i", x[pairs[0]], x[pairs[1]])
        squares = np.einsum("ij,ij->i", x, x)
    lengths = np.sqrt(squares)
    scale = lengths[pairs[0]] * lengths[pairs[1]]
    found: FloatArray = np.divide(product, scale, out=np.zeros(len(scale)), where=scale > 0)
    return found


def two_means(values: FloatArray) -> float:
    """The threshold between two groups of numbers with the least squared distance to their means.

    Exact: the best of all cuts of the sorted values. Values above it are in the upper group.

    >>> two_means(np.array([0.0, 0.1, 0.9, 1.0]))
    0.5
    """
    ordered = np.sort(values)
    below = np.arange(1, len(ordered))
    sums = np.cumsum(ordered)[:-1]
    # Within-group squares are least where the groups' n · mean² are largest in sum.
    gain = sums**2 / below + (ordered.sum() - sums) ** 2 / (len(ordered) - below)
    cut = int(np.argmax(gain))
    return float((ordered[cut] + ordered[cut + 1]) / 2)


def area(scores: FloatArray, positive: BoolArray) -> float:
    """Area under the ROC curve, ties counting half."""
    ranks = rankdata(scores)
    count = int(positive.sum())
    return float(
        (ranks[positive].sum() - count * (count + 1) / 2) / (count * (len(scores) - count))
    )


def chance_either_way(scores: FloatArray, positive: BoolArray) -> float:
    """The mean of max(AUC, 1 - AUC) when labels are dealt out anew, scores staying as they are.

    The AUC then has the mean one half and the variance of a rank sum with ties (Mann and Whitney
    1947), and is all but normal, so that its mean distance from one half is sqrt(2/pi) deviations.
    """
    total, count = len(scores), int(positive.sum())
    _, ties = np.unique(scores, return_counts=True)
    tied = float((ties.astype(np.float64) ** 3 - ties).sum()) / (total * (total - 1))
    variance = (total + 1 - tied) / (12 * count * (total - count))
    return 0.5 + float(np.sqrt(2 / np.pi * variance))


def mean(attacks: list[Attack | None], value: Callable[[Attack], float]) -> float | None:
    """The plain mean over clients."""
    known = [value(found) for found in attacks if found is not None]
    return float(np.mean(known)) if known else None
