"""Sites in this process, and ways for them to misbehave: what the tests of flower/ share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from polyphily.core.method import create
from polyphily.core.recipes import fill
from polyphily.core.settings import Settings
from polyphily.errors import UserError
from polyphily.flower.joining import Answer, Policy, event_writer
from polyphily.flower.keys import Identity
from polyphily.flower.plan import Plan, Schema
from polyphily.flower.server import Coordinator
from polyphily.flower.site import Site
from polyphily.flower.site_graph import SiteGraph
from polyphily.flower.wire import DISMISS, Parcel
from polyphily.graphs.loading import Federation, load
from polyphily.runs.folder import RunFolder

DATA = "csbm:nodes=60-120,features=8,gap=0.6"
Twist = Callable[[str, Parcel, Parcel], Parcel | Answer | None]
"""What becomes of a site's reply to a message; None is lost on the way."""


def federation(clients: int = 3, seed: int = 0) -> Federation:
    return load(DATA, clients=clients, seed=seed)


def schema_of(data: Federation) -> Schema:
    classes = tuple(str(c) for c in range(len(data.classes)))
    return Schema((), data.clients[0].num_features, classes)


def sites_of(data: Federation, place: Path) -> dict[str, Site]:
    """A site per client, with the federation's split."""
    schema = schema_of(data)
    keys = {graph.name: ec.generate_private_key(ec.SECP384R1()) for graph in data.clients}
    publics = {name: key.public_key() for name, key in keys.items()}
    return {
        graph.name: Site(
            graph.name,
            SiteGraph(replace(graph, masks=None, own_masks=(graph.masks,)), schema),
            place / graph.name,
            identity=Identity(keys[graph.name], publics),
        )
        for graph in data.clients
    }


def settings_for(method: str, **given: object) -> Settings:
    chosen = {"rounds": 3, "epochs": 2, "hidden": 8, "backbone": create(method).backbone or "gcn"}
    return fill(Settings(**chosen | given), "files", "accuracy", dense=True)  # type: ignore[arg-type]


def plan_for(data: Federation, method: str, **given: object) -> Plan:
    names = tuple(graph.name for graph in data.clients)
    settings = settings_for(method, **given)
    return Plan("a-run", method, {}, settings, schema_of(data), names, seed=data.seed)


class Wires:
    """A transport within this process; every message goes through its bytes, there and back.

    Args:
        sites: who is connected.
        twist: what becomes of replies.

    Attributes:
        gated: whether replies pass the sites' gate, as in a deployment: errors become answers, and
            what leaves is logged.
    """

    gated = False

    def __init__(self, sites: Mapping[str, Site], twist: Twist | None = None) -> None:
        self.sites, self.twist = dict(sites), twist
        self.asked: list[tuple[str, Parcel]] = []
        self.dismissed: dict[str, str] = {}

    def online(self) -> set[str]:
        return set(self.sites)

    def ask(
        self,
        messages: Mapping[str, Parcel],
        timeout: float,
        grace: Mapping[str, float] | None = None,
    ) -> Iterator[tuple[str, Answer]]:
        for name, message in messages.items():
            asked = Parcel.unpack(*message.pack())
            self.asked.append((name, asked))
            reply: Parcel | Answer | None
            if asked.facts["kind"] == DISMISS:
                with pytest.raises(UserError, match="left this site out") as told:
                    self.sites[name].answer(asked)
                self.dismissed[name] = str(told.value)
                continue
            if self.gated:
                yield name, self.sites[name].reply(*asked.pack(), lambda text: None)
                continue
            reply = self.sites[name].answer(asked)
            if self.twist is not None:
                assert isinstance(reply, Parcel)
                reply = self.twist(name, asked, reply)
            if isinstance(reply, Parcel):
                reply = Answer(*reply.pack())
            if reply is not None:
                yield name, reply


def coordinate(
    plan: Plan, wires: Wires, folder: Path, min_sites: int = 1, **given: Any
) -> Coordinator:
    """A coordinator whose folder is laid out where it is new."""
    run = RunFolder(folder)
    if not folder.exists():
        run.create({}, [])
    policy = Policy(min_sites, **{"timeout": 5, "repeats": 1, **given})
    return Coordinator(plan, wires, run, policy, event_writer(run))


def graph_arrays(graph: object) -> dict[str, np.ndarray]:
    """A graph as the arrays of an .npz file, without a split."""
    return {"x": graph.features, "edge_index": graph.edges, "y": graph.labels}  # type: ignore[attr-defined]
