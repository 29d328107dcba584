"""The papers' tables as data: protocols and published figures, one `<paper>.toml` for each paper.

A file has a `[protocol]` for all its tables, `[rows]` that say which method and hyperparameters a
printed row stands for (a row that is not there is the method of its name), `[marks]` that explain
what a figure rests on that a sound run must not do, and `[[tables]]`. A table may change the
protocol, and change it again for single datasets.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from polyphily.errors import unknown

PAPERS = ("fedspa", "fedgsp", "fedhero", "s2fgl", "fedath")
AVERAGE = "average"  # a printed mean over cells, under "dataset" or "method"
SECONDS = "seconds_per_round"
METRICS = ("accuracy", "auc", "f1_weighted", SECONDS, "mixed")
MOMENTS = {
    "best_val": "at the best validation round",
    "last5": "mean of the last five rounds",
    "final": "at the last round",
}
VIEWS = {
    "received": "the model the server sends",
    "trained": "the clients' models after local training",
    "own": "each method's own view",
}
MEANS = {"clients": "plain mean over clients", "nodes": "mean over clients by their scored nodes"}


@dataclass(frozen=True)
class Protocol:
    """How a table's figures come about.

    Attributes:
        metric: what is reported.
        view: which model is scored, one of `VIEWS`.
        moment: when, one of `MOMENTS`.
        over: how clients' scores become one, one of `MEANS`.
        seeds: how many runs the paper averages; 0 where it does not say.
        split: of `load`.
        normalize: of `load`.
        clients: how many where the paper does not say.
        settings: of a run.
        marks: what every figure rests on.
        notes: what the paper leaves open or contradicts, and what is done here.
    """

    metric: str = "accuracy"
    view: str = "own"
    moment: str = "best_val"
    over: str = "nodes"
    seeds: int = 0
    split: str | None = None
    normalize: str = "none"
    clients: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    marks: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Variant:
    """What a printed row stands for.

    Attributes:
        method: a method's name, in this library or not.
        set: its hyperparameters, where they differ from the defaults.
        published: whether settings and hyperparameters are those of `<method>_settings.toml`.
        marks: what its figures rest on, beyond the table's marks.
    """

    method: str
    set: Mapping[str, Any] = field(default_factory=dict)
    published: bool = False
    marks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Figure:
    """One published figure, or a place where one should be (`mean` is None).

    Attributes:
        dataset: the dataset's name here, or "average".
        partition: the partition's name here.
        clients: how many; None where the partition decides or the paper is silent; "all".
        method: the row's name.
        mean: as printed, in percent (or seconds).
        std: as printed.
        note: where the print is damaged or contradicts itself.
    """

    dataset: str
    partition: str
    clients: int | str | None
    method: str
    mean: float | None = None
    std: float | None = None
    note: str = ""

    @property
    def cell(self) -> str:
        """The column that the figure stands in: data, partition and number of clients."""
        return f"{self.dataset} {self.partition} {self.clients or ''}".strip()


@dataclass(frozen=True)
class Table:
    """A table, or a figure's study, of a paper.

    Attributes:
        name: its number as printed.
        title: what it shows.
        digits: decimals of the print.
        figures: all of them, in the print's order.
        common: the protocol's entries.
        datasets: entries that differ, by dataset.
    """

    name: str
    title: str
    digits: int
    figures: tuple[Figure, ...]
    common: Mapping[str, Any]
    datasets: Mapping[str, Mapping[str, Any]]

    @property
    def protocol(self) -> Protocol:
        return _protocol(self.common)

    def protocol_of(self, dataset: str) -> Protocol:
        return _protocol(_merge(self.common, self.datasets.get(dataset, {})))


@dataclass(frozen=True)
class Paper:
    """A paper's tables.

    Attributes:
        name: of its method.
        cite: authors, title, venue.
        tables: by name, in the paper's order.
        rows: what printed rows stand for.
        marks: their explanations.
    """

    name: str
    cite: str
    tables: Mapping[str, Table]
    rows: Mapping[str, Variant]
    marks: Mapping[str, str]

    def table(self, name: str) -> Table:
        known = {table.name.lower(): table for table in self.tables.values()}
        if name.lower() not in known:
            raise unknown(f"table of {self.name}", name, known)
        return known[name.lower()]

    def variant(self, row: str) -> Variant:
        return self.rows.get(row) or Variant(row)

    def marks_of(self, table: Table, figure: Figure) -> list[str]:
        """The marks of a figure: of its table, its dataset and its row."""
        if AVERAGE in (figure.dataset, figure.method):
            return []
        wide = table.protocol_of(figure.dataset).marks
        return list(dict.fromkeys([*wide, *self.variant(figure.method).marks]))


@cache
def paper(name: str) -> Paper:
    """A paper by the name of its method.

    >>> paper("s2fgl").table("1").figures[0].mean
    81.9
    """
    if name.lower() not in PAPERS:
        raise unknown("paper", name, PAPERS)
    file = resources.files("polyphily.papers").joinpath(f"{name.lower()}.toml")
    data = tomllib.loads(file.read_text(encoding="utf-8"))
    tables = [_table(entry, data["protocol"]) for entry in data["tables"]]
    rows = {row: Variant(**_frozen(entry)) for row, entry in data.get("rows", {}).items()}
    return Paper(
        name=data["paper"],
        cite=data["cite"],
        tables={table.name: table for table in tables},
        rows=rows,
        marks=data.get("marks", {}),
    )


def _table(entry: Mapping[str, Any], common: Mapping[str, Any]) -> Table:
    return Table(
        name=entry["name"],
        title=entry["title"],
        digits=entry["digits"],
        figures=tuple(_figure(row) for row in entry["figures"]),
        common=_merge(common, entry.get("protocol", {})),
        datasets=entry.get("datasets", {}),
    )


def _figure(row: list[Any]) -> Figure:
    """A row of dataset, partition, clients, method, mean, std, note; "" stands for nothing."""
    dataset, partition, clients, method, *rest = row
    mean, std, note = [*rest, "", "", ""][:3]
    return Figure(
        dataset,
        partition,
        None if clients == "" else clients,
        method,
        None if mean == "" else mean,
        None if std == "" else std,
        note,
    )


def _merge(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Own entries win; settings are merged entry by entry, marks and notes are added."""
    merged = {**common, **own}
    merged["settings"] = {**common.get("settings", {}), **own.get("settings", {})}
    for name in ("marks", "notes"):
        merged[name] = list(dict.fromkeys([*common.get(name, ()), *own.get(name, ())]))
    return merged


def _protocol(entries: Mapping[str, Any]) -> Protocol:
    return Protocol(**_frozen(entries))


def _frozen(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in entries.items()}
