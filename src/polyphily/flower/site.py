"""A site: it answers the server's messages.

Every message names the last round in which the server accepted an answer of this site (`base`), and
the site continues from its memory after that round. So an answer that was late, refused or asked
for twice has no effect.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import scipy.sparse as sp

from polyphily.core.budget import Budget
from polyphily.core.local import Local
from polyphily.core.messages import Message
from polyphily.core.method import Method
from polyphily.core.metrics import SPLITS, Evaluator, positive_index, score_axis
from polyphily.errors import UserError
from polyphily.flower.plan import Plan
from polyphily.flower.site_files import SiteState
from polyphily.flower.site_graph import SiteGraph
from polyphily.flower.wire import (
    CLOSE,
    CONFIRM,
    FINISH,
    HELLO,
    KEYS,
    KINDS,
    MEASURE,
    PREPARE,
    REVEAL,
    SHARE,
    Parcel,
    WireError,
)
from polyphily.graphs.encoding import Encoding
from polyphily.graphs.graph import Graph, own_relations
from polyphily.graphs.loading import with_split
from polyphily.graphs.statistics import train_statistics
from polyphily.privacy.differential import SystemDraws, check_privacy
from polyphily.runs.assessment import by_client
from polyphily.runs.decision import decide
from polyphily.runs.models import BEST, LAST, SavedModel, state_of, without_axis
from polyphily.runs.prediction import with_model
from polyphily.runtime.client import Clients, cohort_of
from polyphily.runtime.machine import check_device, matmul_precision
from polyphily.runtime.network import initial_parameters

if TYPE_CHECKING:
    from polyphily.flower.keys import Identity
    from polyphily.flower.masks import Member

Scores = list[list[float | None]]
"""A score per split and metric; None if there is nothing to score."""


def no_scores(metric: str | None) -> Scores:
    return [[None] * len(score_axis(metric)) for _ in SPLITS]


@dataclass(frozen=True)
class Prepared:
    """A plan with everything that a site needs to train, for its graph as the only client.

    Attributes:
        plan: of the run.
        number: the site's client number.
        clients: the runtime, with this client only.
        evaluator: scores the client's models.
        initial: the parameters before the first round.
        encoding: how the site's columns became features, with its own means if the plan leaves
            them open.
    """

    plan: Plan
    number: int
    clients: Clients
    evaluator: Evaluator
    initial: Message
    encoding: Encoding | None = None

    @classmethod
    def of(
        cls,
        plan: Plan,
        graph: Graph,
        number: int,
        device: str = "cpu",
        encoding: Encoding | None = None,
    ) -> Prepared:
        """Prepare a plan for an encoded graph with a split, on a device of the site's choice."""
        classes = len(plan.schema.classes)
        network = plan.network()
        cohort = cohort_of(plan.settings, [graph], [(plan.seed, number)], classes, device=device)
        clients = Clients.create(
            plan.make_method(),
            network,
            cohort,
            plan.settings,
            population=len(plan.sites),
            noise=SystemDraws(),
        )
        evaluator = Evaluator(
            cohort.graphs,
            classes,
            cohort.device,
            plan.settings.metric or "accuracy",
            positive_index(plan.schema.classes, plan.settings.positive),
        )
        return cls(plan, number, clients, evaluator, initial_parameters(network), encoding)

    @property
    def method(self) -> Method:
        return self.clients.method

    @property
    def private(self) -> bool:
        """True if the run has differential privacy."""
        return self.clients.guard is not None

    def on_device(self, message: Message) -> Message:
        return {n: t.to(self.clients.cohort.device) for n, t in message.items()}

    def train(
        self, received: Message, memory: Message, round_index: int
    ) -> tuple[Message, Message, float]:
        """Train one round; return the upload, the new memory and the mean loss."""
        with matmul_precision(self.plan.settings.precision):
            trained = self.clients.train(received, memory, round_index)
        return trained.uploads, trained.memory, float(trained.losses[0])

    def model(self, rounds: int, view: Local, which: str) -> SavedModel:
        """Return the model of a view, as the site saves it."""
        plan, method = self.plan, self.method
        return SavedModel(
            method=method.name,
            hyperparameters=asdict(method),
            settings=plan.settings,
            width=plan.width,
            classes=plan.schema.classes,
            tensors=without_axis(state_of(method, view)),
            seed=plan.seed,
            round=rounds,
            which=which,
            client=plan.sites[self.number],
            number=self.number,
            dataset=plan.run,
            network=self.clients.network.describe(),
            encoding=self.encoding,
        )

    def decided(self, model: SavedModel) -> SavedModel:
        """Return a model with the temperature and threshold for the site's validation nodes."""
        settings, classes = self.plan.settings, self.plan.schema.classes
        logits = self.clients.predict(with_model(self.clients, model))
        (own,) = by_client(self.evaluator.predictions(logits)[0])
        decision = decide(*own, classes, positive=settings.positive, rule=settings.threshold_rule)
        return replace(model, decision=decision)

    def scores(self, view: Local) -> Scores:
        """Score validation and test nodes.

        Under differential privacy all scores are None, because exact scores would reveal what the
        noise on the model hides.
        """
        if self.private:
            return no_scores(self.plan.settings.metric)
        found = self.evaluator.scores(self.clients.predict(view))[0].tolist()
        return [[None if math.isnan(v) else v for v in split] for split in found]


@dataclass(frozen=True)
class _Round:
    """A site's part in one round of a run.

    Attributes:
        prepared: the plan of the run.
        files: of the run at this site.
        number: the round, from 1.
        base: the last round in which the server accepted an answer of this site.
        download: what the server sent, on the site's device.
        memory: the site's memory after round `base`.
    """

    prepared: Prepared
    files: SiteState
    number: int
    base: int
    download: Message
    memory: Message

    def save_candidate(self, rounds: int, view: Local) -> None:
        """Save the model of a round, which may turn out to be the best."""
        self.prepared.model(rounds, view, BEST).save(self.files.candidate(rounds))

    def save_last(self, received: Local) -> None:
        """Save the final model, in the view that the method is evaluated in."""
        rounds, view = self.number, received
        if self.prepared.method.view != "received":
            rounds, view = self.base, self.prepared.clients.trained(self.memory, self.base)
        self.prepared.model(rounds, view, LAST).save(self.files.model(LAST))

    def train(self) -> tuple[Message, dict[str, Any]]:
        """Train and save the new memory; return the upload, and the scores and loss for the reply.

        Under differential privacy every new upload costs privacy. A repeated question gets the
        same upload again.
        """
        prepared, files, number = self.prepared, self.files, self.number
        question = self._digest()
        if prepared.private:
            if (same := files.sent_before(number, question)) is not None:
                return same, {"trained": no_scores(prepared.plan.settings.metric), "loss": None}
            files.check_budget(prepared.plan.settings.rounds)
        upload, memory, loss = prepared.train(self.download, self.memory, number - 1)
        trained = prepared.clients.trained(memory, number)
        scores = prepared.scores(trained)
        files.save(number, memory)
        if prepared.private:
            files.note_sent(number, question, upload)
        if prepared.method.view == "trained":
            self.save_candidate(number, trained)
        files.prune(number, self.base)
        show_loss = math.isfinite(loss) and not prepared.private
        return upload, {"trained": scores, "loss": loss if show_loss else None}

    def _digest(self) -> str:
        """Return a hash of the round and the download, to recognise a repeated question."""
        found = hashlib.sha256(f"{self.number} {self.base}".encode())
        for name, tensor in sorted(self.download.items()):
            found.update(name.encode() + tensor.cpu().contiguous().numpy().tobytes())
        return found.hexdigest()


class Site:
    """A site with its graph and its folder, which answers the server's messages.

    Args:
        name: the site's name.
        graph: the graph as its files hold it.
        folder: for private memory and models.
        device: where to compute.
        dp: the largest privacy budget with which this site takes part; None: any, or no privacy.
        secure: whether this site takes part only in runs with secure aggregation.
        identity: the site's key and all public keys, for secure aggregation.
    """

    def __init__(
        self,
        name: str,
        graph: SiteGraph,
        folder: Path,
        device: str = "cpu",
        *,
        dp: Budget | None = None,
        secure: bool = False,
        identity: Identity | None = None,
    ) -> None:
        check_device(device)
        self.name, self.graph, self.folder, self.device = name, graph, folder, device
        self.dp, self.secure, self.identity = dp, secure, identity
        self._prepared: Prepared | None = None
        self._own_member: Member | None = None

    def answer(self, asked: Parcel) -> Parcel:
        """Return the reply to a message.

        Raises:
            WireError, UserError: if the message cannot be answered.
        """
        kind = asked.facts.get("kind")
        if kind not in KINDS:
            raise WireError(f"the server asked for '{kind}', which this version does not know")
        if kind == HELLO:
            return self._hello()
        began = time.perf_counter()
        plan = Plan.from_json(asked.facts.get("plan", {}))
        if kind == MEASURE:
            reply = self._measure(plan)
        else:
            reply = self._reply(str(kind), asked, self._prepare(plan))
        seconds = time.perf_counter() - began
        facts = {"kind": kind, "run": plan.run, "round": asked.facts.get("round", 0)}
        return Parcel({**facts, "seconds": seconds, **reply.facts}, reply.tensors)

    def _hello(self) -> Parcel:
        schema = self.graph.schema
        return Parcel(
            {
                "kind": HELLO,
                "site": self.name,
                "features": list(schema.features),
                "width": schema.width,
                "classes": list(schema.classes),
                "columns": [column.to_json() for column in schema.columns],
                "digest": schema.digest,
                "dense": not sp.issparse(self.graph.graph.features),
                "relations": list(own_relations(self.graph.graph)),
            }
        )

    def _prepare(self, plan: Plan) -> Prepared:
        """Prepare a plan; later messages of the run get the same one.

        Raises:
            UserError: if this site does not take part under these conditions.
        """
        if self._prepared is not None and self._prepared.plan == plan:
            return self._prepared
        self._check_conditions(plan)
        raw = self._raw(plan)
        encoding = _own_encoding(plan, raw)
        number = plan.sites.index(self.name)
        self._prepared = Prepared.of(plan, encoding.encode(raw), number, self.device, encoding)
        return self._prepared

    def _raw(self, plan: Plan) -> Graph:
        """Return the site's graph with its split, before its columns are encoded."""
        return with_split(self.graph.aligned(plan.schema), plan.split, plan.seed)

    def _measure(self, plan: Plan) -> Parcel:
        """Return the statistics of the train nodes from which the encoding is learned.

        Raises:
            UserError: in a run with differential privacy or secure aggregation.
        """
        self._check_conditions(plan)
        if plan.settings.private:
            raise UserError(
                f"site '{self.name}' sends no statistics of its columns in a run with differential "
                "privacy or secure aggregation"
            )
        found = train_statistics(self._raw(plan), plan.schema.columns or plan.schema.width)
        return Parcel({"statistics": found.to_json()})

    def _check_conditions(self, plan: Plan) -> None:
        """Check that the plan includes this site and has the privacy that it insists on."""
        if self.name not in plan.sites:
            raise UserError(f"site '{self.name}' is not part of run {plan.run}")
        if self.dp is not None and not self.dp.covers(Budget.parse(plan.settings.dp)):
            raise UserError(
                f"site '{self.name}' takes part with epsilon at most {self.dp.epsilon:g} and delta "
                f"at most {self.dp.delta:g}: run {plan.run} has dp {plan.settings.dp}"
            )
        if self.secure and not plan.settings.secure_aggregation:
            raise UserError(
                f"site '{self.name}' takes part with secure aggregation only: run {plan.run} has "
                "none"
            )
        check_privacy(plan.make_method(), plan.settings, len(plan.sites))

    def _reply(self, kind: str, asked: Parcel, prepared: Prepared) -> Parcel:
        """Return the content of the reply to any message but the first."""
        plan = prepared.plan
        if kind == PREPARE:
            counts = prepared.evaluator.counts[0].tolist()
            return Parcel({"counts": [1.0] * len(SPLITS) if prepared.private else counts})
        if kind in (KEYS, SHARE, CONFIRM, REVEAL):
            return Parcel(self._member(plan).answer(kind, plan, asked.facts))
        files = SiteState(self.folder, plan.run)
        base = _number(asked.facts, "base")
        if files.promote(_number(asked.facts, "best")):
            best = files.model(BEST)
            prepared.decided(SavedModel.load(best)).save(best)
        if kind == CLOSE:
            return Parcel({})
        download = prepared.on_device(asked.tensors)
        memory, note = _load_memory(prepared, files, base)
        number = _number(asked.facts, "round")
        round_ = _Round(prepared, files, number, base, download, memory)
        return self._take_part(round_, note, asked.facts.get("masks"), last=kind == FINISH)

    def _take_part(
        self, round_: _Round, note: str, masks: Mapping[str, Any] | None, *, last: bool
    ) -> Parcel:
        """Score the model that the server sent. Then save it if it is the last one, else train."""
        prepared, plan = round_.prepared, round_.prepared.plan
        facts: dict[str, Any] = {"note": note}
        done = round_.number if last else round_.number - 1  # complete rounds behind the model
        received = prepared.clients.received(round_.download, round_.memory, done)
        if done:
            facts["received"] = prepared.scores(received)
            if prepared.method.view == "received":
                round_.save_candidate(done, received)
        if last:
            round_.save_last(received)
            return Parcel(facts)
        if masks is not None:
            masks = {**masks, "round": round_.number}
            self._member(plan).check_keys(plan, masks)  # before the work is done
        upload, outcome = round_.train()
        return self._masked(plan, facts | outcome, upload, masks)

    def _masked(
        self, plan: Plan, facts: Mapping[str, Any], upload: Message, masks: Mapping[str, Any] | None
    ) -> Parcel:
        """Return a reply with an upload, masked if the run has secure aggregation."""
        if not plan.settings.secure_aggregation or not upload:
            return Parcel(facts, upload)
        if masks is None:
            raise WireError("the server asked for an upload without masks in a run that has them")
        masked = self._member(plan).mask(plan, upload, masks)
        return Parcel({**facts, **masked.facts}, masked.tensors)

    def _member(self, plan: Plan) -> Member:
        """Return the site's side of secure aggregation, which keeps its keys between messages."""
        from polyphily.flower.masks import Member

        if not plan.settings.secure_aggregation:
            raise WireError(f"run {plan.run} has no secure aggregation")
        if self.identity is None:
            raise UserError(f"site '{self.name}' has no keys for secure aggregation")
        if self._own_member is None:
            self._own_member = Member(self.name, self.identity, self.folder)
        return self._own_member


def _own_encoding(plan: Plan, graph: Graph) -> Encoding:
    """Return the plan's encoding, with the site's own means if the plan leaves them open."""
    columns = plan.schema.columns or plan.schema.width
    encoding = plan.encoding
    if encoding is None:
        if plan.normalize == "standard" or plan.schema.columns:
            raise UserError(
                f"run {plan.run} was planned by an earlier version, which scaled features "
                "otherwise: start a new run"
            )
        encoding = Encoding.at_home(columns, plan.normalize)
    if encoding.is_complete:
        return encoding
    return encoding.completed(train_statistics(graph, columns))


def _load_memory(prepared: Prepared, files: SiteState, base: int) -> tuple[Message, str]:
    """Return the memory after round `base`, and a note for the server if it is lost."""
    found = files.load(base) if base else None
    if found is not None:
        return prepared.on_device(found), ""
    initial = prepared.clients.initial_memory(prepared.initial)
    return initial, f"no memory of round {base} here: begun anew" if base else ""


def _number(facts: Mapping[str, Any], name: str) -> int:
    """Return a round number in the server's message."""
    value = facts.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 31:
        raise WireError(f"the server's message has no number '{name}'")
    return value
