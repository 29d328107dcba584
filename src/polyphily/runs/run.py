"""A whole run: rounds, scores, the run folder, and the result in Python's hands."""

from __future__ import annotations

import dataclasses
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import polyphily
from polyphily.core import method as methods
from polyphily.core import sampling
from polyphily.core import settings as knobs
from polyphily.core.cohort import Cohort
from polyphily.core.local import Local, Message
from polyphily.core.method import Method
from polyphily.core.metrics import Evaluator
from polyphily.core.recipes import fill
from polyphily.core.settings import Settings
from polyphily.engines.distributed import DistributedSimulation, Team
from polyphily.engines.replay import Replay
from polyphily.engines.simulation import UPLOADS, RoundReport, Simulation
from polyphily.errors import TrainingError, UserError, unknown
from polyphily.graphs.loading import Federation
from polyphily.privacy.differential import account, check, spent
from polyphily.runs.folder import CONFIG, RunFolder
from polyphily.runs.tracker import VIEWS, Tracker

Progress = Callable[[dict[str, Any]], None]
SMALL = 1_000_000  # nodes times hidden units below which one thread is the better choice
DEVICES = ("cpu", "cuda")
VIEW_OF = {"global": "received", "personal": "trained"}


@dataclass
class Result:
    """What a run leaves in Python.

    Attributes:
        summary: as in `summary.json`.
        models: weights by name: "global", or one per client; "…-best" at the best validation round.
        folder: the run folder, if one was asked for.
    """

    summary: dict[str, Any]
    models: dict[str, Message]
    folder: Path | None
    _logits: list[list[torch.Tensor]]
    _federations: Sequence[Federation]

    def predict(self, client: int | str, seed: int | None = None) -> npt.NDArray[np.str_]:
        """The class names that a client's model gives to its nodes, in the order of its graph.

        Args:
            client: position or name.
            seed: of several runs, which; the first unless given.
        """
        seeds = [f.seed for f in self._federations]
        if seed is not None and seed not in seeds:
            raise UserError(f"no run with seed {seed}: there are {seeds}")
        s = 0 if seed is None else seeds.index(seed)
        federation = self._federations[s]
        names = [graph.name for graph in federation.clients]
        if isinstance(client, str) and client not in names:
            raise unknown("client", client, names)
        k = names.index(client) if isinstance(client, str) else client
        if not -len(names) <= k < len(names):
            raise UserError(f"no client {k}: there are {len(names)}, from 0")
        chosen = self._logits[s][k].argmax(dim=1).numpy()
        labels: npt.NDArray[np.str_] = np.array(federation.classes)[chosen]
        return labels


def run(
    method: str | Method,
    federation: Federation | Sequence[Federation],
    *,
    out: str | Path | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Result:
    """Trains a federation.

    Args:
        method: a method's name, or a method.
        federation: one federation, or several that run side by side (one per seed).
        out: the run folder to write; none unless given.
        progress: called after every round with that round's record.
        **options: settings (`polyphily.Settings`: rounds, epochs, backbone, lr, …) and
            hyperparameters of the method (`mu=0.1`).

    Returns:
        The summary, the models and predictions.

    Raises:
        UserError: for names and values that cannot be.
        TrainingError: when training cannot go on.
    """
    federations = [federation] if isinstance(federation, Federation) else list(federation)
    if not federations:
        raise UserError("no federation was given")
    chosen = {k: v for k, v in options.items() if k in knobs.names()}
    rest = {k: v for k, v in options.items() if k not in chosen}
    if isinstance(method, str):
        known = {*methods.find(method).hyperparameters(), methods.PAPER, *knobs.names()}
        for name in rest:
            if name not in known:
                raise unknown("setting", name, known)
        method = methods.create(method, rest)
    elif rest:
        raise UserError(f"settings that do not exist: {', '.join(rest)}")
    settings = knobs.from_mapping(chosen)
    if settings.engine == "flower":
        raise UserError(
            "engine 'flower' starts a server and sites as processes: use the command line, "
            "polyphily run … --engine flower"
        )
    execution = Execution(method, federations, settings, Path(out) if out else None)
    if execution.folder:
        execution.folder.create(execution.config(), federations)
    return execution.go(progress)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Sets torch's number of threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def products_in(precision: str) -> Iterator[None]:
    """Sets how torch multiplies matrices of float32 for a while."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class Execution:
    """A run in progress: simulation, tracker and folder.

    Args:
        method: what is trained.
        federations: one per seed; with `rates`, also several times the same.
        settings: knobs; what is open is filled in.
        out: the run folder, if there is one.
        loading_seconds: what it took to get the data.
        rates: (learning rate, weight decay) of each federation, in place of the settings'.
        keep_best: whether the models of the best validation round are kept.
        cohort: that of an earlier execution on the same federations, to use again.
        team: the processes that share the clients, where there are several.
    """

    def __init__(
        self,
        method: Method,
        federations: Sequence[Federation],
        settings: Settings,
        out: Path | None,
        loading_seconds: float = 0.0,
        rates: Sequence[tuple[float, float]] | None = None,
        keep_best: bool = True,
        cohort: Cohort | None = None,
        team: Team | None = None,
    ) -> None:
        began = time.perf_counter()
        first = federations[0]
        _check_together(federations, repeated=rates is not None)
        settings = dataclasses.replace(settings, backbone=settings.backbone or method.backbone)
        settings = fill(settings, first.kind, first.metric, dense=first.dense)
        settings.check()
        if settings.metric == "auc" and len(first.classes) != 2:
            raise UserError(
                f"metric auc needs two classes, {first.dataset} has {len(first.classes)}"
            )
        check_device(settings.device)
        check(method, settings, min(len(f) for f in federations))
        sampling.check(method, settings)
        self.method, self.federations, self.settings = method, list(federations), settings
        self.out, self.team = out, team
        self.folder = RunFolder(out) if out and (team is None or team.leads) else None
        try:
            self.simulation = (
                Simulation(method, federations, settings, rates, known=cohort)
                if team is None
                else DistributedSimulation(method, federations, settings, rates, team=team)
            )
        except ValueError as error:
            raise UserError(str(error)) from None
        graphs = self.simulation.cohort.graphs
        self.evaluator = Evaluator(graphs, len(first.classes), self.simulation.device)
        selection = method.selection if settings.selection == "method" else settings.selection
        self.view = VIEW_OF[method.evaluated]
        self.tracker = Tracker(
            self.simulation.share(torch.from_numpy(self.evaluator.counts)).numpy(),
            [len(f) for f in federations],
            settings.metric or "accuracy",
            per_client=selection == "client",
            view=self.view,
            one_model=method.evaluated == "global" and self._all_shared(),
        )
        self.selection, self.keep_best = selection, keep_best
        self._scoring: dict[int, Replay[tuple[torch.Tensor, Message]]] = {}
        self.reports: list[dict[str, Any]] = []
        self.watched = True  # whether anybody looks at the records of rounds
        self.setup_seconds = loading_seconds + time.perf_counter() - began

    def _all_shared(self) -> bool:
        """Whether a federation has one model: clients keep no part of theirs to themselves."""
        network = self.simulation.network
        return all(self.method.shares(network, n) for n, _ in network.named_parameters())

    def config(self) -> dict[str, Any]:
        """Everything needed to run again, for `config.toml`."""
        return {
            "method": self.method.name,
            **self.federations[0].request,
            "seeds": [f.seed for f in self.federations],
            **{k: v for k, v in dataclasses.asdict(self.settings).items() if v is not None},
            "set": dataclasses.asdict(self.method),
        }

    def go(self, progress: Progress | None = None) -> Result:
        """Runs to the end and writes what a run leaves behind."""
        with self.at_work():
            self.advance_to_the_end(progress)
            return self.finish()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Sets torch's threads and the precision of products as this run wants them."""
        settings = self.settings
        with threads(settings.threads or self.usual_threads()), products_in(settings.precision):
            yield

    def usual_threads(self) -> int:
        """One thread for small cohorts: more would wait for each other more than they work."""
        work = self.simulation.cohort.num_nodes * (self.settings.hidden or 1)
        return 1 if work < SMALL else torch.get_num_threads()

    def advance_to_the_end(self, progress: Progress | None = None) -> None:
        """All rounds that are left; `tracker` has the scores."""
        simulation, settings = self.simulation, self.settings
        self.watched = progress is not None
        try:
            while simulation.round < settings.rounds:
                if len(simulation.stopped) == simulation.starts[-1]:
                    break
                record = self._one_round()
                self.reports.append(record)
                if self.folder:
                    self.folder.append(record)
                if self.out and simulation.agree(self._checkpoint_due()):
                    self.checkpoint()
                if progress:
                    progress(record)
        except TrainingError:
            if simulation.round and self.out:
                self._write_models(self._last())
                self.checkpoint()
            raise

    def _checkpoint_due(self) -> bool:
        return self.folder is not None and self.folder.checkpoint_due()

    def checkpoint(self) -> None:
        tensors = self.tensors()
        progress = {
            "round": self.simulation.round,
            "stopped": sorted(self.simulation.stopped),
            "setup_seconds": self.setup_seconds,
        }
        if self.folder:
            self.folder.save_checkpoint(tensors, progress)

    def tensors(self) -> Message:
        """What a checkpoint holds."""
        return _named(self.simulation.tensors(), self.tracker.tensors())

    def part(self, federations: range) -> tuple[Message, dict[str, Any]]:
        """What a checkpoint of consecutive federations would hold, had they run by themselves."""
        simulation, tracker = self.simulation, self.tracker
        first, end = simulation.starts[federations.start], simulation.starts[federations.stop]
        stopped = sorted(k - first for k in simulation.stopped if first <= k < end)
        tensors = _named(simulation.part(federations), tracker.part(federations))
        return tensors, {"round": simulation.round, "stopped": stopped}

    def restore(self) -> int:
        """Goes back to the folder's checkpoint; the number of rounds that are complete."""
        assert self.out
        files = RunFolder(self.out)
        found = files.load_checkpoint()
        if found is None:
            if self.folder:
                self.folder.truncate(0)
            return 0
        tensors, progress = found
        self.adopt(tensors, progress, self.out)
        self.reports = [r for r in files.records() if r["round"] <= progress["round"]]
        if self.folder:
            self.folder.truncate(progress["round"])
        self.setup_seconds = float(progress["setup_seconds"])
        return int(progress["round"])

    def adopt(self, tensors: Message, progress: Mapping[str, Any], folder: Path) -> None:
        """Takes over the models and scores of a checkpoint, which is in a run folder."""

        def part(prefix: str) -> Message:
            return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}

        saved = part("simulation/")
        for name, wanted in self.simulation.tensors().items():
            shape = tuple(saved[name].shape) if name in saved else None
            if name != UPLOADS and shape != tuple(wanted.shape):
                there = "is not there" if shape is None else f"has the shape {shape}"
                raise UserError(
                    f"{folder}: the saved models do not fit {self.method.name} as it is now: "
                    f"{name.rpartition('/')[2]} {there}, {tuple(wanted.shape)} is wanted. Another "
                    "version of polyphily, or of the data, made this run; run it again: "
                    f"polyphily run --config {folder / CONFIG}"
                )
        self.simulation.restore(saved, progress["round"], progress["stopped"])
        self.tracker.restore(part("tracker/"), self.simulation.device)

    # One round -------------------------------------------------------------------------------

    def _one_round(self) -> dict[str, Any]:
        report = self.simulation.advance()
        began = time.perf_counter()
        last = self.simulation.round == self.settings.rounds
        if last or self.simulation.round % self.settings.evaluate_every == 0:
            self._score()
        spans = {"seconds": report.seconds, "seconds_evaluation": time.perf_counter() - began}
        return record_of({"round": report.round, **spans}, self._outcomes(report))

    def _score(self) -> None:
        simulation = self.simulation
        if simulation.moves not in self._scoring:
            work = Replay(lambda _: self._scored(), simulation.device)
            self._scoring = {simulation.moves: work}
        found = self._scoring[simulation.moves](simulation.round)
        scores, params = self._scored() if found is None else found
        everyones = simulation.share(scores).cpu().numpy()
        for view, values in zip(VIEWS, everyones.swapaxes(0, 1), strict=True):
            better = self.tracker.update(view, values, simulation.round)
            if view == self.view and better.any() and self.keep_best:
                units, clients = self.tracker.places(better)
                self.tracker.put_models(simulation.collect(params, clients), units)
        simulation.stopped |= set(self.tracker.stalled(self.settings.patience))

    def _scored(self) -> tuple[torch.Tensor, Message]:
        """Scores of both views, by client, and the parameters of the view that counts."""
        simulation = self.simulation
        views = {"received": simulation.received(), "trained": simulation.trained()}
        scores = [self.evaluator.scores(simulation.predict(views[view])) for view in VIEWS]
        return torch.stack(scores, dim=1), views[self.view].params

    def _outcomes(self, report: RoundReport) -> list[dict[str, Any]]:
        """What a round came to in each federation."""
        evaluated = bool(self.tracker.recent["received"]) and (
            report.round % self.settings.evaluate_every == 0 or report.round == self.settings.rounds
        )
        looked_at = self.folder is not None or self.watched
        return [
            {
                "seed": federation.seed,
                "loss": report.loss[s],
                "bytes_up": report.bytes_up[s],
                "bytes_down": report.bytes_down[s],
                "selected": len(report.selected[s]),
                "failed": report.failed[s],
                "refused": report.refused[s],
                **spent(self.settings, self.simulation.guard, report.uploads[s]),
                **(self.tracker.current(s) if evaluated and looked_at else {}),
            }
            for s, federation in enumerate(self.federations)
        ]

    # The end ---------------------------------------------------------------------------------

    def finish(self) -> Result:
        """Writes what a run leaves behind."""
        simulation = self.simulation
        view = self._last()
        logits = simulation.predict(view).cpu()
        parts = torch.split(logits, list(simulation.cohort.segments.sizes))
        starts = np.cumsum([0, *map(len, simulation.members)]).tolist()
        summary = self._summary()
        models = self._write_models(view)
        if self.out:
            self.checkpoint()
        if self.folder:
            self.folder.write_summary(summary)
        return Result(
            summary=summary,
            models=models,
            folder=self.folder.path if self.folder else None,
            _logits=[list(parts[a:b]) for a, b in pairwise(starts)],
            _federations=self.federations,
        )

    def _last(self) -> Local:
        """The clients with the last round's models, in the view that the method is evaluated in."""
        simulation = self.simulation
        return simulation.received() if self.view == "received" else simulation.trained()

    def best(self) -> Local:
        """The clients with the models of the best validation round; without such, the last."""
        view, kept = self._last(), self.tracker.models
        if kept:
            sizes = [len(f) for f in self.federations]
            owner = np.repeat(np.arange(len(sizes)), sizes)
            rows = torch.from_numpy(owner if self.tracker.one_model else np.arange(len(owner)))
            view.params = {n: t[rows.to(t.device)] for n, t in kept.items()}
        return view

    def _write_models(self, view: Local) -> dict[str, Message]:
        """The models of the last and of the best round, written where there is a folder."""
        starts = self.simulation.starts
        clients = starts[:-1] if self.tracker.one_model else range(starts[-1])
        last = self.simulation.collect(view.params, clients)
        models = self._models(last, "") | self._models(self.tracker.models, "-best")
        if self.folder:
            facts = {"polyphily": polyphily.__version__, "method": self.method.name}
            facts |= {
                "backbone": str(self.settings.backbone),
                "dataset": self.federations[0].dataset,
            }
            self.folder.save_models(models, facts)
        return models

    def _models(self, params: Message, suffix: str) -> dict[str, Message]:
        """Weights by name, from stacked ones: a row per federation, or per client."""
        found: dict[str, Message] = {}
        if not params:
            return found
        single = self.tracker.one_model
        for s, federation in enumerate(self.federations):
            prefix = f"seed-{federation.seed}-" if len(self.federations) > 1 else ""
            names = ["global"] if single else [graph.name for graph in federation.clients]
            for k, name in enumerate(names):
                at = s if single else self.simulation.starts[s] + k
                found[f"{prefix}{name}{suffix}"] = {
                    n: t[at].detach().cpu().clone() for n, t in params.items()
                }
        return found

    def _summary(self) -> dict[str, Any]:
        first, settings = self.federations[0], self.settings
        runs = []
        for s, federation in enumerate(self.federations):
            views = {view: self.tracker.moments(view, s) for view in VIEWS}
            runs.append({"seed": federation.seed, **views[self.view], "views": views})
        seconds = [record["seconds"] for record in self.reports]
        bytes_up = [record["bytes_up"] for record in self.reports]
        bytes_down = [record["bytes_down"] for record in self.reports]
        refused = [
            sum(len(r["refused"]) for r in record.get("per_seed", [record]))
            for record in self.reports
        ]
        scores = [{k: v for k, v in run.items() if k != "seed"} for run in runs]
        return {
            "polyphily": polyphily.__version__,
            "method": self.method.name,
            "hyperparameters": dataclasses.asdict(self.method),
            "dataset": first.dataset,
            "partition": {
                "name": first.partition.name,
                "clients": len(first),
                "sha256": first.partition.sha256,
                **(
                    {"sha256_per_seed": [f.partition.sha256 for f in self.federations]}
                    if len(self.federations) > 1
                    else {}
                ),
            },
            "split": first.split,
            "classes": list(first.classes),
            "clients": [graph.name for graph in first.clients],
            "seeds": [f.seed for f in self.federations],
            "rounds": self.simulation.round,
            "epochs": settings.epochs,
            "backbone": settings.backbone,
            "settings": {k: v for k, v in dataclasses.asdict(settings).items() if v is not None},
            "device": settings.device,
            "engine": settings.engine,
            **({"ranks": self.team.size} if self.team else {}),
            **shortcuts(settings),
            "evaluated": self.method.evaluated,
            "selection": {"by": self.selection, "metric": settings.metric},
            **(scores[0] if len(runs) == 1 else mean_of(scores, spread=True)),
            **({"per_seed": runs} if len(runs) > 1 else {}),
            "seconds_per_round_median": statistics.median(seconds),
            "seconds_evaluation_median": statistics.median(
                record["seconds_evaluation"] for record in self.reports
            ),
            "setup_seconds": self.setup_seconds,
            "peak_memory_mb": peak_memory_mb(),
            "bytes_up_per_round": statistics.median(bytes_up),
            "bytes_down_per_round": statistics.median(bytes_down),
            "refused_updates": sum(refused),
            **self._privacy(),
            "notes": list(first.notes),
            "versions": versions(),
        }

    def _privacy(self) -> dict[str, Any]:
        """What was promised and what was spent, where anything was asked for."""
        simulation = self.simulation
        found = account(self.settings, simulation.guard, int(simulation.uploads.max()))
        if self.settings.secure_aggregation:
            from polyphily.privacy.secure_aggregation import STEP, error_bound, threshold

            clients = max(len(f) for f in self.federations)
            found["secure_aggregation"] = {
                "step": STEP,
                "error_bound_of_sums": error_bound(clients),
                "threshold": threshold(clients),
            }
        return found


def record_of(round_: Mapping[str, Any], runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The record of a round, from what it came to in each federation of a run."""
    if len(runs) == 1:
        return {**round_, **{k: v for k, v in runs[0].items() if k != "seed"}}
    shared = {k: [run[k] for run in runs] for k in runs[0] if k in ("failed", "refused")}
    means: dict[str, Any] = mean_of(
        [{k: v for k, v in run.items() if k not in shared and k != "seed"} for run in runs]
    )
    return {**round_, **means, **shared, "per_seed": list(runs)}


def _named(simulation: Message, tracker: Message) -> Message:
    """What both hold, by the names that a checkpoint has for it."""
    found = {f"simulation/{n}": t for n, t in simulation.items()}
    return found | {f"tracker/{n}": t for n, t in tracker.items()}


def mean_of(values: Sequence[Any], *, spread: bool = False) -> Any:
    """The mean of equal structures, number by number; with `spread`, `…_std` beside metrics.

    Lists of equal length are averaged element by element; of unequal length they become empty.
    A metric that some lack (no area under the curve where a split has one class) is averaged over
    those that have it.
    """
    first = values[0]
    if isinstance(first, Mapping):
        merged: dict[str, Any] = {}
        for key in dict.fromkeys(key for value in values for key in value):
            entries = [value[key] for value in values if key in value]
            merged[key] = mean_of(entries, spread=spread)
            numbers = [e for e in entries if isinstance(e, int | float)]
            if spread and key != "round" and len(numbers) == len(entries) > 1:
                merged[f"{key}_std"] = statistics.stdev(numbers)
        return merged
    if isinstance(first, list):
        if len({len(value) for value in values}) > 1:
            return []
        return [mean_of(entries) for entries in zip(*values, strict=True)]
    numbers = [value for value in values if value is not None]
    return statistics.fmean(numbers) if numbers else None


def shortcuts(settings: Settings) -> dict[str, Any]:
    """How exact products were, and what a step saw of a client's graph where that was not all."""
    chosen = sampling.Sampling.of(settings)
    drawn = chosen and {"neighbours": list(chosen.fanouts), "train_nodes": chosen.batch or None}
    exact = settings.precision if settings.dtype == "float32" else settings.dtype
    return {"precision": exact, "sampling": drawn}


def peak_memory_mb() -> float:
    """The largest resident size of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1024 if sys.platform != "darwin" else peak / 1024**2


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "threads": str(torch.get_num_threads()),
        "cpus": str(os.cpu_count()),
    }


def check_device(device: str) -> None:
    kind, _, number = device.partition(":")
    if kind not in DEVICES or not (number or "0").isdecimal():
        raise unknown("device", device, DEVICES)
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        found = torch.cuda.device_count() or "no"
        raise UserError(f"--device {device}: {found} CUDA device is there; use --device cpu")


def _check_together(federations: Sequence[Federation], *, repeated: bool) -> None:
    first = federations[0]
    if len({f.seed for f in federations}) < len(federations) and not repeated:
        raise UserError("federations that run side by side need different seeds")
    for other in federations[1:]:
        if other.classes != first.classes:
            raise UserError("federations that run side by side need the same classes")
        if other.clients[0].num_features != first.clients[0].num_features:
            raise UserError("federations that run side by side need the same features")
    widths = {graph.num_features for f in federations for graph in f.clients}
    if len(widths) > 1:
        raise UserError(f"clients have different numbers of features: {sorted(widths)}")
