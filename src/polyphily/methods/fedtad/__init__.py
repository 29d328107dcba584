"""FedTAD: hooks in `method`, CKR in `reliability`, the server in `pseudo` and `distillation`."""

from polyphily.methods.fedtad.method import FedTAD

__all__ = ["FedTAD"]
