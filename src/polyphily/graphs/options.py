"""Options of partitions and synthetic graphs, read from Python values or from their text."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

from polyphily.errors import UserError

_TRUTH = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}
_REQUIRED = inspect.Parameter.empty


class Bounds(NamedTuple):
    """The smallest and the largest value of an option, for use in `Annotated[int, Bounds(1)]`."""

    low: float = -math.inf
    high: float = math.inf


_UNBOUNDED = Bounds()


def real(name: str, value: object, low: float = -math.inf, high: float = math.inf) -> float:
    """Return a finite number within [low, high] from a number or its text."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"option '{name}' must be a number, got {value!r}")
    if number < low:
        raise UserError(f"option '{name}' must be at least {low:g}, got {value}")
    if number > high:
        raise UserError(f"option '{name}' must be at most {high:g}, got {value}")
    return number


def whole(name: str, value: object, low: float = -math.inf, high: float = math.inf) -> int:
    """Return a whole number within [low, high] from a number or its text."""
    number = real(name, value, low, high)
    if number != int(number):
        raise UserError(f"option '{name}' must be a whole number, got {value}")
    return int(number)


def truth(name: str, value: object) -> bool:
    """Return True or False from a truth value or one of the words on, off, true, false, 1, 0."""
    word = str(value).lower()
    if word not in _TRUTH:
        raise UserError(f"option '{name}' must be on or off, got {value!r}")
    return _TRUTH[word]


@dataclass(frozen=True)
class Option:
    """An option of a function, as its signature declares it.

    Attributes:
        name: the parameter's name.
        kind: bool, int, float or str.
        default: the value unless one is given; None if one must be given.
        bounds: of a number.
    """

    name: str
    kind: type
    default: Any
    bounds: Bounds = _UNBOUNDED

    def read(self, value: object) -> bool | int | float | str:
        """Return a value of the option's type from a Python value or its text.

        Raises:
            UserError: for a value of another type, or out of bounds.
        """
        if self.kind is bool:
            return truth(self.name, value)
        if self.kind is int:
            return whole(self.name, value, *self.bounds)
        if self.kind is float:
            return real(self.name, value, *self.bounds)
        return str(value)


def declared_options(function: Callable[..., object], skip: int) -> Mapping[str, Option]:
    """Return the options that a function declares as parameters, by name.

    The type of an option is its annotation or, without one, the type of its default. Numbers may
    have bounds, as in `Annotated[float, Bounds(0, 1)]`.

    Args:
        function: the function.
        skip: the number of leading parameters that are no options.

    Raises:
        TypeError: for a parameter that cannot be an option.
    """
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError:  # names that are imported for type checkers only
        hints = {}
    parameters = list(inspect.signature(function).parameters.values())[skip:]
    return {p.name: _declared(p, hints.get(p.name, type(p.default))) for p in parameters}


def _declared(parameter: inspect.Parameter, hint: Any) -> Option:
    bounds = _UNBOUNDED
    if get_origin(hint) is Annotated:
        hint, *extras = get_args(hint)
        bounds = next((extra for extra in extras if isinstance(extra, Bounds)), bounds)
    variadic = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    if variadic or hint not in (bool, int, float, str):
        raise TypeError(
            f"parameter '{parameter}' is no option: name every option and give it a type, which "
            "is bool, int, float or str"
        )
    default = None if parameter.default is _REQUIRED else parameter.default
    return Option(parameter.name, hint, default, bounds)


def read_options(
    owner: str, options: Mapping[str, Option], given: Mapping[str, object]
) -> dict[str, Any]:
    """Return a value for every option: the given one, or its default.

    Args:
        owner: whose options they are, as in "partition 'dirichlet'".
        options: what there is.
        given: values by name, as Python values or as text.

    Raises:
        UserError: for an unknown option, a missing one or a value that does not fit.
    """
    for key in given:
        if key not in options:
            known = ", ".join(sorted(options))
            takes = f"its options: {known}" if known else "it has none"
            raise UserError(f"{owner} has no option '{key}' ({takes})")
    for key, option in options.items():
        if option.default is None and key not in given:
            raise UserError(f"{owner} needs the option '{key}': write {key}=value")
    return {key: option.read(given.get(key, option.default)) for key, option in options.items()}
