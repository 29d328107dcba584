"""The relational backbone, for graphs with several types of edges."""

from __future__ import annotations

from torch import nn

from polyphily.nn.backbones import Stack, register_backbone
from polyphily.nn.layers import RelationalConv

BASES = 8  # relations that have weights of their own; more share this many bases


@register_backbone("rgcn", cite="Schlichtkrull et al., ESWC 2018")
class RGCN(Stack):
    """Relational GCN: weights of their own for every type of edges, mean per type."""

    weighted_edges = False  # it reads the means of relations, which methods do not replace
    separable = True
    relational = True

    def layer(self, inputs: int, outputs: int, last: bool) -> nn.Module:
        count = self.shape.relations * (2 if self.shape.separate else 1)
        return RelationalConv(inputs, outputs, count, BASES)
