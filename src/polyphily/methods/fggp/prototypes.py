"""Class prototypes: their alignment between two views, their clusters, and votes by them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor
from torch.nn import functional as F

from polyphily.methods.s2fgl.spectrum import projections
from polyphily.nn.segments import Segments

Floats = npt.NDArray[np.floating]


# At the clients ----------------------------------------------------------------------------------


def soft_membership(logits: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return w_v at the class of every node, zero elsewhere, `[N, classes]`; without gradient.

    A train node has its label and w = 1, any other its predicted class and w = its probability.
    """
    confidence, predicted = logits.detach().softmax(dim=1).max(dim=1)
    known = labels >= 0
    weight = torch.where(known, torch.ones_like(confidence), confidence)
    label = torch.where(known, labels, predicted)
    return F.one_hot(label, classes).to(weight.dtype) * weight.unsqueeze(1)


def class_means(embedding: Tensor, membership: Tensor, segments: Segments) -> Tensor:
    """Compute q_c = sum of w z over sum of w + 1e-6, `[K, classes, width]`."""
    total = segments.sum(membership)
    return projections(embedding, membership, segments) / (total.unsqueeze(2) + 1e-6)


def alignment(first: Tensor, second: Tensor, present: Tensor, temperature: float) -> Tensor:
    """Compute the loss between prototypes q of one view and q' of another, `[K]`.

    The mean over the classes c that a client has of -log(e^{s(q'_c, q_c)} / (e^{s(q'_c, q_c)} +
    sum over others d of e^{s(q'_c, q'_d)} + e^{s(q'_c, q_d)})), with s = cosine / temperature.

    Args:
        first: q, `[K, classes, width]`.
        second: q', likewise.
        present: one for a class that a client has, else zero, `[K, classes]`.
        temperature: of the cosines.
    """
    one, two = (F.normalize(q, dim=2, eps=1e-6) for q in (first, second))
    across, within = (torch.bmm(two, q.transpose(1, 2)) / temperature for q in (one, two))
    absent = (present == 0).unsqueeze(1).expand_as(across)
    own = torch.eye(across.shape[1], dtype=torch.bool, device=across.device).expand_as(across)
    across = across.masked_fill(absent & ~own, -torch.inf)
    within = within.masked_fill(absent | own, -torch.inf)
    logits = torch.cat([across, within], dim=2)
    loss = logits.logsumexp(dim=2) - across.diagonal(dim1=1, dim2=2)
    return (loss * present).sum(dim=1) / present.sum(dim=1).clamp(min=1)


def vote(embedding: Tensor, kept: Tensor, filled: Tensor, segments: Segments, k: int) -> Tensor:
    """Return log shares of the classes among a node's k nearest prototypes, `[N, classes]`.

    A prototype's vote is its share in the softmax of cosine / 0.1 over these k.

    Args:
        embedding: of every node.
        kept: prototypes that the server sent, `[K, classes, places, width]`.
        filled: how many places of each class have one, `[K, classes]`.
        segments: the nodes of each client.
        k: how many vote.
    """
    clients, classes, places, width = kept.shape
    anchors = F.normalize(kept, dim=3).view(clients, classes * places, width)
    cosine = segments.matmul(F.normalize(embedding, dim=1), anchors.transpose(1, 2))
    place = torch.arange(places, device=kept.device)
    empty = (place >= filled.unsqueeze(2)).view(clients, -1)
    cosine = cosine.masked_fill(empty[segments.owner], -torch.inf)
    best, where = cosine.topk(min(k, classes * places), dim=1)
    share = (best / 0.1).softmax(dim=1).nan_to_num()
    votes = share.new_zeros(len(share), classes).scatter_add(1, where // places, share)
    return votes.clamp(min=1e-12).log()


# At the server -----------------------------------------------------------------------------------


def finch(rows: Floats) -> npt.NDArray[np.int64]:
    """Return the cluster of every row: the coarsest partition of FINCH with more than one.

    Each row is linked to its nearest by cosine, connected rows form clusters, and this is repeated
    on the clusters' means. If the first step leaves one cluster, this is the result.
    """
    cluster = np.arange(len(rows))
    means, found = rows, cluster
    while len(means) > 1:
        norms = np.linalg.norm(means, axis=1, keepdims=True)
        unit = means / np.where(norms > 0, norms, 1)
        likeness = unit @ unit.T
        np.fill_diagonal(likeness, -np.inf)
        size = len(means)
        links = coo_array((np.ones(size), (np.arange(size), likeness.argmax(axis=1))), (size, size))
        number, joined = connected_components(links, directed=False)
        cluster = joined[cluster]
        if number == 1:
            return found if len(means) < len(rows) else cluster
        found = cluster
        means = np.stack([rows[cluster == c].mean(axis=0) for c in range(number)])
    return found


def cluster_means(rows: Floats, clustering: str) -> Floats:
    """Return the prototypes that stand for a class's rows, in an order of their own.

    Args:
        rows: one prototype of every client that has the class.
        clustering: "finch", or "mean" for a single cluster.
    """
    if not len(rows):
        return rows
    cluster = finch(rows) if clustering == "finch" else np.zeros(len(rows), dtype=np.int64)
    means = np.stack([rows[cluster == c].mean(axis=0) for c in np.unique(cluster)])
    return means[np.lexsort(means.T[::-1])]
