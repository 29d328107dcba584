"""The exceptions of Polyphily: one for a mistake of the user, one for a run that failed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class PolyphilyError(Exception):
    """The base class of all exceptions of this package. The message is written for users."""

    exit_status = 1


class UserError(PolyphilyError):
    """A problem that the user can fix: a wrong name, a damaged file, an impossible request."""

    exit_status = 2


class Faults(NamedTuple):
    """The faults of one file.

    Attributes:
        place: the file, for messages; empty if a fault names no file.
        messages: the first faults, in the order of the file.
        total: the number of all faults.
    """

    place: str
    messages: tuple[str, ...]
    total: int


class FileFaults(UserError):
    """Several faults in the files of a user, listed together.

    Attributes:
        files: the faults of each file.
        faults: the messages of all files.
        count: the number of all faults, which may be more than the messages.
    """

    SHOWN = 20

    def __init__(self, files: Sequence[Faults]) -> None:
        self.files = tuple(files)
        self.faults = tuple(message for file in files for message in file.messages)
        self.count = sum(file.total for file in files)
        super().__init__(self._text())

    @classmethod
    def merged(cls, errors: Iterable[UserError]) -> FileFaults:
        """Return one error with the faults of several. Those that occur twice are listed once."""
        files: list[Faults] = []
        for error in errors:
            if isinstance(error, FileFaults):
                files += error.files
            else:
                files.append(Faults("", (str(error),), 1))
        return cls(list(dict.fromkeys(files)))

    def _text(self) -> str:
        if self.count == 1 and self.faults:
            return self.faults[0]
        lines = [f"{self.count:,} faults:"]
        for file, share in zip(self.files, self._shares(), strict=True):
            lines += file.messages[:share]
            if file.total > share:
                place = f" in {file.place}" if file.place else ""
                lines.append(f"and {file.total - share:,} more{place}")
        return "\n  ".join(lines)

    def _shares(self) -> list[int]:
        """Return how many faults of each file are shown, so that every file shows some."""
        shares = [0] * len(self.files)
        left = max(self.SHOWN, len(self.files))
        while left and any(n < len(f.messages) for n, f in zip(shares, self.files, strict=True)):
            for i, file in enumerate(self.files):
                if left and shares[i] < len(file.messages):
                    shares[i] += 1
                    left -= 1
        return shares


class TrainingError(PolyphilyError):
    """A run that failed although the request was valid."""


class OutOfMemory(TrainingError):
    """A run that needs more memory than there is now. With less beside it, it may succeed."""

    def __init__(self, message: str = "there was not enough memory") -> None:
        super().__init__(message)


class MethodError(PolyphilyError, TypeError):
    """A method whose hooks do not keep to their contract; for the method's author."""


class Diverged(TrainingError):
    """A run in which no client of a federation sent finite numbers.

    Attributes:
        federation: its position among the federations that run side by side.
    """

    def __init__(self, message: str, federation: int) -> None:
        super().__init__(message)
        self.federation = federation


def unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    """Return an error for an unknown name, which suggests the most similar known one.

    >>> str(unknown("method", "fedavgg", ["fedavg", "local"]))
    "unknown method 'fedavgg': did you mean 'fedavg'? Known: fedavg, local"
    """
    names = sorted(known)
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    guess = f": did you mean '{near[0]}'?" if near else "."
    return UserError(f"unknown {kind} '{name}'{guess} Known: {', '.join(names)}")


def toml_fault(error: ValueError) -> str:
    """Return what is wrong with a TOML file; for a backslash also what to write instead.

    >>> toml_fault(ValueError("Unescaped '\\\\' in a string (at line 1, column 9)"))
    "Unescaped '\\\\' in a string (at line 1, column 9). Write Windows paths in single quotes"
    """
    text = str(error)
    special = "\\" in text or "hex value" in text
    return f"{text}. Write Windows paths in single quotes" if special else text


def missing_package(package: str, extra: str, purpose: str, otherwise: str = "") -> UserError:
    """Return an error for an optional package that is missing, with the command to install it."""
    hint = f" {otherwise}" if otherwise else ""
    return UserError(
        f"{purpose} needs the package '{package}', which is not installed: "
        f"pip install 'polyphily[{extra}]'.{hint}"
    )
