"""Secure aggregation between real sites: the messages of the protocol, at a site and at the server.

The protocol itself is in `privacy/secure_aggregation.py`. The server may need several attempts at a
round. Each attempt has a random name and takes four messages:

    keys     the site sends its public keys, with its signature
    share    the site gets everybody's keys and sends letters for the other sites
    round    the site gets its letters and the model, and sends its masked upload
    reveal   the site gets the lists of who answered and who was lost, and sends shares

As long as no site is missing, the first two are done in advance for the next attempt: its keys come
with the masked upload, its letters with the shares. A round then takes one exchange more than
without masks.

A site keeps its part in the protocol (`Party`) in memory only and takes every step once. After a
restart of the site, or in a repeated round, the protocol begins again with new keys.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.fernet import InvalidToken
from cryptography.hazmat.primitives.asymmetric import ec

from polyphily.core.messages import Contract, Message, Uploads
from polyphily.flower.keys import Identity
from polyphily.flower.plan import Plan
from polyphily.flower.wire import KEYS, REVEAL, SHARE, Parcel, WireError
from polyphily.privacy.crypto import bytes_to_public_key
from polyphily.privacy.differential import MIN_CLIENTS, unweighed
from polyphily.privacy.secure_aggregation import (
    CURVE,
    LIMIT,
    Keys,
    Numbers,
    Party,
    Round,
    decode,
    encode,
    from_row,
    threshold,
    to_rows,
)
from polyphily.runtime.server import Server

MASKED = "masked"  # name of the only tensor of an answer
PLAUSIBLE = LIMIT / 64  # sums of weighted models stay far below this; random numbers do not
KEPT_PARTIES = 2  # kept at a site: those of this attempt and of the next
Facts = Mapping[str, Any]
Read = Callable[[str, Facts], None]
"""Reads the facts in a site's answer; raises a WireError if they cannot be used."""
Ask = Callable[[str, Mapping[str, Facts], Read], None]
"""Sends a kind of message to sites and reads their answers; sites with a WireError are refused."""


# Uploads as numbers ----------------------------------------------------------------------------


def to_numbers(upload: Message, weights: Mapping[str, str], sites: int) -> Numbers:
    """Convert a site's upload to the numbers that are summed.

    Raises:
        TrainingError: if a number is too large or not finite.
    """
    return encode(to_rows(upload, weights)[0].cpu().numpy(), sites)


def to_uploads(
    total: Numbers, contract: Contract, weights: Mapping[str, str], counts: Sequence[str]
) -> Uploads:
    """Convert the sum of all uploads to one upload with means and sums.

    Args:
        total: the sum.
        contract: the shapes of an upload.
        weights: name of the weight of every averaged tensor (`Server.weights_of_means`).
        counts: names of the tensors that count nodes.

    Raises:
        WireError: if this cannot be a sum of models and of numbers of nodes.
    """
    sums = from_row(torch.from_numpy(decode(total)), contract.shapes)
    if any(float(part.abs().max()) >= PLAUSIBLE for part in sums.values() if part.numel()):
        raise WireError("the sum is not one of models: some site sent other numbers")
    for part in (sums[name] for name in counts if name in sums):
        if bool((part < 0).any()) or not float(part.sum()):
            raise WireError("the sum of the sites' numbers of nodes is not above zero")
    means = {n: t.to(contract.dtype) for n, t in unweighed(sums, weights).items()}
    if not all(bool(torch.isfinite(t).all()) for t in means.values()):
        raise WireError("the sum is not finite")
    return Uploads((), means)


# Parts of messages -----------------------------------------------------------------------------


def _to_text(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


def _to_bytes(text: object) -> bytes:
    try:
        return base64.b64decode(str(text), validate=True)
    except (binascii.Error, ValueError):
        raise WireError("a message of secure aggregation that cannot be read") from None


def _by_party(entries: object, sites: int) -> dict[int, Any]:
    """Read a JSON object whose keys are party numbers."""
    try:
        found = {int(number): value for number, value in dict(entries).items()}  # type: ignore[call-overload]
    except (TypeError, ValueError):
        raise WireError("a message of secure aggregation that cannot be read") from None
    if not all(0 <= number < sites for number in found):
        raise WireError("a message of secure aggregation about sites that are not in the run")
    return found


def _party_numbers(entries: object, sites: int) -> list[int]:
    """Read a JSON list of party numbers."""
    found = entries if isinstance(entries, list) else []
    return sorted(_by_party(dict.fromkeys(found), sites))


def _read_keys(entry: object) -> Keys:
    """Read a party's public keys and check that they are on the right curve."""
    if not isinstance(entry, dict):
        raise WireError("no keys in its answer")
    keys = Keys(_to_bytes(entry.get("mask")), _to_bytes(entry.get("post")))
    for raw in (keys.mask, keys.post):
        try:
            public = bytes_to_public_key(raw)
        except (ValueError, UnsupportedAlgorithm):
            raise WireError("a public key that cannot be read") from None
        if not isinstance(public, ec.EllipticCurvePublicKey) or public.curve.name != CURVE.name:
            raise WireError("a public key of another kind")
    return keys


def _signed_content(run: str, attempt: str, site: str, keys: Keys) -> bytes:
    """Return what a site signs: that these are its keys for this attempt of this run."""
    texts = ["polyphily secure aggregation", run, attempt, site]
    return json.dumps([*texts, _to_text(keys.mask), _to_text(keys.post)]).encode()


def _check_enough(sites: int) -> None:
    if sites < MIN_CLIENTS:
        raise WireError(f"{sites} sites take part, {MIN_CLIENTS} are needed to hide an upload")


# At a site -------------------------------------------------------------------------------------


class Member:
    """A site's side of secure aggregation.

    Args:
        name: the site's name.
        identity: its key, and the public keys of all sites.
    """

    def __init__(self, name: str, identity: Identity) -> None:
        self.name, self.identity = name, identity
        self._parties: dict[str, Party] = {}  # by attempt
        self._used: set[str] = set()  # attempts for which keys were made

    def answer(self, kind: str, plan: Plan, facts: Facts) -> dict[str, Any]:
        """Return the reply to one of the messages without tensors: keys, share or reveal."""
        attempt = str(facts.get("attempt"))
        if kind == KEYS:
            reply = {"keys": self._new_keys(plan, attempt)}
        elif kind == SHARE:
            reply = {"letters": self._letters(plan, attempt, facts.get("keys"))}
        else:
            reply = self._reveal(plan, attempt, facts)
        return {"attempt": attempt, **reply}

    def check_keys(self, facts: Facts) -> None:
        """Raise a WireError if this site does not have the keys of the attempt."""
        self._party(str(facts.get("attempt")))

    def mask(self, plan: Plan, upload: Message, facts: Facts) -> Parcel:
        """Return a masked upload, and the keys of the next attempt if the server asks for them.

        Args:
            plan: of the run.
            upload: the upload to hide.
            facts: the attempt, the other sites' letters to this one, and the next attempt.
        """
        attempt = str(facts.get("attempt"))
        letters = _by_party(facts.get("letters"), len(plan.sites))
        _check_enough(len(letters) + 1)
        numbers = to_numbers(upload, plan.server().weights_of_means(), len(plan.sites))
        try:
            masked = self._party(attempt).mask(
                numbers, {number: _to_bytes(letter) for number, letter in letters.items()}
            )
        except (InvalidToken, KeyError):
            raise WireError("a letter to it is not from the site that the server says") from None
        following = str(facts.get("then", ""))
        in_advance = {"keys": self._new_keys(plan, following)} if following else {}
        tensor = torch.from_numpy(masked.view(np.int64)).unsqueeze(0)
        return Parcel({"attempt": attempt, **in_advance}, {MASKED: tensor})

    def _party(self, attempt: str) -> Party:
        try:
            return self._parties[attempt]
        except KeyError:
            raise WireError(
                "the keys of this attempt are not here: the site was restarted since, or it runs "
                "on Flower's own SuperNode, which keeps nothing in memory (polyphily site join "
                "does)"
            ) from None

    def _new_keys(self, plan: Plan, attempt: str) -> dict[str, str]:
        """Make the keys of an attempt, once, and sign the public keys."""
        if attempt in self._used:
            raise WireError("the server asked for the keys of an attempt twice")
        self._used.add(attempt)
        party = Party(plan.sites.index(self.name), threshold(len(plan.sites)))
        self._parties[attempt] = party
        for old in list(self._parties)[:-KEPT_PARTIES]:
            del self._parties[old]
        signature = self.identity.sign(_signed_content(plan.run, attempt, self.name, party.keys))
        return {
            "mask": _to_text(party.keys.mask),
            "post": _to_text(party.keys.post),
            "signature": _to_text(signature),
        }

    def _letters(self, plan: Plan, attempt: str, entries: object) -> dict[str, str]:
        """Check the signatures of everybody's keys; return letters for the other sites."""
        found = _by_party(entries, len(plan.sites))
        _check_enough(len(found))
        keys = {number: _read_keys(entry) for number, entry in found.items()}
        for number, public in keys.items():
            site = plan.sites[number]
            content = _signed_content(plan.run, attempt, site, public)
            if not self.identity.verify(site, content, _to_bytes(found[number].get("signature"))):
                raise WireError(
                    f"the keys that the server passes on as '{site}' are not signed with the key "
                    f"of '{site}' in this site's bundle (sites/{site}.pub)"
                )
        letters = self._party(attempt).share(keys)
        return {str(other): _to_text(letter) for other, letter in letters.items()}

    def _reveal(self, plan: Plan, attempt: str, facts: Facts) -> dict[str, Any]:
        """Return the shares that the server needs, and letters of the next attempt."""
        answered = _party_numbers(facts.get("answered"), len(plan.sites))
        lost = _party_numbers(facts.get("lost"), len(plan.sites))
        try:
            shares = self._party(attempt).reveal(answered, lost)
        except KeyError:
            raise WireError("the server asks for shares that this site never got") from None
        reply: dict[str, Any] = {
            "shares": {str(owner): _to_text(share) for owner, share in shares.items()}
        }
        if following := str(facts.get("then", "")):
            reply["letters"] = self._letters(plan, following, facts.get("keys"))
        return reply


# At the server ---------------------------------------------------------------------------------


@dataclass
class Attempt:
    """An attempt at a round, at the server.

    Attributes:
        round: everything that the sites sent in it.
        name: random, so that answers to another attempt are recognised.
        signed: keys and signatures as they arrived, to be passed on, by party.
    """

    round: Round
    name: str = field(default_factory=lambda: os.urandom(16).hex())
    signed: dict[int, Facts] = field(default_factory=dict)

    def check(self, facts: Facts) -> None:
        """Raise a WireError if an answer belongs to another attempt."""
        if facts.get("attempt") != self.name:
            raise WireError("answered another attempt than the one that was asked for")

    def add_keys(self, number: int, entry: object) -> None:
        keys = _read_keys(entry)
        known = {key for other in self.round.keys.values() for key in (other.mask, other.post)}
        if known & {keys.mask, keys.post} or keys.mask == keys.post:
            raise WireError("its keys are those of another site, or equal")
        assert isinstance(entry, dict)
        self.round.keys[number] = keys
        self.signed[number] = {n: str(entry.get(n)) for n in ("mask", "post", "signature")}

    def add_letters(self, number: int, entries: object, sites: int) -> None:
        letters = _by_party(entries, sites)
        if letters.keys() != self.round.keys.keys() - {number}:
            raise WireError("its letters are not one to each of the others")
        content = {(number, other): _to_bytes(letter) for other, letter in letters.items()}
        self.round.letters |= content

    @property
    def members(self) -> list[int]:
        """The parties that sent letters. Everybody's masks are made for them."""
        return sorted({number for number, _ in self.round.letters})

    @property
    def keys(self) -> dict[str, Facts]:
        """The signed keys as a message has them."""
        return {str(number): entry for number, entry in self.signed.items()}


class Masking:
    """The server's side of secure aggregation, over all rounds of a run.

    For every attempt at a round: `exchange_keys`, then a message to each site with `round_facts`,
    `add_answer` for each answer, `unmask` and `uploads`.

    Args:
        sites: of the run.
        server: aggregates the uploads.
        ask: sends messages to the sites.
    """

    def __init__(self, sites: Sequence[str], server: Server, ask: Ask) -> None:
        self.sites, self.server, self.ask = list(sites), server, ask
        self.required = threshold(len(sites))
        self._attempt, self._next = self._new(), self._new()
        self._next_is_ready = False  # whether all keys and letters of the next attempt are here

    def _new(self) -> Attempt:
        return Attempt(Round(self.required))

    def exchange_keys(self) -> list[str]:
        """Begin an attempt: exchange keys and letters, unless that was done in advance.

        Returns:
            The sites that take part.

        Raises:
            WireError: if they are too few.
        """
        if self._next_is_ready:
            self._attempt, self._next_is_ready = self._next, False
        else:
            self._attempt = self._new()
            self._ask_for_keys_and_letters()
        self._next = self._new()
        self._check_enough(len(self._attempt.members))
        return [self.sites[number] for number in self._attempt.members]

    def _check_enough(self, sites: int) -> None:
        needed = max(MIN_CLIENTS, self.required)
        if sites < needed:
            raise WireError(
                f"secure aggregation: {sites} sites exchanged keys, {needed} are needed"
            )

    def _ask_for_keys_and_letters(self) -> None:
        attempt = self._attempt

        def read_keys(site: str, facts: Facts) -> None:
            attempt.check(facts)
            attempt.add_keys(self.sites.index(site), facts.get("keys"))

        def read_letters(site: str, facts: Facts) -> None:
            attempt.check(facts)
            attempt.add_letters(self.sites.index(site), facts.get("letters"), len(self.sites))

        self.ask(KEYS, {site: {"attempt": attempt.name} for site in self.sites}, read_keys)
        self._check_enough(len(attempt.round.keys))
        message = {"attempt": attempt.name, "keys": attempt.keys}
        self.ask(SHARE, {self.sites[n]: message for n in attempt.round.keys}, read_letters)

    def round_facts(self, site: str, *, in_advance: bool) -> dict[str, Any]:
        """Return what a site needs to mask its upload.

        Args:
            site: the site's name.
            in_advance: whether the site shall also send its keys of the next attempt.
        """
        letters = self._attempt.round.letters_to(self.sites.index(site))
        return {
            "attempt": self._attempt.name,
            "letters": {str(number): _to_text(letter) for number, letter in letters.items()},
            **({"then": self._next.name} if in_advance else {}),
        }

    def add_answer(self, site: str, answer: Parcel, numbers: int, *, in_advance: bool) -> None:
        """Add a site's masked upload. Only its size can be checked.

        Raises:
            WireError: if it is not `numbers` numbers of 64 bits.
        """
        self._attempt.check(answer.facts)
        tensor = answer.tensors.get(MASKED)
        if answer.tensors.keys() != {MASKED} or tensor is None:
            raise WireError("sent other tensors than its masked upload")
        if tensor.dtype != torch.int64 or tuple(tensor.shape) != (1, numbers):
            raise WireError(f"its masked upload is not {numbers:,} numbers of 64 bits")
        number = self.sites.index(site)
        if in_advance:
            self._next.add_keys(number, answer.facts.get("keys"))
        self._attempt.round.masked[number] = tensor[0].numpy().view(np.uint64)

    def unmask(self) -> Numbers:
        """Ask the sites that answered for their shares; return the sum without masks.

        Raises:
            WireError: if too few sites reveal shares, or if the shares do not fit.
        """
        attempt, round_, following = self._attempt, self._attempt.round, self._next
        in_advance = len(following.signed) == len(self.sites)
        answered, lost = sorted(round_.masked), round_.lost()

        def read_shares(site: str, facts: Facts) -> None:
            attempt.check(facts)
            number = self.sites.index(site)
            shares = _by_party(facts.get("shares"), len(self.sites))
            if shares.keys() != {*answered, *lost}:
                raise WireError("its shares are not of all that took part")
            if in_advance:
                following.add_letters(number, facts.get("letters"), len(self.sites))
            round_.shares |= {(owner, number): _to_bytes(share) for owner, share in shares.items()}

        message: dict[str, Any] = {"attempt": attempt.name, "answered": answered, "lost": lost}
        if in_advance:
            message |= {"then": following.name, "keys": following.keys}
        self.ask(REVEAL, {self.sites[number]: message for number in answered}, read_shares)
        self._next_is_ready = len(following.members) == len(self.sites)
        revealed = len({by for _, by in round_.shares})
        if revealed < self.required:
            raise WireError(f"{revealed} sites revealed their shares, {self.required} are needed")
        try:
            return round_.total()
        except (ValueError, IndexError):
            raise WireError("the shares that sites revealed do not fit together") from None

    def uploads(self, total: Numbers, contract: Contract) -> Uploads:
        """Convert the sum to one upload with means and sums.

        Raises:
            WireError: if the sum is not plausible.
        """
        server = self.server
        return to_uploads(total, contract, server.weights_of_means(), server.counts())

    @property
    def bytes_up(self) -> int:
        """Number of bytes that the sites sent in this attempt."""
        return self._attempt.round.bytes_up

    def describe_silence(self, site: str) -> str:
        """Say when a site fell silent, in a round that has a sum nevertheless."""
        number = self.sites.index(site)
        if number in self._attempt.round.masked:
            return " when shares were to be revealed; its numbers are in the sum"
        if number in self._attempt.members:
            return "; the others' shares took its masks off the sum"
        return ", before it shared keys"
