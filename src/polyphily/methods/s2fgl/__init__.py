"""S2FGL: hooks in `method`; NLIR in `centrality` and `repository`, FGMA in `spectrum`; `losses`.

Any backbone is trained.
"""

from polyphily.methods.s2fgl.method import S2FGL

__all__ = ["S2FGL"]
