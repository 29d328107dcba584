"""FedSage and FedSage+: `plain` and `plus`.

Parts of the latter: `network`, `slots` and `leaves` (generated neighbours), `impaired`, `exchange`.
"""

from polyphily.methods.fedsage.plain import FedSage
from polyphily.methods.fedsage.plus import FedSagePlus

__all__ = ["FedSage", "FedSagePlus"]
