"""FedSage+ as a loop over clients.

A client's graph is really changed: hidden nodes are cut out, and generated neighbours are added as
nodes with edges in both directions.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyphily.bench.geometric.training import (
    Data,
    States,
    Training,
    copy_of_state,
    mean_of_states,
    share_correct,
)
from polyphily.graphs.graph import Graph
from polyphily.graphs.loading import Federation
from polyphily.graphs.random import generator
from polyphily.methods.fedsage import FedSagePlus

ENCODER_WIDTH = JUDGE_WIDTH = 32


class Draws:
    """Random numbers of a client."""

    def __init__(self, device: str) -> None:
        self.device = device

    def uniform(self, rows: int, width: int) -> Tensor:
        return torch.rand(rows, width, device=self.device)

    def normal(self, rows: int, width: int) -> Tensor:
        return torch.randn(rows, width, device=self.device)


# The networks ------------------------------------------------------------------------------------


class SAGE(nn.Module):
    """Two layers of GraphSAGE on a graph to which generated nodes are added."""

    def __init__(
        self, features: int, hidden: int, classes: int, dropout: tuple[float, float]
    ) -> None:
        from torch_geometric.nn import SAGEConv

        super().__init__()
        self.first, self.second = SAGEConv(features, hidden), SAGEConv(hidden, classes)
        self.dropout = dropout

    def forward(self, x: Tensor, edges: Tensor, generated: Tensor) -> Tensor:
        """Return the logits of the real nodes; generated features are not dropped."""
        if self.dropout[0]:
            x = F.dropout(x, self.dropout[0], self.training)
        hidden = self.first(torch.cat([x, generated]), edges).relu()
        hidden = F.dropout(hidden, self.dropout[1], self.training)
        out: Tensor = self.second(hidden, edges)
        return out[: len(x)]


class FeatureGenerator(nn.Module):
    """Features of a node's lost neighbours, from its noisy embedding."""

    def __init__(self, method: FedSagePlus, features: int, dropout: float) -> None:
        super().__init__()
        self.first = nn.Linear(method.embedding, method.first_width)
        self.second = nn.Linear(method.first_width, method.second_width)
        self.last = nn.Linear(method.second_width, method.slots * features)
        self.slots, self.dropout = method.slots, dropout

    def forward(self, z: Tensor) -> Tensor:
        """Return `[rows, slots, features]`."""
        hidden = self.second(self.first(z).relu()).relu()
        hidden = F.dropout(hidden, self.dropout, self.training)
        out: Tensor = self.last(hidden).tanh().view(len(z), self.slots, -1)
        return out


class NeighGen(nn.Module):
    """An encoder, a regression of the number of lost neighbours, and a generator of features."""

    def __init__(self, method: FedSagePlus, features: int, dropout: float) -> None:
        from torch_geometric.nn import SAGEConv

        super().__init__()
        self.first = SAGEConv(features, ENCODER_WIDTH)
        self.second = SAGEConv(ENCODER_WIDTH, method.embedding)
        self.count = nn.Linear(method.embedding, 1)
        nn.init.ones_(self.count.bias)
        self.generator = FeatureGenerator(method, features, dropout)
        self.dropout = dropout

    def embed(self, x: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
        """Return embeddings and counts."""
        hidden = F.dropout(self.first(x, edges).relu(), self.dropout, self.training)
        z: Tensor = self.second(hidden, edges).relu()
        return z, self.count(z).relu().view(-1)

    def forward(self, x: Tensor, edges: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """Return counts and generated features."""
        z, count = self.embed(x, edges)
        return count, self.generator(z + draws.normal(*z.shape))


def exists(count: Tensor, slots: int) -> Tensor:
    """Return which slots of a node exist: as many as the nearest whole number to its count."""
    whole = (count.detach() + 0.5).floor()
    return torch.arange(1, slots + 1, device=count.device) <= whole.unsqueeze(1)


def mend(edges: Tensor, generated: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Add the generated nodes that exist; return all edges and the features of the new nodes."""
    node, slot = kept.nonzero(as_tuple=True)
    fresh = len(kept) + torch.arange(len(node), device=edges.device)
    there, back = torch.stack([node, fresh]), torch.stack([fresh, node])
    return torch.cat([edges, there, back], dim=1), generated[node, slot]


def feature_errors(generated: Tensor, kept: Tensor, targets: Tensor, present: Tensor) -> Tensor:
    """Return, for each row, the squared distances to the nearest target, summed over slots."""
    gaps = torch.cdist(generated, targets).square()
    nearest = gaps.masked_fill(~present.unsqueeze(1), torch.inf).amin(dim=2)
    return (nearest * kept).sum(dim=1)


# The clients -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """A question that other clients answer: the generator, embeddings and counts."""

    generator: FeatureGenerator
    z: Tensor
    count: Tensor


class Impaired:
    """A client's graph without its hidden nodes, and what NeighGen should find.

    Attributes:
        seen: the visible nodes.
        edges: those between them, numbered among them.
        missing: how many hidden neighbours each visible node has.
        losers: the visible nodes with a hidden neighbour, numbered among the visible ones.
        targets: features of the first hidden neighbours of each of these.
        present: which of these there are.
        train: the visible train nodes.
    """

    def __init__(self, data: Data, method: FedSagePlus, seed: int, client: int) -> None:
        from torch_geometric.utils import subgraph

        device, size = data.x.device, len(data)
        count = min(max(round(method.hidden_share * size), 1), size - 1)
        drawn = generator(seed, f"fedsage+/hidden/{client}").choice(size, count, replace=False)
        hidden = torch.zeros(size, dtype=torch.bool, device=device)
        hidden[torch.from_numpy(drawn).to(device)] = True
        self.seen = (~hidden).nonzero().view(-1)
        self.edges: Tensor = subgraph(self.seen, data.edges, relabel_nodes=True, num_nodes=size)[0]
        lost: list[list[int]] = [[] for _ in range(size)]
        for one, other in sorted(data.edges.T.tolist()):
            if hidden[other] and not hidden[one]:
                lost[one].append(other)
        found = [lost[node] for node in self.seen.tolist()]
        self.missing = torch.tensor([float(len(own)) for own in found], device=device)
        self.losers = self.missing.nonzero().view(-1)
        first = [own[: method.slots] for own in found if own]
        filled = [own + [own[0]] * (method.slots - len(own)) for own in first]
        index = torch.tensor(filled, dtype=torch.int64, device=device).view(-1, method.slots)
        self.targets = data.x[index]
        number = torch.arange(method.slots, device=device)
        self.present = number < self.missing[self.losers].unsqueeze(1)
        self.train = data.train[self.seen]
        self.x, self.labels = data.x[self.seen], data.labels[self.seen]


class FedSagePlusClient:
    """One client: its graph, impaired and mended, its networks and their optimisers."""

    def __init__(
        self,
        graph: Graph,
        training: Training,
        method: FedSagePlus,
        key: tuple[int, int],
        classes: int,
    ) -> None:
        device = training.device
        self.data, self.training, self.method = Data(graph, device), training, method
        self.draws, self.impaired = Draws(device), Impaired(self.data, method, *key)
        width, (_, dropout) = graph.num_features, training.dropout
        self.neighgen = NeighGen(method, width, dropout).to(device)
        self.judge = SAGE(width, JUDGE_WIDTH, classes, (0.0, dropout)).to(device)
        self.classifier = SAGE(width, training.hidden, classes, training.dropout).to(device)
        self.preparing = training.optimizer(
            chain(self.neighgen.parameters(), self.judge.parameters())
        )
        self.classifying = training.optimizer(self.classifier.parameters())
        self.starts = _starts_of_neighbours(self.data)
        self.mended: tuple[Tensor, Tensor] | None = None

    # NeighGen

    def train_generator(self, steps: int, answer: States | None, *, alone: bool) -> None:
        """Take steps on NeighGen, or on its feature generator alone.

        Args:
            steps: how many.
            answer: gradients that other clients have sent.
            alone: whether only the feature generator is trained.
        """
        for parameter in chain(self.neighgen.parameters(), self.judge.parameters()):
            parameter.requires_grad_(not alone)
        for parameter in self.neighgen.generator.parameters():
            parameter.requires_grad_()
        self.neighgen.train()
        self.judge.train()
        for _ in range(steps):
            self.preparing.zero_grad()
            self.generator_loss().backward()  # type: ignore[no-untyped-call]
            if answer is not None:
                for name, parameter in self.neighgen.generator.named_parameters():
                    assert parameter.grad is not None
                    parameter.grad += self.method.cross * answer[name]
            self.preparing.step()

    def generator_loss(self) -> Tensor:
        """Compute the errors of counts and features, and the judge's cross-entropy."""
        given, method = self.impaired, self.method
        count, generated = self.neighgen(given.x, given.edges, self.draws)
        kept = exists(count, method.slots)
        counts = F.smooth_l1_loss(count, given.missing)
        errors = feature_errors(
            generated[given.losers], kept[given.losers], given.targets, given.present
        )
        edges, fresh = mend(given.edges, generated, kept)
        logits = self.judge(given.x, edges, fresh)[given.train]
        total = F.cross_entropy(logits, given.labels[given.train], reduction="sum")
        return (
            method.count_weight * counts
            + method.feature_weight * errors.sum() / len(given.seen)
            + method.class_weight * total / max(len(logits), 1)
        )

    @torch.no_grad()
    def ask(self) -> Question:
        """Return the feature generator with embeddings and counts of some visible nodes."""
        self.neighgen.eval()
        given, method = self.impaired, self.method
        z, count = self.neighgen.embed(given.x, given.edges)
        nodes = (self.draws.uniform(1, method.rows)[0] * len(z)).long()
        sent = FeatureGenerator(method, self.data.x.shape[1], 0.0).to(self.training.device)
        sent.load_state_dict(self.neighgen.generator.state_dict())
        return Question(sent, z[nodes], count[nodes])

    def answer(self, question: Question) -> States:
        """Return the gradient of the distance of generated features to features of this client."""
        rows, width = question.z.shape
        noise = self.draws.normal(1, rows * width).view(rows, width)
        generated = question.generator(question.z + noise.to(question.z.dtype))
        targets = self.data.x[self.random_neighbours(rows)]
        kept = exists(question.count, self.method.slots)
        everything = torch.ones(targets.shape[:2], dtype=torch.bool, device=targets.device)
        loss = feature_errors(generated, kept, targets, everything).mean()
        names, parameters = zip(*question.generator.named_parameters(), strict=True)
        return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))

    def random_neighbours(self, rows: int) -> Tensor:
        """Draw nodes and neighbours of each with replacement; a lone node stands for its own."""
        slots, (first, degrees, near) = self.method.slots, self.starts
        drawn = self.draws.uniform(1, rows * (1 + slots)).view(rows, 1 + slots)
        node = (drawn[:, :1] * len(self.data)).long()
        if len(near) == 0:
            return node.expand(-1, slots)
        place = first[node] + (drawn[:, 1:] * degrees[node]).long()
        return torch.where(degrees[node] > 0, near[place.clamp(max=len(near) - 1)], node)

    @torch.no_grad()
    def mend(self) -> None:
        """Add generated neighbours to the whole graph, once and for all."""
        self.neighgen.eval()
        count, generated = self.neighgen(self.data.x, self.data.edges, self.draws)
        self.mended = mend(self.data.edges, generated, exists(count, self.method.slots))

    # The classifier

    def fit(self, state: States) -> States:
        """Train the classifier on the mended graph, and return its state."""
        assert self.mended is not None
        self.classifier.load_state_dict(state)
        self.classifier.train()
        for _ in range(self.training.epochs):
            self.classifying.zero_grad()
            loss = self.data.cross_entropy(self.classifier(self.data.x, *self.mended))
            loss.backward()  # type: ignore[no-untyped-call]
            self.classifying.step()
        return {name: value.detach() for name, value in self.classifier.state_dict().items()}

    @torch.no_grad()
    def count_correct(self, state: States) -> tuple[int, int]:
        if self.mended is None:
            self.mend()
        assert self.mended is not None
        self.classifier.load_state_dict(state)
        self.classifier.eval()
        return self.data.count_correct(self.classifier(self.data.x, *self.mended))


def _starts_of_neighbours(data: Data) -> tuple[Tensor, Tensor, Tensor]:
    """Return where each node's neighbours begin, how many there are, and all of them in order."""
    from torch_geometric.utils import degree, sort_edge_index

    edges = sort_edge_index(data.edges, num_nodes=len(data))
    degrees = degree(edges[0], len(data), torch.int64)
    return degrees.cumsum(0) - degrees, degrees, edges[1]


# The loop ----------------------------------------------------------------------------------------


class FedSagePlusLoop:
    """FedSage+, with `mend=generated`, `counting=nearest` and `distance=sum`.

    Args:
        federation: the clients.
        training: of each client.
        method: the hyperparameters.

    Attributes:
        state: the global classifier.
        round: the number of complete rounds.
    """

    def __init__(self, federation: Federation, training: Training, method: FedSagePlus) -> None:
        torch.manual_seed(federation.seed)
        self.training, self.method, self.round = training, method, 0
        self.clients = [
            FedSagePlusClient(
                graph, training, method, (federation.seed, k), len(federation.classes)
            )
            for k, graph in enumerate(federation.clients)
        ]
        self.state = copy_of_state(self.clients[0].classifier)
        self.questions: list[Question] = []
        self.answers: list[States | None] = [None] * len(self.clients)

    def advance(self) -> None:
        """Train one round of NeighGen or, after these, of the classifier."""
        if self.round < self.method.preparation:
            self.advance_generators()
        else:
            if self.round == self.method.preparation:
                for client in self.clients:
                    client.mend()
            states = [client.fit(self.state) for client in self.clients]
            self.state = mean_of_states(states, [1.0] * len(states))
        self.training.finish_round()
        self.round += 1

    def advance_generators(self) -> None:
        """Answer the questions of the last round, train NeighGen, and ask for the next one."""
        number, method = self.round + 1, self.method
        first = len(method.first_steps)
        shares = method.crosses and first <= number <= method.preparation - 2
        nothing: list[States | None] = [None] * len(self.clients)
        questions, answers = (self.questions, self.answers) if number > first else ([], nothing)
        self.questions, self.answers = [], nothing.copy()
        for k, client in enumerate(self.clients):
            for owner in self.owners(k) if questions else ():
                self.add(owner, client.answer(questions[owner]))
            alone = number > first
            steps = self.training.epochs if alone else method.first_steps[self.round]
            client.train_generator(steps, answers[k], alone=alone)
            if shares:
                self.questions.append(client.ask())

    def owners(self, client: int) -> list[int]:
        """Return whose questions a client answers in this round; these rotate."""
        others = len(self.clients) - 1
        first = self.round * self.method.partners
        steps = [(first + r) % others + 1 for r in range(min(self.method.partners, others))]
        return [(client + step) % len(self.clients) for step in steps]

    def add(self, owner: int, answer: States) -> None:
        """Add an answer to those of its owner, scaled to all other clients."""
        others = len(self.clients) - 1
        scale = others / min(self.method.partners, others)
        last = self.answers[owner]
        self.answers[owner] = {
            name: scale * value + (0 if last is None else last[name])
            for name, value in answer.items()
        }

    def accuracy(self) -> float:
        """Return the accuracy of the global classifier on all test nodes of mended graphs."""
        return share_correct([client.count_correct(self.state) for client in self.clients])
