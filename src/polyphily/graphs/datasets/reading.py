"""Reading the graphs of a dataset that a user names as `name:option=value,…`."""

from __future__ import annotations

import os
import pickle
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from polyphily.errors import UserError, unknown
from polyphily.graphs.datasets.fetch import check_intact, fetch, missing
from polyphily.graphs.datasets.info import DatasetInfo, Request
from polyphily.graphs.datasets.registry import DATASETS

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


def data_root() -> Path:
    """Return the folder of the datasets: `$POLYPHILY_DATA`, or a folder in the user's cache."""
    own = os.environ.get("POLYPHILY_DATA")
    if own:
        return Path(own).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "polyphily"


def parse_dataset(spec: str) -> tuple[DatasetInfo, dict[str, str]]:
    """Return the dataset and the options of a `name` or `name:option=value,option=value`.

    >>> info, options = parse_dataset("Syn_Cora:0.3,component=largest")
    >>> info.name, options
    ('syn-cora', {'homophily': '0.3', 'component': 'largest'})
    """
    name, _, rest = spec.partition(":")
    info = DATASETS.find(name)
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
    """Return whether all files of `name`, or `name:option=value`, are in place."""
    info, options = parse_dataset(name)
    return not missing(info.chosen(options).values(), root or data_root())


def read(
    spec: str, *, root: Path | None = None, seed: int = 0, clients: int | None = None
) -> Collection:
    """Read the graph, or the clients' graphs, of a dataset.

    Missing files are downloaded if they are public. Features are as published, not normalised.

    Args:
        spec: `name` or `name:option=value,option=value`; see `DATASETS` for both.
        root: the folder with the data; `data_root()` unless given.
        seed: the seed of graphs that are drawn at random, such as csbm.
        clients: the number of clients of graphs that are drawn at random.

    Raises:
        UserError: for a wrong name or option, and for files that are absent or damaged.
    """
    from polyphily.graphs.datasets.readers import READERS

    info, options = parse_dataset(spec)
    kept = {name: options.pop(name) for name in SUBGRAPHS if name in options}
    for name, value in kept.items():
        if value != SUBGRAPHS[name][0]:
            raise unknown(f"value of {name}", value, SUBGRAPHS[name][:1])
    folder = root or data_root()
    parts = info.chosen(options)
    new = fetch(info, parts.values(), folder)
    check_intact(info, parts.values(), folder)
    files = {key: tuple(folder / file for file in part.files) for key, part in parts.items()}
    reader = info.reader or READERS[info.format]
    try:
        found = reader(Request(info, files, options, seed, clients, folder))
    except _DAMAGED as error:
        if not files and not (info.reader and isinstance(error, OSError)):
            raise
        for path in new:  # otherwise the next attempt would find them and fail again
            path.unlink(missing_ok=True)
        raise _damaged(info, files, new, error) from error
    collection = _as_collection(info, found)
    if "component" in kept and len(collection.graphs) > 1 and info.name == "syn-cora":
        raise UserError(
            "syn-cora:homophily=all has the same nodes at every level, but component=largest would "
            "keep different nodes at each level. Leave one of the two options out"
        )
    for name in kept:
        graphs = tuple(SUBGRAPHS[name][1](graph) for graph in collection.graphs)
        collection = replace(collection, graphs=graphs)
    if "twins" in kept:
        collection = replace(collection, notes=())  # the notes warn of twins
    return collection


def _as_collection(info: DatasetInfo, found: Graph | Sequence[Graph] | Collection) -> Collection:
    """Return what a reader returned as a collection, once its labels are known to be valid."""
    from polyphily.graphs.graph import Collection, Graph

    if not isinstance(found, Collection):
        graphs = (found,) if isinstance(found, Graph) else found
        if not isinstance(graphs, Sequence) or not graphs:
            kind = "no graph" if isinstance(graphs, Sequence) else type(found).__name__
            raise UserError(
                f"the reader of dataset '{info.name}' returned {kind}: it must return a Graph, a "
                "list of graphs or a Collection"
            )
        names = info.class_names or tuple(str(label) for label in range(info.classes))
        natural = info.natural or len(graphs) > 1
        found = Collection(info.name, tuple(graphs), names, natural=natural, notes=info.notes)
    for graph in found.graphs:
        if not isinstance(graph, Graph):
            raise UserError(
                f"the reader of dataset '{info.name}' returned a {type(graph).__name__} among its "
                "graphs: build each with Graph.build"
            )
        if graph.labels.max(initial=-1) >= len(found.classes):
            raise UserError(
                f"dataset '{info.name}': a label of '{graph.name}' is {graph.labels.max()}, but "
                f"there are {len(found.classes)} classes (0 to {len(found.classes) - 1})"
            )
    return found


def without_twins(graph: Graph) -> Graph:
    """Keep the first of all nodes with equal neighbours; nodes without neighbours stay."""
    import numpy as np

    source, target = graph.edges  # sorted: equal neighbours are equal bytes
    degrees = np.bincount(source, minlength=graph.num_nodes)
    first: dict[bytes, int] = {}
    nodes = [
        node
        for node, near in enumerate(np.split(target, degrees.cumsum()[:-1]))
        if not len(near) or first.setdefault(near.tobytes(), node) == node
    ]
    return graph.subgraph(np.array(nodes, dtype=np.int64))


def largest_component(graph: Graph) -> Graph:
    """Keep the largest connected component, with its nodes in the same order."""
    import numpy as np
    from scipy.sparse.csgraph import connected_components

    _, member = connected_components(graph.adjacency(), directed=False)
    return graph.subgraph(np.flatnonzero(member == np.bincount(member).argmax()))


# Options that keep a part of each graph, in the order in which they apply: value and function.
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
            f"{info.name}: the downloaded files cannot be read ({reason}) and were removed. "
            f"Try again later, or download them by hand from {info.source}"
        )
    folders = sorted({str(path.parent) for paths in files.values() for path in paths})
    where = f"a file in {', '.join(folders)}" if folders else "a file"
    return UserError(
        f"{info.name}: {where} cannot be read ({reason}). Replace it by an intact copy. Official "
        f"source: {info.source or 'unknown'}"
    )
