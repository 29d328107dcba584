"""AdaFGL: hooks in `method`, heads in `network`, pairs of nodes and signs in `propagation`."""

from polyphily.methods.adafgl.method import AdaFGL

__all__ = ["AdaFGL"]
