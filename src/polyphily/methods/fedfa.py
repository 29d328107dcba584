"""FedFA: hidden features are shifted and scaled at random, more so where clients differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from polyphily.core.cohort import Cohort
from polyphily.core.local import Local
from polyphily.core.messages import (
    AFTER_FIRST,
    Declared,
    Dims,
    Message,
    Sizes,
    State,
    Sum,
    Uploads,
    public,
    statistic,
    to_each,
)
from polyphily.core.method import parameter, register
from polyphily.core.search import Range
from polyphily.methods.fedavg import FedAvg
from polyphily.nn.backbones import BACKBONES, Backbone, Output, Shape, Stack
from polyphily.nn.draws import Draws
from polyphily.nn.segments import Segments
from polyphily.nn.stacked import GraphView, StackedGraph

EPS = 1e-6  # ε, added to variances
LEAST = 8  # nodes of a group at least
STATISTICS, SQUARES, CLIENTS = "statistics", "squares", "clients"  # uploads
VARIANCES = "variances"  # S, the download
UPDATES, END = "updates", "end"  # steps behind a client's statistics, and those after the round


@register("fedfa", cite="Zhou and Konukoglu, FedFA: Federated Feature Augmentation, ICLR 2023")
@dataclass(frozen=True)
class FedFA(FedAvg):
    """FedAvg whose clients train on features with random means and deviations.

    After a hidden layer, features x_b of a group b of nodes with mean μ_b and deviation σ_b become

        (σ_b + e' sqrt((1 + γ^σ) V_σ)) (x_b - μ_b) / σ_b + μ_b + e sqrt((1 + γ^μ) V_μ),

    channel by channel, where e and e' are standard normal and V_μ and V_σ are the variances of μ_b
    and σ_b over the groups of the client. γ is large for channels in which clients differ:

        γ_c = Q g_c / sum_d g_d, g_c = 1 / (1 + 1 / (S_c + ε)),

    for Q channels, with S_c the variance over clients of the client's running mean of μ_b (of σ_b).
    """

    left_open: ClassVar[Sequence[str]] = (
        "The paper augments images, each with statistics over its pixels. A graph has no such "
        "instances. Here: every step divides a client's nodes at random into groups.",
        "A client with fewer than 16 nodes has no two groups of 8, and its V is undefined. Here: "
        "its features stay as they are, and its statistics count in S.",
        "Where running statistics start is not stated, and whether a step without augmentation "
        "counts. Here: every step counts, and means are corrected for their start as in Adam, so "
        "that S compares features and not numbers of steps.",
        "What γ is before the server has statistics is not stated. Here: 1 in the first round.",
    )

    probability: float = parameter(
        0.5,
        "probability that a layer's features are augmented in a step",
        symbol="p",
        search=Range(0.1, 0.9),
    )
    decay: float = parameter(
        0.99,
        "share of the running statistics that a step keeps, below 1",
        symbol="α",
        search=Range(0.9, 0.999),
    )
    groups: int = parameter(
        16, f"groups of a client's nodes, fewer if they had less than {LEAST} nodes", symbol="B"
    )
    spread: str = parameter(
        "federation",
        "what γ follows: the variances over clients (federation), nothing with γ = 1 in every "
        "channel (even), or nothing with γ = 0 (client)",
        symbol="γ",
        choices=("federation", "even", "client"),
    )

    # The network -----------------------------------------------------------------------------

    def supported_backbones(self) -> Sequence[str]:
        return tuple(name for name, cls in BACKBONES.items() if issubclass(cls, Stack))

    def build(self, backbone: str, shape: Shape, seed: int) -> Backbone:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return augmenting(BACKBONES.find(backbone))(shape)

    # What travels ----------------------------------------------------------------------------

    @property
    def exchanges(self) -> bool:
        """True if statistics travel."""
        return self.probability > 0 and self.spread == "federation"

    def uploads(self, sizes: Sizes) -> tuple[Declared, ...]:
        if not self.exchanges:
            return super().uploads(sizes)
        shape = _shape(sizes)
        return (
            *super().uploads(sizes),
            statistic(STATISTICS, shape, Sum(), meaning="mean of μ_b and of σ_b in each layer"),
            statistic(SQUARES, shape, Sum(), meaning="their squares, for variances over clients"),
            public(CLIENTS, (), Sum(), meaning="1, to count the clients"),
        )

    def downloads(self, sizes: Sizes) -> tuple[Declared, ...]:
        if not self.exchanges:
            return super().downloads(sizes)
        meaning = "S, the variances over clients, of every channel"
        variances = statistic(VARIANCES, _shape(sizes), rounds=AFTER_FIRST, meaning=meaning)
        return (*super().downloads(sizes), variances)

    def needs_whole_graph(self) -> str | None:
        if self.probability == 0:
            return None
        return "statistics are over all nodes, and a sample has correct features at few of them"

    # At the clients --------------------------------------------------------------------------

    def init_client_state(self, cohort: Cohort, network: Backbone, params: Message) -> Message:
        hidden = network.shape.layers - 1, 2, network.shape.hidden
        zeros = torch.zeros(len(cohort), *hidden, dtype=cohort.dtype, device=cohort.device)
        return {STATISTICS: zeros, UPDATES: zeros.new_zeros(len(cohort))}

    def prepare_round(self, local: Local) -> Message:
        return {END: local.memory[UPDATES] + local.cohort.constant(local.steps)}

    def loss(self, local: Local) -> Tensor:
        layers = local.network.shape.layers - 1
        if local.draws is None or self.probability == 0 or layers == 0:
            return super().loss(local)
        groups = local.cohort.cached(("fedfa/groups", self.groups), self.divide)
        noise = self.noise(local.draws, groups, layers, local.network.shape.hidden)
        lots = local.draws.uniform(1, local.cohort.segments.pointers).view(-1)
        graph = AugmentedGraph(
            local.cohort,
            groups,
            (local.cohort.segments.owner + lots).argsort(),
            noise.to(local.cohort.dtype),
            (1 + self.gamma(local)).sqrt(),
        )
        output: Output = functional_call(local.network, local.params, (graph, local.draws))
        self.follow(local, torch.stack(graph.statistics, dim=1))
        return local.cross_entropy(output.logits)

    def divide(self, graph: StackedGraph) -> Groups:
        """Divide the nodes of each client into groups of almost equal size."""
        nodes = np.asarray(graph.segments.sizes)
        counts = (nodes // LEAST).clip(1, self.groups)
        sizes = [len(part) for n, b in zip(nodes, counts, strict=True) for part in _parts(n, b)]
        return Groups(
            Segments(tuple(sizes), graph.device), Segments(tuple(counts.tolist()), graph.device)
        )

    def noise(self, draws: Draws, groups: Groups, layers: int, width: int) -> Tensor:
        """Draw e and e' of every group and layer, `[groups, layers, 2, width]`.

        They are zero in the layers that a client does not augment in this step.
        """
        clients = groups.clients
        uniform = draws.uniform(layers * 2 * width, clients.pointers) + 2.0**-33  # above 0
        normal = torch.special.ndtri(uniform).view(-1, layers, 2, width)
        chosen = draws.uniform(layers, range(len(clients) + 1)) < self.probability
        active = chosen & (clients.counts > 1).unsqueeze(1)
        drawn: Tensor = normal * active[clients.owner].view(-1, layers, 1, 1)
        return drawn

    def gamma(self, local: Local) -> Tensor:
        """Return γ, `[K, layers, 2, width]`."""
        if self.spread == "federation" and VARIANCES in local.received:
            return emphasis(local.received[VARIANCES])
        same = torch.zeros_like if self.spread == "client" else torch.ones_like
        return same(local.memory[STATISTICS])

    def follow(self, local: Local, now: Tensor) -> None:
        """Move the running statistics of the clients that have not stopped in this round."""
        past, updates = local.memory[STATISTICS], local.memory[UPDATES]
        going = updates < local.constants[END]
        moved = self.decay * past + (1 - self.decay) * now
        local.memory[STATISTICS] = torch.where(going.view(-1, 1, 1, 1), moved, past)
        local.memory[UPDATES] = updates + going.to(updates.dtype)

    def upload(self, local: Local) -> Message:
        if not self.exchanges:
            return super().upload(local)
        past, updates = local.memory[STATISTICS], local.memory[UPDATES]
        seen = (1 - self.decay**updates).clamp(min=EPS)  # the weight of all steps so far
        mean = past / seen.view(-1, 1, 1, 1)
        one = torch.ones_like(updates)
        return {**super().upload(local), STATISTICS: mean, SQUARES: mean.square(), CLIENTS: one}

    # At the server ---------------------------------------------------------------------------

    def aggregate(self, state: State, uploads: Uploads, rng: np.random.Generator) -> State:
        after = super().aggregate(state, uploads, rng)
        if self.exchanges:
            clients = uploads[CLIENTS].sum()
            mean, square = (uploads[name].sum(dim=0) / clients for name in (STATISTICS, SQUARES))
            after[VARIANCES] = (square - mean.square()).clamp(min=0)
        return after

    def download(self, state: State, clients: Sequence[int]) -> Message:
        variances = {n: t for n, t in state.items() if n == VARIANCES}
        return {**super().download(state, clients), **to_each(variances, clients)}

    # For people ------------------------------------------------------------------------------

    def without_effect(self) -> Mapping[str, str]:
        if self.probability == 0:
            reason = "no features are augmented; set probability above 0"
            return dict.fromkeys(("decay", "groups", "spread"), reason)
        if self.spread != "federation":
            return {"decay": "running statistics are not used; set spread=federation"}
        return {}


def emphasis(variances: Tensor) -> Tensor:
    """Compute γ from the variances S of all channels, the last axis; its mean over them is 1."""
    weight = 1 / (1 + 1 / (variances + EPS))
    return weight / weight.mean(dim=-1, keepdim=True)


def _shape(sizes: Sizes) -> Dims:
    """Return (hidden layers, 2, width): the shape of a client's statistics."""
    layers = {name.split(".")[1] for name in sizes.parameters if name.startswith("convs.")}
    return len(layers) - 1, 2, sizes.hidden


def _parts(nodes: int, groups: int) -> Sequence[np.ndarray]:
    return np.array_split(np.arange(nodes), groups)


# The augmentation --------------------------------------------------------------------------------


class Groups(NamedTuple):
    """Groups of nodes: the nodes of each group, and the groups of each client.

    Nodes are in the order of their clients, and in random order within a client.
    """

    nodes: Segments
    clients: Segments


class AugmentedGraph(GraphView):
    """A stacked graph on which hidden features are augmented.

    Args:
        graph: the graph.
        groups: how many nodes each group has.
        order: the nodes in the order in which groups take them.
        noise: e and e' of every group and layer, `[groups, layers, 2, width]`.
        scale: sqrt(1 + γ) of every client and layer, `[K, layers, 2, width]`.

    Attributes:
        statistics: the means of μ_b and σ_b over the groups of each client, `[K, 2, width]`, of
            the layers so far.
    """

    def __init__(
        self, graph: StackedGraph, groups: Groups, order: Tensor, noise: Tensor, scale: Tensor
    ) -> None:
        super().__init__(graph)
        self.groups, self.order, self.place = groups, order, order.argsort()
        self.noise, self.scale = noise.unbind(dim=1), scale.unbind(dim=1)
        self.statistics: list[Tensor] = []

    def augment(self, x: Tensor) -> Tensor:
        """Return the features of the next hidden layer after augmentation, `[N, width]`."""
        (nodes, clients), layer = self.groups, len(self.statistics)
        x = x[self.order]
        mean = nodes.mean(x)
        centred = x - nodes.expand(mean)
        deviation = (nodes.mean(centred.square()) + EPS).sqrt()
        own = torch.stack([mean, deviation], dim=1)
        average = clients.mean(own)
        variance = clients.mean((own - clients.expand(average)).square()) + EPS
        self.statistics.append(average.detach())
        reach = clients.expand(variance.sqrt() * self.scale[layer])
        shift, stretch = (self.noise[layer] * reach).unbind(dim=1)
        # Written so that features without noise stay as they are to the bit.
        moved = x + nodes.expand(stretch / deviation) * centred + nodes.expand(shift)
        return moved[self.place]


@cache
def augmenting(backbone: type[Backbone]) -> type[Backbone]:
    """Return a backbone's class with augmentation between its hidden layers and their dropout."""

    class Augmenting(backbone):  # type: ignore[misc, valid-type]
        def in_evaluation(self, params: Message) -> tuple[Backbone, Message]:
            return backbone(self.shape), params

        def drop(self, x: Tensor, graph: StackedGraph, draws: Draws | None) -> Tensor:
            if isinstance(graph, AugmentedGraph):
                x = graph.augment(x)
            dropped: Tensor = super().drop(x, graph, draws)
            return dropped

    return Augmenting
