"""Secure aggregation between real sites: the messages of the protocol, at a site and at the server.

The protocol itself is in `privacy/secure_aggregation.py`. The server may need several attempts at a
round. Each attempt has a random name and takes five messages:

    keys     the site sends its public keys, with its signature
    share    the site gets everybody's keys and sends letters for the other sites
    round    the site gets its letters and the model, and sends its masked upload
    confirm  the site gets the list of who answered, and signs it
    reveal   the site gets the others' signatures of this list, and sends shares

As long as no site is missing, the first two are done in advance for the next round: its keys come
with the masked upload, its letters with the shares. A round then takes two exchanges more than
without masks.

A site trusts no word of the server. It computes the threshold by itself, and knows the other sites
by their public keys. Every signature names the run, the round, the attempt, the step and a hash of
the plan. The signature of a list also names a hash of everybody's keys and who shared them. A site
reveals nothing unless as many sites as the threshold have signed the very same.

A site keeps its part in the protocol (`Party`) in memory only and takes every step once. After a
restart of the site, or in a repeated round, the protocol begins again with new keys. Which sites
were in the sum of a round is kept on disk (`Sums`), because two sums of one round over different
sites would reveal something about single uploads.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.fernet import InvalidToken
from cryptography.hazmat.primitives.asymmetric import ec

from polyphily.core.messages import Contract, Message, Uploads
from polyphily.flower.keys import Identity
from polyphily.flower.plan import Plan
from polyphily.flower.wire import CONFIRM, KEYS, REVEAL, SHARE, Parcel, WireError
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
from polyphily.runs.folder import sync
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
    return sorted(_by_party({str(number): None for number in found}, sites))


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


def _digest(content: object) -> str:
    """Return a hash of something that JSON can hold."""
    text = json.dumps(content, sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()


def plan_digest(plan: Plan) -> str:
    """Return a hash of a plan, the same at all sites that were told the same."""
    return _digest(plan.to_json())


@dataclass(frozen=True)
class Place:
    """The place that a signature belongs to, so that it is of no use elsewhere.

    Attributes:
        run: name of the run.
        number: of the round.
        attempt: at the round.
        plan: hash of the plan.
    """

    run: str
    number: int
    attempt: str
    plan: str

    def content(self, step: str, site: str, *what: str) -> bytes:
        """Return what a site signs in a step."""
        place = [self.run, self.number, self.attempt, self.plan]
        return json.dumps(["polyphily secure aggregation", step, *place, site, *what]).encode()


def _key_texts(keys: Keys) -> tuple[str, str]:
    return _to_text(keys.mask), _to_text(keys.post)


def _check_enough(sites: int) -> None:
    if sites < MIN_CLIENTS:
        raise WireError(f"{sites} sites take part, {MIN_CLIENTS} are needed to hide an upload")


# At a site -------------------------------------------------------------------------------------


class Sums:
    """A file of the sites that were in the sum of each round of a run.

    Args:
        folder: the site's.
        run: name of the run.
    """

    def __init__(self, folder: Path, run: str) -> None:
        self.file = folder / "memory" / run / "sums.json"

    def _read(self) -> dict[str, list[str]]:
        try:
            found: dict[str, list[str]] = json.loads(self.file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise WireError(f"the site cannot read {self.file.name}: {error}") from None
        return found

    def note(self, number: int, sites: Collection[str]) -> None:
        """Write down the sites in the sum of a round; return once this is safe on disk.

        Raises:
            WireError: if there was a sum of this round over other sites.
        """
        sums, new = self._read(), sorted(sites)
        old = sums.setdefault(str(number), new)
        if old != new:
            raise WireError(
                f"round {number} was summed over {', '.join(old)} before: the difference to a sum "
                f"over {', '.join(new)} would reveal uploads"
            )
        write_durably(self.file, json.dumps(sums) + "\n")


def write_durably(file: Path, text: str) -> None:
    """Write a file atomically, and return only once the disk has it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(file.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    sync(partial)
    os.replace(partial, file)
    sync(file.parent)


@dataclass
class Part:
    """A site's part in an attempt.

    Attributes:
        place: the round and the plan that the attempt belongs to, for good.
        party: takes the steps of the protocol.
        keys: hash of everybody's keys, once they are known.
    """

    place: Place
    party: Party
    keys: str = ""

    def list_signed(self, sites: Sequence[str], site: str, answered: Collection[int]) -> bytes:
        """Return what a site signs in the step `CONFIRM`: who is in the sum, and for what keys."""
        names = [sorted(sites[k] for k in some) for some in (self.party.members, answered)]
        return self.place.content(CONFIRM, site, self.keys, *map(_digest, names))


class Member:
    """A site's side of secure aggregation.

    Args:
        name: the site's name.
        identity: its key, and the public keys of all sites.
        folder: the site's, where it keeps which sites were in the sum of each round.
    """

    def __init__(self, name: str, identity: Identity, folder: Path) -> None:
        self.name, self.identity, self.folder = name, identity, folder
        self._parts: dict[str, Part] = {}  # by attempt
        self._used: set[str] = set()  # attempts for which keys were made

    def answer(self, kind: str, plan: Plan, facts: Facts) -> dict[str, Any]:
        """Return the reply to one of the messages without tensors."""
        attempt = str(facts.get("attempt"))
        reply: dict[str, Any]
        if kind == KEYS:
            reply = {"keys": self._new_keys(plan, attempt, _round_number(facts))}
        elif kind == SHARE:
            reply = {"letters": self._letters(plan, facts)}
        elif kind == CONFIRM:
            reply = {"signature": self._confirm(plan, facts)}
        else:
            reply = self._reveal(plan, facts)
        return {"attempt": attempt, **reply}

    def check_keys(self, plan: Plan, facts: Facts) -> None:
        """Raise a WireError if this site does not have the keys of the attempt."""
        self._part(plan, facts)

    def mask(self, plan: Plan, upload: Message, facts: Facts) -> Parcel:
        """Return a masked upload, and the keys of the next round if the server asks for them.

        Args:
            plan: of the run.
            upload: the upload to hide.
            facts: the round, the attempt, the other sites' letters to this one, and the attempt at
                the next round.
        """
        part = self._part(plan, facts)
        letters = _by_party(facts.get("letters"), len(plan.sites))
        _check_enough(len(letters) + 1)
        numbers = to_numbers(upload, plan.server().weights_of_means(), len(plan.sites))
        try:
            masked = part.party.mask(
                numbers, {number: _to_bytes(letter) for number, letter in letters.items()}
            )
        except (InvalidToken, KeyError):
            raise WireError("a letter to it is not from the site that the server says") from None
        following = str(facts.get("then", ""))
        in_advance = (
            {"keys": self._new_keys(plan, following, part.place.number + 1)} if following else {}
        )
        tensor = torch.from_numpy(masked.view(np.int64)).unsqueeze(0)
        return Parcel({"attempt": part.place.attempt, **in_advance}, {MASKED: tensor})

    def _part(self, plan: Plan, facts: Facts, more: int = 0) -> Part:
        """Return the site's part in the attempt that a message names.

        Args:
            plan: that came with the message.
            facts: of the message.
            more: how many rounds after that of the message the attempt is.
        """
        attempt = str(facts.get("then" if more else "attempt"))
        try:
            part = self._parts[attempt]
        except KeyError:
            raise WireError(
                "the keys of this attempt are not here: the site was restarted since, or it runs "
                "on Flower's own SuperNode, which keeps nothing in memory (polyphily site join "
                "does)"
            ) from None
        number = _round_number(facts) + more
        if part.place != Place(plan.run, number, attempt, plan_digest(plan)):
            raise WireError("the server changed the plan or the round of an attempt")
        return part

    def _new_keys(self, plan: Plan, attempt: str, number: int) -> dict[str, str]:
        """Make the keys of an attempt, once, and sign the public keys."""
        self._check_sites(plan)
        if attempt in self._used:
            raise WireError("the server asked for the keys of an attempt twice")
        self._used.add(attempt)
        place = Place(plan.run, number, attempt, plan_digest(plan))
        party = Party(plan.sites.index(self.name), threshold(len(plan.sites)))
        self._parts[attempt] = Part(place, party)
        for old in list(self._parts)[:-KEPT_PARTIES]:
            del self._parts[old]
        mask, post = _key_texts(party.keys)
        signature = self.identity.sign(place.content(KEYS, self.name, mask, post))
        return {"mask": mask, "post": post, "signature": _to_text(signature)}

    def _check_sites(self, plan: Plan) -> None:
        """Check that the plan names different sites, each with a key of its own.

        Raises:
            WireError: if it does not. A site that is named twice could speak for two.
        """
        if len(set(plan.sites)) < len(plan.sites):
            raise WireError("the plan names a site twice")
        _check_enough(len(plan.sites))
        known = [
            (name, self.identity.public_keys[name].public_numbers())
            for name in plan.sites
            if name in self.identity.public_keys
        ]
        if len({numbers for _, numbers in known}) < len(known):
            raise WireError("two sites of the plan have the same key in this site's bundle")
        if dict(known).get(self.name) != self.identity.private.public_key().public_numbers():
            raise WireError(f"the key of '{self.name}' in this site's bundle is not its own")

    def _letters(self, plan: Plan, facts: Facts, more: int = 0) -> dict[str, str]:
        """Check the signatures of everybody's keys; return letters for the other sites."""
        part = self._part(plan, facts, more)
        found = _by_party(facts.get("keys"), len(plan.sites))
        _check_enough(len(found))
        keys = {number: _read_keys(entry) for number, entry in sorted(found.items())}
        for number, public in keys.items():
            site = plan.sites[number]
            content = part.place.content(KEYS, site, *_key_texts(public))
            if not self.identity.verify(site, content, _to_bytes(found[number].get("signature"))):
                raise WireError(
                    f"the keys that the server passes on as '{site}' are not signed with the key "
                    f"of '{site}' in this site's bundle (sites/{site}.pub)"
                )
        letters = part.party.share(keys)
        part.keys = _digest([[plan.sites[k], *_key_texts(public)] for k, public in keys.items()])
        return {str(other): _to_text(letter) for other, letter in letters.items()}

    def _confirm(self, plan: Plan, facts: Facts) -> str:
        """Sign the list of the sites that answered."""
        part = self._part(plan, facts)
        answered = _party_numbers(facts.get("answered"), len(plan.sites))
        part.party.confirm(answered)
        content = part.list_signed(plan.sites, self.name, answered)
        return _to_text(self.identity.sign(content))

    def _reveal(self, plan: Plan, facts: Facts) -> dict[str, Any]:
        """Return the shares that the server needs, and letters of the next attempt.

        Raises:
            WireError: if too few sites have signed the list that this site has signed.
        """
        part = self._part(plan, facts)
        answered = _party_numbers(facts.get("answered"), len(plan.sites))
        signatures = _by_party(facts.get("signatures"), len(plan.sites))
        agreed = [
            number
            for number in answered
            if number in signatures and self._has_signed(plan, part, number, answered, signatures)
        ]
        if len(agreed) < part.party.required:
            raise WireError(
                f"{len(agreed)} sites have signed the list of sites in the sum, "
                f"{part.party.required} are needed: the server told others another list, or they "
                "are gone"
            )
        shares = part.party.reveal(answered)
        Sums(self.folder, plan.run).note(part.place.number, [plan.sites[k] for k in answered])
        reply: dict[str, Any] = {
            "shares": {str(owner): _to_text(share) for owner, share in shares.items()}
        }
        if facts.get("then"):
            reply["letters"] = self._letters(plan, facts, more=1)
        return reply

    def _has_signed(
        self,
        plan: Plan,
        part: Part,
        number: int,
        answered: Collection[int],
        signatures: Mapping[int, object],
    ) -> bool:
        """Return whether a site has signed the same list as this one."""
        content = part.list_signed(plan.sites, plan.sites[number], answered)
        try:
            signature = _to_bytes(signatures[number])
        except WireError:
            return False
        return self.identity.verify(plan.sites[number], content, signature)


def _round_number(facts: Facts) -> int:
    number = facts.get("round")
    if not isinstance(number, int) or isinstance(number, bool):
        raise WireError("a message of secure aggregation that names no round")
    return number


# At the server ---------------------------------------------------------------------------------


@dataclass
class Attempt:
    """An attempt at a round, at the server.

    Attributes:
        round: everything that the sites sent in it.
        number: of the round of the run that it is an attempt at.
        name: random, so that answers to another attempt are recognised.
        signed: keys and signatures as they arrived, to be passed on, by party.
        confirmed: signatures of the list of sites that answered, by party.
    """

    round: Round
    number: int
    name: str = field(default_factory=lambda: os.urandom(16).hex())
    signed: dict[int, Facts] = field(default_factory=dict)
    confirmed: dict[int, str] = field(default_factory=dict)

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
        self._attempt, self._next = self._new(0), self._new(0)
        self._next_is_ready = False  # whether all keys and letters of the next round are here

    def _new(self, number: int) -> Attempt:
        return Attempt(Round(self.required), number)

    def exchange_keys(self, number: int) -> list[str]:
        """Begin an attempt: exchange keys and letters, unless that was done in advance.

        Args:
            number: of the round.

        Returns:
            The sites that take part.

        Raises:
            WireError: if they are too few.
        """
        ready = self._next_is_ready and self._next.number == number
        self._attempt, self._next_is_ready = self._next if ready else self._new(number), False
        if not ready:
            self._ask_for_keys_and_letters()
        self._next = self._new(number + 1)
        self._check_enough(len(self._attempt.members))
        return [self.sites[number] for number in self._attempt.members]

    def _check_enough(self, sites: int) -> None:
        if sites < self.required:
            raise WireError(
                f"secure aggregation: {sites} sites exchanged keys, {self.required} are needed"
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
        """Ask the sites that answered to agree on who they are, then for their shares.

        Returns:
            The sum without masks.

        Raises:
            WireError: if too few sites agree or reveal shares, or if the shares do not fit.
        """
        attempt, round_, following = self._attempt, self._attempt.round, self._next
        in_advance = len(following.signed) == len(self.sites)
        answered = sorted(round_.masked)

        def read_signature(site: str, facts: Facts) -> None:
            attempt.check(facts)
            attempt.confirmed[self.sites.index(site)] = str(facts.get("signature"))

        def read_shares(site: str, facts: Facts) -> None:
            attempt.check(facts)
            number = self.sites.index(site)
            shares = _by_party(facts.get("shares"), len(self.sites))
            if shares.keys() != {*answered, *round_.lost()}:
                raise WireError("its shares are not of all that took part")
            if in_advance:
                following.add_letters(number, facts.get("letters"), len(self.sites))
            round_.shares |= {(owner, number): _to_bytes(share) for owner, share in shares.items()}

        message: dict[str, Any] = {"attempt": attempt.name, "answered": answered}
        self.ask(CONFIRM, {self.sites[k]: message for k in answered}, read_signature)
        self._check_left(len(attempt.confirmed), "confirmed who is in the sum")
        message["signatures"] = {str(k): text for k, text in attempt.confirmed.items()}
        if in_advance:
            message |= {"then": following.name, "keys": following.keys}
        self.ask(REVEAL, {self.sites[k]: message for k in attempt.confirmed}, read_shares)
        self._next_is_ready = len(following.members) == len(self.sites)
        self._check_left(len({by for _, by in round_.shares}), "revealed their shares")
        try:
            return round_.total()
        except (ValueError, IndexError):
            raise WireError("the shares that sites revealed do not fit together") from None

    def _check_left(self, sites: int, what: str) -> None:
        if sites < self.required:
            raise WireError(f"{sites} sites {what}, {self.required} are needed")

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
            return " after its upload; its numbers are in the sum"
        if number in self._attempt.members:
            return "; the others' shares took its masks off the sum"
        return ", before it shared keys"
