"""Placement of trainer ranks and engines on GPUs, with the engines' tensor-parallel degrees.

SmolLM2 has 9 heads and 3 key-value heads, so an engine has 1 or 3 ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weightcast.lab.demo.settings import Mode

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineGpus:
    """Placement of one engine: its tensor-parallel degree, and the index of each rank's GPU (empty on a CPU)."""

    tp: int
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoPlacement:
    """Placement of all processes of one mode.

    Attributes:
        trainer_gpus: Index of each trainer's GPU; empty on a CPU.
        note: Remark on a choice made for lack of GPUs; may be empty.
    """

    device: Device
    trainers: int
    trainer_gpus: tuple[int, ...]
    engines: tuple[EngineGpus, ...]
    note: str = ""


def place(mode: Mode, *, num_gpus: int) -> DemoPlacement:
    """Places the processes of one mode on GPUs, or on the CPU if there are too few.

    In colocated mode every engine rank shares its GPU with a trainer rank.  In disaggregated mode no GPU is shared, and
    a process group can use a GPU only once, so one GPU is not enough.
    """
    if num_gpus == 0:
        return _on_cpu()
    if mode == "colocated":
        if num_gpus >= 4:
            return _on_gpus((0, 1, 2, 3), EngineGpus(tp=1, gpus=(0,)), EngineGpus(tp=3, gpus=(1, 2, 3)))
        if num_gpus >= 2:
            return _on_gpus((0, 1), EngineGpus(tp=1, gpus=(0,)), EngineGpus(tp=1, gpus=(1,)))
        return _on_gpus((0,), EngineGpus(tp=1, gpus=(0,)), EngineGpus(tp=1, gpus=(0,)))
    if num_gpus >= 6:
        return _on_gpus((0, 1), EngineGpus(tp=1, gpus=(2,)), EngineGpus(tp=3, gpus=(3, 4, 5)))
    if num_gpus >= 4:
        return _on_gpus((0, 1), EngineGpus(tp=1, gpus=(2,)), EngineGpus(tp=1, gpus=(3,)))
    if num_gpus == 3:
        return _on_gpus((0,), EngineGpus(tp=1, gpus=(1,)), EngineGpus(tp=1, gpus=(2,)))
    if num_gpus == 2:
        return _on_gpus((0,), EngineGpus(tp=1, gpus=(1,)), note="two GPUs: one trainer and one engine")
    return _on_cpu(note="one GPU: trainer and engines would share it, so this mode runs on the CPU")


def _on_cpu(note: str = "") -> DemoPlacement:
    return DemoPlacement(
        device="cpu", trainers=2, trainer_gpus=(), engines=(EngineGpus(tp=1), EngineGpus(tp=3)), note=note
    )


def _on_gpus(trainer_gpus: tuple[int, ...], *engines: EngineGpus, note: str = "") -> DemoPlacement:
    return DemoPlacement(
        device="cuda", trainers=len(trainer_gpus), trainer_gpus=trainer_gpus, engines=engines, note=note
    )
