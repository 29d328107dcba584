"""Attackers: methods that leak by construction, methods that cannot, and known computations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from audit.runs import UNINFORMATIVE, trained
from builders import dense_adjacency, dense_features
from polyphily.audit import attackers
from polyphily.audit.attackers import Attacker, Audit, Finding, audit, centred
from polyphily.audit.exchange import last_exchange
from polyphily.audit.links import area, cosines, draw_pairs
from polyphily.core.cohort import TrainingGraph
from polyphily.core.local import Local
from polyphily.core.messages import (
    Declared,
    Individually,
    Message,
    Sizes,
    as_model,
    statistic,
    with_prefix,
)
from polyphily.core.method import METHODS, Method
from polyphily.engines.simulation import Simulation

NODES, WIDTH = 150, 1024
BASELINES = ["features", "labels", "labels by class"]
MODEL = ["model", "model by class", "representations", "representations by class"]


@pytest.fixture(autouse=True)
def short_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attackers, "STEPS", 10)


def found(result: Audit) -> dict[str, Finding]:
    return {finding.sees: finding for finding in result.findings}


def aucs(finding: Finding) -> list[float]:
    return [own.auc for own in finding.attacks if own is not None]


# Methods that leak, and methods that cannot ------------------------------------------------------


def edge_sketch(graph: TrainingGraph) -> Tensor:
    """Add a random vector of signs for each edge to both of its nodes, `[N, WIDTH]`."""
    edges = graph.edges
    key = torch.minimum(edges.row, edges.col_long) * graph.num_nodes
    key = key + torch.maximum(edges.row, edges.col_long)
    _, number = key.unique(return_inverse=True)
    chance = torch.rand(int(number.max()) + 1, WIDTH, generator=torch.Generator().manual_seed(1))
    return torch.zeros(graph.num_nodes, WIDTH).index_add_(
        0, edges.row, chance.round()[number] - 0.5
    )


@dataclass(frozen=True)
class Sends(Method):
    """Trains alone and sends one table, a row per node."""

    name: ClassVar[str] = "sends"

    def uploads(self, sizes: Sizes) -> tuple[Declared, ...]:
        return (statistic("table", (NODES, WIDTH), Individually("it is a test")),)

    def upload(self, local: Local) -> Message:
        return {"table": self.table(local.cohort).view(len(local.cohort), NODES, WIDTH)}

    def table(self, graph: TrainingGraph) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class SendsEdges(Sends):
    def table(self, graph: TrainingGraph) -> Tensor:
        return edge_sketch(graph)


@dataclass(frozen=True)
class SendsNoise(Sends):
    def table(self, graph: TrainingGraph) -> Tensor:
        source = torch.Generator().manual_seed(2)
        return torch.randn(graph.num_nodes, WIDTH, generator=source)


@dataclass(frozen=True)
class SendsConstants(Method):
    """Sends the same numbers whatever the client's data are."""

    name: ClassVar[str] = "sends constants"

    def uploads(self, sizes: Sizes) -> tuple[Declared, ...]:
        alone = Individually("it is a test")
        return (
            statistic("prototypes", (sizes.classes, sizes.embedding), alone),
            statistic("directions", (3, sizes.features), alone),
            statistic("number", (), alone),
        )

    def upload(self, local: Local) -> Message:
        shape, count = local.network.shape, len(local.cohort)
        return {
            "prototypes": torch.ones(count, shape.classes, local.network.embedding_width),
            "directions": torch.zeros(count, 3, shape.features),
            "number": torch.ones(count),
        }


def test_a_method_that_leaks_is_caught() -> None:
    seen = found(audit(trained(SendsEdges(), data=UNINFORMATIVE)))
    assert min(aucs(seen["table by node"])) > 0.99
    assert not seen["table by node"].at_chance
    assert seen["model"].attacks == [None, None]


def test_a_method_that_sends_noise_is_at_chance() -> None:
    seen = found(audit(trained(SendsNoise(), data=UNINFORMATIVE)))
    own = [a.deviations for a in seen["table by node"].attacks if a is not None]
    assert len(own) == 2
    assert max(map(abs, own)) < 3
    assert "rows of table" in seen["table by node"].tried


def test_a_method_that_sends_constants_cannot_leak() -> None:
    result = audit(trained(SendsConstants(), data=UNINFORMATIVE))
    seen = found(result)
    for name in ("prototypes by class", "directions by features"):
        assert aucs(seen[name]) == [0.5, 0.5]  # all nodes look alike
        assert seen[name].at_chance
    own = [a.deviations for a in seen["prototypes by embedding"].attacks if a is not None]
    assert max(map(abs, own)) < 3
    assert result.unread == ["number"]


def test_nothing_shared_is_nothing_to_attack_with() -> None:
    seen = found(audit(trained("local")))
    assert list(seen) == [*BASELINES, "model", "representations"]
    assert all(seen["features"].attacks)
    assert all(seen["labels"].attacks)
    assert not any(seen["model"].attacks)
    assert not any(seen["representations"].attacks)


# Every method ------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", sorted(set(METHODS) - {"local"}))
def test_every_upload_is_attacked_or_named(method: str) -> None:
    simulation = trained(method)
    result = audit(simulation)
    seen = found(result)
    shared = any(name.startswith("model/") for name in last_exchange(simulation).upload)
    wanted = [*BASELINES, *(MODEL if shared else MODEL[::2])]
    assert list(seen)[: len(wanted)] == wanted
    for entry in simulation.servers[0].declared_uploads:
        if entry.rounds.first > simulation.round:  # a later stage sends it
            continue
        name = entry.name.rstrip("/")
        by_name = [s for s in seen if s.split(" by ")[0] == name or s.startswith(f"{name}/")]
        assert by_name or name in result.unread, name
        assert not (by_name and name in result.unread and name != "model"), name
    for finding in result.findings[len(wanted) :]:
        assert len(aucs(finding)) == 2
        assert all(0 <= auc <= 1 for auc in aucs(finding))


def test_edges_show_in_representations() -> None:
    seen = found(audit(trained("fedavg", 20)))
    # Representations of a homophilic graph that edges have smoothed show these edges.
    assert np.mean(aucs(seen["representations"])) > np.mean(aucs(seen["model"])) + 0.05
    again = found(audit(trained("fedavg", 20)))
    assert {n: f.attacks for n, f in seen.items()} == {n: f.attacks for n, f in again.items()}


# Known computations ------------------------------------------------------------------------------


def expected(simulation: Simulation, client: int, table: np.ndarray) -> float:
    federation = simulation.federations[0]
    drawn = draw_pairs(federation.clients[client], federation.seed, client)
    assert drawn is not None
    pairs, linked = drawn
    return area(cosines(table, pairs), linked)


@pytest.mark.parametrize("share", ["global", "all"])
def test_fedhero_is_attacked_through_its_learner(share: str) -> None:
    """The learner's embedding is Â X W + b; without edges Â is the identity."""
    simulation = trained("fedhero", 5, values={"share": share}, backbone="gcn")
    exchange = last_exchange(simulation)
    seen = found(audit(simulation, exchange))
    for k, graph in enumerate(simulation.federations[0].clients):
        weight = exchange.upload["model/learner.encoder.weight"][k].double()
        bias = exchange.upload["model/learner.encoder.bias"][k].double()
        alone = dense_features(graph) @ weight
        loops = dense_adjacency(graph) + torch.eye(graph.num_nodes)
        scale = loops.sum(dim=1).rsqrt()
        joined = (scale[:, None] * loops * scale) @ alone
        for name, table in (("", alone), (", own graph", joined)):
            wanted = expected(simulation, k, (table + bias).numpy())
            assert aucs(seen[f"learner.encoder{name}"])[k] == pytest.approx(wanted, abs=1e-4)
    assert min(aucs(seen["learner.encoder, own graph"])) > 0.6
    assert "scores of learner" not in seen  # they are the cosines of this embedding
    for name in ("model", "representations"):
        assert 0.5 not in aucs(seen[name])


def test_the_learners_scores_are_those_of_the_paper() -> None:
    """a_uv = (1/N_H) sum_h cos(w_h^1 ∘ z_u, w_h^2 ∘ z_v), the mean of both directions."""
    values = {"share": "global", "learner": "weighted-cosine"}
    simulation = trained("fedhero", 5, values=values)
    exchange = last_exchange(simulation)
    seen = found(audit(simulation, exchange))["scores of learner"]
    sent = {n: t.double() for n, t in with_prefix(exchange.upload, "model/learner.").items()}
    federation = simulation.federations[0]
    for k, graph in enumerate(federation.clients):
        drawn = draw_pairs(graph, federation.seed, k)
        assert drawn is not None
        z = dense_features(graph) @ sent["encoder.weight"][k] + sent["encoder.bias"][k]
        u, v = torch.from_numpy(drawn[0])
        both = [
            torch.cosine_similarity(one * z[a], two * z[b], dim=1)
            for one, two in zip(sent["left"][k], sent["right"][k], strict=True)
            for a, b in ((u, v), (v, u))
        ]
        scores = torch.stack(both).mean(dim=0).numpy()
        assert aucs(seen)[k] == pytest.approx(area(scores, drawn[1]), abs=1e-4)


def test_a_shared_edge_evaluator_scores_pairs() -> None:
    """c_ij of FedATH's evaluator, an MLP on the features of both ends."""
    simulation = trained("fedath", 5, values={"share": "all"})
    exchange = last_exchange(simulation)
    seen = found(audit(simulation, exchange))["scores of evaluator"]
    assert "scores of evaluator" not in found(audit(trained("fedath")))  # it is private there
    sent = {n: t.double() for n, t in with_prefix(exchange.upload, "model/evaluator.").items()}
    federation = simulation.federations[0]
    for k, graph in enumerate(federation.clients):
        drawn = draw_pairs(graph, federation.seed, k)
        assert drawn is not None
        x = torch.nn.functional.normalize(dense_features(graph), dim=1)
        one, two = (x @ sent["weight"][k]).chunk(2, dim=1)
        u, v = torch.from_numpy(drawn[0])
        hidden = sent["hidden_bias"][k]
        scores = sum(
            (one[a] + hidden + two[b]).relu() @ sent["last"][k] for a, b in ((u, v), (v, u))
        )
        wanted = area(scores.numpy().ravel(), drawn[1])
        assert aucs(seen)[k] == pytest.approx(wanted, abs=1e-4)


def test_the_update_is_upload_minus_download() -> None:
    simulation = trained("fedavg", backbone="mlp")
    exchange = last_exchange(simulation)
    seen = found(audit(simulation, exchange))
    for k, graph in enumerate(simulation.federations[0].clients):
        weight, bias = (
            (exchange.upload[name] - exchange.download[name])[k].double()
            for name in ("model/convs.0.weight", "model/convs.0.bias")
        )
        wanted = expected(simulation, k, (dense_features(graph) @ weight + bias).relu().numpy())
        assert aucs(seen["update"])[k] == pytest.approx(wanted, abs=1e-4)


def test_directions_in_the_space_of_features_project_them() -> None:
    simulation = trained("fedavg")
    graphs = simulation.federations[0].clients
    pairs = [np.array([[0, 1, 2], [3, 4, 5]])] * 2
    attacker = Attacker(simulation, last_exchange(simulation), pairs)
    directions = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    by_rows, by_columns = (
        list(attacker.read("v", value)) for value in (directions, directions.transpose(1, 2))
    )
    for k, graph in enumerate(graphs):
        table = centred(graph.features @ directions[k].numpy().T.astype(np.float64))
        for ((name, _, scores),) in (by_rows, by_columns):
            assert name == "v by features"
            assert scores[k] == pytest.approx(cosines(table, pairs[k]))


# Private parameters ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "values"),
    [
        ("fedper", {}),
        ("fedhero", {"share": "global"}),
        ("fedath", {}),
        ("fedath", {"share": "causal+evaluator"}),  # no private parameter enters the output
        ("fedproto", {}),
    ],
)
def test_private_parameters_are_unknown(method: str, values: dict[str, str]) -> None:
    simulation = trained(method, values=values)
    exchange = last_exchange(simulation)
    before = audit(simulation, exchange)
    sent = {name for name in exchange.upload if name.startswith("model/")}
    kept = as_model(dict(simulation.network.named_parameters())).keys() - sent
    assert kept
    simulation.memory = {n: t + 1 if n in kept else t for n, t in simulation.memory.items()}
    assert audit(simulation, exchange) == before


def test_private_parameters_are_fitted() -> None:
    simulation = trained("fedper", 10)
    attacker = Attacker(simulation, last_exchange(simulation), [None, None])
    best, *draws = attacker.completed
    private = [name for name in best if name not in attacker.sent]
    assert private
    assert all(best[name].abs().sum() > 0 for name in private)
    assert not any(torch.equal(draws[0][name], draws[1][name]) for name in private)
    clients = attacker.without_edges

    def losses(params: Message) -> Tensor:
        local = clients.with_params(params, {}, {}, 0)
        return local.cross_entropy(local.frozen(params).logits)

    start = {
        n: p.detach().expand(2, *p.shape[1:]) for n, p in simulation.network.named_parameters()
    }
    assert (losses(best) < losses({**start, **attacker.sent})).all()
    assert torch.equal(losses(best), torch.stack([losses(draw) for draw in draws]).amin(dim=0))
    for name in attacker.sent:
        assert torch.equal(best[name], attacker.sent[name])


def test_a_client_without_edges_is_left_out() -> None:
    simulation = trained("fedavg")
    federation = simulation.federations[0]
    one, two = federation.clients
    empty = replace(one, edges=one.edges[:, :0])
    alone = Simulation(
        simulation.method, [replace(federation, clients=(empty, two))], simulation.settings
    )
    alone.advance()
    for finding in audit(alone).findings:
        assert finding.attacks[0] is None
        assert finding.attacks[1] is not None
