"""FedSage and FedSage+: `plain` and `plus`; the latter's `network`, `impaired` and `exchange`."""

from polyphily.methods.fedsage.plain import FedSage
from polyphily.methods.fedsage.plus import FedSagePlus

__all__ = ["FedSage", "FedSagePlus"]
