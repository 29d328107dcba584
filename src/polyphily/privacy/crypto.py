"""The cryptography of secure aggregation: secret sharing, key agreement, encryption.

Everything but Shamir's secret sharing is taken from the package `cryptography`.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Sequence

from cryptography.fernet import Fernet
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

PRIME = 2**521 - 1  # shares are numbers modulo this prime
LONGEST = 64  # bytes of a secret
_INDEX, _VALUE = 4, 66  # bytes of a share: its number, and the value of the polynomial there


# Secret sharing --------------------------------------------------------------------------------


def create_shares(secret: bytes, threshold: int, num: int) -> list[bytes]:
    """Split a secret into shares (Shamir, 1979): `threshold` recover it, fewer tell nothing.

    The secret is the value at 0 of a random polynomial of degree `threshold` - 1, and share i its
    value at i.

    Raises:
        ValueError: if the secret is too long, or the threshold is not between 1 and `num`.
    """
    if len(secret) > LONGEST:
        raise ValueError(f"a secret of {len(secret)} bytes; at most {LONGEST} can be shared")
    if not 1 <= threshold <= num:
        raise ValueError(f"a threshold of {threshold} for {num} shares")
    first = int.from_bytes(b"\x01" + secret)  # the leading byte keeps zeros at the front
    polynomial = [first, *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return [
        index.to_bytes(_INDEX) + _evaluate(polynomial, index).to_bytes(_VALUE)
        for index in range(1, num + 1)
    ]


def _evaluate(polynomial: Sequence[int], x: int) -> int:
    value = 0
    for coefficient in reversed(polynomial):
        value = (value * x + coefficient) % PRIME
    return value


def combine_shares(shares: Sequence[bytes]) -> bytes:
    """Recover a secret from as many shares as the threshold.

    Raises:
        ValueError: if the shares do not belong together, or one is there twice. Too few shares
            are noticed except with a probability below 2^-8.
    """
    points: dict[int, int] = {}
    for share in shares:
        if len(share) != _INDEX + _VALUE:
            raise ValueError(f"a share of {len(share)} bytes")
        index, value = int.from_bytes(share[:_INDEX]), int.from_bytes(share[_INDEX:])
        if index == 0 or index in points or value >= PRIME:
            raise ValueError("a share is there twice, or is not a share")
        points[index] = value
    total = 0
    for i, value in points.items():
        above = below = 1
        for j in points:
            if j != i:
                above, below = above * j % PRIME, below * (j - i) % PRIME
        total = (total + value * above * pow(below, -1, PRIME)) % PRIME
    raw = total.to_bytes(_VALUE).lstrip(b"\0")
    if raw[:1] != b"\x01" or len(raw) > LONGEST + 1:
        raise ValueError("the shares do not belong together, or are too few")
    return raw[1:]


# Key agreement and encryption ------------------------------------------------------------------


def generate_key_pairs() -> tuple[ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey]:
    """Generate a private key on P-384; return it with its public key."""
    private = ec.generate_private_key(ec.SECP384R1())
    return private, private.public_key()


def public_key_to_bytes(public_key: ec.EllipticCurvePublicKey) -> bytes:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return bytes(public_key.public_bytes(serialization.Encoding.PEM, form))


def bytes_to_public_key(content: bytes) -> ec.EllipticCurvePublicKey:
    """Read a public key in PEM.

    Raises:
        ValueError: if it is not an elliptic-curve key.
    """
    key = serialization.load_pem_public_key(content)
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError("not an elliptic-curve key")
    return key


def generate_shared_key(
    private_key: ec.EllipticCurvePrivateKey, public_key: ec.EllipticCurvePublicKey
) -> bytes:
    """Derive the key that two parties share, in the form that `encrypt` takes."""
    secret = private_key.exchange(ec.ECDH(), public_key)
    derived = HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=None).derive(secret)
    return base64.urlsafe_b64encode(derived)


def encrypt(key: bytes, plaintext: bytes) -> bytes:
    """Encrypt and authenticate (Fernet)."""
    return bytes(Fernet(key).encrypt(plaintext))


def decrypt(key: bytes, ciphertext: bytes) -> bytes:
    """Decrypt what `encrypt` returned.

    Raises:
        InvalidToken: if it was changed, or encrypted with another key.
    """
    return bytes(Fernet(key).decrypt(ciphertext))


# Letters between two parties -------------------------------------------------------------------


def share_keys_plaintext_concat(
    src_node_id: int, dst_node_id: int, b_share: bytes, sk_share: bytes
) -> bytes:
    """Join the numbers of sender and recipient and the two shares of a letter."""
    numbers = src_node_id.to_bytes(8, "little") + dst_node_id.to_bytes(8, "little")
    return numbers + len(b_share).to_bytes(4, "little") + b_share + sk_share


def share_keys_plaintext_separate(plaintext: bytes) -> tuple[int, int, bytes, bytes]:
    """Return what `share_keys_plaintext_concat` joined."""
    source, target, length = (
        int.from_bytes(plaintext[start:end], "little") for start, end in ((0, 8), (8, 16), (16, 20))
    )
    return source, target, plaintext[20 : 20 + length], plaintext[20 + length :]
