"""Optimisers over stacked parameters: one call steps every client with its own state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from polyphily.nn import kernels
from polyphily.nn.sparse import flat

OPTIMIZERS = ("adam", "adamw", "sgd")
PREFIX = "optimizer/"
STEPS = PREFIX + "steps"
BETAS, EPSILON = (0.9, 0.999), 1e-8  # of Adam
AT_A_TIME = 1 << 17  # numbers in a pass over gradients on a CPU: few enough for its cache


@dataclass(frozen=True)
class OptimizerSpec:
    """The optimiser of the clients.

    Attributes:
        kind: "adam" (L2 penalty added to the gradient), "adamw" (decoupled decay) or "sgd".
        lr: learning rate; several where federations that run side by side have their own.
        weight_decay: coefficient of the decay; several likewise.
        momentum: of SGD.
        clip: largest norm of one client's gradient, all its parameters together; 0 is off.
        keep: whether moments survive from one round to the next.
    """

    kind: str = "adam"
    lr: float | tuple[float, ...] = 0.01
    weight_decay: float | tuple[float, ...] = 0.0
    momentum: float = 0.0
    clip: float = 0.0
    keep: bool = False

    def only(self, federations: Sequence[int]) -> OptimizerSpec:
        """Return the spec of some of the federations."""

        def cut(value: float | tuple[float, ...]) -> float | tuple[float, ...]:
            return tuple(value[s] for s in federations) if isinstance(value, tuple) else value

        return replace(self, lr=cut(self.lr), weight_decay=cut(self.weight_decay))

    def of_block(self, block: int) -> tuple[float, float]:
        """Return learning rate and decay of one federation."""
        lr, decay = self.lr, self.weight_decay
        return (
            lr[block] if isinstance(lr, tuple) else lr,
            decay[block] if isinstance(decay, tuple) else decay,
        )


def initial_state(spec: OptimizerSpec, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return zero moments for stacked parameters `[K, …]`, and a step count per client."""
    slots = {"adam": ("mean", "square"), "adamw": ("mean", "square"), "sgd": ("momentum",)}
    first = next(iter(params.values()))
    state = {
        f"{PREFIX}{slot}/{name}": torch.empty_like(value)
        if first.is_cuda
        else torch.zeros_like(value)
        for slot in slots[spec.kind]
        for name, value in params.items()
        if spec.kind != "sgd" or spec.momentum
    }
    if first.is_cuda and state:
        torch._foreach_zero_(list(state.values()))  # one kernel for all of them
    return {**state, STEPS: torch.zeros(len(first), dtype=torch.int64, device=first.device)}


class Optimizer:
    """An optimiser that steps stacked `params` in place.

    Args:
        spec: kind and coefficients.
        params: stacked parameters.
        state: the moments (`initial_state`), changed in place.
        blocks: slices of clients that step in one call each. torch's kernels round the last
            elements of a tensor differently from the rest. Federations that run side by side step
            in calls of their own, so that their steps equal those of separate runs to the bit.
        own: specs of parameters that have one of their own; the kind is that of `spec`.
        even: whether the clients of each block have stepped equally often, now and in all steps to
            come. If not known to be true, the counts are read from the device.
        stepped: the number of steps that all clients have taken before, if it is known and they
            are `even`.
    """

    def __init__(
        self,
        spec: OptimizerSpec,
        params: Mapping[str, Tensor],
        state: dict[str, Tensor],
        blocks: Sequence[slice] = (slice(None),),
        own: Mapping[str, OptimizerSpec] | None = None,
        even: bool | None = None,
        stepped: int | None = None,
    ) -> None:
        self.spec, self.params, self.state, self.blocks = spec, params, state, blocks
        self.own = own or {}
        self._before = stepped
        self._taken = 0
        self._counts: list[int] | None = None
        if not even:
            self._counts = state[STEPS].tolist()
        self._ticks: Tensor | None = None  # the steps before, of each block

    def step(self, grads: Mapping[str, Tensor], clients: Sequence[int] | None = None) -> None:
        """Take one step for all clients, or for those given."""
        if self.spec.clip:
            grads = clipped(grads, self.spec.clip)
        for names, rows in self._groups(list(grads), clients):
            spec = self.own.get(names[0], self.spec)
            lr, decay = spec.of_block(rows[0][0])
            cut = [row for _, row in rows]

            def pick(tensors: list[Tensor], cut: Sequence[slice | int] = cut) -> list[Tensor]:
                return [tensor[row] for tensor in tensors for row in cut]

            params = pick([self.params[name].detach() for name in names])
            gradients = pick([grads[name].contiguous() for name in names])
            with torch.no_grad():
                if spec.kind == "sgd":
                    buffers = pick(self._slot("momentum", names))
                    self._sgd(params, gradients, buffers, lr, decay)
                else:
                    ticks = self._times(names[0], rows) * len(names)
                    means, squares = (pick(self._slot(s, names)) for s in ("mean", "square"))
                    self._adam(params, gradients, means, squares, ticks, lr, decay)
        if self._counts is not None:
            for k in range(len(self._counts)) if clients is None else clients:
                self._counts[k] += 1
        self._taken += 1

    def _groups(
        self, names: list[str], clients: Sequence[int] | None
    ) -> list[tuple[list[str], list[tuple[int, slice | int]]]]:
        """Return what steps in one call, as (parameter names, [(block, rows of it), …]).

        One call takes one learning rate and decay, so parameters are grouped by their spec and
        blocks by their rates.
        """
        rows = self._rows(clients)
        by_spec: dict[OptimizerSpec, list[str]] = {}
        for name in names:
            by_spec.setdefault(self.own.get(name, self.spec), []).append(name)
        groups = []
        for spec, members in by_spec.items():
            by_rate: dict[tuple[float, float], list[tuple[int, slice | int]]] = {}
            for block, row in rows:
                by_rate.setdefault(spec.of_block(block), []).append((block, row))
            groups += [(members, alike) for alike in by_rate.values()]
        return groups

    def _rows(self, clients: Sequence[int] | None) -> list[tuple[int, slice | int]]:
        """Return the rows that step, each with its block.

        A block whose clients all step and have stepped equally often is one slice; the clients of
        other blocks step one by one, since Adam's bias correction depends on the count.
        """
        counts = self._counts
        if counts is None:
            assert clients is None, "clients that step unevenly"
            return list(enumerate(self.blocks))
        members = set(range(len(counts)) if clients is None else clients)
        rows: list[tuple[int, slice | int]] = []
        for block, own in enumerate(self.blocks):
            inside = range(*own.indices(len(counts)))
            if members.issuperset(inside) and len({counts[k] for k in inside}) == 1:
                rows.append((block, own))
            else:
                rows += [(block, k) for k in inside if k in members]
        return rows

    def _times(self, name: str, rows: Sequence[tuple[int, slice | int]]) -> list[Tensor]:
        """Return the number of each row's step, counted from 1, as tensors on the device."""
        device = self.params[name].device
        if self._counts is not None:
            counts = self._counts
            firsts = [
                range(*r.indices(len(counts)))[0] if isinstance(r, slice) else r for _, r in rows
            ]
            return [torch.tensor(float(counts[k] + 1), device=device) for k in firsts]
        if self._before is not None:
            return [_number(self._before + self._taken + 1, device)] * len(rows)
        if self._ticks is None:
            steps = self.state[STEPS]
            self._ticks = torch.stack([steps[own][0] for own in self.blocks]).to(torch.float32)
        own = (self._ticks + (self._taken + 1)).unbind()
        return [own[block] for block, _ in rows]

    def finish(self) -> None:
        """Write the step counts back into the state."""
        before = self.state[STEPS]
        self.state[STEPS] = (
            before + self._taken
            if self._counts is None
            else torch.tensor(self._counts, dtype=torch.int64, device=before.device)
        )

    def _slot(self, slot: str, names: list[str]) -> list[Tensor]:
        found = [self.state.get(f"{PREFIX}{slot}/{name}") for name in names]
        return [tensor for tensor in found if tensor is not None]

    def _sgd(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        buffers: list[Tensor],
        lr: float,
        decay: float,
    ) -> None:
        sgd(
            params,
            grads,
            list(buffers) or [None] * len(params),
            fused=True,
            weight_decay=decay,
            momentum=self.spec.momentum,
            lr=lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )

    def _adam(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        means: list[Tensor],
        squares: list[Tensor],
        steps: list[Tensor],
        lr: float,
        decay: float,
    ) -> None:
        decoupled = self.spec.kind == "adamw"
        rows = list(zip(params, grads, means, squares, steps, strict=True))
        for row in rows:
            if _steps_alone(row[0]):
                kernels.adam_step(
                    *row, lr=lr, decay=decay, betas=BETAS, epsilon=EPSILON, decoupled=decoupled
                )
        rest = [row for row in rows if not _steps_alone(row[0])]
        if not rest:
            return
        params, grads, means, squares, steps = (list(column) for column in zip(*rest, strict=True))
        step = torch._fused_adamw_ if decoupled else torch._fused_adam_
        step(
            params,
            grads,
            means,
            squares,
            [],
            steps,
            lr=lr,
            beta1=BETAS[0],
            beta2=BETAS[1],
            weight_decay=decay,
            eps=EPSILON,
            amsgrad=False,
            maximize=False,
        )


def _steps_alone(param: Tensor) -> bool:
    """Return whether a parameter steps in a kernel of its own: a large one on a GPU."""
    return kernels.available(param) and param.is_contiguous() and param.numel() >= kernels.MANY


@cache
def _number(value: int, device: torch.device) -> Tensor:
    """Return a number on a device, copied there once."""
    return torch.tensor(float(value), device=device)


def own_gradients(grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return gradients that may be changed in place: dense, each in memory of its own.

    Autograd returns one tensor for two parameters that are added, and an expanded one for a sum.
    """
    found: dict[str, Tensor] = {}
    places: set[int] = set()
    for name, grad in grads.items():
        place = grad.untyped_storage().data_ptr()
        own = grad.is_contiguous() and place not in places
        places.add(place)
        found[name] = grad if own else grad.clone(memory_format=torch.contiguous_format)
    return found


def in_cache(params: Tensor) -> list[slice]:
    """Return slices of clients whose parameters fit into a CPU's cache; on a GPU, all of them."""
    each = max(1, AT_A_TIME // max(params[0].numel(), 1)) if params.is_cpu else len(params)
    return [slice(start, start + each) for start in range(0, len(params), each)]


def add_proximal(
    weight: float,
    anchor: Mapping[str, Tensor],
    params: Mapping[str, Tensor],
    grads: Mapping[str, Tensor],
) -> Tensor:
    """Add the gradient of weight/2 ‖params − anchor‖² in place; return the term itself, `[K]`.

    Args:
        weight: of the term.
        anchor: what some of the parameters are pulled to.
        params: the parameters.
        grads: their gradients (`own_gradients`).
    """
    squares = []
    with torch.no_grad():
        for name, value in anchor.items():
            own = []
            for clients in in_cache(value):
                way = params[name][clients] - value[clients]
                grads[name][clients].add_(way, alpha=weight)
                own.append(flat(way.square_()).sum(dim=1))
            squares.append(torch.cat(own))
    return weight / 2 * torch.stack(squares).sum(dim=0)


def clipped(grads: Mapping[str, Tensor], limit: float) -> dict[str, Tensor]:
    """Scale gradients so that no client's norm over all its parameters exceeds `limit`."""
    squares = torch.stack([flat(g).square().sum(dim=1) for g in grads.values()])
    norm = squares.sum(dim=0).sqrt()
    factor = (limit / (norm + 1e-6)).clamp(max=1)
    return {n: g * factor.view(-1, *[1] * (g.dim() - 1)) for n, g in grads.items()}
