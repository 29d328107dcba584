"""The exceptions of Polyphily: one for a mistake of the user, one for a run that failed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PolyphilyError(Exception):
    """The base class of all exceptions of this package. The message is written for users."""

    exit_status = 1


class UserError(PolyphilyError):
    """A problem that the user can fix: a wrong name, a damaged file, an impossible request."""

    exit_status = 2


class TrainingError(PolyphilyError):
    """A run that failed although the request was valid."""


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


def missing_package(package: str, extra: str, purpose: str, otherwise: str = "") -> UserError:
    """Return an error for an optional package that is missing, with the command to install it."""
    hint = f" {otherwise}" if otherwise else ""
    return UserError(
        f"{purpose} needs the package '{package}', which is not installed: "
        f"pip install 'polyphily[{extra}]'.{hint}"
    )
