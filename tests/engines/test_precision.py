"""Shorter numbers in matrix products: training works, weights and sums stay in float32."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from builders import CPU, random_graphs
from cases import simulate, small_federation, weights_of
from polyphily.core.cohort import Cohort
from polyphily.core.local import Local
from polyphily.core.method import METHODS, create
from polyphily.core.settings import Settings
from polyphily.errors import UserError
from polyphily.graphs.loading import load
from polyphily.methods.fedavg import FedAvg
from polyphily.nn.backbones import BACKBONES
from polyphily.nn.segments import Segments
from polyphily.runs.run import run
from polyphily.runtime.machine import matmul_precision

BF16 = {"dtype": "float32", "precision": "bf16", "dropout": 0.3}


def short() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


# What is short and what is not -------------------------------------------------------------------


def test_products_are_short_under_autocast_and_their_gradients_reach_float32() -> None:
    segments = Segments((3, 0, 40, 40), CPU)
    x, weight = torch.randn(83, 16), torch.randn(4, 16, 8, requires_grad=True)
    exact = segments.matmul(x, weight)
    with short():
        found = segments.matmul(x, weight)
    assert found.dtype == torch.bfloat16
    rounded = [part.bfloat16().double() for part in (x, weight.detach())]
    parts = zip(rounded[0].split(segments.sizes), rounded[1], strict=True)
    expected = torch.cat([rows @ own for rows, own in parts])
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-6)
    target = torch.randn(83, 8)
    (grad,) = torch.autograd.grad((found * target).sum(), weight)
    (wanted,) = torch.autograd.grad((exact * target).sum(), weight)
    assert grad.dtype == torch.float32
    assert float((grad - wanted).norm() / wanted.norm()) < 0.01


def test_sums_over_neighbours_and_clients_are_never_short() -> None:
    cohort = Cohort(random_graphs((300, 280)), [(0, 0), (0, 1)], 3)
    x = torch.randn(580, 4).bfloat16()
    with short():
        sums = {
            "product": (cohort.mean @ x, cohort.mean @ x.float()),
            "by row": (
                cohort.edges.sum_by_row(cohort.edges.at_cols(x)),
                cohort.edges.sum_by_row(cohort.edges.at_cols(x.float())),
            ),
            "by client": (cohort.segments.sum(x), cohort.segments.sum(x.float())),
            "mean": (cohort.segments.mean(x), cohort.segments.mean(x.float())),
            "expanded": (cohort.segments.expand(x[:2]), cohort.segments.expand(x[:2].float())),
        }
    for name, (found, expected) in sums.items():
        assert found.dtype == torch.float32, name
        assert torch.equal(found, expected), name


@dataclass(frozen=True)
class Watched(FedAvg):
    """FedAvg that tells how its loss is computed."""

    seen: list[bool] = field(default_factory=list)

    def loss(self, local: Local) -> Tensor:
        self.seen.append(torch.is_autocast_enabled("cpu"))
        return super().loss(local)

    def predict(self, local: Local) -> Tensor:
        self.seen.append(torch.is_autocast_enabled("cpu"))
        return super().predict(local)


@pytest.mark.parametrize(("precision", "expected"), [("bf16", True), ("float32", False)])
def test_losses_are_short_and_scores_are_not(precision: str, expected: bool) -> None:
    method = Watched()
    simulation = simulate(
        method, small_federation(), 1, epochs=1, dtype="float32", precision=precision
    )
    simulation.predict(simulation.received())
    assert method.seen == [expected, False]


# Training ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(METHODS))
@pytest.mark.parametrize("sparse", [False, True])
def test_every_method_trains_in_bf16_and_keeps_float32(name: str, sparse: bool) -> None:
    method = create(name, {"warm_up": 0, "ramp": 0} if name == "s2fgl" else {})
    federation = small_federation(sparse=sparse)
    mixed = weights_of(simulate(method, federation, 3, **BF16))
    assert all(t.isfinite().all() for t in mixed.values())
    assert not any(t.dtype in (torch.bfloat16, torch.float16) for t in mixed.values())


@pytest.mark.parametrize("backbone", sorted(BACKBONES))
def test_every_backbone_trains_in_bf16(backbone: str) -> None:
    federation = small_federation()
    mixed = weights_of(simulate("fedavg", federation, 2, backbone=backbone, **BF16))
    plain = weights_of(
        simulate("fedavg", federation, 2, backbone=backbone, dtype="float32", dropout=0.3)
    )
    assert any(not torch.equal(mixed[name], plain[name]) for name in plain), "nothing was short"
    sequential = simulate("fedavg", federation, 2, backbone=backbone, engine="sequential", **BF16)
    for name, value in weights_of(sequential).items():
        assert (value - mixed[name]).norm() <= 0.05 * mixed[name].norm()


@pytest.mark.parametrize("backbone", ["gcn", "mlp", "acm-gcn"])
def test_scores_in_bf16_are_those_in_float32_within_a_point_or_two(backbone: str) -> None:
    federation = load("csbm:nodes=1000,degree=8,features=32,mu=200", clients=4, seed=0)
    scores = {
        precision: run(
            "fedavg", federation, rounds=25, backbone=backbone, precision=precision
        ).summary
        for precision in ("float32", "bf16")
    }
    accuracy = {name: s["final"]["test"]["accuracy"] for name, s in scores.items()}
    assert accuracy["float32"] > 0.7, "nothing is learned here"
    assert abs(accuracy["bf16"] - accuracy["float32"]) < 0.02
    assert {name: s["precision"] for name, s in scores.items()} == {n: n for n in scores}


# For a run and back ------------------------------------------------------------------------------


def test_tf32_is_for_the_run_alone() -> None:
    before = torch.get_float32_matmul_precision()
    seen: list[str] = []
    chosen = {"rounds": 2, "backbone": "gcn"}
    for precision in ("tf32", "float32"):
        run(
            "fedavg",
            small_federation(),
            precision=precision,
            progress=lambda _: seen.append(torch.get_float32_matmul_precision()),
            **chosen,
        )
    assert seen == ["high", "high", "highest", "highest"]
    assert torch.get_float32_matmul_precision() == before
    with pytest.raises(RuntimeError), matmul_precision("tf32"):
        raise RuntimeError
    assert torch.get_float32_matmul_precision() == before


def test_precisions_that_cannot_be() -> None:
    with pytest.raises(UserError, match="precision"):
        Settings(precision="half").check()
    with pytest.raises(UserError, match="--precision bf16 is for --dtype float32"):
        Settings(precision="bf16", dtype="float64").check()
    doubled = run("fedavg", small_federation(), rounds=1, backbone="gcn", dtype="float64")
    assert doubled.summary["precision"] == "float64"
