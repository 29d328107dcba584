"""The server's exchange with the sites: send messages, check the answers, collect uploads.

`Exchange` sends one message to each site and checks that an answer belongs to it. `Collector` uses
it to collect the uploads of a round. It repeats the round if too few sites answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from polyphily.core.messages import Contract, Message, Uploads
from polyphily.core.metrics import SPLITS, score_axis
from polyphily.errors import TrainingError
from polyphily.flower.bounds import Bounds
from polyphily.flower.joining import (
    Answer,
    Emit,
    Policy,
    Transport,
    Troubles,
    note_trouble,
    refusing,
    unpack_answer,
)
from polyphily.flower.plan import Plan
from polyphily.flower.presence import Presence
from polyphily.flower.wire import HEADER, ROUND, Parcel, WireError, check_upload, limit_of
from polyphily.graphs.checked import Reader, plain
from polyphily.runtime.server import Server
from polyphily.runtime.tracker import FloatArray

if TYPE_CHECKING:
    from polyphily.flower.masks import Masking, Read

Facts = Mapping[str, Any]
LARGEST = 1e30  # of a loss or of seconds


@dataclass
class Exchange:
    """Messages to the sites of a run and their answers.

    Attributes:
        plan: of the run; it is part of every message.
        transport: sends the messages.
        policy: timeouts and the like.
        emit: writes events.
        troubles: late and refused answers so far.
        presence: which sites are away.
        needed: number of answers that a message needs.
    """

    plan: Plan
    transport: Transport
    policy: Policy
    emit: Emit
    troubles: Troubles = field(default_factory=list)
    presence: Presence = field(init=False)
    needed: int = field(init=False)

    def __post_init__(self) -> None:
        self.presence = Presence(self.transport, self.policy)
        self.needed = self.policy.min_sites

    def ask(
        self, kind: str, facts: Mapping[str, Facts], download: Message
    ) -> Iterator[tuple[str, Answer]]:
        """Send a message to sites and yield their answers as they arrive.

        Args:
            kind: of message.
            facts: what each site is told, by site.
            download: tensors stacked over all sites of the run; each site gets its own row.
        """
        plan = self.plan.to_json()
        row = {site: k for k, site in enumerate(self.plan.sites)}
        messages = {
            site: Parcel(
                {"kind": kind, "plan": plan, **own},
                {n: t[row[site] : row[site] + 1] for n, t in download.items()},
            )
            for site, own in facts.items()
        }
        silent = set(messages)
        grace = self.presence.grace(list(messages), self.needed)
        more = {"grace": grace} if grace else {}
        for site, answer in self.transport.ask(messages, self.policy.timeout, **more):
            silent.discard(site)
            self.presence.note_answer(site)
            yield site, answer
        self.presence.note_silence(silent)

    def read(self, site: str, answer: Answer, kind: str, number: int, limit: int) -> Parcel:
        """Unpack an answer.

        Args:
            site: whose answer it is.
            answer: what it sent.
            kind: of the message that was sent.
            number: of the round that the message was about.
            limit: largest size in bytes.

        Raises:
            WireError: if it cannot be read, or answers another message.
        """
        parcel = unpack_answer(answer, limit)
        expected = {"kind": kind, "run": self.plan.run, "round": number}
        for name, value in expected.items():
            found = parcel.facts.get(name)
            if type(found) is not type(value) or found != value:
                raise WireError(f"answered {name} {plain(repr(found), 60)}, not {value!r}")
        note = parcel.facts.get("note")
        if isinstance(note, str) and note:
            self.emit("note", text=f"{site}: {plain(note, 200)}")
        return parcel

    def note_trouble(self, number: int, what: str, site: str, reason: str) -> None:
        """Record that a site was late or its answer refused in a round."""
        note_trouble(self.troubles, self.emit, number, what, site, reason)

    @contextmanager
    def refusing(self, number: int, site: str) -> Iterator[None]:
        """Refuse a site's answer about a round if reading it raises anything."""
        with refusing(lambda reason: self.note_trouble(number, "refused", site, reason)):
            yield

    def reasons(self, number: int, more: str = "") -> str:
        """Return the latest trouble of each site in a round, in brackets; empty without any."""
        latest = {
            trouble["site"]: f"{trouble['site']}: {trouble['reason']}"
            for trouble in self.troubles
            if trouble["round"] == number
        }
        texts = [*latest.values(), *([more] if more else [])]
        return f" ({'; '.join(texts)})" if texts else ""


@dataclass
class SiteReport:
    """The numbers that a site sends besides its upload.

    Attributes:
        loss: mean training loss; None under differential privacy.
        seconds: the site's computing time.
        received: scores of the model that it received; None in the first round.
        trained: scores of the model that it trained.
    """

    loss: float | None
    seconds: float
    received: FloatArray | None
    trained: FloatArray


@dataclass
class OpenRound:
    """A round whose uploads are being collected.

    Attributes:
        number: the round, from 1.
        facts: what the round's message tells each site besides the download.
        download: tensors stacked over all sites.
        contract: the tensors that an upload must have.
        reports: of the sites whose answer was accepted.
        refused: sites whose answer was refused, with the reason.
        silent: sites that were asked and have not answered.
        plain: uploads by site, if they are not masked.
        uploads: what is aggregated; None as long as there is nothing.
        bytes_up: number of bytes that the sites sent for it.
        failure: why masked uploads could not be summed.
    """

    number: int
    facts: Mapping[str, Facts]
    download: Message
    contract: Contract
    reports: dict[str, SiteReport] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    plain: dict[str, Message] = field(default_factory=dict)
    uploads: Uploads | None = None
    bytes_up: int = 0
    failure: str = ""


class Collector:
    """Collects the uploads of a round, plain or masked.

    Args:
        exchange: with the sites.
        server: of the run.
        bounds: on uploads.
        private: whether the run has differential privacy; sites then send no loss.
    """

    def __init__(
        self, exchange: Exchange, server: Server, bounds: Bounds, *, private: bool
    ) -> None:
        self.exchange, self.server, self.bounds = exchange, server, bounds
        self.private = private
        self.plan, self.policy, self.emit = exchange.plan, exchange.policy, exchange.emit
        self._masking: Masking | None = None
        self._round: OpenRound  # the round that is being collected

    def collect(self, round_: OpenRound) -> tuple[Uploads, list[str]]:
        """Ask for uploads, several times if needed; return them and the sites that were late.

        Raises:
            TrainingError: if too few sites answered in all attempts.
        """
        self._round = round_
        sites, number = self.plan.sites, round_.number
        masking = self._get_masking() if round_.contract.shapes else None
        needed = max(self.policy.min_sites, masking.required if masking else 1)
        self.exchange.needed = needed
        for attempt in range(1 + self.policy.repeats):
            # Masks of an earlier attempt are of no use, so that all sites are asked again.
            missing = [site for site in sites if masking or site not in round_.reports]
            if attempt:
                self.emit("repeat", round=number, attempt=attempt + 1, sites=missing)
            if masking:
                self._ask_masked(round_, masking, needed)
            else:
                self._ask_plain(round_, missing)
            if round_.uploads is not None and len(round_.reports) >= needed:
                break
        late = [site for site in sites if site in round_.silent and site not in round_.refused]
        for site in late:
            when = masking.describe_silence(site) if masking and round_.uploads is not None else ""
            away = self.exchange.presence.is_away(site)
            reason = "away: no answer" if away else f"no answer within {self.policy.timeout:g} s"
            reason += when
            self.exchange.note_trouble(number, "late", site, reason)
        if round_.uploads is None or len(round_.reports) < needed:
            raise TrainingError(
                f"round {number}: {len(round_.reports)} of {len(sites)} sites answered well, "
                f"{needed} are needed, after {1 + self.policy.repeats} attempts"
                f"{self.exchange.reasons(number, round_.failure)}. "
                f"The last good model is that of round {number - 1}."
            )
        return round_.uploads, late

    # Plain uploads ---------------------------------------------------------------------------

    def _ask_plain(self, round_: OpenRound, sites: Sequence[str]) -> None:
        """Ask sites for their uploads and add them to those that came before."""
        round_.silent = set()
        facts = {site: round_.facts[site] for site in sites}
        for site, answer in self._ask(ROUND, facts, round_.download):
            with self._refusing(site):
                parcel = self._read(site, answer, ROUND, limit_of(round_.contract))
                check_upload(round_.contract, parcel.tensors)
                report = self._report(parcel)
                round_.plain[site] = parcel.tensors
                self._accept(site, report)
        downloads = {site: self.download_to(site) for site in round_.plain}
        strange = self.bounds.check(round_.number, round_.plain, downloads)
        for site, reason in strange.items():
            self.refuse(site, reason)
        self.stack()

    def refuse(self, site: str, reason: str) -> None:
        """Refuse an answer that was accepted at first."""
        round_ = self._round
        del round_.plain[site], round_.reports[site]
        round_.refused[site] = reason
        self.exchange.note_trouble(round_.number, "refused", site, reason)

    def stack(self) -> None:
        """Stack the accepted uploads."""
        round_ = self._round
        members = [site for site in self.plan.sites if site in round_.reports]
        round_.uploads = None
        if members:
            names = round_.plain[members[0]]
            tensors = {n: torch.cat([round_.plain[s][n] for s in members]) for n in names}
            clients = tuple(self.plan.sites.index(site) for site in members)
            round_.uploads = Uploads(clients, tensors)
            round_.bytes_up = round_.contract.bytes * len(members)

    def download_to(self, site: str) -> Message:
        """Return what a site was sent in this round."""
        k = self.plan.sites.index(site)
        return {name: value[k : k + 1] for name, value in self._round.download.items()}

    # Masked uploads --------------------------------------------------------------------------

    def _get_masking(self) -> Masking | None:
        """Return the server's side of secure aggregation; None if the run does not have it."""
        if self._masking is None and self.plan.settings.secure_aggregation:
            from polyphily.flower.masks import Masking

            self._masking = Masking(self.plan.sites, self.server, self._ask_step)
        return self._masking

    def _ask_masked(self, round_: OpenRound, masking: Masking, needed: int) -> None:
        """Ask all sites for masked uploads, and for the shares that unmask their sum.

        The sum is unmasked only if enough sites answered for the round to count. Otherwise the
        round would be repeated, and the difference of two sums of the same round, over different
        sites, would reveal something about single uploads.

        Raises:
            TrainingError: if the sum is not plausible.
        """
        round_.reports, round_.refused, round_.silent = {}, {}, set()
        round_.uploads, round_.failure = None, ""
        try:
            self._ask_masked_uploads(round_, masking, masking.exchange_keys(round_.number))
            if len(round_.reports) < needed:
                return
            total = masking.unmask()
        except WireError as error:
            round_.failure = str(error)
            self.emit("note", text=f"round {round_.number}: {error}")
            return
        try:
            uploads = masking.uploads(total, round_.contract)
            self.bounds.check_mean(
                round_.number, uploads.tensors, self.download_to(self.plan.sites[0])
            )
            round_.uploads = uploads
        except WireError as error:
            raise TrainingError(
                f"round {round_.number}: {error}. Secure aggregation does not show which site it "
                "was. The round is not repeated, because a second sum could reveal a site's "
                f"upload. The last good model is that of round {round_.number - 1}."
            ) from None
        round_.bytes_up = masking.bytes_up
        # A site whose upload is in the sum counts as accepted, whatever it revealed later.
        round_.refused = {s: why for s, why in round_.refused.items() if s not in round_.reports}

    def _ask_masked_uploads(
        self, round_: OpenRound, masking: Masking, sites: Sequence[str]
    ) -> None:
        """Send the round's own message to the sites that have exchanged keys."""
        in_advance = round_.number < self.plan.settings.rounds
        numbers = round_.contract.numbers
        facts = {
            site: {**round_.facts[site], "masks": masking.round_facts(site, in_advance=in_advance)}
            for site in sites
        }
        for site, answer in self._ask(ROUND, facts, round_.download):
            with self._refusing(site):
                parcel = self._read(site, answer, ROUND, 8 * numbers + HEADER)
                report = self._report(parcel)
                masking.add_answer(site, parcel, numbers, in_advance=in_advance)
                self._accept(site, report)

    def _ask_step(self, kind: str, facts: Mapping[str, Facts], read: Read) -> None:
        """Send another message of secure aggregation, before or after the round's own."""
        number = self._round.number
        numbered = {site: {"round": number, **own} for site, own in facts.items()}
        for site, answer in self._ask(kind, numbered, {}):
            with self._refusing(site):
                read(site, self._read(site, answer, kind, HEADER).facts)

    # Answers ---------------------------------------------------------------------------------

    def _ask(
        self, kind: str, facts: Mapping[str, Facts], download: Message
    ) -> Iterator[tuple[str, Answer]]:
        """Ask sites, and keep track of those that have not answered."""
        self._round.silent |= facts.keys()
        for site, answer in self.exchange.ask(kind, facts, download):
            self._round.silent.discard(site)
            yield site, answer

    @contextmanager
    def _refusing(self, site: str) -> Iterator[None]:
        """Refuse the site's answer if reading it raises anything."""

        def refuse(reason: str) -> None:
            self._round.refused[site] = reason
            self.exchange.note_trouble(self._round.number, "refused", site, reason)

        with refusing(refuse):
            yield
            self._round.refused.pop(site, None)

    def _read(self, site: str, answer: Answer, kind: str, limit: int) -> Parcel:
        return self.exchange.read(site, answer, kind, self._round.number, limit)

    def _accept(self, site: str, report: SiteReport) -> None:
        self._round.reports[site] = report
        self.emit("answer", round=self._round.number, site=site, seconds=report.seconds)

    def _report(self, parcel: Parcel) -> SiteReport:
        """Read and check the numbers in an answer."""
        found = Reader(parcel.facts, "its answer")
        (seconds,) = found.floats("seconds")
        kept = self.plan.settings.private and parcel.facts.get("loss") is None  # at the site
        loss = None if self.private or kept else found.floats("loss")[0]
        if not 0 <= seconds <= LARGEST or (loss is not None and not abs(loss) <= LARGEST):
            raise WireError("its loss or its time is out of bounds")
        metrics = len(score_axis(self.plan.settings.metric))
        trained = read_scores(parcel.facts, "trained", metrics)
        later = self._round.number > 1
        received = read_scores(parcel.facts, "received", metrics) if later else None
        return SiteReport(loss, seconds, received, trained)


def read_scores(facts: Facts, view: str, metrics: int) -> FloatArray:
    """Read a view's scores `[splits, metrics]`; NaN if there is nothing to score.

    Args:
        facts: the answer.
        view: which model was scored.
        metrics: the number of metrics on the axis of scores.

    Raises:
        WireError, UserError: if they are missing, or not between 0 and 1.
    """
    rows = Reader(facts, "its answer").items(view, len(SPLITS))
    for row in rows:
        if not isinstance(row, list) or len(row) != metrics or not all(map(_is_score, row)):
            raise WireError(f"its scores of the {view} model are not valid")
    return np.array(rows, dtype=np.float64)


def _is_score(value: object) -> bool:
    if value is None:
        return True
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1
