"""The report page of runs that are going on, served to browsers on this machine.

There are two addresses: the page, and its state as JSON. The server listens on 127.0.0.1, answers
no request that was sent to another host name (a page elsewhere could otherwise have its own name
point here), and the page may connect to nothing else.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from polyphily.report.blocks import Content
from polyphily.report.content import content
from polyphily.report.following import Follower, Standing, headline
from polyphily.report.page import POLICY, render

HOST = "127.0.0.1"
NAMES = (HOST, "localhost")  # of this machine; a forwarded port may be another than ours
FRESH = 0.5  # seconds for which a look at the runs is used again
SHARE = 0.1  # at most this share of the time goes into making pages
HEADERS = {
    "Content-Security-Policy": f"{POLICY}; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class LivePage:
    """The page of the runs in a folder. It is made again when they have changed and someone asks.

    Args:
        folder: a run folder, or one with runs in it; it need not exist yet.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._follower = Follower(folder)
        self._lock = threading.Lock()
        self._looked, self._standings = -FRESH, list[Standing]()
        self._version = ""  # of the runs as they are
        self._made, self._page = "", ""  # version and text of the page
        self._made_at, self._cost = 0.0, 0.0
        self._unread, self._unmade = "", ""  # why the runs could not be read, or the page not made

    def state(self) -> dict[str, Any]:
        """Return where the runs stand, and the version of the page that can be had."""
        with self._lock:
            self._look()
            return {
                "version": self._version if self._due() else self._made,
                "words": headline(self._standings, self.folder),
                "trouble": self._unread or self._unmade,
                "runs": [asdict(standing) for standing in self._standings],
            }

    def page(self) -> str:
        """Return the page. It is made again within its share of the time only."""
        with self._lock:
            self._look()
            if self._made != self._version and self._due():
                self._make()
            return self._page

    def _look(self) -> None:
        if time.monotonic() - self._looked < FRESH:
            return
        try:
            self._standings = self._follower.standings()
            text = json.dumps([self._follower.signature(), [s.state for s in self._standings]])
            self._version = hashlib.sha256(text.encode()).hexdigest()[:16]
            self._unread = ""
        except Exception as error:  # a file that is being changed: the next look reads it
            self._unread = f"{type(error).__name__}: {error}"
        self._looked = time.monotonic()

    def _due(self) -> bool:
        return time.monotonic() - self._made_at >= self._cost / SHARE

    def _make(self) -> None:
        began = time.monotonic()
        try:
            runs = self._follower.runs()
            shown = content(runs) if runs else _nothing_yet(self.folder)
            self._page = render(shown, version=self._version)
            self._unmade = ""
        except Exception as error:  # the page before stays, and says so
            self._unmade = f"the page could not be made: {type(error).__name__}: {error}"
            self._page = self._page or render(_nothing_yet(self.folder), version=self._version)
        self._made, self._made_at = self._version, time.monotonic()
        self._cost = self._made_at - began


def _nothing_yet(folder: Path) -> Content:
    note = "The page fills as soon as a round is complete."
    return Content("No round yet", str(folder), (), (), (note,))


class _Handler(BaseHTTPRequestHandler):
    server_version, sys_version = "polyphily", ""
    timeout = 10  # seconds for a request
    live: LivePage

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        path, status, kind = urlsplit(self.path).path, HTTPStatus.OK, "text/plain"
        if _host_name(self.headers.get("Host", "")) not in NAMES:
            status, text = HTTPStatus.MISDIRECTED_REQUEST, f"open http://{HOST} instead\n"
        elif path == "/":
            kind, text = "text/html", self.live.page()
        elif path == "/state":
            kind, text = "application/json", json.dumps(self.live.state())
        else:
            status, text = HTTPStatus.NOT_FOUND, "there is nothing here\n"
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of browsers that have gone away."""


def _host_name(host: str) -> str:
    """Return the name in a Host header, without its port.

    >>> _host_name("localhost:8766"), _host_name("evil.example")
    ('localhost', 'evil.example')
    """
    return host.rpartition(":")[0] if ":" in host else host


@contextmanager
def serving(live: LivePage, port: int) -> Iterator[str]:
    """Serve a page inside the block.

    Args:
        live: the page.
        port: where; 0 takes one that is free.

    Yields:
        The address of the page.

    Raises:
        OSError: if the port is taken.
    """
    handler = type("Handler", (_Handler,), {"live": live})
    server = _Server((HOST, port), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://{HOST}:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
