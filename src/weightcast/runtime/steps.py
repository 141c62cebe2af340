"""The steps of an engine, as work beside them sees them: how many have begun, and whether another one is likely."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator
from contextlib import contextmanager

import torch

# An engine generates nothing if its last step began, and had work on the GPU, so long ago.
_IDLE_S = 0.05
# A launch waits so long at most for the next step, and looks for it so often.
_WAIT_S = 0.03
_LOOK_S = 2e-4
_SWITCH_INTERVAL_S = 5e-5


def share_interpreter() -> None:
    """Lets threads beside an engine's have the interpreter in time.

    An engine whose loop runs in Python keeps it, and Python's own interval of 5 ms passes before each step of another
    thread.  On one H200, SGLang took 6 s for an update of 16 GB that way.
    """
    sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_INTERVAL_S))


class StepCounter:
    """Counts an engine's steps.  An engine that counts them itself overrides ``begun`` and ``generates``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._count, self._busy_at = 0, float("-inf")
        self._launching = False
        self._launched: torch.cuda.Event | None = None  # the end of the last step's work

    @contextmanager
    def one(self) -> Generator[None]:
        """Surrounds the launch of each step, on a thread whose current stream gets its work."""
        self._count += 1
        self._busy_at = time.monotonic()
        self._launching = True
        try:
            yield
        finally:
            self._launching = False
        if self._device.type == "cuda":
            launched = torch.cuda.Event()
            launched.record(torch.cuda.current_stream(self._device))
            self._launched = launched

    def stand_still(self, *, goes_on: bool) -> None:
        """Called while no step runs; with ``goes_on`` the next one comes at once."""
        self._busy_at = time.monotonic() if goes_on else float("-inf")
        self._launched = None

    @property
    def begun(self) -> int:
        """How many steps have begun."""
        return self._count

    def generates(self) -> bool:
        """True if a step runs, or another one is likely to come at once."""
        now = time.monotonic()
        # A step that reads long prompts takes longer than an engine needs to be taken for idle.  Its stream must not be
        # asked: a launch may be the capture of a graph, which that would spoil.
        launched = self._launched
        if self._launching or (launched is not None and not launched.query()):
            self._busy_at = now
        return now - self._busy_at < _IDLE_S

    def let_one_begin(self) -> bool:
        """Waits until the next step begins, if the engine generates; returns False if none has begun."""
        begun, until = self.begun, time.monotonic() + _WAIT_S
        while self.generates() and self.begun == begun and time.monotonic() < until:
            time.sleep(_LOOK_S)
        return self.begun != begun
