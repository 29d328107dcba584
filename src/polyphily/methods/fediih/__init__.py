"""FedIIH: personal models, mixed factor by factor by the similarity of the clients' encodings."""

from polyphily.methods.fediih.method import FedIIH

__all__ = ["FedIIH"]
