"""Benchmarks of the hot paths of a round: pytest benchmarks/test_hot_paths.py

Compare them with each other, or between two commits on one machine.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

import polyphily
from polyphily.bench.timing import make_simulation
from polyphily.core.cohort import Cohort
from polyphily.core.metrics import Evaluator
from polyphily.core.optimizers import Optimizer, OptimizerSpec, initial_state
from polyphily.nn.sparse import SparseMatrix

HIDDEN = 64
Benchmark = Callable[..., Any]


@cache
def cohort(dataset: str = "csbm:nodes=500,features=128,degree=10", clients: int = 10) -> Cohort:
    federation = polyphily.load(dataset, clients=clients)
    return make_simulation([federation], "fedavg", {"backbone": "gcn", "hidden": HIDDEN}).cohort


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_sparse_product(benchmark: Benchmark) -> None:
    own = cohort()
    x = torch.randn(own.num_nodes, HIDDEN)
    benchmark(lambda: own.gcn @ x)


def test_product_with_weights_of_every_client(benchmark: Benchmark) -> None:
    own = cohort()
    x, weight = torch.randn(own.num_nodes, HIDDEN), torch.randn(len(own), HIDDEN, HIDDEN)
    benchmark(lambda: own.segments.matmul(x, weight))


def test_sum_by_client(benchmark: Benchmark) -> None:
    own = cohort()
    x = torch.randn(own.num_nodes, HIDDEN)
    benchmark(lambda: own.segments.sum(x))


def test_dropout(benchmark: Benchmark) -> None:
    own = cohort()
    x, draws = torch.randn(own.num_nodes, HIDDEN), own.draws(0)
    benchmark(lambda: draws.dropout(x, 0.5, own.segments.pointers))


def test_values_that_change(benchmark: Benchmark) -> None:
    own: SparseMatrix = cohort().gcn
    value = torch.rand(own.nnz)
    benchmark(lambda: own.with_value(value))


def test_optimizer_step(benchmark: Benchmark) -> None:
    spec = OptimizerSpec("adam")
    params = {"weight": torch.randn(10, 1433, HIDDEN)}
    stepper = Optimizer(spec, params, initial_state(spec, params))
    grads = {"weight": torch.randn(10, 1433, HIDDEN)}
    benchmark(lambda: stepper.step(grads))


def test_scores(benchmark: Benchmark) -> None:
    own = cohort()
    evaluator = Evaluator(own.graphs, own.classes, own.device)
    logits = torch.randn(own.num_nodes, own.classes)
    benchmark(lambda: evaluator.scores(logits))


@pytest.mark.parametrize(
    "method", ["fedavg", "scaffold", "fedspa", "fedgsp", "fedhero", "s2fgl", "fedath"]
)
def test_round(benchmark: Benchmark, method: str) -> None:
    federation = polyphily.load("csbm:nodes=200,features=64", clients=5)
    simulation = make_simulation([federation], method, {"backbone": "acm-gcn", "hidden": HIDDEN})
    for _ in range(2):
        simulation.advance()
    benchmark.pedantic(simulation.advance, rounds=10)  # type: ignore[attr-defined]
