"""Keys, seats and ports of a server and sites that run as processes: `make test-deploy`."""

from __future__ import annotations

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
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from cryptography import x509

from flower.federations import federation
from polyphily.flower import admission, control, loopback
from polyphily.flower.deployment import Bundle, Deployment

pytestmark = [pytest.mark.deploy, pytest.mark.long, pytest.mark.xdist_group("deploy")]
NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
KNOCK = """
import httpx, sys
for path in ("control/start-run", "control/list-runs", "runtime/acquire-task"):
    reply = httpx.post(f"https://127.0.0.1:{sys.argv[1]}/v1/{path}", content=b"", verify=False)
    print(path, reply.status_code)
"""


def polyphily(*arguments: object, status: int = 0) -> str:
    """Run a command as a user does; return what it prints."""
    command = [sys.executable, "-m", "polyphily", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def wait_for(what: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.2)


class Place:
    """A server whose authority's key is elsewhere, and sites with keys of their own."""

    def __init__(self, path: Path, *names: str) -> None:
        self.path, self.names = path, names
        self.home, self.ca_key = path / "server", path / "safe" / "ca.key"
        self.ca_key.parent.mkdir(mode=0o700)
        port, inner = loopback.free_port(), loopback.free_port()
        self.address = f"127.0.0.1:{port}"
        polyphily(
            "server", "init", self.home, "--host", "127.0.0.1", "--port", port,
            "--control-port", inner, "--ca-key", self.ca_key,
        )  # fmt: skip
        self.own = Deployment.open(self.home)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        for name, graph in zip(names, federation(len(names)).clients, strict=True):
            loopback.write_graph(loopback.graph_file(path, name), graph)

    def start_server(self) -> None:
        self.processes["server"] = loopback.start_server(self.own, self.path)
        loopback.wait_for_server(self.own, self.processes["server"], self.path)

    def admit(self, name: str) -> None:
        """From an empty folder to a complete one, with the commands of both operators."""
        asked = polyphily(
            "site", "init", self.path / name, "--name", name, "--server", self.address
        )
        request = self.path / name / f"{name}.request.json"
        told = polyphily("server", "admit", self.home, request, "--ca-key", self.ca_key)
        (theirs,), (ours,) = (re.findall(r"^  (SHA256:\S+)$", t, re.M) for t in (asked, told))
        assert theirs == ours, "both see the same fingerprint"
        answer = self.home / "answers" / f"{name}.answer.json"
        assert "compare the fingerprint" in polyphily("site", "accept", self.path / name, answer)

    def join(self, name: str, folder: str = "") -> None:
        place = self.path / (folder or name)
        graph = loopback.graph_file(self.path, name)
        command = ["site", "join", str(place), "--graph", str(graph)]
        self.processes[folder or name] = loopback.spawn(self.log(folder or name), command)

    def log(self, name: str) -> Path:
        return self.path / f"{name}.log"

    def said(self, name: str, words: str) -> Callable[[], bool]:
        return lambda: words in self.log(name).read_text()

    def close(self) -> None:
        for process in list(self.processes.values())[::-1]:
            loopback.end(process)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    found = Place(tmp_path, "north", "south", "east")
    try:
        yield found
    finally:
        found.close()


def test_keys_made_at_home_a_copied_folder_and_a_revocation_in_a_run(place: Place) -> None:
    place.start_server()
    assert not (place.home / "ca.key").exists(), "the server does not need it"
    for name in place.names:  # while the server runs
        place.admit(name)
    for name in place.names:
        answer = admission.answer(place.own, name)
        polyphily("site", "accept", place.path / name, answer)
        place.join(name)
    for name in place.names:
        wait_for(place.said(name, "connected"))

    # A copy connects: the original is told and does not come back; the operator is told, too.
    shutil.copytree(place.path / "north", place.path / "copy")
    place.join("north", "copy")
    assert place.processes.pop("north").wait(60) == 2
    assert "another process has connected with the key of 'north'" in place.log("north").read_text()
    wait_for(place.said("server", "somebody else has its key"))

    # A site is revoked in the middle of a run, which goes on without it.
    name = place.own.new_run("fedavg", {"rounds": 12, "min_sites": 2, "classes": ["0", "1"]}, {})
    folder = place.own.run_folder(name)
    control.start(place.own, folder)
    wait_for(lambda: len(folder.records()) >= 2, 120)
    _no_token_in_the_process_list()
    _another_user_gets_nowhere(place)
    polyphily("server", "revoke", place.home, "north")
    assert place.processes.pop("copy").wait(60) == 2
    assert "was revoked" in place.log("copy").read_text()
    loopback.watch(place.own, folder)
    refused = [e for e in loopback.events(folder) if e["event"] == "refused"]
    assert {e["site"] for e in refused} == {"north"}
    assert "was revoked" in refused[0]["reason"]
    listed = json.loads(polyphily("server", "sites", place.home, "--json"))
    states = {row["name"]: row["status"] for row in listed}
    assert states["south"] == states["east"] == "online"
    assert "revoked" in states["north"]
    happened = [json.loads(e)["event"] for e in (place.home / "events.jsonl").open()]
    assert {"admitted", "connected", "replaced", "revoked", "refused"} <= set(happened)


def _no_token_in_the_process_list() -> None:
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert "polyphily.flower.executor" in listed
    own = [line for line in listed.splitlines() if "polyphily.flower.executor" in line]
    assert any(line.endswith("conduct") for line in own), "the process of the run"
    assert not [line for line in own if re.search(r"[0-9a-f]{32}", line)]


def _another_user_gets_nowhere(place: Place) -> None:
    if os.getuid() != 0 or not shutil.which("setpriv"):
        return
    inner = place.own.control.rpartition(":")[2]
    tried = subprocess.run(
        [*NOBODY, sys.executable, "-P", "-c", KNOCK, inner], capture_output=True, text=True
    )
    assert [line.split()[1] for line in tried.stdout.splitlines()] == ["401"] * 3, tried.stderr
    for file in (place.home / "server.key", place.own.secret_file, place.ca_key):
        read = subprocess.run([*NOBODY, "cat", str(file)], capture_output=True)
        assert read.returncode != 0
    for process in Path("/proc").glob("[0-9]*"):  # secrets are not in environments, either
        try:
            if b"polyphily.flower.executor" in (process / "cmdline").read_bytes():
                secret = place.own.secret_file.read_bytes().strip()
                assert secret not in (process / "environ").read_bytes()
        except OSError:
            continue


def test_keys_and_certificates_are_replaced_while_the_server_runs(place: Place) -> None:
    place.start_server()
    for name in place.names:
        place.admit(name)
        place.join(name)
    wait_for(place.said("north", "connected"))
    before = _served_certificate(place)
    polyphily("server", "renew", place.home, "--ca-key", place.ca_key)
    wait_for(lambda: _served_certificate(place).serial_number != before.serial_number)
    state = json.loads(polyphily("server", "status", place.home, "--json"))
    assert state["valid_until"]["server"] > "2027"
    assert place.processes["north"].poll() is None, "connections go on"

    request = place.path / "north" / "north.request.json"
    polyphily("site", "rotate", place.path / "north")
    assert "has a key already" in polyphily(
        "server", "admit", place.home, request, "--ca-key", place.ca_key, status=2
    )
    polyphily("server", "rotate", place.home, request, "--ca-key", place.ca_key)
    assert place.processes.pop("north").wait(60) == 2
    assert "was replaced" in place.log("north").read_text()
    answer = place.home / "answers" / "north.answer.json"
    polyphily("site", "accept", place.path / "north", answer)
    place.join("north")
    told = polyphily(
        "site", "accept", place.path / "south", place.home / "answers" / "south.answer.json"
    )
    assert "north has a new key, signed with its old one" in told
    done = polyphily("server", "run", place.home, "fedavg", "--rounds", 2)
    assert "north joined" in done


def _served_certificate(place: Place) -> x509.Certificate:
    host, port = admission.parse_address(place.address)
    pem = ssl.get_server_certificate((host, port), ca_certs=str(place.home / "ca.crt"))
    return x509.load_pem_x509_certificate(pem.encode())


def test_loose_modes_are_refused_with_the_command_that_helps(place: Place) -> None:
    place.admit("north")
    north, graph = place.path / "north", loopback.graph_file(place.path, "north")
    for file, command in (
        (place.home / "server.key", ("server", "start", place.home)),
        (north / "site.key", ("site", "join", north, "--graph", graph)),
    ):
        file.chmod(0o666)
        assert f"chmod go= {file}" in polyphily(*command, status=2)
        file.chmod(0o600)


def test_a_healthy_server_and_healthy_sites_print_no_errors(place: Place) -> None:
    """From start to end, with a run that is stopped and resumed."""
    place.start_server()
    for name in place.names:
        place.admit(name)
        place.join(name)
    name = place.own.new_run("fedavg", {"rounds": 6, "classes": ["0", "1"]}, {})
    folder = place.own.run_folder(name)
    control.start(place.own, folder)
    wait_for(lambda: len(folder.records()) >= 2, 120)
    polyphily("server", "stop", place.home)
    polyphily("server", "resume", place.home)
    for process in ("south", "east", "north", "server"):
        place.processes[process].send_signal(signal.SIGINT)
        place.processes[process].wait(30)
    for log in place.path.glob("*.log"):
        text = log.read_text()
        assert not re.search(r"error|warning|traceback|\x1b", text, re.I), f"{log.name}: {text}"


# Flower's own SuperLink and SuperNodes ---------------------------------------------------------


def test_the_app_runs_on_flowers_own_superlink_and_supernodes(tmp_path: Path) -> None:
    """`flwr run` on the app's folder: the same code, without Polyphily's server and sites."""
    data = federation(2)
    names = [graph.name for graph in data.clients]
    own = loopback.deploy(tmp_path, names, data.clients)
    config = own.path / "config.toml"
    config.write_text(config.read_text() + "hidden = 8\nclasses = ['0', '1']\n")
    tools, home, port = Path(sys.executable).parent, tmp_path / "home", loopback.free_port()
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{port}"\n'
        f'root-certificates = "{own.path / "ca.crt"}"\n'
    )
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    environment = {
        **os.environ, **quiet, "FLWR_HOME": str(home), "POLYPHILY_SERVER": str(own.path),
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    processes = []

    def spawn(log: str, *command: object) -> None:
        with (tmp_path / log).open("ab") as stream:
            processes.append(
                subprocess.Popen(
                    list(map(str, command)), stdout=stream, stderr=stream, env=environment
                )
            )

    def flwr(*arguments: object) -> None:
        command = list(map(str, (tools / "flwr", *arguments)))
        subprocess.run(command, check=True, env=environment, timeout=60)

    try:
        spawn(
            "superlink.log", tools / "flower-superlink", "--host", "127.0.0.1", "--port", port,
            "--ssl-ca-certfile", own.path / "ca.crt", "--ssl-certfile", own.path / "server.crt",
            "--ssl-keyfile", own.path / "server.key", "--enable-supernode-auth",
            "--disable-runtime-dependency-installation", "--database", tmp_path / "state.db",
        )  # fmt: skip
        wait_for(lambda: _answers(port))
        for site in names:
            bundle = Bundle(own.path / "bundles" / site)
            graph = loopback.graph_file(tmp_path, site)
            flwr("supernode", "register", own.path / "sites" / f"{site}.pub", "here")
            spawn(
                f"{site}.log", tools / "flower-supernode", "--superlink", f"127.0.0.1:{port}",
                "--root-certificates", bundle.certificate,
                "--auth-supernode-private-key", bundle.key, "--port", loopback.free_port(),
                "--node-config", f'bundle="{bundle.path}" graph="{graph}"',
            )  # fmt: skip
        flwr("run", control.FAB, "here", "-c", 'method="fedprox" rounds=1')
        runs = own.path / "runs"
        wait_for(lambda: list(runs.glob("*/summary.json")), 240)
        summary = json.loads(next(runs.glob("*/summary.json")).read_text())
        assert (summary["method"], summary["rounds"]) == ("fedprox", 1)
        assert summary["troubles"] == []
    finally:
        for process in processes[::-1]:
            loopback.end(process)


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
        return True
    except OSError:
        return False
