"""The server's side of a run: the rounds, the records and the run folder.

One message per round and site carries the download to the site, and the upload and the scores back.
A site scores the model that it receives, so these scores belong to the round before. The record of
a round is therefore complete one message later, and a last message follows the last round.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from polyphily.core.messages import Message, model_part
from polyphily.core.metrics import SPLITS
from polyphily.errors import TrainingError
from polyphily.flower.checkpoint import ServerCheckpoint
from polyphily.flower.collecting import Collector, Exchange, OpenRound, read_scores
from polyphily.flower.joining import Emit, Policy, Transport
from polyphily.flower.plan import Plan
from polyphily.flower.wire import CLOSE, FINISH, HEADER, PREPARE, WireError
from polyphily.privacy.differential import account, guard_of, spent
from polyphily.runs.folder import RunFolder
from polyphily.runs.models import (
    BEST,
    GLOBAL,
    LAST,
    SavedModel,
    received_state,
    save_models,
    without_axis,
)
from polyphily.runs.summary import RunFacts, stage_of, summarise
from polyphily.runtime.tracker import FloatArray, make_tracker


@dataclass
class Coordinator:
    """Runs the rounds of a run at the server.

    Attributes:
        plan: of the run.
        transport: sends messages to the sites.
        folder: the run folder, which exists already.
        policy: timeouts and the like.
        emit: writes events.
        progress: called with each round's record, once it is complete.
        dataset: name of the data in the summary.
        round: number of complete rounds.
        accepted: the last round in which each site's answer was accepted.
        records: of all rounds that are complete and scored.
        pending: the record of the last round, if its received view is not scored yet.
    """

    plan: Plan
    transport: Transport
    folder: RunFolder
    policy: Policy
    emit: Emit
    progress: Callable[[dict[str, Any]], None] | None = None
    dataset: str = "sites"
    round: int = 0
    accepted: dict[str, int] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)
    pending: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        plan = self.plan
        self.server = plan.server()
        self.method = self.server.method
        self.view = self.method.view
        self.guard = guard_of(plan.settings, self.server.declared_uploads)
        self.accepted = dict.fromkeys(plan.sites, 0)
        self.exchange = Exchange(plan, self.transport, self.policy, self.emit)
        private = self.guard is not None
        self.collector = Collector(self.exchange, self.server, private=private)

    # A whole run -----------------------------------------------------------------------------

    def go(self) -> dict[str, Any]:
        """Run to the end and return the summary.

        Raises:
            TrainingError: if too few sites answer. The last good model is in the folder.
        """
        began = time.perf_counter()
        self._prepare()
        self.setup_seconds = time.perf_counter() - began
        try:
            while self.round < self.plan.settings.rounds:
                self._one_round()
            self._finish()
        except TrainingError:
            self._write_models()
            raise
        self._write_models()
        summary = self._summary()
        self.folder.write_summary(summary)
        self.emit("done", rounds=self.round)
        return summary

    def _prepare(self) -> None:
        """Ask every site how many nodes it scores; create the tracker; go to the checkpoint."""
        counts = np.zeros((len(self.plan.sites), len(SPLITS)))
        ready = 0
        for site, answer in self.exchange.ask(PREPARE, {s: {} for s in self.plan.sites}, {}):
            try:
                facts = self.exchange.read(answer, PREPARE, 0, HEADER).facts
                counts[self.plan.sites.index(site)] = _read_counts(facts)
                ready += 1
            except WireError as error:
                self.exchange.note_trouble(self.round + 1, "refused", site, str(error))
        if ready < self.policy.min_sites:
            raise TrainingError(
                f"{ready} of {len(self.plan.sites)} sites could prepare for the run, "
                f"{self.policy.min_sites} are needed{self.exchange.reasons(self.round + 1)}"
            )
        self.tracker = make_tracker(
            self.method,
            self.plan.settings,
            counts,
            [len(self.plan.sites)],
            one_model=self.server.one_model,
        )
        self._restore()

    def _one_round(self) -> None:
        began = time.perf_counter()
        number, sites = self.round + 1, self.plan.sites
        self.emit("round", round=number, rounds=self.plan.settings.rounds)
        download = self.server.download(range(len(sites)))
        contract = self.server.upload_contract(self.round)
        open_round = OpenRound(number, self._facts(sites, number), download, contract)
        uploads, late = self.collector.collect(open_round)
        reports = open_round.reports
        self._complete_record({s: r.received for s, r in reports.items()}, download)
        self.server.state = self.server.aggregate(uploads, self.round)
        self.round = number
        self.accepted |= dict.fromkeys(reports, number)
        trained = self._stack_scores({s: r.trained for s, r in reports.items()})
        self.tracker.update("trained", trained, number)
        self.pending = {
            "round": number,
            **stage_of(self.method, number),
            "seconds": time.perf_counter() - began,
            "seconds_evaluation": 0.0,
            "loss": _mean(reports[site].loss for site in sites if site in reports),
            "bytes_up": open_round.bytes_up,
            "bytes_down": self.server.download_contract(self.round - 1).bytes * len(sites),
            "selected": len(sites),
            "failed": [k for k, s in enumerate(sites) if s in late and s not in reports],
            "refused": [k for k, s in enumerate(sites) if s in open_round.refused],
            **spent(self.plan.settings, self.guard, number),
            "trained": self.tracker.current(0)["trained"],
        }
        self._checkpoint()

    def _complete_record(
        self, received: Mapping[str, FloatArray | None], download: Message
    ) -> None:
        """Add the scores of the received view to the record of the last round and write it.

        Args:
            received: scores of the model in `download`, by site.
            download: what the server sent after that round.
        """
        if self.pending is None:
            return
        scores = self._stack_scores({s: own for s, own in received.items() if own is not None})
        improved = self.tracker.update("received", scores, self.round)
        if self.view == "received" and self.server.one_model and improved.any():
            self.tracker.keep_models(self._global_state(download), improved)
        record = {**self.pending, "received": self.tracker.current(0)["received"]}
        self.records.append(record)
        self.folder.append(record)
        self.pending = None
        if self.progress:
            self.progress(record)

    def _finish(self) -> None:
        """Send the last model for scoring; then tell every site which round was its best."""
        sites = self.plan.sites
        download = self.server.download(range(len(sites)))
        received: dict[str, FloatArray | None] = {}
        for site, answer in self.exchange.ask(FINISH, self._facts(sites, self.round), download):
            try:
                facts = self.exchange.read(answer, FINISH, self.round, HEADER).facts
                received[site] = read_scores(facts, "received", len(self.tracker.names))
            except WireError as error:
                self.exchange.note_trouble(self.round + 1, "refused", site, str(error))
        for site in sites:
            if site not in received:
                reason = "did not take the last model"
                self.exchange.note_trouble(self.round + 1, "late", site, reason)
        self._complete_record(received, download)
        self._checkpoint()
        for _ in self.exchange.ask(CLOSE, self._facts(received, self.round), {}):
            pass

    def _facts(self, sites: Iterable[str], number: int) -> dict[str, dict[str, Any]]:
        """Return the facts in a message about a round, by site."""
        best = self.tracker.best_round[self.view][self.tracker.group].tolist()
        return {
            site: {
                "round": number,
                "base": self.accepted[site],
                "best": int(best[self.plan.sites.index(site)]),
            }
            for site in sites
        }

    def _stack_scores(self, scores: Mapping[str, FloatArray]) -> FloatArray:
        """Stack the scores of all sites; NaN for sites that sent none."""
        stacked = np.full((len(self.plan.sites), len(SPLITS), len(self.tracker.names)), math.nan)
        for site, own in scores.items():
            stacked[self.plan.sites.index(site)] = own
        return stacked

    # The run folder --------------------------------------------------------------------------

    def _checkpoint(self) -> None:
        ServerCheckpoint(
            self.round,
            self.server.state,
            self.tracker.tensors(),
            self.accepted,
            self.exchange.troubles,
            self.pending,
        ).save(self.folder)

    def _restore(self) -> None:
        """Go to the state of the folder's checkpoint, if there is one."""
        found = ServerCheckpoint.load(self.folder)
        if found is None:
            self.folder.truncate(0)
            return
        self.server.state = found.state
        self.tracker.restore(found.tracker, torch.device("cpu"))
        self.round, self.accepted, self.pending = found.round, found.accepted, found.pending
        self.exchange.troubles[:0] = found.troubles
        recorded = self.round - (self.pending is not None)
        self.records = self.folder.truncate(recorded)
        self.emit("resumed", round=self.round)

    def _write_models(self) -> None:
        """Write the global model of the last and the best round, if the run has a global model."""
        if not self.server.one_model or not self.round:
            return
        plan = self.plan
        last = SavedModel(
            method=self.method.name,
            hyperparameters=dataclasses.asdict(self.method),
            settings=plan.settings,
            width=plan.width,
            classes=plan.schema.classes,
            tensors=without_axis(self._global_state(self.server.download([0]))),
            seed=plan.seed,
            round=self.round,
            which=LAST,
            dataset=self.dataset,
            network=plan.network().describe(),
            encoding=plan.encoding,
        )
        models = {GLOBAL: last}
        if self.tracker.models:
            models[f"{GLOBAL}-{BEST}"] = dataclasses.replace(
                last,
                which=BEST,
                round=int(self.tracker.best_round[self.view][0]),
                tensors=without_axis(self.tracker.models),
            )
        save_models(self.folder, models)

    def _global_state(self, download: Message) -> Message:
        """Return the global model in a download, with what predictions need of it."""
        return {**model_part(download), **received_state(self.method, download)}

    def _summary(self) -> dict[str, Any]:
        plan = self.plan
        facts = RunFacts(
            method=self.method,
            settings=plan.settings,
            network=plan.network().describe(),
            data={
                "dataset": self.dataset,
                "partition": {  # the server does not know the nodes: the schema's hash stands in
                    "name": "natural",
                    "clients": len(plan.sites),
                    "sha256": plan.schema.digest,
                },
                "split": plan.split or "each site's own, else 0.6,0.2,0.2",
                "classes": list(plan.schema.classes),
                "clients": list(plan.sites),
                "seeds": [plan.seed],
            },
            engine="flower",
            selection=self.tracker.selection,
            setup_seconds=self.setup_seconds,
            privacy=self._privacy(),
            more={"troubles": self.exchange.troubles},
            remarks=[*self.server.remarks(), *self._metric_note()],
        )
        return summarise(facts, self.tracker, self.records, self.round)

    def _metric_note(self) -> list[str]:
        """Return a note that a rare class would call for another metric."""
        if len(self.plan.schema.classes) != 2 or self.plan.settings.metric != "accuracy":
            return []
        return ["the server sees no label counts: if one class is rare, choose --metric auprc"]

    def _privacy(self) -> dict[str, Any]:
        found = account(self.plan.settings, self.guard, self.round)
        if self.plan.settings.secure_aggregation:
            from polyphily.privacy.secure_aggregation import promise

            found |= promise(len(self.plan.sites))
        return found


def _mean(losses: Iterable[float | None]) -> float | None:
    known = [loss for loss in losses if loss is not None]
    return statistics.fmean(known) if known else None


def _read_counts(facts: Mapping[str, Any]) -> list[float]:
    """Read how many nodes a site scores in each split."""
    try:
        counts = [float(value) for value in facts["counts"]]
    except (KeyError, TypeError, ValueError):
        raise WireError("no numbers of scored nodes in its answer") from None
    if len(counts) != len(SPLITS) or min(counts) < 0 or not math.isfinite(sum(counts)):
        raise WireError("its numbers of scored nodes are not valid")
    return counts
