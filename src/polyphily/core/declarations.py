"""Declarations for people to read: shapes in words, without running a round."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from polyphily.core.messages import Declared, Dims, Sizes
from polyphily.core.method import Method, sizes_of
from polyphily.nn.backbones import Backbone, Shape

USUAL_BACKBONE = "gcn"
_EXAMPLE = Shape(features=29, classes=5, hidden=12, layers=2, heads=2, hops=10)
_STEPS = {"features": 7, "hidden": 6, "classes": 3}  # a multiple of heads for hidden
_CLIENTS, _MORE_CLIENTS = 4, 2


def backbone_of(method: Method, name: str | None = None) -> str:
    """Return the backbone a method is described with: the one asked for, else its own."""
    supported = method.supported_backbones()
    usual = USUAL_BACKBONE if USUAL_BACKBONE in supported else supported[0]
    return name or method.backbone or usual


def example_sizes(method: Method, backbone: str | None = None) -> Sizes:
    """Return the sizes of a small federation, for questions that do not depend on them."""
    return _sizes(method, backbone_of(method, backbone), _EXAMPLE, _CLIENTS)


def example_network(method: Method) -> Backbone:
    """Return the network of a small federation, for the same questions."""
    return method.build(backbone_of(method), _EXAMPLE, seed=0)


def _sizes(method: Method, backbone: str, shape: Shape, clients: int) -> Sizes:
    return sizes_of(method, method.build(backbone, shape, seed=0), clients)


def describe(
    method: Method, backbone: str | None = None
) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return a row for every tensor that a client sends, and for every one that it is sent.

    How a shape depends on the sizes of a federation is found by declaring it for several of them.
    """
    name = backbone_of(method, backbone)
    base = example_sizes(method, name)
    grown: dict[str, tuple[Sizes, int]] = {
        "clients": (_sizes(method, name, _EXAMPLE, _CLIENTS + _MORE_CLIENTS), _MORE_CLIENTS)
    }
    for size, step in _STEPS.items():
        larger = replace(_EXAMPLE, **{size: getattr(_EXAMPLE, size) + step})
        grown[size] = _sizes(method, name, larger, _CLIENTS), step
    rows = []
    for declare in (method.uploads, method.downloads):
        others = {n: (_shapes(declare(sizes)), step) for n, (sizes, step) in grown.items()}
        found = []
        for entry in declare(base):
            for tensor, shape in entry.shapes.items():
                near = {n: (shapes[tensor], step) for n, (shapes, step) in others.items()}
                found.append(_row(entry, tensor, shape, near))
        rows.append(found)
    return rows[0], rows[1]


def _shapes(declared: Iterable[Declared]) -> dict[str, Dims]:
    return {name: shape for entry in declared for name, shape in entry.shapes.items()}


def _row(
    entry: Declared, tensor: str, shape: Dims, near: dict[str, tuple[Dims, int]]
) -> dict[str, str]:
    dims = [
        _words(dim, {n: (others[axis] - dim) / step for n, (others, step) in near.items()})
        for axis, dim in enumerate(shape)
    ]
    return {
        "name": tensor,
        "shape": " × ".join(dims) or "one number",
        "role": entry.role.value,
        "rounds": str(entry.rounds),
        "server": "" if entry.server is None else str(entry.server),
        "meaning": entry.meaning,
    }


_AT = {"features": _EXAMPLE.features, "hidden": _EXAMPLE.hidden, "classes": _EXAMPLE.classes}
_AT |= {"clients": _CLIENTS}


def _words(dim: int, slopes: dict[str, float]) -> str:
    """Return a length as a sum of sizes: `2·hidden`, `classes + 1`, or the number itself."""
    whole = {n: int(s) for n, s in slopes.items() if s == int(s)}
    rest = dim - sum(s * _AT[n] for n, s in whole.items())
    if len(whole) < len(slopes) or rest < 0:
        return str(dim)
    terms = [n if s == 1 else f"{s}·{n}" for n, s in whole.items() if s]
    return " + ".join([*terms, *([str(rest)] if rest or not terms else [])])
