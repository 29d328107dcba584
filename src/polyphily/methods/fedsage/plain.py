"""FedSage: the mean of the clients' GraphSAGE classifiers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from polyphily.core.method import parameter, register
from polyphily.methods.fedavg import FedAvg

CITE = "Zhang et al., Subgraph Federated Learning with Missing Neighbor Generation, NeurIPS 2021"


@register("fedsage", cite=CITE)
@dataclass(frozen=True)
class FedSage(FedAvg):
    """FedAvg of a GraphSAGE classifier: w = (1/M) sum_i w_i.

    It differs from `fedavg` in two points: the network is always GraphSAGE, and clients have equal
    weights. The paper samples five neighbours per layer; `--sample 5,5 --batch 32` does.
    """

    backbone = "sage"
    left_open: ClassVar[Sequence[str]] = (
        "The paper's classifier is GraphSAGE with sampled neighbours. By default a step sees all "
        "of them (set --sample to draw some).",
    )

    weighting: str = parameter(
        "uniform",
        "what a client's weight n_i counts: its nodes, its train nodes, or one each",
        symbol="n_i",
        choices=("nodes", "train", "uniform"),
    )

    def supported_backbones(self) -> Sequence[str]:
        return ("sage",)
