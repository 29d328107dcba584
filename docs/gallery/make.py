"""Write the gallery: run the commands below, and put their pictures and this list on a page.

    python docs/gallery/make.py              # everything; some minutes
    python docs/gallery/make.py gain spectra # some pictures
    python docs/gallery/make.py --page       # the page alone

The page index.md is written from this list, so that a picture and its command cannot part. Runs
that exist in the folder `runs/gallery` are not repeated. Cora and Chameleon are downloaded if need
be.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RUNS = "runs/gallery"
WIDTH = 72  # characters of a command that the site shows without scrolling

CSBM = "csbm:homophily=0.5,gap=0.8,spread=even,nodes=300-500"
TRAINING = {
    "csbm": (
        "Ten synthetic clients whose homophily rises from 0.1 to 0.9, with labels for 10 % of the "
        "nodes, five seeds, 40 rounds.",
        f"polyphily compare local fedavg fedprox fedspa fedgsp --dataset {CSBM} "
        f"--clients 10 --split 0.1,0.3,0.6 --seeds 0-4 --rounds 40 --out {RUNS}/csbm",
    ),
    "chameleon": (
        "Chameleon, a heterophilic graph, cut into five clients by METIS, two seeds, 20 rounds.",
        "polyphily compare local fedavg fedper --dataset chameleon --partition metis "
        f"--clients 5 --seeds 0,1 --rounds 20 --out {RUNS}/chameleon",
    ),
    "cora": (
        "A sweep on Cora, five clients by Louvain, two seeds, 10 rounds.",
        "polyphily sweep fedprox fedavg --vary mu=0.01,0.1,1,10 --dataset cora "
        f"--partition louvain --clients 5 --seeds 0,1 --rounds 10 --out {RUNS}/cora",
    ),
}


@dataclass(frozen=True)
class Entry:
    """A picture of the gallery.

    Attributes:
        name: of the picture, without its suffix.
        title: the heading on the page.
        text: what the picture shows, and what to look for.
        command: draws the picture.
        training: the run that it needs, a name in `TRAINING`; None if it needs none.
    """

    name: str
    title: str
    text: str
    command: str
    training: str | None

    @property
    def file(self) -> Path:
        return HERE / f"{self.name}.svg"


def _plot(figure: str, training: str, more: str = "", name: str = "") -> str:
    file = f"docs/gallery/{name or figure}.svg"
    return f"polyphily plot {figure} {RUNS}/{training}{more} --out {file}"


ENTRIES = (
    Entry(
        "convergence",
        "Convergence",
        "Test score by round. The band is one standard deviation over seeds.",
        _plot("convergence", "csbm", " --width 4.5"),
        "csbm",
    ),
    Entry(
        "megabytes",
        "Accuracy against megabytes",
        "The same curves over what has been sent: what a given amount of traffic buys. Local sends "
        "nothing, so it has no line to speak of.",
        _plot("convergence", "csbm", " --against megabytes --width 4.5", "megabytes"),
        "csbm",
    ),
    Entry(
        "cost",
        "What the best model cost",
        "One point per method: its test score, and the megabytes that were sent and received up to "
        "its best validation round. Up and left is better. `--against seconds` shows time.",
        _plot("cost", "csbm", " --width 4.5"),
        "csbm",
    ),
    Entry(
        "client-spread",
        "Client spread",
        "Each dot is a client, the line is their median. A mean hides the weakest client; this "
        "does not.",
        _plot("client-spread", "csbm", " --width 4.5"),
        "csbm",
    ),
    Entry(
        "gain",
        "Homophily against gain",
        "What each client gains over training alone, against its homophily, first seed. Points "
        "below the line are clients that federation hurts.",
        _plot("gain", "csbm", " --width 4.5"),
        "csbm",
    ),
    Entry(
        "gain-chameleon",
        "The same on a real graph",
        "Gains on Chameleon, against adjusted homophily, which is 0 if edges do not depend on "
        "labels.",
        _plot("gain", "chameleon", ' --against "adjusted homophily" --width 4.5', "gain-chameleon"),
        "chameleon",
    ),
    Entry(
        "homophily",
        "Homophily of clients",
        "How the clients differ, before any training.",
        _plot("homophily", "csbm/fedavg"),
        "csbm",
    ),
    Entry(
        "collaboration",
        "Collaboration matrices",
        "Row i shows what the next model of client i is made of. FedAvg gives everyone the same "
        "mean, so its rows are equal. FedGSP learns the weights.",
        _plot("collaboration", f"csbm/fedavg {RUNS}/csbm/fedgsp", " --width 6.8"),
        "csbm",
    ),
    Entry(
        "spectra",
        "Spectra",
        "Histogram of the eigenvalues of each client's Laplacian, coloured by homophily. Low, "
        "smooth frequencies are on the left.",
        _plot("spectra", "chameleon/fedavg", " --width 4.5"),
        "chameleon",
    ),
    Entry(
        "spectral-kl",
        "Distances between spectra",
        "How much the spectra of two clients differ.",
        _plot("spectral-kl", "chameleon/fedavg"),
        "chameleon",
    ),
    Entry(
        "sensitivity",
        "Sensitivity",
        "Test score over the values of a hyperparameter, with the deviation over seeds. A method "
        "without it is a straight line.",
        _plot("sensitivity", "cora", " --against mu --width 4.5"),
        "cora",
    ),
    Entry(
        "critical-difference",
        "Critical difference",
        "Mean ranks over the seeds; 1 is best. A bar joins methods that do not "
        "differ significantly (Nemenyi, 0.05).",
        f"polyphily plot critical-difference {RUNS}/csbm --width 6.8 "
        "--out docs/gallery/critical-difference.svg",
        "csbm",
    ),
    Entry(
        "ablation",
        "Scores side by side",
        "The mean over seeds with its standard deviation: for ablations, or a few methods.",
        _plot("ablation", "chameleon", " --width 4.5"),
        "chameleon",
    ),
    Entry(
        "leaderboard",
        "Leaderboard",
        "Points above FedAvg of every method in every cell that has run; the mean is over those "
        "cells, which are not the same for all rows. A dot is a cell that has not run. Numbers "
        "stand where the difference is two points or more. Nothing is trained: the trials are in "
        "`docs/results/leaderboard`.",
        "polyphily study leaderboard --no-run --out docs/results "
        "--write docs/gallery/leaderboard.svg",
        None,
    ),
)


def page() -> str:
    """Return the text of index.md."""
    parts = [
        "# Gallery",
        "<!-- Written by docs/gallery/make.py; do not edit. -->",
        "Pictures as they come out of the commands below them, from small runs that take minutes. "
        "They show what the figures look like; for results see [results.md](../results.md). "
        "`--out` takes `.pdf`, `.svg` and `.png`, `--width 3.3` fits a column. In Python, "
        '`polyphily.plot("gain", "runs/…")` draws the same and a notebook shows it. '
        "[report.md](../report.md#figures-for-papers) lists all figures and their flags. "
        "`make gallery` draws this page again.",
        "## The runs",
    ]
    for text, command in TRAINING.values():
        parts += [text, _code(command)]
    for entry in ENTRIES:
        parts += [
            f"## {entry.title}",
            entry.text,
            f"![{entry.title}]({entry.file.name})",
            _code(entry.command),
        ]
    return "\n\n".join(parts) + "\n"


def _code(command: str) -> str:
    """Return a command as a block, folded before flags: a flag and its value stay together."""
    first, *flags = re.split(r" (?=--)", command)
    lines = [first]
    for flag in flags:
        if len(f"{lines[-1]} {flag} \\") > WIDTH:
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] += f" {flag}"
    return "\n".join(["```sh", *lines, "```"])


def call(command: str) -> None:
    """Run a command of this list in the root of the repository, in this process."""
    from polyphily.cli import main as command_line

    print(f"$ {command}", flush=True)
    os.chdir(ROOT)
    sys.argv = shlex.split(command)
    try:
        command_line()
    except SystemExit as ended:
        if ended.code:
            raise


def main(words: list[str]) -> None:
    """Make what was asked for."""
    known = {entry.name: entry for entry in ENTRIES}
    unknown = [word for word in words if word not in known and word != "--page"]
    if unknown:
        raise SystemExit(f"no picture {unknown[0]}; there are {', '.join(known)}")
    wanted = [] if words == ["--page"] else [known[w] for w in words] or list(ENTRIES)
    for name in dict.fromkeys(entry.training for entry in wanted if entry.training):
        call(TRAINING[name][1])
    for entry in wanted:
        call(entry.command)
    (HERE / "index.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
