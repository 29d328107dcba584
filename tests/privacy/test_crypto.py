"""Secret sharing, key agreement and encryption."""

from __future__ import annotations

import pytest

pytest.importorskip("cryptography")

from cryptography.fernet import InvalidToken
from hypothesis import given
from hypothesis import strategies as st

from polyphily.privacy.crypto import (
    LONGEST,
    PRIME,
    bytes_to_public_key,
    combine_shares,
    create_shares,
    decrypt,
    encrypt,
    generate_key_pairs,
    generate_shared_key,
    public_key_to_bytes,
    share_keys_plaintext_concat,
    share_keys_plaintext_separate,
)


@given(st.binary(max_size=LONGEST), st.data())
def test_any_threshold_shares_recover_the_secret(secret: bytes, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 9))
    threshold = data.draw(st.integers(1, count))
    shares = create_shares(secret, threshold, count)
    chosen = data.draw(st.permutations(shares))[:threshold]
    assert combine_shares(chosen) == secret
    assert combine_shares(shares) == secret, "more than the threshold do as well"


def test_fewer_shares_fit_every_secret() -> None:
    """For any other secret there is a share that completes those of the attacker to it."""
    shares = create_shares(b"yes", 2, 3)
    (index, value) = int.from_bytes(shares[0][:4]), int.from_bytes(shares[0][4:])
    for other in (b"yes", b"no", b"\0" * 48):
        first = int.from_bytes(b"\x01" + other)
        slope = (value - first) * pow(index, -1, PRIME) % PRIME
        completed = (2).to_bytes(4) + ((first + 2 * slope) % PRIME).to_bytes(66)
        assert combine_shares([shares[0], completed]) == other


def test_shares_differ_each_time() -> None:
    assert create_shares(b"secret", 3, 5)[0] != create_shares(b"secret", 3, 5)[0]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda shares: [shares[0], shares[0], shares[1]],
        lambda shares: [shares[0][:-1], *shares[1:]],
        lambda shares: [b"\0\0\0\0" + shares[0][4:], *shares[1:]],
        lambda shares: [shares[0][:4] + b"\xff" * 66, *shares[1:]],
        lambda shares: [],
    ],
)
def test_what_is_no_share_is_refused(spoil) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="share"):
        combine_shares(spoil(create_shares(b"secret", 3, 5)))


@pytest.mark.parametrize(("length", "threshold"), [(LONGEST + 1, 2), (4, 0), (4, 4)])
def test_impossible_sharing_is_refused(length: int, threshold: int) -> None:
    with pytest.raises(ValueError, match=r"secret|threshold"):
        create_shares(bytes(length), threshold, 3)


def test_two_parties_agree_on_a_key_that_no_third_has() -> None:
    (a, public_a), (b, public_b), (c, _) = (generate_key_pairs() for _ in range(3))
    key = generate_shared_key(a, bytes_to_public_key(public_key_to_bytes(public_b)))
    assert key == generate_shared_key(b, public_a)
    letter = encrypt(key, b"hello")
    assert decrypt(key, letter) == b"hello"
    with pytest.raises(InvalidToken):
        decrypt(generate_shared_key(c, public_a), letter)
    with pytest.raises(InvalidToken):
        decrypt(key, letter[:-4] + b"AAA=")


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.binary(), st.binary())
def test_a_letter_is_read_as_it_was_written(a: int, b: int, first: bytes, second: bytes) -> None:
    parts = (a, b, first, second)
    assert share_keys_plaintext_separate(share_keys_plaintext_concat(*parts)) == parts


def test_a_key_of_another_kind_is_refused() -> None:
    from cryptography.hazmat.primitives.asymmetric import ed25519

    with pytest.raises(ValueError, match="elliptic-curve"):
        bytes_to_public_key(public_key_to_bytes(ed25519.Ed25519PrivateKey.generate().public_key()))
