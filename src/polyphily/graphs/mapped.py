"""Graphs of many clients in memory-mapped files.

A folder holds the graphs one after another: the nodes of client k are consecutive rows of
`features.bin`, `labels.bin` and `masks.bin`, and its edges consecutive rows of `edges.bin`.
`pointers.npy` has the first row of each. A graph is read when it is asked for, so that memory holds
the graphs in use and not those of all clients.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from polyphily.errors import UserError
from polyphily.graphs.graph import Graph, Masks
from polyphily.graphs.partitions import NATURAL, Partition

FORMAT = 1
FACTS, POINTERS = "facts.json", "pointers.npy"
MASKS = ("train", "val", "test")  # bit i of a node's entry in masks.bin
KINDS: Mapping[str, Any] = {
    "features": np.float32,
    "labels": np.int32,
    "masks": np.uint8,
    "edges": np.int32,
}


class MappedGraphs(Sequence[Graph]):
    """The graphs in a folder that `write_graphs` wrote.

    Args:
        folder: with the files.
        first: how many of the graphs, from the first on; all unless given.

    Attributes:
        num_features: the features of a node, the same for all clients.
    """

    def __init__(self, folder: Path, first: int | None = None) -> None:
        self.folder = folder
        try:
            facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
            self.num_features = int(facts["features"])
            stored: npt.NDArray[np.int64] = np.load(folder / POINTERS, allow_pickle=False)
            self._pointers = stored if first is None else stored[:, : first + 1]
            self._maps: list[mmap.mmap] = []
            widths = {"features": self.num_features, "edges": 2}
            self._arrays = {
                name: self._open(folder / f"{name}.bin", kind, widths.get(name, 1))
                for name, kind in KINDS.items()
            }
        except (OSError, ValueError, KeyError) as error:
            raise UserError(
                f"the graphs in {folder} cannot be read ({error}): remove the folder, and they are "
                "made again"
            ) from None

    def _open(self, file: Path, kind: Any, width: int) -> npt.NDArray[Any]:
        with file.open("rb") as stream:
            if os.fstat(stream.fileno()).st_size == 0:  # which cannot be mapped
                return np.zeros((0, width), dtype=kind)
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        self._maps.append(mapped)
        return np.frombuffer(mapped, dtype=kind).reshape(-1, width)

    def __len__(self) -> int:
        return int(self._pointers.shape[1]) - 1

    @property
    def num_nodes(self) -> int:
        """The nodes of all clients together."""
        return int(self._pointers[0, -1])

    @overload
    def __getitem__(self, client: int) -> Graph: ...

    @overload
    def __getitem__(self, client: slice) -> Sequence[Graph]: ...

    def __getitem__(self, client: int | slice) -> Graph | Sequence[Graph]:
        """Read the graph of a client into memory."""
        if isinstance(client, slice):
            return [self[k] for k in range(*client.indices(len(self)))]
        k = range(len(self))[client]
        nodes, edges = (slice(*row[k : k + 2].tolist()) for row in self._pointers)
        bits = np.array(self._arrays["masks"][nodes, 0])
        return Graph(
            features=np.array(self._arrays["features"][nodes]),
            edges=np.ascontiguousarray(self._arrays["edges"][edges].T.astype(np.int64)),
            labels=self._arrays["labels"][nodes, 0].astype(np.int64),
            masks=Masks(*((bits >> i & 1).astype(np.bool_) for i in range(len(MASKS)))),
            name=client_name(k, len(self)),
        )

    def __iter__(self) -> Iterator[Graph]:
        return (self[k] for k in range(len(self)))

    def release(self) -> None:
        """Give back the memory of pages that were read; they are read again where needed."""
        for mapped in self._maps:
            if hasattr(mmap, "MADV_DONTNEED"):
                mapped.madvise(mmap.MADV_DONTNEED)

    def partition(self, clients: Sequence[int]) -> Partition:
        """Return the nodes of some clients, numbered through all of them, and their masks."""
        nodes = [np.arange(*self._pointers[0, k : k + 2].tolist()) for k in clients]
        masks = [self[k].masks for k in clients]
        return Partition.of(NATURAL, nodes, [own for own in masks if own is not None])


def client_name(client: int, clients: int) -> str:
    """Return the name of a client that has none of its own.

    >>> client_name(7, 100)
    'client-07'
    """
    return f"client-{client:0{len(str(clients - 1))}d}"


def write_graphs(folder: Path, graphs: Iterable[Graph]) -> MappedGraphs:
    """Write graphs into a new folder, one at a time, and return them from there.

    Args:
        folder: it must not exist, or must be empty.
        graphs: with their masks drawn. They have dense features, and edges without weights,
            direction and types. Names are not kept: clients are named by their position.

    Raises:
        UserError: for a graph that is none of this kind, or a folder that cannot be written to.
    """
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        unfinished.mkdir(parents=True)
        _write(unfinished, graphs)
        try:
            unfinished.rename(folder)
        except OSError:
            if not (folder / FACTS).exists():  # otherwise another process was faster
                raise
    except OSError as error:
        raise UserError(f"cannot write graphs to {folder}: {error.strerror}") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return MappedGraphs(folder)


def _write(folder: Path, graphs: Iterable[Graph]) -> None:
    nodes, edges, width = [0], [0], -1
    streams = {name: (folder / f"{name}.bin").open("wb") for name in KINDS}
    try:
        for graph in graphs:
            width = graph.num_features if width < 0 else width
            _check(graph, width)
            assert graph.masks is not None
            bits = sum(getattr(graph.masks, name).astype(np.uint8) << i for i, name in _bits())
            parts = {
                "features": graph.features,
                "labels": graph.labels,
                "masks": bits,
                "edges": graph.edges.T,
            }
            for name, values in parts.items():
                streams[name].write(np.ascontiguousarray(values, dtype=KINDS[name]).tobytes())
            nodes.append(nodes[-1] + graph.num_nodes)
            edges.append(edges[-1] + graph.edges.shape[1])
    finally:
        for stream in streams.values():
            stream.close()
    np.save(folder / POINTERS, np.array([nodes, edges], dtype=np.int64))
    facts = {"format": FORMAT, "clients": len(nodes) - 1, "features": width}
    (folder / FACTS).write_text(json.dumps(facts) + "\n", encoding="utf-8")


def _bits() -> Iterator[tuple[int, str]]:
    return enumerate(MASKS)


def _check(graph: Graph, width: int) -> None:
    problem = (
        "has no split"
        if graph.masks is None
        else "has sparse features"
        if sp.issparse(graph.features)
        else "has columns that are not encoded"
        if graph.table is not None
        else "has weights, directions or types of edges"
        if any(x is not None for x in (graph.edge_weights, graph.arcs, graph.edge_types))
        else f"has {graph.num_features} features, others have {width}"
        if graph.num_features != width
        else ""
    )
    if problem:
        raise UserError(f"graph '{graph.name}' cannot be kept on disk: it {problem}")


def graphs_folder(root: Path, request: Mapping[str, Any]) -> Path:
    """Return the folder of graphs that were made for a request, under the folder of datasets."""
    text = json.dumps({"format": FORMAT, **request}, sort_keys=True)
    return root / "mapped" / hashlib.sha256(text.encode()).hexdigest()[:16]
