"""Flower's log, as the operator of a server or a site needs it.

Flower logs expected events as errors: an answer that comes after a run was stopped, a message that
has expired. Polyphily handles these events and reports them in its own words. Their lines are left
out here. All others are printed without escape sequences, because they may quote what a site sent.
"""

from __future__ import annotations

import logging
import re

from polyphily.flower import flwr_internals
from polyphily.graphs.checked import plain

EXPECTED = re.compile(
    r"Failed to store Message reply: (The message it replies to|duplicate reply)"
    r"|Invalid run ID for Message"
    r"|\[ApiError:2007\]"  # an answer after the end of its run
    r"|\[/v1/runtime/[a-z-]+\]\[ApiError:1008\]"  # the server's part of a run that was stopped
    r"|\[ApiError:18\] Cannot stop run \d+ .*already finished"
    r"|SuperExec subprocess did not terminate within"  # it ends when it sees that its parent has
    r"|Connection attempt failed, retrying"  # while the server starts
    r"|Connection successful after"
    r"|SuperExec terminated gracefully|Task stopped by user"
)


class OperatorFilter(logging.Filter):
    """Drops the lines of expected events; debugging shows all lines."""

    def filter(self, record: logging.LogRecord) -> bool:
        debugging = logging.getLogger("flwr").level <= logging.DEBUG
        return debugging or not EXPECTED.search(record.getMessage())


class PlainFormatter(logging.Formatter):
    """Formats a line of Flower's log as text on one line, with an exception's name at its end."""

    def format(self, record: logging.LogRecord) -> str:
        error = record.exc_info[1] if record.exc_info else None
        text = plain(record.getMessage()) + (f" ({plain(repr(error))})" if error else "")
        return f"{self.formatTime(record, '%H:%M:%S')} flower: {record.levelname.lower()}: {text}"


def install(level: str) -> None:
    """Print Flower's log from now on with this level, filtered."""
    handler = logging.StreamHandler()
    handler.setFormatter(PlainFormatter())
    handler.addFilter(OperatorFilter())
    log = flwr_internals.logger()
    log.handlers[:] = [handler]
    log.setLevel(level)
