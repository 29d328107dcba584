"""Reading graphs from files of the user: a folder of clients, one client's folder, or one file.

A client is a folder with a table of nodes (columns `id`, `label`, optionally `split`, and one
column per feature) and a table of edges (columns `source` and `target`, optionally `weight` and
`type`), as CSV or parquet. `schema.toml` maps other names. Or a client is an `.npz` or `.pt` file
of arrays. Files are never unpickled. `docs/data.md` describes all of this.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, cast

import numpy as np

from polyphily.errors import FileFaults, UserError
from polyphily.graphs.columns import named_columns
from polyphily.graphs.files import arrays, folder
from polyphily.graphs.files.client import ClientFile, RawColumn, count, is_whole, listed
from polyphily.graphs.files.columns import as_kind
from polyphily.graphs.files.schema import FILE as SCHEMA
from polyphily.graphs.files.schema import TableSchema, read_schema
from polyphily.graphs.graph import UNLABELLED, Collection, Graph

__all__ = ["collect", "read", "read_clients"]

DISTINCT = 0.9  # the share of different texts from which a column holds names, not categories
DISTINCT_FROM = 50  # values that a column must have for this judgement


def read(
    path: Path,
    *,
    labels: Literal["required", "optional"] = "required",
    schema: Path | None = None,
    kinds: Mapping[str, str] | None = None,
) -> Collection:
    """Read the clients at `path`, in the order of their names, with one list of classes.

    Args:
        path: a folder with a sub-folder, an `.npz` or a `.pt` file per client; or one client's
            folder; or one client's `.npz` or `.pt` file.
        labels: whether nodes must have labels. If they are optional, as in prediction, the column
            may be missing, and columns of nearly distinct texts are kept.
        schema: the `schema.toml` to use; unless given, the one beside the tables of a client or in
            the folder above.
        kinds: the expected kinds of feature columns that `schema.toml` does not declare, such as
            those that a model was trained on.

    Raises:
        UserError: for files that cannot be used. It lists the faults of all clients, each with the
            file and, if possible, the line and the column.
    """
    clients, notes = read_clients(path, labels=labels, schema=schema, kinds=kinds)
    return collect(path, clients, notes)


def read_clients(
    path: Path,
    *,
    labels: Literal["required", "optional"] = "required",
    schema: Path | None = None,
    kinds: Mapping[str, str] | None = None,
) -> tuple[dict[str, ClientFile], list[str]]:
    """Return the clients by name, with columns of one order and kind, and notes on the data.

    The arguments are those of `read`.
    """
    try:
        sources, notes = _sources(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    find = _SchemaFinder(schema, kinds or {})
    clients: dict[str, ClientFile] = {}
    errors: list[UserError] = []
    for source in sources:
        try:
            clients[_name(source)] = _read_client(source, find(source), labels == "required")
        except OSError as error:
            errors.append(_unreadable(source, error))
        except UserError as error:
            errors.append(error)
    if errors:
        raise errors[0] if len(errors) == 1 else FileFaults.merged(errors)
    _check_splits(clients)
    clients = _align_columns(clients)
    clients = _align_kinds(clients)
    if labels == "required":
        clients, found = _without_distinct(clients)
        notes += found
    return clients, notes


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"{error.filename or path}: cannot be read: {error.strerror or error}")


class _SchemaFinder:
    """Finds the schema of a client and reads each file once."""

    def __init__(self, given: Path | None, kinds: Mapping[str, str]) -> None:
        self._given, self._kinds = given, kinds
        self._read: dict[Path | None, TableSchema] = {None: TableSchema(expected=kinds)}

    def __call__(self, source: Path) -> TableSchema:
        absolute = Path(os.path.abspath(source))
        places = [absolute.parent] if source.is_file() else [absolute, absolute.parent]
        beside = (place / SCHEMA for place in places)
        path = self._given or next((file for file in beside if file.is_file()), None)
        if path not in self._read:
            self._read[path] = replace(read_schema(cast(Path, path)), expected=self._kinds)
        return self._read[path]


def collect(path: Path, clients: dict[str, ClientFile], notes: Sequence[str] = ()) -> Collection:
    """Return the clients' graphs with one list of classes and of types of edges."""
    classes = _union(client.classes for client in clients.values())
    relations = _union(client.relations for client in clients.values())
    return Collection(
        name=_name(path),
        graphs=tuple(_graph(name, client, classes, relations) for name, client in clients.items()),
        classes=classes,
        natural=True,
        notes=(
            *notes,
            *(f"{name}: {', '.join(c.notes)}" for name, c in clients.items() if c.notes),
        ),
        feature_names=next(
            (tuple(x.name for x in c.columns) for c in clients.values() if c.columns), ()
        ),
    )


def _sources(path: Path) -> tuple[list[Path], list[str]]:
    """Return the clients' folders and files at `path`, and notes on files that are ignored."""
    if not path.exists():
        raise UserError(f"{path}: no such file or folder")
    if path.is_file():
        if path.suffix not in arrays.SUFFIXES:
            raise UserError(
                f"{path}: not a graph: give an .npz or .pt file, or the folder with the files of "
                "nodes and edges"
            )
        return [path], []
    entries = _visible(path)
    if any(entry.name in folder.FILES for entry in entries):
        return [path], []
    clients = [entry for entry in entries if entry.is_dir() or entry.suffix in arrays.SUFFIXES]
    if not clients:
        raise UserError(
            f"{path}: no client found: every client needs a folder with nodes and edges, or an "
            f".npz or .pt file (found: {listed(entry.name for entry in entries) or 'nothing'})"
        )
    for name, times in Counter(map(_name, clients)).items():
        if times > 1:
            raise UserError(f"{path}: {times} clients are named '{name}': rename or remove one")
    stray = [entry.name for entry in entries if entry not in clients and entry.name != SCHEMA]
    return sorted(clients, key=_name), [f"{listed(stray)} ignored: not a client"] if stray else []


def _visible(path: Path) -> list[Path]:
    return sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))


def _name(source: Path) -> str:
    return source.stem if source.suffix in arrays.SUFFIXES else Path(os.path.abspath(source)).name


def _read_client(source: Path, schema: TableSchema, labels_required: bool) -> ClientFile:
    if source.is_file():
        return arrays.read_arrays(source, schema, labels_required=labels_required)
    entries = _visible(source)
    tables = [entry for entry in entries if entry.name in folder.FILES]
    files = [entry for entry in entries if entry.suffix in arrays.SUFFIXES]
    if len(files) > 1 or (files and tables):
        names = listed(entry.name for entry in tables + files)
        raise UserError(f"{source}: more than one graph ({names}): keep one")
    if files:
        client = arrays.read_arrays(files[0], schema, labels_required=labels_required)
    else:
        client = folder.read_folder(source, schema, labels_required=labels_required)
    known = [*tables, *files, source / SCHEMA]
    stray = [entry.name for entry in entries if entry not in known]
    notes = (f"{listed(stray)} in its folder ignored",) if stray else ()
    return replace(client, notes=client.notes + notes)


def _check_splits(clients: dict[str, ClientFile]) -> None:
    split = [name for name, client in clients.items() if client.own_masks]
    unsplit = [name for name, client in clients.items() if not client.own_masks]
    if split and unsplit:
        raise UserError(
            f"client '{split[0]}' ({clients[split[0]].path}) has a split and client "
            f"'{unsplit[0]}' ({clients[unsplit[0]].path}) has none: give all clients one, or none"
        )


def _align_columns(clients: dict[str, ClientFile]) -> dict[str, ClientFile]:
    """Return the clients with feature columns in the order of the first that names them."""
    first = next((n for n, c in clients.items() if c.columns is not None), next(iter(clients)))
    return {name: _align(name, client, first, clients[first]) for name, client in clients.items()}


def _align(name: str, client: ClientFile, first: str, model: ClientFile) -> ClientFile:
    if client is model:
        return client
    if client.columns is None or model.columns is None:
        ours, theirs = _width(client), _width(model)
        if ours != theirs:
            raise UserError(
                f"client '{first}' ({model.path}) has {count(theirs, 'feature')} and client "
                f"'{name}' ({client.path}) has {ours}: give all clients the same features"
            )
        if model.columns is None:
            return client
        return _named(client, model.columns, f"x taken in the order of {first}'s columns")
    columns = {column.name: column for column in client.columns}
    names = [column.name for column in model.columns]
    lacking = [column for column in names if column not in columns]
    known = set(names)
    added = [column for column in columns if column not in known]
    if lacking or added:
        only = [
            f"{listed(columns)} only in client '{owner}' ({path})"
            for columns, owner, path in ((lacking, first, model.path), (added, name, client.path))
            if columns
        ]
        raise UserError(
            f"clients '{first}' and '{name}' have different feature columns: {'; '.join(only)}. "
            "Give all clients the same columns"
        )
    return replace(client, columns=tuple(columns[column] for column in names))


def _align_kinds(clients: dict[str, ClientFile]) -> dict[str, ClientFile]:
    """Return the clients with columns of one kind, if values of each can be of that kind."""
    tables = {name: client.columns for name, client in clients.items() if client.columns}
    if len(tables) < 2:
        return clients
    aligned: dict[str, list[RawColumn]] = {name: [] for name in tables}
    errors: list[UserError] = []
    for columns in zip(*tables.values(), strict=True):
        agreed = _of_one_kind(columns)
        if agreed is None:
            kinds = {
                column.kind: f"{column.kind} in client '{name}' ({clients[name].path})"
                for name, column in zip(tables, columns, strict=True)
                if not column.missing.all()
            }
            errors.append(
                UserError(
                    f"column '{columns[0].name}' is a {', a '.join(kinds.values())}: declare its "
                    f"kind in {SCHEMA}, [nodes.kinds]"
                )
            )
        else:
            for name, column in zip(tables, agreed, strict=True):
                aligned[name].append(column)
    if errors:
        raise errors[0] if len(errors) == 1 else FileFaults.merged(errors)
    return clients | {
        name: replace(clients[name], columns=tuple(columns)) for name, columns in aligned.items()
    }


def _of_one_kind(columns: Sequence[RawColumn]) -> list[RawColumn] | None:
    kinds = {column.kind for column in columns}
    if len(kinds) == 1:
        return list(columns)
    kinds = {column.kind for column in columns if not column.missing.all()} or {"number"}
    for kind in sorted(kinds, key=("date", "category", "boolean", "number").index):
        agreed = [as_kind(column, kind) for column in columns]
        if None not in agreed:
            return [column for column in agreed if column is not None]
    return None


def _without_distinct(
    clients: dict[str, ClientFile],
) -> tuple[dict[str, ClientFile], list[str]]:
    """Return the clients without text columns whose values nearly all differ, and a note."""
    tables = {name: client.columns for name, client in clients.items() if client.columns}
    dropped = []
    for columns in zip(*tables.values(), strict=True):
        name = columns[0].name
        if any(clients[client].schema.kind(name) for client in tables):
            continue
        distinct = sum(len(column.texts) for column in columns)
        if distinct < DISTINCT * DISTINCT_FROM:
            continue
        given = sum(int((~column.missing).sum()) for column in columns)
        if given >= DISTINCT_FROM and distinct >= DISTINCT * given:
            dropped.append(name)
    if not dropped:
        return clients, []
    kept = {
        name: replace(
            clients[name],
            columns=tuple(column for column in table if column.name not in dropped),
            ignored=(*clients[name].ignored, *dropped),
        )
        for name, table in tables.items()
    }
    first = next(iter(kept.values()))
    note = f"{listed(dropped)} ignored: nearly every value is different"
    if not first.columns:
        raise UserError(f"{first.path}: no feature column is left: {note}")
    return clients | kept, [f"{note} (to use such a column, declare its kind in {SCHEMA})"]


def _named(client: ClientFile, columns: Iterable[RawColumn], note: str) -> ClientFile:
    """Return a client whose array of features has become columns of numbers with names."""
    assert client.features is not None
    numbers = named_columns(client.features, [column.name for column in columns])
    return replace(client, features=None, columns=numbers, notes=(*client.notes, note))


def _width(client: ClientFile) -> int:
    if client.columns is not None:
        return len(client.columns)
    return 0 if client.features is None else client.features.shape[1]


def _union(vocabularies: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Return all class names, sorted as numbers if all are whole numbers, otherwise as text."""
    names = sorted({name for vocabulary in vocabularies for name in vocabulary})
    return tuple(sorted(names, key=int) if all(map(is_whole, names)) else names)


def _graph(
    name: str, client: ClientFile, classes: tuple[str, ...], relations: tuple[str, ...]
) -> Graph:
    position = {label: i for i, label in enumerate(classes)}
    table = np.array([*(position[label] for label in client.classes), UNLABELLED])
    types = client.edge_types
    if types is not None:
        types = np.array([relations.index(r) for r in client.relations], dtype=np.int64)[types]
    nothing = np.zeros((len(client.labels), 0), dtype=np.float32)  # until `load` encodes the table
    graph = Graph.build(
        nothing if client.features is None else client.features,
        client.edges,
        table[client.labels],
        edge_weights=client.edge_weights,
        directed=client.directed,
        edge_types=types,
        relations=() if types is None else relations,
        own_masks=client.own_masks,
        name=name,
        node_ids=client.node_ids,
    )
    return replace(graph, table=_declared(client))


def _declared(client: ClientFile) -> tuple[RawColumn, ...] | None:
    """Return the columns of a table, with what the schema declares about each."""
    if client.columns is None:
        return None
    categories, scale = client.schema.categories, client.schema.scale
    return tuple(
        replace(c, categories=tuple(categories.get(c.name, ())), scale=scale.get(c.name))
        for c in client.columns
    )
