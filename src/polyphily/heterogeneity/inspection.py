"""All measures of a federation in one object, for tables, files and reports."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from polyphily.graphs.graph import UNLABELLED, Graph, IntArray, alike
from polyphily.graphs.loading import Federation
from polyphily.heterogeneity import divergence, homophily, pagerank, spectral
from polyphily.heterogeneity.partitioning import RESTART, Loss, partition_loss
from polyphily.heterogeneity.topology import Topology, topology

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Profile:
    """The measures of one graph. All known labels are used, regardless of the split.

    Attributes:
        name: the name of the client or of the dataset.
        nodes: the number of nodes.
        edges: the number of undirected edges without self-loops.
        features: the number of features.
        classes: the number of classes that occur in the graph.
        labelled: the number of nodes with a label.
        train: the number of train nodes.
        edge_homophily: see `homophily.edge_homophily`.
        node_homophily: see `homophily.node_homophily`.
        class_insensitive_homophily: see `homophily.class_insensitive_homophily`.
        adjusted_homophily: see `homophily.adjusted_homophily`.
        label_informativeness: see `homophily.label_informativeness`.
        high_frequency_area: of the features, with the symmetric normalised Laplacian.
        high_frequency_area_combinatorial: the same with the Laplacian D - A.
        structure_inertia_score: SIS, a sum over nodes; see `pagerank`.
        structure_inertia_per_node: SIS divided by the number of nodes.
        spectrum: the share of the Laplacian's eigenvalues in each of equal parts of [0, 2].
        spectrum_exact: whether all eigenvalues were computed.
        topology: degrees, density, clustering, components.
        label_counts: the number of nodes of each class.
        neighbours: Q_ab, the share of class a's edges that lead to class b.
    """

    name: str
    nodes: int
    edges: int
    features: int
    classes: int
    labelled: int
    train: int
    edge_homophily: float
    node_homophily: float
    class_insensitive_homophily: float
    adjusted_homophily: float
    label_informativeness: float
    high_frequency_area: float
    high_frequency_area_combinatorial: float
    structure_inertia_score: float
    structure_inertia_per_node: float
    spectrum: FloatArray
    spectrum_exact: bool
    topology: Topology
    label_counts: IntArray
    neighbours: FloatArray


@dataclass(frozen=True)
class Trained:
    """The measures of a run's models.

    Attributes:
        method: the method that was trained.
        network: the kind of network.
        round: the number of rounds that were trained.
        seed: the seed of the run.
        view: which models: "received" or "trained".
        embedding_divergence: between clients, averaged over classes, `[K, K]`.
        embedding_divergence_per_class: averaged over pairs of clients, `[C]`.
        frequencies: where the responses of the filters are given; None if there are none.
        responses: the response of each client's filter.
        collaboration: the weights w in H(G): "learned" or "equal".
        heterogeneity: H(G) = sum_ij w_ij ||θ_i - θ_j||^2 of the clients' trained parameters.
        heterogeneity_relative: H(G) divided by sum_ij w_ij (||θ_i||^2 + ||θ_j||^2).
    """

    method: str
    network: str
    round: int
    seed: int
    view: str
    embedding_divergence: FloatArray
    embedding_divergence_per_class: FloatArray
    frequencies: FloatArray | None
    responses: FloatArray | None
    collaboration: str
    heterogeneity: float
    heterogeneity_relative: float


@dataclass(frozen=True)
class Inspection:
    """The measures of a federation.

    Attributes:
        dataset: the name or path of the data.
        partition: the name of the partition.
        split: how train nodes were drawn; the structure inertia score depends on them.
        seed: the seed of partition, split and all estimates.
        class_names: the names of the labels.
        graph: the measures of the whole graph, if there is one.
        clients: the measures of each client's graph.
        pairs: matrices `[K, K]` by name; see `measure_pairs`.
        similarity_ratio: the share of client pairs with a similarity of one half or more.
        complementarity_ratio: the share of the other pairs.
        lost: what the partition lost, if there was a whole graph.
        trained: the measures of a run's models, if there are any.
        notes: which numbers are estimates, and of what kind.
    """

    dataset: str
    partition: str
    split: str
    seed: int
    class_names: tuple[str, ...]
    graph: Profile | None
    clients: tuple[Profile, ...]
    pairs: dict[str, FloatArray]
    similarity_ratio: float
    complementarity_ratio: float
    lost: Loss | None
    trained: Trained | None = None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists and numbers; NaN where a measure is undefined."""
        found: dict[str, Any] = _plain(dataclasses.asdict(self))
        return found


def inspect(
    federation: Federation,
    whole: Graph | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Inspection:
    """Measure a federation.

    Args:
        federation: the clients' graphs.
        whole: the graph before it was divided (`whole_graph`), if there is one.
        tell: called before each measurement with the name of what is measured.
    """
    classes, seed = len(federation.classes), federation.seed
    measured = []
    for graph in federation.clients:
        tell(graph.name)
        measured.append(profile(graph, classes, seed))
    clients = tuple(found for found, _ in measured)
    tell("pairs of clients")
    pairs = measure_pairs(federation.clients, [spectrum for _, spectrum in measured], classes)
    ratio = divergence.complementarity_ratio(pairs["similarity"])
    before, lost = None, None
    if whole is not None:
        tell("the whole graph")
        before, _ = profile(whole, classes, seed)
        parts = [federation.partition.nodes_of(k) for k in range(len(federation))]
        train = [client.masks.train for client in federation.clients if client.masks]
        lost = partition_loss(whole, parts, train)
    return Inspection(
        dataset=federation.dataset,
        partition=federation.partition.name,
        split=federation.split,
        seed=seed,
        class_names=federation.classes,
        graph=before,
        clients=clients,
        pairs=pairs,
        similarity_ratio=1 - ratio,
        complementarity_ratio=ratio,
        lost=lost,
        notes=_notes([*clients, *([before] if before else [])]),
    )


def profile(graph: Graph, classes: int, seed: int = 0) -> tuple[Profile, spectral.Spectrum]:
    """Compute the measures of one graph, and its spectrum."""
    counts = homophily.class_counts(graph, classes)
    train = np.zeros(graph.num_nodes, np.bool_) if graph.masks is None else graph.masks.train
    reach = pagerank.structure_inertia_score(graph, train, RESTART, seed=seed)
    spectrum = spectral.spectrum(graph, seed)
    found = Profile(
        name=graph.name,
        nodes=graph.num_nodes,
        edges=graph.num_edges,
        features=graph.num_features,
        classes=int(np.count_nonzero(counts)),
        labelled=int((graph.labels != UNLABELLED).sum()),
        train=int(train.sum()),
        edge_homophily=homophily.edge_homophily(graph),
        node_homophily=homophily.node_homophily(graph),
        class_insensitive_homophily=homophily.class_insensitive_homophily(graph),
        adjusted_homophily=homophily.adjusted_homophily(graph),
        label_informativeness=homophily.label_informativeness(graph),
        high_frequency_area=spectral.high_frequency_area(graph),
        high_frequency_area_combinatorial=spectral.high_frequency_area(graph, "combinatorial"),
        structure_inertia_score=reach,
        structure_inertia_per_node=reach / max(graph.num_nodes, 1),
        spectrum=spectrum.histogram(),
        spectrum_exact=spectrum.exact,
        topology=topology(graph),
        label_counts=counts,
        neighbours=divergence.neighbour_distribution(graph, classes),
    )
    return found, spectrum


def measure_pairs(
    graphs: Sequence[Graph], spectra: Sequence[spectral.Spectrum], classes: int
) -> dict[str, FloatArray]:
    """Compute the distances between clients, as matrices `[K, K]` by name.

    `spectral_kl` has KL(i || j) in row i. All others are symmetric. The two that end in `_chance`
    are the values expected between clients of these sizes if their distributions were equal.
    """
    counts = [homophily.class_counts(graph, classes) for graph in graphs]
    mixing = [homophily.class_mixing(graph, classes) for graph in graphs]
    neighbours = [divergence.shares(matrix) for matrix in mixing]
    labels = [divergence.shares(count) for count in counts]
    similar = divergence.symmetric(mixing, divergence.similarity)
    np.fill_diagonal(similar, 1.0)
    return {
        "spectral_kl": divergence.pairwise(spectra, spectral.spectral_kl),
        "spectral_wasserstein": divergence.symmetric(spectra, spectral.spectral_wasserstein),
        "neighbour_divergence": divergence.symmetric(neighbours, divergence.neighbour_divergence),
        "neighbour_divergence_chance": divergence.symmetric(
            mixing, divergence.chance_neighbour_divergence
        ),
        "label_divergence": divergence.symmetric(labels, divergence.total_variation),
        "label_divergence_chance": divergence.symmetric(counts, divergence.chance_total_variation),
        "feature_divergence": divergence.feature_divergence(alike(graphs)),
        "similarity": similar,
    }


def mean_of_pairs(matrix: FloatArray) -> float:
    """Compute the mean over pairs of different clients, ignoring NaN; NaN if nothing is left."""
    others = matrix[~np.eye(len(matrix), dtype=np.bool_)]
    known = others[~np.isnan(others)]
    return float(known.mean()) if len(known) else float("nan")


def _notes(profiles: Sequence[Profile]) -> tuple[str, ...]:
    """Return notes on the measures that are estimates."""
    notes = []
    large = [p for p in profiles if not p.spectrum_exact]
    if large:
        notes.append(
            f"spectra of graphs with more than {spectral.EXACT:,} nodes are estimates: "
            f"{spectral.STEPS} Lanczos steps from at most {spectral.PROBES} random vectors"
        )
    if any(p.nodes > pagerank.LARGEST for p in profiles):
        notes.append(
            f"structure inertia of graphs with more than {pagerank.LARGEST:,} nodes is a lower "
            "bound, one or two percent low"
        )
    if any(p.nodes > pagerank.MANY for p in profiles):
        notes.append(
            f"structure inertia of graphs with more than {pagerank.MANY:,} nodes is extrapolated "
            f"from {pagerank.MANY:,} random nodes"
        )
    unlabelled = sum(p.labelled < p.nodes for p in profiles)
    if unlabelled:
        notes.append(
            f"{unlabelled} of {len(profiles)} graphs have unlabelled nodes: measures of labels use "
            "labelled nodes only"
        )
    return tuple(notes)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value
