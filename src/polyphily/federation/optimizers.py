"""Optimisers over stacked parameters: one call steps every client with its own state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from polyphily.nn.sparse import flat

OPTIMIZERS = ("adam", "adamw", "sgd")
PREFIX = "optimizer/"
_STEPS = PREFIX + "steps"


@dataclass(frozen=True)
class OptimizerSpec:
    """Which optimiser the clients use.

    Attributes:
        kind: "adam" (L2 penalty added to the gradient), "adamw" (decoupled decay) or "sgd".
        lr: learning rate.
        weight_decay: coefficient of the decay.
        momentum: of SGD.
        clip: largest norm of one client's gradient, all its parameters together; 0 is off.
        keep: whether moments survive from one round to the next.
    """

    kind: str = "adam"
    lr: float = 0.01
    weight_decay: float = 0.0
    momentum: float = 0.0
    clip: float = 0.0
    keep: bool = False


def initial_state(spec: OptimizerSpec, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Moments at zero for stacked parameters `[K, …]`, and every client's count of steps."""
    slots = {"adam": ("mean", "square"), "adamw": ("mean", "square"), "sgd": ("momentum",)}
    state = {
        f"{PREFIX}{slot}/{name}": torch.zeros_like(value)
        for slot in slots[spec.kind]
        for name, value in params.items()
        if spec.kind != "sgd" or spec.momentum
    }
    clients = len(next(iter(params.values())))
    return {**state, _STEPS: torch.zeros(clients, dtype=torch.int64)}


class Optimizer:
    """Steps `params` in place.

    Args:
        spec: kind and coefficients.
        params: stacked parameters.
        state: the moments (`initial_state`), changed in place.
        blocks: runs of clients that step in one call each. The kernels round the last numbers of a
            tensor differently from the rest, so federations that run side by side are kept apart:
            their steps are then those of separate runs to the bit.
    """

    def __init__(
        self,
        spec: OptimizerSpec,
        params: Mapping[str, Tensor],
        state: dict[str, Tensor],
        blocks: Sequence[slice] = (slice(None),),
    ) -> None:
        self.spec, self.params, self.state, self.blocks = spec, params, state, blocks
        self._counts: list[int] = state[_STEPS].tolist()

    def step(self, grads: Mapping[str, Tensor], clients: Sequence[int] | None = None) -> None:
        """One step for all clients, or for those given."""
        if self.spec.clip:
            grads = clipped(grads, self.spec.clip)
        everybody = range(len(self._counts))
        members = everybody if clients is None else clients
        together = len(members) == len(everybody) and len(set(self._counts)) == 1
        names = list(grads)

        def pick(tensors: list[Tensor]) -> list[Tensor]:
            rows: Iterable[int | slice] = self.blocks if together else members
            return [tensor[row] for tensor in tensors for row in rows]

        params = pick([self.params[name].detach() for name in names])
        gradients = pick([grads[name].contiguous() for name in names])
        with torch.no_grad():
            if self.spec.kind == "sgd":
                self._sgd(params, gradients, pick(self._slot("momentum", names)))
            else:
                first = [self._counts[0]] * len(self.blocks)
                counts = first if together else [self._counts[k] for k in members]
                self._adam(
                    params,
                    gradients,
                    pick(self._slot("mean", names)),
                    pick(self._slot("square", names)),
                    counts * len(names),
                )
        for k in members:
            self._counts[k] += 1

    def finish(self) -> None:
        """Writes the step counts back into the state."""
        self.state[_STEPS] = torch.tensor(self._counts, dtype=torch.int64)

    def _slot(self, slot: str, names: list[str]) -> list[Tensor]:
        found = [self.state.get(f"{PREFIX}{slot}/{name}") for name in names]
        return [tensor for tensor in found if tensor is not None]

    def _sgd(self, params: list[Tensor], grads: list[Tensor], buffers: list[Tensor]) -> None:
        spec = self.spec
        sgd(
            params,
            grads,
            list(buffers) or [None] * len(params),
            fused=True,
            weight_decay=spec.weight_decay,
            momentum=spec.momentum,
            lr=spec.lr,
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
        counts: list[int],
    ) -> None:
        spec = self.spec
        device = params[0].device
        adam(
            params,
            grads,
            means,
            squares,
            [],
            [torch.tensor(float(count), device=device) for count in counts],
            fused=True,
            decoupled_weight_decay=spec.kind == "adamw",
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=spec.lr,
            weight_decay=spec.weight_decay,
            eps=1e-8,
            maximize=False,
        )


def clipped(grads: Mapping[str, Tensor], limit: float) -> dict[str, Tensor]:
    """Gradients scaled so that no client's norm over all its parameters exceeds `limit`."""
    squares = torch.stack([flat(g).square().sum(dim=1) for g in grads.values()])
    norm = squares.sum(dim=0).sqrt()
    factor = (limit / (norm + 1e-6)).clamp(max=1)
    return {n: g * factor.view(-1, *[1] * (g.dim() - 1)) for n, g in grads.items()}
