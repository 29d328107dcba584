"""FedAvg as a loop over clients."""

from __future__ import annotations

import torch

from polyphily.bench.geometric.training import (
    GCN,
    Client,
    Training,
    copy_of_state,
    mean_of_states,
    share_correct,
)
from polyphily.graphs.loading import Federation


class FedAvgLoop:
    """FedAvg of GCNs, weighted by nodes.

    Args:
        federation: the clients.
        training: of each client.

    Attributes:
        state: the global model.
        round: the number of complete rounds.
    """

    def __init__(self, federation: Federation, training: Training) -> None:
        torch.manual_seed(federation.seed)
        self.training, self.round = training, 0
        width, classes = federation.clients[0].num_features, len(federation.classes)
        self.clients = [
            Client(graph, GCN(width, training.hidden, classes, training.dropout), training)
            for graph in federation.clients
        ]
        self.state = copy_of_state(self.clients[0].model)

    def advance(self) -> None:
        """Train one round."""
        states = [client.fit(self.state) for client in self.clients]
        self.state = mean_of_states(states, [len(client.data) for client in self.clients])
        self.training.finish_round()
        self.round += 1

    def accuracy(self) -> float:
        """Return the accuracy of the global model on all test nodes."""
        return share_correct([client.count_correct(self.state) for client in self.clients])
