"""Edge lists in canonical form: both directions of every edge, with weights, arcs and relations.

Neighbours are symmetric in every graph of the library, because most methods need it. What an edge
list says beyond that is kept beside the entries of the canonical list: the weight of an edge, the
direction in which it was given, and the relations that it belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from polyphily.errors import UserError

IntArray: TypeAlias = npt.NDArray[np.int64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
FloatArray: TypeAlias = npt.NDArray[np.float32]

MOST_RELATIONS = 63  # bits of an int64 without its sign
UNTYPED = "untyped"  # the relation of edges without types, among clients whose edges have some


@dataclass(frozen=True)
class Edges:
    """The edges of a graph in canonical form. The arrays `[2m]` belong to the columns of `ends`.

    Attributes:
        ends: int64 `[2, 2m]`, both directions of every edge, sorted by source and then target.
        weights: float32 `[2m]`, positive; None if edges have no weights.
        arcs: bool `[2m]`, True at (u, v) if the data have the edge from u to v; None if edges
            have no direction.
        types: int64 `[2m]`, a bit set: bit r is set if the edge belongs to relation r; None if
            edges have no types.
    """

    ends: IntArray
    weights: FloatArray | None = None
    arcs: BoolArray | None = None
    types: IntArray | None = None

    def take(self, ends: IntArray, positions: IntArray | BoolArray) -> Edges:
        """Return other ends, with what is known about the edges at some positions of this list."""
        return Edges(
            ends,
            None if self.weights is None else self.weights[positions],
            None if self.arcs is None else self.arcs[positions],
            None if self.types is None else self.types[positions],
        )


def canonical_edges(edges: IntArray, num_nodes: int) -> IntArray:
    """Return both directions of every distinct edge, sorted by source and then target.

    Self-loops are removed.

    >>> canonical_edges(np.array([[0, 1, 2, 2], [1, 0, 2, 0]]), 3).tolist()
    [[0, 0, 1, 2], [1, 2, 0, 0]]
    """
    source, target = edges.astype(np.int64, copy=False)
    keep = source != target
    source, target = source[keep], target[keep]
    low, high = np.minimum(source, target), np.maximum(source, target)
    key = np.sort(low * num_nodes + high)  # much faster than np.unique
    key = key[np.diff(key, prepend=-1) != 0]
    low, high = np.divmod(key, max(num_nodes, 1))
    both = np.sort(np.concatenate([low * num_nodes + high, high * num_nodes + low]))
    return np.stack(np.divmod(both, max(num_nodes, 1)))


def canonical(
    edges: IntArray,
    num_nodes: int,
    weights: npt.NDArray[Any] | None = None,
    types: IntArray | None = None,
    *,
    directed: bool = False,
) -> Edges:
    """Return edges in canonical form with their weights, arcs and relations.

    Edges of weight 0 and self-loops are removed. The weights of repeated edges of one direction
    are added, and their relations united. For a pair that is given in both directions:

    - If edges are directed, each entry has the weight and the relations of its own arc. An entry
      without an arc of its own has those of its partner.
    - If they are not, both entries have the mean weight and all relations.

    >>> found = canonical(np.array([[0, 1, 0], [1, 0, 2]]), 3, np.array([1.0, 3.0, 5.0]))
    >>> found.ends.tolist(), found.weights.tolist()
    ([[0, 0, 1, 2], [1, 2, 0, 0]], [2.0, 5.0, 2.0, 5.0])
    """
    if weights is None and types is None and not directed:
        return Edges(canonical_edges(edges, num_nodes))
    kept = edges[0] != edges[1]
    if weights is not None:
        kept &= weights.astype(np.float32) > 0
    source, target = edges[:, kept].astype(np.int64, copy=False)
    keys = source * num_nodes + target
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    first = np.flatnonzero(np.diff(keys, prepend=-1))
    arcs = keys[first]
    ends = canonical_edges(np.stack([source, target]), num_nodes)
    own, has_own = _positions(arcs, ends[0] * num_nodes + ends[1])
    # The list is symmetric and sorted, so that sorting it by target leads from (u, v) to (v, u).
    mirror = np.argsort(ends[1], kind="stable")
    partner, has_partner = own[mirror], has_own[mirror]
    either = np.where(has_own, own, partner)
    found_weights = found_types = None
    if weights is not None:
        sums = _reduced(np.add, weights[kept][order].astype(np.float64), first)
        values = sums[either]
        if not directed:
            values = (values + sums[np.where(has_partner, partner, own)]) / 2
        found_weights = values.astype(np.float32)
    if types is not None:
        bits = np.left_shift(np.int64(1), types[kept][order])
        united = _reduced(np.bitwise_or, bits, first)
        found_types = united[either]
        if not directed:
            found_types = found_types | united[np.where(has_partner, partner, own)]
    return Edges(ends, found_weights, has_own if directed else None, found_types)


def _positions(arcs: IntArray, keys: IntArray) -> tuple[IntArray, BoolArray]:
    """Return the position of each key among sorted arcs, and whether it is one of them."""
    if not len(arcs):
        return np.zeros(len(keys), dtype=np.int64), np.zeros(len(keys), dtype=np.bool_)
    found = np.minimum(np.searchsorted(arcs, keys), len(arcs) - 1)
    return found, arcs[found] == keys


def _reduced(how: np.ufunc, values: npt.NDArray[Any], first: IntArray) -> npt.NDArray[Any]:
    """Combine runs of values that begin at `first`."""
    if not len(first):
        return values[:0]
    found: npt.NDArray[Any] = how.reduceat(values, first)
    return found


def mirrored(pairs: IntArray, nodes: int) -> tuple[IntArray, IntArray]:
    """Return both directions of distinct pairs in canonical order, and where each comes from.

    Args:
        pairs: `[2, m]`, distinct, one direction of every edge.
        nodes: the number of nodes.

    Returns:
        the canonical edges `[2, 2m]`, and for every entry its position in the concatenation of
        `pairs` with its reversal.
    """
    both = np.concatenate([pairs, pairs[::-1]], axis=1)
    order = np.argsort(both[0] * nodes + both[1])
    return np.ascontiguousarray(both[:, order]), order


def checked_weights(name: str, weights: npt.NDArray[Any], edges: int) -> npt.NDArray[Any]:
    """Return weights `[m]`, once they are known to be finite and not negative."""
    if weights.shape != (edges,):
        raise UserError(
            f"graph '{name}': edge weights have shape {weights.shape}, but there are {edges} "
            "edges: give one weight per edge"
        )
    if weights.dtype.kind not in "iufb":
        raise UserError(f"graph '{name}': edge weights have dtype {weights.dtype}: give numbers")
    with np.errstate(over="ignore"):
        wrong = ~np.isfinite(weights.astype(np.float32)) | (weights < 0)
    if wrong.any():
        edge = int(wrong.argmax())
        raise UserError(
            f"graph '{name}': edge {edge} has the weight {weights[edge]}: give finite numbers from "
            "0; an edge of weight 0 is left out"
        )
    return weights


def checked_types(
    name: str, types: npt.NDArray[Any], relations: Sequence[str], edges: int
) -> tuple[IntArray, tuple[str, ...]]:
    """Return types `[m]` and the names of relations, once they are known to fit together."""
    if types.shape != (edges,):
        raise UserError(
            f"graph '{name}': edge types have shape {types.shape}, but there are {edges} edges: "
            "give one type per edge"
        )
    if types.dtype.kind not in "iub" and edges:
        raise UserError(
            f"graph '{name}': edge types have dtype {types.dtype}: give the positions of their "
            "names in `relations` as whole numbers"
        )
    types = types.astype(np.int64)
    names = tuple(str(r) for r in relations)
    if not names:
        names = tuple(str(r) for r in range(int(types.max(initial=-1)) + 1))
    odd = [each for each in names if "," in each or each != each.strip() or not each]
    if odd:
        raise UserError(
            f"graph '{name}': the relation {odd[0]!r} has a name with a comma, with spaces around "
            "it, or without any letter: rename it"
        )
    if len(set(names)) < len(names):
        raise UserError(f"graph '{name}': relations have the same name twice: {', '.join(names)}")
    if len(names) > MOST_RELATIONS:
        raise UserError(
            f"graph '{name}': there are {len(names)} relations, but at most {MOST_RELATIONS} are "
            "possible: join rare ones"
        )
    if edges and (types.min() < 0 or types.max() >= len(names)):
        edge = int(((types < 0) | (types >= len(names))).argmax())
        raise UserError(
            f"graph '{name}': edge {edge} has the type {types[edge]}, but there are {len(names)} "
            f"relations (0 to {len(names) - 1})"
        )
    return types, names
