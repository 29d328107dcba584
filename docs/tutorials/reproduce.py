# %% [markdown]
# # Reproduce a table
#
# A paper prints a table. What do we get if we run it again? `polyphily reproduce` knows the tables
# of five papers: their data, partitions, splits, settings, and the numbers they printed. We run a
# small corner of Table 1 of S2FGL, on Texas, a graph of 183 web pages. The data are downloaded on
# first use.

# %%
import json
import subprocess
import sys
from pathlib import Path

ROUNDS = 40
SEEDS = "0,1"


def shell(command: str) -> None:
    """Run a command of the library, and print what it prints."""
    print(f"$ {command}")
    words = command.split()
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
    print(done.stdout or done.stderr)
    done.check_returncode()


# %% [markdown]
# ## What can be run?
#
# Every table and figure has a state: it runs, or its data are not there.

# %%
shell("polyphily reproduce s2fgl --list")

# %% [markdown]
# ## Two rows
#
# The paper's protocol has five seeds and a hundred rounds. We change both to be quick, and the
# table says so: its numbers are then a look, not a reproduction. The terms of S2FGL begin after
# round 20: with fewer rounds it would not act, and a note would say so. Leave out `--rounds` and
# `--seeds` for the real thing.

# %%
shell(
    "polyphily reproduce s2fgl --table 1 --only texas --methods fedavg,s2fgl "
    f"--rounds {ROUNDS} --seeds {SEEDS} --out runs/reproduce"
)

# %% [markdown]
# ## How to read it
#
# *Published* is what the paper printed. *Paper's form* is the method with the paper's
# hyperparameters, *default form* with ours. The difference to the published number stands in
# parentheses. Marks are explained below the table: what the paper does not say, and what was
# changed.
#
# A difference has many causes: other splits, a round that was chosen otherwise, a detail that the
# paper leaves out. A deviation of several points over seeds is usual on a graph of this size.

# %% [markdown]
# ## The same as data

# %%
table = json.loads(Path("runs/reproduce/table-1.json").read_text(encoding="utf-8"))
for row in table["rows"]:
    published = row["published"]["mean"]
    for form, ours in row["forms"].items():
        print(f"{row['method']:8s} {form:8s} published {published:.1f}   ours {ours['mean']:.1f}")

# %% [markdown]
# ## Next
#
# - `polyphily reproduce s2fgl --table 1 --write table.tex` writes LaTeX, with booktabs.
# - `docs/reproduction` has what came out by the papers' own protocols, page by page.
# - If a number is far off, look at the notes first; then at `docs/equations`, which says where each
#   equation is in the code.
