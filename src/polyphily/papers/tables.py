"""The papers' tables as data: protocols and published numbers, one `<paper>.toml` for each paper.

A file has these parts:

- `[protocol]`: the protocol of all tables. A table can change it, also for single datasets.
- `[rows]`: the method and hyperparameters of each printed row. A row that is missing here is the
  method of the same name.
- `[marks]`: explanations of flaws in how published numbers were obtained, which our runs avoid.
- `[[tables]]`: the tables.
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
    """The way in which the numbers of a table are obtained.

    Attributes:
        metric: the score that is reported.
        view: the model that is scored, one of `VIEWS`.
        moment: the round that is scored, one of `MOMENTS`.
        over: how clients' scores are averaged, one of `MEANS`.
        seeds: how many runs the paper averages; 0 if it does not say.
        split: argument of `load`.
        normalize: argument of `load`.
        clients: the number of clients, if the paper does not say.
        settings: arguments of `Settings`.
        marks: flaws of all numbers of the table, keys of `Paper.marks`.
        notes: what the paper leaves open or contradicts, and what we do.
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
    """The method and hyperparameters of a printed row.

    Attributes:
        method: the name of a method, whether this library has it or not.
        set: hyperparameters that differ from the defaults.
        published: whether settings and hyperparameters are those of `<method>_settings.toml`.
        marks: flaws of the row's numbers, in addition to the table's.
    """

    method: str
    set: Mapping[str, Any] = field(default_factory=dict)
    published: bool = False
    marks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Entry:
    """One published number, or a place where one should be (`mean` is None).

    Attributes:
        dataset: the name of the dataset in this library, or "average".
        partition: the name of the partition in this library.
        clients: the number of clients, or "all"; None if the partition decides or the paper does
            not say.
        method: the name of the row.
        mean: as printed, in percent (or seconds).
        std: as printed.
        note: says where the print is damaged or contradicts itself.
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
        """The cell of the entry: dataset, partition and number of clients."""
        return f"{self.dataset} {self.partition} {self.clients or ''}".strip()


@dataclass(frozen=True)
class Table:
    """A table of a paper, or the numbers of a plot.

    Attributes:
        name: the printed number of the table.
        title: what the table shows.
        digits: the number of printed decimals.
        entries: all published numbers, in printed order.
        common: the protocol.
        datasets: what differs in it, by dataset.
    """

    name: str
    title: str
    digits: int
    entries: tuple[Entry, ...]
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
        name: the name of its method.
        cite: authors, title, venue.
        tables: the tables by name, in printed order.
        rows: the printed rows that have an entry in the file.
        marks: the explanation of each mark.
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

    def marks_of(self, table: Table, entry: Entry) -> list[str]:
        """Return the marks of an entry: those of its table, its dataset and its row."""
        if AVERAGE in (entry.dataset, entry.method):
            return []
        shared = table.protocol_of(entry.dataset).marks
        return list(dict.fromkeys([*shared, *self.variant(entry.method).marks]))


@cache
def paper(name: str) -> Paper:
    """Return a paper by the name of its method.

    >>> paper("s2fgl").table("1").entries[0].mean
    81.9
    """
    if name.lower() not in PAPERS:
        raise unknown("paper", name, PAPERS)
    file = resources.files("polyphily.papers").joinpath(f"{name.lower()}.toml")
    data = tomllib.loads(file.read_text(encoding="utf-8"))
    tables = [_table(each, data["protocol"]) for each in data["tables"]]
    rows = {row: Variant(**_frozen(each)) for row, each in data.get("rows", {}).items()}
    return Paper(
        name=data["paper"],
        cite=data["cite"],
        tables={table.name: table for table in tables},
        rows=rows,
        marks=data.get("marks", {}),
    )


def _table(data: Mapping[str, Any], common: Mapping[str, Any]) -> Table:
    return Table(
        name=data["name"],
        title=data["title"],
        digits=data["digits"],
        entries=tuple(_entry(row) for row in data["entries"]),
        common=_merge(common, data.get("protocol", {})),
        datasets=data.get("datasets", {}),
    )


def _entry(row: list[Any]) -> Entry:
    """Parse a row of dataset, partition, clients, method, mean, std, note; "" stands for None."""
    dataset, partition, clients, method, *rest = row
    mean, std, note = [*rest, "", "", ""][:3]
    return Entry(
        dataset,
        partition,
        None if clients == "" else clients,
        method,
        None if mean == "" else mean,
        None if std == "" else std,
        note,
    )


def _merge(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Override common entries with own ones; merge settings, and append marks and notes."""
    merged = {**common, **own}
    merged["settings"] = {**common.get("settings", {}), **own.get("settings", {})}
    for name in ("marks", "notes"):
        merged[name] = list(dict.fromkeys([*common.get(name, ()), *own.get(name, ())]))
    return merged


def _protocol(entries: Mapping[str, Any]) -> Protocol:
    return Protocol(**_frozen(entries))


def _frozen(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in entries.items()}
