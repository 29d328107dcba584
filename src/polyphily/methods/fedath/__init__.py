"""FedATH: hooks in `method`, the dual GNN and edge evaluators in `network`, `losses`."""

from polyphily.methods.fedath.method import FedATH

__all__ = ["FedATH"]
