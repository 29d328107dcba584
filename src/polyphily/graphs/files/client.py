"""One client's graph as read from a file, and functions that the file formats share."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from polyphily.errors import UserError
from polyphily.graphs.graph import UNLABELLED, IntArray, Masks

FloatArray = npt.NDArray[np.float32]

FLOAT32_OVERFLOW = 2.0**128 - 2.0**103  # the smallest number that float32 rounds to infinity
MISSING_LABELS = ("", "nan")  # in lower case


@dataclass(frozen=True)
class ClientFile:
    """A client's graph before columns and classes are aligned between clients.

    Attributes:
        path: the file of the nodes, for messages.
        features: `[n, f]`.
        feature_names: the names of the columns of `features`; None if the format has none.
        edges: `[2, m]`, as in the file.
        labels: positions in `classes`, or `UNLABELLED`.
        classes: the label names of this client.
        masks: the split, if the file has one.
        node_ids: the ids of the nodes, if the file has any.
        notes: what was removed, merged or ignored.
    """

    path: Path
    features: FloatArray
    feature_names: tuple[str, ...] | None
    edges: IntArray
    labels: IntArray
    classes: tuple[str, ...]
    masks: Masks | None
    node_ids: npt.NDArray[np.generic] | None
    notes: tuple[str, ...]


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


def encode_labels(names: Sequence[str], codes: IntArray) -> tuple[IntArray, tuple[str, ...]]:
    """Return labels and class names from each node's position in a list of label texts.

    An empty text and "NaN" in any case mean that a label is missing. Whole numbers written as
    `1.0`, as spreadsheets and data frames do in a column with gaps, are read as `1`.
    """
    names = ["" if name.lower() in MISSING_LABELS else name for name in names]
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
        raise UserError(
            f"{node(int(missing.argmax()))} is in the split but has no label: label it, or remove "
            "it from train, val and test"
        )
    if not masks.train.any():
        raise UserError(f"{split}: the split has no train node: mark some nodes as train")


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
