"""Every equation of FedSPA's paper, in the paper's form, against sums written out here.

`docs/equations/fedspa.md` says which test belongs to which equation.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from builders import dense_adjacency, dense_features, of_client, split_by_client
from cases import simulate, small_federation
from polyphily.core.messages import Uploads, model_part
from polyphily.core.method import create
from polyphily.engines.simulation import Simulation
from polyphily.graphs.graph import Graph
from polyphily.heterogeneity.homophily import edge_homophily
from polyphily.methods.fedspa import FedSPA

Array = npt.NDArray[np.float64]
Values = dict[str, Array]


def paper(**options: object) -> FedSPA:
    method = create("fedspa", {"paper": True, **options})
    assert isinstance(method, FedSPA)
    return method


def run(rounds: int, method: FedSPA | None = None, **settings: object) -> Simulation:
    return simulate(method or paper(), small_federation(), rounds, backbone="acm-gcn", **settings)


def clients(simulation: Simulation) -> list[Graph]:
    return list(simulation.cohort.graphs)


def values_of(simulation: Simulation, k: int) -> Values:
    """The parameters of a client after its training, without the client axis."""
    own = of_client(model_part(simulation.memory), k)
    return {name: value[0].numpy().copy() for name, value in own.items()}


# The paper's computation for one client, node by node --------------------------------------------


def visible(graph: Graph) -> list[int | None]:
    """The labels that are visible: those of the train nodes."""
    assert graph.masks is not None
    return [int(y) if t else None for y, t in zip(graph.labels, graph.masks.train, strict=True)]


def kind(u: int, v: int, labels: list[int | None]) -> str:
    """Equation 4."""
    if labels[u] is None or labels[v] is None:
        return "unk"
    return "hom" if labels[u] == labels[v] else "het"


def convolution(z: Array, graph: Graph, own: Values) -> tuple[Array, Array, Array]:
    """Equations 4 to 6 for the low-pass and the high-pass channel, and what ACM-GCN keeps beside.

    Returns z_v W_self of all three channels, the sum over neighbours, and the degrees.
    """
    labels, adjacency = visible(graph), dense_adjacency(graph).numpy()
    near = np.zeros((len(z), own["weight_hom"].shape[1]))
    for v in range(len(z)):
        phi = float(z[v] @ own["harmoniser.weight"][:, 0] + own["harmoniser.bias"][0])
        alpha = 1 / (1 + np.exp(-phi))  # of the centre node
        theta = {"hom": own["weight_hom"], "het": own["weight_het"]}
        theta["unk"] = alpha * theta["hom"] + (1 - alpha) * theta["het"]
        for u in np.flatnonzero(adjacency[v]):
            near[v] += z[u] @ theta[kind(u, v, labels)]
    return z @ own["weight_self"], near, adjacency.sum(axis=1)


def layer(z: Array, graph: Graph, own: Values) -> Array:
    """ACM-GCN's mixture of relu(self + near), relu(d self - near) and relu(self)."""
    selves, near, degree = convolution(z, graph, own)
    low, high, identity = np.split(selves, 3, axis=1)
    near_low, near_high = np.split(near, 2, axis=1)
    bands = [low + near_low, degree[:, None] * high - near_high, identity]
    bands = [np.maximum(band, 0) for band in bands]
    scores = np.stack([band @ own["attend"][:, i] for i, band in enumerate(bands)], axis=1)
    mixed = (1 / (1 + np.exp(-scores))) @ own["mix"] / 3
    weights = np.exp(mixed) / np.exp(mixed).sum(axis=1, keepdims=True)
    return 3 * sum(weights[:, [i]] * band for i, band in enumerate(bands))


def network(graph: Graph, values: Values) -> Array:
    """Two layers with ReLU between them: the logits."""
    of_layer = [
        {n.removeprefix(f"convs.{i}."): p for n, p in values.items() if n.startswith(f"convs.{i}.")}
        for i in range(2)
    ]
    hidden = np.maximum(layer(dense_features(graph).numpy(), graph, of_layer[0]), 0)
    return layer(hidden, graph, of_layer[1])


def log_likelihood(graph: Graph, values: Values) -> float:
    """The mean log-probability of the train nodes' labels."""
    assert graph.masks is not None
    logits = network(graph, values)
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    train = np.flatnonzero(graph.masks.train)
    return float(np.mean([log_p[i, graph.labels[i]] for i in train]))


def weights_by(deviations: list[float]) -> Array:
    """Equations 9 and 10 (and 12)."""
    low, high = min(deviations), max(deviations)
    raised = np.array([np.exp(-(d - low) / (high - low)) for d in deviations])
    return raised / raised.sum()


# The form ----------------------------------------------------------------------------------------


def test_the_papers_form_is_the_printed_method() -> None:
    method = paper()
    assert (method.form, method.normalise, method.laplacian) == ("paper", "sum", "symmetric")
    assert (method.prior_by, method.weighting) == ("distance", "nodes")
    assert (method.hidden_share, method.channel_lr) == (0, 1)
    assert (method.sfpd, method.prior, method.posterior) == (True, True, True)


def test_the_codes_form_differs_where_the_code_does() -> None:
    method = create("fedspa", {"code": True})
    assert isinstance(method, FedSPA)
    assert (method.form, method.normalise) == ("code", "sum")
    assert (method.laplacian, method.prior_by) == ("combinatorial", "area")
    assert (method.hidden_share, method.channel_lr) == (0, 1)


def test_equation_1_homophily_level() -> None:
    for graph in clients(run(0)):
        alike = [graph.labels[u] == graph.labels[v] for u, v in graph.edges.T.tolist()]
        assert edge_homophily(graph) == pytest.approx(sum(alike) / len(alike))


# SFPD --------------------------------------------------------------------------------------------


def test_equations_4_to_6_in_both_layers() -> None:
    """The whole network with trained parameters, different at every client."""
    simulation = run(2)
    logits = split_by_client(simulation.predict(simulation.trained()), simulation.cohort)
    for k, graph in enumerate(clients(simulation)):
        expected = network(graph, values_of(simulation, k))
        assert logits[k].numpy() == pytest.approx(expected, rel=1e-7, abs=1e-9)


def test_the_clients_minimise_the_cross_entropy_of_their_train_nodes() -> None:
    """With every edge kind visible: no label is hidden in the paper's form."""
    simulation = run(2)
    local = simulation.trained()
    local.draws = simulation.cohort.draws(0)
    losses = simulation.method.loss(local)
    for k, graph in enumerate(clients(simulation)):
        expected = -log_likelihood(graph, values_of(simulation, k))
        assert losses[k].item() == pytest.approx(expected)


# HBDA, what the clients send ---------------------------------------------------------------------


def laplacian(graph: Graph) -> Array:
    """I - D^-1/2 A D^-1/2, with a zero row for a node without edges."""
    adjacency = dense_adjacency(graph).numpy()
    degree = adjacency.sum(axis=1)
    scale = np.maximum(degree, 1) ** -0.5
    return np.diag((degree > 0).astype(float)) - scale[:, None] * adjacency * scale


def areas(simulation: Simulation) -> list[float]:
    """Equation 7 with a quadratic form for every column of the features."""
    found = []
    for graph in clients(simulation):
        x, matrix = dense_features(graph).numpy(), laplacian(graph)
        columns = [x[:, f] for f in range(x.shape[1]) if x[:, f].any()]
        found.append(float(np.mean([c @ matrix @ c / (c @ c) for c in columns])))
    return found


def test_equation_7_high_frequency_area() -> None:
    simulation = run(1)
    sent = simulation.method.upload(simulation.trained())
    assert sent["high_frequency_area"].tolist() == pytest.approx(areas(simulation))


def test_equation_2_the_area_is_the_mean_eigenvalue_by_energy() -> None:
    """sum_k λ_k x̂_k^2 / sum_k x̂_k^2, where x̂ = U^T x."""
    simulation = run(1)
    sent = simulation.method.upload(simulation.trained())["high_frequency_area"]
    for k, graph in enumerate(clients(simulation)):
        values, vectors = np.linalg.eigh(laplacian(graph))
        energy = (vectors.T @ dense_features(graph).numpy()) ** 2
        ratios = [values @ e / e.sum() for e in energy.T if e.sum() > 1e-12]
        assert sent[k].item() == pytest.approx(np.mean(ratios))


def test_equations_3_13_and_14_diagonal_of_the_fisher_information() -> None:
    """(d log p / d θ)^2 by differences, for some entries of every parameter of both channels."""
    simulation = run(2, dropout=0.5)
    sent = simulation.method.upload(simulation.trained())
    names = [n.removeprefix("fisher/") for n in sent if n.startswith("fisher/")]
    assert sorted(names) == [f"convs.{i}.weight_{c}" for i in (0, 1) for c in ("het", "hom")]
    rng, step = np.random.default_rng(0), 1e-5
    for k, graph in enumerate(clients(simulation)):
        values = values_of(simulation, k)
        for name in names:
            for place in rng.integers(0, values[name].size, 3):
                entry = np.unravel_index(place, values[name].shape)
                both = []
                for sign in (1, -1):
                    moved = {**values, name: values[name].copy()}
                    moved[name][entry] += sign * step
                    both.append(log_likelihood(graph, moved))
                expected = ((both[0] - both[1]) / (2 * step)) ** 2
                assert sent[f"fisher/{name}"][k][entry].item() == pytest.approx(
                    expected, rel=1e-4, abs=1e-10
                )


# HBDA, what the server does ----------------------------------------------------------------------


def uploads_of(simulation: Simulation) -> tuple[Uploads, list[int]]:
    sent = simulation.method.upload(simulation.trained())
    nodes = [graph.num_nodes for graph in clients(simulation)]
    return Uploads(tuple(range(len(nodes))), sent), nodes


def prior_weights(simulation: Simulation) -> Array:
    """Equations 8 to 10."""
    nodes = [graph.num_nodes for graph in clients(simulation)]
    area = areas(simulation)
    globe = sum(n * s for n, s in zip(nodes, area, strict=True)) / sum(nodes)
    return weights_by([abs(s - globe) for s in area])


def posterior_weights(uploads: Uploads, nodes: list[int], channel: str) -> Array:
    """Equations 11 and 12 for one channel, entry by entry over all of its layers."""
    rows = [
        np.concatenate(
            [
                uploads[name][k].numpy().ravel()
                for name in uploads.tensors
                if name.startswith("fisher/") and name.endswith(f"_{channel}")
            ]
        )
        for k in range(len(nodes))
    ]
    globe = sum(n / sum(nodes) * row for n, row in zip(nodes, rows, strict=True))
    deviations = [sum(abs(row[j] - globe[j]) for j in range(len(row))) / len(row) for row in rows]
    return weights_by(deviations)


def test_equations_8_to_12_weigh_the_parameters() -> None:
    """Prior weights for the harmoniser and all else, a posterior weight for each channel."""
    simulation = run(2)
    uploads, nodes = uploads_of(simulation)
    by_owner = {c: posterior_weights(uploads, nodes, c) for c in ("hom", "het")}
    by_owner["rest"] = prior_weights(simulation)
    assert not np.allclose(by_owner["hom"], by_owner["het"])
    after = simulation.method.aggregate({}, uploads, np.random.default_rng(0))
    seen = set()
    for name, rows in uploads.model.items():
        ending = name.rpartition("_")[2]
        owner = ending if ending in ("hom", "het") else "rest"
        weights = by_owner[owner]
        expected = sum(w * row for w, row in zip(weights, rows.numpy(), strict=True))
        assert after[f"model/{name}"].numpy() == pytest.approx(expected)
        seen.add(name.split(".", 2)[2])
    assert {"harmoniser.weight", "harmoniser.bias", "weight_hom", "weight_het"} <= seen
    assert {"weight_self", "attend", "mix"} <= seen  # left open: with w^h


def test_the_global_model_is_sent_to_every_client() -> None:
    simulation = run(2)
    uploads, _ = uploads_of(simulation)
    received = simulation.received().params
    after = simulation.method.aggregate({}, uploads, np.random.default_rng(0))
    for name, rows in received.items():
        assert torch.equal(rows, after[f"model/{name}"].expand_as(rows))


def test_the_codes_prior_weights_fall_with_the_area_itself() -> None:
    simulation = run(2, paper(prior_by="area"))
    uploads, _ = uploads_of(simulation)
    after = simulation.method.aggregate({}, uploads, np.random.default_rng(0))
    name = "convs.0.harmoniser.weight"
    rows = uploads.model[name].numpy()
    expected = sum(w * r for w, r in zip(weights_by(areas(simulation)), rows, strict=True))
    assert after[f"model/{name}"].numpy() == pytest.approx(expected)
