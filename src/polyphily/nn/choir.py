"""A choir: networks of different bias side by side, whose class probabilities are mixed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from polyphily.nn.backbones import BACKBONES, Backbone, Output, Shape, register_backbone
from polyphily.nn.draws import Draws
from polyphily.nn.residual import Residual
from polyphily.nn.stacked import StackedGraph

VOICES = ("gpr-gnn", "acm-gcn", "res-acm", "res-gcn")
PLAIN_LAYERS = 2  # of voices without residual connections, which lose by depth
LEAST = 1e-6  # weight of a voice in a mix


class Song(Output):
    """The output of a choir.

    Attributes:
        voices: the logits of every voice, `[V, N, C]`.
    """

    voices: Tensor

    @classmethod
    def of(cls, logits: Tensor, embedding: Tensor, voices: Tensor) -> Song:
        song = cls(logits, embedding)
        song.voices = voices
        return song


@register_backbone("choir", cite="Polyphily, docs/polyphony.md")
class Choir(Backbone):
    """Networks side by side, the voices; their class probabilities are averaged.

    Residual voices are as deep as the choir's `layers`. The others have two layers.

    Args:
        shape: of every voice.
        voices: the backbones of the voices.
        labelled: the numbers of the voices that have labels among their inputs.
    """

    local_reach = False
    headless = True
    defaults: ClassVar = {"all": {"layers": 4}}

    def __init__(
        self, shape: Shape, voices: Sequence[str] = VOICES, labelled: Sequence[int] = ()
    ) -> None:
        super().__init__(shape)
        self.names, self.labelled = tuple(voices), frozenset(labelled)
        self.voices = nn.ModuleList(
            self._voice(name, number in self.labelled) for number, name in enumerate(voices)
        )

    def _voice(self, name: str, labelled: bool) -> Backbone:
        cls, shape = BACKBONES.find(name), self.shape
        inputs = shape.features + (shape.classes if labelled else 0)
        layers = shape.layers if issubclass(cls, Residual) else min(PLAIN_LAYERS, shape.layers)
        return cls(replace(shape, features=inputs, layers=layers))

    @property
    def embedding_width(self) -> int:
        return sum(self.voice(v).embedding_width for v in range(len(self.names)))

    @property
    def reach(self) -> int | None:
        found = [self.voice(v).reach for v in range(len(self.names))]
        known = [hops for hops in found if hops is not None]
        return max(known) if len(known) == len(found) else None

    def voice(self, number: int) -> Backbone:
        """Return a voice by its number."""
        found = self.voices[number]
        assert isinstance(found, Backbone)
        return found

    def forward(
        self,
        graph: StackedGraph,
        draws: Draws | None = None,
        with_labels: StackedGraph | None = None,
        weights: Tensor | None = None,
    ) -> Song:
        """Return the output for every node.

        Args:
            graph: the graph.
            draws: the random draws of dropout.
            with_labels: the graph for voices that have labels among their inputs.
            weights: of the voices in each client's mix, `[K, V]`; None: even.
        """
        outputs: list[Output] = [
            self.voices[v](with_labels if v in self.labelled else graph, draws)
            for v in range(len(self.names))
        ]
        voices = torch.stack([output.logits for output in outputs])
        if weights is None:
            weights = voices.new_full((len(graph.segments), len(voices)), 1 / len(voices))
        mixed = mix(voices.log_softmax(dim=2), graph.segments.expand(weights))
        return Song.of(mixed, torch.cat([output.embedding for output in outputs], dim=1), voices)

    def is_classifier(self, parameter: str) -> bool:
        return self.voice(number_of(parameter)).is_classifier(parameter.split(".", 2)[2])


def number_of(parameter: str) -> int:
    """Return the number of the voice that a parameter of a choir belongs to."""
    return int(parameter.split(".")[1])


def mix(log_probabilities: Tensor, weights: Tensor) -> Tensor:
    """Return log sum_v w_v p_v, `[V, N, …]` and `[N, V]` -> `[N, …]`.

    No weight counts as less than `LEAST`, so that gradients stay finite.
    """
    logs = weights.clamp(min=LEAST).log().T
    return (
        log_probabilities + logs.view(*logs.shape, *[1] * (log_probabilities.dim() - 2))
    ).logsumexp(dim=0)
