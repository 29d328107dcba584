"""Local: every client trains alone. The baseline without federation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from polyphily.core.method import Method, register


@register("local", cite="no communication; the same optimiser and budget as the others")
@dataclass(frozen=True)
class LocalOnly(Method):
    """Each client trains its own model; nothing leaves a site."""

    labels_can_be_inputs: ClassVar[bool] = True
    evaluated = "personal"
    selection = "client"
