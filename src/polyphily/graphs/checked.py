"""Text and objects of JSON that others wrote: both are checked as they are read."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from polyphily.errors import UserError

TEXT = 256  # characters of a text that messages repeat
LONG = 4096  # characters of a name or a value
DEPTH = 32  # levels of lists and objects within each other
DIGITS = 20  # of a whole number: enough for 64 bits
VALUES = 1 << 23  # numbers, texts, lists and objects in one text
_ESCAPES = re.compile(
    r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?"  # titles, links, the clipboard
    r"|[\x1b\x9b]\[?[0-?]*[ -/]*[@-~]"  # colours, the cursor
)


def plain(text: object, limit: int = 300) -> str:
    r"""Return text that others wrote as one harmless line of at most `limit` characters.

    Sequences that control a terminal and characters that cannot be seen are removed, and white
    space becomes single spaces. It is for everything that is shown or logged.

    >>> plain("\x1b]0;root\x07all \x1b[32mwell\x1b[0m\r\n$ rm")
    'all well $ rm'
    """
    shown = _ESCAPES.sub("", str(text)[: 4 * limit])
    kept = "".join(" " if c.isspace() else c for c in shown if c.isspace() or c.isprintable())
    words = " ".join(kept.split())
    return words if len(words) <= limit else words[: limit - 1] + "…"


def parse_json(text: str) -> Any:
    """Parse JSON that others wrote.

    Raises:
        ValueError: if it is not valid, has numbers that are not finite or have more than 64 bits,
            a key twice in an object, text that is no Unicode, lists within lists beyond `DEPTH`, or
            more than `VALUES` values. The last is found before anything is allocated.
    """
    if sum(map(text.count, ",[{")) > VALUES:
        raise ValueError(f"more than {VALUES:,} values")
    try:
        found = json.loads(
            text,
            parse_int=_parse_int,
            parse_float=_parse_float,
            parse_constant=_refuse_constant,
            object_pairs_hook=_without_duplicates,
        )
    except RecursionError:
        raise ValueError(f"its JSON is nested more than {DEPTH} levels deep") from None
    _check_values(found)
    return found


def _parse_int(text: str) -> int:
    digits = len(text.lstrip("-"))
    if digits > DIGITS:
        raise ValueError(f"a number of {digits} digits")
    return int(text)


def _parse_float(text: str) -> float:
    value = float(text) if len(text) <= TEXT else math.inf
    if not math.isfinite(value):
        raise ValueError("a number that is too large")
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} where a finite number belongs")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key that occurs twice in an object")
    return found


def _check_values(data: Any) -> None:
    """Check the depth of lists and objects, and that every text can be written as UTF-8."""
    level: list[Any] = [data]
    for _ in range(DEPTH):
        following: list[Any] = []
        for value in level:
            if isinstance(value, str):
                value.encode()  # a UnicodeEncodeError is a ValueError
            elif isinstance(value, dict):
                following += value.keys()
                following += value.values()
            elif isinstance(value, list):
                following += value
        if not following:
            return
        level = following
    raise ValueError(f"its JSON is nested more than {DEPTH} levels deep")


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
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
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
