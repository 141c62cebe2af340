"""Listeners that log the report of each update where trainers log their losses.

Each takes an object of the caller's, so weightcast needs none of these packages:

    WeightUpdater.connect(model, targets, on_event=to_wandb(wandb.run))
    WeightUpdater.connect(model, targets, on_event=to_tensorboard(SummaryWriter()))
    WeightUpdater.connect(model, targets, on_event=to_mlflow(mlflow))

They log on the head alone, once for each update.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from weightcast.report import UpdateReport
from weightcast.watch.events import Event, UpdateEnded
from weightcast.watch.listeners import Listener

Values = dict[str, float]


class WandbRun(Protocol):
    """The part of a Weights & Biases run that is used."""

    def log(self, data: dict[str, Any], /, *, commit: bool) -> object:
        """As ``wandb.Run.log``."""
        ...


class TensorBoardWriter(Protocol):
    """The part of ``torch.utils.tensorboard.SummaryWriter`` that is used."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> object:
        """As ``SummaryWriter.add_scalar``."""
        ...


class Mlflow(Protocol):
    """The part of the module ``mlflow`` that is used."""

    def log_metrics(self, metrics: dict[str, float], /, *, step: int) -> object:
        """As ``mlflow.log_metrics``."""
        ...


def to_wandb(run: WandbRun) -> Listener:
    """Logs each update in a Weights & Biases run.

    The values become part of the row that the trainer logs next, so that the run's step does not change.
    """
    return _each(lambda values, _: run.log(values, commit=False))


def to_tensorboard(writer: TensorBoardWriter) -> Listener:
    """Logs each update with a TensorBoard writer; the step is the weight version."""

    def log(values: Values, version: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, version)

    return _each(log)


def to_mlflow(mlflow: Mlflow) -> Listener:
    """Logs each update as metrics of the active MLflow run; the step is the weight version."""
    return _each(lambda values, version: mlflow.log_metrics(values, step=version))


def values_of(report: UpdateReport) -> Values:
    """The numbers of a report by name; seconds and bytes unless the name says something else."""
    states = [row.status for row in report.targets]
    ratio = report.changed_ratio
    return {
        "weightcast/version": float(report.version),
        "weightcast/seconds": report.seconds,
        **{f"weightcast/phase/{name}": seconds for name, seconds in report.phases.items()},
        "weightcast/bytes": float(report.bytes),
        "weightcast/peak_extra_bytes": float(report.peak_extra_bytes),
        **({} if ratio is None else {"weightcast/changed_ratio": ratio}),
        "weightcast/targets/serving": float(states.count("serving")),
        "weightcast/targets/failed": float(len(states) - states.count("serving")),
    }


def _each(log: Callable[[Values, int], object]) -> Listener:
    def listen(event: Event) -> None:
        if not isinstance(event, UpdateEnded) or event.rank:
            return
        values = {"weightcast/version": float(event.version)} if event.report is None else values_of(event.report)
        log(values | {"weightcast/succeeded": float(event.outcome == "succeeded")}, event.version)

    return listen
