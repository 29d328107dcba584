"""Messages between server and sites: JSON for text and numbers, safetensors for tensors.

Neither format can make the reader run code. The reader checks sizes, names, shapes and types before
it computes with a message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors.torch import load, save

from polyphily.core.messages import Contract, Message, MessageError
from polyphily.graphs.checked import parse_json, plain

HELLO, PREPARE, ROUND, FINISH, CLOSE = "hello", "prepare", "round", "finish", "close"
MEASURE = "measure"  # asks for statistics of the train nodes: flower/agreeing.py
KEYS, SHARE = "keys", "share"  # these four are for secure aggregation: flower/masks.py
CONFIRM, REVEAL = "confirm", "reveal"
DISMISS = "dismiss"  # tells a site that it is left out of the run, and why
KINDS = (HELLO, MEASURE, PREPARE, KEYS, SHARE, ROUND, CONFIRM, REVEAL, FINISH, CLOSE, DISMISS)
HEADER = 1 << 20  # largest size of JSON and names of tensors, in bytes


class WireError(Exception):
    """A message cannot be used. The text gives the reason."""


@dataclass(frozen=True)
class Parcel:
    """One message: facts as JSON, and tensors with a leading client axis of one."""

    facts: Mapping[str, Any]
    tensors: Message = field(default_factory=dict)

    def pack(self) -> tuple[str, bytes]:
        """Return the facts as text and the tensors as bytes."""
        host = {n: t.detach().cpu().contiguous().clone() for n, t in self.tensors.items()}
        return json.dumps(self.facts, allow_nan=False), save(host)

    @classmethod
    def unpack(cls, text: str, blob: bytes) -> Parcel:
        """Read a message that `pack` has written.

        Everything that can go wrong in reading ends here: whoever calls it need not know what the
        parsers of JSON and safetensors raise.

        Raises:
            WireError: if it cannot be read.
        """
        try:
            facts = parse_json(text)
            tensors = load(blob)
        except Exception as error:
            reason = plain(error) or type(error).__name__
            raise WireError(f"unreadable message: {reason}") from None
        if not isinstance(facts, dict):
            raise WireError("unreadable message: its JSON is not an object")
        return cls(facts, tensors)


def size(text: str, blob: bytes) -> int:
    """Return the size of a packed message in bytes."""
    return len(text.encode(errors="surrogatepass")) + len(blob)


def limit_of(contract: Contract) -> int:
    """Return the largest size of a message with an upload, in bytes."""
    return contract.bytes + HEADER


def check_upload(contract: Contract, upload: Message) -> None:
    """Check names, shapes, types and values of a site's upload.

    Raises:
        WireError: naming what is wrong.
    """
    try:
        contract.check(upload)
    except MessageError as error:
        raise WireError(str(error)) from None
    for name, tensor in upload.items():
        if len(tensor) != 1:
            raise WireError(f"{name} has {len(tensor)} rows, not one")
        if not torch.isfinite(tensor).all():
            raise WireError(f"{name} holds numbers that are not finite")
