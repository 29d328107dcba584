"""FedTAD: the server distils reliable knowledge of the clients' models into their mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

import numpy as np

from polyphily.core.local import Local
from polyphily.core.messages import (
    Declared,
    Individually,
    Message,
    Sizes,
    State,
    Uploads,
    as_model,
    count,
    model,
    model_part,
    statistic,
)
from polyphily.core.method import parameter, register
from polyphily.core.search import Range
from polyphily.errors import UserError
from polyphily.methods.fedavg import WEIGHT, FedAvg
from polyphily.methods.fedtad.distillation import (
    GENERATOR,
    STUDENT,
    Distillation,
    class_weights,
)
from polyphily.methods.fedtad.reliability import class_reliability
from polyphily.nn.backbones import BACKBONES

RELIABILITY = "reliability"
WHY = "it runs each client's model as a teacher, weighted by class"

# Hyperparameters that nothing but the distillation, or the training of the generator, uses.
OF_DISTILLATION = (
    *("weights", "walk", "nodes", "noise", "neighbours", "generator_steps", "generator_lr"),
    *("semantic", "diversity", "distil_steps", "distil_lr", "decay"),
)
OF_GENERATOR = ("generator_lr", "semantic", "diversity")


@register(
    "fedtad",
    cite="Zhu et al., FedTAD: Topology-aware Data-free Knowledge Distillation for Subgraph "
    "Federated Learning, IJCAI 2024",
)
@dataclass(frozen=True)
class FedTAD(FedAvg):
    """w = FedAvg, then w = argmin sum_ic w_ic |f_w - f_i| on pseudo-graphs that the server makes.

    A client's knowledge of a class is as reliable as its train nodes of the class resemble their
    neighbours: w_ic = CKR_ic / sum_j CKR_jc. A generator at the server draws labelled pseudo-nodes
    that the clients' models recognise and on which the mean of the models disagrees with them; a
    graph joins each to its nearest. Clients train by cross-entropy, as in FedAvg.
    """

    left_open: ClassVar[Sequence[str]] = (
        "Details of the server follow the authors' code, such as the widths of the generator and "
        "the factor K of the diversity term.",
        "The authors' code does not walk for its topology embedding: it stores node ids. Here: the "
        "probabilities that a random walk is back after 1 to 5 steps.",
        "Isolated train nodes and classes without train nodes leave fractions undefined. Here: r = "
        "1, and weight 0.",
        "In the authors' code a pseudo-node counts among its own nearest, so that 4 others are "
        "left (neighbours=4). Here it does not count.",
        "The generator's gradient of |f - f_i| goes through the student alone, as in the authors' "
        "code.",
        "Clients send their reliability in every round, not once: C numbers, and a client that "
        "joins late is heard.",
        "Nothing bounds the generated features. If they grow, disagreement grows with them.",
    )

    weights: str = parameter(
        "reliability",
        "what teachers are weighted by for each class: CKR, or one over their number",
        choices=("reliability", "uniform"),
    )
    walk: int = parameter(5, "longest random walk of the topology embedding", symbol="p")
    server_epochs: int = parameter(
        5, "rounds of generator and distillation at the server; 0: none, which is FedAvg"
    )
    nodes: int = parameter(100, "number of pseudo-nodes")
    noise: int = parameter(32, "width of the generator's noise")
    neighbours: int = parameter(
        5, "nearest pseudo-nodes that one is joined to; 0: no edges", symbol="k", code=4
    )
    generator_steps: int = parameter(
        1, "steps of the generator in each epoch; 0: it stays as it was drawn"
    )
    generator_lr: float = parameter(
        0.001, "learning rate of the generator", search=Range(1e-4, 1e-2, log=True)
    )
    semantic: float = parameter(1.0, "weight of the teachers' cross-entropy", symbol="λ1")
    diversity: float = parameter(
        1.0,
        "weight of the penalty of like pseudo-nodes",
        symbol="λ2",
        search=Range(0.1, 10.0, log=True),
    )
    distil_steps: int = parameter(5, "steps of the global model in each epoch")
    distil_lr: float = parameter(
        1e-4,
        "learning rate of the distillation; small, so that the global model stays near the mean",
        paper=0.001,
        search=Range(1e-5, 1e-3, log=True),
    )
    decay: float = parameter(5e-4, "weight decay of both")

    def __post_init__(self) -> None:
        steps = ("server_epochs", "generator_steps", "distil_steps", "neighbours")
        for name, least in {**dict.fromkeys(steps, 0), "nodes": 2, "noise": 1, "walk": 1}.items():
            if getattr(self, name) < least:
                raise UserError(f"fedtad: '{name}' must be {least} or more")

    @property
    def distils(self) -> bool:
        """True if the server changes the mean."""
        return self.server_epochs > 0 and self.distil_steps > 0

    def without_effect(self) -> Mapping[str, str]:
        if not self.distils:
            empty = "server_epochs" if not self.server_epochs else "distil_steps"
            reason = f"nothing is distilled; set {empty} above 0"
            return {n: reason for n in (*OF_DISTILLATION, "server_epochs") if n != empty}
        idle = {}
        if self.weights == "uniform":
            idle["walk"] = "no reliability is computed; set weights=reliability"
        if not self.generator_steps:
            reason = "the generator is not trained; set generator_steps above 0"
            idle |= dict.fromkeys(OF_GENERATOR, reason)
        return idle

    def supported_backbones(self) -> Sequence[str]:
        return tuple(name for name, backbone in BACKBONES.items() if backbone.weighted_edges)

    # What travels ----------------------------------------------------------------------------

    def uploads(self, sizes: Sizes) -> tuple[Declared, ...]:
        if not self.distils:
            return super().uploads(sizes)
        why = Individually(WHY)
        weight = count(WEIGHT, (), why, meaning="weight of the client in the mean")
        if self.weights == "uniform":
            return (model(sizes, why), weight)
        reliability = statistic(
            RELIABILITY, (sizes.classes,), why, meaning="reliability of each class (CKR)"
        )
        return (model(sizes, why), weight, reliability)

    def upload(self, local: Local) -> Message:
        sent = super().upload(local)
        if self.distils and self.weights == "reliability":
            sent[RELIABILITY] = class_reliability(local.cohort, self.walk)
        return sent

    # At the server ---------------------------------------------------------------------------

    def needs_whole_model(self) -> str | None:
        return "the server runs them to distil" if self.distils else None

    def aggregate(self, state: State, uploads: Uploads, rng: np.random.Generator) -> State:
        after = super().aggregate(state, uploads, rng)
        if not self.distils:
            return after
        network, teachers, mean = uploads.network, uploads.model, model_part(after)
        assert network is not None, "the server passes its network on"
        if self.weights == "reliability":
            weights = class_weights(uploads[RELIABILITY])
        else:
            clients = len(uploads[WEIGHT])
            weights = uploads[WEIGHT].new_full((clients, network.shape.classes), 1 / clients)
        kept = {n: t for n, t in state.items() if n.startswith((GENERATOR, STUDENT))}
        student, kept = self.distillation(network, mean, teachers, weights, kept, rng)
        return {**after, **as_model(student), **kept}

    @property
    def distillation(self) -> Distillation:
        """The training at the server, with this method's settings."""
        return Distillation(**{own.name: getattr(self, own.name) for own in fields(Distillation)})
