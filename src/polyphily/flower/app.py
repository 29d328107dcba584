"""The Flower app: messages over Flower's grid at the server, replies to them at a site."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.serverapp import Grid

from polyphily.errors import UserError
from polyphily.flower import flwr_internals
from polyphily.flower.deployment import Bundle, Deployment
from polyphily.flower.joining import Answer
from polyphily.flower.register import Register
from polyphily.flower.site import Site
from polyphily.flower.site_graph import SiteGraph
from polyphily.flower.wire import Parcel, WireError

MESSAGE_TYPE = "train"  # Flower's type of all messages of this app
FACTS, TENSORS, BLOB, JSON = "facts", "tensors", "safetensors", "json"
OTHER_FORM = "the message does not have the form of Polyphily's messages"
SMALL = 4 << 20  # bytes that are sent as one object
POLL = 0.2  # seconds
AWAY_TTL = 60.0  # seconds after which a message to a site that is away expires
BATCH = 16  # messages that are sent at once, and are in memory together
ErrorCode = flwr_internals.error_codes()
UNREACHED = (
    ErrorCode.NODE_UNAVAILABLE,
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
)


def to_records(parcel: Parcel) -> RecordDict:
    """Pack a parcel as the content of a Flower message."""
    return _records(*parcel.pack())


def _records(text: str, blob: bytes) -> RecordDict:
    """Pack text and bytes.

    Flower sends every record, array and chunk of an array as an object, with a request of its own.
    A small blob is therefore part of the record of facts. A large one is an array, which Flower
    divides into chunks.
    """
    if len(blob) <= SMALL:
        return RecordDict({FACTS: ConfigRecord({JSON: text, BLOB: blob})})
    array = Array(dtype="uint8", shape=(len(blob),), stype=BLOB, data=blob)
    return RecordDict({FACTS: ConfigRecord({JSON: text}), TENSORS: ArrayRecord({BLOB: array})})


def raw_parts(records: RecordDict) -> tuple[str, bytes]:
    """Return the text and the bytes of a message's content, without parsing them.

    Raises:
        WireError: if the content has another form.
    """
    try:
        facts = records[FACTS]
        text, blob = facts[JSON], facts[BLOB] if BLOB in facts else records[TENSORS][BLOB]
    except (KeyError, TypeError):
        raise WireError(OTHER_FORM) from None
    if isinstance(blob, Array) and blob.stype == BLOB:
        blob = blob.data
    if not isinstance(text, str) or not isinstance(blob, bytes):
        raise WireError(OTHER_FORM)
    return text, blob


# At the server ---------------------------------------------------------------------------------


class GridTransport:
    """A transport (`joining.Transport`) over Flower's grid.

    Args:
        grid: given by Flower.
        sites: the sites' names by public key.
        register: of the sites; it is read before every message, because keys can be replaced and
            revoked during a run.
    """

    def __init__(
        self, grid: Grid, sites: Mapping[bytes, str], register: Register | None = None
    ) -> None:
        self.grid, self.sites, self.register = grid, sites, register
        self._singly = False  # whether replies are fetched one by one

    def _refused(self) -> dict[str, str]:
        """Read the register; return the sites that may not connect, with the reasons."""
        if self.register is None:
            return {}
        with suppress(UserError):  # somebody is editing it: it stays as it was
            self.register.refresh()
        self.sites = {entry.pem: entry.name for entry in self.register.active()}
        found = ((entry.name, entry.refusal()) for entry in self.register.entries())
        return {name: reason for name, reason in found if reason}

    def _nodes(self) -> dict[str, int]:
        """Return the node numbers of connected sites by name. Unknown keys are ignored."""
        return {
            self.sites[node.public_key]: node.node_id
            for node in self.grid.get_nodes()
            if node.public_key in self.sites
        }

    def online(self) -> set[str]:
        """Return connected sites, and those that may not connect: `ask` gives the reason."""
        return set(self._refused()) | set(self._nodes())

    def ask(
        self,
        messages: Mapping[str, Parcel],
        timeout: float,
        grace: Mapping[str, float] | None = None,
    ) -> Iterator[tuple[str, Answer]]:
        """Send messages and yield answers, as `Transport.ask`.

        A site that is offline gets its message as soon as it is connected again.
        """
        began, brief = time.monotonic(), grace or {}
        pending: dict[str, str] = {}  # site by the id of a message without an answer
        waiting = set(messages)
        while waiting:
            spent = time.monotonic() - began
            if all(spent >= min(brief.get(site, timeout), timeout) for site in waiting):
                return
            for site, reason in self._refused().items():
                if site in waiting:
                    waiting.discard(site)
                    pending = {number: other for number, other in pending.items() if other != site}
                    yield site, Answer(error=reason)
            left = timeout - spent
            unsent = waiting - set(pending.values())
            if unsent:
                nodes = self._nodes()
                sending = [
                    (site, nodes[site], min(left, AWAY_TTL) if site in brief else left)
                    for site in sorted(unsent & nodes.keys())
                ]
                for some in batched(sending, BATCH):
                    pending |= self._push(messages, some)
            for site, answer in self._pull(pending):
                waiting.discard(site)
                yield site, answer
            time.sleep(POLL)

    def _pull(self, pending: dict[str, str]) -> Iterator[tuple[str, Answer]]:
        """Fetch replies and yield them; what is no longer in `pending` is to be sent again.

        Flower parses replies as it fetches them. If one of several cannot be parsed, all of them
        are lost. They are then asked for again, and fetched one by one from there on, so that the
        site which sent it is known.
        """
        groups = [[name] for name in pending] if self._singly else [list(pending)]
        for names in filter(None, groups):
            try:
                replies = list(self.grid.pull_messages(names))
            except Exception as error:
                if _is_connection_error(error):
                    raise
                lost = [pending.pop(name) for name in names]
                if self._singly:
                    reason = f"Flower cannot read its message: {type(error).__name__}: {error}"
                    yield from ((site, Answer(error=reason)) for site in lost)
                self._singly = True
                continue
            for reply in replies:
                site = pending.pop(reply.metadata.reply_to_message_id, "")
                if not site or (reply.has_error() and reply.error.code in UNREACHED):
                    continue  # nobody was asked, or it is sent again
                yield site, _to_answer(reply)

    def _push(
        self, messages: Mapping[str, Parcel], sending: Sequence[tuple[str, int, float]]
    ) -> dict[str, str]:
        """Send messages at once; return the sites by the ids of their messages.

        A message that Flower does not take has no id. It is sent again.

        Args:
            messages: by site.
            sending: sites, with their node numbers and the seconds for which a message is valid.
        """
        numbers = self.grid.push_messages(
            [
                Message(
                    to_records(messages[site]),
                    node,
                    MESSAGE_TYPE,
                    ttl=seconds,
                    group_id=str(messages[site].facts.get("round", "")),
                )
                for site, node, seconds in sending
            ]
        )
        taken = zip(numbers, sending, strict=False)
        return {str(number): site for number, (site, *_) in taken if number is not None}


T = TypeVar("T")


def batched(entries: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Cut a list into parts of at most `size`."""
    return (entries[begin : begin + size] for begin in range(0, len(entries), size))


def _is_connection_error(error: Exception) -> bool:
    """Return whether an error is about the connection to the SuperLink, not about a message."""
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] == "httpx"


def _to_answer(reply: Message) -> Answer:
    if reply.has_error():
        return Answer(error=str(reply.error.reason or "failed without a reason"))
    try:
        return Answer(*raw_parts(reply.content))
    except Exception as error:  # of Flower's records, too
        return Answer(error=str(error))


def serve(grid: Grid, context: Context) -> None:
    """Run the run that the app's configuration names; create one if it names none.

    Flower calls this at the server.
    """
    deployment = Deployment.of_environment()
    config = context.run_config
    name = str(config["run"]) or deployment.new_run(
        str(config["method"]), {"rounds": int(config["rounds"])}, {}
    )
    transport = GridTransport(grid, deployment.public_keys(), deployment.register)
    deployment.conduct(name, transport)


# At a site -------------------------------------------------------------------------------------


def make_reply(site: Site, message: Message, report: Callable[[str], None]) -> Message:
    """Return a site's reply to a message: its answer, or an error with the reason."""
    try:
        answer = site.reply(*raw_parts(message.content), report)
    except WireError as error:
        answer = site.failure(error, {}, report)
    if answer.error:
        told = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, answer.error)
        return Message(told, reply_to=message)
    return Message(_records(answer.text, answer.blob), reply_to=message)


def respond(message: Message, context: Context) -> Message:
    """Reply to a message from a site that runs Flower's own SuperNode.

    Flower calls this at the site. The SuperNode is started with
    `--node-config 'bundle="…" graph="…"'`.
    """
    bundle = Bundle(Path(str(context.node_config["bundle"])))
    graph = SiteGraph.read(Path(str(context.node_config["graph"])))
    site = Site(bundle.name, graph, bundle.path, identity=bundle.identity())
    return make_reply(site, message, lambda _: None)
