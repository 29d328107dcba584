"""Recorded rounds without a GPU: the work of a replay is done anew, into the same tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from cases import assert_same_bits, simulate, small_federation
from polyphily.core.method import create
from polyphily.engines import recorded
from polyphily.engines.replay import Given


def tensors_in(found: Any) -> Iterator[Tensor]:
    """Return the tensors of a structure in a fixed order."""
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, dict | list | tuple):
        for part in found.values() if isinstance(found, dict) else found:
            yield from tensors_in(part)
    elif is_dataclass(found):
        yield from tensors_in([getattr(found, field.name) for field in fields(found)])


class Repeat:
    """Stands for `Replay` on a CPU: repeats the work, with what a recording would know."""

    made = 0
    obstacle = None

    def __init__(self, work: Callable[[Given], Any], device: torch.device) -> None:
        self.work, self.device = work, device
        self.result: Any = None
        self._given: Given | None = None
        Repeat.made += 1

    @property
    def recorded(self) -> bool:
        return self._given is not None

    def __call__(self, round_index: int) -> Any:
        if self._given is None:
            self._given = Given(self.device, round_index)
            self.work(self._given)  # the warm-up
            self._given.rewind()
            self.result = self.work(self._given)
        self._given.renew(round_index)
        self._given.rewind()
        found = self.work(self._given)
        for own, new in zip(tensors_in(self.result), tensors_in(found), strict=True):
            own.copy_(new)
        return self.result


@pytest.mark.parametrize(
    ("name", "chosen", "recordings"),
    [
        ("fedavg", {}, 1),
        ("s2fgl", {"warm_up": 0, "ramp": 1}, 1),  # its first round is not recorded
        ("fedtad", {"nodes": 12}, 2),  # the generator is new after the first
    ],
)
def test_repeated_rounds_are_rounds(
    name: str, chosen: dict[str, Any], recordings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"dropout": 0.3}
    plain = simulate(create(name, chosen), small_federation(), 5, **options)
    monkeypatch.setattr(recorded, "Replay", Repeat)
    monkeypatch.setattr(Repeat, "made", 0)
    repeated = simulate(create(name, chosen), small_federation(), 0, **options)
    repeated.in_place, repeated.backend = True, recorded.Recorded(repeated)
    for _ in range(5):
        repeated.advance()
    assert repeated.obstacle is None
    assert Repeat.made == 3 * recordings  # of clients, servers and storage
    assert_same_bits(plain.tensors(), repeated.tensors())
