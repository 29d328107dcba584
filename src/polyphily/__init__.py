"""Polyphily: federated graph learning for graphs that differ in kind.

>>> import polyphily
>>> federation = polyphily.load("csbm:nodes=100,features=8", clients=3, seed=0)
>>> result = polyphily.run("fedavg", federation, rounds=2)
>>> sorted(result.models)
['global', 'global-best']
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyphily.core.method import Method, register
    from polyphily.core.settings import Settings
    from polyphily.errors import PolyphilyError, TrainingError, UserError
    from polyphily.graphs.graph import Graph, Masks
    from polyphily.graphs.loading import Federation, load
    from polyphily.runs.run import Result, run

__version__ = "0.1.0"

_HOMES = {
    "Federation": "polyphily.graphs.loading",
    "Graph": "polyphily.graphs.graph",
    "Masks": "polyphily.graphs.graph",
    "Method": "polyphily.core.method",
    "PolyphilyError": "polyphily.errors",
    "Result": "polyphily.runs.run",
    "Settings": "polyphily.core.settings",
    "TrainingError": "polyphily.errors",
    "UserError": "polyphily.errors",
    "load": "polyphily.graphs.loading",
    "register": "polyphily.core.method",
    "run": "polyphily.runs.run",
}

__all__ = [
    "Federation",
    "Graph",
    "Masks",
    "Method",
    "PolyphilyError",
    "Result",
    "Settings",
    "TrainingError",
    "UserError",
    "load",
    "register",
    "run",
]


def __getattr__(name: str) -> Any:
    """Imports on first use, so that `import polyphily` (and `polyphily --help`) stays quick."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'polyphily' has no attribute '{name}'")
