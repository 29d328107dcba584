"""Select entries of a table, check which of them can run here, and turn each into runs.

Nothing here imports torch before a run is planned, so that tables are listed quickly.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from polyphily.errors import UserError, unknown
from polyphily.graphs.datasets import is_present
from polyphily.papers import published
from polyphily.papers.tables import AVERAGE, Entry, Paper, Protocol, Table
from polyphily.runs.orders import Order

QUICK_ROUNDS = 10
USUAL_SEEDS = 3  # if the paper does not state a number
NOT_A_RUN = "a mean over cells, not a run"
NO_METHOD = "method not in the library"
NO_DATA = "needs data"
DEFAULT = "default"
FORMS = {"paper": "paper's form", DEFAULT: "default form", "code": "code's form"}
"""The forms in which a method is run, and their headings.

They are the hyperparameters of the paper, of this library, and of the authors' code.
"""


@dataclass(frozen=True)
class Choice:
    """The user's selection; None stands for what the paper does.

    Attributes:
        datasets: only these cells, each a text of a dataset, a partition and a number of clients,
            or of some of them: "cora", "cora 10", "louvain 5".
        methods: only these methods, by the name of the row or of its method.
        clients: only these numbers of clients.
        seeds: the seeds to run; by default 0, 1, …, as many as in the paper.
        rounds: the number of rounds.
        quick: one seed and few rounds, unless these are given.
        device: the device to train on.
        partitions: a folder of partition files, see `graphs.prepared`.
    """

    datasets: tuple[str, ...] | None = None
    methods: tuple[str, ...] | None = None
    clients: tuple[int, ...] | None = None
    seeds: tuple[int, ...] | None = None
    rounds: int | None = None
    quick: bool = False
    device: str = "cpu"
    partitions: Path | None = None

    @property
    def all_rounds(self) -> int | None:
        return self.rounds or (QUICK_ROUNDS if self.quick else None)

    def seeds_of(self, protocol: Protocol) -> tuple[int, ...]:
        return self.seeds or tuple(range(1 if self.quick else protocol.seeds or USUAL_SEEDS))

    def by_name(self) -> Choice:
        """Return the choice with names of datasets alone, for exhibits, which have no cells.

        Numbers of clients in the texts become `clients`, if every text has one.
        """
        if self.datasets is None:
            return self
        words = [text.lower().split() for text in self.datasets]
        numbers = [int(word) for text in words for word in text if word.isdecimal()]
        every = all(any(word.isdecimal() for word in text) for text in words)
        names = [text[0] for text in words if not text[0].isdecimal()]
        return replace(
            self,
            datasets=tuple(names) or None,
            clients=self.clients or (tuple(dict.fromkeys(numbers)) if every else None),
        )


@dataclass(frozen=True)
class Job(Order):
    """The run that reproduces an entry.

    Attributes:
        entry: the published number that the result is compared with.
        protocol: says which score is reported.
        form: the form of the method; the default form also if another one is no different.
    """

    entry: Entry
    protocol: Protocol
    form: str = DEFAULT


def key_of(request: Mapping[str, Any]) -> str:
    """Return a request as text, to compare it with others."""
    return json.dumps(request, sort_keys=True)


@cache
def registered() -> frozenset[str]:
    """Return the names of all methods, read from the source files: importing them imports torch."""
    found = {point.name for point in entry_points(group="polyphily.methods")}
    for file in Path(str(resources.files("polyphily.methods"))).rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        found |= set(re.findall(r'^@register\(\s*"([^"]+)"', text, flags=re.MULTILINE))
    return frozenset(found)


def obstacle(paper: Paper, entry: Entry) -> str | None:
    """Return the reason why an entry cannot be reproduced here; None if it can."""
    if AVERAGE in (entry.dataset, entry.method):
        return NOT_A_RUN
    if paper.variant(entry.method).method not in registered():
        return NO_METHOD
    return None if is_present(entry.dataset) else NO_DATA


# What is chosen -----------------------------------------------------------------------------------


def check_choice(paper: Paper, tables: Sequence[Table], choice: Choice) -> None:
    """Raise an error for names and numbers of clients that no table has."""
    entries = [entry for table in tables for entry in table.entries]
    words = {word for entry in entries for word in _words(entry)}
    for text in choice.datasets or ():
        for word in text.lower().split():
            if word not in words:
                raise unknown(f"dataset, partition or number in {paper.name}'s tables", word, words)
    names = {name for entry in entries for name in _names(paper, entry)}
    for name in choice.methods or ():
        if name.lower() not in names:
            raise unknown(f"method of {paper.name}'s tables", name, names)
    counts = sorted({entry.clients for entry in entries if isinstance(entry.clients, int)})
    for count in choice.clients or ():
        if count not in counts:
            raise UserError(f"--clients {count}: the tables have {', '.join(map(str, counts))}")


def select(paper: Paper, table: Table, choice: Choice) -> list[Entry]:
    """Return the selected entries, cell by cell."""
    selected = [entry for entry in table.entries if _is_selected(paper, entry, choice)]
    cells = list(dict.fromkeys(entry.cell for entry in selected))
    return sorted(selected, key=lambda entry: cells.index(entry.cell))


def _is_selected(paper: Paper, entry: Entry, choice: Choice) -> bool:
    words, names = _words(entry), _names(paper, entry)
    texts, methods = choice.datasets, choice.methods
    return (
        (texts is None or any(words.issuperset(text.lower().split()) for text in texts))
        and (methods is None or any(name.lower() in names for name in methods))
        and (choice.clients is None or entry.clients in choice.clients)
    )


def _words(entry: Entry) -> set[str]:
    """Return the words of a cell: the dataset with and without options, partition, clients."""
    short = entry.dataset.partition(":")[0]
    return {short, entry.dataset, entry.partition, str(entry.clients or "")} - {""}


def _names(paper: Paper, entry: Entry) -> set[str]:
    """Return the names of a row: as printed, without its options, and its method."""
    return {entry.method, entry.method.partition("[")[0], paper.variant(entry.method).method}


# What is run --------------------------------------------------------------------------------------


def check_forms(paper: Paper, forms: Sequence[str], given: Mapping[str, Any]) -> None:
    """Raise an error for forms that the paper's method does not have, and for idle settings.

    Args:
        paper: the paper.
        forms: the forms to run.
        given: the hyperparameters that the user set.
    """
    from polyphily.core.method import check_effects, create

    for name in given:
        if name in FORMS:
            raise UserError(f"--set {name}=…: choose forms with --form {name}")
    for form in forms:
        method = create(paper.name, {**_hyperparameters(paper.name, form, strict=True), **given})
        try:
            check_effects(method, given)
        except UserError as error:
            raise UserError(f"{FORMS[form]} of {error}; --form chooses other forms") from None


def jobs(
    paper: Paper,
    table: Table,
    entry: Entry,
    choice: Choice,
    forms: Sequence[str] = (DEFAULT,),
    given: Mapping[str, Any] | None = None,
) -> dict[str, Job]:
    """Return the run for an entry in each form: the table's protocol with the user's changes.

    Args:
        paper: the paper.
        table: one of its tables.
        entry: one of the table's entries.
        choice: the user's selection.
        forms: the forms to run.
        given: hyperparameters of the paper's method that the user set.
    """
    usual = _job(paper, table, entry, choice, DEFAULT, given or {})
    same = usual.request()
    found = {form: _job(paper, table, entry, choice, form, given or {}) for form in forms}
    return {form: usual if job.request() == same else job for form, job in found.items()}


def _job(
    paper: Paper, table: Table, entry: Entry, choice: Choice, form: str, given: Mapping[str, Any]
) -> Job:
    protocol, variant = table.protocol_of(entry.dataset), paper.variant(entry.method)
    clients = protocol.clients if entry.clients is None else entry.clients
    hyperparameters, settings = _hyperparameters(variant.method, form), {}
    if variant.published:
        case = published(variant.method, entry.dataset, entry.partition, int(clients or 0))
        settings = case.settings
        hyperparameters |= case.hyperparameters
    hyperparameters |= given if variant.method == paper.name else {}
    hyperparameters |= variant.set  # what the printed row means stays
    job = by_protocol(
        protocol,
        replace(entry, clients=clients),
        choice,
        variant.method,
        hyperparameters,
        settings=settings,
    )
    return replace(job, entry=entry, form=form)


def by_protocol(
    protocol: Protocol,
    entry: Entry,
    choice: Choice,
    method: str,
    hyperparameters: Mapping[str, Any],
    *,
    settings: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
) -> Job:
    """Return the run of a method in a cell by a paper's protocol, with the user's changes.

    Args:
        protocol: the protocol.
        entry: names the cell.
        choice: the user's selection.
        method: the name of the method.
        hyperparameters: of the method.
        settings: settings that differ from the protocol's.
        data: arguments of `load` that differ from the protocol's.
    """
    from polyphily.core.method import create

    values = {**protocol.settings, **(settings or {})}
    if values.get("backbone") not in create(method, hyperparameters).supported_backbones():
        values.pop("backbone", None)  # the method has a network of its own
    if protocol.metric in SELECTED_BY:
        values["metric"] = SELECTED_BY[protocol.metric]
    values["device"] = choice.device
    if choice.all_rounds is not None:
        values["rounds"] = choice.all_rounds
    load = {
        "dataset": entry.dataset,
        "partition": entry.partition,
        "clients": entry.clients,
        "split": protocol.split,
        "normalize": protocol.normalize,
        **(data or {}),
    }
    return Job(
        method=method,
        hyperparameters=dict(hyperparameters),
        data={name: value for name, value in load.items() if value is not None},
        seeds=choice.seeds_of(protocol),
        settings=values,
        partitions=choice.partitions,
        entry=entry,
        protocol=protocol,
    )


SELECTED_BY = {"accuracy": "accuracy", "auc": "auc", "f1_weighted": "accuracy"}
"""The metric that selects the best round on validation, by the metric that is reported."""


def _hyperparameters(method: str, form: str, *, strict: bool = False) -> dict[str, Any]:
    """Return what puts a method into a form. Without `strict`, one it does not have is its default.

    >>> _hyperparameters("fedspa", "paper")
    {'paper': True}
    """
    from polyphily.core.method import settable

    return {form: True} if form != DEFAULT and (strict or form in settable(method)) else {}
