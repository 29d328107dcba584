"""Checks of partitions, datasets and metrics."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from polyphily.core.metrics import METRICS, Metric, Predictions
from polyphily.errors import UserError
from polyphily.graphs.datasets import DATASETS, read
from polyphily.graphs.graph import Collection, Graph
from polyphily.graphs.loading import load
from polyphily.graphs.partitions import PARTITIONS, partition
from polyphily.nn.segments import Segments
from polyphily.registry import Registry
from polyphily.testing.comparing import CheckFailed
from polyphily.testing.examples import CLASSES, random_graph

T = TypeVar("T")
_SEEDED = "Draw random numbers from numpy.random.default_rng of the seed, not from global state."


def _find(registry: Registry[T], what: str | Callable[..., Any], member: str) -> T:
    """Return the registered entry of a name or of a decorated function."""
    if isinstance(what, str):
        return registry.find(what)
    for entry in registry.values():
        if getattr(entry, member) is what:
            return entry
    name = getattr(what, "__name__", repr(what))
    raise CheckFailed(
        f"{name}: this is not registered. Decorate it with @register_{registry.kind}(…)."
    )


@contextmanager
def _reported(title: str) -> Any:
    """Turn exceptions into `CheckFailed`."""
    try:
        yield
    except CheckFailed:
        raise
    except Exception as error:
        words = " ".join(str(error).split())
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        raise CheckFailed(f"{title}: {kind}{words}") from error


def _twice(function: Callable[..., T], *arguments: Any, **options: Any) -> list[T]:
    """Call a function twice, with global random states that differ."""
    states, found = (np.random.get_state(), random.getstate()), []  # noqa: NPY002
    try:
        for seed in (1, 2):
            np.random.seed(seed)  # noqa: NPY002
            random.seed(seed)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                found.append(function(*arguments, **options))
    finally:
        np.random.set_state(states[0])  # noqa: NPY002
        random.setstate(states[1])
    return found


# Partitions --------------------------------------------------------------------------------------


def check_partition(
    way: str | Callable[..., Any], /, *, clients: Iterable[int] = (1, 3, 5), **options: Any
) -> None:
    """Check a partition on a random graph of 60 nodes.

    Args:
        way: the decorated function, or the name it is registered under.
        clients: numbers of clients to try; a partition that finds the number is asked for none.
        **options: of the partition.

    Raises:
        CheckFailed: for the first property that does not hold.
    """
    method = _find(PARTITIONS, way, "function")
    title = f"partition '{method.name}'"
    if not method.description:
        raise CheckFailed(f"{title}: it has no description. Give the function a docstring.")
    graph = random_graph(60, density=0.1, unlabelled=0.1)
    before = _copied(graph)
    for count in [None] if method.finds_clients else clients:
        for seed in (0, 1):
            with _reported(title):
                first, second = _twice(partition, graph, method.name, count, seed, **options)
            if [part.tolist() for part in first] != [part.tolist() for part in second]:
                raise CheckFailed(f"{title}: two calls with seed {seed} differ. {_SEEDED}")
    if not _same(before, graph):
        raise CheckFailed(f"{title}: it changes the graph. Copy arrays before you change them.")


# Datasets ----------------------------------------------------------------------------------------


def check_dataset(spec: str | Callable[..., Any], /, *, root: Path | None = None) -> None:
    """Check a dataset: what it reads, its statistics, and that the seed decides all that is drawn.

    Args:
        spec: the decorated function, or `name` or `name:option=value`.
        root: the folder with the data; the usual one unless given.

    Raises:
        CheckFailed: for the first property that does not hold.
    """
    name = spec if isinstance(spec, str) else _find(DATASETS, spec, "reader").name
    info = DATASETS.find(name.partition(":")[0])
    title = f"dataset '{info.name}'"
    with _reported(title):
        first, second = _twice(read, name, root=root, seed=0)
    if not all(_same(a, b) for a, b in zip(first.graphs, second.graphs, strict=True)):
        raise CheckFailed(f"{title}: two calls with one seed differ. {_SEEDED}")
    found = _statistics(first)
    for key, value in found.items():
        wanted = getattr(info, key)
        if wanted and wanted != value and ":" not in name:
            raise CheckFailed(
                f"{title}: it has {value} {key}, but its DatasetInfo says {wanted}. "
                "Correct the number, or write 0 if it varies."
            )
    for graph in first.graphs:
        values: Any = graph.features
        if not np.isfinite(values.data if sp.issparse(values) else values).all():
            raise CheckFailed(
                f"{title}: a feature of '{graph.name}' is not finite. Fill in missing values."
            )
    with _reported(title):
        load(name, root=root, seed=0, partition=None if first.natural else "random")


def _statistics(collection: Collection) -> dict[str, int]:
    graphs = collection.graphs
    return {
        "nodes": sum(graph.num_nodes for graph in graphs),
        "edges": sum(graph.num_edges for graph in graphs),
        "features": graphs[0].num_features,
        "classes": len(collection.classes),
    }


def _copied(graph: Graph) -> Graph:
    return replace(
        graph,
        features=graph.features.copy(),
        edges=graph.edges.copy(),
        labels=graph.labels.copy(),
    )


def _same(first: Graph, second: Graph) -> bool:
    """Return whether two graphs have equal features, edges and labels."""
    found: list[Any] = [first.features, second.features]
    features = [x.toarray() if sp.issparse(x) else x for x in found]
    pairs = (features, (first.edges, second.edges), (first.labels, second.labels))
    return all(np.array_equal(a, b, equal_nan=True) for a, b in pairs)


# Metrics -----------------------------------------------------------------------------------------

_SIZES = (30, 12, 1, 0)


def check_metric(metric: str | Callable[..., Any], /) -> None:
    """Check a metric on random scores of four clients, one of them without any node.

    Args:
        metric: the decorated function, or the name it is registered under.

    Raises:
        CheckFailed: for the first property that does not hold.
    """
    entry = _find(METRICS, metric, "function")
    title = f"metric '{entry.name}'"
    with _reported(title):
        _check_metric(entry, title)


def _check_metric(metric: Metric, title: str) -> None:
    classes = metric.classes or CLASSES
    source = torch.Generator().manual_seed(0)
    labels = torch.randint(classes, (sum(_SIZES),), generator=source)
    logits = torch.randn(sum(_SIZES), classes, generator=source)
    kept = logits.clone()
    values = metric.compute(_predictions(logits, labels, _SIZES))
    if not torch.equal(kept, logits):
        raise CheckFailed(f"{title}: it changes the logits. Return new tensors.")
    known = values[~values.isnan()]
    if not values[-1].isnan():
        raise CheckFailed(
            f"{title}: a client without nodes has the score {float(values[-1]):.3g}. "
            "Return NaN for it, as a mean over no nodes does."
        )
    if not len(known) or ((known < 0) | (known > 1)).any():
        raise CheckFailed(
            f"{title}: the scores of random predictions are {values.tolist()}. "
            "Return numbers from 0 to 1, which a server accepts from its sites."
        )
    ends = np.cumsum([0, *_SIZES]).tolist()
    for k, size in enumerate(_SIZES):
        own = slice(ends[k], ends[k + 1])
        shuffled = torch.randperm(size, generator=source)
        alone = _predictions(logits[own][shuffled], labels[own][shuffled], (size,))
        if not torch.allclose(metric.compute(alone)[0], values[k], equal_nan=True):
            raise CheckFailed(
                f"{title}: the score of client {k} changes if it is computed by itself, or with "
                "its nodes in another order. Sum over the nodes of each client with "
                "`predictions.segments`, or start from `predictions.confusion`."
            )
    exact = torch.nn.functional.one_hot(labels, classes).float()
    best = metric.compute(_predictions(exact, labels, _SIZES))
    if metric.selects and (best < values).any():
        raise CheckFailed(
            f"{title}: exact predictions score {best.tolist()}, random ones {values.tolist()}. "
            "Larger must be better, or register it with selects=False."
        )


def _predictions(logits: Tensor, labels: Tensor, sizes: tuple[int, ...]) -> Predictions:
    return Predictions(logits, labels, Segments(sizes, logits.device), logits.shape[1])
