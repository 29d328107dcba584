"""Trials of Polyphony's mixes: train voices once, then score any mix of what they say.

    python benchmarks/mixes.py train --out voices --cell texas-louvain-3 --seeds 5 6 --decays 5e-4
    python benchmarks/mixes.py train --out voices --cell texas-louvain-3 --together 1 --name t1
    python benchmarks/mixes.py table voices/*.t0.*.npz
    python benchmarks/mixes.py heard voices/minesweeper*.npz
    python benchmarks/mixes.py together voices/*.t1.*.npz

Voices that are trained apart do not depend on the mix, so that one training serves all mixes. A
voice is written as its backbone with marks: `acm-gcn:L` has labels among its inputs, `res-acm:L:d5`
has five blocks, `res-acm:S` shares its normalisations, `gcn:solo` stays at home. A part is a voice
as received, or with a plus sign as the client trained it last.

Cells are those of `polyphily study polyphony`. `table` compares mixes with the default one over all
files: validation score at the best round and rate, and the test score there. `heard` gives a fifth
of the validation nodes to the audition's EM and scores the mix on the others: what held-out nodes
are worth where there are many. `together` compares files t1 with files t0 of the same cell and
seed, by the even mix of the voices of t1.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from polyphily.core.method import parameter
from polyphily.core.settings import from_mapping
from polyphily.graphs.loading import Federation
from polyphily.methods.polyphony.audition import posterior, responsibilities
from polyphily.methods.polyphony.method import Polyphony
from polyphily.methods.polyphony.voices import VOICES, Voices
from polyphily.nn.backbones import BACKBONES, Backbone, Shape
from polyphily.nn.choir import PLAIN_LAYERS, number_of
from polyphily.nn.residual import Residual
from polyphily.nn.segments import Segments
from polyphily.runs.together import stacked
from polyphily.studies.contest import contest
from polyphily.studies.trials import federation_of

Array = npt.NDArray[Any]
RESIDUAL = "res-acm:L:d5"
ALL = f"gpr-gnn,acm-gcn,acm-gcn:L,{RESIDUAL},res-gcn:L:d5,res-acm:d5"
CELLS = {cell.name: cell for cell in contest().cells}


# Training ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Voice:
    """A voice as it is written on the command line."""

    backbone: str
    marks: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Voice:
        name, *marks = text.split(":")
        return cls(name, tuple(marks))

    def shape(self, shape: Shape) -> Shape:
        depth = next((int(mark[1:]) for mark in self.marks if mark.startswith("d")), None)
        usual = 3 if issubclass(BACKBONES.find(self.backbone), Residual) else PLAIN_LAYERS
        labels = shape.classes if "L" in self.marks else 0
        return replace(
            shape,
            features=shape.features + labels,
            layers=depth or usual,
            norms_at_home="S" not in self.marks,
            readout="jump" if "J" in self.marks else "last",
        )


class Several(Voices):
    """Voices with marks, each with renditions."""

    def __init__(self, shape: Shape, voices: Sequence[Voice]) -> None:
        self._next = iter(voices)
        numbers = range(len(voices))
        super().__init__(
            shape,
            [voice.backbone for voice in voices],
            [v for v in numbers if "L" in voices[v].marks],
            [v for v in numbers if "solo" in voices[v].marks],
            [1 / (2 * len(voices))] * (2 * len(voices)),
        )

    def _voice(self, name: str, labelled: bool) -> Backbone:
        voice = next(self._next)
        return BACKBONES.find(name)(voice.shape(self.shape))

    def stays_home(self, parameter: str) -> bool:
        if not parameter.startswith(VOICES):
            return True
        number = number_of(parameter)
        private = self.voice(number).shape.norms_at_home and self.is_norm(parameter)
        return private or number in self.at_home


@dataclass(frozen=True)
class Trial(Polyphony):
    """Polyphony with an even mix of voices with marks."""

    written: str = parameter(ALL, "the voices, with marks")

    def __post_init__(self) -> None:
        """Take any voices."""

    @property
    def marked(self) -> tuple[Voice, ...]:
        return tuple(Voice.parse(text) for text in self.written.split(","))

    @property
    def shared_voices(self) -> tuple[str, ...]:
        return tuple(voice.backbone for voice in self.marked)

    @property
    def labelled(self) -> tuple[int, ...]:
        return tuple(v for v, voice in enumerate(self.marked) if "L" in voice.marks)

    def build(self, backbone: str, shape: Shape, seed: int) -> Backbone:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Several(shape, self.marked)


def train(args: argparse.Namespace) -> None:
    """Train voices on a cell; write what all parts say in some rounds, a file for each seed.

    All seeds and rates train in one pass. Of many nodes a part is kept, with 8 bits for a number.
    """
    cell = CELLS[args.cell]
    method = Trial(mixing="even", together=args.together, written=args.voices)
    method = replace(method, hidden_share=args.hidden_share)
    rates = [(rate, 0.0) for rate in args.rates] + [(0.01, decay) for decay in args.decays]
    settings = from_mapping(
        {**cell.settings, "rounds": args.rounds, "backbone": "choir", "device": args.device}
    )
    federations = [federation_of(cell, seed, args.partitions) for seed in args.seeds]
    execution = stacked(method, federations, settings, rates, keep_best=False)
    sizes = [sum(graph.num_nodes for graph in one.clients) for one in federations]
    kept = [chosen_nodes(one, args.most) for one in federations]
    said: list[list[list[Array]]] = [[[] for _ in rates] for _ in federations]
    with execution.at_work():
        for number in range(1, args.rounds + 1):
            execution.simulation.advance()
            if number % args.every == 0 or number in args.at:
                with torch.no_grad():
                    voices: Tensor = execution.simulation.received().forward().voices  # type: ignore[attr-defined]
                blocks = iter(voices.softmax(dim=2).split(sizes * len(rates), dim=1))
                for rate in range(len(rates)):
                    for seed, nodes in enumerate(kept):
                        block = next(blocks)[:, torch.from_numpy(nodes).to(voices.device)]
                        said[seed][rate].append(quantised(block))
    args.out.mkdir(parents=True, exist_ok=True)
    for seed, federation, nodes, own in zip(args.seeds, federations, kept, said, strict=True):
        clients = federation.clients
        path = args.out / f"{args.cell}.{args.name}.{seed}.npz"
        owner = np.repeat(np.arange(len(clients)), [graph.num_nodes for graph in clients])
        np.savez_compressed(
            path,
            probs=np.stack([np.stack(rate) for rate in own]),
            labels=np.concatenate([graph.labels for graph in clients])[nodes],
            val=np.concatenate([graph.masks.val for graph in clients])[nodes],
            test=np.concatenate([graph.masks.test for graph in clients])[nodes],
            owner=owner[nodes],
            meta=json.dumps({"cell": args.cell, "seed": seed, "spec": args.voices, "rates": rates}),
        )
        print(path, flush=True)


def chosen_nodes(federation: Federation, most: int) -> Array:
    """Return the nodes of a federation that are kept: validation and test, of each so many."""
    chosen = []
    lots = np.random.default_rng(0)
    for split in ("val", "test"):
        masks = [getattr(graph.masks, split) for graph in federation.clients]
        nodes = lots.permutation(np.flatnonzero(np.concatenate(masks)))
        chosen.append(nodes[: most // max(1, len(federation.classes) - 1)])
    return np.sort(np.concatenate(chosen))


def quantised(probabilities: Tensor) -> Array:
    """Return square roots of probabilities in 8 bits; of two classes, the second alone."""
    if probabilities.shape[-1] == 2:
        probabilities = probabilities[..., 1:]
    return (probabilities.sqrt() * 255).round().to(torch.uint8).cpu().numpy()


def restored(numbers: Array) -> Array:
    """Return the probabilities behind 8 bits."""
    found = (numbers.astype(np.float32) / 255) ** 2
    if found.shape[-1] == 1:
        return np.concatenate([1 - found, found], axis=-1)
    return found / found.sum(axis=-1, keepdims=True)


# Scoring -----------------------------------------------------------------------------------------


class Said:
    """Return what all parts say in a file, `[rates, rounds, parts, nodes, classes]`."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as file:
            self.said, self.labels, self.owner = file["probs"], file["labels"], file["owner"]
            self.said = restored(self.said)
            self.val, self.test = file["val"], file["test"]
            meta = json.loads(str(file["meta"]))
        self.cell, self.seed, self.voices = meta["cell"], meta["seed"], meta["spec"].split(",")
        self.auc = CELLS[self.cell].metric == "auc"

    def numbers(self, voices: Sequence[str]) -> list[int]:
        """Return the numbers of voices as received, then as trained."""
        found = [self.voices.index(voice) for voice in voices]
        return [*found, *(number + len(self.voices) for number in found)]

    def score(self, probabilities: Array, nodes: Array) -> float:
        from sklearn.metrics import roc_auc_score

        labels = self.labels[nodes]
        if self.auc:
            return 100 * float(roc_auc_score(labels, probabilities[nodes, 1]))
        return 100 * float((probabilities[nodes].argmax(axis=1) == labels).mean())

    def best(self, mixed: Callable[[Array], Array]) -> tuple[float, float]:
        """Return validation and test score at the best round and rate."""
        tried = [
            (self.score(p, self.val), self.score(p, self.test))
            for rate in self.said
            for p in (mixed(parts.astype(np.float32)) for parts in rate)
        ]
        return max(tried, key=lambda pair: pair[0])


def even(said: Said, voices: Sequence[str], own: float) -> Callable[[Array], Array]:
    numbers = said.numbers(voices)
    weights = np.repeat([(1 - own) / len(voices), own / len(voices)], len(voices))
    return lambda parts: np.tensordot(weights, parts[numbers], 1)


def geometric(said: Said, voices: Sequence[str]) -> Callable[[Array], Array]:
    numbers = said.numbers(voices)
    return lambda parts: np.log(np.maximum(parts[numbers], 1e-4)).mean(axis=0)


GPR, ACM, RES_GCN = "gpr-gnn", "acm-gcn:L", "res-gcn:L:d5"
DEFAULT = (GPR, ACM, RESIDUAL, RES_GCN)
MIXES: dict[str, tuple[Sequence[str], float | None]] = {
    "default": (DEFAULT, 0.25),
    "own share 0": (DEFAULT, 0.0),
    "own share 0.5": (DEFAULT, 0.5),
    "own share 1": (DEFAULT, 1.0),
    "mean of log-probabilities": (DEFAULT, None),
    "without gpr-gnn": (DEFAULT[1:], 0.25),
    "without acm-gcn": ((GPR, RESIDUAL, RES_GCN), 0.25),
    "without res-acm": ((GPR, ACM, RES_GCN), 0.25),
    "without res-gcn": ((GPR, ACM, RESIDUAL), 0.25),
    "acm-gcn without labels": ((GPR, "acm-gcn", RESIDUAL, RES_GCN), 0.25),
    "res-acm without labels": ((GPR, ACM, "res-acm:d5", RES_GCN), 0.25),
    "both with and without labels, six voices": ((*DEFAULT, "acm-gcn", "res-acm:d5"), 0.25),
    "gpr-gnn": ((GPR,), 0.0),
    "acm-gcn": (("acm-gcn",), 0.0),
    "acm-gcn, labels": ((ACM,), 0.0),
    "res-acm": (("res-acm:d5",), 0.0),
    "res-acm, labels": ((RESIDUAL,), 0.0),
    "res-gcn, labels": ((RES_GCN,), 0.0),
}
FITTED = "each client's weights, fitted on its validation nodes; the even mix selects"


def table(paths: Sequence[Path], trust: float = 20.0) -> str:
    """Return how mixes differ from the default one, in Markdown."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in (*MIXES, FITTED)}
    for path in paths:
        said = Said(path)
        for name, (voices, own) in MIXES.items():
            mixed = geometric(said, voices) if own is None else even(said, voices, own)
            found[name].append(said.best(mixed))
        found[FITTED].append(_fitted(said, trust))
    base = np.array(next(iter(found.values())))
    text = [f"| mix ({len(paths)} runs) | validation | test |", "|---|---|---|"]
    for name, scores in found.items():
        apart = np.array(scores) - base
        error = apart.std(axis=0, ddof=1) / len(apart) ** 0.5
        parts = [f"{apart.mean(axis=0)[i]:+.2f} ± {error[i]:.2f}" for i in (0, 1)]
        text.append(f"| {name} | {parts[0]} | {parts[1]} |")
    return "\n".join(text)


def _fitted(said: Said, trust: float) -> tuple[float, float]:
    """Return the even mix's best validation score, and the test score of fitted weights there."""
    numbers, val = said.numbers(DEFAULT), np.flatnonzero(said.val)
    val = val[np.argsort(said.owner[val], kind="stable")]
    clients = int(said.owner.max()) + 1
    sizes = tuple(np.bincount(said.owner[val], minlength=clients).tolist())
    weights = np.repeat([0.75 / len(DEFAULT), 0.25 / len(DEFAULT)], len(DEFAULT))
    prior = torch.tensor(weights).expand(clients, -1)
    best = (-1.0, -1.0)
    for parts in said.said.reshape(-1, *said.said.shape[2:]):
        p = parts[numbers].astype(np.float64)
        score = said.score(np.tensordot(weights, p, 1), said.val)
        if score > best[0]:
            logs = torch.from_numpy(np.log(np.maximum(p[:, val, said.labels[val]], 1e-4)).T)
            each = Segments(sizes, torch.device("cpu"))
            own = posterior(responsibilities(logs, prior, prior, trust, each, 12), prior, trust)
            mixed = np.einsum("vnc,nv->nc", p, own.numpy()[said.owner])
            best = (score, said.score(mixed, said.test))
    return best


def together(paths: Sequence[Path]) -> str:
    """Return what training voices together changes, in Markdown."""
    apart = []
    for path in paths:
        found = Said(path)
        plain = Said(path.with_name(path.name.replace(".t1.", ".t0.")))
        first, second = (said.best(even(said, found.voices, 0.25)) for said in (found, plain))
        apart.append([first[0] - second[0], first[1] - second[1]])
    mean, error = np.mean(apart, axis=0), np.std(apart, axis=0, ddof=1) / len(apart) ** 0.5
    parts = [f"{mean[i]:+.2f} ± {error[i]:.2f}" for i in (0, 1)]
    return f"{len(paths)} runs: validation {parts[0]}, test {parts[1]}"


def heard(paths: Sequence[Path], trust: float = 20.0, share: float = 0.2) -> str:
    """Return validation scores of mixes that have heard a share of the validation nodes."""
    text = ["| run | voices | even | the federation's | each client's |", "|---|---|---|---|---|"]
    for path in paths:
        said = Said(path)
        residual = next(voice for voice in said.voices if voice.startswith("res-acm:L"))
        for voices in (
            ("gpr-gnn", "acm-gcn"),
            ("gpr-gnn", "acm-gcn:L"),
            ("gpr-gnn:L", "acm-gcn:L"),
        ):
            if not {*voices} <= {*said.voices}:
                continue
            scores = _heard(said, (*voices, residual), trust, share)
            shown = " | ".join(f"{score:.2f}" for score in scores)
            text.append(f"| {said.cell} {said.seed} | {', '.join((*voices, residual))} | {shown} |")
    return "\n".join(text)


def _heard(said: Said, voices: Sequence[str], trust: float, share: float) -> Array:
    """Return the best score over rounds on the nodes not heard, for the three kinds of mix."""
    nodes = np.flatnonzero(said.val)
    chosen = np.random.default_rng(0).random(len(nodes)) < share
    given, others = nodes[chosen], nodes[~chosen]
    clients = int(said.owner.max()) + 1
    sizes = tuple(np.bincount(said.owner[given], minlength=clients).tolist())
    each, everyone = (
        Segments(sizes, torch.device("cpu")),
        Segments((sum(sizes),), torch.device("cpu")),
    )
    own = np.repeat([0.75 / len(voices), 0.25 / len(voices)], len(voices))
    prior = torch.tensor(own).unsqueeze(0)
    found = []
    for parts in said.said[-1]:
        p = parts[said.numbers(voices)].astype(np.float64)
        logs = torch.from_numpy(np.log(np.maximum(p[:, given, said.labels[given]], 1e-4)).T)
        sums = responsibilities(logs, prior, prior, trust, everyone, 50)
        shared = posterior(sums, prior, trust).expand(clients, -1)
        sums = responsibilities(logs, shared, shared, trust, each, 50)
        weights = (prior.expand(clients, -1), shared, posterior(sums, shared, trust))
        mixes = (np.einsum("vnc,nv->nc", p, w.numpy()[said.owner]) for w in weights)
        found.append([said.score(mixed, others) for mixed in mixes])
    return np.array(found).max(axis=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train")
    training.add_argument("--out", type=Path, required=True)
    training.add_argument("--cell", choices=CELLS, required=True)
    training.add_argument("--seeds", type=int, nargs="+", default=[5])
    training.add_argument("--voices", default=ALL)
    training.add_argument("--rates", type=float, nargs="+", default=[0.003, 0.01, 0.03])
    training.add_argument("--decays", type=float, nargs="*", default=[], help="with rate 0.01")
    training.add_argument("--rounds", type=int, default=100)
    training.add_argument("--at", type=int, nargs="*", default=[], help="further rounds to score")
    training.add_argument("--most", type=int, default=10**9, help="numbers per split and part")
    training.add_argument("--device", default="cpu")
    training.add_argument("--partitions", type=Path, help="folder of partition files")
    training.add_argument("--every", type=int, default=20, help="rounds between scores")
    training.add_argument("--together", type=float, default=0.0)
    training.add_argument("--hidden-share", type=float, default=0.5)
    training.add_argument("--name", default="t0", help="a part of the names of files")
    for name in ("table", "heard", "together"):
        commands.add_parser(name).add_argument("files", type=Path, nargs="+")
    args = parser.parse_args()
    if args.command == "train":
        train(args)
    else:
        shown = {"table": table, "heard": heard, "together": together}[args.command]
        print(shown(args.files))


if __name__ == "__main__":
    main()
