"""The network of a run: which one, how large, with which initial parameters and optimiser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from polyphily.core.messages import Message
from polyphily.core.method import METHODS, Method
from polyphily.core.optimizers import OptimizerSpec
from polyphily.core.recipes import fill
from polyphily.core.settings import HOME, Settings
from polyphily.errors import UserError
from polyphily.graphs.degrees import COLUMNS
from polyphily.graphs.directions import SEPARATE
from polyphily.graphs.random import derive
from polyphily.nn.backbones import BACKBONES, Backbone, Shape
from polyphily.runtime.edges import check_separate, with_edges


def complete(
    settings: Settings,
    method: Method,
    kind: str,
    metric: str,
    *,
    dense: bool = False,
    relations: Sequence[str] | None = None,
) -> Settings:
    """Fill in every setting that the user left open.

    Args:
        settings: what the user chose.
        method: what will be trained; it decides which backbones there are to choose from.
        kind: of the data: "homophilic", "heterophilic", "synthetic", "fraud" or "files".
        metric: what selects on validation unless the user chose.
        dense: whether the features are dense.
        relations: the types of edges that the data have; None if unknown.

    Raises:
        UserError: for a backbone that the method cannot train, or cannot train so.
    """
    filled = _with_backbone(settings, method, kind, metric, dense=dense)
    return with_edges(filled, method, relations)


def _with_backbone(
    settings: Settings, method: Method, kind: str, metric: str, *, dense: bool
) -> Settings:
    """Fill in the backbone, and every setting that depends on it."""
    supported = method.supported_backbones()
    if settings.backbone is not None:
        name = BACKBONES.find(settings.backbone).name  # in lower case
        if name not in supported:
            raise UserError(
                f"{method.name} cannot train the backbone {name}. "
                f"It supports: {', '.join(supported)}"
            )
        return fill(replace(settings, backbone=name), kind, metric, dense=dense)
    filled = fill(replace(settings, backbone=method.backbone), kind, metric, dense=dense)
    if filled.backbone not in supported:
        filled = fill(replace(settings, backbone=supported[0]), kind, metric, dense=dense)
    return filled


def build_network(
    method: Method, settings: Settings, features: int, classes: int, seed: int
) -> Backbone:
    """Build the network with its initial parameters: the same for a seed at every party.

    Args:
        method: what will be trained.
        settings: with every setting filled in.
        features: the number of features of a node.
        classes: the number of classes.
        seed: the federation's.
    """
    assert settings.backbone is not None
    assert settings.hidden is not None
    assert settings.layers is not None
    assert settings.dropout is not None
    assert settings.input_dropout is not None
    if settings.label_inputs:
        _check_label_inputs(method, settings)
    degrees = COLUMNS if settings.degree_inputs else 0
    labels = classes if settings.label_inputs else 0
    shape = Shape(
        features=features + degrees + labels,
        classes=classes,
        hidden=settings.hidden,
        layers=settings.layers,
        dropout=settings.dropout,
        input_dropout=settings.input_dropout,
        heads=settings.heads,
        hops=settings.hops,
        norms_at_home=settings.norms == HOME,
        readout=settings.readout,
        separate=settings.direction == SEPARATE,
        relations=max(len(settings.relation_names()), 1),
    )
    network = method.build(settings.backbone, shape, derive(seed, "initial parameters"))
    if shape.norms_at_home:
        _check_norms(method, network, settings.backbone)
    _check_readout(method, network, settings)
    if shape.separate:
        check_separate(method, network)
    return network.to(dtype=getattr(torch, settings.dtype))


def _check_norms(method: Method, network: Backbone, backbone: str) -> None:
    """Check that there are normalisations which would otherwise travel, and need not."""
    norms = [name for name, _ in network.named_parameters() if network.is_norm(name)]
    if not norms:
        raise UserError(
            f"--norms home: {backbone} has no normalisation; use res-gcn, res-sage, res-gat or "
            "res-acm"
        )
    if reason := method.needs_whole_model():
        raise UserError(f"--norms home: {method.name} needs whole models: {reason}")
    if not any(method.shares(network, name) for name in norms):
        raise UserError(f"--norms home: {method.name} does not share normalisations anyway")


def _check_readout(method: Method, network: Backbone, settings: Settings) -> None:
    """Check that the network, or one within it, has the readout."""
    parts = [part for part in network.modules() if isinstance(part, Backbone)]
    if any(settings.readout in part.readouts for part in parts):
        return
    able = [name for name, cls in BACKBONES.items() if settings.readout in cls.readouts]
    if settings.backbone in able:
        raise UserError(
            f"--readout {settings.readout}: {method.name} has a network of its own, without it"
        )
    raise UserError(
        f"--readout {settings.readout}: {settings.backbone} has no such readout; "
        f"use {', '.join(able[:-1])} or {able[-1]}"
    )


def _check_label_inputs(method: Method, settings: Settings) -> None:
    """Check that labels can be inputs of the network."""
    assert settings.backbone is not None
    if not vars(type(method)).get("labels_can_be_inputs"):
        able = [name for name, cls in METHODS.items() if vars(cls).get("labels_can_be_inputs")]
        raise UserError(
            f"--label-inputs: {method.name} uses features or labels in a way of its own. "
            f"It is for: {', '.join(able)}"
        )
    if BACKBONES.find(settings.backbone).keeps_features:
        raise UserError(
            f"--label-inputs: {settings.backbone} computes from the features once, but every step "
            "hides other labels; use another --backbone"
        )
    if settings.fanouts() is not None or settings.batch:
        raise UserError("--label-inputs cannot be combined with --sample or --batch yet")


def initial_parameters(network: Backbone) -> Message:
    """Return copies of a network's parameters, stacked over one client."""
    return {name: value.detach().clone() for name, value in network.named_parameters()}


def optimizer_of(
    settings: Settings, rates: Sequence[tuple[float, float]] | None = None
) -> OptimizerSpec:
    """Return the clients' optimiser.

    Args:
        settings: with every setting filled in.
        rates: (learning rate, weight decay) of each federation, in place of the settings'.
    """
    assert settings.lr is not None
    assert settings.optimizer is not None
    assert settings.weight_decay is not None
    own = rates or []
    return OptimizerSpec(
        kind=settings.optimizer,
        lr=tuple(lr for lr, _ in own) or settings.lr,
        weight_decay=tuple(decay for _, decay in own) or settings.weight_decay,
        momentum=settings.momentum,
        clip=settings.clip,
        keep=bool(settings.keep_optimizer),
    )
