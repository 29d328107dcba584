"""Reading a client's graph from the named arrays of an `.npz` or a `.pt` file."""

from __future__ import annotations

import pickle
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from polyphily.errors import UserError
from polyphily.graphs.files.client import (
    ClientFile,
    FloatArray,
    check_masks,
    edge_notes,
    encode_labels,
    listed,
    number_fault,
)
from polyphily.graphs.graph import BoolArray, IntArray, Masks

SUFFIXES = (".npz", ".pt")
REQUIRED = ("x", "edge_index", "y")
MASKS = ("train_mask", "val_mask", "test_mask")
IDS = "node_ids"
Array = npt.NDArray[Any]


def read_arrays(path: Path) -> ClientFile:
    """Read a graph from the arrays x, edge_index, y and, if there are any, masks and node_ids."""
    arrays = _load_npz(path) if path.suffix == ".npz" else _load_pt(path)
    missing = [name for name in REQUIRED if name not in arrays]
    if missing:
        raise UserError(
            f"{path}: no array {listed(missing)}. Arrays found: {listed(arrays) or 'none'}; "
            f"needed: {listed(REQUIRED)}"
        )
    features = _features(path, arrays["x"])
    num_nodes = len(features)
    edges = _edges(path, arrays["edge_index"], num_nodes)
    distinct, codes = np.unique(_labels(path, arrays["y"], num_nodes), return_inverse=True)
    names = [str(label) if label >= 0 else "" for label in distinct]
    labels, classes = encode_labels(names, codes)
    masks = None
    if any(name in arrays for name in MASKS):
        masks = Masks(*(_mask(path, name, arrays.get(name), num_nodes) for name in MASKS))
        check_masks(masks, labels, f"{path}, train_mask", lambda node: f"{path}: node {node}")
    ignored = [name for name in arrays if name not in (*REQUIRED, *MASKS, IDS)]
    notes = [f"{listed(ignored)} of {path.name} ignored"] if ignored else []
    return ClientFile(
        path=path,
        features=features,
        feature_names=None,
        edges=edges,
        labels=labels,
        classes=classes,
        masks=masks,
        node_ids=_ids(path, arrays[IDS], num_nodes) if IDS in arrays else None,
        notes=(*edge_notes(edges, num_nodes), *notes),
    )


def _load_npz(path: Path) -> dict[str, Array]:
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            raise ValueError("it holds a single array")
        with loaded:
            return dict(loaded)
    except (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(
            f"{path}: damaged, or not an .npz of plain arrays: {error}. Save x, edge_index and y "
            "with numpy.savez"
        ) from error


def _load_pt(path: Path) -> dict[str, Array]:
    import torch

    advice = (
        "save a dict of tensors: torch.save({'x': x, 'edge_index': edge_index, 'y': y}, 'graph.pt')"
    )
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
        small = tensor.is_floating_point() and tensor.element_size() < 4
        try:
            arrays[name] = (tensor.float() if small else tensor).detach().numpy()
        except (TypeError, RuntimeError) as error:
            raise UserError(f"{path}: '{name}' is not a dense tensor: {error}") from error
    return arrays


def _features(path: Path, x: Array) -> FloatArray:
    _check_kind(path, "x", x, "biuf", "numbers")
    if x.ndim != 2 or 0 in x.shape:
        raise UserError(f"{path}: x has shape {x.shape}: give [nodes, features], one or more each")
    with np.errstate(over="ignore"):
        features = x.astype(np.float32)
    faulty = ~np.isfinite(features)
    if faulty.any():
        node, column = np.unravel_index(int(faulty.argmax()), x.shape)
        raise UserError(f"{path}: x[{node}, {column}] {number_fault(x[node, column])}")
    return features


def _edges(path: Path, edge_index: Array, num_nodes: int) -> IntArray:
    _check_kind(path, "edge_index", edge_index, "iu", "integers")
    if edge_index.ndim != 2 or edge_index.shape[0] != 2:
        columns = edge_index.ndim == 2 and edge_index.shape[1] == 2
        hint = ": transpose it (edge_index.T)" if columns else ""
        raise UserError(
            f"{path}: edge_index has shape {edge_index.shape}: give [2, edges], the sources in the "
            f"first row and the targets in the second{hint}"
        )
    outside = ((edge_index < 0) | (edge_index >= num_nodes)).any(axis=0)
    if outside.any():
        edge = int(outside.argmax())
        raise UserError(
            f"{path}: edge_index[:, {edge}] = {edge_index[:, edge].tolist()} names a node that "
            f"does not exist: x has rows 0 to {num_nodes - 1}"
        )
    return edge_index.astype(np.int64)


def _labels(path: Path, y: Array, num_nodes: int) -> Array:
    _check_kind(path, "y", y, "iu", "integers")
    _check_length(path, "y", y, num_nodes)
    return y


def _mask(path: Path, name: str, mask: Array | None, num_nodes: int) -> BoolArray:
    if mask is None:
        return np.zeros(num_nodes, dtype=np.bool_)
    _check_kind(path, name, mask, "biu", "booleans")
    _check_length(path, name, mask, num_nodes)
    if not np.isin(mask, (0, 1)).all():
        raise UserError(f"{path}: {name} holds values other than 0 and 1: give one per node")
    return mask.astype(np.bool_)


def _ids(path: Path, ids: Array, num_nodes: int) -> Array:
    _check_kind(path, IDS, ids, "iuU", "integers or text")
    _check_length(path, IDS, ids, num_nodes)
    values, counts = np.unique(ids, return_counts=True)
    if (counts > 1).any():
        raise UserError(
            f"{path}: {IDS} has '{values[counts.argmax()]}' {counts.max()} times: give every node "
            "its own"
        )
    return ids


def _check_kind(path: Path, name: str, array: Array, kinds: str, wanted: str) -> None:
    if array.dtype.kind not in kinds:
        raise UserError(f"{path}: {name} has dtype {array.dtype}: give {wanted}")


def _check_length(path: Path, name: str, array: Array, num_nodes: int) -> None:
    if array.shape != (num_nodes,):
        raise UserError(
            f"{path}: {name} has shape {array.shape}, but x has {num_nodes} rows: "
            f"give shape ({num_nodes},)"
        )
