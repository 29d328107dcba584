"""`python -m website OUT` builds the site into OUT.

A warning, a broken link, or anything that pages load from another host is an error.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path

from website.staging import BrokenLink, stage

HERE = Path(__file__).parent
LOADED = re.compile(
    r"""<(?:script|img|iframe|source|audio|video)\b[^>]*\bsrc=["']?((?:https?:)?//[^"'\s>]+)"""
    r"""|<link\b(?![^>]*rel=["']?canonical)[^>]*\bhref=["']?((?:https?:)?//[^"'\s>]+)"""
    r"""|(?:@import\s+|url\()["']?((?:https?:)?//[^"'\s)]+)""",
    flags=re.IGNORECASE,
)


def loaded_from_elsewhere(out: Path) -> list[str]:
    """Return "page: address" for all that pages and styles load from another host."""
    return [
        f"{file.relative_to(out)}: {next(filter(None, found))}"
        for file in sorted(out.rglob("*"))
        if file.suffix in (".html", ".css")
        for found in LOADED.findall(file.read_text(encoding="utf-8"))
    ]


def main() -> int:
    """Build the site and return the exit status."""
    parser = argparse.ArgumentParser(prog="website", description=__doc__)
    parser.add_argument("out", type=Path, help="the folder for the pages")
    parser.add_argument("--pages", type=Path, help="keep the Markdown that Sphinx reads here")
    asked = parser.parse_args()

    from sphinx.cmd.build import main as build

    with tempfile.TemporaryDirectory() as folder:
        pages = asked.pages or Path(folder) / "pages"
        try:
            stage(pages)
        except BrokenLink as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        flags = ["--quiet", "--fail-on-warning", "--builder", "html", "--conf-dir", str(HERE)]
        flags += ["--fresh-env", "--doctree-dir", str(Path(folder) / "doctrees")]
        status = build([*flags, str(pages), str(asked.out)])
    if status:
        return status
    if foreign := loaded_from_elsewhere(asked.out):
        print("error: pages load from other hosts:", *foreign, sep="\n  ", file=sys.stderr)
        return 1
    print(f"{asked.out}/index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
