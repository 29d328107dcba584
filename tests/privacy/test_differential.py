"""Differential privacy: what it costs, what it does to uploads, and that no method gets past it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting import pld, rdp
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

import polyphily
from cases import assert_close, assert_same_bits, simulate, small_federation
from polyphily.cli import main
from polyphily.core.budget import Budget
from polyphily.core.declarations import example_sizes
from polyphily.core.local import Local
from polyphily.core.messages import Declared, Message, Role, Uploads, count, public, statistic
from polyphily.core.method import METHODS, create
from polyphily.core.settings import Settings
from polyphily.engines.replay import Replay
from polyphily.engines.simulation import Simulation
from polyphily.errors import UserError
from polyphily.methods.fedavg import FedAvg
from polyphily.nn.draws import Draws, Streams
from polyphily.nn.sparse import flat
from polyphily.privacy import differential as privacy
from polyphily.privacy.differential import Guard, SystemDraws, clipped, normal
from polyphily.runs.folder import RunFolder
from polyphily.runs.run import Execution

NAMES = sorted(METHODS)
SUMMABLE = [n for n in NAMES if not create(n).reason_against_sums(example_sizes(create(n)))]
every_method = pytest.mark.parametrize("name", NAMES)
CPU = torch.device("cpu")
DP = "epsilon=8,delta=1e-5,clip=0.5"


# What it costs ---------------------------------------------------------------------------------


def delta_of(epsilon: float, sigma: float) -> float:
    """Balle and Wang (ICML 2018), Theorem 8, with sensitivity one."""
    a, b = 1 / (2 * sigma) - epsilon * sigma, -1 / (2 * sigma) - epsilon * sigma
    return float(stats.norm.cdf(a) - math.exp(epsilon + stats.norm.logcdf(b)))


def test_the_noise_for_one_upload_is_the_published_one() -> None:
    # What the reference code of Balle and Wang gives for epsilon 1, delta 1e-5, sensitivity 1.
    assert Budget(1.0, 1e-5).multiplier(1) == pytest.approx(3.730631634816, rel=1e-10)


@given(st.floats(0.05, 200), st.sampled_from([1e-7, 1e-5, 1e-2]), st.integers(1, 500), st.data())
def test_all_uploads_together_spend_the_budget_and_fewer_spend_less(
    epsilon: float, delta: float, uploads: int, data: st.DataObject
) -> None:
    budget = Budget(epsilon, delta)
    noise = budget.multiplier(uploads)
    assert budget.spent(noise, uploads) == pytest.approx(epsilon, rel=1e-6)
    fewer = data.draw(st.integers(0, uploads))
    assert budget.spent(noise, fewer) <= epsilon * (1 + 1e-6)
    assert budget.spent(noise, 0) == 0


@given(st.floats(0.5, 20), st.integers(1, 300))
def test_what_is_spent_is_the_exact_privacy_curve(noise: float, uploads: int) -> None:
    spent = Budget(1.0, 1e-5).spent(noise, uploads)
    sigma = noise / math.sqrt(uploads)
    if spent > 0:
        assert delta_of(spent, sigma) == pytest.approx(1e-5, rel=1e-4)
    else:
        assert delta_of(0.0, sigma) <= 1e-5


@pytest.mark.parametrize(("noise", "uploads"), [(1.0, 1), (2.0, 50), (6.0, 100)])
def test_the_accountants_of_the_library_agree(noise: float, uploads: int) -> None:
    spent = Budget(1.0, 1e-5).spent(noise, uploads)
    event = dp_accounting.GaussianDpEvent(noise)
    exact, loose = pld.PLDAccountant(), rdp.RdpAccountant()
    for accountant in (exact, loose):
        accountant.compose(event, uploads)
    assert spent == pytest.approx(exact.get_epsilon(1e-5), rel=1e-4)
    assert spent < loose.get_epsilon(1e-5)


def test_budgets_are_read_as_written() -> None:
    assert Budget.parse("off") is None
    assert Budget.parse("epsilon=2") == Budget(2.0, 1e-5, 1.0)
    assert Budget.parse("clip=0.1, delta=1e-6,epsilon=3") == Budget(3.0, 1e-6, 0.1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("epsilon=0", "positive"),
        ("epsilon=inf", "positive and finite"),
        ("epsilon=nan", "positive"),
        ("epsilon=1,delta=1", "between 0 and 1"),
        ("epsilon=1,clip=-1", "positive"),
        ("epsilon", "not name=value"),
        ("delta=1e-5", "epsilon=8"),
        ("eps=8", "did you mean 'epsilon'"),
        ("", "not name=value"),
    ],
)
def test_budgets_that_cannot_be_are_refused(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        Settings(dp=text).check()


# Clipping --------------------------------------------------------------------------------------


def norms(message: Message) -> Tensor:
    return torch.cat([flat(t) for t in message.values()], dim=1).norm(dim=1)


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=6, max_size=6),
    st.floats(1e-3, 1e3),
)
def test_clipping_keeps_directions_and_what_is_within(
    values: Sequence[float], radius: float
) -> None:
    rows = torch.tensor(values, dtype=torch.float64)
    message = {"a": rows[:2].view(1, 2), "b": rows[2:].view(1, 2, 2)}
    before, after = norms(message), norms(cut := clipped(message, radius))
    assert after.item() == pytest.approx(min(before.item(), radius), rel=1e-12)
    if before.item() <= radius:
        assert_same_bits(message, cut)
    else:
        assert_close({n: t * radius / before for n, t in message.items()}, cut, 1e-12)


def test_clients_are_clipped_by_themselves_and_what_is_not_finite_is_no_change() -> None:
    message = {
        "a": torch.tensor([[3.0, 4.0], [0.3, 0.4], [math.nan, 1.0], [0.0, 0.0]]).double(),
        "b": torch.tensor([[0.0], [0.0], [1.0], [math.inf]]).double(),
    }
    cut = clipped(message, 1.0)
    expected = [[0.6, 0.8], [0.3, 0.4], [0.0, 0.0], [0.0, 0.0]]
    torch.testing.assert_close(cut["a"], torch.tensor(expected, dtype=torch.float64))
    assert cut["b"].tolist() == [[0.0], [0.0], [0.0], [0.0]]


# The mechanism ---------------------------------------------------------------------------------


def streams(clients: int, *, hashed: bool = False) -> Streams:
    return Streams([(0, k) for k in range(clients)], CPU, hashed)


def test_the_mechanism_by_hand() -> None:
    upload = {
        "model/w": torch.tensor([[1.0, 5.0]]),
        "model/b": torch.tensor([[2.0]]),
        "area": torch.tensor([0.25]),
        "weight": torch.tensor([731.0]),
        "effort": torch.tensor([3.0]),
    }
    received = {"model/w": torch.tensor([[1.0, 1.0]]), "model/b": torch.tensor([[-1.0]])}
    declared = [
        Declared("model/", {"model/w": (2,), "model/b": (1,)}, Role.MODEL),
        statistic("area", ()),
        count("weight"),
        public("effort"),
    ]
    guard = Guard(2.0, 0.0, declared)
    sent = guard(upload, received, streams(1).of_round(0))
    radius = 2 / math.sqrt(2)  # the model and the area are two kinds
    scale = radius / 5  # the model moved by (0, 4) and 3
    torch.testing.assert_close(sent["model/w"], torch.tensor([[1.0, 1 + 4 * scale]]))
    torch.testing.assert_close(sent["model/b"], torch.tensor([[-1 + 3 * scale]]))
    assert sent["area"].item() == 0.25, "within its radius"
    assert sent["weight"].item() == 1.0
    assert sent["effort"].item() == 3.0
    assert all(sent[n].dtype == t.dtype for n, t in upload.items())


@pytest.mark.parametrize("hashed", [False, True])
def test_noise_has_the_promised_deviation_on_every_number(hashed: bool) -> None:
    size = 20_000
    upload = {
        "model/w": torch.zeros(3, size, dtype=torch.float64),
        "statistic": torch.zeros(3, 2, size // 2, dtype=torch.float64),
    }
    declared = [
        Declared("model/", {"model/w": (size,)}, Role.MODEL),
        statistic("statistic", (2, size // 2)),
    ]
    guard = Guard(0.5, 1.7, declared)
    sent = guard(upload, {}, streams(3, hashed=hashed).of_round(4))
    rows = [row for t in sent.values() for row in t.flatten(1) / (2 * 0.5 * 1.7)]
    for row in rows:
        assert stats.kstest(row.numpy(), "norm").pvalue > 1e-4
        assert row.std().item() == pytest.approx(1, abs=4 / math.sqrt(2 * size))
    between = np.corrcoef(torch.stack(rows).numpy()) - np.eye(len(rows))
    assert np.abs(between).max() < 5 / math.sqrt(size), "no two have noise in common"


@pytest.mark.parametrize("shape", [(2,), (2, 1), (2, 3), (2, 4, 5), (1, 0)])
def test_normal_numbers_of_any_shape(shape: tuple[int, ...]) -> None:
    like = torch.zeros(shape)
    assert normal(streams(shape[0]).of_round(0), like).shape == shape


def test_noise_belongs_to_client_and_round() -> None:
    like, many, one = torch.zeros(3, 50), streams(3), Streams([(0, 1)], CPU)
    first = normal(many.of_round(0), like)
    assert torch.equal(first[1:2], normal(one.of_round(0), like[:1]))
    assert not torch.equal(first, normal(many.of_round(1), like))


def test_the_systems_numbers_are_normal_and_never_come_again() -> None:
    like = torch.zeros(1, 20_001)
    first, second = (normal(SystemDraws(), like).flatten() for _ in range(2))
    assert stats.kstest(first.numpy(), "norm").pvalue > 1e-4
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / math.sqrt(like.numel())


class Unlike(Draws):
    """Draws that stand for nothing that a run has."""

    def uniform(self, width: int, pointers: Sequence[int]) -> Tensor:
        return torch.full((pointers[-1], width), 0.5, dtype=torch.float64)


def test_a_guard_with_draws_of_its_own_does_not_take_the_runs() -> None:
    upload = {"model/w": torch.zeros(1, 3)}
    declared = [Declared("model/", {"model/w": (3,)}, Role.MODEL)]
    guard = Guard(1.0, 1.0, declared, SystemDraws())
    sent = [guard(upload, {}, Unlike())["model/w"] for _ in range(2)]
    assert not torch.equal(*sent)


# No method gets past it ------------------------------------------------------------------------


def upload_of(simulation: Simulation, guard: Guard | None) -> tuple[Message, Message]:
    """What the clients receive and send in the next round."""
    received = simulation.method.download(simulation.states[0], range(len(simulation.cohort)))
    clients = replace(simulation.clients, guard=guard)
    upload = clients.train(received, simulation.memory, simulation.round).uploads
    return received, upload


EARLY = {"fedsage+": {"first_rounds": 1}}  # to send something in the rounds that are looked at


@every_method
def test_uploads_of_any_two_sites_are_within_the_sensitivity(name: str) -> None:
    """Before noise: everything that may differ between graphs lies in a ball of radius clip."""
    clip, method = 0.3, create(name, EARLY.get(name))
    simulation = simulate(method, small_federation((17, 9, 24, 12)), 2, lr=0.5)
    declared = simulation.servers[0].declared_uploads
    tallies, publics = (
        [n for entry in declared if entry.role is role for n in entry.shapes]
        for role in (Role.COUNT, Role.PUBLIC)
    )
    guard = Guard(clip, 0.0, declared)
    received, upload = upload_of(simulation, guard)
    for tally in tallies:
        assert tally not in upload or (upload[tally] == 1).all()
    for known in upload.keys() & set(publics):
        assert len(upload[known].unique()) == 1, "the same for all clients of equal settings"
    rest = {n: t for n, t in upload.items() if n not in (*tallies, *publics)}
    if name == "local":
        assert not upload
        return
    moved = {n: t - received[n] if n in received else t for n, t in rest.items()}
    assert (norms(moved) <= clip * (1 + 1e-9)).all()
    assert (norms(moved) > 0.1 * clip).all(), "and it is not lost"


@every_method
def test_every_method_runs_under_noise_alike_on_both_engines(name: str) -> None:
    chosen = {"dropout": 0.5, "participation": 0.75, "dp": "epsilon=300,clip=0.5"}
    method = create(name, EARLY.get(name))
    stacked = simulate(method, small_federation(), 4, **chosen)
    sequential = simulate(method, small_federation(), 4, engine="sequential", **chosen)
    assert_close(stacked.tensors(), sequential.tensors(), 1e-5)
    assert all(t.double().isfinite().all() for t in stacked.tensors().values())


def test_seeds_side_by_side_have_the_noise_they_have_alone() -> None:
    federations = [small_federation(seed=seed) for seed in (0, 1)]
    both = simulate("fedavg", federations, 3, dp=DP)
    for s, federation in enumerate(federations):
        alone = simulate("fedavg", federation, 3, dp=DP)
        assert_close(both.states[s], alone.states[0], 1e-9)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@every_method
def test_replayed_rounds_have_the_noise_of_rounds(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = {"device": "cuda", "dtype": "float32", "dp": "epsilon=300,clip=0.5"}
    replayed = simulate(name, small_federation(), 4, **chosen)
    monkeypatch.setattr(Replay, "__call__", lambda self, round_index: None)
    assert_close(
        replayed.tensors(), simulate(name, small_federation(), 4, **chosen).tensors(), 1e-5
    )


def test_noise_is_not_the_dropout_of_the_same_round() -> None:
    """The stream goes on after training: with another number of steps the noise is another."""
    federation = small_federation()
    few, many = (
        simulate("fedavg", federation, 1, dropout=0.5, epochs=n, dp=DP, lr=1e-12) for n in (1, 2)
    )
    gaps = [(few.states[0][n] - t).abs().max() for n, t in many.states[0].items()]
    assert min(gaps) > 0.01


def test_the_servers_model_is_the_mean_of_noised_updates() -> None:
    """The noise on the mean of K equal weights has the deviation 2 · clip · z / sqrt(K)."""
    federation = small_federation((17, 9, 24, 9) * 4)
    simulation = simulate("fedavg", federation, 0, dp="epsilon=8,clip=1e-3", hidden=512)
    before = {n: t.clone() for n, t in simulation.states[0].items()}
    simulation.advance()
    moved = torch.cat([(t - before[n]).flatten() for n, t in simulation.states[0].items()])
    expected = 2 * 1e-3 * Budget(8.0).multiplier(1) / math.sqrt(16)
    assert moved.std().item() == pytest.approx(expected, rel=0.05)


def test_a_diverged_update_leaves_as_noise_alone() -> None:
    class Poisoned(FedAvg):
        def upload(self, local: Local) -> Message:
            sent = super().upload(local)
            return sent | {"model/convs.0.weight": sent["model/convs.0.weight"] * math.nan}

    simulation = simulate(Poisoned(), small_federation(), 1, dp=DP)
    assert all(t.isfinite().all() for t in simulation.states[0].values())


# Runs ------------------------------------------------------------------------------------------


def test_a_run_spends_its_budget_round_by_round(tmp_path: Path) -> None:
    records: list[dict[str, object]] = []
    result = polyphily.run(
        "fedavg",
        small_federation(),
        rounds=4,
        hidden=8,
        dp=DP,
        out=tmp_path / "run",
        progress=records.append,
    )
    spent = [float(str(record["epsilon"])) for record in records]
    noise = Budget(8.0, 1e-5).multiplier(4)
    assert spent == pytest.approx([Budget(8.0, 1e-5).spent(noise, n) for n in (1, 2, 3, 4)])
    assert spent[-1] == pytest.approx(8)
    assert result.summary["dp"] == {
        "unit": "all uploads of a client",
        "target_epsilon": 8.0,
        "epsilon": spent[-1],
        "delta": 1e-5,
        "clip": 0.5,
        "noise_multiplier": pytest.approx(noise),
        "noise_deviation": pytest.approx(noise),
    }
    assert "dp" not in polyphily.run("fedavg", small_federation(), rounds=1, hidden=8).summary


def test_clients_that_are_not_asked_spend_nothing() -> None:
    execution = Execution(
        create("fedavg"),
        [small_federation()],
        Settings(rounds=6, hidden=8, participation=0.5, failures=0.5, dp=DP),
        None,
    )
    execution.advance_to_the_end(lambda _: None)
    uploads = execution.simulation.upload_counts
    assert uploads.sum() == 6, "one of the two that are asked fails to answer"
    budget = Budget(8.0, 1e-5)
    spent = budget.spent(budget.multiplier(6), int(uploads.max()))
    assert execution.reports[-1]["epsilon"] == pytest.approx(spent)
    assert spent < 8


def test_a_method_that_sends_nothing_spends_nothing() -> None:
    result = polyphily.run("local", small_federation(), rounds=2, hidden=8, dp=DP)
    assert result.summary["dp"]["epsilon"] == 0


def test_a_resumed_run_has_the_same_noise_and_has_spent_as_much(tmp_path: Path) -> None:
    settings = Settings(rounds=4, hidden=8, participation=0.5, dp=DP)

    def execution(folder: str) -> Execution:
        made = Execution(create("fedavg"), [small_federation()], settings, tmp_path / folder)
        assert made.folder
        if not (tmp_path / folder).exists():
            made.folder.create(made.config(), made.federations)
        return made

    whole = execution("whole")
    expected = whole.go().summary
    part = execution("part")
    for _ in range(2):
        record = part._one_round()
        part.reports.append(record)
        assert isinstance(part.folder, RunFolder)
        part.folder.append(record)
    part.checkpoint()
    again = execution("part")
    assert again.restore() == 2
    found = again.go().summary
    assert found["dp"] == expected["dp"]
    assert_same_bits(whole.simulation.tensors(), again.simulation.tensors())


def test_stopping_early_would_tell_of_scores() -> None:
    with pytest.raises(UserError, match="patience"):
        polyphily.run("fedavg", small_federation(), rounds=2, dp=DP, patience=2)


# Sums instead of uploads -----------------------------------------------------------------------


@pytest.mark.parametrize("name", SUMMABLE)
def test_a_declared_method_needs_sums_only(name: str) -> None:
    """The server's new state from all uploads equals that from their weighted sums."""
    simulation = simulate(name, small_federation((17, 9, 24, 12)), 2, epochs="1-3")
    method = simulation.method
    weights = simulation.servers[0].weights_of_means()
    _, upload = upload_of(simulation, None)
    sums = {n: t.sum(dim=0, keepdim=True) for n, t in privacy.weighed(upload, weights).items()}
    one = Uploads((), privacy.unweighed(sums, weights))
    states = [
        method.aggregate(simulation.states[0], sent, np.random.default_rng(0))
        for sent in (Uploads((0, 1, 2, 3), upload), one)
    ]
    assert_close(*states, 1e-12)


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(SUMMABLE)))
def test_methods_that_need_every_upload_refuse_and_say_why(name: str) -> None:
    refusal = f"{re.escape(name)} cannot take --secure-aggregation: ...."
    with pytest.raises(UserError, match=refusal):
        polyphily.run(name, small_federation(), rounds=1, hidden=8, secure_aggregation=True)


def test_which_methods_can_do_with_sums() -> None:
    named = {"fedavg", "fedprox", "fedper", "fedath", "fedhero", "moon", "fedopt", "scaffold"}
    assert {*named, "fedproto", "local"} <= set(SUMMABLE)
    assert not {"fednova", "fedspa", "fedgsp", "s2fgl"} & set(SUMMABLE)


@pytest.mark.parametrize("chosen", [{"sizes": (9, 9)}, {"participation": 0.5}])
def test_too_few_clients_to_hide_among_are_refused(chosen: dict[str, object]) -> None:
    federation = small_federation(chosen.pop("sizes", (9, 9, 9, 9)))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="at least 3 clients in a round, not 2"):
        polyphily.run("fedavg", federation, rounds=1, secure_aggregation=True, **chosen)


# The command line ------------------------------------------------------------------------------


def command(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """A command's exit status, and all that it says."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["polyphily", *map(str, arguments)])
        patch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as caught:
            main()
    said = capsys.readouterr()
    return int(caught.value.code or 0), said.out + said.err


SMALL = ("--dataset", "csbm:nodes=40-60,features=4", "--clients", "3", "--hidden", "4")


def test_a_run_says_what_it_spent_and_cannot_be_made_longer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    asked = ("run", "fedavg", *SMALL, "--rounds", "2", "--dp", "epsilon=8", "--no-report")
    status, said = command(capsys, *asked, "--out", out)
    assert (status, "epsilon 8 at delta 1e-05" in said) == (0, True)
    status, said = command(capsys, "run", "--resume", out, "--rounds", "4")
    assert status == 2
    assert "the noise of --dp was chosen for" in said


def test_a_comparison_is_refused_before_anything_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "both"
    asked = ("compare", "fedavg", "fedspa", *SMALL, "--secure-aggregation", "--out", out)
    assert command(capsys, *asked)[0] == 2
    assert not out.exists()


@every_method
def test_methods_say_what_happens_to_each_tensor(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, said = command(capsys, "methods", "show", name, "--json")
    facts, method = json.loads(said), create(name)
    assert status == 0
    roles = {
        tensor: entry.role
        for entry in method.uploads(example_sizes(method))
        for tensor in entry.shapes
    }
    words = {Role.COUNT: "ones are sent", Role.PUBLIC: "sent as it is"}
    assert {row["name"]: row["dp"] for row in facts["uploaded"]} == {
        tensor: words.get(role, "clipped and noised") for tensor, role in roles.items()
    }
    assert facts["secure_aggregation"]["possible"] == (name in SUMMABLE)
    assert bool(facts["secure_aggregation"]["why_not"]) == (name not in SUMMABLE)
