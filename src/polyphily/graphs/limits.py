"""Limits on the sizes of input files, checked before memory is allocated for them.

A user's own data have generous limits. Files that come from others, such as models and
configurations, have strict ones. Every limit can be raised with an environment variable, which the
error names.
"""

from __future__ import annotations

import gzip
import io
import math
import os
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from polyphily.errors import UserError

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True)
class Limit:
    """A limit on the size of files of one kind.

    Attributes:
        variable: the environment variable that sets another.
        default: in bytes.
    """

    variable: str
    default: int

    def bytes(self) -> int:
        """Return the limit in bytes.

        Raises:
            UserError: if the environment variable is not a size.
        """
        text = os.environ.get(self.variable)
        if text is None:
            return self.default
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]B)", text.strip().upper())
        if not found:
            raise UserError(f"{self.variable}: '{text}' is no size: write 8GB or 500MB")
        return int(float(found[1]) * UNITS[found[2]])

    def check(self, path: Path, size: int, what: str = "has") -> None:
        """Raise a UserError if a file is too large.

        Args:
            path: the file.
            size: in bytes, of the file or of what it unpacks to.
            what: the verb before the size in the message.
        """
        if size > (most := self.bytes()):
            raise UserError(
                f"{path}: {what} {in_words(size)}, and {in_words(most)} is the most that is read. "
                f"If the file is right, set the environment variable {self.variable}, as in "
                f"{self.variable}={in_words(2 * size).replace(' ', '')}"
            )

    def check_file(self, path: Path) -> None:
        """Raise a UserError if a file is too large; one that does not exist is not."""
        try:
            self.check(path, path.stat().st_size)
        except OSError:
            return


DATA = Limit("POLYPHILY_MAX_DATA", 64 * 10**9)
"""Of a file with a graph, unpacked."""
MODEL = Limit("POLYPHILY_MAX_MODEL", 4 * 10**9)
"""Of a file with a model or a state."""
PARTITION = Limit("POLYPHILY_MAX_PARTITION", 4 * 10**9)
"""Of a file with a partition, unpacked."""
TEXT = Limit("POLYPHILY_MAX_TEXT", 16 * 10**6)
"""Of a configuration: TOML or JSON."""


def in_words(size: float) -> str:
    """Write a size with the largest unit that fits.

    >>> in_words(1_500_000_000), in_words(12)
    ('1.5 GB', '1 KB')
    """
    unit = next((unit for unit in reversed(UNITS) if size >= UNITS[unit]), "KB")
    return f"{max(size / UNITS[unit], 1):.4g} {unit}"


def read_text(path: Path, limit: Limit = TEXT) -> str:
    """Read a text file in UTF-8, with or without a byte order mark, unless it is too large.

    Raises:
        UserError: if it is too large, cannot be read, or is not UTF-8.
    """
    limit.check_file(path)
    try:
        with path.open("rb") as stream:
            content = stream.read(limit.bytes() + 1)  # the file may grow, or have no size
        limit.check(path, len(content))
        return content.decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text: save the file as UTF-8") from None


# Archives --------------------------------------------------------------------------------------


def check_zip(path: Path, limit: Limit = DATA) -> None:
    """Check the size that an archive unpacks to, as its headers declare it.

    zipfile reads no more of a member than is declared.

    Raises:
        UserError: if it is too large.
        zipfile.BadZipFile: if it is not a zip file.
    """
    limit.check_file(path)
    with zipfile.ZipFile(path) as archive:
        limit.check(path, sum(member.file_size for member in archive.infolist()), "unpacks to")


def check_npz(path: Path, limit: Limit = DATA) -> None:
    """Check the size of an `.npz` file's arrays by the headers of the archive and of the arrays.

    numpy allocates an array as its header declares it, before it reads the numbers. So a header
    that declares more numbers than the archive has is refused, too.

    Raises:
        UserError: if the arrays are too large.
        ValueError, zipfile.BadZipFile: if it is not an archive of arrays.
    """
    check_zip(path, limit)
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            with archive.open(member) as stream:
                size = _array_size(stream)
            limit.check(path, size, f"its array '{member.filename}' declares")
            if size > member.file_size:
                raise ValueError(
                    f"the array '{member.filename}' declares {in_words(size)} and has "
                    f"{in_words(member.file_size)}"
                )


def _array_size(stream: IO[bytes]) -> int:
    """Return the number of bytes that the header of an array declares; 0 without such a header."""
    from numpy.lib import format  # not at the top: commands that read no arrays start without it

    if stream.read(len(format.MAGIC_PREFIX)) != format.MAGIC_PREFIX:
        return 0
    stream.seek(0)
    version = format.read_magic(stream)
    read = format.read_array_header_1_0
    if version != (1, 0):
        read = format.read_array_header_2_0
    shape, _, dtype = read(stream)
    if dtype.hasobject or any(size < 0 for size in shape):  # numpy refuses to read it
        return 0
    return math.prod(shape) * int(dtype.itemsize)


class Unpacking(io.RawIOBase):
    """A gzip file that refuses to unpack more than a number of bytes.

    Args:
        path: the file.
        limit: the number of bytes.
        advice: what to do if the file is right, for the message.
    """

    def __init__(self, path: Path, limit: int, advice: str) -> None:
        self._path, self._limit, self._advice = path, limit, advice
        self._file, self._done = gzip.GzipFile(path), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        self._done += len(data)
        if self._done > self._limit:
            raise UserError(
                f"{self._path}: unpacks to more than {self._limit / (1 << 30):.3g} GB: if this is "
                f"right, {self._advice}"
            )
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def unpacked(path: Path, limit: Limit = DATA) -> io.BufferedReader:
    """Open a gzip file, which is unpacked as far as the limit allows."""
    advice = f"set the environment variable {limit.variable}"
    return io.BufferedReader(Unpacking(path, limit.bytes(), advice), 1 << 20)
