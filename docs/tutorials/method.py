# %% [markdown]
# # Write a method
#
# A method is a class with a few hooks. Everything else comes with the library: data, networks,
# speed, other methods to compare with, tests. We write one in six lines, check it, and see whether
# it is any good. Nothing is downloaded.

# %%
from dataclasses import dataclass

import polyphily
from polyphily.extend import FedAvg, Local, Message, Range, model_part, parameter, register_method
from polyphily.testing import check_method

ROUNDS = 20
SEEDS = (0, 1, 2)

# %% [markdown]
# ## The idea
#
# FedAvg replaces the model of every client by the mean of all. If a client's graph is unlike the
# others, that throws away what it has learned. So let each client *keep* a share of its own model:
# a round starts from `keep` times its own and `1 - keep` times the mean.
#
# Only one hook differs from FedAvg: `receive`, which returns the parameters that a round starts
# from. `local.memory` has the client's own model, `local.received` what the server sent. Tensors
# have a row for each client, because all clients train in one pass. Plain arithmetic works row by
# row.


# %%
@register_method("keep-some", cite="this tutorial")
@dataclass(frozen=True)
class KeepSome(FedAvg):
    """A round starts from keep · own model + (1 - keep) · mean of all models."""

    evaluated = "personal"  # the result is each client's model, not the mean

    keep: float = parameter(
        0.5, "share of its own model that a client keeps", search=Range(0.1, 0.9)
    )

    def receive(self, local: Local) -> Message:
        own, mean = model_part(local.memory), model_part(local.received)
        return {name: self.keep * own[name] + (1 - self.keep) * mean[name] for name in mean}


# %% [markdown]
# ## Is it correct?
#
# `check_method` trains small federations. It tests that clients do not influence each other except
# through the server, that no label outside the train mask is used, that what is sent is what is
# declared, that a run can be resumed, and more. It takes some seconds and says nothing if all is
# well.

# %%
check_method(KeepSome)

# %% [markdown]
# ## Does it work?
#
# Six clients whose homophily rises from 0.1 to 0.9, with labels for 5 % of the nodes. `keep` has
# two limits that we know: with 0 it is FedAvg, scored at the clients, and with 1 nobody listens.

# %%
federations = [
    polyphily.load(
        "csbm:nodes=200,homophily=0.5,gap=0.8,spread=even",
        clients=6,
        split="0.05,0.2,0.75",
        seed=seed,
    )
    for seed in SEEDS
]
found = polyphily.compare(
    ["local", "fedavg", "fedper", "keep-some"], federations, rounds=ROUNDS, out="runs/method"
)
print(found.table())

# %% [markdown]
# Look at the deviations before you celebrate. All three federated methods beat `local`. But
# `keep-some` is within one deviation of FedAvg: this experiment does not tell them apart. That is
# the usual outcome, and worth knowing early.

# %% [markdown]
# ## How sensitive is it?

# %%
for keep in (0.0, 0.25, 0.5, 0.75, 1.0):
    result = polyphily.run("keep-some", federations, rounds=ROUNDS, keep=keep)
    test = result.summary["best_val"]["test"]
    print(f"keep {keep:4.2f}: {100 * test['accuracy']:.1f} ± {100 * test['accuracy_std']:.1f}")

# %% [markdown]
# ## Next
#
# - Put the class into a package, and `polyphily run keep-some` works on the command line:
#   `docs/extending.md` has the three lines of `pyproject.toml`, and the hooks of the server.
# - `polyphily.tune("keep-some", federations, trials=20)` searches the range that `parameter`
#   declares.
# - `polyphily study leaderboard --methods keep-some` sets it beside all other methods.
