"""A site: it answers the server's messages.

Every message names the last round in which the server accepted an answer of this site (`base`), and
the site continues from its memory after that round. So an answer that was late, refused or asked
for twice has no effect.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import scipy.sparse as sp
import torch

from polyphily.core.budget import Budget
from polyphily.core.local import Local
from polyphily.core.messages import Contract, Declared, Message, MessageError
from polyphily.core.method import Method, sizes_of
from polyphily.core.metrics import SPLITS, Evaluator, positive_index, score_axis
from polyphily.errors import UserError
from polyphily.flower import account, disclosure
from polyphily.flower.audit_log import AuditLog
from polyphily.flower.joining import Answer
from polyphily.flower.plan import Plan
from polyphily.flower.site_files import SiteState
from polyphily.flower.site_graph import SiteGraph
from polyphily.flower.site_policy import MEGABYTE, Ledger, PolicyFile, Refused, SitePolicy
from polyphily.flower.wire import (
    CLOSE,
    CONFIRM,
    DISMISS,
    FINISH,
    HEADER,
    HELLO,
    KEYS,
    KINDS,
    MEASURE,
    PREPARE,
    REVEAL,
    SHARE,
    Parcel,
    WireError,
    size,
)
from polyphily.graphs.checked import plain
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

MODELS_IN_A_MESSAGE = 8  # the server may send several tensors of the size of a model
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
        declared: what the method declares to upload, and to get from the server.
        encoding: how the site's columns became features, with its own means if the plan leaves
            them open.
    """

    plan: Plan
    number: int
    clients: Clients
    evaluator: Evaluator
    initial: Message
    declared: tuple[tuple[Declared, ...], tuple[Declared, ...]]
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
        method, network = plan.make_method(), plan.network()
        cohort = cohort_of(plan.settings, [graph], [(plan.seed, number)], classes, device=device)
        clients = Clients.create(
            method,
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
        sizes = sizes_of(method, network, len(plan.sites))
        declared = method.uploads(sizes), method.downloads(sizes)
        initial = initial_parameters(network)
        return cls(plan, number, clients, evaluator, initial, declared, encoding)

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

    def check_upload(self, upload: Message, number: int) -> None:
        """Raise a MessageError if an upload is not what the method declares for a round."""
        self._contract(0, number).check(upload)

    def check_download(self, download: Message, number: int) -> None:
        """Raise a WireError if the server sent something other than the method declares."""
        try:
            self._contract(1, number).check(download)
        except MessageError as error:
            raise WireError(f"the server's message {error}") from None
        if any(len(tensor) != 1 for tensor in download.values()):
            raise WireError("the server's message is not for one site")

    def _contract(self, direction: int, number: int) -> Contract:
        dtype: torch.dtype = getattr(torch, self.plan.settings.dtype)
        return Contract.of(self.declared[direction], number, dtype)

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
        ledger: of the uploads in this run.
        number: the round, from 1.
        base: the last round in which the server accepted an answer of this site.
        download: what the server sent, on the site's device.
        memory: the site's memory after round `base`.
    """

    prepared: Prepared
    files: SiteState
    ledger: Ledger
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
        same upload again. An upload is in the site's journal before this returns.
        """
        prepared, number = self.prepared, self.number
        question = _digest(f"{number} {self.base}", self.download)
        same = self.files.sent_before(number, question) if prepared.private else None
        if same is None:
            self.ledger.check()  # before the work is done
            upload, outcome = self._train(question)
        else:
            upload = same
            outcome = {"trained": no_scores(prepared.plan.settings.metric), "loss": None}
        if prepared.plan.settings.private:
            prepared.check_upload(upload, number)
        if upload:
            self.ledger.record(number, _digest("upload", upload))
        return upload, outcome

    def _train(self, question: str) -> tuple[Message, dict[str, Any]]:
        prepared, files, number = self.prepared, self.files, self.number
        upload, memory, loss = prepared.train(self.download, self.memory, number - 1)
        trained = prepared.clients.trained(memory, number)
        scores = prepared.scores(trained)
        files.save(number, memory)
        if prepared.private:
            files.save_sent(number, question, upload)
        if prepared.method.view == "trained":
            self.save_candidate(number, trained)
        files.prune(number, self.base)
        show_loss = math.isfinite(loss) and not prepared.private
        return upload, {"trained": scores, "loss": loss if show_loss else None}


class Site:
    """A site with its graph and its folder, which answers the server's messages.

    Args:
        name: the site's name.
        graph: the graph as its files hold it.
        folder: for private memory and models.
        device: where to compute.
        dp: the largest privacy budget of all uploads of this site; None: as its policy says.
        secure: whether this site takes part only in runs with secure aggregation, whatever its
            policy says.
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
        self.policy, self.log = PolicyFile(folder), AuditLog(folder)
        self.clock: Callable[[], dt.datetime] = account.now
        self._report: Callable[[str], None] = _ignore
        self._judged: tuple[Plan, SitePolicy] | None = None
        self._prepared: Prepared | None = None
        self._own_member: Member | None = None

    def check_files(self) -> None:
        """Check the policy, the journal of uploads and the audit log.

        Raises:
            UserError: if one of them cannot be used.
        """
        if self.policy.file.exists():
            self.policy.read()
        self.policy.account().uploads()
        self.log.check_uploads(self.policy.account().journal)

    def reply(self, text: str, blob: bytes, report: Callable[[str], None]) -> Answer:
        """Return the reply to a packed message, or an error. Either is in the audit log by then.

        Args:
            text, blob: the message (`Parcel.pack`).
            report: called with a line of text for the site's operator.
        """
        self._report = report
        facts: Mapping[str, Any] = {}
        try:
            _check_size(text, blob, self._rules())
            asked = Parcel.unpack(text, blob)
            facts = asked.facts
            if self._rules().messages_per_day is not None:
                self._rules().judge_messages(self.log.answered(self.clock()))
            packed = self.answer(asked).pack()
            self.log.note_answer(self.clock(), facts, packed, self.policy.account().journal)
        except Exception as error:
            return self.failure(error, facts, report)
        report(plain(f"{facts.get('kind')} {facts.get('round', '')}"))
        return Answer(*packed)

    def failure(
        self, error: Exception, facts: Mapping[str, Any], report: Callable[[str], None]
    ) -> Answer:
        """Return an error for the server, which tells no more than it may; report all of it here.

        Args:
            error: what went wrong.
            facts: of the server's message, as far as it could be read.
            report: called with a line of text for the site's operator.
        """
        reason = disclosure.full_text(error)
        report(reason if isinstance(error, Refused) else f"failed: {reason}")
        try:
            private = disclosure.is_private(facts, self._rules())
        except UserError:
            private = True
        sent = disclosure.public_text(error, facts.get("kind"), self.folder, private=private)
        try:
            self.log.note_error(self.clock(), facts, sent, reason)
        except UserError as trouble:
            report(f"failed: {disclosure.full_text(trouble)}")
            sent = "failed: the site cannot write its audit log"
        return Answer(error=sent)

    def _rules(self) -> SitePolicy:
        """Return the policy as it is now, together with the flags of this site."""
        return self.policy.get(self._report).stricter(self.dp, secure=self.secure)

    def answer(self, asked: Parcel) -> Parcel:
        """Return the reply to a message.

        Raises:
            WireError, UserError: if the message cannot be answered.
        """
        kind = asked.facts.get("kind")
        if kind not in KINDS:
            raise WireError(f"the server asked for '{kind}', which this version does not know")
        if kind == DISMISS:  # as an error, so that the operator reads it
            raise UserError(f"the server left this site out: {plain(asked.facts.get('reason'))}")
        rules = self._rules()
        rules.judge_time(str(kind), self.clock())
        if kind == HELLO:
            reply = self._hello(rules)
        else:
            began = time.perf_counter()
            with _about_the_plan():
                plan = Plan.from_json(asked.facts.get("plan", {}))
            self._check_conditions(plan, str(kind), rules)
            content = (
                self._measure(plan)
                if kind == MEASURE
                else self._reply(str(kind), asked, self._prepare(plan), rules)
            )
            facts = {"kind": kind, "run": plan.run, "round": asked.facts.get("round", 0)}
            facts |= {"seconds": time.perf_counter() - began, **content.facts}
            reply = Parcel(disclosure.silenced(facts, plan, rules), content.tensors)
        disclosure.check_declared(str(kind), reply)
        return reply

    def _hello(self, rules: SitePolicy) -> Parcel:
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
                "dense": rules.private or not sp.issparse(self.graph.graph.features),
                "relations": list(own_relations(self.graph.graph)),
            }
        )

    def _prepare(self, plan: Plan) -> Prepared:
        """Prepare a plan; later messages of the run get the same one."""
        if self._prepared is not None and self._prepared.plan == plan:
            return self._prepared
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
        if plan.settings.private:
            raise UserError(
                f"site '{self.name}' sends no statistics of its columns in a run with differential "
                "privacy or secure aggregation"
            )
        found = train_statistics(self._raw(plan), plan.schema.columns or plan.schema.width)
        return Parcel({"statistics": found.to_json()})

    def _check_conditions(self, plan: Plan, kind: str, rules: SitePolicy) -> None:
        """Judge a plan by the site's policy: as a whole if it is new, its budget every time.

        Raises:
            Refused: if it breaks a rule.
            WireError: if the plan is not one for this site.
        """
        if self._judged != (plan, rules):
            with _about_the_plan():
                if self.name not in plan.sites:
                    raise UserError(f"site '{self.name}' is not part of run {plan.run}")
                check_privacy(plan.make_method(), plan.settings, len(plan.sites))
                rules.judge(plan)
            self._judged = plan, rules
        rules.judge_budget(plan, kind, self.policy.account(), self.clock())

    def _reply(self, kind: str, asked: Parcel, prepared: Prepared, rules: SitePolicy) -> Parcel:
        """Return the content of the reply to any message but the first."""
        plan = prepared.plan
        if kind == PREPARE:
            return Parcel({"counts": prepared.evaluator.counts[0].tolist()})
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
        if number > plan.settings.rounds:
            raise WireError(f"the server asked for round {number} of {plan.settings.rounds}")
        prepared.check_download(asked.tensors, number + (kind == FINISH))
        ledger = Ledger(rules, self.policy.account(), plan, prepared.clients.guard, self.clock)
        round_ = _Round(prepared, files, ledger, number, base, download, memory)
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


def _digest(text: str, message: Message) -> str:
    """Return a hash of a text and named tensors."""
    found = hashlib.sha256(text.encode())
    for name, tensor in sorted(message.items()):
        found.update(name.encode() + tensor.cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def _check_size(text: str, blob: bytes, rules: SitePolicy) -> None:
    """Check the size of the server's message before it is unpacked."""
    most = int(MODELS_IN_A_MESSAGE * rules.megabytes * MEGABYTE)
    if len(text) > 64 * HEADER or len(blob) > most + HEADER:
        raise WireError(f"the server's message has {size(text, blob):,} bytes, which is too many")


def _ignore(text: str) -> None:
    """Report nothing."""


@contextmanager
def _about_the_plan() -> Iterator[None]:
    """Turn errors into those of the server's message: they tell nothing but what is in it."""
    try:
        yield
    except Refused:
        raise
    except UserError as error:
        raise disclosure.BadPlan(str(error)) from None


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
