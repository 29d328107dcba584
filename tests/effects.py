"""Whether a hyperparameter of a method changes what is predicted."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cases import simulate, small_federation
from polyphily.core.method import Method


def changes_predictions(method: Method, name: str) -> bool:
    """Return whether any other value of a hyperparameter changes a bit of the predictions.

    The predictions are those of both views after two rounds with dropout, under SGD: Adam divides
    factors of gradients out again.
    """
    return any(
        not torch.equal(
            _predictions(dataclasses.replace(method, **{name: value})), _predictions(method)
        )
        for value in _other_values(method, name)
    )


@cache
def _predictions(method: Method) -> Tensor:
    backbone = {"backbone": method.backbone} if method.backbone else {}
    chosen = {"optimizer": "sgd", "dropout": 0.3, **backbone}
    simulation = simulate(method, small_federation(), 2, **chosen)
    return torch.cat([simulation.predict(v) for v in (simulation.received(), simulation.trained())])


def _other_values(method: Method, name: str) -> list[Any]:
    field, value = type(method).hyperparameters()[name], getattr(method, name)
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, str):
        return [choice for choice in field.metadata["choices"] if choice != value]
    return [value + 1] if isinstance(value, int) else [value / 2 + 0.1]
