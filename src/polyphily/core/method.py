"""A method: hooks for the clients, hooks for the server, declarations of what travels.

A method is a frozen dataclass of hyperparameters. Client hooks see a `Local` (a cohort of one or
many clients); server hooks see uploads and the server's own state, and nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
from torch import Tensor

from polyphily.core.cohort import Cohort
from polyphily.core.local import Local
from polyphily.core.messages import (
    Declared,
    Message,
    Sizes,
    State,
    Uploads,
    as_model,
    model_part,
    reason_against_sums,
)
from polyphily.core.optimizers import OptimizerSpec
from polyphily.core.search import Search, check_search
from polyphily.errors import UserError, unknown
from polyphily.nn import backbones
from polyphily.nn.backbones import Backbone, Shape
from polyphily.registry import Registry

VIEWS = ("received", "trained")  # the model as the server sends it, and as the client trained it
VIEW_OF = {"global": "received", "personal": "trained"}
PAPER = "paper"  # `--set paper=on`: every hyperparameter as the paper has it
CODE = "code"  # `--set code=on`: as the authors' code has it, without its defects
FORMS = (PAPER, CODE)
SEARCH = "search"  # where the metadata of a hyperparameter have its search range


def parameter(
    default: Any,
    doc: str,
    *,
    symbol: str = "",
    choices: Sequence[str] = (),
    paper: Any = None,
    code: Any = None,
    search: Search | None = None,
) -> Any:
    """Declare a hyperparameter.

    Args:
        default: its value unless set; its type is the type of all values.
        doc: what it means.
        symbol: the paper's symbol.
        choices: the values there are, for text.
        paper: the paper's value where that is another (`--set paper=on` takes it).
        code: the value in the authors' code where that differs from the paper's (`--set code=on`
            takes it).
        search: the values that tuning may try (`--tune`); None keeps it out of the search.
    """
    if not isinstance(default, bool | int | float | str):
        raise TypeError(
            f"parameter({default!r}, …): the default must be a bool, int, float or str, because "
            "its type is how values from the command line are read"
        )
    if search is not None:
        check_search(search, default, tuple(choices))
    metadata = {
        "doc": doc,
        "symbol": symbol,
        "choices": tuple(choices),
        PAPER: paper,
        CODE: code,
        SEARCH: search,
    }
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Method:
    """The hooks, with defaults that train the backbone on cross-entropy and share nothing.

    Attributes:
        name: set by `register`.
        cite: set by `register`.
        evaluated: which model is the result: "global", as the server sends it, or "personal", as
            the client trained it.
        selection: whose validation score picks the best round: "federation" or each "client".
        backbone: the network that the method is made for, used if the user names none.
        left_open: what the paper does not say or contradicts, and what is done here, a sentence
            each; `methods show` prints them.
        labels_can_be_inputs: whether `--label-inputs` is possible: features and train labels reach
            the method through `Local` alone. Subclasses do not inherit it.
        weighted_edges: whether weights of edges are used, by operators of the graph alone. If not,
            all edges have weight 1.
    """

    name: ClassVar[str]
    cite: ClassVar[str] = ""
    evaluated: ClassVar[Literal["global", "personal"]] = "global"
    selection: ClassVar[Literal["federation", "client"]] = "federation"
    backbone: ClassVar[str | None] = None
    left_open: ClassVar[Sequence[str]] = ()
    labels_can_be_inputs: ClassVar[bool] = False
    weighted_edges: ClassVar[bool] = True

    @property
    def view(self) -> str:
        """The view that the method is evaluated in: "received" or "trained"."""
        return VIEW_OF[self.evaluated]

    # The network -----------------------------------------------------------------------------

    def supported_backbones(self) -> Sequence[str]:
        """Return the names of the backbones that the method can train; by default all."""
        return tuple(backbones.BACKBONES)

    def build(self, backbone: str, shape: Shape, seed: int) -> Backbone:
        """Build the network of one client with its initial parameters."""
        return backbones.build(backbone, shape, seed)

    def shares(self, network: Backbone, parameter: str) -> bool:
        """Return whether a parameter travels; the others stay with the client."""
        return False

    # What travels ----------------------------------------------------------------------------

    def uploads(self, sizes: Sizes) -> tuple[Declared, ...]:
        """Declare what `upload` sends, and what the server needs of it.

        A class that overrides `aggregate` must override this, too, if only to return what its
        base class does: a server that has changed may need more than it did.
        """
        return ()

    def downloads(self, sizes: Sizes) -> tuple[Declared, ...]:
        """Declare what `download` sends."""
        return ()

    # Which rounds are alike ------------------------------------------------------------------

    def phase(self, round_index: int) -> Hashable:
        """Return what of a round's number the clients look at; rounds of one phase do the same."""
        return None

    def stage(self, round_index: int) -> str:
        """Return the name of the stage that a round belongs to, for people; "" if there is one."""
        return ""

    def needs_whole_model(self) -> str | None:
        """Return why every parameter must travel; None if some may stay at home (`--norms`)."""
        return None

    def needs_whole_graph(self) -> str | None:
        """Return why a step needs every node of a client at once; None if samples will do."""
        return None

    def needs_symmetric_edges(self) -> str | None:
        """Return why edges must lead both ways; None if a network may read one (`--direction`)."""
        return None

    # At the clients --------------------------------------------------------------------------

    def init_client_state(self, cohort: Cohort, network: Backbone, params: Message) -> Message:
        """Return what each client keeps beside its model: statistics, control variates, …"""
        return {}

    def receive(self, local: Local) -> Message:
        """Return the parameters a round starts from: those received, else the client's own."""
        return {**model_part(local.memory), **model_part(local.received)}

    def prepare_round(self, local: Local) -> Message:
        """Compute what stays the same during the round (during a step, with `--sample`)."""
        return {}

    def loss(self, local: Local) -> Tensor:
        """Return each client's loss, `[K]`; a client's value depends on that client alone."""
        return local.cross_entropy(local.forward().logits)

    def proximal(self, local: Local) -> tuple[float, Message] | None:
        """Return μ and the anchor of a term μ/2 ‖w − anchor‖² of the loss, if there is one.

        Its gradient is added just before the step, which costs less than a term in `loss`.
        """
        return None

    def correct_gradients(self, local: Local, grads: Message) -> Message:
        """Return the gradients to step with, for methods that correct them.

        The gradients may be changed in place.
        """
        return grads

    def optimizer_for(self, parameter: str, run: OptimizerSpec) -> OptimizerSpec:
        """Return the optimiser of a parameter, for methods that give some their own rate."""
        return run

    def train(self, local: Local) -> None:
        """Train locally; changes `local.params` in place."""
        local.descend(self)

    def update_memory(self, local: Local) -> Message:
        """Return the entries of the memory that change after training (the model is kept)."""
        return {}

    def upload(self, local: Local) -> Message:
        """Return what leaves the site: the shared parameters, and what the method adds."""
        return as_model({n: p for n, p in local.params.items() if travels(self, local.network, n)})

    def predict(self, local: Local) -> Tensor:
        """Return class scores `[N, C]` of every node; dropout is off.

        It may be of another graph than that of training. Of memory and download it sees what
        `prediction_state` names.
        """
        return local.forward().logits

    def prediction_state(self) -> Sequence[str]:
        """Return what `predict` reads beside parameters and graph; model files hold it.

        Names are `memory/NAME` and `received/NAME`. If an entry of the memory is among them, every
        client has a model of its own.
        """
        return ()

    def reach(self, network: Backbone) -> int | None:
        """Return within how many hops of a node the nodes are that its prediction depends on.

        None: all nodes of the graph, so that it cannot be predicted in blocks. By default it is the
        network's, if that is one of the registered backbones and `predict` is not overridden.
        """
        trunk = network.trunk if isinstance(network, backbones.LinearHead) else network
        plain = backbones.BACKBONES.get(trunk.name) is type(trunk)
        return network.reach if plain and type(self).predict is Method.predict else None

    # At the server ---------------------------------------------------------------------------

    def init_server_state(self, shared: Message, clients: int) -> State:
        """Return the server's state before the first round, from the shared parameters."""
        return {}

    def aggregate(self, state: State, uploads: Uploads, rng: np.random.Generator) -> State:
        """Return the new state; a pure function of its arguments."""
        return state

    def download(self, state: State, clients: Sequence[int]) -> Message:
        """Return what the server sends to each of `clients`, stacked in their order."""
        return {}

    def collaboration(self, state: State) -> Tensor | None:
        """Return the weights `[clients, clients]` by which the server mixes models, if it has any.

        Row i is what the next model of client i is made of; the report shows it.
        """
        return None

    # For people ------------------------------------------------------------------------------

    def remarks(self, state: State) -> Sequence[str]:
        """Return what a user should know of the server's state at the end of a run, if anything."""
        return ()

    def rounds_before_it_acts(self) -> int:
        """Return after how many rounds the method begins to act: the length of its warm-up."""
        return 0

    def without_effect(self) -> Mapping[str, str]:
        """Return the hyperparameters that change nothing beside the others, each with the reason.

        A user who sets one of them is told so (`check_effects`).
        """
        return {}

    @classmethod
    def hyperparameters(cls) -> dict[str, dataclasses.Field[Any]]:
        return {f.name: f for f in dataclasses.fields(cls)}

    @classmethod
    def search_ranges(cls) -> dict[str, Search]:
        """Return the ranges of the hyperparameters that tuning searches."""
        found = {n: f.metadata.get(SEARCH) for n, f in cls.hyperparameters().items()}
        return {name: search for name, search in found.items() if search is not None}

    @classmethod
    def paper_form(cls) -> dict[str, Any]:
        """Return the hyperparameters whose defaults depart from the paper, as they are there."""
        return cls._values_in(PAPER)

    @classmethod
    def code_form(cls) -> dict[str, Any]:
        """Return the hyperparameters of the authors' code: the paper's but for those it changes.

        Empty if nothing is known of such code, or nothing in it differs.
        """
        found = cls._values_in(CODE)
        return {**cls.paper_form(), **found} if found else {}

    @classmethod
    def _values_in(cls, form: str) -> dict[str, Any]:
        found = {n: f.metadata.get(form) for n, f in cls.hyperparameters().items()}
        return {name: value for name, value in found.items() if value is not None}

    def reason_against_sums(self, sizes: Sizes) -> str | None:
        """Return why `--secure-aggregation` is impossible; None if sums are enough for the server.

        Declarations count only if they are at least as specific as `aggregate`: a subclass that
        changes its server does not inherit the promise of its base class.
        """
        order = type(self).__mro__
        declared, changed = (
            next(i for i, cls in enumerate(order) if hook in vars(cls))
            for hook in ("uploads", "aggregate")
        )
        if changed < declared:
            return (
                f"{order[changed].__name__} has an `aggregate` of its own and does not declare "
                "what that needs of uploads"
            )
        return reason_against_sums(self.uploads(sizes))


def sizes_of(method: Method, network: Backbone, clients: int) -> Sizes:
    """Return the sizes that a method's declarations are made of."""
    shape = network.shape
    return Sizes(
        features=shape.features,
        hidden=shape.hidden,
        classes=shape.classes,
        embedding=network.embedding_width,
        clients=clients,
        parameters={
            name: tuple(value.shape[1:])
            for name, value in network.named_parameters()
            if travels(method, network, name)
        },
    )


def travels(method: Method, network: Backbone, parameter: str) -> bool:
    """Return whether a parameter is shared: if the method shares it, and the network lets it go."""
    return method.shares(network, parameter) and not network.stays_home(parameter)


# The registry ------------------------------------------------------------------------------------

METHODS: Registry[type[Method]] = Registry("method", "methods", "polyphily.methods")
M = TypeVar("M", bound=type[Method])


def register(name: str, *, cite: str) -> Callable[[M], M]:
    """Make a method available by name, on the command line and in `polyphily.run`."""

    def add(cls: M) -> M:
        undecorated = [n for n, v in vars(cls).items() if isinstance(v, dataclasses.Field)]
        if undecorated:
            raise TypeError(
                f"{cls.__name__}: '{undecorated[0]}' is a hyperparameter, so the class needs "
                "@dataclass(frozen=True) below @register"
            )
        cls.name, cls.cite = name.lower(), cite
        METHODS.add(name, cls)
        return cls

    return add


def settable(name: str) -> set[str]:
    """Return the names that `create` takes for a method: its hyperparameters and its forms."""
    cls = METHODS.find(name)
    return {*cls.hyperparameters(), PAPER, *([CODE] if cls.code_form() else [])}


def create(name: str, settings: Mapping[str, Any] | None = None) -> Method:
    """Return a method with some hyperparameters set, values as Python values or as text.

    `paper=on` sets all of them as the paper has them, `code=on` as the authors' code does, but for
    those that are set beside it.
    """
    cls = METHODS.find(name)
    fields = cls.hyperparameters()
    wanted = dict(settings or {})
    values = _form(cls, wanted)
    for key, value in wanted.items():
        if key not in fields:
            raise unknown(f"hyperparameter of {cls.name}", key, [*fields, *FORMS])
        values[key] = _convert(cls.name, fields[key], value)
    return cls(**values)


def _form(cls: type[Method], wanted: dict[str, Any]) -> dict[str, Any]:
    """Take `paper` and `code` out of what is wanted; return the values of the form they name."""
    fields = cls.hyperparameters()
    chosen = [
        form
        for form in FORMS
        if form not in fields and _truth(cls.name, form, wanted.pop(form, False))
    ]
    if len(chosen) > 1:
        raise UserError(f"{cls.name}: set paper=on or code=on, not both")
    if chosen == [CODE] and not cls.code_form():
        raise UserError(
            f"{cls.name}: there is no code=on: this library knows no code of its authors that "
            "differs from the paper (paper=on is the paper's form)"
        )
    return {PAPER: cls.paper_form, CODE: cls.code_form}[chosen[0]]() if chosen else {}


def check_effects(method: Method, given: Iterable[str]) -> None:
    """Raise a `UserError` if a hyperparameter that the user set changes nothing.

    Args:
        method: as it was created.
        given: the names that the user set.
    """
    idle = method.without_effect()
    for name in given:
        if name in idle:
            raise UserError(f"{method.name}: '{name}' has no effect here: {idle[name]}")


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
