"""Metadata of datasets: statistics, origin, files and options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from polyphily.errors import unknown

if TYPE_CHECKING:
    from polyphily.graphs.graph import Collection, Graph

Kind = Literal["homophilic", "heterophilic", "synthetic", "fraud"]
Reader: TypeAlias = "Callable[[Request], Graph | Sequence[Graph] | Collection]"

ALL_PARTS = "all"

_COMPONENT = "'largest' keeps the largest connected component only (FED-PUB's protocol)"


def common_options(**own: str) -> dict[str, str]:
    """Return a dataset's own options together with the one that every dataset has."""
    return {**own, "component": _COMPONENT}


@dataclass(frozen=True)
class Part:
    """Files that are downloaded together.

    Attributes:
        files: paths relative to the data root.
        getter: the class in `torch_geometric.datasets` that downloads them, "ogb" for the ogb
            package, "linkx" for graphs of torch_geometric's LINKXDataset, or "https" for one file
            at a fixed address; empty if the user has to download them by hand.
        arguments: arguments of the class beside its root, which is the folder of its own name; for
            "https" the `url`.
        sha256: the digests of files that do not change, by path; files are checked by them after
            their download and before every use.
    """

    files: tuple[str, ...]
    getter: str = ""
    arguments: Mapping[str, str | bool] = field(default_factory=dict)
    sha256: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class DatasetInfo:
    """Metadata of a dataset, known without opening its files.

    Attributes:
        name: the name on the command line.
        title: the name in prose.
        kind: "homophilic", "heterophilic", "synthetic" or "fraud"; it selects default settings.
        nodes, edges, features, classes: statistics. Edges are undirected, without self-loops. For
            a natural federation they are totals over the clients. 0 means that they vary.
        citation: the paper.
        source: the official address, or how to obtain the files.
        format: how the files are read: a key of `readers.READERS`, unless there is a `reader`.
        parts: the files, by the value of the option `choice` if there is one.
        natural: whether the data are clients' graphs already, not one graph to be partitioned.
        metric: the metric that the literature reports and that selects models on validation.
        default_clients: the number of clients unless the user gives one.
        options: the meaning of each option of `name:option=value`.
        extra: the extra of this package that downloading needs.
        choice: the option that selects a part; if empty, all parts are read.
        default: the part that is read unless `choice` is given.
        combines: whether `choice` may be 'all', which makes every part a client.
        short: the option that a bare value stands for (`syn-cora:0.3`).
        class_names: names of the labels, if they are known.
        notes: remarks on the data for the user.
        reader: returns the graphs; set by `register_dataset`.
    """

    name: str
    title: str
    kind: Kind
    nodes: int
    edges: int
    features: int
    classes: int
    citation: str = ""
    source: str = ""
    format: str = ""
    parts: Mapping[str, Part] = field(default_factory=dict)
    natural: bool = False
    metric: str = "accuracy"
    default_clients: int = 10
    options: Mapping[str, str] = field(default_factory=common_options)
    extra: str = ""
    choice: str = ""
    default: str = ""
    combines: bool = False
    short: str = ""
    class_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    reader: Reader | None = field(default=None, compare=False, repr=False)

    def chosen(self, options: Mapping[str, str]) -> Mapping[str, Part]:
        """Return the parts that the options ask for."""
        if not self.choice:
            return self.parts
        wanted = options.get(self.choice, self.default)
        if self.combines and wanted == ALL_PARTS:
            return self.parts
        key = wanted if wanted in self.parts else _as_level(wanted)
        if key not in self.parts:
            raise unknown(f"value of {self.choice} for {self.name}", wanted, self.parts)
        return {key: self.parts[key]}


@dataclass(frozen=True)
class Request:
    """The arguments of a reader.

    Attributes:
        info: the dataset.
        files: its files, by part.
        options: the user's options of `name:option=value`, as text.
        seed: the seed of the federation.
        clients: the number of clients that the user asks for; None if none was given.
        root: the folder that holds the data.
    """

    info: DatasetInfo
    files: Mapping[str, tuple[Path, ...]]
    options: Mapping[str, str]
    seed: int = 0
    clients: int | None = None
    root: Path = Path()

    @property
    def paths(self) -> tuple[Path, ...]:
        """All files, part after part, in the order in which `info` names them."""
        return tuple(path for paths in self.files.values() for path in paths)


def _as_level(text: str) -> str:
    """Write a number as the parts of syn-cora are named: '.30' as '0.3'; return other text."""
    try:
        number = float(text)
    except ValueError:
        return text
    return str(round(number, 6))
