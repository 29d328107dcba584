"""Splits into train, validation and test nodes: parsing their text, and drawing them.

A split is written as one of

- `0.2,0.4,0.4` or `0.2,0.4,0.4:stratified`: drawn per client and class. Train and validation are
  rounded down, and the rest is test (FedATH). A class that is too small for its share has no train
  node; only the client as a whole is guaranteed one.
- `0.6,0.2,0.2:client`: drawn per client, regardless of classes (FedSPA, S2FGL).
- `0.2,0.4,0.4:global`: drawn over the whole graph before it is partitioned (FED-PUB, FedGSP).
- `5-fold`: five groups per client, three for training, one for validation, one for test (FedHERO).
  Seeds 0 to 4 rotate the groups of one shuffle, seeds 5 to 9 those of the next.
- `own`: the masks that come with the data; the seed, modulo their number, selects one.

If clients share nodes, every kind is drawn over the whole graph, so that no test label of one
client is a train label of another. Unlabelled nodes are in no mask. A client with labelled nodes
but no train node is given one, which is taken from nodes in no mask, otherwise from test, otherwise
from validation. A client may have no validation nodes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from polyphily.errors import UserError, unknown
from polyphily.graphs.graph import UNLABELLED, Graph, IntArray, Masks
from polyphily.graphs.random import generator

RATIO_KINDS = ("stratified", "client", "global")  # the first is the default
_FORMS = "a split is written '0.6,0.2,0.2' (also with ':client' or ':global'), '5-fold' or 'own'"


@dataclass(frozen=True)
class Split:
    """A way to split nodes, as `parse_split` returns it.

    Attributes:
        kind: `stratified`, `client`, `global`, `fold` or `own`.
        ratios: shares of train, validation and test, for the first three kinds.
        folds: the number of groups, for `fold`.
        text: the text that the user wrote.
    """

    kind: str
    ratios: tuple[float, float, float] = (0.0, 0.0, 0.0)
    folds: int = 0
    text: str = field(default="", compare=False)

    def __str__(self) -> str:
        return self.text


def parse_split(text: str) -> Split:
    """Return the split that a text describes.

    >>> parse_split("0.2,0.4,0.4:global").ratios
    (0.2, 0.4, 0.4)
    >>> parse_split("5-fold").folds
    5
    """
    text = "".join(text.split()).lower()
    if text == "own":
        return Split("own", text=text)
    if found := re.fullmatch(r"(\d{1,9})-fold", text):
        return _parse_folds(text, int(found[1]))
    return _parse_ratios(text)


def _parse_folds(text: str, folds: int) -> Split:
    if folds < 3:
        raise UserError(
            f"split '{text}' needs 3 folds or more: one is for validation, one for test"
        )
    return Split("fold", folds=folds, text=text)


def _parse_ratios(text: str) -> Split:
    numbers, _, kind = text.partition(":")
    try:
        train, val, test = map(float, numbers.split(","))
    except ValueError:
        raise UserError(f"cannot read split '{text}': {_FORMS}") from None
    if ":" in text and kind not in RATIO_KINDS:
        raise unknown("kind of split", kind, RATIO_KINDS)
    ratios = (train, val, test)
    if not (min(ratios) >= 0 and abs(sum(ratios) - 1) <= 1e-6):
        raise UserError(f"split '{text}' must be three shares of 0 or more that sum to 1")
    if train == 0:
        raise UserError(f"split '{text}' leaves nothing to train on: the first share is 0")
    return Split(kind or RATIO_KINDS[0], ratios, text=text)


def draw(split: Split, graphs: Sequence[Graph], seed: int) -> list[Masks]:
    """Draw every client's masks. Those of client k depend only on its graph, k and the seed."""
    return [draw_one(split, graph, seed, client) for client, graph in enumerate(graphs)]


def draw_one(split: Split, graph: Graph, seed: int, client: int) -> Masks:
    """Draw the masks of one client."""
    if split.kind not in _DRAWS:
        raise UserError(
            f"split '{split}' is drawn over one whole graph, but every client has a graph of its "
            "own. Use ':client' or ':stratified' in place of ':global'."
        )
    return ensure_train(_DRAWS[split.kind](split, graph, seed, client), graph, seed, client)


def draw_global(split: Split, graph: Graph, seed: int) -> Masks:
    """Draw masks over a whole graph before it is partitioned.

    A client's part of them may hold no train node; see `ensure_train`.
    """
    if split.kind != "global":
        raise ValueError(f"split '{split}' is drawn per client")
    nodes = generator(seed, "split global").permutation(_labelled(graph))
    return ensure_train(_masks(graph, *_cut(nodes, split.ratios)), graph, seed)


def ensure_train(masks: Masks, graph: Graph, seed: int, client: int = 0) -> Masks:
    """Return the masks, with one train node added if labelled nodes exist but none is train."""
    labelled = graph.labels != UNLABELLED
    if masks.train.any() or not labelled.any():
        return masks
    spare = labelled & ~(masks.val | masks.test)
    pool = next(part for part in (spare, masks.test, masks.val) if part.any())
    chosen = generator(seed, f"split train {client}").choice(np.flatnonzero(pool))
    one = np.arange(graph.num_nodes) == chosen
    return Masks(one, masks.val & ~one, masks.test & ~one)


def _draw_client(split: Split, graph: Graph, seed: int, client: int) -> Masks:
    nodes = generator(seed, f"split client {client}").permutation(_labelled(graph))
    return _masks(graph, *_cut(nodes, split.ratios))


def _draw_stratified(split: Split, graph: Graph, seed: int, client: int) -> Masks:
    rng = generator(seed, f"split stratified {client}")
    nodes = _labelled(graph)
    cuts = [
        _cut(rng.permutation(nodes[graph.labels[nodes] == label]), split.ratios)
        for label in np.unique(graph.labels[nodes])
    ]
    return _masks(graph, *(np.concatenate(part) for part in zip(*cuts, strict=True)))


def _draw_fold(split: Split, graph: Graph, seed: int, client: int) -> Masks:
    shuffle, turn = divmod(seed, split.folds)
    nodes = generator(shuffle, f"split fold {client}").permutation(_labelled(graph))
    groups = np.array_split(nodes, split.folds)
    test, val, *train = groups[turn:] + groups[:turn]
    return _masks(graph, np.concatenate(train), val, test)


def _draw_own(split: Split, graph: Graph, seed: int, client: int) -> Masks:
    if not graph.own_masks:
        raise UserError(
            f"split 'own' asks for masks that come with the data, but '{graph.name}' has none. "
            "Give shares instead, for example '0.6,0.2,0.2'."
        )
    own = graph.own_masks[seed % len(graph.own_masks)]
    labelled = graph.labels != UNLABELLED
    return Masks(own.train & labelled, own.val & labelled, own.test & labelled)


_DRAWS: dict[str, Callable[[Split, Graph, int, int], Masks]] = {
    "client": _draw_client,
    "stratified": _draw_stratified,
    "fold": _draw_fold,
    "own": _draw_own,
}


def _labelled(graph: Graph) -> IntArray:
    return np.flatnonzero(graph.labels != UNLABELLED)


def _cut(nodes: IntArray, ratios: tuple[float, float, float]) -> list[IntArray]:
    """Cut nodes into three parts, rounded down; the last non-zero part takes the rest."""
    sizes = [int(np.floor(ratio * len(nodes) + 1e-9)) for ratio in ratios]
    last = max(part for part, ratio in enumerate(ratios) if ratio > 0)
    sizes[last] += len(nodes) - sum(sizes)
    return np.split(nodes, np.cumsum(sizes)[:-1])


def _masks(graph: Graph, *parts: IntArray) -> Masks:
    """Return boolean masks from the train, validation and test nodes."""
    masks = np.zeros((3, graph.num_nodes), dtype=np.bool_)
    for mask, nodes in zip(masks, parts, strict=False):
        mask[nodes] = True
    return Masks(*masks)


@dataclass(frozen=True)
class _Default:
    split: str
    partitions: frozenset[str] | None = None  # None matches any
    datasets: frozenset[str] | None = None

    def applies(self, dataset: str, partition: str) -> bool:
        return (self.partitions is None or partition in self.partitions) and (
            self.datasets is None or dataset in self.datasets
        )


_METIS = frozenset({"metis", "metis-overlap"})
_ARXIV = frozenset({"ogbn-arxiv"})

# The splits of the papers. The first entry that applies is used.
_DEFAULTS = (
    _Default("0.05,0.475,0.475:client", datasets=frozenset({"arxiv-year"})),  # FedSPA
    _Default("0.6,0.2,0.2:client", frozenset({"louvain"})),  # FedSPA, S2FGL
    _Default("0.6,0.2,0.2:stratified", frozenset({"louvain-capped"}), _ARXIV),  # FedATH
    _Default(
        "0.5,0.2,0.3:stratified",
        frozenset({"louvain-capped"}),
        frozenset({"wikics", "roman-empire"}),
    ),
    _Default("0.2,0.4,0.4:stratified", frozenset({"louvain-capped"})),
    _Default(
        "5-fold",
        frozenset({"metis"}),
        frozenset({"squirrel", "chameleon", "actor", "flickr"}),
    ),  # FedHERO
    _Default("5-fold", frozenset({"louvain-min"})),
    _Default("0.05,0.475,0.475:global", _METIS, _ARXIV),  # FED-PUB, FedGSP
    _Default("0.2,0.4,0.4:global", _METIS),
    _Default("0.6,0.2,0.2:stratified"),
)


def default_split(dataset: str, partition: str) -> Split:
    """Return the split that the literature uses with a partition and a dataset.

    >>> str(default_split("cora", "louvain"))
    '0.6,0.2,0.2:client'
    """
    rules = (rule for rule in _DEFAULTS if rule.applies(dataset.lower(), partition))
    return parse_split(next(rules).split)
