"""Parts that all loops have: a client's tensors, a GCN, local training, means of states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyphily.core.settings import Settings
from polyphily.graphs.graph import Graph

States = dict[str, Tensor]


@dataclass(frozen=True)
class Training:
    """Size of the networks and local training; the optimiser is Adam and keeps its moments.

    Attributes:
        hidden: width of the hidden layer.
        epochs: steps in a round.
        lr: learning rate.
        weight_decay: coefficient of the decay.
        dropout: before the first and before the second layer.
        device: "cpu" or "cuda".
    """

    hidden: int = 64
    epochs: int = 3
    lr: float = 0.01
    weight_decay: float = 0.0
    dropout: tuple[float, float] = (0.0, 0.5)
    device: str = "cpu"

    @classmethod
    def of(cls, settings: Settings) -> Training:
        """Return the training of a run whose settings are all filled in."""
        assert settings.hidden is not None
        assert settings.lr is not None
        assert settings.weight_decay is not None
        assert settings.dropout is not None
        assert settings.input_dropout is not None
        return cls(
            hidden=settings.hidden,
            epochs=settings.epoch_range()[0],
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            dropout=(settings.input_dropout, settings.dropout),
            device=settings.device,
        )

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """Return an optimiser of some parameters, or of groups of them."""
        return torch.optim.Adam(parameters, lr=self.lr, weight_decay=self.weight_decay)

    def finish_round(self) -> None:
        """Wait until the device has done its work."""
        if torch.device(self.device).type == "cuda":
            torch.cuda.synchronize(self.device)


class Data:
    """The tensors of one client."""

    def __init__(self, graph: Graph, device: str) -> None:
        features: Any = graph.features
        dense = features.toarray() if sp.issparse(features) else features
        assert graph.masks is not None
        self.x = torch.from_numpy(np.asarray(dense)).float().to(device)
        self.edges = torch.from_numpy(graph.edges).to(device)
        self.labels = torch.from_numpy(graph.labels).to(device)
        self.train, self.test = (
            torch.from_numpy(mask).to(device) for mask in (graph.masks.train, graph.masks.test)
        )

    def __len__(self) -> int:
        return len(self.x)

    def cross_entropy(self, logits: Tensor) -> Tensor:
        """Return the mean cross-entropy over the train nodes."""
        return F.cross_entropy(logits[self.train], self.labels[self.train])

    def count_correct(self, logits: Tensor) -> tuple[int, int]:
        """Return the number of correctly classified test nodes and the number of test nodes."""
        correct = logits.argmax(dim=1) == self.labels
        return int(correct[self.test].sum()), int(self.test.sum())


class GCN(nn.Module):
    """Two graph convolutions, with dropout before each."""

    def __init__(
        self, features: int, hidden: int, classes: int, dropout: tuple[float, float]
    ) -> None:
        super().__init__()
        self.first, self.second = self.layer(features, hidden), self.layer(hidden, classes)
        self.dropout = dropout

    def layer(self, inputs: int, outputs: int) -> nn.Module:
        from torch_geometric.nn import GCNConv

        conv: nn.Module = GCNConv(inputs, outputs)
        return conv

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if self.dropout[0]:
            x = F.dropout(x, self.dropout[0], self.training)
        x = self.first(x, edge_index).relu()
        x = F.dropout(x, self.dropout[1], self.training)
        out: Tensor = self.second(x, edge_index)
        return out


class Client:
    """One client's data, model and optimiser."""

    def __init__(self, graph: Graph, model: nn.Module, training: Training) -> None:
        self.data, self.training = Data(graph, training.device), training
        self.model = model.to(training.device)
        self.optimizer = training.optimizer(self.model.parameters())

    def fit(self, state: States, penalty: Callable[[], Tensor] | None = None) -> States:
        """Train on the cross-entropy, plus a penalty if given; return the trained state."""
        self.model.load_state_dict(state, strict=False)
        self.model.train()
        for _ in range(self.training.epochs):
            self.optimizer.zero_grad()
            loss = self.data.cross_entropy(self.model(self.data.x, self.data.edges))
            if penalty is not None:
                loss = loss + penalty()
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
        return {name: value.detach() for name, value in self.model.state_dict().items()}

    @torch.no_grad()
    def predict(self) -> Tensor:
        """Return the model's logits, without dropout."""
        self.model.eval()
        out: Tensor = self.model(self.data.x, self.data.edges)
        return out

    def count_correct(self, state: States) -> tuple[int, int]:
        """Return how many test nodes a state classifies correctly, and of how many."""
        self.model.load_state_dict(state, strict=False)
        return self.data.count_correct(self.predict())


def copy_of_state(model: nn.Module) -> States:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def mean_of_states(states: Sequence[States], weights: Sequence[float]) -> States:
    """Return the weighted mean of states; the weights need not sum to one."""
    total = sum(weights)
    return {
        name: torch.stack(
            [weight / total * state[name] for weight, state in zip(weights, states, strict=True)]
        ).sum(0)
        for name in states[0]
    }


def share_correct(counts: Sequence[tuple[int, int]]) -> float:
    """Return the share of correctly classified nodes over all clients."""
    return sum(correct for correct, _ in counts) / max(sum(total for _, total in counts), 1)
