"""Registries: named objects of the library, to which other packages can add their own."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pkgutil import iter_modules
from typing import Generic, TypeVar

from polyphily.errors import unknown

T = TypeVar("T")
NAME = re.compile(r"[a-z0-9][a-z0-9+._-]*")


class PluginWarning(UserWarning):
    """A plug-in that could not be loaded and was skipped."""


class Registry(Mapping[str, T], Generic[T]):
    """Objects of one kind by name: those of the library and those of installed plug-ins.

    Plug-ins are packages with an entry point in the group `polyphily.<kinds>`; loading the entry
    point must register something. They are loaded when a name is first looked up. One that fails
    is skipped with a `PluginWarning` that names its package.

    Args:
        kind: the word for one of the objects in messages, such as "method".
        kinds: the plural, which also names the group of entry points.
        package: the package whose modules register the library's own, imported on first use.
        modules: further modules that do, such as those that would be imported in a circle.
        dashes: whether names are written with `-`; then `_` is accepted in its place.
    """

    def __init__(
        self,
        kind: str,
        kinds: str,
        package: str | None = None,
        modules: Sequence[str] = (),
        *,
        dashes: bool = False,
    ) -> None:
        self.kind, self.group = kind, f"polyphily.{kinds}"
        self.package, self.modules, self.dashes = package, tuple(modules), dashes
        self._entries: dict[str, T] = {}
        self._loaded = False

    def add(self, name: str, entry: T) -> T:
        """Register an entry under a name, which is written in lower case.

        A class or function of a notebook takes the place of its earlier self, so that a cell can
        be run again.

        Raises:
            ValueError: for a name that is taken, or that has other characters than allowed.
        """
        name = self.key(name)
        if not NAME.fullmatch(name):
            raise ValueError(
                f"'{name}' is no name for a {self.kind}: use letters, digits and any of + - . _"
            )
        before = self._entries.get(name, entry)
        if before is not entry and not _defined_again(before, entry):
            raise ValueError(f"a {self.kind} named '{name}' is registered already")
        self._entries[name] = entry
        return entry

    def find(self, name: str) -> T:
        """Return the entry of a name, in any case.

        Raises:
            UserError: for an unknown name, with suggestions.
        """
        self._load()
        if self.key(name) not in self._entries:
            raise unknown(self.kind, str(name), self)
        return self._entries[self.key(name)]

    def key(self, name: str) -> str:
        """Return a name as it is registered: in lower case and, with `dashes`, with `-` for `_`."""
        key = str(name).strip().lower()
        return key.replace("_", "-") if self.dashes else key

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Undo every registration that is made inside the block. Meant for tests."""
        self._load()
        before = dict(self._entries)
        try:
            yield
        finally:
            self._entries = before

    def __getitem__(self, name: str) -> T:
        self._load()
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        self._load()
        return iter(tuple(self._entries))

    def __len__(self) -> int:
        self._load()
        return len(self._entries)

    def _load(self) -> None:
        """Import the library's own modules and all plug-ins, once."""
        if self._loaded:
            return
        self._loaded = True  # first: a module that is imported here may look a name up
        if self.package is not None:
            for module in iter_modules(import_module(self.package).__path__):
                import_module(f"{self.package}.{module.name}")
        for name in self.modules:
            import_module(name)
        for point in sorted(entry_points(group=self.group), key=lambda point: point.name):
            self._load_plugin(point)

    def _load_plugin(self, point: EntryPoint) -> None:
        before = dict(self._entries)
        try:
            point.load()
        except Exception as error:  # whatever is wrong with it, the rest must work
            self._entries = before  # nothing of a half-loaded plug-in stays
            package = point.dist.name if point.dist else "an unknown package"
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            warnings.warn(
                f"{self.kind} plug-in '{point.name}' of the package '{package}' is skipped: "
                f"{reason}",
                PluginWarning,
                stacklevel=2,
            )


def _defined_again(before: object, entry: object) -> bool:
    """Return whether both are the same definition in a notebook or script."""
    own, other = (
        (getattr(x, "__module__", None), getattr(x, "__qualname__", None)) for x in (before, entry)
    )
    return own == other and own[0] == "__main__" and own[1] is not None
