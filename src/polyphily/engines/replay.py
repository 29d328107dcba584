"""CUDA graphs: work that is recorded once and replayed.

A round launches hundreds of small kernels; a graph launches them at once. Recorded work must do
the same every time, on tensors that stay where they are, and must not read values on the host.
What changes from round to round comes in through `Given`. Work on the host (eigenvectors, say) cuts
the recording into several graphs. `Replay.obstacle` says why work cannot be recorded.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, NoReturn, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

T = TypeVar("T")
Make = Callable[[int], npt.NDArray[Any]]
HostWork = Callable[..., Tensor]
OBSTACLES = {  # words of errors while recording, and what they mean
    "operation not permitted when stream is capturing": "the host looks at numbers on the device",
    "Cannot copy between CPU and CUDA tensors": "the host hands over numbers in the middle",
}


class CannotReplayError(RuntimeError):
    """The work depends on something that a recording cannot know."""


class Unknown:
    """A stand-in for a value that a recording cannot know; any use of it ends the recording."""

    def __init__(self, what: str) -> None:
        self._what = what

    def _refuse(self, *_: object) -> NoReturn:
        raise CannotReplayError(f"it looks at {self._what}")

    __getattr__ = __call__ = __getitem__ = __format__ = __int__ = __float__ = __index__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __str__ = _refuse
    __add__ = __sub__ = __mul__ = __truediv__ = __floordiv__ = __mod__ = _refuse
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rfloordiv__ = __rmod__ = _refuse
    __eq__ = __ne__ = _refuse
    __hash__ = None  # type: ignore[assignment]


class Given:
    """Tensors that the host computes, renewed in place for every replay.

    They are computed from the round's number (`__call__`) or from other tensors in the middle of
    a round (`on_host`).
    """

    def __init__(self, device: torch.device, round_index: int) -> None:
        self.device, self._round = device, round_index
        self._kept: list[tuple[Make, Tensor]] = []
        self._asked = 0
        self._found: list[Tensor] = []
        self._pieces: _Pieces | None = None

    @property
    def round_index(self) -> int:
        """Stands for the round's number, which a recording cannot know."""
        return cast(int, Unknown("the round's number"))

    def __call__(self, make: Make) -> Tensor:
        """Return the tensor of the next request; requests come in the same order every time."""
        if self._asked == len(self._kept):
            self._kept.append((make, self._made(make).to(self.device)))
        self._asked += 1
        return self._kept[self._asked - 1][1]

    def on_host(self, work: HostWork, *inputs: Tensor) -> Tensor:
        """Return `work(*inputs)`, of the same shape every time.

        While recording, return the tensor that will hold it when a replay reaches this place.
        """
        if self._pieces is not None:
            return self._pieces.cut(work, inputs, self._found.pop(0))
        self._found.append(work(*inputs))
        return self._found[-1]

    def rewind(self, pieces: _Pieces | None = None) -> None:
        """Start again with the first request, in a recording if one is given."""
        self._asked, self._pieces = 0, pieces

    def renew(self, round_index: int) -> None:
        """Compute the tensors of another round."""
        self._round = round_index
        for make, tensor in self._kept:
            tensor.copy_(self._made(make), non_blocking=True)

    def _made(self, make: Make) -> Tensor:
        return torch.from_numpy(np.asarray(make(self._round)))


class ServerDraws(Unknown):
    """A server's random numbers in a recording, as tensors on the device, renewed every round.

    They are those of the server's generator, in the order of the calls. It can draw what methods
    draw at servers: `random`, `standard_normal` and `uniform`.

    Args:
        given: where the tensors are kept.
        make: returns the server's generator of a round.
    """

    def __init__(self, given: Given, make: Callable[[int], np.random.Generator]) -> None:
        super().__init__("the server's random numbers")
        self._given, self._make = given, make
        self._called = False
        self._generator: np.random.Generator | None = None  # of a round, after some of its calls

    def random(self, shape: tuple[int, ...]) -> Tensor:
        return self._draw(lambda generator: generator.random(shape))

    def standard_normal(self, shape: tuple[int, ...]) -> Tensor:
        return self._draw(lambda generator: generator.standard_normal(shape))

    def uniform(self, low: float, high: float, shape: tuple[int, ...]) -> Tensor:
        return self._draw(lambda generator: generator.uniform(low, high, shape))

    def _draw(self, draw: Callable[[np.random.Generator], npt.NDArray[Any]]) -> Tensor:
        """Return what the next call draws; tensors are renewed in the order of the calls."""
        first, self._called = not self._called, True

        def make(round_index: int) -> npt.NDArray[Any]:
            if first:
                self._generator = self._make(round_index)
            assert self._generator is not None
            return draw(self._generator)

        return self._given(make)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Pause garbage collection: freeing an older graph would break a recording."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class _Pieces:
    """A recording in pieces: graphs, and the work of the host between them."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._memory = torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._between: list[tuple[HostWork, tuple[Tensor, ...], Tensor]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        torch.cuda.synchronize(self._stream.device)
        torch.cuda.empty_cache()  # memory of graphs is apart from the rest
        with _no_garbage_collection(), torch.cuda.stream(self._stream):
            self._begin()
            try:
                yield
            finally:
                self._graphs[-1].capture_end()

    def _begin(self) -> None:
        self._graphs.append(torch.cuda.CUDAGraph())
        self._graphs[-1].capture_begin(pool=self._memory)

    def cut(self, work: HostWork, inputs: tuple[Tensor, ...], like: Tensor) -> Tensor:
        self._graphs[-1].capture_end()
        found = torch.empty_like(like)
        self._between.append((work, inputs, found))
        self._begin()
        return found

    def replay(self) -> None:
        first, *others = self._graphs
        first.replay()
        for (work, inputs, found), graph in zip(self._between, others, strict=True):
            found.copy_(work(*inputs))
            graph.replay()


class Replay(Generic[T]):
    """A function that is recorded on first use and then replayed.

    Args:
        work: takes the round's `Given`, reads tensors that stay in place, and returns new ones (in
            any structure). It must not change what it reads.
        device: where it runs; nothing is recorded on a CPU.
    """

    def __init__(self, work: Callable[[Given], T], device: torch.device) -> None:
        self.work, self.device = work, device
        self.obstacle: str | None = None
        self._recorded: tuple[_Pieces, Given] | None = None
        self.result: T | None = None

    @property
    def recorded(self) -> bool:
        return self._recorded is not None

    def __call__(self, round_index: int) -> T | None:
        """Return the result, in tensors that the next call overwrites; None if not recordable."""
        if self.device.type != "cuda" or self.obstacle is not None:
            return None
        pieces, given = self._recorded or self._record(round_index) or (None, None)
        if pieces is None or given is None:
            return None
        given.renew(round_index)
        pieces.replay()
        return self.result

    def _record(self, round_index: int) -> tuple[_Pieces, Given] | None:
        given, pieces = Given(self.device, round_index), _Pieces(self.device)
        try:
            self._warm_up(given)
            given.rewind(pieces)
            with pieces.recording():
                self.result = self.work(given)
            self._recorded = pieces, given
        except RuntimeError as error:
            torch.cuda.synchronize(self.device)
            first = str(error.__context__ or error)  # ending the capture fails a second time
            meant = (text for words, text in OBSTACLES.items() if words in first)
            self.obstacle = next(meant, first.splitlines()[0])
        return self._recorded

    def _warm_up(self, given: Given) -> None:
        """Run once outside the recording, so that constants are cached and kernels loaded."""
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self.work(given)
        torch.cuda.current_stream(self.device).wait_stream(stream)
