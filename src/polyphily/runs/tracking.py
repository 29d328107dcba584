"""Logging a run's rounds to TensorBoard, MLflow or Weights & Biases: one callback for all three."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from polyphily.core.method import VIEWS
from polyphily.core.metrics import METRICS, SPLITS
from polyphily.errors import missing_package, unknown
from polyphily.runs.run import Execution

PLAIN = ("loss", "seconds", "seconds_evaluation", "bytes_up", "bytes_down")


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


class Log:
    """Sends the records of rounds to every sink."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self.sinks, self.last = sinks, 0

    def round(self, record: Mapping[str, Any]) -> None:
        """Log a round's record."""
        self.last = record["round"]
        values = scalars(record)
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
        yield Log(sinks)


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a round by name, such as `received/test/accuracy`; means over seeds.

    >>> scalars({"round": 1, "loss": 0.5, "received": {"test": {"accuracy": 0.75}}})
    {'loss': 0.5, 'received/test/accuracy': 0.75}
    """
    found = {name: record[name] for name in PLAIN if record.get(name) is not None}
    for view in VIEWS:
        for split in SPLITS:
            scores = record.get(view, {}).get(split, {})
            for metric in METRICS:
                if scores.get(metric) is not None:
                    found[f"{view}/{split}/{metric}"] = scores[metric]
    return found
