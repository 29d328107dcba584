"""Decisions, baselines, warnings and curves of whole runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score

import polyphily
from polyphily.core.method import create
from polyphily.core.settings import from_mapping
from polyphily.graphs.loading import Federation
from polyphily.runs.assessment import (
    CLIENT_POINTS,
    POINTS,
    Assessment,
    Scored,
    baseline_name,
    below_baseline,
    by_client,
    class_warnings,
    pooled,
)
from polyphily.runs.decision import Decision, decide
from polyphily.runs.folder import RunFolder
from polyphily.runs.run import Execution

RARE = "csbm:nodes=400,features=6,positives=0.08,mu=200"
SMALL: dict[str, Any] = {"rounds": 3, "hidden": 8, "backbone": "gcn"}


def rare(seed: int = 0, clients: int = 3) -> Federation:
    return polyphily.load(RARE, clients=clients, seed=seed)


@pytest.fixture(scope="module")
def execution(tmp_path_factory: pytest.TempPathFactory) -> Execution:
    out = tmp_path_factory.mktemp("runs") / "rare"
    chosen = from_mapping({**SMALL, "threshold_rule": "precision=0.5"})
    made = Execution(create("fedavg", {}), [rare()], chosen, out)
    assert made.folder
    made.folder.create(made.config(), made.federations)
    made.go()
    return made


def summary_of(execution: Execution) -> dict[str, Any]:
    assert execution.folder
    found = execution.folder.read_summary()
    assert found is not None
    return found


def test_decisions_are_chosen_on_validation_nodes_of_the_best_models(execution: Execution) -> None:
    logits = execution.simulation.predict(execution.best())
    own, start = [], 0
    for graph in execution.federations[0].clients:
        nodes = np.flatnonzero(graph.masks.val)  # type: ignore[union-attr]
        own.append(Scored(logits[start + nodes], torch.from_numpy(graph.labels[nodes])))
        start += graph.num_nodes
    (found,) = execution.assessments
    rule = {"rule": "precision=0.5"}
    classes = execution.federations[0].classes
    assert found.together == decide(*pooled(own), classes, **rule, source="pooled")
    assert found.clients == tuple(decide(*nodes, classes, **rule) for nodes in own)


def test_labels_of_other_nodes_do_not_change_decisions(execution: Execution) -> None:
    federation = execution.federations[0]
    test = [Scored(n.logits, 1 - n.labels) for n in execution.assessments[0].test]
    val = by_client(
        execution.evaluator.predictions(execution.simulation.predict(execution.best()))[0]
    )
    other = Assessment.of(federation, val, test, execution.settings)
    assert other.clients == execution.assessments[0].clients
    assert other.summary() != execution.assessments[0].summary()


def test_the_summary_has_decisions_and_their_test_scores(execution: Execution) -> None:
    section = summary_of(execution)["decision"]
    (found,) = execution.assessments
    assert Decision.from_json(section["pooled"]) == found.together
    assert [Decision.from_json(own) for own in section["per_client"]] == list(found.clients)
    assert [own["client"] for own in section["per_client"]] == list(found.names)
    test = section["pooled"]["test"]
    assert test["nodes"] == sum(len(nodes.labels) for nodes in found.test)
    nodes = pooled(found.test)
    above = found.together.probabilities(nodes.logits.double())[:, 1] >= found.together.threshold
    assert test["flagged"] == pytest.approx(float(above.double().mean()))


def test_the_baseline_stands_beside_the_scores(execution: Execution) -> None:
    summary = summary_of(execution)
    federation = execution.federations[0]
    shares = [graph.labels[graph.masks.test].mean() for graph in federation.clients]  # type: ignore[union-attr]
    test = summary["baseline"]["test"]
    assert test["auprc_per_client"] == pytest.approx(shares)
    assert test["accuracy_per_client"] == pytest.approx([1 - share for share in shares])
    assert test.keys() == summary["best_val"]["test"].keys()


def test_curves_are_those_of_the_test_nodes(execution: Execution) -> None:
    assert execution.folder
    curves = RunFolder(execution.folder.path).read_curves()
    found = curves["precision_recall"]
    nodes = pooled(execution.assessments[0].test)
    score, hit = (nodes.logits[:, 1] - nodes.logits[:, 0]).numpy(), nodes.labels.numpy() == 1
    assert found["positive"] == "+1"
    assert found["share"] == pytest.approx(hit.mean(), abs=1e-6)
    recall, precision = np.array(found["pooled"]).T
    assert len(recall) <= POINTS
    area = (np.diff(recall, prepend=0) * precision).sum()
    assert area == pytest.approx(average_precision_score(hit, score), abs=2e-3)
    assert len(found["clients"]) == 3
    assert all(len(own["points"]) <= CLIENT_POINTS for own in found["clients"])
    for moment in ("before", "after"):
        count, _, right = np.array(curves["reliability"][moment]).T
        assert count.sum() == len(hit)
        assert (count * right).sum() == pytest.approx(hit.sum(), abs=0.1)


def test_several_seeds_have_their_own_decisions() -> None:
    result = polyphily.run("fedavg", [rare(0), rare(1)], **SMALL)
    assert "decision" not in result.summary
    first, second = (own["decision"]["pooled"] for own in result.summary["per_seed"])
    assert first["temperature"] != second["temperature"]
    assert "auprc_std" in result.summary["baseline"]["test"]
    both = [own["baseline"]["test"]["auprc"] for own in result.summary["per_seed"]]
    assert result.summary["baseline"]["test"]["auprc"] == pytest.approx(np.mean(both))


def test_a_client_with_few_validation_nodes_takes_the_common_decision() -> None:
    federation = polyphily.load("csbm:nodes=60,features=8", clients=3, seed=0)  # 12 of validation
    result = polyphily.run("fedavg", federation, **SMALL)
    section = result.summary["decision"]
    assert section["pooled"]["source"] == "pooled"
    assert section["pooled"]["nodes"] == 36
    for own in section["per_client"]:
        assert own["source"] == "pooled"
        assert own["temperature"] == section["pooled"]["temperature"]


# The metric and the warnings -------------------------------------------------------------------


def test_a_rare_class_is_selected_by_auprc_with_a_note() -> None:
    federation = rare()
    assert federation.metric == "auprc"
    result = polyphily.run("fedavg", federation, **SMALL)
    assert result.summary["selection"]["metric"] == "auprc"
    assert any("'+1' has 7.9 % of the train labels" in n for n in result.summary["notes"])
    chosen = polyphily.run("fedavg", federation, **SMALL, metric="accuracy")
    assert chosen.summary["selection"]["metric"] == "accuracy"
    assert not any("of the train labels: the best" in n for n in chosen.summary["notes"])


@pytest.mark.parametrize(
    ("data", "metric"),
    [("csbm:nodes=200,positives=0.12", "accuracy"), ("csbm:nodes=200,positives=0.95", "auprc")],
)
def test_only_a_class_below_a_tenth_is_rare(data: str, metric: str) -> None:
    assert polyphily.load(data, clients=2).metric == metric


def assessed(labels: list[int], predicted: list[int]) -> Assessment:
    logits = torch.nn.functional.one_hot(torch.tensor(predicted), 2).double()
    nodes = Scored(logits, torch.tensor(labels))
    return Assessment(("-1", "+1"), ("a",), Decision(), (Decision(),), (nodes,))


def test_a_class_that_is_never_predicted() -> None:
    missed = assessed([0, 1, 1, 0], [0, 0, 0, 0])
    assert missed.never_predicted() == {"+1": 2}
    assert assessed([0, 1], [0, 1]).never_predicted() == {}
    assert assessed([0, 0], [0, 0]).never_predicted() == {}  # no test node has it
    notes = class_warnings([rare()], from_mapping({"metric": "accuracy"}), [missed])
    (note,) = notes
    assert note.startswith("'+1' is never predicted at the best round, but 2 test nodes have it")
    both = class_warnings(
        [rare()], from_mapping({"metric": "accuracy"}), [missed, assessed([0, 1], [0, 1])]
    )
    assert "with 1 of 2 seeds" in both[0]


def test_a_positive_class_that_is_the_frequent_one() -> None:
    federation = polyphily.load("csbm:nodes=200,positives=0.9", clients=2)
    fine = assessed([0, 1], [0, 1])
    (note,) = class_warnings([federation], from_mapping({"metric": "accuracy"}), [fine])
    assert note.startswith("the positive class is '+1', which has 90.0 % of the train labels")
    assert "--positive -1" in note
    chosen = from_mapping({"metric": "accuracy", "positive": "-1"})
    assert class_warnings([federation], chosen, [fine]) == []


def test_the_positive_class_can_be_chosen() -> None:
    federation = rare()
    second = polyphily.run("fedavg", federation, **SMALL).summary
    first = polyphily.run("fedavg", federation, **SMALL, positive="-1").summary
    assert second["decision"]["pooled"]["positive"] == "+1"
    assert first["decision"]["pooled"]["positive"] == "-1"
    assert first["baseline"]["test"]["auprc"] == pytest.approx(
        1 - second["baseline"]["test"]["auprc"]
    )
    with pytest.raises(polyphily.UserError, match="unknown class 'fraud'"):
        polyphily.run("fedavg", federation, **SMALL, positive="fraud")


def test_a_run_that_does_not_beat_the_trivial_predictor() -> None:
    own = {"auprc": 0.02, "auprc_per_client": [0.01, 0.03, None]}
    trivial = {"auprc": 0.02, "auprc_per_client": [0.02, 0.02, 0.02]}
    note = below_baseline([own], [trivial], "auprc")
    assert note.startswith("no better than the random ranking: test auprc 2.00 %")
    assert note.endswith("1 of 2 clients do not beat their own")
    better = own | {"auprc": 0.5}
    assert below_baseline([better], [trivial], "auprc") == ""
    assert "in 1 of 2 seeds" in below_baseline([own, better], [trivial, trivial], "auprc")
    assert below_baseline([{}], [trivial], "auprc") == ""
    assert baseline_name("accuracy") == "majority class"


def test_a_model_that_learns_nothing_is_reported() -> None:
    result = polyphily.run("fedavg", rare(), **{**SMALL, "rounds": 1}, lr=1e-12, metric="accuracy")
    best = result.summary["best_val"]["test"]["accuracy"]
    trivial = result.summary["baseline"]["test"]["accuracy"]
    noted = any("no better than the majority class" in n for n in result.summary["remarks"])
    assert noted == (best <= trivial)
    assert noted


def test_old_checkpoints_resume_with_new_metrics_unknown(tmp_path: Path) -> None:
    federation = rare()
    chosen = from_mapping({**SMALL, "metric": "accuracy"})
    made = Execution(create("fedavg", {}), [federation], chosen, tmp_path / "run")
    assert made.folder
    made.folder.create(made.config(), [federation])
    made.go()
    found = made.folder.load_checkpoint()
    assert found is not None
    tensors, progress = found
    old = {n: t for n, t in tensors.items() if n != "tracker/metrics"}
    for name in old:
        if name.startswith(("tracker/best/", "tracker/recent/")):
            old[name] = old[name][..., :4]
    made.folder.save_checkpoint(old, progress)
    longer = replace(chosen, rounds=4)
    again = Execution(create("fedavg", {}), [federation], longer, tmp_path / "run")
    assert again.restore() == 3
    before = again.tracker.recent["received"][-1]
    assert not np.isnan(before[..., :4]).any()
    assert np.isnan(before[..., 4:]).all()
    summary = again.go().summary
    assert summary["final"]["test"]["auprc"] > 0
    assert json.dumps(summary["last5"]["test"]["accuracy"]) != "null"
