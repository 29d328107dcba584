"""FedLit: link types, channels and the matching server, each against a computation here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from builders import cohort_of, random_cohort, random_graphs
from cases import simulate, small_federation
from effects import changes_predictions
from polyphily.core.messages import Uploads, model_part
from polyphily.core.method import create
from polyphily.methods.fedlit.links import assign, degrees_of, kmeans, links_of, means, typed_graph
from polyphily.methods.fedlit.match import greedy_match
from polyphily.methods.fedlit.method import NODES, TYPED, FedLit
from polyphily.methods.fedlit.network import CENTROIDS
from polyphily.nn.segments import Segments
from polyphily.testing import METHOD_CHECKS, MethodCase

NO_RNG = np.random.default_rng(0)
SIZES = (9, 5, 1)


def method(**values: Any) -> FedLit:
    found = create("fedlit", values)
    assert isinstance(found, FedLit)
    return found


@pytest.mark.parametrize("check", METHOD_CHECKS)
@pytest.mark.parametrize(
    "form", [{"types": 1}, {"assignment": "random"}, {"align": False}], ids=str
)
def test_ablations_pass_the_shared_checks(form: dict[str, Any], check: str) -> None:
    METHOD_CHECKS[check](MethodCase(method(**form), untrained=(CENTROIDS,)))


# Link types --------------------------------------------------------------------------------------


def test_types_and_centroids_of_the_card() -> None:
    e = torch.tensor([[1, 0], [0.8, 0.2], [0, 1], [0.3, 0.9]])
    centroids = torch.tensor([[[1, 0.2], [0, 1]]])
    links = Segments((4,), torch.device("cpu"))
    types = assign(e, centroids, links)
    assert types.tolist() == [0, 0, 1, 1]
    torch.testing.assert_close(
        means(e, types, centroids, links), torch.tensor([[[0.9, 0.1], [0.15, 0.95]]])
    )


def test_a_type_without_links_keeps_its_centroid() -> None:
    e = torch.tensor([[1.0, 0.0], [0.9, 0.1]])
    centroids = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[0.5, 0.5], [0.2, 0.1]]])
    links = Segments((2, 0), torch.device("cpu"))
    found = means(e, assign(e, centroids, links), centroids, links)
    assert found[0, 1].tolist() == [0.0, 1.0]
    assert torch.equal(found[1], centroids[1])


def test_kmeans_finds_bundles_of_directions() -> None:
    rng = np.random.default_rng(0)
    axes = np.eye(3)[[0, 1, 2, 0, 1, 2, 0, 1, 2]]
    e = torch.from_numpy(axes * rng.uniform(1, 3, (9, 1)) + rng.uniform(0, 0.05, (9, 3)))
    links = Segments((9, 0), torch.device("cpu"))
    centroids = kmeans(e, 3, links)
    types = assign(e, centroids, links)
    assert [len(set(types[t::3].tolist())) for t in range(3)] == [1, 1, 1]
    assert len(set(types.tolist())) == 3
    assert not centroids[1].any()  # a client without links


@pytest.mark.parametrize("form", ["symmetric", "ordered"])
def test_embeddings_of_links(form: str) -> None:
    cohort = random_cohort(SIZES)
    links = links_of(cohort)
    h = torch.randn(cohort.num_nodes, 4, dtype=torch.float64)
    found = links.embed(h, form)
    edges = zip(cohort.edges.row.tolist(), cohort.edges.col_long.tolist(), strict=True)
    for entry, (u, v) in enumerate(edges):
        low, high = h[min(u, v)], h[max(u, v)]
        ordered, both = [low, high], [low + high, (low - high).abs()]
        wanted = torch.cat(ordered if form == "ordered" else both)
        torch.testing.assert_close(found[links.of_entry[entry]], wanted)


# Channels ----------------------------------------------------------------------------------------


def test_the_typed_graph_is_the_graphs_of_the_types() -> None:
    cohort = cohort_of(random_graphs(SIZES, density=0.5))
    links = links_of(cohort)
    types = torch.from_numpy(np.random.default_rng(0).integers(0, 3, len(links.low)))
    typed = typed_graph(cohort, types, 3)
    n = cohort.num_nodes
    x = torch.randn(n, 3, 2, dtype=torch.float64, requires_grad=True)
    found = (typed @ x.flatten(0, 1)).view(n, 3, 2)
    dense = torch.zeros(3, n, n, dtype=torch.float64)
    for low, high, t in zip(links.low.tolist(), links.high.tolist(), types.tolist(), strict=True):
        dense[t, low, high] = dense[t, high, low] = 1
    degree = dense.sum(dim=2)
    assert degrees_of(typed).view(n, 3).T.tolist() == degree.tolist()
    scale = degree.clamp(min=1).rsqrt()
    dense = scale.unsqueeze(2) * dense * scale.unsqueeze(1)
    torch.testing.assert_close(found, torch.einsum("tuv,vtd->utd", dense, x))
    weight = torch.randn_like(found)
    (grad,) = torch.autograd.grad((found * weight).sum(), x)
    torch.testing.assert_close(grad, torch.einsum("tuv,utd->vtd", dense, weight))


@pytest.mark.parametrize("self_path", [True, False])
def test_the_network_is_a_sum_of_channels(self_path: bool) -> None:
    simulation = simulate(method(types=2, self_path=self_path), small_federation(), 2)
    local = simulation.trained()
    cohort, params = local.cohort, local.params
    found = local.forward().logits
    assert isinstance(cohort.x, Tensor)
    links, owner = links_of(cohort), cohort.segments.owner
    starts = cohort.segments.pointers
    for k in range(4):
        own = {n: p[k] for n, p in params.items()}
        h = cohort.x[owner == k] @ own["project.weight"] + own["project.bias"]
        adjacency = torch.zeros(2, len(h), len(h), dtype=torch.float64)
        for low, high in zip(links.low.tolist(), links.high.tolist(), strict=True):
            if owner[low] != k:
                continue
            u, v = low - starts[k], high - starts[k]
            e = torch.cat([h[u] + h[v], (h[u] - h[v]).abs()])
            t = int(F.cosine_similarity(e.unsqueeze(0), own[CENTROIDS]).argmax())
            adjacency[t, u, v] = adjacency[t, v, u] = 1
        z = torch.zeros_like(h)
        for t, links_of_type in enumerate(adjacency):
            degree = links_of_type.sum(dim=1)
            scale = degree.clamp(min=1).rsqrt()
            x = h @ own["channels.weights.0"][t] + own["channels.biases.0"][t]
            for i in (1, 2):
                x = scale.unsqueeze(1) * links_of_type * scale @ x
                x = (x @ own[f"channels.weights.{i}"][t] + own[f"channels.biases.{i}"][t]).relu()
            z = z + x * (degree > 0).unsqueeze(1)
        if self_path:
            z = z + (h @ own["channels.own.weight"] + own["channels.own.bias"]).relu()
        wanted = z @ own["channels.head.weight"] + own["channels.head.bias"]
        torch.testing.assert_close(found[owner == k], wanted)


def test_centroids_follow_the_links_and_are_not_decayed() -> None:
    """After a round of one step, a centroid is the mean of the links that were its type."""
    chosen: dict[str, Any] = {"epochs": 1, "weight_decay": 0.5}
    simulation = simulate(method(), small_federation(), 1, **chosen)
    received = model_part(simulation.download([range(4)]))
    cohort = simulation.cohort
    simulation.advance()
    links = links_of(cohort)
    h = cohort.x @ received["project.weight"][0] + received["project.bias"][0]
    e = links.embed(h, "symmetric")
    after = model_part(simulation.memory)[CENTROIDS]
    for k in range(4):
        own, centroids = e[links.segments.owner == k], received[CENTROIDS][k]
        types = F.cosine_similarity(own.unsqueeze(1), centroids.unsqueeze(0), dim=2).argmax(dim=1)
        for t in range(4):
            inside = own[types == t]
            wanted = inside.mean(dim=0) if len(inside) else centroids[t]
            torch.testing.assert_close(after[k, t], wanted)


# The server --------------------------------------------------------------------------------------


def test_greedy_matching() -> None:
    reference = torch.eye(3)
    clients = torch.stack([reference[[2, 0, 1]], reference[[0, 1, 2]]]) * 5 + 0.1
    match = greedy_match(clients, reference)
    assert match.tolist() == [[1, 2, 0], [0, 1, 2]]
    # The closest pair is matched first: (0, 0), although type 1 is nearer to 0 than to 1.
    close = torch.tensor([[[1.0, 0.0], [0.9, 0.4]]])
    assert greedy_match(close, torch.tensor([[1.0, 0.1], [0.0, 1.0]])).tolist() == [[0, 1]]


def sent_in_round(rounds: int, **values: Any) -> tuple[FedLit, dict[str, Tensor], Uploads]:
    simulation = simulate(method(**values), small_federation(), rounds)
    chosen = simulation.method
    assert isinstance(chosen, FedLit)
    trained = simulation.backend.train(range(4), [range(4)]).trained
    return chosen, simulation.states[0], Uploads((0, 1, 2, 3), trained.uploads)


@pytest.mark.parametrize("rounds", [0, 2])
def test_numbering_types_in_another_way_leaves_the_server_unchanged(rounds: int) -> None:
    chosen, state, uploads = sent_in_round(rounds)
    heaviest = int(uploads["weight"].argmax())
    other = next(k for k in range(4) if k != heaviest)
    order = [2, 0, 3, 1]
    tensors = {n: t.clone() for n, t in uploads.tensors.items()}
    for name in tensors:
        if name.startswith(tuple(f"model/{n}" for n in (*TYPED, CENTROIDS))) or name == NODES:
            tensors[name][other] = tensors[name][other][order]
    straight = chosen.aggregate(state, uploads, NO_RNG)
    shuffled = chosen.aggregate(state, Uploads(uploads.clients, tensors), NO_RNG)
    for name, value in straight.items():
        torch.testing.assert_close(shuffled[name], value)
    without = method(align=False).aggregate(state, Uploads(uploads.clients, tensors), NO_RNG)
    weights = "model/channels.weights.1"
    assert not torch.allclose(without[weights], straight[weights])


def test_the_server_against_a_plain_loop() -> None:
    chosen, state, uploads = sent_in_round(1)
    uploads[NODES][:, 3] = 0  # no client has a train node with a link of its type 3
    uploads[NODES][0, 1] = 0
    after = model_part(chosen.aggregate(state, uploads, NO_RNG))
    before, sent, weight = model_part(state), uploads.model, uploads["weight"]
    match = [dict[int, int]() for _ in range(4)]
    for k in range(4):
        cosine = F.cosine_similarity(
            before[CENTROIDS].unsqueeze(1), sent[CENTROIDS][k].unsqueeze(0), dim=2
        )
        pairs = sorted(np.ndindex(4, 4), key=lambda pair: -cosine[pair].item())
        for server, client in pairs:
            if server not in match[k] and client not in match[k].values():
                match[k][server] = client
    for name, value in sent.items():
        for t in range(4):
            matched = [value[k][match[k][t]] for k in range(4) if value.dim() > 2]
            if name == CENTROIDS:
                torch.testing.assert_close(after[name][t], torch.stack(matched).mean(dim=0))
            elif name.startswith(TYPED):
                kept = [m for k, m in enumerate(matched) if uploads[NODES][k, match[k][t]] > 0]
                wanted = torch.stack(kept).mean(dim=0) if kept else before[name][t]
                torch.testing.assert_close(after[name][t], wanted)
        if name != CENTROIDS and not name.startswith(TYPED):
            total = sum(weight[k] * value[k] for k in range(4)) / weight.sum()
            torch.testing.assert_close(after[name], total)


def test_nodes_by_type_counts_train_nodes_with_such_a_link() -> None:
    simulation = simulate(method(), small_federation(), 1)
    local, chosen = simulation.trained(), simulation.method
    assert isinstance(chosen, FedLit)
    found = chosen.nodes_by_type(local)
    cohort, links = local.cohort, links_of(local.cohort)
    assert isinstance(cohort.x, Tensor)
    h = cohort.segments.matmul(cohort.x, local.params["project.weight"])
    h = h + cohort.segments.expand(local.params["project.bias"])
    e = links.embed(h, "symmetric")
    types = assign(e, local.params[CENTROIDS], links.segments).tolist()
    ends = [{v for v, t in zip((*links.low.tolist(), *links.high.tolist()), types * 2, strict=True)
             if t == wanted} for wanted in range(4)]  # fmt: skip
    for k in range(4):
        train = {v for v in cohort.train_nodes.tolist() if cohort.segments.owner[v] == k}
        assert found[k].tolist() == [len(train & nodes) for nodes in ends]


# Ablations ---------------------------------------------------------------------------------------


def test_channels_start_equal_and_part() -> None:
    simulation = simulate(method(), small_federation())
    weights = model_part(simulation.states[0])["channels.weights.1"]
    assert all(torch.equal(weights[0], weights[t]) for t in range(4))
    simulation.advance()
    weights = model_part(simulation.states[0])["channels.weights.1"]
    assert not torch.allclose(weights[0], weights[1])


def test_types_differ_from_one_type_and_from_random_ones() -> None:
    federation = small_federation()
    forms = [method(), method(types=1), method(assignment="random")]
    runs = [simulate(form, federation, 3) for form in forms]
    first, *others = [run.predict(run.received()) for run in runs]
    assert all(not torch.allclose(first, other) for other in others)


@pytest.mark.parametrize("form", [{}, {"types": 1}, {"assignment": "random"}], ids=str)
def test_what_has_no_effect_changes_nothing(form: dict[str, Any]) -> None:
    chosen = method(**form)
    idle = chosen.without_effect()
    for name in idle:
        assert not changes_predictions(chosen, name), name
    for name in sorted({"types", "embedding", "self_path", "iterations"} - set(idle)):
        assert changes_predictions(chosen, name), name
