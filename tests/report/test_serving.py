"""The live page: what the server answers, and how the page updates itself in a browser."""

from __future__ import annotations

import http.client
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import polyphily
from polyphily.report import following, serving
from polyphily.report.page import POLICY
from polyphily.report.serving import HOST, LivePage
from polyphily.runs.folder import START, SUMMARY, RunFolder
from report.browser import Visit, chromium


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    data = polyphily.load("csbm:nodes=60,features=8", clients=3, seed=0)
    for method in ("fedavg", "local"):
        polyphily.run(method, data, rounds=6, hidden=8, out=folder / method)
    return folder


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at every request."""
    monkeypatch.setattr(serving, "FRESH", 0.0)
    monkeypatch.setattr(following, "SEARCH", 0.0)
    monkeypatch.setattr(serving, "SHARE", 1e9)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """Serve a folder that does not exist yet; yield it with the address of its page."""
    folder = tmp_path / "runs"
    with serving.serving(LivePage(folder), 0) as address:
        yield folder, address


def ask(
    address: str, path: str = "/", verb: str = "GET", **headers: str
) -> tuple[int, Any, dict[str, str]]:
    connection = http.client.HTTPConnection(HOST, int(address.rstrip("/").rpartition(":")[2]))
    connection.request(verb, path, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text, dict(answer.getheaders())


def begin(source: Path, target: Path, rounds: int) -> RunFolder:
    """Copy a run as it was after some rounds."""
    shutil.copytree(source, target)
    (target / SUMMARY).unlink()
    folder = RunFolder(target)
    folder.truncate(rounds)
    return folder


def wait(page: Any, condition: str) -> None:
    """Wait until a condition holds on a page; its policy forbids playwright's own way."""
    for _ in range(200):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(100)
    raise AssertionError(f"never: {condition}")


def test_the_server_listens_on_this_machine_only(place: tuple[Path, str]) -> None:
    assert place[1].startswith("http://127.0.0.1:")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_requests_to_other_host_names_are_refused(place: tuple[Path, str], host: str) -> None:
    """A page elsewhere could let its own name point to 127.0.0.1, and then read the answers."""
    for path in ("/", "/state"):
        status, text, _ = ask(place[1], path, Host=host)
        assert (status, text) == (421, "open http://127.0.0.1 instead\n")


@pytest.mark.parametrize("host", ["localhost:9000", "127.0.0.1", "localhost"])
def test_a_forwarded_port_works(place: tuple[Path, str], host: str) -> None:
    assert ask(place[1], "/state", Host=host)[0] == 200


@pytest.mark.parametrize(
    "path", ["/config.toml", "/fedavg/", "/../../etc/passwd", "/%2e%2e/", "//etc", "/state/x", "/."]
)
def test_nothing_else_is_served(place: tuple[Path, str], finished: Path, path: str) -> None:
    shutil.copytree(finished, place[0])
    assert ask(place[1], path)[0] == 404


def test_requests_only_read(place: tuple[Path, str]) -> None:
    for verb in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(place[1], "/", verb)[0] == 501
    status, text, headers = ask(place[1], "/", "HEAD")
    assert (status, text) == (200, "")
    assert int(headers["Content-Length"]) > 1000


def test_headers_bar_everything_but_the_page(place: tuple[Path, str]) -> None:
    for path in ("/", "/state", "/nothing"):
        headers = ask(place[1], path)[2]
        policy = headers["Content-Security-Policy"]
        assert policy.startswith(f"{POLICY}; connect-src 'self'")
        assert "frame-ancestors 'none'" in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"
        assert not [name for name in headers if name.lower().startswith("access-control")]
        assert "Python" not in headers["Server"]


def test_a_page_is_made_only_when_it_has_changed_and_someone_asks(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    render = serving.render
    monkeypatch.setattr(serving, "render", lambda *a, **k: made.append(1) or render(*a, **k))
    folder = begin(finished / "fedavg", tmp_path / "run", 3)
    live = LivePage(tmp_path / "run")
    for _ in range(3):
        live.state()
    assert made == []
    first = live.page()
    assert live.page() == first
    assert len(made) == 1
    folder.append(RunFolder(finished / "fedavg").records()[3])
    assert live.page() != first
    assert len(made) == 2
    monkeypatch.setattr(serving, "SHARE", 1e-9)  # the next page may not be made yet
    folder.append(RunFolder(finished / "fedavg").records()[4])
    version = live.state()["version"]
    live.page()
    assert len(made) == 2
    assert f'data-version="{version}"' in live.page()


def test_a_damaged_file_is_told_and_the_page_stays(finished: Path, tmp_path: Path) -> None:
    folder = begin(finished / "fedavg", tmp_path / "run", 3)
    live = LivePage(tmp_path / "run")
    page = live.page()
    (tmp_path / "run" / START).write_text("{half")
    folder.append(RunFolder(finished / "fedavg").records()[3])
    assert live.page() == page
    assert "the page could not be made" in live.state()["trouble"]
    shutil.copy(finished / "fedavg" / START, tmp_path / "run" / START)
    assert live.page() != page
    assert live.state()["trouble"] == ""


def test_the_page_updates_itself_and_keeps_what_the_reader_has_set(
    place: tuple[Path, str], finished: Path
) -> None:
    folder, address = place
    records = RunFolder(finished / "fedavg").records()
    with chromium() as browser:
        visit = Visit(browser, address)
        page = visit.page
        assert page.locator(".live").inner_text().startswith("waiting")
        run = begin(finished / "fedavg", folder / "fedavg", 2)
        page.wait_for_selector("[data-figure=convergence] svg path.mark", timeout=20_000)
        assert "Scores so far, not final: fedavg after 2 of 6 rounds" in page.inner_text("#result")
        page.click("[data-figure=convergence] .segments button:has-text('val accuracy')")
        page.click("#result th >> nth=2")
        page.evaluate("document.documentElement.dataset.theme = 'dark'")
        page.evaluate("document.getElementById('provenance').scrollIntoView({behavior: 'instant'})")
        before = page.evaluate("document.getElementById('provenance').getBoundingClientRect().top")
        run.append(records[2])
        wait(page, "document.body.innerText.includes('after 3 of 6 rounds')")
        begin(finished / "local", folder / "local", 4)  # a second run: other sections, choices
        page.wait_for_selector("[data-figure=spread] svg", timeout=20_000)
        after = page.evaluate("document.getElementById('provenance').getBoundingClientRect().top")
        assert abs(after - before) < 3
        chosen = "[data-figure=convergence] .segments button[aria-pressed=true] >> nth=0"
        assert page.inner_text(chosen) == "val accuracy"
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        for name in ("fedavg", "local"):
            shutil.copy(finished / name / SUMMARY, folder / name / SUMMARY)
        wait(page, "!document.body.innerText.includes('not final')")
        assert "finished" in page.inner_text(".live")
        assert visit.complaints == []
        assert {url.removeprefix(address) for url in visit.requests} == {"", "state"}


def test_a_sorted_table_stays_sorted(place: tuple[Path, str], finished: Path) -> None:
    folder, address = place
    shutil.copytree(finished / "fedavg", folder)
    with chromium() as browser:
        page = Visit(browser, address).page
        page.wait_for_selector("#result th[data-sort]")
        page.click("#result th >> nth=2")
        page.click("#result th >> nth=2")
        summary = json.loads((folder / SUMMARY).read_text())
        summary["views"]["trained"]["final"]["val"]["accuracy"] = 0.0123
        (folder / SUMMARY).write_text(json.dumps(summary))
        wait(page, "document.getElementById('result').innerText.includes('1.23')")
        assert page.get_attribute("#result th >> nth=2", "aria-sort") == "ascending"
        assert page.inner_text("#result tbody td >> nth=2") == "1.23"


def test_the_page_says_when_nobody_serves_it_any_more(tmp_path: Path) -> None:
    with chromium() as browser:
        with serving.serving(LivePage(tmp_path), 0) as address:
            visit = Visit(browser, address)
        wait(visit.page, "document.body.innerText.includes('watch has ended')")
