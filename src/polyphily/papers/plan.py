"""What of a table is asked for, what of that can run here, and as which run.

Nothing here imports torch, so that tables are listed at once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.metadata import entry_points
from typing import Any

from polyphily.errors import UserError, unknown
from polyphily.graphs.datasets import is_present
from polyphily.papers import published
from polyphily.papers.tables import AVERAGE, Figure, Paper, Protocol, Table

QUICK_ROUNDS = 10
USUAL_SEEDS = 3  # where a paper does not say how many
NOT_A_RUN = "a mean over cells, not a run"
NO_METHOD = "method not in the library yet"
NO_DATA = "data not present"


@dataclass(frozen=True)
class Choice:
    """What the user asked for; None leaves a choice to the paper.

    Attributes:
        datasets: only these.
        methods: only these, by a row's name or its method's.
        clients: only these numbers of clients.
        seeds: in place of 0, 1, … as many as in the paper.
        rounds: in place of the paper's.
        quick: one seed and few rounds, where they are not given.
        device: where to train.
    """

    datasets: tuple[str, ...] | None = None
    methods: tuple[str, ...] | None = None
    clients: tuple[int, ...] | None = None
    seeds: tuple[int, ...] | None = None
    rounds: int | None = None
    quick: bool = False
    device: str = "cpu"

    @property
    def all_rounds(self) -> int | None:
        return self.rounds or (QUICK_ROUNDS if self.quick else None)

    def seeds_of(self, protocol: Protocol) -> tuple[int, ...]:
        return self.seeds or tuple(range(1 if self.quick else protocol.seeds or USUAL_SEEDS))


@dataclass(frozen=True)
class Order:
    """A run that is wanted.

    Attributes:
        method: the method's name.
        hyperparameters: of the method.
        data: arguments of `load`, without the seed.
        seeds: all in one pass.
        settings: arguments of `Settings`.
    """

    method: str
    hyperparameters: dict[str, Any]
    data: dict[str, Any]
    seeds: tuple[int, ...]
    settings: dict[str, Any]

    def request(self) -> dict[str, Any]:
        """What decides the outcome; where it is computed does not."""
        return {
            "method": self.method,
            "set": self.hyperparameters,
            "data": self.data,
            "seeds": list(self.seeds),
            "settings": {k: v for k, v in self.settings.items() if k != "device"},
        }


@dataclass(frozen=True)
class Job(Order):
    """One row in one cell, as a run.

    Attributes:
        figure: what it is compared with.
        protocol: which of the scores is reported.
    """

    figure: Figure
    protocol: Protocol


@cache
def registered() -> frozenset[str]:
    """The names under which methods are registered, read from their files without running them."""
    found = {point.name for point in entry_points(group="polyphily.methods")}
    for file in resources.files("polyphily.methods").iterdir():
        if file.name.endswith(".py"):
            text = file.read_text(encoding="utf-8")
            found |= set(re.findall(r'^@register\(\s*"([^"]+)"', text, flags=re.MULTILINE))
    return frozenset(found)


def obstacle(paper: Paper, figure: Figure) -> str | None:
    """Why a figure cannot be reproduced here, if it cannot."""
    if AVERAGE in (figure.dataset, figure.method):
        return NOT_A_RUN
    if paper.variant(figure.method).method not in registered():
        return NO_METHOD
    return None if is_present(figure.dataset) else NO_DATA


def check(paper: Paper, tables: Sequence[Table], choice: Choice) -> None:
    """Refuses names that none of the tables has."""
    figures = [figure for table in tables for figure in table.figures]
    known = {
        "dataset": {_short(figure) for figure in figures} | {f.dataset for f in figures},
        "method": {name for figure in figures for name in _names(paper, figure)},
    }
    for kind, given in (("dataset", choice.datasets), ("method", choice.methods)):
        for name in given or ():
            if name.lower() not in known[kind]:
                raise unknown(f"{kind} of {paper.name}'s tables", name, known[kind])
    counts = sorted({f.clients for f in figures if isinstance(f.clients, int)})
    for count in choice.clients or ():
        if count not in counts:
            raise UserError(f"--clients {count}: the tables have {', '.join(map(str, counts))}")


def select(paper: Paper, table: Table, choice: Choice) -> list[Figure]:
    """The figures that were asked for, cell by cell."""
    wanted = [figure for figure in table.figures if _wanted(paper, figure, choice)]
    cells = list(dict.fromkeys(figure.cell for figure in wanted))
    return sorted(wanted, key=lambda figure: cells.index(figure.cell))


def _wanted(paper: Paper, figure: Figure, choice: Choice) -> bool:
    def among(given: tuple[str, ...] | None, names: set[str]) -> bool:
        return given is None or any(name.lower() in names for name in given)

    return (
        among(choice.datasets, {_short(figure), figure.dataset})
        and among(choice.methods, _names(paper, figure))
        and (choice.clients is None or figure.clients in choice.clients)
    )


def _short(figure: Figure) -> str:
    return figure.dataset.partition(":")[0]


def _names(paper: Paper, figure: Figure) -> set[str]:
    return {figure.method, paper.variant(figure.method).method}


def job(paper: Paper, table: Table, figure: Figure, choice: Choice) -> Job:
    """The run that stands beside a figure: the table's protocol, with what the user changed."""
    protocol, variant = table.protocol_of(figure.dataset), paper.variant(figure.method)
    clients = protocol.clients if figure.clients is None else figure.clients
    settings, hyperparameters = dict(protocol.settings), dict(variant.set)
    if variant.published:
        case = published(variant.method, figure.dataset, figure.partition, int(clients or 0))
        settings |= case.settings
        hyperparameters = {**case.hyperparameters, **variant.set}
    if protocol.metric in ("accuracy", "auc"):
        settings["metric"] = protocol.metric
    settings |= {"device": choice.device}
    settings |= {} if choice.all_rounds is None else {"rounds": choice.all_rounds}
    data = {
        "dataset": figure.dataset,
        "partition": figure.partition,
        "clients": clients,
        "split": protocol.split,
        "normalize": protocol.normalize,
    }
    return Job(
        figure=figure,
        method=variant.method,
        hyperparameters=hyperparameters,
        data={name: value for name, value in data.items() if value is not None},
        seeds=choice.seeds_of(protocol),
        settings=settings,
        protocol=protocol,
    )
