"""The tracker against a plain reading of its rules, over random histories with many ties."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import CPU
from polyphily.core.method import VIEWS
from polyphily.core.metrics import METRICS, SPLITS, describe
from polyphily.runs.folder import RunFolder
from polyphily.runtime.tracker import ABSENT, FloatArray, Tracker

MANY = settings(max_examples=60, deadline=None)
METRIC = {"accuracy": 0, "auc": 3}


@dataclass(frozen=True)
class History:
    """Federations' scores round by round. Quarters and whole counts: equal means are equal."""

    sizes: tuple[int, ...]
    rounds: int
    metric: str
    per_client: bool
    one_model: bool
    seed: int

    @property
    def clients(self) -> int:
        return sum(self.sizes)

    @property
    def counts(self) -> FloatArray:
        rng = np.random.default_rng([self.seed, 0])
        return rng.integers(0, 3, (self.clients, len(SPLITS))).astype(float)

    def scores(self, view: str, round_index: int) -> FloatArray:
        rng = np.random.default_rng([self.seed, 1 + VIEWS.index(view), round_index])
        scores = rng.integers(0, 5, (self.clients, len(SPLITS), len(METRICS))) / 4
        scores[self.counts == 0] = math.nan
        one_class = np.random.default_rng([self.seed, 9]).random(self.clients) < 0.3
        scores[one_class, :, 3] = math.nan
        return scores

    def groups(self) -> list[list[int]]:
        """The clients that choose a best round together."""
        if self.per_client:
            return [[k] for k in range(self.clients)]
        ends = np.cumsum([0, *self.sizes]).tolist()
        return [list(range(a, b)) for a, b in pairwise(ends)]

    def value(self, group: list[int], scores: FloatArray) -> float | None:
        known = [
            (scores[k, 0, METRIC[self.metric]], self.counts[k, 0])
            for k in group
            if self.counts[k, 0] > 0 and not math.isnan(scores[k, 0, METRIC[self.metric]])
        ]
        if not known:
            return None
        return sum(v * w for v, w in known) / sum(w for _, w in known)

    def best_round(self, view: str, group: list[int]) -> int:
        """The first of the best rounds; the last round where nothing can be selected on."""
        values = [self.value(group, self.scores(view, r)) for r in range(1, self.rounds + 1)]
        if None in values:
            return self.rounds
        return 1 + max(range(self.rounds), key=lambda r: (values[r], -r))

    def tracker(self, view: str = "received") -> Tracker:
        return Tracker(
            self.counts,
            self.sizes,
            self.metric,
            per_client=self.per_client,
            view=view,
            one_model=self.one_model,
        )

    def play(self, tracker: Tracker, first: int = 1, last: int | None = None) -> Tracker:
        for r in range(first, (last or self.rounds) + 1):
            for view in VIEWS:
                better = tracker.update(view, self.scores(view, r), r)
                if view == tracker.view and better.any():
                    tracker.keep_models({"w": self.weights(r)}, better)
        return tracker

    def weights(self, round_index: int) -> torch.Tensor:
        """Of every client; the same throughout a federation that has one model."""
        federation = np.repeat(np.arange(len(self.sizes)), self.sizes)
        unit = federation if self.one_model and not self.per_client else np.arange(self.clients)
        return torch.from_numpy(np.stack([100.0 * round_index + unit, unit], axis=1))


histories = st.builds(
    History,
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple),
    rounds=st.integers(1, 12),
    metric=st.sampled_from(["accuracy", "auc"]),
    per_client=st.booleans(),
    one_model=st.booleans(),
    seed=st.integers(0, 10_000),
)
views = st.sampled_from(VIEWS)


def same(left: object, right: object) -> bool:
    """Equal structures of numbers, up to rounding."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    if left is None or right is None:
        return left is right
    return bool(left == pytest.approx(right, rel=1e-12, abs=1e-12))


@MANY
@given(histories, views)
def test_the_best_round_is_the_first_with_the_best_validation_score(
    history: History, view: str
) -> None:
    tracker = history.play(history.tracker())
    for g, group in enumerate(history.groups()):
        best = history.best_round(view, group)
        assert tracker.best_round[view][g] == best
        wanted = history.scores(view, best)[group]
        np.testing.assert_array_equal(tracker.best[view][group], wanted)


@MANY
@given(histories, views)
def test_the_kept_models_are_those_of_the_best_round(history: History, view: str) -> None:
    tracker = history.play(history.tracker(view))
    kept, single = tracker.models["w"], history.one_model and not history.per_client
    assert len(kept) == (len(history.sizes) if single else history.clients)
    for g, group in enumerate(history.groups()):
        weights = history.weights(history.best_round(view, group))
        rows = [g] if single else group
        assert torch.equal(kept[rows], weights[group[:1] if single else group])


@MANY
@given(histories, views)
def test_moments_describe_the_last_the_last_five_and_the_best(history: History, view: str) -> None:
    tracker = history.play(history.tracker())
    starts = np.cumsum([0, *history.sizes])
    latest = range(max(1, history.rounds - 5 + 1), history.rounds + 1)
    for s in range(len(history.sizes)):
        own = slice(starts[s], starts[s + 1])
        groups = [g for g in history.groups() if starts[s] <= g[0] < starts[s + 1]]
        rounds = [history.best_round(view, group) for group in groups]
        best = np.concatenate(
            [history.scores(view, r)[g] for r, g in zip(rounds, groups, strict=True)]
        )
        mean = sum(history.scores(view, r)[own] for r in latest) / len(latest)
        expected = {
            moment: {
                split: describe(scores[:, i], history.counts[own, i])
                for i, split in enumerate(SPLITS)
            }
            for moment, scores in (
                ("final", history.scores(view, history.rounds)[own]),
                ("last5", mean),
                ("best_val", best),
            )
        }
        expected["best_val"]["round"] = rounds if history.per_client else rounds[0]  # type: ignore[assignment]
        found = tracker.moments(view, s)
        assert same(found, expected)
        assert same(tracker.current(s)[view], expected["final"])


@MANY
@given(histories, views, st.integers(1, 5))
def test_a_group_stalls_after_patience_evaluations_without_a_better_one(
    history: History, view: str, patience: int
) -> None:
    tracker = history.play(history.tracker(view))
    late = [
        k
        for group in history.groups()
        for k in group
        if history.rounds - history.best_round(view, group) >= patience
    ]
    assert tracker.stalled(patience) == late
    assert tracker.stalled(0) == []


@MANY
@given(histories, views, st.data())
def test_a_restored_tracker_goes_on_as_if_nothing_had_happened(
    history: History, view: str, data: st.DataObject
) -> None:
    stop = data.draw(st.integers(1, history.rounds))
    whole = history.play(history.tracker(view))
    before = history.play(history.tracker(view), last=stop)
    saved = {n: t.clone() for n, t in before.tensors().items()}
    after = history.tracker(view)
    after.restore(saved, CPU)
    if stop < history.rounds:
        history.play(after, first=stop + 1)
    left, right = after.tensors(), whole.tensors()
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        np.testing.assert_array_equal(tensor, right[name], err_msg=name)
    for s in range(len(history.sizes)):
        assert same(after.moments(view, s), whole.moments(view, s))


def test_a_checkpoint_file_holds_a_tracker_whole(tmp_path: Path) -> None:
    """NaN scores, groups without a selecting score (-inf) and models survive the file."""
    history = History((3, 2), 7, "auc", True, False, 3)
    tracker = history.play(history.tracker())
    assert np.isnan(tracker.best["received"]).any()
    assert set(np.isinf(tracker.best_value["received"])) == {True, False}
    folder = RunFolder(tmp_path)
    folder.save_checkpoint(tracker.tensors(), {"round": 7})
    found = folder.load_checkpoint()
    assert found is not None
    again = history.tracker()
    again.restore(found[0], CPU)
    for name, tensor in again.tensors().items():
        np.testing.assert_array_equal(tensor, tracker.tensors()[name], err_msg=name)


# Clients that are missing ------------------------------------------------------------------------


def best_of_those_there(
    history: History, view: str, group: list[int], scored: list[list[bool]]
) -> int:
    """The rules, read plainly: more clients that belong to the run first, then the score."""
    best = 0
    for r in range(1, history.rounds + 1):
        belongs = [k for k in group if any(row[k] for row in scored[max(0, r - ABSENT) : r])]
        now = [k for k in belongs if scored[r - 1][k]]
        before = [k for k in belongs if best and scored[best - 1][k]]
        ours = history.value(now, history.scores(view, r))
        theirs = history.value(before, history.scores(view, best)) if best else None
        wins = len(now) == len(before) and (ours is None or theirs is None or ours > theirs)
        if now and (len(now) > len(before) or wins):
            best = r
    return best


@MANY
@given(histories, views, st.data())
def test_a_round_does_not_win_by_the_absence_of_a_client(
    history: History, view: str, data: st.DataObject
) -> None:
    row = st.lists(st.booleans(), min_size=history.clients, max_size=history.clients)
    scored = data.draw(st.lists(row, min_size=history.rounds, max_size=history.rounds))
    stop = data.draw(st.integers(1, history.rounds))
    tracker = history.tracker()
    for r in range(1, history.rounds + 1):
        scores = history.scores(view, r)
        there = np.array(scored[r - 1])
        scores[~there] = math.nan
        tracker.update(view, scores, r, there)
        if r == stop:  # a checkpoint in between changes nothing
            saved = {n: t.clone() for n, t in tracker.tensors().items()}
            tracker = history.tracker()
            tracker.restore(saved, CPU)
    for g, group in enumerate(history.groups()):
        best = best_of_those_there(history, view, group, scored)
        assert tracker.best_round[view][g] == best
        for k in group:
            if best and scored[best - 1][k]:
                np.testing.assert_array_equal(tracker.best[view][k], history.scores(view, best)[k])
            else:
                assert np.isnan(tracker.best[view][k]).all()


@MANY
@given(histories, views)
def test_if_nobody_is_missing_nothing_changes(history: History, view: str) -> None:
    """Simulations do not say who was scored; deployed runs with all sites choose alike."""
    plain = history.play(history.tracker())
    told = history.tracker()
    everybody = np.ones(history.clients, dtype=bool)
    for r in range(1, history.rounds + 1):
        for each in VIEWS:
            told.update(each, history.scores(each, r), r, everybody)
    assert (told.best_round[view] == plain.best_round[view]).all()
    assert told.tensors().keys() <= plain.tensors().keys()
    for s in range(len(history.sizes)):
        assert same(told.moments(view, s), plain.moments(view, s))


# Small cases by hand ---------------------------------------------------------------------------


def scores_of(*validation: float) -> FloatArray:
    """Scores of clients whose test accuracy is a hundredth of their validation accuracy."""
    scores = np.full((len(validation), len(SPLITS), len(METRICS)), 0.5)
    scores[:, 0, 0] = validation
    scores[:, 1, 0] = np.array(validation) / 100
    return scores


def tracker_of(counts: list[int], *, per_client: bool, sizes: list[int] | None = None) -> Tracker:
    return Tracker(
        np.array([[count, 10.0] for count in counts]),
        sizes or [len(counts)],
        "accuracy",
        per_client=per_client,
        view="received",
        one_model=False,
    )


def test_a_federation_selects_by_the_mean_weighted_by_validation_nodes() -> None:
    tracker = tracker_of([30, 10], per_client=False)
    assert tracker.update("received", scores_of(0.5, 0.5), 1).tolist() == [True]
    assert tracker.update("received", scores_of(0.4, 0.9), 2).tolist() == [True]  # 0.525
    assert tracker.update("received", scores_of(0.4, 0.7), 3).tolist() == [False]  # 0.475
    assert tracker.moments("received", 0)["best_val"]["round"] == 2


def test_clients_select_each_for_itself() -> None:
    tracker = tracker_of([30, 10], per_client=True)
    for r, values in enumerate([(0.5, 0.5), (0.4, 0.9), (0.6, 0.9)], start=1):
        tracker.update("received", scores_of(*values), r)
    best = tracker.moments("received", 0)["best_val"]
    assert best["round"] == [3, 2]
    assert best["test"]["accuracy_per_client"] == pytest.approx([0.006, 0.009])


def test_the_first_of_equal_rounds_is_kept() -> None:
    tracker = tracker_of([5], per_client=False)
    for r in (1, 2, 3):
        tracker.update("received", scores_of(0.5), r)
    assert tracker.moments("received", 0)["best_val"]["round"] == 1
    assert tracker.stalled(2) == [0]
    assert tracker.stalled(3) == []


def test_a_client_without_validation_nodes_takes_the_latest_and_never_stalls() -> None:
    tracker = tracker_of([0, 10], per_client=True)
    for r, values in enumerate([(math.nan, 0.9), (math.nan, 0.5), (math.nan, 0.4)], start=1):
        tracker.update("received", scores_of(*values), r)
    assert tracker.moments("received", 0)["best_val"]["round"] == [3, 1]
    assert tracker.stalled(2) == [1]


def test_the_views_are_tracked_apart_and_patience_looks_at_one() -> None:
    tracker = tracker_of([10], per_client=False)
    for r, (received, trained) in enumerate([(0.5, 0.1), (0.4, 0.2), (0.3, 0.3)], start=1):
        tracker.update("received", scores_of(received), r)
        tracker.update("trained", scores_of(trained), r)
    assert tracker.moments("received", 0)["best_val"]["round"] == 1
    assert tracker.moments("trained", 0)["best_val"]["round"] == 3
    assert tracker.stalled(2) == [0]


def test_federations_do_not_mix() -> None:
    tracker = tracker_of([10, 10, 10], per_client=False, sizes=[2, 1])
    tracker.update("received", scores_of(0.2, 0.4, 0.9), 1)
    tracker.update("received", scores_of(0.6, 0.4, 0.1), 2)
    assert tracker.moments("received", 0)["best_val"]["round"] == 2
    assert tracker.moments("received", 1)["best_val"]["round"] == 1
    assert tracker.moments("received", 1)["final"]["val"]["accuracy"] == pytest.approx(0.1)
    assert tracker.current(0)["received"]["val"]["accuracy"] == pytest.approx(0.5)
    assert "trained" not in tracker.current(0)


def test_a_client_that_left_for_good_does_not_block_for_ever() -> None:
    tracker = tracker_of([10, 10], per_client=False)
    both, first = np.array([True, True]), np.array([True, False])
    tracker.update("received", scores_of(0.5, 0.1), 1, both)
    for r in range(2, 2 + ABSENT):
        tracker.update("received", scores_of(0.9, math.nan), r, first)
        assert tracker.best_round["received"][0] == (1 if r < 1 + ABSENT else r)
    assert tracker.moments("received", 0)["best_val"]["unscored"] == [1]
    tracker.update("received", scores_of(0.2, 0.2), 20, both)  # it is back
    assert tracker.best_round["received"][0] == 20
    assert "unscored" not in tracker.moments("received", 0)["best_val"]


def test_the_last_five_rounds_are_those_in_which_a_client_was_scored() -> None:
    tracker = tracker_of([10, 10], per_client=False)
    tracker.update("received", scores_of(0.5, 0.3), 1, np.array([True, True]))
    tracker.update("received", scores_of(0.7, math.nan), 2, np.array([True, False]))
    means = tracker.moments("received", 0)["last5"]["val"]["accuracy_per_client"]
    assert means == pytest.approx([0.6, 0.3])
