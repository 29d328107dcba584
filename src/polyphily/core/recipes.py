"""Defaults that serve federated averaging well, by kind of data and backbone.

Chosen on FedAvg's validation score over twelve partitioned datasets, one knob changed at a time:
`benchmarks/defaults.py` makes the trials, `docs/defaults.md` shows them. A user's flag wins.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from polyphily.core.settings import Settings


@dataclass(frozen=True)
class Recipe:
    """Values for the knobs that `Settings` leaves open."""

    hidden: int = 64
    dropout: float = 0.5
    input_dropout: float = 0.5
    optimizer: str = "adam"
    lr: float = 0.01
    weight_decay: float = 0.0
    keep_optimizer: bool = True


BACKBONES = {"homophilic": "gpr-gnn"}
USUAL_BACKBONE = "acm-gcn"

USUAL = Recipe()
DENSE = Recipe(input_dropout=0.0)  # a handful of measured features, none of them to spare
EXCEPTIONS: dict[tuple[str, str], Recipe] = {
    ("homophilic", "acm-gcn"): Recipe(lr=0.003),
    ("heterophilic", "gat"): Recipe(input_dropout=0.0),
}


def fill(settings: Settings, kind: str, metric: str, *, dense: bool = False) -> Settings:
    """Settings with nothing left open.

    Args:
        settings: what the user chose.
        kind: of the data: "homophilic", "heterophilic", "synthetic", "fraud" or "files".
        metric: what selects on validation unless the user chose.
        dense: whether the features are dense.
    """
    backbone = settings.backbone or BACKBONES.get(kind, USUAL_BACKBONE)
    recipe = EXCEPTIONS.get((kind, backbone), DENSE if dense else USUAL)
    opened = {
        name: getattr(recipe, name)
        for name in Recipe.__dataclass_fields__
        if getattr(settings, name) is None
    }
    return replace(settings, backbone=backbone, metric=settings.metric or metric, **opened)
