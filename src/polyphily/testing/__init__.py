"""Checks for methods, backbones, partitions, datasets and metrics of your own.

Each check runs on small random data and raises `CheckFailed`, an `AssertionError`, whose first line
says what is wrong and what to do. A test of a method is one line:

    from polyphily.testing import check_method

    def test_my_method():
        check_method(MyMethod)

`METHOD_CHECKS` and `BACKBONE_CHECKS` hold the single properties by name, to run them one by one.
"""

from __future__ import annotations

from polyphily.testing.backbones import BACKBONE_CHECKS, BackboneCase, check_backbone
from polyphily.testing.cases import METHOD_CHECKS, MethodCase
from polyphily.testing.comparing import CheckFailed, assert_close, assert_same_bits
from polyphily.testing.data import check_dataset, check_metric, check_partition
from polyphily.testing.examples import (
    awkward_graph,
    random_cohort,
    random_graph,
    random_graphs,
    random_parameters,
    simulate,
    small_federation,
)
from polyphily.testing.methods import check_method

__all__ = [
    "BACKBONE_CHECKS",
    "METHOD_CHECKS",
    "BackboneCase",
    "CheckFailed",
    "MethodCase",
    "assert_close",
    "assert_same_bits",
    "awkward_graph",
    "check_backbone",
    "check_dataset",
    "check_method",
    "check_metric",
    "check_partition",
    "random_cohort",
    "random_graph",
    "random_graphs",
    "random_parameters",
    "simulate",
    "small_federation",
]
