"""FedHERO in the paper's form (`paper=on`), each equation against loops written from the paper.

The table of equations is `docs/equations/fedhero.md`.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

import polyphily.papers
from builders import dense_adjacency, dense_features, of_client, random_cohort, random_parameters
from cases import simulate, small_federation
from polyphily.core.cohort import Cohort
from polyphily.core.local import Local
from polyphily.core.messages import model_part
from polyphily.core.method import create
from polyphily.engines.simulation import Simulation
from polyphily.graphs.graph import Graph
from polyphily.methods.fedhero import FedHERO
from polyphily.methods.fedhero.latent import LatentGraph
from polyphily.methods.fedhero.network import DualChannel, WithLatent
from polyphily.methods.fedhero.sampled import SampledGraph
from polyphily.methods.fedhero.search import row_blocks
from polyphily.methods.fedhero.structure import LEARNERS
from polyphily.nn.backbones import Shape
from polyphily.nn.layers import GCNConv

SIZES = (9, 7)
SEED = 48  # no two nodes have the same neighbours, and the scores are spread
K = 3  # below the sizes, where the paper's 20 would join all nodes
SHAPE = Shape(features=6, classes=3, hidden=5, layers=2, dropout=0.0)
Params = dict[str, Tensor]


def paper_form(**options: object) -> FedHERO:
    method = create("fedhero", {"paper": True, "width": 4, **options})
    assert isinstance(method, FedHERO)
    return method


@dataclasses.dataclass
class Example:
    """Two clients, a network in the paper's form, and parameters that differ between clients."""

    method: FedHERO
    cohort: Cohort
    network: DualChannel
    params: Params

    @classmethod
    def of(cls, **options: object) -> Example:
        method = paper_form(**{"k": K, **options})
        cohort = random_cohort(SIZES, density=0.4, seed=SEED)
        network = method.build("gcn", SHAPE, 0).double()
        assert isinstance(network, DualChannel)
        params = random_parameters(network, len(cohort), seed=SEED)
        return cls(method, cohort, network, {n: p.requires_grad_() for n, p in params.items()})

    def output(self) -> WithLatent:
        output = functional_call(self.network, self.params, (self.cohort,))
        assert isinstance(output, WithLatent)
        return output

    def clients(self) -> list[tuple[int, Graph, Params, slice]]:
        """Number, graph, parameters and rows of each client."""
        rows = [slice(a, b) for a, b in pairwise(self.cohort.segments.pointers)]
        return [
            (k, graph, {n: p[k] for n, p in self.params.items()}, rows[k])
            for k, graph in enumerate(self.cohort.graphs)
        ]


# The paper, client by client ---------------------------------------------------------------------


def given_convolution(graph: Graph, z: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Eq. (1) as Kipf and Welling's layer: v's own and its neighbours' z over root degrees."""
    a = dense_adjacency(graph)
    degree = [1 + int(row.sum()) for row in a]
    rows = []
    for v in range(len(a)):
        near = [u for u in range(len(a)) if u == v or a[u, v] == 1]
        rows.append(sum(z[u] / math.sqrt(degree[u] * degree[v]) for u in near) @ weight + bias)
    return torch.stack(rows)


def latent_convolution(latent: Tensor, z: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The mean over a node and its latent neighbours, then the same update."""
    rows = []
    for u in range(len(latent)):
        total = z[u] + sum(latent[u, v] * z[v] for v in range(len(latent)))
        rows.append(total / (1 + latent[u].sum()) @ weight + bias)
    return torch.stack(rows)


def cosine(a: Tensor, b: Tensor) -> Tensor:
    return a @ b / (a.square().sum().sqrt() * b.square().sum().sqrt())


def embedding(p: Params, graph: Graph) -> Tensor:
    weight, bias = p["learner.encoder.weight"], p["learner.encoder.bias"]
    return given_convolution(graph, dense_features(graph), weight, bias)


def phi(p: Params, z: Tensor, u: int, v: int) -> Tensor:
    """Eq. (3)."""
    heads = len(p["learner.left"])
    total = sum(
        cosine(p["learner.left"][h] * z[u], p["learner.right"][h] * z[v]) for h in range(heads)
    )
    assert isinstance(total, Tensor)
    return total / heads


def scores(learner: str, p: Params, graph: Graph) -> Tensor:
    """ã_uv of all pairs by each learner of Table 4; 0 where it gives none."""
    a, count = dense_adjacency(graph), graph.num_nodes
    out = [[torch.zeros((), dtype=torch.float64)] * count for _ in range(count)]
    if learner == "glcn":
        z = dense_features(graph) @ p["learner.encoder.weight"]
    else:
        z = embedding(p, graph)
    for u in range(count):
        near = [v for v in range(count) if a[u, v] == 1]
        if learner == "gat":
            heads = p["learner.target"].shape[1]
            for h in range(heads):
                raw = {
                    v: z[u] @ p["learner.target"][:, h] + z[v] @ p["learner.source"][:, h]
                    for v in near
                }
                raised = {v: torch.exp(r if r > 0 else 0.2 * r) for v, r in raw.items()}
                for v in near:
                    out[u][v] = out[u][v] + raised[v] / sum(raised.values()) / heads
        elif learner == "glcn":
            raised = {
                v: torch.exp(torch.relu((z[u] - z[v]).abs() @ p["learner.compare"][:, 0]))
                for v in near
            }
            for v in near:
                out[u][v] = raised[v] / sum(raised.values())
        else:
            for v in range(count):
                if learner == "weighted-cosine":
                    out[u][v] = phi(p, z, u, v)
                elif learner == "cosine":
                    out[u][v] = cosine(z[u], z[v])
                elif learner == "attention":
                    query, key = z[u] @ p["learner.query"], z[v] @ p["learner.key"]
                    out[u][v] = torch.sigmoid(query @ key / math.sqrt(z.shape[1]))
                elif learner == "gaug":
                    out[u][v] = 0.5 * torch.sigmoid(z[u] @ z[v]) + 0.5 * a[u, v]
    return torch.stack([torch.stack(row) for row in out])


def kept(score: Tensor, k: int, *, ties: bool = False) -> Tensor:
    """Eq. (4) without a node itself; a pair that a learner on given edges leaves out is none."""
    out = torch.zeros_like(score)
    for u in range(len(score)):
        others = [v for v in range(len(score)) if v != u and score[u, v] != 0]
        order = sorted(others, key=lambda v: -float(score[u, v]))
        out[u, order[:k]] = 1
        if ties:
            continue
        assert len(order) <= k or score[u, order[k - 1]] - score[u, order[k]] > 1e-9
    return out


def latent_of(p: Params, graph: Graph, learner: str = "weighted-cosine", k: int = K) -> Tensor:
    """Ã, with the gradient of ã where it is 1."""
    score = scores(learner, p, graph)
    chosen = kept(score.detach(), k)
    return chosen + chosen * (score - score.detach())


def layers(
    p: Params, graph: Graph, latent: Tensor, alpha: float = 0.2, local: str = "local_convs"
) -> list[Tensor]:
    """Z^0 = f_0(X) and Z^l of Eq. (5)."""
    x = dense_features(graph)
    z = [torch.relu(x @ p["projection.weight"] + p["projection.bias"])]
    for n in range(2):
        e = given_convolution(graph, z[-1], p[f"{local}.{n}.weight"], p[f"{local}.{n}.bias"])
        shared = p[f"global_convs.{n}.weight"], p[f"global_convs.{n}.bias"]
        h = latent_convolution(latent, z[-1], *shared)
        z.append(torch.relu(alpha * e + (1 - alpha) * h))
    return z


def logits_of(p: Params, graph: Graph, latent: Tensor, local: str = "local_convs") -> Tensor:
    """f_c(COMB(X, Z^0, …, Z^L)) with concatenation."""
    z_out = torch.cat([dense_features(graph), *layers(p, graph, latent, local=local)], dim=1)
    weight = torch.cat([p["classifier.ego.weight"], p["classifier.layers.weight"]])
    return z_out @ weight + p["classifier.layers.bias"]


def smooth(graph: Graph, latent: Tensor, lam: float = 0.1, mu: float = 0.1) -> Tensor:
    """Eq. (7)."""
    x, total = dense_features(graph), torch.zeros((), dtype=torch.float64)
    for u in range(len(x)):
        for v in range(len(x)):
            total = total + lam * latent[u, v] * (x[u] - x[v]).square().sum()
            total = total + mu * latent[u, v] ** 2
    return total


def cross_entropy(graph: Graph, logits: Tensor) -> Tensor:
    assert graph.masks is not None
    nodes = graph.masks.train.nonzero()[0]
    total = torch.zeros((), dtype=torch.float64)
    for v in nodes:
        softmax = torch.exp(logits[v]) / torch.exp(logits[v]).sum()  # Eq. (6)
        total = total - torch.log(softmax[int(graph.labels[v])])
    return total / len(nodes)


def total_loss(p: Params, graph: Graph, k: int = K) -> Tensor:
    """Eq. (8)."""
    latent = latent_of(p, graph, k=k)
    return cross_entropy(graph, logits_of(p, graph, latent)) + smooth(graph, latent)


# Against the library -----------------------------------------------------------------------------


def matrix(latent: LatentGraph | SampledGraph) -> Tensor:
    """Ã of all clients as a matrix."""
    assert isinstance(latent, LatentGraph)
    count = len(latent.neighbours.index)
    out = torch.zeros(count, count, dtype=torch.float64)
    return out.scatter_add(1, latent.neighbours.index, latent.weight)


def test_the_hyperparameters_are_those_of_section_4_1() -> None:
    method = create("fedhero", {"paper": True})
    printed = {"alpha": 0.2, "smoothness": 0.1, "degree": 0.1, "k": 20, "comparisons": 4}
    form = {"weights": "one", "latent": "topk", "learner": "weighted-cosine", "plain": False}
    form |= {"scale": "nothing", "unit_features": False, "share": "global", "refresh": "step"}
    form |= {"dual_channel": True, "share_projection": False, "weighting": "nodes"}
    assert dataclasses.asdict(method) == {**printed, **form, "width": 32}
    assert method.evaluated == "personal"


def test_the_protocol_is_that_of_section_4_1() -> None:
    file = Path(polyphily.papers.__file__).with_name("fedhero.toml")
    protocol = tomllib.loads(file.read_text(encoding="utf-8"))["protocol"]
    printed = {"layers": 2, "optimizer": "adam", "lr": 0.005, "rounds": 200, "epochs": 1}
    assert protocol["settings"].items() >= printed.items()
    assert {"seeds": 5, "split": "5-fold", "over": "clients"}.items() <= protocol.items()


def test_equation_1_a_layer_aggregates_and_updates() -> None:
    cohort = random_cohort(SIZES, density=0.4)
    conv = GCNConv(6, 4).double()
    params = random_parameters(conv, 2)
    z = torch.cat([dense_features(graph) for graph in cohort.graphs])
    found = functional_call(conv, params, (z, cohort)).split(SIZES)
    for k, graph in enumerate(cohort.graphs):
        own = params["weight"][k], params["bias"][k]
        expected = given_convolution(graph, dense_features(graph), *own)
        torch.testing.assert_close(found[k], expected)


def test_section_3_1_a_one_layer_gnn_embeds_the_nodes() -> None:
    example = Example.of()
    learner = {n.removeprefix("learner."): p for n, p in example.params.items()}
    encoder = {
        n.removeprefix("encoder."): p for n, p in learner.items() if n.startswith("encoder.")
    }
    found = functional_call(
        example.network.learner.encoder, encoder, (example.cohort.x, example.cohort)
    )
    for _, graph, p, rows in example.clients():
        torch.testing.assert_close(found[rows], embedding(p, graph))


@pytest.mark.parametrize("learner", sorted(LEARNERS))
def test_equation_3_and_table_4_the_scores_of_every_learner(learner: str) -> None:
    example = Example.of(learner=learner)
    own = {
        n.removeprefix("learner."): p for n, p in example.params.items() if n.startswith("learner.")
    }
    near, score = functional_call(example.network.learner, own, (example.cohort, 5))
    assert score.abs().sum() > 0
    for _, graph, p, rows in example.clients():
        expected = scores(learner, p, graph)
        for u in range(graph.num_nodes):
            for place, v in enumerate((near.index[rows][u] - rows.start).tolist()):
                wanted = expected[u, v].item() if v != u else 0.0
                assert float(score.detach()[rows][u, place]) == pytest.approx(wanted)


@pytest.mark.parametrize("learner", ["weighted-cosine", "cosine", "attention", "gat", "gaug"])
def test_equation_4_keeps_the_k_largest_with_weight_one(learner: str) -> None:
    example = Example.of(learner=learner)
    found = matrix(example.output().latent)
    for _, graph, p, rows in example.clients():
        assert torch.equal(found[rows, rows], latent_of(p, graph, learner).detach())
    assert found.sum() == sum(found[rows, rows].sum() for *_, rows in example.clients())


def test_equation_4_with_the_ties_of_glcn() -> None:
    example = Example.of(learner="glcn")
    found = matrix(example.output().latent)
    for _, graph, p, rows in example.clients():
        block, score = found[rows, rows], scores("glcn", p, graph).detach()
        assert set(block.unique().tolist()) <= {0.0, 1.0}
        assert torch.equal(block.sum(dim=1), kept(score, K, ties=True).sum(dim=1))
        torch.testing.assert_close(
            (block * score).sum(dim=1), (kept(score, K, ties=True) * score).sum(dim=1)
        )


def test_the_gradient_of_a_latent_edge_is_that_of_its_score() -> None:
    example = Example.of()
    factor = torch.randn(16, 16, dtype=torch.float64, generator=torch.manual_seed(0))
    names = [n for n in example.params if n.startswith("learner.")]
    values = [example.params[n] for n in names]
    found = torch.autograd.grad((matrix(example.output().latent) * factor).sum(), values)
    total = sum(
        (latent_of(p, graph) * factor[rows, rows]).sum() for _, graph, p, rows in example.clients()
    )
    assert isinstance(total, Tensor)
    for name, mine, theirs in zip(names, found, torch.autograd.grad(total, values), strict=True):
        assert mine.abs().sum() > 0, name
        torch.testing.assert_close(mine, theirs)


def test_section_3_1_bernoulli_edges_are_drawn_among_all_pairs() -> None:
    """The mean of many draws is the score, clipped to a probability, for every pair but (u, u)."""
    example = Example.of(latent="bernoulli")
    draws, total = 1500, torch.zeros(16, 16, dtype=torch.float64)
    words = torch.randint(
        -(2**31), 2**31, (draws, 2, 2), dtype=torch.int32, generator=torch.manual_seed(0)
    )
    latent = example.output().latent
    assert isinstance(latent, SampledGraph)
    with torch.no_grad():
        for own in words:
            sample = dataclasses.replace(latent, words=own)
            for block in row_blocks(sample.segments, own):
                total[block.rows, block.nodes] += sample.drawn(block)
    for _, graph, p, rows in example.clients():
        chance = scores("weighted-cosine", p, graph).detach().clamp(0, 1).fill_diagonal_(0)
        spread = (chance * (1 - chance) / draws).sqrt()
        assert ((total[rows, rows] / draws - chance).abs() <= 4.5 * spread + 1e-12).all()
        assert 0.1 < chance.mean() < 0.9


def test_section_3_2_and_equations_5_and_6() -> None:
    example = Example.of()
    output = example.output()
    for _, graph, p, rows in example.clients():
        latent = latent_of(p, graph)
        embedded = torch.cat(layers(p, graph, latent), dim=1)
        torch.testing.assert_close(output.embedding[rows], embedded)
        torch.testing.assert_close(output.logits[rows], logits_of(p, graph, latent))


def local_of(example: Example) -> tuple[Simulation, Local]:
    """A simulation's view whose clients, graphs and parameters are those of the example."""
    simulation = simulate(example.method, small_federation(SIZES), hidden=5)
    local = simulation.received()
    local.cohort, local.params = example.cohort, example.params
    local.draws = example.cohort.draws(0)
    return simulation, local


def test_equation_7_is_a_sum_over_latent_edges() -> None:
    example = Example.of()
    _, local = local_of(example)
    found = example.method.regulariser(local, example.output().latent)
    for k, graph, p, _ in example.clients():
        torch.testing.assert_close(found[k], smooth(graph, latent_of(p, graph)))


def test_equations_2_and_8_each_client_has_the_loss_of_its_own_model_and_graph() -> None:
    example = Example.of()
    _, local = local_of(example)
    local.constants = example.method.prepare_round(local)
    found = example.method.loss(local)
    expected = torch.stack([total_loss(p, graph) for _, graph, p, _ in example.clients()])
    torch.testing.assert_close(found, expected)
    values = list(example.params.values())
    mine = torch.autograd.grad(found.sum(), values, materialize_grads=True)
    theirs = torch.autograd.grad(expected.sum(), values, materialize_grads=True)
    for name, a, b in zip(example.params, mine, theirs, strict=True):
        torch.testing.assert_close(a, b, msg=name)


def test_sections_2_and_3_3_a_round() -> None:
    """w_i <- w_i - eta grad L_i; the global channel is averaged by nodes, the rest stays."""
    federation, rate = small_federation(SIZES), 1e-3
    settings = {"optimizer": "sgd", "lr": rate, "weight_decay": 0.0, "epochs": 1, "hidden": 5}
    simulation = simulate(paper_form(k=K), federation, 2, **settings)
    before = {n: p.clone() for n, p in simulation.received().params.items()}
    simulation.advance()
    trained: dict[str, list[Tensor]] = {name: [] for name in before}
    for k, graph in enumerate(federation.clients):
        own = {n: p[0].requires_grad_() for n, p in of_client(before, k).items()}
        grads = torch.autograd.grad(total_loss(own, graph), list(own.values()))
        for (name, value), grad in zip(own.items(), grads, strict=True):
            trained[name].append((value - rate * grad).detach())
    after = simulation.received().params
    for name, (one, two) in trained.items():
        shared = name.startswith(("learner.", "global_convs."))
        mean = (9 * one + 7 * two) / 16
        expected = torch.stack([mean, mean] if shared else [one, two])
        torch.testing.assert_close(after[name], expected, msg=name)
        assert shared == torch.equal(after[name][0], after[name][1])


def test_section_3_3_the_classifier_and_the_local_channel_stay_at_home() -> None:
    simulation = simulate(paper_form(), small_federation(SIZES), 1)
    sent = {name.split(".")[0] for name in model_part(simulation.states[0])}
    assert sent == {"learner", "global_convs"}


@pytest.mark.parametrize(
    ("share", "sent"),
    [
        ("none", set()),
        ("all", {"learner", "projection", "global_convs", "local_convs", "classifier"}),
        ("task", {"projection", "local_convs", "classifier"}),
    ],
)
def test_table_5_what_is_shared(share: str, sent: set[str]) -> None:
    simulation = simulate(paper_form(share=share), small_federation(SIZES), 1)
    assert {name.split(".")[0] for name in model_part(simulation.states[0])} == sent


def test_table_5_without_the_dual_channel_one_gnn_takes_both_graphs() -> None:
    example = Example.of(dual_channel=False)
    assert not any(name.startswith("local_convs") for name in example.params)
    output = example.output()
    for _, graph, p, rows in example.clients():
        expected = logits_of(p, graph, latent_of(p, graph), local="global_convs")
        torch.testing.assert_close(output.logits[rows], expected)


def test_table_2_the_learner_is_what_travels_beyond_a_gnn() -> None:
    method = create("fedhero", {"paper": True, "width": 6})
    features = hidden = 6
    network = method.build("gcn", Shape(features, 3, hidden=hidden, layers=2), 0)
    sent = {n: p.numel() for n, p in network.named_parameters() if method.shares(network, n)}
    learner = sum(count for name, count in sent.items() if name.startswith("learner."))
    assert learner == 6**2 + 6 + 2 * 4 * 6  # d^2 and 2 N_H d, and a bias
    assert sum(sent.values()) - learner == 2 * (hidden**2 + hidden)


# What a binary latent graph is good for ----------------------------------------------------------


@pytest.mark.parametrize("learner", sorted(LEARNERS))
def test_the_latent_graph_does_not_vanish_and_the_learner_trains(learner: str) -> None:
    method = create("fedhero", {"paper": True, "learner": learner})
    simulation = simulate(method, small_federation((30, 12)), lr=0.005, weight_decay=0.0)
    before = {n: p.clone() for n, p in model_part(simulation.memory).items()}
    for _ in range(40):
        simulation.advance()
    view = simulation.trained()
    latent = functional_call(simulation.network, view.params, (simulation.cohort,)).latent
    assert set(latent.weight[latent.neighbours.filled].tolist()) == {1.0}
    degrees = simulation.cohort.degrees.long().split((30, 12))
    for size, edges, given in zip((30, 12), latent.edges.split((30, 12)), degrees, strict=True):
        most = torch.full_like(edges, min(20, size - 1))
        on_edges = learner in ("gat", "glcn")
        assert torch.equal(edges, torch.minimum(most, given) if on_edges else most)
    local = simulation.received()
    local.params = {n: p.clone().requires_grad_() for n, p in local.params.items()}
    local.draws = simulation.cohort.draws(0)
    values = list(local.params.values())
    grads = torch.autograd.grad(method.loss(local).sum(), values, materialize_grads=True)
    cancelled = {"gat": ("learner.encoder.bias", "learner.target")}.get(learner, ())
    for (name, value), grad in zip(view.params.items(), grads, strict=True):
        if name.startswith("learner.") and name not in cancelled:
            assert not torch.equal(value, before[name]), name
            assert grad.abs().sum() > 0, name


def test_similarities_as_weights_vanish_under_the_printed_sums() -> None:
    """The reason for weight one in the paper's form."""
    method = create("fedhero", {"paper": True, "weights": "similarity"})
    simulation = simulate(method, small_federation((30, 12)), 60, lr=0.02, weight_decay=0.0)
    view = simulation.trained()
    latent = functional_call(simulation.network, view.params, (simulation.cohort,)).latent
    assert latent.weight.count_nonzero() < 0.5 * latent.neighbours.filled.sum()
