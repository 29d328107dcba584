"""Checking a method: all properties that every method must have, one after another."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from polyphily.core.method import METHODS, Method
from polyphily.runtime.machine import threads
from polyphily.testing import method_class, method_messages, method_training
from polyphily.testing.cases import METHOD_CHECKS, MethodCase

CHECKS = (method_class, method_messages, method_training)  # importing them adds to METHOD_CHECKS


def check_method(
    method: str | type[Method] | Method,
    /,
    *,
    backbone: str | None = None,
    permutes: bool = True,
    untrained: Sequence[str] = (),
    **hyperparameters: Any,
) -> None:
    """Check a method on small random federations; takes some seconds.

    Args:
        method: a class, the name of a registered method, or a method with its hyperparameters.
        backbone: the network to train; unless given, gcn if the method can train it, and in one
            of the checks all that it supports.
        permutes: whether the order of clients does not matter.
        untrained: parameters that the first round leaves as they are, by name or by what their
            names begin with.
        **hyperparameters: of the method.

    Raises:
        CheckFailed: for the first property that does not hold. The first line of the message says
            what is wrong, in which hook, and what to do.
    """
    if isinstance(method, str):
        method = METHODS.find(method)
    if not isinstance(method, Method):
        method_class.check_class(method)
        method = method(**hyperparameters)
    elif hyperparameters:
        method = dataclasses.replace(method, **hyperparameters)
    case = MethodCase(method, backbone, permutes, tuple(untrained))
    with threads(1):
        for check in METHOD_CHECKS.values():
            check(case)
        for name in [] if backbone else method.supported_backbones():
            METHOD_CHECKS["stacked-equals-sequential"](dataclasses.replace(case, backbone=name))
