"""The operator's terminal: text from sites and Flower's log arrive without escapes."""

from __future__ import annotations

import json
import logging
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyphily.cli.deploying import _Display
from polyphily.flower import flower_log
from polyphily.flower.register import Journal
from polyphily.graphs.checked import plain
from polyphily.runs.folder import RunFolder

NASTY = "\x1b]0;owned\x07\x1b[2J\x1b[31mred\x1b[0m\r\n\x9b5m\u202egnp.exe\x00\x08 \x1bPq\x1b\\"


@given(st.text(max_size=2000))
def test_nothing_that_moves_a_cursor_is_left(text: str) -> None:
    shown = plain(text)
    assert len(shown) <= 300
    for character in shown:
        assert unicodedata.category(character) not in {"Cc", "Cf", "Cs", "Zl", "Zp"}
    assert plain(shown) == shown


@given(st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=100))
def test_ordinary_text_stays(text: str) -> None:
    assert plain(text) == text


def test_known_tricks() -> None:
    assert plain(NASTY) == "red gnp.exe q"
    assert plain("\x1b]52;c;cm0gLXJm\x07ok") == "ok", "the clipboard"
    assert plain("\x1b]8;;http://bad\x1b\\click\x1b]8;;\x1b\\") == "click"
    assert plain("é 图 Ω") == "é 图 Ω"
    assert plain("x" * 600) == "x" * 299 + "…"


@pytest.mark.parametrize(
    "event",
    [
        {"event": "refused", "round": 1, "site": "a", "reason": NASTY},
        {"event": "late", "round": 1, "site": "a", "reason": NASTY},
        {"event": "note", "text": NASTY},
    ],
)
def test_what_a_site_sent_is_shown_without_escapes(
    event: dict, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").touch()
    _Display(RunFolder(tmp_path)).show([event])
    shown = capfd.readouterr().err
    assert "red gnp.exe q" in shown
    assert "\x1b" not in shown
    assert "\r" not in shown


def test_the_servers_own_events_are_plain(tmp_path: Path) -> None:
    Journal(tmp_path).write("refused", site="a", address=NASTY)
    (entry,) = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert entry["address"] == "red gnp.exe q"


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    pytest.importorskip("flwr")
    found = logging.getLogger("flwr")
    handlers, level = found.handlers[:], found.level
    yield found
    found.handlers[:] = handlers
    found.setLevel(level)


EXPECTED = [
    "[/v1/fleet/push-messages][ApiError:2007] SuperNode 1, exception: Run 5 is finished.",
    "[/v1/runtime/get-nodes][ApiError:1008] Runtime task-token authentication failed.",
    "Failed to store Message reply: The message it replies to with message_id ab does not exist",
    "Failed to store Message reply: duplicate reply for reply_to_message_id ab or invalid run.",
    "Connection attempt failed, retrying in 0.61 seconds",
    "[/v1/control/stop-run][ApiError:18] Cannot stop run 5 for x; run is already finished with y",
    "SuperExec subprocess did not terminate within 1 second.",
]
REAL = [
    "[/v1/control/start-run][ApiError:5] the database is locked",
    "[/v1/fleet/activate-node][ApiError:2004] could not be activated",
    "Unexpected node registration failure.",
    "Executor failed to launch task_id 3. Reason: no memory",
]


def test_expected_events_are_left_out_of_flowers_log_and_failures_are_not(
    log: logging.Logger, capfd: pytest.CaptureFixture[str]
) -> None:
    flower_log.install("WARNING")
    for line in (*EXPECTED, *REAL):
        log.error(line)
    log.info("not for operators")
    shown = capfd.readouterr().err.splitlines()
    assert [line.partition(" flower: error: ")[2] for line in shown] == REAL


def test_flowers_log_has_no_escapes_and_one_line_per_event(
    log: logging.Logger, capfd: pytest.CaptureFixture[str]
) -> None:
    flower_log.install("WARNING")
    try:
        raise ValueError(NASTY)
    except ValueError:
        log.error("a site sent %s", NASTY, exc_info=True)
    shown = capfd.readouterr().err
    assert shown.count("\n") == 1
    assert "\x1b" not in shown
    assert "a site sent red gnp.exe q" in shown
    assert "ValueError" in shown


def test_debugging_shows_everything(log: logging.Logger, capfd: pytest.CaptureFixture[str]) -> None:
    flower_log.install("DEBUG")
    for line in EXPECTED:
        log.error(line)
    assert len(capfd.readouterr().err.splitlines()) == len(EXPECTED)
