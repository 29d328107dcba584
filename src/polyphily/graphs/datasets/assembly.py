"""Functions that readers of datasets share: arrays from files, checked and assembled."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from polyphily.graphs.datasets.info import Request
from polyphily.graphs.graph import BoolArray, Collection, Features, Graph, IntArray, Masks
from polyphily.graphs.limits import check_npz, unpacked


def load_npz(path: Path) -> Any:
    """Open an archive of plain arrays. Arrays that would have to be unpickled are refused."""
    check_npz(path)
    return np.load(path, allow_pickle=False)


def read_table(path: Path, **arguments: Any) -> Any:
    """Read a CSV file into a pandas table. pandas is imported on first use."""
    import pandas as pd  # type: ignore[import-untyped, unused-ignore]

    if path.suffix == ".gz":
        with unpacked(path) as stream:
            return pd.read_csv(stream, **arguments)
    return pd.read_csv(path, **arguments)


def build(
    request: Request,
    features: Features,
    edges: npt.ArrayLike,
    labels: npt.ArrayLike,
    own_masks: tuple[Masks, ...] = (),
    name: str = "",
    node_ids: npt.NDArray[np.generic] | None = None,
) -> Graph:
    """Build a graph from the arrays of a file, after checking that they fit together.

    Raises:
        ValueError: if an edge leads outside the graph, lengths differ, or a label is none of the
            dataset's.
    """
    ends, classes = np.asarray(edges), np.asarray(labels)
    nodes = len(classes)
    if features.shape[0] != nodes or any(len(masks.train) != nodes for masks in own_masks):
        raise ValueError("features, labels and splits have different lengths")
    if ends.size and not 0 <= ends.min() <= ends.max() < nodes:
        raise ValueError("an edge leads to a node that does not exist")
    if nodes and not -1 <= classes.min() <= classes.max() < request.info.classes:
        raise ValueError(f"a label is outside 0..{request.info.classes - 1}")
    return Graph.build(
        features,
        ends,
        classes,
        own_masks=own_masks,
        name=name or request.info.name,
        node_ids=node_ids,
    )


def collect(
    request: Request, graphs: Iterable[Graph], *, natural: bool, classes: Iterable[str] = ()
) -> Collection:
    """Return a collection with the class names and notes of the registry."""
    info = request.info
    names = tuple(classes) or info.class_names or [str(label) for label in range(info.classes)]
    return Collection(info.name, tuple(graphs), tuple(names), natural=natural, notes=info.notes)


def compressed_rows(arrays: Any, prefix: str = "") -> sp.csr_array:
    """Return a CSR matrix from the arrays `data`, `indices`, `indptr` and `shape`."""
    data, indices, indptr, shape = (
        arrays[prefix + part] for part in ("data", "indices", "indptr", "shape")
    )
    matrix = sp.csr_array((data, indices, indptr), shape=tuple(int(size) for size in shape))
    matrix.check_format(full_check=True)  # scipy's compiled code does not check the indices
    return matrix


def edges_of(adjacency: sp.csr_array) -> IntArray:
    """Return the row and the column of every stored entry, `[2, entries]`."""
    source = np.repeat(np.arange(adjacency.shape[0]), np.diff(adjacency.indptr))
    return np.stack([source, adjacency.indices.astype(np.int64)])


def flags(values: npt.ArrayLike) -> BoolArray:
    """Convert values to booleans."""
    return np.asarray(values).astype(np.bool_)


def flags_at(positions: npt.ArrayLike, length: int) -> BoolArray:
    """Return a boolean array that is True at the given positions."""
    array = np.zeros(length, dtype=np.bool_)
    array[np.asarray(positions, dtype=np.int64)] = True
    return array


def geom_gcn_masks(paths: Iterable[Path]) -> tuple[Masks, ...]:
    """Read the splits of Geom-GCN, one archive each."""
    masks = []
    for path in paths:
        with load_npz(path) as archive:
            masks.append(
                Masks(*(flags(archive[f"{role}_mask"]) for role in ("train", "val", "test")))
            )
    return tuple(masks)
