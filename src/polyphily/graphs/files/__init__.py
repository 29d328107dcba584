"""Reading graphs from files of the user: a folder of clients, one client's folder, or one file.

A client is a folder with `nodes.csv` (columns `id`, `label`, optionally `split`, and one column per
feature) and `edges.csv` (columns `source` and `target`). Each may be `.parquet` instead. Or a
client is an `.npz` or `.pt` file with `x`, `edge_index`, `y` and optionally `train_mask`,
`val_mask` and `test_mask`. Files are never unpickled.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from polyphily.errors import UserError
from polyphily.graphs.files import arrays, folder
from polyphily.graphs.files.client import ClientFile, count, is_whole, listed
from polyphily.graphs.graph import UNLABELLED, Collection, Graph

__all__ = ["read"]


def read(path: Path) -> Collection:
    """Read the clients at `path`, in the order of their names, with one list of classes.

    Args:
        path: a folder with a sub-folder, an `.npz` or a `.pt` file per client; or one client's
            folder; or one client's `.npz` or `.pt` file.

    Raises:
        UserError: for a file that cannot be used. It names the file and, if possible, the line and
            the column.
    """
    try:
        sources, notes = _sources(path)
        clients = {_name(source): _read_client(source) for source in sources}
    except OSError as error:
        place, reason = error.filename or path, error.strerror or error
        raise UserError(f"{place}: cannot be read: {reason}") from error
    _check_splits(clients)
    clients = _align_features(clients)
    classes = _union(client.classes for client in clients.values())
    return Collection(
        name=_name(path),
        graphs=tuple(_graph(name, client, classes) for name, client in clients.items()),
        classes=classes,
        natural=True,
        notes=(
            *notes,
            *(f"{name}: {', '.join(c.notes)}" for name, c in clients.items() if c.notes),
        ),
        feature_names=next((c.feature_names for c in clients.values() if c.feature_names), ()),
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
    stray = [entry.name for entry in entries if entry not in clients]
    return sorted(clients, key=_name), [f"{listed(stray)} ignored: not a client"] if stray else []


def _visible(path: Path) -> list[Path]:
    return sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))


def _name(source: Path) -> str:
    return source.stem if source.suffix in arrays.SUFFIXES else Path(os.path.abspath(source)).name


def _read_client(source: Path) -> ClientFile:
    if source.is_file():
        return arrays.read_arrays(source)
    entries = _visible(source)
    tables = [entry for entry in entries if entry.name in folder.FILES]
    files = [entry for entry in entries if entry.suffix in arrays.SUFFIXES]
    if len(files) > 1 or (files and tables):
        names = listed(entry.name for entry in tables + files)
        raise UserError(f"{source}: more than one graph ({names}): keep one")
    client = arrays.read_arrays(files[0]) if files else folder.read_folder(source)
    stray = [entry.name for entry in entries if entry not in tables + files]
    notes = (f"{listed(stray)} in its folder ignored",) if stray else ()
    return replace(client, notes=client.notes + notes)


def _check_splits(clients: dict[str, ClientFile]) -> None:
    split = [name for name, client in clients.items() if client.masks]
    unsplit = [name for name, client in clients.items() if not client.masks]
    if split and unsplit:
        raise UserError(
            f"client '{split[0]}' ({clients[split[0]].path}) has a split and client "
            f"'{unsplit[0]}' ({clients[unsplit[0]].path}) has none: give all clients one, or none"
        )


def _align_features(clients: dict[str, ClientFile]) -> dict[str, ClientFile]:
    """Return the clients with feature columns in the order of the first that names them."""
    first = next(
        (n for n, c in clients.items() if c.feature_names is not None), next(iter(clients))
    )
    return {name: _align(name, client, first, clients[first]) for name, client in clients.items()}


def _align(name: str, client: ClientFile, first: str, model: ClientFile) -> ClientFile:
    if client is model:
        return client
    if client.feature_names is None or model.feature_names is None:
        ours, theirs = client.features.shape[1], model.features.shape[1]
        if ours != theirs:
            raise UserError(
                f"client '{first}' ({model.path}) has {count(theirs, 'feature')} and client "
                f"'{name}' ({client.path}) has {ours}: give all clients the same features"
            )
        if model.feature_names is None:
            return client
        return replace(client, notes=(*client.notes, f"x taken in the order of {first}'s columns"))
    position = {column: i for i, column in enumerate(client.feature_names)}
    lacking = [column for column in model.feature_names if column not in position]
    added = sorted(position.keys() - set(model.feature_names), key=position.__getitem__)
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
    order = [position[column] for column in model.feature_names]
    return replace(client, features=client.features[:, order], feature_names=model.feature_names)


def _union(vocabularies: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Return all class names, sorted as numbers if all are whole numbers, otherwise as text."""
    names = sorted({name for vocabulary in vocabularies for name in vocabulary})
    return tuple(sorted(names, key=int) if all(map(is_whole, names)) else names)


def _graph(name: str, client: ClientFile, classes: tuple[str, ...]) -> Graph:
    position = {label: i for i, label in enumerate(classes)}
    table = np.array([*(position[label] for label in client.classes), UNLABELLED])
    return Graph.build(
        client.features,
        client.edges,
        table[client.labels],
        own_masks=(client.masks,) if client.masks else (),
        name=name,
        node_ids=client.node_ids,
    )
