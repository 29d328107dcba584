"""FedGNN: keys and their matches, the expanded last layer, noise, and its equality to FedAvg."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from builders import cohort_of, dense_adjacency, dense_features, random_graph
from cases import assert_close, assert_same_bits, simulate, small_federation
from effects import changes_predictions
from polyphily.core.messages import Uploads, model_part
from polyphily.core.method import Method, create
from polyphily.engines.simulation import Simulation
from polyphily.errors import UserError
from polyphily.graphs.graph import Graph
from polyphily.graphs.loading import Federation, load
from polyphily.methods.fedgnn import FedGNN
from polyphily.methods.fedgnn.matching import Slots, match, neighbourhoods
from polyphily.methods.fedgnn.method import MATCHED, MATCHES, laplace
from polyphily.nn.backbones import Shape
from polyphily.testing.examples import of_client, with_clients

SLOTS = 12
OWN = {"keys", "embeddings", "copies", MATCHED, MATCHES}  # what FedAvg has not


def overlapping(seed: int = 0) -> Federation:
    """Return three clients that share nodes; the first two have some with equal neighbours."""
    whole = replace(random_graph(30, density=0.06, seed=seed), masks=None).with_ids()
    parts = [np.arange(22), np.arange(4, 26)[::-1].copy(), np.arange(12, 30)]
    graphs = [whole.subgraph(part, f"client-{k}") for k, part in enumerate(parts)]
    return load(graphs, seed=seed, split="0.5,0.25,0.25:client")


def without_ids(federation: Federation) -> Federation:
    return with_clients(federation, [replace(g, node_ids=None) for g in federation.clients])


def neighbours(graph: Graph) -> list[frozenset[int]]:
    """Return the ids of each node's neighbours."""
    assert graph.node_ids is not None
    found: list[set[int]] = [set() for _ in range(graph.num_nodes)]
    for u, v in graph.edges.T.tolist():
        found[u].add(int(graph.node_ids[v]))
    return [frozenset(own) for own in found]


def fedgnn(**settings: Any) -> Method:
    return create("fedgnn", {"slots": SLOTS + 20, **settings})


def same_as_fedavg(simulation: Simulation, other: Simulation) -> bool:
    """Return whether all that FedAvg has is the same to the bit."""
    found = simulation.tensors()
    return all(torch.equal(value, found[name]) for name, value in other.tensors().items())


# Keys --------------------------------------------------------------------------------------------


def test_equal_hashes_mean_equal_neighbours() -> None:
    graphs = overlapping().clients
    sets = [own for graph in graphs for own in neighbours(graph)]
    hashes = np.concatenate([neighbourhoods(graph, "a key") for graph in graphs])
    for one, first in zip(sets, hashes, strict=True):
        assert (first < 0) == (not one)
        for two, second in zip(sets, hashes, strict=True):
            assert (first == second) == (one == two)


def test_hashes_need_the_key_and_ids() -> None:
    graph = overlapping().clients[0]
    hashes = neighbourhoods(graph, "one")
    known = hashes >= 0
    assert known.any()
    assert not np.intersect1d(hashes[known], neighbourhoods(graph, "two")).size
    assert (neighbourhoods(replace(graph, node_ids=None), "one") == -1).all()


def test_a_client_with_too_many_keys_takes_the_lowest() -> None:
    cohort = cohort_of(overlapping().clients)
    few, all_of_them = (Slots.of(cohort, number, "") for number in (3, SLOTS + 20))
    assert torch.equal(few.keys, all_of_them.keys[:, :3])
    first = all_of_them.keys[0]
    used = int((all_of_them.copies[0] > 0).sum())
    whole = (first[:used] * torch.tensor([2.0**40, 2.0**20, 1.0])).sum(dim=1)
    assert (whole.diff() > 0).all()


def test_slots_hold_the_mean_of_their_nodes() -> None:
    star = np.array([[0, 0, 0], [1, 2, 3]])  # three leaves have the same neighbours
    graph = Graph.build(
        np.ones((5, 1), np.float32), star, np.zeros(5, np.int64), node_ids=np.arange(5)
    )
    masks = random_graph(5).masks
    slots = Slots.of(cohort_of([replace(graph, masks=masks)]), 4, "")
    assert sorted(slots.copies[0].tolist()) == [0, 0, 1, 3]  # no slot for the isolated node
    means = slots.means(torch.tensor([[10.0], [1], [2], [6], [99]]).double())
    assert means[0, slots.copies[0] == 3].item() == pytest.approx(3)
    assert means[0, slots.copies[0] == 1].item() == 10


# Matching at the third party ---------------------------------------------------------------------


def test_matches_are_the_nodes_with_the_same_neighbours_elsewhere() -> None:
    simulation = simulate(fedgnn(), overlapping(), 1)
    local = simulation.trained()
    method = simulation.method
    assert isinstance(method, FedGNN)
    slots = method.own_slots(local.cohort)
    embedding = local.frozen(local.params).embedding
    state = simulation.states[0]
    sets = [own for graph in local.cohort.graphs for own in neighbours(graph)]
    owner = local.cohort.segments.owner
    members, some = slots.members.transposed, 0
    for node, own in enumerate(sets):
        twins = [u for u, other in enumerate(sets) if own == other and owner[u] != owner[node]]
        if not own:
            assert members.crow[node] == members.crow[node + 1]
            continue
        some += len(twins)
        slot = int(members.col[int(members.crow[node])])
        assert state[MATCHES].view(-1)[slot].item() == len(twins)
        found = state[MATCHED].flatten(0, 1)[slot]
        wanted = embedding[twins].mean(dim=0) if twins else torch.zeros_like(found)
        torch.testing.assert_close(found, wanted)
    assert some > 3


def test_one_shared_node_with_equal_neighbours_is_one_match_each() -> None:
    """Both clients have a path 1 - 0 - 2; one prolongs it by a node, the other closes it."""
    edges = [np.array([[0, 0, 1], [1, 2, 3]]), np.array([[0, 0, 1], [1, 2, 2]])]
    ids = [np.array([0, 1, 2, 7]), np.array([0, 1, 2])]
    graphs = [
        Graph.build(
            np.eye(len(own), 6, dtype=np.float32) + 0.1,
            ends,
            np.arange(len(own)) % 2,
            node_ids=own,
            masks=random_graph(len(own)).masks,
            name=f"site {len(own)}",
        )
        for own, ends in zip(ids, edges, strict=True)
    ]
    simulation = simulate(fedgnn(), with_clients(small_federation(), graphs), 1)
    assert simulation.states[0][MATCHES].sum(dim=1).tolist() == [1, 1]


def test_a_key_that_was_noised_matches_nothing() -> None:
    keys = torch.tensor([[[1.0, 2.0, 3.0]], [[1.0, 2.0, 3.0]], [[1.5, 2.0, 3.0]]])
    means, copies = torch.tensor([[[4.0]], [[8.0]], [[1.0]]]), torch.ones(3, 1)
    mean, number = match(keys, means, copies)
    assert number.view(-1).tolist() == [1, 1, 0]
    assert mean.view(-1).tolist() == [8, 4, 0]
    assert not match(keys + 0.1, means, copies)[1].any()


def test_the_number_of_matches_is_bounded() -> None:
    keys, copies = torch.ones(2, 1, 3), torch.tensor([[5.0], [2.0]])
    sent = {"keys": keys, "embeddings": torch.ones(2, 1, 8), "copies": copies}
    weights = {"weight": torch.ones(2)}
    method = create("fedgnn", {"slots": 1, "most": 3})
    state = method.init_server_state({"convs.0.weight": torch.zeros(6, 8)}, 2)
    model = {"model/convs.0.weight": torch.zeros(2, 6, 8)}
    uploads = Uploads((0, 1), {**model, **sent, **weights})
    after = method.aggregate(state, uploads, np.random.default_rng(0))
    assert after[MATCHES].view(-1).tolist() == [2, 3]
    assert not state["keys"].any()  # the old state is as it was


def test_clients_that_are_away_keep_what_they_sent() -> None:
    simulation = simulate(fedgnn(), overlapping(), 1)
    state, method = simulation.states[0], simulation.method
    sent = {n: torch.zeros_like(state[n][:1]) for n in ("keys", "embeddings", "copies")}
    model = {f"model/{n}": t.unsqueeze(0) for n, t in model_part(state).items()}
    uploads = Uploads((1,), {**model, **sent, "weight": torch.ones(1).double()})
    after = method.aggregate(state, uploads, np.random.default_rng(0))
    assert torch.equal(after["embeddings"][[0, 2]], state["embeddings"][[0, 2]])
    assert not after["copies"][1].any()


# The expanded graph ------------------------------------------------------------------------------


def test_the_last_layer_sees_matched_nodes_as_neighbours() -> None:
    """A dense GCN in which every match is a node of its own, with the degree of its twin."""
    federation = overlapping()
    simulation = simulate(fedgnn(), federation, 2)
    logits = simulation.predict(simulation.received())
    local, state = simulation.received(), simulation.states[0]
    slots = Slots.of(local.cohort, SLOTS + 20, "polyphily")
    slot_of = {int(v): s for s, v in zip(slots.members.row, slots.members.col, strict=True)}
    start, heard = 0, 0
    for k, graph in enumerate(federation.clients):
        own = of_client(local.params, k)
        weights = [own[f"convs.{i}.weight"][0] for i in range(2)]
        biases = [own[f"convs.{i}.bias"][0] for i in range(2)]
        loops = dense_adjacency(graph) + torch.eye(graph.num_nodes).double()
        scale = loops.sum(dim=1).rsqrt()
        hidden = scale[:, None] * loops * scale @ dense_features(graph) @ weights[0] + biases[0]
        hidden = hidden.relu()
        slot = [slot_of.get(start + v, -1) for v in range(graph.num_nodes)]
        further = torch.stack(
            [state[MATCHES].view(-1)[s] if s >= 0 else torch.zeros(()).double() for s in slot]
        )
        size = loops.sum(dim=1) + further
        for v in range(graph.num_nodes):
            near = torch.nonzero(loops[v]).view(-1).tolist()
            out = sum((hidden[u] / (size[u] * size[v]).sqrt() for u in near), torch.zeros(8))
            for _ in range(int(further[v])):
                out = out + state[MATCHED].flatten(0, 1)[slot[v]] / size[v]
                heard += 1
            torch.testing.assert_close(logits[start + v], out @ weights[1] + biases[1])
        start += graph.num_nodes
    assert heard > 3


def test_matches_change_what_is_trained() -> None:
    expanded = simulate(fedgnn(), overlapping(), 3)
    assert not same_as_fedavg(expanded, simulate("fedavg", overlapping(), 3))
    assert not same_as_fedavg(expanded, simulate(fedgnn(most=1, slots=2), overlapping(), 3))


def test_other_embeddings_from_elsewhere_change_predictions() -> None:
    simulation = simulate(fedgnn(), overlapping(), 2)
    view = simulation.received()
    before = simulation.predict(view)
    view.received = {**view.received, MATCHED: view.received[MATCHED].flip(1)}
    assert not torch.allclose(before, simulation.predict(view))


def test_another_graph_is_predicted_without_matches_of_the_old_one() -> None:
    simulation = simulate(fedgnn(), overlapping(), 2)
    view = simulation.received()
    assert not torch.allclose(simulation.predict(view), view.forward().logits)
    view.memory = {**view.memory, "keys": view.memory["keys"] + 1}
    torch.testing.assert_close(simulation.predict(view), view.forward().logits)


def test_the_trained_model_keeps_the_matches_it_was_trained_with() -> None:
    simulation = simulate(fedgnn(), overlapping(), 1)
    sent = simulation.download(simulation.placement.members)
    simulation.advance()
    for name in (MATCHED, MATCHES):
        assert torch.equal(simulation.memory[name], sent[name])


# FedAvg ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_disjoint_clients_train_as_fedavg_does_to_the_bit(dtype: str) -> None:
    graph = replace(random_graph(60, density=0.06), masks=None)
    federation = load(graph, partition="random", clients=4)
    assert all(own.node_ids is not None for own in federation.clients)
    chosen: dict[str, Any] = {"dropout": 0.4, "input_dropout": 0.2, "dtype": dtype}
    ours, theirs = (simulate(m, federation, 4, **chosen) for m in (fedgnn(), "fedavg"))
    assert ours.states[0]["copies"].any()  # there are keys, but no two are equal
    assert same_as_fedavg(ours, theirs)
    assert torch.equal(ours.predict(ours.received()), theirs.predict(theirs.received()))
    assert torch.equal(ours.predict(ours.trained()), theirs.predict(theirs.trained()))
    assert "trained as fedavg does" in ours.method.remarks(ours.states[0])[0]


@pytest.mark.parametrize("expand", [True, False])
def test_without_ids_or_expansion_it_is_fedavg_to_the_bit(expand: bool) -> None:
    federation = without_ids(overlapping()) if expand else overlapping()
    ours = simulate(fedgnn(expand=expand), federation, 4, dropout=0.4)
    assert same_as_fedavg(ours, simulate("fedavg", federation, 4, dropout=0.4))
    if not expand:
        assert not OWN & set(ours.tensors())


def test_remarks_count_matches_and_full_slots() -> None:
    simulation = simulate(fedgnn(slots=5), overlapping(), 1)
    first, second = simulation.method.remarks(simulation.states[0])
    matched = int((simulation.states[0][MATCHES] > 0).sum())
    assert first == f"{matched} of 15 keys have a match at another client"
    assert second.startswith("3 clients use all 5 slots")


# Engines -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [{}, {"gradient_clip": 0.1, "gradient_noise": 0.05}])
def test_matched_clients_train_alike_stacked_and_one_by_one(form: dict[str, float]) -> None:
    chosen: dict[str, Any] = {"dropout": 0.3, "participation": 0.7}
    stacked = simulate(fedgnn(**form), overlapping(), 4, **chosen)
    alone = simulate(fedgnn(**form), overlapping(), 4, engine="sequential", **chosen)
    assert_close(stacked.tensors(), alone.tensors(), 1e-8)


def test_two_seeds_side_by_side_match_within_themselves() -> None:
    federations = [overlapping(1), overlapping(2)]
    together = simulate(fedgnn(), federations, 3)
    for s, federation in enumerate(federations):
        assert_close(together.states[s], simulate(fedgnn(), federation, 3).states[0], 1e-8)


def test_a_run_with_matches_resumes() -> None:
    straight = simulate(fedgnn(), overlapping(), 2, dropout=0.3)
    saved = {n: t.clone() for n, t in straight.tensors().items()}
    straight.advance()
    resumed = simulate(fedgnn(), overlapping(), 0, dropout=0.3)
    resumed.restore(saved, 2, [])
    resumed.advance()
    assert_same_bits(straight.tensors(), resumed.tensors())


# Local differential privacy ----------------------------------------------------------------------


def test_the_papers_noise_spends_an_epsilon_of_one() -> None:
    method = create("fedgnn", {"paper": True})
    assert isinstance(method, FedGNN)
    assert method.epsilon == pytest.approx(1)


def test_the_noise_is_laplace() -> None:
    like = torch.zeros(2, 100, 1000, dtype=torch.float64)
    noise = laplace(0.2, like, cohort_of(overlapping().clients[:2]).draws(3))
    for own in noise:
        assert own.mean().item() == pytest.approx(0, abs=0.005)
        assert own.var().item() == pytest.approx(0.08, rel=0.03)
        assert own.abs().mean().item() == pytest.approx(0.2, rel=0.02)  # 0.226 if it were normal
    assert not torch.equal(noise[0], noise[1])
    assert noise.isfinite().all()


def test_gradients_are_clipped_then_noised() -> None:
    simulation = simulate(fedgnn(gradient_clip=0.1, gradient_noise=0.2), overlapping())
    local = simulation.received()
    rows = [[5.0, -5.0, 0.05], [0.0, 0.2, -0.01], [0.0] * 3]
    grads = {"w": torch.tensor(rows, dtype=torch.float64)}

    def corrected(noise: float) -> Tensor:
        local.draws = local.cohort.draws(0)  # type: ignore[attr-defined]
        return fedgnn(gradient_clip=0.1, gradient_noise=noise).correct_gradients(local, grads)["w"]

    clipped = corrected(0.0)
    assert clipped.tolist() == [[0.1, -0.1, 0.05], [0.0, 0.1, -0.01], [0.0] * 3]
    added = corrected(0.2) - clipped
    assert (added != 0).all()
    torch.testing.assert_close(corrected(0.4) - clipped, 2 * added)


def test_noise_changes_what_is_trained_and_is_drawn_anew() -> None:
    noised = simulate(fedgnn(gradient_clip=0.1, gradient_noise=0.2, expand=False), overlapping(), 2)
    assert not same_as_fedavg(noised, simulate("fedavg", overlapping(), 2))
    assert "ε = 1" in noised.method.remarks(noised.states[0])[-1]


# Hyperparameters ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{"gradient_noise": 0.1}, {"slots": 0}, {"most": 0}, {"gradient_clip": -1.0}]
)
def test_impossible_settings_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(UserError, match="fedgnn"):
        create("fedgnn", settings)


def test_one_layer_has_no_hidden_embedding_to_exchange() -> None:
    ours, theirs = (simulate(m, overlapping(), 2, layers=1) for m in (fedgnn(), "fedavg"))
    assert same_as_fedavg(ours, theirs)
    assert "one layer" in ours.method.remarks(ours.states[0])[0]


def test_without_expansion_every_backbone_is_supported() -> None:
    assert fedgnn(expand=False).build("mlp", Shape(6, 3), 0).name == "mlp"
    assert fedgnn().supported_backbones() == ("gcn",)


def test_without_expansion_its_settings_have_no_effect() -> None:
    method = fedgnn(expand=False)
    idle = method.without_effect()
    assert set(idle) == {"slots", "most", "key"}
    assert not any(changes_predictions(method, name) for name in ("slots", "most"))
    assert changes_predictions(method, "weighting")
    assert changes_predictions(method, "gradient_clip")
    other = replace(method, key="another")
    first, second = (simulate(m, overlapping(), 2).tensors() for m in (method, other))
    assert_same_bits(first, second)


def test_samples_are_refused_only_with_expansion() -> None:
    assert fedgnn().needs_whole_graph()
    assert fedgnn(expand=False).needs_whole_graph() is None
