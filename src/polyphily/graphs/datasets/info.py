"""What is known of a dataset without opening it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from polyphily.errors import unknown

Kind = Literal["homophilic", "heterophilic", "synthetic", "fraud"]
Metric = Literal["accuracy", "auc"]

ALL_PARTS = "all"

_COMPONENT = "'largest' keeps the largest connected component only (FED-PUB's protocol)"


def common_options(**own: str) -> dict[str, str]:
    """A dataset's own options and the one that every dataset has."""
    return {**own, "component": _COMPONENT}


@dataclass(frozen=True)
class Part:
    """Files that are fetched together.

    Attributes:
        files: paths relative to the data root.
        getter: the class in `torch_geometric.datasets` that downloads them ("ogb" for the ogb
            package); empty where they have to be put in place by hand.
        arguments: what the class is given beside its root, which is the folder of its own name.
    """

    files: tuple[str, ...]
    getter: str = ""
    arguments: Mapping[str, str | bool] = field(default_factory=dict)


@dataclass(frozen=True)
class DatasetInfo:
    """What is known of a dataset without opening it.

    Attributes:
        name: what to write on the command line.
        title: the name in prose.
        nodes, edges, features, classes: statistics; edges are undirected, without self-loops. Of a
            natural federation they are totals over the clients.
        source: the official place, or how to come by the files.
        natural: True where the data are clients already, not one graph to be partitioned.
        metric: what the literature reports.
        default_clients: how many clients a run has unless told otherwise.
        options: meaning of each option of `name:option=value`.
        extra: the extra of this package that downloading needs.
        format: how the files are read; a key of `readers.READERS`.
        parts: the files, by the value of the option `choice` where there is one.
        choice: the option that picks a part; where empty, all parts are read.
        default: the part read when `choice` is not given.
        combines: whether `choice` may be 'all': every part is a client of its own.
        short: the option that a bare value stands for (`syn-cora:0.3`).
        class_names: label names where they are known.
        notes: what a user should know about the data.
    """

    name: str
    title: str
    kind: Kind
    nodes: int
    edges: int
    features: int
    classes: int
    citation: str
    source: str
    format: str
    parts: Mapping[str, Part]
    natural: bool = False
    metric: Metric = "accuracy"
    default_clients: int = 10
    options: Mapping[str, str] = field(default_factory=common_options)
    extra: str = ""
    choice: str = ""
    default: str = ""
    combines: bool = False
    short: str = ""
    class_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def chosen(self, options: Mapping[str, str]) -> Mapping[str, Part]:
        """The parts that these options ask for."""
        if not self.choice:
            return self.parts
        wanted = options.get(self.choice, self.default)
        if self.combines and wanted == ALL_PARTS:
            return self.parts
        key = wanted if wanted in self.parts else _as_level(wanted)
        if key not in self.parts:
            raise unknown(f"value of {self.choice} for {self.name}", wanted, self.parts)
        return {key: self.parts[key]}


def _as_level(text: str) -> str:
    """A number as the parts of syn-cora are called: '.30' is '0.3'; other text as it is."""
    try:
        number = float(text)
    except ValueError:
        return text
    return str(round(number, 6))
