"""FED-PUB: models that answer a random graph alike are mixed, and private masks select weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
    State,
    Uploads,
    model_part,
    statistic,
    with_prefix,
)
from polyphily.core.method import parameter, register
from polyphily.core.optimizers import OptimizerSpec
from polyphily.core.search import Range
from polyphily.methods.fedgsp.collaboration import uniform_self_weight
from polyphily.methods.fedpub.network import MASKS, MaskedNetwork
from polyphily.methods.fedpub.proxy import Proxy
from polyphily.methods.mixing import ALONE, HEARD, WEIGHTS, Mixing
from polyphily.nn import backbones
from polyphily.nn.backbones import BACKBONES, Backbone, Shape
from polyphily.nn.sparse import flat

EMBEDDING = "embedding"
NEARLY_EVEN = 0.99  # share of the largest entropy above which mixtures are called even


@register("fedpub", cite="Baek et al., Personalized Subgraph Federated Learning, ICML 2023")
@dataclass(frozen=True)
class FedPub(Mixing):
    """Client i receives sum_j a_ij W_j with a_ij = softmax_j(tau cos(e_i, e_j)).

    e_i is the functional embedding of client i: the mean output, over the nodes of a random proxy
    graph that all clients have, of its last convolution after training.

    Every weight matrix is used as W ∘ m. The mask m begins as ones, is trained, and stays with the
    client; in evaluation entries with |m| < `prune` are zero. The loss is

        L = CE + lambda_1 sum ||m||_1 + lambda_2 sum ||W - W_received||_2,

    over tensors, the last term from the second round. With `penalty=soft` the masks are shrunk
    instead of penalised: after a round of s steps m becomes sign(m) max(|m| - s lr lambda_1, 0).
    Adam divides the scale of a gradient out, so that under the penalty an entry that no data uses
    loses lr in each step whatever lambda_1 is. Shrunk, it loses lambda_1 lr. As Adam moves an entry
    by at most about lr, lambda_1 is the share of that which the data must demand.
    """

    evaluated = "personal"
    selection = "federation"
    left_open: ClassVar[Sequence[str]] = (
        "Both penalties of the authors' code are computed on detached tensors and train nothing; "
        "here they have gradients. code=on turns them off.",
        "Under Adam the L1 penalty shrinks unused entries of the masks by the learning rate in "
        "every step, whatever its weight is; the default shrinks them by a soft threshold "
        "(penalty=soft).",
        "The server of the authors' code draws the proxy graph and sends it; here every client "
        "draws it from `proxy_seed`, so that it need not travel.",
        "The paper has a linear classifier behind two convolutions, and compares what the second "
        "one returns (head=linear). By default the network is the backbone, and its output is "
        "compared.",
        "Masks have no weight decay: under Adam it would act as the L1 penalty does.",
        "How partial participation works is not stated. As in the authors' code, models of the "
        "clients that answered are mixed, an absent client keeps its last mixture, and a client "
        "that has not answered yet receives the plain mean.",
    )

    tau: float = parameter(
        10.0,
        "sharpness of the mixing weights; the authors' scripts have 3 for disjoint and 5 for "
        "overlapping clients",
        symbol="τ",
        paper=3.0,
        search=Range(1.0, 30.0, log=True),
    )
    masks: bool = parameter(True, "whether weights have private masks", symbol="m")
    sparsity: float = parameter(
        0.3,
        "weight of the masks' penalty, or of their soft threshold",
        symbol="λ1",
        paper=0.001,
        code=0.0,
        search=Range(1e-3, 0.5, log=True),
    )
    penalty: str = parameter(
        "soft",
        "what makes masks sparse: a soft threshold after each round (soft), or the L1 norm in the "
        "loss (loss)",
        choices=("soft", "loss"),
        paper="loss",
    )
    prune: float = parameter(
        0.001, "entries of a mask with a smaller magnitude are zero in evaluation"
    )
    proximity: float = parameter(
        0.001,
        "weight of the distance to the received weights",
        symbol="λ2",
        code=0.0,
        search=Range(1e-4, 1.0, log=True),
    )
    head: str = parameter(
        "none",
        "what classifies: the last layer of the backbone (none), or a linear layer behind all of "
        "them (linear)",
        choices=("none", "linear"),
        paper="linear",
    )
    mixture: str = parameter(
        "similarity",
        "similarity: the weights of the method; control: every client has their mean self-weight, "
        "and the others share the rest equally; even: equal weights; own: no mixing",
        choices=("similarity", "control", "even", "own"),
    )
    proxy_seed: int = parameter(0, "seed of the proxy graph, the same at all clients")

    @property
    def compares(self) -> bool:
        """True if the clients' models are compared."""
        return self.mixture in ("similarity", "control")

    def without_effect(self) -> Mapping[str, str]:
        idle: dict[str, str] = {}
        if not self.masks:
            reason = "there are no masks; set masks=on as well"
            idle |= dict.fromkeys(("sparsity", "penalty", "prune"), reason)
        elif self.sparsity == 0:
            idle["penalty"] = "its weight is 0; set sparsity above 0 as well"
        if not self.compares:
            reason = "the clients' models are not compared; set mixture=similarity as well"
            idle |= dict.fromkeys(("tau", "proxy_seed"), reason)
        return idle

    # The network -----------------------------------------------------------------------------

    def supported_backbones(self) -> Sequence[str]:
        return tuple(
            name
            for name, backbone in BACKBONES.items()
            if backbone.weighted_edges and not (self.head == "linear" and backbone.headless)
        )

    def build(self, backbone: str, shape: Shape, seed: int) -> Backbone:
        if backbone not in self.supported_backbones():
            raise ValueError(f"fedpub's proxy graph has no edges that '{backbone}' could read")
        gnn = backbones.build(backbone, shape, seed, linear_head=self.head == "linear")
        return MaskedNetwork(gnn, masked=self.masks, prune=self.prune)

    def shares(self, network: Backbone, parameter: str) -> bool:
        return not parameter.startswith(MASKS)

    # What travels ----------------------------------------------------------------------------

    def uploads(self, sizes: Sizes) -> tuple[Declared, ...]:
        models = super().uploads(sizes)
        if not self.compares:
            return models
        width = sizes.hidden if self.head == "linear" else sizes.classes
        meaning = "mean output of the model on the proxy graph"
        return (*models, statistic(EMBEDDING, (width,), ALONE, meaning=meaning))

    # At the clients --------------------------------------------------------------------------

    def phase(self, round_index: int) -> bool:
        """Return whether the round is after the first."""
        return round_index > 0

    def optimizer_for(self, parameter: str, run: OptimizerSpec) -> OptimizerSpec:
        return replace(run, weight_decay=0.0) if parameter.startswith(MASKS) else run

    def loss(self, local: Local) -> Tensor:
        loss = super().loss(local)
        if self.sparsity and self.penalty == "loss":
            for mask in with_prefix(local.params, MASKS).values():
                loss = loss + self.sparsity * flat(mask).abs().sum(dim=1)
        if self.proximity and local.phase:
            for name, anchor in model_part(local.received).items():
                moved = flat(local.params[name] - anchor)
                loss = loss + self.proximity * torch.linalg.vector_norm(moved, dim=1)
        return loss

    def train(self, local: Local) -> None:
        super().train(local)
        if self.sparsity and self.penalty == "soft":
            way = self.sparsity * local.learning_rates * local.cohort.constant(local.steps)
            with torch.no_grad():
                for mask in with_prefix(local.params, MASKS).values():
                    mask.copy_(shrunk(mask, way))

    def upload(self, local: Local) -> Message:
        sent = super().upload(local)
        if not self.compares:
            return sent
        network, seed = local.network, self.proxy_seed
        assert isinstance(network, MaskedNetwork)
        proxy = local.cohort.cached(("fedpub/proxy", seed), lambda cohort: Proxy(cohort, seed))
        return {**sent, EMBEDDING: proxy.segments.mean(network.convolved(local.params, proxy))}

    # At the server ---------------------------------------------------------------------------

    def mixing(self, uploads: Uploads, rng: np.random.Generator) -> Tensor:
        if not self.compares:
            like = next(iter(uploads.model.values()))
            own = torch.eye(len(like), dtype=like.dtype, device=like.device)
            return own if self.mixture == "own" else torch.full_like(own, 1 / len(own))
        direction = F.normalize(uploads[EMBEDDING], dim=1)
        weights = (self.tau * direction @ direction.T).softmax(dim=1)
        return uniform_self_weight(weights) if self.mixture == "control" else weights

    def remarks(self, state: State) -> Sequence[str]:
        weights = state[WEIGHTS].double()
        clients = len(weights)
        if self.mixture != "similarity" or clients < 2 or not bool(state[HEARD].all()):
            return ()
        entropy = -torch.special.xlogy(weights, weights).sum(dim=1).mean().item()
        share = entropy / math.log(clients)
        if share < NEARLY_EVEN:
            return ()
        return (
            f"the mixing weights have {share:.1%} of the largest entropy: the models were averaged "
            "almost evenly; a larger tau makes them more personal",
        )


def shrunk(mask: Tensor, way: Tensor) -> Tensor:
    """Return sign(m) max(|m| - way, 0), with a way for each client, `[K]`."""
    way = way.view(-1, *[1] * (mask.dim() - 1))
    return mask.sign() * (mask.abs() - way).clamp(min=0)
