"""Admission of sites to a federation: a key is made at its site and never leaves it.

1. `polyphily site init` makes the key and a request: the public key and the site's name, signed
   with the key.
2. `polyphily server admit` checks the request, certifies the key and writes an answer: the
   certificate, the authority's certificate, and the public keys of all sites. None of it is secret.
3. `polyphily site accept` checks that the answer is for the site's key and completes the folder.

A request for a new key (`site rotate`) is also signed with the old key. These signatures are part
of answers, so that the other sites can check a new key themselves and need not trust the server.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from polyphily.errors import UserError
from polyphily.flower import keys
from polyphily.flower.deployment import CONFIG, SITE, Bundle, Deployment, check_site_name
from polyphily.flower.register import Entry, Journal, Register
from polyphily.runs.folder import to_toml, write_text

LARGEST = 1 << 20  # bytes of a request or an answer
MOST_ROTATIONS = 100
NEW_KEY = "site.key.new"  # a key that has been requested and is not accepted yet


# Files that travel -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """A request of a site to the server's operator.

    Attributes:
        name: of the site.
        key: its public key.
        csr: the certificate request (PKCS#10, PEM).
        signature: of the new key with the old one; empty in a site's first request.
    """

    name: str
    key: ec.EllipticCurvePublicKey
    csr: str
    signature: bytes = b""

    @classmethod
    def read(cls, file: Path) -> Request:
        """Read a request and check that its sender has the private key.

        Raises:
            UserError: if it cannot be read or is not signed with its own key.
        """
        entries = _read_json(file, "request")
        try:
            csr = str(entries["csr"])
            name, key = keys.read_request(csr.encode("ascii"))
            signature = base64.b64decode(str(entries.get("signature", "")), validate=True)
        except (KeyError, ValueError) as error:
            raise UserError(f"{file} is not the request of a site: {error}") from None
        check_site_name(name)
        return cls(name, key, csr, signature)

    def write(self, file: Path) -> None:
        signature = base64.b64encode(self.signature).decode("ascii")
        _write_json(file, "request", {"csr": self.csr, "signature": signature})


@dataclass(frozen=True)
class Member:
    """A site as an answer describes it to the other sites.

    Attributes:
        keys: all public keys that it has had (OpenSSH), the latest last.
        signatures: of each key but the first, with the key before it.
    """

    keys: tuple[str, ...]
    signatures: tuple[str, ...] = ()

    @property
    def key(self) -> ec.EllipticCurvePublicKey:
        return keys.parse_public(self.keys[-1].encode("ascii"))

    def follows(self, name: str, known: ec.EllipticCurvePublicKey) -> bool:
        """Return whether the latest key is a known one, or was signed by it or its successors."""
        parsed = [keys.parse_public(key.encode("ascii")) for key in self.keys]
        if known not in parsed:
            return False
        for i in range(parsed.index(known), len(parsed) - 1):
            signature = base64.b64decode(self.signatures[i])
            if not keys.is_rotation(parsed[i], name, self.keys[i + 1].encode("ascii"), signature):
                return False
        return True

    def to_json(self) -> dict[str, Any]:
        return {"keys": list(self.keys), "signatures": list(self.signatures)}

    @classmethod
    def from_json(cls, entries: Any) -> Member:
        """Read what `to_json` wrote.

        Raises:
            ValueError: if it has another form.
        """
        try:
            found = tuple(map(str, entries["keys"])), tuple(map(str, entries["signatures"]))
        except (KeyError, TypeError):
            raise ValueError("a site without keys") from None
        if not 1 <= len(found[0]) <= MOST_ROTATIONS or len(found[1]) != len(found[0]) - 1:
            raise ValueError("a site with keys and signatures that do not match")
        for key in found[0]:
            keys.parse_public(key.encode("ascii"))
        for signature in found[1]:
            base64.b64decode(signature, validate=True)
        return cls(*found)


@dataclass(frozen=True)
class ServerAnswer:
    """An answer of the server's operator to a site; nothing in it is secret.

    Attributes:
        name: of the site.
        host: by which sites reach the server.
        port: for sites.
        authority: certificate of the federation's authority (PEM).
        certificate: of the site's key (PEM).
        members: all sites of the federation, by name.
    """

    name: str
    host: str
    port: int
    authority: str
    certificate: str
    members: Mapping[str, Member]

    def write(self, file: Path) -> None:
        members = {name: member.to_json() for name, member in self.members.items()}
        entries = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        _write_json(file, "answer", entries | {"members": members})

    @classmethod
    def read(cls, file: Path) -> ServerAnswer:
        """Read an answer.

        Raises:
            UserError: if it cannot be read.
        """
        entries = _read_json(file, "answer")
        try:
            members = {str(n): Member.from_json(e) for n, e in dict(entries["members"]).items()}
            answer = cls(
                name=str(entries["name"]),
                host=str(entries["host"]),
                port=int(entries["port"]),
                authority=str(entries["authority"]),
                certificate=str(entries["certificate"]),
                members=members,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{file} is not an answer of a server: {error}") from None
        for name in (answer.name, *members):
            check_site_name(name)
        return answer


def _read_json(file: Path, kind: str) -> dict[str, Any]:
    try:
        if file.stat().st_size > LARGEST:
            raise UserError(f"{file} is too large to be a {kind}")
        entries = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None
    except (ValueError, RecursionError):
        entries = None
    if not isinstance(entries, dict) or entries.get("polyphily") != kind:
        raise UserError(f"{file} is not a {kind} of `polyphily`")
    return entries


def _write_json(file: Path, kind: str, entries: Mapping[str, Any]) -> None:
    write_text(file, json.dumps({"polyphily": kind, **entries}, indent=2) + "\n")


# At the site -----------------------------------------------------------------------------------


def init_site(folder: Path, name: str, server: str, authority: Path | None = None) -> Path:
    """Create a site's folder with a new key; return the file with the request.

    Args:
        folder: to create.
        name: of the site.
        server: host and port.
        authority: certificate of the federation's authority, if it is known already.

    Raises:
        UserError: if the folder is in use, or the name or the address is not valid.
    """
    check_site_name(name)
    host, port = parse_address(server)
    if (folder / SITE).exists():
        raise UserError(
            f"{folder} is a site's folder already. For a new key: polyphily site rotate {folder}"
        )
    content = authority.read_bytes() if authority is not None and _certificate(authority) else b""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        (folder / "sites").mkdir(exist_ok=True)
        key = keys.new_key()
        keys.write_private(folder / "site.key", keys.private_openssh(key))
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}") from None
    if content:
        (folder / "ca.crt").write_bytes(content)
    write_text(folder / SITE, to_toml({"name": name, "host": host, "port": port}))
    return _write_request(folder, name, key)


def rotate_site(folder: Path) -> Path:
    """Make a new key for a site; return the file with the request, signed with the old key too.

    The old key stays in use until the answer is accepted.
    """
    bundle = Bundle(folder)
    old, _ = bundle.pair()
    (folder / NEW_KEY).unlink(missing_ok=True)
    key = keys.new_key()
    keys.write_private(folder / NEW_KEY, keys.private_openssh(key))
    signature = keys.sign_rotation(old, bundle.name, keys.public_openssh(key))
    return _write_request(folder, bundle.name, key, signature)


def _write_request(
    folder: Path, name: str, key: ec.EllipticCurvePrivateKey, signature: bytes = b""
) -> Path:
    file = folder / f"{name}.request.json"
    csr = keys.new_request(key, name).decode("ascii")
    Request(name, key.public_key(), csr, signature).write(file)
    return file


@dataclass(frozen=True)
class Accepted:
    """The changes that an answer made at a site.

    Attributes:
        authority: fingerprint of the authority's certificate.
        known: whether the site had that certificate before.
        added: fingerprints of other sites' keys that are new, by site.
        replaced: fingerprints of other sites' keys that replace older ones, by site.
        removed: sites that have left the federation.
        address: where the server says it is, if site.toml has another address.
    """

    authority: str
    known: bool
    added: dict[str, str]
    replaced: dict[str, str]
    removed: list[str]
    address: str


def accept(folder: Path, file: Path) -> Accepted:
    """Complete a site's folder with the answer of the server's operator.

    Everything is checked before anything is written: the answer is for this site and its key, the
    authority is the one that the site knows, and a new key of another site was signed with its old
    one.

    Raises:
        UserError: if a check fails. The folder is then unchanged.
    """
    bundle, answer = Bundle(folder), ServerAnswer.read(file)
    name = bundle.name
    if answer.name != name:
        raise UserError(f"{file} is the answer to '{answer.name}', and this site is '{name}'")
    authority = _parse(answer.authority, file)
    known = bundle.certificate.exists()
    if known and _certificate(bundle.certificate) != authority:
        raise UserError(
            f"{file} is from another authority than {bundle.certificate}. Ask the server's "
            "operator. If it is a new federation, start with an empty folder: polyphily site init"
        )
    own = _own_key(folder, bundle, answer, authority, file)
    held = keys.read_public_keys(folder / "sites")
    added, replaced = _compare(answer.members, held, name, file)
    removed = sorted(held.keys() - answer.members.keys() - {name})
    for other in removed:
        (folder / "sites" / f"{other}.pub").unlink()
    (folder / "sites").mkdir(exist_ok=True)
    for other, member in answer.members.items():
        write_text(folder / "sites" / f"{other}.pub", member.keys[-1])
    write_text(folder / "ca.crt", answer.authority)
    write_text(folder / "site.crt", answer.certificate)
    if own != bundle.key:
        own.replace(bundle.key)
    address = f"{answer.host}:{answer.port}"
    same = bundle.address == (answer.host, answer.port)
    return Accepted(
        keys.certificate_fingerprint(authority),
        known,
        added,
        replaced,
        removed,
        "" if same else address,
    )


def _own_key(
    folder: Path, bundle: Bundle, answer: ServerAnswer, authority: x509.Certificate, file: Path
) -> Path:
    """Return the file with the private key that an answer has certified."""
    certificate = _parse(answer.certificate, file)
    for own in (bundle.key, folder / NEW_KEY):
        if not own.exists():
            continue
        keys.check_modes(own)
        _, public = keys.read_pair(own)
        listed = answer.members.get(answer.name)
        if keys.is_certified(certificate, answer.name, public, authority) and (
            listed is not None and listed.key == public
        ):
            return own
    raise UserError(f"{file} is not for the key in {folder}. Send its latest request again")


def _compare(
    members: Mapping[str, Member],
    held: Mapping[str, ec.EllipticCurvePublicKey],
    own: str,
    file: Path,
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the fingerprints of other sites' new keys: of new sites, and of known ones."""
    added, replaced = {}, {}
    for name, member in members.items():
        key = member.key
        if name == own or held.get(name) == key:
            continue
        if name not in held:
            added[name] = keys.fingerprint(key)
            continue
        if not member.follows(name, held[name]):
            raise UserError(
                f"{file} has another key for '{name}', which is not signed with the key that this "
                f"site knows ({keys.fingerprint(held[name])}). If '{name}' has lost its key, ask "
                f"it for the fingerprint of the new one ({keys.fingerprint(key)}). If they are the "
                f"same, delete sites/{name}.pub and try again"
            )
        replaced[name] = keys.fingerprint(key)
    return added, replaced


# At the server ---------------------------------------------------------------------------------


def admit(deployment: Deployment, file: Path, ca_key: Path | None = None) -> Path:
    """Certify and register the key of a site's request; return the file with the answer.

    A request with a key that is registered already renews the site's certificate.

    Raises:
        UserError: if the request is not valid, the key was revoked, or the site has another key.
    """
    request, register = Request.read(file), Register(deployment.path)
    name, wanted = request.name, keys.fingerprint(request.key)
    if wanted in register.revoked():
        raise UserError(f"the key in {file} was revoked. '{name}' must make a new one")
    current = register.find(name)
    if current and current.key != request.key and current.fingerprint not in register.revoked():
        raise UserError(
            f"'{name}' has a key already: {current.fingerprint}. To replace it: `polyphily site "
            f"rotate` there and `polyphily server rotate` here. If it is lost: polyphily server "
            f"revoke {deployment.path} {name}"
        )
    taken = [e.name for e in register.entries() if e.key == request.key and e.name != name]
    if taken:
        raise UserError(f"the key in {file} is the key of '{taken[0]}'")
    renewal = current is not None and current.key == request.key
    chain = _read_history(deployment, name) if renewal else Member((_openssh(request),))
    return _register(deployment, request, chain, ca_key, "admitted")


def rotate(deployment: Deployment, file: Path, ca_key: Path | None = None) -> Path:
    """Replace a site's key by that of its request; return the file with the answer.

    Raises:
        UserError: if the request is not signed with the site's present key.
    """
    request, register = Request.read(file), Register(deployment.path)
    current = register.find(request.name)
    if current is None or current.refusal():
        raise UserError(
            f"'{request.name}' has no valid key to be replaced: polyphily server admit "
            f"{deployment.path} {file}"
        )
    if keys.fingerprint(request.key) in register.revoked():
        raise UserError(f"the key in {file} was revoked or replaced before")
    new = _openssh(request).encode("ascii")
    if not keys.is_rotation(current.key, request.name, new, request.signature):
        raise UserError(f"{file} is not signed with the present key of '{request.name}'")
    chain = _read_history(deployment, request.name)
    signature = base64.b64encode(request.signature).decode("ascii")
    chain = Member((*chain.keys, _openssh(request)), (*chain.signatures, signature))
    return _register(deployment, request, chain, ca_key, "rotated", replaces=current)


def _register(
    deployment: Deployment,
    request: Request,
    chain: Member,
    ca_key: Path | None,
    event: str,
    *,
    replaces: Entry | None = None,
) -> Path:
    """Certify a key, write it into the register, and write the answer."""
    path, name = deployment.path, request.name
    authority = keys.read_certificate(path / "ca.crt")
    key = keys.read_authority_key(ca_key or path / "ca.key", authority)
    certificate = keys.new_site_certificate(name, request.key, authority, key)
    folder = path / "sites"
    if replaces is not None:
        Register(path).revoke(replaces, "replaced")
    write_text(folder / f"{name}.keys.json", json.dumps(chain.to_json()) + "\n")
    write_text(folder / f"{name}.crt", keys.certificate_pem(certificate).decode("ascii"))
    write_text(folder / f"{name}.pub", _openssh(request))
    if name not in deployment.config()["sites"]:
        _add_site(path / CONFIG, name)
    Journal(path).write(event, site=name, fingerprint=keys.fingerprint(request.key))
    return answer(deployment, name)


def answer(deployment: Deployment, name: str) -> Path:
    """Write what a site needs to know: its certificate and all sites' public keys."""
    path, config = deployment.path, deployment.config()
    members = {e.name: _read_history(deployment, e.name) for e in Register(path).active()}
    folder = path / "answers"
    folder.mkdir(exist_ok=True)
    file = folder / f"{name}.answer.json"
    ServerAnswer(
        name,
        str(config["host"]),
        int(config["port"]),
        (path / "ca.crt").read_text(encoding="ascii"),
        (path / "sites" / f"{name}.crt").read_text(encoding="ascii"),
        members,
    ).write(file)
    return file


def revoke(deployment: Deployment, name: str) -> str:
    """Refuse a site's key from its next message on; return the key's fingerprint."""
    register = Register(deployment.path)
    entry = register.find(name)
    if entry is None:
        known = ", ".join(e.name for e in register.entries()) or "none"
        raise UserError(f"there is no site '{name}'. Sites with a key: {known}")
    if entry.fingerprint in register.revoked():
        raise UserError(f"{entry.why_not} already")
    register.revoke(entry, "revoked")
    Journal(deployment.path).write("revoked", site=name, fingerprint=entry.fingerprint)
    return entry.fingerprint


def renew(deployment: Deployment, ca_key: Path | None = None) -> x509.Certificate:
    """Replace the server's certificate by one that is valid for longer, with the same key."""
    path = deployment.path
    authority = keys.read_certificate(path / "ca.crt")
    key = keys.read_authority_key(ca_key or path / "ca.key", authority)
    certificate = keys.renewed_certificate(
        keys.read_certificate(path / "server.crt"), authority, key
    )
    write_text(path / "server.crt", keys.certificate_pem(certificate).decode("ascii"))
    Journal(path).write("renewed", until=f"{certificate.not_valid_after_utc:%Y-%m-%d}")
    return certificate


def _read_history(deployment: Deployment, name: str) -> Member:
    """Return all keys that a site has had; only the present one if no others are recorded."""
    folder = deployment.path / "sites"
    present = (folder / f"{name}.pub").read_text(encoding="ascii")
    file = folder / f"{name}.keys.json"
    if file.exists():
        found = Member.from_json(json.loads(file.read_text(encoding="utf-8")))
        if found.keys[-1] == present:
            return found
    return Member((present,))


def _add_site(file: Path, name: str) -> None:
    """Add a name to the list of sites in config.toml, leaving everything else as it is."""
    text = file.read_text(encoding="utf-8")
    before = tomllib.loads(text)
    wanted = [*before["sites"], name]
    listed = ", ".join(json.dumps(site) for site in wanted)
    changed, count = re.subn(r"(?m)^sites\s*=\s*\[[^\]]*\]", f"sites = [{listed}]", text)
    if count != 1 or tomllib.loads(changed) != before | {"sites": wanted}:
        raise UserError(f"cannot add '{name}' to `sites` in {file}: add it yourself")
    write_text(file, changed)


# Both ------------------------------------------------------------------------------------------


def parse_address(text: str) -> tuple[str, int]:
    """Split host and port.

    >>> parse_address("server.example.org:9443")
    ('server.example.org', 9443)
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"'{text}' is not an address: give host and port, such as localhost:9443")
    return host, int(port)


def _openssh(request: Request) -> str:
    return keys.public_openssh(request.key).decode("ascii")


def _certificate(file: Path) -> x509.Certificate:
    return keys.read_certificate(file)


def _parse(pem: str, file: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(pem.encode("ascii"))
    except ValueError as error:
        raise UserError(f"{file} has a damaged certificate: {error}") from None
