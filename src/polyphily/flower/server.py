"""The server's side of a run: ask the sites, check what they send, aggregate, write it down.

One message per round and site carries the download there and the upload back, along with the scores
of both views. What a site scores of the model it receives arrives with its next answer, so a
round's record is complete one message later; a last message after the last round brings the rest.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

import polyphily
from polyphily.core.local import Message, model_part
from polyphily.core.method import Uploads
from polyphily.core.metrics import METRICS, SPLITS
from polyphily.engines.simulation import payload
from polyphily.errors import TrainingError, UserError
from polyphily.flower.plan import Plan, Schema, initial_parameters
from polyphily.flower.site import Trainer
from polyphily.flower.wire import (
    CLOSE,
    FINISH,
    HEADER,
    HELLO,
    PREPARE,
    ROUND,
    Contract,
    Parcel,
    WireError,
    size,
)
from polyphily.graphs.graph import Graph, Masks
from polyphily.graphs.random import generator
from polyphily.privacy.differential import account, spent
from polyphily.runs.folder import RunFolder
from polyphily.runs.run import VIEW_OF, peak_memory_mb, shortcuts, versions
from polyphily.runs.tracker import VIEWS, FloatArray, Tracker

if TYPE_CHECKING:
    from polyphily.flower.masks import Masking, Read

POLL = 0.5
EVENTS = "events.jsonl"
Emit = Callable[..., None]


@dataclass(frozen=True)
class Answer:
    """What came back from a site: the two parts of a message, or the reason why there is none."""

    text: str = ""
    blob: bytes = b""
    error: str = ""


class Transport(Protocol):
    """How messages get to the sites and back."""

    def online(self) -> set[str]:
        """The sites that are connected now."""

    def ask(self, messages: Mapping[str, Parcel], timeout: float) -> Iterator[tuple[str, Answer]]:
        """Sends a message to each site and yields answers as they come, until the time is up."""


@dataclass(frozen=True)
class Policy:
    """How much trouble a run puts up with.

    Attributes:
        min_sites: answers without which a round does not count.
        timeout: seconds a site has to answer.
        repeats: how often a round with too few answers is asked again.
        join_timeout: seconds to wait for the sites before the first round.
    """

    min_sites: int
    timeout: float = 600.0
    repeats: int = 2
    join_timeout: float = 600.0

    def __post_init__(self) -> None:
        if self.min_sites < 1 or self.repeats < 0 or min(self.timeout, self.join_timeout) <= 0:
            raise UserError("min_sites must be 1 or more, repeats 0 or more, timeouts above 0")


def log_to(folder: RunFolder, also: Callable[[dict[str, Any]], None] | None = None) -> Emit:
    """Writes what happens into the run folder, for whoever watches."""

    def emit(event: str, **facts: Any) -> None:
        entry = {"time": time.time(), "event": event, **facts}
        with (folder.path / EVENTS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, allow_nan=False) + "\n")
        if also:
            also(entry)

    return emit


def gather(
    transport: Transport, sites: Sequence[str], policy: Policy, emit: Emit
) -> dict[str, dict[str, Any]]:
    """Waits for the sites and asks each for its schema.

    Returns:
        The answers by site, in the order of `sites`.

    Raises:
        TrainingError: where too few sites came.
    """
    emit("waiting", sites=list(sites))
    answers: dict[str, dict[str, Any]] = {}
    heard: set[str] = set()
    deadline = time.monotonic() + policy.join_timeout
    while len(heard) < len(sites) and (left := deadline - time.monotonic()) > 0:
        fresh = (transport.online() & set(sites)) - heard
        if not fresh:
            time.sleep(POLL)
            continue
        hello = {site: Parcel({"kind": HELLO}) for site in sorted(fresh)}
        for site, answer in transport.ask(hello, min(policy.timeout, left)):
            heard.add(site)
            try:
                answers[site] = _hello(answer)
                emit("joined", site=site)
            except WireError as error:
                emit("refused", site=site, round=0, reason=str(error))
    if len(answers) < policy.min_sites:
        absent = [site for site in sites if site not in answers]
        raise TrainingError(
            f"{len(answers)} of {len(sites)} sites joined within {policy.join_timeout:g} s, "
            f"{policy.min_sites} are needed. Missing: {', '.join(absent)}"
        )
    return {site: answers[site] for site in sites if site in answers}


def _hello(answer: Answer) -> dict[str, Any]:
    facts = _open(answer, HEADER * 64).facts
    try:
        schema = Schema(
            tuple(map(str, facts["features"])),
            int(facts["width"]),
            tuple(map(str, facts["classes"])),
        )
        if facts["digest"] != schema.digest:
            raise WireError("its schema does not match its own hash")
        return {"schema": schema, "dense": bool(facts["dense"])}
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"no schema in its answer: {error!r}") from None


def _open(answer: Answer, limit: int) -> Parcel:
    """The message in an answer, once its size is known to be possible."""
    if answer.error:
        raise WireError(answer.error)
    found = size(answer.text, answer.blob)
    if found > limit:
        raise WireError(f"sent {found:,} bytes where at most {limit:,} can be right")
    return Parcel.unpack(answer.text, answer.blob)


@dataclass
class _Accepted:
    """What a site says in a good answer to a round."""

    loss: float | None  # kept at the site under differential privacy
    seconds: float
    received: FloatArray | None
    trained: FloatArray


@dataclass
class _UnderWay:
    """A round while sites are asked.

    Attributes:
        number: its number.
        download: what is sent, stacked over sites.
        contract: what an upload must look like.
        good: who answered well, and what they said.
        refused: whose answer could not be used, and why.
        silent: who was asked and did not answer.
        plain: uploads by site, where they are not masked.
        uploads: what is aggregated.
        bytes_up: what it took to send it.
        trouble: why there is no sum, though enough sites answered.
    """

    number: int
    download: Message
    contract: Contract
    good: dict[str, _Accepted] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    plain: dict[str, Message] = field(default_factory=dict)
    uploads: Uploads | None = None
    bytes_up: int = 0
    trouble: str = ""


@dataclass
class Coordinator:
    """The rounds of a run.

    Attributes:
        plan: what server and sites agreed on.
        transport: the way to the sites.
        folder: the run folder, laid out already.
        policy: timeouts and the like.
        emit: where events go.
        progress: called with each round's record, once it is complete.
        dataset: what to call the data in the summary.
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
    troubles: list[dict[str, Any]] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    pending: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        plan = self.plan
        self.method = plan.make_method()
        self.view = VIEW_OF[self.method.evaluated]
        network = plan.network(self.method)
        params = initial_parameters(network)
        shared = {n: t[0] for n, t in params.items() if self.method.shares(network, n)}
        self.one_model = self.method.evaluated == "global" and len(shared) == len(params)
        self.state = self.method.open(shared, len(plan.sites))
        self.accepted = dict.fromkeys(plan.sites, 0)
        chosen = plan.settings.selection
        self.selection = self.method.selection if chosen == "method" else chosen
        self._example = Trainer(
            dataclasses.replace(plan, settings=dataclasses.replace(plan.settings, epochs=1)),
            _tiny_graph(plan.schema),
            client=0,
        )
        self._example_memory = self._example.initial_memory()
        self._masks: Masking | None = None

    # A whole run -----------------------------------------------------------------------------

    def go(self) -> dict[str, Any]:
        """Runs to the end; the summary.

        Raises:
            TrainingError: when too few sites answer; the last good model is in the folder.
        """
        began = time.perf_counter()
        self._track()
        self.setup_seconds = time.perf_counter() - began
        rounds = self.plan.settings.rounds
        try:
            while self.round < rounds:
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

    def _track(self) -> None:
        """Asks every site how many nodes it scores on, and gets the tracker ready."""
        counts = np.zeros((len(self.plan.sites), len(SPLITS)))
        ready = 0
        for site, answer in self._ask(PREPARE, {site: {} for site in self.plan.sites}, {}):
            try:
                facts = self._checked(answer, PREPARE, HEADER).facts
                found = [float(value) for value in facts["counts"]]
                if len(found) != len(SPLITS) or min(found) < 0 or not math.isfinite(sum(found)):
                    raise WireError("its numbers of scored nodes cannot be")
                counts[self.plan.sites.index(site)] = found
                ready += 1
            except (WireError, KeyError, TypeError, ValueError) as error:
                self._refuse(site, str(error))
        if ready < self.policy.min_sites:
            raise TrainingError(
                f"{ready} of {len(self.plan.sites)} sites could prepare for the run, "
                f"{self.policy.min_sites} are needed{self._reasons()}"
            )
        self.tracker = Tracker(
            counts,
            [len(self.plan.sites)],
            self.plan.settings.metric or "accuracy",
            per_client=self.selection == "client",
            view=self.view,
            one_model=self.one_model,
        )
        self._restore()

    # One round -------------------------------------------------------------------------------

    def _one_round(self) -> None:
        began = time.perf_counter()
        number, sites = self.round + 1, self.plan.sites
        self.emit("round", round=number, rounds=self.plan.settings.rounds)
        download = self.method.download(self.state, range(len(sites)))
        now = _UnderWay(number, download, self._contract(download))
        uploads, late = self._uploads(now)
        good = now.good
        self._complete({s: a.received for s, a in good.items()}, download)
        members = [site for site in sites if site in good]
        self._aggregate(uploads)
        self.round = number
        self.accepted |= dict.fromkeys(members, number)
        trained = self._scores({site: good[site].trained for site in members})
        self.tracker.update("trained", trained, number)
        self.pending = {
            "round": number,
            "seconds": time.perf_counter() - began,
            "seconds_evaluation": 0.0,
            "loss": _mean(good[site].loss for site in members),
            "bytes_up": now.bytes_up,
            "bytes_down": payload(download) * len(sites),
            "selected": len(sites),
            "failed": [k for k, s in enumerate(sites) if s in late and s not in good],
            "refused": [k for k, site in enumerate(sites) if site in now.refused],
            **spent(self.plan.settings, self._example.guard, number),
            "trained": self.tracker.current(0)["trained"],
        }
        self._checkpoint()

    def _uploads(self, now: _UnderWay) -> tuple[Uploads, list[str]]:
        """What is to be aggregated, asked for until enough sites answered, and who was late.

        Raises:
            TrainingError: where too few answered in all attempts.
        """
        sites, masks = self.plan.sites, self._masking() if now.contract.tensors else None
        needed = max(self.policy.min_sites, masks.least if masks else 1)
        for attempt in range(1 + self.policy.repeats):
            missing = [site for site in sites if masks or site not in now.good]
            if attempt:
                self.emit("repeat", round=now.number, attempt=attempt + 1, sites=missing)
            if masks:
                self._ask_masked(now, masks, needed)
            else:
                self._ask_plain(now, missing)
            if now.uploads is not None and len(now.good) >= needed:
                break
        late = [site for site in sites if site in now.silent and site not in now.refused]
        for site in late:
            words = masks.of_silent(site) if masks and now.uploads is not None else ""
            self._trouble("late", site, f"no answer within {self.policy.timeout:g} s{words}")
        if now.uploads is None or len(now.good) < needed:
            raise TrainingError(
                f"round {now.number}: {len(now.good)} of {len(sites)} sites answered well, "
                f"{needed} are needed, after {1 + self.policy.repeats} attempts"
                f"{self._reasons(now.trouble)}. "
                f"The last good model is that of round {self.round}."
            )
        return now.uploads, late

    def _ask_plain(self, now: _UnderWay, sites: Sequence[str]) -> None:
        """Asks some sites for their uploads; what is good is added to what came before."""
        uploads: dict[str, Message] = now.plain
        now.silent = set()
        asked = self._asked(sites, now.number)
        for site, answer in self._heard(now, ROUND, asked, now.download):
            with self._watched(now, site):
                parcel = self._checked(answer, ROUND, now.contract.limit)
                now.contract.check(parcel.tensors)
                now.good[site] = self._read(parcel)
                uploads[site] = parcel.tensors
                self.emit("answer", round=now.number, site=site, seconds=now.good[site].seconds)
        members = [site for site in self.plan.sites if site in now.good]
        if members:
            tensors = {n: torch.cat([uploads[s][n] for s in members]) for n in uploads[members[0]]}
            clients = tuple(self.plan.sites.index(site) for site in members)
            now.uploads = Uploads(clients, tensors)
            now.bytes_up = sum(payload(uploads[site]) for site in members)

    def _ask_masked(self, now: _UnderWay, masks: Masking, needed: int) -> None:
        """Asks all sites for masked uploads, and for what takes the masks off their sum.

        Answers of an earlier attempt are of no use: their masks do not cancel with these. A sum is
        uncovered only once enough sites answered for the round to count: of two sums of a round,
        over different sites, the difference would tell of single uploads.

        Raises:
            TrainingError: for a sum that cannot be right.
        """
        now.good, now.refused, now.uploads, now.trouble = {}, {}, None, ""
        now.silent, self._now = set(), now
        try:
            self._gather_masked(now, masks, masks.open())
            if len(now.good) < needed:
                return
            total = masks.total()
        except WireError as error:
            now.trouble = str(error)
            self.emit("note", text=f"round {now.number}: {error}")
            return
        try:
            now.uploads, now.bytes_up = masks.uploads(total, now.contract), masks.bytes_up
        except WireError as error:
            raise TrainingError(
                f"round {now.number}: {error}. Whose they were cannot be told under secure "
                "aggregation, and a second sum of the round could give a site's upload away: it "
                f"is not asked for again. The last good model is that of round {self.round}."
            ) from None
        now.refused = {s: why for s, why in now.refused.items() if s not in now.good}

    def _gather_masked(self, now: _UnderWay, masks: Masking, sites: Sequence[str]) -> None:
        """The round's own message, to the sites that have each other's keys."""
        ahead = now.number < self.plan.settings.rounds
        limit = 8 * now.contract.count + HEADER
        asked = {
            site: {**facts, "masks": masks.message(site, ahead=ahead)}
            for site, facts in self._asked(sites, now.number).items()
        }
        for site, answer in self._heard(now, ROUND, asked, now.download):
            with self._watched(now, site):
                parcel = self._checked(answer, ROUND, limit)
                accepted = self._read(parcel)
                masks.take(site, parcel, now.contract.count, ahead=ahead)
                now.good[site] = accepted
                self.emit("answer", round=now.number, site=site, seconds=accepted.seconds)

    def _heard(
        self,
        now: _UnderWay,
        kind: str,
        asked: Mapping[str, Mapping[str, Any]],
        download: Message,
    ) -> Iterator[tuple[str, Answer]]:
        """Asks, and notes who does not answer."""
        now.silent |= asked.keys()
        for site, answer in self._ask(kind, asked, download):
            now.silent.discard(site)
            yield site, answer

    def _masking(self) -> Masking | None:
        """The server's part in secure aggregation, where it was agreed on."""
        if self._masks is None and self.plan.settings.secure_aggregation:
            from polyphily.flower.masks import Masking

            self._masks = Masking(self.plan.sites, self.method, self._exchange)
        return self._masks

    def _exchange(self, kind: str, asked: Mapping[str, Mapping[str, Any]], read: Read) -> None:
        """One step of secure aggregation before or after the round's own message."""
        number = self.round + 1
        messages = {site: {"round": number, **facts} for site, facts in asked.items()}
        for site, answer in self._heard(self._now, kind, messages, {}):
            with self._watched(self._now, site):
                read(site, self._checked(answer, kind, HEADER).facts)

    @contextmanager
    def _watched(self, now: _UnderWay, site: str) -> Iterator[None]:
        """Refuses a site's answer that cannot be used, by name."""
        try:
            yield
            now.refused.pop(site, None)
        except WireError as error:
            now.refused[site] = str(error)
            self._refuse(site, str(error))

    def _aggregate(self, uploads: Uploads) -> None:
        rng = generator(self.plan.seed, f"server/{self.round}")
        with torch.no_grad():
            self.state = self.method.aggregate(self.state, uploads, rng)

    def _complete(self, received: Mapping[str, FloatArray | None], download: Message) -> None:
        """Completes the record of the round before: how well the model did that was sent back."""
        if self.pending is None:
            return
        scores = self._scores({s: own for s, own in received.items() if own is not None})
        better = self.tracker.update("received", scores, self.round)
        if self.view == "received" and self.one_model and better.any():
            self.tracker.keep_models(model_part(download), better)
        record = {**self.pending, "received": self.tracker.current(0)["received"]}
        self.records.append(record)
        self.folder.append(record)
        self.pending = None
        if self.progress:
            self.progress(record)

    def _finish(self) -> None:
        """Sends the last model, and tells every site which round was its best."""
        sites = self.plan.sites
        download = self.method.download(self.state, range(len(sites)))
        received: dict[str, FloatArray | None] = {}
        for site, answer in self._ask(FINISH, self._asked(sites, self.round), download):
            try:
                facts = self._checked(answer, FINISH, HEADER).facts
                received[site] = _scores_of(facts, "received")
            except WireError as error:
                self._refuse(site, str(error))
        for site in sites:
            if site not in received:
                self._trouble("late", site, "did not take the last model")
        self._complete(received, download)
        self._checkpoint()
        for _ in self._ask(CLOSE, self._asked(received, self.round), {}):
            pass

    # Messages --------------------------------------------------------------------------------

    def _asked(self, sites: Iterable[str], number: int) -> dict[str, dict[str, Any]]:
        """What a message says beside its tensors, by site."""
        best = self.tracker.best_round[self.view][self.tracker.group].tolist()
        return {
            site: {
                "round": number,
                "base": self.accepted[site],
                "best": int(best[self.plan.sites.index(site)]),
            }
            for site in sites
        }

    def _ask(
        self, kind: str, asked: Mapping[str, Mapping[str, Any]], download: Message
    ) -> Iterator[tuple[str, Answer]]:
        plan = self.plan.to_json()
        place = {site: k for k, site in enumerate(self.plan.sites)}
        messages = {
            site: Parcel(
                {"kind": kind, "plan": plan, **facts},
                {n: t[place[site] : place[site] + 1] for n, t in download.items()},
            )
            for site, facts in asked.items()
        }
        yield from self.transport.ask(messages, self.policy.timeout)

    def _checked(self, answer: Answer, kind: str, limit: int) -> Parcel:
        """An answer to the message just sent, and to no other."""
        parcel = _open(answer, limit)
        number = {PREPARE: 0, FINISH: self.round}.get(kind, self.round + 1)
        wanted = {"kind": kind, "run": self.plan.run, "round": number}
        for name, value in wanted.items():
            if parcel.facts.get(name) != value:
                raise WireError(f"answered {name} {parcel.facts.get(name)!r}, not {value!r}")
        if note := parcel.facts.get("note"):
            self.emit("note", text=str(note)[:200])
        return parcel

    def _read(self, parcel: Parcel) -> _Accepted:
        """What an answer says beside its tensors."""
        loss, seconds = (parcel.facts.get(name) for name in ("loss", "seconds"))
        if self._example.guard is not None:
            loss = None
        elif not isinstance(loss, int | float) or not math.isfinite(loss):
            raise WireError("its loss is not finite")
        if not isinstance(seconds, int | float) or not math.isfinite(seconds):
            raise WireError("its time is not a number")
        trained = _scores_of(parcel.facts, "trained")
        received = _scores_of(parcel.facts, "received") if self.round else None
        return _Accepted(loss, float(seconds), received, trained)

    def _contract(self, download: Message) -> Contract:
        """What an upload of this round must look like, from the same round on a made-up graph."""
        first = {name: value[:1] for name, value in download.items()}
        upload, _, _ = self._example.train(first, self._example_memory, self.round)
        return Contract.of(upload)

    def _scores(self, found: Mapping[str, FloatArray]) -> FloatArray:
        """Scores of all sites, NaN for those that sent none."""
        scores = np.full((len(self.plan.sites), len(SPLITS), len(METRICS)), math.nan)
        for site, own in found.items():
            scores[self.plan.sites.index(site)] = own
        return scores

    # Trouble ---------------------------------------------------------------------------------

    def _refuse(self, site: str, reason: str) -> None:
        self._trouble("refused", site, reason)

    def _trouble(self, what: str, site: str, reason: str) -> None:
        reason = " ".join(reason.split())[:300]
        entry = {"round": self.round + 1, "site": site, "what": what, "reason": reason}
        self.troubles.append(entry)
        self.emit(what, round=self.round + 1, site=site, reason=reason)

    def _reasons(self, more: str = "") -> str:
        found = [t for t in self.troubles if t["round"] == self.round + 1]
        latest = {t["site"]: f"{t['site']}: {t['reason']}" for t in found}
        words = [*latest.values(), *([more] if more else [])]
        return f" ({'; '.join(words)})" if words else ""

    # The run folder --------------------------------------------------------------------------

    def _checkpoint(self) -> None:
        tensors = {f"state/{n}": t for n, t in self.state.items()}
        tensors |= {f"tracker/{n}": t for n, t in self.tracker.tensors().items()}
        progress = {
            "round": self.round,
            "accepted": self.accepted,
            "troubles": self.troubles,
            "pending": self.pending,
        }
        self.folder.save_checkpoint(tensors, progress)

    def _restore(self) -> None:
        """Goes on after the folder's checkpoint, where there is one."""
        found = self.folder.load_checkpoint()
        if found is None:
            self.folder.truncate(0)
            return
        tensors, progress = found

        def part(prefix: str) -> Message:
            return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}

        self.state = part("state/")
        self.tracker.restore(part("tracker/"), torch.device("cpu"))
        self.round = int(progress["round"])
        self.accepted = {site: int(r) for site, r in progress["accepted"].items()}
        self.troubles = [*progress["troubles"], *self.troubles]
        self.pending = progress["pending"]
        done = self.round - (self.pending is not None)
        self.records = self.folder.truncate(done)
        self.emit("resumed", round=self.round)

    def _write_models(self) -> None:
        """The global model of the last and the best round; private parts are at the sites."""
        if not self.one_model or not self.round:
            return
        last = model_part(self.method.download(self.state, [0]))
        models = {"global": {n: t[0] for n, t in last.items()}}
        if self.tracker.models:
            models["global-best"] = {n: t[0] for n, t in self.tracker.models.items()}
        facts = {"polyphily": polyphily.__version__, "method": self.method.name}
        facts |= {"backbone": str(self.plan.settings.backbone), "dataset": self.dataset}
        self.folder.save_models(models, facts)

    def _summary(self) -> dict[str, Any]:
        plan, settings = self.plan, self.plan.settings
        views = {view: self.tracker.moments(view, 0) for view in VIEWS}

        def median(name: str) -> float:
            return float(statistics.median(record[name] for record in self.records))

        return {
            "polyphily": polyphily.__version__,
            "method": self.method.name,
            "hyperparameters": dataclasses.asdict(self.method),
            "dataset": self.dataset,
            "partition": {  # who holds which node is not known here: the agreed schema stands in
                "name": "natural",
                "clients": len(plan.sites),
                "sha256": plan.schema.digest,
            },
            "split": plan.split or "each site's own, else 0.6,0.2,0.2",
            "classes": list(plan.schema.classes),
            "clients": list(plan.sites),
            "seeds": [plan.seed],
            "rounds": self.round,
            "epochs": settings.epochs,
            "backbone": settings.backbone,
            "settings": {k: v for k, v in dataclasses.asdict(settings).items() if v is not None},
            "device": settings.device,
            "engine": "flower",
            **shortcuts(settings),
            "evaluated": self.method.evaluated,
            "selection": {"by": self.selection, "metric": settings.metric},
            **views[self.view],
            "views": views,
            "seconds_per_round_median": median("seconds"),
            "seconds_evaluation_median": median("seconds_evaluation"),
            "setup_seconds": self.setup_seconds,
            "peak_memory_mb": peak_memory_mb(),
            "bytes_up_per_round": median("bytes_up"),
            "bytes_down_per_round": median("bytes_down"),
            "refused_updates": sum(len(record["refused"]) for record in self.records),
            "troubles": self.troubles,
            **account(settings, self._example.guard, self.round),
            **self._promise(),
            "notes": [],
            "versions": versions(),
        }

    def _promise(self) -> dict[str, Any]:
        if not self.plan.settings.secure_aggregation:
            return {}
        from polyphily.flower.masks import promise

        return promise(len(self.plan.sites))


def _mean(losses: Iterable[float | None]) -> float | None:
    known = [loss for loss in losses if loss is not None]
    return statistics.fmean(known) if known else None


def _scores_of(facts: Mapping[str, Any], view: str) -> FloatArray:
    """A view's scores in an answer, `[splits, metrics]`, all of them shares or nothing."""
    try:
        scores = np.array(facts[view], dtype=np.float64)
    except (KeyError, TypeError, ValueError):
        raise WireError(f"no scores of the {view} model in its answer") from None
    known = scores[~np.isnan(scores)] if scores.dtype == np.float64 else scores
    if scores.shape != (len(SPLITS), len(METRICS)) or (known < 0).any() or (known > 1).any():
        raise WireError(f"its scores of the {view} model cannot be")
    return scores


def _tiny_graph(schema: Schema) -> Graph:
    """A made-up graph of a federation's shape, to learn what an upload looks like."""
    rng = np.random.default_rng(0)
    nodes = max(40, 2 * len(schema.classes))
    labels = np.arange(nodes) % len(schema.classes)
    part = np.arange(nodes) // len(schema.classes) % 4
    return Graph.build(
        rng.normal(size=(nodes, schema.width)).astype(np.float32),
        rng.integers(0, nodes, size=(2, 3 * nodes)),
        labels,
        masks=Masks(part < 2, part == 2, part == 3),
        name="example",
    )
