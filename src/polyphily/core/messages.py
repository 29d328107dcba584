"""Messages between clients and server: named tensors, and what a method declares about them.

A method declares every tensor that it sends up or down (`Method.uploads`, `Method.downloads`).
`polyphily methods show`, byte counts, the server's checks, the clipping groups of differential
privacy and whether secure aggregation is possible all follow from the declarations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

from polyphily.nn.backbones import Backbone
from polyphily.nn.sparse import flat

Message: TypeAlias = dict[str, Tensor]
"""Named tensors with a leading client axis; a scalar per client is a tensor `[K]`."""

State: TypeAlias = Message
"""The server's state: named tensors without a client axis."""

Dims: TypeAlias = tuple[int, ...]

MODEL = "model/"


def with_prefix(message: Mapping[str, Tensor], prefix: str) -> Message:
    """Return the tensors whose names begin with a prefix, by the rest of their names."""
    return {n.removeprefix(prefix): t for n, t in message.items() if n.startswith(prefix)}


def model_part(message: Mapping[str, Tensor]) -> Message:
    """Return the parameters in a message or a memory, by their own names."""
    return with_prefix(message, MODEL)


def as_model(params: Mapping[str, Tensor]) -> Message:
    """Return parameters under the names they have in a message or a memory."""
    return {MODEL + name: value for name, value in params.items()}


@dataclass(frozen=True)
class Uploads:
    """The uploads that arrived in a round: stacked tensors, row `i` from `clients[i]`.

    After secure aggregation there is one row, made of sums, and no clients.

    Attributes:
        clients: who sent them.
        tensors: what they sent.
        network: the federation's network, for servers that run uploaded parameters on inputs of
            their own; its own parameters are the initial ones. `Server.aggregate` sets it.
    """

    clients: tuple[int, ...]
    tensors: Message
    network: Backbone | None = None

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    @property
    def model(self) -> Message:
        return model_part(self.tensors)

    def mean(self, values: Mapping[str, Tensor], weights: Tensor) -> Message:
        """Compute means over clients with the weights given, which need not sum to one."""
        share = weights / weights.sum()
        return {n: (share.to(t.dtype) @ flat(t)).view(t.shape[1:]) for n, t in values.items()}


def to_each(tensors: Mapping[str, Tensor], clients: Sequence[int]) -> Message:
    """Stack the same tensors for every client, without a copy."""
    return {n: t.unsqueeze(0).expand(len(clients), *t.shape) for n, t in tensors.items()}


# When a tensor travels ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Rounds:
    """Rounds in which a tensor travels, counted from 1.

    Attributes:
        first: the first of them.
        last: the last of them; None: to the end of the run.
    """

    first: int = 1
    last: int | None = None

    def __contains__(self, number: int) -> bool:
        return self.first <= number and (self.last is None or number <= self.last)

    def __str__(self) -> str:
        if self.last is None:
            return "every round" if self.first == 1 else f"from round {self.first}"
        if self.first == self.last:
            return "first round" if self.first == 1 else f"round {self.first}"
        return f"rounds {self.first}–{self.last}"


EVERY_ROUND, FIRST_ROUND, AFTER_FIRST = Rounds(), Rounds(1, 1), Rounds(2)


# What the server does with a tensor --------------------------------------------------------------


@dataclass(frozen=True)
class Mean:
    """The server needs only the mean over clients, weighted by another upload."""

    by: str

    def __str__(self) -> str:
        return f"mean weighted by {self.by}"


@dataclass(frozen=True)
class Sum:
    """The server needs only the sum over clients."""

    def __str__(self) -> str:
        return "sum"


@dataclass(frozen=True)
class Individually:
    """The server looks at each client's tensor; `reason` says why, as a clause."""

    reason: str

    def __str__(self) -> str:
        return f"individually: {self.reason}"


Use: TypeAlias = Mean | Sum | Individually


class Role(Enum):
    """The kind of information in a tensor, which decides how differential privacy treats it."""

    MODEL = "model"  # parameters or changes of them: clipped and noised
    STATISTIC = "statistic"  # computed from the client's data: clipped and noised
    COUNT = "count"  # counts nodes, to weigh the client by: ones are sent instead
    PUBLIC = "public"  # says nothing about the client's data: sent as it is


@dataclass(frozen=True)
class Declared:
    """One or several tensors of a message that are treated alike.

    Attributes:
        name: of the tensor, or what the names of all of them begin with (then it ends in "/").
        shapes: the shape of every tensor at one client, by full name.
        role: what they tell.
        server: what the server needs of them; None for what it sends itself.
        rounds: when they travel.
        meaning: a few words for `polyphily methods show`.
    """

    name: str
    shapes: Mapping[str, Dims]
    role: Role
    server: Use | None = None
    rounds: Rounds = EVERY_ROUND
    meaning: str = ""


# What a method knows when it declares ------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """The sizes that shapes are made of.

    Attributes:
        features: width of the input.
        hidden: width between layers.
        classes: number of classes.
        embedding: width of `Output.embedding`.
        clients: number of clients in the federation.
        parameters: shapes of the parameters that travel (`Method.shares`), at one client.
    """

    features: int
    hidden: int
    classes: int
    embedding: int
    clients: int
    parameters: Mapping[str, Dims] = field(default_factory=dict)


def model(
    sizes: Sizes,
    server: Use | None = None,
    *,
    prefix: str = MODEL,
    only: Iterable[str] | None = None,
    role: Role = Role.MODEL,
    rounds: Rounds = EVERY_ROUND,
    meaning: str = "shared parameters",
) -> Declared:
    """Declare a tensor for each shared parameter, of its shape.

    Args:
        sizes: as the method was given them.
        server: what the server needs of an upload.
        prefix: what the tensors' names begin with.
        only: the parameters that it is about; all that travel unless given.
        role: what the tensors tell.
        rounds: when they travel.
        meaning: a few words.
    """
    names = sizes.parameters if only is None else only
    shapes = {prefix + name: sizes.parameters[name] for name in names}
    return Declared(prefix, shapes, role, server, rounds, meaning)


def statistic(
    name: str,
    shape: Sequence[int],
    server: Use | None = None,
    *,
    rounds: Rounds = EVERY_ROUND,
    meaning: str = "",
) -> Declared:
    """Declare a tensor that is computed from a client's data."""
    return Declared(name, {name: tuple(shape)}, Role.STATISTIC, server, rounds, meaning)


def count(
    name: str,
    shape: Sequence[int] = (),
    server: Use | None = None,
    *,
    rounds: Rounds = EVERY_ROUND,
    meaning: str = "",
) -> Declared:
    """Declare a tensor that counts a client's nodes, to weigh the client by."""
    return Declared(name, {name: tuple(shape)}, Role.COUNT, server, rounds, meaning)


def public(
    name: str,
    shape: Sequence[int] = (),
    server: Use | None = None,
    *,
    rounds: Rounds = EVERY_ROUND,
    meaning: str = "",
) -> Declared:
    """Declare a tensor that says nothing about a client's data."""
    return Declared(name, {name: tuple(shape)}, Role.PUBLIC, server, rounds, meaning)


# What follows from declarations ------------------------------------------------------------------


class MessageError(Exception):
    """A message that is not as declared, and in what."""


@dataclass(frozen=True)
class Contract:
    """The names, shapes and type that a message of one round must have.

    Attributes:
        shapes: the shape of every tensor at one client, by name.
        dtype: of all tensors.
    """

    shapes: Mapping[str, Dims]
    dtype: torch.dtype

    @classmethod
    def of(cls, declared: Iterable[Declared], number: int, dtype: torch.dtype) -> Contract:
        """Collect what is declared to travel in round `number`, counted from 1."""
        travelling = [entry for entry in declared if number in entry.rounds]
        return cls({n: s for entry in travelling for n, s in entry.shapes.items()}, dtype)

    @cached_property
    def numbers(self) -> int:
        """The count of numbers that a client sends."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def bytes(self) -> int:
        """The bytes that a client sends."""
        return self.numbers * self.dtype.itemsize

    def check(self, message: Mapping[str, Tensor]) -> None:
        """Compare names, shapes and types; values are not looked at.

        Raises:
            MessageError: saying what differs.
        """
        missing = sorted(self.shapes.keys() - message.keys())
        strange = sorted(message.keys() - self.shapes.keys())
        if missing or strange:
            parts = (("lacks", missing), ("has undeclared", strange))
            words = [f"{verb} {', '.join(names[:5])}" for verb, names in parts if names]
            raise MessageError("; ".join(words))
        for name, shape in self.shapes.items():
            tensor = message[name]
            if tuple(tensor.shape[1:]) != tuple(shape):
                found, wanted = (_words(dims) for dims in (tensor.shape[1:], shape))
                raise MessageError(f"{name} has the shape {found}, not {wanted}")
            if tensor.dtype != self.dtype:
                raise MessageError(f"{name} has the type {tensor.dtype}, not {self.dtype}")


def _words(dims: Sequence[int]) -> str:
    return " × ".join(map(str, dims)) or "one number"


def weights_of_means(declared: Iterable[Declared]) -> dict[str, str]:
    """Return the weight of every tensor that the server averages, by name."""
    return {
        name: entry.server.by
        for entry in declared
        if isinstance(entry.server, Mean)
        for name in entry.shapes
    }


def reason_against_sums(declared: Iterable[Declared]) -> str | None:
    """Return why sums over clients are not enough for the server; None if they are."""
    for entry in declared:
        if isinstance(entry.server, Individually):
            return entry.server.reason
        if entry.server is None:
            return f"it does not say what its server does with {entry.name.rstrip('/')}"
    return None


# Rows of a server's state ------------------------------------------------------------------------


def rows_of(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """Return some rows of a tensor; no copy if these are all."""
    return tensor if list(rows) == list(range(len(tensor))) else tensor[list(rows)]


def with_rows(tensor: Tensor, rows: Sequence[int], values: Tensor) -> Tensor:
    """Return the tensor with some rows replaced; the values themselves if these are all."""
    if list(rows) == list(range(len(tensor))):
        return values
    changed = tensor.clone()
    changed[list(rows)] = values
    return changed
