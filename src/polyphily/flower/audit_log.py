"""The audit log of a site: a line for everything that left it, with what really was sent."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import load

from polyphily.errors import UserError
from polyphily.flower.account import DAY, stamp
from polyphily.flower.journal import Entry, Journal
from polyphily.flower.wire import size

FILE = "audit.jsonl"
ANSWER, ERROR = "answer", "error"
Packed: TypeAlias = tuple[str, bytes]
"""The text and the bytes of a message (`Parcel.pack`)."""


class AuditLog:
    """The audit log in a site's folder.

    Args:
        folder: of the site.
    """

    def __init__(self, folder: Path) -> None:
        self.journal = Journal(folder / FILE, "the record of what left this site")
        self._recent: deque[dt.datetime] | None = None  # answers of the last 24 hours

    def note_answer(
        self, moment: dt.datetime, facts: Mapping[str, Any], packed: Packed, uploads: Journal
    ) -> None:
        """Write down an answer before it leaves.

        Args:
            moment: when it leaves.
            facts: of the server's message.
            packed: the two parts of the answer as they leave.
            uploads: the journal of uploads. The log keeps its last line's hash, so that an older
                copy of it is noticed.
        """
        text, blob = packed
        entry: Entry = {
            "names": sorted(json.loads(text)),
            "tensors": [_described(name, tensor) for name, tensor in sorted(load(blob).items())],
            "sha256": digest(packed),
            "bytes": size(text, blob),
        }
        if entry["tensors"]:
            entry["uploads"] = [uploads.file.name, *uploads.end()]
        self._note(moment, ANSWER, facts, entry)

    def note_error(
        self, moment: dt.datetime, facts: Mapping[str, Any], sent: str, reason: str
    ) -> None:
        """Write down an error: the text that leaves, and the reason, which stays here."""
        content = sent.encode()
        entry = {
            "sent": sent,
            "reason": reason,
            "sha256": hashlib.sha256(content).hexdigest(),
            "bytes": len(content),
        }
        self._note(moment, ERROR, facts, entry)

    def answered(self, moment: dt.datetime) -> int:
        """Return the number of messages that were answered in the 24 hours before."""
        if self._recent is None:
            times = (e["time"] for e in self.journal.read() if e["what"] == ANSWER)
            self._recent = deque(map(dt.datetime.fromisoformat, times))
        while self._recent and self._recent[0] <= moment - DAY:
            self._recent.popleft()
        return len(self._recent)

    def read(self) -> list[Entry]:
        """Return all entries, once the chain is known to be whole."""
        return self.journal.read()

    def check_uploads(self, uploads: Journal) -> None:
        """Check that the journal of uploads has every line that this log knows of.

        Raises:
            UserError: if it is an older copy, or was begun anew.
        """
        known = [e["uploads"] for e in self.read() if "uploads" in e]
        known = [line for name, *line in known if name == uploads.file.name]
        if known and not uploads.has_line(*known[-1]):
            raise UserError(
                f"{uploads.file} lacks uploads that {self.journal.file.name} knows of: "
                f"{uploads.loss} would begin again. Put the file back from a backup. If there is "
                f"none, move {self.journal.file} and {self.journal.head.name} away, too"
            )

    def _note(
        self, moment: dt.datetime, what: str, facts: Mapping[str, Any], entry: Mapping[str, Any]
    ) -> None:
        plan = facts.get("plan")
        run = plan.get("run") if isinstance(plan, dict) else None
        about = {
            "time": stamp(moment),
            "what": what,
            "kind": str(facts.get("kind"))[:20],
            "run": None if run is None else str(run)[:80],
            "round": facts.get("round") if isinstance(facts.get("round"), int) else None,
        }
        self.journal.append({**about, **entry})
        if what == ANSWER and self._recent is not None:
            self._recent.append(moment)


def digest(packed: Packed) -> str:
    """Return the hash of the bytes of a message: its text, then its tensors."""
    text, blob = packed
    return hashlib.sha256(text.encode() + blob).hexdigest()


def _described(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    norm = float(torch.linalg.vector_norm(tensor.double())) if tensor.numel() else 0.0
    return {
        "name": name,
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "norm": norm if norm < float("inf") else None,
    }
