"""Data-free distillation at the server: clients' models teach the averaged one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from polyphily.core.messages import Message, with_prefix
from polyphily.core.optimizers import PREFIX, Optimizer, OptimizerSpec, initial_state
from polyphily.methods.fedtad.pseudo import (
    Nearest,
    PseudoGraph,
    as_drawn,
    copies,
    generate,
    likeness_penalty,
    new_generator,
    pseudo_labels,
)
from polyphily.nn.backbones import Backbone, Output

GENERATOR, STUDENT = "generator/", "student/"  # of the server's state


class Trainable:
    """Parameters at the server, and an Adam optimiser whose moments last from round to round.

    Args:
        name: what the names of its moments in the server's state begin with.
        params: with a leading axis of one, changed in place.
        state: the server's.
        lr: learning rate.
        decay: weight decay.
    """

    def __init__(
        self, name: str, params: Message, state: Mapping[str, Tensor], lr: float, decay: float
    ) -> None:
        spec = OptimizerSpec("adam", lr, decay, keep=True)
        before = with_prefix(state, name + PREFIX)
        self.name, self.params = name, params
        self._moments = {PREFIX + n: t.clone() for n, t in before.items()}
        self._moments = self._moments or initial_state(spec, params)
        self._optimizer = Optimizer(spec, params, self._moments, even=True)

    def step(self, loss: Callable[[Message], Tensor]) -> None:
        """Take a step on a loss of the parameters."""
        with torch.enable_grad():
            own = {name: value.detach().requires_grad_() for name, value in self.params.items()}
            grads = torch.autograd.grad(loss(own), list(own.values()), materialize_grads=True)
        self._optimizer.step(dict(zip(own, grads, strict=True)))

    def finish(self) -> Message:
        """Return the moments under their names in the server's state."""
        self._optimizer.finish()
        return {self.name + name: value for name, value in self._moments.items()}


def class_weights(reliability: Tensor) -> Tensor:
    """Compute w_ic = CKR_ic / sum over clients; zero for a class without train nodes anywhere."""
    positive = reliability.clamp(min=0)  # noise of differential privacy may push it below
    total = positive.sum(dim=0)
    return torch.where(total > 0, positive / torch.where(total > 0, total, 1), 0)


@dataclass(frozen=True)
class Distillation:
    """The alternating training of generator and student; the fields are FedTAD's settings."""

    server_epochs: int
    nodes: int
    noise: int
    neighbours: int
    generator_steps: int
    generator_lr: float
    semantic: float
    diversity: float
    distil_steps: int
    distil_lr: float
    decay: float

    def __call__(
        self,
        network: Backbone,
        student: Message,
        teachers: Message,
        weights: Tensor,
        state: Mapping[str, Tensor],
        rng: np.random.Generator,
    ) -> tuple[Message, Message]:
        """Return the student after distillation, and what the server keeps of this.

        Args:
            network: which all parameters are of.
            student: the parameters of the averaged model.
            teachers: the parameters of K clients' models, stacked.
            weights: w_ic, `[K, C]`.
            state: what the server kept; empty before the first call.
            rng: of the server; in a recorded round it draws tensors.
        """
        classes = weights.shape[1]
        kept = with_prefix(state, GENERATOR)
        maker = {n: t.clone() for n, t in kept.items() if not n.startswith(PREFIX)}
        if not maker:
            features = network.shape.features
            maker = new_generator(self.noise, classes, features, rng, weights)
        pupil = {name: value.detach().clone().unsqueeze(0) for name, value in student.items()}
        generator = Trainable(GENERATOR, maker, state, self.generator_lr, self.decay)
        learner = Trainable(STUDENT, pupil, state, self.distil_lr, self.decay)
        labels = pseudo_labels(self.nodes, classes, weights.device)
        alike = (labels.unsqueeze(1) == labels).sum(dim=1)  # pseudo-nodes of a node's class, [G]
        shares = weights[:, labels] / alike  # of each pseudo-node at each teacher, [K, G]
        noise = rng.standard_normal((self.server_epochs, self.nodes, self.noise))
        for z in as_drawn(noise, weights):
            self.train_generator(generator, network, pupil, teachers, shares, z, labels)
            self.distil(learner, network, teachers, shares, generate(maker, z, labels))
        after = {GENERATOR + name: value for name, value in maker.items()}
        return (
            {name: value[0] for name, value in pupil.items()},
            {**after, **generator.finish(), **learner.finish()},
        )

    def train_generator(
        self,
        generator: Trainable,
        network: Backbone,
        student: Message,
        teachers: Message,
        shares: Tensor,
        z: Tensor,
        labels: Tensor,
    ) -> None:
        """Step on λ1 sum w CE(f_i) - sum w |f - f_i| + λ2 K · the penalty of like nodes.

        Student and teachers run as one stack of K + 1 models.
        """
        models = {n: torch.cat([teachers[n], value]) for n, value in student.items()}

        def loss(params: Message) -> Tensor:
            x = generate(params, z, labels)
            logits = predict(network, models, x, Nearest(x, self.neighbours))
            known, taught = logits[:-1], logits[-1]
            errors = F.cross_entropy(
                known.flatten(0, 1), labels.repeat(len(known)), reduction="none"
            ).view_as(shares)
            return (
                self.semantic * (shares * errors).sum()
                - disagreement(taught, known.detach(), shares)
                + self.diversity * len(known) * likeness_penalty(z, x)
            )

        for _ in range(self.generator_steps):
            generator.step(loss)

    def distil(
        self,
        student: Trainable,
        network: Backbone,
        teachers: Message,
        shares: Tensor,
        x: Tensor,
    ) -> None:
        """Step on sum w |f - f_i| over the pseudo-nodes; what the teachers say is fixed."""
        nearest = Nearest(x, self.neighbours)
        known = predict(network, teachers, x, nearest)
        graph = PseudoGraph(x, nearest, copies(network, len(x), 1, x.device))

        def loss(params: Message) -> Tensor:
            output: Output = functional_call(network, params, (graph,))
            return disagreement(output.logits, known, shares)

        for _ in range(self.distil_steps):
            student.step(loss)


def predict(network: Backbone, models: Message, x: Tensor, nearest: Nearest) -> Tensor:
    """Return the logits of stacked models at the pseudo-nodes, `[models, G, C]`, no dropout."""
    number = len(next(iter(models.values())))
    graph = PseudoGraph(x, nearest, copies(network, len(x), number, x.device))
    output: Output = functional_call(network, models, (graph,))
    return output.logits.view(number, len(x), -1)


def disagreement(student: Tensor, teachers: Tensor, shares: Tensor) -> Tensor:
    """Compute sum_ic w_ic mean over nodes of class c of |f - f_i|, a mean over the logits."""
    return (shares * (student - teachers).abs().mean(dim=2)).sum()
