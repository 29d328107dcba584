"""A real browser for tests of pages; skips where there is none."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def chromium() -> Iterator[Any]:
    """A headless Chromium: `$POLYPHILY_CHROMIUM`, one on the path, or playwright's own."""
    api = pytest.importorskip("playwright.sync_api")
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    found = os.environ.get("POLYPHILY_CHROMIUM") or next(
        filter(None, map(shutil.which, names)), None
    )
    with api.sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except api.Error as error:
            pytest.skip(f"no Chromium to open pages with: {str(error).splitlines()[0]}")
        yield browser
        browser.close()


class Visit:
    """A page opened in a browser, and everything that it complained about or asked for."""

    def __init__(
        self, browser: Any, file: Path | str, *, width: int = 1400, scheme: str = "light"
    ) -> None:
        self.context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, accept_downloads=True
        )
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file if isinstance(file, str) else file.resolve().as_uri())

    def marks(self) -> dict[str, int]:
        """How many marks each figure has drawn."""
        found: dict[str, int] = self.page.evaluate(
            """() => Object.fromEntries([...document.querySelectorAll("figure[data-figure]")].map(
                 (f) => [f.dataset.figure, f.querySelectorAll("svg .mark").length]))"""
        )
        return found

    def network(self) -> list[str]:
        """Requests for anything but the page itself and what lies within it."""
        return [url for url in self.requests[1:] if not url.startswith(("data:", "blob:"))]
