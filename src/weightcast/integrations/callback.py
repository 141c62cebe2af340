"""A callback for transformers' ``Trainer`` and everything derived from it: keeps engines at the trainer's weights.

::

    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[UpdateEngines(ENGINES, wire_dtype="bf16")])
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from weightcast.errors import ConfigError
from weightcast.report import UpdateReport
from weightcast.update.arguments import Targets, UpdateOptions, config_of
from weightcast.update.updater import WeightUpdater


class EngineOptions(UpdateOptions, total=False):
    """Keyword arguments of ``UpdateEngines``."""

    every: int
    on_report: Callable[[UpdateReport], object] | None


class UpdateEngines(TrainerCallback):
    """Sends the weights to running engines at the start of training and after every so many optimiser steps.

    ``on_step_end`` comes after the optimiser step on every rank, so the update is collective as it must be.

    Args:
        engines: The engines, as ``WeightUpdater.connect`` takes them.
        every: Optimiser steps between two updates.
        on_report: Function that the main process calls with every report, e.g. ``print``.
        **options: Keyword arguments of ``WeightUpdater.connect``.  A run that continues from an older checkpoint
            against engines that serve a later version needs ``allow_older=True``.

    Attributes:
        version: Version that the engines serve, the ``global_step`` of the last update; None before the first.
        updater: The updater between ``on_train_begin`` and ``on_train_end``; else None.
    """

    def __init__(
        self,
        engines: Targets,
        *,
        every: int = 1,
        on_report: Callable[[UpdateReport], object] | None = None,
        **options: Unpack[UpdateOptions],
    ) -> None:
        config_of(options)  # refuses what is wrong now, not when training begins
        if every < 1:
            raise ConfigError(f"every={every}: engines are updated after a whole number of steps from 1")
        self.version: int | None = None
        self.updater: WeightUpdater | None = None
        self._engines = engines
        self._every = every
        self._on_report = on_report
        self._options = options

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Connects and sends the weights that training begins with, also after a resume."""
        model = kwargs.get("model")
        if not isinstance(model, nn.Module):
            raise ConfigError("the trainer passed no model to its callbacks")
        self.close()
        self.updater = WeightUpdater.connect(model, self._engines, **self._options)
        self._update(state)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Sends the weights of this step."""
        if state.global_step % self._every == 0:
            self._update(state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Closes the updater; the engines go on serving what they have."""
        self.close()

    def close(self) -> None:
        """Closes the updater, for a training run that ended with an error.  Safe to call twice."""
        updater, self.updater = self.updater, None
        if updater is not None:
            updater.close()

    def _update(self, state: TrainerState) -> None:
        if self.updater is None:
            raise ConfigError("this callback is not connected: training has ended, or has not begun")
        report = self.updater.update(version=state.global_step)
        self.version = state.global_step
        if self._on_report is not None and state.is_world_process_zero:
            self._on_report(report)
