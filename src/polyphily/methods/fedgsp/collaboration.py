"""Collaboration strengths of FedGSP (Section V-B): who takes how much of whose model.

All functions take problems stacked in front: `[…, M, d]`, `[…, M, M]`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

ROUNDING = 1e-10  # share of a number that may be rounding error
TINY = 1e-10  # added to e_l before a division
SETTLED = 1e-9  # largest change of W at which the alternation has converged


# What the clients sent ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Points:
    """Clients as points, their vectors concatenated: the paper's p_i and q_i.

    Attributes:
        x: one row per client, `[…, M, d]`.
    """

    x: Tensor

    @classmethod
    def of(cls, vectors: Tensor) -> Points:
        """Make points of vectors `[…, M, orders, t, F]`."""
        return cls(vectors.flatten(-3))

    def spread(self, laplacian: Tensor) -> Tensor:
        """Compute e_l = p_l^T L p_l of every dimension, Eq. (12), `[…, d]`."""
        return (self.x * (laplacian @ self.x)).sum(dim=-2)

    def distances(self, focus: Tensor) -> Tensor:
        """Compute ||R p_i - R p_j||^2 of all pairs, R = diag(focus)."""
        scaled = focus.unsqueeze(-2) * self.x
        return _distances(scaled @ scaled.mT)


@dataclass(frozen=True)
class Subspaces:
    """Clients as the spans of their vectors: P_i = V_i^T V_i replaces p_i, a feature a dimension.

    Singular vectors are comparable between clients only up to sign, order and, if singular values
    are close, rotation. Their span does not depend on these.

    Attributes:
        v: the vectors of all clients, orthonormal or zero, `[…, orders, M t, F]`.
        count: t.
    """

    v: Tensor
    count: int

    @classmethod
    def of(cls, vectors: Tensor) -> Subspaces:
        """Make subspaces of vectors `[…, M, orders, t, F]`."""
        return cls(vectors.movedim(-4, -3).flatten(-3, -2), vectors.shape[-2])

    @cached_property
    def products(self) -> Tensor:
        return self.v @ self.v.mT

    def spread(self, laplacian: Tensor) -> Tensor:
        """Compute e_l = sum_ij L_ij <P_i[l], P_j[l]> of every order and feature."""
        wide = laplacian.repeat_interleave(self.count, -1).repeat_interleave(self.count, -2)
        weighted = self.products * wide.unsqueeze(-3)
        return (self.v * (weighted @ self.v)).sum(dim=-2).flatten(-2)

    def distances(self, focus: Tensor) -> Tensor:
        """Compute ||R P_i R - R P_j R||_F^2 of all pairs, summed over orders."""
        *stacked, orders, rows, features = self.v.shape
        focus = focus.view(*stacked, orders, 1, features)
        products = ((focus.square() * self.v) @ self.v.mT).square()
        pairs = products.view(*stacked, orders, rows // self.count, self.count, -1, self.count)
        return _distances(pairs.sum(dim=(-5, -3, -1)))


COMPARED: dict[str, type[Points] | type[Subspaces]] = {"subspace": Subspaces, "vectors": Points}


def _distances(products: Tensor) -> Tensor:
    """Compute the squared distances of all pairs from their inner products."""
    squares = products.diagonal(dim1=-2, dim2=-1)
    both = squares.unsqueeze(-1) + squares.unsqueeze(-2)
    found = both - 2 * products
    found = torch.where(found > ROUNDING * both, found, 0)
    found.diagonal(dim1=-2, dim2=-1).zero_()
    return found


# The range of distances --------------------------------------------------------------------------


def unit_range(x: Tensor) -> Tensor:
    """Divide each matrix by the difference of its largest and its smallest entry."""
    spread = x.amax(dim=(-2, -1), keepdim=True) - x.amin(dim=(-2, -1), keepdim=True)
    return x / torch.where(spread > 0, spread, 1)


def between_others(x: Tensor) -> Tensor:
    """Scale distances of different clients to [0, 1/M]; the diagonal is 0, as the nearest pair."""
    own = torch.eye(x.shape[-1], dtype=torch.bool, device=x.device)
    nearest = x.masked_fill(own, torch.inf).amin(dim=(-2, -1), keepdim=True)
    more = (x - nearest).masked_fill(own, 0)
    return unit_range(torch.where(more > ROUNDING * x, more, 0)) / x.shape[-1]


def unscaled(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Scale:
    """The quantity that is scaled to one range before the W step.

    Attributes:
        each: applied to the distances of each kind.
        both: applied to their weighted sum t_ij.
    """

    each: Callable[[Tensor], Tensor] = unscaled
    both: Callable[[Tensor], Tensor] = unscaled


SCALES = {
    "others": Scale(each=between_others),
    "terms": Scale(each=unit_range),
    "range": Scale(both=unit_range),
    "none": Scale(),
}


# The alternation ---------------------------------------------------------------------------------


def attention(clients: Points | Subspaces, strength: Tensor, floor: float) -> Tensor:
    """Compute r on the simplex with r_l proportional to 1/e_l, Eq. (11) and (12).

    L is the Laplacian of the symmetrised W. `floor` times the mean of e is added to every e_l.

    Args:
        clients: what they sent of one kind.
        strength: W, `[…, M, M]`.
        floor: 0 is the paper's form: a dimension on which all clients agree then gets all weight.
    """
    both = (strength + strength.mT) / 2
    e = clients.spread(torch.diag_embed(both.sum(dim=-1)) - both).clamp(min=0)
    inverse = (e + floor * e.mean(dim=-1, keepdim=True) + TINY).reciprocal()
    return inverse / inverse.sum(dim=-1, keepdim=True)


def nearest_on_simplex(t: Tensor, gamma: float) -> Tensor:
    """Minimise sum_j (t_ij w_ij + gamma w_ij^2) on the simplex for each row, Eq. (14) to (16).

    w_ij = (h_ij - b_i)_+, and Newton's method finds b_i from below: f(b) = mean_j (b-h_ij)_+ - b is
    convex and piecewise linear, so that it ends in at most M steps.
    """
    size = t.shape[-1]
    h = 1 / size - t / (2 * gamma) + t.sum(dim=-1, keepdim=True) / (2 * size * gamma)
    b = torch.zeros_like(h[..., :1])
    for _ in range(size):
        value = (b - h).clamp(min=0).mean(dim=-1, keepdim=True) - b
        slope = (h < b).to(h.dtype).mean(dim=-1, keepdim=True) - 1
        b = b - value / slope
    w = (h - b).clamp(min=0)
    return w / w.sum(dim=-1, keepdim=True)  # removes rounding error


def alternate(
    kinds: Sequence[tuple[float, Points | Subspaces]],
    start: Tensor,
    *,
    gamma: float,
    floor: float,
    scale: Scale,
    sweeps: int,
) -> Tensor:
    """Alternate R, S and W of Eq. (7) until W converges; return W, `[…, M, M]`.

    R and S follow from W alone, so that only W is kept. Eq. (12) gives S as the minimiser of a
    term that the objective maximises. It is implemented as the paper states it.

    Args:
        kinds: weight in the objective, and what the clients sent, of each kind.
        start: the first W.
        gamma: weight of w_ij^2.
        floor: see `attention`.
        scale: what is brought to one range.
        sweeps: alternations at most.
    """
    strength = start
    for _ in range(sweeps):
        t = torch.zeros_like(strength)
        for weight, clients in kinds:
            focus = attention(clients, strength, floor)
            t += weight * scale.each(clients.distances(focus))
        updated = nearest_on_simplex(scale.both(t), gamma)
        change = float((updated - strength).abs().max())
        strength = updated
        if change < SETTLED:
            break
    return strength


def only_others(clients: int, like: Tensor) -> Tensor:
    """Return the first W: all other clients equally, `[clients, clients]`."""
    strength = like.new_full((clients, clients), 1 / max(clients - 1, 1))
    return strength.fill_diagonal_(float(clients == 1))


def uniform_self_weight(strength: Tensor) -> Tensor:
    """Replace every row of W by the mean self-weight and equal weights of the others."""
    size = strength.shape[-1]
    own = strength.diagonal(dim1=-2, dim2=-1).mean(dim=-1)[..., None, None]
    others = ((1 - own) / max(size - 1, 1)).expand_as(strength)
    return torch.where(torch.eye(size, dtype=torch.bool, device=own.device), own, others)
