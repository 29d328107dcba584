"""Commands under torchrun, which starts several processes, each for a share of the clients."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec

from polyphily.errors import UserError

if TYPE_CHECKING:
    from polyphily.engines.team import Team

COMMANDS = ("run", "compare", "demo")
P = ParamSpec("P")


def check_launcher(command: str | None) -> None:
    """Refuse a command under torchrun that would do the same work in every process."""
    several = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"
    if several and command not in COMMANDS:
        known = ", ".join(COMMANDS[:-1]) + f" and {COMMANDS[-1]}"
        raise UserError(
            f"torchrun is supported for {known} only: start polyphily {command} without it"
        )


def on_all_ranks(command: Callable[P, None]) -> Callable[P, None]:
    """Decorate a command to connect all ranks before it runs; only the first rank prints."""

    @functools.wraps(command)
    def together(*arguments: P.args, **options: P.kwargs) -> None:
        from polyphily.cli import terminal
        from polyphily.engines.team import joined

        with joined() as team:
            if team is not None and not team.leads:
                terminal.out.quiet = terminal.err.quiet = True
            command(*arguments, **options)

    return together


def team() -> Team | None:
    """Return the ranks that this command runs on; None if there is only one process."""
    from polyphily.engines.team import current

    return current()


def leaders_folder(folder: Path) -> Path:
    """Return the folder that the first rank chose."""
    ranks = team()
    return folder if ranks is None else Path(ranks.same(str(folder)))


def at_leader(work: Callable[[], object]) -> None:
    """Call a function at the first rank only."""
    ranks = team()
    if ranks is None:
        work()
    else:
        ranks.at_leader(work)


def set_run_folder(folder: Path) -> None:
    """Set the run folder, which ranks name in the error if one of them is lost."""
    ranks = team()
    if ranks is not None:
        ranks.folder = folder
