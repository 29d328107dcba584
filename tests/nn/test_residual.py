"""Residual backbones against torch and PyTorch Geometric, and what their blocks must keep."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.nn import functional as F
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
    random_parameters,
    split_by_client,
)
from cases import simulate, small_federation
from polyphily import load, run
from polyphily.core.method import create
from polyphily.errors import UserError
from polyphily.graphs.graph import Graph
from polyphily.nn.backbones import BACKBONES, Backbone, Shape, build
from polyphily.nn.layers import LayerNorm
from polyphily.testing import check_backbone

SHAPE = Shape(features=6, classes=3, hidden=8, layers=2, dropout=0.4, heads=2)
NAMES = ("res-gcn", "res-sage", "res-gat", "res-acm")
every_name = pytest.mark.parametrize("name", NAMES)
depths = pytest.mark.parametrize("layers", [1, 2, 8])
readouts = pytest.mark.parametrize("readout", ["last", "jump"])
Own = dict[str, Tensor]


def make(name: str, **changes: object) -> Backbone:
    return build(name, replace(SHAPE, **changes), seed=0).double()


def close(left: Tensor, right: Tensor) -> None:
    assert_close(left, right, rtol=1e-9, atol=1e-9)


# What they compute, for one client ---------------------------------------------------------------


def gcn(x: Tensor, own: Own, graph: Graph) -> Tensor:
    conv = pyg.GCNConv(SHAPE.hidden, SHAPE.hidden).double()
    weights = {"lin.weight": own["conv.weight"].T, "bias": own["conv.bias"]}
    return call(conv, weights, x, edge_index(graph)) + x @ own["own.weight"]


def sage(x: Tensor, own: Own, graph: Graph) -> Tensor:
    conv = pyg.SAGEConv(SHAPE.hidden, SHAPE.hidden).double()
    weights = {
        "lin_l.weight": own["conv.weight_near"].T,
        "lin_l.bias": own["conv.bias"],
        "lin_r.weight": own["conv.weight_self"].T,
    }
    return call(conv, weights, x, edge_index(graph))


def gat(x: Tensor, own: Own, graph: Graph) -> Tensor:
    conv = pyg.GATConv(SHAPE.hidden, SHAPE.hidden // SHAPE.heads, heads=SHAPE.heads).double()
    weights = {
        "lin.weight": own["conv.weight"].T,
        "att_src": own["conv.attend_source"].unsqueeze(0),
        "att_dst": own["conv.attend_target"].unsqueeze(0),
        "bias": own["conv.bias"],
    }
    return call(conv, weights, x, edge_index(graph)) + x @ own["own.weight"]


def acm(x: Tensor, own: Own, graph: Graph) -> Tensor:
    loops = dense_adjacency(graph) + torch.eye(graph.num_nodes).double()
    smooth = loops / loops.sum(dim=1, keepdim=True)
    high = x @ own["conv.weight_high"]
    channels = (
        (smooth @ x @ own["conv.weight_low"]).relu(),
        (high - smooth @ high).relu(),
        (x @ own["conv.weight_self"]).relu(),
    )
    scores = [channel @ own["conv.attend"][:, c] for c, channel in enumerate(channels)]
    weights = (torch.stack(scores, dim=1).sigmoid() @ own["conv.mix"] / 3).softmax(dim=1)
    return 3 * torch.einsum("nc,cnh->nh", weights, torch.stack(channels))


CONVOLUTIONS = {"res-gcn": gcn, "res-sage": sage, "res-gat": gat, "res-acm": acm}


def norm(x: Tensor, own: Own) -> Tensor:
    weights = {"weight": own["norm.weight"], "bias": own["norm.bias"]}
    return call(nn.LayerNorm(SHAPE.hidden).double(), weights, x)


def linear(x: Tensor, own: Own, name: str) -> Tensor:
    return F.linear(x, own[f"{name}.weight"].T, own[f"{name}.bias"])


def block(own: Own, index: int) -> Own:
    prefix = f"blocks.{index}."
    return {n.removeprefix(prefix): value for n, value in own.items() if n.startswith(prefix)}


def expected(
    name: str, own: Own, graph: Graph, layers: int, readout: str = "last"
) -> tuple[Tensor, Tensor]:
    """Compute logits and embedding of one client."""
    levels = [linear(dense_features(graph), own, "input")]
    for index in range(layers):
        part = block(own, index)
        h = levels[-1]
        levels.append(h + CONVOLUTIONS[name](norm(h, part), part, graph).relu())
    if readout == "last":
        embedding = norm(levels[-1], own)
    else:  # levels normalised without parameters, their mean scaled and shifted once
        plain = torch.stack([F.layer_norm(h, [SHAPE.hidden]) for h in levels])
        weights = own["jump"].exp() / own["jump"].exp().sum()
        mean = torch.tensordot(weights, plain, dims=1)
        embedding = mean * own["norm.weight"] + own["norm.bias"]
    return linear(embedding, own, "head"), embedding


@every_name
@depths
@readouts
def test_every_client_gets_what_the_formulas_say(name: str, layers: int, readout: str) -> None:
    """Among the clients of a cohort are one without edges and one with a single node."""
    graphs = [
        random_graph(13, seed=1),
        random_graph(6, seed=2, density=0.0, sparse=True),
        random_graph(1, seed=3),
    ]
    network, cohort = make(name, layers=layers, readout=readout), cohort_of(graphs)
    params = random_parameters(network, len(graphs))
    output = predict(network, params, cohort)
    logits, embeddings = (split_by_client(part, cohort) for part in output)
    for k, graph in enumerate(graphs):
        own = {n: value[k] for n, value in params.items()}
        wanted = expected(name, own, graph, layers, readout)
        close(logits[k], wanted[0])
        close(embeddings[k], wanted[1])


@every_name
def test_one_client_in_float32(name: str) -> None:
    graph, network = random_graph(30, density=0.2), build(name, replace(SHAPE, layers=3), seed=0)
    found = network(cohort_of([graph], dtype=torch.float32))
    own = {n: value[0].detach().double() for n, value in network.named_parameters()}
    for part, wanted in zip(found, expected(name, own, graph, 3), strict=True):
        assert_close(part, wanted.float(), rtol=1e-5, atol=1e-5)


@every_name
@depths
@readouts
def test_three_clients_together_equal_three_alone(name: str, layers: int, readout: str) -> None:
    network, cohort = make(name, layers=layers, readout=readout), random_cohort([9, 14, 5])
    params = random_parameters(network, 3)
    together = predict(network, params, cohort, cohort.draws(2))
    parts = [split_by_client(part, cohort) for part in together]
    for k in range(3):
        alone = cohort.take([k])
        found = predict(network, of_client(params, k), alone, alone.draws(2))
        for part, own in zip(parts, found, strict=True):
            close(part[k], own)


@pytest.mark.parametrize("name", ["res-gcn", "res-sage"])
def test_stacking_changes_no_bit_in_float32(name: str) -> None:
    federations = [small_federation(seed=1), small_federation((11, 5, 8), seed=2)]
    settings = {"backbone": name, "dtype": "float32", "dropout": 0.4, "hidden": 12, "layers": 4}
    together = simulate("local", federations, 3, **settings)
    alone = simulate("local", federations[1], 3, **settings)
    for key, value in alone.memory.items():
        assert torch.equal(together.memory[key][4:], value), key


@every_name
def test_permuting_nodes_permutes_the_output(name: str) -> None:
    network, graph = make(name, layers=3), random_graph(15)
    order = np.random.default_rng(0).permutation(15)
    params = random_parameters(network, 1)
    before = predict(network, params, cohort_of([graph]))
    after = predict(network, params, cohort_of([graph.subgraph(order)]))
    for left, right in zip(before, after, strict=True):
        assert not torch.allclose(left, right)
        close(left[order], right)


@every_name
@depths
@readouts
def test_a_gradient_reaches_every_parameter_of_every_client(
    name: str, layers: int, readout: str
) -> None:
    network, cohort = make(name, layers=layers, readout=readout), random_cohort([12, 9, 10])
    params = {n: p.requires_grad_() for n, p in random_parameters(network, 3).items()}
    logits = predict(network, params, cohort).logits
    way = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).double()
    grads = torch.autograd.grad((logits * way).sum(), list(params.values()))
    for parameter, grad in zip(params, grads, strict=True):
        assert grad.flatten(1).any(dim=1).all(), parameter


# Blocks are residual -----------------------------------------------------------------------------


@every_name
@depths
def test_blocks_without_weights_leave_the_input_as_it_is(name: str, layers: int) -> None:
    network, cohort = make(name, layers=layers), random_cohort([9, 5])
    params = random_parameters(network, 2)
    for parameter in params:
        if parameter.startswith("blocks.") and not network.is_norm(parameter):
            params[parameter] = torch.zeros_like(params[parameter])
    logits = split_by_client(predict(network, params, cohort, None).logits, cohort)
    for k, graph in enumerate(cohort.graphs):
        own = {n: value[k] for n, value in params.items()}
        close(
            logits[k], linear(norm(linear(dense_features(graph), own, "input"), own), own, "head")
        )


@every_name
def test_dropout_spares_the_residual_path(name: str) -> None:
    """A block whose whole output is dropped leaves its input as it is."""
    network, cohort = make(name, dropout=1 - 2**-15, layers=3), random_cohort([4])
    params = random_parameters(network, 1)
    dropped = predict(network, params, cohort, cohort.draws(0)).logits
    own = {n: value[0] for n, value in params.items()}
    x = linear(dense_features(cohort.graphs[0]), own, "input")
    close(dropped, linear(norm(x, own), own, "head"))
    assert not torch.allclose(predict(network, params, cohort).logits, dropped)


@every_name
def test_without_draws_the_output_is_always_the_same(name: str) -> None:
    network, cohort = make(name), random_cohort([20, 15])
    params = random_parameters(network, 2)
    still = predict(network.train(), params, cohort).logits
    assert torch.equal(predict(network.eval(), params, cohort).logits, still)
    assert not torch.equal(predict(network, params, cohort, cohort.draws(0)).logits, still)


# The jumping readout -----------------------------------------------------------------------------


@every_name
@depths
def test_all_levels_begin_with_the_same_weight(name: str, layers: int) -> None:
    network, cohort = make(name, layers=layers, readout="jump"), random_cohort([9])
    logits = dict(network.named_parameters())["jump"]
    assert torch.equal(logits, torch.zeros(1, layers + 1).double())
    last = make(name, layers=layers)
    levels = [last(cohort).embedding]
    for index in reversed(range(layers)):  # without the blocks from here on
        last.blocks = last.blocks[:index]
        levels.append(last(cohort).embedding)
    close(network(cohort).embedding, torch.stack(levels).mean(dim=0))


@every_name
def test_the_readout_changes_no_other_initial_parameter(name: str) -> None:
    found = dict(make(name, readout="jump").named_parameters())
    assert found.pop("jump").shape == (1, SHAPE.layers + 1)
    plain = dict(make(name).named_parameters())
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[n], value) for n, value in plain.items())


@every_name
def test_a_large_logit_chooses_one_level_for_one_client(name: str) -> None:
    jump, last, cohort = make(name, readout="jump"), make(name), random_cohort([9, 7])
    params = random_parameters(jump, 2)
    params["jump"] = torch.tensor([[0.0, 0.0, 800.0], [800.0, 0.0, 0.0]]).double()
    plain = {n: value for n, value in params.items() if n != "jump"}
    found = split_by_client(predict(jump, params, cohort).logits, cohort)
    whole = split_by_client(predict(last, plain, cohort).logits, cohort)
    own = {n: value[1] for n, value in params.items()}
    x = linear(dense_features(cohort.graphs[1]), own, "input")
    close(found[0], whole[0])
    close(found[1], linear(norm(x, own), own, "head"))
    assert not torch.allclose(found[1], whole[1])


@every_name
@pytest.mark.parametrize("linear_head", [False, True])
def test_logits_of_levels_are_neither_classifier_nor_norm(name: str, linear_head: bool) -> None:
    network = build(name, replace(SHAPE, readout="jump"), seed=0, linear_head=linear_head)
    own = "trunk.jump" if linear_head else "jump"
    assert own in dict(network.named_parameters())
    assert not network.is_classifier(own)
    assert not network.is_norm(own)
    assert network.embedding_width == SHAPE.hidden


def test_only_residual_backbones_have_several_readouts() -> None:
    assert {n for n, b in BACKBONES.items() if "jump" in b.readouts} == set(NAMES)
    assert all("last" in b.readouts for b in BACKBONES.values())


# Normalisations ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [0.0, 100.0])
def test_a_norm_is_torchs_with_each_clients_own_scale(shift: float) -> None:
    cohort, layer = random_cohort([7, 1, 5]), LayerNorm(6)
    params = random_parameters(layer, 3)
    x = torch.randn(13, 6, generator=torch.Generator().manual_seed(0)).double() + shift
    x[2] = shift  # no variance
    found = split_by_client(torch.func.functional_call(layer, params, (x, cohort)), cohort)
    for k, own in enumerate(split_by_client(x, cohort)):
        close(found[k], F.layer_norm(own, [6], params["weight"][k], params["bias"][k]))
    close(found[0][2], params["bias"][0])


def test_a_norm_starts_as_the_identity_on_normalised_features() -> None:
    layer = LayerNorm(5)
    assert torch.equal(layer.weight, torch.ones(1, 5))
    assert torch.equal(layer.bias, torch.zeros(1, 5))


@every_name
@pytest.mark.parametrize("linear_head", [False, True])
def test_norms_are_told_from_other_parameters(name: str, linear_head: bool) -> None:
    network = build(name, SHAPE, seed=0, linear_head=linear_head)
    norms = {n for n, _ in network.named_parameters() if network.is_norm(n)}
    prefix = "trunk." if linear_head else ""
    places = [f"{prefix}blocks.0.norm", f"{prefix}blocks.1.norm", f"{prefix}norm"]
    assert norms == {f"{place}.{part}" for place in places for part in ("weight", "bias")}


def test_other_backbones_have_no_norms() -> None:
    for name in set(BACKBONES) - {*NAMES, "choir"}:
        network = BACKBONES[name](SHAPE)
        assert not any(network.is_norm(n) for n, _ in network.named_parameters()), name


# As backbones ------------------------------------------------------------------------------------


@every_name
def test_it_is_a_backbone(name: str) -> None:
    check_backbone(name)


@every_name
@depths
def test_sizes_and_classifier(name: str, layers: int) -> None:
    network = make(name, layers=layers)
    assert network.embedding_width == SHAPE.hidden
    last = {n for n, _ in network.named_parameters() if network.is_classifier(n)}
    assert last == {"head.weight", "head.bias"}
    assert len(network.blocks) == layers
    assert network.describe() == name


@pytest.mark.parametrize(
    ("name", "own_path"), [*zip(NAMES, (True, False, True, False), strict=True)]
)
def test_only_averaging_convolutions_have_a_path_beside_them(name: str, own_path: bool) -> None:
    names = {n for n, _ in make(name).named_parameters()}
    assert ("blocks.0.own.weight" in names) == own_path


def test_attention_divides_the_hidden_width_among_its_heads() -> None:
    network = make("res-gat", hidden=12, heads=3)
    assert network.blocks[0].conv.attend_source.shape == (1, 3, 4)
    with pytest.raises(
        UserError, match=r"res-gat: hidden \(10\) must be a multiple of heads \(4\)"
    ):
        make("res-gat", hidden=10, heads=4)


def test_norms_travel_with_the_rest_in_fedavg() -> None:
    network = make("res-gcn")
    assert all(create("fedavg").shares(network, n) for n, _ in network.named_parameters())


def test_sixteen_blocks_train_where_sixteen_plain_layers_do_not() -> None:
    data = "csbm:nodes=300,homophily=0.15,gap=0.1,degree=6,features=16,mu=200"
    federation = load(data, clients=3, seed=5)
    settings = {"layers": 16, "hidden": 16, "rounds": 12, "dropout": 0.0, "input_dropout": 0.0}
    accuracy = {
        name: run("fedavg", federation, backbone=name, **settings).summary["final"]["test"][
            "accuracy"
        ]
        for name in ("res-gcn", "gcn")
    }
    assert accuracy["res-gcn"] > 0.85
    assert accuracy["res-gcn"] > accuracy["gcn"] + 0.25
