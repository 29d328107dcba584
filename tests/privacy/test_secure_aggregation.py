"""Secure aggregation: the sum is right, and nothing but the sum can be had."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

pytest.importorskip("flwr")

from cryptography.fernet import InvalidToken

import polyphily
from cases import assert_close, simulate, small_federation
from polyphily.core.declarations import example_sizes
from polyphily.core.local import Local
from polyphily.core.messages import Message
from polyphily.core.method import METHODS, create
from polyphily.errors import TrainingError
from polyphily.methods.fedavg import FedAvg
from polyphily.privacy.crypto import combine_shares
from polyphily.privacy.secure_aggregation import (
    STEP,
    Numbers,
    Party,
    ProtocolError,
    decode,
    encode,
    error_bound,
    run_round,
    shared_key,
    stream,
    threshold,
    to_secret,
    tolerated,
)

SUMMABLE = [
    n for n in sorted(METHODS) if not create(n).reason_against_sums(example_sizes(create(n)))
]
PARTIES = (0, 3, 4, 7, 9, 12, 15)  # five must stay
LENGTH = 4000


def secrets(parties: tuple[int, ...] = PARTIES, seed: int = 0) -> dict[int, Numbers]:
    """Small numbers that would be plain to see."""
    rng = np.random.default_rng(seed)
    return {k: encode(rng.normal(size=LENGTH), len(parties)) for k in parties}


def total(numbers: Mapping[int, Numbers]) -> Numbers:
    return np.stack(list(numbers.values())).sum(axis=0)


def looks_random(numbers: Numbers) -> bool:
    """Whether the numbers could be even draws from all of 64 bits."""
    return bool(stats.kstest(numbers / 2.0**64, "uniform").pvalue > 1e-6)


def recovered(shares: Sequence[bytes]) -> bytes | None:
    """What shares give; None where they give nothing that could be a secret."""
    try:
        secret: bytes = combine_shares(list(shares))
        return secret
    except ValueError:
        return None


# Numbers ---------------------------------------------------------------------------------------


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), st.integers(1, 1000))
def test_numbers_are_kept_to_half_a_step(values: list[float], parties: int) -> None:
    exact = np.array(values)
    assert np.abs(decode(encode(exact, parties)) - exact).max() <= STEP / 2


@given(st.data())
def test_sums_are_right_to_the_stated_error(data: st.DataObject) -> None:
    parties = data.draw(st.integers(3, 40))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    values = rng.normal(scale=1e4, size=(parties, 7))
    found = decode(total({k: encode(row, parties) for k, row in enumerate(values)}))
    assert np.abs(found - values.sum(axis=0)).max() <= error_bound(parties) * (1 + 1e-6)


@pytest.mark.parametrize("value", [1e13, np.inf, np.nan])
def test_numbers_too_large_to_be_summed_are_refused(value: float) -> None:
    with pytest.raises(TrainingError, match="too large"):
        encode(np.array([0.0, value]), 10)


# The protocol ----------------------------------------------------------------------------------


def test_the_masks_cancel() -> None:
    numbers = secrets()
    np.testing.assert_array_equal(run_round(numbers, PARTIES).total(), total(numbers))


@pytest.mark.parametrize("gone", [(0,), (7,), (9,), (0, 9), (3, 4)])
def test_masks_of_parties_that_drop_out_are_taken_off(gone: tuple[int, ...]) -> None:
    numbers = {k: own for k, own in secrets().items() if k not in gone}
    seen = run_round(numbers, PARTIES)
    assert seen.lost() == sorted(gone)
    np.testing.assert_array_equal(seen.total(), total(numbers))


def test_five_of_seven_must_stay() -> None:
    numbers = {k: own for k, own in secrets().items() if k in (0, 3, 4, 9)}
    with pytest.raises(TrainingError, match="4 of 7 clients answered, 5 are needed"):
        run_round(numbers, PARTIES)


def test_two_are_no_crowd() -> None:
    with pytest.raises(TrainingError, match="2 clients take part, 3 are needed"):
        run_round(secrets((0, 1)), (0, 1))


@settings(max_examples=8, deadline=None)
@given(st.sets(st.integers(0, 1000), min_size=3, max_size=8), st.data())
def test_any_parties_with_any_of_them_gone(people: set[int], data: st.DataObject) -> None:
    parties = tuple(sorted(people))
    spare = len(parties) - threshold(len(parties))
    gone = data.draw(st.sets(st.sampled_from(parties), max_size=spare))
    numbers = {k: own for k, own in secrets(parties).items() if k not in gone}
    np.testing.assert_array_equal(run_round(numbers, parties).total(), total(numbers))


# What the server sees --------------------------------------------------------------------------


def test_answers_are_noise_to_the_server_alone_and_in_any_subset() -> None:
    numbers = secrets()
    seen = run_round(numbers, PARTIES)
    assert not looks_random(numbers[0])
    for count in range(1, len(PARTIES) + 1):
        for some in combinations(PARTIES, count):
            assert looks_random(np.stack([seen.masked[k] for k in some]).sum(axis=0))


def test_not_even_with_all_that_was_revealed() -> None:
    """Seeds come off for the sum; what is left of one answer, or of four, is still masked."""
    numbers = secrets()
    seen = run_round(numbers, PARTIES)
    bare = {}
    for party, masked in seen.masked.items():
        told = [share for (of, _), share in seen.shares.items() if of == party]
        bare[party] = masked - stream(combine_shares(told[: seen.required]), LENGTH)
    for count in range(1, len(PARTIES)):
        for some in combinations(PARTIES, count):
            assert looks_random(np.stack([bare[k] for k in some]).sum(axis=0))
    np.testing.assert_array_equal(total(bare), total(numbers))


def test_the_same_numbers_look_different_in_every_round() -> None:
    numbers = secrets()
    first, second = (run_round(numbers, PARTIES).masked[3] for _ in range(2))
    assert looks_random(first - second)


def test_shares_below_the_threshold_do_not_give_a_seed_back() -> None:
    seen = run_round(secrets(), PARTIES)
    told = [share for (of, _), share in seen.shares.items() if of == 3]
    seed = combine_shares(told[:5])
    assert combine_shares(told[2:]) == seed, "any five do"
    assert all(recovered(four) != seed for four in combinations(told, 4))


def test_two_that_collude_with_the_server_still_see_noise() -> None:
    """Parties 0 and 9 give the server all they have; 3's answer stays masked by the other four."""
    numbers = secrets()
    least = threshold(len(PARTIES))
    people = {k: Party(k, least) for k in PARTIES}
    keys = {k: party.keys for k, party in people.items()}
    letters = {k: party.share(keys) for k, party in people.items()}
    masked = people[3].mask(numbers[3], {k: letters[k][3] for k in PARTIES if k != 3})
    for traitor in (0, 9):
        people[traitor].mask(
            numbers[traitor], {k: letters[k][traitor] for k in PARTIES if k != traitor}
        )
        between = stream(key_of(people[traitor], keys[3].mask), LENGTH)
        masked = masked - between if traitor < 3 else masked + between
    assert looks_random(masked)
    known = [people[traitor]._shares[3] for traitor in (0, 9)]
    for honest in (4, 7):
        people[honest].mask(
            numbers[honest], {k: letters[k][honest] for k in PARTIES if k != honest}
        )
    more = [*known, *(people[k]._shares[3] for k in (3, 4, 7))]
    private = to_secret(people[3]._mask_key)
    for kind, secret in enumerate((people[3]._seed, private)):
        assert recovered([share[kind] for share in known]) != secret
        assert recovered([share[kind] for share in more]) == secret, "three more would tell"


def key_of(party: Party, public: bytes) -> bytes:
    return base64.urlsafe_b64decode(shared_key(party._mask_key, public))


# What a party refuses --------------------------------------------------------------------------


def begun() -> tuple[dict[int, Party], dict[int, dict[int, bytes]]]:
    people = {k: Party(k, 5) for k in PARTIES}
    keys = {k: party.keys for k, party in people.items()}
    return people, {k: party.share(keys) for k, party in people.items()}


def letters_to(number: int, letters: Mapping[int, Mapping[int, bytes]]) -> dict[int, bytes]:
    return {k: own[number] for k, own in letters.items() if k != number}


def test_a_party_reveals_once_and_never_seed_and_key_of_one() -> None:
    people, letters = begun()
    for k, party in people.items():
        party.mask(secrets()[k], letters_to(k, letters))
    with pytest.raises(ProtocolError, match="out of turn"):
        people[0].reveal(PARTIES)
    with pytest.raises(ProtocolError, match="4 parties are left, 5 are needed"):
        people[3].confirm([0, 3, 4, 9])
    people[7].confirm(PARTIES)
    with pytest.raises(ProtocolError, match="agreed to another list"):
        people[7].reveal(PARTIES[:-1])
    people[4].confirm(PARTIES[:-1])
    shares = people[4].reveal(PARTIES[:-1])
    assert shares == {k: people[4]._shares[k][k == PARTIES[-1]] for k in PARTIES}
    for step in (people[4].confirm, people[4].reveal):
        with pytest.raises(ProtocolError, match="out of turn"):
            step(PARTIES)


@pytest.mark.parametrize("wrong", [(0, 3, 4, 7, 9, 9), (0, 3, 4, 7, 9, 8), (3, 4, 7, 9, 12)])
def test_a_party_does_not_agree_to_any_list(wrong: tuple[int, ...]) -> None:
    """One that names a party twice, a stranger, or not the party itself."""
    people, letters = begun()
    people[0].mask(secrets()[0], letters_to(0, letters))
    with pytest.raises(ProtocolError, match="party 0"):
        people[0].confirm(wrong)
    with pytest.raises(ProtocolError, match="out of turn"):
        people[0].confirm(PARTIES)


@given(st.integers(3, 300))
def test_two_groups_that_agree_share_an_honest_party(parties: int) -> None:
    """Of any two groups as large as the threshold, the common part has more than the colluders."""
    least, colluders = threshold(parties), tolerated(parties)
    assert 3 <= least <= parties
    assert 2 * least > parties + colluders
    assert least - colluders >= 2, "two honest parties are in every sum"
    assert colluders >= 1


def test_a_party_masks_once() -> None:
    people, letters = begun()
    people[0].mask(secrets()[0], letters_to(0, letters))
    with pytest.raises(ProtocolError, match="out of turn"):
        people[0].mask(secrets()[0], letters_to(0, letters))


def test_a_party_refuses_keys_that_were_exchanged() -> None:
    people = {k: Party(k, 5) for k in PARTIES}
    keys = {k: party.keys for k, party in people.items()}
    with pytest.raises(ProtocolError, match="not the keys"):
        people[0].share({**keys, 0: keys[3]})
    with pytest.raises(ProtocolError, match="not the keys"):
        people[3].share({**keys, 0: keys[4]})


def test_a_party_refuses_a_threshold_that_is_too_low() -> None:
    people = {k: Party(k, 4) for k in PARTIES}
    with pytest.raises(ProtocolError, match="4 parties could recover"):
        people[0].share({k: party.keys for k, party in people.items()})


def test_letters_of_others_cannot_be_passed_off() -> None:
    people, letters = begun()
    wrong = letters_to(0, letters) | {3: letters[4][0]}
    with pytest.raises(InvalidToken):
        people[0].mask(secrets()[0], wrong)


def test_too_few_letters_are_no_crowd() -> None:
    people, letters = begun()
    with pytest.raises(ProtocolError, match="2 parties are left, 5 are needed"):
        people[0].mask(secrets()[0], {3: letters[3][0]})


# Training --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SUMMABLE)
def test_training_is_the_same_to_the_stated_error(name: str) -> None:
    plain = simulate(name, small_federation(), 3, epochs="1-3")
    secure = simulate(name, small_federation(), 3, epochs="1-3", secure_aggregation=True)
    assert_close(plain.states[0], secure.states[0], 1e-5)


def test_one_aggregate_is_within_the_bound() -> None:
    plain, secure = (
        simulate(FedAvg(weighting="uniform"), small_federation(), 1, secure_aggregation=chosen)
        for chosen in (False, True)
    )
    for name, value in plain.states[0].items():
        assert (value - secure.states[0][name]).abs().max() <= STEP / 2 * (1 + 1e-6)


def test_a_client_that_fails_drops_out_of_the_sum() -> None:
    chosen = {"failures": 0.25, "epochs": 1}
    plain = simulate("fedavg", small_federation(), 3, **chosen)
    secure = simulate("fedavg", small_federation(), 2, secure_aggregation=True, **chosen)
    report = secure.advance()
    assert len(report.failed[0]) == 1
    assert_close(plain.states[0], secure.states[0], 1e-6)
    numbers = sum(t.numel() for t in secure.states[0].values()) + 1  # and the weight
    assert report.bytes_up[0] > 3 * 8 * numbers, "three answers of 64 bits, and keys and shares"


class Poisoned(FedAvg):
    """The first client's update is not a number."""

    def upload(self, local: Local) -> Message:
        sent = super().upload(local)
        name = "model/convs.0.weight"
        first = torch.tensor([key[1] == 0 for key in local.cohort.keys]).view(-1, 1, 1)
        return sent | {name: torch.where(first, torch.nan, sent[name])}


def test_an_update_that_is_not_finite_is_not_sent() -> None:
    plain = simulate(Poisoned(), small_federation(), 2)
    secure = simulate(Poisoned(), small_federation(), 1, secure_aggregation=True)
    assert secure.advance().refused == [[0]]
    assert_close(plain.states[0], secure.states[0], 1e-6)


def test_too_many_failures_end_the_run_with_the_last_good_model() -> None:
    simulation = simulate("fedavg", small_federation(), 0, secure_aggregation=True, failures=0.5)
    before = {n: t.clone() for n, t in simulation.states[0].items()}
    with pytest.raises(TrainingError, match="2 of 4 clients answered, 3 are needed"):
        simulation.advance()
    assert_close(before, simulation.states[0], 0)


def test_with_noise_too_and_in_the_summary(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    chosen = {"rounds": 2, "hidden": 8, "dp": "epsilon=100"}
    plain = polyphily.run("fedavg", small_federation(), **chosen)
    secure = polyphily.run("fedavg", small_federation(), secure_aggregation=True, **chosen)
    assert_close(plain.models["global"], secure.models["global"], 1e-5)
    assert secure.summary["dp"] == plain.summary["dp"]
    assert secure.summary["secure_aggregation"] == {
        "step": STEP,
        "error_bound_of_sums": 4 * STEP / 2,
        "threshold": 3,
        "colluding_clients_tolerated": 1,
    }
