"""A server and one process per client on this machine: `polyphily run … --engine flower`.

Certificates, keys, messages and files are those of a real deployment. Only the graphs are handed
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
from polyphily.flower.checkpoint import ServerCheckpoint
from polyphily.flower.deployment import Deployment, require_flower
from polyphily.flower.joining import EVENTS
from polyphily.flower.site_files import SiteState
from polyphily.graphs.conversion import given_edges
from polyphily.graphs.graph import Graph
from polyphily.runs.folder import METRICS, RunFolder
from polyphily.runs.models import BEST, SavedModel
from polyphily.runs.summary import add_judgement

if TYPE_CHECKING:
    from polyphily.runs.run import Execution, Progress

POLL = 0.3  # seconds between attempts to reach the server
LOOK = 1.0  # seconds between two queries of a run's state
START_TIMEOUT = 120.0  # seconds for the server and the sites to start


def run(execution: Execution, progress: Progress | None = None) -> dict[str, Any]:
    """Train an execution's federation on Flower and return the summary.

    Raises:
        UserError: if there are several seeds, or for a run that was resumed.
        TrainingError: if the run fails.
    """
    require_flower()
    if len(execution.federations) > 1:
        raise UserError("--engine flower runs one seed at a time: give one --seed")
    if execution.reports:
        raise UserError("--engine flower cannot resume a run: start a new one without --resume")
    assert execution.folder is not None
    federation, settings = execution.federations[0], execution.settings
    names = [f"client-{k}" for k in range(len(federation))]
    with tempfile.TemporaryDirectory(prefix="polyphily-") as temporary, ExitStack() as stack:
        workdir = Path(temporary)
        deployment = deploy(workdir, names, federation.clients)
        name = deployment.new_run(
            execution.method.name,
            {
                **{k: v for k, v in dataclasses.asdict(settings).items() if v is not None},
                "seed": federation.seed,
                "classes": [str(c) for c in range(len(federation.classes))],
                "join_timeout": START_TIMEOUT,
            },
            dataclasses.asdict(execution.method),
        )
        stack.enter_context(_exit_on_sigterm())
        stack.enter_context(started(deployment, workdir))
        folder = deployment.run_folder(name)
        stack.enter_context(execution.in_folder())
        control.start(deployment, folder)
        watch(deployment, folder, _recorded(execution.folder, progress))
        return _collect(execution, deployment, folder)


def _recorded(folder: RunFolder, progress: Progress | None) -> Progress:
    """Return a callback that also writes the records of rounds to a folder, as they come."""

    def record(found: dict[str, Any]) -> None:
        folder.append(found)
        if progress:
            progress(found)

    return record


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Raise SystemExit on SIGTERM, so that the server and the sites are ended, too."""

    def exit_(*_: object) -> NoReturn:
        raise SystemExit(128 + signal.SIGTERM)

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can handle signals
        return
    before = signal.signal(signal.SIGTERM, exit_)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def deploy(workdir: Path, names: Sequence[str], graphs: Sequence[Graph]) -> Deployment:
    """Create a server folder for sites on this machine, and a file with each site's graph."""
    server = workdir / "server"
    deployment = Deployment.create(server, names, "127.0.0.1", free_port(), free_port())
    for name, graph in zip(names, graphs, strict=True):
        write_graph(graph_file(workdir, name), graph)
    return deployment


def graph_file(workdir: Path, name: str) -> Path:
    return workdir / f"{name}.npz"


def write_graph(file: Path, graph: Graph) -> None:
    """Write a graph with its split and its node ids in the format of a site's own files."""
    assert graph.masks is not None
    more: dict[str, Any] = {} if graph.node_ids is None else {"node_ids": graph.node_ids}
    edges, weights, types = given_edges(graph)
    more |= {} if weights is None else {"edge_weight": weights}
    more |= {} if types is None else {"edge_type": np.array(graph.relations)[types]}
    more |= {} if graph.arcs is None else {"directed": True}
    x = sp.csr_array(graph.features).toarray() if sp.issparse(graph.features) else graph.features
    np.savez(
        file,
        x=x,
        edge_index=edges,
        y=graph.labels,
        train_mask=graph.masks.train,
        val_mask=graph.masks.val,
        test_mask=graph.masks.test,
        **more,
    )


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def started(deployment: Deployment, workdir: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Start the server and all sites as processes; end them on exit."""
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        processes["server"] = start_server(deployment, workdir)
        wait_for_server(deployment, processes["server"], workdir)
        for site in deployment.sites:
            processes[site] = start_site(deployment, workdir, site)
        yield processes
    finally:
        for process in reversed(processes.values()):
            end(process)


def start_server(deployment: Deployment, workdir: Path) -> subprocess.Popen[bytes]:
    return spawn(workdir / "server.log", ["server", "start", str(deployment.path)])


def start_site(deployment: Deployment, workdir: Path, site: str) -> subprocess.Popen[bytes]:
    bundle = deployment.path / "bundles" / site
    return spawn(
        workdir / f"{site}.log",
        ["site", "join", str(bundle), "--graph", str(graph_file(workdir, site))],
    )


def spawn(log: Path, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a `polyphily` command as a process; append its output to a file."""
    with log.open("ab") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", "polyphily", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
            start_new_session=True,  # Ctrl-C in the terminal does not reach it
        )


def end(process: subprocess.Popen[bytes]) -> None:
    """Terminate a process; kill it if it has not ended after ten seconds."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for_server(
    deployment: Deployment, process: subprocess.Popen[bytes], workdir: Path
) -> None:
    """Wait until the server accepts connections.

    Raises:
        TrainingError: if it does not start, with the end of its log.
    """
    host, _, port = deployment.control.partition(":")
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
            return
        except OSError:
            time.sleep(POLL)
    raise TrainingError(f"the server did not start: {_tail(workdir / 'server.log')}")


def _tail(log: Path) -> str:
    text = log.read_text(encoding="utf-8", errors="replace").strip() if log.exists() else ""
    return text[-1000:] or "its log is empty"


def watch(deployment: Deployment, folder: RunFolder, progress: Progress | None = None) -> None:
    """Wait for the end of a run; call `progress` with the record of every round.

    Raises:
        TrainingError: if the run did not complete.
    """
    seen = 0
    over = False
    while not over:
        time.sleep(LOOK)
        state = control.state(deployment, folder)
        over = state.over
        records = folder.records()
        for record in records[seen:]:
            if progress:
                progress(record)
        seen = len(records)
    if not state.well or folder.read_summary() is None:
        raise TrainingError(failure(folder) or f"the run ended as {state.words}")


def failure(folder: RunFolder) -> str | None:
    """Return the reason why a run failed; None if it did not."""
    last = [e for e in events(folder) if e["event"] in ("failed", "done", "started")][-1:]
    return str(last[0]["reason"]) if last and last[0]["event"] == "failed" else None


def events(folder: RunFolder) -> list[dict[str, Any]]:
    """Return the events of a run so far."""
    return folder.records(EVENTS)


def _collect(execution: Execution, deployment: Deployment, source: RunFolder) -> dict[str, Any]:
    """Copy the outcome and the sites' models into the execution's run folder."""
    assert execution.folder is not None
    target = execution.folder
    for name in (METRICS, EVENTS):
        shutil.copy(source.path / name, target.path / name)
    _restore(execution, deployment, source)
    execution.write_models(decided=True)
    summary = source.read_summary()
    assert summary is not None
    summary |= execution.data_facts()
    summary.pop("command", None)  # of a server that is gone
    found = execution.assessments[0]
    add_judgement(summary, execution.baselines()[0], found.summary(), execution.remarks())
    target.write_curves(found.curves())
    target.write_summary(summary)
    return summary


def _restore(execution: Execution, deployment: Deployment, source: RunFolder) -> None:
    """Set the execution to the final state of server and sites, and write its checkpoint."""
    simulation = execution.simulation
    checkpoint = ServerCheckpoint.load(source)
    assert checkpoint is not None
    memories = []
    for k, site in enumerate(deployment.sites):
        files = SiteState(deployment.path / "bundles" / site, source.path.name)
        initial = {n: t[k : k + 1] for n, t in simulation.memory.items()}
        memories.append(initial | (files.load(checkpoint.accepted[site]) or {}))
    memory = {n: torch.cat([one[n] for one in memories]) for n in simulation.memory}
    simulation.set_state(memory, [checkpoint.state], checkpoint.round)
    execution.tracker.restore(checkpoint.tracker, simulation.device)
    if not execution.tracker.one_model:  # the best models are at the sites
        best = []
        for site in deployment.sites:
            files = SiteState(deployment.path / "bundles" / site, source.path.name)
            best.append(SavedModel.load(files.model(BEST)).tensors)
        execution.tracker.models = {n: torch.stack([own[n] for own in best]) for n in best[0]}
    execution.reports = source.records()
    execution.checkpoint()
