"""FGSSL's views and both of its terms, each against a computation written out here."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from builders import random_cohort
from cases import assert_close, assert_same_bits, simulate, small_federation
from effects import changes_predictions
from polyphily.core.cohort import Cohort
from polyphily.core.local import Local
from polyphily.core.messages import model_part
from polyphily.core.method import check_effects, create
from polyphily.engines.simulation import Simulation
from polyphily.errors import UserError
from polyphily.graphs.graph import Graph
from polyphily.methods import fgssl
from polyphily.methods.fgssl import FGSSL, contrast_with, log_neighbour_shares, random_view
from polyphily.nn.segments import Segments
from polyphily.testing.examples import cohort_of

CPU = torch.device("cpu")
DENOMINATORS = ("negatives", "all")
SIZES = (9, 1, 14, 6)


def method(**options: object) -> FGSSL:
    made = create("fgssl", options)
    assert isinstance(made, FGSSL)
    return made


# L_C ---------------------------------------------------------------------------------------------


def plain_contrast(h: Tensor, g: Tensor, labels: Tensor, tau: float, denominator: str) -> Tensor:
    """The loss of every anchor of one client, pair by pair."""
    losses = []
    for i, anchor in enumerate(h):
        s = [F.cosine_similarity(anchor, key, dim=0) / tau for key in g]
        positives = [k for k in range(len(g)) if labels[k] == labels[i]]
        terms = []
        for p in positives:
            others = [k for k in range(len(g)) if denominator == "all" or k not in positives]
            total = sum((s[k].exp() for k in others), torch.zeros(()).double())
            if denominator == "negatives":
                total = total + s[p].exp()
            terms.append(total.log() - s[p])
        losses.append(sum(terms) / len(terms))
    return torch.stack(losses)


@pytest.mark.parametrize(
    ("denominator", "expected"),
    [("all", [0.8620, 0.8620, 0.5514]), ("negatives", [0.3133, 0.3133, 0.5514])],
)
def test_contrast_of_three_nodes(denominator: str, expected: list[float]) -> None:
    h = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    labels, rows = torch.tensor([0, 0, 1]), Segments((3,), CPU)
    found = contrast_with(h, h, labels, rows, 1.0, denominator)
    assert found.tolist() == pytest.approx(expected, abs=5e-5)


def example(sizes: tuple[int, ...] = SIZES) -> tuple[Tensor, Tensor, Tensor, Segments]:
    source = torch.Generator().manual_seed(3)
    h, g = torch.randn(2, sum(sizes), 4, generator=source).double()
    labels = torch.randint(0, 3, (sum(sizes),), generator=source)
    return h, g, labels, Segments(sizes, CPU)


@pytest.mark.parametrize("block", [fgssl.BLOCK, 40, 1])
@pytest.mark.parametrize("denominator", DENOMINATORS)
def test_contrast_and_its_gradient(
    denominator: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fgssl, "BLOCK", block)
    h, g, labels, rows = example()
    ours, theirs = (h.clone().requires_grad_() for _ in range(2))
    found = contrast_with(ours, g, labels, rows, 0.3, denominator)
    parts = zip(*(torch.split(t, SIZES) for t in (theirs, g, labels)), strict=True)
    expected = torch.cat([plain_contrast(*part, 0.3, denominator) for part in parts])
    torch.testing.assert_close(found, expected)
    weight = torch.arange(1.0, len(h) + 1).double()
    torch.testing.assert_close(
        torch.autograd.grad(found @ weight, ours), torch.autograd.grad(expected @ weight, theirs)
    )


@pytest.mark.parametrize("denominator", DENOMINATORS)
@pytest.mark.parametrize("temperature", [0.01, 1.0, 50.0])
def test_contrast_within_one_class(denominator: str, temperature: float) -> None:
    h, g, _, rows = example((5,))
    anchors = h.requires_grad_()
    labels = torch.zeros(5, dtype=torch.long)
    found = contrast_with(anchors, g, labels, rows, temperature, denominator)
    (slope,) = torch.autograd.grad(found.sum(), anchors)
    assert slope.isfinite().all()
    if denominator == "negatives":  # nothing to push away from
        assert found.abs().max() < 1e-30
        assert slope.abs().max() < 1e-30


@pytest.mark.parametrize("denominator", DENOMINATORS)
def test_contrast_depends_on_labels_and_keys(denominator: str) -> None:
    h, g, labels, rows = example()
    usual = contrast_with(h, g, labels, rows, 0.3, denominator)
    for other in (
        contrast_with(h, g, (labels + torch.arange(len(labels))) % 3, rows, 0.3, denominator),
        contrast_with(h, h, labels, rows, 0.3, denominator),
    ):
        assert (other - usual).abs().max() > 0.1


# L_D ---------------------------------------------------------------------------------------------


def star(cosines: list[float]) -> Tensor:
    """Logits of a node and of its neighbours, which have these cosines with it."""
    return torch.tensor([[1.0, 0.0], *[[c, math.sqrt(1 - c * c)] for c in cosines]]).double()


def divergence(first: Tensor, second: Tensor, cohort: Cohort, temperature: float) -> Tensor:
    p, q = (log_neighbour_shares(o, cohort.edges, temperature) for o in (first, second))
    return cohort.edges.sum_by_row(p.exp() * (p - q))


def test_divergence_of_a_star() -> None:
    edges = np.array([[0, 0, 0], [1, 2, 3]])
    graph = Graph.build(np.ones((4, 1), np.float32), edges, np.zeros(4, np.int64))
    cohort = cohort_of([graph])
    one, two = star([1.0, 0.5, 0.0]), star([0.0, 0.5, 1.0])  # scores 2, 1, 0 at ω = 0.5
    found = divergence(one, two, cohort, 0.5)
    assert found[0].item() == pytest.approx(1.1504, abs=5e-5)
    assert found[1:].abs().max() < 1e-12  # a single neighbour has all of the share
    assert divergence(one, one, cohort, 0.5).abs().max() < 1e-12


@pytest.mark.parametrize("temperature", [0.002, 0.5, 3.0])
def test_neighbour_shares_are_softmaxes(temperature: float) -> None:
    cohort = random_cohort((12, 1, 7), density=0.3)
    logits = torch.randn(20, 3, generator=torch.Generator().manual_seed(4)).double()
    logits.requires_grad_()
    found = log_neighbour_shares(logits, cohort.edges, temperature)
    unit = logits.detach() / logits.detach().norm(dim=1, keepdim=True)
    for node in range(20):
        mine = cohort.edges.row == node
        scores = unit[cohort.edges.col_long[mine]] @ unit[node] / temperature
        torch.testing.assert_close(found[mine].detach(), scores.log_softmax(dim=0))
    (grad,) = torch.autograd.grad(found.square().mean(), logits)
    assert grad.isfinite().all()


def test_gradients_of_neighbour_shares_also_hold_for_single_neighbours() -> None:
    """A single neighbour has the whole share, so that the sum of its exponentials is 1."""
    cohort = random_cohort((12, 1, 7), density=0.15)
    degree = torch.bincount(cohort.edges.row, minlength=20)
    assert {0, 1, 2} <= set(degree.tolist())
    logits = torch.randn(20, 3, generator=torch.Generator().manual_seed(4)).double()
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: log_neighbour_shares(x, cohort.edges, 0.5), logits)


def test_rows_of_zeros_have_small_gradients() -> None:
    cohort = random_cohort((8,), density=0.6)
    x, g, labels, rows = example((8,))
    x[[0, 3]] = 0
    for term in (
        lambda x: contrast_with(x, g, labels, rows, 0.1, "all"),
        lambda x: log_neighbour_shares(x, cohort.edges, 0.5),
    ):
        leaf = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(term(leaf).sum(), leaf)
        assert grad[[0, 3]].abs().max() < 1000


# Views -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sparse", [False, True])
def test_a_view_is_the_graph_without_some_edges_and_features(sparse: bool) -> None:
    cohort = random_cohort((15, 11), sparse=sparse)
    view = random_view(cohort, cohort.draws(0), 0.6, 0.4)
    kept = view.weight.bool()
    assert 0 < kept.sum() < len(kept)
    assert torch.equal(view.weight, view.weight[cohort.edges.permutation])  # both directions
    starts = cohort.segments.pointers
    graphs = []
    for k, graph in enumerate(cohort.graphs):
        mine = cohort.segments.owner[cohort.edges.row] == k
        edges = torch.stack([cohort.edges.row, cohort.edges.col_long])[:, mine & kept] - starts[k]
        features = graph.features.toarray() if sparse else graph.features
        columns = view.features[k].numpy()
        assert 0 < columns.sum() < len(columns)
        graphs.append(Graph.build(features * columns, edges.numpy(), graph.labels))
    other = cohort_of(graphs)
    eye = torch.eye(26).double()
    for name in ("gcn", "random_walk", "mean"):
        torch.testing.assert_close(getattr(view, name) @ eye, getattr(other, name) @ eye)
    assert isinstance(other.x, Tensor)
    weight = torch.eye(6).double().repeat(2, 1)  # the sparse features of both clients
    torch.testing.assert_close(view.x @ weight if sparse else view.x, other.x)
    assert not torch.equal(view.features[0], view.features[1])


def test_views_lack_the_shares_asked_for() -> None:
    cohort = random_cohort((60, 50), features=400, density=0.4)
    view = random_view(cohort, cohort.draws(0), 0.8, 0.3)
    assert view.weight.mean().item() == pytest.approx(0.2, abs=0.03)
    assert view.features.mean().item() == pytest.approx(0.7, abs=0.05)
    whole = random_view(cohort, cohort.draws(0), 0.0, 0.0)
    assert whole.weight.min() == whole.features.min() == 1


# The loss ----------------------------------------------------------------------------------------


def started(simulation: Simulation) -> Local:
    """The local view in the next round, after the parameters have moved away from the received."""
    local = simulation.received()
    local.draws = simulation.cohort.draws(7)
    source = torch.Generator().manual_seed(5)
    local.params = {
        n: (p + 0.3 * torch.randn(p.shape, generator=source).to(p)).requires_grad_()
        for n, p in local.params.items()
    }
    return local


@pytest.mark.parametrize("teacher", ["received", "local"])
@pytest.mark.parametrize("denominator", DENOMINATORS)
def test_loss_has_three_terms(teacher: str, denominator: str) -> None:
    made = method(
        lambda_c=0.7, lambda_d=3.0, temperature=0.4, teacher=teacher, denominator=denominator
    )
    simulation = simulate(made, small_federation(), 2)
    local = started(simulation)
    loss = made.loss(local)

    cohort, draws = simulation.cohort, simulation.cohort.draws(7)
    weak = random_view(cohort, draws, 0.3, 0.3)
    strong = random_view(cohort, draws, 0.8, 0.5)
    params = model_part(local.received) if teacher == "received" else local.params
    call = torch.func.functional_call
    ours = call(local.network, local.params, (strong,))
    theirs = call(local.network, params, (weak,))
    clean = local.forward().logits
    owner, labels, edges = cohort.segments.owner, cohort.labels, cohort.edges
    shares = [log_neighbour_shares(o.logits, edges, 0.5) for o in (theirs, ours)]
    for k in range(4):
        mine = (owner == k) & (labels >= 0)
        entropy = F.cross_entropy(clean[mine], labels[mine])
        parts = ours.embedding[mine], theirs.embedding[mine], labels[mine]
        contrast = plain_contrast(*parts, 0.4, denominator).mean()
        at = owner[edges.row] == k
        gap = (shares[0].exp() * (shares[0] - shares[1]))[at].sum() / (owner == k).sum()
        expected = entropy + 0.7 * contrast + 3 * gap
        assert loss[k].item() == pytest.approx(expected.item())
        assert contrast.item() > 0.01
        assert gap.item() > 0.001


def test_the_received_model_gets_no_gradient() -> None:
    simulation = simulate(method(), small_federation(), 1)
    local = started(simulation)
    local.received = {n: t.clone().requires_grad_() for n, t in local.received.items()}
    loss = simulation.method.loss(local).sum()
    found = torch.autograd.grad(loss, list(local.received.values()), allow_unused=True)
    assert found == (None,) * len(local.received)


def test_each_term_changes_what_is_trained() -> None:
    federation = small_federation()

    def trained(**options: object) -> Tensor:
        simulation = simulate(method(**options), federation, 2)
        return model_part(simulation.states[0])["convs.0.weight"]

    forms = [
        trained(),
        trained(lambda_d=0),
        trained(lambda_c=0),
        trained(lambda_c=0, lambda_d=0),
        trained(denominator="all"),
        trained(teacher="local"),
    ]
    for i, one in enumerate(forms):
        for other in forms[:i]:
            assert (one - other).abs().max() > 1e-3


def test_without_both_terms_it_is_fedavg() -> None:
    federation, settings = small_federation(), {"dropout": 0.4, "input_dropout": 0.2}
    ours = simulate(method(lambda_c=0, lambda_d=0), federation, 3, **settings)
    assert_same_bits(ours.tensors(), simulate("fedavg", federation, 3, **settings).tensors())


def test_stacked_equals_sequential_with_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fgssl, "BLOCK", 16)
    federation, settings = small_federation(), {"dropout": 0.3, "backbone": "gat"}
    stacked, sequential = (
        simulate(method(), federation, 3, engine=engine, **settings)
        for engine in ("stacked", "sequential")
    )
    assert_close(stacked.tensors(), sequential.tensors(), 1e-7)


# For users ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form",
    [method(), method(lambda_c=0), method(lambda_d=0), method(lambda_c=0, lambda_d=0)],
)
def test_hyperparameters_have_an_effect_or_are_refused(form: FGSSL) -> None:
    idle = form.without_effect()
    for name in FGSSL.hyperparameters():
        assert changes_predictions(form, name) == (name not in idle), name
        if name in idle:
            with pytest.raises(UserError, match=r"no effect here.*; set "):
                check_effects(form, [name])


def test_the_codes_form_has_the_codes_contrast() -> None:
    made = create("fgssl", {"code": "on"})
    assert isinstance(made, FGSSL)
    assert (made.denominator, made.lambda_c, made.weighting) == ("all", 1.5, "train")
    assert made.lambda_d > 0


def test_networks_without_edge_weights_are_refused() -> None:
    assert "unifilter" not in method().supported_backbones()
    assert {"gcn", "gat", "sage", "acm-gcn"} <= set(method().supported_backbones())
