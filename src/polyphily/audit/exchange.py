"""The last messages between the server and its clients, as the server sees them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from polyphily.core.messages import Message
from polyphily.engines.simulation import Simulation


@dataclass(frozen=True)
class Exchange:
    """The messages between the server and the clients of a federation, stacked over clients.

    Attributes:
        upload: what the clients sent; under secure aggregation what follows from the sums.
        download: what the server had sent to them.
    """

    upload: Message
    download: Message


def last_exchange(simulation: Simulation) -> Exchange:
    """Return the messages of the last round of the first federation.

    A checkpoint holds models and memories, but no message. So the clients train for that round
    again, from where the run has ended, and their uploads are those of the method itself, clipped
    and noised under differential privacy. A tensor that travels in early rounds only is taken from
    the last of these. The simulation is not changed.
    """
    server, done = simulation.servers[0], max(simulation.round, 1)
    latest = {
        name: done if entry.rounds.last is None else min(done, entry.rounds.last)
        for entry in server.declared_uploads
        if entry.rounds.first <= done
        for name in entry.shapes
    }
    download = server.download(range(server.clients))
    rounds = {n: _uploads(simulation, download, n - 1) for n in sorted(set(latest.values()))}
    upload = {name: rounds[number][name] for name, number in latest.items()}
    if simulation.settings.secure_aggregation:
        upload = means(upload, server.weights_of_means())
    return Exchange(upload, download)


def _uploads(simulation: Simulation, download: Message, round_index: int) -> Message:
    """Return what the first federation's clients send in a round, trained group by group."""
    sent = []
    for group in simulation.groups.split(range(len(simulation.federations[0]))):
        rows = slice(group.start, group.stop)
        received = {n: t[rows] for n, t in download.items()}
        memory = {n: t[rows] for n, t in simulation.memory.items()}
        sent.append(simulation.clients.take(group).train(received, memory, round_index).uploads)
    return {name: torch.cat([message[name] for message in sent]) for name in sent[0]}


def means(upload: Message, weights: Mapping[str, str]) -> Message:
    """Replace the tensors of each client by means over clients: all that sums reveal.

    Args:
        upload: what the clients sent, stacked.
        weights: the upload that weighs each averaged tensor, by name; others are summed.
    """

    def mean(name: str, value: Tensor) -> Tensor:
        weight = upload[weights[name]] if name in weights else value.new_ones(len(value))
        weight = weight.view(*weight.shape, *[1] * (value.dim() - weight.dim()))
        share = weight / weight.sum(dim=0).clamp(min=torch.finfo(value.dtype).tiny)
        return (share * value).sum(dim=0).expand_as(value)

    return {name: mean(name, value) for name, value in upload.items()}
