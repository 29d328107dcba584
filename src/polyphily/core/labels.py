"""Train labels as inputs: a node's neighbours may say what they are.

The label of a visible train node is appended to its features, as a one-hot vector. Every training
step hides the labels of some train nodes, drawn anew, and its loss is that of the hidden ones, so
that no node's loss depends on its own label. At prediction all train labels are visible. Labels of
other nodes are never inputs (Wang et al. 2021; Shi et al. 2021).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from polyphily.graphs.graph import UNLABELLED
from polyphily.nn.draws import Draws
from polyphily.nn.segments import Segments
from polyphily.nn.sparse import SparseMatrix
from polyphily.nn.stacked import GraphView, StackedGraph

if TYPE_CHECKING:
    from polyphily.core.cohort import Key, TrainingGraph
    from polyphily.core.sampling import Sampling

T = TypeVar("T")


class LabelledFeatures:
    """The features of a graph's nodes, with columns for the classes of visible train nodes.

    Args:
        graph: the graph.
        x: its features, dense `[N, F]` or sparse and block-diagonal `[N, K·F]`.
        classes: the number of classes.
    """

    def __init__(self, graph: StackedGraph, x: Tensor | SparseMatrix, classes: int) -> None:
        nodes = graph.train_nodes
        self._labels = graph.labels[nodes]
        self._nodes, self._segments = nodes, graph.segments
        self._places: Tensor | None = None  # of train labels among the entries, if sparse
        if isinstance(x, Tensor):
            self._width = x.shape[1]
            self._x: Tensor | SparseMatrix = torch.cat([x, x.new_zeros(len(x), classes)], dim=1)
            return
        clients = len(graph.segments)
        width = x.shape[1] // clients
        owner = graph.segments.owner
        # Columns of client k begin at k (F + C); those of its classes follow its features.
        cols = x.col_long + owner[x.row] * classes
        own = owner[nodes] * (width + classes) + width + self._labels
        rows = torch.cat([x.row, nodes]).cpu().numpy()
        all_cols = torch.cat([cols, own]).cpu().numpy()
        order = np.lexsort((all_cols, rows))
        pattern = SparseMatrix.from_coordinates(
            rows[order],
            all_cols[order],
            None,
            (x.shape[0], clients * (width + classes)),
            dtype=graph.dtype,
            device=graph.device,
        )
        value = torch.ones(x.nnz, dtype=graph.dtype, device=graph.device)
        value = value if x.value is None else x.value
        moved = torch.from_numpy(order).to(graph.device)
        self._x = pattern.with_value(torch.cat([value, value.new_zeros(len(nodes))])[moved])
        places = torch.empty_like(moved)
        places[moved] = torch.arange(len(moved), device=moved.device)
        self._places = places[x.nnz :]

    @cached_property
    def pointers(self) -> tuple[int, ...]:
        """The first entry of each client, as `StackedGraph.x_pointers`."""
        return self._segments.pointers_into(self._x)

    def seen(self, visible: Tensor | None = None) -> Tensor | SparseMatrix:
        """Return features and labels.

        Args:
            visible: which train nodes show their labels, `[train nodes]`; None: all of them.
        """
        x = self._x
        like = x if isinstance(x, Tensor) else x.value
        assert like is not None
        shown = like.new_ones(len(self._nodes)) if visible is None else visible.to(like)
        if isinstance(x, Tensor):
            return x.index_put((self._nodes, self._width + self._labels), shown)
        assert self._places is not None
        return x.with_value(like.index_put((self._places,), shown))


def draw_hidden(graph: TrainingGraph, draws: Draws, share: float) -> Tensor:
    """Draw the train nodes that hide their labels in a step: indices among train nodes, ascending.

    These are a share of each client's train nodes, and at least one.
    """
    segments = graph.train_segments
    lots = draws.uniform(1, segments.pointers).squeeze(1)
    order = (lots + segments.owner).argsort()  # client by client, as the nodes are
    picked = graph.cached(("labels/hidden", share), lambda g: _first(g.train_segments, share))
    return order[picked].sort().values


def hidden_counts(segments: Segments, share: float) -> tuple[int, ...]:
    """Return how many train nodes of each client hide their labels."""
    return tuple(min(size, max(1, round(share * size))) for size in segments.sizes)


def _first(segments: Segments, share: float) -> Tensor:
    """Return the indices of the first train nodes of each client, as many as are hidden."""
    counts = zip(segments.pointers, hidden_counts(segments, share), strict=False)
    parts = [np.arange(start, start + count) for start, count in counts]
    return torch.from_numpy(np.concatenate([np.empty(0, np.int64), *parts])).to(segments.device)


class _WithoutFeatures(GraphView):
    """A graph for values that are kept from step to step, which must not depend on labels."""

    @property
    def x(self) -> Tensor | SparseMatrix:
        raise TypeError(
            "with --label-inputs features hold labels, of which every step hides others: a network "
            "must not keep (`graph.cached`) what it computes from `graph.x`"
        )

    def cached(self, key: Hashable, make: Callable[[StackedGraph], T]) -> T:
        return self.graph.cached(("labels", key), lambda graph: make(_WithoutFeatures(graph)))


class LabelsHidden(GraphView):
    """What a training step sees of a cohort: some labels as inputs, the others to be predicted.

    A `TrainingGraph`. Its train nodes are those that hide their labels in this step.

    Args:
        graph: the cohort.
        features: its features with labels.
        draws: the random draws of the round.
        share: the share of train nodes that hide their labels.
    """

    sampling: Sampling | None = None
    changes: bool = False  # a step is not divided again

    def __init__(
        self, graph: TrainingGraph, features: LabelledFeatures, draws: Draws, share: float
    ) -> None:
        super().__init__(graph)
        self.whole, self._features, self._share = graph, features, share
        self.keys: tuple[Key, ...] = graph.keys
        self.blocks, self.classes, self.mixed = graph.blocks, graph.classes, graph.mixed
        self._hidden = draw_hidden(graph, draws, share)

    def __len__(self) -> int:
        return len(self.whole)

    @cached_property
    def x(self) -> Tensor | SparseMatrix:
        visible = torch.ones(
            len(self.whole.train_nodes), dtype=torch.bool, device=self._hidden.device
        )
        return self._features.seen(visible.index_fill(0, self._hidden, False))

    @property
    def x_pointers(self) -> tuple[int, ...]:
        return self._features.pointers

    @cached_property
    def labels(self) -> Tensor:
        labels = torch.full_like(self.whole.labels, UNLABELLED)
        return labels.index_put((self.train_nodes,), self.train_labels)

    @cached_property
    def train_nodes(self) -> Tensor:
        return self.whole.train_nodes[self._hidden]

    @cached_property
    def train_labels(self) -> Tensor:
        return self.whole.train_labels[self._hidden]

    @property
    def train_segments(self) -> Segments:
        return self.whole.cached(
            ("labels/segments", self._share),
            lambda g: Segments(hidden_counts(g.train_segments, self._share), g.device),
        )

    @property
    def num_train(self) -> Tensor:
        return self.whole.constant(self.train_segments.sizes)

    @cached_property
    def train_onehot(self) -> Tensor:
        return torch.nn.functional.one_hot(self.train_labels, self.classes).to(self.dtype)

    @property
    def class_weights(self) -> Tensor:
        return self.whole.class_weights

    @property
    def forward_only(self) -> LabelsHidden:
        return self

    def sample(self, draws: Draws) -> LabelsHidden:
        return self

    def cached(self, key: Hashable, make: Callable[[Any], T]) -> T:
        return self.whole.cached(("labels", key), lambda graph: make(_WithoutFeatures(graph)))

    def constant(self, values: tuple[float, ...]) -> Tensor:
        return self.whole.constant(values)


class LabelsShown(GraphView):
    """A graph with labels of its train nodes among the features.

    Args:
        graph: the graph.
        features: its features with labels.
        visible: which train nodes show their labels, `[train nodes]`; None: all of them.
    """

    def __init__(
        self, graph: StackedGraph, features: LabelledFeatures, visible: Tensor | None = None
    ) -> None:
        super().__init__(graph)
        self._features, self._visible = features, visible

    @cached_property
    def x(self) -> Tensor | SparseMatrix:
        return self._features.seen(self._visible)

    @property
    def x_pointers(self) -> tuple[int, ...]:
        return self._features.pointers


def labelled_features(graph: StackedGraph, classes: int) -> LabelledFeatures:
    """Return the features of a graph with columns for labels, made once."""
    return graph.cached(("labels/features", classes), lambda g: LabelledFeatures(g, g.x, classes))
