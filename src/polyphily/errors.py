"""What Polyphily raises: one kind for a user's mistake, one for a run that failed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PolyphilyError(Exception):
    """Base of everything this package raises on purpose. The message is written for a person."""

    exit_status = 1


class UserError(PolyphilyError):
    """Something the user can mend: a wrong name, a damaged file, a request that cannot be met."""

    exit_status = 2


class TrainingError(PolyphilyError):
    """A run that could not go on although the request was sound."""


class Diverged(TrainingError):
    """No client of a federation sent finite numbers.

    Attributes:
        federation: its place among those that run side by side.
    """

    def __init__(self, message: str, federation: int) -> None:
        super().__init__(message)
        self.federation = federation


def unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    """An error for a name that does not exist, naming the nearest that does.

    >>> str(unknown("method", "fedavgg", ["fedavg", "local"]))
    "unknown method 'fedavgg': did you mean 'fedavg'? Known: fedavg, local"
    """
    names = sorted(known)
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    guess = f": did you mean '{near[0]}'?" if near else "."
    return UserError(f"unknown {kind} '{name}'{guess} Known: {', '.join(names)}")


def missing_package(package: str, extra: str, purpose: str, otherwise: str = "") -> UserError:
    """An error for an optional package that is not installed, with the command that brings it."""
    hint = f" {otherwise}" if otherwise else ""
    return UserError(
        f"{purpose} needs the package '{package}', which is not installed: "
        f"pip install 'polyphily[{extra}]'.{hint}"
    )
