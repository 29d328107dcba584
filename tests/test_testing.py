"""The shipped checks: what breaks a property fails the check of that property, in plain words."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyphily import extend, testing
from polyphily.core.method import METHODS
from polyphily.core.metrics import METRICS
from polyphily.errors import UserError
from polyphily.extend import (
    AFTER_FIRST,
    WEIGHT,
    Backbone,
    Cohort,
    DatasetInfo,
    Declared,
    Draws,
    FedAvg,
    Graph,
    Linear,
    Local,
    Mean,
    Message,
    Method,
    Output,
    Predictions,
    Request,
    Shape,
    Sizes,
    StackedGraph,
    State,
    Uploads,
    as_model,
    glorot,
    model,
    model_part,
    parameter,
    public,
    register_backbone,
    register_dataset,
    register_method,
    register_metric,
    register_partition,
    to_each,
    zeros,
)
from polyphily.graphs.datasets import DATASETS
from polyphily.graphs.partitions import PARTITIONS
from polyphily.nn.backbones import BACKBONES, GCN
from polyphily.testing import (
    BACKBONE_CHECKS,
    METHOD_CHECKS,
    BackboneCase,
    CheckFailed,
    MethodCase,
    check_backbone,
    check_dataset,
    check_method,
    check_metric,
    check_partition,
)


@pytest.fixture(autouse=True)
def _nothing_stays_registered() -> Iterator[None]:
    with ExitStack() as stack:
        for registry in (METHODS, BACKBONES, PARTITIONS, DATASETS, METRICS):
            stack.enter_context(registry.restored())
        yield


def registered(cls: type[Method], cite: str = "nobody") -> type[Method]:
    """Register a subclass of the same name, so that the class itself stays as it is."""
    own = type(cls.__name__, (cls,), {"__doc__": cls.__doc__})
    return register_method(cls.__name__, cite=cite)(dataclass(frozen=True)(own))


# Methods -----------------------------------------------------------------------------------------

CALLS = [0]


class ScalarLoss(FedAvg):
    """A loss that is one number."""

    def loss(self, local: Local) -> Tensor:
        return super().loss(local).sum()


class MixedLoss(FedAvg):
    """A loss that divides by the train nodes of all clients."""

    def loss(self, local: Local) -> Tensor:
        return super().loss(local) * local.cohort.num_train / local.cohort.num_train.sum()


class MixedUpload(FedAvg):
    """Clients that upload their common mean."""

    def upload(self, local: Local) -> Message:
        sent = super().upload(local)
        return {n: t.mean(dim=0, keepdim=True).expand_as(t) for n, t in sent.items()}


class MixedPreparation(FedAvg):
    """A constant of a round that is centred over all clients."""

    def prepare_round(self, local: Local) -> Message:
        degrees = local.cohort.degrees
        return {"degrees": degrees - degrees.mean()}


class TorchDropout(FedAvg):
    """Dropout from torch's own generator."""

    def loss(self, local: Local) -> Tensor:
        return local.cross_entropy(F.dropout(local.forward().logits, 0.5))


class NumbersClients(FedAvg):
    """Weights that grow with the client's number."""

    def upload(self, local: Local) -> Message:
        numbers = tuple(float(1 + client) for _, client in local.cohort.keys)
        return {**super().upload(local), WEIGHT: local.cohort.constant(numbers)}


class Peeks(FedAvg):
    """A loss that knows the share of class 0 among all nodes."""

    def loss(self, local: Local) -> Tensor:
        shares = local.cohort.cached_per_graph("share", lambda g: float((g.labels == 0).mean()))
        return super().loss(local) * (1 + local.cohort.constant(tuple(shares)))


class PeeksAtPrediction(FedAvg):
    """Predictions that are the labels."""

    def predict(self, local: Local) -> Tensor:
        labels = local.cohort.cached_per_graph("labels", lambda graph: graph.labels)
        return F.one_hot(torch.from_numpy(np.concatenate(labels)), local.cohort.classes).double()


class Frozen(FedAvg):
    """A loss that does not reach the first layer."""

    def loss(self, local: Local) -> Tensor:
        own = {n: p.detach() if n.startswith("convs.0") else p for n, p in local.params.items()}
        return local.cross_entropy(local.forward(own).logits)


class Forgets(FedAvg):
    """A memory that appears after the first round only."""

    def loss(self, local: Local) -> Tensor:
        return super().loss(local) * local.memory.get("more", local.cohort.num_train * 0 + 1)

    def update_memory(self, local: Local) -> Message:
        return {"more": local.cohort.num_train * 0 + 2}


class CountsCalls(FedAvg):
    """A loss that depends on how often it was called."""

    def loss(self, local: Local) -> Tensor:
        CALLS[0] += 1
        return super().loss(local) * CALLS[0]


class NeedsGraphs(FedAvg):
    """A loss that needs whole graphs without saying so."""

    def loss(self, local: Local) -> Tensor:
        sizes = local.cohort.constant(
            tuple(float(graph.num_nodes) for graph in local.cohort.graphs)
        )
        return super().loss(local) * sizes / sizes


class Lonely(FedAvg):
    """A server that divides by the number of other clients."""

    def uploads(self, sizes: Sizes) -> tuple[Declared, ...]:
        return tuple(
            replace(d, server=extend.Individually("it counts")) for d in super().uploads(sizes)
        )

    def aggregate(self, state: State, uploads: Uploads, rng: np.random.Generator) -> State:
        others = torch.tensor(float(len(uploads.clients) - 1))
        return {n: t * others / others for n, t in super().aggregate(state, uploads, rng).items()}


@dataclass(frozen=True)
class Divides(FedAvg):
    """A loss over a number that may be zero; `by` says which."""

    by: str = parameter(
        "classes", "what it divides by", choices=("classes", "edges", "val", "nodes")
    )

    def loss(self, local: Local) -> Tensor:
        numbers = {
            "classes": lambda g: len(np.unique(g.labels)) - 1,
            "edges": lambda g: g.num_edges,
            "val": lambda g: int(g.masks.val.sum()),
            "nodes": lambda g: g.num_nodes - 1,
        }
        found = local.cohort.cached_per_graph(self.by, numbers[self.by])
        return super().loss(local) / local.cohort.constant(tuple(map(float, found)))

    def needs_whole_graph(self) -> str:
        return "it looks at graphs"


class UndeclaredUpload(FedAvg):
    """More is sent than declared."""

    def upload(self, local: Local) -> Message:
        return {**super().upload(local), "more": local.cohort.num_train}


class LateUpload(FedAvg):
    """Declared for later rounds only."""

    def uploads(self, sizes: Sizes) -> tuple[Declared, ...]:
        return (*super().uploads(sizes), public("more", (), extend.Sum(), rounds=AFTER_FIRST))

    def upload(self, local: Local) -> Message:
        return {**super().upload(local), "more": local.cohort.num_train}


class WholeNumbers(FedAvg):
    """An upload of another type."""

    def upload(self, local: Local) -> Message:
        sent = super().upload(local)
        return {**sent, WEIGHT: sent[WEIGHT].long()}


class OtherShape(FedAvg):
    """A download of another shape."""

    def download(self, state: State, clients: Sequence[int]) -> Message:
        return {n: t.unsqueeze(-1) for n, t in super().download(state, clients).items()}


class UnknownWeight(FedAvg):
    """A mean by a weight that is not sent."""

    def uploads(self, sizes: Sizes) -> tuple[Declared, ...]:
        return (model(sizes, Mean("importance")),)


class DeclaredTwice(FedAvg):
    """The same tensors twice."""

    def downloads(self, sizes: Sizes) -> tuple[Declared, ...]:
        return super().downloads(sizes) * 2


class OneRow(FedAvg):
    """A download without a row per client."""

    def download(self, state: State, clients: Sequence[int]) -> Message:
        return to_each(as_model(model_part(state)), [0])


class AsksAround(FedAvg):
    """A download that depends on how many are asked."""

    def download(self, state: State, clients: Sequence[int]) -> Message:
        return {n: t * len(clients) for n, t in super().download(state, clients).items()}


class Leaks(FedAvg):
    """Private parameters that are uploaded."""

    def shares(self, network: Backbone, parameter: str) -> bool:
        return not parameter.endswith("bias")

    def upload(self, local: Local) -> Message:
        return as_model(local.params)


class ChangesState(FedAvg):
    """A server that writes into the state that it is given."""

    def uploads(self, sizes: Sizes) -> tuple[Declared, ...]:
        return super().uploads(sizes)

    def aggregate(self, state: State, uploads: Uploads, rng: np.random.Generator) -> State:
        for name, value in super().aggregate(state, uploads, rng).items():
            state[name].copy_(value)
        return state


class ChangesUploads(ChangesState):
    """A server that writes into uploads."""

    def aggregate(self, state: State, uploads: Uploads, rng: np.random.Generator) -> State:
        uploads[WEIGHT].mul_(2)
        return FedAvg.aggregate(self, state, uploads, rng)


class RandomServer(ChangesState):
    """A server with random numbers of its own."""

    def aggregate(self, state: State, uploads: Uploads, rng: np.random.Generator) -> State:
        after = FedAvg.aggregate(self, state, uploads, rng)
        return {n: t + torch.rand(()) for n, t in after.items()}


class LosesState(FedAvg):
    """A state that loses an entry."""

    def init_server_state(self, shared: Message, clients: int) -> State:
        return {**super().init_server_state(shared, clients), "kept": torch.zeros(())}

    def aggregate(self, state: State, uploads: Uploads, rng: np.random.Generator) -> State:
        return as_model(uploads.mean(uploads.model, uploads[WEIGHT]))


class Median(ChangesState):
    """A median that claims to be a mean."""

    def uploads(self, sizes: Sizes) -> tuple[Declared, ...]:
        return super().uploads(sizes)

    def aggregate(self, state: State, uploads: Uploads, rng: np.random.Generator) -> State:
        return as_model({n: t.median(dim=0).values for n, t in uploads.model.items()})


class UnseededNetwork(FedAvg):
    """A network whose initial parameters ignore the seed."""

    def build(self, backbone: str, shape: Shape, seed: int) -> Backbone:
        return BACKBONES.find(backbone)(shape)


class Squares(GCN):
    """A network whose embedding is wider than it says."""

    def forward(self, graph: StackedGraph, draws: Draws | None = None) -> Output:
        logits, embedding = super().forward(graph, draws)
        return Output(logits, torch.cat([embedding, embedding.square()], dim=1))


class WideEmbedding(FedAvg):
    """A network that is wider than it says."""

    def build(self, backbone: str, shape: Shape, seed: int) -> Backbone:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Squares(shape)


class Raises(FedAvg):
    """A hook that raises."""

    def update_memory(self, local: Local) -> Message:
        raise KeyError("prototypes")


@pytest.mark.parametrize(
    ("cls", "check", "hook", "words"),
    [
        (ScalarLoss, "one-loss-per-client", "loss", r"shape \(\): return one value per client"),
        (MixedLoss, "hooks-keep-clients-apart", "loss", "depend on that client alone"),
        (MixedLoss, "stacked-equals-sequential", "", "one after another differ"),
        (MixedLoss, "seeds-side-by-side", "", "side by side differ"),
        (MixedUpload, "hooks-keep-clients-apart", "upload", "for client 0 changes"),
        (MixedPreparation, "hooks-keep-clients-apart", "prepare_round", "for client 0 changes"),
        (TorchDropout, "stacked-equals-sequential-with-dropout", "", r"from `local.draws`"),
        (NumbersClients, "permuting-clients", "aggregate", "permutes=False"),
        (Peeks, "labels-outside-training", "", "change what is trained"),
        (PeeksAtPrediction, "labels-outside-training", "predict", "change predictions"),
        (Frozen, "every-parameter-trains", "loss", r"convs.0.weight did not change.*untrained="),
        (Forgets, "memory-keeps-its-entries", "", "update_memory returned 'more'"),
        (CountsCalls, "resumes", "", "in attributes or global"),
        (NeedsGraphs, "trains-on-samples", "needs_whole_graph", "sampled subgraphs"),
        (Lonely, "a-federation-of-one-client", "", "not finite"),
        (UndeclaredUpload, "declares-what-it-sends", "upload", "round 1 has undeclared more"),
        (LateUpload, "declares-what-it-sends", "upload", "round 1 has undeclared more"),
        (WholeNumbers, "declares-what-it-sends", "upload", "type torch.int64"),
        (OtherShape, "declares-what-it-sends", "download", "shape"),
        (UnknownWeight, "declares-what-it-sends", "uploads", "by importance, which is not"),
        (DeclaredTwice, "declares-what-it-sends", "downloads", "declared twice"),
        (OneRow, "declares-what-it-sends", "download", "1 rows for 4 clients"),
        (AsksAround, "download-of-some", "download", "who else is asked"),
        (Leaks, "private-parameters-stay", "upload", "bias travels"),
        (ChangesState, "server-is-pure", "aggregate", "changes the state"),
        (ChangesUploads, "server-is-pure", "aggregate", "changes the uploads"),
        (RandomServer, "server-is-pure", "aggregate", "draw random numbers from `rng`"),
        (LosesState, "server-is-pure", "aggregate", "kept is missing"),
        (Median, "sums-are-enough", "aggregate", "Individually"),
        (UnseededNetwork, "network", "build", "two networks of one seed differ"),
        (WideEmbedding, "embedding-width", "build", r"\(59, 6\), but its embedding_width is 3"),
        (Raises, "resumes", "update_memory", "KeyError: 'prototypes'"),
    ],
)
def test_what_breaks_a_property_fails_its_check(
    cls: type[Method], check: str, hook: str, words: str
) -> None:
    case = MethodCase(registered(cls)())
    with pytest.raises(CheckFailed) as caught:
        METHOD_CHECKS[check](case)
    first = str(caught.value).splitlines()[0]
    assert first.startswith(cls.__name__ + (f".{hook}" if hook else ":"))
    assert re.search(words, first), first


@pytest.mark.parametrize(
    ("by", "kind"),
    [
        ("classes", "one-class"),
        ("edges", "no-edges"),
        ("val", "no-validation"),
        ("nodes", "one-node"),
    ],
)
def test_an_awkward_client_is_found_by_its_check(by: str, kind: str) -> None:
    case = MethodCase(registered(Divides)(by=by))
    with pytest.raises(CheckFailed, match=r"client 4 .* is not finite. Guard divisions"):
        METHOD_CHECKS[f"a-client-with-{kind}"](case)
    METHOD_CHECKS["a-client-with-no-edges" if by != "edges" else "a-client-with-one-class"](case)


def test_every_check_has_a_method_that_fails_it() -> None:
    marks = test_what_breaks_a_property_fails_its_check.pytestmark[0].args[1]
    tested = {check for _, check, _, _ in marks} | {
        n for n in METHOD_CHECKS if "a-client-with" in n
    }
    apart = {"class", "created-by-name", "seeds-side-by-side-with-some-clients-each-round"}
    assert METHOD_CHECKS.keys() - tested == apart


def test_the_first_failure_ends_check_method() -> None:
    with pytest.raises(CheckFailed, match=r"^ScalarLoss.loss returned .* one value per client"):
        check_method(registered(ScalarLoss))


def test_known_exceptions_pass() -> None:
    check_method(registered(NumbersClients), permutes=False)
    check_method(registered(Frozen)(), untrained=("convs.0",), backbone="gcn")


def test_hyperparameters_are_those_given() -> None:
    method = registered(Divides)
    with pytest.raises(CheckFailed, match="one node"):
        check_method(method, by="nodes", backbone="gcn")
    with pytest.raises(CheckFailed, match="no validation"):
        check_method(method(), by="val", backbone="gcn")


# The class of a method ---------------------------------------------------------------------------


def unregistered() -> type[Method]:
    return MixedLoss


def no_docstring() -> type[Method]:
    @register_method("x", cite="y")
    @dataclass(frozen=True)
    class Mine(FedAvg):
        pass

    Mine.__doc__ = None
    return Mine


def no_citation() -> type[Method]:
    return registered(MixedLoss, cite="")


def no_dataclass() -> type[Method]:
    @register_method("x", cite="y")
    class Mine(FedAvg):
        """Mine."""

        mu: float = 0.1

    return Mine


def no_meaning() -> type[Method]:
    @register_method("x", cite="y")
    @dataclass(frozen=True)
    class Mine(FedAvg):
        """Mine."""

        mu: float = 0.1

    return Mine


def name_of_a_setting() -> type[Method]:
    @register_method("x", cite="y")
    @dataclass(frozen=True)
    class Mine(FedAvg):
        """Mine."""

        momentum: float = parameter(0.9, "of the server")

    return Mine


def same_in_the_paper() -> type[Method]:
    @register_method("x", cite="y")
    @dataclass(frozen=True)
    class Mine(FedAvg):
        """Mine."""

        mu: float = parameter(0.9, "of the server", paper=0.9)

    return Mine


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (unregistered, "MixedLoss: the class is not registered. Decorate it with @register_method"),
        (no_docstring, "Mine: the class has no docstring"),
        (no_citation, "MixedLoss: it cites nothing"),
        (no_dataclass, r"Mine.mu: this is no hyperparameter.*@dataclass\(frozen=True\)"),
        (no_meaning, r"Mine.mu: the hyperparameter has no default or no description"),
        (name_of_a_setting, "Mine.momentum: settings of a run have this name"),
        (same_in_the_paper, "Mine.mu: the paper's value is the default"),
    ],
)
def test_a_class_that_is_not_as_it_should_be(make: Callable[[], type[Method]], words: str) -> None:
    with pytest.raises(CheckFailed, match=words):
        check_method(make())


def test_a_default_of_another_type_than_its_values() -> None:
    @register_method("x", cite="y")
    @dataclass(frozen=True)
    class Mine(FedAvg):
        """Mine."""

        mu: float = parameter(1, "a number")

    with pytest.raises(CheckFailed, match=r"Mine: the check 'created-by-name'.*type int"):
        METHOD_CHECKS["created-by-name"](MethodCase(Mine(mu=0.5)))


# Backbones ---------------------------------------------------------------------------------------


class Plain(Backbone):
    """A linear map and one propagation per layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.last = Linear(shape.features, shape.classes)

    def forward(self, graph: StackedGraph, draws: Draws | None = None) -> Output:
        logits = self.last(self.drop_input(graph, draws), graph)
        for _ in range(self.shape.layers):
            logits = graph.gcn @ logits
        return Output(logits, logits)

    @property
    def embedding_width(self) -> int:
        return self.shape.classes

    def is_classifier(self, parameter: str) -> bool:
        return True


class WrongWidth(Plain):
    """A width that is not that of the embedding."""

    embedding_width = 5


class NoClassifier(Plain):
    """Marks nothing."""

    def is_classifier(self, parameter: str) -> bool:
        return False


class MixesClients(Plain):
    """Centres over all clients."""

    def forward(self, graph: StackedGraph, draws: Draws | None = None) -> Output:
        logits = super().forward(graph, draws).logits
        return Output(logits - logits.mean(dim=0), logits)


class DropsAlways(Plain):
    """Dropout from torch."""

    def forward(self, graph: StackedGraph, draws: Draws | None = None) -> Output:
        logits = F.dropout(super().forward(graph).logits, self.shape.dropout)
        return Output(logits, logits)


class Unused(Plain):
    """A parameter that is not used."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.scale = zeros(shape.classes)


class NotStacked(Plain):
    """A parameter without the client axis."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.scale = nn.Parameter(torch.ones(shape.classes))


class Buffered(Plain):
    """A buffer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.register_buffer("seen", torch.zeros(1))


class DenseOnly(Plain):
    """Takes dense features only."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.weight = glorot((shape.features, shape.classes), 1, 1)

    def forward(self, graph: StackedGraph, draws: Draws | None = None) -> Output:
        x = graph.x if isinstance(graph.x, Tensor) else torch.zeros(graph.num_nodes, 6).double()
        logits = super().forward(graph, draws).logits + graph.segments.matmul(x, self.weight)
        return Output(logits, logits)


class ByDegree(Plain):
    """Divides by a degree that may be zero."""

    weighted_edges = False

    def forward(self, graph: StackedGraph, draws: Draws | None = None) -> Output:
        logits = super().forward(graph, draws).logits / graph.degrees.unsqueeze(1)
        return Output(logits, logits)


class FarReach(Plain):
    """One propagation more than there are layers."""

    def forward(self, graph: StackedGraph, draws: Draws | None = None) -> Output:
        logits = graph.gcn @ super().forward(graph, draws).logits
        return Output(logits, logits)


class ReachesLess(FarReach):
    """Says itself how far it reaches, and is wrong."""

    local_reach = False

    @property
    def reach(self) -> int:
        return self.shape.layers


class ReadsEdges(Plain):
    """Reads the edges themselves."""

    def forward(self, graph: StackedGraph, draws: Draws | None = None) -> Output:
        logits = self.last(self.drop_input(graph, draws), graph)
        return Output(graph.edges @ logits + logits, logits)


@pytest.mark.parametrize(
    ("cls", "check", "words"),
    [
        (WrongWidth, "output", r"WrongWidth.embedding_width: with 1 layers embedding have"),
        (NoClassifier, "classifier", "NoClassifier.is_classifier: it marks no parameter"),
        (MixesClients, "stacked-equals-one-by-one", "MixesClients.forward: the output of client 0"),
        (DropsAlways, "dropout", "DropsAlways.forward: without draws it drops entries"),
        (Unused, "gradients", "Unused.forward: with 1 layers no gradient reaches scale"),
        (NotStacked, "parameters-of-one-client", r"NotStacked: scale has the shape \(3,\)"),
        (Buffered, "parameters-of-one-client", "Buffered: it has buffers"),
        (DenseOnly, "sparse-equals-dense-features", "DenseOnly.forward: sparse features give"),
        (ByDegree, "a-client-without-edges", "ByDegree.forward: .* without edges is not finite"),
        (FarReach, "local-reach", "FarReach.local_reach: .* Set `local_reach = False`"),
        (ReachesLess, "local-reach", "ReachesLess.reach: .* Correct `reach`"),
        (ReadsEdges, "weighted-edges", "ReadsEdges.weighted_edges: edges of weight 0 change"),
    ],
)
def test_what_breaks_a_property_of_backbones(cls: type[Backbone], check: str, words: str) -> None:
    case = BackboneCase(register_backbone(cls.__name__)(cls))
    with pytest.raises(CheckFailed, match=words):
        BACKBONE_CHECKS[check](case)


def test_a_backbone_that_is_not_registered() -> None:
    with pytest.raises(CheckFailed, match="Plain: the class is not registered"):
        check_backbone(Plain)
    check_backbone(register_backbone("plain")(Plain))
    check_backbone("plain", hidden=4)


@pytest.mark.parametrize("check", BACKBONE_CHECKS)
@pytest.mark.parametrize("name", BACKBONES)
def test_backbones_of_the_library(name: str, check: str) -> None:
    BACKBONE_CHECKS[check](BackboneCase(BACKBONES[name]))


# Partitions, datasets and metrics ----------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "louvain-min": {"min_nodes": 5},
    "metis-overlap": {"clients": (5, 10)},
}


@pytest.mark.parametrize("name", [name for name in PARTITIONS if name != "natural"])
def test_partitions_of_the_library(name: str) -> None:
    check_partition(name, **OPTIONS.get(name, {}))


def test_what_breaks_a_property_of_partitions() -> None:
    @register_partition("global", "draws from global state")
    def unseeded(graph: Graph, clients: int, seed: int) -> Sequence[Any]:
        return np.array_split(np.random.permutation(graph.num_nodes), clients)  # noqa: NPY002

    @register_partition("empty", "leaves a client without nodes")
    def empty(graph: Graph, clients: int, seed: int) -> Sequence[Any]:
        return [np.arange(graph.num_nodes), *[np.arange(0)] * (clients - 1)]

    @register_partition("writes", "changes the graph")
    def writes(graph: Graph, clients: int, seed: int) -> Sequence[Any]:
        graph.labels[:] = 0
        return np.array_split(np.arange(graph.num_nodes), clients)

    with pytest.raises(CheckFailed, match="partition 'global': two calls with seed 0 differ"):
        check_partition(unseeded)
    with pytest.raises(CheckFailed, match=r"'empty'.* returned no nodes for client 1"):
        check_partition("empty")
    with pytest.raises(CheckFailed, match="partition 'writes': it changes the graph"):
        check_partition(writes)
    with pytest.raises(
        CheckFailed, match=r"<lambda>: this is not registered. .*register_partition"
    ):
        check_partition(lambda graph, clients, seed: [])


def info(name: str, **statistics: int) -> DatasetInfo:
    usual = {"nodes": 20, "edges": 0, "features": 6, "classes": 3}
    return DatasetInfo(name, name, "synthetic", **{**usual, **statistics})


def test_what_breaks_a_property_of_datasets() -> None:
    def drawn(request: Request) -> Graph:
        return replace(testing.random_graph(20, seed=request.seed), masks=None)

    register_dataset(info("fine"))(drawn)
    check_dataset("fine")
    check_dataset(drawn)
    register_dataset(info("counted", nodes=21))(lambda request: drawn(request))
    with pytest.raises(
        CheckFailed, match="'counted': it has 20 nodes, but its DatasetInfo says 21"
    ):
        check_dataset("counted")

    @register_dataset(info("global"))
    def unseeded(request: Request) -> Graph:
        return drawn(replace(request, seed=np.random.randint(1 << 30)))  # noqa: NPY002

    with pytest.raises(CheckFailed, match="dataset 'global': two calls with one seed differ"):
        check_dataset(unseeded)

    @register_dataset(info("missing"))
    def missing(request: Request) -> Graph:
        graph = drawn(request)
        return replace(graph, features=graph.features * np.nan)

    with pytest.raises(CheckFailed, match=r"dataset 'missing': .* Fill in missing values"):
        check_dataset(missing)
    with pytest.raises(UserError, match="unknown dataset"):
        check_dataset("none-of-them")


@pytest.mark.parametrize("name", METRICS)
def test_metrics_of_the_library(name: str) -> None:
    check_metric(name)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda p: (p.logits.argmax(dim=1) == p.labels).double().mean(), "one value per client"),
        (lambda p: p.segments.mean(p.logits[:, 0].double()), r"without nodes has the score 0"),
        (lambda p: p.averages[0] * 100, "numbers from 0 to 1"),
        (lambda p: 1 - p.averages[0], "Larger must be better"),
        (
            lambda p: p.averages[0] * p.averages[0][0],
            "client 0|changes if it is computed by itself",
        ),
        (lambda p: p.averages[0] + 0 * p.logits.mul_(2).sum(), "it changes the logits"),
    ],
)
def test_what_breaks_a_property_of_metrics(
    function: Callable[[Predictions], Tensor], words: str
) -> None:
    register_metric("mine")(function)
    with pytest.raises(CheckFailed, match=f"^metric 'mine': .*({words})"):
        check_metric(function)


# The names for authors ---------------------------------------------------------------------------


def test_all_names_of_extend_exist_and_are_typed() -> None:
    source = inspect.getsource(extend)
    typed = set(re.findall(r"^    from \S+ import \w+ as (\w+)$", source, flags=re.MULTILINE))
    assert typed | {"register_method"} == set(extend.__all__) == set(dir(extend))
    for name in extend.__all__:
        assert getattr(extend, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        extend.nothing  # noqa: B018
    assert Cohort.__module__ == "polyphily.core.cohort"
