"""FGGP: hooks in `method`, `network`, the second view in `view`, prototypes in `prototypes`."""

from polyphily.methods.fggp.method import FGGP

__all__ = ["FGGP"]
