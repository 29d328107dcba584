"""FedHERO: hooks in `method`, the dual channel in `network`, structure learners in `structure`.

Latent graphs are in `latent`, built on `neighbours`, `search` and `distances`.
"""

from polyphily.methods.fedhero.method import FedHERO

__all__ = ["FedHERO"]
