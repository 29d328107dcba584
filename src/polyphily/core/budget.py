"""The privacy budget of a site in a run: `--dp epsilon=8,delta=1e-5,clip=1.0`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import lru_cache
from types import ModuleType

from polyphily.errors import UserError, missing_package, unknown

OFF = "off"
ROUNDING = 1e-9  # relative; by this much a budget may be exceeded


@dataclass(frozen=True)
class Budget:
    """The (epsilon, delta) that all uploads of a site in a run may spend together.

    Attributes:
        epsilon: the bound on the privacy loss.
        delta: the probability with which the bound may fail.
        clip: the largest norm of an upload's difference to what was received.
    """

    epsilon: float
    delta: float = 1e-5
    clip: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Budget | None:
        """Parse a budget; None if it is off.

        >>> Budget.parse("epsilon=8,clip=0.5")
        Budget(epsilon=8.0, delta=1e-05, clip=0.5)
        """
        if text == OFF:
            return None
        values: dict[str, float] = {}
        known = [field.name for field in fields(cls)]
        for item in text.split(","):
            name, sign, value = (part.strip() for part in item.partition("="))
            if not sign:
                raise UserError(
                    f"dp: '{item}' is not name=value, as in epsilon=8,delta=1e-5,clip=1.0"
                )
            if name not in known:
                raise unknown("part of dp", name, known)
            try:
                values[name] = float(value)
            except ValueError:
                raise UserError(f"dp: '{item}' is not a number, as in epsilon=8") from None
            if not 0 < values[name] < (1 if name == "delta" else math.inf):
                words = "between 0 and 1" if name == "delta" else "positive and finite"
                raise UserError(f"dp: {name} must be {words}, not {value}")
        if "epsilon" not in values:
            raise UserError("dp: say how much privacy, as in epsilon=8,delta=1e-5,clip=1.0")
        return cls(**values)

    def covers(self, other: Budget | None) -> bool:
        """Return whether another budget is within this one."""
        return other is not None and other.epsilon <= self.epsilon and other.delta <= self.delta

    def multiplier(self, uploads: int) -> float:
        """Return the noise multiplier with which so many uploads spend the budget.

        Gaussian noise composes without loss, whatever later uploads make of earlier ones: `n`
        uploads with noise z are as one with z / sqrt(n) (Dong, Roth and Su 2022, Corollary 3.3).
        """
        sigma: float = _accounting().get_sigma_gaussian(self.epsilon, self.delta)
        return sigma * math.sqrt(uploads)

    def spent(self, multiplier: float, uploads: int) -> float:
        """Return the exact epsilon of so many uploads."""
        return _epsilon(multiplier / math.sqrt(uploads), self.delta) if uploads else 0.0

    def spent_by(self, multipliers: Iterable[float]) -> float:
        """Return the exact epsilon of uploads with these noise multipliers together."""
        sigma = composed(multipliers)
        if math.isinf(sigma):
            return 0.0
        return _epsilon(sigma, self.delta) if sigma > 0 else math.inf

    def allows(self, multipliers: Iterable[float]) -> bool:
        """Return whether uploads with these noise multipliers are within the budget together."""
        return composed(multipliers) >= self.multiplier(1) * (1 - ROUNDING)


def composed(multipliers: Iterable[float]) -> float:
    """Return the noise multiplier of one upload that reveals as much as several together.

    Infinite without any; 0 if one of them has no noise (Dong, Roth and Su 2022, Corollary 3.3).

    >>> composed([2.0, 2.0, 2.0, 2.0])
    1.0
    """
    losses = [1 / (z * z) if z > 0 and z * z > 0 else math.inf for z in multipliers]
    return 1 / math.sqrt(math.fsum(losses)) if losses else math.inf


@lru_cache(maxsize=4096)
def _epsilon(sigma: float, delta: float) -> float:
    return float(_accounting().get_epsilon_gaussian(sigma, delta))


def _accounting() -> ModuleType:
    try:
        import dp_accounting
    except ImportError:
        raise missing_package("dp-accounting", "privacy", "--dp") from None
    module: ModuleType = dp_accounting
    return module
