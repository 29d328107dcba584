"""Datasets by name: metadata, download and reading.

Importing this package imports neither numpy nor torch, so that listing the names is quick.
"""

from polyphily.graphs.datasets.info import DatasetInfo, Request
from polyphily.graphs.datasets.reading import SUBGRAPHS, data_root, is_present, parse_dataset, read
from polyphily.graphs.datasets.registry import DATASETS, register_dataset

__all__ = [
    "DATASETS",
    "SUBGRAPHS",
    "DatasetInfo",
    "Request",
    "data_root",
    "is_present",
    "parse_dataset",
    "read",
    "register_dataset",
]
