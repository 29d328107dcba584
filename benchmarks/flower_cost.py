"""Measure what a round over Flower costs in addition to training, and the memory of a site.

    python benchmarks/flower_cost.py --sites 3,10 --rounds 10
    python benchmarks/flower_cost.py --only masked

Three deployments are measured for each number of sites:

- plain: Polyphily's server and sites, training fedavg on small synthetic graphs.
- masked: the same with secure aggregation.
- bare: a Flower app that sends a number and gets it back, on Flower's own SuperLink and nodes.

All use TLS and keys, and run on this machine. The cost of a round is its time minus the time of the
slowest site's training. Memory is the resident size of all processes of a site; parts of it are
shared between processes.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from polyphily.flower import control, keys, loopback
from polyphily.flower.deployment import quiet_flower
from polyphily.graphs.loading import load

SERVER = """
import time
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp
app = ServerApp()

@app.main()
def main(grid, context):
    sites, rounds = context.run_config["sites"], context.run_config["rounds"]
    while len(list(grid.get_node_ids())) < sites:
        time.sleep(0.5)
    for number in range(rounds):
        began = time.perf_counter()
        waiting = set(grid.push_messages([
            Message(RecordDict({"c": ConfigRecord({"n": number})}), node, "train", ttl=120)
            for node in grid.get_node_ids()
        ]))
        while waiting:
            for reply in grid.pull_messages(waiting):
                waiting.discard(reply.metadata.reply_to_message_id)
            time.sleep(0.2)
        with open(context.run_config["out"], "a") as file:
            file.write(f"{time.perf_counter() - began}\\n")
"""
CLIENT = """
from flwr.app import Message
from flwr.clientapp import ClientApp
app = ClientApp()

@app.train()
def train(message, context):
    return Message(message.content, reply_to=message)
"""
PROJECT = """
[project]
name = "bare"
version = "1.0.0"
dependencies = []
[tool.flwr.app]
publisher = "polyphily"
[tool.flwr.app.components]
serverapp = "bare.server:app"
clientapp = "bare.client:app"
[tool.flwr.app.config]
sites = {sites}
rounds = {rounds}
out = "{out}"
"""


def resident_mb(process: subprocess.Popen[bytes]) -> float:
    """Return the resident size of a process and all its descendants, in MB."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = int(fields[1])
            except OSError:
                continue
    family, found = {process.pid}, {process.pid}
    while found:
        found = {child for child, parent in parents.items() if parent in family} - family
        family |= found
    pages = 0
    for pid in family:
        try:
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except OSError:
            continue
    return pages * os.sysconf("SC_PAGESIZE") / 1e6


def ours(sites: int, rounds: int, masked: bool = False) -> tuple[list[float], float]:
    """Return the seconds of each round without the sites' training, and MB per site."""
    data = load("csbm:nodes=200,features=32", clients=sites, seed=0)
    names = [graph.name for graph in data.clients]
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        own = loopback.deploy(place, names, data.clients)
        classes = [str(c) for c in range(len(data.classes))]
        chosen = {"rounds": rounds, "hidden": 16, "classes": classes, "secure_aggregation": masked}
        run = own.new_run("fedavg", chosen, {})
        folder = own.run_folder(run)
        with loopback.started(own, place) as processes:
            control.start(own, folder)
            loopback.watch(own, folder)
            memory = statistics.mean(resident_mb(processes[site]) for site in names)
        work = [
            max(e["seconds"] for e in loopback.events(folder) if e.get("round") == r + 1
                and e["event"] == "answer")
            for r in range(rounds)
        ]  # fmt: skip
        seconds = [record["seconds"] for record in folder.records()]
    return [whole - own for whole, own in zip(seconds, work, strict=True)], memory


def bare(sites: int, rounds: int) -> tuple[list[float], float]:
    """Return the same for a Flower app that does nothing."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        port, out = loopback.free_port(), place / "seconds"
        authority_key, server_key = keys.new_key(), keys.new_key()
        authority = keys.new_authority(authority_key)
        certificate = keys.new_certificate(server_key, ["127.0.0.1"], authority, authority_key)
        (place / "ca.crt").write_bytes(keys.certificate_pem(authority))
        (place / "server.crt").write_bytes(keys.certificate_pem(certificate))
        keys.write_private(place / "server.key", keys.private_pem(server_key))
        home = place / "home"
        home.mkdir()
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{port}"\n'
            f'root-certificates = "{place / "ca.crt"}"\n'
        )
        os.environ["FLWR_HOME"] = str(home)
        app = place / "app"
        (app / "bare").mkdir(parents=True)
        (app / "bare" / "__init__.py").touch()
        (app / "bare" / "server.py").write_text(SERVER)
        (app / "bare" / "client.py").write_text(CLIENT)
        (app / "pyproject.toml").write_text(PROJECT.format(sites=sites, rounds=rounds, out=out))
        processes = [
            spawn(
                "flower-superlink", "--ssl-ca-certfile", place / "ca.crt",
                "--ssl-certfile", place / "server.crt", "--ssl-keyfile", place / "server.key",
                "--enable-supernode-auth", "--disable-runtime-dependency-installation",
                "--host", "127.0.0.1", "--port", port, "--database", place / "state.db",
            )
        ]  # fmt: skip
        try:
            time.sleep(10)
            for k in range(sites):
                key = keys.new_key()
                keys.write_private(place / f"{k}.key", keys.private_openssh(key))
                (place / f"{k}.pub").write_bytes(keys.public_openssh(key))
                run("flwr", "supernode", "register", place / f"{k}.pub", "here")
                processes.append(
                    spawn(
                        "flower-supernode", "--root-certificates", place / "ca.crt",
                        "--superlink", f"127.0.0.1:{port}", "--port", loopback.free_port(),
                        "--auth-supernode-private-key", place / f"{k}.key",
                    )
                )  # fmt: skip
            run("flwr", "run", app, "here")
            seconds: list[str] = []
            memory: list[float] = []
            while len(seconds) < rounds:
                time.sleep(0.5)
                seconds = out.read_text().splitlines() if out.exists() else []
                memory += [resident_mb(node) for node in processes[1:]] if seconds else []
            return [float(value) for value in seconds], max(memory)
        finally:
            for process in processes[::-1]:
                process.send_signal(signal.SIGINT)
            for process in processes:
                process.wait()


def spawn(*command: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def run(*command: object) -> None:
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)


MEASURES = {"plain": ours, "masked": partial(ours, masked=True), "bare": bare}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sites", default="3,10")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", choices=list(MEASURES))
    chosen = parser.parse_args()
    quiet_flower()
    print(
        f"{'sites':>5} {'what':<10} {'s/round median':>14} {'least':>6} {'most':>6} {'MB/site':>8}"
    )
    for sites in map(int, chosen.sites.split(",")):
        for what, measure in MEASURES.items():
            if chosen.only not in (None, what):
                continue
            seconds, memory = measure(sites, chosen.rounds)
            print(
                f"{sites:>5} {what:<10} {statistics.median(seconds):>14.2f} {min(seconds):>6.2f} "
                f"{max(seconds):>6.2f} {memory:>8.0f}"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
