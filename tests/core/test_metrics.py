"""Scores of all clients at once against scikit-learn's, client by client."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, f1_score, roc_auc_score
from torch import Tensor

from builders import CPU, mask_at, random_graphs
from polyphily.core.metrics import (
    METRICS,
    SPLITS,
    Evaluator,
    Predictions,
    auc,
    check_metric,
    check_score_axis,
    describe,
    from_confusion,
    register_metric,
)
from polyphily.errors import UserError
from polyphily.graphs.graph import UNLABELLED, Graph, Masks
from polyphily.nn.segments import Segments

MANY = settings(max_examples=50, deadline=None)
sizes = st.lists(st.integers(1, 14), min_size=1, max_size=5)
seeds = st.integers(0, 10_000)


def coarse_logits(nodes: int, classes: int, seed: int) -> Tensor:
    """Logits with many ties between nodes, but none within a node."""
    rng = np.random.default_rng(seed)
    logits = rng.integers(0, 4, (nodes, classes)) + np.arange(classes) / 64
    return torch.from_numpy(logits)


def expected_scores(graph: Graph, logits: Tensor, split: str, classes: int) -> list[float]:
    nodes = np.flatnonzero(getattr(graph.masks, split) & (graph.labels != UNLABELLED))
    if not len(nodes):
        return [math.nan] * len(METRICS)
    true, scores = graph.labels[nodes], logits.numpy()[nodes]
    predicted = scores.argmax(axis=1)
    area = math.nan
    if classes == 2 and len(set(true)) == 2:
        area = roc_auc_score(true, scores[:, 1] - scores[:, 0])
    return [
        accuracy_score(true, predicted),
        f1_score(true, predicted, average="macro"),
        f1_score(true, predicted, average="weighted"),
        area,
    ]


@MANY
@given(sizes, st.integers(2, 5), seeds, st.sampled_from([0.0, 0.4]))
def test_scores_are_scikit_learns_for_every_client(
    sizes: list[int], classes: int, seed: int, unlabelled: float
) -> None:
    graphs = random_graphs([*sizes, 20], seed=seed, classes=classes, unlabelled=unlabelled)
    starts = np.cumsum([0, *[graph.num_nodes for graph in graphs]])
    logits = coarse_logits(starts[-1], classes, seed)
    evaluator = Evaluator(graphs, classes, CPU)
    assume(evaluator.counts.any(axis=0).all())  # see test_no_client_with_validation_nodes
    found = evaluator.scores(logits)
    assert found.shape == (len(graphs), len(SPLITS), len(METRICS))
    for k, graph in enumerate(graphs):
        own = logits[starts[k] : starts[k + 1]]
        for s, split in enumerate(SPLITS):
            wanted = expected_scores(graph, own, split, classes)
            np.testing.assert_allclose(found[k, s], wanted, rtol=1e-12, err_msg=f"{k} {split}")


@MANY
@given(sizes, seeds)
def test_counts_are_the_nodes_scored(sizes: list[int], seed: int) -> None:
    graphs = random_graphs(sizes, seed=seed, unlabelled=0.3)
    counts = Evaluator(graphs, 3, CPU).counts
    for k, graph in enumerate(graphs):
        labelled = graph.labels != UNLABELLED
        assert counts[k, 0] == (graph.masks.val & labelled).sum()
        assert counts[k, 1] == (graph.masks.test & labelled).sum()


def test_train_nodes_and_nodes_in_no_mask_do_not_count() -> None:
    graphs = random_graphs([12, 9])
    logits = coarse_logits(21, 3, 0)
    scored = np.concatenate([g.masks.val | g.masks.test for g in graphs])
    other = torch.where(torch.from_numpy(scored).view(-1, 1), logits, -logits)
    evaluator = Evaluator(graphs, 3, CPU)
    assert not torch.equal(other, logits)
    np.testing.assert_array_equal(evaluator.scores(other), evaluator.scores(logits))
    assert not np.array_equal(evaluator.scores(-logits), evaluator.scores(logits), equal_nan=True)


def with_split(graph: Graph, val: list[int], test: list[int]) -> Graph:
    rest = mask_at(graph.num_nodes, [0])
    masks = Masks(rest, mask_at(graph.num_nodes, val), mask_at(graph.num_nodes, test))
    return replace(graph, masks=masks)


def test_unlabelled_nodes_in_a_mask_do_not_count() -> None:
    (graph,) = random_graphs([20], unlabelled=0.4)
    unlabelled = graph.labels == UNLABELLED
    assert unlabelled.any()
    wider = replace(graph, masks=replace(graph.masks, val=graph.masks.val | unlabelled))
    logits = coarse_logits(20, 3, 0)
    plain, wide = Evaluator([graph], 3, CPU), Evaluator([wider], 3, CPU)
    np.testing.assert_array_equal(wide.scores(logits), plain.scores(logits))
    np.testing.assert_array_equal(wide.counts, plain.counts)


@pytest.mark.parametrize("classes", [2, 3])
def test_a_client_without_validation_nodes_has_no_validation_scores(classes: int) -> None:
    first, second = random_graphs([6, 7], classes=classes)
    graphs = [with_split(first, [], [1, 2, 3]), with_split(second, [1, 2], [3, 4])]
    scores = Evaluator(graphs, classes, CPU).scores(coarse_logits(13, classes, 1))
    assert scores[0, 0].isnan().all()
    assert not scores[0, 1, :3].isnan().any()
    assert not scores[1, :, :3].isnan().any()


@pytest.mark.parametrize("classes", [2, 3])
def test_no_client_with_validation_nodes(classes: int) -> None:
    """As after `--split 0.6,0,0.4`."""
    graphs = [with_split(g, [], [1, 2, 3]) for g in random_graphs([6, 7], classes=classes)]
    scores = Evaluator(graphs, classes, CPU).scores(coarse_logits(13, classes, 1))
    assert scores[:, 0].isnan().all()
    assert not scores[:, 1, :3].isnan().any()


def test_the_area_is_only_for_two_classes() -> None:
    graphs = random_graphs([20, 20], classes=3)
    scores = Evaluator(graphs, 3, CPU).scores(coarse_logits(40, 3, 0))
    assert scores[:, :, METRICS.index("auc")].isnan().all()


# Metrics of others -----------------------------------------------------------------------------


def balanced_accuracy(predictions: Predictions) -> Tensor:
    recall = predictions.confusion.diagonal(dim1=1, dim2=2) / predictions.confusion.sum(dim=2)
    return recall.nanmean(dim=1).float()


def test_another_metric_is_scored_after_our_own() -> None:
    graphs = random_graphs([20, 30])
    logits = coarse_logits(50, 3, 0)
    before = Evaluator(graphs, 3, CPU).scores(logits)
    with METRICS.restored():
        register_metric("Balanced_Accuracy", title="balanced accuracy")(balanced_accuracy)
        register_metric("a_first", classes=2)(balanced_accuracy)
        assert list(METRICS)[4:] == ["a_first", "balanced_accuracy"]
        assert len(METRICS) == 6
        assert METRICS.index("balanced_accuracy") == 5
        scores = Evaluator(graphs, 3, CPU).scores(logits)
        found = describe(scores[:, 1].numpy(), np.ones(2))
    assert scores.dtype == torch.float64
    torch.testing.assert_close(scores[:, :, :4], before, rtol=0, atol=0, equal_nan=True)
    assert scores[:, :, 4].isnan().all()  # it needs two classes
    assert "a_first" not in found
    nodes = np.flatnonzero(graphs[0].masks.test)
    labels, predicted = graphs[0].labels[nodes], logits[nodes].argmax(dim=1).numpy()
    recalls = [float((predicted[labels == c] == c).mean()) for c in np.unique(labels)]
    assert found["balanced_accuracy_per_client"][0] == pytest.approx(np.mean(recalls), rel=1e-6)


def test_the_confusion_matrix_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(
        "polyphily.core.metrics.from_confusion",
        lambda confusion: calls.append(confusion) or from_confusion(confusion),
    )
    Evaluator(random_graphs([20, 30]), 3, CPU).scores(coarse_logits(50, 3, 0))
    assert len(calls) == len(SPLITS)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda predictions: predictions.labels.double(), "returned shape ("),
        (lambda predictions: predictions.averages[0].mean(), "returned shape ()"),
        (lambda predictions: 0.5, "returned 0.5"),
    ],
)
def test_a_metric_must_return_one_value_per_client(wrong: object, words: str) -> None:
    with METRICS.restored():
        register_metric("wrong")(wrong)  # type: ignore[arg-type]
        evaluator = Evaluator(random_graphs([20, 30]), 3, CPU)
        with pytest.raises(UserError, match="metric 'wrong'") as caught:
            evaluator.scores(coarse_logits(50, 3, 0))
    assert words in str(caught.value)
    assert "one value per client, of shape (2,)" in str(caught.value)


def test_titles_are_for_reports() -> None:
    titles = [metric.title for metric in METRICS.values()]
    assert titles == ["accuracy", "macro F1", "weighted F1", "AUC"]
    assert all(metric.selects for metric in METRICS.values())


def test_a_metric_is_refused_for_another_number_of_classes() -> None:
    check_metric("auc", 2, "cora")
    check_metric("f1_macro", 7, "cora")
    with pytest.raises(UserError, match=r"^metric auc needs two classes, cora has 7$"):
        check_metric("auc", 7, "cora")
    with METRICS.restored():
        register_metric("triple", classes=3)(balanced_accuracy)
        with pytest.raises(UserError, match=r"^metric triple needs 3 classes, cora has 7$"):
            check_metric("triple", 7, "cora")


def test_stored_scores_of_other_metrics_are_refused() -> None:
    check_score_axis(len(METRICS), "runs/a")
    with pytest.raises(UserError, match=r"^runs/a has scores of 5 metrics, but 4 are registered"):
        check_score_axis(5, "runs/a")


# The area under the curve ----------------------------------------------------------------------

scored = st.lists(
    st.lists(st.tuples(st.integers(-2, 3), st.integers(0, 1)), max_size=12), min_size=1, max_size=5
).filter(any)


def areas(clients: list[list[tuple[int, int]]]) -> Tensor:
    flat = [pair for client in clients for pair in client]
    score = torch.tensor([float(s) for s, _ in flat], dtype=torch.float64)
    label = torch.tensor([y for _, y in flat])
    return auc(score, label, Segments(tuple(map(len, clients)), CPU))


@MANY
@given(scored)
def test_the_area_counts_pairs_with_ties_for_half(clients: list[list[tuple[int, int]]]) -> None:
    found = areas(clients)
    for k, client in enumerate(clients):
        above = [s for s, y in client if y == 1]
        below = [s for s, y in client if y == 0]
        if not above or not below:
            assert math.isnan(found[k])
            continue
        wins = sum((a > b) + (a == b) / 2 for a in above for b in below)
        assert float(found[k]) == pytest.approx(wins / (len(above) * len(below)), rel=1e-12)
        assert float(found[k]) == pytest.approx(
            roc_auc_score([y for _, y in client], [s for s, _ in client]), rel=1e-12
        )


@MANY
@given(scored)
def test_the_area_of_a_client_is_its_own(clients: list[list[tuple[int, int]]]) -> None:
    together, backwards = areas(clients), areas(clients[::-1])
    torch.testing.assert_close(backwards.flip(0), together, equal_nan=True, rtol=1e-12, atol=0)


def test_the_area_of_many_nodes_is_scikit_learns() -> None:
    rng = np.random.default_rng(0)
    sizes = (30_000, 5_000, 1)
    score, label = rng.standard_normal(sum(sizes)).round(3), rng.integers(0, 2, sum(sizes))
    score += label / 2
    found = auc(torch.from_numpy(score), torch.from_numpy(label), Segments(sizes, CPU))
    for k, (a, b) in enumerate([(0, 30_000), (30_000, 35_000)]):
        assert float(found[k]) == pytest.approx(roc_auc_score(label[a:b], score[a:b]), rel=1e-12)
    assert math.isnan(found[2])


# From confusion matrices -----------------------------------------------------------------------


def test_scores_from_a_confusion_matrix_by_hand() -> None:
    """Two of three right; class 2 occurs nowhere and is left out of the macro mean."""
    confusion = torch.tensor([[[1.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]])
    accuracy, macro, weighted = (float(value) for value in from_confusion(confusion))
    assert accuracy == pytest.approx(2 / 3)
    assert macro == pytest.approx(2 / 3)  # both classes: 2·1/(2+1)
    assert weighted == pytest.approx(2 / 3)


def test_an_empty_confusion_matrix_has_no_scores() -> None:
    assert all(value.isnan().all() for value in from_confusion(torch.zeros(2, 3, 3)))


# What the summary says -------------------------------------------------------------------------


def test_means_are_weighted_by_nodes_and_plain() -> None:
    nan = math.nan
    scores = np.array([[0.5, 0.4, 0.3, nan], [1.0, 0.8, 0.6, 0.9], [nan, nan, nan, nan]])
    found = describe(scores, np.array([30.0, 10.0, 0.0]))
    assert found["accuracy"] == pytest.approx((0.5 * 30 + 1.0 * 10) / 40)
    assert found["accuracy_client_mean"] == pytest.approx(0.75)
    assert found["accuracy_per_client"] == [0.5, 1.0, None]
    assert found["f1_macro"] == pytest.approx((0.4 * 30 + 0.8 * 10) / 40)
    assert found["f1_weighted_client_mean"] == pytest.approx(0.45)
    assert found["auc"] == found["auc_client_mean"] == pytest.approx(0.9)
    assert found["auc_per_client"] == [None, 0.9, None]


@MANY
@given(st.integers(1, 6), seeds)
def test_means_lie_between_the_clients_and_agree_for_equal_counts(clients: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.random((clients, len(METRICS)))
    found = describe(scores, rng.integers(1, 50, clients).astype(float))
    level = describe(scores, np.full(clients, 7.0))
    for column, metric in enumerate(METRICS):
        values = scores[:, column]
        assert values.min() - 1e-12 <= found[metric] <= values.max() + 1e-12
        assert found[f"{metric}_client_mean"] == pytest.approx(values.mean())
        assert found[f"{metric}_per_client"] == values.tolist()
        assert level[metric] == pytest.approx(level[f"{metric}_client_mean"])


def test_weights_follow_the_client_whose_score_is_missing() -> None:
    scores = np.array([[math.nan] * 4, [0.2] * 4, [0.8] * 4])
    assert describe(scores, np.array([5.0, 1.0, 3.0]))["accuracy"] == pytest.approx(0.65)


def test_nothing_known_is_null_and_the_area_is_left_out() -> None:
    found = describe(np.full((2, len(METRICS)), math.nan), np.zeros(2))
    assert found["accuracy"] is None
    assert found["accuracy_client_mean"] is None
    assert not any(name.startswith("auc") for name in found)


def test_nothing_known_is_a_null_for_every_client() -> None:
    found = describe(np.full((2, len(METRICS)), math.nan), np.zeros(2))
    assert found["accuracy_per_client"] == [None, None]


def test_the_area_is_left_out_where_there_are_more_classes() -> None:
    scores = np.array([[0.5, 0.5, 0.5, math.nan]])
    found = describe(scores, np.ones(1))
    assert "auc" not in found
    assert found["accuracy"] == 0.5
