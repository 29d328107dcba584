"""FedLit: hooks in `method`, link types in `links`, channels in `network`, the server's `match`."""

from polyphily.methods.fedlit.method import FedLit

__all__ = ["FedLit"]
