"""CUDA streams: waits for their work, and the stream of a caller on another thread."""

from __future__ import annotations

from collections.abc import Callable

import torch


def wait_for_streams(*devices: torch.device) -> None:
    """Waits for the current stream of each GPU among these devices; raises CUDA's RuntimeError if work on it failed."""
    for device in dict.fromkeys(devices):
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def on_stream_of_caller(device: torch.device, work: Callable[[], None]) -> Callable[[], None]:
    """Returns ``work`` for another thread, where the caller's current stream of a GPU will be current, too."""
    if device.type != "cuda":
        return work
    stream = torch.cuda.current_stream(device)

    def there() -> None:
        with torch.cuda.stream(stream):
            work()

    return there
