"""Backbones: against independent formulas, blind to other clients, every parameter in use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import pytest
import scipy.sparse as sp
import torch
import torch_geometric.nn as pyg
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from builders import (
    call,
    cohort_of,
    dense_adjacency,
    dense_features,
    edge_index,
    of_client,
    predict,
    random_cohort,
    random_graph,
    random_graphs,
    random_parameters,
    split_by_client,
    with_features,
)
from cases import simulate, small_federation
from polyphily.core.method import create
from polyphily.core.recipes import USUAL, fill
from polyphily.core.sampling import check_sampling
from polyphily.core.settings import Settings
from polyphily.errors import UserError
from polyphily.graphs.graph import Graph
from polyphily.nn.backbones import (
    BACKBONES,
    GCN,
    GPRGNN,
    Backbone,
    Shape,
    build,
    register_backbone,
)

SHAPE = Shape(features=6, classes=3, hidden=8, layers=2, dropout=0.4, heads=2, hops=4)
SIZES = [7, 5, 5, 1]
every_backbone = pytest.mark.parametrize("name", BACKBONES)
kinds_of_features = pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
numbers_of_layers = pytest.mark.parametrize("layers", [1, 2, 3])
Own = dict[str, Tensor]


def close(left: Tensor, right: Tensor) -> None:
    assert_close(left, right, rtol=1e-10, atol=1e-10)


def make(name: str, **changes: object) -> Backbone:
    return build(name, replace(SHAPE, **changes), seed=0).double()


# What each backbone computes, for one client ---------------------------------------------------


def linear(x: Tensor, own: Own, prefix: str) -> Tensor:
    return x @ own[f"{prefix}.weight"] + own[f"{prefix}.bias"]


def with_loops(graph: Graph) -> Tensor:
    adjacency = dense_adjacency(graph)
    return adjacency + torch.eye(len(adjacency), dtype=torch.float64)


def symmetric(graph: Graph) -> Tensor:
    loops = with_loops(graph)
    scale = torch.diag(loops.sum(dim=1).pow(-0.5))
    return scale @ loops @ scale


def mlp_layer(x: Tensor, own: Own, i: int, graph: Graph, last: bool) -> Tensor:
    return linear(x, own, f"convs.{i}")


def gcn_layer(x: Tensor, own: Own, i: int, graph: Graph, last: bool) -> Tensor:
    return symmetric(graph) @ x @ own[f"convs.{i}.weight"] + own[f"convs.{i}.bias"]


def sage_layer(x: Tensor, own: Own, i: int, graph: Graph, last: bool) -> Tensor:
    adjacency = dense_adjacency(graph)
    near = adjacency @ x / adjacency.sum(dim=1, keepdim=True).clamp(min=1)
    prefix = f"convs.{i}"
    return (
        x @ own[f"{prefix}.weight_self"]
        + near @ own[f"{prefix}.weight_near"]
        + own[f"{prefix}.bias"]
    )


def gat_layer(x: Tensor, own: Own, i: int, graph: Graph, last: bool) -> Tensor:
    prefix = f"convs.{i}"
    heads, width = own[f"{prefix}.attend_source"].shape
    conv = pyg.GATConv(x.shape[1], width, heads=heads, concat=not last).double()
    weights = {
        "lin.weight": own[f"{prefix}.weight"].T,
        "att_src": own[f"{prefix}.attend_source"].unsqueeze(0),
        "att_dst": own[f"{prefix}.attend_target"].unsqueeze(0),
        "bias": own[f"{prefix}.bias"],
    }
    return call(conv, weights, x, edge_index(graph))


def acm_layer(x: Tensor, own: Own, i: int, graph: Graph, last: bool) -> Tensor:
    loops = with_loops(graph)
    smooth = torch.diag(1 / loops.sum(dim=1)) @ loops
    sharp = torch.eye(len(loops), dtype=torch.float64) - smooth
    prefix = f"convs.{i}"
    channels = (
        (smooth @ x @ own[f"{prefix}.weight_low"]).relu(),
        (sharp @ x @ own[f"{prefix}.weight_high"]).relu(),
        (x @ own[f"{prefix}.weight_self"]).relu(),
    )
    attend, mix = own[f"{prefix}.attend"], own[f"{prefix}.mix"]
    scores = torch.stack([h @ attend[:, c] for c, h in enumerate(channels)], dim=1)
    weights = torch.softmax(scores.sigmoid() @ mix / 3, dim=1)
    return 3 * sum(weights[:, c : c + 1] * h for c, h in enumerate(channels))


LAYERS = {
    "mlp": mlp_layer,
    "gcn": gcn_layer,
    "sage": sage_layer,
    "gat": gat_layer,
    "acm-gcn": acm_layer,
}
every_formula = pytest.mark.parametrize("name", [*LAYERS, "gpr-gnn"])


def expected(name: str, own: Own, graph: Graph, shape: Shape) -> tuple[Tensor, Tensor]:
    """Logits and embedding of one client."""
    x = embedding = dense_features(graph)
    for i in range(shape.layers):
        last = i == shape.layers - 1
        if name == "gpr-gnn":
            out = linear(x, own, f"convs.{i}")
        else:
            out = LAYERS[name](x, own, i, graph, last)
        if not last:
            x = embedding = out.relu()
    if name == "gpr-gnn":
        powers = [out]
        for _ in range(shape.hops):
            powers.append(symmetric(graph) @ powers[-1])
        out = sum(own["gamma"][step] * z for step, z in enumerate(powers))
    return out, out if shape.layers == 1 else embedding


@every_formula
@kinds_of_features
@numbers_of_layers
def test_every_client_gets_what_the_formulas_say(name: str, sparse: bool, layers: int) -> None:
    network, cohort = make(name, layers=layers), random_cohort(SIZES, sparse=sparse)
    params = random_parameters(network, len(cohort))
    output = predict(network, params, cohort)
    logits, embeddings = (split_by_client(part, cohort) for part in output)
    for k, graph in enumerate(cohort.graphs):
        own = {n: value[k] for n, value in params.items()}
        wanted = expected(name, own, graph, network.shape)
        close(logits[k], wanted[0])
        close(embeddings[k], wanted[1])


@every_backbone
@settings(max_examples=8, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    seed=st.integers(0, 100),
    density=st.sampled_from([0.0, 0.2, 1.0]),
)
def test_stacked_equals_one_client_after_another(
    name: str, sizes: list[int], seed: int, density: float
) -> None:
    """With dropout on, in a random cohort."""
    network = make(name, input_dropout=0.2)
    cohort = random_cohort(sizes, seed=seed, density=density)
    params = random_parameters(network, len(cohort), seed=seed)
    stacked = predict(network, params, cohort, cohort.draws(seed))
    logits, embeddings = (split_by_client(part, cohort) for part in stacked)
    for k in range(len(cohort)):
        alone = cohort.take([k])
        output = predict(network, of_client(params, k), alone, alone.draws(seed))
        close(logits[k], output.logits)
        close(embeddings[k], output.embedding)


@every_backbone
@kinds_of_features
@numbers_of_layers
def test_gradient_reaches_every_parameter_of_every_client(
    name: str, sparse: bool, layers: int
) -> None:
    network, cohort = make(name, layers=layers), random_cohort([9, 12, 7], sparse=sparse)
    params = {n: p.requires_grad_() for n, p in random_parameters(network, len(cohort)).items()}
    logits = predict(network, params, cohort).logits
    upstream = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2)).double()
    logits.backward(upstream)
    for parameter, value in params.items():
        assert value.grad is not None, parameter
        for k in range(len(cohort)):
            assert value.grad[k].any(), (parameter, k)


@every_backbone
@kinds_of_features
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_client_never_notices_another(name: str, sparse: bool, dtype: torch.dtype) -> None:
    """Other graphs, features and weights elsewhere, dropout on: the same output bit by bit.

    Sizes stay, of nodes and of train nodes: products of clients of one size share a kernel.
    """
    network = make(name, input_dropout=0.3).to(dtype)
    graphs = random_graphs(SIZES, sparse=sparse)
    params = random_parameters(network, len(SIZES), dtype=dtype)
    cohort = cohort_of(graphs, dtype=dtype)
    before = split_by_client(predict(network, params, cohort, cohort.draws(1)).logits, cohort)
    for k in range(len(SIZES)):
        others = zip(random_graphs(SIZES, seed=9, sparse=sparse), graphs, strict=True)
        strange = [replace(new, masks=old.masks) for new, old in others]
        strange[k] = graphs[k]
        other = random_parameters(network, len(SIZES), seed=9, dtype=dtype)
        for key, value in other.items():
            value[k] = params[key][k]
        disturbed = cohort_of(strange, dtype=dtype)
        output = predict(network, other, disturbed, disturbed.draws(1))
        assert torch.equal(split_by_client(output.logits, disturbed)[k], before[k])


@every_backbone
def test_gradients_of_a_client_never_depend_on_another(name: str) -> None:
    network, cohort = make(name), random_cohort(SIZES)
    params = {n: p.requires_grad_() for n, p in random_parameters(network, len(cohort)).items()}
    logits = predict(network, params, cohort).logits
    first = split_by_client(logits, cohort)[0]
    for grad in torch.autograd.grad(first.square().sum(), list(params.values())):
        assert grad[0].any()
        assert not grad[1:].any()


@every_backbone
@numbers_of_layers
def test_sparse_and_dense_features_give_the_same(name: str, layers: int) -> None:
    network = make(name, layers=layers)
    dense, sparse = random_cohort(SIZES), random_cohort(SIZES, sparse=True)
    params = random_parameters(network, len(SIZES))
    for left, right in zip(
        predict(network, params, dense), predict(network, params, sparse), strict=True
    ):
        close(left, right)


@every_backbone
def test_dropout_is_on_exactly_when_draws_are_given(name: str) -> None:
    network, cohort = make(name), random_cohort([20, 15])
    params = random_parameters(network, len(cohort))
    network.train()
    still = predict(network, params, cohort).logits
    network.eval()
    assert torch.equal(predict(network, params, cohort).logits, still)
    dropped = predict(network, params, cohort, cohort.draws(0)).logits
    assert not torch.allclose(dropped, still)
    assert torch.equal(predict(network, params, cohort, cohort.draws(0)).logits, dropped)
    assert not torch.equal(predict(network, params, cohort, cohort.draws(1)).logits, dropped)


@every_backbone
@kinds_of_features
def test_input_dropout_acts_without_the_other(name: str, sparse: bool) -> None:
    cohort = random_cohort([20, 15], sparse=sparse)
    network = make(name, dropout=0.0, input_dropout=0.5)
    params = random_parameters(network, len(cohort))
    still = predict(network, params, cohort).logits
    assert not torch.allclose(predict(network, params, cohort, cohort.draws(0)).logits, still)
    without = make(name, dropout=0.0, input_dropout=0.0)
    assert torch.equal(predict(without, params, cohort, cohort.draws(0)).logits, still)


def test_input_dropout_is_a_clients_own_where_only_some_clients_are_sparse() -> None:
    network = make("mlp", dropout=0.0, input_dropout=0.5)
    dense, other = random_graphs([12, 9])
    cohort = cohort_of([dense, with_features(other, sp.csr_array(other.features))])
    params = random_parameters(network, len(cohort))
    alone = cohort.take([0])
    stacked = predict(network, params, cohort, cohort.draws(0)).logits
    close(
        split_by_client(stacked, cohort)[0],
        predict(network, of_client(params, 0), alone, alone.draws(0)).logits,
    )


@every_formula
def test_clients_with_one_node_or_no_edge(name: str) -> None:
    network = make(name)
    graphs = [random_graph(1, seed=1), random_graph(5, seed=2, density=0.0), random_graph(6)]
    cohort = cohort_of(graphs)
    params = random_parameters(network, len(cohort))
    logits = split_by_client(predict(network, params, cohort).logits, cohort)
    for k, graph in enumerate(graphs):
        own = {n: value[k] for n, value in params.items()}
        close(logits[k], expected(name, own, graph, network.shape)[0])


# How a backbone is made -----------------------------------------------------------------------


@every_backbone
@numbers_of_layers
def test_parameters_are_one_clients_and_the_seeds_alone(name: str, layers: int) -> None:
    shape = replace(SHAPE, layers=layers)
    torch.manual_seed(1)
    expected_next = torch.rand(3)
    torch.manual_seed(1)
    first = build(name, shape, seed=5)
    assert torch.equal(torch.rand(3), expected_next)  # the global stream is left alone
    again, other = build(name, shape, seed=5), build(name, shape, seed=6)
    pairs = zip(first.named_parameters(), again.parameters(), other.parameters(), strict=True)
    drawn = 0
    for (parameter, left), same, different in pairs:
        assert left.shape[0] == 1, parameter
        assert torch.equal(left, same)
        drawn += not torch.equal(left, different)
    assert drawn > 0


@every_backbone
@numbers_of_layers
def test_the_classifier_is_the_last_layer(name: str, layers: int) -> None:
    """Without its parameters, the rest determines the embedding and nothing more."""
    network, cohort = make(name, layers=layers), random_cohort([6])
    params = random_parameters(network, 1)
    chosen = {n for n in params if network.is_classifier(n)}
    assert chosen
    assert layers == 1 or len(chosen) < len(params)
    other = {n: p + 1 if n in chosen else p for n, p in params.items()}
    before, after = predict(network, params, cohort), predict(network, other, cohort)
    assert not torch.allclose(before.logits, after.logits)
    if layers > 1:
        assert torch.equal(before.embedding, after.embedding)


@every_backbone
@numbers_of_layers
def test_outputs_have_the_widths_of_the_shape(name: str, layers: int) -> None:
    network, cohort = make(name, layers=layers), random_cohort(SIZES)
    output = predict(network, random_parameters(network, len(cohort)), cohort)
    assert output.logits.shape == (sum(SIZES), SHAPE.classes)
    assert output.embedding.shape == (sum(SIZES), network.embedding_width)


def test_widths_run_from_features_to_classes() -> None:
    assert Shape(features=9, classes=2, hidden=5, layers=1).widths() == [(9, 2)]
    assert Shape(features=9, classes=2, hidden=5, layers=3).widths() == [(9, 5), (5, 5), (5, 2)]


@pytest.mark.parametrize("hops", [1, 10])
def test_gpr_gnn_starts_from_personalised_pagerank(hops: int) -> None:
    network = make("gpr-gnn", hops=hops)
    assert isinstance(network, GPRGNN)
    steps = [0.1 * 0.9**step for step in range(hops)] + [0.9**hops]
    close(network.gamma[0], torch.tensor(steps, dtype=torch.float32).double())
    assert float(network.gamma.detach().sum()) == pytest.approx(1)


def test_gat_divides_the_hidden_width_among_its_heads() -> None:
    network = make("gat", hidden=12, heads=3)
    assert network.convs[0].attend_source.shape == (1, 3, 4)
    with pytest.raises(ValueError, match=r"hidden \(10\) must be a multiple of heads \(4\)"):
        make("gat", hidden=10, heads=4)


def test_an_unknown_backbone_is_named_with_a_suggestion() -> None:
    with pytest.raises(UserError, match="unknown backbone 'gccn': did you mean 'gcn'"):
        build("gccn", SHAPE, seed=0)


# The registry ------------------------------------------------------------------------------------


@pytest.fixture
def far_gcn() -> Iterator[type[Backbone]]:
    """A backbone as a plug-in would add it: one class in one file."""

    @register_backbone("Far-GCN", cite="Nobody, 2026")
    class FarGCN(GCN):
        """A GCN that claims to reach further than it has layers."""

        local_reach = False
        defaults: ClassVar = {"fraud": {"lr": 0.5, "hidden": 32}}

    yield FarGCN
    del BACKBONES._entries["far-gcn"]


def test_the_librarys_own_are_registered() -> None:
    own = {"mlp", "gcn", "sage", "gat", "gpr-gnn", "acm-gcn", "unifilter"}
    own |= {"disengcn", "res-gcn", "res-sage", "res-gat", "res-acm"}
    assert own <= set(BACKBONES)


@every_backbone
def test_a_backbone_says_who_it_is(name: str) -> None:
    backbone = BACKBONES[name]
    assert backbone.name == name
    assert (backbone.__doc__ or "").strip()
    assert backbone.citation or name == "mlp"
    assert make(name).describe() == name
    assert BACKBONES.find(name.upper()) is backbone


def test_a_registered_backbone_is_trained_by_its_name(far_gcn: type[Backbone]) -> None:
    assert (far_gcn.name, far_gcn.citation) == ("far-gcn", "Nobody, 2026")
    federation = small_federation()
    ours = simulate("fedavg", federation, 2, backbone="far-gcn").tensors()
    theirs = simulate("fedavg", federation, 2, backbone="gcn").tensors()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name
    assert GCN.name == "gcn"


def test_a_registered_backbone_is_refused_on_samples_if_it_reaches_far(
    far_gcn: type[Backbone],
) -> None:
    with pytest.raises(UserError, match="--batch: far-gcn reaches further") as refused:
        check_sampling(create("fedavg"), Settings(backbone="far-gcn", layers=2, batch=3))
    assert "gcn" in str(refused.value).rpartition("use one of ")[2].split(", ")
    far_gcn.local_reach = True
    check_sampling(create("fedavg"), Settings(backbone="far-gcn", layers=2, batch=3))


def test_a_registered_backbone_brings_its_defaults(far_gcn: type[Backbone]) -> None:
    filled = fill(Settings(backbone="far-gcn"), "fraud", "auc", dense=True)
    assert (filled.lr, filled.hidden, filled.input_dropout) == (0.5, 32, USUAL.input_dropout)
    assert fill(Settings(backbone="far-gcn", lr=0.1), "fraud", "auc").lr == 0.1
    assert fill(Settings(backbone="far-gcn"), "files", "auc").lr == USUAL.lr


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ValueError, match="a backbone named 'gcn' is registered already"):
        register_backbone("gcn")(GPRGNN)
    assert GPRGNN.name == "gpr-gnn"
