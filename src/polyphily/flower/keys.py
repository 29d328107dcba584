"""TLS certificates for the server and key pairs for the sites."""

from __future__ import annotations

import datetime as dt
import ipaddress
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

KeyPair: TypeAlias = tuple[ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey]
VALID = dt.timedelta(days=3 * 365)
_ISSUER = "Polyphily federation"


def new_key() -> ec.EllipticCurvePrivateKey:
    """Generate a private key on P-384, the curve that Flower uses."""
    return ec.generate_private_key(ec.SECP384R1())


def write_private(file: Path, content: bytes) -> None:
    """Write a new file with mode 0600, created with that mode so that others can never read it."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(content)


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


def public_openssh(key: ec.EllipticCurvePrivateKey) -> bytes:
    public = key.public_key()
    return bytes(
        public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    )


def read_public(file: Path) -> bytes:
    """Read a public key and return it as PEM, as Flower sends it over the network."""
    key = serialization.load_ssh_public_key(file.read_bytes())
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return bytes(key.public_bytes(serialization.Encoding.PEM, form))


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
        key = serialization.load_ssh_public_key(file.read_bytes())
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise ValueError(f"{file}: not an elliptic-curve key")
        found[file.name.removesuffix(".pub")] = key
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
        _builder(name, name, key)
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
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:64])])
    issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    return (
        _builder(name, authority.subject, key)
        .add_extension(x509.SubjectAlternativeName([_general_name(h) for h in hosts]), False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False)
        .add_extension(issuer_key, critical=False)
        .sign(authority_key, hashes.SHA384())
    )


def certificate_pem(certificate: x509.Certificate) -> bytes:
    return bytes(certificate.public_bytes(serialization.Encoding.PEM))


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + VALID)
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
