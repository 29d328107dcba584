"""Settings published per dataset by papers or their authors' code: `<method>_settings.toml`.

A file names its columns (keys, settings of a run, hyperparameters of the method) and has a row per
dataset, partition and number of clients. `published` finds a row.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Any

from polyphily.errors import UserError


@dataclass(frozen=True)
class Published:
    """The settings of a paper or its code for one dataset, partition and number of clients.

    Attributes:
        dataset: the name of the dataset in this library.
        partition: the name of the partition in this library.
        clients: the number of clients.
        settings: arguments of `Settings`.
        hyperparameters: of the method.
    """

    dataset: str
    partition: str
    clients: int
    settings: dict[str, Any]
    hyperparameters: dict[str, Any]


def table(method: str) -> list[Published]:
    """Return all rows of a method's file, in the order of the file."""
    file = resources.files(__name__).joinpath(f"{method}_settings.toml")
    if not file.is_file():
        raise UserError(f"there are no published settings of '{method}' in this library")
    data = tomllib.loads(file.read_text(encoding="utf-8"))
    columns = data["table"]
    found = []
    for row in columns["rows"]:
        names = [*columns["keys"], *columns["settings"], *columns["hyperparameters"]]
        values = dict(zip(names, row, strict=True))
        found.append(
            Published(
                **{name: values[name] for name in columns["keys"]},
                settings={**data["common"], **{n: values[n] for n in columns["settings"]}},
                hyperparameters={name: values[name] for name in columns["hyperparameters"]},
            )
        )
    return found


def published(method: str, dataset: str, partition: str, clients: int) -> Published:
    """Return the published settings for a dataset, a partition and a number of clients.

    >>> published("fedgsp", "cora", "metis", 10).hyperparameters["gamma"]
    1.6
    """
    cases = table(method)
    wanted = (dataset, partition, clients)
    for case in cases:
        if (case.dataset, case.partition, case.clients) == wanted:
            return case
    near = [f"{c.partition} {c.clients}" for c in cases if c.dataset == dataset]
    known = f"there are {', '.join(near)}" if near else "there are none for that dataset"
    raise UserError(
        f"no published settings of '{method}' for {dataset}, {partition} {clients}: {known}"
    )
