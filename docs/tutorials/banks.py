# %% [markdown]
# # Three banks on one machine
#
# Three banks want one model that finds illicit payments, and none may show its graph to another. We
# write a small graph for each bank, rehearse in a single process, then start the real thing: a
# server and three sites, each in its own process, with TLS and keys. At the end one bank predicts
# its own payments. Nothing is downloaded, and nothing leaves this machine.

# %%
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd

import polyphily

BANKS = ("east", "north", "south")
ROUNDS = 10
folder = Path("runs/banks")

# %% [markdown]
# ## A folder for each bank
#
# A graph is two tables. `nodes.csv` has a row for each payment: an id, a label, the split, and any
# columns as features. `edges.csv` has a row for each flow of money from one payment to the next.
# Here the payments are drawn at random, one in ten illicit; you would export yours.

# %%
drawn = polyphily.load(
    "payments:nodes=400,features=6,positives=0.1,unknown=0", clients=len(BANKS), seed=0
)
for bank, data in zip(BANKS, drawn.to_pyg(), strict=True):
    place = folder / "graphs" / bank
    place.mkdir(parents=True, exist_ok=True)
    nodes = pd.DataFrame(data.x.numpy(), columns=[f"x{i}" for i in range(data.num_features)])
    nodes.insert(0, "id", [f"{bank}-{i}" for i in range(data.num_nodes)])
    nodes.insert(1, "label", np.array(data.class_names)[data.y.numpy()])
    masks = [data.train_mask.numpy(), data.val_mask.numpy(), data.test_mask.numpy()]
    nodes.insert(2, "split", np.select(masks, ["train", "val", "test"], "none"))
    nodes.to_csv(place / "nodes.csv", index=False)
    ends = nodes["id"].to_numpy()[data.edge_index.numpy()]
    pd.DataFrame({"source": ends[0], "target": ends[1]}).to_csv(place / "edges.csv", index=False)
print(nodes.iloc[:3, :6])


# %% [markdown]
# ## Look before you train
#
# `polyphily check` shows what the files hold, or lists all their faults at once.


# %%
def shell(command: str) -> str:
    """Run a command of the library, print what it prints, and return it."""
    print(f"$ {command}")
    words = [sys.executable, "-m", *command.split()]
    done = subprocess.run(words, capture_output=True, text=True)
    print(done.stdout, done.stderr, sep="")
    done.check_returncode()
    return done.stdout


shell(f"polyphily check {folder}/graphs")

# %% [markdown]
# ## A rehearsal
#
# The same files in one process, as a simulation. Illicit payments are rare, so the score is the
# area under the precision-recall curve: accuracy would praise a model that finds none. Is it worth
# it? Compare with banks that train alone.

# %%
federation = polyphily.load(f"./{folder}/graphs")
settings = {"rounds": ROUNDS, "metric": "auprc", "positive": "illicit"}
alone = polyphily.run("local", federation, **settings)
together = polyphily.run("fedavg", federation, **settings)
for result in (alone, together):
    found = result.summary["best_val"]["test"]
    scores = zip(result.summary["clients"], found["auprc_per_client"], strict=True)
    each = ", ".join(f"{bank} {score:.3f}" for bank, score in scores)
    print(f"{result.summary['method']:7s} AUPRC {found['auprc']:.3f}: {each}")

# %% [markdown]
# When we ran this, two banks gained about a tenth and one lost a little. Each has eight illicit
# payments among its test nodes, so single scores are noisy: draw other payments with `seed=1` and
# look again before you conclude anything.

# %% [markdown]
# ## The server
#
# `server init` makes certificates and a folder. With `--sites` it also makes the keys of the sites,
# which is handy on one machine. Real sites make their own (`docs/deploy.md`). We ask the system for
# two free ports.


# %%
def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return int(own.getsockname()[1])


server = folder / "server"
shell(
    f"polyphily server init {server} --sites {','.join(BANKS)} --host localhost "
    f"--port {free_port()} --control-port {free_port()}"
)

# %% [markdown]
# What would leave a bank? Ask before you join. No feature, no edge and no label of a payment is in
# this list.

# %%
shell(f"polyphily site check --graph {folder}/graphs/north --method fedavg")

# %% [markdown]
# ## Four processes
#
# In real life these are four machines. Each process writes to a log of its own.

# %%
processes = {}


def start(name: str, command: str) -> None:
    """Start a command of the library as a process of its own."""
    with (folder / f"{name}.log").open("wb") as log:
        words = [sys.executable, "-m", *command.split()]
        processes[name] = subprocess.Popen(words, stdout=log, stderr=log)


start("server", f"polyphily server start {server}")
for bank in BANKS:
    start(bank, f"polyphily site join {server}/bundles/{bank} --graph {folder}/graphs/{bank}")

# %% [markdown]
# ## A run
#
# The run waits for all three banks. Then the server sends a model, each bank trains it on its own
# graph, and the server averages what comes back.

# %%
try:
    for _ in range(120):  # until the server answers
        status = subprocess.run(
            [sys.executable, "-m", "polyphily", "server", "status", str(server)],
            capture_output=True,
        )
        if status.returncode == 0:
            break
        time.sleep(1)
    shell(
        f"polyphily server run {server} fedavg --rounds {ROUNDS} --metric auprc --positive illicit"
    )
finally:
    for process in processes.values():
        process.terminate()
    for process in processes.values():
        process.wait()

# %% [markdown]
# ## The same result
#
# Sites and simulation run the same code, so the scores should be those of the rehearsal.

# %%
[run] = (server / "runs").iterdir()
summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
deployed = summary["best_val"]["test"]["auprc"]
print(f"rehearsal {together.summary['best_val']['test']['auprc']:.4f}   deployed {deployed:.4f}")

# %% [markdown]
# ## Predictions stay at home
#
# Each bank has the model. It predicts its own payments, also those that come tomorrow.

# %%
shell(
    f"polyphily predict --model {server}/bundles/north/models/{run.name} "
    f"--graph {folder}/graphs/north --out {folder}/north.csv"
)
print(pd.read_csv(folder / "north.csv").head())

# %% [markdown]
# ## Next
#
# - `docs/deploy.md`: the same over several machines, as services, and what happens when one fails.
# - `docs/privacy.md`: `--dp` adds noise to what leaves a site; `--secure-aggregation` shows the
#   server sums only. Updates of a model can reveal something about data, so one of them is wise.
# - `docs/security.md`: what is promised if a bank, or the server, is hostile.
