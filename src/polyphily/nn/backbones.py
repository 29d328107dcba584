"""Backbones: the networks that methods train. Each is a module for any number of stacked clients.

Parameters are created for one client, `[1, …]`; training passes stacked ones, `[K, …]`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from polyphily.errors import unknown
from polyphily.nn.layers import ACMConv, GATConv, GCNConv, Linear, SAGEConv
from polyphily.nn.sparse import SparseMatrix

if TYPE_CHECKING:
    from polyphily.core.cohort import Cohort
    from polyphily.nn.draws import Draws


class Output(NamedTuple):
    """What a backbone returns for every node of a cohort."""

    logits: Tensor
    embedding: Tensor


@dataclass(frozen=True)
class Shape:
    """The size of a backbone, shared by all of them.

    Attributes:
        features: width of the input.
        classes: width of the output.
        hidden: width between layers.
        layers: number of layers.
        dropout: before every layer but the first.
        input_dropout: on the input features.
        heads: attention heads (gat).
        hops: propagation steps (gpr-gnn).
    """

    features: int
    classes: int
    hidden: int = 64
    layers: int = 2
    dropout: float = 0.5
    input_dropout: float = 0.0
    heads: int = 4
    hops: int = 10

    def widths(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of every layer."""
        sizes = [self.features, *[self.hidden] * (self.layers - 1), self.classes]
        return list(pairwise(sizes))


class Backbone(nn.Module, ABC):
    """A stacked network. Dropout is on exactly when `draws` are given."""

    citation: ClassVar[str] = ""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape

    @abstractmethod
    def forward(self, cohort: Cohort, draws: Draws | None = None) -> Output: ...

    @abstractmethod
    def is_classifier(self, parameter: str) -> bool:
        """Whether a parameter belongs to the last layer (what FedPer keeps at home)."""

    def drop_input(self, cohort: Cohort, draws: Draws | None) -> Tensor | SparseMatrix:
        x = cohort.x
        if draws is None or self.shape.input_dropout == 0:
            return x
        if isinstance(x, Tensor):
            return draws.dropout(x, self.shape.input_dropout, cohort.x_pointers)
        assert x.value is not None
        return x.with_value(draws.dropout(x.value, self.shape.input_dropout, cohort.x_pointers))

    def drop(self, x: Tensor, cohort: Cohort, draws: Draws | None) -> Tensor:
        if draws is None:
            return x
        return draws.dropout(x, self.shape.dropout, cohort.segments.pointers)


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
    def layer(self, inputs: int, outputs: int, last: bool) -> nn.Module: ...

    def forward(self, cohort: Cohort, draws: Draws | None = None) -> Output:
        *hidden, last = self.convs
        x = self.drop_input(cohort, draws)
        embedding = None
        for conv in hidden:
            embedding = conv(x, cohort).relu()
            x = self.drop(embedding, cohort, draws)
        logits = last(x, cohort)
        return Output(logits, logits if embedding is None else embedding)

    def is_classifier(self, parameter: str) -> bool:
        return parameter.startswith(f"convs.{len(self.convs) - 1}.")


class MLP(Stack):
    """No graph at all: the yardstick for what edges are worth."""

    def layer(self, inputs: int, outputs: int, last: bool) -> nn.Module:
        return Linear(inputs, outputs)


class GCN(Stack):
    """Graph convolutional network."""

    citation = "Kipf and Welling, ICLR 2017"

    def layer(self, inputs: int, outputs: int, last: bool) -> nn.Module:
        return GCNConv(inputs, outputs)


class GraphSAGE(Stack):
    """GraphSAGE, mean aggregator, full neighbourhoods."""

    citation = "Hamilton et al., NeurIPS 2017"

    def layer(self, inputs: int, outputs: int, last: bool) -> nn.Module:
        return SAGEConv(inputs, outputs)


class GAT(Stack):
    """Graph attention network; `hidden` is the width of all heads together."""

    citation = "Velickovic et al., ICLR 2018"

    def layer(self, inputs: int, outputs: int, last: bool) -> nn.Module:
        heads = self.shape.heads
        if last:
            return GATConv(inputs, outputs, heads, average=True)
        return GATConv(inputs, max(outputs // heads, 1), heads, average=False)

    def __init__(self, shape: Shape) -> None:
        heads = shape.heads
        if shape.hidden % heads:
            raise ValueError(f"gat: hidden ({shape.hidden}) must be a multiple of heads ({heads})")
        super().__init__(shape)


class ACMGCN(Stack):
    """Adaptive channel mixing GCN: low-pass, high-pass and identity channels per layer."""

    citation = "Luan et al., NeurIPS 2022"

    def layer(self, inputs: int, outputs: int, last: bool) -> nn.Module:
        return ACMConv(inputs, outputs)


class GPRGNN(Stack):
    """Generalised PageRank GNN: an MLP, then learned weights of 0 to `hops` propagation steps."""

    citation = "Chien et al., ICLR 2021"
    restart = 0.1

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        steps = torch.arange(shape.hops + 1)
        gamma = self.restart * (1 - self.restart) ** steps.double()
        gamma[-1] = (1 - self.restart) ** shape.hops
        self.gamma = nn.Parameter(gamma.to(torch.get_default_dtype()).unsqueeze(0))

    def layer(self, inputs: int, outputs: int, last: bool) -> nn.Module:
        return Linear(inputs, outputs)

    def forward(self, cohort: Cohort, draws: Draws | None = None) -> Output:
        z, embedding = super().forward(cohort, draws)
        gamma = cohort.segments.expand(self.gamma)
        logits = gamma[:, :1] * z
        for step in range(1, self.shape.hops + 1):
            z = cohort.gcn @ z
            logits = logits + gamma[:, step : step + 1] * z
        return Output(logits, embedding if len(self.convs) > 1 else logits)

    def is_classifier(self, parameter: str) -> bool:
        return parameter == "gamma" or super().is_classifier(parameter)


BACKBONES: dict[str, Callable[[Shape], Backbone]] = {
    "mlp": MLP,
    "gcn": GCN,
    "sage": GraphSAGE,
    "gat": GAT,
    "gpr-gnn": GPRGNN,
    "acm-gcn": ACMGCN,
}


def build(name: str, shape: Shape, seed: int) -> Backbone:
    """A backbone with one client's initial parameters, the same for a seed on every machine."""
    if name not in BACKBONES:
        raise unknown("backbone", name, BACKBONES)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return BACKBONES[name](shape)
