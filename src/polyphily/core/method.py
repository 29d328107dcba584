"""What a method is: hooks for the clients, hooks for the server, and a registry of all of them.

A method is a frozen dataclass of hyperparameters. Client hooks see a `Local` (a cohort of one or
many clients); server hooks see uploads and the server's own state, and nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import iter_modules
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
from torch import Tensor

import polyphily.methods
from polyphily.core.cohort import Cohort
from polyphily.core.local import Local, LossAndGradient, Message, as_model, model_part
from polyphily.errors import UserError, unknown
from polyphily.nn import backbones
from polyphily.nn.backbones import Backbone, Shape
from polyphily.nn.sparse import flat

State = Message
"""The server's memory: named tensors without a client axis."""


@dataclass(frozen=True)
class Uploads:
    """What arrived at the server in a round: stacked tensors, row `i` from `clients[i]`.

    After secure aggregation there is one row, made of sums, and no clients.
    """

    clients: tuple[int, ...]
    tensors: Message

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    @property
    def model(self) -> Message:
        return model_part(self.tensors)

    def mean(self, values: Mapping[str, Tensor], weights: Tensor) -> Message:
        """Means over clients with the weights given, which need not sum to one."""
        share = weights / weights.sum()
        return {n: (share.to(t.dtype) @ flat(t)).view(t.shape[1:]) for n, t in values.items()}


def to_each(tensors: Mapping[str, Tensor], clients: Sequence[int]) -> Message:
    """The same tensors for every client, stacked without a copy."""
    return {n: t.unsqueeze(0).expand(len(clients), *t.shape) for n, t in tensors.items()}


PAPER = "paper"  # `--set paper=on`: every hyperparameter as the paper has it


def parameter(
    default: Any, doc: str, *, symbol: str = "", choices: Sequence[str] = (), paper: Any = None
) -> Any:
    """A hyperparameter: its default, its meaning, the paper's symbol, and its value there where
    that is another (`--set paper=on` takes these)."""
    metadata = {"doc": doc, "symbol": symbol, "choices": tuple(choices), "paper": paper}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Method(LossAndGradient):
    """The hooks, with defaults that train the backbone on cross-entropy and share nothing."""

    name: ClassVar[str]
    cite: ClassVar[str] = ""
    evaluated: ClassVar[Literal["global", "personal"]] = "global"
    selection: ClassVar[Literal["federation", "client"]] = "federation"
    backbone: ClassVar[str | None] = None  # what the method is made for, if the user names none

    # What `privacy/differential.py` must know of uploads. Tallies count a client's nodes, to weigh it
    # by: under --dp everybody sends ones. Public ones say nothing about a client's data. Tensors
    # whose names begin like a key of `averaged` may be replaced by their mean, weighted by the
    # tally that it names, and all others by their sum: `aggregate` is the same. Else it says why.
    tallies: ClassVar[tuple[str, ...]] = ()
    public: ClassVar[tuple[str, ...]] = ()
    averaged: ClassVar[Mapping[str, str] | str] = "nobody has said that its server needs sums only"

    def phase(self, round_index: int) -> Hashable:
        """What of a round's number the clients look at: rounds of one phase do the same work."""
        return None

    def whole_graph(self) -> str | None:
        """Why a step needs every node of a client at once, where it does: `--sample` tells."""
        return None

    # At the clients --------------------------------------------------------------------------

    def build(self, backbone: str, shape: Shape, seed: int) -> Backbone:
        """The network of one client with its initial parameters."""
        return backbones.build(backbone, shape, seed)

    def shares(self, network: Backbone, parameter: str) -> bool:
        """Whether a parameter travels; the others stay with the client."""
        return False

    def remember(self, cohort: Cohort, network: Backbone, params: Message) -> Message:
        """What each client keeps beside its model: statistics of its graph, control variates, …"""
        return {}

    def receive(self, local: Local) -> Message:
        """The parameters a round starts from: what came, and its own for what did not."""
        return {**model_part(local.memory), **model_part(local.received)}

    def loss(self, local: Local) -> Tensor:
        return local.cross_entropy(local.forward().logits)

    def train(self, local: Local) -> None:
        """The local training; changes `local.params` in place."""
        local.descend(self)

    def update_memory(self, local: Local) -> Message:
        """Entries of the memory that change after training (the model is kept anyway)."""
        return {}

    def upload(self, local: Local) -> Message:
        """What leaves the site: the shared parameters, and what the method adds."""
        return as_model({n: p for n, p in local.params.items() if self.shares(local.network, n)})

    def predict(self, local: Local) -> Tensor:
        """Class scores `[N, C]` of every node; dropout is off."""
        return local.forward().logits

    # At the server ---------------------------------------------------------------------------

    def open(self, shared: Message, clients: int) -> State:
        """The server's state before the first round, from the shared initial parameters."""
        return {}

    def aggregate(self, state: State, uploads: Uploads, rng: np.random.Generator) -> State:
        """The new state. A pure function of its arguments."""
        return state

    def download(self, state: State, clients: Sequence[int]) -> Message:
        """What the server sends to each of `clients`, stacked in their order."""
        return {}

    # For people ------------------------------------------------------------------------------

    @classmethod
    def hyperparameters(cls) -> dict[str, dataclasses.Field[Any]]:
        return {f.name: f for f in dataclasses.fields(cls)}

    @classmethod
    def paper_form(cls) -> dict[str, Any]:
        """The hyperparameters whose defaults here depart from the paper, as they are there."""
        found = {n: f.metadata.get("paper") for n, f in cls.hyperparameters().items()}
        return {name: value for name, value in found.items() if value is not None}


METHODS: dict[str, type[Method]] = {}
M = TypeVar("M", bound=type[Method])


def register(name: str, *, cite: str) -> Callable[[M], M]:
    """Makes a method available by name, on the command line and in `polyphily.run`."""

    def add(cls: M) -> M:
        if METHODS.get(name, cls) is not cls:
            raise ValueError(f"a method named '{name}' is registered already")
        cls.name, cls.cite = name, cite
        METHODS[name] = cls
        return cls

    return add


def load_all() -> dict[str, type[Method]]:
    """Imports every module of this package and every entry point `polyphily.methods`."""
    for module in iter_modules(polyphily.methods.__path__):
        import_module(f"polyphily.methods.{module.name}")
    for point in entry_points(group="polyphily.methods"):
        point.load()
    return METHODS


def find(name: str) -> type[Method]:
    methods = load_all()
    if name.lower() not in methods:
        raise unknown("method", name, methods)
    return methods[name.lower()]


def create(name: str, settings: Mapping[str, Any] | None = None) -> Method:
    """A method with some hyperparameters set, values as Python values or as text.

    `paper=on` sets all of them as the paper has them, but for those that are set beside it.
    """
    cls = find(name)
    fields = cls.hyperparameters()
    wanted = dict(settings or {})
    values: dict[str, Any] = {}
    if PAPER not in fields and _truth(cls.name, PAPER, wanted.pop(PAPER, False)):
        values |= cls.paper_form()
    for key, value in wanted.items():
        if key not in fields:
            raise unknown(f"hyperparameter of {cls.name}", key, [*fields, PAPER])
        values[key] = _convert(cls.name, fields[key], value)
    return cls(**values)


def _truth(method: str, name: str, value: Any) -> bool:
    words = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}
    if str(value).lower() not in words:
        raise UserError(f"{method}: '{name}' takes a value of type bool, not '{value}'")
    return words[str(value).lower()]


def _convert(method: str, field: dataclasses.Field[Any], value: Any) -> Any:
    default: Any = field.default
    kind: type = type(default)
    choices = field.metadata.get("choices", ())
    try:
        if kind is bool:
            return _truth(method, field.name, value)
        converted: Any = kind(value)
        if kind is int and float(value) != converted:
            raise ValueError
    except (ValueError, TypeError):
        raise UserError(
            f"{method}: '{field.name}' takes a value of type {kind.__name__}, not '{value}'"
        ) from None
    if choices and converted not in choices:
        raise unknown(f"value of {method}'s '{field.name}'", str(converted), choices)
    return converted
