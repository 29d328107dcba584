"""Weights, direction and types of edges in a run: what is used, refused, and noted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from polyphily.core.method import Method
from polyphily.core.settings import Settings
from polyphily.errors import UserError, unknown
from polyphily.graphs.directions import BOTH, INWARD, OUTWARD, SEPARATE
from polyphily.graphs.edges import UNTYPED
from polyphily.graphs.files.client import listed
from polyphily.graphs.graph import Graph, own_relations, relations_of
from polyphily.nn.backbones import BACKBONES, Backbone
from polyphily.nn.layers import DirectedConv, RelationalConv


def with_edges(settings: Settings, method: Method, relations: Sequence[str] | None) -> Settings:
    """Fill in what the network will use of edges, after checking that it can.

    Args:
        settings: with the backbone filled in.
        method: what will be trained.
        relations: the types of edges that the data have; None if unknown.

    Raises:
        UserError: for a direction or relations that cannot be used.
    """
    assert settings.backbone is not None
    backbone = BACKBONES.find(settings.backbone)
    _check_direction(method, settings)
    if not _uses_weights(method, backbone):
        settings = replace(settings, edge_weights=False)
    chosen = settings.relation_names()
    if chosen and not backbone.relational:
        able = [name for name, cls in BACKBONES.items() if cls.relational]
        raise UserError(
            f"--relations: {backbone.name} does not tell types of edges apart; use "
            f"--backbone {_words(able)}"
        )
    if chosen and relations is not None:
        if not relations:
            raise UserError("--relations: the edges of the data have no types; leave it out")
        for name in chosen:
            if name not in relations:
                raise unknown("relation", name, relations)
    if backbone.relational and not chosen:
        settings = replace(settings, relations=",".join(relations or ()))
    return settings


def _uses_weights(method: Method, backbone: type[Backbone]) -> bool:
    return method.weighted_edges and backbone.uses_weights()


def _words(names: Sequence[str]) -> str:
    """Return names with commas, and "or" before the last."""
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last


def _check_direction(method: Method, settings: Settings) -> None:
    direction = settings.direction
    if direction == BOTH:
        return
    if reason := method.needs_symmetric_edges():
        raise UserError(f"--direction {direction}: {method.name} needs symmetric edges: {reason}")
    if settings.backbone in _able_in(direction, method):
        return
    able = _able_in(direction, method)
    hint = f"use {_words(able)}" if able else "leave it out"
    raise UserError(f"--direction {direction}: {settings.backbone} cannot read edges so; {hint}")


def _able_in(direction: str, method: Method) -> list[str]:
    """Return the backbones of a method that can read edges in a direction."""
    names = method.supported_backbones()
    return [name for name in names if direction in BACKBONES.find(name).directions()]


def check_separate(method: Method, network: Backbone) -> None:
    """Check that a network built for separate directions has weights for each."""
    if not any(isinstance(part, DirectedConv | RelationalConv) for part in network.modules()):
        raise UserError(
            f"--direction {SEPARATE}: {method.name} has a network of its own, without it; use "
            f"{INWARD} or {OUTWARD}"
        )


def edge_notes(method: Method, settings: Settings, graphs: Sequence[Graph]) -> list[str]:
    """Return what a user should know about the use of weights, direction and types of edges.

    Args:
        method: what will be trained.
        settings: with every setting filled in.
        graphs: the clients' graphs.
    """
    assert settings.backbone is not None
    backbone = BACKBONES.find(settings.backbone)
    return [
        *_weight_notes(method, settings, backbone, graphs),
        *_direction_notes(method, settings, graphs),
        *_type_notes(method, settings, backbone, graphs),
    ]


def prediction_notes(settings: Settings, graph: Graph) -> list[str]:
    """Return what a user should know if a model is used on edges unlike those of training."""
    notes = []
    if settings.direction != BOTH and graph.arcs is None and graph.num_edges:
        notes.append(
            f"edges have no direction, but the model was trained with --direction "
            f"{settings.direction}: each leads both ways"
        )
    known = settings.relation_names()
    strange = [name for name in own_relations(graph) if name not in known]
    if known and graph.edge_types is not None and strange:
        notes.append(
            f"edges of relations that were not trained with are left out: {listed(strange)}"
        )
    return notes


def _weight_notes(
    method: Method, settings: Settings, backbone: type[Backbone], graphs: Sequence[Graph]
) -> list[str]:
    without = [g.name for g in graphs if g.edge_weights is None and g.num_edges]
    if not any(g.edge_weights is not None for g in graphs):
        return []
    if not method.weighted_edges:
        return [
            f"edges have weights, but {method.name} does not use them: each counts as 1 "
            "(docs/edges.md says which methods do)"
        ]
    if not backbone.uses_weights():
        able = [n for n in method.supported_backbones() if BACKBONES.find(n).uses_weights()]
        unused = f"edges have weights, but {backbone.name} does not use them: each counts as 1"
        return [f"{unused}; {_words(able)} would use them" if able else unused]
    if settings.edge_weights and without:
        return [f"edges of {listed(without)} have no weights: each counts as 1"]
    return []


def _direction_notes(method: Method, settings: Settings, graphs: Sequence[Graph]) -> list[str]:
    directed = any(graph.arcs is not None for graph in graphs)
    if settings.direction != BOTH and not directed:
        return [f"--direction {settings.direction}: no edges have a direction, so it has no effect"]
    if settings.direction != BOTH or not directed:
        return []
    if reason := method.needs_symmetric_edges():
        return [f"edges have a direction, but {method.name} does not use it: {reason}"]
    able = [d for d in (INWARD, OUTWARD, SEPARATE) if settings.backbone in _able_in(d, method)]
    if able:
        return [
            "edges have a direction, but nodes receive from both ends: --direction "
            f"{_words(able)} uses it"
        ]
    others = _able_in(SEPARATE, method)
    hint = f"; {_words(others)} can, with --direction" if others else ""
    return [f"edges have a direction, but {settings.backbone} does not use it{hint}"]


def _type_notes(
    method: Method, settings: Settings, backbone: type[Backbone], graphs: Sequence[Graph]
) -> list[str]:
    names = relations_of(graphs)
    if not names:
        return []
    if not backbone.relational:
        able = [n for n in method.supported_backbones() if BACKBONES.find(n).relational]
        typed = listed(name for name in names if name != UNTYPED)
        unused = f"edges have types ({typed}), but {backbone.name} does not tell them apart"
        return [f"{unused}: --backbone {_words(able)} does" if able else unused]
    notes = []
    left_out = [name for name in names if name not in settings.relation_names()]
    if left_out:
        notes.append(f"--relations leaves out edges of {listed(left_out)}")
    elif UNTYPED in names:
        without = [g.name for g in graphs if g.edge_types is None and g.num_edges]
        notes.append(f"edges of {listed(without)} have no types: they are a relation of their own")
    return notes
