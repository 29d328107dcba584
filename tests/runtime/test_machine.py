"""What `runtime.machine` says about memory."""

from __future__ import annotations

import gc
import weakref

from polyphily.core.method import create
from polyphily.core.settings import from_mapping
from polyphily.graphs.loading import load
from polyphily.runs.run import Execution
from polyphily.runtime.machine import release_memory


def test_a_finished_run_gives_its_memory_back() -> None:
    gc.disable()  # else the collector may come by itself
    try:
        federation = load("csbm:nodes=30,features=4", clients=2, seed=0)
        settings = from_mapping({"rounds": 1, "hidden": 4})
        run = Execution(create("fedavg"), [federation], settings, None)
        run.advance_to_the_end()
        simulation = weakref.ref(run.simulation)
        del run
        release_memory()
        assert simulation() is None
    finally:
        gc.enable()
