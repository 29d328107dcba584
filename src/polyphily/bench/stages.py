"""The rounds of a method that are timed: each of its stages, and a first round of its own kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from polyphily.bench.timing import WARM_UP
from polyphily.core.method import Method, create
from polyphily.engines.simulation import Simulation

FIRST_ROUND = "first round"
MARGIN = 3  # rounds at the ends of a stage that may differ from the others
FEW = 3  # how often a first round is timed
MORE, QUICK = 3, 0.5  # rounds that take fewer seconds are timed more often
# The hyperparameter that says how many rounds the stages before a method's last one have.
LENGTHS = {"adafgl": "federated", "fedsage+": "generator_rounds"}


@dataclass(frozen=True)
class Span:
    """Rounds of a method that do the same work.

    Attributes:
        label: the name of the stage, or `FIRST_ROUND`; "" if the method has one stage only.
        start: how many rounds come before them.
        again: whether they are the first round, run again and again from the same state.
        hyperparameters: those that make the stage long enough to be timed.
    """

    label: str = ""
    start: int = 0
    again: bool = False
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)


def spans(name: str, rounds: int) -> list[Span]:
    """Return the rounds of a method that must be timed apart.

    The last stage begins when the method acts, after its warm-up. A stage before it is made longer
    where it has fewer rounds than are timed; its rounds do the same work then.

    Args:
        name: of the method.
        rounds: how many rounds will be timed, after `WARM_UP` others.
    """
    method = create(name)
    last = method.rounds_before_it_acts()
    stages = list(dict.fromkeys(method.stage(index) for index in range(last + 1)))
    final = Span(stages.pop(), last)
    if not stages or name not in LENGTHS:
        apart = method.phase(0) != method.phase(1)
        return [*([Span(FIRST_ROUND, again=True)] if apart else []), final]
    length = {LENGTHS[name]: WARM_UP + rounds + MARGIN}
    longer = create(name, length)
    starts = {stage: _longest(longer, stage) for stage in stages}
    apart = longer.phase(0) != longer.phase(starts[longer.stage(0)])
    return [
        *([Span(FIRST_ROUND, again=True)] if apart else []),
        *(Span(stage, start, hyperparameters=length) for stage, start in starts.items()),
        final,
    ]


def _longest(method: Method, stage: str) -> int:
    """Return where the longest run of rounds of a stage begins that all do the same work."""
    ends = range(method.rounds_before_it_acts())
    alike = groupby((n for n in ends if method.stage(n) == stage), key=method.phase)
    return max((list(run) for _, run in alike), key=len)[0]


def turns(span: Span, device: str, rounds: int) -> tuple[int, int]:
    """Return how many rounds of a span are timed, and how many before them are not.

    On a GPU the first rounds are recorded. A first round happens once in a run, so that its
    recording counts, and few of them are timed because they may take long.
    """
    if span.again:
        return min(rounds, FEW), 1
    return rounds, 1 if device == "cpu" else WARM_UP


def more_if_quick(simulation: Simulation, timed: int, warm_up: int, seconds: float) -> int:
    """Return how many rounds are timed: more than asked for if they are quick, for a stable median.

    Args:
        simulation: that is timed next.
        timed: how many rounds are asked for.
        warm_up: how many rounds are run before them.
        seconds: what a round takes.
    """
    first, method = simulation.round + warm_up, simulation.method
    kinds = [(method.stage(n), method.phase(n)) for n in range(first, first + MORE * timed)]
    alike = next((n for n, kind in enumerate(kinds) if kind != kinds[0]), len(kinds))
    return max(timed, alike) if seconds < QUICK else timed


def first_round_again(simulation: Simulation) -> Callable[[], None]:
    """Return a function that takes a simulation back to its present state."""
    number = simulation.round
    state = {name: tensor.clone() for name, tensor in simulation.tensors().items()}

    def restore() -> None:
        copies = {name: tensor.clone() for name, tensor in state.items()}
        simulation.restore(copies, number, ())

    return restore
