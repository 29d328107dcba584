"""FedAvg as most code implements it: a loop over clients, each with a torch_geometric model.

This is the baseline for the stacked engine. A round loads the global weights, trains a GCN for some
epochs with Adam and averages the state dictionaries, as other libraries do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyphily.graphs.graph import Graph
from polyphily.graphs.loading import Federation


class GCN(nn.Module):
    """Two graph convolutions, with dropout before each."""

    def __init__(
        self, features: int, hidden: int, classes: int, dropout: tuple[float, float]
    ) -> None:
        from torch_geometric.nn import GCNConv

        super().__init__()
        self.first, self.second = GCNConv(features, hidden), GCNConv(hidden, classes)
        self.dropout = dropout

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if self.dropout[0]:
            x = F.dropout(x, self.dropout[0], self.training)
        x = self.first(x, edge_index).relu()
        x = F.dropout(x, self.dropout[1], self.training)
        out: Tensor = self.second(x, edge_index)
        return out


class Client:
    """One client's data, model and optimiser."""

    def __init__(self, graph: Graph, model: nn.Module, lr: float, device: torch.device) -> None:
        features: Any = graph.features
        dense = features.toarray() if sp.issparse(features) else features
        assert graph.masks is not None
        self.x = torch.from_numpy(np.asarray(dense)).float().to(device)
        self.edges = torch.from_numpy(graph.edges).to(device)
        self.labels = torch.from_numpy(graph.labels).to(device)
        self.train, self.test = (
            torch.from_numpy(mask).to(device) for mask in (graph.masks.train, graph.masks.test)
        )
        self.model = model.to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=lr)

    def fit(self, state: dict[str, Tensor], epochs: int) -> dict[str, Tensor]:
        self.model.load_state_dict(state)
        self.model.train()
        for _ in range(epochs):
            self.optimizer.zero_grad()
            out = self.model(self.x, self.edges)
            loss = F.cross_entropy(out[self.train], self.labels[self.train])
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
        return {name: value.detach() for name, value in self.model.state_dict().items()}

    @torch.no_grad()
    def count_correct(self, state: dict[str, Tensor]) -> tuple[int, int]:
        """Return the number of correctly classified test nodes and the number of test nodes."""
        self.model.load_state_dict(state)
        self.model.eval()
        correct = self.model(self.x, self.edges).argmax(dim=1) == self.labels
        return int(correct[self.test].sum()), int(self.test.sum())


class Loop:
    """A federation whose clients are trained one after the other."""

    def __init__(
        self,
        federation: Federation,
        *,
        hidden: int = 64,
        epochs: int = 3,
        lr: float = 0.01,
        dropout: tuple[float, float] = (0.0, 0.5),
        device: str = "cpu",
    ) -> None:
        torch.manual_seed(federation.seed)
        self.device, self.epochs = torch.device(device), epochs
        width, classes = federation.clients[0].num_features, len(federation.classes)
        self.clients = [
            Client(graph, GCN(width, hidden, classes, dropout), lr, self.device)
            for graph in federation.clients
        ]
        self.sizes = [graph.num_nodes for graph in federation.clients]
        first = self.clients[0].model.state_dict()
        self.state = {name: value.clone() for name, value in first.items()}

    def advance(self) -> None:
        """Train one round."""
        states = [client.fit(self.state, self.epochs) for client in self.clients]
        self.state = _mean(states, self.sizes)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def accuracy(self) -> float:
        """Return the accuracy of the global model on all test nodes."""
        counts = [client.count_correct(self.state) for client in self.clients]
        return sum(correct for correct, _ in counts) / max(sum(total for _, total in counts), 1)


def _mean(states: Sequence[dict[str, Tensor]], sizes: Sequence[int]) -> dict[str, Tensor]:
    shares = [size / sum(sizes) for size in sizes]
    return {
        name: torch.stack([s * state[name] for s, state in zip(shares, states, strict=True)]).sum(0)
        for name in states[0]
    }
