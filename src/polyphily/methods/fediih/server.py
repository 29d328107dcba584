"""FedIIH's server: how alike clients are in each factor, and mixtures of their models."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from polyphily.methods.fedgsp.collaboration import uniform_self_weight

FACTOR_AXIS = {  # where the factors are in a parameter of all clients
    "project.weight": 2,
    "project.bias": 1,
    "head.weight": 1,
    "spread": 1,
    "spread_bias": 1,
}


def similarity(mean: Tensor, logvar: Tensor) -> Tensor:
    """Compute 1 - JS / ln 2 of all pairs of clients, `[M, factors, width] -> [factors, M, M]`.

    JS is the mean divergence of two Gaussians from the Gaussian with their mean and their mean
    variance, summed over entries. It has no upper bound, so that a similarity may be negative.
    """
    mean, logvar = mean.transpose(0, 1), logvar.transpose(0, 1)
    gap = (mean.unsqueeze(1) - mean.unsqueeze(2)).square()
    variance = _midway(logvar.exp())
    js = (variance.log() - _midway(logvar) + gap / (4 * variance)).sum(dim=3) / 2
    return 1 - js / math.log(2)


def _midway(values: Tensor) -> Tensor:
    return (values.unsqueeze(1) + values.unsqueeze(2)) / 2


def strengths(alike: Tensor, heard: Tensor, temperature: float, weights: str) -> Tensor:
    """Return the weights β of all clients in each client's model, `[factors, M, M]`.

    Args:
        alike: similarities, `[factors, M, M]`.
        heard: whether a client has sent anything, `[M]`. Others have no weight, and receive the
            plain mean.
        temperature: factor τ before the softmax.
        weights: as the hyperparameter of the method.
    """
    even = (heard / heard.sum()).to(alike.dtype).expand_as(alike)
    if weights == "even":
        return even
    if weights == "averaged":
        alike = alike.mean(dim=0, keepdim=True).expand_as(alike)
    beta = (temperature * alike).masked_fill(~heard, -torch.inf).softmax(dim=2)
    if weights == "control":
        beta = uniform_self_weight(beta) * heard
        beta = beta / beta.sum(dim=2, keepdim=True)
    return torch.where(heard.unsqueeze(1), beta, even)


def mixed(name: str, values: Tensor, beta: Tensor, plain: Tensor) -> Tensor:
    """Mix a parameter: the slice of each factor by its own weights, others by the plain mean.

    Args:
        name: of the parameter.
        values: of all clients, `[M, …]`.
        beta: `[receivers, factors, M]`.
        plain: `[receivers, M]`.
    """
    if name not in FACTOR_AXIS:
        return torch.einsum("ij,j...->i...", plain, values)
    axis = FACTOR_AXIS[name]
    parts = torch.unflatten(values, axis, (beta.shape[1], -1)).movedim(axis, 1)
    whole = torch.einsum("iqj,jq...->iq...", beta, parts)
    return whole.movedim(1, axis).flatten(axis, axis + 1)
