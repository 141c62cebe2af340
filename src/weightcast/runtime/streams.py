"""Waits for work on CUDA streams."""

from __future__ import annotations

import torch


def wait_for_streams(*devices: torch.device) -> None:
    """Waits for the current stream of each GPU among these devices; raises CUDA's RuntimeError if work on it failed."""
    for device in dict.fromkeys(devices):
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
