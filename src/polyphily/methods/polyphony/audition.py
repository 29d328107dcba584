"""The audition: how well every voice predicts train nodes that no voice was trained on.

The mix of a client maximises sum_i log sum_v w_v p_v(y_i) over its held-out nodes i, with a
Dirichlet prior around the federation's mix. A step of the EM algorithm is

    r_iv = w_v p_v(y_i) / sum_u w_u p_u(y_i),   w_v = (τ w̄_v + sum_i r_iv) / (τ + n).

The sums over nodes are all that the server needs for the federation's mix w̄. Likelihood spreads
weight over voices that agree at most nodes, so a mix departs further from the even one than EM
does: w⁰ (w / w⁰)^γ.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from polyphily.core.cohort import TrainingGraph
from polyphily.graphs.random import generator
from polyphily.nn.choir import LEAST
from polyphily.nn.segments import Segments

STEPS = 5  # of EM in a round, for a mix of the client's own


def held_out(cohort: TrainingGraph, share: float, fewest: int) -> tuple[Tensor, Segments]:
    """Draw the train nodes of each client that are held out; the same in every round.

    Args:
        cohort: the clients.
        share: the share of its train nodes that a client holds out.
        fewest: clients with fewer train nodes hold none out.

    Returns:
        Their indices among the train nodes, ascending, and how many each client has.
    """

    def draw(graph: TrainingGraph) -> tuple[Tensor, Segments]:
        segments, drawn = graph.train_segments, []
        for (seed, client), start, size in zip(
            graph.keys, segments.pointers, segments.sizes, strict=False
        ):
            lots = generator(seed, f"audition/{client}").permutation(size)
            count = round(share * size) if size >= fewest else 0
            drawn.append(start + np.sort(lots[:count]))
        found = torch.from_numpy(np.concatenate(drawn).astype(np.int64)).to(graph.device)
        return found, Segments(tuple(len(own) for own in drawn), graph.device)

    return cohort.cached(("polyphony/held out", share, fewest), draw)


def posterior(parts: Tensor, prior: Tensor, trust: float) -> Tensor:
    """Return the weights of the voices, `[K, V]`, from sums of responsibilities and the prior."""
    return (trust * prior + parts) / (trust + parts.sum(dim=1, keepdim=True))


def sharpened(weights: Tensor, even: Tensor, power: float) -> Tensor:
    """Return w⁰ (w / w⁰)^γ, normalised: what was heard counts γ times, `[K, V]`.

    Args:
        weights: w, `[K, V]`.
        even: w⁰, the weights before anything was heard, `[V]`.
        power: γ.
    """
    start = even.clamp(min=LEAST).log()
    return (start + power * (weights.clamp(min=LEAST).log() - start)).softmax(dim=1)


def responsibilities(
    log_likelihood: Tensor,
    weights: Tensor,
    prior: Tensor,
    trust: float,
    segments: Segments,
    steps: int = STEPS,
) -> Tensor:
    """Return each client's sums of responsibilities after some steps of EM, `[K, V]`.

    Args:
        log_likelihood: log p_v(y_i) of the held-out nodes, `[n, V]`.
        weights: where EM starts, `[K, V]`.
        prior: w̄, `[K, V]`.
        trust: τ.
        segments: the held-out nodes of each client.
        steps: how many; after a single one the weights are still those given.
    """
    parts = torch.zeros_like(weights)
    for _ in range(steps):
        logs = segments.expand(weights.clamp(min=LEAST).log())
        parts = segments.sum((log_likelihood + logs).softmax(dim=1))
        weights = posterior(parts, prior, trust)
    return parts
