"""Before the first round: the transport to the sites, the policy of a run, and the handshake."""

from __future__ import annotations

import json
import math
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from polyphily.errors import TrainingError, UserError
from polyphily.flower.plan import Schema
from polyphily.flower.wire import DISMISS, HEADER, HELLO, Parcel, WireError, size
from polyphily.graphs.checked import Reader, plain
from polyphily.graphs.columns import MAX_COLUMNS, Column
from polyphily.graphs.edges import MOST_RELATIONS
from polyphily.graphs.rules import MAX_WIDTH
from polyphily.runs.folder import RunFolder

POLL = 0.5  # seconds
EVENTS = "events.jsonl"
EVENT_TEXT = 2000  # characters of a text in an event
MAX_CLASSES = 4096
FAREWELL = 10.0  # seconds that sites have to take note that they are left out
Emit = Callable[..., None]
Troubles = list[dict[str, Any]]
"""Late and refused answers, and sites that were left out, in the order of events."""


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

    def ask(
        self,
        messages: Mapping[str, Parcel],
        timeout: float,
        grace: Mapping[str, float] | None = None,
    ) -> Iterator[tuple[str, Answer]]:
        """Send each site its message; yield the answers as they arrive, until the timeout.

        Args:
            messages: by site.
            timeout: seconds to wait.
            grace: sites that are not waited for any longer once all others have answered and so
                many seconds have passed.
        """


@dataclass(frozen=True)
class Policy:
    """The faults that a run tolerates.

    Attributes:
        min_sites: number of answers that a round needs.
        timeout: seconds a site has to answer.
        repeats: how often a round with too few answers is repeated.
        join_timeout: seconds to wait for the sites before the first round.
        misses: messages in a row without an answer after which a site counts as away.
        grace: seconds that a site which is away has to answer, if the others are quicker.
        max_update: largest change of a model, relative to other changes (`flower/bounds.py`).
        max_weight: largest count or statistic, relative to those of other sites.
        max_model: largest model, in megabytes.
    """

    min_sites: int
    timeout: float = 600.0
    repeats: int = 2
    join_timeout: float = 600.0
    misses: int = 2
    grace: float = 5.0
    max_update: float = 100.0
    max_weight: float = 10_000.0
    max_model: float = 512.0

    def __post_init__(self) -> None:
        for name in ("min_sites", "repeats", "misses"):
            value, least = getattr(self, name), int(name != "repeats")
            if type(value) is not int or value < least:
                raise UserError(f"{name} must be a whole number, {least} or more, not {value!r}")
        for name in ("timeout", "join_timeout", "grace", *LIMITS):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
                words = "a number above 0" + (' or "off"' if name in LIMITS else "")
                raise UserError(f"{name} must be {words}, not {value!r}")


LIMITS = ("max_update", "max_weight", "max_model")  # entries of a policy that can be "off"


def read_limit(name: str, value: Any) -> Any:
    """Return an entry of a policy, with "off" as infinity and numbers in text as numbers."""
    if name not in LIMITS or not isinstance(value, str):
        return value
    try:
        return math.inf if value.strip().lower() == "off" else float(value)
    except ValueError:
        return value


def event_writer(folder: RunFolder) -> Emit:
    """Return a function that appends events to the run folder. All text in them is `plain`."""

    def emit(event: str, **facts: Any) -> None:
        entry = {"time": time.time(), "event": event, **{k: _tidy(v) for k, v in facts.items()}}
        with (folder.path / EVENTS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, allow_nan=False) + "\n")

    return emit


def _tidy(value: Any) -> Any:
    if isinstance(value, list):
        return [_tidy(entry) for entry in value]
    return plain(value, EVENT_TEXT) if isinstance(value, str) else value


def note_trouble(
    troubles: Troubles, emit: Emit, number: int, what: str, site: str, reason: str
) -> None:
    """Record that a site was late, refused or left out in a round; 0 is before the first."""
    reason = plain(reason)
    troubles.append({"round": number, "site": site, "what": what, "reason": reason})
    emit(what, round=number, site=site, reason=reason)


@contextmanager
def refusing(refuse: Callable[[str], None]) -> Iterator[None]:
    """Call `refuse` with the reason if reading a site's answer raises anything.

    Readers raise a WireError or a UserError. Anything else is a fault of theirs that the answer
    has brought to light. It must not end the run either. A full disk is no site's fault.
    """
    try:
        yield
    except OSError:
        raise
    except (WireError, UserError) as error:
        refuse(str(error))
    except Exception as error:
        refuse(f"its answer cannot be read: {type(error).__name__}: {error}")


def dismiss(transport: Transport, reasons: Mapping[str, str]) -> None:
    """Tell sites that they are left out, and why. Their answers do not matter."""
    messages = {
        site: Parcel({"kind": DISMISS, "reason": plain(why)}) for site, why in reasons.items()
    }
    if messages:
        for _ in transport.ask(messages, FAREWELL):
            pass


def gather(
    transport: Transport,
    sites: Sequence[str],
    policy: Policy,
    emit: Emit,
    troubles: Troubles | None = None,
) -> dict[str, dict[str, Any]]:
    """Wait for the sites and ask each for its schema. A site whose answer is refused is told why.

    Returns:
        The answers by site, in the order of `sites`: the schema, whether features are dense, and
        the types of edges.

    Raises:
        TrainingError: if too few sites have joined in time.
    """
    emit("waiting", sites=list(sites))
    answers: dict[str, dict[str, Any]] = {}
    refused: dict[str, str] = {}
    noted = [] if troubles is None else troubles

    def refuse(reason: str) -> None:
        refused[site] = reason
        note_trouble(noted, emit, 0, "refused", site, reason)

    deadline = time.monotonic() + policy.join_timeout
    while len(answers | refused) < len(sites) and (left := deadline - time.monotonic()) > 0:
        new = (transport.online() & set(sites)) - answers.keys() - refused.keys()
        if not new:
            time.sleep(POLL)
            continue
        hello = {site: Parcel({"kind": HELLO}) for site in sorted(new)}
        for site, answer in transport.ask(hello, min(policy.timeout, left)):
            with refusing(refuse):
                answers[site] = _read_hello(answer)
                emit("joined", site=site)
    dismiss(transport, refused)
    if len(answers) < policy.min_sites:
        absent = [site for site in sites if site not in answers]
        raise TrainingError(
            f"{len(answers)} of {len(sites)} sites joined within {policy.join_timeout:g} s, "
            f"{policy.min_sites} are needed. Missing: {', '.join(absent)}"
        )
    return {site: answers[site] for site in sites if site in answers}


def _read_hello(answer: Answer) -> dict[str, Any]:
    """Read and check a site's answer to the handshake."""
    found = Reader(unpack_answer(answer, HEADER * 64).facts, "its schema")
    columns = _read_columns(found.items("columns")) if found.has("columns") else ()
    schema = Schema(
        found.texts("features", MAX_WIDTH),
        found.count("width"),
        found.texts("classes", MAX_CLASSES),
        columns,
    )
    if schema.width > MAX_WIDTH:
        raise WireError(f"its number of features is not between 0 and {MAX_WIDTH:,}")
    if schema.features and len(set(schema.features)) != schema.width:
        raise WireError("its columns have not one name each")
    if schema.columns and tuple(c.name for c in schema.columns) != schema.features:
        raise WireError("its columns are not those that it named")
    _check_names("label", schema.classes)
    if found.text("digest") != schema.digest:
        raise WireError("its schema does not match the hash that it sent")
    relations = found.texts("relations", MOST_RELATIONS) if found.has("relations") else ()
    _check_names("type of edges", relations)
    if any("," in name or not name.strip() for name in relations):
        raise WireError("a type of its edges has a name that is empty or has a comma")
    return {"schema": schema, "dense": found.flag("dense"), "relations": relations}


def _check_names(what: str, names: Sequence[str]) -> None:
    """Check names that others will read: each occurs once and has no control characters."""
    if len(set(names)) < len(names):
        raise WireError(f"a {what} occurs twice in its schema")
    for name in names:
        if any(unicodedata.category(character) == "Cc" for character in name):
            raise WireError(f"a {what} in its schema has control characters: {plain(name, 50)}")


def _read_columns(found: Sequence[Any]) -> tuple[Column, ...]:
    if len(found) > MAX_COLUMNS:
        raise WireError(f"its columns are not a list of at most {MAX_COLUMNS:,}")
    return tuple(Column.from_json(column, f"column {i}") for i, column in enumerate(found))


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
