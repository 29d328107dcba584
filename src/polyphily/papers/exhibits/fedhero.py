"""Exhibits of the paper."""

from polyphily.papers.exhibits import Exhibit

EXHIBITS: tuple[Exhibit, ...] = ()
