"""FedGTA: clients whose propagated labels have similar moments are mixed by their confidence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from polyphily.core.local import Local
from polyphily.core.messages import (
    Declared,
    Message,
    Sizes,
    Uploads,
    count,
    statistic,
)
from polyphily.core.method import parameter, register
from polyphily.core.search import Range
from polyphily.methods.mixing import ALONE, Mixing
from polyphily.nn.segments import Segments

SIGNATURE, CONFIDENCE, NODES = "signature", "confidence", "nodes"
SMALLEST = 1e-8  # added inside the logarithm


@register(
    "fedgta", cite="Li et al., FedGTA: Topology-aware Averaging for Federated Graph Learning, 2023"
)
@dataclass(frozen=True)
class FedGTA(Mixing):
    """Client i receives sum_j H_j w_j / sum_j H_j over itself and all j with cos(s_i, s_j) > eps.

    After training, each client propagates its soft labels: F^0 is the one-hot label at train nodes
    and the prediction elsewhere. Each step takes F to (1 - a) Â F + a F^0, and adds F^0 once more
    at train nodes. With B = softmax(F) and B' = softmax(F / T), both one-hot at train nodes,

        s = mean_v B_vc^p, and with `signature=hybrid` mean_v (B_vc - mean B_c)^p,   p = 1 … P,
        H = sum_v degree_v (C / e + sum_c B'_vc ln B'_vc).

    Clients among which no H is above zero are weighted by their nodes.
    """

    evaluated = "global"  # each client's mixture is scored as the server sends it
    selection = "federation"
    left_open: ClassVar[Sequence[str]] = (
        "The order P of the moments, their kind and the threshold are tuned for each dataset; the "
        "defaults are those for Cora in the authors' code (CiteSeer: hybrid, 20, 0.6; PubMed: "
        "origin, 13, 0.65).",
        "High raw moments of labels that are one-hot at train nodes tell the shares of the classes "
        "among these nodes to about 1e-4; the signature is declared as a statistic, which "
        "differential privacy clips and noises.",
        "The authors' code begins with the true label of a node that is in no part of the split; "
        "here only train labels are used.",
        "A threshold of 1 or more leaves a client without partners; each client is always its own "
        "partner here.",
        "A client without edges has no confidence, and a group of such clients would divide by "
        "zero; the group is then weighted by nodes.",
        "The authors' code sends replies by position, which is wrong if some clients are absent. "
        "Here an absent client keeps its last mixture, and one that has not answered yet receives "
        "the plain mean.",
    )

    signature: str = parameter(
        "hybrid",
        "which moments are compared: raw (origin), or raw and central (hybrid)",
        choices=("hybrid", "origin"),
    )
    orders: int = parameter(6, "highest order of the moments", symbol="P")
    threshold: float = parameter(
        0.5,
        "cosine above which two clients are partners; 1: none are",
        symbol="ε",
        search=Range(0.1, 0.95),
    )
    propagation: int = parameter(5, "steps of label propagation", symbol="k", search=Range(1, 10))
    restart: float = parameter(
        0.5, "share of the initial labels in each step", symbol="α", search=Range(0.1, 0.9)
    )
    temperature: float = parameter(
        20.0,
        "temperature of the labels in the confidence",
        symbol="T",
        search=Range(1.0, 50.0, log=True),
    )
    confidence: str = parameter(
        "topology",
        "what a model weighs: the confidence H (topology), or the client's number of nodes (nodes)",
        choices=("topology", "nodes"),
    )
    shuffled: bool = parameter(
        False, "control: the server deals the signatures out to the clients at random"
    )

    def without_effect(self) -> Mapping[str, str]:
        idle = {}
        about_labels = ("propagation", "restart")
        if self.threshold >= 1:
            reason = "no clients are partners; set threshold below 1 as well"
            names = ("signature", "orders", *about_labels, "temperature", "confidence", "shuffled")
            return dict.fromkeys(names, reason)
        if self.confidence == "nodes":
            idle["temperature"] = "models are weighted by nodes; set confidence=topology as well"
        if self.threshold < -1:
            reason = "all clients are partners; set threshold above -1 as well"
            idle |= dict.fromkeys(("signature", "orders", "shuffled"), reason)
            if self.confidence == "nodes":
                idle |= dict.fromkeys(about_labels, reason)
        if self.restart == 1:
            idle["propagation"] = "each step returns the initial labels; set restart below 1"
        if self.propagation == 0:
            idle["restart"] = "labels are not propagated; set propagation above 0 as well"
        return idle

    # What travels ----------------------------------------------------------------------------

    def uploads(self, sizes: Sizes) -> tuple[Declared, ...]:
        kinds = {"origin": 1, "hybrid": 2}[self.signature]
        return (
            *super().uploads(sizes),
            statistic(
                SIGNATURE,
                (kinds * self.orders * sizes.classes,),
                ALONE,
                meaning="moments of the propagated labels, with the shares of classes in training",
            ),
            statistic(CONFIDENCE, (), ALONE, meaning="confidence H of the propagated labels"),
            count(NODES, (), ALONE, meaning="number of nodes, a weight where no H is above 0"),
        )

    # At the clients --------------------------------------------------------------------------

    def upload(self, local: Local) -> Message:
        cohort, graph = local.cohort, local.cohort.forward_only
        soft = local.frozen(local.params).logits.softmax(dim=1)
        known = torch.zeros_like(soft).index_put((cohort.train_nodes,), cohort.train_onehot)
        trains = known.any(dim=1, keepdim=True)
        start = found = torch.where(trains, known, soft)
        for _ in range(self.propagation):
            found = (1 - self.restart) * (graph.gcn @ found) + self.restart * start + known
        sharp, flat = (
            torch.where(trains, known, (found / t).softmax(dim=1)) for t in (1, self.temperature)
        )
        return {
            **super().upload(local),
            SIGNATURE: self.moments(sharp, graph.segments),
            CONFIDENCE: graph.segments.sum(graph.degrees * certainty(flat)),
            NODES: cohort.constant(graph.segments.sizes),
        }

    def moments(self, labels: Tensor, segments: Segments) -> Tensor:
        """Return the moments of each client's labels over its nodes, `[K, kinds · P · C]`."""
        bases = [labels]
        if self.signature == "hybrid":
            bases.append(labels - segments.expand(segments.mean(labels)))
        powers = [base**p for base in bases for p in range(1, self.orders + 1)]
        return torch.cat([segments.mean(power) for power in powers], dim=1)

    # At the server ---------------------------------------------------------------------------

    def mixing(self, uploads: Uploads, rng: np.random.Generator) -> Tensor:
        direction = F.normalize(uploads[SIGNATURE], dim=1)
        if self.shuffled:
            direction = direction[rng.permutation(len(direction)).tolist()]
        own = torch.eye(len(direction), dtype=torch.bool, device=direction.device)
        partners = own | ((direction @ direction.T).clamp(max=1) > self.threshold)
        nodes = partners * uploads[NODES]
        sure = uploads[CONFIDENCE].clamp(min=0)  # noise may have made it negative
        weights = partners * sure if self.confidence == "topology" else nodes
        certain = weights.sum(dim=1, keepdim=True) > 0
        weights = torch.where(certain, weights, nodes)
        return weights / weights.sum(dim=1, keepdim=True)


def certainty(labels: Tensor) -> Tensor:
    """Return C / e + sum_c b ln b of each node, which is at least 0: b ln b is at least -1 / e."""
    return labels.shape[1] / math.e + (labels * (labels + SMALLEST).log()).sum(dim=1)
