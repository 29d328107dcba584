"""A whole run: the summary against numbers worked out here, seeds, stopping, and the run folder."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from sklearn.metrics import f1_score, roc_auc_score

import polyphily
from builders import predict, random_graphs
from cases import SIZES, small_federation
from polyphily import Federation, Graph, Masks, Result
from polyphily.core.cohort import Cohort
from polyphily.core.local import Local
from polyphily.core.messages import Message
from polyphily.core.method import METHODS, create
from polyphily.core.settings import Settings
from polyphily.errors import TrainingError, UserError
from polyphily.graphs.partitions import Partition
from polyphily.methods.fedavg import FedAvg
from polyphily.runs.run import Execution
from polyphily.runs.summary import mean_of
from polyphily.runtime.client import Clients
from polyphily.runtime.network import build_network

SMALL: dict[str, Any] = {
    "rounds": 7,
    "epochs": 2,
    "backbone": "gcn",
    "hidden": 8,
    "dropout": 0.3,
    "input_dropout": 0.0,
    "lr": 0.02,
}
MOMENTS = ("final", "last5", "best_val")
VIEWS = ("received", "trained")
METRICS = ("accuracy", "f1_macro", "f1_weighted", "auc")
DIVERGES = {
    "optimizer": "sgd",
    "lr": 1e4,
    "weight_decay": 1.0,
    "epochs": 1,
}  # weights grow 10⁴-fold


def tiny(clients: int = 3, **options: Any) -> Federation:
    return polyphily.load("csbm:nodes=60,features=8", clients=clients, **options)


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def model_bytes(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted((folder / "models").iterdir())}


def model_weights(folder: Path) -> dict[str, dict[str, bytes]]:
    return {
        file.name: {n: t.numpy().tobytes() for n, t in load_file(file).items()}
        for file in sorted((folder / "models").iterdir())
    }


def outcome(summary: Mapping[str, Any]) -> dict[str, Any]:
    """What of a summary does not depend on the clock and the machine."""
    apart = ("seconds_per_round_median", "seconds_evaluation_median", "setup_seconds")
    apart += ("peak_memory_mb", "engine", "settings", "versions")
    return {key: value for key, value in summary.items() if key not in apart}


def assert_alike(first: Any, second: Any, gap: float = 1e-6) -> None:
    """Equal structures, numbers up to `gap`."""
    if isinstance(first, Mapping):
        assert first.keys() == second.keys()
        for key in first:
            assert_alike(first[key], second[key], gap)
    elif isinstance(first, list):
        assert len(first) == len(second)
        for ours, theirs in zip(first, second, strict=True):
            assert_alike(ours, theirs, gap)
    elif isinstance(first, float):
        assert first == pytest.approx(second, abs=gap)
    else:
        assert first == second


@dataclass
class Done:
    """A finished run with its folder and federation."""

    result: Result
    folder: Path
    federation: Federation

    @property
    def summary(self) -> dict[str, Any]:
        return self.result.summary


@pytest.fixture(scope="module", params=["fedavg", "local"])
def done(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A global and a personal method on two classes."""
    folder = tmp_path_factory.mktemp(request.param) / "run"
    federation = tiny(seed=2)
    return Done(polyphily.run(request.param, federation, out=folder, **SMALL), folder, federation)


# The summary -----------------------------------------------------------------------------------


def assert_scores(scores: Mapping[str, Any], clients: int, *, binary: bool) -> None:
    for split in ("val", "test"):
        for metric in METRICS:
            if metric == "auc" and not binary:
                assert not [name for name in scores[split] if name.startswith("auc")]
                continue
            assert 0 <= scores[split][metric] <= 1
            assert 0 <= scores[split][f"{metric}_client_mean"] <= 1
            assert len(scores[split][f"{metric}_per_client"]) == clients


def test_the_summary_has_every_documented_field(done: Done) -> None:
    summary, federation = done.summary, done.federation
    name = summary["method"]
    assert name in ("fedavg", "local")
    assert summary["dataset"] == "csbm:nodes=60,features=8"
    assert summary["partition"] == {
        "name": "natural",
        "clients": 3,
        "sha256": federation.partition.sha256,
    }
    assert summary["split"] == "0.6,0.2,0.2"
    assert summary["seeds"] == [2]
    assert (summary["rounds"], summary["epochs"]) == (7, 2)
    assert (summary["backbone"], summary["device"], summary["engine"]) == ("gcn", "cpu", "stacked")
    assert summary["evaluated"] == ("global" if name == "fedavg" else "personal")
    for place in (summary, *(summary["views"][view] for view in VIEWS)):
        for moment in MOMENTS:
            assert_scores(place[moment], 3, binary=True)
    assert summary["views"].keys() == set(VIEWS)
    for name in ("seconds_per_round_median", "setup_seconds", "peak_memory_mb"):
        assert summary[name] > 0
    assert summary["clients"] == [graph.name for graph in federation.clients]
    assert summary["classes"] == ["-1", "+1"]
    assert "per_seed" not in summary


def test_the_area_is_left_out_where_there_are_more_than_two_classes() -> None:
    summary = polyphily.run("fedavg", small_federation(), **SMALL).summary
    for place in (summary, *(summary["views"][view] for view in VIEWS)):
        for moment in MOMENTS:
            assert_scores(place[moment], len(SIZES), binary=False)


def test_bytes_are_those_of_the_model_and_nothing_for_a_method_that_shares_nothing(
    done: Done,
) -> None:
    up, down = (done.summary[f"bytes_{way}_per_round"] for way in ("up", "down"))
    if done.summary["method"] == "local":
        assert (up, down) == (0, 0)
        return
    model = 4 * sum(tensor.numel() for tensor in done.result.models["global"].values())
    assert down == 3 * model
    assert up == 3 * (model + 4)  # and the client's weight


def test_the_headline_is_the_view_in_which_the_method_is_evaluated(done: Done) -> None:
    summary = done.summary
    view = "received" if summary["evaluated"] == "global" else "trained"
    other = next(name for name in VIEWS if name != view)
    for moment in MOMENTS:
        assert summary[moment] == summary["views"][view][moment]
    received, trained = (summary["views"][name]["last5"] for name in (view, other))
    # A method that shares nothing receives nothing: its clients keep what they have trained.
    assert (received == trained) == (summary["method"] == "local")


def test_final_scores_are_those_of_the_predictions(done: Done) -> None:
    classes = np.array(done.federation.classes)
    for split in ("val", "test"):
        truth, found = [], []
        for k, graph in enumerate(done.federation.clients):
            mask = getattr(graph.masks, split)
            truth.append(classes[graph.labels[mask]])
            found.append(done.result.predict(k, which="last")[mask])
        scores = done.summary["final"][split]
        right = [float((a == b).mean()) for a, b in zip(truth, found, strict=True)]
        assert scores["accuracy_per_client"] == pytest.approx(right)
        assert scores["accuracy_client_mean"] == pytest.approx(statistics.fmean(right))
        together = np.concatenate(truth) == np.concatenate(found)
        assert scores["accuracy"] == pytest.approx(float(together.mean()))
        for average in ("macro", "weighted"):
            expected = [f1_score(*pair, average=average) for pair in zip(truth, found, strict=True)]
            assert scores[f"f1_{average}_per_client"] == pytest.approx(expected)


def logits_of(done: Done, name: str, client: int) -> torch.Tensor:
    """Class scores of a client's nodes, from the weights in a model's file and nothing else."""
    graph, settings = done.federation.clients[client], Settings(**done.summary["settings"])
    method = create(done.summary["method"], done.summary["hyperparameters"])
    classes = len(done.federation.classes)
    network = build_network(method, settings, graph.num_features, classes, 0)
    weights = load_file(done.folder / "models" / f"{name}.safetensors")
    cohort = Cohort([graph], [(0, 0)], len(done.federation.classes))
    stacked = {n: weight.unsqueeze(0) for n, weight in weights.items()}
    return predict(network, stacked, cohort).logits.detach()


def test_saved_models_give_the_scores_of_the_summary(done: Done) -> None:
    for suffix, moment in (("", "final"), ("-best", "best_val")):
        accuracy, area = [], []
        for k, graph in enumerate(done.federation.clients):
            name = "global" if done.summary["evaluated"] == "global" else graph.name
            logits = logits_of(done, name + suffix, k)
            assert graph.masks is not None
            labels = graph.labels[graph.masks.test]
            chosen = logits.argmax(dim=1).numpy()
            expected = np.array(done.federation.classes)[chosen]
            which = "best" if suffix else "last"
            np.testing.assert_array_equal(done.result.predict(k, which=which), expected)
            accuracy.append(float((chosen[graph.masks.test] == labels).mean()))
            score = (logits[:, 1] - logits[:, 0]).numpy()[graph.masks.test]
            area.append(roc_auc_score(labels, score))
        test = done.summary[moment]["test"]
        assert test["accuracy_per_client"] == pytest.approx(accuracy)
        assert test["auc_per_client"] == pytest.approx(area)


def test_models_in_memory_are_those_of_the_files(done: Done) -> None:
    for name, params in done.result.models.items():
        saved = load_file(done.folder / "models" / f"{name}.safetensors")
        assert saved.keys() == params.keys()
        assert all(torch.equal(saved[key], value) for key, value in params.items())


@pytest.mark.parametrize("view", VIEWS)
def test_moments_are_those_of_the_recorded_rounds(done: Done, view: str) -> None:
    rounds, found = records(done.folder), done.summary["views"][view]
    assert [record["round"] for record in rounds] == list(range(1, 8))
    assert_alike(found["final"], rounds[-1][view], 0)
    for split in ("val", "test"):
        for metric in METRICS:
            last = [record[view][split][metric] for record in rounds[-5:]]
            assert found["last5"][split][metric] == pytest.approx(statistics.fmean(last))
            each = [record[view][split][f"{metric}_per_client"] for record in rounds[-5:]]
            assert found["last5"][split][f"{metric}_per_client"] == pytest.approx(
                np.mean(each, axis=0).tolist()
            )


@pytest.mark.parametrize("view", VIEWS)
def test_the_best_round_is_chosen_on_validation_alone(done: Done, view: str) -> None:
    rounds, best = records(done.folder), done.summary["views"][view]["best_val"]
    if done.summary["method"] == "fedavg":
        values = [record[view]["val"]["accuracy"] for record in rounds]
        at = int(np.argmax(values))
        assert best["round"] == at + 1
        assert_alike({"val": best["val"], "test": best["test"]}, rounds[at][view], 0)
        return
    each = np.array([record[view]["val"]["accuracy_per_client"] for record in rounds])
    at_each = np.argmax(each, axis=0)
    assert best["round"] == (at_each + 1).tolist()
    for split in ("val", "test"):
        expected = [rounds[r][view][split]["accuracy_per_client"][k] for k, r in enumerate(at_each)]
        assert best[split]["accuracy_per_client"] == expected


def test_whose_validation_score_selects_is_the_users_choice(tmp_path: Path) -> None:
    federation = tiny(seed=2)
    each = polyphily.run("fedavg", federation, **SMALL, selection="client")
    assert len(each.summary["best_val"]["round"]) == 3
    assert each.summary["selection"] == {"by": "client", "metric": "accuracy"}
    together = polyphily.run("local", federation, out=tmp_path, **SMALL, selection="federation")
    values = [record["trained"]["val"]["accuracy"] for record in records(tmp_path)]
    assert together.summary["best_val"]["round"] == int(np.argmax(values)) + 1
    assert set(together.models) == {f"client-{k}{end}" for k in range(3) for end in ("", "-best")}


def test_the_area_may_select(tmp_path: Path) -> None:
    summary = polyphily.run("fedavg", tiny(), out=tmp_path, **SMALL, metric="auc").summary
    values = [record["received"]["val"]["auc"] for record in records(tmp_path)]
    assert summary["best_val"]["round"] == int(np.argmax(values)) + 1
    assert summary["selection"]["metric"] == "auc"


# Several seeds ---------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["fedavg", "local"])
def seeds(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = tmp_path_factory.mktemp(request.param) / "run"
    federations = [tiny(seed=seed) for seed in (3, 5)]
    result = polyphily.run(request.param, federations, out=folder, **SMALL)
    return Done(result, folder, federations[0])


def test_every_seed_is_its_own_separate_run(seeds: Done) -> None:
    for i, seed in enumerate((3, 5)):
        alone = polyphily.run(seeds.summary["method"], tiny(seed=seed), **SMALL)
        together = seeds.summary["per_seed"][i]
        assert together["seed"] == seed
        assert_alike({m: together[m] for m in MOMENTS}, {m: alone.summary[m] for m in MOMENTS})
        assert_alike(together["views"], alone.summary["views"])
        for name, params in alone.models.items():
            for key, value in params.items():
                assert torch.allclose(seeds.result.models[f"seed-{seed}-{name}"][key], value)
        for k in range(3):
            np.testing.assert_array_equal(seeds.result.predict(k, seed=seed), alone.predict(k))
    np.testing.assert_array_equal(seeds.result.predict(1), seeds.result.predict(1, seed=3))


def test_mean_and_deviation_are_over_seeds(seeds: Done) -> None:
    summary = seeds.summary
    places = [(summary, summary["per_seed"])]
    places += [
        (summary["views"][view], [run["views"][view] for run in summary["per_seed"]])
        for view in VIEWS
    ]
    for whole, each in places:
        for moment in MOMENTS:
            for split in ("val", "test"):
                scores = whole[moment][split]
                for name in ("accuracy", "accuracy_client_mean", "f1_macro", "auc"):
                    values = [run[moment][split][name] for run in each]
                    assert scores[name] == pytest.approx(statistics.fmean(values))
                    assert scores[f"{name}_std"] == pytest.approx(statistics.stdev(values))
                lists = [run[moment][split]["accuracy_per_client"] for run in each]
                assert scores["accuracy_per_client"] == pytest.approx(np.mean(lists, axis=0))
    assert summary["seeds"] == [3, 5]
    hashes = summary["partition"]["sha256_per_seed"]
    assert hashes == [tiny(seed=seed).partition.sha256 for seed in (3, 5)]
    assert summary["partition"]["sha256"] == hashes[0] != hashes[1]


def test_rounds_are_recorded_per_seed(seeds: Done) -> None:
    for record in records(seeds.folder):
        assert [run["seed"] for run in record["per_seed"]] == [3, 5]
        values = [run["received"]["test"]["accuracy"] for run in record["per_seed"]]
        assert record["received"]["test"]["accuracy"] == pytest.approx(statistics.fmean(values))
        losses = [run["loss"] for run in record["per_seed"]]
        assert record["loss"] == pytest.approx(statistics.fmean(losses))


def one_class_tested(seed: int, *, lacking: bool) -> Federation:
    """Two clients of two classes; where `lacking`, every test node is of class 0."""
    part = np.repeat([0, 1, 2], [10, 4, 6])
    masks = Masks(part == 0, part == 1, part == 2)
    graphs = []
    for k, graph in enumerate(random_graphs([20, 20], seed=seed)):
        labels = np.where((part == 2) & lacking, 0, np.arange(20) % 2)
        graphs.append(
            Graph(graph.features, graph.edges, labels, own_masks=(masks,), name=f"client-{k}")
        )
    return polyphily.load(graphs, seed=seed)


@pytest.mark.parametrize("order", [(True, False), (False, True)])
def test_a_seed_without_an_area_leaves_it_to_the_others(order: tuple[bool, bool]) -> None:
    federations = [one_class_tested(s, lacking=lacking) for s, lacking in enumerate(order)]
    summary = polyphily.run("fedavg", federations, **SMALL, metric="auc").summary
    known = summary["per_seed"][order.index(False)]["final"]["test"]
    assert "auc" not in summary["per_seed"][order.index(True)]["final"]["test"]
    assert summary["final"]["test"]["auc"] == known["auc"]
    assert summary["final"]["test"]["auc_per_client"] == known["auc_per_client"]


def test_means_of_structures() -> None:
    first = {"a": 1.0, "list": [1.0, None], "n": None, "inner": {"b": 2}, "round": 3}
    second = {"a": 3.0, "list": [2.0, 4.0], "n": None, "inner": {"b": 4}, "round": 4}
    assert mean_of([first, second]) == {
        "a": 2.0,
        "list": [1.5, 4.0],
        "n": None,
        "inner": {"b": 3.0},
        "round": 3.5,
    }
    spread = mean_of([first, second], spread=True)
    assert spread["a_std"] == pytest.approx(math.sqrt(2))
    assert spread["inner"]["b_std"] == pytest.approx(math.sqrt(2))
    assert "round_std" not in spread
    assert "n_std" not in spread
    assert mean_of([{"list": [1, 2]}, {"list": [1]}]) == {"list": []}


def test_federations_side_by_side_must_go_together() -> None:
    with pytest.raises(UserError, match="different seeds"):
        polyphily.run("fedavg", [tiny(), tiny()], **SMALL)
    with pytest.raises(UserError, match="same classes"):
        polyphily.run("fedavg", [tiny(seed=1), small_federation()], **SMALL)
    wider = polyphily.load("csbm:nodes=60,features=9", clients=3)
    with pytest.raises(UserError, match="same features"):
        polyphily.run("fedavg", [tiny(seed=1), wider], **SMALL)
    mixed = polyphily.load([*random_graphs([20], features=6), *random_graphs([20], features=7)])
    with pytest.raises(UserError, match=r"numbers of features: \[6, 7\]"):
        polyphily.run("fedavg", mixed, **SMALL)
    with pytest.raises(UserError, match="no federation"):
        polyphily.run("fedavg", [], **SMALL)


# What a run is told ----------------------------------------------------------------------------


def test_hyperparameters_and_settings_are_keywords() -> None:
    federation = tiny()
    result = polyphily.run("fedprox", federation, **SMALL, mu=0.5, clip=1.0)
    assert result.summary["hyperparameters"]["mu"] == 0.5
    assert result.summary["settings"]["clip"] == 1.0
    plain = polyphily.run("fedprox", federation, **SMALL, clip=1.0)
    assert plain.summary["hyperparameters"]["mu"] == 0.01
    key = next(iter(result.models["global"]))
    assert not torch.equal(result.models["global"][key], plain.models["global"][key])


def test_a_method_may_be_given_as_an_object() -> None:
    federation = tiny()
    named = polyphily.run("fedavg", federation, **SMALL, weighting="uniform")
    given = polyphily.run(FedAvg(weighting="uniform"), federation, **SMALL)
    assert_alike(outcome(given.summary), outcome(named.summary), 0)
    with pytest.raises(UserError, match="weighting"):
        polyphily.run(FedAvg(), federation, **SMALL, weighting="uniform")


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("fedavgg", {}, "unknown method 'fedavgg': did you mean 'fedavg'"),
        ("fedprox", {"muh": 1}, "unknown setting 'muh': did you mean 'mu'"),
        ("fedavg", {"epoch": 1}, "did you mean 'epochs'"),
        ("fedprox", {"mu": "much"}, "'mu' takes a value of type float"),
        ("fedavg", {"weighting": "node"}, "did you mean 'nodes'"),
        ("fedavg", {"backbone": "gcnn"}, "did you mean 'gcn'"),
        ("fedavg", {"backbone": "gat", "heads": 3}, "multiple of heads"),
        ("fedavg", {"rounds": 0}, "rounds: 0 is out of bounds"),
        ("fedavg", {"device": "tpu"}, "unknown device 'tpu'"),
        ("fedavg", {"device": "cuda:x"}, "unknown device 'cuda:x'"),
        ("fedavg", {"engine": "stack"}, "did you mean 'stacked'"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    method: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        polyphily.run(method, tiny(), out=tmp_path / "run", **{**SMALL, **options})
    assert message in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_the_area_selects_among_more_than_two_classes() -> None:
    result = polyphily.run("fedavg", small_federation(), **SMALL, metric="auc")
    best = result.summary["best_val"]
    assert 0 <= best["val"]["auc"] <= 1
    assert result.summary["baseline"]["val"]["auc"] == pytest.approx(0.5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_is_refused_where_there_is_none() -> None:
    for device in ("cuda", "cuda:1"):
        with pytest.raises(UserError, match="no CUDA device"):
            polyphily.run("fedavg", tiny(), **SMALL, device=device)


def test_no_hyperparameter_has_the_name_of_a_setting() -> None:
    settings = {field.name for field in dataclasses.fields(Settings)} | {"out", "progress"}
    for name, method in METHODS.items():
        assert not settings & method.hyperparameters().keys(), name


def test_what_a_user_leaves_open_is_written_down(done: Done) -> None:
    settings = done.summary["settings"]
    assert settings.keys() == {field.name for field in dataclasses.fields(Settings)}
    assert settings["optimizer"] in ("adam", "adamw", "sgd")
    assert {name: settings[name] for name in SMALL} == SMALL


def test_progress_is_told_every_round(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    polyphily.run("fedavg", tiny(), out=tmp_path, progress=seen.append, **SMALL)
    assert seen == records(tmp_path)


# Evaluating now and then, and stopping ---------------------------------------------------------


def test_rounds_between_evaluations_have_no_scores(tmp_path: Path) -> None:
    summary = polyphily.run("fedavg", tiny(), out=tmp_path, **SMALL, evaluate_every=3).summary
    rounds = records(tmp_path)
    scored = [record["round"] for record in rounds if "received" in record]
    assert scored == [3, 6, 7]
    assert all("loss" in record for record in rounds)
    assert summary["rounds"] == 7
    values = [r["received"]["test"]["accuracy"] for r in rounds if "received" in r]
    assert summary["last5"]["test"]["accuracy"] == pytest.approx(statistics.fmean(values))
    assert summary["best_val"]["round"] in scored


def test_evaluating_changes_nothing_but_what_is_known() -> None:
    often = polyphily.run("moon", tiny(), **SMALL)
    seldom = polyphily.run("moon", tiny(), **SMALL, evaluate_every=100)
    assert_alike(often.summary["final"], seldom.summary["final"], 0)
    assert seldom.summary["best_val"]["round"] == 7


@pytest.mark.parametrize(("method", "passes"), [("local", 1), ("fedper", 2), ("fedavg", 2)])
def test_views_that_cannot_differ_are_predicted_once(
    method: str, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    predicted: list[Local] = []
    of_view = Clients.predict

    def noted(clients: Clients, view: Local) -> torch.Tensor:
        predicted.append(view)
        return of_view(clients, view)

    execution = Execution(create(method), [tiny()], Settings(**SMALL), None)
    monkeypatch.setattr(Clients, "predict", noted)
    record = execution.advance()
    assert len(predicted) == passes
    for view in VIEWS:
        logits = execution.simulation.predict(getattr(execution.simulation, view)())
        scores = execution.evaluator.scores(logits)[:, 1, 0].tolist()
        assert record[view]["test"]["accuracy_per_client"] == scores


def test_a_federation_stops_when_it_no_longer_gets_better(tmp_path: Path) -> None:
    options = {**SMALL, "rounds": 200}
    summary = polyphily.run("fedavg", tiny(), out=tmp_path, **options, patience=3).summary
    assert summary["rounds"] < 200
    assert summary["rounds"] == summary["best_val"]["round"] + 3
    rounds = records(tmp_path)
    assert len(rounds) == summary["rounds"]
    assert_alike(summary["final"], rounds[-1]["received"], 0)
    full = polyphily.run("fedavg", tiny(), **{**options, "rounds": summary["rounds"]}).summary
    assert_alike(summary["final"], full["final"], 0)


def test_clients_that_select_for_themselves_stop_for_themselves(tmp_path: Path) -> None:
    options = {**SMALL, "rounds": 200}
    federation = tiny(clients=4, seed=1)
    result = polyphily.run("local", federation, out=tmp_path, **options, patience=3)
    best = result.summary["best_val"]["round"]
    assert len(set(best)) > 1
    rounds = records(tmp_path)
    assert len(rounds) == max(best) + 3 < 200
    for record in rounds:
        assert record["selected"] == sum(record["round"] <= at + 3 for at in best)
    # A client that has stopped keeps its model: it is that of a run that ends there.
    first = int(np.argmin(best))
    short = polyphily.run("local", federation, **{**SMALL, "rounds": best[first] + 3})
    for key, value in short.models[f"client-{first}"].items():
        assert torch.allclose(result.models[f"client-{first}"][key], value, atol=1e-6)


# Predictions -----------------------------------------------------------------------------------


def test_a_client_is_named_or_counted(done: Done) -> None:
    result = done.result
    for k, graph in enumerate(done.federation.clients):
        found = result.predict(graph.name)
        assert found.shape == (graph.num_nodes,)
        assert set(found) <= {"-1", "+1"}
        np.testing.assert_array_equal(found, result.predict(k))
        np.testing.assert_array_equal(found, result.predict(k - 3))


def test_clients_and_seeds_that_do_not_exist_are_refused(done: Done) -> None:
    with pytest.raises(UserError, match="unknown client 'client-9': did you mean 'client-"):
        done.result.predict("client-9")
    for k in (3, -4):
        with pytest.raises(UserError, match=f"no client {k}: there are 3"):
            done.result.predict(k)
    with pytest.raises(UserError, match=r"no run with seed 0: there are \[2\]"):
        done.result.predict(0, seed=0)


def test_predictions_carry_the_names_of_the_classes() -> None:
    federation = dataclasses.replace(small_federation(), classes=("ash", "birch", "cedar"))
    result = polyphily.run("local", federation, **SMALL)
    assert set(np.concatenate([result.predict(k) for k in range(4)])) <= {"ash", "birch", "cedar"}


# The run folder --------------------------------------------------------------------------------


def test_a_run_leaves_its_files(done: Done) -> None:
    names = ["global"] if done.summary["method"] == "fedavg" else [f"client-{k}" for k in range(3)]
    models = [f"models/{name}{end}.safetensors" for name in names for end in ("", "-best")]
    files = {str(p.relative_to(done.folder)) for p in done.folder.rglob("*") if p.is_file()}
    assert files == {
        *("config.toml", "partition.npz", "metrics.jsonl", "summary.json", "curves.json"),
        *("start.json", "lock", "checkpoint/state.safetensors"),
        *models,
    }
    assert done.result.folder == done.folder
    assert json.loads((done.folder / "summary.json").read_text()) == done.summary
    saved = Partition.load(done.folder / "partition.npz")
    assert saved.sha256 == done.federation.partition.sha256
    with safe_open(done.folder / models[0], framework="pt") as file:
        (facts,) = map(json.loads, file.metadata().values())
    expected = {
        "polyphily": polyphily.__version__,
        "method": done.summary["method"],
        "backbone": "gcn",
        "network": "gcn",
        "dataset": "csbm:nodes=60,features=8",
        "classes": done.summary["classes"],
        "settings": done.summary["settings"],
    }
    assert {name: facts[name] for name in expected} == expected


def test_files_of_several_seeds_carry_the_seed(seeds: Done) -> None:
    single = (
        ["global"] if seeds.summary["method"] == "fedavg" else [f"client-{k}" for k in range(3)]
    )
    assert {file.name for file in (seeds.folder / "models").iterdir()} == {
        f"seed-{seed}-{name}{end}.safetensors"
        for seed in (3, 5)
        for name in single
        for end in ("", "-best")
    }
    for file, seed in (("partition.npz", 3), ("partition-seed-5.npz", 5)):
        saved = Partition.load(seeds.folder / file)
        assert saved.sha256 == tiny(seed=seed).partition.sha256
    assert tomllib.loads((seeds.folder / "config.toml").read_text())["seeds"] == [3, 5]


def test_the_config_says_everything(done: Done) -> None:
    config = tomllib.loads((done.folder / "config.toml").read_text())
    assert config.pop("set", {}) == done.summary["hyperparameters"]
    assert config.pop("method") == done.summary["method"]
    assert config.pop("seeds") == [2]
    data = {name: config.pop(name) for name in done.federation.request}
    assert data == done.federation.request
    assert config == done.summary["settings"]


def test_a_folder_that_holds_a_run_is_refused_and_left_as_it_is(done: Done) -> None:
    before = {p: p.read_bytes() for p in done.folder.rglob("*") if p.is_file()}
    with pytest.raises(UserError, match="holds a run already"):
        polyphily.run("fedavg", tiny(), out=done.folder, **SMALL)
    assert {p: p.read_bytes() for p in done.folder.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("method", ["fedavg", "local", "moon", "scaffold"])
def test_the_same_seed_gives_the_same_bytes(method: str, tmp_path: Path) -> None:
    for name in ("one", "two"):
        polyphily.run(method, tiny(), out=tmp_path / name, **SMALL, participation=0.7)
    assert model_bytes(tmp_path / "one") == model_bytes(tmp_path / "two")
    polyphily.run(method, tiny(seed=1), out=tmp_path / "other", **SMALL)
    assert model_bytes(tmp_path / "one") != model_bytes(tmp_path / "other")


@pytest.mark.parametrize("method", ["fedavg", "local", "fedproto"])
def test_engines_give_the_same_summary(method: str) -> None:
    federations = [tiny(seed=seed) for seed in (0, 1)]
    options = {**SMALL, "dtype": "float64", "epochs": "1-3"}
    stacked, sequential = (
        polyphily.run(method, federations, **options, engine=engine).summary
        for engine in ("stacked", "sequential")
    )
    assert (stacked["engine"], sequential["engine"]) == ("stacked", "sequential")
    assert_alike(outcome(stacked), outcome(sequential), 1e-6)


# Failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 100])
def test_the_models_of_the_last_good_round_are_kept(every: int, tmp_path: Path) -> None:
    options = {**SMALL, **DIVERGES, "rounds": 50, "evaluate_every": every}
    with pytest.raises(TrainingError, match="not finite") as caught:
        polyphily.run("fedavg", tiny(), out=tmp_path / "failed", **options)
    good = len(records(tmp_path / "failed"))
    assert good > 1
    assert f"round {good + 1}:" in str(caught.value)
    assert not (tmp_path / "failed" / "summary.json").exists()
    short = {**options, "rounds": good}
    polyphily.run("fedavg", tiny(), out=tmp_path / "good", **short)
    failed, expected = model_weights(tmp_path / "failed"), model_weights(tmp_path / "good")
    assert failed["global.safetensors"] == expected["global.safetensors"]
    if every == 1:
        assert failed == expected


def test_nothing_is_kept_of_a_run_that_fails_at_once(tmp_path: Path) -> None:
    options = {**SMALL, "optimizer": "sgd", "lr": 1e38, "weight_decay": 1.0}
    with pytest.raises(TrainingError, match="round 1:"):
        polyphily.run("fedavg", tiny(), out=tmp_path, **options)
    assert model_bytes(tmp_path) == {}


@dataclass(frozen=True)
class OneSeedFails(FedAvg):
    """FedAvg in which the clients of seed 1 send NaN in the third round."""

    def upload(self, local: Local) -> Message:
        sent = super().upload(local)
        if local.round_index < 2:
            return sent
        bad = torch.tensor([seed == 1 for seed, _ in local.cohort.keys])
        return {
            n: torch.where(bad.view(-1, *[1] * (t.dim() - 1)), torch.nan, t)
            for n, t in sent.items()
        }


def test_when_one_seed_fails_the_others_keep_the_round_before(tmp_path: Path) -> None:
    federations = [tiny(seed=seed) for seed in (0, 1)]
    OneSeedFails.name = "one-seed-fails"
    with pytest.raises(TrainingError, match="round 3"):
        polyphily.run(OneSeedFails(), federations, out=tmp_path / "failed", **SMALL)
    good = polyphily.run("fedavg", federations, **{**SMALL, "rounds": 2})
    for seed in (0, 1):
        kept = load_file(tmp_path / "failed" / "models" / f"seed-{seed}-global.safetensors")
        for key, value in good.models[f"seed-{seed}-global"].items():
            assert torch.equal(kept[key], value)


def test_rounds_in_which_nobody_answers_change_nothing(tmp_path: Path) -> None:
    options = {**SMALL, "participation": 0.1, "failures": 0.6}  # one is selected, and fails
    federation = tiny(clients=4)
    result = polyphily.run("fedavg", federation, out=tmp_path, **options)
    short = polyphily.run("fedavg", federation, **{**options, "rounds": 1})
    for record in records(tmp_path):
        assert len(record["failed"]) == record["selected"] == 1
        assert (record["loss"], record["bytes_up"]) == (None, 0)
    for key, value in short.models["global"].items():
        assert torch.equal(result.models["global"][key], value)


def test_flower_is_not_run_in_process_behind_the_users_back() -> None:
    with pytest.raises(UserError, match="command line"):
        polyphily.run("fedavg", small_federation(), engine="flower", rounds=1)


def test_a_best_round_in_the_warm_up_is_said(tmp_path: Path) -> None:
    federation = polyphily.load("csbm:nodes=40", clients=2, split="0.6,0.2,0.2")
    short = polyphily.run("s2fgl", federation, backbone="gcn", rounds=3, warm_up=5).summary
    assert short["warm_up"]["rounds"] == 5
    assert short["warm_up"]["best_round_within"]
    assert short["notes"][-1] == "s2fgl has not begun: it acts after round 5, the run has 3"
    still = {"backbone": "gcn", "rounds": 6, "warm_up": 5, "lr": 1e-9}
    longer = polyphily.run("s2fgl", federation, **still).summary
    assert longer["best_val"]["round"] == 1
    assert "the best round lies in the warm-up" in longer["notes"][-1]
    begun = polyphily.run("s2fgl", federation, backbone="gcn", rounds=3, warm_up=0).summary
    assert begun["warm_up"]["rounds"] == 1
    assert "warm_up" not in polyphily.run("fedavg", federation, rounds=2).summary


def test_stages_are_named_and_counted(tmp_path: Path) -> None:
    @dataclasses.dataclass(frozen=True)
    class Staged(FedAvg):
        name = "staged"

        def stage(self, round_index: int) -> str:
            return "first" if round_index < 2 else "second"

    federation = polyphily.load("csbm:nodes=40", clients=2, split="0.6,0.2,0.2")
    result = polyphily.run(Staged(), federation, rounds=5, out=tmp_path / "run")
    stages = result.summary["stages"]
    assert [(stage["name"], stage["rounds"]) for stage in stages] == [("first", 2), ("second", 3)]
    per_round = result.summary["bytes_up_per_round"]
    assert [stage["bytes_up"] for stage in stages] == [2 * per_round, 3 * per_round]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["stage"] for line in lines] == ["first"] * 2 + ["second"] * 3
    assert "stages" not in polyphily.run("fedavg", federation, rounds=2).summary
