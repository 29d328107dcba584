"""FedSPA: neighbours of the same and of another class pass through channels of their own, and the
server favours clients whose homophily is near the federation's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from polyphily.core.cohort import Cohort
from polyphily.core.local import Local, Message, as_model
from polyphily.core.method import State, Uploads, parameter, register
from polyphily.errors import UserError
from polyphily.graphs.graph import UNLABELLED
from polyphily.heterogeneity.spectral import Laplacian, high_frequency_area
from polyphily.methods.fedavg import WEIGHT, FedAvg
from polyphily.methods.fedspa.network import (
    CHANNELS,
    ACMDecoupledConv,
    AttentionDecoupledConv,
    Decoupled,
    PlainDecoupledConv,
    channel_of,
    edge_kinds,
)
from polyphily.nn.backbones import BACKBONES, Backbone, Output, Shape
from polyphily.nn.draws import Draws
from polyphily.nn.sparse import flat

AREA, FISHER = "high_frequency_area", "fisher/"


@register(
    "fedspa",
    cite="Tan et al., Generalizable Federated Graph Learning under Homophily Heterogeneity, "
    "CVPR 2025",
)
@dataclass(frozen=True)
class FedSPA(FedAvg):
    """SFPD at the clients, HBDA at the server.

    SFPD (equations 4 to 6): z_v = f_self(z_v) + sums of f_hom, f_het and f_unk over the neighbours
    of each kind, theta_unk = alpha_v theta_hom + (1 - alpha_v) theta_het, alpha_v =
    sigmoid(phi(z_v)).
    HBDA (equations 7 to 12): weights exp(-gamma), gamma the min-max normalised deviation from the
    federation: of the high-frequency area for the harmoniser and whatever neither channel owns, of
    the diagonal Fisher information for each channel.

    The network is the paper's, SFPD in ACM-GCN, whatever the backbone's name, but for two: "gcn"
    and "sage" are equation 6 alone, with that backbone's normalisation. Without `sfpd` it is the
    plain backbone of that name; without all three parts this is FedAvg.
    """

    backbone = "acm-gcn"
    averaged = "the server weighs each client by how far its homophily is from the others'"

    sfpd: bool = parameter(True, "separate channels for homophilic and heterophilic neighbours")
    prior: bool = parameter(
        True, "weights by high-frequency area; off: by size, as FedAvg", symbol="w^h"
    )
    posterior: bool = parameter(
        True, "the channels' weights by Fisher information; off: by size, as FedAvg", symbol="w^d"
    )
    form: str = parameter(
        "paper",
        "what the channels own: weight matrices as the paper writes, or attention vectors as the "
        "authors' code has it (in ACM-GCN only)",
        choices=("paper", "code"),
    )
    normalise: str = parameter(
        "mean",
        "sums over neighbours are divided by the degree (mean), or not, as printed (sum)",
        choices=("mean", "sum"),
        paper="sum",
    )
    hidden_share: float = parameter(
        0.5,
        "share of train nodes whose labels each step hides from the network and takes the loss on: "
        "else train nodes' edges tell them their labels, and test nodes' do not",
        paper=0.0,
    )
    tied: bool = parameter(
        False, "all channels start equal: the network starts as the backbone (the paper is silent)"
    )
    channel_lr: float = parameter(
        2.0,
        "factor on the channels' gradients, their learning-rate factor under SGD: the two share "
        "the step on unknown edges; Adam's steps do not depend on it",
        paper=1.0,
    )
    laplacian: str = parameter(
        "symmetric",
        "of the high-frequency area: normalised, or D - A as in the authors' code",
        symbol="L",
        choices=("symmetric", "combinatorial"),
    )

    def __post_init__(self) -> None:
        if not 0 <= self.hidden_share <= 1:
            raise UserError(f"fedspa: 'hidden_share' is from 0 to 1, not {self.hidden_share}")

    # At the clients --------------------------------------------------------------------------

    def whole_graph(self) -> str | None:
        if not self.sfpd:
            return None
        return "the channels' Fisher information is that of all train nodes (without: sfpd=off)"

    def build(self, backbone: str, shape: Shape, seed: int) -> Backbone:
        if not self.sfpd or backbone not in BACKBONES:  # an unknown name is refused there
            return super().build(backbone, shape, seed)

        def layer(inputs: int, outputs: int) -> torch.nn.Module:
            if self.form == "code":
                return AttentionDecoupledConv(inputs, outputs, self.normalise, self.tied)
            if backbone in ("gcn", "sage"):
                usual = "gcn" if backbone == "gcn" else "mean"
                chosen = usual if self.normalise == "mean" else "sum"
                return PlainDecoupledConv(inputs, outputs, chosen, self.tied)
            return ACMDecoupledConv(inputs, outputs, self.normalise, self.tied)

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Decoupled(shape, layer)

    def remember(self, cohort: Cohort, network: Backbone, params: Message) -> Message:
        if not self.prior:
            return {}
        kind = cast(Laplacian, self.laplacian)
        areas = [high_frequency_area(graph, kind) for graph in cohort.graphs]  # equation 7
        return {AREA: torch.tensor(areas, dtype=cohort.dtype, device=cohort.device)}

    def loss(self, local: Local) -> Tensor:
        if not self.sfpd or self.hidden_share == 0 or local.draws is None:
            return super().loss(local)
        cohort = local.cohort
        hidden = self.hides(cohort, local.draws)
        labels = cohort.labels.index_put(
            (cohort.train_nodes,), torch.where(hidden, UNLABELLED, cohort.train_labels)
        )
        kinds = edge_kinds(cohort, labels, moving=True)
        output: Output = functional_call(local.network, local.params, (cohort, local.draws, kinds))
        logits = output.logits[cohort.train_nodes]
        losses = F.cross_entropy(logits, cohort.train_labels, reduction="none") * hidden
        count = cohort.train_segments.sum(hidden.to(cohort.dtype))
        return cohort.train_segments.sum(losses) / count.clamp(min=1)

    def hides(self, cohort: Cohort, draws: Draws) -> Tensor:
        """Which train nodes hide their labels in this step: the given share of each client's, one
        at least, those that draw the lowest numbers."""
        segments = cohort.train_segments
        lots = draws.uniform(1, segments.pointers).squeeze(1)
        order = (lots + segments.owner).argsort()  # client by client, as the nodes are
        shares = (max(1, round(self.hidden_share * size)) for size in segments.sizes)
        quota = cohort.constant(tuple(shares)).long()[segments.owner]
        starts = segments.starts[:-1].long()[segments.owner]
        rank = torch.arange(len(order), device=order.device) - starts
        return torch.empty_like(quota, dtype=torch.bool).index_put((order,), rank < quota)

    def correct(self, local: Local, grads: Message) -> Message:
        if local.optimizer.kind != "sgd":  # Adam divides the factor out again
            return grads
        return {n: g * self.channel_lr if channel_of(n) else g for n, g in grads.items()}

    def upload(self, local: Local) -> Message:
        message = super().upload(local)
        if self.prior:
            message[AREA] = local.memory[AREA]
        if self.posterior and self.sfpd:
            message |= {FISHER + name: value for name, value in self.fisher(local).items()}
        return message

    def fisher(self, local: Local) -> Message:
        """The diagonal of each client's Fisher information, for the channels' parameters.

        Equations 3 and 14 with the one graph a client has: the squared gradient of
        log p(G | theta), the mean log-likelihood of its train nodes' labels. Dropout is off, no
        label is hidden.
        """
        params = {
            n: p.detach().requires_grad_(bool(channel_of(n))) for n, p in local.params.items()
        }
        owned = {name: value for name, value in params.items() if value.requires_grad}
        with torch.enable_grad():
            output: Output = functional_call(local.network, params, (local.cohort,))
            likelihood = -local.cross_entropy(output.logits).sum()
            grads = torch.autograd.grad(likelihood, list(owned.values()), materialize_grads=True)
        return {name: grad.square() for name, grad in zip(owned, grads, strict=True)}

    # At the server ---------------------------------------------------------------------------

    def aggregate(self, state: State, uploads: Uploads, rng: np.random.Generator) -> State:
        nodes = uploads[WEIGHT]
        weights = dict.fromkeys((None, *CHANNELS), nodes)
        if self.prior:
            weights[None] = bias_weights(uploads[AREA].unsqueeze(1), nodes)  # equations 8 to 10
        for channel in CHANNELS:
            fisher = [
                flat(value)
                for name, value in uploads.tensors.items()
                if name.startswith(FISHER) and channel_of(name) == channel
            ]
            if fisher:  # equations 11 and 12; a channel's layers have one weight together
                weights[channel] = bias_weights(torch.cat(fisher, dim=1), nodes)
        after = dict(state)
        for owner, weight in weights.items():
            owned = {n: t for n, t in uploads.model.items() if channel_of(n) == owner}
            after |= as_model(uploads.mean(owned, weight))
        return after


def bias_weights(values: Tensor, nodes: Tensor) -> Tensor:
    """Weights of the clients that answered, by how far `values` `[K, m]` are from the federation's.

    Deviation d_i = mean_j |values_ij - sum_k (N_k / N) values_kj| (equations 8 and 11), gamma_i =
    (d_i - min d) / (max d - min d) (9), weight_i = exp(-gamma_i) / sum_k exp(-gamma_k) (10, 12).
    Where all deviations are equal, up to rounding, gamma is 0 and the weights are uniform: two
    clients of one size always deviate equally, and rounding must not choose between them.
    """
    globe = (nodes / nodes.sum()).to(values.dtype) @ values
    deviation = (values - globe).abs().mean(dim=1)
    low, high = deviation.aminmax()
    rounding = 100 * torch.finfo(values.dtype).eps * values.abs().mean(dim=1).amax()
    spread = high - low
    gamma = torch.where(spread > rounding, (deviation - low) / spread, 0)
    return torch.softmax(-gamma, dim=0)
