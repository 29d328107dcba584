"""Search ranges: the values of a hyperparameter or setting that tuning may try.

They are declared beside the value they belong to: `parameter(0.01, "…", search=Range(1e-4, 1,
log=True))`. Nothing here draws from them; `polyphily.runs.searching` does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

Value = bool | int | float | str


@dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`, both included: whole numbers if both bounds are.

    >>> 0.1 in Range(0.01, 1.0), 2.0 in Range(0.01, 1.0), str(Range(0.01, 1.0, log=True))
    (True, False, '0.01 – 1, log')

    Attributes:
        low: the smallest value.
        high: the largest value.
        log: whether every order of magnitude is equally likely.
    """

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise TypeError(f"Range({self.low}, {self.high}): give two numbers, the smaller first")
        if self.log and self.low <= 0:
            raise TypeError(f"Range({self.low}, {self.high}, log=True): begin above 0")

    @property
    def whole(self) -> bool:
        """True if only whole numbers belong to the range."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def size(self) -> float:
        """The number of values."""
        return self.high - self.low + 1 if self.whole else math.inf

    def __contains__(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return self.low <= value <= self.high and not (self.whole and value != int(value))

    def __str__(self) -> str:
        return f"{self.low:g} – {self.high:g}" + ", log" * self.log

    def to_dict(self) -> dict[str, Any]:
        """Return the range as plain data."""
        return {"low": self.low, "high": self.high, "log": self.log}


@dataclass(frozen=True, init=False)
class Choices:
    """A few values.

    >>> 64 in Choices(32, 64), str(Choices(32, 64))
    (True, '32, 64')
    """

    values: tuple[Value, ...]

    def __init__(self, *values: Value) -> None:
        if len(set(values)) < 2 or len(set(values)) < len(values):
            raise TypeError(f"Choices{values}: give two different values or more")
        object.__setattr__(self, "values", values)

    @property
    def size(self) -> float:
        """The number of values."""
        return len(self.values)

    def __contains__(self, value: object) -> bool:
        return any(type(value) is type(known) and value == known for known in self.values)

    def __str__(self) -> str:
        return ", ".join(map(str, self.values))

    def to_dict(self) -> dict[str, Any]:
        """Return the values as plain data."""
        return {"values": list(self.values)}


Search = Range | Choices


def check_search(search: Search, default: Value, choices: tuple[str, ...] = ()) -> None:
    """Raise a `TypeError` if a range does not suit the hyperparameter that declares it.

    A range must have values of the type of the default, hold the default, and leave out 0: with a
    coefficient of 0 a method would be another one. Switches cannot be searched for that reason.

    Args:
        search: the range.
        default: the default of the hyperparameter.
        choices: the words that the hyperparameter takes.
    """

    def refuse(reason: str) -> TypeError:
        return TypeError(f"parameter({default!r}, …, search={search!r}): {reason}")

    if isinstance(default, bool):
        raise refuse("a switch is not searched, because a tuned method must keep all its parts")
    if isinstance(search, Range):
        if isinstance(default, str) or isinstance(default, int) != search.whole:
            raise refuse(f"its bounds must be of type {type(default).__name__}, as the default")
        if search.low <= 0:
            raise refuse("begin above 0, which would turn a part of the method off")
    else:
        if any(type(value) is not type(default) for value in search.values):
            raise refuse(f"its values must be of type {type(default).__name__}, as the default")
        if 0 in search.values:
            raise refuse("leave out 0, which would turn a part of the method off")
        if isinstance(default, str) and not set(search.values) <= set(choices):
            raise refuse("its values must be among the choices")
    if default not in search:
        raise refuse("the default lies outside")
