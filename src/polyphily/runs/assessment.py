"""What the best models are good for: decisions, warnings and curves of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from polyphily.core.metrics import METRICS, Predictions, positive_index
from polyphily.core.settings import Settings
from polyphily.graphs.imbalance import train_counts
from polyphily.graphs.loading import Federation
from polyphily.runs.decision import (
    POOLED,
    Decision,
    decide,
    enough,
    judge,
    precision_recall,
    reliability,
)

POINTS = 200  # of a curve, at most
CLIENT_POINTS = 50
CLIENT_CURVES = 30  # clients with a curve of their own, at most
LOPSIDED = 1 / 3  # share of train labels below which the class that is not positive is the rarer


class Scored(NamedTuple):
    """Nodes of one client with their class scores and labels, on the CPU."""

    logits: Tensor
    labels: Tensor

    def finite(self) -> Scored:
        """Return the nodes whose scores are finite; a model that diverged may have others."""
        fine = self.logits.isfinite().all(dim=1)
        return Scored(self.logits[fine], self.labels[fine])


def by_client(predictions: Predictions) -> list[Scored]:
    """Divide scored nodes by client."""
    sizes = list(predictions.segments.sizes)
    logits, labels = predictions.logits.detach().cpu(), predictions.labels.cpu()
    return [
        Scored(*both)
        for both in zip(torch.split(logits, sizes), torch.split(labels, sizes), strict=True)
    ]


def pooled(clients: Sequence[Scored]) -> Scored:
    """Return the nodes of all clients together."""
    return Scored(torch.cat([c.logits for c in clients]), torch.cat([c.labels for c in clients]))


@dataclass(frozen=True)
class Assessment:
    """What the models of the best round of one federation are good for.

    Attributes:
        classes: the names of the classes.
        names: the names of the clients.
        together: the decision for a global model, chosen on the validation nodes of all clients.
        clients: the decision of each client; the common one if it has too few validation nodes.
        test: the test nodes of each client.
    """

    classes: tuple[str, ...]
    names: tuple[str, ...]
    together: Decision
    clients: tuple[Decision, ...]
    test: tuple[Scored, ...]

    @classmethod
    def of(
        cls, federation: Federation, val: Sequence[Scored], test: Sequence[Scored], how: Settings
    ) -> Assessment:
        """Choose the decisions of a federation on validation nodes.

        Args:
            federation: the data.
            val: the validation nodes of each client.
            test: the test nodes of each client.
            how: with the positive class and the rule for thresholds.
        """
        val, test = ([nodes.finite() for nodes in split] for split in (val, test))
        classes, positive, rule = federation.classes, how.positive, how.threshold_rule
        everyone = pooled(val)
        together = decide(*everyone, classes, positive=positive, rule=rule, source=POOLED)
        clients = tuple(
            decide(*own, classes, positive=positive, rule=rule) if enough(own.labels) else together
            for own in val
        )
        names = tuple(graph.name for graph in federation.clients)
        return cls(classes, names, together, clients, tuple(test))

    def summary(self) -> dict[str, Any]:
        """Return the section `decision` of a summary."""
        return {
            "pooled": _with_test(self.together, pooled(self.test), self.classes),
            "per_client": [
                {"client": name, **_with_test(own, nodes, self.classes)}
                for name, own, nodes in zip(self.names, self.clients, self.test, strict=True)
            ],
        }

    def never_predicted(self) -> dict[str, int]:
        """Return classes that no test node is predicted to have, and how many test nodes do."""
        nodes = pooled(self.test)
        true = torch.bincount(nodes.labels, minlength=len(self.classes)).tolist()
        predicted = nodes.logits.argmax(dim=1).bincount(minlength=len(self.classes)).tolist()
        both = zip(self.classes, true, predicted, strict=True)
        return {name: count for name, count, found in both if count and not found}

    def curves(self) -> dict[str, Any]:
        """Return the curves of the report, on test nodes.

        `reliability` has for each bin of probability the number of nodes, the mean probability and
        the share of nodes of which it is true, at temperature 1 (`before`) and with the decision's
        (`after`). The probability is that of the class `of` or, with more than two classes, that of
        the predicted class. With two classes, `precision_recall` has points `[recall, precision]`
        of all test nodes, and of each client.
        """
        everyone = pooled(self.test)
        if not len(everyone.labels):
            return {}
        at = positive_index(self.classes, self.together.positive or "")
        logits = everyone.logits.double()
        before, after = torch.softmax(logits, dim=1), self.together.probabilities(logits)
        found: dict[str, Any] = {
            "reliability": {
                "of": None if at is None else self.classes[at],
                "before": _bins(before, everyone.labels, at),
                "after": _bins(after, everyone.labels, at),
            }
        }
        if at is None or not bool((everyone.labels == at).any()):
            return found
        shown = [
            {"client": name, "points": points}
            for name, nodes in zip(self.names, self.test, strict=True)
            if (points := _curve(nodes, at, CLIENT_POINTS))
        ]
        share = float((everyone.labels == at).double().mean())
        found["precision_recall"] = {
            "positive": self.classes[at],
            "share": round(share, 6),
            "pooled": _curve(everyone, at, POINTS),
            "clients": shown[:CLIENT_CURVES],
            "decision": judge(self.together, *everyone, self.classes),
        }
        return found


def class_warnings(
    federations: Sequence[Federation], settings: Settings, assessed: Sequence[Assessment]
) -> list[str]:
    """Return notes on classes: never predicted, or a positive class that is not the rare one."""
    first = federations[0]
    notes = [first.metric_reason] if first.metric_reason and settings.metric == first.metric else []
    missed: dict[str, list[int]] = {}
    for found in assessed:
        for name, count in found.never_predicted().items():
            missed.setdefault(name, []).append(count)
    for name, counts in missed.items():
        seeds = f" with {len(counts)} of {len(assessed)} seeds" if len(assessed) > 1 else ""
        notes.append(
            f"'{name}' is never predicted at the best round{seeds}, but {max(counts)} test nodes "
            "have it (--class-weights balanced may help)"
        )
    if not settings.positive and len(first.classes) == 2:
        counts = train_counts(first.clients, 2).sum(axis=0)
        share = counts[0] / counts.sum()
        if share < LOPSIDED:
            notes.append(
                f"the positive class is '{first.classes[1]}', which has {100 * (1 - share):.1f} % "
                f"of the train labels: --positive {first.classes[0]} scores the rarer one"
            )
    return notes


def below_baseline(
    scores: Sequence[Mapping[str, Any]], baselines: Sequence[Mapping[str, Any]], metric: str
) -> str:
    """Return a note if the test scores of a run do not beat the trivial predictor's.

    Args:
        scores: the test scores of each seed.
        baselines: the same of the trivial predictor.
        metric: the metric that selects.
    """
    pairs = [(s.get(metric), b.get(metric)) for s, b in zip(scores, baselines, strict=True)]
    known = [(own, trivial) for own, trivial in pairs if own is not None and trivial is not None]
    lost = [own <= trivial for own, trivial in known]
    if not any(lost):
        return ""
    key = f"{metric}_per_client"
    clients = [
        own <= trivial
        for s, b in zip(scores, baselines, strict=True)
        for own, trivial in zip(s.get(key, []), b.get(key, []), strict=False)
        if own is not None and trivial is not None
    ]
    own, trivial = (float(np.mean(values)) for values in zip(*known, strict=True))
    seeds = f" in {sum(lost)} of {len(lost)} seeds" if len(lost) > 1 else ""
    return (
        f"no better than the {baseline_name(metric)}{seeds}: test {metric} {100 * own:.2f} %, "
        f"{baseline_name(metric)} {100 * trivial:.2f} %; {sum(clients)} of {len(clients)} clients "
        "do not beat their own"
    )


def baseline_name(metric: str) -> str:
    """Return what the trivial predictor is called beside a metric."""
    return "random ranking" if METRICS.find(metric).ranks else "majority class"


def _with_test(decision: Decision, test: Scored, classes: Sequence[str]) -> dict[str, Any]:
    return {**decision.to_json(), "test": judge(decision, *test, classes)}


def _curve(nodes: Scored, at: int, points: int) -> list[list[float]]:
    """Return points `[recall, precision]` of a precision-recall curve; none without positives."""
    hit = (nodes.labels == at).numpy()
    if not hit.any():
        return []
    logits = nodes.logits.double().numpy()
    _, precision, recall = precision_recall(logits[:, at] - logits[:, 1 - at], hit)
    found = np.flatnonzero(np.diff(recall, prepend=0) > 0)  # thresholds that find another one
    kept = found[np.unique(np.linspace(0, len(found) - 1, points).round().astype(np.int64))]
    return [[round(float(recall[i]), 4), round(float(precision[i]), 4)] for i in kept]


def _bins(probabilities: Tensor, labels: Tensor, at: int | None) -> list[list[float]]:
    """Return number, mean probability and share of hits of each bin."""
    if at is None:
        confidence, predicted = probabilities.max(dim=1)
        hit = predicted == labels
    else:
        confidence, hit = probabilities[:, at], labels == at
    columns = reliability(confidence.numpy(), hit.numpy())
    return [[round(float(value), 4) for value in row] for row in zip(*columns, strict=True)]
