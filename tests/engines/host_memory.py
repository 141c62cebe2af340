"""Runs where an engine runs: what engines do with CUDA memory of another process, done with segments of the host."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing.reductions as reductions


def open_segment(say: Callable[[str], object], *, own_device: object) -> Callable[..., torch.Tensor]:
    """In the place of ``rebuild_cuda_tensor``: the same arguments, but the handle names a segment."""

    def opened(*args: Any) -> torch.Tensor:
        _, size, stride, offset, _, dtype, device, handle, size_bytes, _, _, manager, *_ = args
        assert device == own_device, "the engine puts its own device there"
        say("open")
        storage = reductions.rebuild_storage_filename(torch.UntypedStorage, manager, handle, size_bytes)
        return torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)

    return opened


def receive_on_host() -> None:
    """checkpoint-engine's receiver, which knows accelerators only."""
    from checkpoint_engine import worker

    class Device:
        device_module = types.SimpleNamespace(
            synchronize=lambda: None, ipc_collect=lambda: None, empty_cache=lambda: None
        )

    worker.DeviceManager = Device
