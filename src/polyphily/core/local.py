"""One round at the clients: what a method sees while it trains, and what goes to the server."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from polyphily.core.cohort import Cohort
from polyphily.core.optimizers import Optimizer, OptimizerSpec
from polyphily.engines.replay import Given
from polyphily.nn.backbones import Backbone, Output
from polyphily.nn.draws import Draws
from polyphily.nn.sparse import flat

Message: TypeAlias = dict[str, Tensor]
"""Named tensors with a leading client axis; a scalar per client is a tensor `[K]`."""

MODEL = "model/"


def model_part(message: Mapping[str, Tensor]) -> Message:
    """The parameters in a message or a memory, by their own names."""
    return {n.removeprefix(MODEL): t for n, t in message.items() if n.startswith(MODEL)}


def as_model(params: Mapping[str, Tensor]) -> Message:
    """Parameters under the names they have in a message or a memory."""
    return {MODEL + name: value for name, value in params.items()}


@dataclass
class Local:
    """A round of local training for the clients of a cohort, one or many.

    Attributes:
        cohort: the clients' graphs.
        network: the backbone; its own parameters are never used, `params` are.
        params: stacked parameters `[K, …]`, being trained.
        received: what the server sent for this round.
        memory: what each client keeps to itself from round to round.
        optimizer: which optimiser the clients use.
        steps: how many optimiser steps each client takes in this round.
        phase: what of the round's number the method looks at (`Method.phase`).
        round_index: the round, from 0. Training looks at `phase` and `given` instead.
        draws: the round's random draws; None in evaluation.
        even: whether all clients of a federation have taken equally many steps so far, and will
            in this round; None where nobody has looked.
        give: makes the tensors of `given`, where an engine replays rounds.
        constants: what `Method.begin` computed once for this round.
        losses: mean loss of each client over its steps.
    """

    cohort: Cohort
    network: Backbone
    params: Message
    received: Message
    memory: Message
    optimizer: OptimizerSpec
    steps: tuple[int, ...] = ()
    phase: Hashable = None
    round_index: int = 0
    draws: Draws | None = None
    even: bool | None = None
    give: Given | None = None
    constants: Message = field(default_factory=dict)
    losses: Tensor | None = None

    def forward(self, params: Mapping[str, Tensor] | None = None) -> Output:
        """The network's output on the cohort, with `params` where others than the trained ones."""
        chosen = dict(self.params if params is None else params)
        cohort = self.cohort if torch.is_grad_enabled() else self.cohort.forward_only
        output: Output = functional_call(self.network, chosen, (cohort, self.draws))
        return output

    def frozen(self, params: Mapping[str, Tensor]) -> Output:
        """The output of other parameters, without dropout and without gradient."""
        with torch.no_grad():
            output: Output = functional_call(
                self.network, dict(params), (self.cohort.forward_only,)
            )
        return output

    @property
    def learning_rates(self) -> Tensor:
        """Each client's, `[K]`."""
        blocks = enumerate(self.cohort.blocks)
        rates = [
            self.optimizer.of_block(b)[0] for b, own in blocks for _ in range(own.start, own.stop)
        ]
        return self.cohort.constant(tuple(rates))

    def given(self, make: Callable[[int], npt.NDArray[Any]]) -> Tensor:
        """A tensor that the host makes anew for every round, from the round's number."""
        if self.give is not None:
            return self.give(make)
        return torch.from_numpy(np.asarray(make(self.round_index))).to(self.cohort.device)

    def on_host(self, work: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """`work(*inputs)`, which the host takes part in: an engine that replays rounds must know.

        No gradient goes through it.
        """
        with torch.no_grad():
            return work(*inputs) if self.give is None else self.give.on_host(work, *inputs)

    def cross_entropy(self, logits: Tensor) -> Tensor:
        """Each client's mean cross-entropy over its own train nodes, `[K]`."""
        nodes = self.cohort.train_nodes
        return self.train_mean(
            F.cross_entropy(logits[nodes], self.cohort.train_labels, reduction="none")
        )

    def train_mean(self, values: Tensor) -> Tensor:
        """Each client's mean of values at its train nodes; zero for a client without any."""
        return self.cohort.train_segments.sum(values) / self.cohort.num_train.clamp(min=1)

    def drift(self, anchor: Mapping[str, Tensor]) -> Tensor:
        """Squared distance of each client's parameters to `anchor`, over the names in it, `[K]`."""
        distances = [
            flat(self.params[name] - value).square().sum(dim=1) for name, value in anchor.items()
        ]
        return torch.stack(distances).sum(dim=0)

    def descend(self, method: LossAndGradient) -> None:
        """Steps on the method's loss, on whole graphs or on a sample anew for every step; a client
        stops after its own number of steps."""
        run, whole = self.optimizer, self.cohort
        own = {name: method.optimizer_of(name, run) for name in self.params}
        stepper = Optimizer(run, self.params, self.memory, self.cohort.blocks, own, self.even)
        total = self.cohort.num_train.new_zeros(len(self.cohort))
        alike = len(set(self.steps)) == 1
        for step in range(max(self.steps)):
            going = None if alike else [k for k, limit in enumerate(self.steps) if step < limit]
            if whole.sampling is not None and self.draws is not None:
                self.cohort = whole.sampling.draw(whole, self.draws)
                self.constants = method.begin(self)
            with torch.autocast(
                whole.device.type, torch.bfloat16, enabled=whole.mixed, cache_enabled=False
            ):
                loss = method.loss(self)
            names, values = zip(*self.params.items(), strict=True)
            gradients = torch.autograd.grad(loss.sum(), values, materialize_grads=True)
            grads = method.correct(self, dict(zip(names, gradients, strict=True)))
            stepper.step(grads, going)
            total += loss.detach() if going is None else self._only(loss.detach(), going)
        stepper.finish()
        self.cohort = whole
        self.losses = total / self.cohort.constant(self.steps)

    def _only(self, values: Tensor, clients: list[int]) -> Tensor:
        kept = torch.zeros_like(values)
        kept[clients] = values[clients]
        return kept


class LossAndGradient:
    """What `Local.descend` asks of a method."""

    def begin(self, local: Local) -> Message:
        """What stays the same during the round, computed once; from a sample, for every step."""
        return {}

    def loss(self, local: Local) -> Tensor:
        """Each client's loss, `[K]`; a client's value depends on that client alone."""
        raise NotImplementedError

    def correct(self, local: Local, grads: Message) -> Message:
        """The gradients to step with, for methods that correct them."""
        return grads

    def optimizer_of(self, parameter: str, run: OptimizerSpec) -> OptimizerSpec:
        """The optimiser of a parameter, for methods that give some their own learning rate."""
        return run
