"""Polyphony: shared voices, mixed by every client for itself."""

from polyphily.methods.polyphony.method import Polyphony

__all__ = ["Polyphony"]
