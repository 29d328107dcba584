"""Independent pieces of work in several processes, on all cores or on several GPUs.

Every process takes the next job as soon as it is free. A job that ran out of memory beside others
is tried again with fewer beside it, and in the end by itself. With one process, jobs run here.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

import torch

from polyphily.errors import OutOfMemory, PolyphilyError
from polyphily.runtime.machine import free_memory, is_out_of_memory, release_memory, share_memory

T = TypeVar("T")

FEWER = 4  # jobs that ran out of memory are tried again with so many times fewer at once
SCARCE = 0.15  # of a GPU's memory: with less than this free, no further job is started
LOOK = 1.0  # seconds between two looks at the free memory
DONE, FAILED, MEMORY = "done", "failed", "memory"


@dataclass(frozen=True)
class Job(Generic[T]):
    """A piece of work.

    Attributes:
        name: for people.
        work: does it; with several processes it must be picklable, as a partial function is.
        about: what the caller wants to find again when the job has ended.
    """

    name: str
    work: Callable[[], T]
    about: Any = None


@dataclass(frozen=True)
class Ended(Generic[T]):
    """A job that has ended.

    Attributes:
        job: the job.
        result: what it returned; None if it failed.
        failure: why it failed; empty if it did not.
        seconds: how long it took.
        no_memory: whether it failed for lack of memory.
    """

    job: Job[T]
    result: T | None
    failure: str
    seconds: float
    no_memory: bool = False


@dataclass(frozen=True)
class Standing:
    """The progress of jobs.

    Attributes:
        running: the names of the jobs that are running.
        ended: the number of jobs that have ended.
        total: the number of all jobs.
    """

    running: Sequence[str]
    ended: int
    total: int


Watch = Callable[[Standing], None]
"""Called whenever a job starts or ends."""


def run_jobs(
    jobs: Sequence[Job[T]],
    processes: int = 1,
    *,
    device: str = "cpu",
    until: float = float("inf"),
    watch: Watch | None = None,
) -> Iterator[Ended[T]]:
    """Run jobs and yield them as they end. A job that fails does not stop the others.

    Args:
        jobs: in the order in which they are started.
        processes: how many run at once.
        device: that the jobs train on. Processes on "cuda" take turns with the GPUs of the machine.
        until: no job is started after this value of `time.monotonic()`.
        watch: shows which jobs are running.
    """
    if processes == 1:
        for number, job in enumerate(jobs):
            if time.monotonic() > until:
                return
            if watch:
                watch(Standing([job.name], number, len(jobs)))
            began = time.perf_counter()
            kind, content = _attempt(job.work)
            release_memory()
            yield _ended(job, kind, content, time.perf_counter() - began)
        return
    with _Workers(min(processes, len(jobs)), device, until) as workers:
        waiting, at_once, done = list(jobs), len(workers.members), 0

        def show(running: Sequence[str]) -> None:
            if watch:
                watch(Standing(running, done, len(jobs)))

        while waiting:
            short: list[Ended[T]] = []  # of memory
            for ended in workers.run(waiting, at_once, show):
                if ended.no_memory and at_once > 1:
                    short.append(ended)
                else:
                    done += 1
                    yield ended
            if time.monotonic() > until:
                yield from short  # no time for another try
                return
            waiting, at_once = [ended.job for ended in short], max(1, at_once // FEWER)


class _Workers:
    """Processes that work on jobs."""

    def __init__(self, number: int, device: str, until: float) -> None:
        self.members = list(range(number))
        self._device, self._until = device, until
        self._pipes: dict[int, Connection] = {}
        self._processes: dict[int, Any] = {}

    def __enter__(self) -> _Workers:
        for member in self.members:
            self._start(member)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.terminate()

    def _start(self, member: int) -> None:
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self._pipes[member], theirs = context.Pipe()
        process = context.Process(
            target=_serve, args=(theirs, member, len(self.members), self._device), daemon=True
        )
        process.start()
        theirs.close()
        self._processes[member] = process

    def run(
        self, jobs: Sequence[Job[T]], at_once: int, show: Callable[[Sequence[str]], None]
    ) -> Iterator[Ended[T]]:
        """Run jobs, at most so many at once; those that are not started in time are left out."""
        waiting, running = list(jobs), dict[int, tuple[Job[T], float]]()
        while waiting or running:
            free = [member for member in self.members if member not in running]
            while waiting and free and len(running) < at_once and self._may_start(bool(running)):
                if time.monotonic() > self._until:
                    waiting.clear()
                    break
                member, job = free.pop(0), waiting.pop(0)
                self._pipes[member].send(job.work)
                running[member] = job, time.perf_counter()
                show([job.name for job, _ in running.values()])
            owners = {self._pipes[member]: member for member in running}
            for pipe in wait(list(owners), timeout=LOOK):
                member = owners[pipe]  # type: ignore[index]
                job, began = running.pop(member)
                yield _ended(job, *self._answer(member), time.perf_counter() - began)
                show([job.name for job, _ in running.values()])

    def _may_start(self, beside_others: bool) -> bool:
        """Return whether there is memory for one more job."""
        if not beside_others or not self._device.startswith("cuda"):
            return True
        total = sum(
            torch.cuda.get_device_properties(gpu).total_memory
            for gpu in range(torch.cuda.device_count())
        )
        free = sum(
            free_memory(torch.device("cuda", gpu)) for gpu in range(torch.cuda.device_count())
        )
        return free > SCARCE * total

    def _answer(self, member: int) -> tuple[str, Any]:
        """Return how a process's job ended; a process that died or lacked memory is replaced."""
        process = self._processes[member]
        try:
            answer: tuple[str, Any] = self._pipes[member].recv()
        except (EOFError, OSError):
            process.join()
            answer = FAILED, f"its process ended with status {process.exitcode}"
        if answer[0] == MEMORY:
            process.terminate()  # after such an error a GPU may not work for it any more
            process.join()
        if not process.is_alive():
            self._start(member)
        return answer


def _serve(pipe: Connection, member: int, members: int, device: str) -> None:
    """Work on jobs until the pipe is closed: the main function of a process."""
    devices = torch.cuda.device_count() if device == "cuda" else 1
    if device == "cuda":
        _take_gpu(member)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // members))
    share_memory(-(-members // max(1, devices)))
    with suppress(EOFError, KeyboardInterrupt, BrokenPipeError):
        while True:
            answer = _attempt(pipe.recv())
            release_memory()
            pipe.send(answer)


def _take_gpu(member: int) -> None:
    """Let a process see only its own GPU; it must not have used any before."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    gpus = named.split(",") if named else [str(gpu) for gpu in range(torch.cuda.device_count())]
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[member % len(gpus)]


def _attempt(work: Callable[[], Any]) -> tuple[str, Any]:
    """Do a piece of work; return how it ended, with its result or the reason."""
    try:
        return DONE, work()
    except Exception as error:
        if is_out_of_memory(error):
            return MEMORY, str(OutOfMemory())
        if isinstance(error, PolyphilyError):
            return FAILED, str(error)
        return FAILED, f"{type(error).__name__}: {error}"


def _ended(job: Job[T], kind: str, content: Any, seconds: float) -> Ended[T]:
    if kind == DONE:
        return Ended(job, content, "", seconds)
    return Ended(job, None, str(content), seconds, no_memory=kind == MEMORY)
