"""Relations of labels along edges: four definitions of homophily, and label informativeness.

They describe the data, not training: all known labels are used, regardless of the split. Unlabelled
nodes are left out, and so are edges with an unlabelled end. Undefined values (no such edge, a
single class) are NaN.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.special import xlogy

from polyphily.graphs.graph import UNLABELLED, Graph, IntArray

FloatArray = npt.NDArray[np.float64]


def class_mixing(graph: Graph, classes: int | None = None) -> FloatArray:
    """Count the edges from class a to class b, `[C, C]`. It is symmetric: an edge counts twice.

    Args:
        graph: the graph with its labels and edges.
        classes: C; the largest label plus one unless given.

    >>> path = Graph.build(np.zeros((3, 1)), np.array([[0, 1], [1, 2]]), np.array([0, 0, 1]))
    >>> class_mixing(path).tolist()
    [[2.0, 1.0], [1.0, 0.0]]
    """
    count = int(graph.labels.max(initial=UNLABELLED)) + 1 if classes is None else classes
    source, target = _labels_at_ends(graph)
    pairs = np.bincount(source * count + target, minlength=count * count)
    return pairs.reshape(count, count).astype(np.float64)


def class_counts(graph: Graph, classes: int | None = None) -> IntArray:
    """Count the nodes of each class, `[C]`."""
    known = graph.labels[graph.labels != UNLABELLED]
    return np.bincount(known, minlength=classes or 0).astype(np.int64)


def edge_homophily(graph: Graph) -> float:
    """Compute h = |{(u, v) in E: y_u = y_v}| / |E| (Zhu et al., NeurIPS 2020)."""
    source, target = _labels_at_ends(graph)
    return float((source == target).mean()) if len(source) else float("nan")


def node_homophily(graph: Graph) -> float:
    """Compute the mean over nodes of the share of neighbours with equal label (Pei et al., 2020).

    A node without labelled neighbours counts as 0, as in torch_geometric. Partitioning creates many
    of them.
    """
    known = graph.labels != UNLABELLED
    ends = graph.edges[:, known[graph.edges].all(axis=0)]
    if not ends.shape[1]:
        return float("nan")
    nodes = graph.num_nodes
    same = graph.labels[ends[0]] == graph.labels[ends[1]]
    degrees = np.bincount(ends[0], minlength=nodes)
    alike = np.bincount(ends[0], weights=same, minlength=nodes)
    return float((alike / np.maximum(degrees, 1))[known].mean())


def class_insensitive_homophily(graph: Graph) -> float:
    """Compute 1/(C-1) sum_k max(0, h_k - n_k/n), with h_k the edge homophily of class k.

    (Lim et al., New Benchmarks for Learning on Non-Homophilous Graphs, 2021.) n_k is the number of
    nodes of class k, and C the number of classes that occur in the graph. A class without edges has
    h_k = 0.
    """
    mixing, counts = class_mixing(graph), class_counts(graph)
    present = np.count_nonzero(counts)
    if present < 2 or not mixing.any():
        return float("nan")
    own = mixing.diagonal() / np.maximum(mixing.sum(axis=1), 1)
    excess = np.maximum(own - counts / counts.sum(), 0)
    return float(excess.sum() / (present - 1))


def adjusted_homophily(graph: Graph) -> float:
    """Compute (h - sum_k p_k^2) / (1 - sum_k p_k^2), with p_k the share of edge ends in class k.

    It is edge homophily adjusted for the degrees of the classes (Platonov et al., Characterizing
    Graph Datasets for Node Classification, NeurIPS 2023): 1 if all edges join equal labels, 0 if
    edges are independent of labels, negative if edges join different labels preferably.
    """
    joint = _joint(graph)
    chance = (joint.sum(axis=1) ** 2).sum()
    if not joint.size or chance >= 1 - 1e-12:
        return float("nan")
    return float((np.trace(joint) - chance) / (1 - chance))


def label_informativeness(graph: Graph) -> float:
    """Compute LI = I(y_u, y_v) / H(y_u) over a random edge (u, v), in [0, 1].

    It is the information that a neighbour's label gives (Platonov et al., NeurIPS 2023). With
    p(a, b) the share of edges from class a to class b, and p(a) the share of edge ends in class a,
    LI = 2 - sum_ab p(a,b) ln p(a,b) / sum_a p(a) ln p(a).
    """
    joint = _joint(graph)
    margin = joint.sum(axis=1)
    entropy = -xlogy(margin, margin).sum()
    if entropy <= 1e-12:
        return float("nan")
    # Rounding may make the difference of two entropies slightly negative.
    return float(max(2 + xlogy(joint, joint).sum() / entropy, 0.0))


def _joint(graph: Graph) -> FloatArray:
    """Compute p(a, b) over edges; of shape [0, 0] if there is no labelled edge."""
    mixing = class_mixing(graph)
    total = mixing.sum()
    return mixing / total if total else np.zeros((0, 0))


def _labels_at_ends(graph: Graph) -> tuple[IntArray, IntArray]:
    """Return the labels at both ends of all edges, in both directions, if both are known."""
    source, target = graph.labels[graph.edges]
    known = (source != UNLABELLED) & (target != UNLABELLED)
    return source[known], target[known]
