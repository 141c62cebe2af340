"""A small generation loop that makes the stall of an update visible.

The loop runs a step with the live weights about every millisecond. The longest time between two steps is the stall that
a user of a real engine would see. The steps are small enough not to slow the measured update.
"""

from __future__ import annotations

import threading
import time
from itertools import pairwise

import torch

from weightcast.config import PauseMode
from weightcast.lab.bench.synthetic import SyntheticEngine

_STEP_S = 0.001
_ROWS = 16


class Decoding:
    """The generation loop, with the hooks that a receiver needs.

    Attributes:
        going: Clear while the loop is paused.
    """

    def __init__(self, engine: SyntheticEngine, *, enabled: bool) -> None:
        self._engine = engine
        self.going = threading.Event()
        self.going.set()
        self._ended = threading.Event()
        self._step = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stepped: list[float] = []  # when each step ended
        self._enabled = enabled

    @property
    def paused(self) -> bool:
        """True while no step runs."""
        return not self.going.is_set()

    def pause(self, mode: PauseMode = "abort", timeout_s: float = 60.0) -> None:
        """Pauses the loop and returns when no step runs."""
        self.going.clear()
        with self._step:
            pass

    def resume(self) -> None:
        """Resumes the loop."""
        self.going.set()

    def stop_waiting(self) -> None:
        """Does nothing: ``pause`` returns soon by itself."""

    def drop_caches(self) -> None:
        """Does nothing: the loop has no caches."""

    def set_version(self, version: int) -> None:
        """Does nothing: the loop's output has no version."""

    def start(self) -> None:
        """Starts the loop if it is enabled."""
        if not self._enabled:
            return
        self._ended.clear()
        self._stepped = [time.monotonic()]
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)
        self._thread.start()
        time.sleep(10 * _STEP_S)

    def stop(self) -> float:
        """Stops the loop and returns the longest time without a step, in seconds."""
        if self._thread is None:
            return 0.0
        time.sleep(10 * _STEP_S)
        self._ended.set()
        self.going.set()
        self._thread.join()
        self._thread = None
        return max((after - before for before, after in pairwise(self._stepped)), default=0.0)

    def _run(self) -> None:
        parameter = next(iter(self._engine.kept.values()))
        flat = parameter.data.view(-1)
        width = min(1024, flat.numel() // _ROWS)
        state = torch.zeros(_ROWS, dtype=torch.float32, device=flat.device)
        while not self._ended.is_set():
            self.going.wait()
            with self._step:
                if not self.going.is_set():
                    continue
                rows = parameter.data.view(-1)[: _ROWS * width].view(_ROWS, width)
                state = rows.float().nan_to_num_().mean(dim=1) + state
                if flat.device.type == "cuda":
                    torch.cuda.current_stream(flat.device).synchronize()
                self._stepped.append(time.monotonic())
            time.sleep(_STEP_S)
