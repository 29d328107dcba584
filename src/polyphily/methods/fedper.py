"""FedPer: all layers but the classifier are shared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from polyphily.core.method import register
from polyphily.methods.fedavg import FedAvg
from polyphily.nn.backbones import Backbone


@register("fedper", cite="Arivazhagan et al., Federated Learning with Personalization Layers, 2019")
@dataclass(frozen=True)
class FedPer(FedAvg):
    """FedAvg over all parameters except those of the last layer, which are personal."""

    labels_can_be_inputs: ClassVar[bool] = True
    evaluated = "personal"

    def shares(self, network: Backbone, parameter: str) -> bool:
        return not network.is_classifier(parameter)
