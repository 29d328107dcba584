"""The leaderboard: every method on the same cells, with equally many trials each.

`leaderboard.toml` says what is compared. A row is a method, in its default form or its paper's. In
every cell a row has as many trials as any other: points of its hyperparameters and of the settings
that all methods have, each trained with the same learning rates on the same seeds in one pass.
Validation selects among them. A file per cell keeps all trials.
"""

from __future__ import annotations

import json
import statistics
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from importlib import resources
from itertools import combinations
from pathlib import Path
from typing import Any

from polyphily.core.method import METHODS, VIEWS, create
from polyphily.errors import OutOfMemory, UserError
from polyphily.graphs.datasets import is_present
from polyphily.graphs.loading import Federation
from polyphily.runs.folder import write_text
from polyphily.runs.jobs import Job, Watch, run_jobs
from polyphily.runs.run import Execution
from polyphily.runs.searching import search, search_space
from polyphily.runs.trials import SearchTrial
from polyphily.studies import Cell
from polyphily.studies.trials import DIGITS, Report, data_of, failure_text, to_json

NAME = "leaderboard"
PAPER_FORM = ", paper's form"
SAME = 0.9  # of the trainings of two rows: with more of them equal, the rows are one model
TRAINED = ", trained at home"  # FedAvg's models after local training: the other view of its row


@dataclass(frozen=True)
class Entrant:
    """A row of the leaderboard.

    Attributes:
        method: the name of a method.
        set: hyperparameters that differ from the defaults.
    """

    method: str
    set: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return self.method + (PAPER_FORM if self.set else "")


@dataclass(frozen=True)
class Leaderboard:
    """What is compared.

    Attributes:
        cells: the data.
        seeds: seeds of data, weights and random draws.
        trials: the number of trials of every row in every cell.
        rates: pairs of learning rate and weight decay that every trial trains.
        backbones: the networks among which a method shares its trials, if it can train them.
        forms: methods that have a row for their paper's form.
        settings: settings of all runs.
        findings: what the table shows, a sentence each.
    """

    cells: tuple[Cell, ...]
    seeds: tuple[int, ...]
    trials: int
    rates: tuple[tuple[float, float], ...]
    backbones: tuple[str, ...]
    forms: tuple[str, ...]
    settings: Mapping[str, Any]
    findings: tuple[str, ...] = ()

    def entrants(self, names: Sequence[str] | None = None) -> tuple[Entrant, ...]:
        """Return the rows of some methods, of all that are registered unless names are given."""
        chosen = [METHODS.find(name).name for name in names] if names else sorted(METHODS)
        return tuple(
            entrant
            for name in dict.fromkeys(chosen)
            for entrant in (
                Entrant(name),
                *([Entrant(name, {"paper": True})] if name in self.forms else []),
            )
        )

    def shares(self, entrant: Entrant) -> dict[str | None, int]:
        """Return the number of trials on each backbone; None stands for the method's own network.

        The first backbones have one more if the trials do not divide evenly.
        """
        supported = create(entrant.method, dict(entrant.set)).supported_backbones()
        usable = [name for name in self.backbones if name in supported][: self.trials]
        if not usable:
            return {None: self.trials}
        each, rest = divmod(self.trials, len(usable))
        return {name: each + (i < rest) for i, name in enumerate(usable)}


@cache
def leaderboard() -> Leaderboard:
    """Return what `leaderboard.toml` says."""
    text = resources.files(__package__).joinpath("leaderboard.toml").read_text(encoding="utf-8")
    data = tomllib.loads(text)
    return Leaderboard(
        cells=tuple(Cell(**{"clients": None, **cell}) for cell in data["cells"]),
        seeds=tuple(data["seeds"]),
        trials=data["trials"],
        rates=tuple((lr, decay) for lr, decay in data["rates"]),
        backbones=tuple(data["backbones"]),
        forms=tuple(data["forms"]),
        settings=data["settings"],
        findings=tuple(data["findings"]),
    )


# Running -----------------------------------------------------------------------------------------


def file_of(folder: Path, cell: Cell) -> Path:
    return folder / NAME / f"{cell.name}.json"


def run_rows(
    board: Leaderboard,
    cells: Iterable[Cell],
    entrants: Sequence[Entrant],
    folder: Path,
    *,
    device: str = "cpu",
    partitions: Path | None = None,
    report: Report = print,
    until: float = float("inf"),
    processes: int = 1,
    watch: Watch | None = None,
) -> None:
    """Run the rows of cells that are not in the cells' files yet.

    Args:
        board: what is compared.
        cells: some of its cells.
        entrants: the rows.
        folder: the folder of the results.
        device, partitions, report, until, processes, watch: as in `trials.run_rows`.
    """
    jobs: list[Job[dict[str, Any]]] = []
    for cell in cells:
        if not is_present(cell.dataset):
            report(f"{cell.title}: data not present, skipped")
            continue
        kept = _read(file_of(folder, cell))
        for entrant in entrants:
            if not is_complete(kept.get(entrant.label), request(board, cell, entrant)):
                work = partial(_run_row, board, cell, entrant, device, partitions)
                jobs.append(Job(f"{cell.title}: {entrant.label}", work, (cell, entrant)))
    for ended in run_jobs(jobs, processes, device=device, until=until, watch=watch):
        if ended.result is None:
            report(f"{ended.job.name}: {failure_text(ended)}")
            continue
        cell, entrant = ended.job.about
        seconds, path = round(ended.seconds, 1), file_of(folder, cell)
        rows = _read(path)  # another process may have written meanwhile
        wanted = request(board, cell, entrant)
        about = {"request": wanted, "seconds": seconds, "device": kind_of(device)}
        rows[entrant.label] = {**about, **ended.result}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, to_json({"cell": asdict(cell), "rows": dict(sorted(rows.items()))}))
        report(f"{ended.job.name}: {seconds} s")


def kind_of(device: str) -> str:
    """Return the kind of a device: "cpu" or "cuda"."""
    return device.split(":")[0]


def is_complete(row: Mapping[str, Any] | None, wanted: Mapping[str, Any]) -> bool:
    """Return whether a stored row is the one that is wanted, with all of its trials.

    A trial that lacked memory was not given its chance. The row is then run again.
    """
    if row is None or row["request"] != wanted:
        return False
    return all(trial.get("failed") != str(OutOfMemory()) for trial in row["trials"])


def _run_row(
    board: Leaderboard, cell: Cell, entrant: Entrant, device: str, partitions: Path | None
) -> dict[str, Any]:
    """Run a row of a cell.

    Raises:
        OutOfMemory: if a trial lacked memory.
    """
    federations = data_of(cell, board.seeds, partitions).federations
    return run_row(board, cell, entrant, federations, device)


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))["rows"] if path.exists() else {}
    return found


def request(board: Leaderboard, cell: Cell, entrant: Entrant) -> dict[str, Any]:
    """Return everything that determines the results of a row, saved beside them."""
    fixed = {**board.settings, **cell.settings, "metric": cell.metric, "backbone": ""}
    space = search_space(entrant.method, dict(entrant.set), fixed)
    return json.loads(  # type: ignore[no-any-return]
        json.dumps(
            {
                "method": entrant.method,
                "set": asdict(create(entrant.method, dict(entrant.set))),
                "trials": [[name, number] for name, number in board.shares(entrant).items()],
                "search": {name: search.to_dict() for name, search in space.items()},
                "settings": {**board.settings, **cell.settings, "metric": cell.metric},
                "split": cell.split,
                **({} if cell.normalize == "none" else {"normalize": cell.normalize}),
                "seeds": board.seeds,
                "rates": board.rates,
            }
        )
    )


def run_row(
    board: Leaderboard,
    cell: Cell,
    entrant: Entrant,
    federations: Sequence[Federation],
    device: str = "cpu",
) -> dict[str, Any]:
    """Run all trials of a row.

    Returns:
        `trials` and `cost`. A trial has its backbone, the values that were tried, and for each pair
        of rates and each view the scores of every seed at its best validation round. The cost is
        that of the defaults on the first backbone: seconds of a round of all seeds and rates, and
        megabytes that the clients of one federation send and receive in it.

    Raises:
        OutOfMemory: if a trial lacked memory. A row without it would have had fewer than others.
    """
    trials: list[dict[str, Any]] = []
    costs: list[dict[str, float]] = []
    for backbone, number in board.shares(entrant).items():
        settings = {**board.settings, **cell.settings, "metric": cell.metric, "device": device}
        if backbone is not None:
            settings["backbone"] = backbone
        test: dict[int, list[dict[str, Any]]] = {}
        first: list[dict[str, float]] = []  # the passes of the first trial

        def keep(
            number: int,
            execution: Execution,
            test: dict[int, list[dict[str, Any]]] = test,
            first: list[dict[str, float]] = first,
        ) -> None:
            found = _scores(execution, len(federations), cell.metric)
            test.setdefault(number, []).extend(found)
            if number == 0:
                first.append(_cost(execution))

        searched = search(
            entrant.method,
            federations,
            settings,
            entrant.set,
            trials=number,
            pairs=board.rates,
            trained=keep,
        )
        if any(trial.lacked_memory for trial in searched.trials):
            raise OutOfMemory
        if first:
            seconds = round(sum(one["seconds"] for one in first), 5)
            costs.append({"seconds": seconds, "megabytes": first[0]["megabytes"]})
        trials += [_as_data(trial, backbone, test.get(trial.number)) for trial in searched.trials]
    return {"trials": trials, "cost": costs[0] if costs else None}


def _cost(execution: Execution) -> dict[str, float]:
    records = execution.reports
    sent = [record["per_seed"][0] for record in records]
    return {
        "seconds": round(statistics.median(record["seconds"] for record in records), 5),
        "megabytes": round(
            statistics.fmean(s["bytes_up"] + s["bytes_down"] for s in sent) / 1e6, 4
        ),
    }


def _scores(execution: Execution, seeds: int, metric: str) -> list[dict[str, Any]]:
    """Return the test scores of every pair of rates, by view."""
    found = []
    for begin in range(0, len(execution.federations), seeds):
        places = range(begin, begin + seeds)
        moments = {
            view: [execution.tracker.moments(view, s)["best_val"] for s in places] for view in VIEWS
        }
        found.append(
            {
                view: [round(moment["test"][metric], DIGITS) for moment in moments[view]]
                for view in VIEWS
            }
        )
    return found


def _as_data(
    trial: SearchTrial, backbone: str | None, test: Sequence[Mapping[str, Any]] | None
) -> dict[str, Any]:
    data = trial.to_dict()
    for i, pair in enumerate(data["rates"]):
        if "val" in pair and test is not None:
            pair["val"] = {v: [round(s, DIGITS) for s in pair["val"][v]] for v in VIEWS}
            pair["test"] = test[i]
    return {"backbone": backbone, **data}


# Reading -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Score:
    """What a row reached in a cell, by the trial and rates that validation selected.

    Attributes:
        val: validation score in percent, mean over seeds.
        test: test score of every seed in percent.
        backbone: the network; None if it is the method's own.
        values: the hyperparameters and settings of the trial.
        rate: its learning rate and weight decay.
        first: whether the trial has the defaults.
    """

    val: float
    test: tuple[float, ...]
    backbone: str | None
    values: Mapping[str, Any]
    rate: tuple[float, float]
    first: bool

    @property
    def mean(self) -> float:
        return statistics.fmean(self.test)

    @property
    def deviation(self) -> float:
        return statistics.stdev(self.test) if len(self.test) > 1 else 0.0


def standings(
    board: Leaderboard, entrants: Sequence[Entrant], folder: Path
) -> dict[str, dict[str, Score]]:
    """Return the scores by label of the row and title of the cell.

    Results of rows whose definition has changed since they were run are left out. FedAvg has a
    second row, `TRAINED`: the clients' models after training, with a selection of its own.
    """
    found: dict[str, dict[str, Score]] = {}
    for cell in board.cells:
        rows = _read(file_of(folder, cell))
        for entrant in entrants:
            row = rows.get(entrant.label)
            if row is None or not is_complete(row, request(board, cell, entrant)):
                continue
            view = METHODS.find(entrant.method)().view
            score = _select(row["trials"], view)
            if score is not None:
                found.setdefault(entrant.label, {})[cell.title] = score
            if entrant.method == "fedavg":
                other = _select(row["trials"], "trained")
                if other is not None:
                    found.setdefault(entrant.method + TRAINED, {})[cell.title] = other
    return found


def _select(trials: Iterable[Mapping[str, Any]], view: str) -> Score | None:
    """Return the trial and rates that validate best; None if all failed."""
    scores = [
        Score(
            100 * statistics.fmean(pair["val"][view]),
            tuple(100 * score for score in pair["test"][view]),
            trial["backbone"],
            {**trial["set"], **trial["settings"]},
            (pair["lr"], pair["weight_decay"]),
            trial["trial"] == 0,
        )
        for trial in trials
        for pair in trial["rates"]
        if "test" in pair
    ]
    return max(scores, key=lambda score: score.val, default=None)


@dataclass(frozen=True)
class Alike:
    """Two rows that are nearly always one model.

    Attributes:
        rows: their labels.
        same: the number of trainings with the same test scores in all views and seeds.
        compared: the number of trainings that both rows have: cells, networks, trials and rates.
    """

    rows: tuple[str, str]
    same: int
    compared: int


def alike(board: Leaderboard, entrants: Sequence[Entrant], folder: Path) -> list[Alike]:
    """Return the pairs of rows with the same test scores in at least `SAME` of their trainings."""
    scores: dict[str, dict[tuple[Any, ...], Any]] = {entrant.label: {} for entrant in entrants}
    for cell in board.cells:
        rows = _read(file_of(folder, cell))
        for entrant in entrants:
            row = rows.get(entrant.label)
            if row is None or not is_complete(row, request(board, cell, entrant)):
                continue
            scores[entrant.label] |= {
                (cell.name, trial["backbone"], trial["trial"], i): pair["test"]
                for trial in row["trials"]
                for i, pair in enumerate(trial["rates"])
                if "test" in pair
            }
    found = []
    for first, second in combinations(scores, 2):
        both = scores[first].keys() & scores[second].keys()
        same = sum(scores[first][key] == scores[second][key] for key in both)
        if both and same >= SAME * len(both):
            found.append(Alike((first, second), same, len(both)))
    return found


def device_of(row: Mapping[str, Any]) -> str:
    """Return the kind of device that a stored row was trained on."""
    kind: str = row.get("device", "cuda")  # the first rows do not say so: they are from a GPU
    return kind


def devices(
    board: Leaderboard, entrants: Sequence[Entrant], folder: Path
) -> dict[str, list[tuple[str, str]]]:
    """Return the label and the title of the cell of every complete row, by kind of device."""
    found: dict[str, list[tuple[str, str]]] = {}
    for cell in board.cells:
        rows = _read(file_of(folder, cell))
        for entrant in entrants:
            row = rows.get(entrant.label)
            if row is not None and is_complete(row, request(board, cell, entrant)):
                found.setdefault(device_of(row), []).append((entrant.label, cell.title))
    return found


@dataclass(frozen=True)
class Cost:
    """What a row takes, over the cells that it has.

    Attributes:
        rounds: the time of a round in rounds of FedAvg, median over cells; None without FedAvg.
        megabytes: sent and received by all clients in a round, mean over cells.
    """

    rounds: float | None
    megabytes: float


def costs(board: Leaderboard, entrants: Sequence[Entrant], folder: Path) -> dict[str, Cost]:
    """Return the costs by label of the row. Times are compared on the same kind of device only."""
    seconds: dict[str, list[float]] = {}
    sent: dict[str, list[float]] = {}
    for cell in board.cells:
        rows = _read(file_of(folder, cell))
        base = rows.get("fedavg", {})
        for entrant in entrants:
            row = rows.get(entrant.label, {})
            found = row.get("cost")
            if found is None:
                continue
            sent.setdefault(entrant.label, []).append(found["megabytes"])
            if base.get("cost") is not None and device_of(row) == device_of(base):
                ratio = found["seconds"] / base["cost"]["seconds"]
                seconds.setdefault(entrant.label, []).append(ratio)
    return {
        label: Cost(
            statistics.median(seconds[label]) if label in seconds else None,
            statistics.fmean(values),
        )
        for label, values in sent.items()
    }


def check_names(names: Iterable[str]) -> list[str]:
    """Return the names of methods from a list with commas, such as `fedavg,fedspa`."""
    found = [name.strip() for text in names for name in text.split(",") if name.strip()]
    if not found:
        raise UserError("--methods: name one method at least")
    return [METHODS.find(name).name for name in found]
