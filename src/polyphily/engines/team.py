"""Clients over several processes, on one machine or many: `torchrun … -m polyphily run …`.

Every process (a rank) holds the graphs, models and memories of its share of the clients. Rank 0
leads: the servers live there, and it alone prints and writes. A round is planned everywhere alike,
because draws are named by seed and round; every rank trains its own clients; uploads go to rank 0,
which aggregates and sends the servers' new states to all. `docs/distributed.md` is for users.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from math import ceil, prod
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from polyphily.core.messages import Message
from polyphily.errors import PolyphilyError, UserError

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TIMEOUT = "POLYPHILY_RANK_TIMEOUT"
USUAL_TIMEOUT = 300.0  # seconds that ranks wait for each other
HEARTBEAT = 0.5  # seconds between heartbeats
SILENCE = 4.0  # seconds without a heartbeat after which a rank counts as lost
GRACE = 2.0  # seconds between SIGTERM and the forced exit of a rank that hangs

Layout: TypeAlias = list[tuple[str, str, list[int]]]
"""Names, types and shapes of a message's rows, as JSON values."""


class LostRankError(PolyphilyError):
    """A run that cannot go on because a rank is lost or does not answer."""


# Messages as bytes -------------------------------------------------------------------------------


def layout(rows: Message) -> Layout:
    """Return names, types and shapes of a message's rows."""
    return [
        (name, str(value.dtype).removeprefix("torch."), list(value.shape[1:]))
        for name, value in rows.items()
    ]


def pack(rows: Message, count: int, device: torch.device) -> Tensor:
    """Return a message as bytes, one row per client, so that all types travel together."""
    parts = [torch.empty(count, 0, dtype=torch.uint8)]
    for value in rows.values():
        own = value.flatten().clone().view(torch.uint8)
        parts.append(own.view(count, prod(value.shape[1:]) * value.element_size()))
    return torch.cat([part.to(device) for part in parts], dim=1)


def unpack(packed: Tensor, form: Layout) -> Message:
    """Return the message that `pack` turned into bytes."""
    found, start = {}, 0
    for name, kind, shape in form:
        dtype = _dtype(kind)
        stop = start + prod(shape) * dtype.itemsize
        own = packed[:, start:stop].flatten().clone()  # a copy is aligned
        found[name] = own.view(dtype).view(len(packed), *shape)
        start = stop
    return found


def width(form: Layout) -> int:
    """Return the bytes of one row."""
    return sum(prod(shape) * _dtype(kind).itemsize for _, kind, shape in form)


def _dtype(kind: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, kind)
    return dtype


# The processes -----------------------------------------------------------------------------------


class Team:
    """The processes of a run, and this one's place among them.

    Small values travel over gloo between hosts. Uploads and server states do so too, unless every
    rank has a GPU of its own: then they travel over nccl.

    A thread sends a heartbeat twice a second, whatever the rank is computing. When a collective
    operation fails, the ranks without a heartbeat are the lost ones.

    Args:
        timeout: how many seconds ranks wait for each other.
    """

    def __init__(self, timeout: float) -> None:
        self.rank, self.size, self.local_rank, self.local_size = (
            int(os.environ[name]) for name in LAUNCHER[:4]
        )
        self.timeout = timeout
        self.folder: Path | None = None  # the run folder, named in the message about a lost rank
        self._bulk: tuple[dist.ProcessGroup | None, torch.device] = None, torch.device("cpu")
        self._connected: str | None = None
        self._terminated = False  # SIGTERM has arrived
        self._ending = False  # the main thread is reporting the failure already
        self._leaving = threading.Event()
        patience = timedelta(seconds=timeout)
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        kept_by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        prefix = f"polyphily/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        try:
            store = TCPStore(
                host,
                port,
                self.size,
                is_master=self.rank == 0 and not kept_by_launcher,
                timeout=patience,
                wait_for_workers=False,
            )
            # A second connection for the thread: the first one may be blocked in a wait.
            self._store = PrefixStore(
                f"{prefix}/signs", TCPStore(host, port, is_master=False, timeout=patience)
            )
            dist.init_process_group(
                "gloo",
                store=PrefixStore(f"{prefix}/group", store),
                rank=self.rank,
                world_size=self.size,
                timeout=patience,
            )
        except RuntimeError as error:
            raise LostRankError(
                f"rank {self.rank} of {self.size} did not find the others within {timeout:g} s "
                f"at {host}:{port}. {str(error).splitlines()[0]}"
            ) from error
        self._wakeup_read, self._wakeup_write = os.pipe()
        os.set_blocking(self._wakeup_write, False)
        self._before = (
            signal.signal(signal.SIGTERM, self._note_termination),
            signal.set_wakeup_fd(self._wakeup_write),
        )
        self._heartbeat_thread = threading.Thread(target=self._send_heartbeats, daemon=True)
        self._heartbeat_thread.start()

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def leave(self) -> None:
        """Leave the team: stop the heartbeats and close the process group."""
        self._leaving.set()
        os.write(self._wakeup_write, b"\0")  # wakes the thread
        signal.set_wakeup_fd(self._before[1])
        signal.signal(signal.SIGTERM, self._before[0])
        self._heartbeat_thread.join(SILENCE)
        os.close(self._wakeup_read)
        os.close(self._wakeup_write)
        dist.destroy_process_group()

    # Devices ---------------------------------------------------------------------------------

    def connect(self, device: str) -> str:
        """Return this rank's device and open the process group that its tensors travel in."""
        if device.startswith("cuda:"):
            raise UserError(
                f"--device {device} with several ranks: --device cuda gives each its own"
            )
        if device == "cpu":
            return device
        gpus = torch.cuda.device_count()
        mine = f"cuda:{self.local_rank % gpus}"
        if self._connected != mine:
            torch.cuda.set_device(mine)
            if self._all(self.local_size <= gpus):
                os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # a lost rank raises
                group = dist.new_group(backend="nccl", timeout=timedelta(seconds=self.timeout))
                self._bulk = group, torch.device(mine)
            self._connected = mine
        return mine

    def on_one_device(self, device: torch.device) -> int:
        """Return how many ranks share the memory of a device."""
        return self.local_size if device.type == "cpu" else ceil(self.local_size / _gpus())

    # Sending --------------------------------------------------------------------------------

    def share(self, rows: Message, owners: Sequence[int]) -> Message:
        """Gather rows from all ranks, on every host.

        Args:
            rows: those of this rank, in the order in which it occurs in `owners`.
            owners: the rank of each row of the result.
        """
        return self._gather(rows, owners, None, torch.device("cpu"), everywhere=True)

    def collect(self, rows: Message, owners: Sequence[int], device: torch.device) -> Message:
        """Gather rows at rank 0, on a device; the other ranks get nothing."""
        group, between = self._bulk
        found = self._gather(rows, owners, group, between, everywhere=False)
        return {name: value.to(device) for name, value in found.items()}

    def _gather(
        self,
        rows: Message,
        owners: Sequence[int],
        group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        everywhere: bool,
    ) -> Message:
        counts = [0] * self.size
        places = []  # of each row of the result: its rank, and its row there
        for rank in owners:
            places.append((rank, counts[rank]))
            counts[rank] += 1
        if not owners:
            return {}
        form = layout(rows)
        if not all(counts):  # a rank without rows does not know the layout
            form = self.same(form, next(rank for rank, count in enumerate(counts) if count))
        if not width(form):
            return unpack(torch.empty(len(owners), 0, dtype=torch.uint8), form)
        most, own = max(counts), counts[self.rank]
        sent = torch.zeros(most, width(form), dtype=torch.uint8, device=device)
        if own:
            sent[:own] = pack(rows, own, device)
        gets = everywhere or self.leads
        arrived = sent.new_empty(self.size if gets else 0, most, width(form))
        parts = list(arrived.unbind())
        with self._collective():
            if everywhere:
                dist.all_gather(parts, sent, group=group)
            else:
                dist.gather(sent, parts if gets else None, dst=0, group=group)
        if not gets:
            return {}
        ranks, at = torch.tensor(places, device=device).T
        return unpack(arrived[ranks, at], form)

    def send(self, message: Message, device: torch.device) -> Message:
        """Broadcast tensors without a client axis from rank 0."""
        rows = {name: value.unsqueeze(0) for name, value in message.items()}
        form = self.same(layout(rows))
        group, between = self._bulk
        packed = (
            pack(rows, 1, between)
            if self.leads
            else torch.empty(1, width(form), dtype=torch.uint8, device=between)
        )
        if width(form):
            with self._collective():
                dist.broadcast(packed, src=0, group=group)
        if self.leads:
            return message
        return {name: value[0].to(device) for name, value in unpack(packed, form).items()}

    def same(self, value: Any, source: int = 0) -> Any:
        """Broadcast a JSON value from one rank.

        torch's own function pickles, so that anybody who reaches a rank's port could run code.
        """
        text = json.dumps(value).encode() if self.rank == source else b""
        size = torch.tensor([len(text)])
        with self._collective():
            dist.broadcast(size, src=source)
            held = torch.zeros(int(size), dtype=torch.uint8)
            held[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
            dist.broadcast(held, src=source)
        return json.loads(bytes(held.tolist()))

    def _all(self, value: bool) -> bool:
        """Return whether the value is true at every rank."""
        held = torch.tensor([int(value)])
        with self._collective():
            dist.all_reduce(held, op=dist.ReduceOp.MIN)
        return bool(held.item())

    def at_leader(self, work: Callable[[], object]) -> None:
        """Do something at rank 0; a `UserError` there is raised by all ranks."""
        words = None
        if self.leads:
            try:
                work()
            except UserError as error:
                words = str(error)
        words = self.same(words)
        if words is not None:
            raise UserError(words)

    def claims_message(self, words: str) -> bool:
        """Return whether this rank is the first to print a message; the others stay silent."""
        try:
            return int(self._store.add(f"said/{words}", 1)) == 1
        except RuntimeError:  # the rank that keeps the store is lost
            return True

    # Lost ranks -----------------------------------------------------------------------------

    @contextmanager
    def _collective(self) -> Iterator[None]:
        """Turn the failure of a collective operation into a `LostRankError`."""
        try:
            yield
        except RuntimeError as error:
            self._ending = True
            raise LostRankError(self._describe_failure()) from error

    def _send_heartbeats(self) -> None:
        """Send heartbeats, and end a rank that got SIGTERM but hangs (runs in a thread)."""
        deadline = float("inf")
        while not self._leaving.is_set():
            with suppress(RuntimeError):  # the store is gone: nobody reads heartbeats
                self._heartbeats(self.rank, 1)
            heard, _, _ = select.select([self._wakeup_read], [], [], HEARTBEAT)
            if heard and signal.SIGTERM in os.read(self._wakeup_read, 64):
                self._terminated = True
                deadline = min(deadline, time.monotonic() + GRACE)
            if time.monotonic() > deadline and not self._ending:
                words = self._describe_failure()
                if self.claims_message(words):
                    print(f"error: {words}", file=sys.stderr, flush=True)
                os._exit(LostRankError.exit_status)

    def _note_termination(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGTERM: the next collective operation, or the thread, ends this process."""
        self._terminated = True

    def _describe_failure(self) -> str:
        """Say what went wrong and how to resume, in the same words at every rank."""
        try:
            if not self._store.check(["gone"]):
                silent = ",".join(map(str, self._silent_ranks())) or "nobody"
                self._store.compare_set("gone", "", silent)
            gone = self._store.get("gone").decode().replace("nobody", "")
        except RuntimeError:
            gone = "0"  # rank 0 keeps the store
        several = "," in gone
        if gone:
            what = (
                f"rank{'s' if several else ''} {gone.replace(',', ', ')} of {self.size} "
                f"{'are' if several else 'is'} gone: killed, out of memory, or off the network."
            )
        elif self._terminated:
            what = f"the {self.size} ranks of this run were told to stop."
        else:
            what = (
                f"ranks waited for each other for more than {self.timeout:g} s, though all "
                f"{self.size} are there: {TIMEOUT}={4 * self.timeout:g} lets them wait longer."
            )
        if self.folder is None:
            return f"{what} Nothing was written yet: start the run again."
        return (
            f"{what} The run goes on from its last checkpoint, with any number of ranks: "
            f"torchrun --nproc-per-node {self.local_size} -m polyphily run --resume {self.folder}"
        )

    def _silent_ranks(self) -> list[int]:
        """Return the ranks that send no heartbeat within `SILENCE` seconds."""
        seen = [self._heartbeats(rank) for rank in range(self.size)]
        until = time.monotonic() + SILENCE
        silent = list(range(self.size))
        while silent and time.monotonic() < until:
            time.sleep(HEARTBEAT / 2)
            self._heartbeats(self.rank, 1)  # this may be the heartbeat thread itself
            silent = [rank for rank in silent if self._heartbeats(rank) == seen[rank]]
        return silent

    def _heartbeats(self, rank: int, more: int = 0) -> int:
        """Return how many heartbeats a rank has sent, after adding `more`."""
        return int(self._store.add(f"beat/{rank}", more))


def _gpus() -> int:
    return max(1, torch.cuda.device_count())


# The team of this process ------------------------------------------------------------------------

_current: Team | None = None


def current() -> Team | None:
    """Return the team that this process is in; None if it is in none."""
    return _current


@contextmanager
def joined() -> Iterator[Team | None]:
    """Join the processes that torchrun started, for the time of the context; None without any.

    An error that all ranks raise is printed by one; the others exit with the same status.
    """
    global _current
    if not all(name in os.environ for name in LAUNCHER) or os.environ["WORLD_SIZE"] == "1":
        yield None
        return
    team = _current = Team(_timeout())
    try:
        yield team
    except PolyphilyError as error:
        if not team.claims_message(str(error)):
            time.sleep(2 * HEARTBEAT)  # torchrun stops the others as soon as one exits
            raise SystemExit(error.exit_status) from None
        raise
    finally:
        _current = None
        team.leave()


def _timeout() -> float:
    text = os.environ.get(TIMEOUT, str(USUAL_TIMEOUT))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds < float("inf"):
        raise UserError(f"{TIMEOUT}: '{text}' is not a number of seconds, 1 or more")
    return seconds
