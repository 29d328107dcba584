"""One client's graph as it was read: what the file formats have in common."""

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

FLOAT32_OVERFLOW = 2.0**128 - 2.0**103  # from here on a float32 rounds to infinity


@dataclass(frozen=True)
class ClientFile:
    """A client's graph before the clients have been brought onto common columns and classes.

    Attributes:
        path: where the nodes were read, for messages.
        feature_names: the names of the columns of `features`; None where the format has none.
        labels: positions in `classes`, the client's own, or `UNLABELLED`.
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
    """Why `value` cannot be a feature, or None where it can.

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
    """Labels and class names from each node's position in a list of label texts.

    An empty text is no label. Whole numbers written as `1.0`, as spreadsheets and data frames do in
    a column with gaps, are read as `1`.
    """
    given = [name for name in names if name]
    if all(re.fullmatch(r"[+-]?\d+\.0+", name) for name in given):
        names = [name.partition(".")[0] for name in names]
    classes = tuple(dict.fromkeys(filter(None, names)))
    position = {name: i for i, name in enumerate(classes)}
    table = np.array([position.get(name, UNLABELLED) for name in names], dtype=np.int64)
    return table[codes], classes


def is_whole(name: str) -> bool:
    return re.fullmatch(r"[+-]?[0-9]+", name) is not None


def check_masks(masks: Masks, labels: IntArray, split: str, node: Callable[[int], str]) -> None:
    """Refuse a split that trains on nothing, overlaps, or asks for a label that is not there.

    Args:
        split: how to name the split in a message.
        node: how to name a node by its position in a message.
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
            f"{node(int(missing.argmax()))} is in the split but has no label: label it, or leave "
            "it out of train, val and test"
        )
    if not masks.train.any():
        raise UserError(f"{split}: the split has no train node: mark some nodes as train")


def edge_notes(edges: IntArray, num_nodes: int) -> list[str]:
    """What `Graph.build` will remove: self-loops, and edges given twice in the same direction."""
    source, target = edges
    kept = source != target
    loops = int(kept.size - np.count_nonzero(kept))
    key = np.sort((source * num_nodes + target)[kept])
    repeats = int(np.count_nonzero(key[1:] == key[:-1]))
    notes = [f"{count(loops, 'self-loop')} removed"] if loops else []
    return notes + ([f"{count(repeats, 'repeated edge')} merged"] if repeats else [])


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(names: Iterable[str], limit: int = 10) -> str:
    """Names for a message, the first few where there are many.

    >>> listed(["a", "b", "c"], limit=2)
    "'a', 'b' and 1 more"
    """
    quoted = [f"'{name}'" for name in names]
    more = f" and {len(quoted) - limit} more" if len(quoted) > limit else ""
    return ", ".join(quoted[:limit]) + more
