"""The list of what may leave a site: the facts of each kind of reply, and the texts of errors.

A private run is one with differential privacy or secure aggregation. In such a run nothing leaves
the site but what the plan declares: no count, no time, no text of an unexpected error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyphily.core.budget import OFF
from polyphily.errors import PolyphilyError, UserError
from polyphily.flower.plan import Plan
from polyphily.flower.site_policy import Refused, SitePolicy
from polyphily.flower.wire import (
    CLOSE,
    CONFIRM,
    DISMISS,
    FINISH,
    HELLO,
    KEYS,
    MEASURE,
    PREPARE,
    REVEAL,
    ROUND,
    SHARE,
    Parcel,
    WireError,
)
from polyphily.graphs.checked import plain

COMMON = {"kind", "run", "round", "seconds"}
FACTS: Mapping[str, set[str]] = {
    HELLO: {"site", "features", "width", "classes", "columns", "digest", "dense", "relations"},
    MEASURE: {"statistics"},
    PREPARE: {"counts"},
    KEYS: {"attempt", "keys"},
    SHARE: {"attempt", "letters"},
    ROUND: {"note", "received", "trained", "loss", "attempt", "keys"},
    REVEAL: {"attempt", "shares", "letters"},
    FINISH: {"note", "received"},
    CONFIRM: {"attempt", "signature"},
    CLOSE: set(),
    DISMISS: set(),
}
"""The names of the facts in a reply of each kind, besides `COMMON`."""
SCORES = ("received", "trained", "loss")
FAILED = "failed while it worked on '{kind}'; the site's log has the reason"
LONGEST = 300  # characters of an error
_QUOTED_PATH = re.compile(r"(['\"])(?:[A-Za-z]:)?[\\/].*?\1")
_PATH = re.compile(r"(?<![\w.])(?:[A-Za-z]:)?[\\/][^\s'\",;:()\[\]<>]+")


class BadPlan(WireError, UserError):
    """A plan that cannot be used. The text tells nothing but what is in the plan."""


class Undeclared(PolyphilyError):
    """A reply that has more in it than the plan declares; a fault of the program."""


def is_private(facts: Mapping[str, Any], policy: SitePolicy) -> bool:
    """Return whether a message belongs to a private run; True if that cannot be told.

    Before there is a plan, the site's policy decides.
    """
    if policy.private or "plan" not in facts:
        return policy.private
    settings = facts["plan"].get("settings") if isinstance(facts["plan"], dict) else None
    if not isinstance(settings, dict):
        return True
    return settings.get("dp", OFF) != OFF or settings.get("secure_aggregation", False) is not False


def silenced(reply: Mapping[str, Any], plan: Plan, policy: SitePolicy) -> dict[str, Any]:
    """Return the facts of a reply without what a private run keeps at the site.

    Counts become ones and the time zero, because the server needs some number. Scores and losses
    become null under differential privacy, or if the policy keeps them.
    """
    if not plan.settings.private:
        return dict(reply)
    found = {**reply, "seconds": 0.0}
    if "counts" in found:
        found["counts"] = [1.0] * len(found["counts"])
    if plan.settings.dp != OFF or not policy.scores:
        found |= {name: _nulls(found[name]) for name in SCORES if name in found}
    return found


def _nulls(value: Any) -> Any:
    return [_nulls(entry) for entry in value] if isinstance(value, list) else None


def check_declared(kind: str, reply: Parcel) -> None:
    """Check that a reply has no facts but those of its kind, and tensors in a round only.

    Raises:
        Undeclared: naming what it has.
    """
    extra = reply.facts.keys() - COMMON - FACTS.get(kind, set())
    if extra or (reply.tensors and kind != ROUND):
        raise Undeclared(f"a reply to '{kind}' with undeclared {', '.join(sorted(extra))} was kept")


# Errors ----------------------------------------------------------------------------------------


def full_text(error: Exception) -> str:
    """Return the text of an error for the site's operator, in one line."""
    known = isinstance(error, PolyphilyError | WireError)
    return plain(str(error) if known else f"{type(error).__name__}: {error}")


def public_text(error: Exception, kind: object, folder: Path, *, private: bool) -> str:
    """Return the text of an error for the server: one line, bounded, without paths of files.

    In a private run it is a fixed text, unless the error is about the server's own message
    (`WireError`) or a refusal by the site's policy.

    Args:
        error: what went wrong.
        kind: of the message that was being answered.
        folder: of the site.
        private: whether the run is private.
    """
    if isinstance(error, Refused):
        return error.public
    if private and not isinstance(error, WireError):
        return FAILED.format(kind=kind if kind in FACTS else "a message")
    text = full_text(error).replace(str(folder.absolute()), "/-")
    return _PATH.sub("(a file)", _QUOTED_PATH.sub("(a file)", text))[:LONGEST]
