"""The plan of a run: what the server and the sites agree on before they train."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polyphily.core.budget import OFF
from polyphily.core.method import Method, create
from polyphily.core.settings import Settings, from_mapping
from polyphily.errors import UserError
from polyphily.graphs.checked import plain
from polyphily.graphs.columns import Column, agree_columns
from polyphily.graphs.encoding import Encoding
from polyphily.graphs.files.client import is_whole, listed
from polyphily.nn.backbones import Backbone
from polyphily.runtime.network import build_network
from polyphily.runtime.server import Server

RUN_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,79}")
SITE_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,39}")


@dataclass(frozen=True)
class Schema:
    """The feature columns and the labels of a site's graph. All sites must have the same.

    Attributes:
        features: names of the feature columns; empty if the file format has no names.
        width: number of feature columns.
        classes: label names.
        columns: kinds and declarations of a table's feature columns; empty for an array.
    """

    features: tuple[str, ...]
    width: int
    classes: tuple[str, ...]
    columns: tuple[Column, ...] = ()

    @property
    def digest(self) -> str:
        """A hash that is equal for sites that can train together, in any order of columns."""
        columns = sorted(self.features) if self.features else self.width
        text = json.dumps([columns, sorted(self.classes)])
        return hashlib.sha256(text.encode()).hexdigest()


def agree(schemas: Mapping[str, Schema], classes: Sequence[str] = ()) -> Schema:
    """Return the schema that all sites share: columns in the first site's order, classes sorted.

    Kinds of columns are agreed on as in a simulation (`agree_columns`). If some sites have tables
    and others arrays, the arrays are columns of numbers, in the order of the first table.

    Args:
        schemas: by site.
        classes: all label names. Without them, every site must have the same labels.

    Raises:
        UserError: if sites differ, naming the sites and the columns or labels.
    """
    (first, reference), *others = schemas.items()
    for site, schema in others:
        if schema.features and reference.features:
            _check_same("feature columns", first, reference.features, site, schema.features)
        elif schema.width != reference.width:
            raise UserError(
                f"sites '{first}' and '{site}' have {reference.width} and {schema.width} features: "
                "give all sites the same features"
            )
    reference = _with_columns(reference, schemas)
    if classes:
        for site, schema in schemas.items():
            unlisted = [name for name in schema.classes if name not in classes]
            if unlisted:
                raise UserError(
                    f"site '{site}' has labels that the server's list of classes lacks: "
                    f"{listed(unlisted)}. The list: {listed(classes, 50)}"
                )
        return dataclasses.replace(reference, classes=tuple(classes))
    for site, schema in others:
        _check_same("labels", first, reference.classes, site, schema.classes)
    key = int if all(map(is_whole, reference.classes)) else None
    return dataclasses.replace(reference, classes=tuple(sorted(reference.classes, key=key)))


def _with_columns(reference: Schema, schemas: Mapping[str, Schema]) -> Schema:
    """Return a schema with the columns that the sites agree on."""
    table = next((schema for schema in schemas.values() if schema.columns), None)
    if table is None:
        return reference
    numbers = [Column(column.name, "number") for column in table.columns]
    columns = agree_columns({s: own.columns or numbers for s, own in schemas.items()}, "sites")
    return dataclasses.replace(
        reference, features=tuple(c.name for c in columns), width=len(columns), columns=columns
    )


def _check_same(
    what: str, first: str, ours: Sequence[str], second: str, theirs: Sequence[str]
) -> None:
    """Raise a UserError that lists what only one of two sites has, if they differ."""
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
    """A run as the server and all sites know it.

    Attributes:
        run: name of the run, also used for files at the sites.
        method: name of the method.
        hyperparameters: of the method.
        settings: with every setting filled in.
        schema: columns and classes.
        sites: the sites that take part, in the order of client numbers.
        split: fractions of the split that sites draw. Empty: a site's own split, or 0.6,0.2,0.2.
        normalize: normalisation of the features at the sites.
        seed: of initial parameters, splits and draws.
        encoding: how columns become features. Means that it leaves open are each site's own. None
            if it is not agreed on yet, or in a plan of an earlier version.
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
    encoding: Encoding | None = None

    def __post_init__(self) -> None:
        if len(set(self.sites)) < len(self.sites):
            raise UserError(f"the plan names a site twice: {plain(', '.join(self.sites))}")

    def to_json(self) -> dict[str, Any]:
        found = dataclasses.asdict(dataclasses.replace(self, encoding=None))
        found["schema"]["columns"] = [column.to_json() for column in self.schema.columns]
        return found | {"encoding": None if self.encoding is None else self.encoding.to_json()}

    @property
    def width(self) -> int:
        """The number of features of a node."""
        return self.schema.width if self.encoding is None else self.encoding.width

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """Read a plan that came over the network and check every part of it.

        Raises:
            UserError: if a part is missing or not valid.
        """
        try:
            schema, encoding = data["schema"], data.get("encoding")
            plan = cls(
                run=str(data["run"]),
                method=str(data["method"]),
                hyperparameters=dict(data["hyperparameters"]),
                settings=from_mapping(dict(data["settings"])),
                schema=Schema(
                    tuple(map(str, schema["features"])),
                    int(schema["width"]),
                    tuple(map(str, schema["classes"])),
                    tuple(Column.from_json(column) for column in schema.get("columns", ())),
                ),
                sites=tuple(map(str, data["sites"])),
                split=str(data["split"]),
                normalize=str(data["normalize"]),
                seed=int(data["seed"]),
                encoding=None if encoding is None else Encoding.from_json(encoding),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"the server sent a plan that cannot be read: {error!r}") from None
        if not RUN_NAME.fullmatch(plan.run):
            raise UserError(f"the server sent a run name that is not valid: {plan.run[:80]!r}")
        plan.make_method()
        return plan

    def make_method(self) -> Method:
        return create(self.method, self.hyperparameters)

    def network(self) -> Backbone:
        """Build the network with its initial parameters, the same at the server and all sites."""
        classes = len(self.schema.classes)
        return build_network(self.make_method(), self.settings, self.width, classes, self.seed)

    def server(self) -> Server:
        """Create the server of the run, in its state before the first round."""
        method, network = self.make_method(), self.network()
        return Server(method, network, self.settings, len(self.sites), self.seed)


def check_for_flower(settings: Settings) -> None:
    """Raise a UserError if a setting is given that only simulations have."""
    for name, default, reason in (
        ("participation", 1.0, "every site is asked in every round"),
        ("failures", 0.0, "sites fail by themselves"),
        ("patience", 0, "a run ends after its rounds"),
        ("evaluate_every", 1, "every answer carries its scores"),
        ("attack", OFF, "sites are what they are"),
    ):
        if getattr(settings, name) != default:
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} is for simulations: on Flower {reason}. Leave it out")
