"""FedSPA: separate channels for neighbours of the same and of other classes, and aggregation that
favours clients whose homophily is near the federation's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from polyphily.core.cohort import Cohort, TrainingGraph
from polyphily.core.labels import draw_hidden
from polyphily.core.local import Local
from polyphily.core.messages import (
    Declared,
    Individually,
    Message,
    Role,
    Sizes,
    State,
    Uploads,
    as_model,
    model,
    statistic,
)
from polyphily.core.method import parameter, register
from polyphily.core.search import Range
from polyphily.errors import UserError
from polyphily.graphs.graph import UNLABELLED
from polyphily.heterogeneity.spectral import Laplacian, high_frequency_area
from polyphily.methods.fedavg import WEIGHT, FedAvg
from polyphily.methods.fedspa.edges import KindSums, edge_kinds
from polyphily.methods.fedspa.network import (
    CHANNELS,
    ACMDecoupledConv,
    AttentionDecoupledConv,
    Decoupled,
    PlainDecoupledConv,
    channel_of,
    train_kinds,
)
from polyphily.methods.fedspa.weights import bias_weights
from polyphily.nn.backbones import Backbone, Output, Shape
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
    """Clients separate messages by kind of edge, and the server weighs clients by deviation.

    Clients (SFPD, equations 4 to 6) have a channel each for neighbours of the same class, of
    another class, and of a class that is unknown:

        z_v = f_self(z_v) + sums of f_hom, f_het and f_unk over the neighbours of each kind,
        theta_unk = alpha_v theta_hom + (1 - alpha_v) theta_het,   alpha_v = sigmoid(phi(z_v)).

    The server (HBDA, equations 7 to 12) weighs a client by exp(-gamma), where gamma is its min-max
    normalised deviation from the federation: of the high-frequency area for the harmoniser and all
    else that neither channel owns, of the diagonal Fisher information for each channel.

    The paper's network is SFPD in ACM-GCN (`acm-gcn`). With `gcn` and `sage` it is equation 6
    alone, with that backbone's normalisation. Without `sfpd` it is the plain backbone; without all
    three parts this is FedAvg.
    """

    backbone = "acm-gcn"
    weighted_edges: ClassVar[bool] = False
    left_open: ClassVar[Sequence[str]] = (
        "The paper names ACM-GCN, but not how equation 6 enters its low-pass and high-pass "
        "channels: each of the two has equation 6 with weights of its own.",
        "The maps f and the harmoniser phi are not written out: linear maps, phi with a bias.",
        "Equation 6 sums over neighbours without a normalisation, and ACM-GCN has one: paper=on "
        "sums (the default divides by the degree).",
        "Equation 7 calls L the graph Laplacian; equation 2, which it applies, has the eigenvalues "
        "of the normalised one: the normalised Laplacian, with a zero row for a node without "
        "edges. Columns of features that are zero are left out of the mean.",
        "Equation 9 divides by zero if all biases are equal: the weights are uniform then.",
        "Equations 3 and 14 leave open which labels log p(G | theta) is of, whether it is a sum or "
        "a mean, and at which parameters: the mean over the train nodes' labels, at the client's "
        "parameters after local training, without dropout.",
        "Whether a channel has a weight for each layer is not stated: it has one for all layers.",
        "Weights are given for the harmoniser (equation 10) and for the two channels (equation "
        "12). For theta_self and all else that neither channel owns none are given: those of the "
        "harmoniser, w^h, as in the authors' code.",
        "The initial values of the channels are not stated: each channel has its own.",
        "Optimiser, learning rate, rounds and epochs are not stated: the settings of the run.",
    )

    sfpd: bool = parameter(True, "separate channels for homophilic and heterophilic neighbours")
    prior: bool = parameter(
        True, "weights by high-frequency area; off: by size, as FedAvg", symbol="w^h"
    )
    prior_by: str = parameter(
        "distance",
        "what lowers a client's prior weight: the distance of its area from the federation's "
        "(equation 8), or the area itself as in the authors' code",
        symbol="δ",
        choices=("distance", "area"),
        code="area",
    )
    posterior: bool = parameter(
        True, "the channels' weights by Fisher information; off: by size, as FedAvg", symbol="w^d"
    )
    form: str = parameter(
        "paper",
        "what the channels own: weight matrices as in the paper, or attention vectors as in the "
        "authors' code (acm-gcn only)",
        choices=("paper", "code"),
        code="code",
    )
    normalise: str = parameter(
        "mean",
        "sums over neighbours are divided by the degree (mean), or not, as printed (sum)",
        choices=("mean", "sum"),
        paper="sum",
    )
    hidden_share: float = parameter(
        0.5,
        "share of train nodes whose labels each step hides from the network and computes the loss "
        "on: otherwise the kinds of edges reveal the labels of train nodes, but not of test nodes",
        paper=0.0,
        search=Range(0.1, 0.9),
    )
    tied: bool = parameter(
        False, "whether all channels start equal, as the backbone (not stated in the paper)"
    )
    channel_lr: float = parameter(
        2.0,
        "factor on the channels' gradients under SGD, because the two share the step on unknown "
        "edges; Adam's steps do not depend on it",
        paper=1.0,
    )
    laplacian: str = parameter(
        "symmetric",
        "of the high-frequency area: normalised, or D - A as in the authors' code",
        symbol="L",
        choices=("symmetric", "combinatorial"),
        code="combinatorial",
    )

    def __post_init__(self) -> None:
        if not 0 <= self.hidden_share <= 1:
            raise UserError(f"fedspa: 'hidden_share' is from 0 to 1, not {self.hidden_share}")

    def without_effect(self) -> Mapping[str, str]:
        idle = {}
        if not self.sfpd:
            of_channels = ("posterior", "form", "normalise", "hidden_share", "tied", "channel_lr")
            idle = dict.fromkeys(of_channels, "there are no channels; set sfpd=on as well")
        if not self.prior:
            by_area = ("prior_by", "laplacian")
            idle |= dict.fromkeys(by_area, "no weight is by area; set prior=on as well")
        elif not self.sfpd and self.prior_by == "area":
            idle["weighting"] = "all weights are by area; set prior_by=distance or prior=off"
        return idle

    # The network -----------------------------------------------------------------------------

    def supported_backbones(self) -> Sequence[str]:
        if not self.sfpd:
            return super().supported_backbones()
        return ("acm-gcn",) if self.form == "code" else ("acm-gcn", "gcn", "sage")

    def build(self, backbone: str, shape: Shape, seed: int) -> Backbone:
        if not self.sfpd:
            return super().build(backbone, shape, seed)
        if backbone not in self.supported_backbones():
            raise ValueError(f"fedspa has no SFPD in '{backbone}'")

        def layer(inputs: int, outputs: int) -> torch.nn.Module:
            if self.form == "code":
                return AttentionDecoupledConv(inputs, outputs, self.normalise, self.tied)
            if backbone == "acm-gcn":
                return ACMDecoupledConv(inputs, outputs, self.normalise, self.tied)
            usual = "gcn" if backbone == "gcn" else "mean"
            chosen = usual if self.normalise == "mean" else "sum"
            return PlainDecoupledConv(inputs, outputs, chosen, self.tied)

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Decoupled(backbone, shape, layer)

    # What travels ----------------------------------------------------------------------------

    def uploads(self, sizes: Sizes) -> tuple[Declared, ...]:
        by_fisher = self.posterior and self.sfpd
        if not (self.prior or by_fisher):  # the server computes FedAvg's mean
            return super().uploads(sizes)
        alone = Individually(
            "the server weighs each client by how far its homophily is from the others'"
        )
        sent = [replace(declared, server=alone) for declared in super().uploads(sizes)]
        if self.prior:
            sent.append(statistic(AREA, (), alone, meaning="high-frequency area of the features"))
        if by_fisher:
            fisher = model(
                sizes,
                alone,
                prefix=FISHER,
                only=[name for name in sizes.parameters if channel_of(name)],
                role=Role.STATISTIC,
                meaning="diagonal Fisher information of the channels",
            )
            sent.append(fisher)
        return tuple(sent)

    # At the clients --------------------------------------------------------------------------

    def needs_symmetric_edges(self) -> str:
        return "it sums over kinds of edges that lead both ways"

    def needs_whole_graph(self) -> str | None:
        if not self.sfpd:
            return None
        return "the channels' Fisher information is that of all train nodes (without: sfpd=off)"

    def init_client_state(self, cohort: Cohort, network: Backbone, params: Message) -> Message:
        if not self.prior:
            return {}
        combinatorial = self.laplacian == "combinatorial"
        kind: Laplacian = "combinatorial" if combinatorial else "symmetric"
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
        kinds: KindSums
        if labels.is_cuda or self.form == "code":
            kinds = edge_kinds(cohort, labels, moving=True)
        else:
            kinds = train_kinds(cohort).visible(labels != UNLABELLED)
        output: Output = functional_call(local.network, local.params, (cohort, local.draws, kinds))
        losses = local.train_errors(output.logits[cohort.train_nodes]) * hidden
        count = cohort.train_segments.sum(hidden.to(cohort.dtype))
        return cohort.train_segments.sum(losses) / count.clamp(min=1)

    def hides(self, cohort: TrainingGraph, draws: Draws) -> Tensor:
        """Draw the train nodes that hide their labels in this step, as a mask of train nodes.

        These are a given share of each client's train nodes, and at least one.
        """
        hidden = draw_hidden(cohort, draws, self.hidden_share)
        none = torch.zeros(len(cohort.train_nodes), dtype=torch.bool, device=hidden.device)
        return none.index_fill(0, hidden, True)

    def correct_gradients(self, local: Local, grads: Message) -> Message:
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
        """Compute the diagonal of each client's Fisher information for the channels' parameters.

        Equations 3 and 14 for the one graph that a client has: the squared gradient of
        log p(G | theta), the mean log-likelihood of its train nodes' labels. Dropout is off, no
        label is hidden.
        """
        params = {
            n: p.detach().requires_grad_(bool(channel_of(n))) for n, p in local.params.items()
        }
        owned = {name: value for name, value in params.items() if value.requires_grad}
        with torch.enable_grad():
            output: Output = functional_call(local.network, params, (local.cohort,))
            logits, labels = output.logits[local.cohort.train_nodes], local.cohort.train_labels
            errors = F.cross_entropy(logits, labels, reduction="none")  # without weights
            likelihood = -local.train_mean(errors).sum()
            grads = torch.autograd.grad(likelihood, list(owned.values()), materialize_grads=True)
        return {name: grad.square() for name, grad in zip(owned, grads, strict=True)}

    # At the server ---------------------------------------------------------------------------

    def aggregate(self, state: State, uploads: Uploads, rng: np.random.Generator) -> State:
        nodes = uploads[WEIGHT]
        weights = dict.fromkeys((None, *CHANNELS), nodes)
        if self.prior:
            areas, distance = uploads[AREA].unsqueeze(1), self.prior_by == "distance"
            weights[None] = bias_weights(areas, nodes, distance=distance)  # equations 8 to 10
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
