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
from polyphily.graphs.directions import BOTH, DIRECTIONS

HOME = "home"  # of norms
READOUTS = ("last", "jump")
ENGINES = ("stacked", "sequential", "flower")
SELECTIONS = ("method", "federation", "client")
MIXED = "bf16"
AUTO = "auto"
CROSS_ENTROPY = "cross-entropy"  # of loss


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
        degree_inputs: whether the number of a node's neighbours is among its features
            (`polyphily.graphs.degrees`).
        direction: which neighbours a node receives from if edges have a direction: "both", "in"
            (those that point to it), "out" (those that it points to), or "separate" (both, with
            weights for each).
        edge_weights: whether weights of edges are used where there are any.
        relations: the types of edges that rgcn tells apart, with commas between them; all that
            the data have unless given.
        optimizer: "adam", "adamw" or "sgd".
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
        on_disk: whether what clients keep from round to round is in files, so that memory holds
            only the clients that are drawn in a round. Graphs of csbm are in files, too. Unless
            given, if csbm draws 20,000 clients or more.
        scored_clients: how many clients are scored with on_disk, a fixed sample of all.
        evaluate_every: rounds between evaluations; the last round is always evaluated.
        patience: evaluations without a better validation score before stopping; 0 never stops.
        selection: whose validation score picks the best round: "federation", "client" (each its
            own), or as the method prefers.
        metric: what selects a model on validation, such as "accuracy", "auprc", "f1" or
            "recall@precision=0.9" (`polyphily metrics` lists them); unless given, the dataset's
            own, or auprc if one of two classes is rare.
        positive: the positive class of two, for auprc, f1 and thresholds; unless given, the second.
        threshold_rule: how the threshold on the positive class is chosen on validation: "f1",
            "precision=0.9", or a number.
        class_weights: weights of the classes in the loss: "none", or "balanced" by each client's
            own train labels, so that rare classes count as much as frequent ones.
        loss: "cross-entropy", or "focal=2" for a focal loss with this exponent.
        dp: differential privacy of each client's uploads, all rounds together: epsilon=8, with
            delta=1e-5 and clip=1.0 after commas where others are wanted.
        secure_aggregation: whether the server sees the sum of the uploads only, by SecAgg+.
        robust: how the server averages if some clients may be hostile: median, trimmed-mean=0.2,
            krum, geometric-median or clip=auto; "off" is the method's own mean.
        attack: what hostile clients of a simulation do: scale=1e6, sign-flip, noise or labels.
        attackers: which clients are hostile: a share, or names with commas.
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
    degree_inputs: bool = False
    direction: str = BOTH
    edge_weights: bool = True
    relations: str = ""
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
    on_disk: bool | None = None
    scored_clients: int = 500
    evaluate_every: int = 1
    patience: int = 0
    selection: str = "method"
    metric: str | None = None
    positive: str = ""
    threshold_rule: str = "f1"
    class_weights: str = "none"
    loss: str = "cross-entropy"
    dp: str = OFF
    secure_aggregation: bool = False
    robust: str = OFF
    attack: str = OFF
    attackers: str = "0.2"

    @property
    def private(self) -> bool:
        """True under differential privacy or secure aggregation."""
        return self.dp != OFF or self.secure_aggregation

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

    def relation_names(self) -> tuple[str, ...]:
        """Return the names of the relations.

        >>> Settings(relations="family, business").relation_names()
        ('family', 'business')
        """
        return tuple(filter(None, (name.strip() for name in self.relations.split(","))))

    def focal(self) -> float:
        """Return the exponent of the focal loss; 0 for cross-entropy.

        >>> Settings(loss="focal=2").focal()
        2.0
        """
        name, _, value = self.loss.partition("=")
        if self.loss == CROSS_ENTROPY:
            return 0.0
        if name == "focal" and (gamma := number(value or "2")) is not None and 0 < gamma <= 10:
            return gamma
        raise UserError(
            f"--loss {self.loss}: write cross-entropy, or focal=2 with an exponent above 0 and at "
            "most 10"
        )

    def check(self) -> None:
        """Raise a `UserError` for a value of the wrong type or out of bounds."""
        kinds = get_type_hints(Settings)
        for name in names() - {"epochs"}:
            _check_kind(name, getattr(self, name), get_args(kinds[name]) or (kinds[name],))
        self.epoch_range()
        for name, known in choices().items():
            value = getattr(self, name)
            if value is not None and value not in known and not _is_metric(name, value):
                raise unknown(name, value, known)
        self.memory_limit()
        self.focal()
        parse_threshold(self.threshold_rule)
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
    "direction": DIRECTIONS,
    "class_weights": ("none", "balanced"),
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
    "scored_clients": (1, _ANY, "at least 1"),
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


def _is_metric(name: str, value: str) -> bool:
    """Return whether a value of `metric` is one with a number, such as recall@precision=0.8."""
    from polyphily.core.metrics import METRICS, RECALL

    return name == "metric" and RECALL.fullmatch(METRICS.key(value)) is not None


def parse_threshold(text: str) -> tuple[str, float]:
    """Return the kind of a rule for thresholds, "f1", "precision" or "fixed", and its number.

    >>> parse_threshold("precision=0.9")
    ('precision', 0.9)

    Raises:
        UserError: for any other text.
    """
    name, sign, value = text.strip().lower().partition("=")
    if name == "f1" and not sign:
        return "f1", 0.0
    found = number(value if sign else name)
    if found is not None and 0 < found < 1 and (name == "precision" or not sign):
        return ("precision" if sign else "fixed"), found
    raise UserError(
        f"--threshold-rule {text}: write f1, precision=0.9, or a number between 0 and 1 such as 0.5"
    )


def number(text: str) -> float | None:
    """Return a number that is written as text; None if it is none."""
    try:
        return float(text)
    except ValueError:
        return None


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
    lowered = {*choices(), "loss", "threshold_rule", "device", "memory", "sample", "dp"}
    words = {k: v.lower() for k, v in values.items() if k in lowered and isinstance(v, str)}
    if "metric" in words:
        from polyphily.core.metrics import METRICS

        words["metric"] = METRICS.key(words["metric"])
    settings = Settings(**(values | words))
    settings.check()
    return settings
