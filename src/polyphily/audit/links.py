"""The link inference attack (FedHERO, Section 4.7): scores of pairs of nodes against true edges.

FedHERO refers to Gong and Liu (2018) and gives no procedure. Ours draws as many edges as pairs of
nodes without an edge, at random, and scores each pair, most often by the cosine of its two nodes'
representations. It reports the area under the ROC curve (AUC), and the accuracy of a threshold that
two-means finds without knowing any edge. Chance level is one half for both.

`polyphily.audit.attackers` says where the scores come from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp
from scipy.stats import chi2, rankdata

from polyphily.graphs.graph import BoolArray, Features, Graph, IntArray
from polyphily.graphs.noise import new_pairs
from polyphily.graphs.random import generator

FloatArray = npt.NDArray[np.float64]
MAX_EDGES = 50_000  # maximum number of edges per client
CHANCE = 0.5
CONFIDENCE, MATERIAL = 0.95, 0.005
HALF_NORMAL_MEAN = math.sqrt(2 / math.pi)  # E|z| of a standard normal z


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

    @property
    def deviations(self) -> float:
        """The distance of the AUC from one half, in standard deviations of uninformative scores."""
        deviation = (self.chance_either_way - CHANCE) / HALF_NORMAL_MEAN
        return (self.auc - CHANCE) / deviation if deviation else 0.0


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


def attack(scores: FloatArray, linked: BoolArray) -> Attack:
    """Compare the scores of pairs with the true edges."""
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
    Scores that are all equal have no deviation.
    """
    total, count = len(scores), int(positive.sum())
    _, ties = np.unique(scores, return_counts=True)
    tied = float((ties.astype(np.float64) ** 3 - ties).sum()) / (total * (total - 1))
    variance = max(total + 1 - tied, 0.0) / (12 * count * (total - count))
    return CHANCE + HALF_NORMAL_MEAN * math.sqrt(variance)


def at_chance(attacks: Sequence[Attack | None]) -> bool:
    """Return whether all clients' AUCs together are those of scores that say nothing, or almost.

    The sum of their squared deviations is compared with the quantile of its distribution for such
    scores (chi-squared). Clients whose AUCs lie on different sides of one half do not cancel. With
    many pairs tiny differences are significant, so less than `MATERIAL` counts as chance as well.
    """
    known = [found for found in attacks if found is not None]
    if not known:
        return False
    excess = np.mean([found.either_way - found.chance_either_way for found in known])
    squares = sum(found.deviations**2 for found in known)
    return bool(squares <= chi2.ppf(CONFIDENCE, len(known)) or excess < MATERIAL)


def mean(attacks: Sequence[Attack | None], value: Callable[[Attack], float]) -> float | None:
    """Return the unweighted mean over clients; None if no client was attacked."""
    known = [value(found) for found in attacks if found is not None]
    return float(np.mean(known)) if known else None
