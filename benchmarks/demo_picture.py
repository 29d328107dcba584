"""Draw what `polyphily demo` prints as docs/demo.svg, the picture of README.md.

    python benchmarks/demo_picture.py

Times of rounds are those of this machine: draw it while nothing else runs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

FILE = Path(__file__).resolve().parents[1] / "docs" / "demo.svg"
COMMAND, WIDTH = "polyphily demo", 80


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        printed = subprocess.run(
            [sys.executable, "-m", *COMMAND.split()],
            cwd=folder,
            env={**os.environ, "COLUMNS": str(WIDTH), "FORCE_COLOR": "1", "TERM": "xterm-256color"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout
    console = Console(record=True, width=WIDTH, file=StringIO())
    console.print(f"[bold]$ {COMMAND}[/bold]", highlight=False)
    console.print(Text.from_ansi(printed))
    picture = console.export_svg(title=COMMAND)
    # Fonts come from the reader's machine, nothing from elsewhere.
    FILE.write_text(re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL), "utf-8")


if __name__ == "__main__":
    main()
