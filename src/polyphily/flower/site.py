"""A site: its own graph, its private memory on disk, and what it does when the server asks.

The memory never leaves the site. It is written to a file per round, whole or not at all; the server
names the last round in which it accepted this site's answer, and the site goes on from exactly
there. So an answer that came late, was refused or was asked for twice leaves no trace.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp
import torch
from safetensors import SafetensorError
from torch import Tensor

from polyphily.core.cohort import Cohort
from polyphily.core.local import Local, Message, as_model, model_part
from polyphily.core.method import Method
from polyphily.core.metrics import METRICS, SPLITS, Evaluator
from polyphily.core.optimizers import initial_state
from polyphily.core.sampling import Sampling
from polyphily.core.settings import MIXED
from polyphily.engines.simulation import train_locally
from polyphily.errors import UserError
from polyphily.flower.plan import Plan, Schema, initial_parameters
from polyphily.flower.wire import (
    CLOSE,
    FINISH,
    HELLO,
    KEYS,
    KINDS,
    PREPARE,
    REVEAL,
    ROUND,
    SHARE,
    Parcel,
    WireError,
)
from polyphily.graphs import files
from polyphily.graphs.files.client import listed
from polyphily.graphs.graph import UNLABELLED, Collection, Graph
from polyphily.graphs.loading import load
from polyphily.graphs.random import generator
from polyphily.heterogeneity.homophily import class_counts, edge_homophily
from polyphily.privacy.differential import Budget, SystemDraws, check, guard_of
from polyphily.runs.folder import read_tensors, save_tensors
from polyphily.runs.run import VIEW_OF, check_device, products_in

if TYPE_CHECKING:
    from polyphily.flower.keys import Identity
    from polyphily.flower.masks import Member

KEPT = 4  # rounds whose files are kept beside the one that the server names
LAST, BEST = "last", "best"


@dataclass(frozen=True)
class SiteGraph:
    """A site's graph as its files hold it, before anything is agreed."""

    graph: Graph
    schema: Schema
    notes: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Path) -> SiteGraph:
        """The one graph at `path`, in any of the formats of `polyphily run`."""
        collection = files.read(path)
        if len(collection.graphs) != 1:
            names = listed(graph.name for graph in collection.graphs)
            raise UserError(f"{path}: holds {len(collection.graphs)} graphs ({names}): give one")
        (graph,) = collection.graphs
        schema = Schema(collection.feature_names, graph.num_features, collection.classes)
        return cls(graph, schema, collection.notes)

    def agreed(self, schema: Schema) -> Graph:
        """The graph with columns and labels in the order that all sites use.

        Raises:
            UserError: naming columns or labels that do not fit.
        """
        graph, own = self.graph, self.schema
        features = graph.features
        if own.features and schema.features:
            position = {name: i for i, name in enumerate(own.features)}
            lacking = [name for name in schema.features if name not in position]
            added = [name for name in own.features if name not in schema.features]
            if lacking or added:
                raise UserError(
                    "the graph's feature columns are not those agreed on: lacks "
                    f"{listed(lacking) or 'none'}, has besides "
                    f"{listed(added) or 'none'}"
                )
            features = features[:, [position[name] for name in schema.features]]
        elif graph.num_features != schema.width:
            raise UserError(
                f"the graph has {graph.num_features} features, {schema.width} were agreed on"
            )
        place = {name: i for i, name in enumerate(schema.classes)}
        strange = [name for name in own.classes if name not in place]
        if strange:
            raise UserError(
                f"the graph has labels that were not agreed on: {listed(strange)}. "
                f"Agreed: {listed(schema.classes, 50)}"
            )
        table = np.array([*(place[name] for name in own.classes), UNLABELLED])
        return replace(graph, features=features, labels=table[graph.labels])

    def summary(self) -> dict[str, Any]:
        """Size, homophily and label mix: for the site's own eyes."""
        graph = self.graph
        homophily = edge_homophily(graph)
        counts = class_counts(graph, len(self.classes))
        return {
            "nodes": graph.num_nodes,
            "edges": graph.num_edges,
            "features": graph.num_features,
            "labelled": int(counts.sum()),
            "labels": dict(zip(self.classes, counts.tolist(), strict=True)),
            "homophily": None if math.isnan(homophily) else homophily,
            "split": "own" if graph.own_masks else "drawn",
        }

    @property
    def classes(self) -> tuple[str, ...]:
        return self.schema.classes


@dataclass
class Trainer:
    """A plan put to work on one site's graph: what a cohort of one computes.

    Attributes:
        plan: what was agreed on.
        graph: the site's, with its split.
        client: the site's number.
        device: where this site computes, which is its own affair.
    """

    plan: Plan
    graph: Graph
    client: int
    device: str = "cpu"

    def __post_init__(self) -> None:
        plan = self.plan
        place = torch.device(self.device)
        classes = len(plan.schema.classes)
        self.method: Method = plan.make_method()
        self.view = VIEW_OF[self.method.evaluated]
        self.network = plan.network(self.method).to(place)
        self.optimizer = plan.optimizer()
        self.guard = guard_of(self.method, plan.settings, SystemDraws())
        keys = [(plan.seed, self.client)]
        self.cohort = Cohort(
            [self.graph],
            keys,
            classes,
            device=place,
            dtype=plan.dtype,
            mixed=plan.settings.precision == MIXED,
            sampling=Sampling.of(plan.settings),
        )
        self.evaluator = Evaluator(self.cohort.graphs, classes, place)

    def initial_memory(self) -> Message:
        params = {n: t.to(self.cohort.device) for n, t in initial_parameters(self.network).items()}
        return {
            **as_model(params),
            **(initial_state(self.optimizer, params) if self.optimizer.keep else {}),
            **self.method.remember(self.cohort, self.network, params),
        }

    def steps(self, round_index: int) -> int:
        low, high = self.plan.settings.epoch_range()
        if low == high:
            return low
        rng = generator(self.plan.seed, f"epochs/{round_index}/{self.client}")
        return int(rng.integers(low, high + 1))

    def train(
        self, received: Message, memory: Message, round_index: int
    ) -> tuple[Message, Message, float]:
        """One round: what to upload, the memory after it, the mean loss."""
        with products_in(self.plan.settings.precision):
            upload, kept, losses = train_locally(
                self.method,
                self.network,
                self.cohort,
                received,
                memory,
                self.optimizer,
                [self.steps(round_index)],
                round_index,
                guard=self.guard,
            )
        return upload, kept, float(losses[0])

    def received(self, download: Message, memory: Message, rounds: int) -> Local:
        """The model that the server sends, as this site would use it."""
        view = self._local(download, memory, rounds)
        view.params = self.method.receive(view)
        return view

    def trained(self, memory: Message, rounds: int) -> Local:
        """The model as training left it."""
        view = self._local({}, memory, rounds)
        view.params = model_part(memory)
        return view

    def restored(self, model: SavedModel) -> Local:
        view = self._local(model.part("received/"), model.part("memory/"), model.round)
        view.params = model.part("params/")
        return view

    def _local(self, download: Message, memory: Message, rounds: int) -> Local:
        return Local(
            cohort=self.cohort,
            network=self.network,
            params={},
            received=download,
            memory=memory,
            optimizer=self.optimizer,
            round_index=rounds,
        )

    def predict(self, view: Local) -> Tensor:
        with torch.no_grad():
            return self.method.predict(view)

    def scores(self, view: Local) -> list[list[float | None]]:
        """Of validation and test nodes: the metrics, None where there is nothing to score.

        Under differential privacy there is nothing to tell: noise on the model would be no use.
        """
        if self.guard is not None:
            return [[None] * len(METRICS) for _ in SPLITS]
        found = self.evaluator.scores(self.predict(view))[0].tolist()
        return [[None if math.isnan(v) else v for v in split] for split in found]


@dataclass(frozen=True)
class SavedModel:
    """A model in a site's folder: parameters, and what the method needs beside them."""

    plan: Plan
    client: int
    round: int
    tensors: Message

    def part(self, prefix: str) -> Message:
        return {n.removeprefix(prefix): t for n, t in self.tensors.items() if n.startswith(prefix)}

    @classmethod
    def of(cls, plan: Plan, client: int, rounds: int, view: Local) -> SavedModel:
        tensors = {f"params/{n}": t for n, t in view.params.items()}
        tensors |= {f"memory/{n}": t for n, t in view.memory.items()}
        tensors |= {f"received/{n}": t for n, t in view.received.items()}
        return cls(plan, client, rounds, tensors)

    def save(self, file: Path) -> None:
        facts = {"plan": self.plan.to_json(), "client": self.client, "round": self.round}
        save_tensors(file, self.tensors, {"polyphily": json.dumps(facts)})

    @classmethod
    def load(cls, file: Path) -> SavedModel:
        """Reads a model.

        Raises:
            UserError: for a file that is none.
        """
        try:
            tensors, facts = read_tensors(file)
            found = json.loads(facts["polyphily"])
            return cls(
                Plan.from_json(found["plan"]), int(found["client"]), int(found["round"]), tensors
            )
        except FileNotFoundError:
            raise UserError(f"no model {file}") from None
        except (OSError, SafetensorError, LookupError, ValueError, TypeError) as error:
            raise UserError(f"{file}: not a model of a Polyphily site: {error}") from None


class Site:
    """Answers the server's messages, from one site's graph and folder.

    Args:
        name: the site's.
        graph: as its files hold it.
        folder: where private memory and models are kept.
        device: where to compute.
        dp: the differential privacy that this site insists on, if it does.
        secure: whether it insists on secure aggregation.
        identity: its key and the other sites', for secure aggregation.
    """

    def __init__(
        self,
        name: str,
        graph: SiteGraph,
        folder: Path,
        device: str = "cpu",
        *,
        dp: Budget | None = None,
        secure: bool = False,
        identity: Identity | None = None,
    ) -> None:
        check_device(device)
        self.name, self.graph, self.folder, self.device = name, graph, folder, device
        self.dp, self.secure, self.identity = dp, secure, identity
        self._trainer: Trainer | None = None
        self._own_member: Member | None = None

    def answer(self, asked: Parcel) -> Parcel:
        """What to reply to a message.

        Raises:
            WireError, UserError: for messages that cannot be answered.
        """
        kind = asked.facts.get("kind")
        if kind not in KINDS:
            raise WireError(f"the server asked for '{kind}', which this version does not know")
        if kind == HELLO:
            return self._hello()
        began = time.perf_counter()
        plan = Plan.from_json(asked.facts.get("plan", {}))
        trainer = self._prepare(plan)
        reply = self._act(str(kind), asked, trainer)
        seconds = time.perf_counter() - began
        facts = {"kind": kind, "run": plan.run, "round": asked.facts.get("round", 0)}
        return Parcel({**facts, "seconds": seconds, **reply.facts}, reply.tensors)

    def _hello(self) -> Parcel:
        schema = self.graph.schema
        return Parcel(
            {
                "kind": HELLO,
                "site": self.name,
                "features": list(schema.features),
                "width": schema.width,
                "classes": list(schema.classes),
                "digest": schema.digest,
                "dense": not sp.issparse(self.graph.graph.features),
            }
        )

    def _prepare(self, plan: Plan) -> Trainer:
        """The trainer for a plan; kept from message to message."""
        if self._trainer is not None and self._trainer.plan == plan:
            return self._trainer
        if self.name not in plan.sites:
            raise UserError(f"site '{self.name}' is not part of run {plan.run}")
        if self.dp is not None and not self.dp.covers(Budget.parse(plan.settings.dp)):
            raise UserError(
                f"site '{self.name}' takes part with epsilon at most {self.dp.epsilon:g} and delta "
                f"at most {self.dp.delta:g}: run {plan.run} has dp {plan.settings.dp}"
            )
        if self.secure and not plan.settings.secure_aggregation:
            raise UserError(
                f"site '{self.name}' takes part with secure aggregation only: run {plan.run} has "
                "none"
            )
        check(plan.make_method(), plan.settings, len(plan.sites))
        federation = load(
            Collection(
                self.name, (self.graph.agreed(plan.schema),), plan.schema.classes, natural=True
            ),
            seed=plan.seed,
            split=plan.split or None,
            normalize=plan.normalize,
        )
        client = plan.sites.index(self.name)
        self._trainer = Trainer(plan, federation.clients[0], client, self.device)
        return self._trainer

    def _act(self, kind: str, asked: Parcel, trainer: Trainer) -> Parcel:
        state = SiteState(self.folder, trainer.plan.run)
        if kind == PREPARE:
            if trainer.guard is not None:
                return Parcel({"counts": [1.0] * len(SPLITS)})
            return Parcel({"counts": trainer.evaluator.counts[0].tolist()})
        if kind in (KEYS, SHARE, REVEAL):
            return Parcel(self._member(trainer.plan).answer(kind, trainer.plan, asked.facts))
        base, best = _number(asked.facts, "base"), _number(asked.facts, "best")
        download = {n: t.to(trainer.cohort.device) for n, t in asked.tensors.items()}
        state.promote(best)
        if kind == CLOSE:
            return Parcel({})
        memory, note = self._memory(state, base, trainer)
        rounds = _number(asked.facts, "round")
        done = rounds if kind == FINISH else rounds - 1
        view = trainer.received(download, memory, done)
        facts: dict[str, Any] = {"note": note}
        if done:
            facts["received"] = trainer.scores(view)
        if kind == FINISH:
            last = view if trainer.view == "received" else trainer.trained(memory, base)
            self._saved(trainer, done if last is view else base, last).save(state.model(LAST))
        if done and trainer.view == "received":
            self._saved(trainer, done, view).save(state.candidate(done))
        if kind != ROUND:
            return Parcel(facts)
        masks = asked.facts.get("masks")
        if masks is not None:
            self._member(trainer.plan).expect(masks)
        question = _digest(rounds, base, asked.tensors)
        if trainer.guard is not None:
            facts |= {"trained": trainer.scores(view), "loss": None}
            if (same := state.sent_before(rounds, question)) is not None:
                return self._reply(trainer.plan, facts, same, masks)
            state.check_budget(trainer.plan.settings.rounds)
        upload, kept, loss = trainer.train(download, memory, rounds - 1)
        trained = trainer.trained(kept, rounds)
        if trainer.guard is None:
            known = loss if math.isfinite(loss) else None
            facts |= {"trained": trainer.scores(trained), "loss": known}
        state.save(rounds, kept)
        if trainer.guard is not None:
            state.note_sent(rounds, question, upload)
        if trainer.view == "trained":
            self._saved(trainer, rounds, trained).save(state.candidate(rounds))
        state.prune(rounds, base)
        return self._reply(trainer.plan, facts, upload, masks)

    def _reply(
        self, plan: Plan, facts: Mapping[str, Any], upload: Message, masks: Mapping[str, Any] | None
    ) -> Parcel:
        """An upload as it leaves the site: under masks where that was agreed on."""
        if not plan.settings.secure_aggregation or not upload:
            return Parcel(facts, upload)
        if masks is None:
            raise WireError("the server asked for an upload without masks in a run that has them")
        masked = self._member(plan).mask(plan, upload, masks)
        return Parcel({**facts, **masked.facts}, masked.tensors)

    def _member(self, plan: Plan) -> Member:
        from polyphily.flower.masks import Member

        if not plan.settings.secure_aggregation:
            raise WireError(f"run {plan.run} has no secure aggregation")
        if self.identity is None:
            raise UserError(f"site '{self.name}' has no keys of its own for secure aggregation")
        if self._own_member is None:
            self._own_member = Member(self.name, self.identity)
        return self._own_member

    def _saved(self, trainer: Trainer, rounds: int, view: Local) -> SavedModel:
        return SavedModel.of(trainer.plan, trainer.client, rounds, view)

    def _memory(self, state: SiteState, base: int, trainer: Trainer) -> tuple[Message, str]:
        """The memory as of round `base`, and what the server should know about it."""
        if base:
            found = state.load(base)
            if found is not None:
                return {n: t.to(trainer.cohort.device) for n, t in found.items()}, ""
            return trainer.initial_memory(), f"no memory of round {base} here: begun anew"
        return trainer.initial_memory(), ""


def _number(facts: Mapping[str, Any], name: str) -> int:
    value = facts.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 31:
        raise WireError(f"the server's message has no number '{name}'")
    return value


def _digest(rounds: int, base: int, download: Message) -> str:
    """Tells one question of the server from another."""
    found = hashlib.sha256(f"{rounds} {base}".encode())
    for name, tensor in sorted(download.items()):
        found.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


class SiteState:
    """A run's files at a site: the memory after each of the last rounds, and the models.

    Under differential privacy also the last uploads, and a line for each that was ever made:
    every upload costs privacy, whether or not the server got it. One that is asked for again with
    the same question is sent again as it was.
    """

    def __init__(self, folder: Path, run: str) -> None:
        self.memories = folder / "memory" / run
        self.models = folder / "models" / run
        self.uploads = self.memories / "uploads.txt"

    def _sent(self, rounds: int) -> Path:
        return self.memories / f"sent-{rounds:06d}.safetensors"

    def sent_before(self, rounds: int, question: str) -> Message | None:
        """The upload that answered the same question already."""
        try:
            upload, facts = read_tensors(self._sent(rounds))
        except (OSError, SafetensorError):
            return None
        return upload if facts.get("question") == question else None

    def check_budget(self, rounds: int) -> None:
        """Refuses an upload more than the noise was made for."""
        made = len(self.uploads.read_text().splitlines()) if self.uploads.exists() else 0
        if made >= rounds:
            raise UserError(f"the privacy budget of this run is spent: {made} uploads were made")

    def note_sent(self, rounds: int, question: str, upload: Message) -> None:
        with self.uploads.open("a", encoding="ascii") as file:
            file.write(f"{rounds} {question}\n")
        save_tensors(self._sent(rounds), upload, {"question": question})

    def _file(self, rounds: int) -> Path:
        return self.memories / f"round-{rounds:06d}.safetensors"

    def candidate(self, rounds: int) -> Path:
        """The model of a round that may turn out to be the best."""
        return self.memories / f"model-{rounds:06d}.safetensors"

    def model(self, which: str) -> Path:
        return self.models / f"{which}.safetensors"

    def save(self, rounds: int, memory: Message) -> None:
        save_tensors(self._file(rounds), memory, {"round": str(rounds)})

    def load(self, rounds: int) -> Message | None:
        try:
            return read_tensors(self._file(rounds))[0]
        except (OSError, SafetensorError):
            return None

    def promote(self, rounds: int) -> None:
        """Makes a round's model the best one, if it is here."""
        file = self.candidate(rounds)
        if rounds and file.exists():
            self.models.mkdir(parents=True, exist_ok=True)
            file.replace(self.model(BEST))

    def prune(self, rounds: int, base: int) -> None:
        """Drops files of rounds that nobody will ask for again."""
        for file in self.memories.glob("*-*.safetensors"):
            number = int(file.stem.rpartition("-")[2])
            if number < rounds - KEPT and number != base:
                file.unlink(missing_ok=True)
