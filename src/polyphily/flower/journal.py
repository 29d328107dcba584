"""An append-only file of JSON lines at a site, each with the hash of the line before.

A line is on the disk (fsync) before `append` returns. A changed, inserted or removed line breaks
the chain of hashes. The file NAME.head beside it has the number of lines and the hash of the last,
so that lines removed from the end are noticed, too. A kill can leave half a line at the end, and
can leave the head a line behind. Both are repaired: what half a line tells of never left the site.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from polyphily.errors import UserError
from polyphily.runs.folder import sync, write_text

Entry = dict[str, Any]
START = "0" * 64  # what the first line has in place of the hash of the line before


@dataclass(frozen=True)
class _End:
    """The end of a journal: its size in bytes, the number of its lines, the hash of the last."""

    size: int = 0
    lines: int = 0
    digest: str = START


class Journal:
    """A journal in a file, which need not exist yet.

    Args:
        file: the file.
        loss: what would be lost with the file, for messages: "the account of what was uploaded".
    """

    def __init__(self, file: Path, loss: str) -> None:
        self.file, self.loss = file, loss
        self.head = file.with_suffix(".head")
        self._end: _End | None = None  # as far as this process has checked the file

    def read(self) -> list[Entry]:
        """Return all entries, once the chain is known to be whole.

        Raises:
            UserError: if the file was tampered with or cannot be read; it says what to do.
        """
        try:
            content = self.file.read_bytes() if self.file.exists() else b""
        except OSError as error:
            raise UserError(f"{self.file}: cannot be read: {error.strerror or error}") from None
        entries, self._end = self._checked(content)
        return entries

    def append(self, entry: Mapping[str, Any]) -> None:
        """Add an entry; it is on the disk when this returns.

        Raises:
            UserError: if the file was tampered with, or cannot be written.
        """
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self._locked() as stream:
                self._append(stream, entry)
        except OSError as error:
            raise UserError(f"{self.file}: cannot be written: {error.strerror or error}") from None

    def end(self) -> tuple[int, str]:
        """Return the number of lines and the hash of the last one, as the file is now."""
        if self._end is None or self.changed():
            self.read()
        assert self._end is not None
        return self._end.lines, self._end.digest

    def has_line(self, number: int, digest: str) -> bool:
        """Return whether a line is in the file, with this hash."""
        before = [*(entry["before"] for entry in self.read()), self.end()[1]]
        return number < len(before) and before[number] == digest

    def changed(self) -> bool:
        """Return whether the file is not as this process has last seen it."""
        size = self.file.stat().st_size if self.file.exists() else 0
        return self._end is None or size != self._end.size

    @contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        """Open the file for one process at a time; create it with mode 0600."""
        is_new = not self.file.exists()
        descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "r+b") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            if is_new:
                sync(self.file.parent)
            yield stream

    def _append(self, stream: BinaryIO, entry: Mapping[str, Any]) -> None:
        size = stream.seek(0, os.SEEK_END)
        if self._end is None or self._end.size != size:
            stream.seek(0)
            _, self._end = self._checked(stream.read())
        end = self._end
        facts = {"line": end.lines + 1, "before": end.digest, **entry}
        line = json.dumps(facts, allow_nan=False).encode() + b"\n"
        try:
            stream.truncate(end.size)  # half a line that a kill has left
            stream.seek(end.size)
            stream.write(line)
            stream.flush()
            os.fsync(stream.fileno())
        except OSError:
            self._end = None
            raise
        self._end = _End(end.size + len(line), end.lines + 1, _digest(line))
        write_text(self.head, f"{self._end.lines} {self._end.digest}\n")

    def _checked(self, content: bytes) -> tuple[list[Entry], _End]:
        """Return the entries and the end of a file's content, without half a line at the end."""
        whole = content[: content.rfind(b"\n") + 1]
        lines = whole.splitlines(keepends=True)
        entries, digests = [], [START]
        for number, line in enumerate(lines, 1):
            try:
                entry = json.loads(line)
                follows = entry["before"] == digests[-1] and entry["line"] == number
            except (ValueError, LookupError, TypeError, RecursionError):
                follows = False
            if not follows:
                raise self._tampered(f"line {number} does not follow from the line before it")
            entries.append(entry)
            digests.append(_digest(line))
        self._check_head(digests)
        return entries, _End(len(whole), len(lines), digests[-1])

    def _check_head(self, digests: list[str]) -> None:
        """Check that the file still has every line that the head knows of."""
        if not self.head.exists():
            if len(digests) > 2:  # a kill can prevent the first head only
                raise self._tampered(f"{self.head.name} is missing")
            return
        try:
            number, digest = self.head.read_text(encoding="ascii").split()
            known = digests[int(number)] == digest
        except (ValueError, IndexError):
            known = False
        if not known:
            raise self._tampered(f"it lacks lines that {self.head.name} knows of")

    def _tampered(self, what: str) -> UserError:
        return UserError(
            f"{self.file} was changed by something other than polyphily: {what}. Put back the file "
            f"and {self.head.name} from a backup. Without one, move both away: the site then "
            f"begins again, and {self.loss} is lost"
        )


def _digest(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()
