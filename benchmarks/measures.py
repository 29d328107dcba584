"""Time every measure of heterogeneity on one graph of a million edges, and on ten parts of it.

    OMP_NUM_THREADS=1 python benchmarks/measures.py

The graph is a csbm graph of 100,000 nodes and degree 20 with 64 features and 10 % training nodes.
Measures that compare clients get ten random parts of it, which keep a tenth of its edges. Prints a
table in Markdown: processor seconds, and the peak memory of the process after each measure.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from polyphily.graphs.csbm import sample
from polyphily.graphs.graph import Graph
from polyphily.heterogeneity import divergence, homophily, pagerank, spectral
from polyphily.heterogeneity.filters import basis_response
from polyphily.heterogeneity.partitioning import partition_loss
from polyphily.heterogeneity.topology import topology
from polyphily.report.trained import host_bases

CLASSES, PARTS, HIDDEN = 2, 10, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--degree", type=float, default=20)
    parser.add_argument("--features", type=int, default=64)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    graph = sample(args.nodes, args.features, 1000.0, args.degree, 0.3, rng)
    print(f"{graph.num_nodes:,} nodes, {graph.num_edges:,} edges, {graph.num_features} features\n")
    print("| measure | seconds | peak, GB |\n|---|---:|---:|")
    for name, measure in measures(graph, rng).items():
        began = time.process_time()
        measure()
        spent = time.process_time() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
        print(f"| {name} | {spent:.1f} | {peak:.1f} |", flush=True)


def measures(graph: Graph, rng: np.random.Generator) -> dict[str, Callable[[], object]]:
    train = rng.random(graph.num_nodes) < 0.1
    owner = rng.integers(0, PARTS, graph.num_nodes)
    nodes = [np.flatnonzero(owner == k) for k in range(PARTS)]
    parts = [graph.subgraph(own) for own in nodes]
    mixing = [homophily.class_mixing(part, CLASSES) for part in parts]
    embedding = rng.standard_normal((graph.num_nodes, HIDDEN))
    density: list[spectral.Spectrum] = []

    def spectra() -> None:
        density.append(spectral.spectrum(graph))

    def distances() -> None:
        spectral.spectral_kl(density[0], density[0])
        spectral.spectral_wasserstein(density[0], density[0])

    return {
        "edge homophily": partial(homophily.edge_homophily, graph),
        "node homophily": partial(homophily.node_homophily, graph),
        "adjusted homophily": partial(homophily.adjusted_homophily, graph),
        "class-insensitive homophily": partial(homophily.class_insensitive_homophily, graph),
        "label informativeness": partial(homophily.label_informativeness, graph),
        "high-frequency area": partial(spectral.high_frequency_area, graph),
        "high-frequency area, D - A": partial(spectral.high_frequency_area, graph, "combinatorial"),
        "spectrum": spectra,
        "spectral KL and W1 of two spectra": distances,
        "personalised PageRank to all train nodes": partial(pagerank.sent_to, graph, train, 0.15),
        "structure inertia score": partial(pagerank.structure_inertia_score, graph, train),
        "partition loss, ten parts": partial(
            partition_loss, graph, nodes, [train[own] for own in nodes]
        ),
        "degrees, density, clustering, components": partial(topology, graph),
        "neighbour distribution": partial(divergence.neighbour_distribution, graph, CLASSES),
        "neighbour divergence, ten parts": partial(
            divergence.symmetric,
            [divergence.shares(own) for own in mixing],
            divergence.neighbour_divergence,
        ),
        "similarity, ten parts": partial(divergence.symmetric, mixing, divergence.similarity),
        "feature divergence, ten parts": partial(divergence.feature_divergence, parts),
        "embedding divergence, ten parts": partial(
            divergence.embedding_divergence,
            [embedding[own] for own in nodes],
            [part.labels for part in parts],
            CLASSES,
            0,
        ),
        "response of a UniFilter of order 10": partial(
            basis_response,
            partial(host_bases, homophily=0.3, order=10),
            spectral.normalised_adjacency(graph),
            graph.features,
            np.full((11, graph.num_features), 1 / 11),
            0.5,
        ),
    }


if __name__ == "__main__":
    main()
