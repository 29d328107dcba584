"""Temperatures, thresholds and calibration errors against independent computations."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import f1_score, precision_recall_curve, precision_score, recall_score
from torch import Tensor
from torchmetrics.functional.classification import multiclass_calibration_error

from polyphily.errors import UserError
from polyphily.runs.decision import (
    DEFAULT,
    POOLED,
    TEMPERATURES,
    Decision,
    calibration_error,
    decide,
    judge,
    precision_recall,
    reliability,
    temperature,
)

CLASSES = ("no", "yes")
MANY = settings(max_examples=40, deadline=None)
seeds = st.integers(0, 10_000)


def nodes(
    seed: int, count: int = 200, classes: int = 2, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Logits of which the softmax at `scale` 1 is the distribution of the labels."""
    rng = np.random.default_rng(seed)
    logits = 1.5 * rng.standard_normal((count, classes))
    chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    labels = (rng.random((count, 1)) > chances.cumsum(axis=1)).sum(axis=1).clip(0, classes - 1)
    labels[:2] = (0, 1)
    return torch.from_numpy(scale * logits), torch.from_numpy(labels)


@pytest.mark.parametrize("scale", [0.2, 1.0, 3.0, 7.0])
@pytest.mark.parametrize("classes", [2, 5])
def test_the_temperature_undoes_a_scale(scale: float, classes: int) -> None:
    logits, labels = nodes(1, 20_000, classes, scale)
    assert temperature(logits, labels) == pytest.approx(scale, rel=0.05)


@MANY
@given(seeds, st.integers(2, 4), st.floats(0.1, 8))
def test_no_other_temperature_has_a_smaller_loss(seed: int, classes: int, scale: float) -> None:
    logits, labels = nodes(seed, 60, classes, scale)
    found = temperature(logits, labels)

    def loss(t: float) -> float:
        log = torch.log_softmax(logits / t, dim=1)
        return -float(log[torch.arange(len(labels)), labels].mean())

    assert TEMPERATURES[0] * 0.999 <= found <= TEMPERATURES[1] * 1.001
    tried = np.geomspace(*TEMPERATURES, 200)
    assert loss(found) <= min(loss(t) for t in [*tried, 1.0]) + 1e-9


def test_a_model_that_is_always_right_has_the_smallest_temperature() -> None:
    labels = torch.arange(40) % 2
    logits = torch.nn.functional.one_hot(labels, 2).double()
    assert temperature(logits, labels) == pytest.approx(TEMPERATURES[0], rel=1e-3)


@MANY
@given(seeds, st.integers(2, 6), st.integers(1, 20))
def test_the_calibration_error_is_that_of_torchmetrics(seed: int, classes: int, bins: int) -> None:
    logits, labels = nodes(seed, 150, classes, 2.0)
    chances = torch.softmax(logits, dim=1)
    wanted = multiclass_calibration_error(chances, labels, classes, n_bins=bins)
    assert calibration_error(chances, labels, bins) == pytest.approx(float(wanted), abs=1e-6)


def test_bins_of_confidence_by_hand() -> None:
    chances = torch.tensor([[0.9, 0.1], [0.7, 0.3], [0.2, 0.8]], dtype=torch.float64)
    hit = np.array([True, False, True])
    count, confidence, right = reliability(np.array([0.9, 0.7, 0.8]), hit, 4)
    assert count.tolist() == [0, 0, 1, 2]
    assert confidence.tolist() == pytest.approx([0, 0, 0.7, 0.85])
    assert right.tolist() == [0, 0, 0, 1]
    assert calibration_error(chances, torch.tensor([0, 1, 1]), 4) == pytest.approx(1.0 / 3)
    assert calibration_error(chances[:0], torch.tensor([])) is None


@MANY
@given(seeds)
def test_the_curve_is_scikit_learns(seed: int) -> None:
    rng = np.random.default_rng(seed)
    score, hit = rng.integers(0, 8, 40) / 8, rng.random(40) < 0.3
    hit[0] = True
    thresholds, precision, recall = precision_recall(score, hit)
    wanted = precision_recall_curve(hit, score)
    np.testing.assert_allclose(thresholds, wanted[2][::-1])
    np.testing.assert_allclose(precision, wanted[0][:-1][::-1])
    np.testing.assert_allclose(recall, wanted[1][:-1][::-1])


@MANY
@given(seeds, st.sampled_from(CLASSES))
def test_no_other_threshold_has_a_larger_f1(seed: int, positive: str) -> None:
    logits, labels = nodes(seed, 50)
    found = decide(logits, labels, CLASSES, positive=positive)
    at = CLASSES.index(positive)
    chance, hit = found.probabilities(logits)[:, at].numpy(), labels.numpy() == at
    assert found.threshold is not None
    best = f1_score(hit, chance >= found.threshold)
    assert best == pytest.approx(max(f1_score(hit, chance >= t) for t in chance))
    assert found.precision == pytest.approx(precision_score(hit, chance >= found.threshold))
    assert found.recall == pytest.approx(recall_score(hit, chance >= found.threshold))
    assert (found.positive, found.rule, found.source, found.nodes) == (positive, "f1", "own", 50)


@MANY
@given(seeds, st.sampled_from([0.3, 0.6, 0.9]))
def test_the_threshold_for_a_precision_has_the_largest_recall(seed: int, wanted: float) -> None:
    logits, labels = nodes(seed, 50)
    found = decide(logits, labels, CLASSES, rule=f"precision={wanted}")
    chance, hit = found.probabilities(logits)[:, 1].numpy(), labels.numpy() == 1
    able = [t for t in chance if precision_score(hit, chance >= t) >= wanted]
    if not able:
        assert found.rule.startswith(f"precision={wanted} (not reached: the largest precision is")
        assert found.precision == pytest.approx(
            max(precision_score(hit, chance >= t) for t in chance)
        )
        return
    assert found.rule == f"precision={wanted}"
    assert found.precision is not None
    assert found.precision >= wanted
    assert found.recall == pytest.approx(max(recall_score(hit, chance >= t) for t in able))


def test_a_threshold_can_be_given() -> None:
    logits, labels = nodes(3)
    assert decide(logits, labels, CLASSES, rule="0.25").threshold == 0.25
    assert decide(logits[:3], labels[:3], CLASSES, rule="0.25").threshold == 0.25
    with pytest.raises(UserError, match="--threshold-rule often"):
        decide(logits, labels, CLASSES, rule="often")


def test_many_classes_have_a_temperature_only() -> None:
    logits, labels = nodes(0, 300, 4, 3.0)
    found = decide(logits, labels, "abcd", source=POOLED)
    assert found.temperature == pytest.approx(3, rel=0.3)
    assert (found.positive, found.threshold, found.rule, found.precision) == (None, None, "", None)
    assert found.above(found.probabilities(logits), "abcd") is None
    assert found.ece_after is not None
    assert found.ece_before is not None
    assert found.ece_after < found.ece_before
    assert set(judge(found, logits, labels, "abcd")) == {"nodes", "ece_before", "ece_after"}


@pytest.mark.parametrize("count", [0, 1, 19])
def test_too_few_nodes_have_the_default(count: int) -> None:
    logits, labels = nodes(0)
    found = decide(logits[:count], labels[:count], CLASSES)
    assert found == Decision(positive="yes", threshold=0.5, nodes=count)
    assert found.source == DEFAULT
    assert decide(logits[:count], labels[:count], "abc") == Decision(nodes=count)


def test_nodes_of_one_class_have_the_default() -> None:
    logits, _ = nodes(0)
    found = decide(logits, torch.ones(len(logits), dtype=torch.int64), CLASSES)
    assert (found.temperature, found.threshold, found.source) == (1.0, 0.5, DEFAULT)


def test_scores_that_are_not_finite_are_left_out() -> None:
    logits, labels = nodes(0)
    broken = torch.cat([logits, torch.full((5, 2), math.nan)])
    assert decide(broken, torch.cat([labels, labels[:5]]), CLASSES) == decide(
        logits, labels, CLASSES
    )
    assert decide(broken[-5:], labels[:5], CLASSES).source == DEFAULT


def test_a_decision_survives_json() -> None:
    found = decide(*nodes(0), CLASSES, rule="precision=0.8")
    assert Decision.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert Decision.from_json({**found.to_json(), "later": 3}) == found


def test_probabilities_and_nodes_above_the_threshold() -> None:
    found = Decision(temperature=2.0, positive="no", threshold=0.7)
    logits = torch.tensor([[2.0, 0.0], [0.0, 2.0]])
    chances = found.probabilities(logits)
    torch.testing.assert_close(chances, torch.softmax(logits / 2, dim=1))
    assert found.above(chances, CLASSES).tolist() == [True, False]  # type: ignore[union-attr]


def test_a_decision_is_judged_on_other_nodes() -> None:
    found = Decision(positive="yes", threshold=0.5)
    logits = torch.tensor([[0.0, 1.0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.0]])
    judged = judge(found, logits, torch.tensor([1, 0, 1, 0]), CLASSES)
    assert (judged["precision"], judged["recall"], judged["f1"]) == (0.5, 0.5, 0.5)
    assert (judged["flagged"], judged["nodes"]) == (0.5, 4)
    assert judged["ece_before"] == judged["ece_after"]
    nothing = judge(found, logits[2:], torch.tensor([0, 0]), CLASSES)
    assert (nothing["precision"], nothing["recall"], nothing["flagged"]) == (None, None, 0.0)
