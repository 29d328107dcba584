"""DisenGCN and its routing, compared with plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from builders import random_cohort, random_parameters
from cases import simulate, small_federation
from polyphily.nn.backbones import Shape, build
from polyphily.nn.disengcn import DisenGCN, route, unit
from polyphily.testing import check_backbone

SIZES = (7, 1, 12)


def close(found: Tensor, wanted: Tensor, within: float) -> None:
    torch.testing.assert_close(found, wanted, rtol=within, atol=within)


def random_like(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def routed_by_loops(x: Tensor, neighbours: list[list[int]], factors: int, times: int) -> Tensor:
    """Route node by node and edge by edge, `[nodes, factors · width]`."""
    parts = F.normalize(x.view(len(x), factors, -1), dim=2)
    u = parts
    for _ in range(times):
        after = []
        for v, near in enumerate(neighbours):
            total = parts[v].clone()
            for w in near:
                share = torch.softmax((parts[w] * u[v]).sum(dim=1), dim=0)
                total = total + share.unsqueeze(1) * parts[w]
            after.append(F.normalize(total, dim=1))
        u = torch.stack(after)
    return u.flatten(1)


@pytest.mark.parametrize(("factors", "times"), [(1, 2), (2, 1), (3, 6)])
def test_routing_is_that_of_plain_loops(factors: int, times: int) -> None:
    cohort = random_cohort(SIZES)
    x = random_like(sum(SIZES), 4 * factors)
    near: list[list[int]] = [[] for _ in x]
    for v, w in zip(cohort.edges.row.tolist(), cohort.edges.col.tolist(), strict=True):
        near[v].append(w)
    assert any(near)
    found = torch.cat(route(x.split(4, dim=1), cohort.edges, times), dim=1)
    close(found, routed_by_loops(x, near, factors, times), 1e-12)


@pytest.mark.parametrize("times", [0, 6])
def test_the_squared_norm_of_a_routed_row_is_the_number_of_factors(times: int) -> None:
    cohort = random_cohort(SIZES)
    found = route(random_like(sum(SIZES), 12).split(4, dim=1), cohort.edges, times)
    close(torch.cat(found, dim=1).square().sum(dim=1), torch.full((20,), 3.0).double(), 1e-12)


def test_the_gradient_of_routing_is_right() -> None:
    edges = random_cohort((5, 3)).edges
    x = random_like(8, 6).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: torch.cat(route(x.split(3, dim=1), edges, 2), dim=1), (x,)
    )


def test_products_at_edges_have_the_gradient_of_the_dense_product() -> None:
    edges = random_cohort(SIZES).edges
    left, right = (random_like(20, 3, seed=s).requires_grad_() for s in (1, 2))
    dense = (left @ right.T)[edges.row, edges.col_long]
    found = edges.products(left, right)
    close(found, dense, 1e-12)
    way = random_like(edges.nnz, seed=3)
    for mine, theirs in zip(
        torch.autograd.grad(found, (left, right), way),
        torch.autograd.grad(dense, (left, right), way),
        strict=True,
    ):
        close(mine, theirs, 1e-12)


def test_rows_that_lost_everything_keep_gradients_finite() -> None:
    x = torch.tensor([[0.0, 0.0], [1e-20, 0.0], [3.0, 4.0]], dtype=torch.float64).requires_grad_()
    y = unit(x)
    close(y.detach(), torch.tensor([[0, 0], [1, 0], [0.6, 0.8]], dtype=torch.float64), 1e-12)
    (grad,) = torch.autograd.grad((y * torch.tensor([1.0, 0.0])).sum(), x)
    assert grad[:2].abs().max() == 0  # along the only entry a unit vector does not change
    close(grad[2], torch.tensor([0.128, -0.096], dtype=torch.float64), 1e-12)


def test_the_network_projects_routes_and_classifies() -> None:
    cohort = random_cohort(SIZES)
    network = DisenGCN(Shape(features=6, classes=3, hidden=8, layers=4), factors=2, iterations=3)
    params = random_parameters(network, len(SIZES))
    found = torch.func.functional_call(network, params, (cohort,))
    assert isinstance(cohort.x, Tensor)
    for k, rows in enumerate(torch.arange(20).split(SIZES)):
        own = cohort.x[rows]
        h = F.leaky_relu(own @ params["project.weight"][k] + params["project.bias"][k])
        start = int(rows[0])
        near: list[list[int]] = [[] for _ in rows]
        for v, w in zip(cohort.edges.row.tolist(), cohort.edges.col.tolist(), strict=True):
            if start <= v <= int(rows[-1]):
                near[v - start].append(w - start)
        for _ in range(2):  # four layers: two are the projection and the classifier
            h = F.leaky_relu(routed_by_loops(h, near, 2, 3))
        close(found.embedding[rows], h, 1e-12)
        logits = h @ params["head.weight"][k] + params["head.bias"][k]
        close(found.logits[rows], logits, 1e-12)


@pytest.mark.parametrize(("layers", "depth"), [(1, 1), (2, 1), (3, 1), (4, 2), (5, 3)])
def test_projection_and_classifier_count_as_layers(layers: int, depth: int) -> None:
    network = build("disengcn", Shape(features=6, classes=3, layers=layers), 0)
    assert isinstance(network, DisenGCN)
    assert network.depth == depth


def test_the_width_is_rounded_up_to_a_multiple_of_the_factors() -> None:
    torch.manual_seed(1)
    network = DisenGCN(Shape(features=6, classes=3, hidden=10), factors=4)
    assert (network.width, network.embedding_width) == (3, 12)
    bound = 1 / math.sqrt(12)
    for parameter in network.parameters():
        assert 0.5 * bound < parameter.abs().max() <= bound


def test_stacking_changes_no_bit_in_float32() -> None:
    federations = [small_federation(seed=1), small_federation((11, 5, 8), seed=2)]
    settings = {"backbone": "disengcn", "dtype": "float32", "dropout": 0.4}
    together = simulate("local", federations, 3, **settings)
    alone = simulate("local", federations[1], 3, **settings)
    for name, value in alone.memory.items():
        assert torch.equal(together.memory[name][4:], value), name


def test_it_is_a_backbone() -> None:
    check_backbone(DisenGCN)
