"""The report of each update reaches Weights & Biases, TensorBoard and MLflow as plain numbers."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from tests.helpers.watching import A, B, ended, report, row, started, targets
from weightcast.watch import to_mlflow, to_tensorboard, to_wandb
from weightcast.watch.callbacks import values_of

REPORT = report(row(A), row(B, status="quarantined"))


class WandbRun:
    """As ``wandb.Run``: ``log`` with ``commit=False`` adds to the row of the present step."""

    def __init__(self) -> None:
        self.step = 0
        self.row: dict[str, Any] = {}
        self.rows: list[tuple[int, dict[str, Any]]] = []

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        assert isinstance(data, dict)
        self.row |= data
        if commit is not False:
            self.rows.append((self.step, self.row))
            self.row, self.step = {}, self.step + 1


class SummaryWriter:
    """As ``torch.utils.tensorboard.SummaryWriter``."""

    def __init__(self) -> None:
        self.scalars: dict[tuple[str, int | None], float] = {}

    def add_scalar(
        self,
        tag: str,
        scalar_value: float,
        global_step: int | None = None,
        walltime: float | None = None,
        new_style: bool = False,
        double_precision: bool = False,
    ) -> None:
        self.scalars[tag, global_step] = float(scalar_value)


class MlflowModule:
    """As the module ``mlflow``."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, float], int | None]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None, synchronous: bool | None = None) -> None:
        self.logged.append((metrics, step))


def test_a_report_is_numbers_alone():
    values = values_of(REPORT)
    assert json.loads(json.dumps(values)) == values
    assert all(type(value) is float for value in values.values())
    assert values["weightcast/seconds"] == 2.0
    assert values["weightcast/phase/gather"] == 0.5
    assert values["weightcast/phase/stall"] == 0.25
    assert "weightcast/changed_ratio" not in values  # it is unknown
    assert values_of(msgspec.structs.replace(REPORT, changed_ratio=0.5))["weightcast/changed_ratio"] == 0.5
    assert (values["weightcast/targets/serving"], values["weightcast/targets/failed"]) == (1.0, 1.0)


def test_wandb_gets_the_update_in_the_row_of_the_trainers_own_step():
    run = WandbRun()
    listen = to_wandb(run)
    for step in range(2):
        for event in (started(), targets(a="serving"), ended("partial", REPORT, version=step)):
            listen(event)
        run.log({"loss": 0.5})
    assert [step for step, _ in run.rows] == [0, 1]
    assert all(row["loss"] == 0.5 and row["weightcast/bytes"] == 1000.0 for _, row in run.rows)
    assert run.rows[0][1]["weightcast/succeeded"] == 0.0


def test_tensorboard_gets_each_number_at_the_version():
    writer = SummaryWriter()
    to_tensorboard(writer)(ended("succeeded", REPORT))
    assert writer.scalars["weightcast/phase/send", 7] == 1.0
    assert writer.scalars["weightcast/succeeded", 7] == 1.0


def test_mlflow_gets_all_numbers_at_the_version():
    mlflow = MlflowModule()
    to_mlflow(mlflow)(ended("succeeded", REPORT))
    [(values, step)] = mlflow.logged
    assert step == 7
    assert values == values_of(REPORT) | {"weightcast/succeeded": 1.0}


def test_a_failed_update_without_a_report_is_logged_as_failed():
    mlflow = MlflowModule()
    to_mlflow(mlflow)(ended("failed", error="no target is active", error_kind="ConfigError"))
    assert mlflow.logged == [({"weightcast/version": 7.0, "weightcast/succeeded": 0.0}, 7)]


@pytest.mark.parametrize("make", [to_wandb, to_tensorboard, to_mlflow])
def test_other_ranks_log_nothing(make):
    make(object())(ended("succeeded", REPORT, rank=1))
