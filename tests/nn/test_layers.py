"""Stacked layers against PyTorch Geometric's own, client by client, and against their formulas."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.testing import assert_close

from builders import (
    call,
    cohort_of,
    dense_adjacency,
    dense_features,
    edge_index,
    of_client,
    random_cohort,
    random_graph,
    random_graphs,
    random_parameters,
    split_by_client,
)
from polyphily.core.cohort import Cohort
from polyphily.graphs.graph import Graph
from polyphily.nn import channels
from polyphily.nn.layers import (
    ACMConv,
    GATConv,
    GCNConv,
    Linear,
    SAGEConv,
    matmul,
    mixed_channels,
)
from polyphily.nn.segments import Segments
from polyphily.nn.sparse import SparseMatrix, is_shared

INPUTS, OUTPUTS, HEADS = 6, 4, 3
SIZES = (
    [7, 11, 5],  # all different
    [6, 6, 6],  # all equal: one batched product
    [8, 1, 8, 8, 1],  # runs of equal sizes, clients with one node
    [9],  # alone
)
LAYERS = {
    "linear": lambda: Linear(INPUTS, OUTPUTS),
    "linear without bias": lambda: Linear(INPUTS, OUTPUTS, bias=False),
    "gcn": lambda: GCNConv(INPUTS, OUTPUTS),
    "sage": lambda: SAGEConv(INPUTS, OUTPUTS),
    "gat, heads side by side": lambda: GATConv(INPUTS, OUTPUTS, HEADS, average=False),
    "gat, mean of heads": lambda: GATConv(INPUTS, OUTPUTS, HEADS, average=True),
    "gat, one head": lambda: GATConv(INPUTS, OUTPUTS, 1, average=False),
    "acm": lambda: ACMConv(INPUTS, OUTPUTS),
}
every_layer = pytest.mark.parametrize("name", LAYERS)
sizes_of_clients = pytest.mark.parametrize("sizes", SIZES, ids=str)
kinds_of_features = pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])


def close(left: Tensor, right: Tensor) -> None:
    assert_close(left, right, rtol=1e-10, atol=1e-10)


def expected_linear(layer: nn.Module, own: dict[str, Tensor], graph: Graph) -> Tensor:
    out = dense_features(graph) @ own["weight"]
    return out + own["bias"] if "bias" in own else out


def expected_gcn(layer: nn.Module, own: dict[str, Tensor], graph: Graph) -> Tensor:
    conv = pyg.GCNConv(INPUTS, OUTPUTS).double()
    weights = {"lin.weight": own["weight"].T, "bias": own["bias"]}
    return call(conv, weights, dense_features(graph), edge_index(graph))


def expected_sage(layer: nn.Module, own: dict[str, Tensor], graph: Graph) -> Tensor:
    conv = pyg.SAGEConv(INPUTS, OUTPUTS, aggr="mean").double()
    weights = {
        "lin_l.weight": own["weight_near"].T,
        "lin_l.bias": own["bias"],
        "lin_r.weight": own["weight_self"].T,
    }
    return call(conv, weights, dense_features(graph), edge_index(graph))


def expected_gat(layer: nn.Module, own: dict[str, Tensor], graph: Graph) -> Tensor:
    assert isinstance(layer, GATConv)
    conv = pyg.GATConv(INPUTS, OUTPUTS, heads=layer.heads, concat=not layer.average).double()
    weights = {
        "lin.weight": own["weight"].T,
        "att_src": own["attend_source"].unsqueeze(0),
        "att_dst": own["attend_target"].unsqueeze(0),
        "bias": own["bias"],
    }
    assert weights.keys() == dict(conv.named_parameters()).keys()
    return call(conv, weights, dense_features(graph), edge_index(graph))


def expected_acm(layer: nn.Module, own: dict[str, Tensor], graph: Graph) -> Tensor:
    """The docstring's formulas, one node after another."""
    x, identity = dense_features(graph), torch.eye(graph.num_nodes, dtype=torch.float64)
    with_loops = dense_adjacency(graph) + identity
    smooth = with_loops / with_loops.sum(dim=1, keepdim=True)
    channels = [
        torch.relu(smooth @ x @ own["weight_low"]),
        torch.relu((identity - smooth) @ x @ own["weight_high"]),
        torch.relu(x @ own["weight_self"]),
    ]
    rows = []
    for node in range(graph.num_nodes):
        score = torch.stack([h[node] @ own["attend"][:, c] for c, h in enumerate(channels)])
        weights = torch.softmax(torch.sigmoid(score) @ own["mix"] / 3, dim=0)
        rows.append(3 * sum(w * h[node] for w, h in zip(weights, channels, strict=True)))
    return torch.stack(rows)


EXPECTED = {
    Linear: expected_linear,
    GCNConv: expected_gcn,
    SAGEConv: expected_sage,
    GATConv: expected_gat,
    ACMConv: expected_acm,
}


def agrees_client_by_client(layer: nn.Module, cohort: Cohort, seed: int = 0) -> None:
    params = random_parameters(layer, len(cohort), seed=seed)
    parts = split_by_client(call(layer, params, cohort.x, cohort), cohort)
    for k, graph in enumerate(cohort.graphs):
        own = {n: value[k] for n, value in params.items()}
        close(parts[k], EXPECTED[type(layer)](layer, own, graph))


@every_layer
@sizes_of_clients
@kinds_of_features
def test_every_client_gets_what_the_layer_gives_it_alone(
    name: str, sizes: list[int], sparse: bool
) -> None:
    agrees_client_by_client(LAYERS[name](), random_cohort(sizes, sparse=sparse))


@every_layer
@kinds_of_features
def test_clients_without_edges(name: str, sparse: bool) -> None:
    graphs = [
        random_graph(5, seed=1, sparse=sparse),
        random_graph(4, seed=2, density=0.0, sparse=sparse),
        random_graph(1, seed=3, sparse=sparse),
    ]
    assert [graph.num_edges > 0 for graph in graphs] == [True, False, False]
    agrees_client_by_client(LAYERS[name](), cohort_of(graphs))


@every_layer
def test_no_edge_in_the_whole_cohort(name: str) -> None:
    agrees_client_by_client(LAYERS[name](), random_cohort([3, 2, 2], density=0.0))


@every_layer
def test_clients_on_complete_graphs(name: str) -> None:
    agrees_client_by_client(LAYERS[name](), random_cohort([6, 4], density=1.0))


@every_layer
@kinds_of_features
def test_gradients_are_those_of_the_layer_on_each_client_alone(name: str, sparse: bool) -> None:
    layer, cohort = LAYERS[name](), random_cohort([7, 3, 3, 5], sparse=sparse)
    params = {n: p.requires_grad_() for n, p in random_parameters(layer, len(cohort)).items()}
    out = call(layer, params, cohort.x, cohort)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).double()
    stacked = torch.autograd.grad(out, list(params.values()), upstream)
    for k, (graph, own_upstream) in enumerate(
        zip(cohort.graphs, split_by_client(upstream, cohort), strict=True)
    ):
        own = {n: value.detach()[k].clone().requires_grad_() for n, value in params.items()}
        alone = EXPECTED[type(layer)](layer, own, graph)
        grads = torch.autograd.grad(alone, list(own.values()), own_upstream)
        for found, grad in zip(stacked, grads, strict=True):
            close(found[k], grad)


@every_layer
@kinds_of_features
def test_gradients_by_finite_differences(name: str, sparse: bool) -> None:
    layer, cohort = LAYERS[name](), random_cohort([4, 2, 2], sparse=sparse)
    params = random_parameters(layer, len(cohort))
    leaves = [value.requires_grad_() for value in params.values()]
    assert torch.autograd.gradcheck(
        lambda *values: call(layer, dict(zip(params, values, strict=True)), cohort.x, cohort),
        leaves,
    )


@every_layer
@kinds_of_features
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_client_never_notices_another(name: str, sparse: bool, dtype: torch.dtype) -> None:
    """Other features and other weights elsewhere: not one bit of a client's output changes."""
    layer, sizes = LAYERS[name](), [7, 5, 5, 9]
    graphs = random_graphs(sizes, sparse=sparse)
    params = random_parameters(layer, len(sizes), dtype=dtype)
    cohort = cohort_of(graphs, dtype=dtype)
    before = split_by_client(call(layer, params, cohort.x, cohort), cohort)
    for k in range(len(sizes)):
        strange = random_graphs(sizes, seed=9, sparse=sparse)
        strange[k] = graphs[k]
        other = random_parameters(layer, len(sizes), seed=9, dtype=dtype)
        for key, value in other.items():
            value[k] = params[key][k]
        disturbed = cohort_of(strange, dtype=dtype)
        after = split_by_client(call(layer, other, disturbed.x, disturbed), disturbed)
        assert torch.equal(after[k], before[k])
        assert not any(torch.equal(after[j], before[j]) for j in range(len(sizes)) if j != k)


@every_layer
@sizes_of_clients
def test_sparse_and_dense_features_give_the_same(name: str, sizes: list[int]) -> None:
    layer = LAYERS[name]()
    dense, sparse = random_cohort(sizes), random_cohort(sizes, sparse=True)
    params = random_parameters(layer, len(sizes))
    close(call(layer, params, dense.x, dense), call(layer, params, sparse.x, sparse))


@every_layer
def test_a_layer_starts_with_one_clients_parameters(name: str) -> None:
    layer = LAYERS[name]()
    cohort = random_cohort([7], dtype=torch.float32)
    assert {value.shape[0] for value in layer.parameters()} == {1}
    out = layer(cohort.x, cohort)
    own = of_client(dict(layer.named_parameters()), 0)
    assert torch.equal(out, call(layer, own, cohort.x, cohort))
    for key, value in layer.named_parameters():
        if key == "bias":
            assert not value.any()
        else:
            assert len(value.unique()) == value.numel(), key


def test_initial_weights_fill_the_glorot_interval() -> None:
    torch.manual_seed(0)
    layer = GCNConv(200, 100)
    bound = (6 / 300) ** 0.5
    weight = layer.weight.detach()
    assert 0.99 * bound < weight.max() <= bound
    assert -bound <= weight.min() < -0.99 * bound
    assert abs(float(weight.mean())) < 5 * bound / (3 * weight.numel()) ** 0.5


@pytest.mark.parametrize("cached", [1, 9, 1 << 17])
@pytest.mark.parametrize("scaled", [False, True])
def test_channels_mixed_in_blocks_are_those_mixed_at_once(
    scaled: bool, cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "CACHED", cached)
    segments = Segments((5, 1, 9), torch.device("cpu"))
    random = torch.Generator().manual_seed(1)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).double()

    scales = numbers(15, 2).abs() if scaled else None
    leaves = [numbers(*shape) for shape in ((15, 3), (15, 6), (15, 6), (3, 3, 3), (3, 3, 3))]
    upstream = numbers(15, 3)
    results = []
    for large in (0, 1000):
        monkeypatch.setattr(channels, "LARGE", large)
        own, pair, near, attend, mix = (leaf.clone().requires_grad_() for leaf in leaves)
        assert channels.pays(own, segments) == (large == 0)
        out = mixed_channels(own, pair, near, scales, attend, mix, segments)
        wanted = (own, pair, near, attend, mix)
        results.append([out, *torch.autograd.grad(out, wanted, upstream, materialize_grads=True)])
    for ours, plain in zip(*results, strict=True):
        assert_close(ours, plain)


def test_weights_that_clients_share_are_not_copied_and_change_no_bit() -> None:
    dense = np.random.default_rng(0).standard_normal((90, 6))
    rows, cols = np.nonzero(dense > 0)
    owner = rows // 30
    x = SparseMatrix.from_coordinates(
        rows,
        cols + 6 * owner,
        dense[rows, cols],
        (90, 18),
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    segments = Segments((30, 30, 30), torch.device("cpu"))
    graph = SimpleNamespace(segments=segments)
    weight, bias = torch.randn(6, 4), torch.randn(4)
    once, copied = weight.expand(3, 6, 4), weight.repeat(3, 1, 1)
    assert is_shared(once)
    assert not is_shared(copied)
    assert not is_shared(once.clone().requires_grad_())
    assert torch.equal(matmul(x, once, graph), matmul(x, copied, graph))
    assert torch.equal(segments.expand(bias.expand(3, 4)), segments.expand(bias.repeat(3, 1)))
