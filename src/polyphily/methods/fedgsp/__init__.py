"""FedGSP: hooks in `method`, the server's W in `collaboration`, what is sent in `directions`.

The network is `polyphily.nn.unifilter`.
"""

from polyphily.methods.fedgsp.method import FedGSP

__all__ = ["FedGSP"]
