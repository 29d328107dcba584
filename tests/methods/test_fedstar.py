"""FedStar: its encodings, its two channels against a plain computation, and what it shares."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from builders import (
    cohort_of,
    dense_adjacency,
    dense_features,
    predict,
    random_cohort,
    random_parameters,
    with_features,
)
from cases import assert_same_bits, simulate, small_federation
from effects import changes_predictions
from polyphily.core.messages import Message, model_part
from polyphily.core.method import create, sizes_of
from polyphily.core.sampling import check_sampling
from polyphily.core.settings import Settings
from polyphily.errors import UserError
from polyphily.graphs.graph import Graph
from polyphily.methods.fedstar.network import STRUCTURE
from polyphily.methods.fedstar.structure import Encodings
from polyphily.nn.backbones import Shape
from polyphily.testing.examples import with_clients

SHAPE = Shape(features=6, classes=3, hidden=5, layers=2)


def parts(params: Message) -> tuple[Message, Message]:
    """Return the parameters of the structure channel, and the others."""
    shared = {n: t for n, t in params.items() if n.startswith(STRUCTURE)}
    return shared, {n: t for n, t in params.items() if n not in shared}


# The encodings -----------------------------------------------------------------------------------


def test_the_degree_encoding_ends_with_all_higher_degrees() -> None:
    star = np.array([[0] * 5, [1, 2, 3, 4, 5]])
    edges = np.concatenate([star, [[1], [2]]], axis=1)
    graph = Graph.build(np.ones((7, 1), np.float32), edges, np.zeros(7, np.int64))
    found = Encodings(degrees=3, steps=2).of(cohort_of([graph]))
    assert found[:, :3].tolist() == [
        [0, 0, 1],  # degree 5
        [0, 1, 0],
        [0, 1, 0],
        *[[1, 0, 0]] * 3,
        [0, 0, 0],  # no neighbours
    ]
    assert found[6].tolist() == [0] * 5
    # Back to the centre after two steps: certain from three neighbours, half from two of them.
    assert found[0, 4].item() == pytest.approx((3 + 2 / 2) / 5)


def test_encodings_are_those_of_each_client_alone() -> None:
    cohort = random_cohort((9, 12, 4))
    encodings = Encodings(4, 5)
    alone = [encodings.of(cohort_of([graph])) for graph in cohort.graphs]
    assert torch.equal(encodings.of(cohort), torch.cat(alone))


# The network -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", ["gcn", "gin"])
def test_the_network_is_that_of_the_paper(layer: str) -> None:
    cohort = random_cohort((9, 12, 4))
    method = create("fedstar", {"convolution": "gin"} if layer == "gin" else {})
    network = method.build("gcn", SHAPE, 0)
    params = random_parameters(network, 3)
    output = predict(network, params, cohort)
    for k, graph in enumerate(cohort.graphs):
        own = {name: value[k] for name, value in params.items()}
        loops = dense_adjacency(graph) + torch.eye(graph.num_nodes).double()
        scale = loops.sum(dim=1).rsqrt()
        gcn = scale[:, None] * loops * scale
        g = linear(Encodings(16, 16).of(cohort_of([graph])), own, "structure.embed")
        h = linear(dense_features(graph), own, "embed")
        for index in range(2):
            both, name = torch.cat([h, g], dim=1), f"convs.{index}"
            if layer == "gcn":
                h = gcn @ both @ own[f"{name}.weight"] + own[f"{name}.bias"]
            else:
                inner = loops @ both @ own[f"{name}.first.weight"] + own[f"{name}.bias"]
                h = linear(inner.relu(), own, f"{name}.second")
            h = h.relu()
            weight, bias = (own[f"structure.{name}.{part}"] for part in ("weight", "bias"))
            g = (gcn @ g @ weight + bias).tanh()
        embedding = linear(torch.cat([h, g], dim=1), own, "join").relu()
        rows = slice(cohort.segments.pointers[k], cohort.segments.pointers[k + 1])
        torch.testing.assert_close(output.embedding[rows], embedding)
        torch.testing.assert_close(output.logits[rows], linear(embedding, own, "head"))


def linear(x: Tensor, params: Message, name: str) -> Tensor:
    return x @ params[f"{name}.weight"] + params[f"{name}.bias"]


def test_other_features_leave_the_structure_channel_as_it_is() -> None:
    cohort = random_cohort((9, 12))
    rng = np.random.default_rng(5)
    others = [
        with_features(g, rng.standard_normal(g.features.shape).astype(np.float32))
        for g in cohort.graphs
    ]
    network: Any = create("fedstar").build("gcn", SHAPE, 0)
    outputs, tops = [], []
    for one in (cohort, cohort_of(others)):
        params = random_parameters(network, 2)
        outputs.append(predict(network, params, one).logits)
        own = {n.removeprefix(STRUCTURE): t for n, t in parts(params)[0].items()}
        arguments = (network.encodings.of(one), one)
        tops.append(torch.func.functional_call(network.structure, own, arguments)[-1])
    assert torch.equal(tops[0], tops[1])
    assert not torch.allclose(outputs[0], outputs[1])


def test_the_structure_encoder_of_the_paper_has_14592_numbers() -> None:
    method = create("fedstar", {"paper": True})
    network = method.build("gcn", Shape(features=1433, classes=7, hidden=64, layers=3), 0)
    shapes = sizes_of(method, network, 10).parameters.values()
    assert sum(int(np.prod(shape)) for shape in shapes) == 14_592


# What is shared ----------------------------------------------------------------------------------


def test_after_a_round_clients_have_one_structure_channel_and_their_own_features() -> None:
    simulation = simulate("fedstar", small_federation(), 1)
    shared, own = parts(simulation.received().params)
    assert shared
    assert own
    assert all(torch.equal(t, t[:1].expand_as(t)) for t in shared.values())
    assert not any(torch.allclose(t[0], t[1]) for t in own.values())


def test_the_server_weighs_clients_by_their_train_nodes() -> None:
    federation = small_federation()
    simulation = simulate("fedstar", federation, 1)
    trained = parts(model_part(simulation.memory))[0]
    masks = [graph.masks for graph in federation.clients]
    counts = torch.tensor([int(m.train.sum()) for m in masks if m], dtype=torch.float64)
    for name, value in model_part(simulation.states[0]).items():
        mean = torch.einsum("k,k...->...", counts / counts.sum(), trained[name])
        torch.testing.assert_close(value, mean)


@pytest.mark.parametrize(("share", "alike"), [("none", True), ("structure", False)])
def test_other_clients_matter_only_through_what_is_shared(share: str, alike: bool) -> None:
    method = create("fedstar", {"share": share})
    federation = small_federation()
    fewer = with_clients(federation, federation.clients[:2])
    found = [simulate(method, data, 3).memory for data in (federation, fewer)]
    pairs = [(found[0][name][:2], found[1][name][:2]) for name in found[0]]
    assert all(torch.equal(a, b) for a, b in pairs) == alike


def test_share_all_leaves_nothing_private() -> None:
    simulation = simulate(create("fedstar", {"share": "all"}), small_federation(), 1)
    assert set(model_part(simulation.states[0])) == set(simulation.received().params)


def test_without_sharing_no_parameter_travels() -> None:
    simulation = simulate(create("fedstar", {"share": "none"}), small_federation(), 1)
    assert not model_part(simulation.states[0])
    sent = simulation.backend.train(range(4), [range(4)]).trained.uploads
    assert set(sent) == {"weight"}


# Hyperparameters ---------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [{}, {"paper": True}, {"share": "none"}, {"share": "all"}])
def test_every_hyperparameter_that_claims_an_effect_has_one(form: dict[str, Any]) -> None:
    method = create("fedstar", form)
    idle = method.without_effect()
    for name in type(method).hyperparameters():
        assert changes_predictions(method, name) == (name not in idle), name


@pytest.mark.parametrize(("off", "width"), [("degrees", 16), ("steps", 16)])
def test_an_encoding_can_be_left_out(off: str, width: int) -> None:
    method = create("fedstar", {off: 0})
    network: Any = method.build("gcn", SHAPE, 0)
    assert network.encodings.width == width == network.structure.embed.weight.shape[1]


def test_no_encoding_at_all_is_refused() -> None:
    with pytest.raises(UserError, match="one of them above 0"):
        create("fedstar", {"degrees": 0, "steps": 0})


def test_samples_are_refused() -> None:
    with pytest.raises(UserError, match="structure encodings"):
        check_sampling(create("fedstar"), replace(Settings(), layers=2, sample="3"))


def test_encodings_do_not_depend_on_labels() -> None:
    cohort = random_cohort((9, 12))
    others = [replace(graph, labels=graph.labels * 0) for graph in cohort.graphs]
    found = [{"s": Encodings(4, 4).of(one)} for one in (cohort, cohort_of(others))]
    assert_same_bits(*found)
