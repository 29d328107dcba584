"""TLS certificates for the server, key pairs and certificates for the sites."""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import ipaddress
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from polyphily.errors import UserError

KeyPair: TypeAlias = tuple[ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey]
Authority: TypeAlias = tuple[x509.Certificate, ec.EllipticCurvePrivateKey]
VALID = dt.timedelta(days=3 * 365)  # certificates of servers and sites
AUTHORITY_VALID = dt.timedelta(days=10 * 365)
WARNING = dt.timedelta(days=30)  # a certificate that ends earlier than this is warned about
_ISSUER = "Polyphily federation"
_CURVE = ec.SECP384R1().name


def new_key() -> ec.EllipticCurvePrivateKey:
    """Generate a private key on P-384, the curve that Flower uses."""
    return ec.generate_private_key(ec.SECP384R1())


def write_private(file: Path, content: bytes) -> None:
    """Write a new file with mode 0600, created with that mode so that others can never read it."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(content)


def check_modes(private: Path, *public: Path) -> None:
    """Check that other users of the machine cannot read a private key or replace any of the files.

    Args:
        private: a private key. Its folder is checked, too.
        public: files in that folder that others may read, but not change.

    Raises:
        UserError: if they can, with the command that prevents it.
    """
    wrong = []
    is_open = private.parent.exists() and private.parent.stat().st_mode & 0o011
    for file, forbidden, command in (
        (private, 0o077, "go="),
        (private.parent, 0o022, "go-w"),
        *((file, 0o022, "go-w") for file in public if is_open),
    ):
        try:
            mode = file.stat().st_mode & 0o777
        except FileNotFoundError:
            continue
        if mode & forbidden:
            wrong.append((file, mode, f"chmod {command} {shlex.quote(str(file))}"))
    if wrong:
        what = "; ".join(f"{file} has mode {mode:04o}" for file, mode, _ in wrong)
        raise UserError(
            f"other users of this machine can read or replace keys: {what}. If that was not "
            f"intended, make new keys. Otherwise: {' && '.join(fix for *_, fix in wrong)}"
        )


def private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )


def private_openssh(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return a private key in the format in which Flower reads it."""
    return bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.OpenSSH,
            serialization.NoEncryption(),
        )
    )


def public_openssh(key: ec.EllipticCurvePrivateKey | ec.EllipticCurvePublicKey) -> bytes:
    public = key.public_key() if isinstance(key, ec.EllipticCurvePrivateKey) else key
    return bytes(
        public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    )


def public_pem(key: ec.EllipticCurvePublicKey) -> bytes:
    """Return a public key in PEM, as Flower sends it over the network."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return bytes(key.public_bytes(serialization.Encoding.PEM, form))


def parse_public(content: bytes) -> ec.EllipticCurvePublicKey:
    """Read a public key in the format of OpenSSH.

    Raises:
        ValueError: if it is no elliptic-curve key on P-384.
    """
    key = serialization.load_ssh_public_key(content)
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != _CURVE:
        raise ValueError("not an elliptic-curve key on P-384")
    return key


def parse_pem(content: bytes) -> ec.EllipticCurvePublicKey:
    """Read a public key in PEM.

    Raises:
        ValueError: if it is no elliptic-curve key.
    """
    try:
        key = serialization.load_pem_public_key(content)
    except UnsupportedAlgorithm:
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError("not an elliptic-curve key")
    return key


def verifies(key: ec.EllipticCurvePublicKey, content: bytes, signature: bytes) -> bool:
    """Return whether a signature of Flower's (ECDSA, SHA-256) is that of a key."""
    try:
        key.verify(signature, content, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        return False
    return True


def fingerprint(key: ec.EllipticCurvePublicKey) -> str:
    """Return the fingerprint of a public key, as `ssh-keygen -lf` prints it."""
    blob = base64.b64decode(public_openssh(key).split()[1])
    digest = base64.b64encode(hashlib.sha256(blob).digest()).decode("ascii")
    return f"SHA256:{digest.rstrip('=')}"


def certificate_fingerprint(certificate: x509.Certificate) -> str:
    """Return the fingerprint of a certificate, as `openssl x509 -fingerprint -sha256` does."""
    digest = certificate.fingerprint(hashes.SHA256()).hex().upper()
    return ":".join(digest[i : i + 2] for i in range(0, len(digest), 2))


def read_pair(file: Path) -> KeyPair:
    """Read a site's private key; return it with its public key.

    Raises:
        ValueError: if the file holds no elliptic-curve key.
    """
    key = serialization.load_ssh_private_key(file.read_bytes(), password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("not an elliptic-curve key")
    return key, key.public_key()


@dataclass(frozen=True)
class Identity:
    """The key that a site signs with, and the keys that verify the other sites' signatures.

    Attributes:
        private: the site's own key.
        public_keys: every site's public key, by name.
    """

    private: ec.EllipticCurvePrivateKey
    public_keys: Mapping[str, ec.EllipticCurvePublicKey]

    def sign(self, content: bytes) -> bytes:
        return bytes(self.private.sign(content, ec.ECDSA(hashes.SHA384())))

    def verify(self, site: str, content: bytes, signature: bytes) -> bool:
        """Return whether a site has signed the content; False for an unknown site."""
        try:
            self.public_keys[site].verify(signature, content, ec.ECDSA(hashes.SHA384()))
        except (KeyError, InvalidSignature):
            return False
        return True


def read_public_keys(folder: Path) -> dict[str, ec.EllipticCurvePublicKey]:
    """Read the sites' public keys in a folder, by name; empty if there is no such folder.

    Raises:
        ValueError: if a file holds no elliptic-curve key.
    """
    found = {}
    for file in sorted(folder.glob("*.pub")):
        try:
            found[file.name.removesuffix(".pub")] = parse_public(file.read_bytes())
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None
    return found


def new_authority(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    """Create a self-signed certificate authority for one federation."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _ISSUER)])
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        _builder(name, name, key.public_key(), AUTHORITY_VALID)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )


def new_certificate(
    key: ec.EllipticCurvePrivateKey,
    hosts: Sequence[str],
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
) -> x509.Certificate:
    """Create a server's certificate for the names and addresses in `hosts`."""
    names = x509.SubjectAlternativeName([_general_name(h) for h in hosts])
    usage = ExtendedKeyUsageOID.SERVER_AUTH
    builder = _issued(hosts[0], key.public_key(), usage, authority, authority_key)
    return builder.add_extension(names, critical=False).sign(authority_key, hashes.SHA384())


def renewed_certificate(
    old: x509.Certificate,
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
) -> x509.Certificate:
    """Create a new certificate for the server, with the key and the names of the old one."""
    names = old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    key = old.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    usage = ExtendedKeyUsageOID.SERVER_AUTH
    builder = _issued(_common_name(old.subject), key, usage, authority, authority_key)
    return builder.add_extension(names, critical=False).sign(authority_key, hashes.SHA384())


def new_site_certificate(
    name: str,
    key: ec.EllipticCurvePublicKey,
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
) -> x509.Certificate:
    """Create a certificate that says which site a public key belongs to, and until when."""
    usage = ExtendedKeyUsageOID.CLIENT_AUTH
    builder = _issued(name, key, usage, authority, authority_key)
    return builder.sign(authority_key, hashes.SHA384())


def _issued(
    name: str,
    key: ec.EllipticCurvePublicKey,
    usage: x509.ObjectIdentifier,
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
) -> x509.CertificateBuilder:
    """Return a builder of a certificate that an authority is about to sign."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    left = authority.not_valid_after_utc - dt.datetime.now(dt.UTC)
    return (
        _builder(subject, authority.subject, key, min(VALID, left))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        .add_extension(issuer_key, critical=False)
    )


def is_certified(
    certificate: x509.Certificate, name: str, key: ec.EllipticCurvePublicKey, by: x509.Certificate
) -> bool:
    """Return whether an authority has certified that a key belongs to a site, and it is valid."""
    now = dt.datetime.now(dt.UTC)
    try:
        certificate.verify_directly_issued_by(by)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return (
        certificate.public_key() == key
        and _common_name(certificate.subject) == name
        and certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc
    )


def read_certificate(file: Path) -> x509.Certificate:
    """Read a certificate in PEM.

    Raises:
        UserError: if there is none in the file.
    """
    try:
        return x509.load_pem_x509_certificate(file.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{file} is not a certificate: {error}") from None


def read_authority_key(file: Path, authority: x509.Certificate) -> ec.EllipticCurvePrivateKey:
    """Read the private key of a certificate authority.

    Raises:
        UserError: if the file holds another key or none, or if others can read it.
    """
    try:
        check_modes(file)
        key = serialization.load_pem_private_key(file.read_bytes(), password=None)
    except FileNotFoundError:
        raise UserError(
            f"{file} is not there. If the authority's key is kept elsewhere: --ca-key FILE"
        ) from None
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{file} is not a private key: {error}") from None
    if (
        not isinstance(key, ec.EllipticCurvePrivateKey)
        or key.public_key() != authority.public_key()
    ):
        raise UserError(f"{file} is not the key of this federation's authority (ca.crt)")
    return key


# Requests of sites -----------------------------------------------------------------------------


def new_request(key: ec.EllipticCurvePrivateKey, name: str) -> bytes:
    """Return a certificate request (PKCS#10, PEM): a name and a key, signed with the key."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject)
    return bytes(request.sign(key, hashes.SHA384()).public_bytes(serialization.Encoding.PEM))


def read_request(content: bytes) -> tuple[str, ec.EllipticCurvePublicKey]:
    """Return the name and the key of a certificate request.

    Raises:
        ValueError: if it cannot be read, or if whoever made it does not have the private key.
    """
    request = x509.load_pem_x509_csr(content)
    key = request.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != _CURVE:
        raise ValueError("not an elliptic-curve key on P-384")
    if not request.is_signature_valid:
        raise ValueError("it is not signed with its own key")
    return _common_name(request.subject), key


def sign_rotation(old: ec.EllipticCurvePrivateKey, name: str, new: bytes) -> bytes:
    """Sign with a site's old key that another public key (OpenSSH) replaces it."""
    return bytes(old.sign(_rotation(name, new), ec.ECDSA(hashes.SHA384())))


def is_rotation(old: ec.EllipticCurvePublicKey, name: str, new: bytes, signature: bytes) -> bool:
    """Return whether a site has signed with its old key that a public key replaces it."""
    try:
        old.verify(signature, _rotation(name, new), ec.ECDSA(hashes.SHA384()))
    except InvalidSignature:
        return False
    return True


def _rotation(name: str, new: bytes) -> bytes:
    return b"polyphily: the new key of " + name.encode() + b"\0" + new


def certificate_pem(certificate: x509.Certificate) -> bytes:
    return bytes(certificate.public_bytes(serialization.Encoding.PEM))


def _common_name(name: x509.Name) -> str:
    found = name.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(found[0].value) if found else ""


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, valid: dt.timedelta
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + valid)
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
