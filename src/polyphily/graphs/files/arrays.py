"""Reading a client's graph from the named arrays of an `.npz` or a `.pt` file.

The layouts of common sources are told apart by the names of the arrays: those of torch_geometric
(`x`, `edge_index`, `y`, `train_mask`), of the heterophilous graphs of Platonov et al. (2023)
(`node_features`, `edges`, `node_labels`, `train_masks`), and of gnn-benchmark (`attr_data`,
`adj_data`, `labels`), with matrices as the parts of a compressed sparse row matrix.
"""

from __future__ import annotations

import pickle
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from polyphily.errors import FileFaults, UserError
from polyphily.graphs.edges import MOST_RELATIONS
from polyphily.graphs.files.client import (
    ClientFile,
    check_masks,
    count,
    edge_notes,
    encode_labels,
    listed,
    number_fault,
)
from polyphily.graphs.files.schema import TableSchema
from polyphily.graphs.graph import UNLABELLED, BoolArray, Features, IntArray, Masks
from polyphily.graphs.limits import DATA, check_npz, check_zip

SUFFIXES = (".npz", ".pt")
Array = npt.NDArray[Any]

# The names of the arrays by their role, the usual one first.
FEATURES = ("x", "features", "node_features", "attr_matrix")
LABELS = ("y", "labels", "node_labels")
EDGES = ("edge_index", "edges")
WEIGHTS = ("edge_weight", "edge_weights")
TYPES = ("edge_type", "edge_types")
IDS = ("node_ids",)
DIRECTED = ("directed",)
MASKS = (
    ("train_mask", "train_masks"),
    ("val_mask", "val_masks", "valid_mask"),
    ("test_mask", "test_masks"),
)
SPARSE = ("data", "indices", "indptr", "shape")  # parts of a compressed sparse row matrix
ATTRIBUTES, ADJACENCY = "attr", "adj"  # prefixes of such parts
KNOWN = {
    *(name for role in (FEATURES, LABELS, EDGES, WEIGHTS, TYPES, IDS, *MASKS) for name in role),
    *(f"{prefix}_{part}" for prefix in (ATTRIBUTES, ADJACENCY) for part in SPARSE),
}


def read_arrays(path: Path, schema: TableSchema, *, labels_required: bool = True) -> ClientFile:
    """Read a graph from the arrays of a file.

    Args:
        path: the file.
        schema: says whether edges are directed, unless the file does.
        labels_required: whether there must be labels.

    Raises:
        UserError: with all arrays that cannot be used.
    """
    arrays = _load_npz(path) if path.suffix == ".npz" else _load_pt(path)
    return _Reader(path, arrays).client(schema, labels_required)


class _Reader:
    """Takes the arrays of a file by their roles and collects the faults."""

    def __init__(self, path: Path, arrays: dict[str, Array]) -> None:
        self.path, self.arrays = path, arrays
        self.used: list[str] = []
        self.errors: list[UserError] = []

    def client(self, schema: TableSchema, labels_required: bool) -> ClientFile:
        """Return the graph.

        Raises:
            UserError: for arrays that are missing or cannot be used.
        """
        path = self.path
        self._check_present(labels_required)
        features = self._features()
        num_nodes = features.shape[0]
        found = self._attempt(lambda: self._edges(num_nodes))
        edges, weights = found or (np.zeros((2, 0), dtype=np.int64), None)
        weights = self._attempt(lambda: self._weights(edges, weights)) if found else None
        types = self._attempt(lambda: self._types(edges)) if found else None
        labels, classes = self._attempt(lambda: self._labels(num_nodes)) or (
            np.full(num_nodes, UNLABELLED),
            (),
        )
        masks: tuple[Masks, ...] = ()
        if not self.errors and classes:
            masks = self._attempt(lambda: self._masks(num_nodes, labels)) or ()
        ids = self._attempt(lambda: self._ids(num_nodes))
        directed = bool(np.any(self._take(DIRECTED))) if self._name(DIRECTED) else schema.directed
        if self.errors:
            raise self.errors[0] if len(self.errors) == 1 else FileFaults.merged(self.errors)
        ignored = [name for name in self.arrays if name not in self.used]
        return ClientFile(
            path=path,
            features=features,
            columns=None,
            edges=edges,
            labels=labels,
            classes=classes,
            own_masks=masks,
            node_ids=ids,
            edge_weights=weights,
            directed=directed,
            edge_types=types[0] if types else None,
            relations=types[1] if types else (),
            schema=schema,
            notes=(
                *self._layout_notes(),
                *edge_notes(edges, num_nodes),
                *([f"{listed(ignored)} of {path.name} ignored"] if ignored else []),
            ),
        )

    def _attempt(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except UserError as error:
            self.errors.append(error)
            return None

    def _name(self, role: tuple[str, ...]) -> str | None:
        """Return the name of the array that has a role; None if there is none.

        Raises:
            UserError: if there are several.
        """
        names = [name for name in role if name in self.arrays]
        if len(names) > 1:
            raise UserError(f"{self.path}: has both {listed(names)}: remove one of them")
        return names[0] if names else None

    def _take(self, role: tuple[str, ...]) -> Array | None:
        name = self._name(role)
        if name is None:
            return None
        self.used.append(name)
        return self.arrays[name]

    def _has_matrix(self, prefix: str) -> bool:
        return all(f"{prefix}_{part}" in self.arrays for part in SPARSE)

    def _check_present(self, labels_required: bool) -> None:
        wanted = {
            FEATURES: self._name(FEATURES) or self._has_matrix(ATTRIBUTES),
            EDGES: self._name(EDGES) or self._has_matrix(ADJACENCY),
            LABELS: self._name(LABELS) or not labels_required,
        }
        missing = [role[0] for role, present in wanted.items() if not present]
        if missing:
            raise UserError(
                f"{self.path}: no array {listed(missing)}. Arrays found: "
                f"{listed(self.arrays) or 'none'}; needed: {listed(r[0] for r in wanted)}, or "
                "those of another layout in docs/data.md"
            )

    def _layout_notes(self) -> list[str]:
        """Return a note on arrays that are not those of the usual layout."""
        usual = {role[0] for role in (FEATURES, EDGES, LABELS, WEIGHTS, TYPES, IDS, *MASKS)}
        parts = {f"{p}_{part}": f"{p}_*" for p in (ATTRIBUTES, ADJACENCY) for part in SPARSE}
        other = [parts.get(n, n) for n in self.used if n not in {*usual, *DIRECTED}]
        return [f"read from {listed(dict.fromkeys(other))}"] if other else []

    def _matrix(self, prefix: str) -> sp.csr_array:
        names = [f"{prefix}_{part}" for part in SPARSE]
        self.used += names
        data, indices, indptr, shape = (self.arrays[name] for name in names)
        if data.dtype.kind not in "biuf" or any(
            a.dtype.kind not in "iu" for a in (indices, indptr)
        ):
            raise UserError(f"{self.path}: {listed(names)} are not the parts of a sparse matrix")
        try:
            matrix = sp.csr_array((data, indices, indptr), shape=tuple(shape.tolist()))
            matrix.check_format(full_check=True)
        except (ValueError, TypeError, IndexError) as error:
            raise UserError(
                f"{self.path}: {listed(names)} are not the parts of a sparse matrix: {error}"
            ) from error
        return matrix

    def _features(self) -> Features:
        name = self._name(FEATURES)
        if name is None:
            matrix = self._matrix(ATTRIBUTES)
            name, x, values = f"{ATTRIBUTES}_data", None, matrix.data
        else:
            x = values = self._take(FEATURES)
            assert x is not None
            _check_kind(self.path, name, x, "biuf", "numbers")
            if x.ndim != 2 or 0 in x.shape:
                raise UserError(
                    f"{self.path}: {name} has shape {x.shape}: give [nodes, features], one or more "
                    "each"
                )
        with np.errstate(over="ignore"):
            features = values.astype(np.float32)
        faulty = ~np.isfinite(features)
        if faulty.any():
            errors = [
                UserError(
                    f"{self.path}: {name}[{', '.join(map(str, cell))}] "
                    f"{number_fault(values[tuple(cell)])}"
                )
                for cell in np.argwhere(faulty)[: FileFaults.SHOWN].tolist()
            ]
            raise errors[0] if len(errors) == 1 else FileFaults.merged(errors)
        if x is not None:
            return features
        return sp.csr_array((features, matrix.indices, matrix.indptr), shape=matrix.shape)

    def _edges(self, num_nodes: int) -> tuple[IntArray, npt.NDArray[np.float64] | None]:
        """Return the edges, and the weights of an adjacency matrix that is not 0 and 1."""
        name = self._name(EDGES)
        if name is None:
            matrix = self._matrix(ADJACENCY).tocoo()
            if matrix.shape != (num_nodes, num_nodes):
                raise UserError(
                    f"{self.path}: {ADJACENCY}_shape is {matrix.shape}, but there are {num_nodes} "
                    "nodes"
                )
            edges = np.stack([matrix.row, matrix.col]).astype(np.int64)
            weights = matrix.data.astype(np.float64)
            return edges, None if (weights == 1).all() else weights
        given = self._take(EDGES)
        assert given is not None
        _check_kind(self.path, name, given, "iu", "integers")
        if name == "edges" and given.ndim == 2 and given.shape[1] == 2:
            given = given.T
        if given.ndim != 2 or given.shape[0] != 2:
            columns = given.ndim == 2 and given.shape[1] == 2
            hint = f": transpose it ({name}.T)" if columns else ""
            raise UserError(
                f"{self.path}: {name} has shape {given.shape}: give [2, edges], the sources in the "
                f"first row and the targets in the second{hint}"
            )
        outside = ((given < 0) | (given >= num_nodes)).any(axis=0)
        if outside.any():
            errors = [
                UserError(
                    f"{self.path}: {name}[:, {edge}] = {given[:, edge].tolist()} names a node that "
                    f"does not exist: there are rows 0 to {num_nodes - 1}"
                )
                for edge in np.flatnonzero(outside)[: FileFaults.SHOWN].tolist()
            ]
            raise errors[0] if len(errors) == 1 else FileFaults.merged(errors)
        return given.astype(np.int64), None

    def _weights(
        self, edges: IntArray, found: npt.NDArray[np.float64] | None
    ) -> npt.NDArray[np.float64] | None:
        name, weights = self._name(WEIGHTS) or f"{ADJACENCY}_data", found
        if (given := self._take(WEIGHTS)) is not None:
            _check_kind(self.path, name, given, "biuf", "numbers")
            weights = given.astype(np.float64).reshape(-1) if given.ndim == 2 else given
            self._check_edges(name, weights, edges)
        if weights is None:
            return None
        wrong = ~((weights >= 0) & np.isfinite(weights))
        if wrong.any():
            edge = int(wrong.argmax())
            raise UserError(
                f"{self.path}: {name}[{edge}] is {weights[edge]}: a weight is a finite number from "
                f"0 ({count(int(wrong.sum()), 'such weight')})"
            )
        return weights.astype(np.float64)

    def _types(self, edges: IntArray) -> tuple[IntArray, tuple[str, ...]] | None:
        name, given = self._name(TYPES), self._take(TYPES)
        if name is None or given is None:
            return None
        _check_kind(self.path, name, given, "iuU", "integers or text")
        self._check_edges(name, given, edges)
        names, codes = np.unique(given, return_inverse=True)
        if len(names) > MOST_RELATIONS:
            raise UserError(
                f"{self.path}: {name} has {len(names)} types of edges, and {MOST_RELATIONS} is the "
                "most"
            )
        return codes.astype(np.int64), tuple(map(str, names.tolist()))

    def _check_edges(self, name: str, array: Array, edges: IntArray) -> None:
        if array.shape != (edges.shape[1],):
            raise UserError(
                f"{self.path}: {name} has shape {array.shape}, but there are {edges.shape[1]} "
                f"edges: give shape ({edges.shape[1]},)"
            )

    def _labels(self, num_nodes: int) -> tuple[IntArray, tuple[str, ...]]:
        name, y = self._name(LABELS), self._take(LABELS)
        if name is None or y is None:
            return np.full(num_nodes, UNLABELLED), ()
        _check_kind(self.path, name, y, "iuU", "integers or text")
        if y.ndim == 2 and y.shape[1] == 1:
            y = y[:, 0]
        _check_length(self.path, name, y, num_nodes)
        distinct, codes = np.unique(y, return_inverse=True)
        if y.dtype.kind == "U":
            names = [text.strip() for text in distinct.tolist()]
        else:
            names = [str(label) if label >= 0 else "" for label in distinct.tolist()]
        return encode_labels(names, codes)

    def _masks(self, num_nodes: int, labels: IntArray) -> tuple[Masks, ...]:
        """Return the splits of the file: masks `[n]`, or `[k, n]` or `[n, k]` for several."""
        names = [self._name(role) for role in MASKS]
        if not any(names):
            return ()
        parts = [self._mask(role, num_nodes) for role in MASKS]
        splits = max(len(part) for part in parts)
        if any(len(part) not in (1, splits) for part in parts):
            sizes = ", ".join(str(len(part)) for part in parts)
            raise UserError(
                f"{self.path}: {listed(filter(None, names))} have {sizes} splits: give the same "
                "number of each"
            )
        train, val, test = (np.broadcast_to(part, (splits, num_nodes)) for part in parts)
        masks = tuple(
            Masks(*map(np.ascontiguousarray, row)) for row in zip(train, val, test, strict=True)
        )
        for i, split in enumerate(masks):
            name = f"{names[0] or MASKS[0][0]}" + (f"[{i}]" if splits > 1 else "")
            check_masks(
                split, labels, f"{self.path}, {name}", lambda node: f"{self.path}: node {node}"
            )
        return masks

    def _mask(self, role: tuple[str, ...], num_nodes: int) -> BoolArray:
        """Return masks of one role as `[k, n]`; one without nodes if there is none."""
        name, mask = self._name(role), self._take(role)
        if name is None or mask is None:
            return np.zeros((1, num_nodes), dtype=np.bool_)
        _check_kind(self.path, name, mask, "biu", "booleans")
        if mask.ndim == 2 and mask.shape[1] != num_nodes:
            mask = mask.T
        if mask.ndim == 1:
            _check_length(self.path, name, mask, num_nodes)
            mask = mask[None]
        if mask.ndim != 2 or mask.shape[1] != num_nodes:
            raise UserError(
                f"{self.path}: {name} has shape {self.arrays[name].shape}, but there are "
                f"{num_nodes} nodes: give [nodes], or [splits, nodes]"
            )
        if not np.isin(mask, (0, 1)).all():
            raise UserError(
                f"{self.path}: {name} holds values other than 0 and 1: give one per node"
            )
        return mask.astype(np.bool_)

    def _ids(self, num_nodes: int) -> Array | None:
        name, ids = self._name(IDS), self._take(IDS)
        if name is None or ids is None:
            return None
        _check_kind(self.path, name, ids, "iuU", "integers or text")
        _check_length(self.path, name, ids, num_nodes)
        values, counts = np.unique(ids, return_counts=True)
        if (counts > 1).any():
            raise UserError(
                f"{self.path}: {name} has '{values[counts.argmax()]}' {counts.max()} times: give "
                "every node its own"
            )
        return ids


def _load_npz(path: Path) -> dict[str, Array]:
    try:
        if zipfile.is_zipfile(path):
            check_npz(path)
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            raise ValueError("it holds a single array")
        with loaded:
            return _plain_arrays(loaded)
    except (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(
            f"{path}: damaged, or not an .npz of plain arrays: {error}. Save x, edge_index and y "
            "with numpy.savez"
        ) from error


def _plain_arrays(archive: Any) -> dict[str, Array]:
    """Return the arrays of an archive. Objects, which would have to be unpickled, are left out."""
    arrays = {}
    for name in archive.files:
        try:
            arrays[name] = archive[name]
        except ValueError as error:
            if "allow_pickle" not in str(error) or name in KNOWN:
                raise
    return arrays


def _load_pt(path: Path) -> dict[str, Array]:
    import torch

    advice = (
        "save a dict of tensors: torch.save({'x': x, 'edge_index': edge_index, 'y': y}, 'graph.pt')"
    )
    if zipfile.is_zipfile(path):
        check_zip(path)
    DATA.check_file(path)
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path}: refused, because it holds more than tensors (unpickling could run any code) "
            f"or is damaged: {advice}"
        ) from error
    except (OSError, ValueError, EOFError, RuntimeError) as error:
        raise UserError(f"{path}: damaged, or not a file of tensors: {advice}") from error
    if not isinstance(loaded, dict):
        raise UserError(f"{path}: holds a {type(loaded).__name__}: {advice}")
    arrays = {}
    for name, tensor in loaded.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise UserError(f"{path}: '{name}' is not the name of a tensor: {advice}")
        # A tensor can repeat a few stored numbers as often as it declares.
        DATA.check(path, tensor.numel() * tensor.element_size(), f"its tensor '{name}' declares")
        small = tensor.is_floating_point() and tensor.element_size() < 4
        try:
            arrays[name] = (tensor.float() if small else tensor).detach().numpy()
        except (TypeError, RuntimeError) as error:
            raise UserError(f"{path}: '{name}' is not a dense tensor: {error}") from error
    return arrays


def _check_kind(path: Path, name: str, array: Array, kinds: str, wanted: str) -> None:
    if array.dtype.kind not in kinds:
        raise UserError(f"{path}: {name} has dtype {array.dtype}: give {wanted}")


def _check_length(path: Path, name: str, array: Array, num_nodes: int) -> None:
    if array.shape != (num_nodes,):
        raise UserError(
            f"{path}: {name} has shape {array.shape}, but there are {num_nodes} rows of features: "
            f"give shape ({num_nodes},)"
        )
