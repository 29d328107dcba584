"""The repository of class prototypes at S2FGL's server (Eq. 7)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

SAMPLING = ("holders", "class", "replica")


def build_repository(prototypes: Tensor, counts: Tensor, drawn: Tensor) -> Tensor:
    """Compute the means of prototypes, weighted by counts, over the clients drawn for each.

    A class that no drawn client has gets a vector of zeros, whose cosine with any vector is zero.

    Args:
        prototypes: of each client and class, `[M, C, d]`.
        counts: nodes behind each of them, `[M, C]`.
        drawn: 1 for the clients of each prototype, `[replicas, C, M]`.

    Returns:
        `[replicas, C, d]`.
    """
    weight = drawn * counts.T
    total = weight.sum(dim=2)
    mean = torch.einsum("rcm,mcd->rcd", weight, prototypes)
    return mean / torch.where(total > 0, total, 1).unsqueeze(2)


def draw_clients(
    prototypes: Tensor,
    counts: Tensor,
    rng: np.random.Generator,
    *,
    replicas: int,
    share: float,
    sampling: str,
) -> Tensor:
    """Draw the clients of every prototype; 1 if a client takes part, `[replicas, C, M]`.

    Random numbers are assigned to clients in the order of what they sent, so that the result does
    not depend on their numbering.

    Args:
        prototypes: of each client and class, `[M, C, d]`.
        counts: nodes behind each of them, `[M, C]`.
        rng: the server's random numbers.
        replicas: prototypes per class.
        share: of the clients that may be drawn.
        sampling: "holders", clients that have the class; "class", all clients, drawn for
            every class; "replica", all clients, drawn once for all classes.
    """
    clients, classes = counts.shape
    shape = (replicas, 1 if sampling == "replica" else classes, clients)
    sent = torch.cat([counts, prototypes.flatten(1)], dim=1).double()
    order = (sent @ _column_weights(sent)).argsort(stable=True)
    lots = torch.as_tensor(rng.random(shape), device=counts.device)
    lots = lots[:, :, order.argsort()].expand(-1, classes, -1)
    eligible = torch.full_like(counts[0], clients)
    if sampling == "holders":
        holds = counts.T > 0
        lots = torch.where(holds, lots, 2.0)
        eligible = holds.sum(dim=1)
    number = (share * eligible + 1e-9).floor().clamp(min=1)
    rank = lots.argsort(dim=2).argsort(dim=2)
    return (rank < number.unsqueeze(1)).to(counts.dtype)


def _column_weights(like: Tensor) -> Tensor:
    """Return fixed weights of the columns that make equal row sums unlikely."""
    index = torch.arange(like.shape[1], device=like.device, dtype=like.dtype)
    return (index * index).cos()
