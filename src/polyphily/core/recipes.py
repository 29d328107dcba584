"""Default settings that suit federated averaging, by kind of data and backbone.

They were chosen on FedAvg's validation score over twelve partitioned datasets, changing one setting
at a time. `benchmarks/defaults.py` runs the trials, `benchmarks/depth.py` those of residual
backbones, and `docs/defaults.md` shows them. Settings that the user chooses take precedence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from polyphily.core.settings import Settings
from polyphily.nn.backbones import ALL, BACKBONES


@dataclass(frozen=True)
class Recipe:
    """Values for the settings that are None in `Settings` unless the user chooses."""

    hidden: int = 64
    layers: int = 2
    dropout: float = 0.5
    input_dropout: float = 0.5
    optimizer: str = "adam"
    lr: float = 0.01
    weight_decay: float = 0.0
    keep_optimizer: bool = True


BACKBONE_BY_KIND = {"homophilic": "gpr-gnn"}
USUAL_BACKBONE = "acm-gcn"

USUAL = Recipe()
DENSE = Recipe(input_dropout=0.0)  # few measured features, all of them needed


def fill(settings: Settings, kind: str, metric: str, *, dense: bool = False) -> Settings:
    """Return settings with a value for everything that the user left open.

    Args:
        settings: what the user chose.
        kind: the kind of data: "homophilic", "heterophilic", "synthetic", "fraud" or "files".
        metric: the metric that selects on validation unless the user chose one.
        dense: whether the features are dense.
    """
    backbone = settings.backbone or BACKBONE_BY_KIND.get(kind, USUAL_BACKBONE)
    defaults = BACKBONES.find(backbone).defaults
    own = defaults.get(kind, {})
    # Defaults for a kind of data change the usual recipe, also if features are dense: they were
    # chosen beside it.
    recipe = replace(DENSE if dense and not own else USUAL, **{**defaults.get(ALL, {}), **own})
    opened = {
        name: getattr(recipe, name)
        for name in Recipe.__dataclass_fields__
        if getattr(settings, name) is None
    }
    return replace(
        settings,
        backbone=backbone,
        metric=settings.metric or metric,
        on_disk=bool(settings.on_disk),
        **opened,
    )
