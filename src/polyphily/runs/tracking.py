"""Logging a run's rounds to TensorBoard, MLflow or Weights & Biases: one callback for all three."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from polyphily.core.method import VIEWS
from polyphily.core.metrics import METRICS, SPLITS
from polyphily.errors import missing_package, unknown
from polyphily.runs.folder import safe_name
from polyphily.runs.run import Execution

COSTS = ("seconds", "seconds_evaluation", "bytes_up", "bytes_down")


class Sink(Protocol):
    """A destination for scalar values."""

    def log(self, values: Mapping[str, float], step: int) -> None: ...

    def close(self, failed: bool) -> None: ...


class TensorBoard:
    """Event files in the run folder, under `tensorboard/`."""

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(folder / "tensorboard"))
        lines = "\n".join(f"    {key} = {value}" for key, value in config.items())
        self.writer.add_text("config", f"{name}\n\n{lines}")

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self, failed: bool) -> None:
        self.writer.close()


class MLflow:
    """A run of the experiment `polyphily`, wherever MLFLOW_TRACKING_URI points."""

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any]) -> None:
        import mlflow

        self.mlflow: Any = mlflow
        self.mlflow.set_experiment("polyphily")
        self.mlflow.start_run(run_name=name)
        self.mlflow.log_params({**config, "folder": str(folder)})

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.mlflow.log_metrics(dict(values), step=step)

    def close(self, failed: bool) -> None:
        self.mlflow.end_run("FAILED" if failed else "FINISHED")


class WandB:
    """A run of the project `polyphily`, in WANDB_MODE, kept in the run folder."""

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any]) -> None:
        import wandb

        self.run: Any = wandb.init(
            project="polyphily", name=name, config=dict(config), dir=str(folder)
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.run.log(dict(values), step=step)

    def close(self, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))


SINKS: dict[str, type[TensorBoard] | type[MLflow] | type[WandB]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WandB,
}


@dataclass(frozen=True)
class ClientScores:
    """Which scores of single clients are logged.

    Attributes:
        names: the names of the clients.
        view: the view by which the method is evaluated.
        metric: the metric that selects the best round.
    """

    names: Sequence[str]
    view: str
    metric: str


class Log:
    """Sends the records of rounds to every sink.

    Args:
        sinks: the destinations.
        clients: the scores of single clients to send; none unless given.
    """

    def __init__(self, sinks: Sequence[Sink], clients: ClientScores | None = None) -> None:
        self.sinks, self.clients, self.last = sinks, clients, 0

    def round(self, record: Mapping[str, Any]) -> None:
        """Log a round's record."""
        self.last = record["round"]
        values = scalars(record, self.clients)
        for sink in self.sinks:
            sink.log(values, self.last)

    def finish(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Log the test scores at the best validation round; return the summary."""
        test = summary["best_val"]["test"]
        best = {f"best_val/test/{m}": test[m] for m in METRICS if test.get(m) is not None}
        for sink in self.sinks:
            sink.log(best, self.last)
        return summary


def check_trackers(names: Sequence[str]) -> None:
    """Raise a `UserError` for trackers that do not exist or are not installed."""
    for name in names:
        if name not in SINKS:
            raise unknown("tracker", name, SINKS)
        if find_spec(name) is None:  # the package has the tracker's name, as has our extra
            raise missing_package(name, name, f"--track {name}")


@contextmanager
def log_to(names: Sequence[str], execution: Execution) -> Iterator[Log]:
    """Open the sinks of these names; they are closed also if the run fails."""
    check_trackers(names)
    if not names:
        yield Log([])
        return
    assert execution.folder
    folder, config = execution.folder.path, execution.config()
    flat = {k: v for k, v in config.items() if not isinstance(v, Mapping)} | config["set"]
    title = f"{execution.method.name} {folder.name}"
    with ExitStack() as open_sinks:
        sinks = []
        for name in dict.fromkeys(names):
            sink = SINKS[name](folder, title, flat)
            open_sinks.push(lambda kind, *_, own=sink: own.close(kind is not None))
            sinks.append(sink)
        names = [graph.name for graph in execution.federations[0].clients]
        metric = execution.settings.metric or "accuracy"
        yield Log(sinks, ClientScores(names, execution.view, metric))


def scalars(record: Mapping[str, Any], clients: ClientScores | None = None) -> dict[str, float]:
    """Return the numbers of a round by name, such as `received/test/accuracy`; means over seeds.

    Trackers group charts by what is before the first slash: a view, the costs, or one score of all
    clients.

    >>> record = {"round": 1, "loss": 0.5, "seconds": 2.0}
    >>> record["received"] = {"test": {"accuracy": 0.75, "accuracy_per_client": [1.0, 0.5]}}
    >>> scalars(record, ClientScores(["north", "south"], "received", "accuracy"))
    ... # doctest: +NORMALIZE_WHITESPACE
    {'loss': 0.5, 'cost/seconds': 2.0, 'received/test/accuracy': 0.75,
     'clients test accuracy/north': 1.0, 'clients test accuracy/south': 0.5}
    """
    found = {} if record.get("loss") is None else {"loss": record["loss"]}
    found |= {f"cost/{name}": record[name] for name in COSTS if record.get(name) is not None}
    for view in VIEWS:
        for split in SPLITS:
            scores = record.get(view, {}).get(split, {})
            for metric in METRICS:
                if scores.get(metric) is not None:
                    found[f"{view}/{split}/{metric}"] = scores[metric]
    return found | (_client_scalars(record, clients) if clients else {})


def _client_scalars(record: Mapping[str, Any], clients: ClientScores) -> dict[str, float]:
    return {
        f"clients {split} {clients.metric}/{safe_name(name)}": score
        for split in SPLITS
        for name, score in zip(
            clients.names,
            record.get(clients.view, {}).get(split, {}).get(f"{clients.metric}_per_client", ()),
            strict=False,
        )
        if score is not None
    }
