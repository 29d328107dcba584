"""Secure aggregation: the server learns the sum of the uploads, but no single upload.

This is the protocol of Bonawitz et al. (CCS 2017) against active adversaries (section 6), with
every party as every other party's neighbour. The server may lie, and some parties may help it.

1. `Party.keys`: each party generates two key pairs and publishes the public keys.
2. `Party.share`: each party draws a random seed. It splits the seed and its first private key into
   shares, of which any `threshold` recover the secret. Every other party gets its shares in a
   letter, which is encrypted with a key that the two parties derive from the second key pairs.
3. `Party.mask`: each party adds a mask made from its seed to its numbers. For every other party it
   adds or subtracts a mask made from the key that the two derive from the first key pairs. One of
   them adds it and the other subtracts it, so that these masks cancel in the sum.
4. `Party.confirm`: each party agrees to one list of the parties that answered. Between real sites
   it signs the list (`flower/masks.py`), and goes on only if `threshold` parties signed the same.
5. `Party.reveal`: the parties reveal their shares of the seeds of parties that answered, and their
   shares of the private keys of parties that dropped out. The server removes the remaining masks.

With n parties, of which c help the server, two groups of t parties have more than c parties in
common if 2t > n + c. Then at least one honest party is in both. It agrees to one list only, so no
party can be on the list for one group and off it for the other, and no two secrets of one party are
revealed. `threshold` is the smallest t above two thirds of n, and at least three.

Key agreement, secret sharing and encryption are in `crypto.py`. Two parts differ from Flower's
SecAgg+:

- Its masks come from a generator with a seed of 32 bits, all of which a server can try. Here they
  are the ChaCha20 stream of the whole key.
- Its numbers have 22 bits within a range that must be chosen beforehand. Here they are multiples of
  2^-24 in 64 bits.
"""

from __future__ import annotations

import base64
import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from torch import Tensor

from polyphily.core.messages import Message, Uploads
from polyphily.errors import PolyphilyError, TrainingError
from polyphily.nn.sparse import flat
from polyphily.privacy.crypto import (
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
from polyphily.privacy.differential import MIN_CLIENTS, unweighed, weighed

Numbers: TypeAlias = npt.NDArray[np.uint64]
STEP = 2.0**-24  # resolution of the fixed-point numbers
LIMIT = 2.0**63 * STEP  # bound of a sum
CURVE = ec.SECP384R1()  # the curve of Flower's keys


class ProtocolError(PolyphilyError):
    """A party refuses a step that could reveal its numbers."""


def threshold(parties: int) -> int:
    """Return how many parties must answer and agree: more than two thirds, and at least three.

    So many shares recover a secret, and a sum is over at least so many parties.

    >>> [threshold(n) for n in (3, 4, 5, 6, 7, 10)]
    [3, 3, 4, 5, 5, 7]
    """
    return max(MIN_CLIENTS, 2 * parties // 3 + 1)


def tolerated(parties: int) -> int:
    """Return how many parties may help a lying server without exposing an honest one.

    With t = `threshold(n)` it is the largest c with 2t > n + c that leaves at least two honest
    parties in every sum (c <= t - 2). Colluders know their own numbers, so they learn the sum of
    the honest parties' numbers.

    >>> [tolerated(n) for n in (3, 4, 5, 6, 7, 10)]
    [1, 1, 2, 3, 2, 3]
    """
    least = threshold(parties)
    return min(2 * least - parties - 1, least - 2)


def error_bound(parties: int) -> float:
    """Return the largest rounding error of an entry of the sum."""
    return parties * STEP / 2


def promise(parties: int) -> dict[str, Any]:
    """Return the entry of a run's summary about secure aggregation."""
    return {
        "secure_aggregation": {
            "step": STEP,
            "error_bound_of_sums": error_bound(parties),
            "threshold": threshold(parties),
            "colluding_clients_tolerated": tolerated(parties),
        }
    }


# Numbers ---------------------------------------------------------------------------------------


def encode(values: npt.NDArray[np.float64], parties: int) -> Numbers:
    """Convert to multiples of `STEP` modulo 2^64, small enough that the sum does not overflow.

    Raises:
        TrainingError: if a number is too large or not finite.
    """
    if not (np.abs(values) < LIMIT / parties - STEP).all():
        raise TrainingError(
            f"secure aggregation: a number of {np.abs(values).max():.3g} is too large to be "
            "masked. A smaller --lr or --clip 1.0 usually helps."
        )
    return np.rint(values / STEP).astype(np.int64).view(np.uint64)


def decode(numbers: Numbers) -> npt.NDArray[np.float64]:
    """Convert back from multiples of `STEP`."""
    return numbers.view(np.int64).astype(np.float64) * STEP


def stream(key: bytes, count: int) -> Numbers:
    """Return a mask of `count` numbers: the ChaCha20 stream of a 32-byte key that is used once."""
    cipher = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    return np.frombuffer(cipher.update(bytes(8 * count)), dtype=np.uint64)


def shared_key(private: ec.EllipticCurvePrivateKey, public: bytes) -> bytes:
    """Derive the 32-byte key that two parties share, in base64.

    Either party gets the same key from its own private key and the other's public key.
    """
    key: bytes = generate_shared_key(private, bytes_to_public_key(public))
    return key


def pair_mask(private: ec.EllipticCurvePrivateKey, public: bytes, count: int) -> Numbers:
    """Return the mask that two parties share."""
    return stream(base64.urlsafe_b64decode(shared_key(private, public)), count)


def to_secret(private: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a private key as a plain number, a sixth of the size of its file format."""
    number: int = private.private_numbers().private_value
    return number.to_bytes(CURVE.key_size // 8, "big")


def from_secret(secret: bytes) -> ec.EllipticCurvePrivateKey:
    """Return the private key that `to_secret` was given."""
    return ec.derive_private_key(int.from_bytes(secret, "big"), CURVE)


# Parties ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Keys:
    """A party's public keys: `mask` for the masks, `post` for the encryption of letters."""

    mask: bytes
    post: bytes


class Party:
    """One client in one round. Each step can be taken only once.

    Args:
        number: identifies the party among all parties.
        required: how many parties must take part, and how many shares recover a secret.
    """

    def __init__(self, number: int, required: int) -> None:
        self.number, self.required = number, required
        self._mask_key, public_mask = generate_key_pairs()
        self._letter_key, public_letter = generate_key_pairs()
        self.keys = Keys(public_key_to_bytes(public_mask), public_key_to_bytes(public_letter))
        self._seed = os.urandom(32)
        self._public: Mapping[int, Keys] = {}  # every party's public keys
        self._letter_keys: dict[int, bytes] = {}  # the key shared with each party, for letters
        self._shares: dict[int, tuple[bytes, bytes]] = {}  # of each party's seed and private key
        self._answered: set[int] = set()  # the list that this party agreed to
        self._steps = ["share", "mask", "confirm", "reveal"]  # still to be taken

    def _begin(self, step: str, parties: int) -> None:
        """Check that `step` comes next and that enough parties take part.

        A step that is refused cannot be taken again.
        """
        if not self._steps or self._steps.pop(0) != step:
            raise ProtocolError(f"party {self.number} was asked to {step} out of turn")
        if parties < self.required:
            raise ProtocolError(
                f"party {self.number}: {parties} parties are left, {self.required} are needed"
            )

    def share(self, keys: Mapping[int, Keys]) -> dict[int, bytes]:
        """Split the secrets into shares; return an encrypted letter for every other party.

        Args:
            keys: the public keys of all parties that take part, including this one.
        """
        self._begin("share", len(keys))
        all_keys = [key for entry in keys.values() for key in (entry.mask, entry.post)]
        if len(set(all_keys)) < len(all_keys) or keys.get(self.number) != self.keys:
            raise ProtocolError(f"party {self.number}: these are not the keys that were sent")
        if self.required < threshold(len(keys)):
            raise ProtocolError(
                f"party {self.number}: {self.required} parties could recover its secrets, which is "
                "too few"
            )
        self._public = dict(sorted(keys.items()))
        seeds = create_shares(self._seed, self.required, len(keys))
        privates = create_shares(to_secret(self._mask_key), self.required, len(keys))
        letters = {}
        for other, seed, private in zip(self._public, seeds, privates, strict=True):
            if other == self.number:
                self._shares[other] = seed, private
                continue
            text = share_keys_plaintext_concat(self.number, other, seed, private)
            self._letter_keys[other] = shared_key(self._letter_key, self._public[other].post)
            letters[other] = encrypt(self._letter_keys[other], text)
        return letters

    def mask(self, numbers: Numbers, letters: Mapping[int, bytes]) -> Numbers:
        """Read the letters of the other parties and return the masked numbers.

        Args:
            numbers: what is to be summed.
            letters: to this party, from every other party that takes part.
        """
        self._begin("mask", len(letters) + 1)
        masked = numbers + stream(self._seed, len(numbers))
        for other, letter in letters.items():
            text = decrypt(self._letter_keys[other], letter)
            source, target, seed, private = share_keys_plaintext_separate(text)
            if (source, target) != (other, self.number):
                raise ProtocolError(
                    f"party {self.number}: got a letter from {source} to {target} in place of one "
                    f"from {other}"
                )
            self._shares[other] = seed, private
            between = pair_mask(self._mask_key, self._public[other].mask, len(numbers))
            masked = masked + between if self.number > other else masked - between
        return masked

    @property
    def members(self) -> frozenset[int]:
        """The parties whose letters arrived, and this one. The masks are made for them."""
        return frozenset(self._shares)

    def confirm(self, answered: Collection[int]) -> None:
        """Agree to the list of parties that answered. There is no second list."""
        self._begin("confirm", len(set(answered)))
        if len(set(answered)) < len(answered) or not set(answered) <= self.members:
            raise ProtocolError(
                f"party {self.number}: the list of parties that answered names some twice, or some "
                "that did not take part"
            )
        if self.number not in answered:
            raise ProtocolError(f"party {self.number} answered, but is not on the list")
        self._answered = set(answered)

    def reveal(self, answered: Collection[int]) -> dict[int, bytes]:
        """Return shares of the seeds of `answered` and of the private keys of all others.

        Both secrets of one party are never revealed: together they would unmask its answer.
        """
        self._begin("reveal", len(set(answered)))
        if set(answered) != self._answered:
            raise ProtocolError(f"party {self.number} agreed to another list")
        return {
            other: seed if other in answered else private
            for other, (seed, private) in self._shares.items()
        }


@dataclass
class Round:
    """Everything that the server holds of one round of the protocol.

    Attributes:
        required: how many parties must answer.
        keys: public keys by party.
        letters: encrypted letters by (sender, recipient).
        masked: masked numbers by party.
        shares: revealed shares by (party they belong to, party that revealed them).
    """

    required: int
    keys: dict[int, Keys] = field(default_factory=dict)
    letters: dict[tuple[int, int], bytes] = field(default_factory=dict)
    masked: dict[int, Numbers] = field(default_factory=dict)
    shares: dict[tuple[int, int], bytes] = field(default_factory=dict)

    @property
    def bytes_up(self) -> int:
        """Number of bytes that the parties sent."""
        keys = sum(len(entry.mask) + len(entry.post) for entry in self.keys.values())
        answers = sum(numbers.nbytes for numbers in self.masked.values())
        return keys + answers + sum(map(len, (*self.letters.values(), *self.shares.values())))

    def letters_to(self, party: int) -> dict[int, bytes]:
        """Return the letters to a party, by sender."""
        return {a: letter for (a, b), letter in self.letters.items() if b == party}

    def lost(self) -> list[int]:
        """Return the parties that sent letters but no answer.

        The answers of the others still carry the masks that they share with these parties.
        """
        return sorted({sender for sender, _ in self.letters} - self.masked.keys())

    def total(self) -> Numbers:
        """Recover the secrets from the shares, remove the remaining masks and return the sum."""
        result: Numbers = np.stack(list(self.masked.values())).sum(axis=0)
        for party in (*self.masked, *self.lost()):
            shares = [share for (owner, _), share in self.shares.items() if owner == party]
            secret = combine_shares(shares[: self.required])
            if party in self.masked:
                result = result - stream(secret, len(result))
                continue
            private = from_secret(secret)
            for other in self.masked:
                between = pair_mask(private, self.keys[other].mask, len(result))
                result = result - between if other > party else result + between
        return result


def run_round(numbers: Mapping[int, Numbers], parties: Sequence[int]) -> Round:
    """Run the whole protocol in this process; parties without numbers drop out before masking.

    Raises:
        TrainingError: if too few parties take part, or too few are left to remove the masks.
    """
    if len(parties) < MIN_CLIENTS:
        raise TrainingError(
            f"secure aggregation: {len(parties)} clients take part, {MIN_CLIENTS} are needed. "
            "With --patience clients stop one by one: leave it out"
        )
    required = threshold(len(parties))
    if len(numbers) < required:
        raise TrainingError(
            f"secure aggregation: {len(numbers)} of {len(parties)} clients answered, "
            f"{required} are needed to remove the masks"
        )
    members = {number: Party(number, required) for number in parties}
    server = Round(required, keys={number: party.keys for number, party in members.items()})
    for number, party in members.items():
        letters = party.share(server.keys)
        server.letters |= {(number, other): letter for other, letter in letters.items()}
    for number, values in numbers.items():
        server.masked[number] = members[number].mask(values, server.letters_to(number))
    for number in server.masked:
        members[number].confirm(server.masked)
        shares = members[number].reveal(server.masked)
        server.shares |= {(owner, number): share for owner, share in shares.items()}
    return server


# Uploads ---------------------------------------------------------------------------------------


def to_rows(uploads: Message, weights: Mapping[str, str]) -> Tensor:
    """Return what is to be summed, a row per client; tensors are in the order of their names."""
    summed = weighed(uploads, weights)
    return torch.cat([flat(summed[name]) for name in sorted(summed)], dim=1)


def from_row(row: Tensor, shapes: Mapping[str, Sequence[int]]) -> Message:
    """Split a row into tensors with a leading axis of one; the inverse of `to_rows`."""
    names = sorted(shapes)
    parts = torch.split(row, [math.prod(shapes[name]) for name in names])
    return {name: part.view(1, *shapes[name]) for name, part in zip(names, parts, strict=True)}


def sum_securely(
    uploads: Uploads, parties: Sequence[int], weights: Mapping[str, str]
) -> tuple[Uploads, int]:
    """Aggregate uploads securely; return one upload with the means and sums, and the bytes sent.

    Args:
        uploads: of the parties that answer.
        parties: all parties that began the round.
        weights: name of the weight of every averaged tensor (`Server.weights_of_means`).
    """
    if not uploads.tensors:
        return uploads, 0
    rows = to_rows(uploads.tensors, weights)
    numbers = {
        client: encode(row, len(parties))
        for client, row in zip(uploads.clients, rows.cpu().numpy(), strict=True)
    }
    server = run_round(numbers, parties)
    total = torch.from_numpy(decode(server.total())).to(rows.device)
    sums = from_row(total, {name: t.shape[1:] for name, t in uploads.tensors.items()})
    means = unweighed(sums, weights)
    tensors = {n: means[n].to(t.dtype) for n, t in uploads.tensors.items()}
    return Uploads((), tensors), server.bytes_up
