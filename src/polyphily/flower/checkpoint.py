"""The checkpoints of a deployed server, from which it resumes after a restart.

The last three are kept. Each has a checksum, and it is on the disk (fsync) before it replaces an
older one. If the newest is damaged, a run goes on from the one before.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyphily.core.messages import Message, State, with_prefix
from polyphily.errors import UserError
from polyphily.graphs.checked import plain
from polyphily.runs.folder import METRICS, RunFolder, read_tensors, save_tensors, sync

STATE, TRACKER = "state/", "tracker/"
KEPT = 3  # checkpoints
CHECKSUM = "sha256"


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
        changes: the largest usual changes of models so far (`Bounds.record`).
    """

    round: int
    state: State
    tracker: Message
    accepted: dict[str, int]
    troubles: list[dict[str, Any]]
    pending: dict[str, Any] | None
    changes: Mapping[str, float] = field(default_factory=dict)

    def save(self, folder: RunFolder) -> None:
        """Write the checkpoint into a run folder, atomically, and keep those before it."""
        tensors = {STATE + n: t for n, t in self.state.items()}
        tensors |= {TRACKER + n: t for n, t in self.tracker.items()}
        progress = json.dumps(
            {
                "round": self.round,
                "accepted": self.accepted,
                "troubles": self.troubles,
                "pending": self.pending,
                "changes": dict(self.changes),
            }
        )
        if (records := folder.path / METRICS).exists():
            sync(records)  # a checkpoint stands for the records before it
        files = _files(folder)
        for newer, older in reversed(list(pairwise(files))):
            if newer.exists():
                spare = older.with_suffix(".linked")
                spare.unlink(missing_ok=True)
                os.link(newer, spare)  # the newer file stays until another takes its place
                os.replace(spare, older)
        facts = {"progress": progress, CHECKSUM: _checksum(tensors, progress)}
        save_tensors(files[0], tensors, facts, durable=True)

    @classmethod
    def load(cls, folder: RunFolder) -> ServerCheckpoint | None:
        """Read the last good checkpoint of a run folder; None if there is none yet."""
        return cls.load_last(folder)[0]

    @classmethod
    def load_last(cls, folder: RunFolder) -> tuple[ServerCheckpoint | None, list[str]]:
        """Read the last good checkpoint, and say what is wrong with newer ones.

        Raises:
            UserError: if there are checkpoints and all of them are damaged.
        """
        damaged: list[str] = []
        for file in _files(folder):
            if file.exists():
                try:
                    return cls._read(file), damaged
                except Exception as error:  # whatever a damaged file makes its readers raise
                    damaged.append(plain(f"{file.name}: {error or type(error).__name__}"))
        if damaged:
            raise UserError(
                f"no checkpoint in {folder.path} can be used ({'; '.join(damaged)}): "
                "start a new run"
            )
        return None, damaged

    @classmethod
    def _read(cls, file: Path) -> ServerCheckpoint:
        tensors, facts = read_tensors(file)
        if CHECKSUM in facts and facts[CHECKSUM] != _checksum(tensors, facts["progress"]):
            raise ValueError("its checksum is wrong")
        progress = json.loads(facts["progress"])
        return cls(
            round=int(progress["round"]),
            state=with_prefix(tensors, STATE),
            tracker=with_prefix(tensors, TRACKER),
            accepted={site: int(number) for site, number in progress["accepted"].items()},
            troubles=list(progress["troubles"]),
            pending=progress["pending"],
            changes=progress.get("changes", {}),
        )


def _files(folder: RunFolder) -> list[Path]:
    """Return the files of the last checkpoints, the newest first."""
    newest = folder.checkpoint_file
    older = [newest.with_stem(f"{newest.stem}-{k}") for k in range(1, KEPT)]
    return [newest, *older]


def _checksum(tensors: Mapping[str, Tensor], progress: str) -> str:
    found = hashlib.sha256(progress.encode())
    for name, tensor in sorted(tensors.items()):
        host = tensor.detach().cpu().contiguous()
        found.update(f"{name} {host.dtype} {list(host.shape)} ".encode())
        found.update(host.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
