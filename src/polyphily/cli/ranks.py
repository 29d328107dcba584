"""Commands that torchrun may start several times over, one process for a share of the clients."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec

from polyphily.errors import UserError

if TYPE_CHECKING:
    from polyphily.engines.distributed import Team

SPREAD = ("run", "compare", "demo")
P = ParamSpec("P")


def check(command: str | None) -> None:
    """Refuses a command that would do the same work in every process."""
    several = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"
    if several and command not in SPREAD:
        known = ", ".join(SPREAD[:-1]) + f" and {SPREAD[-1]}"
        raise UserError(f"torchrun spreads {known} alone: start polyphily {command} without it")


def spread(command: Callable[P, None]) -> Callable[P, None]:
    """The command with all ranks together, of which the first alone prints."""

    @functools.wraps(command)
    def together(*arguments: P.args, **options: P.kwargs) -> None:
        from polyphily.cli import terminal
        from polyphily.engines.distributed import joined

        with joined() as team:
            if team is not None and not team.leads:
                terminal.out.quiet = terminal.err.quiet = True
            command(*arguments, **options)

    return together


def team() -> Team | None:
    """The ranks that this command runs on, if there are several."""
    from polyphily.engines.distributed import current

    return current()


def same(folder: Path) -> Path:
    """The folder that the first rank has chosen."""
    ranks = team()
    return folder if ranks is None else Path(ranks.same(str(folder)))


def once(work: Callable[[], object]) -> None:
    """Does something at the first rank only."""
    ranks = team()
    if ranks is None:
        work()
    else:
        ranks.once(work)


def writes(folder: Path) -> None:
    """Tells all ranks where the run goes on if one of them is lost."""
    ranks = team()
    if ranks is not None:
        ranks.folder = folder
