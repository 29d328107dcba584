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
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from polyphily.core.messages import Message, Role, State, Uploads, model_part
from polyphily.core.metrics import SPLITS
from polyphily.errors import PolyphilyError, TrainingError
from polyphily.flower.bounds import LARGEST_COUNT, Bounds, drowning
from polyphily.flower.checkpoint import ServerCheckpoint
from polyphily.flower.collecting import Collector, Exchange, OpenRound, read_scores
from polyphily.flower.joining import Emit, Policy, Transport, Troubles
from polyphily.flower.plan import Plan
from polyphily.flower.wire import CLOSE, FINISH, HEADER, PREPARE, WireError
from polyphily.graphs.checked import Reader, plain
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
        troubles: late and refused answers so far, and sites that were left out.
        command: makes the run once more; empty if it is not known.
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
    troubles: Troubles = field(default_factory=list)
    command: str = ""

    def __post_init__(self) -> None:
        plan = self.plan
        self.server = plan.server()
        self.method = self.server.method
        self.view = self.method.view
        self.guard = guard_of(plan.settings, self.server.declared_uploads)
        self.accepted = dict.fromkeys(plan.sites, 0)
        self.exchange = Exchange(plan, self.transport, self.policy, self.emit, self.troubles)
        noise = 0.0 if self.guard is None else self.guard.deviation
        self.bounds = Bounds(self.server.declared_uploads, self.policy, noise)
        private = self.guard is not None
        self.collector = Collector(self.exchange, self.server, self.bounds, private=private)

    # A whole run -----------------------------------------------------------------------------

    def go(self) -> dict[str, Any]:
        """Run to the end and return the summary.

        Raises:
            TrainingError: if too few sites answer. The last good model is in the folder.
        """
        began = time.perf_counter()
        self._prepare()
        self.setup_seconds = time.perf_counter() - began
        evaluated = {"evaluated": self.method.evaluated}
        self.folder.write_start({**self._data(), **self._more(), **evaluated})
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
        found: dict[str, list[float]] = {}
        for attempt in range(1 + self.policy.repeats):
            missing = [site for site in self.plan.sites if site not in found]
            if attempt and len(found) >= self.policy.min_sites:
                break
            if attempt:
                self.emit("repeat", round=self.round + 1, attempt=attempt + 1, sites=missing)
            for site, answer in self.exchange.ask(PREPARE, {s: {} for s in missing}, {}):
                with self.exchange.refusing(self.round + 1, site):
                    facts = self.exchange.read(site, answer, PREPARE, 0, HEADER).facts
                    found[site] = _read_counts(facts)
        totals = {site: sum(own) for site, own in found.items()}
        for site, why in drowning(totals, self.policy.max_weight).items():
            del found[site]
            reason = f"its number of scored nodes {why} (max_weight)"
            self.exchange.note_trouble(self.round + 1, "refused", site, reason)
        counts = np.zeros((len(self.plan.sites), len(SPLITS)))
        for site, own in found.items():
            counts[self.plan.sites.index(site)] = own
        ready = len(found)
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
        self.server.state = self._aggregate(uploads, open_round)
        self.round = number
        self.accepted |= dict.fromkeys(reports, number)
        self._track("trained", {s: r.trained for s, r in reports.items()}, number)
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
            **self._unscored("trained", reports),
            "trained": self.tracker.current(0)["trained"],
        }
        self._checkpoint()

    def _aggregate(self, uploads: Uploads, round_: OpenRound) -> State:
        """Return the state after a round, if it is sound.

        If it is not, the server looks for one site without whose upload it would be, and refuses
        that site's answer.

        Raises:
            TrainingError: if there is none, or if too few sites would be left.
        """
        state, reason = self._try_to_aggregate(uploads, round_)
        if state is not None:
            return state
        for k, site in enumerate([s for s in self.plan.sites if s in round_.plain]):
            if len(round_.plain) <= self.policy.min_sites:
                break
            rest = [i for i in range(len(uploads.clients)) if i != k]
            without = Uploads(
                tuple(uploads.clients[i] for i in rest),
                {name: value[rest] for name, value in uploads.tensors.items()},
            )
            state, _ = self._try_to_aggregate(without, round_)
            if state is not None:
                self.collector.refuse(site, f"with its upload the aggregate is unsound: {reason}")
                return state
        raise TrainingError(
            f"round {round_.number}: the aggregate of the uploads is unsound: {reason}. No single "
            "site could be left out to mend it. "
            f"The last good model is that of round {round_.number - 1}."
        )

    def _try_to_aggregate(self, uploads: Uploads, round_: OpenRound) -> tuple[State | None, str]:
        """Return the state after a round, or None and why it must not be kept."""
        number, record = round_.number, dict(self.bounds.record)
        sites = [self.plan.sites[k] for k in uploads.clients] or [self.plan.sites[0]]
        own = {
            site: {name: value[i : i + 1] for name, value in uploads.tensors.items()}
            for i, site in enumerate(sites)
        }
        try:
            state = self.server.aggregate(uploads, number - 1)
            following = self.method.download(state, range(len(self.plan.sites)))
            self.bounds.accept(number, own, {s: self.collector.download_to(s) for s in sites})
            models = {
                name: round_.download[name]
                for entry in self.server.declared_downloads
                if entry.role is Role.MODEL
                for name in entry.shapes
                if name in round_.download
            }
            reason = self.bounds.reason_against(state, models, following)
        except PolyphilyError:
            raise
        except Exception as error:  # numbers that a method's server cannot compute with
            reason = plain(f"{type(error).__name__}: {error}")
        if not reason:
            return state, ""
        self.bounds.record = record
        return None, reason

    def _track(
        self, view: str, scores: Mapping[str, FloatArray], number: int
    ) -> npt.NDArray[np.bool_]:
        """Add the scores of the sites that sent some; return which groups improved."""
        present = np.array([site in scores for site in self.plan.sites])
        return self.tracker.update(view, self._stack_scores(scores), number, present)

    def _unscored(self, view: str, scored: Collection[str]) -> dict[str, list[int]]:
        """Return the mark in a record that some sites sent no scores; nothing if all did."""
        missing = [k for k, site in enumerate(self.plan.sites) if site not in scored]
        return {f"unscored_{view}": missing} if missing else {}

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
        scores = {s: own for s, own in received.items() if own is not None}
        improved = self._track("received", scores, self.round)
        if self.view == "received" and self.server.one_model and improved.any():
            self.tracker.keep_models(self._global_state(download), improved)
        record = {
            **self.pending,
            **self._unscored("received", scores),
            "received": self.tracker.current(0)["received"],
        }
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
            with self.exchange.refusing(self.round + 1, site):
                facts = self.exchange.read(site, answer, FINISH, self.round, HEADER).facts
                received[site] = read_scores(facts, "received", len(self.tracker.names))
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
            self.bounds.record,
        ).save(self.folder)

    def _restore(self) -> None:
        """Go to the state of the folder's checkpoint, if there is one."""
        found, damaged = ServerCheckpoint.load_last(self.folder)
        for reason in damaged:
            self.emit("note", text=f"a checkpoint cannot be used: {reason}")
        if found is None:
            self.folder.truncate(0)
            return
        if damaged:
            self.emit("note", text=f"going back to the checkpoint of round {found.round}")
        self.server.state = found.state
        self.tracker.restore(found.tracker, torch.device("cpu"))
        self.round, self.accepted, self.pending = found.round, found.accepted, found.pending
        self.exchange.troubles[:0] = found.troubles
        self.bounds.record = dict(found.changes)
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

    def _data(self) -> dict[str, Any]:
        """Return what the summary says about the data."""
        plan = self.plan
        return {
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
        }

    def _more(self) -> dict[str, Any]:
        """Return what only the summary of a deployed run has."""
        command = {"command": self.command} if self.command else {}
        return {"troubles": self.exchange.troubles, **command}

    def _summary(self) -> dict[str, Any]:
        plan = self.plan
        facts = RunFacts(
            method=self.method,
            settings=plan.settings,
            network=plan.network().describe(),
            data=self._data(),
            engine="flower",
            selection=self.tracker.selection,
            setup_seconds=self.setup_seconds,
            privacy=self._privacy(),
            more=self._more(),
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
    counts = Reader(facts, "its answer").floats("counts", len(SPLITS))
    if min(counts) < 0 or max(counts) > LARGEST_COUNT:
        raise WireError("its numbers of scored nodes are not valid")
    return list(counts)
