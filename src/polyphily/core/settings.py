"""The settings of a run, with their defaults and bounds."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from polyphily.core.budget import OFF, Budget
from polyphily.core.search import Choices, Range, Search
from polyphily.errors import UserError, unknown

HOME = "home"  # of norms
READOUTS = ("last", "jump")
ENGINES = ("stacked", "sequential", "flower")
SELECTIONS = ("method", "federation", "client")
MIXED = "bf16"
AUTO = "auto"


@dataclass(frozen=True)
class Settings:
    """The settings of a run. Those that are None are filled in by `recipes`.

    Attributes:
        rounds: communication rounds.
        epochs: full-batch steps a client takes per round (steps on a batch each, with `batch` or
            `sample`): a number, or a range "1-5" from which each client draws anew in every round.
        backbone: which network.
        hidden: width of the hidden layers.
        layers: number of layers; of residual backbones, number of blocks.
        dropout: before every layer but the first.
        input_dropout: on the input features.
        heads: attention heads of gat.
        hops: propagation steps of gpr-gnn.
        norms: whether normalisations are "shared", or stay at "home" with every client (FedBN); for
            backbones that have them.
        readout: what residual backbones classify from: the "last" block, or by "jump" a learned
            mean of all blocks and their input.
        label_inputs: the share of train labels that each training step hides and predicts from the
            others, which are inputs; 0: labels are not inputs.
        optimizer: adam, adamw or sgd.
        lr: learning rate.
        weight_decay: coefficient of the decay.
        momentum: of sgd.
        clip: largest gradient norm per client; 0 is off.
        keep_optimizer: whether the optimiser's moments survive from round to round.
        participation: share of the clients selected in each round.
        failures: share of the selected clients that fail to answer.
        engine: "stacked", "sequential" (one client after another: the reference), or "flower" (a
            process per client, over Flower on this machine).
        device: "cpu" or "cuda".
        dtype: "float32" or "float64".
        precision: of matrix products: "float32", "tf32" (on a GPU), or "bf16" (losses, by autocast;
            weights, optimiser and scores stay in float32).
        sample: neighbours that each layer draws of a node in a training step, as in "10,10", for
            graphs too large to train on as a whole; "off" takes all.
        batch: train nodes that each client draws for a step; 0 takes all.
        threads: of the CPU; 0 takes one for small graphs and all cores otherwise.
        memory: what training may take, as in "8GB"; clients that do not fit together train in
            turn, with the same results. "auto" is half of what is free.
        evaluate_every: rounds between evaluations; the last round is always evaluated.
        patience: evaluations without a better validation score before stopping; 0 never stops.
        selection: whose validation score picks the best round: "federation", "client" (each its
            own), or as the method prefers.
        metric: what selects a model on validation: "accuracy", "f1_macro", "f1_weighted", "auc"
            or that of a plug-in; None takes the dataset's own.
        dp: differential privacy of each client's uploads, all rounds together: epsilon=8, with
            delta=1e-5 and clip=1.0 after commas where others are wanted.
        secure_aggregation: whether the server sees the sum of the uploads only, by SecAgg+.
    """

    rounds: int = 100
    epochs: int | str = 3
    backbone: str | None = None
    hidden: int | None = None
    layers: int | None = None
    dropout: float | None = None
    input_dropout: float | None = None
    heads: int = 4
    hops: int = 10
    norms: str = "shared"
    readout: str = "last"
    label_inputs: float = 0.0
    optimizer: str | None = None
    lr: float | None = None
    weight_decay: float | None = None
    momentum: float = 0.0
    clip: float = 0.0
    keep_optimizer: bool | None = None
    participation: float = 1.0
    failures: float = 0.0
    engine: str = "stacked"
    device: str = "cpu"
    dtype: str = "float32"
    precision: str = "float32"
    sample: str = OFF
    batch: int = 0
    threads: int = 0
    memory: str = AUTO
    evaluate_every: int = 1
    patience: int = 0
    selection: str = "method"
    metric: str | None = None
    dp: str = OFF
    secure_aggregation: bool = False

    def epoch_range(self) -> tuple[int, int]:
        """Return the smallest and the largest number of local steps of a client."""
        found = re.fullmatch(r"([0-9]+)(?:\s*-\s*([0-9]+))?", str(self.epochs))
        bounds = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= bounds[0] <= bounds[1]:
            raise UserError(
                f"epochs: '{self.epochs}' is neither a positive number nor a range such as 1-5"
            )
        return bounds

    def memory_limit(self) -> int | None:
        """Return the memory that training may use, in bytes; None for half of what is free."""
        if self.memory == AUTO:
            return None
        found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)b?", str(self.memory).lower())
        if not found or not (size := int(float(found[1]) * 1000 ** " kmgt".index(found[2] or " "))):
            raise UserError(f"memory: '{self.memory}' is no size: write 8GB, 500MB or auto")
        return size

    def fanouts(self) -> tuple[int, ...] | None:
        """Return the neighbours to draw in each layer; None if all are taken.

        >>> Settings(sample="15,10").fanouts()
        (15, 10)
        """
        if self.sample == OFF:
            return None
        if not re.fullmatch(r"\s*0*[1-9][0-9]*\s*(,\s*0*[1-9][0-9]*\s*)*", self.sample):
            raise UserError(
                f"--sample {self.sample}: give the neighbours to draw in each layer, such as "
                "10,10, or off"
            )
        return tuple(int(part) for part in self.sample.split(","))

    def check(self) -> None:
        """Raise a `UserError` for a value of the wrong type or out of bounds."""
        kinds = get_type_hints(Settings)
        for name in names() - {"epochs"}:
            _check_kind(name, getattr(self, name), get_args(kinds[name]) or (kinds[name],))
        self.epoch_range()
        for name, known in choices().items():
            value = getattr(self, name)
            if value is not None and value not in known:
                raise unknown(name, value, known)
        self.memory_limit()
        if self.precision != "float32" and self.dtype != "float32":
            raise UserError(f"--precision {self.precision} is for --dtype float32")
        self.fanouts()
        if not re.fullmatch(r"cpu|cuda(:[0-9]+)?", self.device):
            raise unknown("device", self.device, ("cpu", "cuda"))
        for name, (low, high, words) in BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise UserError(f"{_flag(name)}: {value} is out of bounds, give {words}")
        Budget.parse(self.dp)


CHOICES: dict[str, tuple[str, ...]] = {
    "engine": ENGINES,
    "selection": SELECTIONS,
    "dtype": ("float32", "float64"),
    "precision": ("float32", "tf32", MIXED),
    "optimizer": ("adam", "adamw", "sgd"),
    "norms": ("shared", HOME),
    "readout": READOUTS,
}
_ANY = math.inf
_SHARE = (0, 0.999, "at least 0 and at most 0.999")
BOUNDS: dict[str, tuple[float, float, str]] = {
    "rounds": (1, _ANY, "at least 1"),
    "hidden": (1, _ANY, "at least 1"),
    "layers": (1, 64, "1 to 64"),
    "heads": (1, 1024, "1 to 1024"),
    "hops": (1, 1024, "1 to 1024"),
    "dropout": _SHARE,
    "input_dropout": _SHARE,
    "label_inputs": _SHARE,
    "lr": (1e-12, _ANY, "at least 1e-12"),
    "weight_decay": (0, _ANY, "at least 0"),
    "momentum": (0, 0.9999, "at least 0 and at most 0.9999"),
    "clip": (0, _ANY, "at least 0"),
    "participation": (1e-9, 1, "above 0 and at most 1"),
    "failures": _SHARE,
    "evaluate_every": (1, _ANY, "at least 1"),
    "patience": (0, _ANY, "at least 0"),
    "threads": (0, 1024, "0 to 1024"),
    "batch": (0, _ANY, "at least 0"),
}

SEARCHED: dict[str, Search] = {
    "epochs": Range(1, 5),
    "hidden": Choices(32, 64, 128),
    "layers": Choices(2, 3),
    "dropout": Range(0.0, 0.8),
}
"""The settings that tuning searches for every method alike, beside learning rate and decay."""


def choices() -> dict[str, tuple[str, ...]]:
    """Return the values of every setting that takes one of several words."""
    from polyphily.core.metrics import METRICS  # here, because it imports torch

    return CHOICES | {"metric": METRICS.selecting()}


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _check_kind(name: str, value: Any, kinds: tuple[Any, ...]) -> None:
    """Check a type: an int is accepted as a float, a bool as neither; floats must be finite."""
    if isinstance(value, bool):
        fits = bool in kinds
    elif isinstance(value, int):
        fits = int in kinds or float in kinds
    elif isinstance(value, float):
        fits = float in kinds and math.isfinite(value)
    else:
        fits = isinstance(value, kinds)
    if not fits:
        words = " or ".join(_WORDS[kind] for kind in kinds if kind is not type(None))
        raise UserError(f"{_flag(name)}: {value!r} is not {words}")


_WORDS = {int: "a whole number", float: "a finite number", str: "a name", bool: "true or false"}


def names() -> frozenset[str]:
    """Return the names of all settings."""
    return frozenset(field.name for field in dataclasses.fields(Settings))


def from_mapping(values: dict[str, Any]) -> Settings:
    """Return checked settings from keyword arguments. Words are accepted in any case.

    Raises:
        UserError: for an unknown name, with a suggestion, or a value that is not valid.
    """
    for name in values:
        if name not in names():
            raise unknown("setting", name, names())
    words = {k: v.lower() for k, v in values.items() if k in choices() and isinstance(v, str)}
    settings = Settings(**(values | words))
    settings.check()
    return settings
