"""Measure a server under load: many sites, a model of about 1 MB, beside a bare Flower app.

    python benchmarks/flower_load.py --sites 200 --rounds 20

The sites are connections with keys of their own, over TLS, to the Fleet API. A few threads of one
process speak for all of them, one site after another. Sites train nothing: they send back what they
got. Two deployments are measured, one after the other:

- polyphily: `polyphily server start` and fedavg with a model of about 1 MB.
- bare: Flower's own SuperLink and a ServerApp that sends 1 MB to each site and takes it back.

Seconds are those of a round, from the first message to the last answer. Memory is the largest
resident size of the server's processes together; parts of it are shared between processes.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from flower_cost import PROJECT, resident_mb, run, spawn

from polyphily.core.metrics import SPLITS, score_axis
from polyphily.flower import control, flwr_internals, keys, loopback
from polyphily.flower.app import raw_parts, to_records
from polyphily.flower.deployment import Bundle, Deployment, quiet_flower
from polyphily.flower.plan import Plan, Schema
from polyphily.flower.wire import FINISH, HELLO, PREPARE, ROUND, Parcel
from polyphily.methods.fedavg import WEIGHT

SERVER = """
import time
import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.serverapp import ServerApp
app = ServerApp()

@app.main()
def main(grid, context):
    sites, rounds = context.run_config["sites"], context.run_config["rounds"]
    while len(list(grid.get_node_ids())) < sites:
        time.sleep(0.5)
    for number in range(rounds):
        began = time.perf_counter()
        model = np.random.default_rng(number).normal(size=250_000).astype(np.float32)
        content = RecordDict({"model": ArrayRecord({"all": Array(model)})})
        waiting = set(grid.push_messages([
            Message(content, node, "train", ttl=3600) for node in grid.get_node_ids()
        ]))
        while waiting:
            for reply in grid.pull_messages(waiting):
                waiting.discard(reply.metadata.reply_to_message_id)
                np.asarray(reply.content["model"]["all"].numpy()).sum()
            time.sleep(0.2)
        with open(context.run_config["out"], "a") as file:
            file.write(f"{time.perf_counter() - began}\\n")
"""
CLIENT = """
from flwr.clientapp import ClientApp
app = ClientApp()
"""
FEATURES, HIDDEN = 8, 496  # a GCN of 8·496 + 496·496 + 496·2 weights: 1.00 MB
THREADS = 4
Reply = Callable[[Any], Any]
"""Makes a reply to a Flower message."""


# Sites -----------------------------------------------------------------------------------------


class LightSite:
    """A site that sends back what it got, without a graph."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.schema = Schema((), FEATURES, ("0", "1"))

    def answer(self, asked: Parcel) -> Parcel:
        kind = str(asked.facts["kind"])
        facts: dict[str, Any] = {"kind": kind, "round": asked.facts.get("round", 0), "seconds": 0.0}
        if kind == HELLO:
            schema = self.schema
            return Parcel(
                facts
                | {"site": self.name, "features": [], "width": schema.width, "columns": []}
                | {"classes": list(schema.classes), "digest": schema.digest}
                | {"dense": True, "relations": []}
            )
        plan = Plan.from_json(asked.facts["plan"])
        facts["run"] = plan.run
        scores = [[0.5] * len(score_axis(plan.settings.metric)) for _ in SPLITS]
        if kind == PREPARE:
            facts["counts"] = [10.0] * len(SPLITS)
        if kind in (ROUND, FINISH):
            facts |= {"note": "", "received": scores, "trained": scores, "loss": 1.0}
        if kind != ROUND:
            return Parcel(facts)
        return Parcel(facts, {**asked.tensors, WEIGHT: torch.ones(1)})


def reply_as(site: LightSite) -> Reply:
    from flwr.app import Message

    def reply(message: Any) -> Any:
        asked = Parcel.unpack(*raw_parts(message.content))
        return Message(to_records(site.answer(asked)), reply_to=message)

    return reply


def send_back(message: Any) -> Any:
    from flwr.app import Message

    return Message(message.content, reply_to=message)


@contextmanager
def connected(
    address: str, certificate: bytes, sites: Sequence[tuple[keys.KeyPair, Reply]]
) -> Iterator[None]:
    """Connect all sites, and answer their messages in a few threads until the block ends."""
    ending = threading.Event()
    connections = []
    for number, (pair, reply) in enumerate(sites):
        connection = flwr_internals.FleetConnection(address, certificate, pair, f"site-{number}")
        connections.append((connection.__enter__(), reply))

    def speak(own: Sequence[tuple[flwr_internals.FleetConnection, Reply]]) -> None:
        while not ending.is_set():
            busy = False
            for connection, reply in own:
                if ending.is_set():
                    return
                with suppress(flwr_internals.MessageGone, flwr_internals.ReplyRejected):
                    if (received := connection.receive()) is not None:
                        busy = True
                        message, run_id = received
                        connection.send(reply(message), run_id, 0.0)
            if not busy:
                time.sleep(0.2)

    threads = [
        threading.Thread(target=speak, args=(connections[k::THREADS],)) for k in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ending.set()
        for thread in threads:
            thread.join()


# Deployments -----------------------------------------------------------------------------------


class Memory:
    """The largest resident size of a process and its descendants, looked at every second."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.most, self._ending = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._look, args=(process,), daemon=True)
        self._thread.start()

    def _look(self, process: subprocess.Popen[bytes]) -> None:
        while not self._ending.wait(1):
            self.most = max(self.most, resident_mb(process))

    def end(self) -> float:
        self._ending.set()
        self._thread.join()
        return self.most


def ours(sites: int, rounds: int) -> tuple[list[float], float]:
    """Return the seconds of each round and the MB of the server, for Polyphily's server."""
    names = [f"site-{k}" for k in range(sites)]
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        own = Deployment.create(
            place / "server", names, "127.0.0.1", loopback.free_port(), loopback.free_port()
        )
        process = loopback.start_server(own, place)
        try:
            loopback.wait_for_server(own, process, place)
            memory = Memory(process)
            bundles = [Bundle(own.path / "bundles" / site) for site in names]
            host, port = bundles[0].address
            people = [(bundle.pair(), reply_as(LightSite(bundle.name))) for bundle in bundles]
            certificate = bundles[0].certificate.read_bytes()
            chosen = {"rounds": rounds, "hidden": HIDDEN, "classes": ["0", "1"], "layers": 3}
            chosen |= {"backbone": "gcn", "timeout": 3600, "join_timeout": 3600}
            folder = own.run_folder(own.new_run("fedavg", chosen, {}))
            with connected(f"{host}:{port}", certificate, people):
                control.start(own, folder)
                loopback.watch(own, folder)
            summary = folder.read_summary()
            assert summary is not None
            assert summary["troubles"] == []
            print(f"  upload: {summary['bytes_up_per_round'] / sites / 1e6:.2f} MB a site")
            return [record["seconds"] for record in folder.records()], memory.end()
        finally:
            loopback.end(process)


def bare(sites: int, rounds: int) -> tuple[list[float], float]:
    """Return the same for Flower's SuperLink, and an app that sends 1 MB there and back."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        port, out = loopback.free_port(), place / "seconds"
        authority_key, server_key = keys.new_key(), keys.new_key()
        authority = keys.new_authority(authority_key)
        certificate = keys.new_certificate(server_key, ["127.0.0.1"], authority, authority_key)
        (place / "ca.crt").write_bytes(keys.certificate_pem(authority))
        (place / "server.crt").write_bytes(keys.certificate_pem(certificate))
        keys.write_private(place / "server.key", keys.private_pem(server_key))
        home, app = place / "home", place / "app"
        home.mkdir()
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{port}"\n'
            f'root-certificates = "{place / "ca.crt"}"\n'
        )
        os.environ["FLWR_HOME"] = str(home)
        (app / "bare").mkdir(parents=True)
        (app / "bare" / "__init__.py").touch()
        (app / "bare" / "server.py").write_text(SERVER)
        (app / "bare" / "client.py").write_text(CLIENT)
        (app / "pyproject.toml").write_text(PROJECT.format(sites=sites, rounds=rounds, out=out))
        process = spawn(
            "flower-superlink", "--ssl-ca-certfile", place / "ca.crt",
            "--ssl-certfile", place / "server.crt", "--ssl-keyfile", place / "server.key",
            "--enable-supernode-auth", "--disable-runtime-dependency-installation",
            "--host", "127.0.0.1", "--port", port, "--database", place / "state.db",
        )  # fmt: skip
        try:
            wait_for(port)
            memory = Memory(process)
            pairs = [(key, key.public_key()) for key in (keys.new_key() for _ in range(sites))]
            register(f"127.0.0.1:{port}", (place / "ca.crt").read_bytes(), pairs)
            people = [(pair, send_back) for pair in pairs]
            with connected(f"127.0.0.1:{port}", (place / "ca.crt").read_bytes(), people):
                run("flwr", "run", app, "here")
                seconds: list[str] = []
                while len(seconds) < rounds:
                    time.sleep(0.5)
                    seconds = out.read_text().splitlines() if out.exists() else []
            return [float(value) for value in seconds], memory.end()
        finally:
            loopback.end(process)


def wait_for(port: int) -> None:
    """Wait until something listens on a port of this machine, and a little more."""
    deadline = time.monotonic() + loopback.START_TIMEOUT
    while time.monotonic() < deadline:
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            time.sleep(2)
            return
        time.sleep(0.3)
    raise TimeoutError("the SuperLink did not start")


def register(address: str, certificate: bytes, pairs: Sequence[keys.KeyPair]) -> None:
    """Register the keys of all sites with a SuperLink."""
    from flwr.proto.control_pb2 import RegisterNodeRequest

    with flwr_internals.control_client(address, certificate, "") as client:
        for _, public in pairs:
            client.RegisterNode(RegisterNodeRequest(public_key=keys.public_pem(public)))


MEASURES = {"polyphily": ours, "bare": bare}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sites", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", choices=list(MEASURES))
    chosen = parser.parse_args()
    quiet_flower()
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    print(f"{'sites':>5} {'what':<10} {'s/round median':>14} {'least':>6} {'most':>6} {'MB':>6}")
    for what, measure in MEASURES.items():
        if chosen.only in (None, what):
            seconds, memory = measure(chosen.sites, chosen.rounds)
            print(
                f"{chosen.sites:>5} {what:<10} {statistics.median(seconds):>14.2f} "
                f"{min(seconds):>6.2f} {max(seconds):>6.2f} {memory:>6.0f}"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
