"""The states of clients in a file: what each of them keeps from round to round.

The file has a record of fixed size for every client and is memory-mapped. A record is written when
its client has trained for the first time, and the file system stores no others, so that the file
grows with the clients that were drawn.

A run that is killed goes on from its checkpoint, and records may be newer than that. So a record is
copied to a second file, `undo-R.bin`, before it changes for the first time since the checkpoint of
round R. `roll_back` copies these records back.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from polyphily.core.messages import Message
from polyphily.errors import UserError

STATES = "states.bin"
WRITTEN = "written"  # in a record: whether it holds anything
CLIENT, RECORD = "client", "record"  # in an entry of the second file


class ClientStates:
    """The states of all clients of a simulation, on disk.

    Args:
        folder: with the files; they are created unless they exist.
        clients: how many there are.
        example: the state of any clients, stacked; its names, types and shapes are those of all.
        undoable: whether to go back to a checkpoint will be possible.
    """

    def __init__(
        self, folder: Path, clients: int, example: Message, *, undoable: bool = True
    ) -> None:
        self.folder, self.clients, self.undoable = folder, clients, undoable
        self.record = np.dtype(
            [
                (WRITTEN, np.uint8),
                *((n, t.cpu().numpy().dtype, tuple(t.shape[1:])) for n, t in example.items()),
            ]
        )
        self.names = tuple(example)
        self._changed: set[int] = set()  # since the checkpoint
        self._checkpoint = 0
        size = clients * self.record.itemsize
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / STATES
            with file.open("r+b" if file.exists() else "w+b") as stream:
                found = os.fstat(stream.fileno()).st_size
                if found not in (0, size):
                    raise UserError(
                        f"{file} has {found:,} bytes, and the states of {clients:,} clients take "
                        f"{size:,}: another run wrote it. Run into another folder"
                    )
                os.truncate(stream.fileno(), size)
                self._map = mmap.mmap(stream.fileno(), size)
        except OSError as error:
            raise UserError(
                f"cannot keep the states of clients in {folder}: {error.strerror}"
            ) from None
        self._records: npt.NDArray[Any] = np.frombuffer(self._map, dtype=self.record)

    def read(
        self,
        clients: Sequence[int],
        initial: Callable[[Sequence[int]], Message],
        device: torch.device,
    ) -> Message:
        """Return the states of some clients, stacked.

        Args:
            clients: by number.
            initial: returns the states of clients that have none yet, given their positions.
            device: where they are wanted.
        """
        records = self._records[list(clients)]
        self._release()
        found = {n: torch.from_numpy(records[n].copy()) for n in self.names}
        if new := np.flatnonzero(records[WRITTEN] == 0).tolist():
            for name, value in initial(new).items():
                found[name][new] = value.cpu()
        return {n: t.to(device) for n, t in found.items()}

    def write(self, clients: Sequence[int], states: Message) -> None:
        """Replace the states of some clients."""
        if not clients:
            return
        if self.undoable:
            self._remember([k for k in clients if k not in self._changed])
        records = np.zeros(len(clients), dtype=self.record)
        records[WRITTEN] = 1
        for name in self.names:
            records[name] = states[name].detach().cpu().numpy()
        self._records[list(clients)] = records
        self._release()

    def commit(self, rounds: int) -> None:
        """Note that the checkpoint of some rounds is complete."""
        self._forget()
        self._checkpoint = rounds

    def roll_back(self, rounds: int) -> None:
        """Go back to the checkpoint of some rounds, the last one; 0 is the beginning."""
        file = self._undo(rounds)
        if file.exists():
            whole = file.stat().st_size // self._entry.itemsize  # a kill may have cut the last one
            entries = np.fromfile(file, dtype=self._entry, count=whole)
            self._records[entries[CLIENT][::-1]] = entries[RECORD][::-1]
        self.commit(rounds)

    @property
    def _entry(self) -> np.dtype[Any]:
        return np.dtype([(CLIENT, np.int64), (RECORD, self.record)])

    def _undo(self, rounds: int) -> Path:
        return self.folder / f"undo-{rounds}.bin"

    def _remember(self, clients: Sequence[int]) -> None:
        """Copy records to the second file, which must be complete before they change."""
        entries = np.zeros(len(clients), dtype=self._entry)
        entries[CLIENT], entries[RECORD] = clients, self._records[list(clients)]
        with self._undo(self._checkpoint).open("ab") as stream:
            stream.write(entries.tobytes())
        self._changed |= set(clients)

    def _forget(self) -> None:
        for file in self.folder.glob("undo-*.bin"):
            file.unlink()
        self._changed = set()

    def _release(self) -> None:
        """Give back the memory of the pages in use; the operating system keeps their contents."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)
