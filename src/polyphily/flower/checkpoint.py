"""The checkpoint of a deployed server, from which it resumes after a restart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from polyphily.core.messages import Message, State, with_prefix
from polyphily.runs.folder import RunFolder

STATE, TRACKER = "state/", "tracker/"


@dataclass(frozen=True)
class ServerCheckpoint:
    """A server after a round.

    Attributes:
        round: number of complete rounds.
        state: the server's state.
        tracker: the tensors of the tracker (`Tracker.tensors`).
        accepted: the last round in which each site's answer was accepted.
        troubles: late and refused answers so far.
        pending: the record of the last round, if its received view is not scored yet.
    """

    round: int
    state: State
    tracker: Message
    accepted: dict[str, int]
    troubles: list[dict[str, Any]]
    pending: dict[str, Any] | None

    def save(self, folder: RunFolder) -> None:
        """Write the checkpoint into a run folder, atomically."""
        tensors = {STATE + n: t for n, t in self.state.items()}
        tensors |= {TRACKER + n: t for n, t in self.tracker.items()}
        progress = {
            "round": self.round,
            "accepted": self.accepted,
            "troubles": self.troubles,
            "pending": self.pending,
        }
        folder.save_checkpoint(tensors, progress)

    @classmethod
    def load(cls, folder: RunFolder) -> ServerCheckpoint | None:
        """Read the checkpoint of a run folder; None if there is none yet."""
        found = folder.load_checkpoint()
        if found is None:
            return None
        tensors, progress = found

        return cls(
            round=int(progress["round"]),
            state=with_prefix(tensors, STATE),
            tracker=with_prefix(tensors, TRACKER),
            accepted={site: int(number) for site, number in progress["accepted"].items()},
            troubles=list(progress["troubles"]),
            pending=progress["pending"],
        )
