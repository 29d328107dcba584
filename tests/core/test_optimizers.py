"""Stacked optimisers against one of torch's own per client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from polyphily.core.optimizers import (
    OPTIMIZERS,
    Optimizer,
    OptimizerSpec,
    clipped,
    in_cache,
    initial_state,
    own_gradients,
)

CLIENTS, STEPS = 4, 25
SHAPES = {"weight": (3, 2), "bias": (2,), "mix": (2, 1, 2)}
Params = dict[str, Tensor]

SPECS = {
    "adam": OptimizerSpec("adam", lr=0.05),
    "adam with penalty": OptimizerSpec("adam", lr=0.05, weight_decay=0.1),
    "adamw": OptimizerSpec("adamw", lr=0.05, weight_decay=0.1),
    "sgd": OptimizerSpec("sgd", lr=0.05),
    "sgd with decay": OptimizerSpec("sgd", lr=0.05, weight_decay=0.1),
    "sgd with momentum": OptimizerSpec("sgd", lr=0.05, momentum=0.9),
    "sgd with both": OptimizerSpec("sgd", lr=0.05, momentum=0.9, weight_decay=0.1),
    "adam, clipped": OptimizerSpec("adam", lr=0.05, clip=0.5),
    "sgd, clipped": OptimizerSpec("sgd", lr=0.05, momentum=0.5, clip=0.5),
}
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
subsets = st.lists(
    st.sets(st.integers(0, CLIENTS - 1), min_size=1).map(sorted), min_size=1, max_size=15
)


def numbers(seed: int, dtype: torch.dtype = torch.float64) -> Params:
    source = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(CLIENTS, *shape, generator=source).to(dtype)
        for name, shape in SHAPES.items()
    }


@cache
def noise_of(step: int) -> Params:
    return numbers(1000 + step)


def gradient(params: Params, step: int) -> Params:
    """Depends on the parameters, so that an error once made is carried on, and on the step."""
    noise = noise_of(step)
    return {name: value.detach() + noise[name].to(value.dtype) for name, value in params.items()}


def torch_optimizer(spec: OptimizerSpec, params: list[Tensor]) -> torch.optim.Optimizer:
    if spec.kind == "sgd":
        return torch.optim.SGD(
            params, spec.lr, momentum=spec.momentum, weight_decay=spec.weight_decay
        )
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[spec.kind]
    return kind(params, spec.lr, weight_decay=spec.weight_decay)


def one_by_one(
    spec: OptimizerSpec, params: Params, schedule: Sequence[Sequence[int]]
) -> list[Params]:
    """What torch makes of each client on its own."""
    found = []
    for k in range(CLIENTS):
        own = {n: value[k].clone().requires_grad_() for n, value in params.items()}
        optimizer = torch_optimizer(spec, list(own.values()))
        for step, members in enumerate(schedule):
            if k not in members:
                continue
            noise = noise_of(step)
            for name, value in own.items():
                value.grad = value.detach() + noise[name][k].to(value.dtype)
            if spec.clip:
                torch.nn.utils.clip_grad_norm_(list(own.values()), spec.clip)
            optimizer.step()
        found.append({n: value.detach() for n, value in own.items()})
    return found


def stacked(
    spec: OptimizerSpec,
    params: Params,
    schedule: Sequence[Sequence[int] | None],
    *,
    restart: Callable[[int], bool] = lambda step: False,
) -> tuple[Params, dict[str, Tensor]]:
    params = {n: value.clone() for n, value in params.items()}
    state = initial_state(spec, params)
    optimizer = Optimizer(spec, params, state)
    for step, members in enumerate(schedule):
        if restart(step):
            optimizer.finish()
            state = {n: tensor.clone() for n, tensor in state.items()}
            optimizer = Optimizer(spec, params, state)
        optimizer.step(gradient(params, step), members)
    optimizer.finish()
    return params, state


def same(found: Params, expected: list[Params], tolerance: float) -> None:
    for k, own in enumerate(expected):
        for name, value in own.items():
            assert_close(found[name][k], value, rtol=tolerance, atol=tolerance)


@every_spec
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)], ids=str
)
def test_one_stacked_optimizer_is_many_of_torchs(
    spec: OptimizerSpec, dtype: torch.dtype, tolerance: float
) -> None:
    start = numbers(0, dtype)
    found, _ = stacked(spec, start, [None] * STEPS)
    same(found, one_by_one(spec, start, [range(CLIENTS)] * STEPS), tolerance)


@every_spec
@settings(max_examples=12, deadline=None)
@given(schedule=subsets, seed=st.integers(0, 100))
def test_clients_may_step_unevenly(
    spec: OptimizerSpec, schedule: list[list[int]], seed: int
) -> None:
    start = numbers(seed)
    found, state = stacked(spec, start, schedule)
    same(found, one_by_one(spec, start, schedule), 1e-10)
    counts = [sum(k in members for members in schedule) for k in range(CLIENTS)]
    assert state["optimizer/steps"].tolist() == counts


@every_spec
@settings(max_examples=12, deadline=None)
@given(schedule=subsets, seed=st.integers(0, 100))
def test_all_clients_together_again_after_uneven_steps(
    spec: OptimizerSpec, schedule: list[list[int]], seed: int
) -> None:
    start, everyone = numbers(seed), list(range(CLIENTS))
    found, _ = stacked(spec, start, [*schedule, None, everyone, None])
    same(found, one_by_one(spec, start, [*schedule, *[everyone] * 3]), 1e-10)


@every_spec
@settings(max_examples=8, deadline=None)
@given(schedule=subsets)
def test_moments_kept_from_round_to_round_go_on_where_they_stopped(
    spec: OptimizerSpec, schedule: list[list[int]]
) -> None:
    start = numbers(1)
    whole, _ = stacked(spec, start, schedule)
    parts, _ = stacked(spec, start, schedule, restart=lambda step: step % 3 == 2)
    for name, value in whole.items():
        assert torch.equal(parts[name], value)


@every_spec
def test_clients_that_do_not_step_keep_every_bit(spec: OptimizerSpec) -> None:
    params = numbers(0)
    state = initial_state(spec, params)
    optimizer = Optimizer(spec, params, state)
    optimizer.step(gradient(params, 0))
    before = {n: t.clone() for n, t in {**params, **state}.items()}
    optimizer.step(gradient(params, 1), [2, 0])
    for name, value in {**params, **state}.items():
        if name == "optimizer/steps":
            continue
        assert torch.equal(value[[1, 3]], before[name][[1, 3]]), name
        assert not torch.equal(value[[0]], before[name][[0]]), name
        assert not torch.equal(value[[2]], before[name][[2]]), name


@every_spec
def test_a_client_with_a_broken_gradient_harms_nobody_else(spec: OptimizerSpec) -> None:
    params, fine = numbers(0), numbers(0)
    grads = gradient(params, 0)
    Optimizer(spec, fine, initial_state(spec, fine)).step(grads)
    broken = {n: g.clone() for n, g in grads.items()}
    broken["weight"][1] = torch.nan
    Optimizer(spec, params, initial_state(spec, params)).step(broken)
    for name, value in params.items():
        assert torch.equal(value[[0, 2, 3]], fine[name][[0, 2, 3]])
    assert params["weight"][1].isnan().all()


@every_spec
@pytest.mark.parametrize("members", [None, [0, 3]], ids=["all", "some"])
def test_gradients_may_be_views(spec: OptimizerSpec, members: list[int] | None) -> None:
    """Autograd hands out transposed and expanded gradients."""
    source = torch.Generator().manual_seed(5)
    grads = {
        "weight": torch.randn(2, 3, CLIENTS, generator=source).double().permute(2, 1, 0),
        "bias": torch.randn(1, 2, generator=source).double().expand(CLIENTS, 2),
        "mix": torch.randn(CLIENTS, 2, 1, 4, generator=source).double()[..., ::2],
    }
    assert not any(grad.is_contiguous() for grad in grads.values())
    results = []
    for given_grads in (grads, {n: g.contiguous() for n, g in grads.items()}):
        params = numbers(0)
        optimizer = Optimizer(spec, params, initial_state(spec, params))
        optimizer.step(given_grads, members)
        results.append(params)
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_state_has_a_row_for_every_client(kind: str) -> None:
    params = numbers(0)
    state = initial_state(OptimizerSpec(kind, momentum=0.9), params)
    slots = ["momentum"] if kind == "sgd" else ["mean", "square"]
    names = {f"optimizer/{slot}/{name}" for slot in slots for name in SHAPES}
    assert set(state) == {*names, "optimizer/steps"}
    assert all(len(tensor) == CLIENTS and not tensor.any() for tensor in state.values())


def test_plain_sgd_has_no_moments() -> None:
    assert set(initial_state(OptimizerSpec("sgd"), numbers(0))) == {"optimizer/steps"}


def test_only_parameters_with_a_gradient_move() -> None:
    params, spec = numbers(0), OptimizerSpec("adam", weight_decay=0.1)
    before = {n: value.clone() for n, value in params.items()}
    grads = {"bias": gradient(params, 0)["bias"]}
    optimizer = Optimizer(spec, params, initial_state(spec, params))
    optimizer.step(grads)
    optimizer.step(grads, [1])
    assert not torch.equal(params["bias"], before["bias"])
    assert torch.equal(params["weight"], before["weight"])


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    scale=st.sampled_from([0.0, 1e-3, 1.0, 1e4]),
    limit=st.sampled_from([0.1, 1.0, 5.0]),
)
def test_clipping_is_that_of_torch_for_each_client(seed: int, scale: float, limit: float) -> None:
    grads = {n: scale * g for n, g in numbers(seed).items()}
    found = clipped(grads, limit)
    for k in range(CLIENTS):
        own = {n: torch.zeros_like(g[k]).requires_grad_() for n, g in grads.items()}
        for name, value in own.items():
            value.grad = grads[name][k].clone()
        torch.nn.utils.clip_grad_norm_(list(own.values()), limit)
        for name, value in own.items():
            assert value.grad is not None
            assert_close(found[name][k], value.grad, rtol=1e-5, atol=1e-5)
        norm = torch.sqrt(sum(found[name][k].square().sum() for name in found))
        assert norm <= limit


def test_small_gradients_are_not_clipped() -> None:
    grads = {n: 1e-3 * g for n, g in numbers(0).items()}
    for name, value in clipped(grads, 1.0).items():
        assert torch.equal(value, grads[name])


def test_clipping_allows_a_scalar_per_client() -> None:
    grads = {"scale": torch.tensor([3.0, -0.1]), "bias": torch.tensor([[4.0], [0.2]])}
    found = clipped(grads, 1.0)
    assert_close(found["scale"], torch.tensor([0.6, -0.1]))
    assert_close(found["bias"], torch.tensor([[0.8], [0.2]]))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_parameter_may_be_a_scalar_per_client(kind: str) -> None:
    spec = OptimizerSpec(kind, lr=0.1, momentum=0.9)
    params = {"scale": torch.tensor([1.0, 2.0, 3.0])}
    optimizer = Optimizer(spec, params, initial_state(spec, params))
    optimizer.step({"scale": torch.ones(3)})
    optimizer.step({"scale": torch.ones(3)}, [0, 2])
    for k, steps in enumerate((2, 1, 2)):
        own = torch.tensor(k + 1.0, requires_grad=True)
        reference = torch_optimizer(spec, [own])
        for _ in range(steps):
            own.grad = torch.ones(())
            reference.step()
        assert_close(params["scale"][k], own.detach())


def test_gradients_that_share_memory_are_told_apart() -> None:
    one, two, mean = (torch.zeros(2, 3, requires_grad=True) for _ in range(3))
    loss = ((one + two) * torch.arange(3.0)).sum() + mean.sum()
    grads = torch.autograd.grad(loss, [one, two, mean])
    found = own_gradients(dict(zip("abc", grads, strict=True)))
    for name, grad in zip("abc", grads, strict=True):
        torch.testing.assert_close(found[name], grad)
    found["a"].add_(1)
    found["c"][0].add_(1)
    assert found["b"].tolist() == [[0.0, 1.0, 2.0]] * 2
    assert found["c"].tolist() == [[2.0] * 3, [1.0] * 3]


@pytest.mark.parametrize("shape", [(5, 3), (3, 1 << 18), (7, 1 << 15), (2, 0)])
def test_passes_over_parameters_meet_every_client_once(shape: tuple[int, ...]) -> None:
    clients = list(range(shape[0]))
    assert [k for own in in_cache(torch.empty(shape)) for k in clients[own]] == clients
