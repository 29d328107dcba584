"""MOON: a contrastive loss between representations of the local, global and last local model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from polyphily.core.cohort import Cohort
from polyphily.core.local import Local
from polyphily.core.messages import Message, model_part
from polyphily.core.method import parameter, register
from polyphily.core.search import Range
from polyphily.methods.fedavg import FedAvg
from polyphily.nn.backbones import Backbone

TRAINED = "trained"


@register("moon", cite="Li et al., Model-Contrastive Federated Learning, CVPR 2021")
@dataclass(frozen=True)
class Moon(FedAvg):
    """L = CE + mu · mean over train nodes of -log(e^g / (e^g + e^p)).

    g = cos(z, z_g) / T and p = cos(z, z_p) / T, where z, z_g and z_p are the embeddings of the
    model in training, of the received model and of the client's model after its last round. A
    client that has not trained yet has no z_p and uses CE alone.
    """

    labels_can_be_inputs: ClassVar[bool] = True

    mu: float = parameter(
        1.0, "weight of the contrastive term", symbol="μ", search=Range(0.1, 10.0, log=True)
    )
    temperature: float = parameter(
        0.5, "temperature of the contrastive term", symbol="T", search=Range(0.1, 1.0, log=True)
    )

    def init_client_state(self, cohort: Cohort, network: Backbone, params: Message) -> Message:
        return {TRAINED: torch.zeros(len(cohort), dtype=cohort.dtype, device=cohort.device)}

    def prepare_round(self, local: Local) -> Message:
        nodes = local.cohort.train_nodes
        return {
            "global": local.frozen(model_part(local.received)).embedding[nodes],
            "previous": local.frozen(model_part(local.memory)).embedding[nodes],
        }

    def loss(self, local: Local) -> Tensor:
        output = local.forward()
        z = output.embedding[local.cohort.train_nodes]
        near = F.cosine_similarity(z, local.constants["global"]) / self.temperature
        far = F.cosine_similarity(z, local.constants["previous"]) / self.temperature
        contrast = local.train_mean(F.softplus(far - near)) * local.memory[TRAINED]
        return local.cross_entropy(output.logits) + self.mu * contrast

    def update_memory(self, local: Local) -> Message:
        return {TRAINED: torch.ones_like(local.memory[TRAINED])}
