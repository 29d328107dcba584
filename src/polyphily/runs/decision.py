"""From class scores to decisions: temperature scaling and thresholds, chosen on validation nodes.

A temperature T divides the logits before the softmax (Guo et al., On Calibration of Modern Neural
Networks, ICML 2017). It changes how sure a model is, not which class it predicts. With two classes
a threshold on the probability of the positive class decides which nodes to act on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from polyphily.core.metrics import positive_index
from polyphily.core.settings import parse_threshold

BINS = 15  # of the expected calibration error
FEWEST = 20  # validation nodes for a decision of a client's own
TEMPERATURES = (0.05, 20.0)
OWN, POOLED, DEFAULT = "own", "pooled", "default"
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Decision:
    """How class scores become probabilities and, with two classes, decisions.

    Attributes:
        temperature: divides the logits before the softmax.
        positive: the name of the positive class of two; None with more classes.
        threshold: nodes whose probability of the positive class is at least this are positive.
        rule: how the threshold was chosen: "f1", "precision=0.9" or a number; "" without one.
        ece_before: expected calibration error on validation nodes at temperature 1.
        ece_after: the same at the chosen temperature.
        precision: of the positive class at the threshold, on validation nodes.
        recall: the same for the recall.
        nodes: the number of validation nodes that it was chosen on.
        source: whose validation nodes these were: "own", "pooled" (those of all clients), or
            "default" if there were too few.
    """

    temperature: float = 1.0
    positive: str | None = None
    threshold: float | None = None
    rule: str = ""
    ece_before: float | None = None
    ece_after: float | None = None
    precision: float | None = None
    recall: float | None = None
    nodes: int = 0
    source: str = DEFAULT

    def to_json(self) -> dict[str, Any]:
        """Return the decision as plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Decision:
        """Return the decision that `to_json` wrote; entries that are not known are ignored."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return calibrated probabilities of the classes, `[n, C]`."""
        return torch.softmax(logits / self.temperature, dim=1)

    def above(self, probabilities: Tensor, classes: Sequence[str]) -> Tensor | None:
        """Return which nodes are positive at the threshold, bool `[n]`; None without a threshold.

        Args:
            probabilities: those of `probabilities`, `[n, C]`.
            classes: the names of the classes, in the order of the columns.
        """
        if self.threshold is None or self.positive is None:
            return None
        return probabilities[:, list(classes).index(self.positive)] >= self.threshold


def decide(
    logits: Tensor,
    labels: Tensor,
    classes: Sequence[str],
    *,
    positive: str = "",
    rule: str = "f1",
    source: str = OWN,
) -> Decision:
    """Choose temperature and threshold on validation nodes.

    Args:
        logits: class scores of the validation nodes, `[n, C]`.
        labels: their classes, `[n]`.
        classes: the names of the classes.
        positive: the positive class of two; the second unless given.
        rule: how the threshold is chosen: "f1" (largest F1 score), "precision=0.9" (largest
            recall with at least this precision), or a number.
        source: whose nodes these are, for `Decision.source`.

    Returns:
        The decision. With fewer than 20 nodes, or with nodes of a single class, it is the default:
        temperature 1 and, with two classes, threshold 0.5.
    """
    fine = logits.isfinite().all(dim=1)  # a model that diverged may have others
    logits, labels = logits[fine], labels[fine]
    at = positive_index(classes, positive)
    name = None if at is None else classes[at]
    if not enough(labels):
        kind, value = parse_threshold(rule)
        usual = value if kind == "fixed" else 0.5
        return Decision(positive=name, threshold=None if at is None else usual, nodes=len(labels))
    logits = logits.detach().to("cpu", torch.float64)
    labels = labels.cpu()
    found = Decision(
        temperature=temperature(logits, labels), positive=name, nodes=len(labels), source=source
    )
    probabilities = found.probabilities(logits)
    found = replace(
        found,
        ece_before=calibration_error(logits.softmax(dim=1), labels),
        ece_after=calibration_error(probabilities, labels),
    )
    if at is None:
        return found
    hit = (labels == at).numpy()
    chosen, words = _threshold(probabilities[:, at].numpy(), hit, rule)
    precision, recall = _precision_recall(probabilities[:, at].numpy() >= chosen, hit)
    return replace(found, threshold=chosen, rule=words, precision=precision, recall=recall)


def enough(labels: Tensor) -> bool:
    """Return whether validation nodes with these labels can decide: 20 of at least two classes."""
    return len(labels) >= FEWEST and bool((labels != labels[0]).any())


def judge(
    decision: Decision, logits: Tensor, labels: Tensor, classes: Sequence[str]
) -> dict[str, Any]:
    """Return how a decision fares on other nodes, such as the test nodes.

    Returns:
        `nodes`, `ece_before` and `ece_after` (temperature 1 and the decision's) and, with a
        threshold, `precision`, `recall`, `f1` and `flagged` (the share of nodes above it).
        Entries that are undefined are None.
    """
    logits, labels = logits.detach().to("cpu", torch.float64), labels.cpu()
    probabilities = decision.probabilities(logits)
    found: dict[str, Any] = {
        "nodes": len(labels),
        "ece_before": calibration_error(logits.softmax(dim=1), labels),
        "ece_after": calibration_error(probabilities, labels),
    }
    above = decision.above(probabilities, classes)
    if above is None or decision.positive is None:
        return found
    hit = (labels == list(classes).index(decision.positive)).numpy()
    precision, recall = _precision_recall(above.numpy(), hit)
    both = [value for value in (precision, recall) if value is not None]
    f1 = 2 * math.prod(both) / sum(both) if len(both) == 2 and sum(both) > 0 else None
    flagged = float(above.double().mean()) if len(above) else None
    return {**found, "precision": precision, "recall": recall, "f1": f1, "flagged": flagged}


def temperature(logits: Tensor, labels: Tensor) -> float:
    """Return the temperature with the smallest negative log-likelihood, from 0.05 to 20.

    The likelihood is concave in 1/T, so that a bounded scalar search finds the optimum.

    Args:
        logits: class scores in float64, `[n, C]`.
        labels: classes, `[n]`.
    """

    def loss(log_temperature: float) -> float:
        return float(torch.nn.functional.cross_entropy(logits / math.exp(log_temperature), labels))

    low, high = (math.log(t) for t in TEMPERATURES)
    found = minimize_scalar(loss, bounds=(low, high), method="bounded", options={"xatol": 1e-6})
    best = min((float(found.x), 0.0), key=loss)  # never worse than no temperature
    return math.exp(best)


def calibration_error(probabilities: Tensor, labels: Tensor, bins: int = BINS) -> float | None:
    """Return the expected calibration error: the mean gap between confidence and accuracy.

    Nodes are grouped by the probability of their predicted class into bins of equal width. The
    gaps of the bins are weighted by their numbers of nodes. None if there are no nodes.
    """
    if not len(labels):
        return None
    confidence, predicted = probabilities.double().max(dim=1)
    count, sure, right = reliability(confidence.numpy(), (predicted == labels).numpy(), bins)
    return float((count * np.abs(sure - right)).sum() / count.sum())


def reliability(
    probability: FloatArray, hit: npt.NDArray[np.bool_], bins: int = BINS
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the number of nodes, the mean probability and the share of hits of each bin.

    Bins of probability have equal width and contain their upper ends. The mean and the share of an
    empty bin are 0.

    Args:
        probability: of each node.
        hit: whether what is this probable is so.
        bins: the number of bins.
    """
    place = np.clip(np.ceil(probability * bins).astype(np.int64) - 1, 0, bins - 1)
    count = np.bincount(place, minlength=bins).astype(np.float64)
    safe = np.maximum(count, 1)
    return (
        count,
        np.bincount(place, probability, bins) / safe,
        np.bincount(place, hit.astype(np.float64), bins) / safe,
    )


def precision_recall(
    score: FloatArray, hit: npt.NDArray[np.bool_]
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return thresholds from the highest down, and the precision and recall at each.

    Args:
        score: of the positive class, `[n]`.
        hit: which nodes are positive; at least one must be.
    """
    order = np.argsort(-score, kind="stable")
    score, hit = score[order], hit[order]
    last = np.append(score[1:] != score[:-1], True)  # the last node of each score
    found = np.cumsum(hit)[last]
    return score[last], found / (np.flatnonzero(last) + 1), found / hit.sum()


def _threshold(score: FloatArray, hit: npt.NDArray[np.bool_], rule: str) -> tuple[float, str]:
    """Return a threshold, and the rule in words if it could not be kept."""
    kind, value = parse_threshold(rule)
    if kind == "fixed":
        return value, rule
    thresholds, precision, recall = precision_recall(score, hit)
    if kind == "f1":
        best = int(np.argmax(2 * precision * recall / np.maximum(precision + recall, 1e-300)))
    else:
        fit = np.flatnonzero(precision >= value)
        best = int(fit[-1]) if len(fit) else int(np.argmax(precision))
        if not len(fit):
            rule = f"{rule} (not reached: the largest precision is {precision[best]:.3g})"
    # Between two scores, so that a rounding error does not move a node across.
    below = thresholds[best + 1] if best + 1 < len(thresholds) else 0.0
    return float((thresholds[best] + below) / 2), rule


def _precision_recall(
    above: npt.NDArray[np.bool_], hit: npt.NDArray[np.bool_]
) -> tuple[float | None, float | None]:
    both = int((above & hit).sum())
    precision = both / int(above.sum()) if above.any() else None
    return precision, both / int(hit.sum()) if hit.any() else None
