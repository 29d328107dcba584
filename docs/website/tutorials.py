"""Tutorials: scripts in the percent format of notebooks, as pages."""

from __future__ import annotations

import re

CELL = re.compile(r"^# %%(.*)$", flags=re.MULTILINE)


def page(script: str, name: str) -> str:
    """Return the page of a script: cells of text as they are, other cells as Python.

    >>> print(page("# %% [markdown]\\n# # Title\\n# Text.\\n\\n# %%\\nx = 1\\n", "a.py"))
    # Title
    Text.
    <BLANKLINE>
    [Download the script](a.py)
    <BLANKLINE>
    ```python
    x = 1
    ```
    <BLANKLINE>
    """
    _, *parts = CELL.split(script)
    texts = []
    for kind, content in zip(parts[::2], parts[1::2], strict=True):
        if "[markdown]" in kind:
            lines = content.strip("\n").splitlines()
            texts.append("\n".join(line.removeprefix("#").removeprefix(" ") for line in lines))
        elif content.strip():
            texts.append(f"```python\n{content.strip()}\n```")
    texts.insert(1, f"[Download the script]({name})")
    return "\n\n".join(text.strip() for text in texts) + "\n"
