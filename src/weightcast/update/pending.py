"""An update that goes on while the trainer computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext

import torch

from weightcast.report import UpdateReport


class PendingUpdate:
    """An update whose bytes have left the trainer's weights.  ``WeightUpdater.start`` makes one on every rank."""

    def __init__(self, finish: Callable[[], UpdateReport], device: torch.device) -> None:
        """Runs ``finish`` on a thread of its own and, on a GPU, beside what the current stream gets from now on."""
        self._ended = Future[UpdateReport]()
        beside = nullcontext()
        if device.type == "cuda":
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            beside = torch.cuda.stream(stream)

        def run() -> None:
            try:
                with beside:
                    report = finish()
            except BaseException as error:  # noqa: BLE001  ``wait`` raises it
                self._ended.set_exception(error)
            else:
                self._ended.set_result(report)

        threading.Thread(target=run, name="weightcast-finish", daemon=True).start()

    @property
    def done(self) -> bool:
        """True once ``wait`` returns or raises at once."""
        return self._ended.done()

    def wait(self) -> UpdateReport:
        """Returns the report of the update, or raises its error: as ``WeightUpdater.update``, as often as it is called.

        Not collective: each rank ends its part of the update by itself.
        """
        return self._ended.result()

    def settle(self) -> None:
        """Waits for the end, and raises nothing."""
        self._ended.exception()
