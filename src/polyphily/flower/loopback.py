"""A server and a process per client on this machine: `polyphily run … --engine flower`.

Certificates, keys, messages and files are those of a real deployment; only the graphs are handed
out here, and the sites' models are collected into one run folder at the end.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import scipy.sparse as sp
import torch

from polyphily.errors import TrainingError, UserError
from polyphily.flower import control
from polyphily.flower.deployment import Deployment, require_flower
from polyphily.flower.server import EVENTS
from polyphily.flower.site import BEST, LAST, SavedModel, SiteState
from polyphily.graphs.graph import Graph
from polyphily.runs.folder import METRICS, RunFolder

if TYPE_CHECKING:
    from polyphily.runs.run import Execution, Progress

POLL = 0.3
LOOK = 1.0  # seconds between looks at a run
PATIENCE = 120.0  # seconds for the server and the sites to come up


def run(execution: Execution, progress: Progress | None = None) -> dict[str, Any]:
    """Trains an execution's federation on Flower; the summary.

    Raises:
        UserError: for several seeds at once.
        TrainingError: when the run fails.
    """
    require_flower()
    if len(execution.federations) > 1:
        raise UserError("--engine flower runs one seed at a time: give one --seed")
    if execution.simulation.round:
        raise UserError("--resume is for runs in one process: start a run on Flower anew")
    assert execution.folder is not None
    federation, settings = execution.federations[0], execution.settings
    names = [f"client-{k}" for k in range(len(federation))]
    with tempfile.TemporaryDirectory(prefix="polyphily-") as place, ExitStack() as stack:
        own = deploy(Path(place), names, federation.clients)
        name = own.new_run(
            execution.method.name,
            {
                **{k: v for k, v in dataclasses.asdict(settings).items() if v is not None},
                "seed": federation.seed,
                "classes": [str(c) for c in range(len(federation.classes))],
                "join_timeout": PATIENCE,
            },
            dataclasses.asdict(execution.method),
        )
        stack.enter_context(_heeding_termination())
        stack.enter_context(started(own, Path(place)))
        folder = own.run_folder(name)
        control.start(own, folder)
        watch(own, folder, progress)
        return _collect(execution, own, folder)


@contextmanager
def _heeding_termination() -> Iterator[None]:
    """A run that is told to end (SIGTERM) takes its server and sites along."""

    def leave(*_: object) -> NoReturn:
        raise SystemExit(128 + signal.SIGTERM)

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can say what a signal does
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def deploy(place: Path, names: Sequence[str], graphs: Sequence[Graph]) -> Deployment:
    """A server folder for sites of this machine, and each one's graph in a file beside it."""
    own = Deployment.create(place / "server", names, "127.0.0.1", free_port(), free_port())
    for name, graph in zip(names, graphs, strict=True):
        write_graph(graph_file(place, name), graph)
    return own


def graph_file(place: Path, name: str) -> Path:
    return place / f"{name}.npz"


def write_graph(file: Path, graph: Graph) -> None:
    """A graph with its split in the format of a site's own files."""
    assert graph.masks is not None
    x = sp.csr_array(graph.features).toarray() if sp.issparse(graph.features) else graph.features
    np.savez(
        file,
        x=x,
        edge_index=graph.edges,
        y=graph.labels,
        train_mask=graph.masks.train,
        val_mask=graph.masks.val,
        test_mask=graph.masks.test,
    )


def free_port() -> int:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return int(door.getsockname()[1])


@contextmanager
def started(own: Deployment, place: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """The server and all sites as processes; they are ended on the way out."""
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        processes["server"] = start_server(own, place)
        wait_for_server(own, processes["server"], place)
        for site in own.sites:
            processes[site] = start_site(own, place, site)
        yield processes
    finally:
        for process in reversed(processes.values()):
            end(process)


def start_server(own: Deployment, place: Path) -> subprocess.Popen[bytes]:
    return spawn(place / "server.log", ["server", "start", str(own.path)])


def start_site(own: Deployment, place: Path, site: str) -> subprocess.Popen[bytes]:
    bundle = own.path / "bundles" / site
    return spawn(
        place / f"{site}.log",
        ["site", "join", str(bundle), "--graph", str(graph_file(place, site))],
    )


def spawn(log: Path, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    """A `polyphily` command in a process of its own, what it says kept in a file."""
    with log.open("ab") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", "polyphily", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
            start_new_session=True,  # Ctrl-C in the terminal is for us alone
        )


def end(process: subprocess.Popen[bytes]) -> None:
    """Asks a process to end, and makes it after a while."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for_server(own: Deployment, process: subprocess.Popen[bytes], place: Path) -> None:
    host, _, port = own.control.partition(":")
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
            return
        except OSError:
            time.sleep(POLL)
    raise TrainingError(f"the server did not start: {_tail(place / 'server.log')}")


def _tail(log: Path) -> str:
    text = log.read_text(encoding="utf-8", errors="replace").strip() if log.exists() else ""
    return text[-1000:] or "it said nothing"


def watch(own: Deployment, folder: RunFolder, progress: Progress | None = None) -> None:
    """Follows a run to its end.

    Raises:
        TrainingError: where it did not complete.
    """
    seen = 0
    over = False
    while not over:
        time.sleep(LOOK)
        state = control.state(own, folder)
        over = state.over
        records = folder.records()
        for record in records[seen:]:
            if progress:
                progress(record)
        seen = len(records)
    if not state.well or folder.read_summary() is None:
        raise TrainingError(failure(folder) or f"the run ended as {state.words}")


def failure(folder: RunFolder) -> str | None:
    """Why a run failed, in its own words, if it did."""
    last = [e for e in events(folder) if e["event"] in ("failed", "done", "started")][-1:]
    return str(last[0]["reason"]) if last and last[0]["event"] == "failed" else None


def events(folder: RunFolder) -> list[dict[str, Any]]:
    """What happened in a run so far."""
    return folder.records(EVENTS)


def _collect(execution: Execution, own: Deployment, source: RunFolder) -> dict[str, Any]:
    """Brings the outcome and the sites' models into the execution's run folder."""
    assert execution.folder is not None
    target, federation = execution.folder, execution.federations[0]
    for name in (METRICS, EVENTS):
        shutil.copy(source.path / name, target.path / name)
    shutil.copytree(source.path / "models", target.path / "models", dirs_exist_ok=True)
    if not any((source.path / "models").iterdir()):
        models = {}
        for site, graph in zip(own.sites, federation.clients, strict=True):
            state = SiteState(own.path / "bundles" / site, source.path.name)
            for which, suffix in ((LAST, ""), (BEST, "-best")):
                params = SavedModel.load(state.model(which)).part("params/")
                models[f"{graph.name}{suffix}"] = {n: t[0] for n, t in params.items()}
        target.save_models(models, {"method": execution.method.name, "dataset": federation.dataset})
    _restore(execution, own, source)
    summary = source.read_summary()
    assert summary is not None
    summary |= {
        "dataset": federation.dataset,
        "partition": {
            "name": federation.partition.name,
            "clients": len(federation),
            "sha256": federation.partition.sha256,
        },
        "split": federation.split,
        "classes": list(federation.classes),
        "clients": [graph.name for graph in federation.clients],
        "notes": list(federation.notes),
    }
    target.write_summary(summary)
    return summary


def _restore(execution: Execution, own: Deployment, source: RunFolder) -> None:
    """Gives the execution what server and sites ended with, as if it had trained itself."""
    simulation = execution.simulation
    found = source.load_checkpoint()
    assert found is not None
    tensors, progress = found
    memories = []
    for k, site in enumerate(own.sites):
        state = SiteState(own.path / "bundles" / site, source.path.name)
        own_rows = {n: t[k : k + 1] for n, t in simulation.memory.items()}
        memories.append(own_rows | (state.load(progress["accepted"][site]) or {}))
    ended = {
        f"memory/{n}": torch.cat([memory[n] for memory in memories]) for n in simulation.memory
    }
    ended |= {f"state/0/{n[6:]}": t for n, t in tensors.items() if n.startswith("state/")}
    simulation.restore(ended, progress["round"], ())
    scores = {n[8:]: t for n, t in tensors.items() if n.startswith("tracker/")}
    execution.tracker.restore(scores, simulation.device)
    execution.reports = source.records()
    execution.checkpoint()
