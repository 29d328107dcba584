"""Checks that the conversions share, of features, labels and splits of a user's graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp

from polyphily.errors import UserError
from polyphily.graphs.files.client import check_masks
from polyphily.graphs.graph import UNLABELLED, BoolArray, Graph, IntArray, Masks, as_array

PARTS = ("train", "val", "test")
SAME_WEIGHT = 1e-6  # relative difference of two sums of weights that counts as rounding


@dataclass(frozen=True)
class Found:
    """A converted graph.

    Attributes:
        graph: the graph; its labels are positions in `classes`, or numbers if there are none.
        classes: the names of its labels; None if they are numbers.
        labelled: whether it came with labels.
        notes: what was ignored or removed.
    """

    graph: Graph
    classes: tuple[str, ...] | None = None
    labelled: bool = True
    notes: tuple[str, ...] = ()


def as_matrix(matrix: Any) -> Any:
    """Return a torch tensor or a `SparseTensor` of torch_sparse as a scipy matrix or an array."""
    return matrix.to_scipy(layout="csr") if hasattr(matrix, "to_scipy") else as_array(matrix)


def checked_features(x: Any, name: str) -> Any:
    """Return features `[n, f]` as an array or a scipy matrix, once all numbers are finite."""
    values = as_matrix(x)
    if values.ndim != 2:
        raise UserError(
            f"graph '{name}': features have shape {tuple(values.shape)}: give [nodes, features], "
            "such as x.view(-1, 1) for a single feature"
        )
    if not sp.issparse(values) and values.dtype.kind not in "iufb":
        raise UserError(f"graph '{name}': features have dtype {values.dtype}: give numbers")
    faulty = ~np.isfinite(values.data if sp.issparse(values) else values)
    if faulty.any():
        where = np.argwhere(faulty)[0].tolist()
        if sp.issparse(values):
            entries = sp.coo_array(values)
            where = [int(entries.row[where[0]]), int(entries.col[where[0]])]
        raise UserError(
            f"graph '{name}': feature {where[1]} of node {where[0]} is not a finite number: fill "
            "it in, or remove the node"
        )
    return values


def checked_labels(y: Any, nodes: int, name: str) -> IntArray:
    """Return labels as int64 `[n]`: NaN and negative numbers mean that there is none."""
    values = as_array(y)
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim == 2 and len(values) == nodes:
        raise UserError(
            f"graph '{name}': y has shape {values.shape}: give one class per node. If rows are "
            "one-hot, give y.argmax(dim=1); nodes of several classes at once are not supported"
        )
    if values.ndim != 1 or len(values) != nodes:
        raise UserError(
            f"graph '{name}': y has shape {values.shape}, but there are {nodes} nodes: labels are "
            "per node here. Labels of whole graphs are not supported"
        )
    if values.dtype.kind not in "iufb":
        raise UserError(f"graph '{name}': y has dtype {values.dtype}: give whole numbers from 0")
    known = ~(np.isnan(values) | (values < 0)) if values.dtype.kind == "f" else values >= 0
    found = np.where(known, values, UNLABELLED)
    wrong = found != np.floor(found)
    if wrong.any():
        raise UserError(
            f"graph '{name}': node {int(wrong.argmax())} has y = {values[wrong.argmax()]}: give "
            "whole numbers from 0. Regression is not supported"
        )
    return found.astype(np.int64)


def checked_splits(masks: Mapping[str, Any], labels: IntArray, name: str) -> tuple[Masks, ...]:
    """Return the splits of masks `[n]` or `[n, splits]`; one of the former serves all splits."""
    given = {part: as_array(mask) for part, mask in masks.items() if mask is not None}
    if not given:
        return ()
    for part, mask in given.items():
        if (
            mask.ndim not in (1, 2)
            or len(mask) != len(labels)
            or (mask.dtype != np.bool_ and not np.isin(mask, (0, 1)).all())
        ):
            raise UserError(
                f"graph '{name}': {part}_mask is {mask.dtype} of shape {mask.shape}: give one "
                f"boolean per node, [{len(labels)}], or a column for each split"
            )
    counts = {mask.shape[1] for mask in given.values() if mask.ndim == 2}
    if len(counts) > 1:
        raise UserError(f"graph '{name}': masks have {sorted(counts)} columns: give all as many")
    empty = np.zeros(len(labels), dtype=np.bool_)

    def part_of(split: int, part: str) -> BoolArray:
        mask = given.get(part, empty)
        column: BoolArray = (mask[:, split] if mask.ndim == 2 else mask).astype(np.bool_)
        return column

    found = tuple(
        Masks(*(part_of(split, part) for part in PARTS)) for split in range(max(counts, default=1))
    )
    for own in found:
        check_masks(
            own, labels, f"graph '{name}', train_mask", lambda node: f"graph '{name}': node {node}"
        )
    return found


def is_directed(edges: Any, weights: Any, nodes: int) -> bool:
    """Return whether some edge lacks its reverse, or the reverse has another weight.

    >>> is_directed(np.array([[0, 1, 1], [1, 0, 2]]), None, 3)
    True
    """
    if edges.ndim != 2 or len(edges) != 2 or edges.dtype.kind not in "iu" or not edges.size:
        return False
    if edges.min() < 0 or edges.max() >= nodes:
        return False  # `Graph.build` reports it
    if weights is not None and (len(weights) != edges.shape[1] or not np.isfinite(weights).all()):
        return False  # `Graph.build` reports it
    values = np.ones(edges.shape[1]) if weights is None else np.asarray(weights, dtype=np.float64)
    forward = sp.csr_array((values, (edges[0], edges[1])), shape=(nodes, nodes))
    forward.sum_duplicates()
    if weights is None:
        forward.data[:] = 1
    return bool(abs(forward - forward.T).max() > SAME_WEIGHT * abs(forward).max())


def coded_labels(values: Any, nodes: int, name: str) -> tuple[IntArray, tuple[str, ...] | None]:
    """Return labels that may be text as positions, and the names; None if they are numbers."""
    found = as_array(values)
    if found.dtype.kind not in "OU":
        return checked_labels(found, nodes, name), None
    if found.shape != (nodes,):
        return checked_labels(found, nodes, name), None  # which says what is wrong
    kept = [None if _is_missing(value) else value for value in found.tolist()]
    if not any(isinstance(value, str) for value in kept):
        numbers = np.array([np.nan if value is None else value for value in kept], dtype=np.float64)
        return checked_labels(numbers, nodes, name), None
    texts = sorted({str(value) for value in kept if value is not None})
    position = {text: i for i, text in enumerate(texts)}
    codes = [UNLABELLED if value is None else position[str(value)] for value in kept]
    return np.array(codes, dtype=np.int64), tuple(texts)


def _is_missing(value: Any) -> bool:
    return value is None or value == "" or (isinstance(value, float) and bool(np.isnan(value)))


def unless_ones(values: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
    """Return weights of edges, None if all are one."""
    return None if (values == 1).all() else values
