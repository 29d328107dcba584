"""The library's own tables: which methods help, where, and by how much (`polyphily study`).

`studies.toml` says what is compared. A study is a method with its cells (data, partition, number of
clients) and its rows: Local and FedAvg on several backbones, FedAvg on the method's own backbone,
the method, and the method without its parts. Every row is tried with the same learning rates and
decays on the same seeds, all in one pass; validation chooses. Nothing here imports torch.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from polyphily.errors import unknown

LOCAL, FEDAVG, BASELINE, METHOD, ABLATION = "local", "fedavg", "baseline", "method", "ablation"


@dataclass(frozen=True)
class Cell:
    """Where rows are compared.

    Attributes:
        dataset: a dataset's name, with options.
        partition: a partition's name.
        clients: how many; None where the partition decides.
        split: of `load`.
        metric: what selects on validation and is reported.
        table: the published table that has the cell.
        normalize: of `load`.
        settings: of the cell's runs, all rows alike, where they differ from the study's.
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
        """Short, and fit for a file's name."""
        words = [self.dataset, self.partition, str(self.clients or ""), self.metric]
        text = "-".join(filter(None, words)).replace("accuracy", "")
        return "".join(c if c.isalnum() or c in "-._" else "_" for c in text).strip("-")

    @property
    def title(self) -> str:
        words = [self.dataset, self.partition, str(self.clients or "")]
        return " ".join(filter(None, words)) + (" (AUC)" if self.metric == "auc" else "")


@dataclass(frozen=True)
class Row:
    """What is trained in a cell.

    Attributes:
        role: one of LOCAL, FEDAVG, BASELINE, METHOD, ABLATION.
        label: in words.
        method: a method's name.
        backbone: which network; None: the method brings its own.
        set: hyperparameters that differ from the defaults.
    """

    role: str
    label: str
    method: str
    backbone: str | None
    set: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """What decides the numbers; rows of two studies with the same key have the same ones."""
        options = ",".join(f"{k}={v}" for k, v in sorted(self.set.items()))
        return f"{self.method}[{options}]/{self.backbone or 'own'}"


@dataclass(frozen=True)
class Study:
    """A method under test.

    Attributes:
        name: of the study.
        method: a method's name.
        title: what is at stake.
        cells: where it is compared.
        rows: what with; every cell has all of them.
        seeds: of data, weights and draws.
        rates: (learning rate, weight decay): the trials of every row.
        settings: of every run.
        paper: whose published figures stand beside ours.
        findings: what was tried, and what the tables say, in words.
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


@cache
def studies() -> dict[str, Study]:
    """All studies by name."""
    text = resources.files(__name__).joinpath("studies.toml").read_text(encoding="utf-8")
    data = tomllib.loads(text)
    common = {name: data.pop(name) for name in ("seeds", "rates", "backbones", "settings")}
    return {name: _study(name, entry, common) for name, entry in data.items()}


def find(name: str) -> Study:
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
    )


def _cell(cell: Sequence[Any], entry: Mapping[str, Any]) -> Cell:
    names = ("dataset", "partition", "clients", "metric", "table")
    usual = {"clients": None, "table": entry["table"], "split": entry["split"]}
    own = entry.get("of", {}).get(cell[0], {})
    return Cell(**{**usual, **own, **dict(zip(names, cell, strict=False))})


def _rows(method: str, entry: Mapping[str, Any], backbones: Sequence[str]) -> list[Row]:
    own = entry["backbone"]
    named = None if own == "unifilter" else own
    rows = [Row(LOCAL, f"Local, {b}", "local", b) for b in backbones]
    rows += [Row(FEDAVG, f"FedAvg, {b}", "fedavg", b) for b in backbones if b != own]
    base = entry.get("baseline", {"method": "fedavg"})
    rows.append(Row(BASELINE, f"FedAvg, {own}", base["method"], named, base.get("set", {})))
    usual = entry.get("set", {})
    rows.append(Row(METHOD, method, method, named, usual))
    for part in entry.get("ablations", []):
        rows.append(Row(ABLATION, part["name"], method, named, {**usual, **part["set"]}))
    return rows
