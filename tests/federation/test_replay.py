"""What a recorded round may know; that replays equal rounds is shown on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cases import assert_close, simulate, small_federation
from polyphily.federation.replay import CannotReplayError, Given, Replay, ServerDraws, Unknown
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
    given = Given(CPU, 2)
    draws = ServerDraws(given, lambda r: generator(7, f"server/{r}"))
    numbers = draws.random((2, 3))
    np.testing.assert_array_equal(numbers, generator(7, "server/2").random((2, 3)))
    given.renew(4)
    np.testing.assert_array_equal(numbers, generator(7, "server/4").random((2, 3)))
    with pytest.raises(CannotReplayError):
        draws.integers(3)


def test_nothing_is_recorded_on_a_cpu() -> None:
    assert Replay(lambda given: pytest.fail("ran"), CPU)(0) is None


@on_gpu
@pytest.mark.parametrize(
    "name",
    ["fedavg", "fedprox", "moon", "scaffold", "fedspa", "fedgsp", "fedhero", "s2fgl", "fedath"],
)
def test_replayed_rounds_are_rounds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"device": "cuda", "dtype": "float32", "dropout": 0.3}
    replayed = simulate(name, small_federation(), 4, **options)
    monkeypatch.setattr(Replay, "__call__", lambda self, round_index: None)
    plain = simulate(name, small_federation(), 4, **options)
    assert_close(replayed.tensors(), plain.tensors(), 1e-5)
