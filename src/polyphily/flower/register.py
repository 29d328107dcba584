"""The register of a federation's sites: who may connect with which key, and until when.

It is read from the files of the server's folder: `sites` in config.toml, `sites/NAME.pub` (a site's
public key), `sites/NAME.crt` (its certificate) and `sites/revoked.jsonl` (keys that were revoked or
replaced, for ever). Commands change these files, and a running server reads them again as soon as
they have changed. So every change takes effect with a site's next message.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import time
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from polyphily.errors import UserError
from polyphily.flower.keys import fingerprint, parse_pem, parse_public, public_pem
from polyphily.graphs.checked import plain

REVOKED = "revoked.jsonl"
JOURNAL = "events.jsonl"  # in the server's folder: connections, admissions, revocations


@dataclass(frozen=True)
class Entry:
    """A site in the register.

    Attributes:
        name: of the site.
        key: its public key.
        expires: end of its certificate; None if it has none.
        why_not: why it may not connect; empty if it may.
    """

    name: str
    key: ec.EllipticCurvePublicKey
    expires: dt.datetime | None
    why_not: str = ""

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.key)

    @cached_property
    def pem(self) -> bytes:
        return public_pem(self.key)

    def refusal(self) -> str:
        """Return why the site may not connect now; empty if it may."""
        if not self.why_not and self.expires and self.expires < dt.datetime.now(dt.UTC):
            return f"the certificate of '{self.name}' ended on {self.expires:%Y-%m-%d}"
        return self.why_not


class Register:
    """The sites of a server's folder.

    Args:
        path: the server's folder.

    Attributes:
        version: how often the files have been read.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.version = path, 0
        self._stamp: tuple[Any, ...] = ()
        self._entries: dict[str, Entry] = {}
        self._by_key: dict[bytes, Entry] = {}

    def refresh(self) -> None:
        """Read the files again if they have changed.

        Raises:
            UserError: if one of them cannot be read. What was read before is then kept.
        """
        folder = self.path / "sites"
        files = self.path / "config.toml", folder, folder / REVOKED
        stamp = tuple(_stamp(file) for file in files)
        if stamp == self._stamp:
            return
        entries = self._read()
        self._entries = {entry.name: entry for entry in entries}
        self._by_key = {entry.pem: entry for entry in entries}
        self._stamp, self.version = stamp, self.version + 1

    def entries(self) -> list[Entry]:
        """Return all sites that have a key, also those that may not connect."""
        self.refresh()
        return list(self._entries.values())

    def active(self) -> list[Entry]:
        """Return the sites that may connect now, in the order of the configuration."""
        return [entry for entry in self.entries() if not entry.refusal()]

    def find(self, name: str) -> Entry | None:
        self.refresh()
        return self._entries.get(name)

    def refusal(self, key: bytes) -> str:
        """Return why a public key (PEM) may not connect now; empty if it may."""
        self.refresh()
        entry = self._by_key.get(key)
        return entry.refusal() if entry else self._reason_against_unknown(key)

    def name_of(self, key: bytes) -> str:
        """Return the name of the site with a public key (PEM); empty if there is none."""
        return self._by_key[key].name if key in self._by_key else ""

    def revoked(self) -> dict[str, dict[str, Any]]:
        """Return the keys that were revoked or replaced, by fingerprint."""
        return {entry["fingerprint"]: entry for entry in _lines(self.path / "sites" / REVOKED)}

    def revoke(self, entry: Entry, what: str) -> None:
        """Refuse a key for ever.

        Args:
            entry: the site with its key.
            what: happened to the key: "revoked" or "replaced".
        """
        line = {"time": time.time(), "site": entry.name, "fingerprint": entry.fingerprint}
        _append(self.path / "sites" / REVOKED, {**line, "what": what})

    def _read(self) -> list[Entry]:
        folder, revoked = self.path / "sites", self.revoked()
        names = [str(name) for name in _config(self.path)["sites"]]
        others = sorted({file.stem for file in folder.glob("*.pub")} - set(names))
        entries = []
        for name in (*names, *others):
            try:
                key = parse_public((folder / f"{name}.pub").read_bytes())
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                raise UserError(f"{folder / name}.pub: {error}") from None
            found = revoked.get(fingerprint(key))
            why = f"the key of '{name}' was {found['what']} on {_day(found)}" if found else ""
            if not why and name in others:
                why = f"'{name}' is not among the sites in the server's config.toml"
            entries.append(Entry(name, key, _expiry(folder / f"{name}.crt"), why))
        return entries

    def _reason_against_unknown(self, key: bytes) -> str:
        try:
            found = self.revoked().get(fingerprint(parse_pem(key)))
        except ValueError:
            return "that is no public key of a site"
        if found:
            return f"the key of '{found['site']}' was {found['what']} on {_day(found)}"
        return "the server does not know this key"


class Journal:
    """Events at the server besides runs, appended to events.jsonl in its folder.

    Args:
        path: the server's folder.
    """

    def __init__(self, path: Path) -> None:
        self.file = path / JOURNAL

    def write(self, event: str, **facts: Any) -> None:
        cleaned = {k: plain(v) if isinstance(v, str) else v for k, v in facts.items()}
        _append(self.file, {"time": time.time(), "event": event, **cleaned})

    def events(self) -> list[dict[str, Any]]:
        return _lines(self.file)


def _append(file: Path, entry: dict[str, Any]) -> None:
    """Append a line of JSON to a file and wait until it is on the disk."""
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(entry) + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def _lines(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]


def _config(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads((path / "config.toml").read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path / 'config.toml'}: {error}") from None


def _expiry(file: Path) -> dt.datetime | None:
    if not file.exists():
        return None
    return x509.load_pem_x509_certificate(file.read_bytes()).not_valid_after_utc


def _day(entry: dict[str, Any]) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(entry["time"]))


def _stamp(path: Path) -> tuple[int, int, int]:
    """Return what changes when a file is written or replaced, or a folder's files are."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return 0, 0, 0
    return found.st_mtime_ns, found.st_size, found.st_ino
