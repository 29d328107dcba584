"""Local: every client trains alone. What federation must beat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from polyphily.core.method import Method, register


@register("local", cite="no communication; the same optimiser and budget as the others")
@dataclass(frozen=True)
class LocalOnly(Method):
    """Each client trains its own model; nothing leaves a site."""

    evaluated = "personal"
    selection = "client"
    averaged: ClassVar[Mapping[str, str] | str] = {}
