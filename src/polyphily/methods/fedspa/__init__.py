"""FedSPA: hooks in `method`, SFPD in `network` and `edges`, the weights of HBDA in `weights`."""

from polyphily.methods.fedspa.method import FedSPA

__all__ = ["FedSPA"]
