"""A site's account of its uploads, over all runs: what binds a privacy budget to the site.

Every upload is a line in a journal at the site before it leaves. The account is of the site as a
whole, whatever the runs are called and whatever nodes its graph gains. Only its operator can begin
a new account, by declaring that the data are others (`polyphily site policy DIR --new-data`).
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyphily.core.budget import Budget
from polyphily.errors import UserError
from polyphily.flower.journal import Entry, Journal

if TYPE_CHECKING:
    from polyphily.privacy.differential import Guard

FILE = "journal.jsonl"
UPLOAD, NEW_DATA = "upload", "new data"
DAY, YEAR = dt.timedelta(days=1), dt.timedelta(days=365)


def now() -> dt.datetime:
    """Return the time, with the site's time zone."""
    return dt.datetime.now().astimezone()


def stamp(moment: dt.datetime) -> str:
    """Write a moment for a journal, in UTC."""
    return moment.astimezone(dt.UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class Upload:
    """An upload that was made.

    Attributes:
        moment: when.
        run: name of the run.
        round: number of the round.
        sha256: a hash of what left, before masks.
        multiplier: of the noise, in units of the sensitivity; None without differential privacy.
    """

    moment: dt.datetime
    run: str
    round: int
    sha256: str
    multiplier: float | None


class Account:
    """The uploads of a site, as its journal has them.

    Args:
        file: the journal.
    """

    def __init__(self, file: Path) -> None:
        self.journal = Journal(file, "the account of what this site has uploaded")
        self._uploads: list[Upload] = []

    def uploads(self, *, since: dt.datetime | None = None, run: str | None = None) -> list[Upload]:
        """Return the uploads of the present data, of some time or run only if one is given.

        An upload from the future counts: the clock was set back since.
        """
        if self.journal.changed():
            self._uploads = list(_read(self.journal.file, self.journal.read()))
        return [
            upload
            for upload in self._uploads
            if (since is None or upload.moment > since) and (run is None or upload.run == run)
        ]

    def has(self, sha256: str) -> bool:
        """Return whether this very upload was made before."""
        return any(upload.sha256 == sha256 for upload in self.uploads())

    def record(
        self, moment: dt.datetime, run: str, number: int, sha256: str, guard: Guard | None
    ) -> None:
        """Write an upload to the journal; it is on the disk when this returns."""
        noise: dict[str, float] | None = None
        if guard is not None:
            noise = {
                "multiplier": guard.multiplier,
                "deviation": guard.deviation,
                "sensitivity": guard.sensitivity,
            }
        entry = {"kind": UPLOAD, "time": stamp(moment), "run": run, "round": number}
        self.uploads()  # what others have written since
        self.journal.append({**entry, "sha256": sha256, "noise": noise})
        multiplier = None if guard is None else guard.multiplier
        self._uploads.append(Upload(moment, run, number, sha256, multiplier))

    def begin_anew(self, moment: dt.datetime, note: str) -> None:
        """Begin a new account, for data that have nothing to do with those before."""
        self.journal.append({"kind": NEW_DATA, "time": stamp(moment), "note": note})
        self._uploads = []


def noises(uploads: Sequence[Upload]) -> list[float]:
    """Return the noise multipliers of uploads; those without noise have multiplier 0."""
    return [upload.multiplier or 0.0 for upload in uploads]


@dataclass(frozen=True)
class Total:
    """A budget for all uploads of a site together.

    Attributes:
        budget: epsilon and delta.
        yearly: whether it is for any 365 days; otherwise it is for ever.
        rule: the entry of the policy, or the flag, that sets it.
    """

    budget: Budget
    yearly: bool
    rule: str

    def __str__(self) -> str:
        time = "in any 365 days" if self.yearly else "for ever"
        return f"epsilon {self.budget.epsilon:g} at delta {self.budget.delta:g} {time}"

    def counted(self, account: Account, moment: dt.datetime) -> list[float]:
        """Return the noise multipliers of the uploads that the budget is about."""
        return noises(account.uploads(since=moment - YEAR if self.yearly else None))

    def spent(self, account: Account, moment: dt.datetime) -> float:
        """Return the epsilon of all uploads so far; infinite if one had no noise."""
        return self.budget.spent_by(self.counted(account, moment))


def _read(file: Path, entries: list[Entry]) -> Iterator[Upload]:
    """Return the uploads since the operator last declared new data."""
    begins = max((i for i, e in enumerate(entries, 1) if e.get("kind") == NEW_DATA), default=0)
    for entry in entries[begins:]:
        try:
            yield _upload(entry)
        except (LookupError, ValueError, TypeError) as error:
            raise UserError(
                f"{file}, line {entry['line']}: not an entry of this version: {error!r}"
            ) from None


def _upload(entry: dict[str, Any]) -> Upload:
    noise = entry["noise"]
    return Upload(
        dt.datetime.fromisoformat(entry["time"]),
        str(entry["run"]),
        int(entry["round"]),
        str(entry["sha256"]),
        None if noise is None else float(noise["multiplier"]),
    )
