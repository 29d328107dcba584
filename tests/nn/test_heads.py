"""A linear classifier behind any backbone: all checks of a backbone, and what it computes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from builders import (
    dense_adjacency,
    dense_features,
    of_client,
    predict,
    random_cohort,
    random_parameters,
    split_by_client,
)
from polyphily.core.declarations import describe
from polyphily.core.method import create
from polyphily.nn.backbones import BACKBONES, LinearHead, Shape, build
from polyphily.testing.backbones import BACKBONE_CHECKS, BackboneCase

SHAPE = Shape(features=6, classes=3, hidden=8, dropout=0.4, heads=2, hops=4)
every_backbone = pytest.mark.parametrize(
    "name", [name for name, backbone in BACKBONES.items() if not backbone.headless]
)


def headed(name: str) -> type[LinearHead]:
    """The class of a backbone with a linear head, made from a shape alone as backbones are."""
    trunk = BACKBONES[name]

    class Headed(LinearHead):
        local_reach, weighted_edges = trunk.local_reach, trunk.weighted_edges

        def __init__(self, shape: Shape) -> None:
            super().__init__(trunk, shape)

    return Headed


@pytest.mark.parametrize("check", [check for check in BACKBONE_CHECKS if check != "class"])
@every_backbone
def test_it_has_the_properties_of_a_backbone(name: str, check: str) -> None:
    BACKBONE_CHECKS[check](BackboneCase(headed(name)))


def test_two_convolutions_then_a_classifier() -> None:
    network = build("gcn", SHAPE, seed=0, linear_head=True).double()
    cohort = random_cohort([7, 5])
    params = random_parameters(network, 2)
    found = predict(network, params, cohort)
    parts = zip(*(split_by_client(part, cohort) for part in found), strict=True)
    for k, (logits, embedding) in enumerate(parts):
        graph, own = cohort.graphs[k], {n: p[0] for n, p in of_client(params, k).items()}
        loops = dense_adjacency(graph) + torch.eye(graph.num_nodes, dtype=torch.float64)
        scale = torch.diag(loops.sum(dim=1).pow(-0.5))

        def conv(
            x: Tensor, index: int, a: Tensor = scale @ loops @ scale, own: dict = own
        ) -> Tensor:
            layer = f"trunk.convs.{index}"
            return (a @ x @ own[f"{layer}.weight"] + own[f"{layer}.bias"]).relu()

        expected = conv(conv(dense_features(graph), 0), 1)
        assert_close(embedding, expected)
        assert_close(logits, expected @ own["head.weight"] + own["head.bias"])


@every_backbone
def test_nothing_is_dropped_before_the_classifier(name: str) -> None:
    network = build(name, SHAPE, seed=0, linear_head=True).double()
    cohort = random_cohort([9, 4])
    params = random_parameters(network, 2)
    dropped = predict(network, params, cohort, cohort.draws(1))
    assert not torch.allclose(dropped.embedding, predict(network, params, cohort).embedding)
    again = cohort.segments.matmul(dropped.embedding, params["head.weight"])
    assert_close(dropped.logits, again + cohort.segments.expand(params["head.bias"]))
    assert (dropped.embedding >= 0).all()


@every_backbone
def test_its_name_its_seed_and_its_classifier(name: str) -> None:
    network, same, other = (build(name, SHAPE, seed, linear_head=True) for seed in (4, 4, 5))
    assert network.describe() == f"{name} with a linear head"
    assert torch.equal(network.head.weight, same.head.weight)
    assert not torch.equal(network.head.weight, other.head.weight)
    personal = {n for n, _ in network.named_parameters() if not create("fedper").shares(network, n)}
    assert personal == {"head.weight", "head.bias"}


def test_what_travels_has_its_shapes() -> None:
    up, _ = describe(create("s2fgl", {"head": "linear"}), "gcn")
    shapes = {row["name"].removeprefix("model/"): row["shape"] for row in up}
    assert shapes["trunk.convs.0.weight"] == "features × hidden"
    assert shapes["trunk.convs.1.weight"] == "hidden × hidden"
    assert shapes["head.weight"] == "hidden × classes"
    assert shapes["prototypes"] == "classes × hidden"
