"""From what a user writes, `name:option=value,…`, to the graphs."""

from __future__ import annotations

import os
import pickle
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from polyphily.errors import UserError, unknown
from polyphily.graphs.datasets.fetch import fetch, missing
from polyphily.graphs.datasets.info import DatasetInfo
from polyphily.graphs.datasets.registry import find

if TYPE_CHECKING:
    from polyphily.graphs.graph import Collection, Graph

_DAMAGED = (
    OSError,
    EOFError,
    ValueError,
    LookupError,
    zipfile.BadZipFile,
    zlib.error,
    pickle.UnpicklingError,
)


@dataclass(frozen=True)
class Request:
    """What a reader is given: the dataset, its files by part, and the user's wishes."""

    info: DatasetInfo
    files: Mapping[str, tuple[Path, ...]]
    options: Mapping[str, str]
    seed: int = 0
    clients: int | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        """All files in one row; the order within a part is the registry's."""
        return tuple(path for paths in self.files.values() for path in paths)


def data_root() -> Path:
    """Where datasets are kept: `$POLYPHILY_DATA`, else the user's cache folder."""
    own = os.environ.get("POLYPHILY_DATA")
    if own:
        return Path(own).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "polyphily"


def parse(spec: str) -> tuple[DatasetInfo, dict[str, str]]:
    """The dataset and the options of a `name` or `name:option=value,option=value`.

    >>> info, options = parse("Syn_Cora:0.3,component=largest")
    >>> info.name, options
    ('syn-cora', {'homophily': '0.3', 'component': 'largest'})
    """
    name, _, rest = spec.partition(":")
    info = find(name)
    options: dict[str, str] = {}
    for item in filter(None, (item.strip() for item in rest.split(","))):
        key, separator, value = item.rpartition("=")
        key = (key if separator else info.short).strip().lower()
        if not key:
            raise UserError(
                f"'{item}' in '{spec}' is no option: write option=value. "
                f"Options of {info.name}: {', '.join(info.options)}"
            )
        if key not in info.options:
            raise unknown(f"option of {info.name}", key, info.options)
        if key in options:
            raise UserError(f"'{spec}' gives the option {key} twice")
        options[key] = value.strip()
    return info, options


def is_present(name: str, root: Path | None = None) -> bool:
    """Whether `read` of this name, or `name:option=value`, would find all its files."""
    info, options = parse(name)
    return not missing(info.chosen(options).values(), root or data_root())


def read(
    spec: str, *, root: Path | None = None, seed: int = 0, clients: int | None = None
) -> Collection:
    """The graph, or the clients' graphs, that a name stands for.

    Missing files are downloaded from their official place where there is a public one. Features
    are as published, not normalised.

    Args:
        spec: `name` or `name:option=value,option=value`; see `DATASETS` for both.
        root: the folder with the data; `data_root()` unless given.
        seed: for what is drawn at random (csbm only).
        clients: how many clients to draw (csbm only).

    Raises:
        UserError: for a wrong name or option, and for files that are absent or damaged.
    """
    from polyphily.graphs.datasets.readers import READERS

    info, options = parse(spec)
    kept = {name: options.pop(name) for name in SUBGRAPHS if name in options}
    for name, value in kept.items():
        if value != SUBGRAPHS[name][0]:
            raise unknown(f"value of {name}", value, SUBGRAPHS[name][:1])
    folder = root or data_root()
    parts = info.chosen(options)
    new = fetch(info, parts.values(), folder)
    files = {key: tuple(folder / file for file in part.files) for key, part in parts.items()}
    try:
        collection = READERS[info.format](Request(info, files, options, seed, clients))
    except _DAMAGED as error:
        if not files:
            raise
        for path in new:  # else the next attempt would find them and fail again
            path.unlink(missing_ok=True)
        raise _damaged(info, files, new, error) from error
    if "component" in kept and len(collection.graphs) > 1 and info.name == "syn-cora":
        raise UserError(
            "syn-cora:homophily=all has the same nodes at every level; component=largest would "
            "keep others at each of them. Leave one of the two out"
        )
    for name in kept:
        graphs = tuple(SUBGRAPHS[name][1](graph) for graph in collection.graphs)
        collection = replace(collection, graphs=graphs)
    if "twins" in kept:
        collection = replace(collection, notes=())  # they speak of twins
    return collection


def without_twins(graph: Graph) -> Graph:
    """The first of all nodes that have the same neighbours; nodes without any stay."""
    import numpy as np

    source, target = graph.edges  # sorted, so that equal neighbours are equal bytes
    degrees = np.bincount(source, minlength=graph.num_nodes)
    first: dict[bytes, int] = {}
    nodes = [
        node
        for node, near in enumerate(np.split(target, degrees.cumsum()[:-1]))
        if not len(near) or first.setdefault(near.tobytes(), node) == node
    ]
    return graph.subgraph(np.array(nodes, dtype=np.int64))


def largest_component(graph: Graph) -> Graph:
    """The largest connected component, its nodes in their old order."""
    import numpy as np
    from scipy.sparse.csgraph import connected_components

    _, member = connected_components(graph.adjacency(), directed=False)
    return graph.subgraph(np.flatnonzero(member == np.bincount(member).argmax()))


# Options that keep a part of each graph, in the order in which they do: the value, and how.
SUBGRAPHS: Mapping[str, tuple[str, Callable[[Graph], Graph]]] = {
    "twins": ("one", without_twins),
    "component": ("largest", largest_component),
}


def _damaged(
    info: DatasetInfo, files: Mapping[str, tuple[Path, ...]], new: list[Path], error: Exception
) -> UserError:
    reason = str(error).strip() or type(error).__name__
    if new:
        return UserError(
            f"{info.name}: what was downloaded cannot be read ({reason}) and was removed. "
            f"Try again later, or fetch it by hand from {info.source}"
        )
    folders = sorted({str(path.parent) for paths in files.values() for path in paths})
    return UserError(
        f"{info.name}: a file in {', '.join(folders)} cannot be read ({reason}). Put a sound copy "
        f"in its place. Official source: {info.source}"
    )
