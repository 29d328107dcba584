"""FED-PUB as a loop over clients."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyphily.bench.geometric.training import (
    GCN,
    Client,
    States,
    Training,
    copy_of_state,
    mean_of_states,
    share_correct,
)
from polyphily.graphs.graph import Graph
from polyphily.graphs.loading import Federation
from polyphily.methods.fedpub import FedPub
from polyphily.methods.fedpub.proxy import proxy_graph

if TYPE_CHECKING:
    from collections.abc import Iterable

MASK = "mask"


@cache
def _masked_convolution() -> type[nn.Module]:
    """Return the class of a graph convolution with a mask; torch_geometric is imported late."""
    from torch_geometric.nn import GCNConv
    from torch_geometric.nn.conv.gcn_conv import gcn_norm

    class MaskedConv(GCNConv):  # type: ignore[misc]
        """Â x (W ∘ m) + b; in evaluation entries of m below `prune` count as zero."""

        def __init__(self, inputs: int, outputs: int, prune: float) -> None:
            super().__init__(inputs, outputs)
            self.mask, self.prune = nn.Parameter(torch.ones(outputs, inputs)), prune

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            mask: Tensor = self.mask
            if not self.training:
                mask = mask * (mask.abs() >= self.prune)
            edges, weight = gcn_norm(edge_index, None, len(x))
            x = F.linear(x, self.lin.weight * mask)
            out: Tensor = self.propagate(edges, x=x, edge_weight=weight) + self.bias
            return out

    return MaskedConv


class MaskedGCN(GCN):
    """A GCN whose weight matrices have masks."""

    def __init__(self, features: int, training: Training, classes: int, prune: float) -> None:
        self.prune = prune
        super().__init__(features, training.hidden, classes, training.dropout)

    def layer(self, inputs: int, outputs: int) -> nn.Module:
        return _masked_convolution()(inputs, outputs, self.prune)

    def masks(self) -> Iterable[nn.Parameter]:
        return (p for name, p in self.named_parameters() if name.endswith(MASK))

    def weights(self) -> States:
        """Return all parameters but the masks."""
        return {name: p for name, p in self.named_parameters() if not name.endswith(MASK)}


class FedPubClient(Client):
    """A client with masks, which compares its model with others on the proxy graph."""

    def __init__(
        self,
        graph: Graph,
        model: MaskedGCN,
        training: Training,
        method: FedPub,
        proxy: tuple[Tensor, ...],
    ) -> None:
        super().__init__(graph, model, training)
        self.masked, self.method, self.proxy = model, method, proxy
        self.optimizer = training.optimizer(
            [
                {"params": list(model.weights().values())},
                {"params": list(model.masks()), "weight_decay": 0.0},
            ]
        )

    def answer(self, state: States, *, anchored: bool) -> tuple[States, Tensor]:
        """Train, shrink the masks, and return the weights and the functional embedding."""

        def distance() -> Tensor:
            moved = [
                torch.linalg.vector_norm(p - state[n]) for n, p in self.masked.weights().items()
            ]
            return self.method.proximity * torch.stack(moved).sum()

        trained = self.fit(state, distance if anchored else None)
        way = self.method.sparsity * self.training.lr * self.training.epochs
        with torch.no_grad():
            for mask in self.masked.masks():
                mask.copy_(mask.sign() * (mask.abs() - way).clamp(min=0))
            self.model.eval()
            embedding: Tensor = self.model(*self.proxy).mean(dim=0)
        return {n: t for n, t in trained.items() if not n.endswith(MASK)}, embedding


class FedPubLoop:
    """FED-PUB of GCNs, with `penalty=soft` and `head=none`.

    Args:
        federation: the clients.
        training: of each client.
        method: the hyperparameters.

    Attributes:
        states: each client's own mixture, without masks.
        round: the number of complete rounds.
    """

    def __init__(self, federation: Federation, training: Training, method: FedPub) -> None:
        torch.manual_seed(federation.seed)
        self.training, self.method, self.round = training, method, 0
        width, classes = federation.clients[0].num_features, len(federation.classes)
        drawn = proxy_graph(width, method.proxy_seed)
        proxy = tuple(
            torch.from_numpy(np.asarray(array)).to(training.device)
            for array in (drawn.features, drawn.edges)
        )
        self.clients = [
            FedPubClient(
                graph, MaskedGCN(width, training, classes, method.prune), training, method, proxy
            )
            for graph in federation.clients
        ]
        first = copy_of_state(self.clients[0].model)
        self.states = [{n: t for n, t in first.items() if not n.endswith(MASK)}] * len(self.clients)

    def advance(self) -> None:
        """Train one round, and mix the models that answer the proxy graph alike."""
        pairs = zip(self.clients, self.states, strict=True)
        answers = [client.answer(state, anchored=self.round > 0) for client, state in pairs]
        states = [state for state, _ in answers]
        self.states = []
        for _, own in answers:
            alike = [F.cosine_similarity(own, other, dim=0) for _, other in answers]
            weights = (self.method.tau * torch.stack(alike)).softmax(dim=0)
            self.states.append(mean_of_states(states, weights.tolist()))
        self.training.finish_round()
        self.round += 1

    def accuracy(self) -> float:
        """Return the accuracy of the clients' mixtures on all test nodes."""
        pairs = zip(self.clients, self.states, strict=True)
        return share_correct([client.count_correct(state) for client, state in pairs])
