"""What a recorded round may know; that replays equal rounds is shown on a GPU."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from cases import assert_close, simulate, small_federation
from polyphily.core.method import create
from polyphily.engines.replay import CannotReplayError, Given, Replay, ServerDraws, Unknown
from polyphily.graphs.random import generator

CPU = torch.device("cpu")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_what_a_recording_cannot_know_ends_it() -> None:
    number = Unknown("the round's number")
    for use in (
        lambda: number < 3,
        lambda: number + 1,
        lambda: 3 - number,
        lambda: f"{number}",
        lambda: number == 4,
        lambda: bool(number),
        lambda: range(number),
        lambda: number.random(),
    ):
        with pytest.raises(CannotReplayError, match="the round's number"):
            use()


def test_given_tensors_are_renewed_in_place() -> None:
    given = Given(CPU, 3)
    first = given(lambda r: np.array([r, 2 * r]))
    second = given(lambda r: np.float32(r) / 2)
    given.rewind()
    assert given(lambda r: np.zeros(2)) is first
    given.renew(5)
    assert first.tolist() == [5, 10]
    assert second.item() == 2.5


def test_a_servers_draws_are_those_of_its_generator() -> None:
    """In the order of the calls, also if several servers draw in turn."""

    def draw(rng: Any) -> list[Any]:
        return [rng.random((2, 3)), rng.standard_normal((3,)), rng.uniform(-2, 5, (2, 2))]

    def assert_drawn(round_index: int) -> None:
        for seed, numbers in found.items():
            expected = draw(generator(seed, f"server/{round_index}"))
            for own, other in zip(numbers, expected, strict=True):
                np.testing.assert_array_equal(own, other)

    given, found = Given(CPU, 2), {}
    for seed in (7, 8):
        draws = ServerDraws(given, lambda r, seed=seed: generator(seed, f"server/{r}"))
        found[seed] = draw(draws)
    for round_index in (2, 4, 4):
        given.renew(round_index)
        assert_drawn(round_index)
    with pytest.raises(CannotReplayError):
        draws.integers(3)


def test_nothing_is_recorded_on_a_cpu() -> None:
    assert Replay(lambda given: pytest.fail("ran"), CPU)(0) is None


def test_the_host_works_at_once_where_nothing_is_recorded() -> None:
    given = Given(CPU, 0)
    assert given.on_host(lambda a, b: a - b, torch.tensor(5), torch.tensor(3)).item() == 2


def test_in_a_recording_the_hosts_tensors_are_those_of_the_pieces() -> None:
    """They come in the order of the run before, whose tensors tell their shapes."""

    class Pieces:
        def cut(self, work: object, inputs: tuple[Tensor, ...], like: Tensor) -> Tensor:
            return torch.full_like(like, 7)

    given = Given(CPU, 0)
    for size in (2, 3):
        given.on_host(torch.zeros, torch.tensor(size))
    given.rewind(cast(Any, Pieces()))
    for size in (2, 3):
        found = given.on_host(lambda x: pytest.fail("ran"), torch.tensor(0))
        assert found.tolist() == [7] * size


@on_gpu
def test_between_graphs_the_host_sees_the_numbers_of_the_replay() -> None:
    x = torch.tensor([3.0, 1.0, 2.0], device="cuda")

    def work(given: Given) -> Tensor:
        for _ in range(2):
            y = given.on_host(lambda t: torch.tensor(sorted(t.tolist())).cuda(), 10 * x)
            y = given.on_host(lambda a, b: torch.from_numpy(a.cpu().numpy()).cuda() - b, y, x)
        return y + x

    replay = Replay(work, torch.device("cuda"))
    for round_index in range(3):
        x.copy_(torch.tensor([3.0, 1.0, 2.0]) + round_index)
        found = replay(round_index)
        assert found is not None, replay.obstacle
        assert found.tolist() == sorted((10 * x).tolist())


@on_gpu
def test_an_obstacle_is_told_in_plain_words() -> None:
    x = torch.ones(2, device="cuda")
    replay = Replay(lambda given: x * float(x.sum()), torch.device("cuda"))
    assert replay(0) is None
    assert replay.obstacle == "the host looks at numbers on the device"


ACTING = {"warm_up": 0, "ramp": 1}


@on_gpu
@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        *((name, {}) for name in ("fedavg", "fedprox", "moon", "scaffold", "fedspa", "fedgsp")),
        *((name, {}) for name in ("fedhero", "s2fgl", "fedath", "fedtad")),
        ("s2fgl", ACTING),
        ("s2fgl", {**ACTING, "refresh": "step"}),
        ("fedspa", {"form": "code"}),
    ],
)
def test_replayed_rounds_are_rounds(
    name: str, chosen: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"device": "cuda", "dtype": "float32", "dropout": 0.3}
    replayed = simulate(create(name, chosen), small_federation(), 4, **options)
    monkeypatch.setattr(Replay, "__call__", lambda self, round_index: None)
    plain = simulate(create(name, chosen), small_federation(), 4, **options)
    assert_close(replayed.tensors(), plain.tensors(), 1e-5)
    if name in ("s2fgl", "fedtad"):
        assert replayed.obstacle is None


@on_gpu
@pytest.mark.parametrize("backbone", create("fedtad").supported_backbones())
def test_distillation_at_the_server_is_replayed_with_every_backbone(backbone: str) -> None:
    method = create("fedtad", {"nodes": 20})
    options = {"device": "cuda", "dtype": "float32", "hidden": 8}
    replayed = simulate(method, small_federation(), 4, backbone=backbone, **options)
    assert replayed.obstacle is None
