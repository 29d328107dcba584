"""The files of a run at a site: private memory, models, and the last uploads under `--dp`.

Memory never leaves the site. It is written atomically, to one file per round.
"""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError

from polyphily.core.messages import Message
from polyphily.runs.folder import read_tensors, save_tensors
from polyphily.runs.models import BEST

KEPT = 4  # latest rounds whose files are kept, besides the round that the server names


class SiteState:
    """The files of a run at a site: the memory after each of the last rounds, and the models.

    Under differential privacy there are also the last uploads. If the server repeats a question,
    the site sends the same upload again, which costs nothing (`flower/account.py`).
    """

    def __init__(self, folder: Path, run: str) -> None:
        self.memories = folder / "memory" / run
        self.models = folder / "models" / run

    def _sent(self, rounds: int) -> Path:
        return self.memories / f"sent-{rounds:06d}.safetensors"

    def sent_before(self, rounds: int, question: str) -> Message | None:
        """Return the upload of a round if it was the answer to the same question; else None."""
        try:
            upload, facts = read_tensors(self._sent(rounds))
        except (OSError, SafetensorError):
            return None
        return upload if facts.get("question") == question else None

    def save_sent(self, rounds: int, question: str, upload: Message) -> None:
        """Save an upload, to send it again if the question is repeated."""
        save_tensors(self._sent(rounds), upload, {"question": question})

    def _file(self, rounds: int) -> Path:
        return self.memories / f"round-{rounds:06d}.safetensors"

    def candidate(self, rounds: int) -> Path:
        """Return the file of a round's model, which may turn out to be the best."""
        return self.memories / f"model-{rounds:06d}.safetensors"

    def model(self, which: str) -> Path:
        """Return the file of the `LAST` or the `BEST` model."""
        return self.models / f"{which}.safetensors"

    def save(self, rounds: int, memory: Message) -> None:
        """Write the memory after a round. It is on the disk before the answer leaves."""
        save_tensors(self._file(rounds), memory, {"round": str(rounds)}, durable=True)

    def load(self, rounds: int) -> Message | None:
        """Read the memory after a round; None if it is not there."""
        try:
            return read_tensors(self._file(rounds))[0]
        except (OSError, SafetensorError):
            return None

    def promote(self, rounds: int) -> bool:
        """Make a round's model the best one, if its file exists; return whether it does."""
        file = self.candidate(rounds)
        if not rounds or not file.exists():
            return False
        self.models.mkdir(parents=True, exist_ok=True)
        file.replace(self.model(BEST))
        return True

    def prune(self, rounds: int, base: int) -> None:
        """Delete files of old rounds, except those of round `base`, which the server named."""
        for file in self.memories.glob("*-*.safetensors"):
            number = int(file.stem.rpartition("-")[2])
            if number < rounds - KEPT and number != base:
                file.unlink(missing_ok=True)
