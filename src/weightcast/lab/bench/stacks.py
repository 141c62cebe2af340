"""Samples the Python stacks of a process, to show which functions an update spends interpreter time in."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from pathlib import PurePath
from types import FrameType

_INTERVAL_S = 0.0005
_SWITCH_S = 0.0002
# Threads whose innermost frame is here wait for something.
_WAITING = ("threading.py", "selectors.py", "connection.py", "socket.py", "thread.py", "queue.py", "_base.py")
_SHOWN = 45


class StackSampler:
    """Context manager that samples all other threads that do not wait.

    Attributes:
        samples: Number of samples with at least one busy thread.
        inside: Samples in which a function of weightcast was on a busy thread's stack, by place and name.
        at: Samples in which a function was the innermost of weightcast's on a busy thread, likewise.
    """

    def __init__(self) -> None:
        self.samples = 0
        self.inside: Counter[str] = Counter()
        self.at: Counter[str] = Counter()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="weightcast-stacks", daemon=True)
        self._switch_s = sys.getswitchinterval()
        self._ticks, self._ms = 0, 0.0

    def __enter__(self) -> StackSampler:
        sys.setswitchinterval(_SWITCH_S)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        sys.setswitchinterval(self._switch_s)

    def table(self) -> dict[str, dict[str, float]]:
        """Returns milliseconds by function: ``inside`` with the functions it calls, ``at`` without weightcast's."""
        ms = self._ms / max(1, self._ticks)
        return {
            name: {place: round(count * ms, 1) for place, count in counter.most_common(_SHOWN)}
            for name, counter in (("inside", self.inside), ("at", self.at))
        }

    def _sample(self) -> None:
        me = threading.get_ident()
        began = time.monotonic()
        while not self._ended.wait(_INTERVAL_S):
            self._ticks += 1
            busy = False
            frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]  a public function in spite of its name
            for ident, frame in frames.items():
                if ident != me and not frame.f_code.co_filename.endswith(_WAITING):
                    busy |= self._count(frame)
            self.samples += busy
        self._ms = (time.monotonic() - began) * 1e3

    def _count(self, frame: FrameType | None) -> bool:
        places: list[str] = []
        while frame is not None:
            parts = PurePath(frame.f_code.co_filename).parts
            if "weightcast" in parts and "bench" not in parts:
                where = "/".join(parts[len(parts) - parts[::-1].index("weightcast") :])
                places.append(f"{where} {frame.f_code.co_qualname}")
            frame = frame.f_back
        if places:
            self.at[places[0]] += 1
            self.inside.update(set(places))
        return bool(places)
