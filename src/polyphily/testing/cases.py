"""A method to check, and the list of checks."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from polyphily.core.method import Method
from polyphily.engines.simulation import Simulation
from polyphily.graphs.loading import Federation
from polyphily.runtime.client import Trained
from polyphily.testing.comparing import CheckFailed, difference
from polyphily.testing.examples import simulate, small_federation, usual_backbone


@dataclass(frozen=True)
class MethodCase:
    """A method to check, with what is known to be different about it.

    Attributes:
        method: with its hyperparameters.
        backbone: the network to train; gcn unless given, if the method can train it.
        permutes: whether the order of clients does not matter. False for a method whose random
            draws belong to the clients' numbers.
        untrained: parameters that the first round leaves as they are on purpose, by name or by
            what their names begin with.
    """

    method: Method
    backbone: str | None = None
    permutes: bool = True
    untrained: tuple[str, ...] = ()

    @property
    def cls(self) -> type[Method]:
        return type(self.method)

    def simulate(
        self,
        rounds: int,
        federations: Federation | Sequence[Federation] | None = None,
        *,
        method: Method | None = None,
        **settings: Any,
    ) -> Simulation:
        """Return a simulation of the method after some rounds."""
        chosen = {"backbone": self.backbone or usual_backbone(self.method), **settings}
        data = small_federation() if federations is None else federations
        return simulate(method or self.method, data, rounds, **chosen)

    def fail(self, what: str, remedy: str, hook: str = "") -> CheckFailed:
        """Return the error of a failed check: what is wrong, then what to do."""
        place = f"{self.cls.__name__}.{hook}" if hook else self.cls.__name__
        return CheckFailed(f"{place}: {what.rstrip('.')}. {remedy[:1].upper()}{remedy[1:]}.")

    def compare(
        self,
        what: str,
        first: Mapping[str, Tensor],
        second: Mapping[str, Tensor],
        relative: float,
        remedy: str,
        hook: str = "",
    ) -> None:
        """Raise `CheckFailed` unless two sets of tensors agree."""
        found = difference(first, second, relative)
        if found:
            raise self.fail(f"{what}: {found}", remedy, hook)


MethodCheck = Callable[[MethodCase], None]
METHOD_CHECKS: dict[str, MethodCheck] = {}
"""The checks by name, in the order in which `check_method` runs them."""


def method_check(name: str) -> Callable[[MethodCheck], MethodCheck]:
    """Add a check; an exception that it does not expect is reported with the hook it came from."""

    def add(function: MethodCheck) -> MethodCheck:
        @functools.wraps(function)
        def run(case: MethodCase) -> None:
            try:
                function(case)
            except CheckFailed:
                raise
            except Exception as error:
                hook = _hook_of(error)
                words = " ".join(str(error).split())
                raise case.fail(
                    f"the check '{name}' ended with {type(error).__name__}: {words}",
                    "the traceback above shows where it was raised",
                    hook,
                ) from error

        METHOD_CHECKS[name] = run
        return run

    return add


def _hook_of(error: Exception) -> str:
    """Return the innermost hook of a method that an exception passed through."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    inside = [f.f_code.co_name for f in frames if isinstance(f.f_locals.get("self"), Method)]
    return inside[-1] if inside else ""


def trained(simulation: Simulation) -> Trained:
    """Return what all clients would leave in the next round, without advancing."""
    received = simulation.download(simulation.placement.members)
    return simulation.clients.train(received, simulation.memory, simulation.round)
