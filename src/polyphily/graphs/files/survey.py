"""What the files of clients hold: nodes, edges, classes and columns, for `polyphily check`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np

from polyphily.graphs.files import collect, read_clients
from polyphily.graphs.files.client import ClientFile, RawColumn, listed
from polyphily.graphs.graph import Graph

EPOCH = datetime(1970, 1, 1)


@dataclass(frozen=True)
class ColumnSurvey:
    """A feature column of one client.

    Attributes:
        name: the name of the column.
        kind: "number", "boolean", "date" or "category".
        missing: the share of nodes without a value.
        low: the smallest number, or the earliest date in ISO form; None if there is none.
        high: the largest number, or the latest date.
        categories: the number of categories; None for other kinds.
        common: the most frequent categories, at most five.
        true: the share of true among the values of a boolean column; None for other kinds.
    """

    name: str
    kind: str
    missing: float
    low: float | str | None = None
    high: float | str | None = None
    categories: int | None = None
    common: tuple[str, ...] = ()
    true: float | None = None


@dataclass(frozen=True)
class ClientSurvey:
    """The graph of one client.

    Attributes:
        name: the name of the client.
        path: the file of the nodes.
        nodes: the number of nodes.
        edges: the number of undirected edges, without self-loops and repeats.
        labelled: the number of nodes with a label.
        classes: the number of nodes of every class, also of those that only other clients have.
        splits: the number of splits that come with the data.
        split: the number of train, val and test nodes of the first split; empty if there is none.
        weights: the smallest and the largest weight of an edge; None if edges have none.
        directed: whether edges have a direction.
        relations: the number of neighbouring pairs of every type of edges.
        columns: the feature columns of a table.
        features: the number of features of a file of arrays; None for a table.
        ignored: columns that are not used.
        notes: what was removed, merged or ignored.
    """

    name: str
    path: str
    nodes: int
    edges: int
    labelled: int
    classes: Mapping[str, int]
    splits: int
    split: Mapping[str, int]
    weights: tuple[float, float] | None
    directed: bool
    relations: Mapping[str, int]
    columns: tuple[ColumnSurvey, ...]
    features: int | None
    ignored: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Survey:
    """The graphs of all clients.

    Attributes:
        clients: each client's graph.
        notes: remarks on the data of all clients.
        warnings: what is no fault, but may be a mistake.
    """

    clients: tuple[ClientSurvey, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


def survey(path: Path, schema: Path | None = None) -> Survey:
    """Read the clients at `path` as `polyphily run` does and return what was found.

    Args:
        path: a folder or file as for `read`.
        schema: the `schema.toml` to use; unless given, the one beside the files.

    Raises:
        UserError: with the faults of all files.
    """
    files, notes = read_clients(path, schema=schema)
    collection = collect(path, files)
    clients = tuple(
        _survey_client(graph, files[graph.name], collection.classes) for graph in collection.graphs
    )
    return Survey(clients, tuple(notes), tuple(_warnings(clients)))


def _survey_client(graph: Graph, file: ClientFile, classes: tuple[str, ...]) -> ClientSurvey:
    counts = np.bincount(graph.labels[graph.labels >= 0], minlength=len(classes))
    first = file.own_masks[0] if file.own_masks else None
    weights = graph.edge_weights
    types = graph.edge_types
    return ClientSurvey(
        name=graph.name,
        path=str(file.path),
        nodes=graph.num_nodes,
        edges=graph.num_edges,
        labelled=int(counts.sum()),
        classes=dict(zip(classes, counts.tolist(), strict=True)),
        splits=len(file.own_masks),
        split={n: int(getattr(first, n).sum()) for n in ("train", "val", "test")} if first else {},
        weights=(float(weights.min()), float(weights.max()))
        if weights is not None and len(weights)
        else None,
        directed=graph.arcs is not None,
        relations={}
        if types is None
        else {name: int((types >> r & 1).sum()) // 2 for r, name in enumerate(graph.relations)},
        columns=tuple(survey_column(column) for column in file.columns or ()),
        features=None if file.features is None else int(file.features.shape[1]),
        ignored=file.ignored,
        notes=file.notes,
    )


def survey_column(column: RawColumn) -> ColumnSurvey:
    """Return what a column holds."""
    given = ~column.missing
    missing = 1 - float(given.mean()) if len(given) else 0.0
    values = column.values[given]
    if column.kind == "category":
        counts = np.bincount(values, minlength=len(column.texts))
        order = np.argsort(-counts, kind="stable")[:5].tolist()
        common = tuple(column.texts[i] for i in order)
        return ColumnSurvey(
            column.name, column.kind, missing, categories=int((counts > 0).sum()), common=common
        )
    if not len(values):
        return ColumnSurvey(column.name, column.kind, missing)
    low, high = float(values.min()), float(values.max())
    if column.kind == "boolean":
        return ColumnSurvey(column.name, column.kind, missing, true=float(values.mean()))
    if column.kind == "date":
        return ColumnSurvey(column.name, column.kind, missing, _date(low), _date(high))
    return ColumnSurvey(column.name, column.kind, missing, low, high)


def _date(days: float) -> str:
    """Return a number of days since 1970 as a date in ISO form.

    >>> _date(1.0), _date(0.75)
    ('1970-01-02', '1970-01-01T18:00:00')
    """
    try:
        moment = EPOCH + timedelta(seconds=round(days * 86_400))
    except OverflowError:
        return f"{days:.0f} days after 1970"
    return moment.date().isoformat() if moment.time() == EPOCH.time() else moment.isoformat()


def _warnings(clients: tuple[ClientSurvey, ...]) -> list[str]:
    warnings = [f"client '{c.name}' has no labelled node" for c in clients if not c.labelled]
    present = {name for c in clients for name, count in c.classes.items() if count}
    if len(present) == 1:
        warnings.append(f"all labels are '{present.pop()}': there is nothing to predict")
    for client in clients:
        empty = [column.name for column in client.columns if column.missing == 1]
        if empty:
            warnings.append(f"client '{client.name}' has no value in column {listed(empty)}")
        if client.edges == 0:
            warnings.append(f"client '{client.name}' has no edge")
    return warnings
