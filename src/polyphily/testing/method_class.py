"""Checks of a method: its class, its hyperparameters, its network and its loss."""

from __future__ import annotations

import dataclasses
import inspect

import torch

from polyphily.core import settings as knobs
from polyphily.core.method import FORMS, METHODS, Method, create
from polyphily.nn.backbones import Backbone, Shape
from polyphily.testing.cases import MethodCase, method_check, trained
from polyphily.testing.comparing import CheckFailed
from polyphily.testing.examples import CLASSES, FEATURES, usual_backbone


@method_check("class")
def _class(case: MethodCase) -> None:
    check_class(case.cls)


def check_class(cls: type[Method]) -> None:
    """Check that a method is registered, that it is a dataclass, and that it is documented."""
    name = cls.__name__
    if METHODS.get(getattr(cls, "name", "")) is not cls:
        raise CheckFailed(
            f"{name}: the class is not registered. Decorate it with @register_method(name, cite=…)."
        )
    for own in vars(cls).get("__annotations__", {}):
        if own not in cls.hyperparameters() and not _is_class_variable(cls, own):
            raise CheckFailed(
                f"{name}.{own}: this is no hyperparameter, because the class is not a dataclass. "
                "Decorate it with @dataclass(frozen=True), below @register_method."
            )
    if not cls.__doc__ or cls.__doc__.startswith(f"{name}("):
        raise CheckFailed(f"{name}: the class has no docstring. Say in one line what it computes.")
    if not cls.cite:
        raise CheckFailed(
            f"{name}: it cites nothing. Name the paper: @register_method(name, cite=…)."
        )
    for field in cls.hyperparameters().values():
        if not isinstance(field.default, bool | int | float | str) or not field.metadata.get("doc"):
            raise CheckFailed(
                f"{name}.{field.name}: the hyperparameter has no default or no description. "
                f'Declare it with parameter(default, "what it means").'
            )
        if field.name in {*knobs.names(), *FORMS}:
            raise CheckFailed(
                f"{name}.{field.name}: settings of a run have this name already, so the "
                "hyperparameter could not be set. Choose another name."
            )
    for key, value in cls.paper_form().items():
        if value == cls.hyperparameters()[key].default:
            raise CheckFailed(
                f"{name}.{key}: the paper's value is the default. Leave `paper=` out of parameter."
            )


def _is_class_variable(cls: type[Method], name: str) -> bool:
    """Return whether an annotation in a class is not meant as a hyperparameter."""
    inherited = any(name in vars(base).get("__annotations__", {}) for base in cls.__mro__[1:])
    written = inspect.get_annotations(cls)[name]
    return inherited or "ClassVar" in str(written)


@method_check("created-by-name")
def _created_by_name(case: MethodCase) -> None:
    values = dataclasses.asdict(case.method)
    texts = {key: str(value) for key, value in values.items()}
    if create(case.cls.name, texts) != case.method:
        raise case.fail(
            "hyperparameters that are written as text do not give the same method",
            "let the default of each have the type of its values",
        )


@method_check("network")
def _network(case: MethodCase) -> None:
    shape = Shape(features=FEATURES, classes=CLASSES, hidden=8)
    backbone = case.backbone or usual_backbone(case.method)
    with torch.random.fork_rng(devices=[]):
        networks = []
        for state in (1, 2):
            torch.manual_seed(state)
            networks.append(case.method.build(backbone, shape, seed=0))
    for network in networks:
        if not isinstance(network, Backbone) or not dict(network.named_parameters()):
            raise case.fail(
                "it did not return a network with parameters",
                "return a Backbone, such as super().build(backbone, shape, seed)",
                "build",
            )
        for name, value in network.named_parameters():
            if len(value) != 1:
                raise case.fail(
                    f"{name} has the shape {tuple(value.shape)}",
                    "create parameters for one client, with a leading axis of length 1",
                    "build",
                )
    first, second = (dict(network.named_parameters()) for network in networks)
    case.compare(
        "two networks of one seed differ",
        first,
        second,
        0.0,
        "draw initial parameters from the seed alone: torch.random.fork_rng, then "
        "torch.manual_seed(seed)",
        "build",
    )


@method_check("embedding-width")
def _embedding_width(case: MethodCase) -> None:
    for layers in (1, 2, 3):
        simulation = case.simulate(0, layers=layers)
        found, told = simulation.received().forward().embedding, simulation.network.embedding_width
        if found.shape != (simulation.cohort.num_nodes, told):
            raise case.fail(
                f"with {layers} layers the network's embedding has the shape {tuple(found.shape)}, "
                f"but its embedding_width is {told}",
                "correct `embedding_width` of the network",
                "build",
            )


@method_check("one-loss-per-client")
def _one_loss_per_client(case: MethodCase) -> None:
    simulation = case.simulate(0)
    clients = len(simulation.cohort)
    try:
        losses = trained(simulation).losses
    except TypeError as error:
        if ".loss returned" not in str(error):
            raise
        raise CheckFailed(f"{error}. `local.cross_entropy` and `local.train_mean` do.") from None
    if losses.shape != (clients,) or not losses.isfinite().all():
        raise case.fail(
            f"the losses of {clients} clients are {losses.tolist()}",
            f"return one finite value per client, shape ({clients},)",
            "loss",
        )
