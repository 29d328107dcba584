"""The server of FedLit: which type of a client is which type of the server, and means over them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def greedy_match(centroids: Tensor, reference: Tensor) -> Tensor:
    """Match types by the cosine of their centroids, the closest pair of those left first.

    Args:
        centroids: of the clients, `[K, T, d]`.
        reference: of the server, `[T, d]`.

    Returns:
        The client's type that each of the server's types is matched to, `[K, T]`.
    """
    clients, types, _ = centroids.shape
    cosine = F.normalize(reference, dim=1) @ F.normalize(centroids, dim=2).transpose(1, 2)
    found = torch.zeros(clients, types, dtype=torch.int64, device=centroids.device)
    numbers = torch.arange(types, device=centroids.device)
    for _ in range(types):
        best = cosine.flatten(1).argmax(dim=1, keepdim=True)
        server, client = best // types, best % types
        found.scatter_(1, server, client)
        taken = (numbers == server).unsqueeze(2) | (numbers == client).unsqueeze(1)
        cosine = cosine.masked_fill(taken, -torch.inf)
    return found


def in_order(values: Tensor, match: Tensor) -> Tensor:
    """Return values by type, `[K, T, …]`, in the server's order of types."""
    return values[torch.arange(len(values), device=values.device).unsqueeze(1), match]


def mean_over_types(values: Tensor, weights: Tensor, before: Tensor) -> Tensor:
    """Return the mean over clients for each type; the value before where all weights are 0.

    Args:
        values: `[K, T, …]`.
        weights: `[K, T]`.
        before: `[T, …]`.
    """
    total = weights.sum(dim=0)
    share = weights / total.clamp(min=1e-12)
    mean = torch.einsum("kt,kt...->t...", share.to(values.dtype), values)
    return torch.where((total > 0).view(-1, *[1] * (before.dim() - 1)), mean, before)
