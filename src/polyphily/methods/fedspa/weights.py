"""Aggregation weights of FedSPA (HBDA): clients near the federation's mean count more."""

from __future__ import annotations

import torch
from torch import Tensor


def bias_weights(values: Tensor, nodes: Tensor, *, distance: bool = True) -> Tensor:
    """Compute the clients' weights from the deviation of their values from the federation's.

    Deviation d_i = mean_j |values_ij - sum_k (N_k / N) values_kj| (equations 8 and 11), gamma_i =
    (d_i - min d) / (max d - min d) (9), weight_i = exp(-gamma_i) / sum_k exp(-gamma_k) (10, 12).
    If all deviations are equal, up to rounding, gamma is 0 and the weights are uniform: two clients
    of one size always deviate equally, and rounding must not choose between them.

    Args:
        values: one row per client that answered, `[K, m]`.
        nodes: N_k, `[K]`.
        distance: whether weights fall with the deviation; otherwise with the values themselves,
            which are not negative.
    """
    globe = (nodes / nodes.sum()).to(values.dtype) @ values
    deviation = (values - globe).abs().mean(dim=1) if distance else values.mean(dim=1)
    low, high = deviation.aminmax()
    rounding = 100 * torch.finfo(values.dtype).eps * values.abs().mean(dim=1).amax()
    spread = high - low
    gamma = torch.where(spread > rounding, (deviation - low) / spread, 0)
    return torch.softmax(-gamma, dim=0)
