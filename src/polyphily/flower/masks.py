"""Secure aggregation between real sites: what a site does for it, and what the server does.

The protocol is that of `privacy/secure_aggregation.py`; here are its messages. An attempt at a
round has a name, drawn by the server, and goes

    keys     public keys, signed by each site, to the server
    share    everybody's keys to each site; letters for the others back
    round    the letters and the model to each site; masked numbers back
    reveal   who answered and who was lost; shares back

While nobody is missing, the first two travel ahead: keys of the next attempt come with masked
numbers, letters with shares. A round then takes one exchange more than without masks.

A party lives in a site's memory and nowhere else, and takes every step once. A site that was
restarted, or a round that is tried again, begins with new keys.
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
from flwr.supercore.primitives.asymmetric import bytes_to_public_key

from polyphily.core.local import Message
from polyphily.core.method import Method, Uploads
from polyphily.flower.keys import Identity
from polyphily.flower.plan import Plan
from polyphily.flower.wire import KEYS, REVEAL, SHARE, Contract, Parcel, WireError
from polyphily.nn.sparse import flat
from polyphily.privacy.differential import FEWEST, unweighed, weighed
from polyphily.privacy.secure_aggregation import (
    CURVE,
    LIMIT,
    STEP,
    Keys,
    Numbers,
    Party,
    Round,
    decode,
    encode,
    error_bound,
    threshold,
)

MASKED = "masked"  # the one tensor of an answer
PLAUSIBLE = LIMIT / 64  # what no sum of weighted models comes near; one of noise does at once
PARTIES = 2  # that a site keeps: of this attempt and of the next
Facts = Mapping[str, Any]
Read = Callable[[str, Facts], None]
Ask = Callable[[str, Mapping[str, Facts], Read], None]
"""Sends a kind of message to sites and has each answer read; those that cannot be are refused."""


# Uploads as numbers ----------------------------------------------------------------------------


def to_numbers(upload: Message, averaged: Mapping[str, str], sites: int) -> Numbers:
    """A site's upload as it is summed, tensors in the order of their names.

    Raises:
        TrainingError: for numbers that are too large, or none.
    """
    weights = weighed(upload, averaged)
    row = torch.cat([flat(weights[name]) for name in sorted(weights)], dim=1)[0]
    return encode(row.cpu().numpy(), sites)


def to_uploads(
    total: Numbers, contract: Contract, averaged: Mapping[str, str], tallies: Sequence[str]
) -> Uploads:
    """One upload that stands for all, from their sum.

    Raises:
        WireError: for a sum that cannot be one of models and of numbers of nodes.
    """
    names = sorted(contract.tensors)
    sizes = [torch.Size(contract.tensors[name][0]).numel() for name in names]
    parts = torch.split(torch.from_numpy(decode(total)), sizes)
    sums = {
        name: part.view(1, *contract.tensors[name][0])
        for name, part in zip(names, parts, strict=True)
    }
    counted = [sums[name] for name in tallies if name in sums]
    if any(float(part.abs().max()) >= PLAUSIBLE for part in sums.values() if part.numel()):
        raise WireError("the sum is not one of models: some site's numbers were not its own")
    if any(bool((part < 0).any()) or not float(part.sum()) for part in counted):
        raise WireError("the sum of the sites' numbers of nodes is not above zero")
    means = {n: t.to(contract.tensors[n][1]) for n, t in unweighed(sums, averaged).items()}
    if not all(bool(torch.isfinite(t).all()) for t in means.values()):
        raise WireError("the sum is not finite")
    return Uploads((), means)


# Bytes as text ---------------------------------------------------------------------------------


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


def _bytes(text: object) -> bytes:
    try:
        return base64.b64decode(str(text), validate=True)
    except (binascii.Error, ValueError):
        raise WireError("a message of secure aggregation that cannot be read") from None


def _by_number(entries: object, sites: int) -> dict[int, Any]:
    """What a message says of each party, by the party's number."""
    try:
        found = {int(number): value for number, value in dict(entries).items()}  # type: ignore[call-overload]
    except (TypeError, ValueError):
        raise WireError("a message of secure aggregation that cannot be read") from None
    if not all(0 <= number < sites for number in found):
        raise WireError("a message of secure aggregation about sites that are not in the run")
    return found


def _numbers(entries: object, sites: int) -> list[int]:
    found = entries if isinstance(entries, list) else []
    return sorted(_by_number(dict.fromkeys(found), sites))


def _signed(run: str, attempt: str, site: str, keys: Keys) -> bytes:
    """What a site puts its name to: these keys are mine, for this attempt of this run."""
    words = ["polyphily secure aggregation", run, attempt, site, _text(keys.mask), _text(keys.post)]
    return json.dumps(words).encode()


# At a site -------------------------------------------------------------------------------------


class Member:
    """A site's part in secure aggregation.

    Args:
        name: the site's.
        identity: its key, and the keys by which it knows the other sites.
    """

    def __init__(self, name: str, identity: Identity) -> None:
        self.name, self.identity = name, identity
        self._parties: dict[str, Party] = {}
        self._used: set[str] = set()

    def answer(self, kind: str, plan: Plan, facts: Facts) -> dict[str, Any]:
        """The reply to a message that carries no model."""
        attempt = str(facts.get("attempt"))
        if kind == KEYS:
            found = {"keys": self._keys(plan, attempt)}
        elif kind == SHARE:
            found = {"letters": self._letters(plan, attempt, facts.get("keys"))}
        else:
            found = self._reveal(plan, attempt, facts)
        return {"attempt": attempt, **found}

    def expect(self, facts: Facts) -> None:
        """Refuses a round whose keys are not here, before any work is done for it."""
        self._party(str(facts.get("attempt")))

    def mask(self, plan: Plan, upload: Message, facts: Facts) -> Parcel:
        """An upload under masks, and where the server asks for them the keys of the next attempt.

        Args:
            plan: the run's.
            upload: what must not be seen.
            facts: the attempt, the other parties' letters to this one, the next attempt.
        """
        attempt = str(facts.get("attempt"))
        letters = _by_number(facts.get("letters"), len(plan.sites))
        if len(letters) + 1 < FEWEST:
            raise WireError(
                f"{len(letters) + 1} sites take part, {FEWEST} are needed to hide among"
            )
        averaged = plan.make_method().averaged
        assert not isinstance(averaged, str)
        numbers = to_numbers(upload, averaged, len(plan.sites))
        try:
            masked = self._party(attempt).mask(
                numbers, {number: _bytes(letter) for number, letter in letters.items()}
            )
        except (InvalidToken, KeyError):
            raise WireError("a letter to it is not from the site that the server says") from None
        then = str(facts.get("then", ""))
        ahead = {"keys": self._keys(plan, then)} if then else {}
        tensor = torch.from_numpy(masked.view(np.int64)).unsqueeze(0)
        return Parcel({"attempt": attempt, **ahead}, {MASKED: tensor})

    def _party(self, attempt: str) -> Party:
        try:
            return self._parties[attempt]
        except KeyError:
            raise WireError(
                "the keys of this attempt are not here: the site was restarted since, or it runs "
                "on Flower's own SuperNode, which keeps nothing in memory (polyphily site join "
                "does)"
            ) from None

    def _keys(self, plan: Plan, attempt: str) -> dict[str, str]:
        """New keys, and the site's name under them; once for an attempt."""
        if attempt in self._used:
            raise WireError("the server asked for the keys of an attempt twice")
        self._used.add(attempt)
        sites = plan.sites
        party = Party(sites.index(self.name), threshold(len(sites)))
        self._parties[attempt] = party
        for old in list(self._parties)[:-PARTIES]:
            del self._parties[old]
        signature = self.identity.sign(_signed(plan.run, attempt, self.name, party.keys))
        return {
            "mask": _text(party.keys.mask),
            "post": _text(party.keys.post),
            "signature": _text(signature),
        }

    def _letters(self, plan: Plan, attempt: str, entries: object) -> dict[str, str]:
        found = _by_number(entries, len(plan.sites))
        if len(found) < FEWEST:
            raise WireError(f"{len(found)} sites take part, {FEWEST} are needed to hide among")
        keys = {number: _read_keys(entry) for number, entry in found.items()}
        for number, own in keys.items():
            site = plan.sites[number]
            signature = _bytes(found[number].get("signature"))
            if not self.identity.knows(site, _signed(plan.run, attempt, site, own), signature):
                raise WireError(
                    f"the keys that the server passes on as '{site}' are not signed with the key "
                    f"of '{site}' in this site's bundle (sites/{site}.pub)"
                )
        letters = self._party(attempt).share(keys)
        return {str(other): _text(letter) for other, letter in letters.items()}

    def _reveal(self, plan: Plan, attempt: str, facts: Facts) -> dict[str, Any]:
        answered = _numbers(facts.get("answered"), len(plan.sites))
        lost = _numbers(facts.get("lost"), len(plan.sites))
        try:
            shares = self._party(attempt).reveal(answered, lost)
        except KeyError:
            raise WireError("the server asks for shares that this site never got") from None
        then = str(facts.get("then", ""))
        ahead = {"letters": self._letters(plan, then, facts.get("keys"))} if then else {}
        return {"shares": {str(of): _text(share) for of, share in shares.items()}, **ahead}


def _read_keys(entry: object) -> Keys:
    """A party's public keys, each of them a point of the right curve."""
    if not isinstance(entry, dict):
        raise WireError("no keys in its answer")
    keys = Keys(_bytes(entry.get("mask")), _bytes(entry.get("post")))
    for raw in (keys.mask, keys.post):
        try:
            public = bytes_to_public_key(raw)
        except (ValueError, UnsupportedAlgorithm):
            raise WireError("a public key that is none") from None
        right = isinstance(public, ec.EllipticCurvePublicKey) and public.curve.name == CURVE.name
        if not right:
            raise WireError("a public key of another kind")
    return keys


# At the server ---------------------------------------------------------------------------------


@dataclass
class Attempt:
    """An attempt at a round as the server sees it."""

    seen: Round
    name: str = field(default_factory=lambda: os.urandom(16).hex())
    signed: dict[int, Facts] = field(default_factory=dict)  # keys as they came, to be passed on

    def take_keys(self, number: int, entry: object) -> None:
        keys = _read_keys(entry)
        known = {key for own in self.seen.keys.values() for key in (own.mask, own.post)}
        if known & {keys.mask, keys.post} or keys.mask == keys.post:
            raise WireError("its keys are somebody else's")
        assert isinstance(entry, dict)
        self.seen.keys[number] = keys
        self.signed[number] = {n: str(entry.get(n)) for n in ("mask", "post", "signature")}

    def take_letters(self, number: int, entries: object, sites: int) -> None:
        letters = _by_number(entries, sites)
        if letters.keys() != self.seen.keys.keys() - {number}:
            raise WireError("its letters are not one to each of the others")
        content = {(number, other): _bytes(letter) for other, letter in letters.items()}
        self.seen.letters |= content

    @property
    def members(self) -> list[int]:
        """Who sent letters: everybody's masks are made for them."""
        return sorted({number for number, _ in self.seen.letters})

    @property
    def keys(self) -> dict[str, Facts]:
        return {str(number): entry for number, entry in self.signed.items()}


class Masking:
    """The server's part in secure aggregation, from attempt to attempt.

    Args:
        sites: the run's.
        method: whose uploads are summed.
        ask: how to speak with the sites.
    """

    def __init__(self, sites: Sequence[str], method: Method, ask: Ask) -> None:
        self.sites, self.method, self.ask = list(sites), method, ask
        self.least = threshold(len(sites))
        self._now, self._then = self._new(), self._new()
        self._ahead = False  # whether all keys and letters of the next attempt are here

    def _new(self) -> Attempt:
        return Attempt(Round(self.least))

    def open(self) -> list[str]:
        """Exchanges keys and letters, unless that was done ahead; the sites that take part.

        Raises:
            WireError: where there are too few to hide among.
        """
        if self._ahead:
            self._now, self._ahead = self._then, False
        else:
            self._now = self._new()
            self._exchange()
        self._then = self._new()
        self._check_crowd(len(self._now.members))
        return [self.sites[number] for number in self._now.members]

    def _check_crowd(self, sites: int) -> None:
        least = max(FEWEST, self.least)
        if sites < least:
            raise WireError(f"secure aggregation: {sites} sites exchanged keys, {least} are needed")

    def _exchange(self) -> None:
        now = self._now

        def keys(site: str, facts: Facts) -> None:
            self._right(now, facts)
            now.take_keys(self.sites.index(site), facts.get("keys"))

        def letters(site: str, facts: Facts) -> None:
            self._right(now, facts)
            now.take_letters(self.sites.index(site), facts.get("letters"), len(self.sites))

        self.ask(KEYS, {site: {"attempt": now.name} for site in self.sites}, keys)
        self._check_crowd(len(now.seen.keys))
        message = {"attempt": now.name, "keys": now.keys}
        self.ask(SHARE, {self.sites[number]: message for number in now.seen.keys}, letters)

    def message(self, site: str, *, ahead: bool) -> dict[str, Any]:
        """What a site needs to mask its upload; with `ahead`, the name of the attempt to come."""
        letters = self._now.seen.letters_to(self.sites.index(site))
        return {
            "attempt": self._now.name,
            "letters": {str(number): _text(letter) for number, letter in letters.items()},
            **({"then": self._then.name} if ahead else {}),
        }

    def take(self, site: str, answer: Parcel, numbers: int, *, ahead: bool) -> None:
        """Keeps a site's masked numbers. Nothing can be told of them but that they are so many.

        Raises:
            WireError: where they are not.
        """
        self._right(self._now, answer.facts)
        tensor = answer.tensors.get(MASKED)
        if answer.tensors.keys() != {MASKED} or tensor is None:
            raise WireError("sent other tensors than masked numbers")
        if tensor.dtype != torch.int64 or tuple(tensor.shape) != (1, numbers):
            raise WireError(f"its masked numbers are not {numbers:,} of 64 bits")
        number = self.sites.index(site)
        if ahead:
            self._then.take_keys(number, answer.facts.get("keys"))
        self._now.seen.masked[number] = tensor[0].numpy().view(np.uint64)

    def uploads(self, total: Numbers, contract: Contract) -> Uploads:
        """One upload that stands for all that answered.

        Raises:
            WireError: where the sum cannot be right.
        """
        averaged = self.method.averaged
        assert not isinstance(averaged, str)
        return to_uploads(total, contract, averaged, self.method.tallies)

    def total(self) -> Numbers:
        """Asks those that answered for their shares, and takes the masks off the sum.

        Raises:
            WireError: where there is none: too few reveal, or what they reveal does not fit.
        """
        now, seen, then = self._now, self._now.seen, self._then
        ahead = len(then.signed) == len(self.sites)
        answered, lost = sorted(seen.masked), seen.lost()

        def shares(site: str, facts: Facts) -> None:
            self._right(now, facts)
            number = self.sites.index(site)
            told = _by_number(facts.get("shares"), len(self.sites))
            if told.keys() != {*answered, *lost}:
                raise WireError("its shares are not of all that took part")
            if ahead:
                then.take_letters(number, facts.get("letters"), len(self.sites))
            seen.shares |= {(of, number): _bytes(share) for of, share in told.items()}

        message: dict[str, Any] = {"attempt": now.name, "answered": answered, "lost": lost}
        if ahead:
            message |= {"then": then.name, "keys": then.keys}
        self.ask(REVEAL, {self.sites[number]: message for number in answered}, shares)
        self._ahead = len(then.members) == len(self.sites)
        revealed = len({by for _, by in seen.shares})
        if revealed < self.least:
            raise WireError(f"{revealed} sites revealed their shares, {self.least} are needed")
        try:
            return seen.total()
        except (ValueError, IndexError):
            raise WireError("the shares that sites revealed do not fit together") from None

    @property
    def bytes_up(self) -> int:
        """All that the sites sent in this attempt."""
        return self._now.seen.bytes_up

    def of_silent(self, site: str) -> str:
        """What became of a site that fell silent in a round that has a sum, in words."""
        number = self.sites.index(site)
        if number in self._now.seen.masked:
            return " when shares were to be revealed; its numbers are in the sum"
        if number in self._now.members:
            return "; the others' shares took its masks off the sum"
        return ", before it shared keys"

    def _right(self, attempt: Attempt, facts: Facts) -> None:
        if facts.get("attempt") != attempt.name:
            raise WireError("answered another attempt than the one that was asked for")


def promise(sites: int) -> dict[str, Any]:
    """What a run's summary says of it."""
    return {
        "secure_aggregation": {
            "step": STEP,
            "error_bound_of_sums": error_bound(sites),
            "threshold": threshold(sites),
        }
    }
