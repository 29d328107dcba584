"""Clients over several processes, on one machine or many: `torchrun … -m polyphily run …`.

Every process (a rank) holds the graphs, models and memories of its share of the clients. Rank 0
leads: the servers live there, and it alone prints and writes. A round is planned everywhere alike,
because draws are named by seed and round; every rank trains its own clients; uploads go to rank 0,
which aggregates and sends the servers' new states to all. `docs/distributed.md` is for users.
"""

from __future__ import annotations

import heapq
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from math import ceil, prod
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from polyphily.core.local import Message
from polyphily.core.method import State
from polyphily.engines.simulation import Plan, Simulation, Trained
from polyphily.errors import PolyphilyError, UserError

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TIMEOUT = "POLYPHILY_RANK_TIMEOUT"
USUAL_TIMEOUT = 300.0  # seconds that ranks wait for each other
MEMORY = "memory/"
BEAT = 0.5  # seconds between signs of life
SILENCE = 4.0  # seconds without one after which a rank counts as gone
GRACE = 2.0  # seconds that a rank that is told to stop has to find out why by itself

Layout: TypeAlias = list[tuple[str, str, list[int]]]
"""Names, types and shapes of a message's rows, as JSON can say them."""


class LostRankError(PolyphilyError):
    """A run that cannot go on because not all of its processes do."""


def spread(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Who goes where, so that no rank has much more to do than another.

    The costliest first, each to the rank that has least so far.

    >>> spread([5, 1, 1, 4, 3], 2)
    [[0, 1, 2], [3, 4]]
    """
    heap = [(0, rank) for rank in range(ranks)]
    found: list[list[int]] = [[] for _ in range(ranks)]
    for client in sorted(range(len(costs)), key=lambda k: -costs[k]):
        load, rank = heapq.heappop(heap)
        found[rank].append(client)
        heapq.heappush(heap, (load + costs[client], rank))
    return [sorted(own) for own in found]


# Messages as bytes -------------------------------------------------------------------------------


def layout(rows: Message) -> Layout:
    return [
        (name, str(value.dtype).removeprefix("torch."), list(value.shape[1:]))
        for name, value in rows.items()
    ]


def pack(rows: Message, count: int, device: torch.device) -> Tensor:
    """A message as bytes, one row per client: tensors of all types travel together."""
    parts = [torch.empty(count, 0, dtype=torch.uint8)]
    for value in rows.values():
        own = value.flatten().clone().view(torch.uint8)
        parts.append(own.view(count, prod(value.shape[1:]) * value.element_size()))
    return torch.cat([part.to(device) for part in parts], dim=1)


def unpack(packed: Tensor, form: Layout) -> Message:
    """The message that `pack` made bytes of."""
    found, start = {}, 0
    for name, kind, shape in form:
        dtype = _dtype(kind)
        stop = start + prod(shape) * dtype.itemsize
        own = packed[:, start:stop].flatten().clone()  # bytes begin at any place, numbers do not
        found[name] = own.view(dtype).view(len(packed), *shape)
        start = stop
    return found


def width(form: Layout) -> int:
    return sum(prod(shape) * _dtype(kind).itemsize for _, kind, shape in form)


def _dtype(kind: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, kind)
    return dtype


# The processes -----------------------------------------------------------------------------------


class Team:
    """The processes of a run, and this one's place among them.

    Small things travel over gloo between hosts. What clients and servers send each other does so
    too, unless every rank has a GPU of its own: then it goes over nccl.

    A thread gives a sign of life twice a second, whatever the rank is busy with. When ranks cannot
    reach each other any more, those without one are the ones that are gone.

    Args:
        timeout: how many seconds ranks wait for each other.
    """

    def __init__(self, timeout: float) -> None:
        self.rank, self.size, self.local_rank, self.local_size = (
            int(os.environ[name]) for name in LAUNCHER[:4]
        )
        self.timeout = timeout
        self.folder: Path | None = None  # the run folder, for whoever is to go on with it
        self._bulk: tuple[dist.ProcessGroup | None, torch.device] = None, torch.device("cpu")
        self._connected: str | None = None
        self._told = False  # to stop, from outside
        self._ending = False  # the main thread knows that the run is over
        self._left = threading.Event()
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
            # Another connection: the first may be waiting for something while the thread needs it.
            self._board = PrefixStore(
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
        self._ear, self._mouth = os.pipe()
        os.set_blocking(self._mouth, False)
        self._before = signal.signal(signal.SIGTERM, self._hear), signal.set_wakeup_fd(self._mouth)
        self._watch = threading.Thread(target=self._stay_in_sight, daemon=True)
        self._watch.start()

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def leave(self) -> None:
        """Takes this process out of the team."""
        self._left.set()
        os.write(self._mouth, b"\0")  # wakes the thread
        signal.set_wakeup_fd(self._before[1])
        signal.signal(signal.SIGTERM, self._before[0])
        self._watch.join(SILENCE)
        os.close(self._ear)
        os.close(self._mouth)
        dist.destroy_process_group()

    # Devices ---------------------------------------------------------------------------------

    def connect(self, device: str) -> str:
        """The device of this rank where a run asks for `device`; opens what it needs to talk."""
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
        """How many ranks use the memory that this one uses."""
        return self.local_size if device.type == "cpu" else ceil(self.local_size / _gpus())

    # Talking ---------------------------------------------------------------------------------

    def share(self, rows: Message, owners: Sequence[int]) -> Message:
        """Rows that lie with several ranks, together at every host.

        Args:
            rows: this rank's, in the order in which it occurs in `owners`.
            owners: whose row each of the result is.
        """
        return self._gather(rows, owners, None, torch.device("cpu"), everywhere=True)

    def collect(self, rows: Message, owners: Sequence[int], device: torch.device) -> Message:
        """The same at rank 0 alone, on a device; the others get nothing."""
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
        places = []  # of each row: its rank, and where it is there
        for rank in owners:
            places.append((rank, counts[rank]))
            counts[rank] += 1
        if not owners:
            return {}
        form = layout(rows)
        if not all(counts):  # some have nothing to tell it from
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
        with self._together():
            if everywhere:
                dist.all_gather(parts, sent, group=group)
            else:
                dist.gather(sent, parts if gets else None, dst=0, group=group)
        if not gets:
            return {}
        ranks, at = torch.tensor(places, device=device).T
        return unpack(arrived[ranks, at], form)

    def send(self, message: Message, device: torch.device) -> Message:
        """What rank 0 has, without a client axis, on the device of each."""
        rows = {name: value.unsqueeze(0) for name, value in message.items()}
        form = self.same(layout(rows))
        group, between = self._bulk
        packed = (
            pack(rows, 1, between)
            if self.leads
            else torch.empty(1, width(form), dtype=torch.uint8, device=between)
        )
        if width(form):
            with self._together():
                dist.broadcast(packed, src=0, group=group)
        if self.leads:
            return message
        return {name: value[0].to(device) for name, value in unpack(packed, form).items()}

    def same(self, value: Any, source: int = 0) -> Any:
        """What one rank has, at all: anything that JSON can say. (torch's own way is to pickle, and
        who can reach a rank's port could then run code there.)"""
        text = json.dumps(value).encode() if self.rank == source else b""
        size = torch.tensor([len(text)])
        with self._together():
            dist.broadcast(size, src=source)
            held = torch.zeros(int(size), dtype=torch.uint8)
            held[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
            dist.broadcast(held, src=source)
        return json.loads(bytes(held.tolist()))

    def _all(self, value: bool) -> bool:
        """Whether every rank says yes."""
        held = torch.tensor([int(value)])
        with self._together():
            dist.all_reduce(held, op=dist.ReduceOp.MIN)
        return bool(held.item())

    def once(self, work: Callable[[], object]) -> None:
        """Does something at rank 0; a user's mistake that comes up there is raised by all."""
        words = None
        if self.leads:
            try:
                work()
            except UserError as error:
                words = str(error)
        words = self.same(words)
        if words is not None:
            raise UserError(words)

    def speaks(self, words: str) -> bool:
        """Whether this rank is the first that wants to say this."""
        try:
            return int(self._board.add(f"said/{words}", 1)) == 1
        except RuntimeError:  # whoever kept the board is gone
            return True

    # Who is there ----------------------------------------------------------------------------

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Around whatever all ranks must take part in."""
        try:
            yield
        except RuntimeError as error:
            self._ending = True
            raise LostRankError(self._explain()) from error

    def _stay_in_sight(self) -> None:
        """The thread: signs of life, and an end to a rank that is told to stop but hangs."""
        last = float("inf")
        while not self._left.is_set():
            with suppress(RuntimeError):  # nobody is there to see it
                self._beats(self.rank, 1)
            heard, _, _ = select.select([self._ear], [], [], BEAT)
            if heard and signal.SIGTERM in os.read(self._ear, 64):
                self._told, last = True, min(last, time.monotonic() + GRACE)
            if time.monotonic() > last and not self._ending:
                words = self._explain()
                if self.speaks(words):
                    print(f"error: {words}", file=sys.stderr, flush=True)
                os._exit(LostRankError.exit_status)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        """SIGTERM: the next word from another rank, or the thread, ends this process."""
        self._told = True

    def _explain(self) -> str:
        """What went wrong and how to go on, the same words from all ranks."""
        try:
            if not self._board.check(["gone"]):
                silent = ",".join(map(str, self._silent())) or "nobody"
                self._board.compare_set("gone", "", silent)
            gone = self._board.get("gone").decode().replace("nobody", "")
        except RuntimeError:
            gone = "0"  # it kept the board
        several = "," in gone
        if gone:
            what = (
                f"rank{'s' if several else ''} {gone.replace(',', ', ')} of {self.size} "
                f"{'are' if several else 'is'} gone: killed, out of memory, or off the network."
            )
        elif self._told:
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

    def _silent(self) -> list[int]:
        """The ranks that give no sign of life; they are given some time."""
        seen = [self._beats(rank) for rank in range(self.size)]
        until = time.monotonic() + SILENCE
        silent = list(range(self.size))
        while silent and time.monotonic() < until:
            time.sleep(BEAT / 2)
            self._beats(self.rank, 1)  # this may be the thread that gives the signs
            silent = [rank for rank in silent if self._beats(rank) == seen[rank]]
        return silent

    def _beats(self, rank: int, more: int = 0) -> int:
        return int(self._board.add(f"beat/{rank}", more))


def _gpus() -> int:
    return max(1, torch.cuda.device_count())


# The team of this process ------------------------------------------------------------------------

_current: Team | None = None


def current() -> Team | None:
    """The team that this process is in, if it is in one."""
    return _current


@contextmanager
def joined() -> Iterator[Team | None]:
    """Joins the processes that torchrun started with this one, for a while; None without any.

    What all of them raise is left for one of them to say; the others end with the same status.
    """
    global _current
    if not all(name in os.environ for name in LAUNCHER) or os.environ["WORLD_SIZE"] == "1":
        yield None
        return
    team = _current = Team(_timeout())
    try:
        yield team
    except PolyphilyError as error:
        if not team.speaks(str(error)):
            time.sleep(2 * BEAT)  # torchrun stops the others as soon as one has ended
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


# The round loop over ranks -----------------------------------------------------------------------


@dataclass(frozen=True)
class _Gathered(Trained):
    """A round at all clients, seen from one rank: others have looked at their own already."""

    def look(self) -> tuple[list[bool], list[float]]:
        return self.fine.tolist(), self.losses.tolist()


@dataclass
class DistributedSimulation(Simulation):
    """A simulation whose clients live with the ranks of a team.

    `cohort`, `memory` and the views are those of this rank's clients; `states` are the servers' at
    every rank; plans, scores and who has stopped are of all clients everywhere.
    """

    team: Team = field(kw_only=True)

    def __post_init__(self) -> None:
        asked = self.settings
        if asked.engine == "flower":
            raise UserError("engine 'flower' starts processes of its own: run it without torchrun")
        self.settings = replace(asked, device=self.team.connect(asked.device))
        super().__post_init__()
        if not asked.memory_limit():
            self.memory_budget //= self.team.on_one_device(self.device)

    def _members(self) -> list[list[int]]:
        graphs = [graph for f in self.federations for graph in f.clients]
        if len(graphs) < self.team.size:
            raise UserError(
                f"{self.team.size} ranks for {len(graphs)} clients: "
                f"start at most {len(graphs)} with torchrun --nproc-per-node"
            )
        costs = [graph.num_nodes + graph.edges.shape[1] for graph in graphs]
        shares = spread(costs, self.team.size)
        self.owners = [0] * len(graphs)
        for rank, own in enumerate(shares):
            for client in own:
                self.owners[client] = rank
        self.own = shares[self.team.rank]
        self._place = {client: place for place, client in enumerate(self.own)}
        members, start = [], 0
        for f in self.federations:
            members.append([k for k in range(len(f.clients)) if start + k in self._place])
            start += len(f.clients)
        return members

    # One round -------------------------------------------------------------------------------

    def _trained(self, active: Sequence[int], clients: Sequence[Sequence[int]]) -> Trained:
        mine = [self._place[k] for k in active if k in self._place]
        asked = [
            [k for k in ks if start + k in self._place]
            for start, ks in zip(self.starts, clients, strict=False)
        ]
        here = super()._trained(mine, asked)
        looks = torch.tensor(here.look(), dtype=torch.float64).T
        owners = [self.owners[k] for k in active]
        fine, losses = self.team.share({"": looks}, owners).get("", looks).T
        uploads = self.team.collect(here.uploads, owners, self.device)
        return _Gathered(uploads, here.memory, losses, fine.bool(), here.bytes_down)

    def _aggregate(
        self, plan: Sequence[Plan], good: Sequence[Sequence[int]], trained: Trained
    ) -> tuple[list[State], list[int]]:
        states, bytes_up = list(self.states), [0] * len(plan)
        if self.leads:
            states, bytes_up = super()._aggregate(plan, good, trained)
        message = {f"{s}/{n}": t for s, state in enumerate(states) for n, t in state.items()}
        sent = self.team.send(message, self.device)
        renewed: list[State] = [{} for _ in plan]
        for name, value in sent.items():
            s, _, own = name.partition("/")
            renewed[int(s)][own] = value
        return renewed, bytes_up

    def _keep(self, active: Sequence[int], memory: Message, finite: Sequence[bool]) -> None:
        own = [
            (self._place[k], fine)
            for k, fine in zip(active, finite, strict=True)
            if k in self._place
        ]
        super()._keep([k for k, _ in own], memory, [fine for _, fine in own])

    # Between the ranks -----------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        return self.team.leads

    def share(self, rows: Tensor) -> Tensor:
        return self.team.share({"": rows}, self.owners)[""]

    def collect(self, rows: Message, clients: Sequence[int] | None = None) -> Message:
        wanted = range(self.starts[-1]) if clients is None else clients
        mine = [self._place[k] for k in wanted if k in self._place]
        chosen = {name: value[mine] for name, value in rows.items()}
        return self.team.collect(chosen, [self.owners[k] for k in wanted], self.device)

    def agree(self, decision: bool) -> bool:
        return bool(self.team.same(decision))

    # What a checkpoint holds -----------------------------------------------------------------

    def tensors(self) -> Message:
        """All there is at rank 0, the servers' part elsewhere."""
        own = super().tensors()
        memory = {name: value for name, value in own.items() if name.startswith(MEMORY)}
        return {n: t for n, t in own.items() if n not in memory} | self.collect(memory)

    def restore(self, tensors: Message, round_index: int, stopped: Sequence[int]) -> None:
        own = {n: t[self.own] if n.startswith(MEMORY) else t for n, t in tensors.items()}
        super().restore(own, round_index, stopped)
