"""A whole run: rounds, scores, the run folder, and the result in Python."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from polyphily.core import settings as knobs
from polyphily.core.cohort import Cohort
from polyphily.core.local import Local
from polyphily.core.messages import Message, with_prefix
from polyphily.core.method import FORMS, METHODS, VIEWS, Method, create
from polyphily.core.metrics import Evaluator, check_metric
from polyphily.core.sampling import check_sampling
from polyphily.core.settings import Settings
from polyphily.engines.placement import ManyProcesses
from polyphily.engines.replay import Replay
from polyphily.engines.simulation import UPLOADS, RoundReport, Simulation
from polyphily.engines.team import Team
from polyphily.errors import TrainingError, UserError, unknown
from polyphily.graphs.loading import Federation
from polyphily.privacy.differential import account, check_privacy, spent
from polyphily.runs.folder import CONFIG, RunFolder
from polyphily.runs.summary import RunFacts, model_facts, record_of, stage_of, summarise
from polyphily.runtime.machine import check_device, matmul_precision, threads
from polyphily.runtime.network import complete
from polyphily.runtime.tracker import Tracker, make_tracker

Progress = Callable[[dict[str, Any]], None]
SMALL = 1_000_000  # nodes times hidden units below which one thread is the better choice


@dataclass
class Result:
    """The outcome of a run.

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
        """Return the class names that a client's model predicts, in the order of its graph.

        Args:
            client: position or name.
            seed: which of several runs; the first unless given.
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
    """Train a federation.

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
        UserError: for unknown names and values out of bounds.
        TrainingError: when training cannot go on.
    """
    federations = [federation] if isinstance(federation, Federation) else list(federation)
    if not federations:
        raise UserError("no federation was given")
    chosen = {k: v for k, v in options.items() if k in knobs.names()}
    rest = {k: v for k, v in options.items() if k not in chosen}
    if isinstance(method, str):
        check_names(method, rest)
        method = create(method, rest)
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


def check_names(method: str, hyperparameters: Iterable[str]) -> None:
    """Raise a `UserError` for a name that is neither a hyperparameter nor a setting."""
    known = {*METHODS.find(method).hyperparameters(), *FORMS, *knobs.names()}
    for name in hyperparameters:
        if name not in known:
            raise unknown("setting", name, known)


class Execution:
    """A run in progress: simulation, tracker and folder.

    Args:
        method: what is trained.
        federations: one per seed; with `rates`, also several times the same.
        settings: those left open are filled in.
        out: the run folder, if there is one.
        loading_seconds: how long loading the data took.
        rates: (learning rate, weight decay) of each federation, in place of the settings'.
        keep_best: whether the models of the best validation round are kept.
        cohort: that of an earlier execution on the same federations, to be reused.
        team: the processes that share the clients, if there are several.
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
        settings = complete(settings, method, first.kind, first.metric, dense=first.dense)
        settings.check()
        check_metric(settings.metric or "accuracy", len(first.classes), first.dataset)
        check_device(settings.device)
        check_privacy(method, settings, min(len(f) for f in federations))
        check_sampling(method, settings)
        if team is not None and settings.engine == "flower":
            raise UserError("engine 'flower' starts processes of its own: run it without torchrun")
        self.method, self.federations, self.settings = method, list(federations), settings
        self.out, self.team, self.view, self.keep_best = out, team, method.view, keep_best
        self.folder = RunFolder(out) if out and (team is None or team.leads) else None
        self._rates, self._cohort = rates, cohort
        self._scoring: dict[int, Replay[tuple[torch.Tensor, Message]]] = {}
        self.reports: list[dict[str, Any]] = []
        self.watched = True  # whether a callback looks at the records of rounds
        if settings.engine != "flower":  # sites of their own have no use for it
            _ = self.tracker  # builds the rest, so that what can fail fails before the first round
        self.setup_seconds = loading_seconds + time.perf_counter() - began

    @cached_property
    def simulation(self) -> Simulation:
        """The clients and servers of this process."""
        team, federations = self.team, self.federations
        try:
            return Simulation(
                self.method,
                federations,
                self.settings,
                self._rates,
                cohort=self._cohort,
                placement=None if team is None else ManyProcesses(federations, team),
            )
        except ValueError as error:
            raise UserError(str(error)) from None

    @cached_property
    def evaluator(self) -> Evaluator:
        """Scores the models of all clients of this process."""
        cohort = self.simulation.cohort
        return Evaluator(cohort.graphs, cohort.classes, self.simulation.device)

    @cached_property
    def tracker(self) -> Tracker:
        """The scores so far, and the models of the best round."""
        return make_tracker(
            self.method,
            self.settings,
            self.simulation.placement.share(torch.from_numpy(self.evaluator.counts)).numpy(),
            [len(f) for f in self.federations],
            one_model=self.simulation.servers[0].one_model,
        )

    def config(self) -> dict[str, Any]:
        """Return all that is needed to run again, for `config.toml`."""
        return {
            "method": self.method.name,
            **self.federations[0].request,
            "seeds": [f.seed for f in self.federations],
            **{k: v for k, v in dataclasses.asdict(self.settings).items() if v is not None},
            "set": dataclasses.asdict(self.method),
        }

    def go(self, progress: Progress | None = None) -> Result:
        """Run to the end; write models and summary."""
        with self.at_work():
            self.advance_to_the_end(progress)
            return self.finish()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Set torch's threads and the precision of products for this run."""
        settings = self.settings
        with (
            threads(settings.threads or self.usual_threads()),
            matmul_precision(settings.precision),
        ):
            yield

    def usual_threads(self) -> int:
        """Return the number of threads: one for small cohorts, where more would only wait."""
        work = self.simulation.cohort.num_nodes * (self.settings.hidden or 1)
        return 1 if work < SMALL else torch.get_num_threads()

    def advance_to_the_end(self, progress: Progress | None = None) -> None:
        """Run all rounds that are left; `tracker` has the scores."""
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
                if self.out and simulation.placement.agree(self._checkpoint_due()):
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
        """Write a checkpoint into the run folder."""
        tensors = self.tensors()
        progress = {
            "round": self.simulation.round,
            "stopped": sorted(self.simulation.stopped),
            "setup_seconds": self.setup_seconds,
        }
        if self.folder:
            self.folder.save_checkpoint(tensors, progress)

    def tensors(self) -> Message:
        """Return what a checkpoint holds."""
        return _named(self.simulation.tensors(), self.tracker.tensors())

    def part(self, federations: range) -> tuple[Message, dict[str, Any]]:
        """Return what a checkpoint of consecutive federations would hold if they ran alone."""
        simulation, tracker = self.simulation, self.tracker
        first, end = simulation.starts[federations.start], simulation.starts[federations.stop]
        stopped = sorted(k - first for k in simulation.stopped if first <= k < end)
        tensors = _named(simulation.part(federations), tracker.part(federations))
        return tensors, {"round": simulation.round, "stopped": stopped}

    def restore(self) -> int:
        """Go back to the folder's checkpoint; return the number of complete rounds."""
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
        """Take over the models and scores of a checkpoint in a run folder."""

        saved = with_prefix(tensors, "simulation/")
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
        self.tracker.restore(with_prefix(tensors, "tracker/"), self.simulation.device)

    # One round -------------------------------------------------------------------------------

    def _one_round(self) -> dict[str, Any]:
        report = self.simulation.advance()
        began = time.perf_counter()
        last = self.simulation.round == self.settings.rounds
        if last or self.simulation.round % self.settings.evaluate_every == 0:
            self._score()
        spans = {"seconds": report.seconds, "seconds_evaluation": time.perf_counter() - began}
        head = {"round": report.round, **stage_of(self.method, report.round), **spans}
        return record_of(head, self._outcomes(report))

    def _score(self) -> None:
        simulation = self.simulation
        if simulation.moves not in self._scoring:
            work = Replay(lambda _: self._scored(), simulation.device)
            self._scoring = {simulation.moves: work}
        found = self._scoring[simulation.moves](simulation.round)
        scores, params = self._scored() if found is None else found
        everyones = simulation.placement.share(scores).cpu().numpy()
        for view, values in zip(VIEWS, everyones.swapaxes(0, 1), strict=True):
            better = self.tracker.update(view, values, simulation.round)
            if view == self.view and better.any() and self.keep_best:
                units, clients = self.tracker.places(better)
                best = simulation.placement.collect(params, simulation.device, clients)
                self.tracker.put_models(best, units)
        simulation.stopped |= set(self.tracker.stalled(self.settings.patience))

    def _scored(self) -> tuple[torch.Tensor, Message]:
        """Return the scores of both views per client, and the parameters of the method's view."""
        simulation = self.simulation
        views = {"received": simulation.received(), "trained": simulation.trained()}
        scores = [self.evaluator.scores(simulation.predict(views[view])) for view in VIEWS]
        return torch.stack(scores, dim=1), views[self.view].params

    def _outcomes(self, report: RoundReport) -> list[dict[str, Any]]:
        """Return the record of a round for each federation."""
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
                **spent(self.settings, self.simulation.clients.guard, report.uploads[s]),
                **(self.tracker.current(s) if evaluated and looked_at else {}),
            }
            for s, federation in enumerate(self.federations)
        ]

    # The end ---------------------------------------------------------------------------------

    def finish(self) -> Result:
        """Write models and summary; return the result."""
        simulation = self.simulation
        view = self._last()
        logits = simulation.predict(view).cpu()
        parts = torch.split(logits, list(simulation.cohort.segments.sizes))
        starts = np.cumsum([0, *map(len, simulation.placement.members)]).tolist()
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
        """Return the clients with the last models, in the view that the method is evaluated in."""
        simulation = self.simulation
        return simulation.received() if self.view == "received" else simulation.trained()

    def best(self) -> Local:
        """Return the clients with the models of the best validation round, else the last ones."""
        view, kept = self._last(), self.tracker.models
        if kept:
            sizes = [len(f) for f in self.federations]
            owner = np.repeat(np.arange(len(sizes)), sizes)
            rows = torch.from_numpy(owner if self.tracker.one_model else np.arange(len(owner)))
            view.params = {n: t[rows.to(t.device)] for n, t in kept.items()}
        return view

    def _write_models(self, view: Local) -> dict[str, Message]:
        """Return the models of the last and the best round; write them if there is a folder."""
        starts = self.simulation.starts
        clients = starts[:-1] if self.tracker.one_model else range(starts[-1])
        simulation = self.simulation
        last = simulation.placement.collect(view.params, simulation.device, clients)
        models = self._models(last, "") | self._models(self.tracker.models, "-best")
        if self.folder:
            self.folder.save_models(models, self.model_facts())
        return models

    def model_facts(self) -> dict[str, str]:
        """Return what the run's model files say about themselves."""
        network, dataset = self.simulation.network.describe(), self.federations[0].dataset
        return model_facts(self.method, self.settings, network, dataset)

    def _models(self, params: Message, suffix: str) -> dict[str, Message]:
        """Return weights by model name, from stacked ones with a row per federation or client."""
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

    def data_facts(self) -> dict[str, Any]:
        """Return what the summary says about the data."""
        first, hashes = self.federations[0], [f.partition.sha256 for f in self.federations]
        return {
            "dataset": first.dataset,
            "partition": {
                "name": first.partition.name,
                "clients": len(first),
                "sha256": hashes[0],
                **({"sha256_per_seed": hashes} if len(hashes) > 1 else {}),
            },
            "split": first.split,
            "classes": list(first.classes),
            "clients": [graph.name for graph in first.clients],
            "seeds": [f.seed for f in self.federations],
            "notes": list(first.notes),
        }

    def _summary(self) -> dict[str, Any]:
        facts = RunFacts(
            method=self.method,
            settings=self.settings,
            network=self.simulation.network.describe(),
            data=self.data_facts(),
            engine=self.settings.engine,
            selection=self.tracker.selection,
            setup_seconds=self.setup_seconds,
            privacy=self._privacy(),
            more={
                **({"ranks": self.team.size} if self.team else {}),
                **(self.folder.tuning_facts() if self.folder else {}),
            },
            remarks=list(dict.fromkeys(r for s in self.simulation.servers for r in s.remarks())),
        )
        return summarise(facts, self.tracker, self.reports, self.simulation.round)

    def _privacy(self) -> dict[str, Any]:
        """Return what was promised and what was spent, where anything was asked for."""
        simulation = self.simulation
        uploads = int(simulation.upload_counts.max())
        found = account(self.settings, simulation.clients.guard, uploads)
        if self.settings.secure_aggregation:
            from polyphily.privacy.secure_aggregation import promise

            found |= promise(max(len(f) for f in self.federations))
        return found


def _named(simulation: Message, tracker: Message) -> Message:
    """Return the tensors of both by the names they have in a checkpoint."""
    found = {f"simulation/{n}": t for n, t in simulation.items()}
    return found | {f"tracker/{n}": t for n, t in tracker.items()}


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
