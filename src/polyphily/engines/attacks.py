"""Hostile clients in a simulation, to see what a defence holds (`--attack`, `--robust`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from polyphily.core.budget import OFF
from polyphily.core.cohort import Cohort
from polyphily.core.messages import Message
from polyphily.core.settings import Settings
from polyphily.errors import UserError, unknown
from polyphily.graphs.graph import UNLABELLED, Graph
from polyphily.graphs.loading import Federation
from polyphily.graphs.random import generator
from polyphily.nn.draws import Draws
from polyphily.privacy.differential import normal

SCALE, FLIP, NOISE, LABELS = KINDS = ("scale", "sign-flip", "noise", "labels")
USUAL = {SCALE: 1e6, FLIP: 1.0, NOISE: 10.0, LABELS: 1.0}


@dataclass(frozen=True)
class Attack:
    """An attack of hostile clients.

    With u an upload and r what was received under the same name (zero if nothing was):

    - scale=s sends r + s (u - r), sign-flip=s sends r - s (u - r);
    - noise=s adds normal noise of s times the root mean square of u - r;
    - labels trains on wrong labels: class c becomes c + 1, the last one the first.

    Attributes:
        kind: one of `KINDS`.
        strength: s.
    """

    kind: str
    strength: float

    @classmethod
    def parse(cls, text: str) -> Attack | None:
        """Parse the setting `attack`; None if it is off.

        >>> Attack.parse("scale=1e6")
        Attack(kind='scale', strength=1000000.0)
        """
        if text == OFF:
            return None
        kind, sign, rest = (part.strip() for part in text.partition("="))
        if kind not in KINDS:
            raise unknown("attack", kind, [OFF, *KINDS])
        try:
            strength = float(rest) if sign else USUAL[kind]
        except ValueError:
            strength = math.nan
        if not math.isfinite(strength):
            raise UserError(f"attack: '{rest}' in '{text}' is not a finite number")
        return cls(kind, strength)

    def on_graph(self, graph: Graph, classes: int) -> Graph:
        """Return a hostile client's graph, with wrong train labels if that is the attack."""
        if self.kind != LABELS:
            return graph
        assert graph.masks is not None
        wrong = graph.masks.train & (graph.labels != UNLABELLED)
        return replace(graph, labels=np.where(wrong, (graph.labels + 1) % classes, graph.labels))


@dataclass(frozen=True)
class Hostile:
    """The hostile clients of a cohort; changes what they upload.

    Attributes:
        attack: what they do.
        who: (seed, client) of each.
    """

    attack: Attack
    who: frozenset[tuple[int, int]]

    def __call__(self, upload: Message, received: Message, cohort: Cohort, draws: Draws) -> Message:
        """Return the uploads with those of hostile clients changed.

        Args:
            upload: of all clients, stacked.
            received: what the server sent them.
            cohort: the clients.
            draws: the draws of the round.
        """
        if self.attack.kind == LABELS:
            return upload
        mine = cohort.constant(tuple(float(key in self.who) for key in cohort.keys)) > 0
        return {n: self._changed(t, received.get(n), mine, draws) for n, t in upload.items()}

    def _changed(self, sent: Tensor, received: Tensor | None, mine: Tensor, draws: Draws) -> Tensor:
        fits = received is not None and received.shape == sent.shape
        start = received if fits and received is not None else torch.zeros_like(sent)
        change, strength = sent - start, self.attack.strength
        if self.attack.kind == NOISE:
            size = change.flatten(1).square().mean(dim=1).sqrt() if sent.dim() > 1 else change.abs()
            size = size.view(-1, *[1] * (sent.dim() - 1))
            other = sent + (strength * size * normal(draws, sent)).to(sent.dtype)
        else:
            other = start + (strength if self.attack.kind == SCALE else -strength) * change
        return torch.where(mine.view(-1, *[1] * (sent.dim() - 1)), other, sent)


def hostile_clients(federation: Federation, settings: Settings) -> list[int]:
    """Return the positions of the hostile clients; none without an attack.

    Raises:
        UserError: for names that no client has, or if every client would be hostile.
    """
    if settings.attack == OFF:
        return []
    names = [graph.name for graph in federation.clients]
    try:
        share = float(settings.attackers)
    except ValueError:
        chosen = [name.strip() for name in settings.attackers.split(",")]
        for name in chosen:
            if name not in names:
                raise unknown("client", name, names) from None
        found = sorted(names.index(name) for name in set(chosen))
    else:
        if not 0 < share < 1:
            raise UserError(f"attackers: {share} is no share between 0 and 1")
        count = max(1, round(share * len(names)))
        rng = generator(federation.seed, "hostile clients")
        found = np.sort(rng.choice(len(names), min(count, len(names)), replace=False)).tolist()
    if len(found) == len(names):
        raise UserError("attackers: every client would be hostile: leave some honest")
    return found
