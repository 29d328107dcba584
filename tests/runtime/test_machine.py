"""What `runtime.machine` says about memory."""

from __future__ import annotations

import gc
import os
import weakref

import pytest

from polyphily.core.method import create
from polyphily.core.settings import from_mapping
from polyphily.graphs.loading import load
from polyphily.runs.run import Execution
from polyphily.runtime.machine import (
    _CACHES,
    cache_size,
    chosen_size,
    keep_freed_memory,
    release_memory,
)


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


def test_the_largest_size_that_is_clearly_faster_is_chosen() -> None:
    assert chosen_size({1: 1.0, 2: 1.0, 4: 1.9, 8: 3.0}) == 4
    assert chosen_size({1: 1.0, 2: 2.5, 4: 2.9, 8: 3.0}) == 1
    assert chosen_size({1: 3.0, 2: 2.9, 4: 3.1, 8: 3.0}) == 8, "all alike: all are in the cache"


def test_the_size_of_the_cache_is_measured_once() -> None:
    assert cache_size() in _CACHES
    assert cache_size() is cache_size()


def test_settings_of_malloc_have_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _: pytest.fail("malloc was configured"))
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000")
    assert not keep_freed_memory.__wrapped__()


def test_a_system_without_mallopt_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("MALLOC_") or n == "GLIBC_TUNABLES"]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("ctypes.CDLL", lambda _: object())
    assert not keep_freed_memory.__wrapped__()
