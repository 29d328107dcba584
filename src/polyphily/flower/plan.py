"""What the server and the sites of a run agree on before they train."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from polyphily.core.local import Message
from polyphily.core.method import Method, create
from polyphily.core.optimizers import OptimizerSpec
from polyphily.core.settings import Settings, from_mapping
from polyphily.engines.simulation import network_shape
from polyphily.errors import UserError
from polyphily.graphs.files.client import is_whole, listed
from polyphily.graphs.random import derive
from polyphily.nn.backbones import Backbone

RUN_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,79}")
SITE_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,39}")


@dataclass(frozen=True)
class Schema:
    """What a site's files hold, in names: what all sites must have alike.

    Attributes:
        features: names of the feature columns; empty where the format has none.
        width: number of feature columns.
        classes: label names.
    """

    features: tuple[str, ...]
    width: int
    classes: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Equal for sites that can train together, whatever the order of their columns."""
        columns = sorted(self.features) if self.features else self.width
        text = json.dumps([columns, sorted(self.classes)])
        return hashlib.sha256(text.encode()).hexdigest()


def agree(schemas: Mapping[str, Schema], classes: Sequence[str] = ()) -> Schema:
    """The schema that all sites share: columns in the first site's order, classes sorted.

    Args:
        schemas: by site.
        classes: all label names there may be; without them every site must hold the same ones.

    Raises:
        UserError: naming the sites, and the columns or labels in which they differ.
    """
    (first, model), *others = schemas.items()
    for site, schema in others:
        if schema.features and model.features:
            _same("feature columns", first, model.features, site, schema.features)
        elif schema.width != model.width:
            raise UserError(
                f"sites '{first}' and '{site}' have {model.width} and {schema.width} features: "
                "give all sites the same features"
            )
    if classes:
        for site, schema in schemas.items():
            strange = [name for name in schema.classes if name not in classes]
            if strange:
                raise UserError(
                    f"site '{site}' has labels that the server's list of classes does not: "
                    f"{listed(strange)}. The list: {listed(classes, 50)}"
                )
        return dataclasses.replace(model, classes=tuple(classes))
    for site, schema in others:
        _same("labels", first, model.classes, site, schema.classes)
    key = int if all(map(is_whole, model.classes)) else None
    return dataclasses.replace(model, classes=tuple(sorted(model.classes, key=key)))


def _same(what: str, first: str, ours: Sequence[str], second: str, theirs: Sequence[str]) -> None:
    only = [
        f"{listed(names)} only at '{site}'"
        for site, names in (
            (first, [name for name in ours if name not in theirs]),
            (second, [name for name in theirs if name not in ours]),
        )
        if names
    ]
    if only:
        hint = (
            ". If sites may lack labels, list all of them as `classes` in the server's config.toml"
            if what == "labels"
            else ""
        )
        raise UserError(
            f"sites '{first}' and '{second}' have different {what}: {'; '.join(only)}{hint}"
        )


@dataclass(frozen=True)
class Plan:
    """A run as every party knows it.

    Attributes:
        run: the run's name, which also names files at the sites.
        method: its name.
        hyperparameters: of the method.
        settings: with every knob filled in.
        schema: columns and classes.
        sites: who takes part, in the order of client numbers.
        split: how a site draws its split, or empty for its own, else 0.6,0.2,0.2.
        normalize: what a site does with its features.
        seed: of initial parameters, splits and draws.
    """

    run: str
    method: str
    hyperparameters: Mapping[str, Any]
    settings: Settings
    schema: Schema
    sites: tuple[str, ...]
    split: str = ""
    normalize: str = "none"
    seed: int = 0

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """A plan from what came over the network, every part of it checked.

        Raises:
            UserError: for a method, a setting or a name that cannot be.
        """
        try:
            schema = data["schema"]
            plan = cls(
                run=str(data["run"]),
                method=str(data["method"]),
                hyperparameters=dict(data["hyperparameters"]),
                settings=from_mapping(dict(data["settings"])),
                schema=Schema(
                    tuple(map(str, schema["features"])),
                    int(schema["width"]),
                    tuple(map(str, schema["classes"])),
                ),
                sites=tuple(map(str, data["sites"])),
                split=str(data["split"]),
                normalize=str(data["normalize"]),
                seed=int(data["seed"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"the server sent a plan that cannot be read: {error!r}") from None
        if not RUN_NAME.fullmatch(plan.run):
            raise UserError(f"the server sent a run name that is none: {plan.run[:80]!r}")
        plan.make_method()
        return plan

    def make_method(self) -> Method:
        return create(self.method, self.hyperparameters)

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.settings.dtype)
        return found

    def network(self, method: Method) -> Backbone:
        """The network with its initial parameters: the same everywhere, from the seed."""
        assert self.settings.backbone is not None
        shape = network_shape(self.settings, self.schema.width, len(self.schema.classes))
        network = method.build(
            self.settings.backbone, shape, derive(self.seed, "initial parameters")
        )
        return network.to(dtype=self.dtype)

    def optimizer(self) -> OptimizerSpec:
        settings = self.settings
        assert settings.optimizer is not None
        assert settings.lr is not None
        assert settings.weight_decay is not None
        return OptimizerSpec(
            kind=settings.optimizer,
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            momentum=settings.momentum,
            clip=settings.clip,
            keep=bool(settings.keep_optimizer),
        )


def initial_parameters(network: Backbone) -> Message:
    """Stacked over one client."""
    return {name: value.detach().clone() for name, value in network.named_parameters()}


def check_for_flower(settings: Settings) -> None:
    """Refuses knobs that only a simulation has."""
    for name, usual, why in (
        ("participation", 1.0, "every site is asked in every round"),
        ("failures", 0.0, "sites fail by themselves"),
        ("patience", 0, "a run ends after its rounds"),
        ("evaluate_every", 1, "every answer carries its scores"),
    ):
        if getattr(settings, name) != usual:
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} is for simulations: on Flower {why}. Leave it out")
