"""FedProx: FedAvg with a proximal term in each client's loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from polyphily.core.local import Local
from polyphily.core.messages import Message, model_part
from polyphily.core.method import parameter, register
from polyphily.core.search import Range
from polyphily.methods.fedavg import FedAvg


@register("fedprox", cite="Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020")
@dataclass(frozen=True)
class FedProx(FedAvg):
    """L = CE + (mu/2) ||w - w_received||^2."""

    labels_can_be_inputs: ClassVar[bool] = True

    mu: float = parameter(
        0.01, "weight of the proximal term", symbol="μ", search=Range(1e-3, 1.0, log=True)
    )

    def proximal(self, local: Local) -> tuple[float, Message] | None:
        first = local.taken == 0  # w is w_received, and the term is zero
        return None if first else (self.mu, model_part(local.received))
