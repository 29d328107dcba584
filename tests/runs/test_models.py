"""Model files: every method's model predicts, from its file alone, what the run predicted."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from polyphily.core.local import Local
from polyphily.core.messages import Message
from polyphily.core.method import METHODS, create
from polyphily.core.recipes import fill
from polyphily.core.settings import Settings
from polyphily.errors import MethodError, UserError
from polyphily.graphs.graph import UNLABELLED, Graph
from polyphily.graphs.loading import Federation, load
from polyphily.methods.fedavg import FedAvg
from polyphily.runs.decision import Decision
from polyphily.runs.models import BEST, FACTS, LAST, ModelFile, SavedModel, choose_model
from polyphily.runs.opened import load_model, open_run
from polyphily.runs.prediction import bytes_to_predict, class_scores
from polyphily.runs.run import Execution
from polyphily.runtime.client import Clients

# Stages that would otherwise begin after the rounds of these tests.
EARLY: dict[str, dict[str, Any]] = {
    "adafgl": {"federated": 2},
    "s2fgl": {"warm_up": 1},
    "fedgnn": {"expand": True},
    "fggp": {"prediction": "prototypes"},
}


def federation(seed: int = 0) -> Federation:
    return load("csbm:nodes=60,features=8", clients=3, seed=seed)


def executed(method: str, folder: Path, **options: Any) -> Execution:
    settings = Settings(**{"rounds": 4, "epochs": 2, "hidden": 8, **options})
    own = create(method, EARLY.get(method, {}))
    execution = Execution(own, [federation()], settings, folder)
    assert execution.folder
    execution.folder.create(execution.config(), execution.federations)
    execution.go()
    return execution


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_file_predicts_what_the_run_predicted(method: str, tmp_path: Path) -> None:
    execution = executed(method, tmp_path / "run")
    simulation, (data,) = execution.simulation, execution.federations
    sizes = list(simulation.cohort.segments.sizes)
    for which, view in ((LAST, execution._last()), (BEST, execution.best())):
        expected = torch.split(simulation.predict(view), sizes)
        for graph, scores in zip(data.clients, expected, strict=True):
            model = load_model(tmp_path / "run", graph.name, which=which)
            assert model.which == which
            found = class_scores(model, graph)
            torch.testing.assert_close(found, scores, rtol=1e-4, atol=1e-5)
    new = other_graph(data.clients[0])
    assert torch.isfinite(class_scores(model, new)).all()
    if model.make_method().reach(model.module) is not None:
        assert_same_in_blocks(model)


def assert_same_in_blocks(model: SavedModel) -> None:
    """Predict a long chain of nodes, a third of which have labels, whole and in blocks."""
    rng = np.random.default_rng(1)
    nodes = np.arange(200)
    labels = np.where(nodes % 3, UNLABELLED, rng.integers(0, 2, 200))
    features = rng.normal(size=(200, model.width)).astype(np.float32)
    chain = Graph.build(features, np.stack([nodes[:-1], nodes[1:]]), labels)
    limit = bytes_to_predict(chain, model.module, 60, 120)
    found = class_scores(model, chain, memory=f"{limit}B")
    torch.testing.assert_close(found, class_scores(model, chain), rtol=1e-5, atol=1e-5)


def other_graph(graph: Graph) -> Graph:
    """A smaller graph without labels, with new nodes."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(30, graph.num_features)).astype(np.float32)
    return Graph.build(features, rng.integers(0, 30, (2, 60)), np.full(30, UNLABELLED))


def test_the_best_round_has_the_state_of_its_own_round(tmp_path: Path) -> None:
    """FGGP's prototypes are those of the best round, not of the last."""
    execution = executed("fggp", tmp_path / "run", rounds=6, metric="accuracy")
    last, best = (load_model(tmp_path / "run", which=which) for which in (LAST, BEST))
    assert last.round == 6
    assert best.round == execution.tracker.best_round["received"][0]
    assert set(last.received) == set(best.received) == {"buffer", "filled"}
    if best.round != last.round:
        assert not torch.equal(last.received["buffer"], best.received["buffer"])


@dataclass(frozen=True)
class Recalls(FedAvg):
    """FedAvg whose predictions add a number that each client keeps."""

    def init_client_state(self, cohort: Any, network: Any, params: Message) -> Message:
        return {"own": torch.arange(1.0, 1 + len(cohort))}

    def predict(self, local: Local) -> torch.Tensor:
        return super().predict(local) + local.cohort.segments.expand(local.memory["own"])[:, None]


@dataclass(frozen=True)
class SaysSo(Recalls):
    def prediction_state(self) -> Sequence[str]:
        return ("memory/own",)


def test_state_that_is_read_must_be_declared() -> None:
    Recalls.name = SaysSo.name = "recalls"
    settings = Settings(rounds=1, epochs=1, hidden=8, backbone="gcn")
    with pytest.raises(MethodError, match=r"Recalls.predict reads 'memory/own'.*prediction_state"):
        Execution(Recalls(), [federation()], settings, None).go()
    result = Execution(SaysSo(), [federation()], settings, None).go()
    assert {m.memory["own"].item() for m in result.saved.values()} == {1.0, 2.0, 3.0}
    assert "client-2-best" in result.saved  # a model per client, though all weights are shared


# Files -------------------------------------------------------------------------------------------


def small(**changes: Any) -> SavedModel:
    settings = fill(Settings(backbone="gcn", hidden=4), "files", "accuracy", dense=True)
    decision = Decision(1.5, "b", 0.3, "f1", 0.2, 0.1)
    model = SavedModel(
        method="fedavg",
        hyperparameters=dataclasses.asdict(create("fedavg")),
        settings=settings,
        width=3,
        classes=("a", "b"),
        tensors={},
        seed=7,
        round=5,
        which=BEST,
        dataset="data",
        network="gcn",
        decision=decision,
        decisions={"north": Decision(2.0, "b", 0.7, "f1"), "south": decision},
    )
    tensors = {n: p.detach()[0] for n, p in model.module.named_parameters()}
    return dataclasses.replace(model, tensors=tensors, **changes)


def test_a_model_reads_back_as_it_was(tmp_path: Path) -> None:
    model = small(client="bank north/1", number=2)
    model.save(tmp_path / "m.safetensors")
    found = SavedModel.load(tmp_path / "m.safetensors")
    plain = {"tensors": {}, "versions": {}}
    assert dataclasses.replace(found, **plain) == dataclasses.replace(model, **plain)
    assert found.params.keys() == model.params.keys()
    assert all(torch.equal(found.params[n], t) for n, t in model.params.items())
    assert found.shape.features == 3
    assert found.versions["torch"] == torch.__version__
    # Parameters have their own names in the file, as in a state dict.
    assert load_file(tmp_path / "m.safetensors").keys() == model.params.keys()


def test_equal_models_are_equal_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        small().save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def _changed(**changes: Any) -> dict[str, str]:
    facts = small().facts()
    return {FACTS: json.dumps({**facts, **changes})}


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"polyphily": "0.1.0", "method": "fedavg"}, "by version 0.1.0 .* format 1.* train again"),
        ({"polyphily": '{"plan": {}}'}, "by an older version .* format 1.* train again"),
        (_changed(format=3, polyphily="9.9"), "by version 9.9 .* format 3.* reads format 2"),
        ({}, "not a model file"),
        ({FACTS: "["}, "not a model file"),
        ({FACTS: "[]"}, "not a model file"),
        ({FACTS: json.dumps({"format": 2})}, "not a model file"),
        (_changed(settings={"roundz": 3}), "roundz"),
        (_changed(settings={"hidden": -3}), "hidden"),
        (_changed(clients=3), "not a model file"),
        (_changed(decision=Decision(1.0, "c", 0.5).to_json()), "positive class is 'c'"),
        (_changed(decision=Decision(0.0).to_json()), "temperature is 0"),
        (_changed(encoding={"rules": 3}), "m.safetensors: "),
    ],
)
def test_other_files_are_refused(metadata: dict[str, str], message: str, tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    save_file({"w": torch.zeros(1)}, file, metadata=metadata)
    with pytest.raises(UserError, match=message) as caught:
        SavedModel.load(file)
    assert str(file) in str(caught.value)


def test_what_is_no_tensor_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"\x80\x04no")
    with pytest.raises(UserError, match="not a model file of Polyphily"):
        SavedModel.load(tmp_path / "x.safetensors")
    with pytest.raises(UserError, match="no model"):
        SavedModel.load(tmp_path / "y.safetensors")


def test_weights_of_another_network_are_refused() -> None:
    model, graph = small(), other_graph(federation().clients[0])
    narrow = dataclasses.replace(graph, features=graph.features[:, :3])
    assert class_scores(model, narrow).shape == (30, 2)
    (name, value), *rest = model.tensors.items()
    for tensors in (dict(rest), {**model.tensors, name: value[:1]}, {**model.tensors, "x": value}):
        with pytest.raises(UserError, match=r"does not fit fedavg as it is now: .*train again"):
            class_scores(dataclasses.replace(model, tensors=tensors), narrow)


# Which one ---------------------------------------------------------------------------------------


def test_a_global_model_is_used_as_a_client_uses_it() -> None:
    model = small()
    assert model.for_client(None) is model
    north = model.for_client("north")
    assert (north.client, north.decision) == ("north", model.decisions["north"])
    with pytest.raises(UserError, match="unknown client 'nort'"):
        model.for_client("nort")
    with pytest.raises(UserError, match="of client 'north', not of 'south'"):
        north.for_client("south")


names = st.text(st.characters(codec="ascii"), min_size=1, max_size=5)


@given(
    clients=st.lists(names, min_size=1, max_size=4, unique=True),
    seeds=st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True),
    shared=st.booleans(),
    data=st.data(),
)
def test_a_model_is_found_by_client_seed_and_round(
    clients: list[str], seeds: list[int], shared: bool, data: st.DataObject
) -> None:
    owners = [None] if shared else clients
    files = [
        ModelFile(Path(f"{owner}-{seed}-{which}"), owner, seed, which)
        for seed in seeds
        for owner in owners
        for which in (BEST, LAST)
    ]
    client, seed = data.draw(st.sampled_from(clients)), data.draw(st.sampled_from(seeds))
    which = data.draw(st.sampled_from((BEST, LAST)))
    found = choose_model(files, client=client, seed=seed, which=which)
    assert found == ModelFile(found.path, None if shared else client, seed, which)
    if shared or len(clients) == 1:
        assert choose_model(files, seed=seed, which=which) == found
        assert choose_model(files, which=which).seed == seeds[0]
    else:
        with pytest.raises(UserError, match="every client has its own model"):
            choose_model(files)
    with pytest.raises(UserError, match="no run with seed 10"):
        choose_model(files, seed=10)


def test_a_folder_is_opened_with_its_models(tmp_path: Path) -> None:
    executed("fedper", tmp_path / "run")
    run = open_run(tmp_path / "run")
    assert run.models == sorted(f"client-{k}{end}" for k in range(3) for end in ("", "-best"))
    with pytest.raises(UserError, match=r"every client has its own model: name one .*client-0"):
        run.model()
    with pytest.raises(UserError, match="unknown kind of model 'first'"):
        run.model("client-0", which="first")
    assert run.model("client-1", which=LAST).client == "client-1"


def test_clients_see_in_predictions_what_a_file_holds() -> None:
    """What is not declared is not there, however it is looked up."""
    seen: list[set[str]] = []

    class Looks(FedAvg):
        def predict(self, local: Local) -> torch.Tensor:
            seen.append({*local.memory, *local.received})
            return super().predict(local)

    Looks.name = "looks"
    execution = Execution(Looks(), [federation()], Settings(rounds=1, hidden=8), None)
    execution.go()
    assert isinstance(execution.simulation.clients, Clients)
    assert seen
    assert set().union(*seen) == set()
