"""Following runs while they go on: where each stands, and the runs as far as they have come.

A look costs a few file statuses and the lines that were added since the last one.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyphily.report import evidence
from polyphily.report.runs import SET_ASIDE, Run, is_run, read_config, resume_command
from polyphily.report.so_far import run_so_far
from polyphily.report.words import percent
from polyphily.runs.folder import CONFIG, METRICS, START, SUMMARY, TUNING, RunFolder

EVENTS = "events.jsonl"  # of a deployed run
FILES = (CONFIG, START, METRICS, SUMMARY, TUNING, EVENTS, evidence.EVIDENCE, evidence.COLLABORATION)
SEARCH = 2.0  # seconds between two searches for new run folders
SILENCE = 60.0  # seconds without news that are mentioned, if rounds take less
MOST = 30  # runs that are followed; of more, the latest
RECENT = 5  # rounds that the time left is estimated from

STARTING, SEARCHING, RUNNING = "starting", "searching", "running"
STOPPED, FINISHED = "stopped", "finished"


@dataclass(frozen=True)
class Standing:
    """The standing of a run: how far it is, and whether a process works on it.

    Attributes:
        name: the name of the run.
        state: `STARTING`, `SEARCHING`, `RUNNING`, `STOPPED` or `FINISHED`.
        round: the number of complete rounds, or of trials in a search.
        rounds: their number in the end; 0 if unknown.
        words: the state in words.
    """

    name: str
    state: str
    round: int
    rounds: int
    words: str


class Lines:
    """The JSON objects in a file that grows by lines. Only new lines are read.

    A file that was replaced or has become shorter is read from its beginning.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.found: list[dict[str, Any]] = []
        self._inode, self._read = 0, 0

    def look(self) -> list[dict[str, Any]]:
        """Return all objects so far."""
        try:
            with self.file.open("rb") as stream:
                about = self.file.stat()
                if about.st_ino != self._inode or about.st_size < self._read:
                    self.found, self._inode, self._read = [], about.st_ino, 0
                stream.seek(self._read)
                added = stream.read()
        except OSError:
            self.found, self._inode, self._read = [], 0, 0
            return []
        whole = added[: added.rfind(b"\n") + 1]
        try:
            self.found = self.found + [json.loads(line) for line in whole.splitlines()]
            self._read += len(whole)
        except ValueError:  # half a line that a kill has left; the run will replace the file
            pass
        return self.found


class Followed:
    """A run folder that is followed.

    Args:
        path: the folder.
        name: the name to show.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        self.folder = RunFolder(path)
        self.records, self.events = Lines(path / METRICS), Lines(path / EVENTS)
        self._summary: tuple[int, dict[str, Any]] | None = None

    def signature(self) -> tuple[Any, ...]:
        """Return what changes when the files of the run do."""
        return tuple(_status(self.path / name) for name in FILES)

    def is_finished(self) -> bool:
        """Return whether the run has its summary, and is not being continued."""
        summary = self.summary()
        if summary is None:
            return False
        rounds = [record["round"] for record in self.records.look()[-1:]]
        return not (self.folder.is_at_work() and max(rounds, default=0) > summary["rounds"])

    def summary(self) -> dict[str, Any] | None:
        """Return the summary; it is read once for each change of its file."""
        changed = _status(self.path / SUMMARY)
        if changed is None:
            return None
        if self._summary is None or self._summary[0] != changed[0]:
            found = self.folder.read_summary()
            self._summary = None if found is None else (changed[0], found)
        return None if self._summary is None else self._summary[1]

    def run(self) -> Run | None:
        """Return the run as far as it has come; None as long as no round is scored."""
        if self.is_finished():
            return Run.read(self.path)
        if not (self.path / CONFIG).exists():
            return None
        return run_so_far(self.path, self.records.look(), self.events.look())

    def standing(self) -> Standing:
        """Return where the run stands."""
        if not (self.path / CONFIG).exists():
            return self._search()
        records, rounds = self.records.look(), int(read_config(self.path).get("rounds", 0))
        done = int(records[-1]["round"]) if records else 0
        if self.is_finished():
            summary = self.summary()
            assert summary is not None
            metric, total = summary["selection"]["metric"], summary["rounds"]
            score = percent(summary["best_val"]["test"].get(metric), 1)
            words = f"finished after {total} rounds, test {metric} {score} %"
            return Standing(self.name, FINISHED, total, total, words)
        at_work = self.folder.is_at_work()
        if at_work is None:  # it cannot be known: a run without news is taken for stopped
            at_work = self._silence() < max(SILENCE, 20 * _pace(records))
        if not at_work and (self.path / START).exists() | (self._silence() > SILENCE):
            return Standing(self.name, STOPPED, done, rounds, self._why_stopped(done))
        if not done:
            return Standing(self.name, STARTING, 0, rounds, self._waiting() or "starting")
        return Standing(self.name, RUNNING, done, rounds, self._progress(records, done, rounds))

    def _progress(self, records: Sequence[dict[str, Any]], done: int, rounds: int) -> str:
        words = f"round {done} of {rounds}"
        if silent := self._silent_words(_pace(records)):
            return f"{words}, {silent}"
        left = (rounds - done) * _pace(records)
        return f"{words}, about {_span(left)} left" if left else f"{words}, ending"

    def _silent_words(self, pace: float) -> str:
        silence = self._silence()
        return f"no news for {_span(silence)}" if silence > max(SILENCE, 10 * pace) else ""

    def _silence(self) -> float:
        """Return the seconds since a file of the run was changed."""
        found = [status[0] / 1e9 for name in FILES if (status := _status(self.path / name))]
        return max(0.0, time.time() - max(found, default=0.0))

    def _waiting(self) -> str:
        """Return for which sites a deployed run waits."""
        asked: list[str] = []
        for event in self.events.look():
            if event["event"] == "waiting":
                asked = list(event["sites"])
            elif event["event"] == "joined" and event["site"] in asked:
                asked.remove(event["site"])
        return f"waiting for {', '.join(asked)}" if asked else ""

    def _why_stopped(self, done: int) -> str:
        last = [e for e in self.events.look() if e["event"] in ("failed", "started")][-1:]
        failed = f": {last[0]['reason']}" if last and last[0]["event"] == "failed" else ""
        when = f"after round {done}" if done else "before its first round"
        return f"stopped {when}{failed}. Continue it: {resume_command(self.path)}"

    def _search(self) -> Standing:
        lines = self.folder.records(TUNING)
        done = max(len(lines) - 1, 0)
        total = int(lines[0]["request"].get("trials", 0)) if lines else 0
        words = f"searching, {done} of {total} trials" if total else f"searching, {done} trials"
        return Standing(self.name, SEARCHING, done, total, words)


class Follower:
    """Follows the run in a folder, or all runs below it. The folder need not exist yet.

    Of a server's folder, the latest run is followed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._followed: dict[Path, Followed] = {}
        self._searched = -SEARCH

    def runs(self) -> list[Run]:
        """Return all runs that have a scored round."""
        found = (followed.run() for followed in self.followed())
        return [run for run in found if run is not None]

    def standings(self) -> list[Standing]:
        """Return where every run stands, in the order of their start."""
        return [followed.standing() for followed in self.followed()]

    def signature(self) -> tuple[Any, ...]:
        """Return what changes when a run does."""
        return tuple((str(f.path), f.signature()) for f in self.followed())

    def followed(self) -> list[Followed]:
        """Return the run folders; new ones are looked for every `SEARCH` seconds."""
        now = time.monotonic()
        if now - self._searched >= SEARCH:
            self._searched = now
            paths = self._search()
            self._followed = {p: self._followed.get(p) or Followed(p, self._name(p)) for p in paths}
        return list(self._followed.values())

    def _search(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        if is_run(self.folder) or (self.folder / TUNING).exists():
            return [self.folder]
        found = {file.parent for file in self.folder.rglob(CONFIG) if is_run(file.parent)}
        found |= {file.parent for file in self.folder.rglob(TUNING)}
        kept = [path for path in found if SET_ASIDE not in path.name]
        of_server = (self.folder / CONFIG).exists()
        return sorted(kept, key=_begin)[-1 if of_server else -MOST :]

    def _name(self, path: Path) -> str:
        below = path.relative_to(self.folder)
        return str(below) if below.parts else path.resolve().name


def headline(standings: Sequence[Standing], folder: Path) -> str:
    """Return in one line where all runs stand."""
    if not standings:
        return f"waiting for a run in {folder}"
    if len(standings) == 1:
        return standings[0].words
    done = sum(standing.state == FINISHED for standing in standings)
    going = [s for s in standings if s.state != FINISHED]
    rest = "; ".join(f"{s.name}: {s.words}" for s in going[:3])
    more = f"; and {len(going) - 3} more" if len(going) > 3 else ""
    return f"{done} of {len(standings)} runs finished" + (f"; {rest}{more}" if rest else "")


def _status(file: Path) -> tuple[int, int] | None:
    """Return time of change and size of a file; None if there is none."""
    try:
        about = file.stat()
    except OSError:
        return None
    return about.st_mtime_ns, about.st_size


def _begin(path: Path) -> float:
    found = (_status(path / name) for name in (CONFIG, TUNING))
    return min((status[0] for status in found if status), default=0)


def _pace(records: Sequence[dict[str, Any]]) -> float:
    """Return how many seconds the latest rounds took."""
    spans = [r["seconds"] + r["seconds_evaluation"] for r in records[-RECENT:]]
    return statistics.fmean(spans) if spans else 0.0


def _span(seconds: float) -> str:
    """Format a span in whole seconds, minutes or hours.

    >>> _span(4.2), _span(300), _span(9000)
    ('5 s', '5 min', '2.5 h')
    """
    if seconds < 120:
        return f"{int(seconds) + 1} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
