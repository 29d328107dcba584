# %% [markdown]
# # Compare methods on Chameleon in five minutes
#
# Chameleon is a graph of Wikipedia pages about chameleons. Pages link to each other, and the task
# is to tell how much traffic a page has, in five classes. Linked pages often differ in class: the
# graph is *heterophilic*. We cut it into five clients, train five methods, and ask which one helps.
#
# The data are downloaded on first use.

# %%
import polyphily
from polyphily.heterogeneity.homophily import edge_homophily

METHODS = ["local", "fedavg", "fedper", "fedspa", "polyphony"]
SEEDS = (0, 1, 2)
ROUNDS = 30

# %% [markdown]
# ## Five clients
#
# METIS cuts the graph into five parts of equal size. Each seed has its own cut, its own split into
# train, validation and test nodes, and its own initial weights. One seed would tell little: chance
# moves scores by several points here.
#
# Chameleon has a known flaw. Many pages have a twin with the same neighbours and the same class, so
# that a test node may have its twin in training. `twins=one` keeps one page of each.

# %%
federations = [
    polyphily.load("chameleon:twins=one", partition="metis", clients=5, seed=seed) for seed in SEEDS
]
print(federations[0])

# %% [markdown]
# How do the clients differ? Edge homophily is the share of edges that join two nodes of the same
# class. With five classes of equal size, edges drawn at random would have 0.2.

# %%
for client in federations[0].clients:
    print(f"{client.name}: {client.num_nodes} nodes, homophily {edge_homophily(client):.2f}")

# %% [markdown]
# ## Train
#
# `local` trains every client alone: it is what federation has to beat. `fedavg` averages all
# models. `fedper` keeps the last layer at home. `fedspa` and `polyphony` are made for clients that
# differ in homophily. All get the same data and the same number of rounds. Each seed is trained
# side by side with the others, in one pass.

# %%
found = polyphily.compare(METHODS, federations, rounds=ROUNDS, out="runs/chameleon", report=print)

# %% [markdown]
# ## The table
#
# Test accuracy in percent, mean and standard deviation over seeds. Validation nodes chose the
# round. The best mean rank stands first.

# %%
print(found.table())

# %% [markdown]
# ## What it means
#
# Compare a difference with the deviation beside it. If two methods are closer than that, this
# experiment does not tell them apart, whatever their order. With three seeds no test can be
# significant: the notes below the table say so.
#
# When we ran this, no federated method was better or worse than `local` by more than one deviation.
# So here, with default settings and the labels that these clients have, federation is not worth its
# traffic. The tutorial `report.py` shows where it is.

# %%
base = found.mean("local")
for method in found.methods:
    gain = 100 * (found.mean(method) - base)
    noise = 100 * max(found.deviation(method), found.deviation("local"))
    verdict = "more than" if abs(gain) > noise else "within"
    print(f"{method:10s} {gain:+5.1f} points against local, {verdict} one deviation ({noise:.1f})")

# %% [markdown]
# A mean over clients hides the weakest one. Each dot is a client, the line is the median.

# %%
polyphily.plot("client-spread", "runs/chameleon")

# %% [markdown]
# Traffic is the price. A method far to the right has to earn it.

# %%
polyphily.plot("cost", "runs/chameleon")

# %% [markdown]
# ## Next
#
# - More seeds, and a search for each method: `polyphily.compare(METHODS, federations, tune=20)`.
#   Without one, a method may lose because its defaults do not fit.
# - The same from a terminal, which also writes a page with all figures: `polyphily compare local
#   fedavg fedspa --dataset chameleon:twins=one --partition metis --clients 5 --seeds 0-2`
# - `docs/results.md` has comparisons on many graphs, with five seeds and equal searches.
