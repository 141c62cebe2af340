"""An engine that does nothing but generate: a step with the live weights every millisecond or so, until told to stop.

It is there to be stalled. What matters is the longest time between two steps, which is what a user of a real engine
would see; the arithmetic is small enough to leave the machine to the update that is measured.
"""

from __future__ import annotations

import threading
import time

import torch

from weightcast.cli.measuring.synthetic import Engine
from weightcast.config import PauseMode

_STEP_S = 0.001
_ROWS = 16


class Decoding:
    """The loop; and the hooks that a receiver asks of an engine."""

    def __init__(self, engine: Engine, *, enabled: bool) -> None:
        self._engine = engine
        self._go = threading.Event()
        self._go.set()
        self._ended = threading.Event()
        self._step = threading.Lock()
        self._thread: threading.Thread | None = None
        self._steps: list[float] = []
        self._enabled = enabled

    @property
    def paused(self) -> bool:
        """True while nothing runs."""
        return not self._go.is_set()

    def pause(self, mode: PauseMode = "abort", timeout_s: float = 60.0) -> None:
        """Return when nothing runs."""
        self._go.clear()
        with self._step:
            pass

    def resume(self) -> None:
        """Go on."""
        self._go.set()

    def stop_waiting(self) -> None:
        """Nothing here waits for long."""

    def drop_caches(self) -> None:
        """There are none."""

    def set_version(self, version: int) -> None:
        """What is generated belongs to nobody."""

    def start(self) -> None:
        """Begin to generate, where that was asked for."""
        if not self._enabled:
            return
        self._ended.clear()
        self._steps = [time.monotonic()]
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)
        self._thread.start()
        time.sleep(10 * _STEP_S)

    def stop(self) -> float:
        """End; the longest time without a step, in seconds."""
        if self._thread is None:
            return 0.0
        time.sleep(10 * _STEP_S)
        self._ended.set()
        self._go.set()
        self._thread.join()
        self._thread = None
        return max((after - before for before, after in zip(self._steps, self._steps[1:], strict=False)), default=0.0)

    def _run(self) -> None:
        parameter = next(iter(self._engine.kept.values()))
        flat = parameter.data.view(-1)
        width = min(1024, flat.numel() // _ROWS)
        state = torch.zeros(_ROWS, dtype=torch.float32, device=flat.device)
        while not self._ended.is_set():
            self._go.wait()
            with self._step:
                if not self._go.is_set():
                    continue
                rows = parameter.data.view(-1)[: _ROWS * width].view(_ROWS, width)
                state = rows.float().nan_to_num_().mean(dim=1) + state
                if flat.device.type == "cuda":
                    torch.cuda.current_stream(flat.device).synchronize()
                self._steps.append(time.monotonic())
            time.sleep(_STEP_S)
