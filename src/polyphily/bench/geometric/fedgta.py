"""FedGTA as a loop over clients."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
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
from polyphily.methods.fedgta import FedGTA


@dataclass(frozen=True)
class Upload:
    """A client's message: its model, the moments of its labels, its confidence and its size."""

    state: States
    signature: Tensor
    confidence: float
    nodes: int


class FedGTAClient(Client):
    """A client that also propagates its predictions and describes the result."""

    def __init__(self, graph: Graph, model: GCN, training: Training, method: FedGTA) -> None:
        from torch_geometric.nn import SimpleConv
        from torch_geometric.nn.conv.gcn_conv import gcn_norm
        from torch_geometric.utils import degree

        super().__init__(graph, model, training)
        data, self.method = self.data, method
        self.sum = SimpleConv(aggr="sum")
        self.norm: tuple[Tensor, Tensor] = gcn_norm(data.edges, None, len(data))
        self.degrees: Tensor = degree(data.edges[1], len(data))

    def answer(self, state: States) -> Upload:
        """Train, and return all that is sent."""
        return self.describe(self.fit(state))

    @torch.no_grad()
    def describe(self, trained: States) -> Upload:
        """Propagate the predicted labels, and describe the result by moments and confidence."""
        data, method = self.data, self.method
        start = self.predict().softmax(dim=1)
        known = F.one_hot(data.labels[data.train], start.shape[1]).to(start.dtype)
        start[data.train] = known
        labels = start
        for _ in range(method.propagation):
            near = self.sum(labels, *self.norm)
            labels = (1 - method.restart) * near + method.restart * start
            labels[data.train] += known
        sharp, flat = labels.softmax(dim=1), (labels / method.temperature).softmax(dim=1)
        sharp[data.train] = flat[data.train] = known
        certainty = start.shape[1] / math.e + (flat * (flat + 1e-8).log()).sum(dim=1)
        confidence = float((self.degrees * certainty).sum())
        return Upload(trained, self.moments(sharp), confidence, len(data))

    def moments(self, labels: Tensor) -> Tensor:
        """Return the raw moments of the labels, and the central ones of a hybrid signature."""
        found = [(labels**p).mean(dim=0) for p in range(1, self.method.orders + 1)]
        if self.method.signature == "hybrid":
            centred = labels - labels.mean(dim=0)
            found += [(centred**p).mean(dim=0) for p in range(1, self.method.orders + 1)]
        return torch.cat(found)


class FedGTALoop:
    """FedGTA of GCNs.

    Args:
        federation: the clients.
        training: of each client.
        method: the hyperparameters.

    Attributes:
        states: each client's own mixture.
        round: the number of complete rounds.
    """

    def __init__(self, federation: Federation, training: Training, method: FedGTA) -> None:
        torch.manual_seed(federation.seed)
        self.training, self.method, self.round = training, method, 0
        width, classes = federation.clients[0].num_features, len(federation.classes)
        self.clients = [
            FedGTAClient(
                graph, GCN(width, training.hidden, classes, training.dropout), training, method
            )
            for graph in federation.clients
        ]
        self.states = [copy_of_state(self.clients[0].model)] * len(self.clients)

    def advance(self) -> None:
        """Train one round, and mix the models of clients with similar moments."""
        pairs = zip(self.clients, self.states, strict=True)
        uploads = [client.answer(state) for client, state in pairs]
        self.states = [self.mixture(upload, uploads) for upload in uploads]
        self.training.finish_round()
        self.round += 1

    def mixture(self, own: Upload, uploads: list[Upload]) -> States:
        """Return the mean of the models of a client's partners, weighted by their confidence."""
        partners = [
            other
            for other in uploads
            if other is own
            or F.cosine_similarity(own.signature, other.signature, dim=0) > self.method.threshold
        ]
        weights = [max(partner.confidence, 0.0) for partner in partners]
        if sum(weights) == 0 or self.method.confidence == "nodes":
            weights = [float(partner.nodes) for partner in partners]
        return mean_of_states([partner.state for partner in partners], weights)

    def accuracy(self) -> float:
        """Return the accuracy of the clients' mixtures on all test nodes."""
        pairs = zip(self.clients, self.states, strict=True)
        return share_correct([client.count_correct(state) for client, state in pairs])
