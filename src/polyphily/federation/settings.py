"""What a run is told: every knob of training, with its default and its bounds."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from polyphily.errors import UserError, unknown

ENGINES = ("stacked", "sequential")
SELECTIONS = ("method", "federation", "client")


@dataclass(frozen=True)
class Settings:
    """Knobs of training. Those that are None are filled in from `recipes` for data and backbone.

    Attributes:
        rounds: communication rounds.
        epochs: full-batch steps a client takes per round: a number, or a range "1-5" from which each
            client draws anew in every round.
        backbone: which network.
        hidden: width of the hidden layers.
        layers: number of layers.
        dropout: before every layer but the first.
        input_dropout: on the input features.
        heads: attention heads of gat.
        hops: propagation steps of gpr-gnn.
        optimizer: adam, adamw or sgd.
        lr: learning rate.
        weight_decay: coefficient of the decay.
        momentum: of sgd.
        clip: largest gradient norm per client; 0 is off.
        keep_optimizer: whether the optimiser's moments survive from round to round.
        participation: share of the clients selected in each round.
        failures: share of the selected clients that fail to answer.
        engine: "stacked", or "sequential" (one client after another: the reference).
        device: "cpu" or "cuda".
        dtype: "float32" or "float64".
        evaluate_every: rounds between evaluations; the last round is always evaluated.
        patience: evaluations without a better validation score before stopping; 0 never stops.
        selection: whose validation score picks the best round: the whole federation's, each client's
            own, or as the method prefers.
        metric: what selects on validation, "accuracy" or "auc"; None takes the dataset's own.
    """

    rounds: int = 100
    epochs: int | str = 3
    backbone: str | None = None
    hidden: int | None = None
    layers: int = 2
    dropout: float | None = None
    input_dropout: float | None = None
    heads: int = 4
    hops: int = 10
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
    evaluate_every: int = 1
    patience: int = 0
    selection: str = "method"
    metric: str | None = None

    def epoch_range(self) -> tuple[int, int]:
        """The fewest and the most local steps a client takes."""
        try:
            low, _, high = str(self.epochs).partition("-")
            bounds = int(low), int(high or low)
        except ValueError:
            bounds = (0, 0)
        if not 1 <= bounds[0] <= bounds[1]:
            raise UserError(
                f"epochs: '{self.epochs}' is neither a positive number nor a range such as 1-5"
            )
        return bounds

    def check(self) -> None:
        """Raises a `UserError` for a value out of bounds."""
        self.epoch_range()
        one = {"engine": ENGINES, "selection": SELECTIONS, "dtype": ("float32", "float64")}
        one |= {"optimizer": ("adam", "adamw", "sgd"), "metric": ("accuracy", "auc")}
        for name, choices in one.items():
            value = getattr(self, name)
            if value is not None and value not in choices:
                raise unknown(name, value, choices)
        bounds: dict[str, tuple[float, float, str]] = {
            "rounds": (1, float("inf"), "at least 1"),
            "hidden": (1, float("inf"), "at least 1"),
            "layers": (1, 64, "between 1 and 64"),
            "heads": (1, 1024, "at least 1"),
            "hops": (1, 1024, "at least 1"),
            "dropout": (0, 0.999, "at least 0 and below 1"),
            "input_dropout": (0, 0.999, "at least 0 and below 1"),
            "lr": (1e-12, float("inf"), "above 0"),
            "weight_decay": (0, float("inf"), "at least 0"),
            "momentum": (0, 0.9999, "at least 0 and below 1"),
            "clip": (0, float("inf"), "at least 0"),
            "participation": (1e-9, 1, "above 0 and at most 1"),
            "failures": (0, 0.999, "at least 0 and below 1"),
            "evaluate_every": (1, float("inf"), "at least 1"),
            "patience": (0, float("inf"), "at least 0"),
        }
        for name, (low, high, words) in bounds.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise UserError(f"{name.replace('_', '-')}: {value} is out of bounds, give {words}")


def names() -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(Settings))


def from_mapping(values: dict[str, Any]) -> Settings:
    """Settings from keyword arguments, with a suggestion for a name that does not exist."""
    for name in values:
        if name not in names():
            raise unknown("setting", name, names())
    settings = Settings(**values)
    settings.check()
    return settings
