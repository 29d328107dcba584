"""Defaults that serve federated averaging well, by kind of data and backbone.

Chosen on validation accuracy of FedAvg (`docs/defaults.md` has the trials); a user's flag wins.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from polyphily.federation.settings import Settings


@dataclass(frozen=True)
class Recipe:
    """Values for the knobs that `Settings` leaves open."""

    hidden: int = 64
    dropout: float = 0.5
    input_dropout: float = 0.0
    optimizer: str = "adam"
    lr: float = 0.01
    weight_decay: float = 0.0
    keep_optimizer: bool = False


BACKBONE = {"homophilic": "gcn", "heterophilic": "acm-gcn", "synthetic": "acm-gcn"}
USUAL_BACKBONE = "gcn"

RECIPES: dict[tuple[str, str], Recipe] = {}
USUAL = Recipe()


def fill(settings: Settings, kind: str, metric: str) -> Settings:
    """Settings with nothing left open, for data of this kind."""
    backbone = settings.backbone or BACKBONE.get(kind, USUAL_BACKBONE)
    recipe = RECIPES.get((kind, backbone)) or RECIPES.get(("", backbone)) or USUAL
    opened = {
        name: getattr(recipe, name)
        for name in Recipe.__dataclass_fields__
        if getattr(settings, name) is None
    }
    return replace(settings, backbone=backbone, metric=settings.metric or metric, **opened)
