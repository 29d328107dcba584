"""FedHERO: hooks in `method`, the dual channel in `network`, structure learners in `structure`.

Latent graphs of the k nearest are in `latent`, built on `neighbours`, `search` and `distances`;
those of Bernoulli edges in `sampled`.
"""

from polyphily.methods.fedhero.method import FedHERO

__all__ = ["FedHERO"]
