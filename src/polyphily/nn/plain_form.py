"""Backbones in plain form: descriptions and parameters for the networks of `polyphily.nn.plain`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import Tensor, nn

from polyphily.errors import UserError
from polyphily.nn import layers
from polyphily.nn.backbones import (
    ACMGCN,
    BACKBONES,
    GAT,
    GCN,
    GPRGNN,
    MLP,
    Backbone,
    GraphSAGE,
    LinearHead,
)
from polyphily.nn.choir import Choir
from polyphily.nn.disengcn import DisenGCN
from polyphily.nn.relational import BASES, RGCN
from polyphily.nn.residual import ResidualACM, ResidualGAT, ResidualGCN, ResidualSAGE
from polyphily.nn.unifilter import UniFilter

Spec: TypeAlias = dict[str, Any]
Params: TypeAlias = dict[str, Tensor]

SIZES = (  # the fields of `Shape` that plain networks have, too
    *("features", "classes", "hidden", "layers", "heads", "hops"),
    *("readout", "separate", "relations"),
)


# Networks ----------------------------------------------------------------------------------------


def describe(network: Backbone) -> Spec:
    """Return a network's description for `plain.build`.

    Raises:
        UserError: if it has no plain form. Subclasses do not inherit that of their base class.
    """
    if type(network) not in FORMS:
        raise UserError(
            f"the network {network.describe()} has no plain form. There are plain forms of "
            f"{', '.join(plain_backbones())}"
        )
    return FORMS[type(network)](network)


def plain_backbones() -> list[str]:
    """Return the names of the backbones that have a plain form."""
    return [name for name, cls in BACKBONES.items() if cls in FORMS]


def _sizes(kind: str) -> Callable[[Any], Spec]:
    """Return a function that describes a stack or residual network of some kind."""

    def found(network: Backbone) -> Spec:
        sizes = {name: getattr(network.shape, name) for name in SIZES}
        return {"kind": kind, **sizes, **({"bases": BASES} if kind == "rgcn" else {})}

    return found


def _disengcn(network: DisenGCN) -> Spec:
    return {
        "kind": "disengcn",
        "features": network.shape.features,
        "classes": network.shape.classes,
        "width": network.width,
        "factors": network.factors,
        "iterations": network.iterations,
        "depth": network.depth,
    }


def _unifilter(network: UniFilter) -> Spec:
    return {
        "kind": "unifilter",
        "widths": [list(pair) for pair in network.shape.widths()],
        "order": network.order,
        "tau": network.tau,
        "per_feature": network.coefficients.shape[2] > 1,
    }


def _linear_head(network: LinearHead) -> Spec:
    shape, trunk = network.shape, describe(network.trunk)
    return {"kind": "linear head", "trunk": trunk, "hidden": shape.hidden, "classes": shape.classes}


def choir_form(network: Choir) -> Spec:
    """Return the description of a choir with even weights."""
    return {
        "kind": "choir",
        "voices": [describe(network.voice(v)) for v in range(len(network.names))],
        "labelled": sorted(network.labelled),
    }


FORMS: dict[type[nn.Module], Callable[[Any], Spec]] = {
    MLP: _sizes("mlp"),
    GCN: _sizes("gcn"),
    GraphSAGE: _sizes("sage"),
    GAT: _sizes("gat"),
    GPRGNN: _sizes("gpr-gnn"),
    ACMGCN: _sizes("acm"),
    RGCN: _sizes("rgcn"),
    ResidualGCN: _sizes("res-gcn"),
    ResidualSAGE: _sizes("res-sage"),
    ResidualGAT: _sizes("res-gat"),
    ResidualACM: _sizes("res-acm"),
    DisenGCN: _disengcn,
    UniFilter: _unifilter,
    LinearHead: _linear_head,
    Choir: choir_form,
}


# Parameters --------------------------------------------------------------------------------------


def plain_state(network: nn.Module, params: Mapping[str, Tensor]) -> Params:
    """Return parameters, without a client axis, under the names and in the form of plain layers."""
    found: Params = {}
    for name, part in network.named_modules():
        prefix = f"{name}." if name else ""
        own = {n: params[prefix + n] for n, _ in part.named_parameters(recurse=False)}
        convert = LAYERS.get(type(part))
        converted = own if convert is None else convert(own)
        found |= {prefix + n: value.detach().clone() for n, value in converted.items()}
    return found


def _linear(own: Params) -> Params:
    return _renamed(own, {"weight": "weight", "bias": "bias"})


def _gcn(own: Params) -> Params:
    return _renamed(own, {"weight": "conv.lin.weight", "bias": "conv.bias"})


def _sage(own: Params) -> Params:
    if "weight_self" not in own:  # one direction of Dir-GNN
        return _renamed(own, {"weight_near": "conv.lin.weight"})
    names = {"weight_self": "lin_root.weight", "weight_near": "lin_rel.weight"}
    return _renamed(own, {n: f"conv.{to}" for n, to in {**names, "bias": "lin_rel.bias"}.items()})


def _gat(own: Params) -> Params:
    found = _renamed(own, {"weight": "lin.weight", "bias": "bias"})
    vectors = {"att_src": own["attend_source"], "att_dst": own["attend_target"]}
    return found | {n: value.unsqueeze(0) for n, value in vectors.items()}


def _acm(own: Params) -> Params:
    matrices = {"weight_low": "low", "weight_high": "high", "weight_self": "own"}
    found = _renamed(own, {n: f"{to}.weight" for n, to in matrices.items()})
    return found | {n: own[n] for n in ("attend", "mix")}


def _renamed(own: Params, names: Mapping[str, str]) -> Params:
    """Return parameters under other names; matrices `[inputs, outputs]` are transposed."""
    return {
        to: own[n].T.contiguous() if own[n].dim() == 2 else own[n]
        for n, to in names.items()
        if n in own
    }


LAYERS: Mapping[type[nn.Module], Callable[[Params], Params]] = {
    layers.Linear: _linear,
    layers.GCNConv: _gcn,
    layers.SAGEConv: _sage,
    layers.GATConv: _gat,
    layers.ACMConv: _acm,
}
