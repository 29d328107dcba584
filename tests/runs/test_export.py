"""Tests for exported models: equal outputs, files, refusals, explanations."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch_geometric.explain import Explainer, GNNExplainer
from torch_geometric.nn import GATConv

import polyphily
from polyphily.core.method import METHODS, create
from polyphily.core.settings import Settings
from polyphily.errors import UserError
from polyphily.graphs.encoding import Encoding
from polyphily.graphs.graph import Graph
from polyphily.graphs.rules import Rule
from polyphily.nn.backbones import BACKBONES
from polyphily.nn.plain import Model
from polyphily.nn.plain_form import plain_backbones
from polyphily.runs.decision import Decision
from polyphily.runs.export import export, plain_model, write
from polyphily.runs.models import SavedModel
from polyphily.runs.prediction import class_scores
from polyphily.runtime.network import build_network, complete

NODES, EDGES, FEATURES, CLASSES = 30, 80, 6, ("a", "b", "c")
SEPARABLE = [name for name in plain_backbones() if BACKBONES[name].separable]
ONE_WAY = [name for name in plain_backbones() if "in" in BACKBONES[name].directions()]


REFUSED = {  # they have a network of their own, or predict with more than a network
    *("adafgl", "fedath", "fedgnn", "fedhero", "fediih", "fedlit"),
    *("fedsage+", "fedspa", "fedstar", "fggp"),
}

EXPORTED = [
    name
    for name, cls in METHODS.items()
    if cls.__module__.startswith("polyphily.") and name not in REFUSED
]


class Raw:
    """A random graph as a user has it: with self-loops, repeated edges and unknown labels."""

    def __init__(
        self, seed: int = 0, *, weighted: bool = True, relations: int = 0, nodes: int = NODES
    ) -> None:
        rng = np.random.default_rng(seed)
        self.x = rng.normal(size=(nodes, FEATURES)).astype(np.float32)
        self.edges = rng.integers(0, nodes, (2, EDGES))
        self.weights = rng.integers(0, 5, EDGES) / 4 if weighted else None
        self.types = rng.integers(0, relations, EDGES) if relations else None
        self.relations = tuple(map(str, range(relations)))
        self.labels = rng.integers(-1, len(CLASSES), nodes)

    def graph(self, *, directed: bool) -> Graph:
        return Graph.build(
            self.x,
            self.edges,
            self.labels,
            edge_weights=self.weights,
            directed=directed,
            edge_types=self.types,
            relations=self.relations,
        )

    def logits(self, model: Model) -> Tensor:
        with torch.no_grad():
            out: Tensor = model(torch.from_numpy(self.x), *self.prepared(model), self.known)
        return out

    @property
    def known(self) -> Tensor:
        return torch.from_numpy(self.labels)

    def prepared(self, model: Model) -> tuple[Tensor, Tensor | None, Tensor | None]:
        def tensor(values: npt.NDArray[Any] | None) -> Tensor | None:
            return None if values is None else torch.from_numpy(values)

        edges = torch.from_numpy(self.edges)
        nodes = len(self.x)
        return model.prepare(edges, tensor(self.weights), tensor(self.types), num_nodes=nodes)


def saved(
    backbone: str | None,
    method: str = "fedavg",
    *,
    features: int = FEATURES,
    classes: tuple[str, ...] = CLASSES,
    hyperparameters: dict[str, Any] | None = None,
    **options: Any,
) -> SavedModel:
    """Return a model with random parameters."""
    chosen = create(method, hyperparameters)
    wanted = Settings(backbone=backbone, **{"hidden": 8, "heads": 2, "hops": 3, **options})
    filled = complete(wanted, chosen, "files", "accuracy")
    network = build_network(chosen, filled, features, len(classes), 0)
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: (torch.randn(value.shape[1:], generator=generator) / 2).to(value.dtype)
        for name, value in network.named_parameters()
    }
    return SavedModel(
        method=method,
        hyperparameters=hyperparameters or {},
        settings=filled,
        width=features,
        classes=classes,
        tensors=tensors,
        decision=Decision(temperature=1.5),
    )


def assert_equal_outputs(model: SavedModel, raw: Raw, *, directed: bool) -> None:
    """Compare the exported module with what `polyphily predict` computes."""
    wanted = class_scores(model, raw.graph(directed=directed))
    found = raw.logits(plain_model(model))
    assert float(wanted.std()) > 0.01  # something is compared
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


def types_of(backbone: str, count: int = 2) -> dict[str, Any]:
    return {"relations": ",".join(map(str, range(count)))} if backbone == "rgcn" else {}


# Equal outputs -----------------------------------------------------------------------------------


def test_every_backbone_has_a_plain_form() -> None:
    own = {name for name, cls in BACKBONES.items() if cls.__module__.startswith("polyphily.")}
    assert set(plain_backbones()) == own


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("backbone", plain_backbones())
def test_a_backbone_and_its_plain_form_agree(backbone: str, weighted: bool) -> None:
    raw = Raw(weighted=weighted, relations=2 if backbone == "rgcn" else 0)
    model = saved(backbone, **types_of(backbone))
    for directed in (False, True):
        assert_equal_outputs(model, raw, directed=directed)


@pytest.mark.parametrize("direction", ["in", "out"])
@pytest.mark.parametrize("backbone", ONE_WAY)
def test_directions_agree(backbone: str, direction: str) -> None:
    raw = Raw(relations=2 if backbone == "rgcn" else 0)
    model = saved(backbone, direction=direction, **types_of(backbone))
    assert_equal_outputs(model, raw, directed=True)


@pytest.mark.parametrize("backbone", SEPARABLE)
def test_separate_directions_agree(backbone: str) -> None:
    raw = Raw(relations=2 if backbone == "rgcn" else 0)
    model = saved(backbone, direction="separate", **types_of(backbone))
    assert_equal_outputs(model, raw, directed=True)


OPTIONS: dict[str, tuple[str | None, str, dict[str, Any]]] = {
    "weights unused": ("gcn", "fedavg", {"edge_weights": False}),
    "labels as inputs": ("gcn", "fedavg", {"label_inputs": 0.5}),
    "degrees as inputs": ("sage", "fedavg", {"degree_inputs": True}),
    "degrees of arcs": ("gcn", "fedavg", {"degree_inputs": True, "direction": "in"}),
    "degrees and labels": ("gcn", "fedavg", {"degree_inputs": True, "label_inputs": 0.5}),
    "degrees for voices": (None, "polyphony", {"degree_inputs": True}),
    "float64": ("gcn", "fedavg", {"dtype": "float64"}),
    "one layer": ("gcn", "fedavg", {"layers": 1}),
    "three layers": ("mlp", "fedavg", {"layers": 3}),
    "all levels": ("res-gat", "fedavg", {"readout": "jump"}),
    "shared bases": ("rgcn", "fedavg", types_of("rgcn", 12)),
    "deep routing": ("disengcn", "fedavg", {"layers": 5, "hidden": 7}),
    "residual MLP": ("unifilter", "fedavg", {"layers": 3, "hidden": FEATURES}),
    "head": (None, "fedpub", {"hyperparameters": {"head": "linear", "prune": 0.3}}),
    "more labels": (
        None,
        "polyphony",
        {"hyperparameters": {"renditions": "shared", "labels": "all"}},
    ),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options_agree(case: str) -> None:
    backbone, method, options = OPTIONS[case]
    model = saved(backbone, method, **options)
    raw = Raw(relations=len(model.settings.relation_names()))
    if case == "float64":
        raw.x = raw.x.astype(np.float64)
    assert_equal_outputs(model, raw, directed=case == "degrees of arcs")


@given(seed=st.integers(0, 10_000), nodes=st.integers(1, 12), weighted=st.booleans())
@settings(max_examples=20, deadline=None)
def test_edges_are_prepared_as_a_graph_reads_them(seed: int, nodes: int, weighted: bool) -> None:
    raw = Raw(seed, weighted=weighted, relations=3, nodes=nodes)
    for direction in ("both", "in", "out"):
        model = plain_model(saved("rgcn", direction=direction, **types_of("rgcn", 3)))
        graph = raw.graph(directed=direction != "both")
        wanted = class_scores(saved("rgcn", direction=direction, **types_of("rgcn", 3)), graph)
        torch.testing.assert_close(raw.logits(model), wanted, rtol=1e-4, atol=1e-4)
        index, weight, _ = raw.prepared(plain_model(saved("gcn", direction=direction)))
        kept = graph.arcs if graph.arcs is not None else np.ones(graph.edges.shape[1], np.bool_)
        np.testing.assert_array_equal(index, graph.edges[:, kept])
        if weighted:
            np.testing.assert_allclose(weight, graph.edge_weights[kept], rtol=1e-6)


@pytest.mark.parametrize("backbone", ["gcn", "gat", "acm-gcn", "res-sage"])
def test_outputs_agree_on_cora(backbone: str, real_data: Path) -> None:
    (graph,) = polyphily.load("cora", clients=1, partition="random", root=real_data).clients
    model = saved(
        backbone, features=graph.num_features, classes=tuple("abcdefg"), hidden=32, heads=4
    )
    data = graph.to_pyg()
    wanted = class_scores(model, graph)
    with torch.no_grad():
        found = plain_model(model)(data.x, data.edge_index)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("method", EXPORTED)
def test_an_exported_method_predicts_what_the_library_does(method: str) -> None:
    assert_equal_outputs(saved(None, method), Raw(weighted=False), directed=False)


# Refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", sorted(REFUSED))
def test_what_is_more_than_a_backbone_is_refused(method: str) -> None:
    with pytest.raises(UserError, match=rf"{re.escape(method)} cannot be exported: "):
        export(saved(None, method))


# Files -------------------------------------------------------------------------------------------


def test_a_folder_needs_torch_geometric_alone(tmp_path: Path) -> None:
    model, raw = saved("gat"), Raw()
    files = write(model, tmp_path / "exported")
    assert [file.name for file in files] == ["model.safetensors", "model.json", "module.py"]
    facts = json.loads(files[1].read_text())
    assert facts["classes"] == list(CLASSES)
    assert facts["decision"]["temperature"] == 1.5
    edges, weights, _ = raw.prepared(plain_model(model))
    torch.save({"x": torch.from_numpy(raw.x), "edges": edges, "weights": weights}, tmp_path / "in")
    code = (
        "import sys, torch; from module import load\n"
        "model, given = load('.'), torch.load('../in')\n"
        "out = model(given['x'], given['edges'], given['weights'])\n"
        "torch.save(out.detach(), '../out')\n"
        "assert not any(name.startswith('polyphily') for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "exported", check=True)
    wanted = class_scores(model, raw.graph(directed=False))
    torch.testing.assert_close(torch.load(tmp_path / "out"), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("backbone", "options"),
    [
        ("gat", {}),
        ("rgcn", {}),
        ("choir", {}),
        ("sage", {"degree_inputs": True}),
        ("gcn", {"degree_inputs": True, "direction": "in"}),
    ],
)
def test_a_program_takes_graphs_of_any_size(
    backbone: str, options: dict[str, Any], tmp_path: Path
) -> None:
    model = saved(backbone, **types_of(backbone), **options)
    if backbone == "choir":
        labels = {"voices": "gcn,res-gcn", "renditions": "shared"}
        model = saved(None, "polyphony", hyperparameters=labels, layers=1)
    write(model, tmp_path / "model.pt2")
    facts = {"model.json": ""}
    loaded = torch.export.load(tmp_path / "model.pt2", extra_files=facts).module()
    assert json.loads(facts["model.json"])["features"] == FEATURES
    module = plain_model(model)
    for nodes in (5, 40):
        raw = Raw(nodes=nodes, relations=2 if backbone == "rgcn" else 0)
        edges, weights, types = raw.prepared(module)
        more = [] if types is None else [types]
        more += [raw.known] if module.uses_labels else []
        found = loaded(torch.from_numpy(raw.x), edges, weights, *more)
        torch.testing.assert_close(found, raw.logits(module), rtol=1e-5, atol=1e-5)


def test_other_endings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a folder, or a file that ends in \.pt2"):
        write(saved("gcn"), tmp_path / "model.onnx")


# From a run --------------------------------------------------------------------------------------


def test_a_run_is_exported_from_memory_and_from_its_folder(tmp_path: Path) -> None:
    federation = polyphily.load("csbm:nodes=40,features=8", clients=2)
    result = polyphily.run("fedper", federation, rounds=2, out=tmp_path / "run")
    data = federation.to_pyg()[1]
    wanted = class_scores(result.model("client-1"), federation.clients[1])
    for source in (result, tmp_path / "run", result.model("client-1")):
        model = polyphily.export(source, client="client-1")
        found = model(data.x, data.edge_index).detach()
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match="every client has its own model"):
        polyphily.export(result)


@pytest.mark.parametrize("normalize", ["none", "row", "standard"])
def test_raw_features_are_scaled_as_in_training(normalize: str) -> None:
    raw = Raw(weighted=False)
    raw.x[:, 1] = 1e5 + raw.x[:, 1].round(1)  # float32 would not hold the mean well enough
    raw.x[0] = 0
    graph = raw.graph(directed=False)
    federation = polyphily.load(
        [graph, Raw(1, weighted=False).graph(directed=False)], normalize=normalize
    )
    result = polyphily.run("fedavg", federation, rounds=2, backbone="gcn", hidden=8)
    model = polyphily.export(result)
    found = model(model.encode(torch.from_numpy(raw.x)), raw.prepared(model)[0])
    decision = result.model().decision
    assert decision is not None
    wanted = result.predict_proba(graph).to_numpy()
    np.testing.assert_allclose(decision.probabilities(found.double()).detach(), wanted, atol=1e-5)


def test_features_of_a_table_are_not_scaled_as_an_array() -> None:
    rule = Rule("income", "number")
    model = plain_model(replace(saved("gcn"), encoding=Encoding((rule,))))
    with pytest.raises(ValueError, match="columns of a table"):
        model.encode(torch.ones(3, 1))


# Explanations ------------------------------------------------------------------------------------


@pytest.mark.parametrize("backbone", ["gcn", "gat", "sage", "acm-gcn", "res-gcn", "unifilter"])
def test_gnn_explainer_explains_a_node(backbone: str) -> None:
    GATConv(3, 4)  # changes its class when the first one is made, and must not change ours
    raw = Raw(weighted=False)
    saved_model = saved(backbone, layers=2)
    model = plain_model(saved_model)
    explainer = Explainer(
        model=model,
        algorithm=GNNExplainer(epochs=3),
        explanation_type="model",
        node_mask_type="attributes",
        edge_mask_type="object",
        model_config={
            "mode": "multiclass_classification",
            "task_level": "node",
            "return_type": "raw",
        },
    )
    edges, _, _ = raw.prepared(model)
    explanation = explainer(torch.from_numpy(raw.x), edges, index=3)
    assert explanation.edge_mask.shape == (edges.shape[1],)
    assert explanation.node_mask.shape == raw.x.shape
    seen = explanation.edge_mask > 0
    assert seen.any()
    if saved_model.module.local_reach:
        near = _within(edges, 3, 1)  # edges that end elsewhere cannot matter
        assert all(v in near for v in edges[1, seen].tolist())


def _within(edges: Tensor, node: int, hops: int) -> set[int]:
    found = {node}
    for _ in range(hops):
        found |= {int(u) for u, v in edges.T.tolist() if v in found}
    return found


def test_a_module_is_differentiable_and_trains_on() -> None:
    raw = Raw()
    model = plain_model(saved("sage"))
    loss = model(torch.from_numpy(raw.x), *raw.prepared(model)[:2]).square().mean()
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
