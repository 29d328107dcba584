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
import torch

from polyphily.core import settings as knobs
from polyphily.core.budget import OFF
from polyphily.core.cohort import Cohort
from polyphily.core.local import Local
from polyphily.core.messages import Message, with_prefix
from polyphily.core.method import FORMS, METHODS, VIEWS, Method, create
from polyphily.core.metrics import SPLITS, Evaluator, check_metric, describe_all, positive_index
from polyphily.core.sampling import check_sampling
from polyphily.core.settings import Settings
from polyphily.engines.attacks import hostile_clients
from polyphily.engines.drawn import DrawnSimulation, check_drawn, scored_clients
from polyphily.engines.placement import ManyProcesses
from polyphily.engines.replay import Replay
from polyphily.engines.simulation import UPLOADS, RoundReport, Simulation
from polyphily.engines.team import Team
from polyphily.errors import TrainingError, UserError, unknown
from polyphily.graphs.graph import Graph, relations_of
from polyphily.graphs.loading import Federation, same_width
from polyphily.privacy.differential import account, check_privacy, spent
from polyphily.runs.assessment import Assessment, Scored, by_client, class_warnings
from polyphily.runs.folder import CLIENTS, CONFIG, RunFolder
from polyphily.runs.models import (
    BEST,
    GLOBAL,
    LAST,
    MEMORY,
    RECEIVED,
    ModelFile,
    SavedModel,
    choose_model,
    params_of,
    save_models,
    state_of,
    without_axis,
)
from polyphily.runs.prediction import WithModels
from polyphily.runs.summary import RunFacts, record_of, stage_of, summarise
from polyphily.runtime.edges import edge_notes
from polyphily.runtime.machine import check_device, matmul_precision, threads
from polyphily.runtime.network import complete
from polyphily.runtime.robust import check_robust
from polyphily.runtime.tracker import Tracker, make_tracker

Progress = Callable[[dict[str, Any]], None]
DELAY = 0.2  # seconds by which the record of a round may be written late, together with others
SMALL = 1_000_000  # nodes times hidden units below which one thread is the better choice


@dataclass(repr=False)
class Result(WithModels):
    """The outcome of a run.

    Attributes:
        summary: as in `summary.json`.
        saved: the models by name: "global", or one per client; "…-best" at the best validation
            round.
        records: of the rounds, as in `metrics.jsonl`.
        folder: the run folder, if one was asked for.
    """

    summary: dict[str, Any]
    saved: dict[str, SavedModel]
    records: list[dict[str, Any]]
    folder: Path | None
    _federations: Sequence[Federation]

    @cached_property
    def models(self) -> dict[str, Message]:
        """The weights by the name of the model."""
        return {name: model.params for name, model in self.saved.items()}

    def model(
        self, client: str | None = None, *, seed: int | None = None, which: str = BEST
    ) -> SavedModel:
        """Return a model.

        Args:
            client: the client's name; None for the global model, or the only one.
            seed: which of several runs; the first unless given.
            which: "best" (of the best validation round) or "last".
        """
        files = [ModelFile(Path(n), m.client, m.seed, m.which) for n, m in self.saved.items()]
        chosen = choose_model(files, client=client, seed=seed, which=which, place="this run")
        return self.saved[str(chosen.path)].for_client(client)

    def _own_graph(self, source: Any, seed: int | None) -> Graph | None:
        """Return the graph of a client that was trained, by position, name or itself."""
        seeds = [f.seed for f in self._federations]
        if seed is not None and seed not in seeds:
            raise UserError(f"no run with seed {seed}: there are {seeds}")
        clients = self._federations[0 if seed is None else seeds.index(seed)].clients
        names = [graph.name for graph in clients]
        if isinstance(source, int | np.integer):
            if not -len(names) <= source < len(names):
                raise UserError(f"no client {source}: there are {len(names)}, from 0")
            return clients[int(source)]
        if isinstance(source, str):
            if source in names:
                return clients[names.index(source)]
            if not Path(source).expanduser().exists():
                raise unknown("client", source, names)
        return next((graph for graph in clients if graph is source), None)


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
        execution.folder.create(execution.config(), execution.federations)
    return execution.go(progress or _ignore)  # so that `history` has the scores


def _ignore(record: dict[str, Any]) -> None:
    """Do nothing with the record of a round."""


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
        federations = same_width(federations)
        if settings.on_disk is None:
            settings = dataclasses.replace(settings, on_disk=federations[0].on_disk)
        self.population = list(federations)
        self._members = [scored_clients(f, settings) for f in federations]
        if settings.on_disk:
            federations = [f.some(k) for f, k in zip(federations, self._members, strict=True)]
        first = federations[0]
        _check_together(federations, repeated=rates is not None)
        settings = complete(
            settings,
            method,
            first.kind,
            first.metric,
            dense=first.dense,
            relations=relations_of([graph for f in federations for graph in f.clients]),
        )
        if found := edge_notes(method, settings, first.clients):
            noted = dataclasses.replace(first, notes=(*first.notes, *found))
            federations = [noted, *federations[1:]]
        settings.check()
        check_metric(settings.metric or "accuracy", len(first.classes), first.dataset)
        positive_index(first.classes, settings.positive)
        check_device(settings.device)
        check_privacy(method, settings, min(len(f) for f in self.population))
        _check_encodings(federations, settings)
        check_robust(method, settings, min(_fewest_answers(f, settings) for f in self.population))
        check_sampling(method, settings)
        if settings.on_disk:
            check_drawn(method, settings, first)
            if team is not None:
                raise UserError("--on-disk keeps all clients in one process: run without torchrun")
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
            if self.settings.on_disk:
                return DrawnSimulation(
                    self.method,
                    self.population,
                    self.settings,
                    self._rates,
                    members=self._members,
                    folder=self.out and self.out / CLIENTS,
                )
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
        return Evaluator(
            cohort.graphs,
            cohort.classes,
            self.simulation.device,
            self.settings.metric or "accuracy",
            positive_index(self.federations[0].classes, self.settings.positive),
        )

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
            self.in_folder(),
        ):
            yield

    @contextmanager
    def in_folder(self) -> Iterator[None]:
        """Show in the run folder, if there is one, that the run is going on."""
        if self.folder is None:
            yield
            return
        self.folder.write_start({**self.data_facts(), "evaluated": self.method.evaluated})
        with self.folder.at_work():
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
                if simulation.ended:
                    break
                record = self.advance()
                if progress:
                    progress(record)
        except TrainingError:
            if simulation.round and self.out:
                self.write_models()
                self.checkpoint()
            raise

    def advance(self) -> dict[str, Any]:
        """Run the next round, score it, and write its record, and a checkpoint if one is due."""
        record = self._one_round()
        self.reports.append(record)
        if self.folder:
            self.folder.append(record, within=DELAY)
        if self.out and self.simulation.placement.agree(self._checkpoint_due()):
            self.checkpoint()
        return record

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
        self.simulation.commit()

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
            self.simulation.start_again()
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
        scores, models = self._scored() if found is None else found
        everyones = simulation.placement.share(scores).cpu().numpy()
        for view, values in zip(VIEWS, everyones.swapaxes(0, 1), strict=True):
            better = self.tracker.update(view, values, simulation.round)
            if view == self.view and better.any() and self.keep_best:
                units, clients = self.tracker.places(better)
                best = simulation.placement.collect(models, simulation.device, clients)
                self.tracker.put_models(best, units)
        simulation.stop(self.tracker.stalled(self.settings.patience))

    def _scored(self) -> tuple[torch.Tensor, Message]:
        """Return the scores of both views per client, and the models of the method's view."""
        simulation = self.simulation
        views = {"received": simulation.received(), "trained": simulation.trained()}
        scores = self.evaluator.scores_of_views(self._predictions(*(views[v] for v in VIEWS)))
        return scores, state_of(self.method, views[self.view])

    def _predictions(self, received: Local, trained: Local) -> list[torch.Tensor]:
        """Return the class scores of both views, computed once if nothing is received."""
        first = self.simulation.predict(received)
        same = all(received.params.get(name) is value for name, value in trained.params.items())
        if same and not received.received:
            return [first, first]
        return [first, self.simulation.predict(trained)]

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
        summary = self._summary()
        models = self.write_models(decided=True)
        if self.out:
            self.checkpoint()
        if self.folder:
            self.folder.write_summary(summary)
            self.folder.write_curves(self.assessments[0].curves())
        return Result(
            summary=summary,
            saved=models,
            records=self.reports,
            folder=self.folder.path if self.folder else None,
            _federations=self.federations,
        )

    def _last(self) -> Local:
        """Return the clients with the last models, in the view that the method is evaluated in."""
        simulation = self.simulation
        return simulation.received() if self.view == "received" else simulation.trained()

    def best(self) -> Local:
        """Return the clients with the models of the best validation round, else the last ones."""
        view, placement = self._last(), self.simulation.placement
        kept = placement.from_leader([self.tracker.models], self.simulation.device)[0]
        if kept:
            sizes = [len(f) for f in self.federations]
            owner = np.repeat(np.arange(len(sizes)), sizes)
            rows = torch.from_numpy(owner if self.tracker.one_model else np.arange(len(owner)))
            state = placement.own_rows({n: t[rows.to(t.device)] for n, t in kept.items()})
            view.params = params_of(state)
            view.memory = {**view.memory, **with_prefix(state, MEMORY)}
            view.received = {**view.received, **with_prefix(state, RECEIVED)}
        return view

    @cached_property
    def assessments(self) -> list[Assessment]:
        """The decisions of every federation at its best round; empty but at the leading process."""
        predictions = self.evaluator.predictions(self.simulation.predict(self.best()))
        val, test = (
            self._everyones(by_client(found), split) for split, found in enumerate(predictions)
        )
        return [
            Assessment.of(federation, val[a:b], test[a:b], self.settings)
            for federation, (a, b) in zip(
                self.federations, pairwise(self.simulation.starts), strict=True
            )
            if val
        ]

    def _everyones(self, own: list[Scored], split: int) -> list[Scored]:
        """Return the scored nodes of all clients at the leading process, from those of this one."""
        placement = self.simulation.placement
        if placement.size == 1:
            return own
        counts = self.tracker.counts[:, split].astype(np.int64).tolist()
        shape = (len(own), max(counts))
        dtype = self.simulation.cohort.dtype
        logits = torch.zeros(*shape, self.simulation.cohort.classes, dtype=dtype)
        labels = torch.zeros(shape, dtype=torch.int64)
        for row, found in enumerate(own):
            logits[row, : len(found.labels)] = found.logits
            labels[row, : len(found.labels)] = found.labels
        device = self.simulation.device
        rows = {"logits": logits.to(device), "labels": labels.to(device)}
        every = {n: t.cpu() for n, t in placement.collect(rows, device).items()}
        return [
            Scored(every["logits"][k, :n], every["labels"][k, :n])
            for k, n in enumerate(counts)
            if every
        ]

    def remarks(self) -> list[str]:
        """Return the methods' remarks on how the run ended, and warnings about classes."""
        return [
            *dict.fromkeys(r for s in self.simulation.servers for r in s.remarks()),
            *class_warnings(self.federations, self.settings, self.assessments),
        ]

    def baselines(self) -> list[dict[str, Any]]:
        """Return the scores of the trivial predictor, for each federation."""
        shared = self.simulation.placement.share(self.evaluator.baseline()).cpu().numpy()
        counts, names = self.tracker.counts, self.tracker.names
        return [
            dict(zip(SPLITS, describe_all(shared[a:b], counts[a:b], names), strict=True))
            for a, b in pairwise(self.simulation.starts)
        ]

    def write_models(self, *, decided: bool = False) -> dict[str, SavedModel]:
        """Return the models of the last and the best round; write them if there is a folder.

        Args:
            decided: whether models of the best round get their decisions.
        """
        simulation = self.simulation
        starts = simulation.starts
        clients = starts[:-1] if self.tracker.one_model else range(starts[-1])
        state = state_of(self.method, self._last())
        last = simulation.placement.collect(state, simulation.device, clients)
        models = {
            **self.saved_models(last, LAST, decided=decided),
            **self.saved_models(self.tracker.models, BEST, decided=decided),
        }
        if self.folder:
            save_models(self.folder, models)
        return models

    def saved_models(
        self, state: Message, which: str, *, decided: bool = False
    ) -> dict[str, SavedModel]:
        """Return models by name.

        Args:
            state: stacked tensors with a row per federation or client.
            which: `BEST` or `LAST`.
            decided: whether models of the best round get their decisions.
        """
        if not state:
            return {}
        found: dict[str, SavedModel] = {}
        single, tracker = self.tracker.one_model, self.tracker
        suffix = f"-{BEST}" if which == BEST else ""
        for s, federation in enumerate(self.federations):
            prefix = f"seed-{federation.seed}-" if len(self.federations) > 1 else ""
            start = self.simulation.starts[s]
            names = [GLOBAL] if single else [graph.name for graph in federation.clients]
            for k, name in enumerate(names):
                best = int(tracker.best_round[self.view][tracker.group[start + k]])
                done = best if which == BEST else self.simulation.round
                client = None if single else k
                found[f"{prefix}{name}{suffix}"] = SavedModel(
                    method=self.method.name,
                    hyperparameters=dataclasses.asdict(self.method),
                    settings=self.settings,
                    width=federation.clients[0].num_features,
                    classes=federation.classes,
                    tensors=without_axis(state, s if single else start + k),
                    seed=federation.seed,
                    round=done,
                    which=which,
                    client=None if single else name,
                    number=0 if single else k,
                    dataset=federation.dataset,
                    network=self.simulation.network.describe(),
                    **self._encodings(s, client),
                    **(self._decisions(s, client) if decided and which == BEST else {}),
                )
        return found

    def _encodings(self, s: int, client: int | None) -> dict[str, Any]:
        """Return the encoding of a client's model; of the global one (None), that of all clients.

        Where encodings differ, a global model has one for each client.
        """
        federation = self.federations[s]
        own = federation.encodings
        if not own:
            return {}
        if client is not None or all(one == own[0] for one in own):
            return {"encoding": own[client or 0]}
        names = [graph.name for graph in federation.clients]
        return {"encodings": dict(zip(names, own, strict=True))}

    def _decisions(self, s: int, client: int | None) -> dict[str, Any]:
        """Return the decision of a client's model; of the global one (None), also all clients'."""
        if not self.assessments:
            return {}
        found = self.assessments[s]
        if client is not None:
            return {"decision": found.clients[client]}
        return {
            "decision": found.together,
            "decisions": dict(zip(found.names, found.clients, strict=True)),
        }

    def data_facts(self) -> dict[str, Any]:
        """Return what the summary says about the data."""
        first, hashes = self.federations[0], [f.partition.sha256 for f in self.federations]
        return {
            "dataset": first.dataset,
            "partition": {
                "name": first.partition.name,
                "clients": len(self.population[0]),
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
                **self._hostile(),
                **({"scored_clients": len(self.federations[0])} if self.settings.on_disk else {}),
            },
            remarks=self.remarks(),
            baselines=self.baselines(),
            decisions=[found.summary() for found in self.assessments],
        )
        return summarise(facts, self.tracker, self.reports, self.simulation.round)

    def _hostile(self) -> dict[str, Any]:
        """Return the names of hostile clients in a simulated attack, by seed."""
        if self.settings.attack == OFF:
            return {}
        return {
            "hostile": {
                str(f.seed): [f.clients[k].name for k in hostile_clients(f, self.settings)]
                for f in self.federations
            }
        }

    def _privacy(self) -> dict[str, Any]:
        """Return what was promised and what was spent, where anything was asked for."""
        simulation = self.simulation
        uploads = int(simulation.upload_counts.max())
        found = account(self.settings, simulation.clients.guard, uploads)
        if self.settings.secure_aggregation:
            from polyphily.privacy.secure_aggregation import promise

            found |= promise(max(len(f) for f in self.population))
        return found


def _named(simulation: Message, tracker: Message) -> Message:
    """Return the tensors of both by the names they have in a checkpoint."""
    found = {f"simulation/{n}": t for n, t in simulation.items()}
    return found | {f"tracker/{n}": t for n, t in tracker.items()}


def _check_encodings(federations: Sequence[Federation], settings: Settings) -> None:
    """Refuse statistics of columns that clients have exchanged in a run that protects them."""
    if settings.private and any(f.exchanged for f in federations):
        raise UserError(
            "the columns are encoded by statistics of all clients, which differential privacy and "
            "secure aggregation are to protect: load the data with encoding 'home'"
        )


def _fewest_answers(federation: Federation, settings: Settings) -> int:
    """Return how many clients of a federation answer in a round at least."""
    asked = max(1, round(settings.participation * len(federation)))
    return asked - round(settings.failures * asked)


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
