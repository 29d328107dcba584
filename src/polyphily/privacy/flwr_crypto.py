"""Flower's cryptography that secure aggregation uses: secret sharing, key agreement, encryption.

None of it is public API of flwr. If a new version of flwr moves it, only this file changes.
"""

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

__all__ = [
    "bytes_to_public_key",
    "combine_shares",
    "create_shares",
    "decrypt",
    "encrypt",
    "generate_key_pairs",
    "generate_shared_key",
    "public_key_to_bytes",
    "share_keys_plaintext_concat",
    "share_keys_plaintext_separate",
]
