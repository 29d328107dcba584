"""A server and sites as real processes on this machine, over TLS and with keys.

The quick tests run with all others; those marked `long` with `make test-deploy`.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("flwr")

import httpx

from flower.federations import Wires, coordinate, federation, plan_for, settings_for, sites_of
from polyphily.core.method import create
from polyphily.flower import control, loopback
from polyphily.flower.deployment import Deployment
from polyphily.flower.site_files import SiteState
from polyphily.flower.wire import ROUND, Parcel
from polyphily.graphs.graph import Graph
from polyphily.graphs.loading import Federation, load
from polyphily.runs.models import LAST, SavedModel
from polyphily.runs.run import Execution

pytestmark = [pytest.mark.deploy, pytest.mark.xdist_group("deploy")]
BAD = Path(__file__).with_name("bad_site.py")
STILL = {"dropout": 0.0, "input_dropout": 0.0}


def polyphily(*arguments: object, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Runs a command as a user does."""
    done = subprocess.run(
        [sys.executable, "-m", "polyphily", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


class Town:
    """A deployment whose processes a test can start, hurt and end."""

    def __init__(self, place: Path, data: Federation) -> None:
        self.place, self.data = place, data
        self.names = [graph.name for graph in data.clients]
        self.own = loopback.deploy(place, self.names, data.clients)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        if name == "server":
            self.processes[name] = loopback.start_server(self.own, self.place)
            loopback.wait_for_server(self.own, self.processes[name], self.place)
        else:
            self.processes[name] = loopback.start_site(self.own, self.place, name)

    def start_bad(self, name: str, how: str, seconds: float = 0.0) -> None:
        bundle, graph = self.own.path / "bundles" / name, loopback.graph_file(self.place, name)
        command = [sys.executable, BAD, bundle, graph, how, seconds]
        with (self.place / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                list(map(str, command)), stdout=log, stderr=log, start_new_session=True
            )

    def end(self, name: str) -> None:
        loopback.end(self.processes.pop(name))

    def kill(self, name: str) -> None:
        """As a power cut does."""
        process = self.processes.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def launch(self, method: str, **settings: object) -> str:
        """Starts a run and returns at once; its name."""
        chosen = settings_for(method, **STILL, **_knobs(settings))
        given = {k: v for k, v in vars(chosen).items() if v is not None} | settings
        name = self.own.new_run(method, {"classes": ["0", "1"], **given}, {})
        control.start(self.own, self.own.run_folder(name))
        return name

    def until(self, name: str, event: str, number: int, site: str = "") -> None:
        """Waits for something to happen in a run."""
        folder = self.own.run_folder(name)
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            for entry in loopback.events(folder):
                if (entry["event"], entry.get("round")) == (event, number) and (
                    not site or entry["site"] == site
                ):
                    return
            time.sleep(0.1)
        raise AssertionError(f"no {event} {number}: {self.log()}")

    def finish(self, name: str) -> dict:
        """Waits for a run to complete; its summary."""
        folder = self.own.run_folder(name)
        loopback.watch(self.own, folder)
        return folder.read_summary()  # type: ignore[return-value]

    def went_on(self, run: str, number: int) -> float:
        """Seconds from the beginning of a round to that of the next; printed for the docs."""
        times = {
            entry["round"]: entry["time"]
            for entry in loopback.events(self.own.run_folder(run))
            if entry["event"] == "round"
        }
        seconds: float = times[number + 1] - times[number]
        print(f"round {number} went on after {seconds:.1f} s")
        return seconds

    def model(self, site: str, run: str) -> dict[str, torch.Tensor]:
        file = SiteState(self.own.path / "bundles" / site, run).model(LAST)
        return SavedModel.load(file).params

    def log(self) -> str:
        return "\n".join(f"{p.name}: {p.read_text()[-1500:]}" for p in self.place.glob("*.log"))


def _knobs(settings: dict) -> dict:
    policy = ("timeout", "min_sites", "repeats", "join_timeout")
    return {k: v for k, v in settings.items() if k not in policy}


@contextmanager
def town(place: Path, data: Federation, sites: Sequence[str] | None = None) -> Iterator[Town]:
    own = Town(place, data)
    try:
        own.start("server")
        for site in own.names if sites is None else sites:
            own.start(site)
        yield own
    finally:
        for name in list(own.processes)[::-1]:
            own.end(name)


def in_this_process(
    data: Federation,
    place: Path,
    method: str,
    rounds: int,
    lost: set[tuple[str, int]] = frozenset(),
) -> Callable[[str], dict[str, torch.Tensor]]:
    """The same run without Flower, with some answers lost; each site's last model."""

    def twist(name: str, asked: Parcel, reply: Parcel) -> Parcel | None:
        gone = asked.facts["kind"] == ROUND and (name, asked.facts["round"]) in lost
        return None if gone else reply

    plan = plan_for(data, method, rounds=rounds, **STILL)
    coordinate(plan, Wires(sites_of(data, place), twist), place / "run").go()
    return lambda site: SavedModel.load(SiteState(place / site, "a-run").model(LAST)).params


def assert_same_models(own: Town, run: str, expected: Callable[[str], dict]) -> None:
    for site in own.names:
        ours, theirs = own.model(site, run), expected(site)
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            torch.testing.assert_close(value, theirs[name], rtol=0, atol=1e-6)


def widest(own: Town, run: str, expected: dict[str, dict[str, torch.Tensor]]) -> float:
    """The largest difference of any weight at any site from those of a simulation."""
    return max(
        float((value - expected["global" if "global" in expected else site][n]).abs().max())
        for site in own.names
        for n, value in own.model(site, run).items()
    )


def write_folder(folder: Path, graph: Graph, columns: Sequence[str] = ()) -> None:
    """A graph as the tables that a bank would keep."""
    folder.mkdir(parents=True)
    names = list(columns) or [f"f{i}" for i in range(graph.num_features)]
    table = pd.DataFrame(graph.features, columns=names)
    table.insert(0, "id", [f"n{i}" for i in range(graph.num_nodes)])
    table.insert(1, "label", np.array(["fair", "foul"])[graph.labels])
    table.to_csv(folder / "nodes.csv", index=False)
    once = graph.edges[:, graph.edges[0] < graph.edges[1]]
    ends = pd.DataFrame({"source": once[0], "target": once[1]})
    ends.map(lambda i: f"n{i}").to_csv(folder / "edges.csv", index=False)


# Quick ---------------------------------------------------------------------------------------


def test_the_path_of_a_practitioner(tmp_path: Path) -> None:
    """From an empty folder to predictions, as in docs/deploy.md; then strangers knock."""
    names = ["north", "south", "east"]
    home, port, inner = tmp_path / "server", loopback.free_port(), loopback.free_port()
    polyphily(
        "server", "init", home, "--sites", ",".join(names), "--host", "127.0.0.1",
        "--port", port, "--control-port", inner,
    )  # fmt: skip
    for name, graph in zip(names, federation().clients, strict=True):
        write_folder(tmp_path / name / "graph", graph)
        shutil.move(home / "bundles" / name, tmp_path / name / "bundle")
    seen = polyphily("site", "check", "--graph", tmp_path / "north/graph", "--method", "fedspa")
    assert "edge homophily" in seen.stdout
    assert "leaves the site" in seen.stdout
    processes = [loopback.spawn(tmp_path / "server.log", ["server", "start", str(home)])]
    try:
        own = Deployment.open(home)
        loopback.wait_for_server(own, processes[0], tmp_path)
        for name in names:
            place = tmp_path / name
            command = ["site", "join", str(place / "bundle"), "--graph", str(place / "graph")]
            processes.append(loopback.spawn(tmp_path / f"{name}.log", command))
        done = polyphily("server", "run", home, "fedspa", "--rounds", 4, "--lr", 0.05)
        assert re.search(r"round +4/4 +loss", done.stderr)
        assert "north joined" in done.stderr
        assert "fedspa on sites, 3 clients" in done.stdout
        (page,) = (home / "runs").glob("*/report.html")
        assert "fedspa on sites" in page.read_text()
        state = json.loads(polyphily("server", "status", home, "--json").stdout)
        assert state["sites"] == dict.fromkeys(names, "online")
        assert [run["state"] for run in state["runs"]] == ["completed"]
        refused = polyphily("server", "resume", home, status=2)
        assert "is complete" in refused.stderr
        _predictions(tmp_path / "north", state["runs"][0]["name"])
        _no_private_key_leaves(tmp_path, home, names)
        twice = polyphily(
            "site", "join", tmp_path / "east/bundle", "--graph", tmp_path / "east/graph", status=2
        )
        assert "site 'east' takes part already" in twice.stderr
        _strangers_are_turned_away(tmp_path, own, port)
    finally:
        for process in processes[::-1]:
            loopback.end(process)


def _predictions(place: Path, run: str) -> None:
    model = place / "bundle" / "models" / run / "best.safetensors"
    nodes = pd.read_csv(place / "graph" / "nodes.csv")
    added = nodes.iloc[[0]].assign(id="new", label=None)
    pd.concat([nodes, added]).to_csv(place / "graph" / "nodes.csv", index=False)
    out = place / "predictions.parquet"
    polyphily("predict", "--model", model, "--graph", place / "graph", "--out", out)
    table = pd.read_parquet(out)
    assert table["id"].tolist() == [*nodes["id"], "new"]
    assert (table["class"].iloc[:-1].to_numpy() == nodes["label"].to_numpy()).mean() > 0.6


def _no_private_key_leaves(place: Path, home: Path, names: Sequence[str]) -> None:
    """Each key is in its own bundle and nowhere else, and only its owner can read it."""
    for name in names:
        own = place / name / "bundle"
        assert (own / "site.key").stat().st_mode & 0o777 == 0o600
        secret = (own / "site.key").read_bytes().splitlines()[1:-1]
        held = [p for p in place.rglob("*") if p.is_file() and secret[2] in p.read_bytes()]
        assert held == [own / "site.key"]
        assert not list(own.rglob("server.key"))
        assert not list(own.rglob("ca.key"))
    for name in ("ca.key", "server.key"):
        assert (home / name).stat().st_mode & 0o777 == 0o600


def _strangers_are_turned_away(place: Path, own: Deployment, port: int) -> None:
    graph = place / "south" / "graph"
    other = Deployment.create(place / "other", ["north"], "127.0.0.1", port, 1)
    bundle = other.path / "bundles" / "north"
    wrong = polyphily("site", "join", bundle, "--graph", graph, status=2)
    assert "is not the server of this bundle" in wrong.stderr
    shutil.copy(own.path / "ca.crt", bundle / "ca.crt")
    unknown = polyphily("site", "join", bundle, "--graph", graph, status=2)
    assert "refused the key of 'north'" in unknown.stderr
    with pytest.raises(httpx.TransportError):
        httpx.post(f"http://127.0.0.1:{port}/v1/fleet/pull-messages")
    trust = ssl.create_default_context(cafile=str(own.path / "ca.crt"))
    with httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=trust) as client:
        for path in ("control/start-run", "control/list-runs", "runtime/acquire-task"):
            assert client.post(f"/v1/{path}", content=b"").status_code == 404
        for path in ("docs", "openapi.json", "health"):
            assert client.get(f"/{path}").status_code == 404
        assert client.post("/v1/fleet/pull-messages", content=b"").status_code == 401
    flood = http.client.HTTPSConnection("127.0.0.1", port, timeout=10, context=trust)
    flood.putrequest("POST", "/v1/fleet/push-object")
    flood.putheader("Content-Length", str(1 << 30))
    flood.endheaders()
    assert flood.getresponse().status == 413
    flood.close()
    inner = int(own.control.rpartition(":")[2])
    outside = [a for a in _addresses() if not a.startswith("127.")]
    for address in outside:  # the other door opens on this machine's own side only
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((address, inner), timeout=5).close()


def _addresses() -> list[str]:
    """This machine's own addresses."""
    return [
        str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
    ]


# Long ----------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_run_on_flower_from_one_command(tmp_path: Path) -> None:
    """`--engine flower` leaves the folder, and the weights, of the engine in one process."""
    arguments = ["run", "fedper", "--dataset", "csbm:nodes=60-120,features=8", "--clients", 2]
    arguments += ["--rounds", 3, "--hidden", 8]
    for engine in ("flower", "stacked"):
        polyphily(*arguments, "--engine", engine, "--out", tmp_path / engine)
    ours, theirs = tmp_path / "flower", tmp_path / "stacked"
    files = sorted(f"models/{p.name}" for p in (theirs / "models").iterdir())
    assert sorted(f"models/{p.name}" for p in (ours / "models").iterdir()) == files
    for name in [*files, "checkpoint/state.safetensors"]:
        left, right = (load_file(f / name) for f in (ours, theirs))
        for tensors in (left, right):  # best models of clients are at the sites
            for key in [key for key in tensors if key.startswith("tracker/models/")]:
                tensors.pop(key)
        assert left.keys() == right.keys()
        for key, value in left.items():
            torch.testing.assert_close(value, right[key], rtol=0, atol=1e-6)
    first, second = (json.loads((f / "summary.json").read_text()) for f in (ours, theirs))
    assert first["best_val"]["test"]["accuracy"] == second["best_val"]["test"]["accuracy"]
    assert first["dataset"] == second["dataset"]


@pytest.mark.long
def test_a_run_that_is_told_to_end_leaves_no_process_behind(tmp_path: Path) -> None:
    arguments = ["run", "fedavg", "--dataset", "csbm:nodes=60,features=8", "--clients", "2"]
    arguments += ["--rounds", "500", "--engine", "flower", "--out", str(tmp_path / "run")]
    place = tmp_path / "place"
    place.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "polyphily", *arguments],
        env={**os.environ, "TMPDIR": str(place)},
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 90
    while len(_processes_at(place)) < 3 and time.monotonic() < deadline:
        time.sleep(0.5)
    assert len(_processes_at(place)) >= 3, "the server and two sites"
    process.terminate()
    assert process.wait(timeout=60) == 128 + signal.SIGTERM
    deadline = time.monotonic() + 20  # Flower's own processes end with the server
    while _processes_at(place) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert _processes_at(place) == []
    assert list(place.iterdir()) == []


def _processes_at(place: Path) -> list[str]:
    """The commands that work with files of a folder."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(place) in words:
            found.append(words)
    return found


@pytest.mark.long
def test_every_named_method_gives_the_simulations_weights(tmp_path: Path) -> None:
    data = federation()
    gaps = {}
    with town(tmp_path, data) as own:
        for method in (
            "fedavg", "fedprox", "fedper", "fedspa", "fedgsp", "fedath", "s2fgl", "fedhero",
        ):  # fmt: skip
            run = own.launch(method)
            own.finish(run)
            settings = settings_for(method, **STILL)
            expected = Execution(create(method), [data], settings, None).go(None).models
            gaps[method] = widest(own, run, expected)
    print(gaps)
    assert max(gaps.values()) <= 1e-6


@pytest.mark.long
def test_a_killed_site_comes_back_as_it_was(tmp_path: Path) -> None:
    data = federation()
    with town(tmp_path, data, ["client-0", "client-1"]) as own:
        own.start_bad("client-2", "slow", 60)
        run = own.launch("fedper", rounds=5, timeout=10, min_sites=2)
        own.until(run, "round", 2)
        time.sleep(2)
        own.kill("client-2")
        own.start("client-2")
        summary = own.finish(run)
        late = {(t["site"], t["round"]) for t in summary["troubles"]}
        assert ("client-2", 2) in late
        assert ("client-2", 5) not in late
        own.went_on(run, 2)
        assert_same_models(own, run, in_this_process(data, tmp_path / "b", "fedper", 5, late))


@pytest.mark.long
def test_a_slow_site_is_waited_for_only_so_long(tmp_path: Path) -> None:
    data = federation()
    with town(tmp_path, data, ["client-0", "client-1"]) as own:
        own.start_bad("client-2", "slow", 8)
        run = own.launch("scaffold", rounds=6, timeout=5, min_sites=2)
        summary = own.finish(run)
        late = {(t["site"], t["round"]) for t in summary["troubles"]}
        assert ("client-2", 2) in late
        assert {site for site, _ in late} == {"client-2"}
        assert ("client-2", 6) not in late
        records = own.own.run_folder(run).records()
        assert 5 <= records[1]["seconds"] < 7
        own.went_on(run, 2)
        assert_same_models(own, run, in_this_process(data, tmp_path / "b", "scaffold", 6, late))


@pytest.mark.long
def test_a_bad_site_is_refused_and_named(tmp_path: Path) -> None:
    data = federation()
    words = {
        "raise": "ZeroDivisionError: something at the site",
        "nan": "not finite",
        "shape": "has the shape",
        "round": "answered round 7, not 2",
        "size": "bytes where at most",
        "overflow": "a number of 401 digits",
        "scale": "max_update",
        "weight": "count below zero",
    }
    expected = in_this_process(data, tmp_path / "b", "fedavg", 3, {("client-1", 2)})
    with town(tmp_path / "town", data, ["client-0", "client-2"]) as own:
        for how, reason in words.items():
            own.start_bad("client-1", how)
            run = own.launch("fedavg", timeout=30, min_sites=2)
            (trouble,) = own.finish(run)["troubles"]
            assert (trouble["site"], trouble["round"]) == ("client-1", 2)
            assert reason in trouble["reason"]
            own.went_on(run, 2)
            assert_same_models(own, run, expected)
            own.end("client-1")


@pytest.mark.long
def test_too_few_answers_end_a_run_with_its_last_good_model(tmp_path: Path) -> None:
    data = federation()
    with town(tmp_path / "town", data, ["client-0"]) as own:
        own.start_bad("client-1", "nan")
        own.start_bad("client-2", "raise")
        failed = polyphily(
            "server", "run", own.own.path, "fedavg", "--rounds", 3, "--min-sites", 2,
            "--repeats", 1, "--hidden", 8, "--backbone", "gcn", "--dropout", 0,
            "--input-dropout", 0, "--epochs", 2, status=1,
        )  # fmt: skip
        assert (
            "round 2: 1 of 3 sites answered well, 2 are needed, after 2 attempts" in failed.stderr
        )
        assert "client-1: model/" in failed.stderr
        folder = own.own.run_folder()
        assert folder.read_summary() is None
        assert len(loopback.events(folder)) > 0
        in_this_process(data, tmp_path / "b", "fedavg", 1)
        ours, theirs = (
            load_file(f / "models" / "global.safetensors")
            for f in (folder.path, tmp_path / "b/run")
        )
        for name, value in ours.items():
            torch.testing.assert_close(value, theirs[name], rtol=0, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "masked"), [("fedavg", False), ("fedspa", False), ("fedavg", True)]
)
def test_a_killed_server_resumes_to_the_same_models(
    method: str, masked: bool, tmp_path: Path
) -> None:
    data = federation()
    with town(tmp_path / "town", data) as own:
        run = own.launch(method, rounds=6, secure_aggregation=masked)
        own.until(run, "answer", 3)
        own.kill("server")
        own.start("server")
        folder = own.own.run_folder(run)
        assert folder.read_summary() is None
        state = json.loads(polyphily("server", "status", own.own.path, "--json").stdout)
        assert state["runs"][0]["state"] in ("cut short: the server ended", "failed")
        done = polyphily("server", "resume", own.own.path)
        assert "going on after round" in done.stderr
        _seconds_of_resuming(loopback.events(folder))
        assert len(folder.records()) == 6
        assert_same_models(own, run, in_this_process(data, tmp_path / "b", method, 6))


def _seconds_of_resuming(events: list[dict]) -> None:
    """Printed for the docs."""
    (again,) = [k for k, entry in enumerate(events) if entry["event"] == "resumed"]
    (began,) = [e["time"] for e in events[:again] if e["event"] == "started"][1:]
    first = next(e["time"] for e in events[again:] if e["event"] == "round")
    print(f"resumed: {first - began:.1f} s until the next round")


MASKABLE = ("fedavg", "fedprox", "fedper", "fedath", "fedhero")


@pytest.mark.long
def test_masked_uploads_give_the_simulations_weights(tmp_path: Path) -> None:
    """Secure aggregation between processes against plain sums in this one."""
    data = federation()
    gaps = {}
    with town(tmp_path, data) as own:
        for method in MASKABLE:
            run = own.launch(method, secure_aggregation=True)
            summary = own.finish(run)
            assert summary["troubles"] == []
            assert summary["secure_aggregation"]["threshold"] == 3
            expected = Execution(create(method), [data], settings_for(method, **STILL), None)
            gaps[method] = widest(own, run, expected.go(None).models)
    print(gaps)
    assert max(gaps.values()) <= 1e-6


@pytest.mark.long
def test_a_site_killed_after_sharing_is_survived(tmp_path: Path) -> None:
    """Others' uploads are masked for it already: their shares of its key take the masks off."""
    data = federation(4)
    with town(tmp_path / "town", data, ["client-0", "client-1", "client-3"]) as own:
        own.start_bad("client-2", "die")
        run = own.launch("fedper", rounds=4, timeout=20, min_sites=3, secure_aggregation=True)
        own.until(run, "late", 2, "client-2")
        assert own.processes["client-2"].wait() == -signal.SIGKILL
        own.start("client-2")
        (trouble,) = own.finish(run)["troubles"]
        assert (trouble["site"], trouble["round"]) == ("client-2", 2)
        assert "the others' shares took its masks off the sum" in trouble["reason"]
        own.went_on(run, 2)
        lost = {("client-2", 2)}
        assert_same_models(own, run, in_this_process(data, tmp_path / "b", "fedper", 4, lost))


@pytest.mark.long
def test_a_masked_run_from_one_command(tmp_path: Path) -> None:
    """`--engine flower --secure-aggregation`, as in one process; a method that cannot says so."""
    arguments = ["--dataset", "csbm:nodes=60-120,features=8", "--clients", 3, "--rounds", 2]
    arguments += ["--hidden", 8, "--secure-aggregation"]
    for engine in ("flower", "stacked"):
        polyphily("run", "fedavg", *arguments, "--engine", engine, "--out", tmp_path / engine)
    ours, theirs = (tmp_path / engine for engine in ("flower", "stacked"))
    left, right = (load_file(f / "models" / "global.safetensors") for f in (ours, theirs))
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], rtol=0, atol=1e-6)
    first, second = (json.loads((f / "summary.json").read_text()) for f in (ours, theirs))
    assert first["secure_aggregation"] == second["secure_aggregation"]
    refused = polyphily("run", "fedspa", *arguments, "--engine", "flower", status=2)
    assert "fedspa cannot take --secure-aggregation" in refused.stderr


@pytest.mark.long
def test_a_stopped_run_resumes(tmp_path: Path) -> None:
    data = federation()
    with town(tmp_path / "town", data) as own:
        run = own.launch("fedavg", rounds=8)
        own.until(run, "answer", 2)
        assert "is going on" in polyphily("server", "run", own.own.path, "local", status=2).stderr
        polyphily("server", "stop", own.own.path)
        assert control.state(own.own, own.own.run_folder(run)).words == "stopped"
        polyphily("server", "resume", own.own.path)
        assert_same_models(own, run, in_this_process(data, tmp_path / "b", "fedavg", 8))


def _heed_interrupts() -> None:
    """Undoes what a shell does to commands in the background: they are deaf to Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.long
def test_who_watches_may_leave(tmp_path: Path) -> None:
    """Ctrl-C detaches: the run goes on without its watcher."""
    data = federation(2)
    with town(tmp_path / "town", data) as own:
        config = own.own.path / "config.toml"
        config.write_text(config.read_text() + "rounds = 12\nhidden = 8\nclasses = ['0', '1']\n")
        watcher = subprocess.Popen(
            [sys.executable, "-m", "polyphily", "server", "run", str(own.own.path), "fedavg"],
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=_heed_interrupts,
        )
        while not (own.own.path / "runs").exists() or not list((own.own.path / "runs").iterdir()):
            time.sleep(0.2)
        run = own.own.run_folder().path.name
        own.until(run, "answer", 1)
        os.kill(watcher.pid, signal.SIGINT)
        _, words = watcher.communicate(timeout=30)
        assert watcher.returncode == 130
        assert "detached; the run goes on" in words
        attached = polyphily("server", "attach", own.own.path)
        assert "fedavg on sites, 2 clients" in attached.stdout
        assert own.finish(run)["rounds"] == 12


@pytest.mark.long
def test_sites_that_do_not_fit_are_told_before_training(tmp_path: Path) -> None:
    data = federation(2)
    with town(tmp_path / "town", data, []) as own:
        for site, graph, columns in zip(
            own.names, data.clients, ("abcdefgh", "abcdefgz"), strict=True
        ):
            folder = tmp_path / site
            write_folder(folder, graph, columns)
            bundle = own.own.path / "bundles" / site
            command = ["site", "join", str(bundle), "--graph", str(folder)]
            own.processes[site] = loopback.spawn(own.place / f"{site}.log", command)
        failed = polyphily("server", "run", own.own.path, "fedavg", "--rounds", 2, status=1)
        assert "'h' only at 'client-0'; 'z' only at 'client-1'" in failed.stderr
        folder = own.own.run_folder()
        assert not [e for e in loopback.events(folder) if e["event"] == "round"]
        (left_out,) = [e for e in loopback.events(folder) if e["event"] == "left out"]
        log = (own.place / f"{left_out['site']}.log").read_text()
        assert "the server left this site out" in log
        assert "'z' only at 'client-1'" in log


@pytest.mark.long
@pytest.mark.data
def test_fedspa_on_a_real_partition(real_data: Path, tmp_path: Path) -> None:
    data = load("cora", clients=3, seed=0, root=real_data)
    with town(tmp_path / "town", data) as own:
        name = own.own.new_run(
            "fedspa",
            {"classes": [str(c) for c in range(7)], "rounds": 10, "hidden": 32},
            {},
        )
        control.start(own.own, own.own.run_folder(name))
        summary = own.finish(name)
        assert summary["best_val"]["test"]["accuracy"] > 0.6
