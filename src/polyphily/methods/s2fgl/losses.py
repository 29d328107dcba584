"""S2FGL's two losses between local and global embeddings: L_FKD (Eq. 8) and L_FGMA (Eq. 12)."""

from __future__ import annotations

from torch import Tensor

from polyphily.methods.s2fgl.spectrum import projections, unit
from polyphily.nn.segments import Segments


def log_similarity_shares(
    h: Tensor, anchors: Tensor, segments: Segments, temperature: float
) -> Tensor:
    """Compute log sigma(phi(h_u, H)): log softmax of a node's cosines with the repository.

    Args:
        h: embeddings, `[N, d]`.
        anchors: the repository of each client, unit vectors, `[K, d, replicas · C]`.
        segments: the nodes of each client.
        temperature: divides the cosines.
    """
    cosine = segments.matmul(unit(h), anchors)
    return (cosine / temperature).log_softmax(dim=1)


def kl_divergence(first: Tensor, second: Tensor, segments: Segments) -> Tensor:
    """Compute KL(first || second) from log-probabilities, the mean over a client's nodes, `[K]`."""
    return segments.mean((first.exp() * (first - second)).sum(dim=1))


def frequency_gap(h: Tensor, u: Tensor, v: Tensor, b: Tensor, rows: Segments) -> Tensor:
    """Compute L_FGMA (Eq. 12): the sum over m of MSE(u_m u_m^T h, v_m v_m^T h_g), `[K]`.

    With unit vectors, a = u^T h, b = v^T h_g and s = u^T v, the squared Frobenius distance is
    |a - s b|^2 + (1 - s^2) |b|^2, so that no projected matrix is formed. No gradient goes through
    u.

    Args:
        h: local embeddings, `[n, d]`.
        u: basis of the local similarity graph, `[n, vectors]`.
        v: basis of the global model's similarity graph, `[n, vectors]`.
        b: projections of the global embeddings on v, `[K, vectors, d]`.
        rows: the rows of each client.
    """
    s = rows.sum(u * v).unsqueeze(2)
    a = projections(h, u, rows)
    gap = (a - s * b).square() + (1 - s.square()).clamp(min=0) * b.square()
    entries = rows.counts.to(h.dtype) * h.shape[1]
    return gap.sum(dim=(1, 2)) / entries
