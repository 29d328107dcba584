"""Dropout masks belong to (seed, client, round): nobody else in the cohort changes them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from builders import CPU
from polyphily.nn.draws import Draws, Streams

MANY = settings(max_examples=50, deadline=None)
LEVELS = 65536
Key = tuple[int, int]

keys = st.lists(
    st.tuples(st.integers(0, 2**40), st.integers(0, 500)), min_size=1, max_size=6, unique=True
)
rounds = st.integers(0, 1000)
rates = st.sampled_from([0.1, 0.5, 0.8, 0.999])


class Kind:
    """Which of the two ways of drawing the tests of this file run on."""

    hashed = False


@pytest.fixture(autouse=True, scope="module", params=[False, True], ids=["generators", "hashes"])
def kind(request: pytest.FixtureRequest) -> None:
    Kind.hashed = request.param


def draws_of(keys: Sequence[Key], round_index: int = 0) -> Draws:
    return Streams(keys, CPU, Kind.hashed).of_round(round_index)


def pointers(sizes: Sequence[int]) -> list[int]:
    return [0, *accumulate(sizes)]


def drawn(
    keys: Sequence[Key],
    sizes: Sequence[int],
    round_index: int = 0,
    *,
    p: float = 0.5,
    width: int = 7,
    calls: int = 1,
) -> list[Tensor]:
    """Every client's masks of one or more calls, as rows of ones that went through dropout."""
    draws = draws_of(keys, round_index)
    x = torch.ones(sum(sizes), width, dtype=torch.float64)
    masks = [draws.dropout(x, p, pointers(sizes)) for _ in range(calls)]
    return [torch.cat(parts) for parts in zip(*(m.split(list(sizes)) for m in masks), strict=True)]


def sizes_for(members: Sequence[Key], seed: int) -> list[int]:
    return [1 + (seed * 7 + k * 13) % 11 for k in range(len(members))]


@MANY
@given(keys, rounds, rates, st.integers(0, 100), st.integers(1, 5))
def test_a_client_draws_the_same_alone_and_in_any_cohort(
    members: list[Key], round_index: int, p: float, seed: int, width: int
) -> None:
    sizes = sizes_for(members, seed)
    options = {"p": p, "width": width, "calls": 3}
    stacked = drawn(members, sizes, round_index, **options)
    for k, key in enumerate(members):
        alone = drawn([key], [sizes[k]], round_index, **options)
        assert torch.equal(alone[0], stacked[k])


@MANY
@given(keys.flatmap(lambda k: st.tuples(st.just(k), st.permutations(range(len(k))))), rounds)
def test_permuting_clients_permutes_their_masks(
    ordered: tuple[list[Key], list[int]], round_index: int
) -> None:
    members, order = ordered
    sizes = sizes_for(members, 3)
    straight = drawn(members, sizes, round_index, calls=2)
    shuffled = drawn([members[k] for k in order], [sizes[k] for k in order], round_index, calls=2)
    for position, k in enumerate(order):
        assert torch.equal(shuffled[position], straight[k])


@MANY
@given(keys, rounds)
def test_clients_without_rows_change_nothing(members: list[Key], round_index: int) -> None:
    sizes = sizes_for(members, 1)
    plain = drawn(members, sizes, round_index)
    padded_keys = [(7, 900), *[key for member in members for key in (member, (7, 901))]]
    padded_sizes = [0, *[size for own in sizes for size in (own, 0)]]
    padded = drawn(padded_keys, padded_sizes, round_index)
    assert [len(mask) for mask in padded[::2]] == [0] * (len(members) + 1)
    for left, right in zip(padded[1::2], plain, strict=True):
        assert torch.equal(left, right)


@MANY
@given(keys, rounds)
def test_seeds_clients_rounds_and_calls_all_differ(members: list[Key], round_index: int) -> None:
    """64 fair coins each: two equal ones would be a miracle."""
    seed, client = members[0]
    streams = [
        ((seed, client), round_index),
        ((seed + 1, client), round_index),
        ((seed, client + 1), round_index),
        ((seed, client), round_index + 1),
        ((client, seed), round_index) if client != seed else ((seed, client), round_index + 2),
    ]
    masks = [drawn([key], [64], r, width=1)[0] for key, r in streams]
    masks.append(drawn([(seed, client)], [64], round_index, width=1, calls=2)[0][64:])
    for i, left in enumerate(masks):
        for right in masks[i + 1 :]:
            assert not torch.equal(left, right)


@pytest.mark.parametrize("p", [0.05, 0.3, 0.5, 0.75, 0.99])
def test_the_share_kept_is_as_asked_and_the_mean_is_preserved(p: float) -> None:
    kept = drawn([(3, 0), (3, 1)], [10_000, 10_000], p=p, width=20)
    for mask in kept:
        error = (p * (1 - p) / mask.numel()) ** 0.5
        assert abs(float((mask == 0).double().mean()) - p) < 5 * error
        assert abs(float(mask.mean()) - 1) < 5 * error / (1 - p)


def test_neighbouring_entries_are_independent() -> None:
    """Each number drawn serves four entries; they must not look alike."""
    mask = drawn([(0, 0)], [100_000], width=4)[0].bool().double() - 0.5
    entries = mask.flatten()
    for lag in (1, 2, 3, 4, 8):
        product = float((entries[lag:] * entries[:-lag]).mean()) * 4
        assert abs(product) < 5 / len(entries) ** 0.5


def test_streams_of_neighbouring_clients_and_rounds_are_uncorrelated() -> None:
    n = 100_000
    streams = [((0, 0), 0), ((0, 1), 0), ((0, 0), 1), ((1, 0), 0)]
    masks = [drawn([key], [n], r, width=1)[0].bool().double() - 0.5 for key, r in streams]
    for i, left in enumerate(masks):
        for right in masks[i + 1 :]:
            assert abs(float((left * right).mean()) * 4) < 5 / n**0.5


@pytest.mark.parametrize("p", [0.1, 0.5, 1 / 3, 0.999])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_kept_is_scaled_up(p: float, dtype: torch.dtype) -> None:
    x = torch.linspace(1, 2, 3000, dtype=dtype).view(-1, 3)
    out = draws_of([(0, 0)]).dropout(x, p, [0, len(x)])
    assert out.dtype == dtype
    kept = out != 0
    assert 0 < int(kept.sum()) < out.numel()
    level = LEVELS / (LEVELS - round(p * LEVELS))
    torch.testing.assert_close(out[kept], x[kept] * level)
    assert level == pytest.approx(1 / (1 - p), rel=0.01)


def test_no_dropout_is_the_identity_and_draws_nothing() -> None:
    x = torch.randn(5, 3)
    draws, fresh = draws_of([(0, 0)]), draws_of([(0, 0)])
    assert draws.dropout(x, 0.0, [0, 5]) is x
    assert torch.equal(draws.dropout(x, 0.5, [0, 5]), fresh.dropout(x, 0.5, [0, 5]))


@pytest.mark.parametrize("shape", [(40,), (40, 3), (40, 2, 3)])
def test_any_shape_is_dropped_entry_by_entry(shape: tuple[int, ...]) -> None:
    x = torch.ones(shape)
    out = draws_of([(0, 0), (0, 1)]).dropout(x, 0.5, [0, 15, 40])
    assert out.shape == shape
    flat = draws_of([(0, 0), (0, 1)]).dropout(x.view(40, -1), 0.5, [0, 15, 40])
    assert torch.equal(out.view(40, -1), flat)
    assert set(out.unique().tolist()) == {0.0, 2.0}


def test_no_rows_at_all() -> None:
    x = torch.ones(0, 3)
    assert draws_of([(0, 0)]).dropout(x, 0.5, [0, 0]).shape == (0, 3)


def test_the_gradient_passes_where_the_input_was_kept() -> None:
    x = torch.ones(200, requires_grad=True)
    out = draws_of([(0, 0)]).dropout(x, 0.25, [0, 200])
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, out.detach())


def test_the_masks_are_the_same_on_every_machine() -> None:
    """Pinned: runs made with one release must be repeatable with the next."""
    mask = draws_of([(0, 0)]).dropout(torch.ones(32), 0.5, [0, 32])
    pinned = {False: "01001101110010111100001000111000", True: "11111101010001010010010111101000"}
    assert "".join(str(int(kept)) for kept in mask.bool()) == pinned[Kind.hashed]


def test_uniform_numbers_fill_the_unit_interval_and_belong_to_clients() -> None:
    keys, sizes = [(0, 0), (0, 1)], [30_000, 20_000]
    both = draws_of(keys).uniform(2, pointers(sizes))
    assert both.shape == (50_000, 2)
    assert 0 <= float(both.min()) < 0.001
    assert 0.999 < float(both.max()) < 1
    counts = torch.histc(both, 20, 0, 1)
    assert (counts - 5000).abs().max() < 5 * 5000**0.5
    alone = draws_of(keys[1:]).uniform(2, [0, 20_000])
    assert torch.equal(both[30_000:], alone)
    assert not torch.equal(both[:20_000], alone)


def test_the_round_may_be_a_tensor() -> None:
    if Kind.hashed:
        x = torch.ones(64)
        streams = Streams([(0, 0)], CPU, hashed=True)
        given_number = streams.of_round(5).dropout(x, 0.5, [0, 64])
        given_tensor = streams.of_round(torch.tensor(5)).dropout(x, 0.5, [0, 64])
        assert torch.equal(given_number, given_tensor)
