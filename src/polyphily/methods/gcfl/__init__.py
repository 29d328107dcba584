"""GCFL and GCFL+: clusters of clients, split by how their updates differ."""

from polyphily.methods.gcfl.method import GCFL
from polyphily.methods.gcfl.series import GCFLPlus

__all__ = ["GCFL", "GCFLPlus"]
