"""Before the first round: the transport to the sites, the policy of a run, and the handshake."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from polyphily.errors import TrainingError, UserError
from polyphily.flower.plan import Schema
from polyphily.flower.wire import HEADER, HELLO, Parcel, WireError, size
from polyphily.graphs.columns import MAX_COLUMNS, Column
from polyphily.graphs.edges import MOST_RELATIONS
from polyphily.graphs.rules import MAX_WIDTH
from polyphily.runs.folder import RunFolder

POLL = 0.5  # seconds
EVENTS = "events.jsonl"
Emit = Callable[..., None]


@dataclass(frozen=True)
class Answer:
    """A site's answer: the two packed parts of a message, or the reason why there is none."""

    text: str = ""
    blob: bytes = b""
    error: str = ""


class Transport(Protocol):
    """Sends messages to the sites and returns their answers."""

    def online(self) -> set[str]:
        """Return the sites that are connected."""

    def ask(self, messages: Mapping[str, Parcel], timeout: float) -> Iterator[tuple[str, Answer]]:
        """Send each site its message; yield the answers as they arrive, until the timeout."""


@dataclass(frozen=True)
class Policy:
    """The faults that a run tolerates.

    Attributes:
        min_sites: number of answers that a round needs.
        timeout: seconds a site has to answer.
        repeats: how often a round with too few answers is repeated.
        join_timeout: seconds to wait for the sites before the first round.
    """

    min_sites: int
    timeout: float = 600.0
    repeats: int = 2
    join_timeout: float = 600.0

    def __post_init__(self) -> None:
        if self.min_sites < 1 or self.repeats < 0 or min(self.timeout, self.join_timeout) <= 0:
            raise UserError("min_sites must be 1 or more, repeats 0 or more, timeouts above 0")


def event_writer(folder: RunFolder) -> Emit:
    """Return a function that appends events to the run folder."""

    def emit(event: str, **facts: Any) -> None:
        entry = {"time": time.time(), "event": event, **facts}
        with (folder.path / EVENTS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, allow_nan=False) + "\n")

    return emit


def gather(
    transport: Transport, sites: Sequence[str], policy: Policy, emit: Emit
) -> dict[str, dict[str, Any]]:
    """Wait for the sites and ask each for its schema.

    Returns:
        The answers by site, in the order of `sites`: the schema, whether features are dense, and
        the types of edges.

    Raises:
        TrainingError: if too few sites have joined in time.
    """
    emit("waiting", sites=list(sites))
    answers: dict[str, dict[str, Any]] = {}
    replied: set[str] = set()  # with a schema or without
    deadline = time.monotonic() + policy.join_timeout
    while len(replied) < len(sites) and (left := deadline - time.monotonic()) > 0:
        new = (transport.online() & set(sites)) - replied
        if not new:
            time.sleep(POLL)
            continue
        hello = {site: Parcel({"kind": HELLO}) for site in sorted(new)}
        for site, answer in transport.ask(hello, min(policy.timeout, left)):
            replied.add(site)
            try:
                answers[site] = _read_hello(answer)
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


def _read_hello(answer: Answer) -> dict[str, Any]:
    """Read and check a site's answer to the handshake."""
    facts = unpack_answer(answer, HEADER * 64).facts
    try:
        schema = Schema(
            tuple(map(str, facts["features"])),
            int(facts["width"]),
            tuple(map(str, facts["classes"])),
            _read_columns(facts.get("columns", [])),
        )
        if not 0 <= schema.width <= MAX_WIDTH:
            raise WireError(f"its number of features is not between 0 and {MAX_WIDTH:,}")
        if schema.columns and tuple(c.name for c in schema.columns) != schema.features:
            raise WireError("its columns are not those that it named")
        if facts["digest"] != schema.digest:
            raise WireError("its schema does not match the hash that it sent")
        relations = _read_relations(facts.get("relations", []))
        return {"schema": schema, "dense": bool(facts["dense"]), "relations": relations}
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise WireError(f"no schema in its answer: {error!r}") from None


def _read_relations(found: Any) -> tuple[str, ...]:
    if not isinstance(found, list) or len(found) > MOST_RELATIONS:
        raise WireError(f"its types of edges are not a list of at most {MOST_RELATIONS}")
    names = tuple(map(str, found))
    if any("," in name or not name.strip() for name in names):
        raise WireError("a type of its edges has a name that is empty or has a comma")
    return names


def _read_columns(found: Any) -> tuple[Column, ...]:
    if not isinstance(found, list) or len(found) > MAX_COLUMNS:
        raise WireError(f"its columns are not a list of at most {MAX_COLUMNS:,}")
    try:
        return tuple(Column.from_json(column, f"column {i}") for i, column in enumerate(found))
    except UserError as error:
        raise WireError(str(error)) from None


def unpack_answer(answer: Answer, limit: int) -> Parcel:
    """Unpack the message in an answer, after a check of its size.

    Raises:
        WireError: if there is no message, if it is too large, or if it cannot be read.
    """
    if answer.error:
        raise WireError(answer.error)
    found = size(answer.text, answer.blob)
    if found > limit:
        raise WireError(f"sent {found:,} bytes where at most {limit:,} are allowed")
    return Parcel.unpack(answer.text, answer.blob)
