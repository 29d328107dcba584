"""Splits: disjoint, of labelled nodes only, of the size asked for, not drawn as the data were."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyphily.errors import UserError
from polyphily.graphs.graph import UNLABELLED, BoolArray, Graph, IntArray, Masks
from polyphily.graphs.splits import (
    Split,
    default_split,
    draw,
    draw_global,
    ensure_train,
    parse_split,
)

TEXTS = ["0.6,0.2,0.2", "0.2,0.4,0.4:client", "0.05,0.475,0.475:stratified", "5-fold", "3-fold"]
MANY = settings(max_examples=60, deadline=None)

label_lists = st.lists(st.integers(UNLABELLED, 3), min_size=1, max_size=80)
seeds = st.integers(0, 30)


def graph_of(labels: list[int] | IntArray) -> Graph:
    features = np.zeros((len(labels), 1), np.float32)
    return Graph.build(features, np.zeros((2, 0), np.int64), np.array(labels, dtype=np.int64))


def sizes(masks: Masks) -> tuple[int, ...]:
    return tuple(int(mask.sum()) for mask in (masks.train, masks.val, masks.test))


def indices(mask: BoolArray) -> list[int]:
    return np.flatnonzero(mask).tolist()


def same(left: Masks, right: Masks) -> bool:
    return all(np.array_equal(vars(left)[part], vars(right)[part]) for part in vars(left))


def check(masks: Masks, labels: list[int]) -> None:
    labelled = np.array(labels) != UNLABELLED
    each = masks.train.astype(int) + masks.val + masks.test
    assert np.array_equal(each, labelled)  # disjoint, and exactly the labelled nodes
    assert masks.train.any() or not labelled.any()


@MANY
@given(st.lists(label_lists, min_size=1, max_size=4), st.sampled_from(TEXTS), seeds)
def test_every_labelled_node_is_in_one_mask(lists: list[list[int]], text: str, seed: int) -> None:
    graphs = [graph_of(labels) for labels in lists]
    drawn = draw(parse_split(text), graphs, seed)
    for masks, labels in zip(drawn, lists, strict=True):
        check(masks, labels)
    assert all(map(same, drawn, draw(parse_split(text), graphs, seed)))
    assert same(
        drawn[0], draw(parse_split(text), graphs[:1], seed)[0]
    )  # other clients do not matter


@MANY
@given(label_lists, seeds)
def test_a_global_split_covers_the_labelled_nodes(labels: list[int], seed: int) -> None:
    check(draw_global(parse_split("0.2,0.4,0.4:global"), graph_of(labels), seed), labels)


@pytest.mark.parametrize("text", TEXTS)
def test_seeds_and_clients_differ(text: str) -> None:
    graph = graph_of(np.arange(200) % 3)
    first, second = draw(parse_split(text), [graph, graph], 0)
    assert not same(first, second)
    assert not same(first, draw(parse_split(text), [graph], 1)[0])


@given(st.integers(5, 300), st.sampled_from([(0.6, 0.2, 0.2), (0.2, 0.4, 0.4), (0.29, 0.5, 0.21)]))
@settings(max_examples=60, deadline=None)
def test_shares_are_rounded_down_and_the_rest_tests(
    count: int, ratios: tuple[float, float, float]
) -> None:
    text = ",".join(map(str, ratios))
    graph = graph_of(np.arange(count) % 2)
    expected = [int(round(100 * ratio) * count // 100) for ratio in ratios[:2]]
    for masks in (
        draw(parse_split(f"{text}:client"), [graph], 0)[0],
        draw_global(parse_split(f"{text}:global"), graph, 0),
    ):
        assert sizes(masks) == (*expected, count - sum(expected))
    stratified = draw(parse_split(text), [graph], 0)[0]
    for label in (0, 1):
        members = int((graph.labels == label).sum())
        train, val, test = sizes(stratified.take(np.flatnonzero(graph.labels == label)))
        if round(100 * ratios[0]) * members >= 100:
            assert train == round(100 * ratios[0]) * members // 100
            assert val == round(100 * ratios[1]) * members // 100
            assert test == members - train - val


@pytest.mark.parametrize(
    ("text", "expected"), [("0.8,0.2,0", (5, 2, 0)), ("1,0,0", (7, 0, 0)), ("0.5,0,0.5", (3, 0, 4))]
)
def test_a_share_of_zero_is_empty(text: str, expected: tuple[int, ...]) -> None:
    assert sizes(draw(parse_split(f"{text}:client"), [graph_of([0] * 7)], 0)[0]) == expected


@pytest.mark.parametrize("text", ["0.2,0.4,0.4", "0.2,0.4,0.4:client", "5-fold"])
@pytest.mark.parametrize("labels", [[1], [1, 2], [UNLABELLED, 0], [0, 1, 2, 3]])
def test_a_small_client_has_a_train_node(text: str, labels: list[int]) -> None:
    for seed in range(10):
        masks = draw(parse_split(text), [graph_of(labels)], seed)[0]
        assert masks.train.sum() >= 1
        check(masks, labels)


def test_a_client_without_labels_has_empty_masks() -> None:
    for text in TEXTS:
        assert sizes(draw(parse_split(text), [graph_of([UNLABELLED] * 3)], 0)[0]) == (0, 0, 0)


@pytest.mark.parametrize("folds", [3, 4, 5, 10])
@pytest.mark.parametrize("first", [0, 2])
def test_test_folds_of_successive_seeds_cover_all_nodes_once(folds: int, first: int) -> None:
    graph = graph_of(np.arange(47) % 4)
    seeds = range(first * folds, (first + 1) * folds)
    drawn = [draw(parse_split(f"{folds}-fold"), [graph], seed)[0] for seed in seeds]
    for part in ("test", "val"):
        assert (np.sum([getattr(masks, part) for masks in drawn], axis=0) == 1).all()
    for masks in drawn:
        assert masks.test.sum() in (47 // folds, -(-47 // folds))
    other = draw(parse_split(f"{folds}-fold"), [graph], first * folds + folds)[0]
    assert not same(drawn[0], other)


def own_graph(count: int = 3) -> Graph:
    graph = graph_of([0, 1, UNLABELLED, 1, 0, 1])
    eye = np.eye(6, dtype=bool)
    own = tuple(Masks(eye[k], eye[k + 1], eye[k + 2] | eye[5]) for k in range(count))
    return replace(graph, own_masks=own)


def test_own_masks_go_by_seed_and_leave_unlabelled_nodes_out() -> None:
    drawn = [draw(parse_split("own"), [own_graph(2)], seed)[0] for seed in range(4)]
    assert [indices(masks.train) for masks in drawn] == [[0], [1], [0], [1]]
    assert [indices(masks.val) for masks in drawn] == [[1], [], [1], []]
    assert [indices(masks.test) for masks in drawn] == [[5], [3, 5], [5], [3, 5]]


def test_own_masks_that_leave_no_train_node_get_one_from_no_mask() -> None:
    masks = draw(parse_split("own"), [own_graph()], 2)[0]  # its only train node is unlabelled
    assert indices(masks.train)[0] in (0, 1)
    assert indices(masks.val) == [3]
    assert indices(masks.test) == [4, 5]


def test_own_without_masks_is_an_error() -> None:
    with pytest.raises(UserError, match="'graph' has none"):
        draw(parse_split("own"), [graph_of([0, 1])], 0)


def test_a_missing_train_node_comes_from_test_before_validation() -> None:
    graph, none = graph_of([0, 0, 0]), np.zeros(3, dtype=bool)
    val, test = np.array([True, True, False]), np.array([False, False, True])
    assert sizes(ensure_train(Masks(none, val, test), graph, 0)) == (1, 2, 0)
    assert sizes(ensure_train(Masks(none, ~none, none), graph, 0)) == (1, 2, 0)


def test_global_is_for_one_graph_and_the_others_for_clients() -> None:
    with pytest.raises(UserError, match="drawn over one whole graph"):
        draw(parse_split("0.2,0.4,0.4:global"), [graph_of([0])], 0)
    with pytest.raises(ValueError, match="per client"):
        draw_global(parse_split("5-fold"), graph_of([0]), 0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "text", ["0.2,0.4,0.4", "0.6,0.2,0.2:client", "0.2,0.4,0.4:global", "5-fold"]
)
def test_no_split_repeats_the_draw_behind_minesweeper(text: str, seed: int) -> None:
    """Its mines are the first fifth of numpy's default permutation with seed 0, its hidden features
    those of seed 1: a split drawn alike would put one of them into a single part."""
    graph = graph_of(np.zeros(10_000, np.int64))
    split = parse_split(text)
    masks = (
        draw_global(split, graph, seed) if split.kind == "global" else draw(split, [graph], seed)[0]
    )
    for trap in (0, 1):
        special = masks.take(np.random.default_rng(trap).permutation(10_000)[:2_000])
        for found, whole in zip(sizes(special), sizes(masks), strict=True):
            assert abs(found / 2_000 - whole / 10_000) < 0.05


def test_a_text_comes_back() -> None:
    for text in ["0.2,0.4,0.4", "0.2,0.4,0.4:stratified", "0.6,0.2,0.2:global", "7-fold", "own"]:
        assert str(parse_split(text)) == text
    assert parse_split("0.2,0.4,0.4") == parse_split(" 0.2, 0.4, 0.40:stratified ")
    assert parse_split("0.333,0.333,0.334:client") == Split("client", (0.333, 0.333, 0.334))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot read split ''"),
        ("half", "cannot read split 'half': a split is written"),
        ("0.5,0.5", "cannot read split"),
        ("0.4,0.2,0.2,0.2", "cannot read split"),
        ("0.5,0.2,0.2", "sum to 1"),
        ("60,20,20", "sum to 1"),
        ("1.2,-0.1,-0.1", "0 or more"),
        ("nan,0.5,0.5", "sum to 1"),
        ("inf,0,0", "sum to 1"),
        ("0,0.5,0.5", "nothing to train on"),
        ("0.6,0.2,0.2:", "unknown kind of split"),
        ("0.6,0.2,0.2:globel", "did you mean 'global'"),
        ("2-fold", "3 folds or more"),
        ("-5-fold", "cannot read split"),
    ],
)
def test_texts_that_are_no_split(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_split(text)


@pytest.mark.parametrize(
    ("dataset", "partition", "text"),
    [
        ("cora", "louvain", "0.6,0.2,0.2:client"),
        ("arxiv-year", "louvain", "0.05,0.475,0.475:client"),
        ("cora", "louvain-capped", "0.2,0.4,0.4:stratified"),
        ("WikiCS", "louvain-capped", "0.5,0.2,0.3:stratified"),
        ("roman-empire", "louvain-capped", "0.5,0.2,0.3:stratified"),
        ("ogbn-arxiv", "louvain-capped", "0.6,0.2,0.2:stratified"),
        ("cora", "metis", "0.2,0.4,0.4:global"),
        ("cora", "metis-overlap", "0.2,0.4,0.4:global"),
        ("ogbn-arxiv", "metis-overlap", "0.05,0.475,0.475:global"),
        ("squirrel", "metis", "5-fold"),
        ("flickr", "metis", "5-fold"),
        ("squirrel", "metis-overlap", "0.2,0.4,0.4:global"),
        ("ieee-fraud", "louvain-min", "5-fold"),
        ("twitch", "natural", "0.6,0.2,0.2:stratified"),
        ("cora", "dirichlet", "0.6,0.2,0.2:stratified"),
        ("cora", "random", "0.6,0.2,0.2:stratified"),
        ("my-folder", "my-file", "0.6,0.2,0.2:stratified"),
    ],
)
def test_the_literatures_splits(dataset: str, partition: str, text: str) -> None:
    assert str(default_split(dataset, partition)) == text
