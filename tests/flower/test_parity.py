"""Every method on Flower equals the simulation after three rounds, with its own parts at work.

A server and three sites of one client each train through the code of a deployment: the server's
folder and the sites' bundles, the handshake, and Flower's messages as bytes. Only the network is
missing. Everything that the server and the sites hold afterwards is compared with the simulation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("flwr")

from flower.federations import DATA, federation
from flower.grid import Grid, transport
from polyphily.core.messages import Message, State
from polyphily.core.method import METHODS, Method, create
from polyphily.core.settings import Settings
from polyphily.engines.simulation import Simulation
from polyphily.flower.checkpoint import ServerCheckpoint
from polyphily.flower.deployment import complete_for_sites
from polyphily.flower.loopback import deploy, graph_file
from polyphily.flower.site import Site
from polyphily.flower.site_files import SiteState
from polyphily.flower.site_graph import SiteGraph
from polyphily.flower.wire import FINISH, ROUND
from polyphily.graphs.loading import Federation, load
from polyphily.testing.comparing import difference
from polyphily.testing.examples import of_client, with_clients, with_edge_attributes

ROUNDS = 3
EQUAL = 1e-9  # relative to a tensor's largest entry; the engines add numbers in another order
OTHER = 1e-6  # predictions that differ by more come from another method


def three() -> Federation:
    return federation(3)


def overlapping() -> Federation:
    """Return three parts of one graph that share nodes, some of them with all their neighbours."""
    whole = load(DATA, clients=1).clients[0].with_ids()
    half = whole.num_nodes // 2
    parts = [np.arange(half + 20), np.arange(10, half + 30)[::-1], np.arange(half, 2 * half)]
    graphs = [whole.subgraph(part, f"client-{k}") for k, part in enumerate(parts)]
    return load([dataclasses.replace(g, masks=None) for g in graphs], split="0.5,0.25,0.25:client")


def attributed() -> Federation:
    """Return clients whose edges have weights, directions and types, but for one."""
    first, second, third = three().clients
    graphs = (
        with_edge_attributes(first, relations=("work", "family")),
        with_edge_attributes(second, relations=("family", "trade")),
        third,
    )
    return with_clients(three(), graphs)


@dataclass(frozen=True)
class Form:
    """A method with hyperparameters under which its parts work within three rounds.

    Attributes:
        method: its name.
        given: hyperparameters.
        without: hyperparameters that each switch a part off, or names of methods without it. The
            predictions after three rounds must differ from every one of them.
        settings: of the run.
        data: what it is trained on.
        stages: the stage of every round in the records.
        reached: tells from the server's state that a part has acted.
    """

    method: str
    given: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    without: Sequence[Mapping[str, Any] | str] = ()
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    data: Callable[[], Federation] = three
    stages: Sequence[str] = ("", "", "")
    reached: Callable[[State], bool] = lambda _: True

    def create(self, part: Mapping[str, Any] | str | None = None) -> Method:
        """Return the method, or what it is without a part."""
        if isinstance(part, str):
            return create(part)
        return create(self.method, {**self.given, **(part or {})})

    def complete(self, method: Method) -> Settings:
        """Return the settings, as the server of a deployment fills them in."""
        own = METHODS[self.method].backbone or "gcn"
        chosen = {"rounds": ROUNDS, "epochs": 2, "hidden": 8, "dtype": "float64", "backbone": own}
        given = Settings(**chosen | dict(self.settings))  # type: ignore[arg-type]
        data = self.data()
        return complete_for_sites(
            given, method, dense=True, classes=len(data.classes), relations=data.relations
        )


def split_up(state: State) -> bool:
    """Return whether the clients are in more than one cluster."""
    return len(state["cluster"].unique()) > 1


def matched(state: State) -> bool:
    """Return whether the third party has found nodes of two clients with the same neighbours."""
    return bool((state["matches"] > 0).any())


def buffered(state: State) -> bool:
    """Return whether the server holds anything beside the model."""
    return any(not name.startswith("model/") for name in state)


FORMS = {
    "local": Form("local", without=["fedavg"]),
    "fedavg": Form("fedavg", without=["local"]),
    "norms at home": Form("fedavg", settings={"backbone": "res-gcn", "norms": "home"}),
    "robust": Form("fedavg", settings={"robust": "median"}),
    "label inputs": Form("fedavg", settings={"label_inputs": 0.5}),
    "degree inputs": Form("fedavg", settings={"degree_inputs": True}),
    "weights of edges": Form("fedavg", data=attributed),
    "directions of edges": Form(
        "fedavg", settings={"backbone": "gat", "direction": "separate"}, data=attributed
    ),
    "types of edges": Form(
        "fedavg", settings={"backbone": "rgcn", "direction": "separate"}, data=attributed
    ),
    "fedprox": Form("fedprox", {"mu": 0.1}, [{"mu": 0.0}]),
    "fedper": Form("fedper", without=["fedavg", "local"]),
    "fednova": Form("fednova", without=["fedavg"], settings={"epochs": "1-3"}),
    "fedopt": Form("fedopt", without=["fedavg", {"rule": "yogi"}], reached=buffered),
    "moon": Form("moon", without=[{"mu": 0.0}]),
    "fedproto": Form("fedproto", without=[{"pull": 0.0}], reached=buffered),
    "scaffold": Form("scaffold", without=["fedavg", {"option": "II"}], reached=buffered),
    # The five papers
    "fedspa": Form("fedspa", without=[{"sfpd": False}, {"prior": False}, {"posterior": False}]),
    "fedgsp": Form(  # no vectors are sent in the third round
        "fedgsp",
        {"exchange": 2},
        [{"sharing": 0.0}, {"complementing": 0.0}, {"strengths": "control"}],
    ),
    "fedhero": Form("fedhero", without=[{"share": "none"}, {"alpha": 1.0}, {"smoothness": 0.0}]),
    "s2fgl": Form(  # both terms from the second round
        "s2fgl", {"warm_up": 1, "ramp": 1}, [{"nlir": False}, {"fgma": False}, {"warm_up": 2}]
    ),
    "fedath": Form(
        "fedath", without=[{"use_entropy": False}, {"use_independence": False}, {"share": "all"}]
    ),
    "polyphony": Form(
        "polyphony",
        {"mixing": "own", "audition": 2, "fewest": 0},
        [{"labels": "none"}, {"private": "none"}, {"renditions": "shared"}, {"mixing": "even"}],
        stages=("audition", "audition", "concert"),
    ),
    # Their baselines
    "adafgl": Form(
        "adafgl",
        {"federated": 1},
        [{"adaptation": "fine-tuning"}, {"federated": 3}],
        stages=("federated", "local", "local"),
    ),
    "fedfa": Form("fedfa", {"probability": 1.0}, [{"spread": "client"}, {"spread": "even"}]),
    "fedgnn": Form("fedgnn", without=[{"expand": False}], data=overlapping, reached=matched),
    "fedgta": Form(  # two clients are partners, the third has none
        "fedgta",
        {"threshold": 0.9999},
        [{"threshold": 1.0}, {"threshold": 0.5}, {"confidence": "nodes"}],
    ),
    "fediih": Form(
        "fediih", without=[{"weights": "even"}, {"weights": "averaged"}, {"encoder": "labels"}]
    ),
    "fedlit": Form("fedlit", without=[{"assignment": "random"}, {"align": False}]),
    "fedpub": Form("fedpub", without=[{"masks": False}, {"mixture": "even"}, {"proximity": 0.0}]),
    "fedsage": Form("fedsage", without=[{"weighting": "nodes"}]),
    "fedsage+, mended": Form(
        "fedsage+",
        {"generator_rounds": 1, "generator_steps": 5, "first_rounds": 1},
        [{"mend": "off"}, {"mend": "shuffled"}, {"generator_rounds": 0}],
        stages=("generator", "generator", "classifier"),
    ),
    "fedsage+, answers": Form(  # an answer needs two rounds
        "fedsage+",
        {"generator_rounds": 2, "generator_steps": 5, "first_rounds": 1},
        [{"cross": 0.0}],
        stages=("generator", "generator", "generator"),
    ),
    "fedstar": Form("fedstar", without=[{"share": "none"}, {"share": "all"}]),
    "fedtad": Form(
        "fedtad",
        {"distil_lr": 0.001, "nodes": 30},
        [{"server_epochs": 0}, {"generator_steps": 0}, {"weights": "uniform"}],
        reached=buffered,
    ),
    "fggp": Form(  # nearest nodes are searched anew in every round
        "fggp", {"refresh": 1}, [{"refresh": 20}, {"align": 0.0}, {"second_view": False}]
    ),
    "fgssl": Form("fgssl", without=[{"lambda_c": 0.0}, {"lambda_d": 0.0}, {"teacher": "local"}]),
    "gcfl": Form("gcfl", {"warm_up": 1, "ratio": 0.99}, [{"ratio": 0.0}], reached=split_up),
    "gcfl+": Form(
        "gcfl+", {"warm_up": 1, "ratio": 0.99, "length": 2}, [{"ratio": 0.0}], reached=split_up
    ),
}


@dataclass(frozen=True)
class Outcome:
    """What a run on Flower left behind.

    Attributes:
        state: the server's.
        memories: what each site keeps, its trained model among it.
        downloads: what each site was sent after the last round.
        stages: of the rounds in the records.
        uploads: names of tensors in the answers of every round.
    """

    state: State
    memories: list[Message]
    downloads: list[Message]
    stages: tuple[str, ...]
    uploads: list[set[str]]


def on_flower(form: Form, place: Path, monkeypatch: pytest.MonkeyPatch) -> Outcome:
    data, method = form.data(), form.create()
    deployment = deploy(place, [graph.name for graph in data.clients], data.clients)
    settings = dataclasses.asdict(form.complete(method))
    name = deployment.new_run(
        method.name,
        {
            **{key: value for key, value in settings.items() if value is not None},
            "seed": data.seed,
            "classes": [str(c) for c in range(len(data.classes))],
        },
        dataclasses.asdict(method),
    )
    folders = {site: deployment.path / "bundles" / site for site in deployment.sites}
    sites = {
        site: Site(site, SiteGraph.read(graph_file(place, site)), folder)
        for site, folder in folders.items()
    }
    channel = transport(sites, monkeypatch)
    deployment.conduct(name, channel)
    assert isinstance(channel.grid, Grid)
    exchanges, run = channel.grid.exchanges, deployment.run_folder(name)
    last = {site: asked for site, asked, _ in exchanges if asked.facts["kind"] == FINISH}
    checkpoint = ServerCheckpoint.load(run)
    assert checkpoint is not None
    return Outcome(
        checkpoint.state,
        [SiteState(folder, name).load(ROUNDS) or {} for folder in folders.values()],
        [last[site].tensors for site in sites],
        tuple(record.get("stage", "") for record in run.records()),
        [set(reply.tensors) for _, asked, reply in exchanges if asked.facts["kind"] == ROUND],
    )


def simulated(form: Form, part: Mapping[str, Any] | str | None = None) -> Simulation:
    """Return a simulation of the method after three rounds, or of what it is without a part."""
    method = form.create(part)
    simulation = Simulation(method, [form.data()], form.complete(method))
    for _ in range(ROUNDS):
        simulation.advance()
    return simulation


@cache
def simulated_form(name: str) -> Simulation:
    return simulated(FORMS[name])


def predictions(simulation: Simulation) -> Tensor:
    return torch.cat([simulation.predict(v) for v in (simulation.received(), simulation.trained())])


def test_every_method_is_here() -> None:
    assert {form.method for form in FORMS.values()} == set(METHODS)


@pytest.mark.parametrize("name", FORMS)
def test_flower_equals_the_simulation(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare the server's state, and what each site received, trained and keeps."""
    form, expected = FORMS[name], simulated_form(name)
    found = on_flower(form, tmp_path, monkeypatch)
    assert difference(found.state, expected.states[0], EQUAL) is None
    sent = expected.servers[0].download(range(len(found.memories)))
    for k, (memory, download) in enumerate(zip(found.memories, found.downloads, strict=True)):
        assert difference(memory, of_client(expected.memory, k), EQUAL) is None
        assert difference(download, of_client(sent, k), EQUAL) is None
    declared = [set(expected.servers[0].upload_contract(r).shapes) for r in range(ROUNDS)]
    assert found.uploads == [names for names in declared for _ in found.memories]
    assert found.stages == tuple(form.stages)
    assert form.reached(found.state)


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.without])
def test_every_part_acts_within_these_rounds(name: str) -> None:
    """Without one of its parts the method predicts something else."""
    form = FORMS[name]
    own = predictions(simulated_form(name))
    assert torch.isfinite(own).all()
    for part in form.without:
        other = predictions(simulated(form, part))
        assert difference({"logits": own}, {"logits": other}, OTHER) is not None, part
