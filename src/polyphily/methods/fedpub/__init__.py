"""FED-PUB."""

from polyphily.methods.fedpub.method import FedPub

__all__ = ["FedPub"]
