"""Kill parts of a federation at random moments and check that its runs end as if nothing happened.

    PYTHONPATH=src python tests/flower/kills.py --kills 50 --seed 0 --out docs/results/kills.md

A server and three sites run as processes on this machine, over TLS. At random moments one of these
is done: `server stop` and `server resume`; kill -9 of the server, which is started again; of a
site, which is started again; of the process between them, in which Flower runs the rounds; or of
the process that starts those. The runs take turns among `RUNS`. Each must end with the weights of
the same run without any kill, bit for bit. There must be no traceback in any log, and every run
must go on within `LIMIT` seconds.

The exit status is 0 only if all of this holds.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from polyphily.errors import PolyphilyError
from polyphily.flower import control, loopback
from polyphily.flower.site_files import SiteState
from polyphily.graphs.loading import load
from polyphily.runs.folder import RunFolder
from polyphily.runs.models import LAST, SavedModel

DATA = "csbm:nodes=60-120,features=8,gap=0.6"
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "fedavg": ("fedavg", {}),
    "fedper": ("fedper", {}),
    "fedavg masked": ("fedavg", {"secure_aggregation": True}),
}
SETTINGS = {"hidden": 8, "backbone": "gcn", "epochs": 2, "classes": ["0", "1"]}
POLICY = {"timeout": 20, "repeats": 8, "join_timeout": 120}
KINDS = ("stop", "server", "site", "between", "executor")
LIMIT = 240.0  # seconds until a run must have gone on
AT_ONCE = 0.2  # probability that a kill does not wait until the run goes on
LONGEST_WAIT = 8.0  # seconds before a kill, at most


@dataclass
class Kill:
    """A kill: the process, the moment, and the outcome."""

    number: int
    run: str
    kind: str
    when: str
    began: float
    seconds: float | None = None
    outcome: str = "not yet gone on"

    def row(self) -> str:
        took = "" if self.seconds is None else f"{self.seconds:.1f}"
        return (
            f"| {self.number} | {self.run} | {self.kind} | {self.when} | {took} | {self.outcome} |"
        )


class Hang(Exception):
    """A run did not go on."""


@dataclass
class Federation:
    """A server and sites as processes, and the commands that an operator gives.

    Attributes:
        place: for all files.
        rng: draws what happens when.
        rounds: of every run.
    """

    place: Path
    rng: random.Random
    rounds: int
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    kills: list[Kill] = field(default_factory=list)
    commands: int = 0
    to_come: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        data = load(DATA, clients=3, seed=0)
        self.sites = [graph.name for graph in data.clients]
        self.own = loopback.deploy(self.place, self.sites, data.clients)

    # Processes -------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        if name == "server":
            self.processes[name] = loopback.start_server(self.own, self.place)
            loopback.wait_for_server(self.own, self.processes[name], self.place)
        else:
            self.processes[name] = loopback.start_site(self.own, self.place, name)

    def end(self) -> None:
        for process in reversed(self.processes.values()):
            loopback.end(process)

    def command(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        """Run a command of the operator; keep what it prints."""
        self.commands += 1
        with (self.place / f"command-{self.commands:03d}.log").open("wb") as log:
            log.write(f"{' '.join(arguments)}\n".encode())
            log.flush()
            return subprocess.run(
                [sys.executable, "-m", "polyphily", *arguments],
                stdout=log, stderr=log, timeout=LIMIT, check=False,
            )  # fmt: skip

    def between(self) -> int | None:
        """Return the process in which the rounds run; None if there is none for a while."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            for pid in descendants(self.processes["server"].pid):
                if command_line(pid).endswith("conduct"):
                    return pid
            time.sleep(0.1)
        return None

    def executor(self) -> int | None:
        """Return the process that starts the processes of runs."""
        for pid in descendants(self.processes["server"].pid):
            if "flower.executor" in command_line(pid) and "conduct" not in command_line(pid):
                return pid
        return None

    # Runs ------------------------------------------------------------------------------------

    def launch(self, which: str) -> RunFolder:
        method, more = RUNS[which]
        chosen = {**SETTINGS, **POLICY, **more, "rounds": self.rounds, "min_sites": 3}
        folder = self.own.run_folder(self.own.new_run(method, chosen, {}))
        control.start(self.own, folder)
        return folder

    def weights(self, folder: RunFolder) -> dict[str, torch.Tensor]:
        """Return the last model of every site."""
        found = {}
        for site in self.sites:
            files = SiteState(self.own.path / "bundles" / site, folder.path.name)
            model = SavedModel.load(files.model(LAST))
            found |= {f"{site}/{name}": tensor for name, tensor in model.params.items()}
        return found

    def advance(self, folder: RunFolder, seen: int) -> None:
        """Wait until a whole round is complete or the run ends, after the first `seen` events.

        A run that has ended without a summary is resumed, as an operator would.

        Raises:
            Hang: if it takes too long.
        """
        deadline = time.monotonic() + LIMIT
        looked = 0.0
        while not went_on(loopback.events(folder)[seen:]):
            self.revive()
            if time.monotonic() - looked > 3 and folder.read_summary() is None:
                looked = time.monotonic()
                if control.state(self.own, folder).over:
                    self.resume(folder)
            if time.monotonic() > deadline:
                raise Hang(f"{folder.path.name} did not go on within {LIMIT:g} s")
            time.sleep(0.1)

    def revive(self) -> None:
        """Start sites again that have ended by themselves, and say so: they must not."""
        for site in self.sites:
            status = self.processes[site].poll()
            if status is not None:
                self.kills[-1].outcome = f"{site} ended by itself with status {status}"
                self.start(site)

    def resume(self, folder: RunFolder) -> None:
        """Resume a run without watching it, as `server resume` and Ctrl-C do."""
        if folder.read_summary() is None:
            control.start(self.own, folder)

    # Kills -----------------------------------------------------------------------------------

    def kill(self, which: str, folder: RunFolder) -> None:
        """Do one of the things, and start again what an operator would start again."""
        if not self.to_come:
            self.to_come = self.rng.sample(KINDS, len(KINDS))
        kind = self.to_come.pop()
        site = self.rng.choice(self.sites)
        self.kills.append(Kill(len(self.kills) + 1, which, kind, moment(folder), time.time()))
        if kind == "stop":
            done = self.command("server", "stop", str(self.own.path))
            if done.returncode == 0:
                self.resume(folder)
        elif kind == "server":
            kill9(self.processes["server"])
            self.start("server")
            self.resume(folder)
        elif kind == "site":
            self.kills[-1].kind = f"site {site}"
            kill9(self.processes[site])
            self.start(site)
        else:
            pid = self.between() if kind == "between" else self.executor()
            self.kills[-1].when, self.kills[-1].began = moment(folder), time.time()
            if pid is None:
                self.kills[-1].kind = f"{kind} (there was none)"
            else:
                os.kill(pid, signal.SIGKILL)

    def disturb(self, which: str, most: int) -> str:
        """Do a run with at most so many kills; return what became of its weights."""
        folder = self.launch(which)
        while folder.read_summary() is None:
            seen = len(loopback.events(folder))
            if len(self.kills) < most:
                self.wait(folder, self.rng.uniform(0.0, LONGEST_WAIT))
                if folder.read_summary() is not None:
                    break
                seen = len(loopback.events(folder))
                self.kill(which, folder)
                if self.rng.random() < AT_ONCE:
                    self.kills[-1].outcome = "the next came at once"
                    continue
            self.advance(folder, seen)
            self.settle()
        return folder.path.name

    def wait(self, folder: RunFolder, seconds: float) -> None:
        """Wait some seconds, or until the run has ended."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and folder.read_summary() is None:
            time.sleep(0.1)

    def settle(self) -> None:
        """Note how long the run took to go on after the latest kill."""
        if self.kills and self.kills[-1].seconds is None:
            self.kills[-1].seconds = time.time() - self.kills[-1].began
            if self.kills[-1].outcome == "not yet gone on":
                self.kills[-1].outcome = "went on"

    def tracebacks(self) -> list[str]:
        """Return the names of all logs that hold a traceback."""
        logs = sorted(self.place.rglob("*.log"))
        return [f.name for f in logs if "Traceback" in f.read_text(errors="replace")]


def failures(runs: Path) -> list[str]:
    """Return the reasons of all runs that ended with an error, which none should."""
    folders = [RunFolder(path) for path in sorted(runs.iterdir())]
    found = [e for folder in folders for e in loopback.events(folder) if e["event"] == "failed"]
    return [str(entry["reason"]) for entry in found]


def moment(folder: RunFolder) -> str:
    """Return the latest event of a run: where a kill found it."""
    events = loopback.events(folder)
    last = events[-1] if events else {"event": "nothing yet"}
    number = f" {last['round']}" if "round" in last else ""
    site = f" of {last['site']}" if "site" in last else ""
    return f"after {last['event']}{number}{site}"


def went_on(events: list[dict[str, Any]]) -> bool:
    """Return whether a round has begun and ended in these events, or the run has ended."""
    names = [entry["event"] for entry in events]
    return "done" in names or names.count("round") >= 2


def kill9(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:
        return ""


def descendants(pid: int) -> list[int]:
    """Return all processes below a process."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parents[int(entry.name)] = int(
                    (entry / "stat").read_text().rpartition(")")[2].split()[1]
                )
            except OSError:
                continue
    family = [pid]
    for member in family:
        family += [child for child, parent in parents.items() if parent == member]
    return family[1:]


def report(own: Federation, command: str, findings: list[str]) -> str:
    """Return the log of all kills as Markdown."""
    lines = [
        "# A run that is killed again and again",
        "",
        f"    {command}",
        "",
        "Three sites and a server as processes on one machine, over TLS. `stop`: `server stop`,",
        "then resumed. `server`: kill -9 of the server, which is started again; the run is",
        "resumed. `site`: kill -9 of a site, which is started again. `between`: kill -9 of the",
        "process in which Flower runs the rounds; the run is resumed. `executor`: kill -9 of the",
        "process that starts those; the server starts it again. Seconds are those until a round",
        "that began after the kill was complete, or the run was.",
        "",
        *[f"- {finding}" for finding in findings],
        "",
        "| kill | run | what | when | seconds | outcome |",
        "|---:|---|---|---|---:|---|",
        *[kill.row() for kill in own.kills],
    ]
    return "\n".join(lines) + "\n"


def run_kills(place: Path, kills: int, seed: int, rounds: int, command: str) -> tuple[str, bool]:
    """Do runs until there were so many kills; return the report, and whether all went well."""
    own = Federation(place, random.Random(seed), rounds)
    findings, well = [], True
    try:
        for name in ("server", *own.sites):
            own.start(name)
        expected = {}
        for which in RUNS:
            folder = own.launch(which)
            loopback.watch(own.own, folder)
            expected[which] = own.weights(folder)
            print(f"undisturbed: {which}", flush=True)
        which = ""
        while len(own.kills) < kills:
            for which in RUNS:
                if len(own.kills) >= kills:
                    break
                before = len(own.kills)
                name = own.disturb(which, kills)
                found = own.weights(own.own.run_folder(name))
                same = same_weights(found, expected[which])
                well &= same
                count = len(own.kills) - before
                words = "bit for bit those of" if same else "NOT those of"
                findings.append(
                    f"{which}, {rounds} rounds with {count} kills: the weights at all sites are "
                    f"{words} the run without kills"
                )
                print(findings[-1], flush=True)
                for kill in own.kills[before:]:
                    print(kill.row(), flush=True)
    except (Hang, PolyphilyError, subprocess.TimeoutExpired) as error:
        well = False
        findings.append(f"**{type(error).__name__}**: {error}")
    finally:
        own.end()
    bad = own.tracebacks()
    alone = [kill for kill in own.kills if "by itself" in kill.outcome]
    findings.append(f"{len(own.kills)} kills; logs with a traceback: {', '.join(bad) or 'none'}")
    findings.append(f"sites that ended by themselves: {len(alone)}")
    failed = failures(own.own.path / "runs")
    findings.append(f"runs that ended with an error: {'; '.join(failed) or 'none'}")
    return report(own, command, findings), well and not (bad or alone or failed)


def same_weights(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(t, theirs[n]) for n, t in ours.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the report to this file")
    parser.add_argument("--place", type=Path, help="an empty folder for all files; kept")
    chosen = parser.parse_args()
    command = " ".join(
        [
            "PYTHONPATH=src python tests/flower/kills.py",
            f"--kills {chosen.kills} --rounds {chosen.rounds} --seed {chosen.seed}",
            *([f"--out {chosen.out}"] if chosen.out else []),
        ]
    )
    with tempfile.TemporaryDirectory() as name:
        place = chosen.place or Path(name)
        place.mkdir(parents=True, exist_ok=True)
        text, well = run_kills(place, chosen.kills, chosen.seed, chosen.rounds, command)
    if chosen.out:
        chosen.out.write_text(text, encoding="utf-8")
    else:
        print(text)
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
