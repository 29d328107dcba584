"""The Flower app: rounds over Flower's grid at the server, answers at a site."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from polyphily.errors import PolyphilyError
from polyphily.flower import deployment
from polyphily.flower.server import Answer
from polyphily.flower.site import Site, SiteGraph
from polyphily.flower.wire import Parcel, WireError

TYPE = "train"  # the kind of Flower message that all of ours are
FACTS, TENSORS, BLOB, JSON = "facts", "tensors", "safetensors", "json"
POLL = 0.2
UNREACHED = (
    ErrorCode.NODE_UNAVAILABLE,
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
)


def to_records(parcel: Parcel) -> RecordDict:
    text, blob = parcel.pack()
    array = Array(dtype="uint8", shape=(len(blob),), stype=BLOB, data=blob)
    return RecordDict({FACTS: ConfigRecord({JSON: text}), TENSORS: ArrayRecord({BLOB: array})})


def raw_parts(records: RecordDict) -> tuple[str, bytes]:
    """The text and the bytes in a message's content, unread.

    Raises:
        WireError: where the content is of another form.
    """
    try:
        text, array = records[FACTS][JSON], records[TENSORS][BLOB]
    except (KeyError, TypeError):
        raise WireError("a message of another form than Polyphily's") from None
    if not isinstance(text, str) or not isinstance(array, Array) or array.stype != BLOB:
        raise WireError("a message of another form than Polyphily's")
    return text, array.data


class GridTransport:
    """Messages over Flower's grid.

    Args:
        grid: Flower's.
        sites: the sites' names by public key.
    """

    def __init__(self, grid: Grid, sites: Mapping[bytes, str]) -> None:
        self.grid, self.sites = grid, sites

    def _nodes(self) -> dict[str, int]:
        """The connected sites, by name. A node whose key is not ours is nobody."""
        return {
            self.sites[node.public_key]: node.node_id
            for node in self.grid.get_nodes()
            if node.public_key in self.sites
        }

    def online(self) -> set[str]:
        return set(self._nodes())

    def ask(self, messages: Mapping[str, Parcel], timeout: float) -> Iterator[tuple[str, Answer]]:
        """As `Transport.ask`: a site that is away is asked as soon as it is back."""
        deadline = time.monotonic() + timeout
        asked: dict[str, str] = {}  # id of a message without answer yet: site
        done: set[str] = set()
        while len(done) < len(messages) and (left := deadline - time.monotonic()) > 0:
            away = messages.keys() - done - set(asked.values())
            if away:
                nodes = self._nodes()
                for site in sorted(away & nodes.keys()):
                    asked[self._push(messages[site], nodes[site], left)] = site
            for reply in self.grid.pull_messages(list(asked)) if asked else ():
                site = asked.pop(reply.metadata.reply_to_message_id)
                if reply.has_error() and reply.error.code in UNREACHED:
                    continue
                done.add(site)
                yield site, _answer(reply)
            time.sleep(POLL)

    def _push(self, parcel: Parcel, node: int, seconds: float) -> str:
        number = str(parcel.facts.get("round", ""))
        message = Message(to_records(parcel), node, TYPE, ttl=seconds, group_id=number)
        (identity,) = self.grid.push_messages([message])
        return str(identity)


def _answer(reply: Message) -> Answer:
    if reply.has_error():
        return Answer(error=str(reply.error.reason or "failed without a reason"))
    try:
        return Answer(*raw_parts(reply.content))
    except WireError as error:
        return Answer(error=str(error))


def serve(grid: Grid, context: Context) -> None:
    """What Flower runs at the server: a run that was laid out in the server's folder."""
    own = deployment.Deployment.of_environment()
    config = context.run_config
    name = str(config["run"]) or own.new_run(
        str(config["method"]), {"rounds": int(config["rounds"])}, {}
    )
    own.conduct(name, GridTransport(grid, own.public_keys()))


def answer_with(site: Site, message: Message, report: Callable[[str], None]) -> Message:
    """A site's reply to a message: its answer, or in words why there is none."""
    try:
        asked = Parcel.unpack(*raw_parts(message.content))
        what = asked.facts.get("kind")
        reply = to_records(site.answer(asked))
        report(f"{what} {asked.facts.get('round', '')}".strip())
        return Message(reply, reply_to=message)
    except (WireError, PolyphilyError) as error:
        reason = str(error)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    report(f"failed: {reason}")
    return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


def respond(message: Message, context: Context) -> Message:
    """What Flower's own SuperNode runs at a site: `--node-config 'bundle="…" graph="…"'`."""
    bundle = deployment.Bundle(Path(str(context.node_config["bundle"])))
    graph = SiteGraph.read(Path(str(context.node_config["graph"])))
    site = Site(bundle.name, graph, bundle.path, identity=bundle.identity())
    return answer_with(site, message, lambda _: None)
