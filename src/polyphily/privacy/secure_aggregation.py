"""Secure aggregation: the server learns the sum of the uploads and no upload by itself.

The protocol of Bonawitz et al. (CCS 2017), in the form of Flower's SecAgg+ with everybody as
everybody's neighbour, among parties that trust the server to follow it:

1. `Party.keys`: each party makes two key pairs and sends the public halves.
2. `Party.share`: it draws a seed of its own, splits the seed and its first private key into
   shares, any `threshold` of which give the secret back, and sends every party its share,
   encrypted with the second keys.
3. `Party.mask`: it adds to its numbers a mask from its own seed, and for every other party a mask
   from the key that the two agree on, which one adds and the other subtracts.
4. `Party.reveal`: of a party that answered, the others tell their shares of its own seed; of one
   that did not, their shares of its private key. The server takes off what is left of the masks.

Key agreement, secret sharing and encryption are Flower's. Its masks come from a generator with a
seed of 32 bits, all of which a server can try: ours are the ChaCha20 stream of the whole key. Its
numbers have 22 bits within a range that must be guessed: ours are multiples of 2^-24 in 64 bits.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from flwr.common.secure_aggregation.crypto.shamir import combine_shares, create_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import (
    decrypt,
    encrypt,
    generate_shared_key,
)
from flwr.common.secure_aggregation.secaggplus_utils import (
    share_keys_plaintext_concat,
    share_keys_plaintext_separate,
)
from flwr.supercore.primitives.asymmetric import (
    bytes_to_public_key,
    generate_key_pairs,
    public_key_to_bytes,
)

from polyphily.core.method import Uploads
from polyphily.errors import PolyphilyError, TrainingError
from polyphily.nn.sparse import flat
from polyphily.privacy.differential import FEWEST, unweighed, weighed

Numbers: TypeAlias = npt.NDArray[np.uint64]
STEP = 2.0**-24  # between neighbouring numbers
LIMIT = 2.0**63 * STEP  # what a sum must stay below
CURVE = ec.SECP384R1()  # that of Flower's keys


class ProtocolError(PolyphilyError):
    """A step that a party does not take, because it could give its numbers away."""


def threshold(parties: int) -> int:
    """How many shares give a secret back: more than half, so that no two sets can do it apart."""
    return parties // 2 + 1


def error_bound(parties: int) -> float:
    """The most by which an entry of a sum of so many parties can be off."""
    return parties * STEP / 2


# Numbers ---------------------------------------------------------------------------------------


def encode(values: npt.NDArray[np.float64], parties: int) -> Numbers:
    """Whole multiples of `STEP` modulo 2^64; of so many parties' the sum does not overflow.

    Raises:
        TrainingError: for a number that is too large, or not one.
    """
    if not (np.abs(values) < LIMIT / parties - STEP).all():
        raise TrainingError(
            f"secure aggregation: a number of {np.abs(values).max():.3g} is too large to be "
            "masked. A smaller --lr or --clip 1.0 usually mends this."
        )
    return np.rint(values / STEP).astype(np.int64).view(np.uint64)


def decode(numbers: Numbers) -> npt.NDArray[np.float64]:
    return numbers.view(np.int64).astype(np.float64) * STEP


def stream(key: bytes, count: int) -> Numbers:
    """A mask: so many numbers of the ChaCha20 stream of a key of 32 bytes, used once."""
    cipher = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    return np.frombuffer(cipher.update(bytes(8 * count)), dtype=np.uint64)


def agreed(private: ec.EllipticCurvePrivateKey, public: bytes) -> bytes:
    """The key of 32 bytes that two parties have in common, from either's private key, in base64."""
    key: bytes = generate_shared_key(private, bytes_to_public_key(public))
    return key


def to_secret(private: ec.EllipticCurvePrivateKey) -> bytes:
    """A private key as the number that it is: a sixth of its file form, and so of the shares."""
    number: int = private.private_numbers().private_value
    return number.to_bytes(CURVE.key_size // 8, "big")


def from_secret(secret: bytes) -> ec.EllipticCurvePrivateKey:
    return ec.derive_private_key(int.from_bytes(secret, "big"), CURVE)


# Parties ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Keys:
    """A party's public keys: for masks, and for letters between parties."""

    mask: bytes
    post: bytes


class Party:
    """One site in one round. What it does is final: every step can be taken once.

    Args:
        number: its name among the parties.
        least: how many parties must answer, and how many shares give a secret back.
    """

    def __init__(self, number: int, least: int) -> None:
        self.number, self.least = number, least
        self._for_masks, public_mask = generate_key_pairs()
        self._for_post, public_post = generate_key_pairs()
        self.keys = Keys(public_key_to_bytes(public_mask), public_key_to_bytes(public_post))
        self._seed = os.urandom(32)
        self._keys: Mapping[int, Keys] = {}
        self._post: dict[int, bytes] = {}  # keys of letters to and from each party
        self._shares: dict[int, tuple[bytes, bytes]] = {}  # of each party's seed and private key
        self._ahead = ["share", "mask", "reveal"]

    def _check(self, step: str, parties: int) -> None:
        """Refuses steps out of turn, and a crowd too small to hide in."""
        if not self._ahead or self._ahead.pop(0) != step:
            raise ProtocolError(f"party {self.number} was asked to {step} out of turn")
        if parties < self.least:
            raise ProtocolError(
                f"party {self.number}: {parties} parties are left, {self.least} are needed"
            )

    def share(self, keys: Mapping[int, Keys]) -> dict[int, bytes]:
        """Letters to the other parties, which they alone can read."""
        self._check("share", len(keys))
        everybody = [key for own in keys.values() for key in (own.mask, own.post)]
        if len(set(everybody)) < len(everybody) or keys.get(self.number) != self.keys:
            raise ProtocolError(f"party {self.number}: these are not the keys that were sent")
        if self.least < threshold(len(keys)):
            raise ProtocolError(f"party {self.number}: half of the parties could tell its secrets")
        self._keys = dict(sorted(keys.items()))
        seeds = create_shares(self._seed, self.least, len(keys))
        privates = create_shares(to_secret(self._for_masks), self.least, len(keys))
        letters = {}
        for other, seed, private in zip(self._keys, seeds, privates, strict=True):
            if other == self.number:
                self._shares[other] = seed, private
                continue
            text = share_keys_plaintext_concat(self.number, other, seed, private)
            self._post[other] = agreed(self._for_post, self._keys[other].post)
            letters[other] = encrypt(self._post[other], text)
        return letters

    def mask(self, numbers: Numbers, letters: Mapping[int, bytes]) -> Numbers:
        """The numbers under all masks.

        Args:
            numbers: what is to be summed.
            letters: from every other party that takes part, to this one.
        """
        self._check("mask", len(letters) + 1)
        masked = numbers + stream(self._seed, len(numbers))
        for other, letter in letters.items():
            text = decrypt(self._post[other], letter)
            source, target, seed, private = share_keys_plaintext_separate(text)
            if (source, target) != (other, self.number):
                raise ProtocolError(f"party {self.number}: a letter from {source} to {target}")
            self._shares[other] = seed, private
            key = agreed(self._for_masks, self._keys[other].mask)
            between = stream(base64.urlsafe_b64decode(key), len(numbers))
            masked = masked + between if self.number > other else masked - between
        return masked

    def reveal(self, answered: Sequence[int], lost: Sequence[int]) -> dict[int, bytes]:
        """Shares of the answering parties' seeds and of the lost ones' private keys.

        Nobody's seed and key are told both: together they would uncover an answer.
        """
        self._check("reveal", len(set(answered)))
        if set(answered) & set(lost):
            raise ProtocolError(f"party {self.number}: this would uncover a single answer")
        return {
            **{other: self._shares[other][0] for other in answered},
            **{other: self._shares[other][1] for other in lost},
        }


@dataclass
class Round:
    """A round of the protocol as the server sees it: all that it ever holds.

    Attributes:
        least: how many parties must answer.
        keys: the parties' public keys.
        letters: between parties, (from, to), encrypted.
        masked: the answers.
        shares: what parties revealed of each other, (of, by).
    """

    least: int
    keys: dict[int, Keys] = field(default_factory=dict)
    letters: dict[tuple[int, int], bytes] = field(default_factory=dict)
    masked: dict[int, Numbers] = field(default_factory=dict)
    shares: dict[tuple[int, int], bytes] = field(default_factory=dict)

    @property
    def bytes_up(self) -> int:
        """All that the parties sent."""
        keys = sum(len(own.mask) + len(own.post) for own in self.keys.values())
        answers = sum(numbers.nbytes for numbers in self.masked.values())
        return keys + answers + sum(map(len, (*self.letters.values(), *self.shares.values())))

    def letters_to(self, party: int) -> dict[int, bytes]:
        return {a: letter for (a, b), letter in self.letters.items() if b == party}

    def lost(self) -> list[int]:
        """Who sent letters and no answer: others' answers still carry masks shared with them."""
        return sorted({a for a, _ in self.letters} - self.masked.keys())

    def total(self) -> Numbers:
        """The sum of the answers, once the masks that did not cancel are taken off."""
        result: Numbers = np.stack(list(self.masked.values())).sum(axis=0)
        for party in (*self.masked, *self.lost()):
            told = [share for (of, _), share in self.shares.items() if of == party][: self.least]
            secret = combine_shares(told)
            if party in self.masked:
                result = result - stream(secret, len(result))
                continue
            for other in self.masked:
                key = agreed(from_secret(secret), self.keys[other].mask)
                between = stream(base64.urlsafe_b64decode(key), len(result))
                result = result - between if other > party else result + between
        return result


def run_round(numbers: Mapping[int, Numbers], parties: Sequence[int]) -> Round:
    """The whole protocol among parties of this process; those without numbers drop out half-way.

    Raises:
        TrainingError: when too few take part, or are left for the masks to be taken off.
    """
    if len(parties) < FEWEST:
        raise TrainingError(
            f"secure aggregation: {len(parties)} clients take part, {FEWEST} are needed to hide "
            "among. With --patience clients stop one by one: leave it out"
        )
    least = threshold(len(parties))
    if len(numbers) < least:
        raise TrainingError(
            f"secure aggregation: {len(numbers)} of {len(parties)} clients answered, "
            f"{least} are needed to take the masks off"
        )
    people = {number: Party(number, least) for number in parties}
    seen = Round(least, keys={number: party.keys for number, party in people.items()})
    for number, party in people.items():
        letters = party.share(seen.keys)
        seen.letters |= {(number, other): letter for other, letter in letters.items()}
    for number, own in numbers.items():
        seen.masked[number] = people[number].mask(own, seen.letters_to(number))
    for number in seen.masked:
        shares = people[number].reveal(list(seen.masked), seen.lost())
        seen.shares |= {(of, number): share for of, share in shares.items()}
    return seen


# Uploads ---------------------------------------------------------------------------------------


def folded(
    uploads: Uploads, parties: Sequence[int], averaged: Mapping[str, str]
) -> tuple[Uploads, int]:
    """One upload that stands for all, made of their sums alone, and the bytes that were sent.

    Args:
        uploads: of the parties that answer.
        parties: all that began the round.
        averaged: `Method.averaged`.
    """
    if not uploads.tensors:
        return uploads, 0
    rows = torch.cat([flat(t) for t in weighed(uploads.tensors, averaged).values()], dim=1)
    numbers = {
        client: encode(row, len(parties))
        for client, row in zip(uploads.clients, rows.cpu().numpy(), strict=True)
    }
    seen = run_round(numbers, parties)
    total = torch.from_numpy(decode(seen.total())).to(rows.device)
    sizes = [t[0].numel() for t in uploads.tensors.values()]
    sums = {
        name: part.view(1, *tensor.shape[1:])
        for (name, tensor), part in zip(
            uploads.tensors.items(), torch.split(total, sizes), strict=True
        )
    }
    means = {n: t.to(uploads[n].dtype) for n, t in unweighed(sums, averaged).items()}
    return Uploads((), means), seen.bytes_up
