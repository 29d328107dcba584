# %% [markdown]
# # Read a report: when does federation help?
#
# Averaging models is not always worth the trouble. Whether it is depends on two things that you can
# measure before you begin: how many labels each client has, and how much the clients differ. We
# make four federations, one for each combination, and read what comes out. Nothing is downloaded.

# %%
import subprocess
import sys

import polyphily

ROUNDS = 20
SEEDS = (0, 1, 2)

# %% [markdown]
# ## Four federations
#
# Six clients each. *Alike*: at every client, 80 % of the edges join nodes of one class. *Differ*:
# this share rises from 0.1 at the first client to 0.9 at the last. *Few*: 2 % of the nodes have a
# label for training, four at each client. *Many*: 60 %.

# %%
GRAPHS = {
    "alike": "csbm:nodes=200,homophily=0.8,gap=0",
    "differ": "csbm:nodes=200,homophily=0.5,gap=0.8,spread=even",
}
LABELS = {"few labels": "0.02,0.2,0.78", "many labels": "0.6,0.2,0.2"}
federations = {
    f"{labels}, {kind}": [
        polyphily.load(graph, clients=6, split=split, seed=seed) for seed in SEEDS
    ]
    for labels, split in LABELS.items()
    for kind, graph in GRAPHS.items()
}
for name, (first, *_) in federations.items():
    print(f"{name}: {first}")

# %% [markdown]
# ## Alone and together
#
# The report of a single method cannot say whether federation helps. It takes a second run: `local`,
# in which every client trains alone with the same network and the same number of steps.

# %%
found = polyphily.compare(["local", "fedavg"], federations, rounds=ROUNDS, out="runs/report")
print(found.table())

# %% [markdown]
# ## First question: how large is the gain?
#
# With few labels, clients that are alike gain most: together they have six times as many labels.
# With many labels there is little left to gain. If your numbers look like that, the honest answer
# is that FedAvg is not needed.

# %%
for cell in federations:
    alone, together = (100 * found.mean(method, cell) for method in ("local", "fedavg"))
    print(
        f"{cell:20s} alone {alone:5.1f}   together {together:5.1f}   gain {together - alone:+5.1f}"
    )

# %% [markdown]
# ## Second question: who gains, and who pays?
#
# The mean is not the whole answer. Here is the gain of every client where clients differ, against
# its homophily. Points below the line are clients that would do better alone. They have a reason to
# leave the federation, and a method for such clients (`polyphily inspect` names some) has a reason
# to exist.

# %%
polyphily.plot(
    "gain", ["runs/report/few-labels-differ", "runs/report/many-labels-differ"], width=6.8
)

# %%
for cell in federations:
    alone, together = (
        found.summaries[cell, method]["best_val"]["test"]["accuracy_per_client"]
        for method in ("local", "fedavg")
    )
    losing = sum(after < before for before, after in zip(alone, together, strict=True))
    print(f"{cell:20s} {losing} of {len(alone)} clients lose, mean over seeds")

# %% [markdown]
# ## Third question: was it chance?
#
# One standard deviation over seeds is the least that a difference should exceed. The band shows it.

# %%
polyphily.plot("convergence", "runs/report", width=6.8)

# %% [markdown]
# ## The page
#
# `polyphily report` writes all this as one HTML file: scores with ranks, curves, every client, who
# learns from whom, what was sent. `--open` shows it in the browser. Read it in the order of the
# three questions: the table at the top, the clients, then the curves.

# %%
command = [sys.executable, "-m", "polyphily", "report", "runs/report", "--out", "runs/report.html"]
print(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

# %% [markdown]
# ## Before you train
#
# `polyphily inspect --dataset ./sites` measures your clients: labels, homophily, differences
# between pairs. Few labels and small differences: FedAvg will do. Few labels and large differences:
# compare FedAvg with a method made for them. Many labels everywhere: train alone first.
