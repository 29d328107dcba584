"""FedStar: hooks in `method`, the two channels in `network`, encodings in `structure`."""

from polyphily.methods.fedstar.method import FedStar

__all__ = ["FedStar"]
