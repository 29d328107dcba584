"""Backbones: the networks that methods train. Each is a module for any number of stacked clients.

Parameters are created for one client, `[1, …]`. Training passes stacked ones, `[K, …]`. All that
the library needs to know about a backbone is in its class: to add one, write a class and decorate
it with `register_backbone`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from polyphily.graphs.directions import BOTH, INWARD, OUTWARD, SEPARATE
from polyphily.nn.layers import (
    ACMConv,
    DirectedConv,
    GATConv,
    GCNConv,
    LayerNorm,
    Linear,
    SAGEConv,
)
from polyphily.nn.sparse import SparseMatrix
from polyphily.registry import Registry

if TYPE_CHECKING:
    from polyphily.nn.draws import Draws
    from polyphily.nn.stacked import StackedGraph


ALL = "all"  # of Backbone.defaults: for data of every kind


class Output(NamedTuple):
    """The output of a backbone for every node of a stacked graph."""

    logits: Tensor
    embedding: Tensor


@dataclass(frozen=True)
class Shape:
    """The size of a backbone.

    Attributes:
        features: width of the input.
        classes: width of the output.
        hidden: width between layers.
        layers: number of layers.
        dropout: the share of entries dropped before every layer but the first.
        input_dropout: the share of input features dropped.
        heads: number of attention heads (gat).
        hops: number of propagation steps (gpr-gnn).
        norms_at_home: whether normalisations stay with their client, whatever a method shares.
        readout: what a backbone with several `readouts` classifies from.
        separate: whether in- and out-neighbours have weights of their own (Dir-GNN).
        relations: number of types of edges (rgcn).
    """

    features: int
    classes: int
    hidden: int = 64
    layers: int = 2
    dropout: float = 0.5
    input_dropout: float = 0.0
    heads: int = 4
    hops: int = 10
    norms_at_home: bool = False
    readout: str = "last"
    separate: bool = False
    relations: int = 1

    def widths(self) -> list[tuple[int, int]]:
        """Return (inputs, outputs) of every layer."""
        sizes = [self.features, *[self.hidden] * (self.layers - 1), self.classes]
        return list(pairwise(sizes))


class Backbone(nn.Module, ABC):
    """A network for stacked clients. Dropout is on exactly when `draws` are given.

    Attributes:
        name: set by `register_backbone`.
        citation: the paper; set by `register_backbone`.
        local_reach: whether a node's output depends on no node further away than there are layers.
            Otherwise training on samples is refused.
        weighted_edges: whether the graph is read through its operators only (`gcn`, `random_walk`,
            `mean`, `attention`), so that weights and the direction of edges take effect, and
            methods can replace them.
        separable: whether in- and out-neighbours can have weights of their own
            (`Shape.separate`).
        relational: whether types of edges are told apart (`StackedGraph.relations`).
        keeps_features: whether something is computed from the features once and kept. Otherwise
            they are read through `graph.x` in every pass, and labels can be among them.
        headless: whether the output is no free logits (but logarithms of probabilities, say), so
            that no `LinearHead` can follow.
        readouts: what it can classify from (`Shape.readout`): the "last" layer, or also "jump",
            all of them.
        defaults: settings that serve this backbone better than the usual ones, by kind of data
            ("homophilic", "heterophilic", …), or for data of "all" kinds, where those of the kind
            take precedence; see `polyphily.core.recipes.Recipe`.
        shape: the size of the network.
    """

    name: ClassVar[str] = ""
    citation: ClassVar[str] = ""
    local_reach: ClassVar[bool] = True
    weighted_edges: ClassVar[bool] = True
    separable: ClassVar[bool] = False
    relational: ClassVar[bool] = False
    keeps_features: ClassVar[bool] = False
    headless: ClassVar[bool] = False
    readouts: ClassVar[tuple[str, ...]] = ("last",)
    defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape

    @abstractmethod
    def forward(self, graph: StackedGraph, draws: Draws | None = None) -> Output:
        """Return the output for every node; parameters have one entry for each client."""

    @property
    def embedding_width(self) -> int:
        """The width of `Output.embedding`."""
        return self.shape.hidden if self.shape.layers > 1 else self.shape.classes

    @property
    def reach(self) -> int | None:
        """Within how many hops of a node the nodes are that its output depends on; None: all."""
        return self.shape.layers if self.local_reach else None

    @abstractmethod
    def is_classifier(self, parameter: str) -> bool:
        """Return whether a parameter belongs to the last layer (FedPer keeps these private)."""

    def is_norm(self, parameter: str) -> bool:
        """Return whether a parameter belongs to a normalisation, for methods that keep it private.

        Override it if the network has normalisations other than `polyphily.nn.layers.LayerNorm`.
        """
        return isinstance(self.get_submodule(parameter.rpartition(".")[0]), LayerNorm)

    def stays_home(self, parameter: str) -> bool:
        """Return whether a parameter stays with its client, whatever the method shares."""
        return self.shape.norms_at_home and self.is_norm(parameter)

    def in_evaluation(self, params: dict[str, Tensor]) -> tuple[Backbone, dict[str, Tensor]]:
        """Return a network and parameters that compute the same in evaluation; by default these.

        Override it if the network is another one that differs in training only, or one whose
        parameters are made of others. Parameters are those of one client, without a client axis.
        """
        return self, params

    def describe(self) -> str:
        """Return the network's name for records; by default its registered name."""
        return self.name or type(self).__name__

    @classmethod
    def uses_weights(cls) -> bool:
        """Return whether weights of edges take effect."""
        return cls.weighted_edges or cls.relational

    @classmethod
    def directions(cls) -> tuple[str, ...]:
        """Return the directions that it can read edges in, of `polyphily.graphs.edges`."""
        one_way = (INWARD, OUTWARD) if cls.uses_weights() else ()
        return (BOTH, *one_way, *((SEPARATE,) if cls.separable else ()))

    def convolution(
        self, inputs: int, outputs: int, make: Callable[[bool], nn.Module]
    ) -> nn.Module:
        """Build a convolution: one, or one for each direction if these are separate.

        Args:
            inputs: width of the input.
            outputs: width of the output.
            make: builds a convolution, given whether it has a bias and weights for the node itself.
        """
        if self.shape.separate:
            return DirectedConv(inputs, outputs, lambda: make(False))
        return make(True)

    def drop_input(self, graph: StackedGraph, draws: Draws | None) -> Tensor | SparseMatrix:
        """Return the input features after dropout."""
        x = graph.x
        if draws is None or self.shape.input_dropout == 0:
            return x
        if isinstance(x, Tensor):
            return draws.dropout(x, self.shape.input_dropout, graph.x_pointers)
        assert x.value is not None
        return x.with_value(draws.dropout(x.value, self.shape.input_dropout, graph.x_pointers))

    def drop(self, x: Tensor, graph: StackedGraph, draws: Draws | None) -> Tensor:
        """Return hidden features after dropout."""
        if draws is None:
            return x
        return draws.dropout(x, self.shape.dropout, graph.segments.pointers)

    def activate(
        self, x: Tensor, graph: StackedGraph, draws: Draws | None
    ) -> tuple[Tensor, Tensor]:
        """Return ReLU of hidden features, and the same after dropout (`drop`)."""
        if draws is None or type(self).drop is not Backbone.drop:
            rectified = x.relu()
            return rectified, self.drop(rectified, graph, draws)
        return draws.activate(x, self.shape.dropout, graph.segments.pointers)


# The registry ------------------------------------------------------------------------------------

BACKBONES: Registry[type[Backbone]] = Registry(
    "backbone",
    "backbones",
    modules=(
        "polyphily.nn.unifilter",
        "polyphily.nn.disengcn",
        "polyphily.nn.residual",
        "polyphily.nn.relational",
        "polyphily.nn.choir",
    ),
)
B = TypeVar("B", bound=type[Backbone])


def register_backbone(name: str, *, cite: str = "") -> Callable[[B], B]:
    """Make a backbone available by name, on the command line and in `polyphily.run`.

    Its class is called with a `Shape` alone.
    """

    def add(cls: B) -> B:
        BACKBONES.add(name, cls)  # first: a name that is taken must not change the class
        cls.name, cls.citation = name.lower(), cite
        return cls

    return add


def build(name: str, shape: Shape, seed: int, *, linear_head: bool = False) -> Backbone:
    """Build a backbone with one client's initial parameters, which depend on the seed alone.

    Args:
        name: of the backbone.
        shape: its size.
        seed: of the initial parameters.
        linear_head: whether a linear classifier follows the backbone's layers (`LinearHead`).
    """
    backbone = BACKBONES.find(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LinearHead(backbone, shape) if linear_head else backbone(shape)


# The backbones -----------------------------------------------------------------------------------


class Stack(Backbone):
    """Layers of one kind with ReLU and dropout between them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        widths = shape.widths()
        self.convs = nn.ModuleList(
            self.layer(inputs, outputs, index == len(widths) - 1)
            for index, (inputs, outputs) in enumerate(widths)
        )

    @abstractmethod
    def layer(self, inputs: int, outputs: int, last: bool) -> nn.Module:
        """Build a layer; its `forward` takes features and the graph."""

    def forward(self, graph: StackedGraph, draws: Draws | None = None) -> Output:
        *hidden, last = self.convs
        x = self.drop_input(graph, draws)
        embedding = None
        for conv in hidden:
            embedding, x = self.activate(conv(x, graph), graph, draws)
        logits = last(x, graph)
        return Output(logits, logits if embedding is None else embedding)

    def is_classifier(self, parameter: str) -> bool:
        return parameter.startswith(f"convs.{len(self.convs) - 1}.")


@register_backbone("mlp")
class MLP(Stack):
    """Multilayer perceptron, which ignores edges: shows what a graph network gains from them."""

    def layer(self, inputs: int, outputs: int, last: bool) -> nn.Module:
        return Linear(inputs, outputs)


@register_backbone("gcn", cite="Kipf and Welling, ICLR 2017")
class GCN(Stack):
    """Graph convolutional network."""

    separable = True

    def layer(self, inputs: int, outputs: int, last: bool) -> nn.Module:
        return self.convolution(inputs, outputs, lambda own: GCNConv(inputs, outputs, own=own))


@register_backbone("sage", cite="Hamilton et al., NeurIPS 2017")
class GraphSAGE(Stack):
    """GraphSAGE with the mean aggregator over all neighbours."""

    separable = True

    def layer(self, inputs: int, outputs: int, last: bool) -> nn.Module:
        return self.convolution(inputs, outputs, lambda own: SAGEConv(inputs, outputs, own=own))


@register_backbone("gat", cite="Velickovic et al., ICLR 2018")
class GAT(Stack):
    """Graph attention network; `hidden` is the width of all heads together."""

    separable = True
    defaults: ClassVar = {"heterophilic": {"input_dropout": 0.0}}

    def __init__(self, shape: Shape) -> None:
        heads = shape.heads
        if shape.hidden % heads:
            raise ValueError(f"gat: hidden ({shape.hidden}) must be a multiple of heads ({heads})")
        super().__init__(shape)

    def layer(self, inputs: int, outputs: int, last: bool) -> nn.Module:
        heads = self.shape.heads
        width = outputs if last else max(outputs // heads, 1)
        return self.convolution(
            inputs,
            outputs,
            lambda own: GATConv(inputs, width, heads, average=last, own=own),
        )


@register_backbone("gpr-gnn", cite="Chien et al., ICLR 2021")
class GPRGNN(Stack):
    """Generalised PageRank GNN: an MLP, then learned weights of 0 to `hops` propagation steps."""

    local_reach = False
    restart = 0.1

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        steps = torch.arange(shape.hops + 1)
        gamma = self.restart * (1 - self.restart) ** steps.double()
        gamma[-1] = (1 - self.restart) ** shape.hops
        self.gamma = nn.Parameter(gamma.to(torch.get_default_dtype()).unsqueeze(0))

    def layer(self, inputs: int, outputs: int, last: bool) -> nn.Module:
        return Linear(inputs, outputs)

    @property
    def reach(self) -> int:
        return self.shape.hops

    def forward(self, graph: StackedGraph, draws: Draws | None = None) -> Output:
        z, embedding = super().forward(graph, draws)
        gamma = graph.segments.expand(self.gamma)
        logits = gamma[:, :1] * z
        for step in range(1, self.shape.hops + 1):
            z = graph.gcn @ z
            logits = logits + gamma[:, step : step + 1] * z
        return Output(logits, embedding if len(self.convs) > 1 else logits)

    def is_classifier(self, parameter: str) -> bool:
        return parameter == "gamma" or super().is_classifier(parameter)


@register_backbone("acm-gcn", cite="Luan et al., NeurIPS 2022")
class ACMGCN(Stack):
    """Adaptive channel mixing GCN: low-pass, high-pass and identity channels per layer."""

    defaults: ClassVar = {"homophilic": {"lr": 0.003}}

    def layer(self, inputs: int, outputs: int, last: bool) -> nn.Module:
        return ACMConv(inputs, outputs)


# A classifier on top of any of them --------------------------------------------------------------


class LinearHead(Backbone):
    """A backbone whose last layer has the hidden width, too, then ReLU and a linear classifier.

    The embedding is the input of the classifier, so that a loss on it reaches every layer below.
    Nothing is dropped between the two.

    Args:
        trunk: the class of the backbone.
        shape: `layers` counts those of the backbone, without the classifier.
    """

    def __init__(self, trunk: type[Backbone], shape: Shape) -> None:
        super().__init__(shape)
        self.trunk = trunk(replace(shape, classes=shape.hidden))
        self.head = Linear(shape.hidden, shape.classes)

    def describe(self) -> str:
        return f"{self.trunk.describe()} with a linear head"

    @property
    def reach(self) -> int | None:
        return self.trunk.reach

    @property
    def embedding_width(self) -> int:
        return self.shape.hidden

    def forward(self, graph: StackedGraph, draws: Draws | None = None) -> Output:
        embedding = self.trunk(graph, draws).logits.relu()
        return Output(self.head(embedding, graph), embedding)

    def is_classifier(self, parameter: str) -> bool:
        return parameter.startswith("head.")
