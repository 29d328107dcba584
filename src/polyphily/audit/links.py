"""Link inference: predict a site's edges from what it shares (FedHERO, Section 4.7).

FedHERO refers to Gong and Liu (2018) and gives no procedure. Ours draws as many edges as pairs of
nodes without an edge, at random, and scores each pair by the cosine of its two nodes'
representations. It reports the area under the ROC curve (AUC), and the accuracy of a threshold that
two-means finds without knowing any edge. Chance level is one half for both.

The attacker knows one of:

features          the nodes' features but no model: the baseline, the same for every method
model             the features and the parameters that the client sent; representations are computed
                  without edges
representations   the representations that the sent parameters compute on the client's own graph.
                  In this library they never leave a site; FedHERO's attack uses them

Parameters that a client does not send are set to zero.
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
from polyphily.core.messages import Message, model_part
from polyphily.engines.simulation import Simulation
from polyphily.graphs.graph import BoolArray, Features, Graph, IntArray
from polyphily.graphs.noise import new_pairs
from polyphily.graphs.random import generator
from polyphily.nn.backbones import Output

FloatArray = npt.NDArray[np.float64]
MAX_EDGES = 50_000  # maximum number of edges per client
KNOWLEDGE = ("features", "model", "representations")
CHANCE = 0.5


@dataclass(frozen=True)
class Attack:
    """The result of the attack on one client.

    Attributes:
        auc: area under the ROC curve.
        accuracy: accuracy of the threshold found by two-means.
        pairs: the number of scored pairs, half of them edges.
        chance_either_way: the expected value of max(AUC, 1 - AUC) for uninformative scores. It is
            above one half, and the larger the fewer pairs there are.
    """

    auc: float
    accuracy: float
    pairs: int
    chance_either_way: float

    @property
    def either_way(self) -> float:
        """The AUC of an attacker who knows whether edges join similar or dissimilar nodes."""
        return max(self.auc, 1 - self.auc)


def audit(simulation: Simulation) -> dict[str, list[Attack | None]]:
    """Attack every client of the first federation, for each kind of knowledge (`KNOWLEDGE`).

    An entry is None if the client has no edges, or no pairs without an edge, or shares nothing.
    """
    federation = simulation.federations[0]
    drawn = [draw_pairs(graph, federation.seed, k) for k, graph in enumerate(federation.clients)]
    known: dict[str, list[Features] | None] = {
        "features": [graph.features for graph in federation.clients],
        **representations(simulation),
    }
    return {
        name: [
            None if found is None or pairs is None else attack(found[k], *pairs)
            for k, pairs in enumerate(drawn)
        ]
        for name, found in known.items()
    }


def representations(simulation: Simulation) -> dict[str, list[Features] | None]:
    """Compute each client's representations by its sent parameters, without and with edges."""
    federation = simulation.federations[0]
    count = len(federation)
    params = sent_parameters(simulation)
    if params is None:
        return {"model": None, "representations": None}
    without_edges = [replace(g, edges=np.empty((2, 0), dtype=np.int64)) for g in federation.clients]
    found: dict[str, list[Features] | None] = {}
    for name, graphs in (("model", without_edges), ("representations", list(federation.clients))):
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
    """Return the first federation's sent parameters, with zeros for those that are not sent."""
    count = len(simulation.federations[0])
    trained = {n: t[:count] for n, t in model_part(simulation.memory).items()}
    shared = [n for n in trained if simulation.method.shares(simulation.network, n)]
    if not shared:
        return None
    return {n: t if n in shared else torch.zeros_like(t) for n, t in trained.items()}


# The attack --------------------------------------------------------------------------------------


def draw_pairs(graph: Graph, seed: int, client: int) -> tuple[IntArray, BoolArray] | None:
    """Draw pairs of nodes, half of them edges; return them with a mask of the edges."""
    rng = generator(seed, f"link inference/{client}")
    edges = graph.edges[:, graph.edges[0] < graph.edges[1]]
    free = graph.num_nodes * (graph.num_nodes - 1) // 2 - edges.shape[1]
    count = min(edges.shape[1], free, MAX_EDGES)
    if count == 0:
        return None
    chosen = edges[:, rng.permutation(edges.shape[1])[:count]]
    others = new_pairs(edges, graph.num_nodes, count, rng)
    return np.concatenate([chosen, others], axis=1), np.arange(2 * count) < count


def attack(representation: Features, pairs: IntArray, linked: BoolArray) -> Attack:
    """Score pairs by cosine similarity and compare with the true edges."""
    scores = cosines(representation, pairs)
    guess = scores > two_means(scores)
    accuracy = float((guess == linked).mean())
    return Attack(area(scores, linked), accuracy, len(linked), chance_either_way(scores, linked))


def cosines(representation: Features, pairs: IntArray) -> FloatArray:
    """Return the cosine similarity of each pair of rows; zero if a row is zero."""
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
    """Return the threshold that splits values into two groups with the least within-group variance.

    This is exact, since all cuts of the sorted values are compared.

    >>> two_means(np.array([0.0, 0.1, 0.9, 1.0]))
    0.5
    """
    ordered = np.sort(values)
    below = np.arange(1, len(ordered))
    sums = np.cumsum(ordered)[:-1]
    # The within-group sum of squares is least where the sum of n · mean² over groups is largest.
    gain = sums**2 / below + (ordered.sum() - sums) ** 2 / (len(ordered) - below)
    cut = int(np.argmax(gain))
    return float((ordered[cut] + ordered[cut + 1]) / 2)


def area(scores: FloatArray, positive: BoolArray) -> float:
    """Return the area under the ROC curve; ties count half."""
    ranks = rankdata(scores)
    count = int(positive.sum())
    return float(
        (ranks[positive].sum() - count * (count + 1) / 2) / (count * (len(scores) - count))
    )


def chance_either_way(scores: FloatArray, positive: BoolArray) -> float:
    """Return the expected value of max(AUC, 1 - AUC) if labels are permuted at random.

    The AUC then has mean one half and the variance of a rank sum with ties (Mann and Whitney 1947).
    It is approximately normal, so its mean distance from one half is sqrt(2/pi) deviations.
    """
    total, count = len(scores), int(positive.sum())
    _, ties = np.unique(scores, return_counts=True)
    tied = float((ties.astype(np.float64) ** 3 - ties).sum()) / (total * (total - 1))
    variance = (total + 1 - tied) / (12 * count * (total - count))
    return 0.5 + float(np.sqrt(2 / np.pi * variance))


def mean(attacks: list[Attack | None], value: Callable[[Attack], float]) -> float | None:
    """Return the unweighted mean over clients; None if no client was attacked."""
    known = [value(found) for found in attacks if found is not None]
    return float(np.mean(known)) if known else None
