"""The parts of FedHERO, each against a computation written out here."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from builders import (
    CPU,
    dense_adjacency,
    dense_features,
    of_client,
    random_cohort,
    random_graph,
    random_graphs,
    random_parameters,
    with_features,
)
from cases import SIZES, assert_close, federation_of, simulate, small_federation, weights_of
from polyphily.core.cohort import Cohort
from polyphily.core.local import Local
from polyphily.core.messages import Uploads, model_part
from polyphily.core.method import check_effects, create
from polyphily.engines.simulation import Simulation
from polyphily.errors import UserError
from polyphily.graphs.graph import Graph
from polyphily.methods.fedhero import FedHERO, distances, neighbours, search
from polyphily.methods.fedhero.distances import FeatureDistances
from polyphily.methods.fedhero.latent import LatentGraph
from polyphily.methods.fedhero.neighbours import Neighbours
from polyphily.methods.fedhero.network import DualChannel, WithLatent
from polyphily.methods.fedhero.sampled import SampledGraph, pair_words
from polyphily.methods.fedhero.search import Block, nearest, row_blocks, strongest
from polyphily.methods.fedhero.structure import LEARNERS
from polyphily.nn.backbones import Shape, build
from polyphily.nn.draws import Streams
from polyphily.nn.segments import Segments

NO_RNG = np.random.default_rng(0)
SHAPE = Shape(features=6, classes=3, hidden=8, layers=2, dropout=0.0, heads=4)


PAPER = {
    "paper": True,
    "scale": "edges",
    "unit_features": True,
    "weights": "similarity",
    "refresh": "round",
}


def method_with(**options: object) -> FedHERO:
    """The paper's network and learner with weighted edges and a scaled regulariser, and options.

    `test_fedhero_equations.py` is about the paper's form itself.
    """
    method = create("fedhero", {**PAPER, **options})
    assert isinstance(method, FedHERO)
    return method


def network_of(
    cohort: Cohort, backbone: str = "gcn", **options: object
) -> tuple[DualChannel, dict[str, Tensor]]:
    """A network, and random parameters that differ from client to client."""
    network = method_with(width=5, **options).build(backbone, SHAPE, 0).double()
    assert isinstance(network, DualChannel)
    params = random_parameters(network, len(cohort))
    return network, {n: p.requires_grad_() for n, p in params.items()}


def run(network: DualChannel, params: dict[str, Tensor], cohort: Cohort) -> WithLatent:
    output = functional_call(network, params, (cohort,))
    assert isinstance(output, WithLatent)
    return output


def dense(latent: LatentGraph | SampledGraph) -> Tensor:
    """The latent graph as a matrix."""
    if isinstance(latent, SampledGraph):
        out = torch.zeros(latent.segments.rows, latent.segments.rows, dtype=torch.float64)
        for block in row_blocks(latent.segments, latent.words):
            out[block.rows, block.nodes] = latent.drawn(block)
        return out
    near = latent.neighbours
    out = latent.weight.new_zeros(len(near.index), len(near.index))
    return out.scatter_add(1, near.index, latent.weight)


def gcn_matrix(graph: Graph) -> Tensor:
    a = dense_adjacency(graph)
    a = a + torch.eye(len(a))
    scale = a.sum(dim=1).rsqrt()
    return scale[:, None] * a * scale


def embedding(params: dict[str, Tensor], graph: Graph, k: int) -> Tensor:
    """The learner's z: one graph convolution of the raw features."""
    weight, bias = params["learner.encoder.weight"][k], params["learner.encoder.bias"][k]
    return gcn_matrix(graph) @ dense_features(graph) @ weight + bias


def similarity(params: dict[str, Tensor], graph: Graph, k: int) -> Tensor:
    """Eq. (3), all pairs, head by head."""
    z = embedding(params, graph, k)
    left, right = params["learner.left"][k], params["learner.right"][k]
    return torch.stack(
        [
            F.cosine_similarity((left[h] * z)[:, None], (right[h] * z)[None], dim=2)
            for h in range(len(left))
        ]
    ).mean(dim=0)


def top(scores: Tensor, k: int) -> Tensor:
    """1 at the k largest of each row, the diagonal left out."""
    rest = scores.detach().clone().fill_diagonal_(-torch.inf)
    return torch.zeros_like(rest).scatter(1, rest.topk(min(k, len(rest) - 1)).indices, 1)


def blocks(matrix: Tensor, cohort: Cohort) -> list[Tensor]:
    starts = cohort.segments.pointers
    return [matrix[a:b, a:b] for a, b in pairwise(starts)]


def started(simulation: Simulation) -> Local:
    """The local view at the start of the next round, before any step."""
    local = simulation.received()
    local.params = {n: p.clone().requires_grad_() for n, p in local.params.items()}
    local.draws = local.cohort.draws(simulation.round)
    local.constants = simulation.method.prepare_round(local)
    return local


def test_the_papers_form_has_the_papers_values() -> None:
    paper = create("fedhero", {"paper": True})
    wanted = {"k": 20, "comparisons": 4, "alpha": 0.2, "smoothness": 0.1, "degree": 0.1}
    wanted |= {"learner": "weighted-cosine", "share": "global", "plain": False, "scale": "nothing"}
    assert dataclasses.asdict(paper).items() >= wanted.items()


# The latent graph --------------------------------------------------------------------------


@pytest.mark.parametrize("sparse", [False, True])
def test_the_latent_graph_is_the_top_k_of_the_weighted_cosines(sparse: bool) -> None:
    cohort = random_cohort(SIZES, sparse=sparse)
    network, params = network_of(cohort, k=6, comparisons=3)
    latent = run(network, params, cohort).latent
    for k, block in enumerate(blocks(dense(latent), cohort)):
        scores = similarity(params, cohort.graphs[k], k)
        torch.testing.assert_close(block, scores.relu() * top(scores, 6))
    assert dense(latent).count_nonzero() == sum(
        b.count_nonzero() for b in blocks(dense(latent), cohort)
    )


def test_no_node_has_more_neighbours_than_there_are_others() -> None:
    cohort = random_cohort((4, 30, 1))
    network, params = network_of(cohort, k=20)
    edges = run(network, params, cohort).latent.edges
    assert [set(part.tolist()) for part in edges.split((4, 30, 1))] == [{3}, {20}, {0}]


@pytest.mark.parametrize("rows", [1, 7, 1000])
def test_the_search_goes_by_blocks_of_rows(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cohort = random_cohort((23, 40))
    left, right = torch.randn(2, 63, 5, dtype=torch.float64, generator=torch.manual_seed(1))
    monkeypatch.setattr(search, "ROWS", rows)
    index = nearest(left, right, cohort.segments, 4)
    for start, stop in ((0, 23), (23, 63)):
        expected = top(left[start:stop] @ right[start:stop].T, 4)
        found = torch.zeros_like(expected).scatter(1, index[start:stop] - start, 1)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("numbers", [1, 2000, 1 << 24])
def test_clients_of_similar_size_may_be_searched_together(
    numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments = Segments((23, 1, 40, 3, 25, 2, 0), torch.device("cpu"))
    left, right = torch.randn(2, 94, 5, dtype=torch.float64, generator=torch.manual_seed(1))
    monkeypatch.setattr(search, "NUMBERS_GPU", numbers)
    for k in (1, 4, 50):
        together = search._nearest_together(left, right, segments, k)
        assert torch.equal(together, nearest(left, right, segments, k))


def test_the_similarity_matrix_of_a_large_client_never_exists() -> None:
    cohort = random_cohort((2500,), density=0.001)
    seen = []

    def spy(scores: Tensor, block: Block) -> Tensor:
        seen.append(scores.shape)
        return scores

    vectors = torch.randn(cohort.num_nodes, 2)
    nearest(vectors, vectors, cohort.segments, 3, spy)
    assert {columns for _, columns in seen} == {2500}
    assert sum(rows for rows, _ in seen) == 2500
    assert max(rows for rows, _ in seen) <= 1024


@pytest.mark.parametrize("numbers", [1, 1 << 18])
def test_products_and_weighted_sums_have_the_right_gradients(
    numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, "NUMBERS", numbers)
    cohort = random_cohort((7, 4))
    source = torch.manual_seed(2)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=source).requires_grad_()

    x, y, metric, weight = noise(11, 3), noise(11, 3), noise(2, 4, 3), noise(11, 5)
    near = Neighbours.of(nearest(x, y, cohort.segments, 5))
    expected = torch.einsum(
        "nhd,nkd->nkh", x[:, None] * metric[cohort.segments.owner], y[near.index]
    )
    torch.testing.assert_close(near.products(x, y, (metric, cohort.segments)), expected)
    torch.testing.assert_close(
        near.weighted_sum(weight, x), torch.einsum("nk,nkd->nd", weight, x[near.index])
    )
    assert torch.autograd.gradcheck(
        lambda a, b, m: near.products(a, b, (m, cohort.segments)), (x, y, metric)
    )
    assert torch.autograd.gradcheck(near.products, (x, y))
    assert torch.autograd.gradcheck(near.weighted_sum, (weight, x))


def test_latent_convolutions_are_normalised_by_row() -> None:
    cohort = random_cohort((9, 1))
    network, params = network_of(cohort, k=3)
    latent = run(network, params, cohort).latent
    a, x = dense(latent), torch.randn(10, 4, dtype=torch.float64)
    looped = a + torch.eye(10)
    torch.testing.assert_close(latent.gcn @ x, looped / looped.sum(dim=1, keepdim=True) @ x)
    torch.testing.assert_close(latent.random_walk @ x, latent.gcn @ x)
    torch.testing.assert_close(latent.mean @ x, a / a.sum(dim=1, keepdim=True).clamp(min=1e-9) @ x)
    assert (latent.mean @ x)[9].count_nonzero() == 0


def test_binary_edges_pass_the_similaritys_gradient() -> None:
    cohort = random_cohort(SIZES)
    network, params = network_of(cohort, k=6, weights="one")
    latent = run(network, params, cohort).latent
    assert isinstance(latent, LatentGraph)
    assert torch.equal(latent.weight, latent.neighbours.filled.double())
    weighted, _ = network_of(cohort, k=6)
    coefficient = torch.randn(latent.weight.shape, dtype=torch.float64)
    one = torch.autograd.grad((latent.weight * coefficient).sum(), params["learner.left"])[0]
    _, score = functional_call(
        weighted.learner,
        {n.removeprefix("learner."): p for n, p in params.items() if n.startswith("learner.")},
        (cohort, 6),
    )
    plain = torch.autograd.grad((score * coefficient).sum(), params["learner.left"])[0]
    torch.testing.assert_close(one, plain)


# Structure learners ------------------------------------------------------------------------


def all_scores(learner: str, params: dict[str, Tensor], graph: Graph, k: int) -> Tensor:
    """What each learner gives every pair, from its definition; -inf where no edge may be."""
    a = dense_adjacency(graph)
    if learner == "glcn":
        z = dense_features(graph) @ params["learner.encoder.weight"][k]
        gaps = (z[:, None] - z[None]).abs()
        raw = (gaps @ params["learner.compare"][k]).squeeze(2).relu()
        return torch.nan_to_num(raw.masked_fill(a == 0, -torch.inf).softmax(dim=1))
    z = embedding(params, graph, k)
    if learner == "cosine":
        return F.cosine_similarity(z[:, None], z[None], dim=2)
    if learner == "attention":
        query, key = z @ params["learner.query"][k], z @ params["learner.key"][k]
        return torch.sigmoid(query @ key.T / z.shape[1] ** 0.5)
    if learner == "gaug":
        return 0.5 * torch.sigmoid(z @ z.T) + 0.5 * a
    target, source = z @ params["learner.target"][k], z @ params["learner.source"][k]
    raw = F.leaky_relu(target[:, None] + source[None], 0.2)
    masked = raw.masked_fill(a[..., None] == 0, -torch.inf)
    return torch.nan_to_num(masked.softmax(dim=1)).mean(dim=2)


@pytest.mark.parametrize("learner", ["cosine", "attention", "gaug"])
def test_a_learner_over_all_pairs_is_its_formula(learner: str) -> None:
    cohort = random_cohort(SIZES, density=0.2)
    network, params = network_of(cohort, k=5, learner=learner)
    for k, block in enumerate(blocks(dense(run(network, params, cohort).latent), cohort)):
        scores = all_scores(learner, params, cohort.graphs[k], k)
        torch.testing.assert_close(block, scores.relu() * top(scores, 5))


@pytest.mark.parametrize("learner", ["gat", "glcn"])
@pytest.mark.parametrize("kept", [2, 23])
def test_a_learner_on_the_given_edges_is_its_formula(learner: str, kept: int) -> None:
    cohort = random_cohort(SIZES, density=0.4)
    network, params = network_of(cohort, k=kept, learner=learner)
    for k, block in enumerate(blocks(dense(run(network, params, cohort).latent), cohort)):
        scores = all_scores(learner, params, cohort.graphs[k], k)
        torch.testing.assert_close(block, scores * (block != 0))
        best = scores.topk(min(kept, len(scores)), dim=1).values  # ReLU leaves ties
        found = block.topk(min(kept, len(scores)), dim=1).values
        torch.testing.assert_close(found, best)
        assert (block.count_nonzero(dim=1) <= kept).all()


def test_the_strongest_given_edges_are_kept() -> None:
    cohort = random_cohort(SIZES, density=0.4)
    edges = cohort.edges
    score = torch.rand(edges.nnz, generator=torch.manual_seed(0))
    index = strongest(edges, score, cohort.segments, 3)
    for node in range(cohort.num_nodes):
        mine = (edges.row == node).nonzero().view(-1)
        kept = mine[score[mine].argsort(descending=True)[:3]]
        found = [v for v in index[node].tolist() if v != node]
        assert sorted(found) == sorted(edges.col_long[kept].tolist())


@pytest.mark.parametrize("learner", sorted(LEARNERS))
def test_the_classification_loss_reaches_every_parameter_of_the_learner(learner: str) -> None:
    method = method_with(learner=learner, smoothness=0, degree=0, k=4)
    simulation = simulate(method, small_federation())
    local = started(simulation)
    loss = method.loss(local).sum()
    grads = torch.autograd.grad(loss, list(local.params.values()), materialize_grads=True)
    for name, grad in zip(local.params, grads, strict=True):
        unused = {"learner.encoder.bias", "learner.target"} if learner in ("gat", "glcn") else set()
        if name not in unused:  # a softmax over a row cancels what is the same in all of it
            assert grad.abs().sum() > 0, name


@pytest.mark.parametrize("learner", sorted(LEARNERS))
@pytest.mark.parametrize("latent", ["topk", "bernoulli"])
def test_every_learner_serves_awkward_clients_alike_alone_and_together(
    learner: str, latent: str
) -> None:
    graphs = random_graphs((12, 1, 15), density=0.2)
    edgeless = Graph.build(
        dense_features(graphs[2]).numpy(), np.zeros((2, 0), int), graphs[2].labels
    )
    federation = federation_of([*graphs, edgeless])
    method = method_with(learner=learner, latent=latent, k=6)
    chosen = {"dropout": 0.4, "epochs": "1-3"}
    together = simulate(method, federation, 3, **chosen)
    alone = simulate(method, federation, 3, engine="sequential", **chosen)
    assert_close(weights_of(together), weights_of(alone), 1e-6)
    scores = together.predict(together.trained())
    assert scores.isfinite().all()
    torch.testing.assert_close(scores, alone.predict(alone.trained()), atol=1e-6, rtol=0)


def test_a_node_without_features_sends_no_infinite_gradient() -> None:
    graph = random_graph(9, density=0.0)
    features = dense_features(graph).numpy().astype(np.float32)
    features[3] = 0
    for given in (features, sp.csr_array(features)):
        simulation = simulate(method_with(), federation_of([with_features(graph, given)] * 2), 3)
        assert all(t.isfinite().all() for t in simulation.tensors().values())


# Bernoulli edges ---------------------------------------------------------------------------


def constant_graph(score: float, sizes: tuple[int, ...] = (40, 60)) -> SampledGraph:
    """All pairs with one score."""
    segments = Segments(sizes, torch.device("cpu"))
    words = pair_words(Streams([(0, k) for k in range(len(sizes))], CPU).of_round(0), len(sizes))
    return SampledGraph(
        lambda block: torch.full(
            (block.rows.stop - block.rows.start, block.nodes.stop - block.nodes.start),
            score,
            dtype=torch.float64,
        ),
        words,
        segments,
    )


def hashed(x: int) -> int:
    """The hash of a 32-bit word, lowbias32."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) % 2**32
    x = ((x ^ (x >> 15)) * 0x846CA68B) % 2**32
    return x ^ (x >> 16)


@pytest.mark.parametrize("numbers", [200, 1 << 19])
def test_the_numbers_of_pairs_are_hashes_whatever_the_blocks(
    numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, "NUMBERS", numbers)
    graph = constant_graph(0.5, (9, 14))
    for block in row_blocks(graph.segments, graph.words):
        found = graph.noise(block)
        first, second = (int(w) % 2**32 for w in graph.words[block.client])
        size = block.nodes.stop - block.nodes.start
        for u in range(found.shape[0]):
            for v in range(size):
                word = hashed((block.diagonal + u) * size + v + first & 0xFFFFFFFF)
                assert found[u, v].item() == (hashed(word ^ second) >> 8) / 2**24


@pytest.mark.parametrize("score", [-0.4, 0.0, 0.3, 1.0, 1.7])
def test_bernoulli_edges_are_drawn_with_the_similarity_as_probability(score: float) -> None:
    graph = constant_graph(score)
    pairs = [part.masked_select(~torch.eye(len(part)).bool()) for part in drawn_blocks(graph)]
    assert set(torch.cat(pairs).tolist()) <= {0.0, 1.0}
    chance = min(max(score, 0), 1)
    for part in pairs:  # four standard deviations
        assert abs(part.mean().item() - chance) <= 4 * (chance * (1 - chance) / len(part)) ** 0.5
    assert all(part.diagonal().count_nonzero() == 0 for part in drawn_blocks(graph))


def drawn_blocks(graph: SampledGraph) -> list[Tensor]:
    return [dense(graph)[a:b, a:b] for a, b in pairwise(graph.segments.pointers)]


def test_draws_differ_between_rows_clients_and_words() -> None:
    graph = constant_graph(0.5, (30, 30))
    other = dataclasses.replace(graph, words=graph.words + 1)
    one, two = drawn_blocks(graph)
    for a, b in ((one, two), (one, one.T), (one[:-1], one[1:]), (one, drawn_blocks(other)[0])):
        assert 0.4 < (a == b).double().mean().item() < 0.6


@pytest.mark.parametrize("learner", sorted(LEARNERS))
@pytest.mark.parametrize("numbers", [50, 1 << 19])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("table", [0, 1 << 22])
def test_bernoulli_edges_come_from_all_pairs_with_the_gradient_of_their_scores(
    learner: str, numbers: int, sparse: bool, table: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, "NUMBERS", numbers)
    monkeypatch.setattr(distances, "TABLE", table)
    cohort = random_cohort((12, 1, 7), density=0.3, sparse=sparse)
    network, params = network_of(cohort, learner=learner, latent="bernoulli")
    words = pair_words(cohort.draws(3), 3)
    output = functional_call(network, params, (cohort, None, None, words))
    latent = output.latent
    assert isinstance(latent, SampledGraph)
    between = FeatureDistances(cohort.x, cohort.segments, unit=False)
    terms = latent.sum_over_edges(lambda w, d: w * (0.7 * d + 0.3 * w), between)
    found = output.logits.square().sum() + terms.sum()
    expected = torch.zeros((), dtype=torch.float64)
    for k, drawn in enumerate(blocks(dense(latent), cohort)):
        graph = cohort.graphs[k]
        scores = (
            similarity(params, graph, k)
            if learner == "weighted-cosine"
            else all_scores(learner, params, graph, k)
        )
        chance = scores.clamp(0, 1) * (1 - torch.eye(len(scores)))
        noise = latent.noise(Block(k, slice(0, len(scores)), slice(0, len(scores))))
        a = (noise < chance).double() + (chance - chance.detach())
        assert torch.equal(drawn, a)
        logits = expected_logits(params, graph, a, k, 0.2, "local_convs")
        torch.testing.assert_close(output.logits[cohort.segments.owner == k], logits)
        x = dense_features(graph)
        gaps = (x[:, None] - x[None]).square().sum(dim=2)
        expected = expected + logits.square().sum() + (a * (0.7 * gaps + 0.3 * a)).sum()
    torch.testing.assert_close(found, expected)
    names = list(params)
    grads = (
        torch.autograd.grad(value, [params[n] for n in names], materialize_grads=True)
        for value in (found, expected)
    )
    for name, mine, theirs in zip(names, *grads, strict=True):
        torch.testing.assert_close(mine, theirs, msg=name)


def test_bernoulli_operators_are_normalised_by_row() -> None:
    cohort = random_cohort((9, 1))
    network, params = network_of(cohort, latent="bernoulli")
    latent = run(network, params, cohort).latent
    a, x = dense(latent), torch.randn(10, 4, dtype=torch.float64)
    looped = a + torch.eye(10)
    torch.testing.assert_close(latent.gcn @ x, looped / looped.sum(dim=1, keepdim=True) @ x)
    torch.testing.assert_close(latent.random_walk @ x, latent.gcn @ x)
    torch.testing.assert_close(latent.mean @ x, a / a.sum(dim=1, keepdim=True).clamp(min=1) @ x)
    torch.testing.assert_close(latent.edges, a.sum(dim=1))


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor that an operation returns."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, Tensor):
                self.numbers = max(self.numbers, value.numel())
        return result


@pytest.mark.parametrize("sparse", [False, True])
def test_no_step_holds_all_pairs_of_a_client(sparse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "NUMBERS", 1 << 16)
    monkeypatch.setattr(distances, "TABLE", 0)
    nodes = 800
    graphs = random_graphs((nodes, 3), density=0.005, sparse=sparse)
    method = method_with(latent="bernoulli")
    simulation = simulate(method, federation_of(graphs))
    local = started(simulation)
    with Largest() as seen:
        loss = method.loss(local).sum()
        torch.autograd.grad(loss, list(local.params.values()), materialize_grads=True)
    assert 1 << 15 < seen.numbers < nodes**2 / 4


def test_bernoulli_draws_belong_to_a_client_and_a_round() -> None:
    simulation = simulate(method_with(latent="bernoulli"), small_federation())
    local = started(simulation)
    words = local.constants["words"]
    assert words.shape == (4, 2)
    assert words.unique().numel() == 8
    alone = dataclasses.replace(
        local, cohort=local.cohort.take([2]), draws=local.cohort.take([2]).draws(0)
    )
    assert torch.equal(simulation.method.prepare_round(alone)["words"], words[2:3])
    local.draws = local.cohort.draws(1)
    assert not torch.equal(simulation.method.prepare_round(local)["words"], words)


def evaluated(simulation: Simulation, params: dict[str, Tensor]) -> Tensor:
    """Scores with given parameters."""
    view = simulation.received()
    view.params = params
    return simulation.predict(view)


def test_evaluation_draws_follow_from_seed_and_client_alone() -> None:
    method = method_with(latent="bernoulli")
    federation = small_federation()
    first = simulate(method, federation)
    params = random_parameters(first.network, 4)
    scores = evaluated(first, params)
    assert torch.equal(evaluated(first, params), scores)
    later = simulate(method, federation, 2, epochs="1-3")
    torch.testing.assert_close(evaluated(later, params), scores)
    alone = simulate(method, federation, engine="sequential")
    torch.testing.assert_close(evaluated(alone, params), scores)
    rows = slice(*first.cohort.segments.pointers[2:4])
    single = Cohort(
        first.cohort.graphs[2:3], first.cohort.keys[2:3], first.cohort.classes, dtype=torch.float64
    )
    one = functional_call(first.network, of_client(params, 2), (single,)).logits
    torch.testing.assert_close(one, scores[rows])
    other = simulate(method, dataclasses.replace(federation, seed=1))
    assert not torch.allclose(evaluated(other, params), scores)


def test_evaluation_does_not_take_the_draws_of_a_round() -> None:
    simulation = simulate(method_with(latent="bernoulli"), small_federation())
    local = started(simulation)
    trained = functional_call(
        local.network, local.params, (local.cohort, None, None, local.constants["words"])
    )
    assert not torch.allclose(simulation.predict(simulation.received()), trained.logits)


# The dual channel --------------------------------------------------------------------------


def expected_logits(
    params: dict[str, Tensor], graph: Graph, latent: Tensor, k: int, alpha: float, local: str
) -> Tensor:
    """Eq. (5) and (6) for client k, GCN channels."""
    p = {n: t[k] for n, t in params.items()}
    x = dense_features(graph)
    looped = latent + torch.eye(len(latent))
    smooth = looped / looped.sum(dim=1, keepdim=True)
    z = torch.relu(x @ p["projection.weight"] + p["projection.bias"])
    parts = [x, z]
    for layer in range(2):
        mine, shared = f"{local}.{layer}.", f"global_convs.{layer}."
        e = gcn_matrix(graph) @ z @ p[mine + "weight"] + p[mine + "bias"]
        h = smooth @ z @ p[shared + "weight"] + p[shared + "bias"]
        z = torch.relu(alpha * e + (1 - alpha) * h)
        parts.append(z)
    weight = torch.cat([p["classifier.ego.weight"], p["classifier.layers.weight"]])
    return torch.cat(parts, dim=1) @ weight + p["classifier.layers.bias"]


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("dual", [True, False])
def test_the_network_is_that_of_the_paper(sparse: bool, dual: bool) -> None:
    cohort = random_cohort(SIZES, sparse=sparse)
    network, params = network_of(cohort, k=4, alpha=0.3, dual_channel=dual)
    assert dual == any(name.startswith("local_convs") for name in params)
    output = run(network, params, cohort)
    local = "local_convs" if dual else "global_convs"
    parts = torch.split(output.logits, SIZES)
    for k, latent in enumerate(blocks(dense(output.latent), cohort)):
        expected = expected_logits(params, cohort.graphs[k], latent, k, 0.3, local)
        torch.testing.assert_close(parts[k], expected)


@pytest.mark.parametrize(
    ("backbone", "local", "shared"),
    [
        ("mlp", "Linear", "GCNConv"),
        ("gcn", "GCNConv", "GCNConv"),
        ("sage", "SAGEConv", "SAGEConv"),
        ("gat", "GATConv", "GCNConv"),
        ("acm-gcn", "ACMConv", "ACMConv"),
    ],
)
def test_the_backbone_chooses_the_convolutions(backbone: str, local: str, shared: str) -> None:
    network = method_with().build(backbone, SHAPE, 0)
    assert isinstance(network, DualChannel)
    assert {type(conv).__name__ for conv in network.local_convs} == {local}
    assert {type(conv).__name__ for conv in network.global_convs} == {shared}
    assert network.describe() == f"dual channel of {backbone}"


def test_alpha_turns_a_channel_off() -> None:
    cohort = random_cohort(SIZES)
    for alpha, off, on in ((1.0, "global", "local"), (0.0, "local", "global")):
        network, params = network_of(cohort, alpha=alpha)
        names = [f"{part}_convs.{layer}.weight" for part in (off, on) for layer in (0, 1)]
        loss = run(network, params, cohort).logits.square().sum()
        grads = torch.autograd.grad(loss, [params[n] for n in names], materialize_grads=True)
        assert [bool(g.any()) for g in grads] == [False, False, True, True]


# The loss ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("table", [0, 1 << 22])
@pytest.mark.parametrize("unit", [False, True])
def test_feature_distances(
    sparse: bool, table: int, unit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distances, "TABLE", table)
    monkeypatch.setattr(neighbours, "NUMBERS", 40)
    cohort = random_cohort(SIZES, sparse=sparse)
    noise = torch.randn(sum(SIZES), 3, dtype=torch.float64)
    index = nearest(noise, noise, cohort.segments, 5)
    x = torch.cat([dense_features(graph) for graph in cohort.graphs])
    x = F.normalize(x) if unit else x
    expected = (x[:, None] - x[index]).square().sum(dim=2)
    found = FeatureDistances(cohort.x, cohort.segments, unit=unit)(index)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("scale", ["edges", "pairs", "nothing"])
@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("refresh", ["round", "step"])
def test_the_loss_is_cross_entropy_and_the_regulariser(
    scale: str, unit: bool, refresh: str
) -> None:
    method = method_with(
        smoothness=0.7, degree=0.3, scale=scale, unit_features=unit, k=5, refresh=refresh
    )
    simulation = simulate(method, small_federation(), 2)
    local = started(simulation)
    loss = method.loss(local)
    output = run(simulation.network, local.params, local.cohort)  # type: ignore[arg-type]
    plain = local.cross_entropy(output.logits)
    for k, a in enumerate(blocks(dense(output.latent), local.cohort)):
        x = dense_features(local.cohort.graphs[k])
        x = F.normalize(x) if unit else x
        total = 0.7 * (a * torch.cdist(x, x).square()).sum() + 0.3 * a.square().sum()
        count = {"edges": len(a) * 5, "pairs": len(a) ** 2, "nothing": 1}[scale]
        assert loss[k].item() == pytest.approx((plain[k] + total / count).item())


def test_neighbours_are_searched_once_a_round_or_at_every_step() -> None:
    federation = small_federation((30, 25))

    def weights(refresh: str, epochs: int) -> dict[str, Tensor]:
        method = method_with(k=3, refresh=refresh)
        return weights_of(simulate(method, federation, 2, epochs=epochs))

    assert_close(weights("round", 1), weights("step", 1), 1e-12)
    with pytest.raises(AssertionError):
        assert_close(weights("round", 6), weights("step", 6), 1e-6)


# What travels ------------------------------------------------------------------------------

PARTS = {"learner", "projection", "global_convs", "local_convs", "classifier"}


@pytest.mark.parametrize(
    ("options", "travels"),
    [
        ({}, {"learner", "global_convs"}),
        ({"share_projection": True}, {"learner", "global_convs", "projection"}),
        ({"share": "none"}, set()),
        ({"share": "all"}, PARTS),
        ({"share": "task"}, {"projection", "local_convs", "classifier"}),
        (
            {"share": "task", "dual_channel": False},
            {"projection", "global_convs", "classifier"},
        ),
        ({"share": "all", "dual_channel": False}, PARTS - {"local_convs"}),
    ],
)
def test_what_is_shared(options: dict[str, object], travels: set[str]) -> None:
    simulation = simulate(method_with(**options), small_federation(), 1)
    sent = simulation.backend.train(range(4), [range(4)]).trained.uploads
    assert {name.split(".")[0] for name in model_part(sent)} == travels
    assert {name.split(".")[0] for name in model_part(simulation.states[0])} == travels
    assert bool(sent) == bool(travels)


def test_the_server_weighs_by_nodes() -> None:
    tensors = {
        "model/learner.left": torch.tensor([[1.0], [5.0]]),
        "weight": torch.tensor([30.0, 10]),
    }
    state = {"model/learner.left": torch.zeros(1)}
    after = method_with().aggregate(state, Uploads((0, 1), tensors), NO_RNG)
    assert after["model/learner.left"].item() == 2.0
    simulation = simulate(method_with(), small_federation())
    sent = simulation.backend.train(range(4), [range(4)]).trained.uploads
    assert sent["weight"].tolist() == list(SIZES)


def test_clients_keep_their_own_local_channel_and_take_the_global_one() -> None:
    simulation = simulate(method_with(), small_federation(), 3)
    received = simulation.received().params
    for name, value in received.items():
        same = all(torch.equal(value[0], other) for other in value[1:])
        assert same == name.startswith(("learner.", "global_convs.")), name
    own = model_part(simulation.memory)["classifier.ego.weight"]
    assert torch.equal(received["classifier.ego.weight"], own)


def test_unshared_clients_train_as_if_alone() -> None:
    federation = small_federation()
    method = method_with(share="none")
    together = simulate(method, federation, 3)
    alone = dataclasses.replace(federation, clients=federation.clients[1:2])
    # Streams are named by the client's place, which only dropout and Bernoulli edges use.
    assert_close(
        of_client(model_part(together.memory), 1), model_part(simulate(method, alone, 3).memory)
    )


@pytest.mark.parametrize(
    "options", [{"k": 0}, {"comparisons": 0}, {"width": 0}, {"alpha": 1.5}, {"learner": "rbf"}]
)
def test_senseless_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(UserError):
        create("fedhero", options)


def test_a_backbone_without_convolutions_is_refused() -> None:
    assert method_with().supported_backbones() == ("gcn", "sage", "acm-gcn", "gat", "mlp")
    for name in ("gpr-gnn", "unifilter", "transformer"):
        with pytest.raises(ValueError, match=name):
            method_with().build(name, SHAPE, 0)


# The plain network -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gcn", "acm-gcn", "sage", "mlp"])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_plain_network_is_the_backbone_where_the_latent_graph_has_no_weight(
    kind: str, layers: int
) -> None:
    cohort = random_cohort(SIZES, sparse=True)
    shape = Shape(cohort.num_features, 3, hidden=8, layers=layers, heads=2)
    network = create("fedhero", {"alpha": 1.0}).build(kind, shape, 0).double()
    params = random_parameters(network, len(SIZES))
    found = functional_call(network, params, (cohort,)).logits
    backbone = build(kind, shape, 0).double()
    own = {n.removeprefix("local_"): p for n, p in params.items() if n.startswith("local_convs.")}
    expected = functional_call(backbone, own, (cohort,)).logits
    torch.testing.assert_close(found, expected)
    mixed = create("fedhero", {"alpha": 0.5}).build(kind, shape, 0).double()
    assert not torch.allclose(functional_call(mixed, params, (cohort,)).logits, expected)


def test_everything_of_the_plain_network_travels_and_learns() -> None:
    simulation = simulate("fedhero", small_federation(), 1)
    before = {n: t.clone() for n, t in model_part(simulation.memory).items()}
    simulation.advance()
    after = model_part(simulation.states[0])
    assert set(after) == set(before)
    assert {name.split(".")[0] for name in after} == {"learner", "global_convs", "local_convs"}
    for name, value in model_part(simulation.memory).items():
        assert not torch.equal(value, before[name]), name


# Options without effect --------------------------------------------------------------------

OTHER = {
    "weighting": ["train", "uniform"],
    "k": [3],
    "comparisons": [2],
    "width": [7],
    "alpha": [0.4],
    "smoothness": [0.3],
    "degree": [0.3],
    "scale": ["edges", "pairs", "nothing"],
    "unit_features": [True, False],
    "learner": sorted(LEARNERS),
    "latent": ["topk", "bernoulli"],
    "weights": ["similarity", "one"],
    "refresh": ["round", "step"],
    "plain": [True, False],
    "dual_channel": [True, False],
    "share": ["global", "none", "all", "task"],
    "share_projection": [True, False],
}
BASES: list[dict[str, object]] = [
    {},
    {"paper": True},
    {"paper": True, "latent": "bernoulli"},
    {"latent": "bernoulli", "share": "global"},
    {"paper": True, "weights": "similarity", "share": "none"},
    {"paper": True, "share": "task"},
    {"paper": True, "dual_channel": False},
    {"smoothness": 0},
    {"paper": True, "smoothness": 0, "degree": 0},
    {"alpha": 1},
    {"paper": True, "alpha": 1},
    {"alpha": 0},
    {"alpha": 0, "share": "task"},
    {"paper": True, "alpha": 0},
    *[{"paper": True, "learner": learner} for learner in ("attention", "gat", "glcn", "gaug")],
]
FEW = {"k": 2, "width": 4}


def outcome(settings: dict[str, object]) -> dict[str, Tensor]:
    """Weights and predictions after two rounds of two steps."""
    sizes = (14, 9)
    method = create("fedhero", {**settings, **{n: v for n, v in FEW.items() if n not in settings}})
    simulation = simulate(method, small_federation(sizes), 2, weight_decay=0.0)
    found = {"predictions": simulation.predict(simulation.trained())}
    return found | simulation.tensors()


def differ(a: dict[str, Tensor], b: dict[str, Tensor], only: str = "") -> bool:
    names = [n for n in a.keys() | b.keys() if n.startswith(only)]
    return any(n not in a or n not in b or not torch.equal(a[n], b[n]) for n in names)


@pytest.mark.parametrize("base", BASES, ids=lambda b: " ".join(f"{n}={v}" for n, v in b.items()))
def test_a_hyperparameter_changes_something_or_is_named_as_without_effect(
    base: dict[str, object],
) -> None:
    method = create("fedhero", base)
    assert OTHER.keys() == type(method).hyperparameters().keys()
    idle, start = method.without_effect(), outcome(base)
    for name, values in OTHER.items():
        own = getattr(method, name)
        found = (outcome({**base, name: value}) for value in values if value != own)
        if name in idle:
            assert not any(differ(start, other, "predictions") for other in found), name
            with pytest.raises(UserError, match=f"'{name}' has no effect here: .*set "):
                check_effects(method, [name])
        else:
            assert any(differ(start, other) for other in found), name
            check_effects(method, [name])


def test_what_the_default_form_leaves_without_effect() -> None:
    assert create("fedhero").without_effect().keys() == {"comparisons", "share_projection"}
    assert create("fedhero", {"paper": True}).without_effect() == {}
    drawn = create("fedhero", {"paper": True, "latent": "bernoulli"}).without_effect()
    assert drawn.keys() == {"k", "weights"}
