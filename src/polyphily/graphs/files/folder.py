"""Reading a client's graph from a folder with a table of nodes and a table of edges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from polyphily.errors import UserError
from polyphily.graphs.files.client import (
    MISSING_LABELS,
    ClientFile,
    FloatArray,
    check_masks,
    count,
    edge_notes,
    encode_labels,
    listed,
    number_fault,
)
from polyphily.graphs.files.tables import SUFFIXES, Table, arrow, read_table
from polyphily.graphs.graph import IntArray, Masks

ROLES = ("id", "label", "split")
SPLITS = {"train": 0, "val": 1, "valid": 1, "validation": 1, "test": 2, "": 3}
FILES = tuple(stem + suffix for stem in ("nodes", "edges") for suffix in SUFFIXES)


def read_folder(folder: Path) -> ClientFile:
    """Read the graph in `nodes.csv` and `edges.csv`; each may be parquet instead."""
    node_path, edge_path = _table_path(folder, "nodes"), _table_path(folder, "edges")
    nodes = read_table(node_path, ("id", "label"), optional=("split",), numbers=True)
    if not nodes.num_rows:
        raise UserError(f"{nodes.path}: has a header but no nodes: give at least one")
    ids = _ids(nodes)
    feature_names = tuple(name for name in nodes.columns if name not in ROLES)
    features = _features(nodes, feature_names)
    distinct, codes = _distinct(nodes.columns["label"])
    labels, classes = encode_labels(distinct, codes)
    masks = _masks(nodes, labels) if "split" in nodes.columns else None

    table = read_table(edge_path, ("source", "target"))
    edges = np.stack([_positions(table, side, nodes) for side in ("source", "target")])
    notes = _missing_label_notes(distinct, codes)
    notes += [f"{listed(table.ignored)} of {edge_path.name} ignored"] if table.ignored else []
    return ClientFile(
        path=nodes.path,
        features=features,
        feature_names=feature_names,
        edges=edges,
        labels=labels,
        classes=classes,
        masks=masks,
        node_ids=ids,
        notes=(*edge_notes(edges, nodes.num_rows), *notes),
    )


def _table_path(folder: Path, stem: str) -> Path:
    paths = [folder / (stem + suffix) for suffix in SUFFIXES]
    present = [path for path in paths if path.is_file()]
    if len(present) == 1:
        return present[0]
    if present:
        raise UserError(f"{folder}: has both {stem}.csv and {stem}.parquet: remove one of them")
    found = sorted(path.name for path in folder.iterdir())
    raise UserError(
        f"{folder}: no {stem}.csv or {stem}.parquet (found: {listed(found) or 'nothing'}): "
        "a client's folder needs nodes and edges, or one .npz or .pt file"
    )


def _missing_label_notes(texts: list[str], codes: IntArray) -> list[str]:
    """Return notes on label texts that are read as missing labels."""
    return [
        f"{count(int((codes == i).sum()), 'label')} '{text}' read as missing"
        for i, text in enumerate(texts)
        if text and text.lower() in MISSING_LABELS
    ]


def _ids(nodes: Table) -> npt.NDArray[np.generic]:
    """Return the ids of the nodes, as integers if all are, once they are known to be unique."""
    pa, column = arrow(), nodes.columns["id"]
    empty = pa.compute.index(column, "").as_py()
    if empty >= 0:
        raise nodes.fault(empty, "id", "is empty: every node needs an id")
    first = _position_in(column, column)
    repeated = first != np.arange(len(first))
    if repeated.any():
        row = int(repeated.argmax())
        earlier = nodes.place(int(first[row]))
        raise nodes.fault(
            row, "id", f"'{column[row]}' is the id of {earlier} already: give every node its own"
        )
    try:
        numbers = column.cast(pa.int64())
    except pa.ArrowInvalid:
        return np.array(column.to_pylist())
    if not numbers.cast(pa.string()).equals(column):
        return np.array(column.to_pylist())
    integers: IntArray = numbers.to_numpy()
    return integers


def _features(nodes: Table, names: tuple[str, ...]) -> FloatArray:
    if not names:
        raise UserError(
            f"{nodes.path}: no feature column: every column except {listed(ROLES)} is one. If the "
            "nodes have no features, add a column of ones"
        )
    columns = np.empty((len(names), nodes.num_rows), dtype=np.float32)
    for values, name in zip(columns, names, strict=True):
        values[:] = nodes.columns[name].cast(arrow().float32(), safe=False).to_numpy()
    faulty = ~np.isfinite(columns)
    if faulty.any():
        row = int(faulty.any(axis=0).argmax())
        name = names[int(faulty[:, row].argmax())]
        raise nodes.fault(row, name, str(number_fault(nodes.value(row, name))))
    return columns.T


def _masks(nodes: Table, labels: IntArray) -> Masks:
    words, codes = _distinct(nodes.columns["split"])
    for code, word in enumerate(words):
        if word.lower() not in SPLITS:
            row = int((codes == code).argmax())
            raise nodes.fault(
                row, "split", f"unknown word '{word}': write train, val, test or nothing"
            )
    part = np.array([SPLITS[word.lower()] for word in words])[codes]
    masks = Masks(train=part == 0, val=part == 1, test=part == 2)
    ids = nodes.columns["id"]
    check_masks(
        masks,
        labels,
        f"{nodes.path}, column 'split'",
        lambda row: f"{nodes.path}, {nodes.place(row)}, column 'label': node '{ids[row]}'",
    )
    return masks


def _positions(edges: Table, side: str, nodes: Table) -> IntArray:
    """Return the position of the node at one end of every edge."""
    ends = edges.columns[side]
    positions = _position_in(ends, nodes.columns["id"])
    unknown = positions < 0
    if unknown.any():
        row = int(unknown.argmax())
        name = str(ends[row])
        reason = f"no node has the id '{name}'" if name else "is empty"
        raise edges.fault(
            row, side, f"{reason}: write an id of {nodes.path.name}, or remove the edge"
        )
    return positions


def _distinct(column: Any) -> tuple[list[str], IntArray]:
    """Return the distinct texts of a column, and the position of each row's text in them."""
    texts = arrow().compute.unique(column)
    return texts.to_pylist(), _position_in(column, texts)


def _position_in(column: Any, texts: Any) -> IntArray:
    """Return where each entry of a column first occurs in `texts`, or -1."""
    found = arrow().compute.index_in(column, value_set=texts).fill_null(-1)
    positions: IntArray = found.to_numpy().astype(np.int64)
    return positions
