"""Polyphily: federated graph learning for graphs that differ in kind.

>>> import polyphily
>>> federation = polyphily.load("csbm:nodes=100,features=8", clients=3, seed=0)
>>> result = polyphily.run("fedavg", federation, rounds=2)
>>> sorted(result.models)
['global', 'global-best']
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from polyphily.version import __version__ as __version__

if sys.version_info < (3, 11):  # noqa: UP036 (a checkout on the path: pip would have refused)
    _needed = "polyphily needs Python 3.11 or later, this is Python " + sys.version.split()[0]
    if sys.argv[:1] == ["-m"]:  # python -m polyphily
        sys.exit("error: " + _needed)
    raise ImportError(_needed)

if TYPE_CHECKING:
    from polyphily.core.method import Method, register
    from polyphily.core.settings import Settings
    from polyphily.errors import PolyphilyError, TrainingError, UserError
    from polyphily.experiments.comparing import Comparison, compare
    from polyphily.experiments.sweeping import Sweep, sweep
    from polyphily.graphs.conversion import graph
    from polyphily.graphs.graph import Graph, Masks
    from polyphily.graphs.loading import Federation, load
    from polyphily.report.plotting import Picture, plot
    from polyphily.runs.export import export
    from polyphily.runs.models import SavedModel
    from polyphily.runs.opened import Run, load_model, open_run
    from polyphily.runs.run import Result, run
    from polyphily.runs.searching import tune
    from polyphily.runs.trials import Searched


_HOMES = {
    "Comparison": "polyphily.experiments.comparing",
    "Federation": "polyphily.graphs.loading",
    "Graph": "polyphily.graphs.graph",
    "Masks": "polyphily.graphs.graph",
    "Method": "polyphily.core.method",
    "Picture": "polyphily.report.plotting",
    "PolyphilyError": "polyphily.errors",
    "Result": "polyphily.runs.run",
    "Run": "polyphily.runs.opened",
    "SavedModel": "polyphily.runs.models",
    "Searched": "polyphily.runs.trials",
    "Settings": "polyphily.core.settings",
    "Sweep": "polyphily.experiments.sweeping",
    "TrainingError": "polyphily.errors",
    "UserError": "polyphily.errors",
    "compare": "polyphily.experiments.comparing",
    "export": "polyphily.runs.export",
    "graph": "polyphily.graphs.conversion",
    "load": "polyphily.graphs.loading",
    "load_model": "polyphily.runs.opened",
    "open_run": "polyphily.runs.opened",
    "plot": "polyphily.report.plotting",
    "register": "polyphily.core.method",
    "run": "polyphily.runs.run",
    "sweep": "polyphily.experiments.sweeping",
    "tune": "polyphily.runs.searching",
}

__all__ = [
    "Comparison",
    "Federation",
    "Graph",
    "Masks",
    "Method",
    "Picture",
    "PolyphilyError",
    "Result",
    "Run",
    "SavedModel",
    "Searched",
    "Settings",
    "Sweep",
    "TrainingError",
    "UserError",
    "compare",
    "export",
    "graph",
    "load",
    "load_model",
    "open_run",
    "plot",
    "register",
    "run",
    "sweep",
    "tune",
]


def __getattr__(name: str) -> Any:
    """Imports on first use, so that `import polyphily` (and `polyphily --help`) stays quick."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'polyphily' has no attribute '{name}'")
