"""Objects of JSON that others wrote: entries are checked as they are read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from polyphily.errors import UserError

TEXT = 256  # characters of a text that messages repeat
LONG = 4096  # characters of a name or a value


@dataclass(frozen=True)
class Reader:
    """An object of JSON that others wrote, whose entries are checked as they are read."""

    data: Any
    where: str

    def __post_init__(self) -> None:
        if not isinstance(self.data, dict):
            raise UserError(f"{self.where}: is not an object")

    def has(self, name: str) -> bool:
        return name in self.data

    def get(self, name: str, kind: type) -> Any:
        if name not in self.data:
            raise UserError(f"{self.where}: no entry '{name[:TEXT]}'")
        value = self.data[name]
        if not isinstance(value, kind):
            raise UserError(f"{self.where}: the entry '{name[:TEXT]}' has another type")
        return value

    def text(self, name: str, limit: int = LONG) -> str:
        value: str = self.get(name, str)
        if len(value) > limit:
            raise UserError(f"{self.where}: the entry '{name}' has more than {limit} characters")
        return value

    def flag(self, name: str) -> bool:
        return bool(self.get(name, bool))

    def count(self, name: str) -> int:
        return self._whole(name, self.get(name, int))

    def _whole(self, name: str, value: Any) -> int:
        if type(value) is not int or not 0 <= value <= 1 << 48:
            raise UserError(f"{self.where}: '{name[:TEXT]}' is not a number from 0 on")
        return value

    def items(self, name: str, length: int | None = None) -> list[Any]:
        value: list[Any] = self.get(name, list)
        if length is not None and len(value) != length:
            raise UserError(f"{self.where}: '{name}' has {len(value)} entries, not {length}")
        return value

    def counts(self, name: str, length: int) -> list[int]:
        return [self._whole(name, value) for value in self.items(name, length)]

    def texts(self, name: str, limit: int) -> tuple[str, ...]:
        values = self.items(name)
        if len(values) > limit or not all(isinstance(v, str) and len(v) <= LONG for v in values):
            raise UserError(f"{self.where}: '{name}' is not a list of at most {limit:,} texts")
        return tuple(values)

    def floats(self, name: str, length: int | None = None) -> tuple[float, ...]:
        """Return finite numbers: one, or a list of `length`."""
        values = [self.get(name, object)] if length is None else self.items(name, length)
        found = []
        for value in values:
            number = math.nan
            if isinstance(value, int | float) and not isinstance(value, bool):
                try:
                    number = float(value)
                except OverflowError:
                    number = math.inf
            if not math.isfinite(number):
                raise UserError(f"{self.where}: '{name}' is not a finite number")
            found.append(number)
        return tuple(found)
