"""Select figures of a table, check which of them can run here, and turn each into a run.

Nothing here imports torch, so that tables are listed quickly.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from polyphily.errors import UserError, unknown
from polyphily.graphs.datasets import is_present
from polyphily.papers import published
from polyphily.papers.tables import AVERAGE, Figure, Paper, Protocol, Table

QUICK_ROUNDS = 10
USUAL_SEEDS = 3  # if the paper does not state a number
NOT_A_RUN = "a mean over cells, not a run"
NO_METHOD = "method not in the library yet"
NO_DATA = "data not present"


@dataclass(frozen=True)
class Choice:
    """The user's selection; None stands for what the paper does.

    Attributes:
        datasets: only these datasets.
        methods: only these methods, by the name of the row or of its method.
        clients: only these numbers of clients.
        seeds: the seeds to run; by default 0, 1, …, as many as in the paper.
        rounds: the number of rounds.
        quick: one seed and few rounds, unless these are given.
        device: the device to train on.
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
    """A run to make.

    Attributes:
        method: the name of the method.
        hyperparameters: of the method.
        data: arguments of `load`, without the seed.
        seeds: the seeds, all trained in one pass.
        settings: arguments of `Settings`.
    """

    method: str
    hyperparameters: dict[str, Any]
    data: dict[str, Any]
    seeds: tuple[int, ...]
    settings: dict[str, Any]

    def request(self) -> dict[str, Any]:
        """Return everything that determines the result of the run. The device does not."""
        return {
            "method": self.method,
            "set": self.hyperparameters,
            "data": self.data,
            "seeds": list(self.seeds),
            "settings": {k: v for k, v in self.settings.items() if k != "device"},
        }


@dataclass(frozen=True)
class Job(Order):
    """The run that reproduces a figure.

    Attributes:
        figure: the published figure that the result is compared with.
        protocol: says which score is reported.
    """

    figure: Figure
    protocol: Protocol


@cache
def registered() -> frozenset[str]:
    """Return the names of all methods, read from the source files: importing them imports torch."""
    found = {point.name for point in entry_points(group="polyphily.methods")}
    for file in Path(str(resources.files("polyphily.methods"))).rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        found |= set(re.findall(r'^@register\(\s*"([^"]+)"', text, flags=re.MULTILINE))
    return frozenset(found)


def obstacle(paper: Paper, figure: Figure) -> str | None:
    """Return the reason why a figure cannot be reproduced here; None if it can."""
    if AVERAGE in (figure.dataset, figure.method):
        return NOT_A_RUN
    if paper.variant(figure.method).method not in registered():
        return NO_METHOD
    return None if is_present(figure.dataset) else NO_DATA


def check_choice(paper: Paper, tables: Sequence[Table], choice: Choice) -> None:
    """Raise an error for names and numbers of clients that no table has."""
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
    """Return the selected figures, cell by cell."""
    selected = [figure for figure in table.figures if _is_selected(paper, figure, choice)]
    cells = list(dict.fromkeys(figure.cell for figure in selected))
    return sorted(selected, key=lambda figure: cells.index(figure.cell))


def _is_selected(paper: Paper, figure: Figure, choice: Choice) -> bool:
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
    """Return the run for a figure: the table's protocol with the user's changes."""
    from polyphily.core.method import create

    protocol, variant = table.protocol_of(figure.dataset), paper.variant(figure.method)
    clients = protocol.clients if figure.clients is None else figure.clients
    settings, hyperparameters = dict(protocol.settings), dict(variant.set)
    if settings.get("backbone") not in create(variant.method, variant.set).supported_backbones():
        settings.pop("backbone", None)  # the method has a network of its own
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
