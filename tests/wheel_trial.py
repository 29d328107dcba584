"""Install a wheel in a fresh environment, run the demo, then add the extras one after another.

    python tests/wheel_trial.py dist/polyphily-….whl [EXTRA …]

Before an extra is installed, what needs it must say so: exit status 2, and a message that names the
extra. Afterwards it must run. `make test-wheel` runs this; pytest does not, because it installs
gigabytes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parents[1] / "constraints.txt"
DATA = ["--dataset", "csbm:nodes=60", "--clients", "3", "--rounds", "2", "--no-report"]
GRAPH = """
import numpy as np
from pathlib import Path
draw = np.random.default_rng(0)
y = np.arange(120) % 2
x, edge_index = draw.normal(size=(120, 8)) + y[:, None], draw.integers(120, size=(2, 600))
np.savez("graph.npz", x=x, y=y, edge_index=edge_index)
folder = Path("sites/north")
folder.mkdir(parents=True)
nodes, edges = [f"{i},{i % 2},{i}" for i in range(30)], [f"{i},{i + 1}" for i in range(29)]
(folder / "nodes.csv").write_text(chr(10).join(["id,label,age", *nodes]))
(folder / "edges.csv").write_text(chr(10).join(["source,target", *edges]))
"""
# What needs each extra. The command that downloads is only tried without its extra.
TRIALS: dict[str, list[list[str]]] = {
    "partition": [
        ["inspect", "--dataset", "graph.npz", "--partition", "louvain", "--clients", "3"],
        ["inspect", "--dataset", "graph.npz", "--partition", "metis", "--clients", "3"],
    ],
    "files": [["check", "sites"]],
    "plot": [["plot", "convergence", "runs/plain", "--out", "figure.svg"]],
    "privacy": [["run", "fedavg", *DATA, "--dp", "epsilon=1000,clip=1", "--out", "runs/dp"]],
    "tensorboard": [["run", "fedavg", *DATA, "--track", "tensorboard", "--out", "runs/board"]],
    "flower": [["server", "init", "server", "--sites", "north,south"]],
    "mlflow": [["run", "fedavg", *DATA, "--track", "mlflow", "--out", "runs/mlflow"]],
    "wandb": [["run", "fedavg", *DATA, "--track", "wandb", "--out", "runs/wandb"]],
    "ogb": [["run", "fedavg", "--dataset", "ogbn-arxiv", "--rounds", "1"]],
}
DOWNLOADS = {"ogb": "import ogb.utils.url"}


class Trial:
    """A fresh environment in a folder of its own.

    Args:
        wheel: the file to install.
        folder: the folder.
    """

    def __init__(self, wheel: Path, folder: Path) -> None:
        self.wheel, self.folder = wheel.resolve(), folder
        self.bin = folder / "venv" / "bin"
        venv.create(folder / "venv", with_pip=True)
        self.environment = {
            **{k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")},
            "POLYPHILY_DATA": str(folder / "data"),
            "WANDB_MODE": "offline",
            "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        }

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment in the folder."""
        command = [str(self.bin / words[0]), *words[1:]]
        return subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True
        )

    def must(self, status: int, *words: str, names: str = "") -> str:
        """Run a program that must end with this status, and whose output must have these words."""
        done = self.run(*words)
        said = " ".join((done.stdout + done.stderr).split())
        if done.returncode != status or names not in said:
            raise SystemExit(
                f"FAILED: {' '.join(words)}\nexit status {done.returncode}, expected {status} "
                f"and {names!r} in the output:\n{done.stdout}{done.stderr}"
            )
        return done.stdout + done.stderr

    def install(self, *what: str) -> None:
        pip = ["pip", "install", "--quiet", "--disable-pip-version-check"]
        self.must(0, *pip, "--constraint", str(CONSTRAINTS), *what)

    def extra(self, name: str) -> None:
        """Try what needs an extra, without it and with it."""
        for command in TRIALS[name]:
            said = self.must(2, "polyphily", *command, names=f"polyphily[{name}]")
            print(f"without {name}: {' '.join(command)}\n  {' '.join(said.split())}", flush=True)
        self.install(f"{self.wheel}[{name}]")
        if name in DOWNLOADS:
            self.must(0, "python", "-c", DOWNLOADS[name])
            print(f"with {name}: python -c '{DOWNLOADS[name]}'", flush=True)
            return
        for command in TRIALS[name]:
            said = self.must(0, "polyphily", *command)
            last = said.strip().splitlines()[-1] if said.strip() else ""
            print(f"with {name}: {' '.join(command)}\n  {last}", flush=True)


def main(wheel: str, *extras: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(Path(wheel), Path(folder))
        trial.install("torch")
        trial.install(str(trial.wheel))
        print(trial.must(0, "polyphily", "--version", names="polyphily "))
        print(trial.must(0, "polyphily", "demo"), flush=True)
        trial.must(0, "python", "-c", GRAPH)
        trial.must(0, "polyphily", "run", "fedavg", *DATA, "--out", "runs/plain")
        for name in extras or TRIALS:
            trial.extra(name)


if __name__ == "__main__":
    main(*sys.argv[1:])
