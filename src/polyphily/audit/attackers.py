"""Attackers: how somebody who sees a client's messages scores pairs of its nodes as edges.

The attacker is the server, or whoever sees what it sees. He knows the method and its code, the
messages of the last round, and of each client the nodes' features and train labels, but no edge.
Every way to score pairs is one attacker:

features          the cosine of features: a baseline that uses no message
labels            the embeddings of a model that is fitted on features and train labels: what the
                  attacker's background knowledge alone tells, another baseline
model             the embeddings of the parameters that the client sent, without edges
representations   the same on the client's own graph. These never leave a site; it is FedHERO's
                  attack, and what could be learned at most
… by class        any of the last three by class probabilities in place of embeddings
a module's name   the output of a module whose parameters are all sent, by itself, if private
                  parameters do not change it; without edges, and on the client's own graph
a module's scores what a sent module says about pairs (`LinkScorer`)
update            the embeddings of the difference between sent and received parameters
a statistic       an upload that is no model: taken as parameters if it has their shapes, else read
                  by its shape (`Attacker.read`)

Parameters that a client does not send are unknown: they are initialised anew and fitted on what
the attacker knows, several times. The fit with the least loss is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from scipy.special import softmax
from torch import Tensor, nn
from torch.func import functional_call

from polyphily.audit.exchange import Exchange, last_exchange
from polyphily.audit.links import Attack, FloatArray, at_chance, attack, cosines, draw_pairs
from polyphily.core.messages import MODEL, Message, model_part
from polyphily.engines.simulation import Simulation
from polyphily.graphs.edges import Edges, canonical_edges
from polyphily.graphs.graph import Features, Graph, IntArray
from polyphily.graphs.random import derive
from polyphily.nn.backbones import Backbone, Output
from polyphily.nn.stacked import StackedGraph
from polyphily.runtime.client import Clients, cohort_of
from polyphily.runtime.network import build_network, initial_parameters

DRAWS = 3  # initial values that private parameters are fitted from
STEPS, RATE = 100, 0.01  # of Adam, for a fit
OWN_GRAPH = ", own graph"
NO_EDGES: IntArray = np.empty((2, 0), dtype=np.int64)
EQUAL = 1e-5  # largest difference of two scores that is rounding error
NEGLIGIBLE = 1e-6  # share of a row's length below which a difference is rounding error

Scores: TypeAlias = "list[FloatArray | None]"
"""Scores of each client's pairs; None if there are none for this client."""


@runtime_checkable
class LinkScorer(Protocol):
    """A module of a network that says something about pairs of nodes, such as a structure learner.

    The audit asks every such module whose parameters are all sent.
    """

    def link_scores(self, graph: StackedGraph, candidates: StackedGraph) -> Tensor:
        """Return a score for every entry of `candidates.edges`, `[nnz]`; larger: rather an edge.

        Args:
            graph: the nodes with the edges that are known.
            candidates: the same nodes with the pairs to score as edges, in both directions.
        """
        ...


@dataclass(frozen=True)
class Finding:
    """One attacker's results.

    Attributes:
        sees: the attacker's name.
        tried: how pairs were scored.
        attacks: the result at each client. None if the client has no edges, or no pairs without an
            edge, or if it shares nothing that this attacker could use.
    """

    sees: str
    tried: str
    attacks: list[Attack | None]

    @property
    def at_chance(self) -> bool:
        """True if the results may be those of scores that say nothing."""
        return at_chance(self.attacks)


@dataclass(frozen=True)
class Audit:
    """The results of all attackers.

    Attributes:
        findings: an entry for each attacker.
        unread: uploads that no attacker uses, such as single numbers.
    """

    findings: list[Finding]
    unread: list[str]


def audit(simulation: Simulation, exchange: Exchange | None = None) -> Audit:
    """Attack every client of the first federation.

    Args:
        simulation: after its last round.
        exchange: the messages that the attacker sees; those of the last round unless given.
    """
    exchange = last_exchange(simulation) if exchange is None else exchange
    federation = simulation.federations[0]
    drawn = [draw_pairs(graph, federation.seed, k) for k, graph in enumerate(federation.clients)]
    attacker = Attacker(simulation, exchange, [found and found[0] for found in drawn])
    findings = [
        Finding(
            sees,
            tried,
            [
                None if own is None or found is None else attack(own, found[1])
                for own, found in zip(scores, drawn, strict=True)
            ],
        )
        for sees, tried, scores in attacker.all_scores()
    ]
    return Audit(findings, attacker.unread)


Attempt: TypeAlias = tuple[str, str, Scores]
"""An attacker's name, how it works, and its scores."""


class Attacker:
    """Scores pairs of nodes in every way that what was sent permits.

    Args:
        simulation: names method, network, features and train labels. Its clients' private
            parameters and edges are not looked at, but for what is "on the client's own graph".
        exchange: the messages that the attacker sees.
        pairs: the pairs to score at each client, `[2, P]`; None if there are none.
    """

    def __init__(
        self, simulation: Simulation, exchange: Exchange, pairs: Sequence[IntArray | None]
    ) -> None:
        self.simulation, self.exchange, self.pairs = simulation, exchange, pairs
        self.network: Backbone = simulation.network
        self.graphs: Sequence[Graph] = simulation.federations[0].clients
        self.sent = {
            name: value
            for name, value in model_part(exchange.upload).items()
            if name in dict(self.network.named_parameters())
        }
        self.without_edges = self._clients_with([NO_EDGES] * len(pairs))
        self.unread: list[str] = []

    def _clients_with(self, edges: Sequence[IntArray]) -> Clients:
        """Return the clients with other edges."""
        simulation, count = self.simulation, len(self.graphs)
        whole = simulation.cohort
        cohort = cohort_of(
            simulation.settings,
            [_with_edges(graph, own) for graph, own in zip(self.graphs, edges, strict=True)],
            whole.keys[:count],
            whole.classes,
        )
        return replace(simulation.clients.take(range(count)), cohort=cohort)

    @cached_property
    def on_own_graph(self) -> Clients:
        return self.simulation.clients.take(range(len(self.graphs)))

    @cached_property
    def candidates(self) -> StackedGraph:
        """The nodes with the pairs to score as edges."""
        edges = [
            NO_EDGES if own is None else canonical_edges(own, graph.num_nodes)
            for own, graph in zip(self.pairs, self.graphs, strict=True)
        ]
        return self._clients_with(edges).cohort

    def all_scores(self) -> Iterator[Attempt]:
        """Yield what every attacker finds, the baselines first.

        A part of the upload that gives the same scores as the model or another part is left out.
        """
        yield "features", "cosine of features", self.compare([g.features for g in self.graphs])
        fit = "by a model fitted on features and train labels, without edges"
        yield from self.by_output("labels", fit, self.output(self.baseline[0]))
        known = list(self.by_model())
        yield from known
        for attempt in chain(self.by_parts(), self.by_statistics()):
            if not any(same(attempt[2], earlier[2]) for earlier in known):
                known.append(attempt)
                yield attempt

    # The model -------------------------------------------------------------------------------

    def fitted(self, sent: Message) -> list[Message]:
        """Return parameters that the attacker can use, the best first.

        Args:
            sent: parameters that he knows. They are kept, and all others are initialised anew and
                fitted to the train labels, from `DRAWS` draws. The first draw is the run's own,
                which every party knows. The best parameters of a client have the least loss.
        """
        private = [n for n, _ in self.network.named_parameters() if n not in sent]
        if not private:
            return [sent]
        draws, losses = zip(*(self._fit(sent, private, i) for i in range(DRAWS)), strict=True)
        best, clients = torch.stack(losses).argmin(dim=0), torch.arange(len(self.graphs))
        chosen = {n: torch.stack([draw[n] for draw in draws])[best, clients] for n in private}
        return [{**sent, **chosen}, *draws]

    def _fit(self, sent: Message, private: Sequence[str], draw: int) -> tuple[Message, Tensor]:
        """Return the parameters of one fit, and the loss of each client."""
        simulation, clients = self.simulation, self.without_edges
        seed, cohort = simulation.federations[0].seed, clients.cohort
        start = initial_parameters(
            build_network(
                simulation.method,
                simulation.settings,
                cohort.graphs[0].num_features,
                cohort.classes,
                derive(seed, f"attacker/{draw}") if draw else seed,
            )
        )
        own = {n: start[n].repeat(len(cohort), *[1] * (start[n].dim() - 1)) for n in private}
        own = {n: t.to(cohort.device).requires_grad_() for n, t in own.items()}
        local = clients.with_params({**sent, **own}, {}, {}, simulation.round)
        adam = torch.optim.Adam(own.values(), lr=RATE)
        for _ in range(STEPS):
            loss = local.cross_entropy(local.forward().logits)
            if not loss.requires_grad:  # the output depends on no private parameter
                break
            adam.zero_grad()
            loss.sum().backward()  # type: ignore[no-untyped-call]
            adam.step()
        with torch.no_grad():
            loss = local.cross_entropy(local.forward().logits)
        return {n: t.detach() for n, t in local.params.items()}, loss

    @cached_property
    def baseline(self) -> list[Message]:
        """Fits of all parameters, without anything that was sent."""
        return self.fitted({})

    @cached_property
    def completed(self) -> list[Message]:
        """The parameters that were sent, completed by fits."""
        return self.fitted(self.sent) if self.sent else self.baseline

    def output(self, params: Message, clients: Clients | None = None) -> Output:
        """Return the network's output, without edges unless clients are given."""
        chosen = self.without_edges if clients is None else clients
        return chosen.with_params(params, {}, {}, self.simulation.round).frozen(params)

    @cached_property
    def model_output(self) -> Output:
        """The output of the attacker's best model, without edges."""
        return self.output(self.completed[0])

    @property
    def _fits(self) -> str:
        private = len(self.sent) < len(dict(self.network.named_parameters()))
        return f", private parameters fitted on train labels ({DRAWS} draws)" if private else ""

    def by_model(self) -> Iterator[Attempt]:
        """Score by the embeddings of the parameters that were sent, and of their change."""
        places = (
            ("model", "without edges", self.without_edges),
            ("representations", "on the client's own graph", self.on_own_graph),
        )
        for name, where, clients in places:
            if self.sent:
                output = self.output(self.completed[0], clients)
                yield from self.by_output(name, where + self._fits, output)
            else:
                yield name, "no parameters were sent", [None] * len(self.graphs)
        received = model_part(self.exchange.download)
        change = {n: t - received[n] for n, t in self.sent.items() if n in received}
        if change:
            tried = "cosine of embeddings without edges, by the change of parameters in a round"
            yield "update", tried, self.as_parameters(change)

    def by_output(self, name: str, source: str, output: Output) -> Iterator[Attempt]:
        """Score by a model's embeddings, and by its class probabilities."""
        yield name, f"cosine of embeddings {source}", self.compare(self.split(output.embedding))
        classes = [centred(softmax(own, axis=1)) for own in self.arrays(output.logits)]
        yield f"{name} by class", f"cosine of class probabilities {source}", self.compare(classes)

    def as_parameters(self, values: Message) -> Scores:
        """Score by embeddings where the given values stand in place of parameters."""
        embedding = self.output({**self.completed[0], **values}).embedding
        return self.compare(self.split(embedding))

    # Modules ---------------------------------------------------------------------------------

    @cached_property
    def modules(self) -> dict[str, nn.Module]:
        """The modules in the network whose parameters are all sent, by name."""
        found = {}
        for name, module in self.network.named_modules():
            own = [f"{name}.{parameter}" for parameter, _ in module.named_parameters()]
            if name and own and all(parameter in self.sent for parameter in own):
                found[name] = module
        return found

    def by_parts(self) -> Iterator[Attempt]:
        """Score by modules that are sent, each by itself."""
        places = (
            (self.without_edges, ", without edges", ""),
            (self.on_own_graph, OWN_GRAPH, OWN_GRAPH),
        )
        for clients, where, suffix in places:
            for name, table in self._outputs(clients).items():
                tried = f"cosine of the output of {name}{where}"
                yield f"{name}{suffix}", tried, self.compare(self.split(table))
            for name, module in self.modules.items():
                if isinstance(module, LinkScorer):
                    scores = self._link_scores(name, module, clients.cohort)
                    yield f"scores of {name}{suffix}", f"scores of pairs by {name}{where}", scores

    def _outputs(self, clients: Clients) -> dict[str, Tensor]:
        """Return the outputs of modules that do not depend on any private parameter.

        A module within another one that has such an output is left out.
        """
        params, noise = self.completed[0], torch.Generator().manual_seed(0)
        other = {
            n: t if n in self.sent else t + torch.randn(t.shape, generator=noise).to(t)
            for n, t in params.items()
        }
        before, after = (
            outputs_of(self.modules, partial(self.output, p, clients), clients.cohort.num_nodes)
            for p in (params, other)
        )
        found: dict[str, Tensor] = {}
        for name, table in before.items():
            within = any(name.startswith(f"{outer}.") for outer in found)
            if not within and name in after and torch.equal(table, after[name]):
                found[name] = table
        return found

    def _link_scores(self, name: str, module: nn.Module, graph: StackedGraph) -> Scores:
        """Return a module's own scores of pairs, the mean of both directions."""
        own = {f"module.{n}": self.sent[f"{name}.{n}"] for n, _ in module.named_parameters()}
        with torch.no_grad():
            scores: Tensor = functional_call(_LinkScores(module), own, (graph, self.candidates))
        edges, pointers = self.candidates.edges, self.candidates.segments.pointers
        keys = edges.row * edges.shape[0] + edges.col_long  # ascending
        found: Scores = []
        for first, pairs in zip(pointers, self.pairs, strict=False):
            if pairs is None:
                found.append(None)
                continue
            u, v = torch.from_numpy(pairs + first).to(keys.device)
            both = torch.stack([u * edges.shape[0] + v, v * edges.shape[0] + u])
            found.append(scores[torch.searchsorted(keys, both)].double().mean(dim=0).cpu().numpy())
        return found

    # Statistics ------------------------------------------------------------------------------

    def by_statistics(self) -> Iterator[Attempt]:
        """Score by uploads that are no model."""
        parameters = dict(self.network.named_parameters())
        for entry in self.simulation.servers[0].declared_uploads:
            values = {n: self.exchange.upload[n] for n in entry.shapes if n in self.exchange.upload}
            values = {n.removeprefix(entry.name): t for n, t in values.items()}
            name = entry.name.rstrip("/")
            if entry.name == MODEL or not values:
                continue
            if values.keys() <= parameters.keys():
                tried = f"cosine of embeddings without edges, by {name} in place of parameters"
                yield name, tried, self.as_parameters(values)
                values = self.first_layer(values)
            for own, value in values.items():
                full = f"{name}/{own}" if own else name
                found = list(self.read(full, value))
                yield from found
                if not found:
                    self.unread.append(full)

    def first_layer(self, values: Message) -> Message:
        """Return the tensors that have a row for every feature as one, `[clients, F, …]`."""
        width = self.graphs[0].num_features
        inputs = [t.flatten(2) for t in values.values() if t.dim() > 2 and t.shape[1] == width]
        return {"": torch.cat(inputs, dim=2)} if inputs else {}

    def read(self, name: str, value: Tensor) -> Iterator[Attempt]:
        """Score by a tensor, `[clients, …]`, in every way that its shape suggests.

        A row per node is a representation. Rows as wide as the features (or several of these side
        by side), or columns as long, are directions that features are projected on. Rows as wide
        as the embedding are points, and a node is represented by its cosines with them. With a row
        per class, a node is represented by the mean row under the class probabilities of the
        attacker's model.
        """
        shape = tuple(value.shape[1:])
        if not shape:
            return
        width, features = shape[-1], self.graphs[0].num_features
        rows: list[FloatArray] = [own.double().cpu().numpy() for own in value]
        if any(shape[0] == graph.num_nodes for graph in self.graphs):
            tables = [
                own.reshape(len(own), -1) if len(own) == graph.num_nodes else None
                for own, graph in zip(rows, self.graphs, strict=True)
            ]
            yield f"{name} by node", f"cosine of the rows of {name}", self.compare(tables)
        columns = shape[0] == features
        if width == self.network.embedding_width and not columns:
            points = [unit(own.reshape(-1, width)) for own in rows]
            own_points = zip(self.arrays(self.model_output.embedding), points, strict=True)
            found = [centred(unit(h) @ s.T) for h, s in own_points]
            tried = f"cosine of the nodes' affinities to {name}, embedded without edges{self._fits}"
            yield f"{name} by embedding", tried, self.compare(found)
        elif columns or width % features == 0:
            directions = [
                own.reshape(features, -1) if columns else own.reshape(-1, features).T
                for own in rows
            ]
            found = [
                centred(np.asarray(graph.features @ own, dtype=np.float64))
                for graph, own in zip(self.graphs, directions, strict=True)
            ]
            tried = f"cosine of features projected on {name}"
            yield f"{name} by features", tried, self.compare(found)
        if len(shape) > 1 and shape[0] == self.without_edges.cohort.classes:
            own_rows = zip(self.arrays(self.model_output.logits), rows, strict=True)
            found = [centred(softmax(z, axis=1) @ own.reshape(len(own), -1)) for z, own in own_rows]
            tried = f"cosine of the mean {name} of a node's predicted classes{self._fits}"
            yield f"{name} by class", tried, self.compare(found)

    # Helpers ---------------------------------------------------------------------------------

    def split(self, table: Tensor) -> list[Features]:
        """Return the rows of each client."""
        sizes = [graph.num_nodes for graph in self.graphs]
        return [part.cpu().numpy() for part in torch.split(table.detach(), sizes)]

    def arrays(self, table: Tensor) -> list[FloatArray]:
        """Return the rows of each client in double precision."""
        return [np.asarray(own, dtype=np.float64) for own in self.split(table)]

    def compare(self, tables: Sequence[Features | None]) -> Scores:
        """Return the cosines of each client's pairs of rows."""
        return [
            None if table is None or pairs is None else cosines(table, pairs)
            for table, pairs in zip(tables, self.pairs, strict=True)
        ]


def _with_edges(graph: Graph, edges: IntArray) -> Graph:
    """Return a graph with other edges, which are of no relation if its own have types."""
    typed = graph.edge_types is not None
    return graph.with_edges(
        Edges(edges, types=np.zeros(edges.shape[1], np.int64) if typed else None)
    )


class _LinkScores(nn.Module):
    """Calls `link_scores` in place of a module's `forward`, for `functional_call`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, graph: StackedGraph, candidates: StackedGraph) -> Tensor:
        assert isinstance(self.module, LinkScorer)
        return self.module.link_scores(graph, candidates)


def outputs_of(
    modules: dict[str, nn.Module], run: Callable[[], object], nodes: int
) -> dict[str, Tensor]:
    """Return the outputs of modules that have a row for every node, as `run` calls them first."""
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            table = output.embedding if isinstance(output, Output) else output
            if isinstance(table, Tensor) and table.dim() == 2 and len(table) == nodes:
                found.setdefault(name, table.detach())

        return hook

    hooks = [module.register_forward_hook(keep(name)) for name, module in modules.items()]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return {name: found[name] for name in modules if name in found}


def same(one: Scores, two: Scores) -> bool:
    """Return whether two attempts found the same; scores that say nothing are not compared."""
    return all(
        a is b
        if a is None or b is None
        else np.allclose(a, b, rtol=0, atol=EQUAL) and np.ptp(a) > 0
        for a, b in zip(one, two, strict=True)
    )


def unit(x: FloatArray) -> FloatArray:
    """Divide rows by their length; rows of zeros stay."""
    length = np.linalg.norm(x, axis=1, keepdims=True)
    found: FloatArray = np.divide(x, length, out=np.zeros_like(x), where=length > 0)
    return found


def centred(x: FloatArray) -> FloatArray:
    """Subtract the mean row; rows that differ from it by rounding errors only become zero."""
    found: FloatArray = x - x.mean(axis=0)
    small = np.linalg.norm(found, axis=1) <= NEGLIGIBLE * np.linalg.norm(x, axis=1)
    found[small] = 0
    return found
