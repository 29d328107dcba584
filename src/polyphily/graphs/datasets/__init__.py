"""Graphs by name: what there is, where its files lie, and how to read it.

Importing this package imports neither numpy nor torch, so that listing the names is quick.
"""

from polyphily.graphs.datasets.info import DatasetInfo
from polyphily.graphs.datasets.reading import data_root, is_present, read
from polyphily.graphs.datasets.registry import DATASETS, find

__all__ = ["DATASETS", "DatasetInfo", "data_root", "find", "is_present", "read"]
