"""FedGNN: hooks in `method`, keys and their matches in `matching`, the last layer in `network`."""

from polyphily.methods.fedgnn.method import FedGNN

__all__ = ["FedGNN"]
