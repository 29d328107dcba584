"""Messages between server and sites: JSON for words and numbers, safetensors for tensors.

Neither can make the reader run code. What arrives is checked by whoever reads it: sizes, names,
shapes and types before anything is computed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from polyphily.core.local import Message

HELLO, PREPARE, ROUND, FINISH, CLOSE = "hello", "prepare", "round", "finish", "close"
KEYS, SHARE, REVEAL = "keys", "share", "reveal"  # of secure aggregation: flower/masks.py
KINDS = (HELLO, PREPARE, KEYS, SHARE, ROUND, REVEAL, FINISH, CLOSE)
HEADER = 1 << 20  # bytes that names and JSON may take beside the tensors themselves


class WireError(Exception):
    """A message that cannot be used, and why."""


@dataclass(frozen=True)
class Parcel:
    """One message: words and numbers, and tensors with a leading client axis of one."""

    facts: Mapping[str, Any]
    tensors: Message = field(default_factory=dict)

    def pack(self) -> tuple[str, bytes]:
        """The two parts as text and bytes."""
        host = {n: t.detach().cpu().contiguous().clone() for n, t in self.tensors.items()}
        return json.dumps(self.facts, allow_nan=False), save(host)

    @classmethod
    def unpack(cls, text: str, blob: bytes) -> Parcel:
        try:
            facts = json.loads(text)
            tensors = load(blob)
        except (ValueError, SafetensorError) as error:
            raise WireError(f"unreadable message: {error}") from None
        if not isinstance(facts, dict):
            raise WireError("unreadable message: not a table of facts")
        return cls(facts, tensors)


def size(text: str, blob: bytes) -> int:
    return len(text.encode()) + len(blob)


@dataclass(frozen=True)
class Contract:
    """What an upload must look like: the shape and type of every tensor, by name."""

    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]

    @classmethod
    def of(cls, example: Message) -> Contract:
        return cls({name: (tuple(t.shape[1:]), t.dtype) for name, t in example.items()})

    @property
    def count(self) -> int:
        """How many numbers an upload has."""
        return sum(torch.Size(shape).numel() for shape, _ in self.tensors.values())

    @property
    def limit(self) -> int:
        """The largest message that can be right, in bytes."""
        numbers = 0
        for shape, dtype in self.tensors.values():
            numbers += int(torch.Size(shape).numel()) * dtype.itemsize
        return numbers + HEADER

    def check(self, upload: Message) -> None:
        """Raises a `WireError` that says what is wrong with an upload."""
        missing = sorted(self.tensors.keys() - upload.keys())
        strange = sorted(upload.keys() - self.tensors.keys())
        if missing or strange:
            raise WireError(
                "; ".join(
                    f"{words} {', '.join(names[:5])}"
                    for words, names in (("lacks", missing), ("has no business sending", strange))
                    if names
                )
            )
        for name, (shape, dtype) in self.tensors.items():
            tensor = upload[name]
            if tuple(tensor.shape) != (1, *shape):
                wanted = " × ".join(map(str, shape)) or "one number"
                found = " × ".join(map(str, tensor.shape[1:])) or "one number"
                raise WireError(f"{name} has the shape {found}, not {wanted}")
            if tensor.dtype != dtype:
                raise WireError(f"{name} has the type {tensor.dtype}, not {dtype}")
            if not torch.isfinite(tensor).all():
                raise WireError(f"{name} holds numbers that are not finite")
