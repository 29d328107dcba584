"""One client's graph as read from a file, and functions that the file formats share."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from polyphily.errors import UserError
from polyphily.graphs.files.schema import Scale, TableSchema
from polyphily.graphs.graph import UNLABELLED, BoolArray, Features, IntArray, Masks

FloatArray = npt.NDArray[np.float32]

FLOAT32_OVERFLOW = 2.0**128 - 2.0**103  # the smallest number that float32 rounds to infinity
MISSING_LABELS = ("", "nan")  # in lower case
NO_TRAIN = "the split has no train node: mark some nodes as train"


@dataclass(frozen=True)
class RawColumn:
    """A feature column of a table as it was read, before it is encoded.

    Attributes:
        name: the name of the column.
        kind: "number", "boolean", "date" or "category".
        values: numbers, booleans (0 and 1) and dates (days since 1970-01-01) as float64 `[n]`, with
            NaN for missing; categories as int64 positions in `texts`, with -1 for missing.
        texts: the distinct values of a category column.
        categories: the values that the schema declares for a category column, if it does.
        scale: the mean and the standard deviation that the schema declares, if it does.
    """

    name: str
    kind: str
    values: npt.NDArray[Any]
    texts: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    scale: Scale | None = None

    def take(self, nodes: IntArray) -> RawColumn:
        """Return the column of some nodes, in the order given."""
        return replace(self, values=self.values[nodes])

    @property
    def missing(self) -> BoolArray:
        """Which nodes have no value."""
        absent: BoolArray = self.values < 0 if self.kind == "category" else np.isnan(self.values)
        return absent


@dataclass(frozen=True)
class ClientFile:
    """A client's graph before columns and classes are aligned between clients.

    Attributes:
        path: the file of the nodes, for messages.
        features: `[n, f]` for a file of arrays; None for a table.
        columns: the feature columns of a table; None for a file of arrays.
        edges: `[2, m]`, as in the file.
        labels: positions in `classes`, or `UNLABELLED`.
        classes: the label names of this client.
        own_masks: the splits of the file, possibly none.
        node_ids: the ids of the nodes, if the file has any.
        edge_weights: float `[m]`, if the file has any.
        directed: whether the edges have a direction.
        edge_types: int64 `[m]`, positions in `relations`, if the file has any.
        relations: the names of the edges' types.
        schema: what `schema.toml` declares.
        ignored: columns of the tables that are not used.
        notes: what was removed, merged or ignored.
    """

    path: Path
    features: Features | None
    columns: tuple[RawColumn, ...] | None
    edges: IntArray
    labels: IntArray
    classes: tuple[str, ...]
    own_masks: tuple[Masks, ...]
    node_ids: npt.NDArray[np.generic] | None
    edge_weights: npt.NDArray[np.float64] | None = None
    directed: bool = False
    edge_types: IntArray | None = None
    relations: tuple[str, ...] = ()
    schema: TableSchema = field(default_factory=TableSchema)
    ignored: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def number_fault(value: object) -> str | None:
    """Return why `value` cannot be a feature, or None if it can.

    >>> number_fault("red")
    "'red' is not a number: encode it as numbers, or remove the column"
    """
    text = "" if value is None else str(value).strip()
    try:
        number = float(text)
    except ValueError:
        number = None
    if number is None or not text.isascii() or "_" in text:
        if not text:
            return "is empty: every node needs a value"
        return f"'{text}' is not a number: encode it as numbers, or remove the column"
    if abs(number) < FLOAT32_OVERFLOW:
        return None
    if math.isnan(number):
        return f"'{text}' is not a value (NaN): fill it in, or remove the node"
    if "inf" in text.lower():
        return f"'{text}' is infinite: write a finite number"
    return f"'{text}' is too large for a 32-bit float: rescale the column"


def encode_labels(
    names: Sequence[str], codes: IntArray, missing: Sequence[str] = ()
) -> tuple[IntArray, tuple[str, ...]]:
    """Return labels and class names from each node's position in a list of label texts.

    An empty text, "NaN" in any case and the texts of `missing` mean that a label is missing. Whole
    numbers written as `1.0`, as spreadsheets and data frames do in a column with gaps, are read
    as `1`.
    """
    absent = {*MISSING_LABELS, *(text.lower() for text in missing)}
    names = ["" if name.lower() in absent else name for name in names]
    given = [name for name in names if name]
    if all(re.fullmatch(r"[+-]?\d+\.0+", name) for name in given):
        names = [name.partition(".")[0] for name in names]
    classes = tuple(dict.fromkeys(filter(None, names)))
    position = {name: i for i, name in enumerate(classes)}
    table = np.array([position.get(name, UNLABELLED) for name in names], dtype=np.int64)
    return table[codes], classes


def is_whole(name: str) -> bool:
    """Return whether a text is a whole number."""
    return re.fullmatch(r"[+-]?[0-9]+", name) is not None


def check_masks(masks: Masks, labels: IntArray, split: str, node: Callable[[int], str]) -> None:
    """Refuse a split without train nodes, with overlaps, or with nodes that have no label.

    Args:
        masks: the split.
        labels: the labels of the nodes.
        split: the name of the split in messages.
        node: returns the name of a node in messages from its position.

    Raises:
        UserError: for such a split.
    """
    times = masks.train.astype(np.int8) + masks.val + masks.test
    if (times > 1).any():
        raise UserError(
            f"{node(int((times > 1).argmax()))} is in more than one of train, val and test: "
            "choose one"
        )
    missing = (times > 0) & (labels == UNLABELLED)
    if missing.any():
        raise UserError(no_label(node(int(missing.argmax()))))
    if not masks.train.any():
        raise UserError(f"{split}: {NO_TRAIN}")


def no_label(node: str) -> str:
    """Return the message for a node of the split that has no label."""
    return (
        f"{node} is in the split but has no label: label it, or remove it from train, val and test"
    )


def edge_notes(edges: IntArray, num_nodes: int) -> list[str]:
    """Return notes on what `Graph.build` removes: self-loops and repeated directed edges."""
    source, target = edges
    kept = source != target
    loops = int(kept.size - np.count_nonzero(kept))
    key = np.sort((source * num_nodes + target)[kept])
    repeats = int(np.count_nonzero(key[1:] == key[:-1]))
    notes = [f"{count(loops, 'self-loop')} removed"] if loops else []
    return notes + ([f"{count(repeats, 'repeated edge')} merged"] if repeats else [])


def count(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural if necessary."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(names: Iterable[str], limit: int = 10) -> str:
    """Return quoted names for a message, shortened if there are many.

    >>> listed(["a", "b", "c"], limit=2)
    "'a', 'b' and 1 more"
    """
    quoted = [f"'{name}'" for name in names]
    more = f" and {len(quoted) - limit} more" if len(quoted) > limit else ""
    return ", ".join(quoted[:limit]) + more
