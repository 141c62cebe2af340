"""CUDA streams: waits for their work, and a stream beside that of an engine."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

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


class OwnStream:
    """A stream for copies and sums beside the steps of an engine; nothing where the device is not a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    @contextmanager
    def current(self, *, behind: bool) -> Generator[None]:
        """Makes the stream current; ``behind`` orders it behind what the default stream has been given."""
        if self._device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        if behind:
            self._stream.wait_stream(torch.cuda.default_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield
