"""The tracker of scores: last round, last five rounds, best validation round."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from polyphily.core.messages import Message, with_prefix
from polyphily.core.method import VIEWS, Method
from polyphily.core.metrics import SPLITS, align_scores, describe_all, first_axis, score_axis
from polyphily.core.settings import Settings

LAST = 5
ABSENT = 5  # rounds in a row without scores after which a client no longer belongs to the run
NAMES = "metrics"  # in a checkpoint: the names on the axis of scores
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]


def make_tracker(
    method: Method,
    settings: Settings,
    counts: FloatArray,
    sizes: Sequence[int],
    *,
    one_model: bool,
) -> Tracker:
    """Return the tracker of a run, with the best round selected as method and settings say.

    Args:
        method: what is trained.
        settings: with every setting filled in.
        counts: how many nodes each client is scored on, `[clients, splits]`.
        sizes: clients of each federation.
        one_model: whether a federation has a single model (`Server.one_model`).
    """
    chosen = method.selection if settings.selection == "method" else settings.selection
    return Tracker(
        counts,
        sizes,
        settings.metric or "accuracy",
        per_client=chosen == "client",
        view=method.view,
        one_model=one_model,
    )


class Tracker:
    """Scores of both views over the rounds, and the models of the best validation round.

    In a simulation every client is scored in every evaluation. In a deployed run sites may be
    missing, and a round must not win because a site with low scores is. These are the rules:

    - A client belongs to the run from its first scores on, until it has sent none for `ABSENT`
      rounds in a row. It belongs again once it sends scores.
    - Of two rounds, the one that more of these clients scored is better. Only rounds that equally
      many have scored are compared by their scores, and only over clients that belong.
    - So the best round is one that all have scored, as soon as there is such a round. A client that
      has left for good blocks later rounds for `ABSENT` rounds at most.

    Args:
        counts: how many nodes each client is scored on, `[clients, splits]`.
        sizes: clients of each federation.
        metric: what selects on validation.
        per_client: whether each client selects its own best round, or each federation one.
        view: the view whose best models are kept.
        one_model: whether a federation has a single model (then it is kept once).

    Attributes:
        names: the metrics on the axis of scores.
    """

    def __init__(
        self,
        counts: FloatArray,
        sizes: Sequence[int],
        metric: str,
        *,
        per_client: bool,
        view: str,
        one_model: bool,
    ) -> None:
        clients = sum(sizes)
        self.counts, self.sizes, self.metric, self.view = counts, list(sizes), metric, view
        self.starts = np.cumsum([0, *sizes])
        federation = np.repeat(np.arange(len(sizes)), sizes)
        self.group = np.arange(clients) if per_client else federation
        self.groups = int(self.group.max()) + 1
        self.per_client = per_client
        self.one_model = one_model and not per_client
        self.names = score_axis(metric)
        shape = (clients, len(SPLITS), len(self.names))
        self.recent: dict[str, list[FloatArray]] = {view: [] for view in VIEWS}
        self.best = {view: np.full(shape, math.nan) for view in VIEWS}
        self.best_value = {view: np.full(self.groups, -math.inf) for view in VIEWS}
        self.best_round = {view: np.zeros(self.groups, dtype=np.int64) for view in VIEWS}
        self.since = np.zeros(self.groups, dtype=np.int64)
        self.models: Message = {}
        self.missed: dict[str, IntArray] = {}
        """By view: evaluations in a row without each client; `ABSENT` or more before its first.
        Empty as long as nobody was missing."""
        self.best_scored: dict[str, BoolArray] = {}
        """By view: the clients whose scores are in `best`. Empty as long as nobody was missing."""

    @property
    def selection(self) -> str:
        """The owner of the score that selects the best round: "client" or "federation"."""
        return "client" if self.per_client else "federation"

    def update(
        self, view: str, scores: FloatArray, round_index: int, scored: BoolArray | None = None
    ) -> BoolArray:
        """Add a view's scores `[clients, splits, metrics]`; return which groups improved.

        A group is a client or a federation, whichever selects its own best round. A group without
        validation nodes counts as improved in every round, so that its last round is its best.

        Args:
            view: which models were scored.
            scores: NaN for clients that were not scored.
            round_index: the round, from 1.
            scored: the clients that were; None: all.
        """
        self.recent[view] = [*self.recent[view], scores][-LAST:]
        more, fewer = self._attendance(view, scored)
        value = self._value(scores)
        better = more | (~fewer & ((value > self.best_value[view]) | np.isnan(value)))
        latest = np.where(np.isnan(value), -math.inf, value)
        self.best_value[view] = np.where(better, latest, self.best_value[view])
        self.best_round[view][better] = round_index
        rows = better[self.group]
        self.best[view][rows] = scores[rows]
        if view in self.best_scored and scored is not None:
            self.best_scored[view][rows] = scored[rows]
        if view == self.view:
            self.since = np.where(better, 0, self.since + 1)
        return better

    def _attendance(self, view: str, scored: BoolArray | None) -> tuple[BoolArray, BoolArray]:
        """Return which groups more clients scored than their best round, and which fewer did.

        Clients that do not belong to the run are not counted, and their scores in the best round
        no longer count towards its value.
        """
        nobody = np.zeros(self.groups, dtype=bool)
        if scored is None or (scored.all() and view not in self.missed):
            return nobody, nobody
        if view not in self.missed:
            first = len(self.recent[view]) == 1  # the scores of this evaluation are in it already
            self.missed[view] = np.full(len(scored), ABSENT if first else 0, dtype=np.int64)
            self.best_scored[view] = np.full(len(scored), not first)
        missed = np.where(scored, 0, self.missed[view] + 1)
        self.missed[view] = missed
        belongs = missed < ABSENT
        now = np.bincount(self.group, scored & belongs, self.groups)
        before = np.bincount(self.group, self.best_scored[view] & belongs, self.groups)
        known = self.best[view].copy()
        known[~belongs] = math.nan
        value = self._value(known)
        chosen = (self.best_round[view] > 0) & ~np.isnan(value)
        self.best_value[view] = np.where(chosen, value, self.best_value[view])
        return now > before, (now < before) | (now == 0)

    def _value(self, scores: FloatArray) -> FloatArray:
        """Return the selecting score of each group; NaN for a group without validation nodes."""
        values = scores[:, 0, self.names.index(self.metric)]
        known = ~np.isnan(values)
        weights = self.counts[:, 0] * known
        total = np.bincount(self.group, weights, self.groups)
        summed = np.bincount(self.group, np.where(known, values * weights, 0), self.groups)
        found = np.full(self.groups, math.nan)
        np.divide(summed, total, out=found, where=total > 0)
        return found

    def keep_models(self, params: Message, better: BoolArray) -> None:
        """Store the parameters `[clients, …]` of the groups that improved."""
        units, rows = self.places(better)
        self.put_models({name: value[rows] for name, value in params.items()}, units)

    def places(self, better: BoolArray) -> tuple[list[int], list[int]]:
        """Return which stored models change if these groups improved, and from which clients."""
        if self.one_model:
            return np.flatnonzero(better).tolist(), self.starts[:-1][better].tolist()
        rows: list[int] = np.flatnonzero(better[self.group]).tolist()
        return rows, rows

    def put_models(self, params: Message, units: list[int]) -> None:
        """Store parameters, a row for each of the models `units`."""
        count = len(self.sizes) if self.one_model else len(self.group)
        for name, value in params.items():
            if name not in self.models:
                self.models[name] = value.new_zeros(count, *value.shape[1:])
            self.models[name][units] = value

    def stalled(self, patience: int) -> list[int]:
        """Return the clients whose group has not improved for `patience` evaluations."""
        if patience == 0:
            return []
        late: list[int] = np.flatnonzero((self.since >= patience)[self.group]).tolist()
        return late

    # Reading ---------------------------------------------------------------------------------

    def moments(self, view: str, s: int) -> dict[str, Any]:
        """Return `final`, `last5` and `best_val` of one federation in one view."""
        own = slice(int(self.starts[s]), int(self.starts[s + 1]))
        recent = np.stack(self.recent[view])[:, own]
        unscored = self._unscored(view, own)
        best_round = self.best_round[view][np.unique(self.group[own])].tolist()
        return {
            "final": self._describe(recent[-1], own),
            "last5": self._describe(_mean(recent, skip=view in self.missed), own),
            "best_val": {
                **self._describe(self.best[view][own], own),
                "round": best_round if self.per_client else best_round[0],
                **({"unscored": unscored} if unscored else {}),
            },
        }

    def _unscored(self, view: str, own: slice) -> list[int]:
        """Return the clients of a federation that have no scores in their best round."""
        if view not in self.best_scored:
            return []
        missing: list[int] = np.flatnonzero(~self.best_scored[view][own]).tolist()
        return missing

    def _describe(self, scores: FloatArray, own: slice) -> dict[str, Any]:
        found = describe_all(scores, self.counts[own], self.names)
        return dict(zip(SPLITS, found, strict=True))

    def current(self, s: int) -> dict[str, Any]:
        """Return the latest scores of one federation in both views."""
        own = slice(int(self.starts[s]), int(self.starts[s + 1]))
        views = [view for view in VIEWS if self.recent[view]]
        if not views:
            return {}
        scores = np.concatenate([self.recent[view][-1][own] for view in views], axis=1)
        counts = np.concatenate([self.counts[own]] * len(views), axis=1)
        found = iter(describe_all(scores, counts, self.names))
        return {view: {split: next(found) for split in SPLITS} for view in views}

    # What a checkpoint holds -----------------------------------------------------------------

    def tensors(self) -> Message:
        """Return what a checkpoint holds."""
        return self.part(range(len(self.sizes)))

    def part(self, federations: range) -> Message:
        """Return the same for consecutive federations, as if they had run by themselves."""
        own = slice(federations.start, federations.stop)
        clients = slice(int(self.starts[own.start]), int(self.starts[own.stop]))
        groups = clients if self.per_client else own
        units = own if self.one_model else clients
        saved: dict[str, Tensor] = {f"models/{n}": t[units] for n, t in self.models.items()}
        saved["since"] = torch.from_numpy(self.since[groups])
        saved[NAMES] = torch.tensor(list(json.dumps(self.names).encode()), dtype=torch.uint8)
        for view in VIEWS:
            saved[f"best/{view}"] = torch.from_numpy(self.best[view][clients])
            saved[f"best_value/{view}"] = torch.from_numpy(self.best_value[view][groups])
            saved[f"best_round/{view}"] = torch.from_numpy(self.best_round[view][groups])
            for i, scores in enumerate(self.recent[view]):
                saved[f"recent/{view}/{i}"] = torch.from_numpy(scores[clients])
            if view in self.missed:
                saved[f"missed/{view}"] = torch.from_numpy(self.missed[view][clients])
                saved[f"best_scored/{view}"] = torch.from_numpy(self.best_scored[view][clients])
        return saved

    def restore(self, tensors: Message, device: torch.device) -> None:
        """Go back to a checkpoint. Metrics that its scores lack are NaN.

        Raises:
            UserError: if it was scored with metrics that are not registered now.
        """
        named = tensors.get(NAMES)
        stored = first_axis() if named is None else json.loads(bytes(named.tolist()))

        def scores(name: str) -> FloatArray:
            return align_scores(tensors[name].numpy(), stored, self.names, "the checkpoint")

        self.since = tensors["since"].numpy().copy()
        self.models = {n: t.to(device) for n, t in with_prefix(tensors, "models/").items()}
        for view in VIEWS:
            self.best[view] = scores(f"best/{view}")
            self.best_value[view] = tensors[f"best_value/{view}"].numpy().copy()
            self.best_round[view] = tensors[f"best_round/{view}"].numpy().copy()
            count = sum(1 for name in tensors if name.startswith(f"recent/{view}/"))
            self.recent[view] = [scores(f"recent/{view}/{i}") for i in range(count)]
            if f"missed/{view}" in tensors:
                self.missed[view] = tensors[f"missed/{view}"].numpy().copy()
                self.best_scored[view] = tensors[f"best_scored/{view}"].numpy().copy()


def _mean(recent: FloatArray, *, skip: bool) -> FloatArray:
    """Return the mean over rounds, with `skip` over those in which a client was scored."""
    if not skip:
        return np.asarray(recent.mean(axis=0))
    known = ~np.isnan(recent)
    total = np.where(known, recent, 0.0).sum(axis=0)
    return np.where(known.any(axis=0), total / np.maximum(known.sum(axis=0), 1), math.nan)
