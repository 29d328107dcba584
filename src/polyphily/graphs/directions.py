"""The words for directions of edges. Without numpy, because the command line imports them."""

from __future__ import annotations

BOTH, INWARD, OUTWARD, SEPARATE = "both", "in", "out", "separate"
DIRECTIONS = (BOTH, INWARD, OUTWARD, SEPARATE)
"""The ways in which a network reads the direction of edges (`docs/edges.md`)."""
