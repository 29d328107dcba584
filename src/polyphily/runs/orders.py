"""Runs to make, and searches to make before them, as plain data. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from polyphily.errors import UserError, unknown

RATES = ("lr", "weight_decay")  # what federations that run side by side may differ in


@dataclass(frozen=True)
class TuneRequest:
    """What the user asked to tune.

    Attributes:
        trials: how many trials; 1 tries the rates alone.
        rates: the learning rates and decays to combine; `searching.GRID` if empty.
    """

    trials: int
    rates: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.trials, bool) or not isinstance(self.trials, int) or self.trials < 1:
            raise UserError(f"tune: {self.trials!r} is no number of trials: give 1 or more")
        for name, values in self.rates.items():
            if name not in RATES:
                raise unknown("rate to tune", name, RATES)
            if not values:
                raise UserError(f"tune: '{name}' has no values to try")

    @classmethod
    def parse(cls, wishes: Sequence[str]) -> TuneRequest:
        """Parse the values of `--tune`: a number of trials, lists of rates, or both.

        >>> TuneRequest.parse(["20", "lr=0.003,0.01"])
        TuneRequest(trials=20, rates={'lr': (0.003, 0.01)})
        """
        lists = [wish for wish in wishes if "=" in wish]
        numbers = [wish.strip() for wish in wishes if "=" not in wish]
        if len(numbers) > 1:
            raise UserError(f"--tune: two numbers of trials, {' and '.join(numbers)}: give one")
        for number in numbers:
            if not number.isdecimal() or int(number) < 1:
                raise UserError(
                    f"--tune {number}: give a number of trials, 1 or more, as in --tune 20, or "
                    "rates to try, as in --tune lr=0.003,0.01"
                )
        return cls(int(numbers[0]) if numbers else 1, parse_rates(lists))

    def to_dict(self) -> dict[str, Any]:
        """Return the request as plain data."""
        return {"trials": self.trials, "rates": {n: list(v) for n, v in self.rates.items()}}


def parse_rates(wishes: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """Parse values to try.

    >>> parse_rates(["lr=0.003,0.01", "weight_decay=0"])
    {'lr': (0.003, 0.01), 'weight_decay': (0.0,)}
    """
    found: dict[str, tuple[float, ...]] = {}
    for wish in wishes:
        name, _, values = wish.partition("=")
        name = name.strip().replace("-", "_")
        if name not in RATES:
            raise unknown("rate to tune", name, RATES)
        try:
            found[name] = tuple(float(value) for value in values.split(","))
        except ValueError:
            raise UserError(f"--tune {wish}: write values, as in lr=0.003,0.01,0.03") from None
    return found


@dataclass(frozen=True)
class Order:
    """A run to make.

    Attributes:
        method: the name of the method.
        hyperparameters: of the method.
        data: arguments of `load`, without the seed.
        seeds: the seeds, all trained in one pass.
        settings: arguments of `Settings`.
        partitions: a folder of partition files, see `graphs.prepared`.
        tune: the search for what the order leaves open, before the run; None without a search.
    """

    method: str
    hyperparameters: dict[str, Any]
    data: dict[str, Any]
    seeds: tuple[int, ...]
    settings: dict[str, Any]
    partitions: Path | None = field(default=None, kw_only=True)
    tune: TuneRequest | None = field(default=None, kw_only=True)

    def request(self) -> dict[str, Any]:
        """Return everything that determines the result of the run. The device does not.

        Of the hyperparameters these are all values that have an effect, so that orders for one
        model have one request, whatever they call it.
        """
        from polyphily.core.method import create

        method = create(self.method, self.hyperparameters)
        idle = method.without_effect()
        fixed = sorted(self.hyperparameters)  # the others are searched
        return {
            "method": self.method,
            "set": {name: value for name, value in asdict(method).items() if name not in idle},
            "data": self.data,
            "seeds": list(self.seeds),
            "settings": {k: v for k, v in self.settings.items() if k != "device"},
            **({"tune": self.tune.to_dict() | {"set": fixed}} if self.tune else {}),
        }
