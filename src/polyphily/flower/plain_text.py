"""Text from outside, made safe for a terminal and a log."""

from __future__ import annotations

import re
import unicodedata

LONGEST = 500  # characters
_ESCAPES = re.compile(
    r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?"  # titles, links, clipboard
    r"|[\x1b\x9b]\[?[0-?]*[ -/]*[@-~]"  # colours, cursor
)
_INVISIBLE = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}  # controls, directions, surrogates


def plain(text: object, longest: int = LONGEST) -> str:
    r"""Return text on one line without escape sequences and characters that cannot be seen.

    >>> plain("\x1b]0;root\x07all \x1b[32mwell\x1b[0m\r\n$ rm")
    'all well $ rm'
    """
    shown = _ESCAPES.sub("", str(text)[: 4 * longest])
    kept = "".join(" " if c.isspace() else c for c in shown if c.isspace() or _is_visible(c))
    kept = " ".join(kept.split())
    return kept if len(kept) <= longest else kept[: longest - 1] + "…"


def _is_visible(character: str) -> bool:
    return unicodedata.category(character) not in _INVISIBLE
