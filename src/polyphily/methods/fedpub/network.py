"""FED-PUB's network: a backbone whose weight matrices are multiplied by masks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call

from polyphily.core.messages import Message, with_prefix
from polyphily.nn.backbones import Backbone, LinearHead, Output
from polyphily.nn.draws import Draws
from polyphily.nn.stacked import StackedGraph

GNN, MASKS = "gnn.", "masks."
TRUNK = "trunk."


class MaskedNetwork(Backbone):
    """A backbone in which every weight matrix W is used as W ∘ m; biases have no mask.

    In evaluation, that is without draws, entries of m below `prune` count as zero.

    Args:
        gnn: the backbone.
        masked: whether there are masks; they begin as ones.
        prune: the least magnitude of a mask's entry that counts in evaluation.
    """

    def __init__(self, gnn: Backbone, *, masked: bool, prune: float) -> None:
        super().__init__(gnn.shape)
        self.gnn, self.prune = gnn, prune
        matrices = [(n, p) for n, p in gnn.named_parameters() if masked and p.dim() > 2]
        self.masks = nn.ParameterDict({_key(n): torch.ones_like(p) for n, p in matrices})

    def describe(self) -> str:
        name = self.gnn.describe()
        return f"masked {name}" if self.masks else name

    @property
    def embedding_width(self) -> int:
        return self.gnn.embedding_width

    def forward(self, graph: StackedGraph, draws: Draws | None = None) -> Output:
        weights = masked(dict(self.named_parameters()), self.prune if draws is None else 0.0)
        output: Output = functional_call(self.gnn, weights, (graph, draws))
        return output

    def in_evaluation(self, params: Message) -> tuple[Backbone, Message]:
        return self.gnn, masked(params, self.prune)

    def convolved(self, params: Mapping[str, Tensor], graph: StackedGraph) -> Tensor:
        """Return the output of the last convolution, before any activation, in evaluation."""
        weights, gnn = masked(params, self.prune), self.gnn
        if isinstance(gnn, LinearHead):
            weights, gnn = with_prefix(weights, TRUNK), gnn.trunk
        output: Output = functional_call(gnn, weights, (graph,))
        return output.logits

    def is_classifier(self, parameter: str) -> bool:
        return parameter.startswith(GNN) and self.gnn.is_classifier(parameter.removeprefix(GNN))


def masked(params: Mapping[str, Tensor], prune: float) -> Message:
    """Return the backbone's parameters, W ∘ m in place of W; m is zero where |m| < prune."""
    weights = with_prefix(params, GNN)
    for key, mask in with_prefix(params, MASKS).items():
        name = key.replace("/", ".")
        kept = mask.masked_fill(mask.abs() < prune, 0) if prune > 0 else mask
        weights[name] = weights[name] * kept
    return weights


def _key(name: str) -> str:
    """Return a parameter's name without dots, which names in a `ParameterDict` cannot have."""
    return name.replace(".", "/")
