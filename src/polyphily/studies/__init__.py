"""The library's own tables: which methods help, where, and by how much (`polyphily study`).

`studies.toml` says what is compared. A study is a method with its cells (data, partition, number of
clients) and its rows: Local and FedAvg on several backbones, FedAvg on the method's own backbone,
the method as its paper prints it, the method with our defaults, and its ablations. Every row is
trained with the same learning rates and weight decays on the same seeds, all in one pass, and
validation selects one of these trials. Nothing here imports torch.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any

from polyphily.errors import unknown

LOCAL, FEDAVG, BASELINE = "local", "fedavg", "baseline"
METHOD, PAPER_FORM, ABLATION = "method", "paper", "ablation"


@dataclass(frozen=True)
class Cell:
    """The data on which rows are compared.

    Attributes:
        dataset: the name of a dataset, with options.
        partition: the name of a partition.
        clients: the number of clients; None if the partition decides.
        split: argument of `load`.
        metric: the score that selects on validation and is reported on test.
        table: the published table that has the cell.
        normalize: argument of `load`.
        settings: settings of all rows of the cell that differ from the study's.
    """

    dataset: str
    partition: str
    clients: int | None
    split: str
    metric: str = "accuracy"
    table: str = ""
    normalize: str = "none"
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """A short name that is safe in file names."""
        parts = [self.dataset, self.partition, str(self.clients or ""), self.metric]
        text = "-".join(filter(None, parts)).replace("accuracy", "")
        return "".join(c if c.isalnum() or c in "-._" else "_" for c in text).strip("-")

    @property
    def title(self) -> str:
        parts = [self.dataset, self.partition, str(self.clients or "")]
        return " ".join(filter(None, parts)) + (" (AUC)" if self.metric == "auc" else "")


@dataclass(frozen=True)
class Row:
    """A method and backbone that are trained in every cell.

    Attributes:
        role: one of LOCAL, FEDAVG, BASELINE, METHOD, PAPER_FORM, ABLATION.
        label: the name that is shown.
        method: the name of a method.
        backbone: the name of a backbone; None if the method has a network of its own.
        set: hyperparameters that differ from the defaults.
        settings: settings of this row alone.
    """

    role: str
    label: str
    method: str
    backbone: str | None
    set: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The identity of the row; rows of two studies with the same key have the same results."""
        chosen = sorted({**self.set, **self.settings}.items())
        options = ",".join(f"{k}={v}" for k, v in chosen)
        return f"{self.method}[{options}]/{self.backbone or 'own'}"


@dataclass(frozen=True)
class Study:
    """The comparison of a method with baselines.

    Attributes:
        name: the name of the study.
        method: the name of the method.
        title: the question of the study.
        cells: the data on which methods are compared.
        rows: the methods that are compared; every cell has all of them.
        seeds: seeds of data, weights and random draws.
        rates: the trials of every row: pairs of learning rate and weight decay.
        settings: settings of all runs.
        paper: the paper whose published figures are shown beside ours.
        findings: sentences about what was tried and what the tables show.
        gain: the part of the method that the gain comes from, for `polyphily inspect`.
    """

    name: str
    method: str
    title: str
    cells: tuple[Cell, ...]
    rows: tuple[Row, ...]
    seeds: tuple[int, ...]
    rates: tuple[tuple[float, float], ...]
    settings: Mapping[str, Any]
    paper: str
    findings: tuple[str, ...] = ()
    gain: str = ""

    def with_set(self, values: Mapping[str, Any]) -> Study:
        """Return the study with hyperparameters of the method, and of its ablations, changed."""
        if not values:
            return self

        def change(row: Row) -> Row:
            if row.role not in (METHOD, ABLATION):
                return row
            written = ", ".join(f"{name}={value}" for name, value in values.items())
            return replace(row, label=f"{row.label} ({written})", set={**row.set, **values})

        rows = {row.key: row for row in map(change, self.rows)}
        return replace(self, rows=tuple(rows.values()))


@cache
def studies() -> dict[str, Study]:
    """Return all studies by name."""
    text = resources.files(__name__).joinpath("studies.toml").read_text(encoding="utf-8")
    data = tomllib.loads(text)
    common = {name: data.pop(name) for name in ("seeds", "rates", "backbones", "settings")}
    return {name: _study(name, entry, common) for name, entry in data.items()}


def find_study(name: str) -> Study:
    if name not in studies():
        raise unknown("study", name, studies())
    return studies()[name]


def _study(name: str, entry: Mapping[str, Any], common: Mapping[str, Any]) -> Study:
    method = entry.get("method", name)
    return Study(
        name=name,
        method=method,
        title=entry["title"],
        cells=tuple(_cell(cell, entry) for cell in entry["cells"]),
        rows=tuple(_rows(method, entry, entry.get("backbones", common["backbones"]))),
        seeds=tuple(common["seeds"]),
        rates=tuple((lr, decay) for lr, decay in common["rates"]),
        settings={**common["settings"], **entry.get("settings", {})},
        paper=method,
        findings=tuple(entry.get("findings", ())),
        gain=entry.get("gain", ""),
    )


def _cell(cell: Sequence[Any], entry: Mapping[str, Any]) -> Cell:
    names = ("dataset", "partition", "clients", "metric", "table")
    defaults = {"clients": None, "table": entry["table"], "split": entry["split"]}
    own = entry.get("of", {}).get(cell[0], {})  # entries of this dataset
    return Cell(**{**defaults, **own, **dict(zip(names, cell, strict=False))})


def _rows(method: str, entry: Mapping[str, Any], backbones: Sequence[str]) -> list[Row]:
    own = entry["backbone"]
    backbone = None if own == "unifilter" else own  # UniFilter is part of its method
    rows = [Row(LOCAL, f"Local, {b}", "local", b) for b in backbones]
    rows += [Row(FEDAVG, f"FedAvg, {b}", "fedavg", b) for b in backbones if b != own]
    base = entry.get("baseline", {"method": "fedavg"})
    rows.append(Row(BASELINE, f"FedAvg, {own}", base["method"], backbone, base.get("set", {})))
    shared = entry.get("set", {})
    paper = {**shared, "paper": True}
    rows.append(Row(PAPER_FORM, f"{method}, paper's form", method, backbone, paper))
    rows.append(Row(METHOD, method, method, backbone, shared))
    for part in entry.get("ablations", []):
        rows.append(Row(ABLATION, part["name"], method, backbone, {**shared, **part["set"]}))
    return rows
