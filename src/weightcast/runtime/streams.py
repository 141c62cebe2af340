"""Waits for work on CUDA streams."""

from __future__ import annotations

import torch


def wait_for_streams(*devices: torch.device) -> None:
    """Waits for all work on the current stream of each GPU among these devices.

    If work on a stream failed, it raises RuntimeError with CUDA's words.
    """
    for device in dict.fromkeys(devices):
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
