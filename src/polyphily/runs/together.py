"""Runs that differ only in learning rate and weight decay, trained in one pass.

Their federations are stacked like those of several seeds, with rates of their own. After every
round each run gets its record and checkpoint, and in the end its models and summary. The folders
are those that separate runs would leave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from polyphily.core.cohort import Cohort
from polyphily.core.messages import Message
from polyphily.core.method import Method
from polyphily.core.settings import Settings
from polyphily.errors import Diverged
from polyphily.graphs.loading import Federation
from polyphily.runs.folder import RunFolder
from polyphily.runs.orders import RATES as RATES
from polyphily.runs.run import Execution, Progress, Result
from polyphily.runs.summary import record_of
from polyphily.runtime.tracker import NAMES

STATES = "simulation/state/"  # how the servers' tensors are called in a checkpoint

Records = Callable[[Sequence[dict[str, Any]]], None]
"""A callback that takes the records of a round, one of each run."""


def stacked(
    method: Method,
    federations: Sequence[Federation],
    settings: Settings,
    rates: Sequence[tuple[float, float]],
    *,
    keep_best: bool,
    cohort: Cohort | None = None,
) -> Execution:
    """Return one execution, without a folder, of every (rate, decay) on every federation."""
    return Execution(
        method,
        [federation for _ in rates for federation in federations],
        settings,
        None,
        rates=[rate for rate in rates for _ in federations],
        keep_best=keep_best,
        cohort=cohort,
    )


class Together:
    """Several runs in one pass.

    Numbers are those of separate runs, on a CPU to the bit: hence a run's own number of threads,
    and no more runs than train in one group (`Groups.room`). Where a model has sigmoids, they
    are so up to rounding: torch rounds those at the end of a tensor differently. The seconds of a
    round are shared evenly among the runs that are still going.

    Args:
        runs: of one method on the same federations, with equally many rounds behind them; they
            differ in learning rate, decay and folder alone.
    """

    def __init__(self, runs: Sequence[Execution]) -> None:
        first = runs[0]
        self.runs = list(runs)
        self.joint = stacked(
            first.method,
            first.federations,
            first.settings,
            [_rates(run.settings) for run in runs],
            keep_best=first.keep_best,
            cohort=first.simulation.cohort.repeated(len(runs)),
        )
        for run in runs:
            run.setup_seconds += self.joint.setup_seconds / len(runs)
        self._going = list(range(len(runs)))
        self._ended: list[tuple[Execution, Result]] = []
        if first.simulation.round:
            self._take_over()

    def places(self, run: int) -> range:
        """Return the places of a run's federations in the joint simulation."""
        seeds = len(self.runs[0].federations)
        return range(run * seeds, (run + 1) * seeds)

    def go(
        self, watchers: Sequence[Progress], progress: Records | None = None
    ) -> list[tuple[Execution, Result]]:
        """Run to the end.

        A run that diverges is left at its last good round, to fail by itself where it is taken up
        again; the others go on.

        Args:
            watchers: for each run, what is called with its record after every round.
            progress: called with the records of all.

        Returns:
            The runs that have ended, with what came of them.
        """

        def share_out(record: dict[str, Any]) -> None:
            records = self._shares(record)
            due = all(self._folder(run).checkpoint_due(len(records)) for run in records)
            for run, own in records.items():
                self.runs[run].reports.append(own)
                self._folder(run).append(own)
            for run in records if due else ():  # of one round, for the runs to go on together
                self._checkpoint(run)
            for run, own in records.items():
                watchers[run](own)
            self._end_what_is_over()
            if progress:
                progress(list(records.values()))

        with ExitStack() as stack:
            stack.enter_context(self.runs[0].at_work())
            for run in self.runs[1:]:
                stack.enter_context(run.in_folder())
            self._end_what_is_over()
            while self._going:
                try:
                    self.joint.advance_to_the_end(share_out)
                    break
                except Diverged as error:
                    self._give_up(error.federation // len(self.runs[0].federations))
        return self._ended

    def _shares(self, record: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """Return the record of a round for each run that is not over."""
        shared: dict[str, Any] = {n: record[n] for n in ("round", "stage") if n in record}
        spans = {n: record[n] / len(self._going) for n in ("seconds", "seconds_evaluation")}
        outcomes = record["per_seed"]
        return {
            run: record_of({**shared, **spans}, [outcomes[s] for s in self.places(run)])
            for run in self._going
        }

    def _end_what_is_over(self) -> None:
        """Finish the runs whose rounds are done or whose clients have all stopped."""
        simulation = self.joint.simulation
        last = simulation.round == self.joint.settings.rounds
        for run in list(self._going):
            if last or self._clients(run) <= simulation.stopped:
                self._hand_over(run)
                self._ended.append((self.runs[run], self.runs[run].finish()))
                self._going.remove(run)

    def _folder(self, run: int) -> RunFolder:
        folder = self.runs[run].folder
        assert folder
        return folder

    def _clients(self, run: int) -> set[int]:
        starts, places = self.joint.simulation.starts, self.places(run)
        return set(range(starts[places.start], starts[places.stop]))

    def _hand_over(self, run: int) -> None:
        """Copy models and scores from the joint simulation into a run."""
        tensors, progress = self.joint.part(self.places(run))
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        self.runs[run].adopt(copies, progress, self._folder(run).path)

    def _take_over(self) -> None:
        """Copy models and scores from the runs into the joint simulation."""
        rows: dict[str, list[Tensor]] = {}
        states: Message = {}
        stopped: list[int] = []
        for run, execution in enumerate(self.runs):
            first = self.places(run).start
            for name, tensor in execution.tensors().items():
                if name.startswith(STATES):
                    s, _, rest = name.removeprefix(STATES).partition("/")
                    states[f"{STATES}{first + int(s)}/{rest}"] = tensor
                elif name == f"tracker/{NAMES}":
                    rows[name] = [tensor]  # the same in all runs
                else:
                    rows.setdefault(name, []).append(tensor)
            start = self.joint.simulation.starts[first]
            stopped += [start + k for k in execution.simulation.stopped]
        tensors = states | {name: torch.cat(parts) for name, parts in rows.items()}
        progress = {"round": self.runs[0].simulation.round, "stopped": stopped}
        self.joint.adopt(tensors, progress, self._folder(0).path)

    def _checkpoint(self, run: int) -> None:
        self._hand_over(run)
        self.runs[run].checkpoint()

    def _give_up(self, run: int) -> None:
        """Take a run out of the pass, with a checkpoint of its last good round."""
        if self.joint.simulation.round:
            self._checkpoint(run)
        self.joint.simulation.stopped |= self._clients(run)
        self._going.remove(run)


def _rates(settings: Settings) -> tuple[float, float]:
    assert settings.lr is not None
    assert settings.weight_decay is not None
    return settings.lr, settings.weight_decay
