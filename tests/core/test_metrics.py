"""Scores of all clients at once against scikit-learn's and torchmetrics', client by client."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sklearn.metrics import (
    accuracy_score,
    average_precision_score,
    f1_score,
    recall_score,
    roc_auc_score,
)
from torch import Tensor
from torchmetrics.functional.classification import (
    binary_average_precision,
    binary_recall_at_fixed_precision,
    multiclass_auroc,
    multiclass_average_precision,
)

from builders import CPU, mask_at, random_graphs
from polyphily.core.metrics import (
    METRICS,
    SPLITS,
    Evaluator,
    Predictions,
    align_scores,
    auc,
    check_metric,
    describe,
    from_confusion,
    positive_index,
    register_metric,
    score_axis,
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


def expected_scores(
    graph: Graph, logits: Tensor, split: str, classes: int, positive: int = 1
) -> list[float]:
    nodes = np.flatnonzero(getattr(graph.masks, split) & (graph.labels != UNLABELLED))
    if not len(nodes):
        return [math.nan] * len(METRICS)
    true, scores = graph.labels[nodes], logits.numpy()[nodes]
    predicted, hit = scores.argmax(axis=1), graph.labels[nodes] == positive
    macro = f1_score(true, predicted, average="macro")
    area = precision = recall = math.nan
    single = macro if classes > 2 else math.nan
    if classes == 2:
        score = scores[:, positive] - scores[:, 1 - positive]
        if hit.any():
            precision = average_precision_score(hit, score)
            recall = largest_recall(hit, score, 0.9)
            single = f1_score(true, predicted, pos_label=positive)
        if hit.any() and not hit.all():
            area = roc_auc_score(hit, score)
    present = np.unique(true)
    return [
        accuracy_score(true, predicted),
        macro,
        f1_score(true, predicted, average="weighted"),
        area,
        precision,
        single,
        recall_score(true, predicted, average="macro", labels=present),
        recall,
    ]


def largest_recall(hit: np.ndarray, score: np.ndarray, precision: float) -> float:
    """By trying every threshold."""
    found = [0.0]
    for threshold in set(score.tolist()):
        above = score >= threshold
        if hit[above].mean() >= precision:
            found.append(hit[above].sum() / hit.sum())
    return max(found)


@MANY
@given(sizes, st.integers(2, 5), seeds, st.sampled_from([0.0, 0.4]), st.integers(0, 1))
def test_scores_are_scikit_learns_for_every_client(
    sizes: list[int], classes: int, seed: int, unlabelled: float, positive: int
) -> None:
    graphs = random_graphs([*sizes, 20], seed=seed, classes=classes, unlabelled=unlabelled)
    starts = np.cumsum([0, *[graph.num_nodes for graph in graphs]])
    logits = coarse_logits(starts[-1], classes, seed)
    evaluator = Evaluator(graphs, classes, CPU, positive=positive)
    assume(evaluator.counts.any(axis=0).all())  # see test_no_client_with_validation_nodes
    found = evaluator.scores(logits)
    assert found.shape == (len(graphs), len(SPLITS), len(METRICS))
    for k, graph in enumerate(graphs):
        own = logits[starts[k] : starts[k + 1]]
        for s, split in enumerate(SPLITS):
            wanted = expected_scores(graph, own, split, classes, positive)
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


RANKING = ["auc", "auprc", "recall_at_precision_0.9"]


def test_many_classes_are_ranked_only_if_such_a_metric_selects() -> None:
    graphs = random_graphs([20, 20], classes=3)
    logits = coarse_logits(40, 3, 0)
    columns = [METRICS.index(name) for name in RANKING]
    assert [METRICS[name].ranks for name in METRICS] == [name in RANKING for name in METRICS]
    assert Evaluator(graphs, 3, CPU).scores(logits)[:, :, columns].isnan().all()
    for metric in RANKING:
        scores = Evaluator(graphs, 3, CPU, metric).scores(logits)
        assert not scores[:, 1, columns].isnan().any()


@MANY
@given(sizes, st.integers(3, 5), seeds)
def test_rankings_of_many_classes_are_one_against_the_rest(
    sizes: list[int], classes: int, seed: int
) -> None:
    graphs = random_graphs([*sizes, 30], seed=seed, classes=classes)
    logits = torch.from_numpy(
        np.random.default_rng(seed).standard_normal((sum(sizes) + 30, classes))
    )
    evaluator = Evaluator(graphs, classes, CPU, "auc")
    found = evaluator.predictions(logits)[1]
    area, precision, recall = (METRICS[name].compute(found) for name in RANKING)
    chances = torch.softmax(found.logits, dim=1)
    for k in range(len(graphs)):
        own = found.segments.owner == k
        labels, own_chances = found.labels[own].numpy(), chances[own].numpy()
        each = {c: (labels == c, own_chances[:, c]) for c in range(classes) if (labels == c).any()}
        if not each:
            assert precision[k].isnan()
            continue
        wanted = np.mean([average_precision_score(*pair) for pair in each.values()])
        assert float(precision[k]) == pytest.approx(wanted, rel=1e-9)
        wanted = np.mean([largest_recall(*pair, 0.9) for pair in each.values()])
        assert float(recall[k]) == pytest.approx(wanted, rel=1e-9)
        pairs = [pair for pair in each.values() if not pair[0].all()]
        if pairs:
            wanted = np.mean([roc_auc_score(*pair) for pair in pairs])
            assert float(area[k]) == pytest.approx(wanted, rel=1e-9)


def test_rankings_are_those_of_torchmetrics() -> None:
    rng = np.random.default_rng(3)
    labels = torch.from_numpy(rng.integers(0, 4, 400))
    logits = torch.from_numpy(rng.standard_normal((400, 4)))
    logits[torch.arange(400), labels] += 1
    many = Predictions(logits, labels, Segments((400,), CPU), 4)
    chances = torch.softmax(logits, dim=1)
    for name, wanted in [
        ("auc", multiclass_auroc(chances, labels, 4)),
        ("auprc", multiclass_average_precision(chances, labels, 4)),
    ]:
        torch.testing.assert_close(
            METRICS[name].compute(many)[0], wanted.double(), rtol=1e-6, atol=0
        )
    rare = (labels == 3).long()
    two = Predictions(logits[:, [0, 3]], rare, Segments((400,), CPU), 2)
    score = torch.softmax(logits[:, [0, 3]], dim=1)[:, 1]
    torch.testing.assert_close(
        METRICS["auprc"].compute(two)[0],
        binary_average_precision(score, rare).double(),
        rtol=1e-6,
        atol=0,
    )
    for precision in (0.5, 0.8, 0.9):
        recall, _ = binary_recall_at_fixed_precision(score, rare, precision)
        metric = METRICS.find(f"recall@precision={precision}")
        torch.testing.assert_close(metric.compute(two)[0], recall.double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("written", "key"),
    [
        ("Macro-F1", "f1_macro"),
        ("macro_f1", "f1_macro"),
        ("f1-macro", "f1_macro"),
        ("weighted-f1", "f1_weighted"),
        ("balanced-accuracy", "balanced_accuracy"),
        ("AUPRC", "auprc"),
        ("recall@precision=0.9", "recall_at_precision_0.9"),
        ("recall@precision=0.80", "recall_at_precision_0.8"),
        ("recall-at-precision-.8", "recall_at_precision_0.8"),
    ],
)
def test_metrics_are_found_in_any_spelling(written: str, key: str) -> None:
    assert METRICS.key(written) == key
    assert METRICS.find(written).name == key


@pytest.mark.parametrize("written", ["recall@precision=1.5", "recall@precision=", "recall@0.9"])
def test_other_spellings_of_recall_at_a_precision_are_unknown(written: str) -> None:
    with pytest.raises(UserError, match="unknown metric"):
        METRICS.find(written)


def test_a_metric_with_a_number_is_on_the_axis_of_its_own_run_only() -> None:
    assert score_axis() == score_axis("auprc") == tuple(METRICS)
    assert score_axis("recall_at_precision_0.8") == (*METRICS, "recall_at_precision_0.8")
    graphs, logits = random_graphs([20, 20], classes=2), coarse_logits(40, 2, 0)
    scores = Evaluator(graphs, 2, CPU, "recall_at_precision_0.5").scores(logits)
    assert scores.shape[2] == len(METRICS) + 1
    found = describe(scores[:, 1].numpy(), np.ones(2), score_axis("recall_at_precision_0.5"))
    assert found["recall_at_precision_0.5"] >= found["recall_at_precision_0.9"]
    assert "recall_at_precision_0.5" not in METRICS


def test_the_positive_class_is_the_second_unless_named() -> None:
    assert positive_index(("yes", "no")) == 1
    assert positive_index(("yes", "no"), "yes") == 0
    assert positive_index(("a", "b", "c")) is None
    with pytest.raises(UserError, match="unknown class 'maybe'"):
        positive_index(("yes", "no"), "maybe")
    with pytest.raises(UserError, match="it is for two classes, there are 3"):
        positive_index(("a", "b", "c"), "a")


# The trivial predictor -------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 3])
def test_the_baseline_is_the_majority_of_each_clients_train_labels(classes: int) -> None:
    graphs = random_graphs([40, 60, 50], classes=classes, seed=4)
    evaluator = Evaluator(graphs, classes, CPU, "auprc")
    found = evaluator.baseline()
    for k, graph in enumerate(graphs):
        majority = np.bincount(graph.labels[graph.masks.train], minlength=classes).argmax()
        for s, split in enumerate(SPLITS):
            true = graph.labels[getattr(graph.masks, split)]
            own = dict(zip(METRICS, found[k, s].tolist(), strict=True))
            guess = np.full_like(true, majority)
            assert own["accuracy"] == pytest.approx((true == majority).mean())
            assert own["f1_macro"] == pytest.approx(f1_score(true, guess, average="macro"))
            assert own["balanced_accuracy"] == pytest.approx(1 / len(np.unique(true)))
            assert own["auc"] == pytest.approx(0.5)
            shares = [(true == c).mean() for c in np.unique(true)]
            share = (true == 1).mean() if classes == 2 else np.mean(shares)
            assert own["auprc"] == pytest.approx(share)
            assert own["recall_at_precision_0.9"] == 0


def test_a_client_without_train_labels_takes_the_majority_of_all() -> None:
    first, second = random_graphs([40, 40], classes=3, seed=1)
    masks = replace(second.masks, train=np.zeros_like(second.masks.train))
    found = Evaluator([first, replace(second, masks=masks)], 3, CPU).baseline()
    majority = np.bincount(first.labels[first.masks.train]).argmax()
    true = second.labels[second.masks.test]
    assert float(found[1, 1, 0]) == pytest.approx((true == majority).mean())


# Metrics of others -----------------------------------------------------------------------------


def mean_recall(predictions: Predictions) -> Tensor:
    recall = predictions.confusion.diagonal(dim1=1, dim2=2) / predictions.confusion.sum(dim=2)
    return recall.nanmean(dim=1).float()


def test_another_metric_is_scored_after_our_own() -> None:
    graphs = random_graphs([20, 30])
    logits = coarse_logits(50, 3, 0)
    before = Evaluator(graphs, 3, CPU).scores(logits)
    with METRICS.restored():
        register_metric("Mean-Recall", title="mean recall")(mean_recall)
        register_metric("a_first", classes=2)(mean_recall)
        assert list(METRICS)[8:] == ["a_first", "mean_recall"]
        assert len(METRICS) == 10
        assert METRICS.index("mean_recall") == 9
        scores = Evaluator(graphs, 3, CPU).scores(logits)
        found = describe(scores[:, 1].numpy(), np.ones(2))
    assert scores.dtype == torch.float64
    torch.testing.assert_close(scores[:, :, :8], before, rtol=0, atol=0, equal_nan=True)
    assert scores[:, :, 8].isnan().all()  # it needs two classes
    assert "a_first" not in found
    nodes = np.flatnonzero(graphs[0].masks.test)
    labels, predicted = graphs[0].labels[nodes], logits[nodes].argmax(dim=1).numpy()
    recalls = [float((predicted[labels == c] == c).mean()) for c in np.unique(labels)]
    assert found["mean_recall_per_client"][0] == pytest.approx(np.mean(recalls), rel=1e-6)


def test_the_confusion_matrix_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(
        "polyphily.core.metrics.from_confusion",
        lambda confusion: calls.append(confusion) or from_confusion(confusion),
    )
    views = [coarse_logits(50, 3, seed) for seed in (0, 1)]
    Evaluator(random_graphs([20, 30]), 3, CPU).scores_of_views(views)
    assert len(calls) == 1, "once for all views and splits"


@pytest.mark.parametrize(("classes", "metric"), [(2, "accuracy"), (3, "accuracy"), (3, "auc")])
def test_views_and_splits_are_scored_in_one_pass(classes: int, metric: str) -> None:
    evaluator = Evaluator(random_graphs([20, 30, 9], classes=classes), classes, CPU, metric)
    views = [coarse_logits(59, classes, seed) for seed in (0, 1, 2)]
    found = evaluator.scores_of_views(views)
    assert found.shape == (3, len(views), len(SPLITS), len(evaluator.metrics))
    for number, logits in enumerate(views):
        for split, predictions in enumerate(evaluator.predictions(logits)):
            expected = evaluator._scores(predictions)
            torch.testing.assert_close(found[:, number, split], expected, equal_nan=True)
    torch.testing.assert_close(evaluator.scores(views[1]), found[:, 1], equal_nan=True)


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
    assert "one value per client, of shape (4,)" in str(caught.value), "two splits of two clients"


def test_titles_are_for_reports() -> None:
    titles = [metric.title for metric in METRICS.values()]
    assert titles[:5] == ["accuracy", "macro F1", "weighted F1", "AUC", "AUPRC"]
    assert titles[5:] == ["F1", "balanced accuracy", "recall at precision 0.9"]
    assert all(metric.selects for metric in METRICS.values())


def test_a_metric_is_refused_for_another_number_of_classes() -> None:
    check_metric("auc", 2, "cora")
    check_metric("auc", 7, "cora")
    with METRICS.restored():
        register_metric("double", classes=2)(mean_recall)
        with pytest.raises(UserError, match=r"^metric double needs two classes, cora has 7$"):
            check_metric("double", 7, "cora")
        register_metric("triple", classes=3)(mean_recall)
        with pytest.raises(UserError, match=r"^metric triple needs 3 classes, cora has 7$"):
            check_metric("triple", 7, "cora")


def test_stored_scores_are_found_by_name_and_missing_ones_unknown() -> None:
    stored = np.array([[0.1, 0.2], [0.3, 0.4]])
    found = align_scores(stored, ["auc", "accuracy"], ["accuracy", "f1", "auc"], "runs/a")
    np.testing.assert_array_equal(found, [[0.2, math.nan, 0.1], [0.4, math.nan, 0.3]])


def test_stored_scores_of_other_metrics_are_refused() -> None:
    with pytest.raises(UserError, match=r"^runs/a has scores of other metrics \(mine\) than"):
        align_scores(np.zeros((2, 1)), ["mine"], list(METRICS), "runs/a")
    with pytest.raises(UserError, match=r"^runs/a has scores of other metrics"):
        align_scores(np.zeros((2, 5)), ["accuracy"], list(METRICS), "runs/a")


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
    found = describe(scores, np.array([30.0, 10.0, 0.0]), list(METRICS)[:4])
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
    found = describe(scores, np.array([5.0, 1.0, 3.0]), list(METRICS)[:4])
    assert found["accuracy"] == pytest.approx(0.65)


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
    found = describe(scores, np.ones(1), list(METRICS)[:4])
    assert "auc" not in found
    assert found["accuracy"] == 0.5
