"""The network of Polyphony: voices, each client's renditions of them, and its mix."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn

from polyphily.core.labels import LabelsShown, labelled_features
from polyphily.core.messages import Message
from polyphily.nn.backbones import Shape
from polyphily.nn.choir import Choir, Song, mix, number_of
from polyphily.nn.draws import Draws
from polyphily.nn.plain_form import FORMS, Spec, choir_form
from polyphily.nn.stacked import StackedGraph

VOICES, OWN, MIX = "voices.", "own.", "mix"


class Voices(Choir):
    """A choir of which some voices see labels, some stay at home, and each client keeps a version.

    Gradients reach the voices alone. A client's renditions (`own`) and the weights of all parts
    (`mix`) are set by the method. They are parameters, so that a model is whole.

    Args:
        shape: of every voice.
        voices: the backbones of the voices.
        labelled: the numbers of the voices that have labels among their inputs.
        at_home: the numbers of the voices that stay with their client.
        weights: of all parts at first: of the voices, then of the renditions, if clients keep any.
    """

    def __init__(
        self,
        shape: Shape,
        voices: Sequence[str],
        labelled: Sequence[int],
        at_home: Sequence[int],
        weights: Sequence[float],
    ) -> None:
        super().__init__(shape, voices, labelled)
        self.at_home = frozenset(at_home)
        self.own = deepcopy(self.voices) if len(weights) > len(voices) else nn.ModuleList()
        self.mix = nn.Parameter(torch.tensor([weights], dtype=torch.get_default_dtype()))

    def describe(self) -> str:
        return f"choir of {', '.join(self.names)}"

    def forward(
        self,
        graph: StackedGraph,
        draws: Draws | None = None,
        with_labels: StackedGraph | None = None,
        weights: Tensor | None = None,
    ) -> Song:
        """Return the output for every node.

        In training (`draws` are given) only voices sing. Otherwise own renditions do, too.

        Args:
            graph: the graph.
            draws: the random draws of dropout.
            with_labels: the graph for voices that see labels; None: all train labels are visible.
            weights: of the voices, in training; otherwise they are those of the mix.
        """
        if with_labels is None and self.labelled:
            with_labels = LabelsShown(graph, labelled_features(graph, self.shape.classes))
        song = super().forward(graph, draws, with_labels, weights)
        if draws is not None:
            return song
        own = [
            voice(with_labels if v in self.labelled else graph).logits
            for v, voice in enumerate(self.own)
        ]
        parts = torch.cat([song.voices, torch.stack(own)]) if own else song.voices
        mixed = mix(parts.log_softmax(dim=2), graph.segments.expand(self.mix))
        return Song.of(mixed, song.embedding, parts)

    def stays_home(self, parameter: str) -> bool:
        if not parameter.startswith(VOICES) or super().stays_home(parameter):
            return True
        return number_of(parameter) in self.at_home

    def is_norm(self, parameter: str) -> bool:
        return parameter.startswith(VOICES) and super().is_norm(parameter)

    def is_classifier(self, parameter: str) -> bool:
        return parameter.startswith(VOICES) and super().is_classifier(parameter)


def _plain_form(network: Voices) -> Spec:
    """Return the description of the exported network."""
    return {**choir_form(network), "own": len(network.own), "mixed": True}


FORMS[Voices] = _plain_form


def renditions(voices: Message) -> Message:
    """Return a copy of trained voices under the names of a client's own renditions."""
    return {OWN + n.removeprefix(VOICES): value.detach().clone() for n, value in voices.items()}
