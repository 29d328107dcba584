"""The loss of a labelled node: class weights and the focal factor."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from polyphily.core.settings import Settings

LARGEST = 100.0  # ratio of a class's weight to the mean weight of the client's train nodes


@dataclass(frozen=True)
class Objective:
    """The weights of train nodes in the loss: by class, and by how hard a node is.

    Attributes:
        balanced: whether each class of a client has the same weight in sum.
        focal: the exponent gamma of the focal loss; 0 for cross-entropy.
    """

    balanced: bool = False
    focal: float = 0.0

    @classmethod
    def of(cls, settings: Settings) -> Objective:
        """Return what the settings of a run ask for."""
        return cls(settings.class_weights == "balanced", settings.focal())

    @property
    def plain(self) -> bool:
        """True if the loss is the cross-entropy."""
        return not self.balanced and not self.focal


def focal_factor(cross_entropy: Tensor, gamma: float) -> Tensor:
    """Compute (1 - p)^gamma from -log p (Lin et al., Focal Loss, ICCV 2017)."""
    missing = -torch.expm1(-cross_entropy)
    return missing.clamp(min=1e-8) ** gamma  # the root of 0 has no gradient


def balanced_weights(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Compute weights of classes that make all classes of a client count the same.

    A class with n_c of n train nodes has the weight n / (C n_c), where C is the number of classes
    that the client has. So the mean weight of its train nodes is 1. Weights above 100 are cut, and
    the rest is scaled so that the mean stays 1. Classes that a client lacks have weight 0.

    Args:
        counts: the number of train nodes of each class, `[clients, classes]`.
    """
    present = counts > 0
    nodes = counts.sum(axis=1, keepdims=True)
    kinds = np.maximum(present.sum(axis=1, keepdims=True), 1)
    weights = np.where(present, nodes / (kinds * np.maximum(counts, 1)), 0.0)
    weights = np.minimum(weights, LARGEST)
    mean = (weights * counts).sum(axis=1, keepdims=True) / np.maximum(nodes, 1)
    return weights / np.where(mean > 0, mean, 1.0)
