"""Jobs in several processes: results, failures, lack of memory, time limits."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from job_examples import bug, die, mistake, sharing, sole_user, square
from polyphily.errors import OutOfMemory
from polyphily.runs import jobs
from polyphily.runs.jobs import Ended, Job, Standing, run_jobs
from polyphily.runtime.machine import is_out_of_memory


def ended(work: dict[str, Callable[[], Any]], processes: int, **more: Any) -> dict[str, Ended[Any]]:
    found = [Job(name, own, name) for name, own in work.items()]
    return {e.job.about: e for e in run_jobs(found, processes, **more)}


@pytest.mark.parametrize("processes", [1, 2])
def test_every_job_ends_with_its_result_or_its_failure(processes: int) -> None:
    work: dict[str, Callable[[], int]] = {str(n): partial(square, n) for n in range(5)}
    found = ended({**work, "mistake": mistake, "bug": bug}, processes)
    assert {name: found[name].result for name in work} == {str(n): n**2 for n in range(5)}
    assert found["mistake"].failure == "there is no such thing"
    assert found["bug"].failure.startswith("ZeroDivisionError")
    assert all(not found[name].failure for name in work)


def test_a_process_that_dies_is_replaced() -> None:
    found = ended({"die": die, **{str(n): partial(square, n) for n in range(4)}}, 2)
    assert found["die"].failure == "its process ended with status 7"
    assert [found[str(n)].result for n in range(4)] == [0, 1, 4, 9]


def test_jobs_that_lack_memory_beside_others_run_by_themselves(tmp_path: Path) -> None:
    found = ended({str(n): partial(sole_user, tmp_path, n) for n in range(3)}, 3)
    assert {name: e.result for name, e in found.items()} == {"0": 0, "1": 1, "2": 2}


@pytest.mark.parametrize("processes", [1, 2])
def test_a_job_that_lacks_memory_alone_fails_and_says_so(processes: int) -> None:
    def short() -> int:
        raise MemoryError

    work: Callable[[], int] = short if processes == 1 else partial(bytearray, 1 << 60)  # type: ignore[assignment]
    found = ended({"short": work, "other": partial(square, 3)}, processes)
    assert found["short"].no_memory
    assert found["short"].failure == str(OutOfMemory())
    assert found["other"].result == 9


@pytest.mark.parametrize("processes", [1, 2])
def test_no_job_starts_after_the_time_is_up(processes: int) -> None:
    assert ended({str(n): partial(square, n) for n in range(3)}, processes, until=0.0) == {}


def test_jobs_that_lack_memory_as_the_time_ends_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def watch(standing: Standing) -> None:
        nonlocal now
        now = 0.0 if standing.running else 20.0  # the time is up when the first try has ended

    clock = SimpleNamespace(monotonic=lambda: now, perf_counter=time.perf_counter)
    monkeypatch.setattr(jobs, "time", clock)
    work = {str(n): partial(sole_user, tmp_path, n) for n in range(2)}
    (tmp_path / "job-other").touch()  # so that both lack memory
    found = ended(work, 2, until=10.0, watch=watch)
    assert {name: e.no_memory for name, e in found.items()} == {"0": True, "1": True}


@pytest.mark.parametrize("processes", [1, 2])
def test_the_display_is_told_what_runs(processes: int) -> None:
    seen: list[Standing] = []
    ended({str(n): partial(square, n) for n in range(3)}, processes, watch=seen.append)
    assert {name for now in seen for name in now.running} == {"0", "1", "2"}
    assert all(len(now.running) <= processes for now in seen)
    assert {now.total for now in seen} == {3}
    assert sorted(now.ended for now in seen) == [now.ended for now in seen]


def test_processes_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ended({str(n): torch.get_num_threads for n in range(2)}, 2)
    assert {e.result for e in found.values()} == {max(1, (os.cpu_count() or 1) // 2)}


@pytest.mark.parametrize("processes", [1, 2])
def test_processes_share_the_memory(processes: int) -> None:
    jobs = [Job(str(i), sharing) for i in range(2)]
    assert [ended.result for ended in run_jobs(jobs, processes)] == [processes] * 2


def test_processes_take_turns_with_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    for member, gpu in ((0, "4"), (1, "6"), (2, "4")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
        jobs._take_gpu(member)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == gpu


def test_lack_of_memory_is_known_in_all_its_forms() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("x"))
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(OutOfMemory())
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"))
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    with pytest.raises(RuntimeError) as lacking:
        torch.empty(1 << 50)
    assert is_out_of_memory(lacking.value)
    assert not is_out_of_memory(RuntimeError("shapes differ"))
    assert not is_out_of_memory(ValueError("out of memory"))
