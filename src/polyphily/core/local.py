"""One round at the clients, as a method sees it while it trains."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from polyphily.core.cohort import TrainingGraph
from polyphily.core.messages import Message, model_part
from polyphily.core.objective import Objective, focal_factor
from polyphily.core.optimizers import (
    Optimizer,
    OptimizerSpec,
    add_proximal,
    own_gradients,
)
from polyphily.errors import MethodError
from polyphily.nn import kernels
from polyphily.nn.backbones import Backbone, Output
from polyphily.nn.draws import Draws
from polyphily.nn.sparse import flat

if TYPE_CHECKING:
    from polyphily.core.method import Method


class HostInputs(Protocol):
    """The source of `Local.given` and `Local.on_host` in a replayed round."""

    @property
    def round_index(self) -> int:
        """Stands for the round's number, which a recording cannot know: using it ends it."""

    def __call__(self, make: Callable[[int], npt.NDArray[Any]]) -> Tensor:
        """Return a tensor that holds `make(round)` whenever the round is replayed."""

    def on_host(self, work: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Return a tensor that holds `work(*inputs)` whenever this place is reached."""


@dataclass
class Local:
    """A round of local training for the clients of a cohort, one or many.

    Attributes:
        cohort: the clients' graphs.
        network: the backbone; its own parameters are never used, `params` are.
        params: stacked parameters `[K, …]`, being trained.
        received: what the server sent for this round.
        memory: the private state that each client keeps from round to round.
        optimizer: which optimiser the clients use.
        steps: how many optimiser steps each client takes in this round.
        phase: what of the round's number the method looks at (`Method.phase`).
        round_index: the round, from 0. Training looks at `phase` and `given` instead.
        draws: the round's random draws; None in evaluation.
        even: whether all clients of a federation have taken equally many steps so far, and will
            in this round; None if unknown.
        stepped: how many steps every client has taken with the moments in `memory`; None if
            unknown.
        host: where the tensors of `given` come from if an engine replays rounds.
        objective: the weights of train nodes in the loss.
        constants: what `Method.prepare_round` computed once for this round.
        taken: how many steps of the round have been taken.
        losses: mean loss of each client over its steps.
    """

    cohort: TrainingGraph
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
    stepped: int | None = None
    host: HostInputs | None = None
    objective: Objective = field(default_factory=Objective)
    constants: Message = field(default_factory=dict)
    taken: int = 0
    losses: Tensor | None = None

    def forward(self, params: Mapping[str, Tensor] | None = None) -> Output:
        """Return the network's output on the cohort, with the trained parameters or with others."""
        chosen = dict(self.params if params is None else params)
        graph = self.cohort if torch.is_grad_enabled() else self.cohort.forward_only
        output: Output = functional_call(self.network, chosen, (graph, self.draws))
        return output

    def frozen(self, params: Mapping[str, Tensor]) -> Output:
        """Return the output of other parameters, without dropout and without gradient.

        Parameters that are not among them are the client's own, as it kept them.
        """
        whole = {**model_part(self.memory), **params}
        with torch.no_grad():
            output: Output = functional_call(self.network, whole, (self.cohort.forward_only,))
        return output

    @property
    def learning_rates(self) -> Tensor:
        """Each client's learning rate, `[K]`."""
        blocks = enumerate(self.cohort.blocks)
        rates = [
            self.optimizer.of_block(b)[0] for b, own in blocks for _ in range(own.start, own.stop)
        ]
        return self.cohort.constant(tuple(rates))

    def given(self, make: Callable[[int], npt.NDArray[Any]]) -> Tensor:
        """Return a tensor that the host makes anew for every round, from the round's number."""
        if self.host is not None:
            return self.host(make)
        return torch.from_numpy(np.asarray(make(self.round_index))).to(self.cohort.device)

    def on_host(self, work: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Return `work(*inputs)` where `work` computes on the host; no gradient goes through it.

        An engine that replays rounds must know of such work, because it cannot be recorded.
        """
        with torch.no_grad():
            return work(*inputs) if self.host is None else self.host.on_host(work, *inputs)

    def cross_entropy(self, logits: Tensor) -> Tensor:
        """Return each client's mean cross-entropy over its own train nodes, `[K]`.

        Class weights and the focal factor of the run are applied.
        """
        cohort = self.cohort
        if self.objective.plain and kernels.holds_logits(logits):
            return kernels.cross_entropy(
                logits, cohort.train_nodes, cohort.train_labels, cohort.train_segments
            )
        return self.train_mean(self.train_errors(logits[self.cohort.train_nodes]))

    def train_errors(self, logits: Tensor) -> Tensor:
        """Return the weighted cross-entropy of each train node, from the logits of train nodes."""
        labels = self.cohort.train_labels
        return self.weighted(F.cross_entropy(logits, labels, reduction="none"))

    def weighted(self, errors: Tensor) -> Tensor:
        """Apply class weights and the focal factor of the run to cross-entropies.

        Every method passes the cross-entropies of its loss through here.

        Args:
            errors: -log p of the labels of the train nodes, `[…, train nodes]`.
        """
        objective, cohort = self.objective, self.cohort
        if objective.focal:
            errors = focal_factor(errors, objective.focal) * errors
        if objective.balanced:
            owner = cohort.train_segments.owner
            errors = errors * cohort.class_weights[owner, cohort.train_labels]
        return errors

    def train_mean(self, values: Tensor) -> Tensor:
        """Return each client's mean of values at its train nodes; zero if it has none."""
        return self.cohort.train_segments.sum(values) / self.cohort.num_train.clamp(min=1)

    def drift(self, anchor: Mapping[str, Tensor]) -> Tensor:
        """Return the squared distance of each client's parameters to those in `anchor`, `[K]`."""
        distances = [
            flat(self.params[name] - value).square().sum(dim=1) for name, value in anchor.items()
        ]
        return torch.stack(distances).sum(dim=0)

    def descend(self, method: Method) -> None:
        """Take the round's steps on the method's loss; a client stops after its own number.

        Where clients train on samples, or labels are inputs of which some are hidden, every step
        draws anew what it sees in place of the cohort.
        """
        run, whole = self.optimizer, self.cohort
        own = {name: method.optimizer_for(name, run) for name in self.params}
        stepper = Optimizer(
            run, self.params, self.memory, self.cohort.blocks, own, self.even, self.stepped
        )
        total = self.cohort.num_train.new_zeros(len(self.cohort))
        ones = self.cohort.constant((1.0,) * len(self.cohort))
        alike = len(set(self.steps)) == 1
        for step in range(max(self.steps)):
            self.taken = step
            going = None if alike else [k for k, limit in enumerate(self.steps) if step < limit]
            if whole.changes and self.draws is not None:
                self.cohort = whole.sample(self.draws)
                self.constants = method.prepare_round(self)
            with torch.autocast(
                whole.device.type, torch.bfloat16, enabled=whole.mixed, cache_enabled=False
            ):
                loss = method.loss(self)
            if loss.shape != total.shape:  # a sum over clients would mix their gradients' scales
                raise MethodError(
                    f"{type(method).__name__}.loss returned a tensor of shape {tuple(loss.shape)}: "
                    f"return one value per client, shape ({len(whole)},)"
                )
            names, values = zip(*self.params.items(), strict=True)
            each = ones if ones.dtype == loss.dtype else ones.to(loss.dtype)
            gradients = torch.autograd.grad(loss, values, each, materialize_grads=True)
            grads = own_gradients(dict(zip(names, gradients, strict=True)))
            value = loss.detach()
            if (pull := method.proximal(self)) is not None:
                value = value + add_proximal(*pull, self.params, grads)
            grads = method.correct_gradients(self, grads)
            stepper.step(grads, going)
            total += value if going is None else self._only(value, going)
        stepper.finish()
        if self.stepped is not None:
            self.stepped += max(self.steps)
        self.cohort = whole
        self.losses = total / self.cohort.constant(self.steps)

    def _only(self, values: Tensor, clients: list[int]) -> Tensor:
        kept = torch.zeros_like(values)
        kept[clients] = values[clients]
        return kept
