"""The properties that every backbone must have, checked on small random cohorts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyphily.core.cohort import Cohort
from polyphily.graphs.directions import SEPARATE
from polyphily.graphs.edges import Edges
from polyphily.graphs.graph import Graph, Masks, relations_of
from polyphily.nn.backbones import BACKBONES, Backbone, Output, Shape
from polyphily.nn.subgraphs import Subgraph
from polyphily.runtime.machine import threads
from polyphily.testing.comparing import CheckFailed, difference
from polyphily.testing.examples import (
    CLASSES,
    FEATURES,
    cohort_of,
    of_client,
    predict,
    random_cohort,
    random_graphs,
    random_parameters,
    split_by_client,
    with_edge_attributes,
)

SIZES = (9, 5, 12, 1)
_CLOSE = 1e-10
_USUAL = Shape(FEATURES, CLASSES, hidden=8, dropout=0.4, input_dropout=0.3, heads=2, hops=4)


@dataclass(frozen=True)
class BackboneCase:
    """A backbone to check.

    Attributes:
        cls: its class.
        shape: its size.
    """

    cls: type[Backbone]
    shape: Shape = field(default_factory=lambda: _USUAL)

    def build(self, **changes: Any) -> Backbone:
        """Return the network in float64, with initial parameters of one seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.cls(replace(self.shape, **changes)).double()

    def depths(self) -> Iterator[Backbone]:
        """Yield the network with one, two and three layers."""
        for layers in (1, 2, 3):
            yield self.build(layers=layers)

    def fail(self, what: str, remedy: str, member: str = "") -> CheckFailed:
        """Return the error of a failed check: what is wrong, then what to do."""
        place = f"{self.cls.__name__}.{member}" if member else self.cls.__name__
        return CheckFailed(f"{place}: {what}. {remedy[:1].upper()}{remedy[1:]}.")

    def compare(self, what: str, first: Output, second: Output, remedy: str) -> None:
        """Raise `CheckFailed` unless two outputs agree."""
        found = difference(first._asdict(), second._asdict(), _CLOSE)
        if found:
            raise self.fail(f"{what}: {found}", remedy, "forward")


BackboneCheck = Callable[[BackboneCase], None]
BACKBONE_CHECKS: dict[str, BackboneCheck] = {}
"""The checks by name, in the order in which `check_backbone` runs them."""


def check_backbone(backbone: str | type[Backbone], /, **shape: Any) -> None:
    """Check a backbone on small random cohorts.

    Args:
        backbone: a class, or the name of a registered backbone.
        **shape: fields of `Shape` in place of those that are tried, such as `hidden=8`.

    Raises:
        CheckFailed: for the first property that does not hold.
    """
    cls = BACKBONES.find(backbone) if isinstance(backbone, str) else backbone
    case = BackboneCase(cls, replace(_USUAL, **shape))
    with threads(1):
        for check in BACKBONE_CHECKS.values():
            check(case)


def _check(name: str) -> Callable[[BackboneCheck], BackboneCheck]:
    def add(function: BackboneCheck) -> BackboneCheck:
        def run(case: BackboneCase) -> None:
            try:
                function(case)
            except CheckFailed:
                raise
            except Exception as error:
                words = " ".join(str(error).split())
                raise case.fail(
                    f"the check '{name}' ended with {type(error).__name__}: {words}",
                    "the traceback above shows where it was raised",
                ) from error

        BACKBONE_CHECKS[name] = run
        return run

    return add


@_check("class")
def _class(case: BackboneCase) -> None:
    if BACKBONES.get(case.cls.name) is not case.cls:
        raise case.fail("the class is not registered", "decorate it with @register_backbone(name)")
    if not case.cls.__doc__:
        raise case.fail("the class has no docstring", "say in one line what it is")


@_check("parameters-of-one-client")
def _parameters_of_one_client(case: BackboneCase) -> None:
    for network in case.depths():
        for name, value in network.named_parameters():
            if not value.dim() or len(value) != 1:
                raise case.fail(
                    f"{name} has the shape {tuple(value.shape)}",
                    "create parameters for one client, with a leading axis of length 1: "
                    "`glorot`, `zeros` and the layers of polyphily.extend do",
                )
        if any(True for _ in network.buffers()):
            raise case.fail(
                "it has buffers, which neither travel nor are saved",
                "use parameters, or compute the values in `forward`",
            )


@_check("output")
def _output(case: BackboneCase) -> None:
    cohort = random_cohort(SIZES)
    for network in case.depths():
        output = predict(network, random_parameters(network, len(cohort)), cohort)
        width = network.embedding_width
        for part, value, wanted in (
            ("logits", output.logits, (cohort.num_nodes, CLASSES)),
            ("embedding", output.embedding, (cohort.num_nodes, width)),
        ):
            if tuple(value.shape) != wanted:
                member = "forward" if part == "logits" else "embedding_width"
                raise case.fail(
                    f"with {network.shape.layers} layers {part} have the shape "
                    f"{tuple(value.shape)}, not {wanted}",
                    "return a row per node; `embedding_width` is the width of the embedding",
                    member,
                )


@_check("classifier")
def _classifier(case: BackboneCase) -> None:
    for network in case.depths():
        if not any(network.is_classifier(name) for name, _ in network.named_parameters()):
            raise case.fail(
                "it marks no parameter",
                "return True for the parameters of the last layer",
                "is_classifier",
            )


@_check("stacked-equals-one-by-one")
def _stacked_equals_one_by_one(case: BackboneCase) -> None:
    for sparse in (False, True):
        network, cohort = case.build(), random_cohort(SIZES, sparse=sparse)
        params = random_parameters(network, len(cohort))
        for draws in (False, True):
            together = _by_client(predict(network, params, cohort, _draws(cohort, draws)), cohort)
            for k, output in enumerate(together):
                alone = cohort.take([k])
                own = predict(network, of_client(params, k), alone, _draws(alone, draws))
                case.compare(
                    f"the output of client {k} changes if it is computed by itself",
                    output,
                    own,
                    "work client by client: layers of polyphily.extend, `graph.segments.matmul` "
                    "and `expand`; drop entries with `self.drop` and `self.drop_input`",
                )


@_check("dropout")
def _dropout(case: BackboneCase) -> None:
    dropping, plain = case.build(), case.build(dropout=0.0, input_dropout=0.0)
    cohort = random_cohort(SIZES)
    params = random_parameters(plain, len(cohort))
    for what, network, draws in (
        ("without draws it drops entries", dropping, False),
        ("it drops entries although both rates are zero", plain, True),
    ):
        case.compare(
            what,
            predict(network, params, cohort, _draws(cohort, draws)),
            predict(plain, params, cohort),
            "drop entries with `self.drop` and `self.drop_input`, not with torch's dropout",
        )


@_check("gradients")
def _gradients(case: BackboneCase) -> None:
    for sparse in (False, True):
        cohort = random_cohort((9, 12, 7), sparse=sparse)
        for network in case.depths():
            params = random_parameters(network, len(cohort))
            names, values = zip(*((n, p.requires_grad_()) for n, p in params.items()), strict=True)
            logits = predict(network, params, cohort).logits
            way = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2)).double()
            grads = torch.autograd.grad((logits * way).sum(), values, materialize_grads=True)
            for name, grad in zip(names, grads, strict=True):
                if not grad.flatten(1).any(dim=1).all():
                    raise case.fail(
                        f"with {network.shape.layers} layers no gradient reaches {name}",
                        "use it in `forward`, or do not create it",
                        "forward",
                    )


@_check("sparse-equals-dense-features")
def _sparse_equals_dense_features(case: BackboneCase) -> None:
    for network in case.depths():
        params = random_parameters(network, len(SIZES))
        outputs = [predict(network, params, random_cohort(SIZES, sparse=s)) for s in (False, True)]
        case.compare(
            "sparse features give another output than the same features stored densely",
            outputs[0],
            outputs[1],
            "`graph.x` is a Tensor or a SparseMatrix: `Linear` and `matmul` take both",
        )


@_check("a-client-without-edges")
def _a_client_without_edges(case: BackboneCase) -> None:
    graphs = [*random_graphs(SIZES), *random_graphs([6], density=0.0)]
    cohort = cohort_of(graphs)
    for network in case.depths():
        output = predict(network, random_parameters(network, len(cohort)), cohort)
        if not all(part.isfinite().all() for part in output):
            raise case.fail(
                "the output for a client without edges is not finite",
                "do not divide by a degree that may be zero",
                "forward",
            )


@_check("local-reach")
def _local_reach(case: BackboneCase) -> None:
    """Change features that are further from node 0 than the network reaches, on a path."""
    for network in case.depths():
        hops = network.reach
        if hops is None:
            continue
        params = random_parameters(network, 1)
        first = [predict(network, params, _path(hops + 4, hops, x)).logits[:1] for x in (0, 5)]
        if difference({"": first[0]}, {"": first[1]}, _CLOSE):
            remedy = "set `local_reach = False`: training on samples is then refused"
            if not case.cls.local_reach:
                remedy = "correct `reach`, by which large graphs are predicted in blocks"
            raise case.fail(
                f"with {network.shape.layers} layers the output of a node depends on nodes further "
                f"away than {hops} edges",
                remedy,
                "local_reach" if case.cls.local_reach else "reach",
            )


@_check("weighted-edges")
def _weighted_edges(case: BackboneCase) -> None:
    """Edges of weight 0 must act as if they did not exist."""
    if not case.cls.weighted_edges:
        return
    network, graphs = case.build(), random_graphs(SIZES)
    cohort = cohort_of(graphs)
    params = random_parameters(network, len(cohort))
    empty = [graph.with_edges(Edges(np.zeros((2, 0), dtype=np.int64))) for graph in graphs]
    weights = torch.zeros(cohort.edges.nnz, dtype=torch.float64)
    found = difference(
        predict(network, params, Subgraph(cohort, weights))._asdict(),
        predict(network, params, cohort_of(empty))._asdict(),
        _CLOSE,
    )
    if found:
        raise case.fail(
            f"edges of weight 0 change the output: {found}",
            "read the graph through `gcn`, `random_walk`, `mean` and `attention` only, or set "
            "`weighted_edges = False`: methods that weigh edges then refuse the backbone",
            "weighted_edges",
        )


@_check("edge-attributes")
def _edge_attributes(case: BackboneCase) -> None:
    """Weights, directions and types of edges must reach each client as they do alone."""
    graphs = [*map(with_edge_attributes, random_graphs(SIZES[:2])), *random_graphs(SIZES[2:])]
    names = relations_of(graphs) if case.cls.relational else ()
    for direction in case.cls.directions():
        cohort = cohort_of(graphs, direction=direction, relation_names=names)
        network = case.build(separate=direction == SEPARATE, relations=max(len(names), 1))
        params = random_parameters(network, len(cohort))
        for k, output in enumerate(_by_client(predict(network, params, cohort), cohort)):
            own = predict(network, of_client(params, k), cohort.take([k]))
            case.compare(
                f"on edges with weights, read in the direction '{direction}', the output of "
                f"client {k} changes if it is computed by itself",
                output,
                own,
                "read edges through the operators of the graph (`weighted_edges`, `separable`, "
                "`relational`)",
            )


def _path(nodes: int, layers: int, shift: float) -> Cohort:
    """Return a path whose features beyond `layers` edges from node 0 are shifted."""
    place = np.arange(nodes)
    features = np.random.default_rng(0).standard_normal((nodes, FEATURES))
    features[place > layers] += shift
    masks = Masks(place >= 0, place < 0, place < 0)
    edges = np.stack([place[:-1], place[1:]])
    return cohort_of([Graph.build(features, edges, place % CLASSES, masks=masks)])


def _by_client(output: Output, cohort: Cohort) -> list[Output]:
    parts: list[list[Tensor]] = [split_by_client(part, cohort) for part in output]
    return [Output(*own) for own in zip(*parts, strict=True)]


def _draws(cohort: Cohort, wanted: bool) -> Any:
    return cohort.draws(1) if wanted else None
