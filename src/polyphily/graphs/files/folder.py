"""Reading a client's graph from a folder with a table of nodes and a table of edges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from polyphily.errors import FileFaults, UserError, unknown
from polyphily.graphs.edges import MOST_RELATIONS
from polyphily.graphs.files.client import (
    FLOAT32_OVERFLOW,
    MISSING_LABELS,
    NO_TRAIN,
    ClientFile,
    RawColumn,
    count,
    edge_notes,
    encode_labels,
    listed,
    no_label,
    number_fault,
)
from polyphily.graphs.files.columns import parse_numbers, read_column
from polyphily.graphs.files.schema import TableSchema, declared_columns
from polyphily.graphs.files.tables import MISSING, SUFFIXES, Table, arrow, read_table
from polyphily.graphs.graph import UNLABELLED, IntArray, Masks

SPLITS = {"train": 0, "val": 1, "valid": 1, "validation": 1, "test": 2, "": 3}
FILES = tuple(stem + suffix for stem in ("nodes", "edges") for suffix in SUFFIXES)

Floats = npt.NDArray[np.float64]
Result = TypeVar("Result")


def read_folder(folder: Path, schema: TableSchema, *, labels_required: bool = True) -> ClientFile:
    """Read the graph in the tables of nodes and edges of a folder.

    Args:
        folder: the folder.
        schema: what the columns mean.
        labels_required: whether the nodes must have a column of labels.

    Raises:
        UserError: with all faults of both tables.
    """
    arrow()  # a missing package is not a fault of the files
    errors: list[UserError] = []
    nodes = _attempt(errors, lambda: _read_nodes(folder, schema, labels_required))
    edges = _attempt(errors, lambda: _read_edges(folder, schema, _known_ids(nodes)))
    if nodes and (error := nodes.table.error()):
        errors.insert(0, error)
    if edges and (error := edges.table.error()):
        errors.append(error)
    if errors:
        raise FileFaults.merged(errors)
    assert nodes is not None
    assert edges is not None
    assert edges.ends is not None
    num_nodes = nodes.table.num_rows
    return ClientFile(
        path=nodes.table.path,
        features=None,
        columns=nodes.columns,
        edges=edges.ends,
        labels=nodes.labels,
        classes=nodes.classes,
        own_masks=(nodes.masks,) if nodes.masks else (),
        node_ids=_node_ids(nodes.ids),
        edge_weights=edges.weights,
        directed=schema.directed,
        edge_types=edges.types,
        relations=edges.relations,
        schema=schema,
        ignored=(*nodes.table.unused, *edges.table.unused),
        notes=(*edge_notes(edges.ends, num_nodes), *nodes.notes, *edges.notes),
    )


def _known_ids(nodes: _Nodes | None) -> Any:
    """Return the ids of the nodes to check edges with; None if rows of the table are left out."""
    return None if nodes is None or nodes.table.ragged else nodes.ids


class _Nodes(NamedTuple):
    table: Table
    ids: Any
    columns: tuple[RawColumn, ...]
    labels: IntArray
    classes: tuple[str, ...]
    masks: Masks | None
    notes: list[str]


class _Edges(NamedTuple):
    table: Table
    ends: IntArray | None
    weights: Floats | None
    types: IntArray | None
    relations: tuple[str, ...]
    notes: list[str]


def _attempt(errors: list[UserError], work: Callable[[], Result]) -> Result | None:
    """Return the result of `work`; None if it fails, with its error added to the list."""
    try:
        return work()
    except UserError as error:
        errors.append(error)
        return None


def table_path(folder: Path, stem: str) -> Path:
    """Return the file of the nodes or of the edges in a folder."""
    paths = [folder / (stem + suffix) for suffix in SUFFIXES]
    present = [path for path in paths if path.is_file()]
    if len(present) == 1:
        return present[0]
    if present:
        names = " and ".join(path.name for path in present)
        raise UserError(f"{folder}: has both {names}: remove one of them")
    found = sorted(path.name for path in folder.iterdir())
    raise UserError(
        f"{folder}: no {stem}.csv or {stem}.parquet (found: {listed(found) or 'nothing'}): "
        "a client's folder needs nodes and edges, or one .npz or .pt file"
    )


def _read_nodes(folder: Path, schema: TableSchema, labels_required: bool) -> _Nodes:
    roles = (schema.id, schema.label, schema.split)
    required = [schema.id, *([schema.label] if labels_required else [])]
    required += [schema.split] if "nodes.split" in schema.named else []

    def features(names: Sequence[str]) -> list[str]:
        wanted = names if schema.features is None else schema.features
        usable = {*names} - {*roles, *schema.ignore}
        return [name for name in wanted if name in usable]

    path = table_path(folder, "nodes")
    table = read_table(path, schema, required=required, text=roles, others=features)
    _check_declared(table, schema)
    names = features(table.names)
    if not names:
        raise UserError(
            f"{path}: no feature column: every column except {listed(roles)} is one. If the "
            "nodes have no features, add a column of ones"
        )
    if not table.num_rows and not table.ragged:
        raise UserError(f"{path}: has a header but no nodes: give at least one")
    read = [read_column(table, name, schema) for name in names]
    notes = [note for _, found in read for note in found]
    ids = table.columns[schema.id]
    _check_ids(table, schema.id)
    if schema.label in table.columns:
        distinct, codes = _distinct(table.columns[schema.label])
        notes += _missing_label_notes(distinct, codes, schema.missing)
        labels, classes = encode_labels(distinct, codes, schema.missing)
        masks = _masks(table, labels, schema) if schema.split in table.columns else None
    else:
        labels, classes, masks = np.full(table.num_rows, UNLABELLED, dtype=np.int64), (), None
        notes.append(f"no column '{schema.label}': no node has a label")
    return _Nodes(table, ids, tuple(column for column, _ in read), labels, classes, masks, notes)


def _check_declared(table: Table, schema: TableSchema) -> None:
    """Refuse a schema that names feature columns which the table does not have."""
    lacking = [
        UserError(f"{schema.path}, {key}: {unknown('column', column, table.names)} ({table.path})")
        for key, column in declared_columns(schema)
        if column not in table.names
    ]
    if lacking:
        raise FileFaults.merged(lacking)


def _missing_label_notes(texts: list[str], codes: IntArray, missing: Sequence[str]) -> list[str]:
    """Return notes on label texts that are read as missing labels."""
    return [
        f"{count(int((codes == i).sum()), 'label')} '{text}' read as missing"
        for i, text in enumerate(texts)
        if text and text.lower() in MISSING_LABELS and text not in missing
    ]


def _check_ids(table: Table, name: str) -> None:
    """Add faults for ids that are empty or repeated."""
    pa, column = arrow(), table.columns[name]
    first = _position_in(column, column)
    empty = pa.compute.equal(column, "").to_numpy()
    table.add_faults(empty, name, "is empty: every node needs an id")
    repeated = np.flatnonzero((first != np.arange(len(first))) & ~empty)
    if len(repeated):
        earlier = table.place(int(first[repeated[0]]))
        table.add_faults(
            repeated[:1],
            name,
            lambda cell: (
                f"'{cell.strip()}' is the id of {earlier} already: give every node its own"
            ),
        )
        table.add_faults(
            repeated[1:],
            name,
            lambda cell: f"'{cell.strip()}' is the id of an earlier node: give every node its own",
        )


def _node_ids(column: Any) -> npt.NDArray[np.generic]:
    """Return the ids of the nodes, as integers if all are."""
    pa = arrow()
    try:
        numbers = column.cast(pa.int64())
    except pa.ArrowInvalid:
        return np.array(column.to_pylist())
    if not numbers.cast(pa.string()).equals(column):
        return np.array(column.to_pylist())
    integers: IntArray = numbers.to_numpy()
    return integers


def _masks(table: Table, labels: IntArray, schema: TableSchema) -> Masks | None:
    words, codes = _distinct(table.columns[schema.split])
    unknown_words = np.array([word.lower() not in SPLITS for word in words], dtype=np.bool_)
    if unknown_words.any():
        table.add_faults(
            unknown_words[codes],
            schema.split,
            lambda cell: f"unknown word '{cell.strip()}': write train, val, test or nothing",
        )
        return None
    part = np.array([SPLITS[word.lower()] for word in words], dtype=np.int64)[codes]
    masks = Masks(train=part == 0, val=part == 1, test=part == 2)
    unlabelled = (part < 3) & (labels == UNLABELLED)
    if unlabelled.any():
        ids, rows = table.columns[schema.id], np.flatnonzero(unlabelled)
        for row in rows[: FileFaults.SHOWN].tolist():
            table.add_fault(row, schema.label, no_label(f"node '{ids[row]}'"))
        table.num_faults += max(len(rows) - FileFaults.SHOWN, 0)
        return None
    if not masks.train.any():
        table.add_general(f"column '{schema.split}': {NO_TRAIN}")
    return masks


def _read_edges(folder: Path, schema: TableSchema, ids: Any) -> _Edges:
    roles = [role for role in (schema.weight, schema.type) if role not in schema.edges_ignore]
    named = [
        getattr(schema, role) for role in ("weight", "type") if f"edges.{role}" in schema.named
    ]
    ends = (schema.source, schema.target)
    path = table_path(folder, "edges")
    table = read_table(
        path,
        schema,
        required=(*ends, *named),
        text=[*ends, schema.type][: 3 if schema.type in roles else 2],
        others=lambda names: [name for name in roles if name in names],
    )
    positions = None
    if ids is not None:
        positions = np.stack([_positions(table, side, ids) for side in ends])
    weights = _weights(table, schema) if schema.weight in table.columns else None
    types: IntArray | None = None
    relations: tuple[str, ...] = ()
    if schema.type in table.columns:
        types, relations = _types(table, schema)
    unused = [name for name in table.unused if name not in schema.edges_ignore]
    notes = [f"{listed(unused)} of {path.name} ignored"] if unused else []
    if weights is not None and (zero := int((weights == 0).sum())):
        notes.append(f"{count(zero, 'edge')} of weight 0 removed")
    return _Edges(table, positions, weights, types, relations, notes)


def _positions(table: Table, side: str, ids: Any) -> IntArray:
    """Return the position of the node at one end of every edge."""
    positions = _position_in(table.columns[side], ids)
    unknown_ends = positions < 0
    if unknown_ends.any():
        table.add_faults(
            unknown_ends,
            side,
            lambda cell: (
                (f"no node has the id '{cell.strip()}'" if cell.strip() else "is empty")
                + ": write an id of the nodes, or remove the edge"
            ),
        )
    return positions


def _weights(table: Table, schema: TableSchema) -> Floats:
    """Return the weights of the edges. Those that are not finite or negative are faults."""
    values = parse_numbers(table.columns[schema.weight], schema)
    fitting = (values >= 0) & (values < FLOAT32_OVERFLOW)  # False for NaN

    def reason(cell: str) -> str:
        text = cell.strip().replace(schema.decimal, ".")
        if not text or text.lower() in (*MISSING, *(word.lower() for word in schema.missing)):
            return "is empty: every edge needs a weight"
        if fault := number_fault(text):
            return fault.partition(":")[0] + ": a weight is a finite number from 0"
        return f"'{cell.strip()}' is negative: a weight is a finite number from 0"

    table.add_faults(~fitting, schema.weight, reason)
    return values


def _types(table: Table, schema: TableSchema) -> tuple[IntArray, tuple[str, ...]]:
    """Return the type of every edge as a position in the sorted names, and the names."""
    found, codes = _distinct(table.columns[schema.type])
    empty = np.array([not text for text in found], dtype=np.bool_)
    table.add_faults(
        np.append(empty, False)[codes], schema.type, "is empty: every edge needs a type"
    )
    names = sorted(text for text in found if text)
    if len(names) > MOST_RELATIONS:
        table.add_general(
            f"column '{schema.type}' has {len(names):,} types of edges, and {MOST_RELATIONS} is "
            "the most: merge some, or ignore the column in schema.toml: [edges] ignore = "
            f'["{schema.type}"]'
        )
    position = {name: i for i, name in enumerate(names)}
    renumbered = np.array([position.get(text, 0) for text in found], dtype=np.int64)
    return renumbered[codes], tuple(names)


def _distinct(column: Any) -> tuple[list[str], IntArray]:
    """Return the distinct texts of a column, and the position of each row's text in them."""
    texts = arrow().compute.unique(column)
    return texts.to_pylist(), _position_in(column, texts)


def _position_in(column: Any, texts: Any) -> IntArray:
    """Return where each entry of a column first occurs in `texts`, or -1."""
    found = arrow().compute.index_in(column, value_set=texts).fill_null(-1)
    positions: IntArray = found.to_numpy().astype(np.int64)
    return positions
