"""Measures the peak memory of a piece of work.

On CUDA torch's allocator counts.  On the CPU Linux keeps the high-water mark of a process's resident set and lets a
process reset its own.  Where a kernel does not allow that, a peak below an earlier one is not seen: what is resident
when somebody looks counts instead.
"""

from __future__ import annotations

import ctypes
import os
import threading
from contextlib import suppress
from pathlib import Path

import torch

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_STATM = Path("/proc/self/statm")

_lock = threading.Lock()
_open: list[PeakMemory] = []


class PeakMemory:
    """Measures from entering to leaving; measurements may nest and overlap, in any thread.

    On the CPU it measures the process's resident set, which includes shared memory that the process has touched.  Pages
    of files that came in meanwhile do not count: a model loaded from a mapped checkpoint is read from the disk when it
    is first touched, and the kernel may drop those pages at any time.  On CUDA it measures torch's allocations on the
    device.  So overlapping measurements see each other's memory.  On CUDA no other code may call
    ``torch.cuda.reset_peak_memory_stats`` meanwhile.

    Args:
        trim: On the CPU, return freed heap memory to the kernel first; work that reuses it would not show.  What the
            process needs again afterwards it faults in again, a quarter of a second for each GB.
    """

    def __init__(self, device: torch.device, *, trim: bool = True) -> None:
        self._device = device
        self._trim = trim
        self._start_bytes = self._start_file_bytes = self._earlier_peak_bytes = 0
        self._peak_bytes = 0
        self._running = False

    @property
    def extra_bytes(self) -> int:
        """Peak minus start, in bytes, never negative; the peak so far while still inside."""
        if self._running:
            with _lock:
                self._observe()
        return max(self._peak_bytes - self._start_bytes, 0)

    def __enter__(self) -> PeakMemory:
        if self._device.type == "cpu" and self._trim:
            _trim()
        try:
            with _lock:
                # All measurements share one high-water mark: record it for those inside before resetting it.
                for other in _open:
                    other._observe()
                _reset(self._device)
                self._start_bytes, self._earlier_peak_bytes, self._start_file_bytes = _look(self._device)
                self._peak_bytes = self._start_bytes
                self._running = True
                _open.append(self)
        except BaseException:  # an interrupt, after which nobody would leave the block
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with _lock:
            self._observe()
        self._end()

    def _end(self) -> None:
        with _lock:
            self._running = False
            if self in _open:
                _open.remove(self)

    def _observe(self) -> None:
        now_bytes, peak_bytes, file_bytes = _look(self._device)
        found = peak_bytes if peak_bytes > self._earlier_peak_bytes else now_bytes
        came_in = max(file_bytes - self._start_file_bytes, 0)
        self._peak_bytes = max(self._peak_bytes, found - came_in)


def _reset(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        _CLEAR_REFS.write_text("5")


def _look(device: torch.device) -> tuple[int, int, int]:
    """Bytes in use; most of them since the last reset; and those of resident pages of mapped files.

    Shared memory is no file here.  The last figure is 0 if the kernel does not tell.
    """
    if device.type == "cuda":
        # ``torch.cuda.memory_allocated`` would flatten and sort hundreds of figures for this one.
        found = torch.cuda.memory_stats_as_nested_dict(device).get("allocated_bytes", {}).get("all", {})
        return found.get("current", 0), found.get("peak", 0), 0
    status = {name: rest for name, _, rest in (line.partition(":") for line in _STATUS.read_text().splitlines())}
    found = {name: int(status[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM", "RssFile") if name in status}
    now_bytes = found["VmRSS"] if "VmRSS" in found else _statm_bytes()
    return now_bytes, max(found.get("VmHWM", 0), now_bytes), found.get("RssFile", 0)


def _statm_bytes() -> int:
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _trim() -> None:
    """Returns freed heap memory to the kernel, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
